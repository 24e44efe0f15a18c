#include "tests/lib/test_main.h"
#include "transfer/name_rules.h"

#include <stdio.h>
#include <string.h>

#define MAX_PIECES 64

typedef struct {
    name_piece_t pieces[MAX_PIECES];
    size_t n;
} collected_t;

static lk_status_t collect(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    collected_t *all = ctx;
    ck_assert_uint_lt(all->n, MAX_PIECES);
    all->pieces[all->n++] = *piece;
    return LK_OK;
}

static const name_rules_dims_t moe = {.num_layers = 2,
                                      .num_attention_heads = 4,
                                      .num_key_value_heads = 2,
                                      .head_dim = 16,
                                      .num_experts = 3};
static const name_rules_dims_t dense = {.num_layers = 2,
                                        .num_attention_heads = 4,
                                        .num_key_value_heads = 2,
                                        .head_dim = 16,
                                        .tied = true};

#define DESC(text, dims, ...)                                                                      \
    ((tensor_desc_t){                                                                              \
        .name = (text), .dtype = LK_DTYPE_BF16, .ndim = (dims), .shape = {__VA_ARGS__}})

typedef struct {
    const char *name;
    uint32_t ndim;
    uint64_t shape[2];
} expected_t;

static void expect(const name_rules_dims_t *dims, tensor_desc_t t, const expected_t *expected,
                   size_t n)
{
    collected_t all = {.n = 0};
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(name_rules_expand(dims, &t, collect, &all, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(all.n, n);
    uint64_t offset = 0, numel;
    for (size_t i = 0; i < n; i++) {
        const name_piece_t *p = &all.pieces[i];
        ck_assert_str_eq(p->name, expected[i].name);
        ck_assert_uint_eq(p->ndim, expected[i].ndim);
        uint64_t count = 1;
        for (uint32_t d = 0; d < p->ndim; d++) {
            ck_assert_uint_eq(p->shape[d], expected[i].shape[d]);
            count *= p->shape[d];
        }
        ck_assert_uint_eq(p->numel, count);
        ck_assert_uint_eq(p->offset, offset);
        offset += p->numel;
    }
    ck_assert(tensor_desc_numel(&t, &numel));
    ck_assert_uint_eq(offset, numel);
}

#define EXPECT(dims, desc, ...)                                                                    \
    do {                                                                                           \
        static const expected_t list_[] = {__VA_ARGS__};                                           \
        expect(dims, desc, list_, sizeof list_ / sizeof list_[0]);                                 \
    } while (0)

START_TEST(fused_spellings_expand)
{
    EXPECT(&moe, DESC("model.layers.1.mlp.experts.gate_up_proj", 3, 3, 10, 8),
           {"model.layers.1.mlp.experts.0.gate_proj.weight", 2, {5, 8}},
           {"model.layers.1.mlp.experts.0.up_proj.weight", 2, {5, 8}},
           {"model.layers.1.mlp.experts.1.gate_proj.weight", 2, {5, 8}},
           {"model.layers.1.mlp.experts.1.up_proj.weight", 2, {5, 8}},
           {"model.layers.1.mlp.experts.2.gate_proj.weight", 2, {5, 8}},
           {"model.layers.1.mlp.experts.2.up_proj.weight", 2, {5, 8}});
    EXPECT(&moe, DESC("model.layers.1.mlp.experts.down_proj", 3, 3, 8, 5),
           {"model.layers.1.mlp.experts.0.down_proj.weight", 2, {8, 5}},
           {"model.layers.1.mlp.experts.1.down_proj.weight", 2, {8, 5}},
           {"model.layers.1.mlp.experts.2.down_proj.weight", 2, {8, 5}});
    EXPECT(&moe, DESC("model.layers.0.mlp.experts.2.gate_up_proj.weight", 2, 10, 8),
           {"model.layers.0.mlp.experts.2.gate_proj.weight", 2, {5, 8}},
           {"model.layers.0.mlp.experts.2.up_proj.weight", 2, {5, 8}});
    EXPECT(&dense, DESC("model.layers.0.mlp.gate_up_proj.weight", 2, 10, 8),
           {"model.layers.0.mlp.gate_proj.weight", 2, {5, 8}},
           {"model.layers.0.mlp.up_proj.weight", 2, {5, 8}});
    EXPECT(&dense, DESC("model.layers.0.self_attn.qkv_proj.weight", 2, 128, 8),
           {"model.layers.0.self_attn.q_proj.weight", 2, {64, 8}},
           {"model.layers.0.self_attn.k_proj.weight", 2, {32, 8}},
           {"model.layers.0.self_attn.v_proj.weight", 2, {32, 8}});
    EXPECT(&dense, DESC("model.layers.0.self_attn.qkv_proj.bias", 1, 128),
           {"model.layers.0.self_attn.q_proj.bias", 1, {64}},
           {"model.layers.0.self_attn.k_proj.bias", 1, {32}},
           {"model.layers.0.self_attn.v_proj.bias", 1, {32}});
}
END_TEST

START_TEST(other_names_pass_through)
{
    EXPECT(&moe, DESC("model.norm.weight", 1, 8), {"model.norm.weight", 1, {8}});
    EXPECT(&moe, DESC("lm_head.weight", 2, 7, 8), {"lm_head.weight", 2, {7, 8}});
    EXPECT(&dense, DESC("lm_head.weight", 2, 7, 8), {"model.embed_tokens.weight", 2, {7, 8}});
    EXPECT(&moe, DESC("my_module.weight", 1, 8), {"my_module.weight", 1, {8}});
    EXPECT(&moe, DESC("xgate_up_proj.weight", 2, 4, 8), {"xgate_up_proj.weight", 2, {4, 8}});
    EXPECT(&moe, DESC("scalar", 0, 0), {"scalar", 0, {0}});
}
END_TEST

START_TEST(misfits_are_refused_by_name)
{
    char longname[300];
    memset(longname, 'x', sizeof longname);
    longname[299] = '\0';
    char fits[TENSOR_NAME_MAX + 1];
    memset(fits, 'y', sizeof fits);
    memcpy(fits + TENSOR_NAME_MAX - 24, ".mlp.experts.gate_up_proj", 25);
    fits[TENSOR_NAME_MAX - 24] = '.';
    strcpy(fits + TENSOR_NAME_MAX - 25, ".mlp.experts.gate_up_proj");
    const struct {
        const name_rules_dims_t *dims;
        tensor_desc_t t;
        const char *text;
    } table[] = {
        {&dense, DESC("module.model.norm.weight", 1, 8), "send it as model.norm.weight"},
        {&dense, DESC("_orig_mod.module.model.norm.weight", 1, 8), "send it as model.norm.weight"},
        {&dense, DESC("model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight", 1, 8),
         "send it as model.layers.0.mlp.up_proj.weight"},
        {&dense, DESC("model.layers.0.mlp.experts.gate_up_proj", 3, 3, 10, 8), "has no experts"},
        {&dense, DESC("model.layers.0.mlp.experts.down_proj", 3, 3, 10, 8), "has no experts"},
        {&moe, DESC("model.layers.0.mlp.experts.gate_up_proj", 3, 4, 10, 8),
         "model.layers.0.mlp.experts.gate_up_proj: shape [4, 10, 8] does not fit [3 experts"},
        {&moe, DESC("model.layers.0.mlp.experts.gate_up_proj", 3, 3, 9, 8), "does not fit"},
        {&moe, DESC("model.layers.0.mlp.experts.gate_up_proj", 2, 3, 10), "does not fit"},
        {&moe, DESC("model.layers.0.mlp.experts.down_proj", 3, 2, 8, 5), "does not fit"},
        {&moe, DESC("model.layers.0.mlp.gate_up_proj.weight", 2, 9, 5), "does not fit"},
        {&moe, DESC("model.layers.0.self_attn.qkv_proj.weight", 2, 129, 5), "[128, hidden]"},
        {&moe, DESC("model.layers.0.self_attn.qkv_proj.bias", 2, 128, 1), "does not fit [128]"},
        {&moe, DESC("a", 9, 1), "9 dimensions"},
        {&moe, DESC("a", 2, 1ull << 40, 1ull << 40), "too many elements"},
        {&moe, DESC("", 1, 1), "no bytes"},
        {&moe, DESC(longname, 1, 1), "more than 255 bytes"},
        {&moe, DESC(fits, 3, 3, 10, 8), "canonical name is too long"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        collected_t all = {.n = 0};
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_eq(name_rules_expand(table[i].dims, &table[i].t, collect, &all, &err),
                         LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, table[i].text) != NULL, "row %zu: %s", i, err.text);
        ck_assert_uint_eq(all.n, 0);
    }
}
END_TEST

static lk_status_t refuse(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    ++*(int *)ctx;
    return lk_error_set(err, LK_ERR_STATE, "no");
}

START_TEST(a_callback_error_ends_it)
{
    int calls = 0;
    lk_error_t err = LK_ERROR_INIT;
    tensor_desc_t t = DESC("model.layers.1.mlp.experts.gate_up_proj", 3, 3, 10, 8);
    ck_assert_int_eq(name_rules_expand(&moe, &t, refuse, &calls, &err), LK_ERR_STATE);
    ck_assert_int_eq(calls, 1);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("name_rules");
    TCase *tc = tcase_create("all");
    tcase_add_test(tc, fused_spellings_expand);
    tcase_add_test(tc, other_names_pass_through);
    tcase_add_test(tc, misfits_are_refused_by_name);
    tcase_add_test(tc, a_callback_error_ends_it);
    suite_add_tcase(suite, tc);
    return suite;
}
