/*
 * model_config.h: what config.json of a Hugging Face checkpoint says, in one plain struct.
 * Transformers 4 (rope_theta, rope_scaling, num_experts, torch_dtype) and 5 (rope_parameters,
 * num_local_experts, dtype) dialects. Anything not supported is refused by its field's name.
 */
#ifndef LK_ENGINE_CORE_EXEC_MODEL_CONFIG_H
#define LK_ENGINE_CORE_EXEC_MODEL_CONFIG_H

#include "transfer/name_rules.h"

typedef enum { ARCH_LLAMA, ARCH_QWEN2, ARCH_QWEN3, ARCH_QWEN3_MOE } model_arch_t;
typedef enum { ROPE_DEFAULT, ROPE_LLAMA3 } rope_type_t;

#define MODEL_MAX_LAYERS 256
#define MODEL_MAX_EOS    8

typedef struct {
    model_arch_t arch;
    uint32_t hidden_size, intermediate_size, num_layers;
    uint32_t num_heads, num_kv_heads, head_dim;
    uint32_t vocab_size, max_position_embeddings;
    float rms_norm_eps;
    bool tie_word_embeddings;
    bool qkv_bias, o_bias; /* Qwen2: q,k,v; Llama/Qwen3 attention_bias: q,k,v and o */
    bool mlp_bias;         /* refused when true unless implemented */
    bool qk_norm;          /* Qwen3: RMS norm of each head of q and k */
    rope_type_t rope_type;
    float rope_theta;
    float rope_factor, rope_low_freq_factor, rope_high_freq_factor; /* llama3 */
    uint32_t rope_original_max_position;                            /* llama3 */
    /* mixture of experts; num_experts 0 for dense models */
    uint32_t num_experts, num_experts_per_tok, moe_intermediate_size;
    bool norm_topk_prob;
    bool moe_layer[MODEL_MAX_LAYERS];      /* sparse MLP in this layer (decoder_sparse_step,
                                              mlp_only_layers) */
    uint32_t eos_token_ids[MODEL_MAX_EOS]; /* config.json and generation_config.json */
    uint32_t n_eos;
    lk_dtype_t checkpoint_dtype;
} model_config_t;

/* Reads DIR/config.json (and generation_config.json if there). */
LK_MUST_USE lk_status_t model_config_load(const char *dir, model_config_t *out, lk_error_t *err);
/* From JSON text; for tests and fuzzers. generation may be NULL. */
LK_MUST_USE lk_status_t model_config_parse(const char *json, size_t len, const char *generation,
                                           size_t generation_len, model_config_t *out,
                                           lk_error_t *err);
void model_config_dims(const model_config_t *config, name_rules_dims_t *out);

#endif
