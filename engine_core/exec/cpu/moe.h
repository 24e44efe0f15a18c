/*
 * moe.h: a sparse layer's experts: routing, exchange with the ranks that own them, sum at home.
 *
 * A (token, slot) pair names one expert output; slot is the expert's rank in the token's top-k.
 * Every output comes back to the token's home rank and is summed there in slot order, so that the
 * number of ranks does not show in the result (decision 14).
 *
 * Wire format, native byte order (all ranks run one build on one architecture; the handshake
 * checks). Dispatch: u32 {tokens, pairs, bytes per row, 0}; pairs x u32 {row, expert}; tokens x
 * row, in the executor's dtype. Combine: u32 {0, pairs, bytes per row, 0}; pairs x float32 row, in
 * the order of the dispatch. An empty buffer is a message without tokens. Nothing in a message is
 * believed before its length was checked.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_MOE_H
#define LK_ENGINE_CORE_EXEC_CPU_MOE_H

#include "engine_core/exec/cpu/arena.h"
#include "engine_core/exec/cpu/product.h"
#include "engine_core/exec/executor.h"

typedef struct moe moe_t;

typedef struct {
    const executor_config_t *config; /* borrowed for moe_new only */
    const cpu_model_t *model;
    const kernels_t *kernels;
    team_t *team;
} moe_options_t;

LK_MUST_USE lk_status_t moe_new(const moe_options_t *options, moe_t **out, lk_error_t *err);
void moe_destroy(moe_t **self_p);

/* Starts sparse layer l over n tokens: picks experts from router logits [n, experts] and prepares
 * the dispatch of rows of x [n, hidden] (dtype; must stay until moe_own is done). */
void moe_begin(moe_t *self, uint32_t l, uint32_t n, const float *router, const void *x);
/* The experts picked by moe_begin, [n, top_k], most probable first. */
const uint32_t *moe_ids(const moe_t *self);
/* Computes the pairs whose experts are here. */
void moe_own(moe_t *self);
/* What to post, one buffer per rank: the dispatch after moe_begin, the combine after moe_remote. */
const ep_buf_t *moe_send(const moe_t *self);
/* Computes what peers sent (recv of the dispatch) and prepares the combine. */
LK_MUST_USE lk_status_t moe_remote(moe_t *self, const ep_buf_t *recv, lk_error_t *err);
/* Takes in what peers computed (recv of the combine). */
LK_MUST_USE lk_status_t moe_home(moe_t *self, const ep_buf_t *recv, lk_error_t *err);
/* h [n, hidden] += the weighted outputs, in slot order. */
void moe_combine(moe_t *self, float *h);

/* Top-k of one row of router logits: softmax over all experts in float32, the k most probable (the
 * lowest id first among equals), their probabilities divided by their sum if `norm`. scratch:
 * [experts]. */
void moe_route(const float *logits, uint32_t experts, uint32_t k, bool norm, float *scratch,
               uint32_t *ids, float *weights);

#endif
