/*
 * cpu_model.h: a model's weights as the forward pass wants them: per layer, by role. Matrices point
 * into the weight table; norm weights, biases and routers are float32 copies, taken at start and
 * again when the weights have changed.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_CPU_MODEL_H
#define LK_ENGINE_CORE_EXEC_CPU_CPU_MODEL_H

#include "engine_core/exec/weight_table.h"

/* A gated MLP: gate and up [inter, hidden], down [hidden, inter]. */
typedef struct {
    const void *gate, *up, *down;
} mlp_weights_t;

typedef struct {
    const float *attn_norm, *mlp_norm;              /* [hidden] */
    const float *q_norm, *k_norm;                   /* [head_dim], NULL unless qk_norm */
    const void *q, *k, *v, *o;                      /* [out, in] */
    const float *q_bias, *k_bias, *v_bias, *o_bias; /* NULL: none */
    mlp_weights_t mlp;                              /* dense layers */
    const float *router;                            /* [experts, hidden]; NULL in dense layers */
    const mlp_weights_t *experts;                   /* this rank's, [n_local] */
} cpu_layer_t;

typedef struct cpu_model {
    model_config_t config;
    lk_dtype_t dtype;
    uint32_t first_expert, n_local;
    cpu_layer_t *layers;
    const void *embed, *head; /* [vocab, hidden] */
    const float *final_norm;
    float *inv_freq; /* [head_dim / 2], rotations per position in radians */

    mlp_weights_t *experts;
    struct cpu_copy *copies; /* what cpu_model_refresh copies */
    size_t n_copies;
    float *copied;
} cpu_model_t;

/* Resolves every name in the live set of `weights`, or in the incoming one; the table must outlive
 * the model. A set stays the model's through flips: models of the two are swapped with them. */
LK_MUST_USE lk_status_t cpu_model_init(cpu_model_t *self, const model_config_t *config,
                                       const weight_table_t *weights, bool incoming,
                                       uint32_t ep_rank, uint32_t ep_size, lk_error_t *err);
void cpu_model_fini(cpu_model_t *self);
/* Takes the float32 copies again. */
LK_MUST_USE lk_status_t cpu_model_refresh(cpu_model_t *self, lk_error_t *err);
/* The same, one copy per call: *at counts them from 0. INPROGRESS while there are more. */
LK_MUST_USE lk_status_t cpu_model_refresh_some(cpu_model_t *self, size_t *at, lk_error_t *err);
/* Bytes of the float32 copies of one set, without making them. */
uint64_t cpu_model_copied_bytes(const model_config_t *config);

/* Inverse frequencies as Transformers computes them: default, or llama3's smoothed scaling by
 * wavelength (Llama 3.1). out: [head_dim / 2]. */
void cpu_model_inv_freq(const model_config_t *config, float *out);

#endif
