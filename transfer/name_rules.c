#include "transfer/name_rules.h"

#include "base/check.h"

#include <stdio.h>
#include <string.h>

/* Components that training wrappers put into names. */
static const char *const wrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module"};

typedef struct {
    const name_rules_dims_t *dims;
    const tensor_desc_t *t;
    name_piece_fn fn;
    void *ctx;
    lk_error_t *err;
    char shape[160];      /* of t, for error texts */
    size_t stem_len;      /* the name up to and including the dot before the fused part */
    uint64_t next_offset; /* first element of the next piece */
} expansion_t;

static bool is_wrapper(const char *component, size_t len)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(wrappers); i++) {
        if (strlen(wrappers[i]) == len && memcmp(wrappers[i], component, len) == 0) {
            return true;
        }
    }
    return false;
}

/* Copies name without its wrapper components; true if there were any. `out` has room for name. */
static bool strip_wrappers(const char *name, char *out)
{
    bool found = false;
    const char *at = name;
    while (true) {
        size_t len = strcspn(at, ".");
        bool last = at[len] == '\0';
        if (!last && is_wrapper(at, len)) {
            found = true;
        } else {
            memcpy(out, at, len + 1);
            out += len + 1;
        }
        if (last) {
            return found;
        }
        at += len + 1;
    }
}

static bool ends_with(const char *name, const char *suffix, size_t *stem_len)
{
    size_t n = strlen(name), s = strlen(suffix);
    if (n < s || memcmp(name + n - s, suffix, s) != 0 || (n > s && name[n - s - 1] != '.')) {
        return false;
    }
    *stem_len = n - s;
    return true;
}

/* stem + tail, of shape [rows] or [rows, columns] */
static lk_status_t emit(expansion_t *x, const char *tail, uint32_t ndim, uint64_t rows,
                        uint64_t columns)
{
    name_piece_t piece = {.ndim = ndim, .shape = {rows, columns}, .offset = x->next_offset};
    int len = snprintf(piece.name, sizeof piece.name, "%.*s%s", (int)x->stem_len, x->t->name, tail);
    if (len < 0 || (size_t)len >= sizeof piece.name) {
        return lk_error_set(x->err, LK_ERR_INVALID,
                            "tensor %.40s...: its canonical name is too long", x->t->name);
    }
    if (ndim < 2) {
        piece.shape[1] = 0;
    }
    /* no overflow: pieces partition a tensor whose numel was checked */
    piece.numel = ndim < 2 ? rows : rows * columns;
    x->next_offset += piece.numel;
    return x->fn(x->ctx, &piece, x->err);
}

static lk_status_t bad_shape(const expansion_t *x, const char *expected)
{
    return lk_error_set(x->err, LK_ERR_INVALID, "tensor %s: shape %s does not fit %s", x->t->name,
                        x->shape, expected);
}

static lk_status_t need_experts(const expansion_t *x)
{
    if (x->dims->num_experts == 0) {
        return lk_error_set(x->err, LK_ERR_INVALID, "tensor %s: the model has no experts",
                            x->t->name);
    }
    return LK_OK;
}

/* [E, 2I, H] */
static lk_status_t expand_experts_gate_up(expansion_t *x)
{
    LK_RETURN_IF_ERROR(need_experts(x));
    const uint64_t *shape = x->t->shape;
    uint32_t experts = x->dims->num_experts;
    if (x->t->ndim != 3 || shape[0] != experts || shape[1] % 2 != 0) {
        char expected[96];
        snprintf(expected, sizeof expected, "[%u experts, 2 x intermediate, hidden]", experts);
        return bad_shape(x, expected);
    }
    for (uint32_t e = 0; e < experts; e++) {
        char tail[48];
        snprintf(tail, sizeof tail, "%u.gate_proj.weight", e);
        LK_RETURN_IF_ERROR(emit(x, tail, 2, shape[1] / 2, shape[2]));
        snprintf(tail, sizeof tail, "%u.up_proj.weight", e);
        LK_RETURN_IF_ERROR(emit(x, tail, 2, shape[1] / 2, shape[2]));
    }
    return LK_OK;
}

/* [E, H, I] */
static lk_status_t expand_experts_down(expansion_t *x)
{
    LK_RETURN_IF_ERROR(need_experts(x));
    const uint64_t *shape = x->t->shape;
    uint32_t experts = x->dims->num_experts;
    if (x->t->ndim != 3 || shape[0] != experts) {
        char expected[96];
        snprintf(expected, sizeof expected, "[%u experts, hidden, intermediate]", experts);
        return bad_shape(x, expected);
    }
    for (uint32_t e = 0; e < experts; e++) {
        char tail[48];
        snprintf(tail, sizeof tail, "%u.down_proj.weight", e);
        LK_RETURN_IF_ERROR(emit(x, tail, 2, shape[1], shape[2]));
    }
    return LK_OK;
}

/* [2I, H], of a dense MLP or of one expert */
static lk_status_t expand_gate_up(expansion_t *x)
{
    const uint64_t *shape = x->t->shape;
    if (x->t->ndim != 2 || shape[0] % 2 != 0) {
        return bad_shape(x, "[2 x intermediate, hidden]");
    }
    LK_RETURN_IF_ERROR(emit(x, "gate_proj.weight", 2, shape[0] / 2, shape[1]));
    return emit(x, "up_proj.weight", 2, shape[0] / 2, shape[1]);
}

static lk_status_t expand_qkv(expansion_t *x, uint32_t ndim, const char *const tails[3])
{
    uint64_t q = (uint64_t)x->dims->num_attention_heads * x->dims->head_dim;
    uint64_t kv = (uint64_t)x->dims->num_key_value_heads * x->dims->head_dim;
    if (x->t->ndim != ndim || x->t->shape[0] != q + 2 * kv) {
        char expected[96];
        snprintf(expected, sizeof expected, "[%llu%s] (q, k and v heads)",
                 (unsigned long long)(q + 2 * kv), ndim == 2 ? ", hidden" : "");
        return bad_shape(x, expected);
    }
    uint64_t columns = ndim == 2 ? x->t->shape[1] : 1;
    LK_RETURN_IF_ERROR(emit(x, tails[0], ndim, q, columns));
    LK_RETURN_IF_ERROR(emit(x, tails[1], ndim, kv, columns));
    return emit(x, tails[2], ndim, kv, columns);
}

static lk_status_t expand_qkv_weight(expansion_t *x)
{
    static const char *const tails[3] = {"q_proj.weight", "k_proj.weight", "v_proj.weight"};
    return expand_qkv(x, 2, tails);
}

static lk_status_t expand_qkv_bias(expansion_t *x)
{
    static const char *const tails[3] = {"q_proj.bias", "k_proj.bias", "v_proj.bias"};
    return expand_qkv(x, 1, tails);
}

/* The table. `keep` bytes of the suffix stay in the pieces' names ("mlp.experts."). */
static const struct {
    const char *suffix;
    size_t keep;
    lk_status_t (*expand)(expansion_t *x);
} rules[] = {
    {"mlp.experts.gate_up_proj", 12, expand_experts_gate_up},
    {"mlp.experts.down_proj", 12, expand_experts_down},
    {"gate_up_proj.weight", 0, expand_gate_up},
    {"self_attn.qkv_proj.weight", 10, expand_qkv_weight},
    {"self_attn.qkv_proj.bias", 10, expand_qkv_bias},
};

static lk_status_t pass_through(expansion_t *x, const char *name, uint64_t numel)
{
    name_piece_t piece = {.ndim = x->t->ndim, .numel = numel};
    memcpy(piece.name, name, strlen(name) + 1);
    memcpy(piece.shape, x->t->shape, x->t->ndim * sizeof piece.shape[0]);
    return x->fn(x->ctx, &piece, x->err);
}

lk_status_t name_rules_expand(const name_rules_dims_t *dims, const tensor_desc_t *t,
                              name_piece_fn fn, void *ctx, lk_error_t *err)
{
    size_t len = strnlen(t->name, TENSOR_NAME_MAX + 1);
    if (len == 0 || len > TENSOR_NAME_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "tensor name \"%.40s%s\" has %s", t->name,
                            len == 0 ? "" : "...", len == 0 ? "no bytes" : "more than 255 bytes");
    }
    if (t->ndim > TENSOR_MAX_DIMS) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %s: %u dimensions, at most %d are possible", t->name, t->ndim,
                            TENSOR_MAX_DIMS);
    }
    char stripped[TENSOR_NAME_MAX + 1];
    if (strip_wrappers(t->name, stripped)) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "tensor %s: names of a training wrapper are not accepted, send it as %s", t->name,
            stripped);
    }
    expansion_t x = {.dims = dims, .t = t, .fn = fn, .ctx = ctx, .err = err};
    tensor_desc_shape_text(t, x.shape, sizeof x.shape);
    uint64_t numel;
    if (!tensor_desc_numel(t, &numel)) {
        return lk_error_set(err, LK_ERR_INVALID, "tensor %s: shape %s has too many elements",
                            t->name, x.shape);
    }
    for (size_t i = 0; i < LK_ARRAY_LEN(rules); i++) {
        if (ends_with(t->name, rules[i].suffix, &x.stem_len)) {
            x.stem_len += rules[i].keep;
            return rules[i].expand(&x);
        }
    }
    if (dims->tied && strcmp(t->name, "lm_head.weight") == 0) {
        return pass_through(&x, "model.embed_tokens.weight", numel);
    }
    return pass_through(&x, t->name, numel);
}
