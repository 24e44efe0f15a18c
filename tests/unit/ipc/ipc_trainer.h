/*
 * ipc_trainer.h: a trainer that shares memory of a host device as torch shares a GPU's: pickles,
 * reference counts in shared memory, events.
 */
#ifndef LK_TESTS_IPC_TRAINER_H
#define LK_TESTS_IPC_TRAINER_H

#include "transfer/backends/ipc/ipc_handles.h"
#include "transfer/device/device_host.h"

/* What torch would say of one tensor; defaults from ipc_args. */
typedef struct {
    const char *dtype; /* "bfloat16" */
    uint32_t ndim;
    int64_t shape[TENSOR_MAX_DIMS], stride[TENSOR_MAX_DIMS];
    int64_t offset; /* elements */
    uint8_t handle[80];
    size_t handle_len;
    int64_t storage_bytes, storage_offset;
    char counter_name[128];
    int64_t counter;
    uint8_t event[64];
    size_t event_len;
    bool wait;
    bool with_function, plain_shape;
} ipc_args_t;

/* Contiguous, whole storage, no event. */
ipc_args_t ipc_args(const char *dtype, uint32_t ndim, const uint64_t *shape,
                    const uint8_t handle[DEVICE_IPC_HANDLE_SIZE], uint64_t offset,
                    const char *counter_name, uint32_t counter);

/* base64 of the pickle of [{uuid: args}, ...], or of {uuid: args}. Caller frees. */
char *ipc_pickle_list(const ipc_args_t *args, size_t n, const char *uuid);
char *ipc_pickle_dict(const ipc_args_t *args, const char *uuid);

/* A file of counts, all 0, as torch has it. */
void ipc_counts_create(const char *name);
void ipc_counts_unlink(const char *name);
int64_t *ipc_counts_map(const char *name); /* the counts; unmap with ipc_counts_unmap */
void ipc_counts_unmap(int64_t *counts);

#endif
