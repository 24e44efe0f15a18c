#include "engine_core/exec/model_tensors.h"

#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- which ---- */

typedef struct {
    const model_config_t *config;
    model_tensor_fn fn;
    void *ctx;
    lk_error_t *err;
    int32_t layer, expert;
} walk_t;

/* cols 0: a vector of `rows`. `part` is the name behind the layer's and the expert's prefix. */
static lk_status_t visit(walk_t *w, const char *part, uint64_t rows, uint64_t cols, bool joins)
{
    char name[TENSOR_NAME_MAX + 1];
    if (w->layer < 0) {
        snprintf(name, sizeof name, "%s", part);
    } else if (w->expert < 0) {
        snprintf(name, sizeof name, "model.layers.%d.%s", w->layer, part);
    } else {
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s", w->layer, w->expert, part);
    }
    model_tensor_t tensor = {
        .name = name,
        .ndim = cols == 0 ? 1 : 2,
        .shape = {rows, cols},
        .numel = cols == 0 ? rows : rows * cols, /* config limits: below 2^45 */
        .layer = w->layer,
        .expert = w->expert,
        .joins = joins,
    };
    return w->fn(w->ctx, &tensor, w->err);
}

static lk_status_t visit_attention(walk_t *w)
{
    const model_config_t *c = w->config;
    uint64_t q = (uint64_t)c->num_heads * c->head_dim, kv = (uint64_t)c->num_kv_heads * c->head_dim;
    uint64_t hidden = c->hidden_size;
    LK_RETURN_IF_ERROR(visit(w, "self_attn.q_proj.weight", q, hidden, false));
    LK_RETURN_IF_ERROR(visit(w, "self_attn.k_proj.weight", kv, hidden, true));
    LK_RETURN_IF_ERROR(visit(w, "self_attn.v_proj.weight", kv, hidden, true));
    if (c->qkv_bias) {
        LK_RETURN_IF_ERROR(visit(w, "self_attn.q_proj.bias", q, 0, false));
        LK_RETURN_IF_ERROR(visit(w, "self_attn.k_proj.bias", kv, 0, true));
        LK_RETURN_IF_ERROR(visit(w, "self_attn.v_proj.bias", kv, 0, true));
    }
    if (c->qk_norm) {
        LK_RETURN_IF_ERROR(visit(w, "self_attn.q_norm.weight", c->head_dim, 0, false));
        LK_RETURN_IF_ERROR(visit(w, "self_attn.k_norm.weight", c->head_dim, 0, false));
    }
    LK_RETURN_IF_ERROR(visit(w, "self_attn.o_proj.weight", hidden, q, false));
    return c->o_bias ? visit(w, "self_attn.o_proj.bias", hidden, 0, false) : LK_OK;
}

static lk_status_t visit_mlp(walk_t *w, const char *const parts[3], uint64_t intermediate)
{
    uint64_t hidden = w->config->hidden_size;
    LK_RETURN_IF_ERROR(visit(w, parts[0], intermediate, hidden, false));
    LK_RETURN_IF_ERROR(visit(w, parts[1], intermediate, hidden, true));
    return visit(w, parts[2], hidden, intermediate, false);
}

static lk_status_t visit_layer(walk_t *w)
{
    static const char *const dense[3] = {"mlp.gate_proj.weight", "mlp.up_proj.weight",
                                         "mlp.down_proj.weight"};
    static const char *const expert[3] = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
    const model_config_t *c = w->config;
    LK_RETURN_IF_ERROR(visit(w, "input_layernorm.weight", c->hidden_size, 0, false));
    LK_RETURN_IF_ERROR(visit_attention(w));
    LK_RETURN_IF_ERROR(visit(w, "post_attention_layernorm.weight", c->hidden_size, 0, false));
    if (!c->moe_layer[w->layer]) {
        return visit_mlp(w, dense, c->intermediate_size);
    }
    LK_RETURN_IF_ERROR(visit(w, "mlp.gate.weight", c->num_experts, c->hidden_size, false));
    for (uint32_t e = 0; e < c->num_experts; e++) {
        w->expert = (int32_t)e;
        LK_RETURN_IF_ERROR(visit_mlp(w, expert, c->moe_intermediate_size));
    }
    w->expert = -1;
    return LK_OK;
}

lk_status_t model_tensors_each(const model_config_t *config, model_tensor_fn fn, void *ctx,
                               lk_error_t *err)
{
    walk_t w = {.config = config, .fn = fn, .ctx = ctx, .err = err, .layer = -1, .expert = -1};
    uint64_t vocab = config->vocab_size, hidden = config->hidden_size;
    LK_RETURN_IF_ERROR(visit(&w, "model.embed_tokens.weight", vocab, hidden, false));
    for (uint32_t i = 0; i < config->num_layers; i++) {
        w.layer = (int32_t)i;
        LK_RETURN_IF_ERROR(visit_layer(&w));
    }
    w.layer = -1;
    LK_RETURN_IF_ERROR(visit(&w, "model.norm.weight", hidden, 0, false));
    return config->tie_word_embeddings ? LK_OK : visit(&w, "lm_head.weight", vocab, hidden, false);
}

/* ---- generated values ---- */

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static void distribution(const model_tensor_t *tensor, double *mean, double *scale)
{
    *mean = 0;
    if (tensor->ndim == 1) {
        *mean = ends_with(tensor->name, ".bias") ? 0 : 1;
        *scale = 0.1;
        return;
    }
    double gain = 1;
    if (ends_with(tensor->name, "mlp.gate.weight")) {
        gain = 2;
    } else if (tensor->layer < 0) {
        gain = 2.5;
    }
    *scale = gain / sqrt((double)tensor->shape[1]);
}

static uint32_t digit_sum(uint64_t word)
{
    return (uint32_t)((word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) +
                      (word >> 48));
}

lk_status_t model_tensor_random(const model_tensor_t *tensor, uint64_t seed, lk_dtype_t dtype,
                                uint64_t first, uint64_t n, void *out)
{
    enum { BLOCK = 1024 };
    float block[BLOCK];
    double mean, scale;
    CHECK(first <= tensor->numel && n <= tensor->numel - first);
    distribution(tensor, &mean, &scale);
    double unit = scale / sqrt(8.0 * (65536.0 * 65536.0 - 1.0) / 12.0);
    double shift = mean / unit - 8 * 32767.5; /* the product comes last: nothing to fuse */
    uint64_t key = lk_hash64(tensor->name, strlen(tensor->name), seed);
    for (uint64_t done = 0; done < n; done += BLOCK) {
        size_t count = (size_t)LK_MIN(n - done, (uint64_t)BLOCK);
        for (size_t i = 0; i < count; i++) {
            uint64_t at = key + 2 * (first + done + i);
            uint32_t sum =
                digit_sum(lk_mix64(lk_mix64(at))) + digit_sum(lk_mix64(lk_mix64(at + 1)));
            block[i] = (float)(((double)sum + shift) * unit);
        }
        void *at = (char *)out + done * dtype_bytes(dtype);
        LK_RETURN_IF_ERROR(dtype_convert(at, dtype, block, LK_DTYPE_F32, count));
    }
    return LK_OK;
}
