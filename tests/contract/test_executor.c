/*
 * test_executor.c: what executor.h promises, over every implementation.
 */
#include "base/check.h"
#include "base/prng.h"
#include "engine_core/exec/executor.h"
#include "tests/lib/ep_mem.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_EXECUTORS 2
#define N_CASES     (2 * N_EXECUTORS) /* each with one set of weights and with two */
#define BLOCK       8
#define N_BLOCKS    64
#define LENGTH      21
#define VOCAB_MAX   512

static const char *const names[N_EXECUTORS] = {"cpu", "null"};

typedef struct {
    const executor_ops_t *ops;
    model_config_t model;
    executor_config_t config;
    executor_t *exec;
    char dir[1024];
} fixture_t;

static void fixture_open(fixture_t *f, int i, ep_t ep)
{
    lk_error_t err = LK_ERROR_INIT;
    f->ops = executor_find(names[i % N_EXECUTORS]);
    ck_assert_ptr_nonnull(f->ops);
    snprintf(f->dir, sizeof f->dir, "%s/models/qwen3_moe", test_fixtures());
    ck_assert_msg(model_config_load(f->dir, &f->model, &err) == LK_OK, "%s", err.text);
    f->config = (executor_config_t){
        .model_dir = f->dir,
        .model = &f->model,
        .dtype = LK_DTYPE_BF16,
        .shadow = i >= N_EXECUTORS,
        .block_size = BLOCK,
        .num_blocks = N_BLOCKS,
        .max_seqs = 4,
        .max_tokens = 64,
        .threads = 1,
        .ep = ep,
    };
    ck_assert_msg(f->ops->open(&f->config, &f->exec, &err) == LK_OK, "%s", err.text);
    ck_assert_ptr_eq(f->exec->ops, f->ops);
}

/* One row of a result, in a form that both kinds of executors can be compared by. */
typedef struct {
    uint32_t token;
    float values[VOCAB_MAX]; /* logits, or the logprob alone */
} row_t;

static row_t row_of(const fixture_t *f, const exec_result_t *r, size_t i)
{
    row_t out = {0};
    const uint32_t vocab = f->model.vocab_size;
    if (r->logits == NULL) {
        ck_assert(r->tokens != NULL && r->logprobs != NULL);
        out.token = r->tokens[i];
        out.values[0] = r->logprobs[i];
        return out;
    }
    CHECK(vocab <= VOCAB_MAX);
    memcpy(out.values, r->logits + i * vocab, vocab * sizeof(float));
    for (uint32_t t = 1; t < vocab; t++) {
        out.token = out.values[t] > out.values[out.token] ? t : out.token;
    }
    return out;
}

static exec_result_t run(fixture_t *f, const exec_seq_t *seqs, size_t n)
{
    lk_error_t err = LK_ERROR_INIT;
    static uint64_t step;
    const exec_batch_t batch = {.seqs = seqs, .n_seqs = n, .step = step++};
    exec_result_t out = {0};
    lk_status_t rc = f->ops->step_post(f->exec, &batch, &err);
    ck_assert_msg(rc == LK_OK, "%s", err.text);
    for (int i = 0; (rc = f->ops->step_test(f->exec, &out, &err)) == LK_INPROGRESS; i++) {
        ck_assert(!f->ops->step_waits(f->exec)); /* there is nobody to wait for */
        ck_assert_int_lt(i, 100000);
    }
    ck_assert_msg(rc == LK_OK, "%s", err.text);
    return out;
}

static void fill_tokens(const fixture_t *f, uint32_t *tokens, uint64_t seed)
{
    for (uint32_t i = 0; i < LENGTH; i++) {
        tokens[i] = (uint32_t)(lk_mix64(seed * 1000 + i) % f->model.vocab_size);
    }
}

/* Blocks first, first - 1, ... */
static void fill_blocks(uint32_t *blocks, uint32_t first)
{
    for (uint32_t i = 0; i <= LENGTH / BLOCK; i++) {
        blocks[i] = first - i;
    }
}

START_TEST(found_by_name)
{
    ck_assert_str_eq(executor_find(names[_i])->name, names[_i]);
    ck_assert_ptr_null(executor_find("abacus"));
    ck_assert_ptr_null(executor_find(""));
    executor_find(names[_i])->close(NULL);
}
END_TEST

START_TEST(a_missing_model_is_an_error)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    lk_error_t err = LK_ERROR_INIT;
    executor_config_t config = f.config;
    config.model_dir = "/nonexistent";
    executor_t *untouched = NULL;
    ck_assert_int_lt(f.ops->open(&config, &untouched, &err), 0);
    ck_assert_ptr_null(untouched);
    ck_assert_str_ne(err.text, "");
    f.ops->close(f.exec);
}
END_TEST

START_TEST(weights_and_block_size_are_told)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    ck_assert_uint_gt(f.ops->kv_block_bytes(&f.config), 0);
    ck_assert_uint_ge(f.ops->weight_bytes(&f.config), weight_table_bytes(f.ops->weights(f.exec)));
    weight_table_t *w = f.ops->weights(f.exec);
    ck_assert_ptr_nonnull(w);
    ck_assert_int_eq(weight_table_dtype(w), LK_DTYPE_BF16);
    for (size_t i = 0; i < weight_table_count(w); i++) {
        ck_assert(weight_table_at(w, i)->loaded);
    }
    /* dummy weights: a function of the seed */
    digest_t digests[3];
    const uint64_t seeds[3] = {1, 1, 2};
    for (int i = 0; i < 3; i++) {
        lk_error_t err = LK_ERROR_INIT;
        executor_config_t config = f.config;
        config.load_dummy = true;
        config.dummy_seed = seeds[i];
        config.model_dir = NULL;
        executor_t *dummy = NULL;
        ck_assert_msg(f.ops->open(&config, &dummy, &err) == LK_OK, "%s", err.text);
        digests[i] = weight_table_digest(f.ops->weights(dummy));
        f.ops->close(dummy);
    }
    ck_assert(digest_equal(digests[0], digests[1]));
    ck_assert(!digest_equal(digests[0], digests[2]));
    f.ops->close(f.exec);
}
END_TEST

/* New values for every `every`th tensor of the model, as a session brings them. In two sets the
 * live one is what it was until the commit, between any two slices. */
static void update(fixture_t *f, size_t every, uint64_t seed, const exec_seq_t *seq,
                   const row_t *before)
{
    weight_table_t *w = f->ops->weights(f->exec);
    weight_sink_t sink = weight_table_sink(w);
    lk_error_t err = LK_ERROR_INIT;
    lk_prng_t prng;
    lk_prng_seed(&prng, seed);
    ck_assert((sink.ops->prepare != NULL) == f->config.shadow);
    sink.ops->begin(sink.ctx);
    for (size_t i = 0; i < weight_table_count(w); i += every) {
        const weight_slot_t *slot = weight_table_at(w, i);
        tensor_desc_t desc = {.name = slot->name, .dtype = LK_DTYPE_F32, .ndim = slot->ndim};
        memcpy(desc.shape, slot->shape, sizeof slot->shape);
        float *values = malloc(slot->numel * sizeof *values);
        for (uint64_t k = 0; k < slot->numel; k++) {
            values[k] = (float)lk_prng_normal(&prng) / 8;
        }
        ck_ok(sink.ops->plan(sink.ctx, &desc, 1, &err));
        ck_ok(weight_sink_store(&sink, 0, values, slot->numel * sizeof *values, &err));
        free(values);
    }
    if (f->config.shadow) {
        lk_status_t status;
        do {
            exec_result_t r = run(f, seq, 1);
            row_t got = row_of(f, &r, 0);
            ck_assert_mem_eq(&got, before, sizeof got);
            status = sink.ops->prepare(sink.ctx, &err);
            ck_assert_int_ge(status, 0);
        } while (status == LK_INPROGRESS);
        exec_result_t r = run(f, seq, 1);
        row_t got = row_of(f, &r, 0);
        ck_assert_mem_eq(&got, before, sizeof got);
    }
    ck_ok(sink.ops->commit(sink.ctx, &err));
}

/* Whole and partial updates: steps after a commit are those of the new weights, whichever way they
 * came, and nothing an executor keeps beside the weights is left behind. */
START_TEST(steps_follow_the_weights)
{
    fixture_t f, plain;
    fixture_open(&f, _i, ep_local());
    fixture_open(&plain, _i % N_EXECUTORS, ep_local());
    uint32_t tokens[LENGTH], blocks[4];
    fill_tokens(&f, tokens, 4);
    fill_blocks(blocks, 30);
    const exec_seq_t seq = {tokens, 0, LENGTH, blocks, 1};
    exec_result_t r = run(&f, &seq, 1);
    row_t row = row_of(&f, &r, 0);
    static const size_t every[] = {1, 3, 3, 2, 1, 5};
    for (size_t u = 0; u < LK_ARRAY_LEN(every); u++) {
        const row_t before = row;
        update(&f, every[u], u, &seq, &before);
        update(&plain, every[u], u, &seq, &before);
        r = run(&f, &seq, 1);
        row = row_of(&f, &r, 0);
        ck_assert_mem_ne(&row, &before, sizeof row);
        r = run(&plain, &seq, 1);
        row_t want = row_of(&plain, &r, 0);
        ck_assert_mem_eq(&row, &want, sizeof row);
    }
    f.ops->close(f.exec);
    plain.ops->close(plain.exec);
}
END_TEST

START_TEST(a_dummy_step_has_no_rows)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    ck_assert_uint_eq(run(&f, NULL, 0).rows, 0);
    f.ops->close(f.exec);
}
END_TEST

START_TEST(rows_come_in_the_order_of_the_batch)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    uint32_t tokens[3][LENGTH], blocks[3][4];
    row_t alone[3];
    for (uint32_t s = 0; s < 3; s++) {
        fill_tokens(&f, tokens[s], s);
        fill_blocks(blocks[s], 10 * s + 9);
        const exec_seq_t seq = {tokens[s], 0, LENGTH, blocks[s], 1};
        exec_result_t r = run(&f, &seq, 1);
        ck_assert_uint_eq(r.rows, 1);
        alone[s] = row_of(&f, &r, 0);
    }
    /* together on other blocks: the last two rows of 2, none of 0, one of 1 */
    for (uint32_t s = 0; s < 3; s++) {
        fill_blocks(blocks[s], 60 - 5 * s);
    }
    const exec_seq_t batch[] = {{tokens[2], 0, LENGTH, blocks[2], 2},
                                {tokens[0], 0, LENGTH, blocks[0], 0},
                                {tokens[1], 0, LENGTH, blocks[1], 1}};
    exec_result_t r = run(&f, batch, 3);
    ck_assert_uint_eq(r.rows, 3);
    row_t got[] = {row_of(&f, &r, 1), row_of(&f, &r, 2)};
    ck_assert_mem_eq(&got[0], &alone[2], sizeof got[0]);
    ck_assert_mem_eq(&got[1], &alone[1], sizeof got[1]);
    f.ops->close(f.exec);
}
END_TEST

START_TEST(chunks_and_shared_blocks_change_nothing)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    uint32_t tokens[LENGTH], blocks[4];
    fill_tokens(&f, tokens, 5);
    fill_blocks(blocks, 40);
    row_t want[LENGTH];
    const exec_seq_t whole = {tokens, 0, LENGTH, blocks, LENGTH};
    exec_result_t r = run(&f, &whole, 1);
    ck_assert_uint_eq(r.rows, LENGTH);
    for (uint32_t i = 0; i < LENGTH; i++) {
        want[i] = row_of(&f, &r, i);
    }
    uint32_t others[] = {blocks[0], 3, 50};
    const uint32_t starts[] = {8, 9, 14, 20, LENGTH}; /* block 0 is taken as it is */
    for (int i = 0; i < 4; i++) {
        uint32_t n = starts[i + 1] - starts[i];
        const exec_seq_t part = {tokens, starts[i], n, others, n};
        r = run(&f, &part, 1);
        for (uint32_t j = 0; j < n; j++) {
            row_t got = row_of(&f, &r, j);
            ck_assert_mem_eq(&got, &want[starts[i] + j], sizeof got);
        }
    }
    f.ops->close(f.exec);
}
END_TEST

START_TEST(abort_is_legal_at_any_time)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    lk_error_t err = LK_ERROR_INIT;
    uint32_t tokens[LENGTH], blocks[4];
    fill_tokens(&f, tokens, 1);
    fill_blocks(blocks, 30);
    const exec_seq_t seq = {tokens, 0, LENGTH, blocks, 1};
    const exec_batch_t batch = {.seqs = &seq, .n_seqs = 1};
    f.ops->step_abort(f.exec); /* idle */
    exec_result_t r = run(&f, &seq, 1);
    const row_t want = row_of(&f, &r, 0);
    for (int tests = 0; tests < 20; tests++) {
        ck_ok(f.ops->step_post(f.exec, &batch, &err));
        lk_status_t rc = LK_INPROGRESS;
        for (int i = 0; i < tests && rc == LK_INPROGRESS; i++) {
            rc = f.ops->step_test(f.exec, &r, &err);
        }
        f.ops->step_abort(f.exec);
        f.ops->step_abort(f.exec);
        r = run(&f, &seq, 1);
        row_t got = row_of(&f, &r, 0);
        ck_assert_mem_eq(&got, &want, sizeof got);
    }
    f.ops->close(f.exec);
}
END_TEST

START_TEST(closing_in_mid_step_is_legal)
{
    fixture_t f;
    fixture_open(&f, _i, ep_local());
    lk_error_t err = LK_ERROR_INIT;
    uint32_t tokens[LENGTH], blocks[4];
    fill_tokens(&f, tokens, 1);
    fill_blocks(blocks, 30);
    const exec_seq_t seq = {tokens, 0, LENGTH, blocks, 1};
    const exec_batch_t batch = {.seqs = &seq, .n_seqs = 1};
    ck_ok(f.ops->step_post(f.exec, &batch, &err));
    f.ops->close(f.exec);
}
END_TEST

/* Two ranks with different loads: same rows as one rank alone; neither ends without the other. */
START_TEST(ranks_of_a_group)
{
    fixture_t one, two[2];
    ep_mem_t *mem = ep_mem_new(2);
    fixture_open(&one, _i, ep_local());
    fixture_open(&two[0], _i, ep_mem_rank(mem, 0));
    fixture_open(&two[1], _i, ep_mem_rank(mem, 1));
    lk_error_t err = LK_ERROR_INIT;
    uint32_t tokens[LENGTH], blocks[4];
    fill_tokens(&one, tokens, 8);
    fill_blocks(blocks, 20);
    const exec_seq_t seq = {tokens, 0, LENGTH, blocks, 1};
    exec_result_t r = run(&one, &seq, 1), out[2];
    const row_t want = row_of(&one, &r, 0);
    for (uint64_t step = 0; step < 2; step++) {
        const exec_batch_t busy = {.seqs = &seq, .n_seqs = 1, .step = step}, idle = {.step = step};
        const uint32_t home = (uint32_t)step;
        bool done[2] = {false, false};
        ck_ok(two[home].ops->step_post(two[home].exec, &busy, &err));
        for (int i = 0; i < 50; i++) {
            ck_assert_int_eq(two[home].ops->step_test(two[home].exec, &out[home], &err),
                             LK_INPROGRESS);
        }
        ck_assert(two[home].ops->step_waits(two[home].exec));
        ck_ok(two[!home].ops->step_post(two[!home].exec, &idle, &err));
        /* each is left alone only when it says that it waits */
        for (int i = 0; i < 100 && !(done[0] && done[1]); i++) {
            uint32_t at = (uint32_t)i % 2;
            for (int tests = 0; !done[at]; tests++) {
                ck_assert_int_lt(tests, 1000);
                lk_status_t rc = two[at].ops->step_test(two[at].exec, &out[at], &err);
                ck_assert_msg(rc >= 0, "%s", err.text);
                done[at] = rc == LK_OK;
                if (rc == LK_INPROGRESS && two[at].ops->step_waits(two[at].exec)) {
                    break;
                }
            }
        }
        ck_assert(done[0] && done[1]);
        ck_assert_uint_eq(out[home].rows, 1);
        ck_assert_uint_eq(out[!home].rows, 0);
        row_t got = row_of(&two[home], &out[home], 0);
        ck_assert_mem_eq(&got, &want, sizeof got);
    }
    one.ops->close(one.exec);
    two[0].ops->close(two[0].exec);
    two[1].ops->close(two[1].exec);
    ep_mem_destroy(&mem);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("contract_executor");
    TCase *tc = tcase_create("executor");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, found_by_name, 0, N_EXECUTORS);
    tcase_add_loop_test(tc, a_missing_model_is_an_error, 0, N_CASES);
    tcase_add_loop_test(tc, weights_and_block_size_are_told, 0, N_CASES);
    tcase_add_loop_test(tc, steps_follow_the_weights, 0, N_CASES);
    tcase_add_loop_test(tc, a_dummy_step_has_no_rows, 0, N_CASES);
    tcase_add_loop_test(tc, rows_come_in_the_order_of_the_batch, 0, N_CASES);
    tcase_add_loop_test(tc, chunks_and_shared_blocks_change_nothing, 0, N_CASES);
    tcase_add_loop_test(tc, abort_is_legal_at_any_time, 0, N_CASES);
    tcase_add_loop_test(tc, closing_in_mid_step_is_legal, 0, N_CASES);
    tcase_add_loop_test(tc, ranks_of_a_group, 0, N_CASES);
    suite_add_tcase(s, tc);
    return s;
}
