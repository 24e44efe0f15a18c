/*
 * model_maker.h: small random checkpoints in Hugging Face's format, and the tensors of "seed S" for
 * any configuration, in memory: whoever pushes weight set S and whoever checks it later generate
 * the same bits (model_tensors.h has the formula). weight_table_fill gives them too.
 */
#ifndef LK_ENGINE_CORE_EXEC_MODEL_MAKER_H
#define LK_ENGINE_CORE_EXEC_MODEL_MAKER_H

#include "base/buf.h"
#include "engine_core/exec/model_tensors.h"

/* The sizes that a caller may set: field, flag, least, most. What config.json can't hold together
 * is refused when the made configuration is read back. */
#define MODEL_MAKER_SIZES(X)                                                                       \
    X(num_layers, "layers", 1, MODEL_MAX_LAYERS)                                                   \
    X(hidden_size, "hidden-size", 1, 1 << 17)                                                      \
    X(intermediate_size, "intermediate-size", 1, 1 << 20)                                          \
    X(num_heads, "heads", 1, 1024)                                                                 \
    X(num_kv_heads, "kv-heads", 1, 1024)                                                           \
    X(head_dim, "head-dim", 2, 512)                                                                \
    X(vocab_size, "vocab-size", 258, 1 << 24)                                                      \
    X(max_position_embeddings, "max-positions", 1, 1 << 28)                                        \
    X(num_experts, "experts", 1, 1024)                                                             \
    X(num_experts_per_tok, "experts-per-token", 1, 1024)                                           \
    X(moe_intermediate_size, "moe-intermediate-size", 1, 1 << 20)                                  \
    X(decoder_sparse_step, "decoder-sparse-step", 1, 1 << 20)                                      \
    X(bos_token_id, "bos-token-id", 0, 1 << 24)                                                    \
    X(eos_token_id, "eos-token-id", 0, 1 << 24)                                                    \
    X(shards, "shards", 1, 1000)

typedef struct {
    model_arch_t arch;
    uint64_t seed;
    lk_dtype_t dtype; /* F32, BF16 or F16 */
    bool tie_word_embeddings;
    bool attention_bias; /* not for qwen2, which has its biases always */
    bool norm_topk_prob;
    bool llama3_rope; /* llama only */
    float rope_theta;
#define X(field, flag, least, most) uint32_t field;
    MODEL_MAKER_SIZES(X)
#undef X
} model_maker_t;

/* A model of some 100 kB to 1 MB: 2 layers of 64, vocabulary 512 (ids 0 to 255 are bytes, 256 bos,
 * 257 eos), 8 experts of which 2 are used. */
void model_maker_init(model_maker_t *self, model_arch_t arch);
/* "llama", "qwen2", "qwen3", "qwen3_moe". */
bool model_maker_arch(const char *text, model_arch_t *out);
/* Sets one of MODEL_MAKER_SIZES by its flag. LK_ERR_NOT_FOUND: no such flag; LK_ERR_INVALID: out of
 * range. */
LK_MUST_USE lk_status_t model_maker_set(model_maker_t *self, const char *flag, uint64_t value,
                                        lk_error_t *err);

/* config.json (Transformers 5 dialect) and generation_config.json, appended to the buffers. */
void model_maker_config(const model_maker_t *self, lk_buf_t *config, lk_buf_t *generation);

/* Writes config.json, generation_config.json and the weights (model.safetensors, or several files
 * and an index) into dir, which is made if it is missing (its parent must be there) and refused
 * (LK_ERR_INVALID) if it is not empty. One file's tensors are in memory at a time. After a failure
 * the files written so far are gone. */
LK_MUST_USE lk_status_t model_maker_write(const model_maker_t *self, const char *dir,
                                          lk_error_t *err);

/* The tensor `name` (canonical) of weight set `seed` into out, `bytes` long; dtype F32, BF16 or
 * F16. LK_ERR_NOT_FOUND if the model has none, LK_ERR_INVALID if bytes is not its size. A whole set
 * is cheaper through model_tensors_each and model_tensor_random. */
LK_MUST_USE lk_status_t model_maker_tensor(const model_config_t *config, const char *name,
                                           uint64_t seed, lk_dtype_t dtype, void *out, size_t bytes,
                                           lk_error_t *err);

#endif
