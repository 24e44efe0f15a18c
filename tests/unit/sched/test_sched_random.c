#include "tests/lib/test_main.h"
#include "tests/unit/sched/world.h"

#include <stdlib.h>
#include <string.h>

/* What happened over all rounds, so that a test that never met its subject fails. */
typedef struct {
    uint64_t preemptions, hits, mixed, aborted_in_flight, canceled, errors, re_snapshots, tokens;
    uint64_t scored, rescored;
} coverage_t;

static uint32_t range(lk_prng_t *prng, uint32_t low, uint32_t high)
{
    return low + (uint32_t)lk_prng_below(prng, high - low + 1);
}

static bool chance(lk_prng_t *prng, uint32_t percent)
{
    return lk_prng_below(prng, 100) < percent;
}

static world_config_t random_world(lk_prng_t *prng, bool null_executor)
{
    return (world_config_t){
        .num_blocks = range(prng, 4, 16),
        .block_size = range(prng, 1, 8),
        .caching = chance(prng, 70),
        .null_executor = null_executor,
        .sched = {.max_num_seqs = range(prng, 1, 8),
                  .max_num_batched_tokens = chance(prng, 50) ? range(prng, 1, 12) : 1000,
                  .max_model_len = range(prng, 8, WORLD_MAX_LEN),
                  .vocab_size = 61,
                  .max_prompt_rows = chance(prng, 50) ? range(prng, 1, 9) : 0,
                  .max_waiting = 50},
    };
}

static sampling_params_t random_sampling(lk_prng_t *prng)
{
    sampling_params_t p = world_greedy(range(prng, 1, 30));
    p.ignore_eos = chance(prng, 70);
    p.seed = lk_prng_u64(prng);
    if (chance(prng, 50)) {
        p.temperature = 0.5f + (float)lk_prng_unit(prng);
    }
    if (chance(prng, 30)) {
        p.top_k = (int32_t)range(prng, 1, 70);
        p.top_p = 0.9f;
    }
    if (chance(prng, 30)) {
        p.repetition_penalty = 1.2f;
        p.frequency_penalty = 0.1f;
    }
    if (chance(prng, 30)) {
        p.min_tokens = range(prng, 0, p.max_tokens);
    }
    if (chance(prng, 50)) {
        p.logprobs = (int32_t)range(prng, 0, 5);
    }
    if (chance(prng, 30)) {
        p.prompt_logprobs = 1 + range(prng, 0, chance(prng, 20) ? 61 : 3);
    }
    for (p.n_stop_tokens = 0; p.n_stop_tokens < 3 && chance(prng, 40);) {
        p.stop_tokens[p.n_stop_tokens++] = range(prng, 0, 60);
    }
    return p;
}

/* Prompts share prefixes: one of three streams, cut anywhere, sometimes with a tail of its own. */
static uint32_t random_prompt(lk_prng_t *prng, uint32_t most, uint32_t *out)
{
    uint32_t n = range(prng, 1, most), stream = range(prng, 0, 2);
    uint32_t own = chance(prng, 50) ? range(prng, 0, n) : n;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = i < own ? (i * 7 + stream * 13) % 61 : range(prng, 0, 60);
    }
    return n;
}

static void add_one(world_t *w, lk_prng_t *prng)
{
    uint32_t prompt[WORLD_MAX_LEN];
    uint32_t n = random_prompt(prng, LK_MIN(w->config.sched.max_model_len, WORLD_MAX_LEN), prompt);
    sampling_params_t p = random_sampling(prng);
    int64_t priority = chance(prng, 80) ? 0 : (int64_t)range(prng, 0, 4) - 2;
    uint64_t salt = chance(prng, 80) ? 0 : 99;
    lk_error_t err;
    uint32_t copies = chance(prng, 30) ? 3 : 1; /* n > 1: equal prompts at once */
    for (uint32_t choice = 0; choice < copies; choice++) {
        lk_status_t status = world_add(w, prompt, n, &p, priority, salt, choice, &err);
        bool fits = n + 1 <= w->config.sched.max_model_len &&
                    n <= w->config.num_blocks * w->config.block_size;
        ck_assert_int_eq(status, !fits                                  ? LK_ERR_INVALID
                                 : scheduler_num_waiting(w->sched) > 50 ? LK_ERR_UNAVAILABLE
                                                                        : status);
        ck_assert(status == LK_OK || status == LK_ERR_UNAVAILABLE || !fits);
    }
}

static void abort_some(world_t *w, lk_prng_t *prng, coverage_t *cov)
{
    if (w->n_clients == 0) {
        return;
    }
    size_t handle = lk_prng_below(prng, w->n_clients);
    client_t *c = &w->clients[handle];
    bool live = !c->ended && !c->silent;
    uint32_t used = kv_cache_used(w->kv);
    size_t running = scheduler_num_running(w->sched);
    ck_assert(world_abort(w, handle) == live);
    if (live && w->posted != NULL && scheduler_num_running(w->sched) < running &&
        kv_cache_used(w->kv) == used) {
        cov->aborted_in_flight++;
    }
    ck_assert(!live || (c->ended && c->finish == FINISH_ABORT));
}

static void drop_front_end(world_t *w, uint64_t client)
{
    size_t live = 0;
    for (size_t i = 0; i < w->n_clients; i++) {
        if (i % 3 == client && !w->clients[i].ended && !w->clients[i].silent) {
            w->clients[i].silent = true;
            live++;
        }
    }
    ck_assert_uint_eq(scheduler_drop_client(w->sched, client), live);
}

/* Anything that may happen at any time. */
static void disturb(world_t *w, lk_prng_t *prng, coverage_t *cov)
{
    if (chance(prng, 15)) {
        abort_some(w, prng, cov);
    }
    if (chance(prng, 1)) {
        drop_front_end(w, range(prng, 0, 2));
    }
    if (chance(prng, 1)) {
        size_t n = world_unfinished(w);
        bool error = chance(prng, 50);
        ck_assert_uint_eq(scheduler_finish_all(w->sched, error ? FINISH_ERROR : FINISH_ABORT,
                                               error ? "the rank is dirty" : NULL),
                          n);
        ck_assert_uint_eq(world_unfinished(w), 0);
    }
}

/* Between two steps. */
static void between_steps(world_t *w, lk_prng_t *prng, bool epochs)
{
    if (epochs && chance(prng, 8) && w->epoch + 1 < WORLD_MAX_EPOCHS) {
        world_new_weights(w);
        if (chance(prng, 50)) {
            scheduler_recompute_all(w->sched);
            ck_assert_uint_eq(scheduler_num_running(w->sched), 0);
        }
    }
    if (chance(prng, 2)) {
        bool free = kv_cache_used(w->kv) == 0;
        ck_assert(kv_cache_reset_prefixes(w->kv) == free);
    }
}

static void round_of(lk_prng_t *prng, bool null_executor, coverage_t *cov)
{
    world_config_t config = random_world(prng, null_executor);
    world_t *w = world_new(&config);
    bool epochs = chance(prng, 70);
    for (int step = 0; step < 150; step++) {
        if (chance(prng, 30)) {
            add_one(w, prng);
        }
        disturb(w, prng, cov);
        between_steps(w, prng, epochs);
        size_t started = scheduler_num_started(w->sched);
        bool admit = chance(prng, 85);
        if (world_post(w, admit)) {
            world_verify(w);
            disturb(w, prng, cov);
            world_verify(w);
            if (chance(prng, 5)) {
                world_cancel_step(w);
                cov->canceled++;
            } else {
                world_finish_step(w);
            }
        }
        ck_assert(admit || scheduler_num_started(w->sched) <= started);
        world_verify(w);
    }
    world_drain(w, 20000);
    kv_cache_stats_t stats;
    kv_cache_stats(w->kv, &stats);
    cov->hits += stats.hits;
    cov->preemptions += scheduler_num_preemptions(w->sched);
    cov->tokens += w->n_tokens;
    for (size_t i = 0; i < w->n_clients; i++) {
        cov->mixed += w->clients[i].n_mixed;
        cov->re_snapshots += w->clients[i].n_snapshots > 1;
        cov->scored += w->clients[i].n_scored;
        cov->rescored += w->clients[i].n_restarts;
        cov->errors += w->clients[i].finish == FINISH_ERROR;
    }
    world_destroy(&w);
}

static void check_coverage(const coverage_t *cov)
{
    ck_assert_uint_gt(cov->tokens, 1000);
    ck_assert_uint_gt(cov->preemptions, 100);
    ck_assert_uint_gt(cov->hits, 100);
    ck_assert_uint_gt(cov->mixed, 0);
    ck_assert_uint_gt(cov->re_snapshots, 10);
    ck_assert_uint_gt(cov->aborted_in_flight, 10);
    ck_assert_uint_gt(cov->canceled, 10);
    ck_assert_uint_gt(cov->errors, 0);
    ck_assert_uint_gt(cov->scored, 1000);
    ck_assert_uint_gt(cov->rescored, 0);
}

START_TEST(every_token_follows_from_the_reported_kv)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("sched random hash"));
    coverage_t cov = {0};
    for (int i = 0; i < 150; i++) {
        round_of(&prng, false, &cov);
    }
    check_coverage(&cov);
}
END_TEST

START_TEST(every_token_of_the_null_executor_is_right)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("sched random null"));
    coverage_t cov = {0};
    for (int i = 0; i < 150; i++) {
        round_of(&prng, true, &cov);
    }
    check_coverage(&cov);
}
END_TEST

/* The same requests in a world of plenty without features, and in a cramped one with all of them.
 */
START_TEST(twins_make_the_same_tokens)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("sched twins"));
    uint64_t preemptions = 0;
    for (int round = 0; round < 60; round++) {
        world_config_t cramped = random_world(&prng, false);
        cramped.num_blocks = 64 / cramped.block_size + 1;
        cramped.sched.max_model_len = 64;
        world_config_t plenty = cramped;
        plenty.num_blocks = 4000;
        plenty.caching = false;
        plenty.sched.max_num_batched_tokens = 4000;
        plenty.sched.max_prompt_rows = 0;
        plenty.sched.max_num_seqs = 32;
        world_t *w[2] = {world_new(&cramped), world_new(&plenty)};
        for (int i = 0; i < 16; i++) {
            uint32_t prompt[WORLD_MAX_LEN];
            uint32_t n = random_prompt(&prng, 30, prompt);
            sampling_params_t p = random_sampling(&prng);
            p.logprobs = 0;
            lk_error_t err;
            for (int k = 0; k < 2; k++) {
                ck_ok(world_add(w[k], prompt, n, &p, k == 0 ? i % 3 : 0, i % 2, (uint32_t)i, &err));
            }
        }
        world_drain(w[0], 20000);
        world_drain(w[1], 200);
        for (size_t i = 0; i < 16; i++) {
            client_t *a = &w[0]->clients[i], *b = &w[1]->clients[i];
            ck_assert_uint_eq(a->n_output, b->n_output);
            ck_assert_int_eq(a->finish, b->finish);
            ck_assert_mem_eq(a->tokens, b->tokens, (a->n_prompt + a->n_output) * sizeof(uint32_t));
            ck_assert_uint_eq(a->n_scored, b->n_scored);
            ck_assert_mem_eq(a->scores, b->scores, a->n_scored * sizeof(float));
            ck_assert_mem_eq(a->logprobs, b->logprobs, a->n_output * sizeof(float));
        }
        preemptions += scheduler_num_preemptions(w[0]->sched);
        world_destroy(&w[0]);
        world_destroy(&w[1]);
    }
    ck_assert_uint_gt(preemptions, 20);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("sched_random");
    TCase *tc = tcase_create("sched_random");
    tcase_add_test(tc, every_token_follows_from_the_reported_kv);
    tcase_add_test(tc, every_token_of_the_null_executor_is_right);
    tcase_add_test(tc, twins_make_the_same_tokens);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(s, tc);
    return s;
}
