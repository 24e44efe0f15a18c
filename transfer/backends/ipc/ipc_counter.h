/*
 * ipc_counter.h: torch's reference counts of memory that it has exported: a file of shared memory
 * with a header of 64 bytes, then one int64 per export. Whoever has imported an export takes one
 * off when it has read it; torch frees or reuses the memory at 0.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_IPC_COUNTER_H
#define LK_TRANSFER_BACKENDS_IPC_IPC_COUNTER_H

#include "base/status.h"

/* Takes one off each of n counts (below IPC_COUNTERS) of the file, unless it is 0 already. name has
 * been checked (ipc_handles.c). LK_ERR_PEER when there is no such file, or none of that shape. */
LK_MUST_USE lk_status_t ipc_counter_release(const char *name, const uint32_t *counters, size_t n,
                                            lk_error_t *err);
/* The same checks, and takes nothing off. */
LK_MUST_USE lk_status_t ipc_counter_check(const char *name, lk_error_t *err);

#endif
