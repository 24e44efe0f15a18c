/*
 * weight_transfer_engine.h: the receiving half of a way to move weights. nng's transport.h is the
 * model: the contract stands on each operation, and tests/contract runs one suite over every
 * implementation.
 *
 * General rules. One thread calls everything. Nothing blocks: what takes time is post / test.
 * `state` is `state_size` zeroed bytes that the caller allocates and frees; fini accepts a zeroed
 * or half-initialised state. abort is idempotent and legal at any time after init_check; it ends
 * what is posted, and the following test returns LK_ERR_CANCELED. A failed or aborted state can be
 * initialised again. JSON arguments are borrowed for the call. Errors carry a text that names the
 * field, the tensor, or the peer.
 */
#ifndef LK_TRANSFER_WEIGHT_TRANSFER_ENGINE_H
#define LK_TRANSFER_WEIGHT_TRANSFER_ENGINE_H

#include "base/env.h"
#include "transfer/weight_sink.h"

#include <jansson.h>
#include <poll.h>

#define WTE_ABI_VERSION 3u

/* Who I am in the group. Trainer is rank 0 of the transfer group. */
typedef struct {
    /* place among the members of the group epoch, and their number: after a rank was removed for
     * good they differ from --data-parallel-rank and --data-parallel-size */
    uint32_t dp_rank, dp_size;
    uint32_t ranks_per_replica; /* 1 today */
    const lk_env_t *env;
    /* a transfer that moves nothing for so long fails with LK_ERR_TIMEOUT */
    uint64_t no_progress_ns;
    const char *allowed_weight_dirs; /* comma-separated; a path of a request must be below one */
    device_t *device;                /* that holds the weights; NULL: host memory. From the sink */
    uint64_t largest_tensor_bytes; /* of the model, in any spelling; 0: not known. From the sink */
    const char *nccl_library;      /* path or name to load; NULL or "": the default names */
} wte_context_t;

/* One update_weights call, parsed and validated: the tensors in wire order. */
typedef struct {
    const tensor_desc_t *tensors; /* owned by the session; valid until test is done */
    size_t n_tensors;
    bool packed;
    uint64_t packed_buffer_size_bytes;
    uint32_t packed_num_buffers;
    const json_t *update_info; /* for fields of the backend's own */
    void *source;              /* update_open's handle, for engines that have it */
} wte_update_t;

/* What an engine found by itself: the tensors of an update_info that does not list them. */
typedef struct {
    tensor_desc_t *tensors; /* with their names valid until update_close(handle) */
    size_t n_tensors;
    void *handle;
} wte_source_t;

typedef struct {
    uint64_t tensors_done, tensors_total, bytes_done, bytes_total;
    uint64_t moves;        /* differs after a test that did something: there may be more at once */
    bool soon; /* what it waits for is about to happen: test again without sleeping */
    char waiting_for[128]; /* "trainer 127.0.0.1:4000, bucket 3 of 9"; empty when idle */
} wte_progress_t;

typedef struct wte_ops {
    uint32_t abi_version; /* WTE_ABI_VERSION */
    const char *name;     /* the "backend" of --weight-transfer-config */
    size_t state_size;

    /* Checks init_info completely, without side effects: fields, types, ranges, unknown keys
     * ("Invalid init_info for NAME: ..."). */
    lk_status_t (*init_check)(const json_t *init_info, const wte_context_t *ctx, lk_error_t *err);
    /* Starts to connect. Replaces an older connection, also a dead one. ctx is copied. */
    lk_status_t (*init_post)(void *state, const json_t *init_info, const wte_context_t *ctx,
                             lk_error_t *err);
    /* INPROGRESS, OK (connected, ready for updates), or an error (then not initialised). */
    lk_status_t (*init_test)(void *state, lk_error_t *err);

    /* (optional, both or none) For engines whose updates are whole checkpoints that they find
     * themselves: checks update_info and opens what it names. The caller ends *out with
     * update_close, which accepts a NULL handle, after the update's test is done. */
    lk_status_t (*update_open)(const json_t *update_info, const wte_context_t *ctx,
                               wte_source_t *out, lk_error_t *err);
    void (*update_close)(void *handle);
    /* Checks the backend's own fields of an update; no side effects. */
    lk_status_t (*update_check)(void *state, const wte_update_t *update, lk_error_t *err);
    /* Starts to receive update->tensors into sink (already planned with the same list). */
    lk_status_t (*update_post)(void *state, const wte_update_t *update, const weight_sink_t *sink,
                               lk_error_t *err);
    /* INPROGRESS; OK when every byte is in the sink and acknowledged; or an error. Does a bounded
     * amount of work per call (a few MB), so that the caller's loop stays responsive. */
    lk_status_t (*update_test)(void *state, lk_error_t *err);

    void (*abort)(void *state);
    void (*progress)(const void *state, wte_progress_t *out);
    /* (optional) What an initialised engine says of itself in the answer to init and in the log:
     * adds fields to an object ({"nccl_version": "2.28.3", ...}). */
    void (*describe)(const void *state, json_t *object);
    /* Fills at most `room` descriptors worth waiting for; returns how many. 0: call test again
     * soon. */
    size_t (*pollfds)(const void *state, struct pollfd *fds, size_t room);
    void (*fini)(void *state);
} wte_ops_t;

/* Static table, NULL-terminated. Registration asserts that every op is there. */
const wte_ops_t *wte_find(const char *name);
/* Every mandatory operation is there. */
bool wte_ops_whole(const wte_ops_t *ops);
/* "mem, tcp" for error texts. */
const char *wte_names(void);

#endif
