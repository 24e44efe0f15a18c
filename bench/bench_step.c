/*
 * Overhead of one engine step over the null executor: schedule, post, test, update, with an output
 * callback that only counts. Decoding requests of about 256 tokens of context, 64 to 256 of them.
 */
#include "base/check.h"
#include "base/env.h"
#include "engine_core/sched/scheduler.h"

#include <stdio.h>
#include <stdlib.h>

#define CONTEXT 256
#define STEPS   2000
#define PARTS   4 /* schedule, post, test, update */

static const model_config_t model = {.arch = ARCH_LLAMA,
                                     .hidden_size = 8,
                                     .intermediate_size = 8,
                                     .num_layers = 1,
                                     .num_heads = 1,
                                     .num_kv_heads = 1,
                                     .head_dim = 8,
                                     .vocab_size = 32000,
                                     .max_position_embeddings = 8192,
                                     .rms_norm_eps = 1e-6f,
                                     .rope_theta = 10000.0f};

static void count_output(void *ctx, const sched_output_t *out)
{
    *(uint64_t *)ctx += out->n;
}

static void add_requests(scheduler_t *sched, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t prompt[CONTEXT];
        for (uint32_t k = 0; k < CONTEXT; k++) {
            prompt[k] = (i * 977 + k) % model.vocab_size;
        }
        const sampling_params_t p = {
            .top_p = 1.0f, .repetition_penalty = 1.0f, .max_tokens = 4000, .logprobs = 0};
        request_t *r = request_new(prompt, CONTEXT, &p);
        CHECK(r != NULL);
        r->handle = i;
        lk_error_t err;
        CHECKF(scheduler_add(sched, r, &err) == LK_OK, "%s", err.text);
    }
}

/* One step, and where its time went. */
static void step(scheduler_t *sched, executor_t *executor, uint64_t n, uint64_t ns[PARTS])
{
    const lk_env_t *env = lk_env_real();
    lk_error_t err;
    exec_result_t result;
    uint64_t t0 = lk_env_now_ns(env);
    const exec_batch_t *batch = scheduler_schedule(sched, true, 0, n, 0);
    uint64_t t1 = lk_env_now_ns(env);
    CHECK(executor->ops->step_post(executor, batch, &err) == LK_OK);
    uint64_t t2 = lk_env_now_ns(env);
    CHECK(executor->ops->step_test(executor, &result, &err) == LK_OK);
    uint64_t t3 = lk_env_now_ns(env);
    scheduler_update(sched, &result);
    uint64_t t4 = lk_env_now_ns(env);
    ns[0] += t1 - t0;
    ns[1] += t2 - t1;
    ns[2] += t3 - t2;
    ns[3] += t4 - t3;
}

static void run(uint32_t n_requests, bool caching)
{
    const uint32_t block_size = 16, num_blocks = 256 * 300;
    const scheduler_config_t config = {.max_num_seqs = n_requests,
                                       .max_num_batched_tokens = 1u << 20,
                                       .max_model_len = 8192,
                                       .vocab_size = model.vocab_size,
                                       .max_waiting = 1024};
    const executor_config_t exec_config = {.model = &model,
                                           .dtype = LK_DTYPE_F32,
                                           .load_dummy = true,
                                           .block_size = block_size,
                                           .num_blocks = num_blocks,
                                           .max_seqs = n_requests,
                                           .max_tokens = 1u << 20,
                                           .threads = 1,
                                           .ep = {.size = 1}};
    lk_error_t err;
    executor_t *executor;
    CHECKF(executor_null_ops.open(&exec_config, &executor, &err) == LK_OK, "%s", err.text);
    kv_cache_t *kv = kv_cache_new(num_blocks, block_size, caching);
    uint64_t tokens = 0;
    scheduler_t *sched = scheduler_new(&config, kv, count_output, &tokens);
    CHECK(kv != NULL && sched != NULL);
    uint64_t total[PARTS] = {0}, steps = 0, rounds = STEPS / 100;
    for (uint64_t round = 0; round < rounds; round++) {
        add_requests(sched, n_requests);
        uint64_t ignored[PARTS] = {0};
        step(sched, executor, steps, ignored); /* prefill */
        for (int i = 0; i < 100; i++) {
            step(sched, executor, ++steps, total);
        }
        CHECK(scheduler_num_running(sched) == n_requests);
        scheduler_finish_all(sched, FINISH_ABORT, NULL);
    }
    CHECK(tokens == rounds * 101 * n_requests);
    double sum = 0.0;
    printf("%4u requests, prefix cache %-3s:", n_requests, caching ? "on" : "off");
    const char *const names[PARTS] = {"schedule", "post", "test", "update"};
    for (int i = 0; i < PARTS; i++) {
        double us = (double)total[i] / 1e3 / (double)steps;
        printf(" %s %.2f", names[i], us);
        sum += us;
    }
    printf(" -> %.2f us per step\n", sum);
    scheduler_destroy(&sched);
    kv_cache_destroy(&kv);
    executor->ops->close(executor);
}

int main(void)
{
    for (uint32_t n = 64; n <= 256; n *= 2) {
        run(n, false);
        run(n, true);
    }
    return 0;
}
