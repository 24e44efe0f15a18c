/*
 * nccl_comm.h: the few operations of NCCL that moving weights needs. Implemented over a libnccl
 * that is loaded at run time (nccl_lib.c), and over memory in tests.
 *
 * Communicators are non-blocking: init, broadcast and all_reduce return INPROGRESS when poll has to
 * say OK before anything else is called. What they enqueue runs on the stream, after every other
 * rank of the communicator has enqueued its part; a rank that never does blocks the stream, until
 * abort.
 */
#ifndef LK_TRANSFER_NCCL_COMM_H
#define LK_TRANSFER_NCCL_COMM_H

#include "transfer/device_ops.h"
#include "transfer/pickle.h"

typedef struct nccl_comm nccl_comm_t;

/* A loaded library. Stays loaded. */
typedef struct nccl_library {
    char path[512];   /* of the file, as the loader found it */
    char version[32]; /* "2.28.9" */
} nccl_library_t;

typedef struct nccl_comm_ops {
    const char *name; /* "nccl", "fake" */
    /* name: a path or a file's name; NULL or "": the one that this process has loaded, else
     * libnccl.so.2. LK_ERR_UNSUPPORTED says what was tried. */
    lk_status_t (*load)(const char *name, const nccl_library_t **out, lk_error_t *err);
    lk_status_t (*unique_id)(const nccl_library_t *library, uint8_t id[NCCL_ID_BYTES],
                             lk_error_t *err);
    /* OK or INPROGRESS with *out, which abort ends. */
    lk_status_t (*init)(const nccl_library_t *library, device_t *device,
                        const uint8_t id[NCCL_ID_BYTES], uint32_t world_size, uint32_t rank,
                        nccl_comm_t **out, lk_error_t *err);
    /* INPROGRESS; OK: the last call has done its part; or what has gone wrong since. */
    lk_status_t (*poll)(nccl_comm_t *self, lk_error_t *err);
    /* count > 0 elements from rank 0 to all; in place. */
    lk_status_t (*broadcast)(nccl_comm_t *self, void *buffer, uint64_t count, lk_dtype_t dtype,
                             device_stream_t *stream, lk_error_t *err);
    /* The sum of one float32 per rank; `to` differs from `from`. */
    lk_status_t (*all_reduce)(nccl_comm_t *self, const float *from, float *to,
                              device_stream_t *stream, lk_error_t *err);
    /* Tells everything of it to stop, and returns at once; *self_p is NULL then. Accepts NULL. */
    void (*abort)(nccl_comm_t **self_p);
    /* Aborted communicators of this process that haven't ended yet. */
    size_t (*ending)(void);
} nccl_comm_ops_t;

/* libnccl */
extern const nccl_comm_ops_t nccl_lib_ops;

#endif
