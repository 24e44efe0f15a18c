/*
 * ipc_memory.h: a trainer's device memory that is open here. Opening takes the driver long, so what
 * an update has used stays open until one no longer uses it: the trainer may have freed it then.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_IPC_MEMORY_H
#define LK_TRANSFER_BACKENDS_IPC_IPC_MEMORY_H

#include "transfer/backends/ipc/ipc_handles.h"

typedef struct {
    uint8_t handle[DEVICE_IPC_HANDLE_SIZE];
    char *at;
    uint64_t bytes;
    bool used; /* by the update at hand */
} ipc_mapping_t;

typedef struct {
    device_t *device;
    ipc_mapping_t *mappings;
    size_t n, room;
    size_t *mapping_of; /* of each export of the update at hand; NULL: none is */
    /* mappings by their handles: number + 1 in the first free slot from the hash on; only while
     * memory is opened */
    uint32_t *slots;
    size_t n_slots; /* a power of two */
} ipc_memory_t;

/* Opens what the exports lie in, and checks that each lies within: reading beyond would break the
 * device for good. Ended with ipc_memory_close, also after a failure. */
LK_MUST_USE lk_status_t ipc_memory_open(ipc_memory_t *self, device_t *device,
                                        const ipc_handles_t *handles, lk_error_t *err);
/* Of an export that is open. */
const char *ipc_memory_at(const ipc_memory_t *self, const ipc_handles_t *handles, size_t i);
/* The update is over: nothing of it is read any more. Ends what it did not use. */
void ipc_memory_close(ipc_memory_t *self);
/* Ends everything; accepts a zeroed one, and leaves one. */
void ipc_memory_fini(ipc_memory_t *self);

#endif
