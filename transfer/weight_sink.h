/*
 * weight_sink.h: where received tensors go. The update session and the transfer engines know this
 * interface only; the engine's weight table implements it, tests implement it over plain memory.
 *
 * Order of calls: plan -> tensor* (each planned index once, any order) -> plan ... -> commit |
 * abandon. One thread; nothing blocks.
 */
#ifndef LK_TRANSFER_WEIGHT_SINK_H
#define LK_TRANSFER_WEIGHT_SINK_H

#include "transfer/device_ops.h"
#include "transfer/digest.h"

typedef struct weight_sink_ops {
    /* Checks a complete list (names, dtypes, shapes) and changes nothing. Lists all offenders in
     * err (as many as fit, then "and N more"). */
    lk_status_t (*check)(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err);
    /* (optional) The same for a list that has to be the whole model: also lists what is missing. */
    lk_status_t (*check_whole)(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err);
    /* The list that the following tensor() calls index. Copies what it needs. Replaces an older
     * plan. */
    lk_status_t (*plan)(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err);
    /* (optional) Where tensor `index` may be received in place: contiguous, same dtype, owned by
     * this rank. NULL when it needs a staging buffer. */
    void *(*direct)(void *ctx, size_t index);
    /* A whole tensor has arrived. bytes may equal direct(index). Casts, slices, stores what this
     * rank owns, and digests all of it. */
    lk_status_t (*tensor)(void *ctx, size_t index, const void *bytes, size_t len, lk_error_t *err);
    /* (optional, all three or none) For weights in an accelerator's memory, beside the two above,
     * which then take host memory only. The device; the same for the sink's whole life. */
    device_t *(*device)(void *ctx);
    /* As direct, but device memory. */
    void *(*device_direct)(void *ctx, size_t index);
    /* As tensor, but bytes is device memory (any alignment, or device_direct(index)) that is there
     * once the stream comes to it, and must stay until the stream has passed. Only enqueues,
     * without allocating. The caller waits for the stream before it says that the update has
     * arrived; digest, complete and commit come after that. */
    lk_status_t (*device_tensor)(void *ctx, size_t index, const void *bytes, size_t len,
                                 device_stream_t *stream, lk_error_t *err);
    /* (optional) Bytes of the model's largest tensor in any spelling, at the width it is stored in:
     * sizes staging buffers before the first update. */
    uint64_t (*largest)(void *ctx);
    /* True if every canonical tensor of the model arrived since the last `begin`. */
    bool (*complete)(void *ctx);
    /* (optional) The tensors that `complete` waits for, for a text: "a, b and 7 more". */
    void (*missing)(void *ctx, char *out, size_t room);
    /* A session starts: forgets which tensors arrived. */
    void (*begin)(void *ctx);
    /* The group committed: post-process (re-pack), publish. */
    lk_status_t (*commit)(void *ctx, lk_error_t *err);
    /* Digest of the whole set as it stands. */
    digest_t (*digest)(void *ctx);
} weight_sink_ops_t;

typedef struct {
    const weight_sink_ops_t *ops;
    void *ctx;
} weight_sink_t;

#endif
