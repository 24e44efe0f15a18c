/*
 * model_tensors.h: the canonical tensors of a model, in the order of the checkpoint: which names it
 * has, of which shapes. The only list of names; storage, loading and generated weights go by it.
 */
#ifndef LK_ENGINE_CORE_EXEC_MODEL_TENSORS_H
#define LK_ENGINE_CORE_EXEC_MODEL_TENSORS_H

#include "engine_core/exec/model_config.h"

typedef struct {
    const char *name; /* canonical; valid during the call */
    uint32_t ndim;
    uint64_t shape[2]; /* [out, in] for matrices, [n] for norms and biases */
    uint64_t numel;
    int32_t layer;  /* -1 outside the layers */
    int32_t expert; /* -1 unless it belongs to one expert */
    bool joins;     /* stored directly behind the one before it: k and v behind q, up behind gate */
} model_tensor_t;

/* Returning an error ends the enumeration with it. */
typedef lk_status_t (*model_tensor_fn)(void *ctx, const model_tensor_t *tensor, lk_error_t *err);

/* Calls fn for each. lm_head.weight only when it is not tied. */
LK_MUST_USE lk_status_t model_tensors_each(const model_config_t *config, model_tensor_fn fn,
                                           void *ctx, lk_error_t *err);

/*
 * Elements [first, first + n) of a generated tensor, in dtype F32, BF16 or F16: a function of
 * (seed, name, element index, shape) only, bit-equal on every machine. Element i is (digits +
 * shift) * unit,  unit = scale / sigma,  shift = mean / unit - 8 * 32767.5, digits = the sum of the
 * eight 16-bit digits of two words w = 0, 1, word w = mix64(mix64(XXH3_64(name, seed) + 2 i + w)),
 * sigma^2 = 8 (65536^2 - 1) / 12, in float64, rounded to float32, then to dtype: normal enough (the
 * sum of eight uniforms), and without a library function whose last bit differs between machines.
 *
 * Norm weights: mean 1, scale 0.1. Biases: 0, 0.1. Embeddings and lm_head: scale 2.5 /
 * sqrt(hidden), so that logits spread by about 2.5. Routers: 2 / sqrt(in), so that experts differ.
 * Other matrices: 1 / sqrt(in).
 */
LK_MUST_USE lk_status_t model_tensor_random(const model_tensor_t *tensor, uint64_t seed,
                                            lk_dtype_t dtype, uint64_t first, uint64_t n,
                                            void *out);

#endif
