/*
 * ipc_handles.h: the memory handles of an update, as vLLM's trainers send them: base64 of a pickle
 * of torch's arguments for rebuilding a CUDA tensor in another process, by GPU UUID. Pure: reads,
 * checks, opens nothing.
 *
 * Per tensor: a list with one dict per tensor. Packed: one dict, of the buffer that holds all
 * tensors back to back. A dict's value is the tuple of 15 arguments, or (older) a pair of torch's
 * rebuild function and that tuple.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_IPC_HANDLES_H
#define LK_TRANSFER_BACKENDS_IPC_IPC_HANDLES_H

#include "transfer/weight_transfer_engine.h"

#define IPC_COUNTER_NAME_MAX 64
#define IPC_COUNTERS         10000u /* of a file of torch's reference counts */

/* One tensor in another process's memory. */
typedef struct {
    uint8_t memory[DEVICE_IPC_HANDLE_SIZE];
    uint64_t offset; /* bytes from the start of that memory */
    uint64_t bytes;
    uint8_t event[DEVICE_IPC_HANDLE_SIZE];
    bool wait;                               /* for the event, before it is read */
    char counter_name[IPC_COUNTER_NAME_MAX]; /* shared memory with its reference count */
    uint32_t counter;                        /* which of the counts there */
} ipc_export_t;

typedef struct {
    ipc_export_t *exports; /* one per tensor of the update, or one if packed */
    size_t n;
} ipc_handles_t;

/* The backend's fields of update_info against its tensors. LK_ERR_INVALID names the field or the
 * tensor; LK_ERR_UNSUPPORTED for memory that can't be shared by handles (expandable segments). On
 * success the caller ends *out with ipc_handles_fini. */
LK_MUST_USE lk_status_t ipc_handles_parse(const wte_update_t *update, const char *gpu_uuid,
                                          ipc_handles_t *out, lk_error_t *err);
void ipc_handles_fini(ipc_handles_t *self);

#endif
