/*
 * name_rules.h: one table from the spellings trainers use to canonical checkpoint tensors.
 *
 * Canonical is the spelling of the checkpoint file: q_proj/k_proj/v_proj and gate_proj/up_proj
 * apart, one tensor per expert. A spelling expands to one or several pieces; every piece is a
 * contiguous run of elements of the incoming tensor. Both the engine (which needs destinations)
 * and the trainer library (which needs canonical digests) use it.
 *
 * Fused spellings accepted, H hidden, I (moe_)intermediate, E experts:
 *   ...mlp.experts.gate_up_proj  [E, 2I, H] -> mlp.experts.e.{gate_proj,up_proj}.weight [I, H]
 *   ...mlp.experts.down_proj     [E, H, I]  -> mlp.experts.e.down_proj.weight [H, I]
 *   ...mlp.experts.e.gate_up_proj.weight [2I, H], ...mlp.gate_up_proj.weight [2I, H]
 *   ...self_attn.qkv_proj.{weight,bias} [(Nq + 2 Nkv) D, ...] -> {q,k,v}_proj
 * Tied models: lm_head.weight is model.embed_tokens.weight.
 * Wrapper prefixes (module., _orig_mod., _fsdp_wrapped_module.) are refused with the stripped name.
 */
#ifndef LK_TRANSFER_NAME_RULES_H
#define LK_TRANSFER_NAME_RULES_H

#include "transfer/tensor_desc.h"

/* What the rules need to know of a model; comes from config.json, or from the reply to init. */
typedef struct {
    uint32_t num_layers;
    uint32_t num_attention_heads, num_key_value_heads, head_dim;
    uint32_t num_experts; /* 0 for dense models */
    bool tied;
} name_rules_dims_t;

typedef struct {
    char name[TENSOR_NAME_MAX + 1]; /* canonical */
    uint32_t ndim;
    uint64_t shape[TENSOR_MAX_DIMS];
    uint64_t offset; /* first element in the incoming tensor */
    uint64_t numel;
} name_piece_t;

/* Called once per piece, in offset order. */
typedef lk_status_t (*name_piece_fn)(void *ctx, const name_piece_t *piece, lk_error_t *err);

/* Expands one incoming tensor. LK_ERR_INVALID with a text when no rule fits its shape or its name
 * has a wrapper prefix. A name that no rule fuses is passed through as itself (whether the model
 * has it is the table's question). */
LK_MUST_USE lk_status_t name_rules_expand(const name_rules_dims_t *dims, const tensor_desc_t *t,
                                          name_piece_fn fn, void *ctx, lk_error_t *err);

#endif
