#include "base/check.h"
#include "base/hash.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void sha256_hex(const void *data, size_t len, char out[65])
{
    uint8_t sum[32];
    lk_sha256(data, len, sum);
    for (int i = 0; i < 32; i++) {
        snprintf(out + 2 * i, 3, "%02x", sum[i]);
    }
}

/* Values, not bytes: `b` may be stored in another dtype and on a rank without some experts. */
static void assert_same_weights(const weight_table_t *a, const weight_table_t *b)
{
    ck_assert_uint_eq(weight_table_count(a), weight_table_count(b));
    for (size_t i = 0; i < weight_table_count(a); i++) {
        const weight_slot_t *x = weight_table_at(a, i), *y = weight_table_at(b, i);
        ck_assert_str_eq(x->name, y->name);
        ck_assert_msg(x->loaded && y->loaded && digest_equal(x->digest, y->digest), "%s", x->name);
        if (x->data == NULL || y->data == NULL) {
            continue;
        }
        float *fx = calloc(x->numel, 4), *fy = calloc(x->numel, 4);
        ck_ok(dtype_convert(fx, LK_DTYPE_F32, x->data, weight_table_dtype(a), x->numel));
        ck_ok(dtype_convert(fy, LK_DTYPE_F32, y->data, weight_table_dtype(b), x->numel));
        ck_assert_mem_eq(fx, fy, x->numel * 4);
        free(fx);
        free(fy);
    }
    ck_assert(digest_equal(weight_table_digest(a), weight_table_digest(b)));
}

/* The set's digest is the formula over the slots, and each slot's that of its bytes. */
static void assert_digest_is_honest(const weight_table_t *table)
{
    digest_t set = {{0, 0}};
    for (size_t i = 0; i < weight_table_count(table); i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        lk_dtype_t dtype = weight_table_dtype(table);
        digest_t digest = {{0, 0}};
        if (slot->data != NULL) {
            ck_ok(digest_add(&digest, slot->data, dtype, dtype, slot->numel, 0));
            ck_assert_msg(digest_equal(digest, slot->digest), "%s", slot->name);
        }
        digest_set_add(&set, slot->name, slot->digest);
    }
    ck_assert(digest_equal(set, weight_table_digest(table)));
}

/* The bytes in the table are those that the trainer's own hashes name, fused tensors included. */
START_TEST(fixture_loads_as_the_trainer_has_it)
{
    const char *name = model_fixtures[_i];
    weight_table_t *table = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    trainer_list_t list;
    trainer_list_init(&list, name, table);
    for (size_t i = 0; i < list.n; i++) {
        char hex[65];
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list.descs[i], &bytes));
        sha256_hex(list.data[i], bytes, hex);
        ck_assert_msg(strcmp(hex, list.sha256[i]) == 0, "%s", list.descs[i].name);
    }
    assert_digest_is_honest(table);
    trainer_list_fini(&list);
    weight_table_destroy(&table);
    ck_assert_ptr_null(table);
}
END_TEST

/* ---- spellings, orders, dtypes ---- */

static void must_send(const trainer_list_t *list, weight_table_t *table, bool direct)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = trainer_list_send(list, table, direct, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
    weight_sink_t sink = weight_table_sink(table);
    ck_assert(sink.ops->complete(sink.ctx));
    assert_digest_is_honest(table);
}

/* The trainer's fused list and the file's own spelling, shuffled, with and without receiving in
 * place, into both storage dtypes: always the weights of the file. */
START_TEST(any_spelling_and_order_is_the_file)
{
    const char *name = model_fixtures[_i];
    weight_table_t *bf16 = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    weight_table_t *f32 = model_fixture_load(name, LK_DTYPE_F32, 0, 1);
    assert_same_weights(bf16, f32);
    trainer_list_t lists[2];
    trainer_list_init(&lists[0], name, bf16);
    trainer_list_init_split(&lists[1], bf16);
    for (int i = 0; i < 8; i++) {
        trainer_list_t *list = &lists[i & 1];
        trainer_list_shuffle(list, test_seed(name) + (uint64_t)i);
        lk_dtype_t stored = i & 2 ? LK_DTYPE_F32 : LK_DTYPE_BF16;
        weight_table_t *table = model_fixture_table(name, stored, 0, 1);
        must_send(list, table, (i & 4) != 0);
        assert_same_weights(table, bf16);
        weight_table_destroy(&table);
    }
    /* float32 copies have the same values; float16 ones have those that float16 rounds to */
    trainer_list_convert(&lists[0], LK_DTYPE_F32);
    weight_table_t *table = model_fixture_table(name, LK_DTYPE_BF16, 0, 1);
    must_send(&lists[0], table, true);
    assert_same_weights(table, bf16);
    trainer_list_convert(&lists[0], LK_DTYPE_F16);
    must_send(&lists[0], table, true);
    must_send(&lists[0], f32, true);
    trainer_list_convert(&lists[0], LK_DTYPE_F64);
    weight_table_t *wide = model_fixture_table(name, LK_DTYPE_F32, 0, 1);
    must_send(&lists[0], wide, true);
    assert_same_weights(wide, f32);
    weight_table_destroy(&wide);
    weight_table_destroy(&table);
    weight_table_destroy(&f32);
    weight_table_destroy(&bf16);
    trainer_list_fini(&lists[0]);
    trainer_list_fini(&lists[1]);
}
END_TEST

/* Receiving in place is offered where it is possible at all: the fused projections too. */
START_TEST(storage_is_laid_out_for_fused_products)
{
    for (int f = 0; f < N_MODEL_FIXTURES; f++) {
        weight_table_t *table = model_fixture_table(model_fixtures[f], LK_DTYPE_BF16, 0, 1);
        const char *previous_end = NULL;
        uint64_t bytes = 0;
        for (size_t i = 0; i < weight_table_count(table); i++) {
            const weight_slot_t *slot = weight_table_at(table, i);
            ck_assert_ptr_eq(weight_table_find(table, slot->name), slot);
            const char *end = (const char *)slot->data + slot->numel * 2;
            bool follows = strstr(slot->name, "k_proj") != NULL ||
                           strstr(slot->name, "v_proj") != NULL ||
                           strstr(slot->name, "up_proj") != NULL;
            if (follows) {
                ck_assert_ptr_eq(slot->data, previous_end);
            } else {
                ck_assert_uint_eq((uintptr_t)slot->data % WEIGHT_ALIGNMENT, 0);
            }
            previous_end = end;
            bytes += slot->numel * 2;
        }
        ck_assert_uint_ge(weight_table_bytes(table), bytes);
        ck_assert_uint_lt(weight_table_bytes(table),
                          bytes + weight_table_count(table) * WEIGHT_ALIGNMENT);
        ck_assert_ptr_null(weight_table_find(table, "model.layers.99.mlp.up_proj.weight"));
        ck_assert_ptr_null(weight_table_find(table, ""));
        weight_table_destroy(&table);
    }
}
END_TEST

START_TEST(fused_tensors_are_received_in_place)
{
    weight_table_t *table = model_fixture_table("qwen2_bias", LK_DTYPE_BF16, 0, 1);
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    const tensor_desc_t list[] = {
        {"model.layers.1.self_attn.qkv_proj.weight", LK_DTYPE_BF16, 2, {96, 64}},
        {"model.layers.1.self_attn.qkv_proj.bias", LK_DTYPE_BF16, 1, {96}},
        {"model.layers.1.mlp.gate_up_proj.weight", LK_DTYPE_BF16, 2, {320, 64}},
        {"model.layers.0.mlp.gate_up_proj.weight", LK_DTYPE_F32, 2, {320, 64}},
        {"model.norm.weight", LK_DTYPE_BF16, 1, {64}},
    };
    ck_ok(sink.ops->plan(sink.ctx, list, 5, &err));
    ck_assert_ptr_eq(sink.ops->direct(sink.ctx, 0),
                     weight_table_find(table, "model.layers.1.self_attn.q_proj.weight")->data);
    ck_assert_ptr_eq(sink.ops->direct(sink.ctx, 1),
                     weight_table_find(table, "model.layers.1.self_attn.q_proj.bias")->data);
    ck_assert_ptr_eq(sink.ops->direct(sink.ctx, 2),
                     weight_table_find(table, "model.layers.1.mlp.gate_proj.weight")->data);
    ck_assert_ptr_null(sink.ops->direct(sink.ctx, 3)); /* another dtype */
    ck_assert_ptr_eq(sink.ops->direct(sink.ctx, 4),
                     weight_table_find(table, "model.norm.weight")->data);
    weight_table_destroy(&table);
}
END_TEST

/* ---- expert parallelism ---- */

static const uint32_t group_sizes[] = {1, 2, 4, 7};

/* 8 and 6 experts on 1, 2, 4 and 7 ranks: all digests are the whole model's, each expert lives on
 * exactly one rank, everything else on all. */
START_TEST(ranks_share_the_experts)
{
    const char *name = _i & 1 ? "qwen3_moe_mixed" : "qwen3_moe";
    uint32_t size = group_sizes[_i / 2];
    weight_table_t *whole = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    const model_config_t *config = weight_table_config(whole);
    trainer_list_t list;
    trainer_list_init(&list, name, whole);
    size_t n = weight_table_count(whole);
    uint32_t *owners = calloc(n, sizeof *owners);
    ck_assert_uint_eq(ep_first_expert(config->num_experts, 0, size), 0);
    ck_assert_uint_eq(ep_first_expert(config->num_experts, size, size), config->num_experts);
    for (uint32_t rank = 0; rank < size; rank++) {
        weight_table_t *part = model_fixture_load(name, LK_DTYPE_BF16, rank, size);
        assert_same_weights(whole, part);
        weight_table_t *updated = model_fixture_table(name, LK_DTYPE_F32, rank, size);
        must_send(&list, updated, true);
        assert_same_weights(whole, updated);
        uint32_t first = ep_first_expert(config->num_experts, rank, size);
        uint32_t end = ep_first_expert(config->num_experts, rank + 1, size);
        for (size_t i = 0; i < n; i++) {
            const weight_slot_t *slot = weight_table_at(part, i);
            const char *at = strstr(slot->name, ".mlp.experts.");
            bool owned = true;
            if (at != NULL) {
                uint32_t expert = (uint32_t)strtoul(at + 13, NULL, 10);
                owned = expert >= first && expert < end;
            }
            ck_assert_msg((slot->data != NULL) == owned, "%s on rank %u", slot->name, rank);
            owners[i] += owned;
        }
        if (size > 1) {
            ck_assert_uint_lt(weight_table_bytes(part), weight_table_bytes(whole));
        }
        weight_table_destroy(&updated);
        weight_table_destroy(&part);
    }
    for (size_t i = 0; i < n; i++) {
        bool expert = strstr(weight_table_at(whole, i)->name, ".mlp.experts.") != NULL;
        ck_assert_uint_eq(owners[i], expert ? 1 : size);
    }
    free(owners);
    trainer_list_fini(&list);
    weight_table_destroy(&whole);
}
END_TEST

START_TEST(filling_is_equal_on_all_ranks)
{
    lk_error_t err = LK_ERROR_INIT;
    weight_table_t *whole = model_fixture_table("qwen3_moe_mixed", LK_DTYPE_BF16, 0, 1);
    ck_ok(weight_table_fill(whole, 11, &err));
    assert_digest_is_honest(whole);
    for (uint32_t rank = 0; rank < 4; rank++) {
        weight_table_t *part = model_fixture_table("qwen3_moe_mixed", LK_DTYPE_BF16, rank, 4);
        ck_ok(weight_table_fill(part, 11, &err));
        assert_same_weights(whole, part);
        ck_ok(weight_table_fill(part, 12, &err));
        ck_assert(!digest_equal(weight_table_digest(whole), weight_table_digest(part)));
        weight_table_destroy(&part);
    }
    weight_table_destroy(&whole);
}
END_TEST

/* ---- what the sink refuses ---- */

/* Checks `list`, then plans it: both refuse it with `text` and leave the table as it is. */
static void assert_refused(weight_table_t *table, const tensor_desc_t *list, size_t n,
                           const char *text)
{
    weight_sink_t sink = weight_table_sink(table);
    digest_t before = weight_table_digest(table);
    for (int i = 0; i < 2; i++) {
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status = i == 0 ? sink.ops->check(sink.ctx, list, n, &err)
                                    : sink.ops->plan(sink.ctx, list, n, &err);
        ck_assert_int_eq(status, LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, text) != NULL, "expected \"%s\": %s", text, err.text);
    }
    ck_assert(digest_equal(before, weight_table_digest(table)));
}

START_TEST(misfits_are_refused_by_name)
{
    weight_table_t *moe = model_fixture_load("qwen3_moe", LK_DTYPE_BF16, 0, 2);
    weight_table_t *dense = model_fixture_load("qwen2_bias", LK_DTYPE_BF16, 0, 1);
    const struct {
        weight_table_t *table;
        tensor_desc_t t;
        const char *text;
    } rows[] = {
        {moe,
         {"model.nrom.weight", LK_DTYPE_BF16, 1, {64}},
         "tensor model.nrom.weight: the model has no such tensor"},
        {moe,
         {"model.norm.weight", LK_DTYPE_BF16, 1, {65}},
         "tensor model.norm.weight: shape [65], the model has [64]"},
        {moe, {"model.norm.weight", LK_DTYPE_BF16, 2, {64, 1}}, "shape [64, 1]"},
        {moe, {"model.norm.weight", LK_DTYPE_BF16, 0, {0}}, "shape []"},
        {moe, {"lm_head.weight", LK_DTYPE_BF16, 2, {64, 512}}, "shape [64, 512], the model has"},
        {moe, {"model.norm.weight", LK_DTYPE_I32, 1, {64}}, "dtype int32, expected float32"},
        {moe, {"module.model.norm.weight", LK_DTYPE_BF16, 1, {64}}, "as model.norm.weight"},
        {moe,
         {"model.layers.0.mlp.experts.gate_up_proj", LK_DTYPE_BF16, 3, {8, 96, 63}},
         "its model.layers.0.mlp.experts.0.gate_proj.weight would be [48, 63], the model has "
         "[48, 64]"},
        {moe,
         {"model.layers.3.mlp.experts.down_proj", LK_DTYPE_BF16, 3, {8, 64, 48}},
         "the model has no model.layers.3.mlp.experts.0.down_proj.weight"},
        {moe,
         {"model.layers.0.mlp.gate_up_proj.weight", LK_DTYPE_BF16, 2, {320, 64}},
         "the model has no model.layers.0.mlp.gate_proj.weight"},
        {moe,
         {"model.layers.0.mlp.experts.8.up_proj.weight", LK_DTYPE_BF16, 2, {48, 64}},
         "the model has no such tensor"},
        {moe,
         {"model.layers.0.mlp.experts.07.up_proj.weight", LK_DTYPE_BF16, 2, {48, 64}},
         "the model has no such tensor"},
        {moe,
         {"model.layers.0.self_attn.q_proj.bias", LK_DTYPE_BF16, 1, {64}},
         "the model has no such tensor"},
        {dense,
         {"model.layers.0.mlp.experts.down_proj", LK_DTYPE_BF16, 3, {8, 64, 48}},
         "the model has no experts"},
        {dense,
         {"model.layers.0.self_attn.o_proj.bias", LK_DTYPE_BF16, 1, {64}},
         "the model has no such tensor"},
        {dense,
         {"lm_head.weight", LK_DTYPE_BF16, 2, {512, 65}},
         "its model.embed_tokens.weight would be [512, 65], the model has [512, 64]"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        assert_refused(rows[i].table, &rows[i].t, 1, rows[i].text);
    }
    const tensor_desc_t twice[] = {
        {"model.layers.0.self_attn.k_proj.bias", LK_DTYPE_BF16, 1, {16}},
        {"model.layers.0.self_attn.qkv_proj.bias", LK_DTYPE_BF16, 1, {96}},
    };
    assert_refused(dense, twice, 2,
                   "tensor model.layers.0.self_attn.qkv_proj.bias: "
                   "model.layers.0.self_attn.k_proj.bias is in the list twice, first as "
                   "model.layers.0.self_attn.k_proj.bias");
    weight_table_destroy(&moe);
    weight_table_destroy(&dense);
}
END_TEST

START_TEST(all_offenders_are_listed)
{
    weight_table_t *table = model_fixture_load("llama_untied", LK_DTYPE_BF16, 0, 1);
    tensor_desc_t list[40];
    char names[40][64];
    for (int i = 0; i < 40; i++) {
        snprintf(names[i], sizeof names[i], "wrong.%d", i);
        list[i] = (tensor_desc_t){names[i], LK_DTYPE_BF16, 1, {64}};
    }
    list[1] = (tensor_desc_t){"model.norm.weight", LK_DTYPE_BF16, 1, {64}};
    assert_refused(table, list, 3,
                   "2 tensors do not fit the model: tensor wrong.0: the model has no such tensor; "
                   "tensor wrong.2: the model has no such tensor");
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(sink.ops->check(sink.ctx, list, 40, &err), LK_ERR_INVALID);
    unsigned shown = 0, more = 0;
    ck_assert_ptr_nonnull(strstr(err.text, "39 tensors do not fit"));
    for (const char *at = err.text; (at = strstr(at, "wrong.")) != NULL; at++) {
        shown++;
    }
    ck_assert_int_eq(sscanf(strrchr(err.text, ';'), "; and %u more", &more), 1);
    ck_assert_uint_gt(shown, 10);
    ck_assert_uint_eq(shown + more, 39);
    weight_table_destroy(&table);
}
END_TEST

START_TEST(a_wrong_length_changes_nothing)
{
    weight_table_t *table = model_fixture_load("llama_untied", LK_DTYPE_BF16, 0, 1);
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    char zeros[256] = {0};
    const tensor_desc_t one = {"model.norm.weight", LK_DTYPE_BF16, 1, {64}};
    digest_t before = weight_table_digest(table);
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->plan(sink.ctx, &one, 1, &err));
    ck_assert_int_eq(weight_sink_store(&sink, 0, zeros, 127, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "model.norm.weight): 127 bytes came, expected 128"));
    ck_assert(digest_equal(before, weight_table_digest(table)));
    ck_ok(weight_sink_store(&sink, 0, zeros, 128, &err));
    ck_assert(!digest_equal(before, weight_table_digest(table)));
    ck_assert(!sink.ops->complete(sink.ctx));
    ck_assert(digest_equal(sink.ops->digest(sink.ctx), weight_table_digest(table)));
    assert_digest_is_honest(table);
    weight_table_destroy(&table);
}
END_TEST

/* ---- tied embeddings ---- */

static const tensor_desc_t embed_desc = {"model.embed_tokens.weight", LK_DTYPE_BF16, 2, {512, 64}};
static const tensor_desc_t head_desc = {"lm_head.weight", LK_DTYPE_BF16, 2, {512, 64}};

/* Both in one list, or one after the other, in either order. */
START_TEST(two_spellings_of_a_tied_embedding_agree_or_fail)
{
    bool head_first = _i & 1, two_lists = _i & 2, differ = _i & 4;
    weight_table_t *table = model_fixture_load("qwen3", LK_DTYPE_BF16, 0, 1);
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    size_t bytes = 512 * 64 * 2;
    char *a = calloc(1, bytes), *b = calloc(1, bytes);
    b[bytes - 1] = (char)differ;
    tensor_desc_t list[2] = {head_first ? head_desc : embed_desc,
                             head_first ? embed_desc : head_desc};
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->plan(sink.ctx, list, two_lists ? 1 : 2, &err));
    ck_assert((sink.ops->direct(sink.ctx, 0) != NULL) == two_lists);
    ck_ok(weight_sink_store(&sink, 0, a, bytes, &err));
    if (two_lists) {
        ck_ok(sink.ops->plan(sink.ctx, list + 1, 1, &err));
    }
    size_t second = two_lists ? 0 : 1;
    ck_assert_ptr_null(sink.ops->direct(sink.ctx, second));
    digest_t before = weight_table_digest(table);
    lk_status_t status = weight_sink_store(&sink, second, b, bytes, &err);
    if (differ) {
        ck_assert_int_eq(status, LK_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(err.text, "embeddings are tied"));
        ck_assert_ptr_eq(strstr(err.text, list[1].name), err.text + strlen("tensor "));
    } else {
        ck_assert_int_eq(status, LK_OK);
    }
    ck_assert(digest_equal(before, weight_table_digest(table)));
    /* sent again, the last one counts; a new session knows nothing of the old one */
    ck_ok(sink.ops->plan(sink.ctx, list, 2, &err));
    ck_ok(weight_sink_store(&sink, 0, b, bytes, &err));
    ck_ok(weight_sink_store(&sink, 1, b, bytes, &err));
    b[0] ^= 1;
    ck_ok(weight_sink_store(&sink, 0, b, bytes, &err));
    b[0] ^= 1;
    ck_assert_int_eq(weight_sink_store(&sink, 1, b, bytes, &err), LK_ERR_INVALID);
    sink.ops->begin(sink.ctx);
    ck_ok(weight_sink_store(&sink, 1, a, bytes, &err));
    assert_digest_is_honest(table);
    free(a);
    free(b);
    weight_table_destroy(&table);
}
END_TEST

/* ---- sessions ---- */

/* A model sent in several calls is complete when its last tensor came, and not before. */
START_TEST(complete_counts_every_tensor)
{
    weight_table_t *table = model_fixture_load("qwen3_moe_mixed", LK_DTYPE_BF16, 1, 4);
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    weight_table_t *whole = model_fixture_load("qwen3_moe_mixed", LK_DTYPE_BF16, 0, 1);
    trainer_list_t list;
    trainer_list_init_split(&list, whole);
    trainer_list_shuffle(&list, test_seed("complete"));
    ck_assert(!sink.ops->complete(sink.ctx)); /* the load was no session */
    sink.ops->begin(sink.ctx);
    for (size_t i = 0; i < list.n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list.descs[i], &bytes));
        for (int again = 0; again < 2; again++) {
            ck_assert(!sink.ops->complete(sink.ctx) || (again == 1 && i + 1 == list.n));
            ck_ok(sink.ops->plan(sink.ctx, &list.descs[i], 1, &err));
            ck_ok(weight_sink_store(&sink, 0, list.data[i], bytes, &err));
        }
    }
    ck_assert(sink.ops->complete(sink.ctx));
    assert_same_weights(whole, table);
    sink.ops->begin(sink.ctx);
    ck_assert(!sink.ops->complete(sink.ctx));
    trainer_list_fini(&list);
    weight_table_destroy(&whole);
    weight_table_destroy(&table);
}
END_TEST

START_TEST(storage_that_cannot_be_had_is_an_error)
{
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    model_fixture_config("qwen3_moe", &config);
    config.hidden_size = 1u << 17;
    config.moe_intermediate_size = 1u << 20;
    config.num_experts = 1024;
    config.num_layers = 3;
    if (!SANITIZED) {
        ck_assert_ptr_null(weight_table_new(&config, LK_DTYPE_F32, 0, 1, &err));
        ck_assert_int_eq(err.status, LK_ERR_NO_MEMORY);
        ck_assert_ptr_nonnull(strstr(err.text, "no memory for"));
    }
    weight_table_destroy(NULL);
    weight_table_t *none = NULL;
    weight_table_destroy(&none);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("weight_table");
    TCase *each = tcase_create("each_fixture");
    tcase_set_timeout(each, 30);
    tcase_add_loop_test(each, fixture_loads_as_the_trainer_has_it, 0, N_MODEL_FIXTURES);
    tcase_add_loop_test(each, any_spelling_and_order_is_the_file, 0, N_MODEL_FIXTURES);
    tcase_add_loop_test(each, ranks_share_the_experts, 0, 2 * LK_ARRAY_LEN(group_sizes));
    suite_add_tcase(suite, each);
    TCase *rest = tcase_create("rest");
    tcase_set_timeout(rest, 30);
    tcase_add_test(rest, storage_is_laid_out_for_fused_products);
    tcase_add_test(rest, fused_tensors_are_received_in_place);
    tcase_add_test(rest, filling_is_equal_on_all_ranks);
    tcase_add_test(rest, misfits_are_refused_by_name);
    tcase_add_test(rest, all_offenders_are_listed);
    tcase_add_test(rest, a_wrong_length_changes_nothing);
    tcase_add_loop_test(rest, two_spellings_of_a_tied_embedding_agree_or_fail, 0, 8);
    tcase_add_test(rest, complete_counts_every_tensor);
    tcase_add_test(rest, storage_that_cannot_be_had_is_an_error);
    suite_add_tcase(suite, rest);
    return suite;
}
