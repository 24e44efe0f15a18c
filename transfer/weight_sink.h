/*
 * weight_sink.h: where received tensors go. The update session and the transfer engines know this
 * interface only; the engine's weight table implements it, tests implement it over plain memory.
 *
 * Order of calls: begin -> plan -> tensor* (each planned index once, any order) -> plan ... ->
 * (prepare* -> commit) | nothing more; the next begin forgets what a session left. One thread;
 * nothing blocks, and no call does more than a bounded piece of work.
 *
 * A sink with `prepare` has two sets: a session's bytes go to the incoming one, and the set in
 * force is written by nobody. commit makes the incoming set the one in force.
 */
#ifndef LK_TRANSFER_WEIGHT_SINK_H
#define LK_TRANSFER_WEIGHT_SINK_H

#include "transfer/device_ops.h"
#include "transfer/digest.h"

/* Bytes of a tensor that one call works on at most, about. */
#define WEIGHT_SINK_SLICE_BYTES (512u << 10)

typedef struct {
    size_t index; /* of the plan */
    const void *bytes;
    size_t len;
} weight_arrival_t;

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
     * rank owns, and digests all of it. INPROGRESS: a slice of that is done; the caller calls again
     * with the same arguments, and hands over no other tensor before. */
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
    /* (optional) The same for several tensors at once: one launch instead of many, and on a GPU the
     * faster the more similar the tensors are. Callers use weight_sink_device_tensors. */
    lk_status_t (*device_tensors)(void *ctx, const weight_arrival_t *arrivals, size_t n,
                                  device_stream_t *stream, lk_error_t *err);
    /* (optional) The streams of an update have passed: takes in what they computed. LK_ERR_INVALID
     * when the two spellings of a tied embedding differ. The update session calls it. */
    lk_status_t (*device_settle)(void *ctx, lk_error_t *err);
    /* (optional) Bytes of the model's largest tensor in any spelling, at the width it is stored in:
     * sizes staging buffers before the first update. */
    uint64_t (*largest)(void *ctx);
    /* True if every canonical tensor of the model arrived since the last `begin`. */
    bool (*complete)(void *ctx);
    /* (optional) The tensors that `complete` waits for, for a text: "a, b and 7 more". */
    void (*missing)(void *ctx, char *out, size_t room);
    /* A session starts: forgets which tensors arrived. */
    void (*begin)(void *ctx);
    /* (optional, with incoming) What commit needs: completes the incoming set with what did not
     * arrive, and re-packs it; nothing in force changes. A slice of it per call: INPROGRESS until
     * all is done. */
    lk_status_t (*prepare)(void *ctx, lk_error_t *err);
    /* The group committed: post-process (re-pack), publish. After prepare: swaps pointers, and
     * can't fail. */
    lk_status_t (*commit)(void *ctx, lk_error_t *err);
    /* Digest of the whole set in force, as it stands. */
    digest_t (*digest)(void *ctx);
    /* Digest of the incoming set; that of what commit will put in force once prepare is done. */
    digest_t (*incoming)(void *ctx);
} weight_sink_ops_t;

typedef struct {
    const weight_sink_ops_t *ops;
    void *ctx;
} weight_sink_t;

/* A whole tensor at once, for callers that may take their time. */
LK_MUST_USE static inline lk_status_t weight_sink_store(const weight_sink_t *sink, size_t index,
                                                        const void *bytes, size_t len,
                                                        lk_error_t *err)
{
    lk_status_t status;
    do {
        status = sink->ops->tensor(sink->ctx, index, bytes, len, err);
    } while (status == LK_INPROGRESS);
    return status;
}
/* All that commit takes, likewise. */
LK_MUST_USE static inline lk_status_t weight_sink_commit(const weight_sink_t *sink, lk_error_t *err)
{
    lk_status_t status = LK_OK;
    if (sink->ops->prepare != NULL) {
        do {
            status = sink->ops->prepare(sink->ctx, err);
        } while (status == LK_INPROGRESS);
    }
    return status == LK_OK ? sink->ops->commit(sink->ctx, err) : status;
}

/* Several tensors in device memory, whether the sink takes them together or one by one. */
LK_MUST_USE static inline lk_status_t weight_sink_device_tensors(const weight_sink_t *sink,
                                                                 const weight_arrival_t *arrivals,
                                                                 size_t n, device_stream_t *stream,
                                                                 lk_error_t *err)
{
    if (sink->ops->device_tensors != NULL) {
        return sink->ops->device_tensors(sink->ctx, arrivals, n, stream, err);
    }
    for (size_t i = 0; i < n; i++) {
        LK_RETURN_IF_ERROR(sink->ops->device_tensor(sink->ctx, arrivals[i].index, arrivals[i].bytes,
                                                    arrivals[i].len, stream, err));
    }
    return LK_OK;
}

#endif
