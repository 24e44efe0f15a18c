#include "engine_core/exec/model_maker.h"
#include "base/check.h"
#include "transfer/safetensors.h"
#include "engine_core/exec/weight_table.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *fresh_dir(void)
{
    static char path[512];
    static int n;
    snprintf(path, sizeof path, "%s/made-%d", test_tmpdir(), n++);
    return path;
}

static void must_write(const model_maker_t *maker, const char *dir)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(model_maker_write(maker, dir, &err) == LK_OK, "%s", err.text);
}

static weight_table_t *must_load(const char *dir, lk_dtype_t stored, model_config_t *config)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(model_config_load(dir, config, &err) == LK_OK, "%s", err.text);
    weight_table_t *table = weight_table_new(config, stored, 0, 1, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    ck_assert_msg(weight_table_load(table, dir, &err) == LK_OK, "%s", err.text);
    return table;
}

/* Every architecture and dtype: what was written is what the seed says, in one file and in three.
 */
START_TEST(writes_what_the_seed_says)
{
    static const lk_dtype_t dtypes[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16};
    model_arch_t arch = (model_arch_t)(_i / 3);
    model_maker_t maker;
    model_maker_init(&maker, arch);
    maker.dtype = dtypes[_i % 3];
    maker.seed = 7;
    maker.tie_word_embeddings = _i % 2 == 0;
    maker.attention_bias = _i % 2 == 1 && arch != ARCH_QWEN2;
    maker.llama3_rope = arch == ARCH_LLAMA;
    maker.num_layers = 3;
    maker.decoder_sparse_step = 2;
    char one[512];
    snprintf(one, sizeof one, "%s", fresh_dir());
    must_write(&maker, one);
    maker.shards = 3;
    const char *many = fresh_dir();
    must_write(&maker, many);
    model_config_t config;
    weight_table_t *a = must_load(one, LK_DTYPE_F32, &config);
    weight_table_t *b = must_load(many, LK_DTYPE_F32, &config);
    ck_assert(digest_equal(weight_table_digest(a), weight_table_digest(b)));
    ck_assert(config.arch == arch && config.checkpoint_dtype == maker.dtype);
    ck_assert(config.tie_word_embeddings == maker.tie_word_embeddings);
    ck_assert(config.n_eos == 1 && config.eos_token_ids[0] == 257);
    ck_assert(config.o_bias == maker.attention_bias);
    ck_assert((config.rope_type == ROPE_LLAMA3) == (arch == ARCH_LLAMA));
    for (size_t i = 0; i < weight_table_count(a); i++) {
        const weight_slot_t *slot = weight_table_at(a, i);
        size_t bytes = slot->numel * dtype_bytes(maker.dtype);
        void *raw = malloc(bytes);
        digest_t digest = {{0, 0}};
        lk_error_t err = LK_ERROR_INIT;
        ck_ok(model_maker_tensor(&config, slot->name, 7, maker.dtype, raw, bytes, &err));
        ck_ok(digest_add(&digest, raw, maker.dtype, LK_DTYPE_F32, slot->numel, 0));
        ck_assert_msg(digest_equal(digest, slot->digest), "%s", slot->name);
        free(raw);
    }
    weight_table_destroy(&a);
    weight_table_destroy(&b);
}
END_TEST

/* From an independent program in another language that follows model_tensors.h's text. */
START_TEST(generated_values_are_known)
{
    static const struct {
        const char *name;
        uint32_t ndim;
        uint64_t shape[2];
        uint64_t seed, first;
        uint32_t bits[4];
    } rows[] = {
#include "tests/unit/exec/known_weights.inc"
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        model_tensor_t t = {.name = rows[i].name,
                            .ndim = rows[i].ndim,
                            .shape = {rows[i].shape[0], rows[i].shape[1]},
                            .numel = rows[i].shape[0] * LK_MAX(rows[i].shape[1], 1u),
                            .layer = strncmp(rows[i].name, "model.layers.", 13) == 0 ? 0 : -1,
                            .expert = -1};
        uint32_t got[4];
        ck_ok(model_tensor_random(&t, rows[i].seed, LK_DTYPE_F32, rows[i].first, 4, got));
        for (int k = 0; k < 4; k++) {
            ck_assert_msg(got[k] == rows[i].bits[k], "%s[%d]: %08x", rows[i].name, k, got[k]);
        }
    }
}
END_TEST

START_TEST(generated_values_are_nearly_normal)
{
    enum { N = 1 << 18 };
    model_tensor_t t = {.name = "model.layers.0.self_attn.o_proj.weight",
                        .ndim = 2,
                        .shape = {N / 64, 64},
                        .numel = N};
    float *x = malloc(N * sizeof *x), *part = malloc(N * sizeof *part);
    ck_ok(model_tensor_random(&t, 1, LK_DTYPE_F32, 0, N, x));
    double mean = 0, var = 0, fourth = 0, neighbours = 0;
    for (int i = 0; i < N; i++) {
        double z = (double)x[i] * 8; /* scale is 1 / sqrt(64) */
        mean += z / N;
        var += z * z / N;
        fourth += z * z * z * z / N;
        neighbours += i > 0 ? z * (double)x[i - 1] * 8 / N : 0;
    }
    ck_assert_double_lt(fabs(mean), 0.01);
    ck_assert_double_lt(fabs(var - 1), 0.01);
    ck_assert_double_lt(fabs(fourth - 3), 0.3); /* 2.85 for eight uniforms */
    ck_assert_double_lt(fabs(neighbours), 0.01);
    /* any part, in any dtype, is the part of the whole */
    ck_ok(model_tensor_random(&t, 1, LK_DTYPE_F32, 1001, 3000, part));
    ck_assert_mem_eq(part, x + 1001, 3000 * sizeof *x);
    uint16_t *half = malloc(N * 2), *rounded = malloc(N * 2);
    ck_ok(model_tensor_random(&t, 1, LK_DTYPE_BF16, 0, N, half));
    ck_ok(dtype_convert(rounded, LK_DTYPE_BF16, x, LK_DTYPE_F32, N));
    ck_assert_mem_eq(half, rounded, N * 2);
    ck_ok(model_tensor_random(&t, 2, LK_DTYPE_F32, 0, N, part));
    ck_assert(memcmp(part, x, N * sizeof *x) != 0);
    free(x);
    free(part);
    free(half);
    free(rounded);
}
END_TEST

START_TEST(only_an_empty_directory_is_used)
{
    model_maker_t maker;
    lk_error_t err = LK_ERROR_INIT;
    model_maker_init(&maker, ARCH_QWEN3_MOE);
    char dir[512], path[600];
    snprintf(dir, sizeof dir, "%s", fresh_dir());
    ck_assert_int_eq(mkdir(dir, 0755), 0);
    must_write(&maker, dir);
    ck_assert_int_eq(model_maker_write(&maker, dir, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "is not empty"));
    model_config_t config;
    ck_ok(model_config_load(dir, &config, &err)); /* and what was there is untouched */
    snprintf(path, sizeof path, "%s/config.json", dir);
    ck_assert_int_eq(model_maker_write(&maker, path, &err), LK_ERR_INVALID);
    snprintf(path, sizeof path, "%s/a/b", dir);
    ck_assert_int_eq(model_maker_write(&maker, path, &err), LK_ERR_IO);
}
END_TEST

START_TEST(impossible_sizes_leave_nothing)
{
    model_maker_t maker;
    lk_error_t err = LK_ERROR_INIT;
    model_maker_init(&maker, ARCH_LLAMA);
    const char *dir = fresh_dir();
    ck_assert_int_eq(model_maker_set(&maker, "kv-heads", 0, &err), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "kv-heads: expected 1 to 1024, got 0");
    ck_assert_int_eq(model_maker_set(&maker, "no-such", 1, &err), LK_ERR_NOT_FOUND);
    ck_assert_int_eq(model_maker_set(&maker, "layers", 1ull << 32 | 1, &err), LK_ERR_INVALID);
    ck_ok(model_maker_set(&maker, "kv-heads", 3, &err));
    ck_assert_uint_eq(maker.num_kv_heads, 3);
    ck_assert_int_eq(model_maker_write(&maker, dir, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "num_key_value_heads 3"));
    ck_assert_int_ne(access(dir, F_OK), 0);
    maker.num_kv_heads = 4;
    maker.shards = 999;
    ck_assert_int_eq(model_maker_write(&maker, dir, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "999 files"));
    maker.shards = 5; /* the embedding alone fills several shares */
    ck_assert_int_eq(rmdir(dir), 0);
    must_write(&maker, dir);
    model_config_t config;
    weight_table_t *table = must_load(dir, LK_DTYPE_BF16, &config);
    weight_table_destroy(&table);
    model_arch_t arch;
    ck_assert(model_maker_arch("qwen3_moe", &arch) && arch == ARCH_QWEN3_MOE);
    ck_assert(!model_maker_arch("qwen4", &arch) && arch == ARCH_QWEN3_MOE);
    uint16_t out[4];
    ck_assert_int_eq(model_maker_tensor(&config, "nope", 1, LK_DTYPE_BF16, out, 8, &err),
                     LK_ERR_NOT_FOUND);
    ck_assert_int_eq(
        model_maker_tensor(&config, "model.norm.weight", 1, LK_DTYPE_BF16, out, 8, &err),
        LK_ERR_INVALID);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("model_maker");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 30);
    tcase_add_loop_test(tc, writes_what_the_seed_says, 0, 12);
    tcase_add_test(tc, generated_values_are_known);
    tcase_add_test(tc, generated_values_are_nearly_normal);
    tcase_add_test(tc, only_an_empty_directory_is_used);
    tcase_add_test(tc, impossible_sizes_leave_nothing);
    suite_add_tcase(suite, tc);
    return suite;
}
