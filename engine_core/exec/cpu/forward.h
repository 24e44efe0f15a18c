/*
 * forward.h: the dense arithmetic of a step: embedding, attention over paged KV, dense MLPs, the
 * router's and the head's products. One call per layer; no allocation. The residual stream h is
 * float32 in both dtypes.
 *
 * KV memory: [layer][block], and in a block [K or V][kv head], K as [head_dim][slots] and V as
 * [slots][head_dim] (kernels.h says why).
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_FORWARD_H
#define LK_ENGINE_CORE_EXEC_CPU_FORWARD_H

#include "engine_core/exec/cpu/arena.h"
#include "engine_core/exec/cpu/product.h"
#include "engine_core/exec/executor.h"

typedef struct forward forward_t;

typedef struct {
    const executor_config_t *config; /* borrowed for forward_new only */
    const cpu_model_t *model;
    const kernels_t *kernels;
    team_t *team;
} forward_options_t;

LK_MUST_USE lk_status_t forward_new(const forward_options_t *options, forward_t **out,
                                    lk_error_t *err);
void forward_destroy(forward_t **self_p);

uint64_t forward_kv_block_bytes(const executor_config_t *config);

/* Takes a batch whose arrays stay valid until the step ends. LK_ERR_INVALID when it exceeds what
 * was asked for at open, or names a token or block that does not exist; nothing is changed then. */
LK_MUST_USE lk_status_t forward_begin(forward_t *self, const exec_batch_t *batch, lk_error_t *err);
uint32_t forward_tokens(const forward_t *self);
uint32_t forward_rows(const forward_t *self);

/* Attention of layer l (layers in order), then its MLP, or in a sparse layer the router's logits.
 */
void forward_layer(forward_t *self, uint32_t l);
/* After a sparse layer: normed inputs of the experts [tokens, hidden] (dtype), router logits
 * [tokens, experts], and the residual stream [tokens, hidden] that the experts' outputs go to. */
const void *forward_expert_input(const forward_t *self);
const float *forward_router(const forward_t *self);
float *forward_residual(forward_t *self);

/* Final norm and head, some columns per call: true when all are done. */
bool forward_head(forward_t *self);
const float *forward_logits(const forward_t *self);

#endif
