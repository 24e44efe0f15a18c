/*
 * verify.h: the independent check. It recomputes every recorded stream in one process, with
 * no scheduler, KV cache management, or cluster (each stream has blocks of its own; streams share a
 * forward pass, which changes no row: executor.h): for each output token it sets the KV as the
 * stream's kv_history says (engine_core/request.h states the rule), runs the one forward pass under
 * the weights that weight_versions names, and compares the token that the sampler draws and its
 * logprob. A token that came from other weights, or that attended to KV of other weights than
 * reported, differs.
 */
#ifndef LK_EXAMPLES_DEMO_VERIFY_H
#define LK_EXAMPLES_DEMO_VERIFY_H

#include "engine_core/request.h"
#include "examples/demo/demo_weights.h"

/* spans carry the demo's set number (from the version label "set-K"; "default" is 0) as `epoch` */
typedef struct {
    uint32_t at; /* output index whose forward pass found the KV so */
    epoch_span_t *spans;
    size_t n_spans;
} kv_snapshot_t;

typedef struct {
    uint32_t *prompt, *tokens;
    float *logprobs;
    uint32_t n_prompt, n_tokens, cap_tokens;
    sampling_params_t sampling;
    epoch_span_t *spans; /* weight_versions */
    size_t n_spans;
    kv_snapshot_t *history;
    size_t n_history;
} stream_record_t;

void stream_record_fini(stream_record_t *record);

typedef struct {
    uint64_t tokens, streams, mixed_streams; /* compared; streams; those whose KV mixed weights */
    double worst_logprob;                    /* largest difference */
    uint64_t wrong_tokens, wrong_logprobs;
    char first[256]; /* "stream 3, token 17 (set-4): ..." */
} verify_result_t;

/* `progress` may be NULL; called with tokens compared so far and in all. LK_OK when everything
 * could be recomputed; whether it agrees is in *out. */
LK_MUST_USE lk_status_t verify_streams(const char *model_dir, const demo_weights_t *weights,
                                       uint64_t n_sets, lk_dtype_t dtype, uint32_t block_size,
                                       const stream_record_t *records, size_t n_records,
                                       double tolerance,
                                       void (*progress)(void *ctx, size_t done, size_t total),
                                       void *ctx, verify_result_t *out, lk_error_t *err);

#endif
