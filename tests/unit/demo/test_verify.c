/*
 * The demo's checker against one engine in this process: CPU executor, scheduler, KV cache, weight
 * sets that change between steps while requests run, KV kept or recomputed. What happened must
 * verify; the same records with one thing moved must not.
 */
#include "base/check.h"
#include "engine_core/exec/model_maker.h"
#include "engine_core/sched/scheduler.h"
#include "examples/demo/verify.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK    4
#define N_STREAM 6
#define N_SETS   3

static stream_record_t records[N_STREAM];
static const char *model_dir;

static epoch_span_t *copy_spans(const epoch_span_t *spans, size_t n)
{
    epoch_span_t *copy = calloc(n + 1, sizeof *copy);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, spans, n * sizeof *copy);
    return copy;
}

static void on_output(void *ctx, const sched_output_t *o)
{
    const request_t *q = o->request;
    stream_record_t *r = &records[q->handle];
    ck_assert_int_ne(o->finish, FINISH_ERROR);
    r->tokens = realloc(r->tokens, (q->n_tokens + 1) * sizeof *r->tokens);
    r->logprobs = realloc(r->logprobs, (q->n_tokens + 1) * sizeof *r->logprobs);
    if (o->kv_snapshot) {
        r->history = realloc(r->history, (r->n_history + 1) * sizeof *r->history);
        r->history[r->n_history++] =
            (kv_snapshot_t){.at = o->first,
                            .spans = copy_spans(q->kv_spans, q->n_kv_spans),
                            .n_spans = q->n_kv_spans};
    }
    for (uint32_t i = 0; i < o->n; i++) {
        r->tokens[r->n_tokens] = q->tokens[q->n_prompt + o->first + i];
        r->logprobs[r->n_tokens] = o->logprobs[i];
        r->n_tokens++;
    }
    if (o->finish != FINISH_NONE) {
        r->spans = copy_spans(q->weight_spans, q->n_weight_spans);
        r->n_spans = q->n_weight_spans;
    }
}

static void push_set(executor_t *executor, const demo_weights_t *weights, uint64_t k)
{
    lk_error_t err = LK_ERROR_INIT;
    weight_sink_t sink = weight_table_sink(executor->ops->weights(executor));
    const tensor_desc_t *descs = demo_weights_descs(weights);
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->plan(sink.ctx, descs, demo_weights_count(weights), &err));
    for (size_t i = 0; i < demo_weights_count(weights); i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&descs[i], &bytes));
        void *data = malloc(bytes);
        ck_ok(demo_weights_tensor(weights, i, k, data, &err));
        ck_ok(weight_sink_store(&sink, i, data, bytes, &err));
        free(data);
    }
    ck_ok(weight_sink_commit(&sink, &err));
}

static void step(executor_t *executor, scheduler_t *sched, uint64_t epoch, uint64_t n)
{
    lk_error_t err = LK_ERROR_INIT;
    const exec_batch_t *batch = scheduler_schedule(sched, true, epoch, n, 0);
    if (batch->n_seqs == 0) {
        return;
    }
    exec_result_t result;
    lk_status_t status;
    ck_ok(executor->ops->step_post(executor, batch, &err));
    while ((status = executor->ops->step_test(executor, &result, &err)) == LK_INPROGRESS) {
    }
    ck_assert_msg(status == LK_OK, "%s", err.text);
    scheduler_update(sched, &result);
}

/* Runs N_STREAM requests over N_SETS updates; every second update recomputes all KV. */
static void make_records(const demo_weights_t *weights)
{
    lk_error_t err = LK_ERROR_INIT;
    const model_config_t *model = demo_weights_config(weights);
    executor_config_t config = {.model_dir = model_dir,
                                .model = model,
                                .dtype = LK_DTYPE_F32,
                                .block_size = BLOCK,
                                .num_blocks = 48, /* tight: preemption happens */
                                .max_seqs = 8,
                                .max_tokens = 16, /* prompts are chunked */
                                .threads = 1,
                                .ep = ep_local()};
    executor_t *executor;
    ck_ok(executor_cpu_ops.open(&config, &executor, &err));
    kv_cache_t *kv = kv_cache_new(config.num_blocks, BLOCK, true);
    scheduler_config_t sc = {.max_num_seqs = 8,
                             .max_num_batched_tokens = 16,
                             .max_model_len = 256,
                             .vocab_size = model->vocab_size,
                             .max_waiting = 64};
    scheduler_t *sched = scheduler_new(&sc, kv, on_output, NULL);
    for (uint32_t i = 0; i < N_STREAM; i++) {
        stream_record_t *r = &records[i];
        r->n_prompt = 11 + 9 * i;
        r->prompt = calloc(r->n_prompt, sizeof *r->prompt);
        for (uint32_t p = 0; p < r->n_prompt; p++) {
            r->prompt[p] =
                p < 8 ? p + 8 : (p * 31 + i * 7) % 200; /* a shared prefix of two blocks */
        }
        r->sampling = (sampling_params_t){.temperature = 1.0f,
                                          .top_p = 0.95f,
                                          .repetition_penalty = 1.0f,
                                          .seed = 77 + i,
                                          .max_tokens = 40,
                                          .ignore_eos = true,
                                          .logprobs = 0};
        request_t *q = request_new(r->prompt, r->n_prompt, &r->sampling);
        q->handle = i;
        ck_ok(scheduler_add(sched, q, &err));
    }
    uint64_t epoch = 0, n = 0;
    while (scheduler_num_waiting(sched) + scheduler_num_running(sched) > 0) {
        step(executor, sched, epoch, n++);
        if (n % 17 == 0 && epoch < N_SETS) {
            push_set(executor, weights, ++epoch);
            if (epoch % 2 == 0) {
                scheduler_recompute_all(sched);
            }
        }
        ck_assert_uint_lt(n, 5000);
    }
    ck_assert_uint_eq(epoch, N_SETS);
    scheduler_destroy(&sched);
    kv_cache_destroy(&kv);
    executor->ops->close(executor);
}

static verify_result_t verify(const demo_weights_t *weights)
{
    verify_result_t result;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = verify_streams(model_dir, weights, N_SETS, LK_DTYPE_F32, BLOCK, records,
                                        N_STREAM, 1e-3, NULL, NULL, &result, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
    return result;
}

START_TEST(what_happened_verifies_and_what_did_not_fails)
{
    lk_error_t err = LK_ERROR_INIT;
    char dir[512];
    snprintf(dir, sizeof dir, "%s/model", test_tmpdir());
    model_maker_t maker;
    model_maker_init(&maker, ARCH_QWEN3_MOE);
    maker.seed = 7;
    ck_ok(model_maker_write(&maker, dir, &err));
    model_dir = dir;
    demo_weights_t *weights;
    ck_ok(demo_weights_open(dir, false, &weights, &err));
    make_records(weights);

    verify_result_t good = verify(weights);
    ck_assert_msg(good.wrong_tokens == 0 && good.wrong_logprobs == 0, "%s", good.first);
    ck_assert_uint_eq(good.tokens, N_STREAM * 40);
    ck_assert_uint_gt(good.mixed_streams, 0); /* the case that matters happened */

    /* A span moved by one token. */
    stream_record_t *victim = NULL;
    for (size_t i = 0; i < N_STREAM && victim == NULL; i++) {
        victim = records[i].n_spans > 1 ? &records[i] : NULL;
    }
    ck_assert_ptr_nonnull(victim);
    victim->spans[0].end--;
    victim->spans[1].start--;
    verify_result_t shifted = verify(weights);
    ck_assert_uint_gt(shifted.wrong_tokens + shifted.wrong_logprobs, 0);
    ck_assert_str_ne(shifted.first, "");
    victim->spans[0].end++;
    victim->spans[1].start++;

    /* One token, one logprob. */
    records[1].tokens[5] ^= 1;
    ck_assert_uint_gt(verify(weights).wrong_tokens, 0);
    records[1].tokens[5] ^= 1;
    records[2].logprobs[3] -= 0.01f;
    ck_assert_uint_eq(verify(weights).wrong_logprobs, 1);
    records[2].logprobs[3] += 0.01f;

    /* KV that was kept, reported as recomputed. */
    kv_snapshot_t *s = NULL;
    for (size_t i = 0; i < N_STREAM && s == NULL; i++) {
        s = records[i].n_history > 0 ? &records[i].history[0] : NULL;
    }
    ck_assert_ptr_nonnull(s);
    s->spans[0].epoch += 1;
    verify_result_t stale = verify(weights);
    ck_assert_uint_gt(stale.wrong_tokens + stale.wrong_logprobs, 0);
    s->spans[0].epoch -= 1;

    ck_assert_uint_eq(verify(weights).wrong_tokens, 0);
    for (size_t i = 0; i < N_STREAM; i++) {
        stream_record_fini(&records[i]);
    }
    demo_weights_close(&weights);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("verify");
    TCase *tc = tcase_create("verify");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, what_happened_verifies_and_what_did_not_fails);
    suite_add_tcase(s, tc);
    return s;
}
