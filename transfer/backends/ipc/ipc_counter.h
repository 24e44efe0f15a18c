/*
 * ipc_counter.h: torch's reference counts of memory that it has exported: a file of shared memory
 * with a header of 64 bytes, then one int64 per export. Whoever has imported an export takes one
 * off when it has read it; torch frees or reuses the memory at 0.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_IPC_COUNTER_H
#define LK_TRANSFER_BACKENDS_IPC_IPC_COUNTER_H

#include "base/status.h"

typedef int64_t ipc_counts_t; /* of a file that is open */

/* Opens a file of counts. name has been checked (ipc_handles.c). LK_ERR_PEER when there is no such
 * file, or none of that shape. The caller ends *out with ipc_counter_close. */
LK_MUST_USE lk_status_t ipc_counter_open(const char *name, ipc_counts_t **out, lk_error_t *err);
/* The same checks, and opens nothing. */
LK_MUST_USE lk_status_t ipc_counter_check(const char *name, lk_error_t *err);
/* Accepts NULL. */
void ipc_counter_close(ipc_counts_t *counts);
/* Takes one off the count at a place (below IPC_COUNTERS), unless it is 0 already. */
void ipc_counter_release(ipc_counts_t *counts, uint32_t place);

#endif
