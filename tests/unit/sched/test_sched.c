#include "tests/lib/test_main.h"
#include "tests/unit/sched/world.h"

#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static world_config_t plain(uint32_t num_blocks, uint32_t block_size)
{
    return (world_config_t){.num_blocks = num_blocks,
                            .block_size = block_size,
                            .caching = true,
                            .sched = {.max_num_seqs = 8,
                                      .max_num_batched_tokens = 64,
                                      .max_model_len = 100,
                                      .vocab_size = 61,
                                      .max_waiting = 20}};
}

static uint32_t *count_up(uint32_t n)
{
    static uint32_t tokens[4096];
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = (i * 5 + 1) % 61;
    }
    return tokens;
}

static void add(world_t *w, uint32_t n_prompt, uint32_t max_tokens, int64_t priority)
{
    sampling_params_t p = world_greedy(max_tokens);
    lk_error_t err;
    ck_ok(world_add(w, count_up(n_prompt), n_prompt, &p, priority, 0, 0, &err));
}

static void step(world_t *w)
{
    ck_assert(world_post(w, true));
    world_finish_step(w);
    world_verify(w);
}

START_TEST(what_can_never_fit_is_refused_with_its_size)
{
    world_config_t config = plain(4, 4);
    world_t *w = world_new(&config);
    sampling_params_t p = world_greedy(4);
    lk_error_t err;
    ck_assert_int_eq(world_add(w, count_up(100), 100, &p, 0, 0, 0, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "100"));
    ck_assert_ptr_nonnull(strstr(err.text, "max_model_len=100"));
    ck_assert_int_eq(world_add(w, count_up(17), 17, &p, 0, 0, 0, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "17 tokens"));
    ck_assert_ptr_nonnull(strstr(err.text, "holds 16"));
    ck_assert_int_eq(world_add(w, count_up(0), 0, &p, 0, 0, 0, &err), LK_ERR_INVALID);
    uint32_t outside[2] = {1, 61};
    ck_assert_int_eq(world_add(w, outside, 2, &p, 0, 0, 0, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "prompt token 1 is 61"));
    p.top_p = 0.0f;
    ck_assert_int_eq(world_add(w, count_up(2), 2, &p, 0, 0, 0, &err), LK_ERR_INVALID);
    ck_assert_uint_eq(world_unfinished(w), 0);
    add(w, 16, 1, 0); /* fills the pool exactly: the last token needs no KV */
    world_drain(w, 10);
    ck_assert_int_eq(w->clients[0].finish, FINISH_LENGTH);
    world_destroy(&w);
}
END_TEST

START_TEST(queue_limit_and_used_handles_are_refused)
{
    world_config_t config = plain(4, 4);
    config.sched.max_waiting = 2;
    world_t *w = world_new(&config);
    sampling_params_t p = world_greedy(4);
    lk_error_t err;
    add(w, 3, 4, 0);
    w->n_clients = 0; /* the same handle again */
    ck_assert_int_eq(world_add(w, count_up(3), 3, &p, 0, 0, 0, &err), LK_ERR_STATE);
    w->n_clients = 1;
    add(w, 3, 4, 0);
    ck_assert_int_eq(world_add(w, count_up(3), 3, &p, 0, 0, 0, &err), LK_ERR_UNAVAILABLE);
    world_drain(w, 20);
    ck_assert(!world_abort(w, 0));
    world_destroy(&w);
}
END_TEST

START_TEST(a_lone_request_that_outgrows_the_pool_ends_with_an_error)
{
    for (int preempted = 0; preempted < 2; preempted++) {
        world_config_t config = plain(4, 4);
        world_t *w = world_new(&config);
        add(w, 10, 50, 0);
        for (int i = 0; i < 7; i++) {
            step(w);
        }
        ck_assert_uint_eq(w->clients[0].n_output, 7); /* 17 tokens, the last one without KV */
        if (preempted) {
            scheduler_recompute_all(w->sched);
        }
        ck_assert(!world_post(w, true));
        ck_assert_int_eq(w->clients[0].finish, FINISH_ERROR);
        ck_assert_ptr_nonnull(strstr(w->clients[0].error, "KV cache (4 blocks of 4 tokens)"));
        world_destroy(&w);
    }
}
END_TEST

START_TEST(aborted_in_flight_keeps_its_blocks_until_the_step_is_over)
{
    for (int cancel = 0; cancel < 2; cancel++) {
        world_config_t config = plain(8, 4);
        world_t *w = world_new(&config);
        add(w, 9, 5, 0);
        add(w, 6, 5, 0);
        ck_assert(world_post(w, true));
        uint32_t used = kv_cache_used(w->kv);
        ck_assert(world_abort(w, 0));
        ck_assert_int_eq(w->clients[0].finish, FINISH_ABORT);
        ck_assert(!world_abort(w, 0));
        ck_assert_uint_eq(kv_cache_used(w->kv), used);
        ck_assert_uint_eq(scheduler_num_running(w->sched), 1);
        ck_assert_uint_eq(scheduler_num_started(w->sched), 1);
        world_verify(w);
        if (cancel) {
            world_cancel_step(w);
        } else {
            world_finish_step(w);
        }
        ck_assert_uint_eq(kv_cache_used(w->kv), 2);
        ck_assert_uint_eq(w->clients[1].n_output, cancel ? 0 : 1);
        world_drain(w, 10);
        world_destroy(&w);
    }
}
END_TEST

START_TEST(everything_can_end_in_flight)
{
    for (int how = 0; how < 3; how++) {
        world_config_t config = plain(8, 4);
        world_t *w = world_new(&config);
        for (int i = 0; i < 6; i++) {
            add(w, 5, 9, 0);
        }
        step(w);
        ck_assert(world_post(w, true));
        if (how == 2) {
            for (int i = 0; i < 6; i++) {
                w->clients[i].silent = true;
            }
            for (uint64_t client = 0; client < 3; client++) {
                ck_assert_uint_eq(scheduler_drop_client(w->sched, client), 2);
            }
        } else {
            ck_assert_uint_eq(scheduler_finish_all(w->sched, how ? FINISH_ERROR : FINISH_ABORT,
                                                   how ? "rank 1 died" : NULL),
                              6);
            ck_assert_str_eq(w->clients[5].error, how ? "rank 1 died" : "");
        }
        ck_assert_uint_gt(kv_cache_used(w->kv), 0);
        ck_assert_uint_eq(scheduler_num_started(w->sched), 0);
        world_finish_step(w);
        ck_assert_uint_eq(kv_cache_used(w->kv), 0);
        world_destroy(&w);
    }
}
END_TEST

START_TEST(destroying_with_a_posted_step_frees_all)
{
    world_config_t config = plain(8, 4);
    world_t *w = world_new(&config);
    add(w, 9, 5, 0);
    add(w, 6, 5, 0);
    ck_assert(world_post(w, true));
    ck_assert(world_abort(w, 1));
    world_destroy(&w);
}
END_TEST

/* A token source that the test controls. */
static void step_with(world_t *w, uint32_t token)
{
    ck_assert(world_post(w, true));
    for (uint32_t v = 0; v < 61; v++) {
        w->logits[v] = v == token ? 50.0f : 0.0f;
    }
    exec_result_t result = {.rows = 1, .logits = w->logits};
    w->posted = NULL;
    scheduler_update(w->sched, &result);
}

typedef struct {
    uint32_t n;
    finish_reason_t finish;
    int64_t stop_token;
    uint32_t last;
    char error[200];
} heard_t;

static void hear(void *ctx, const sched_output_t *out)
{
    heard_t *heard = ctx;
    heard->n += out->n;
    heard->finish = out->finish;
    heard->stop_token = out->request->stop_token;
    heard->last = out->request->tokens[out->request->n_tokens - 1];
    strncpy(heard->error, out->error != NULL ? out->error : "", sizeof heard->error - 1);
}

/* World without the checking client. */
static world_t *deaf_world(const world_config_t *config, heard_t *heard)
{
    world_t *w = world_new(config);
    scheduler_destroy(&w->sched);
    w->sched = scheduler_new(&w->config.sched, w->kv, hear, heard);
    return w;
}

START_TEST(stop_conditions_in_order)
{
    const struct {
        const char *what;
        uint32_t tokens[4];
        uint32_t min_tokens, max_tokens, stop, n_made;
        bool ignore_eos;
        finish_reason_t finish;
        int64_t stop_token;
    } cases[] = {
        {"eos", {9, 3}, 0, 5, 20, 2, false, FINISH_STOP, -1},
        {"the other eos", {7}, 0, 5, 20, 1, false, FINISH_STOP, -1},
        {"eos ignored", {9, 3, 9, 9}, 0, 4, 20, 4, true, FINISH_LENGTH, -1},
        {"ignored eos that is a stop token", {3}, 0, 4, 3, 1, true, FINISH_STOP, 3},
        {"eos before stop token", {3}, 0, 4, 3, 1, false, FINISH_STOP, -1},
        {"stop token", {9, 20}, 0, 5, 20, 2, false, FINISH_STOP, 20},
        {"stop wins over length", {9, 20}, 0, 2, 20, 2, false, FINISH_STOP, 20},
        {"length", {9, 9}, 0, 2, 20, 2, false, FINISH_LENGTH, -1},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        heard_t heard = {0};
        world_config_t config = plain(8, 4);
        world_t *w = deaf_world(&config, &heard);
        sampling_params_t p = world_greedy(cases[i].max_tokens);
        p.ignore_eos = cases[i].ignore_eos;
        p.min_tokens = cases[i].min_tokens;
        p.n_stop_tokens = 1;
        p.stop_tokens[0] = cases[i].stop;
        lk_error_t err;
        ck_ok(world_add(w, count_up(3), 3, &p, 0, 0, 0, &err));
        for (uint32_t j = 0; j < cases[i].n_made; j++) {
            ck_assert_msg(heard.finish == FINISH_NONE, "%s", cases[i].what);
            step_with(w, cases[i].tokens[j]);
        }
        ck_assert_msg(heard.finish == cases[i].finish && heard.n == cases[i].n_made &&
                          heard.stop_token == cases[i].stop_token,
                      "%s", cases[i].what);
        w->n_clients = 0;
        world_destroy(&w);
    }
}
END_TEST

START_TEST(stops_are_masked_until_min_tokens)
{
    heard_t heard = {0};
    world_config_t config = plain(8, 4);
    world_t *w = deaf_world(&config, &heard);
    sampling_params_t p = world_greedy(9);
    p.ignore_eos = false;
    p.min_tokens = 2;
    p.n_stop_tokens = 1;
    p.stop_tokens[0] = 20;
    lk_error_t err;
    ck_ok(world_add(w, count_up(3), 3, &p, 0, 0, 0, &err));
    step_with(w, 3); /* the largest logit is masked: the lowest id of the rest */
    ck_assert_uint_eq(heard.last, 0);
    step_with(w, 20);
    ck_assert_uint_eq(heard.last, 0);
    ck_assert_int_eq(heard.finish, FINISH_NONE);
    step_with(w, 20);
    ck_assert_int_eq(heard.finish, FINISH_STOP);
    ck_assert_int_eq(heard.stop_token, 20);
    w->n_clients = 0;
    world_destroy(&w);
}
END_TEST

START_TEST(max_model_len_ends_with_length)
{
    world_config_t config = plain(40, 4);
    config.sched.max_model_len = 20;
    world_t *w = world_new(&config);
    add(w, 15, 50, 0);
    add(w, 19, 50, 0);
    world_drain(w, 20);
    ck_assert_uint_eq(w->clients[0].n_output, 5);
    ck_assert_uint_eq(w->clients[1].n_output, 1);
    ck_assert_int_eq(w->clients[0].finish, FINISH_LENGTH);
    world_destroy(&w);
}
END_TEST

/* One bad row ends its request and no other. */
START_TEST(a_broken_row_ends_its_request_only)
{
    world_config_t config = plain(40, 4);
    world_t *w = world_new(&config);
    for (int i = 0; i < 3; i++) {
        add(w, 5 + (uint32_t)i, 4, 0);
    }
    ck_assert(world_post(w, true));
    w->logits[61 + 30] = NAN;
    world_finish_step(w);
    ck_assert_int_eq(w->clients[1].finish, FINISH_ERROR);
    ck_assert_ptr_nonnull(strstr(w->clients[1].error, "NaN"));
    world_drain(w, 10);
    ck_assert_int_eq(w->clients[0].finish, FINISH_LENGTH);
    ck_assert_int_eq(w->clients[2].finish, FINISH_LENGTH);
    world_destroy(&w);
}
END_TEST

START_TEST(priority_goes_first_and_the_last_in_order_is_preempted)
{
    world_config_t config = plain(8, 2);
    config.caching = false;
    config.sched.max_num_seqs = 2;
    world_t *w = world_new(&config);
    add(w, 4, 8, 5);
    add(w, 4, 8, 0);
    add(w, 4, 8, -1);
    step(w);
    ck_assert_uint_eq(w->clients[0].n_output, 0);
    ck_assert_uint_eq(w->clients[1].n_output, 1);
    ck_assert_uint_eq(w->clients[2].n_output, 1);
    world_drain(w, 200);
    ck_assert_uint_gt(scheduler_num_preemptions(w->sched), 0);
    ck_assert_uint_eq(w->clients[2].n_snapshots, 1); /* first in order: never preempted */
    world_destroy(&w);
}
END_TEST

START_TEST(a_long_prompt_is_chunked_beside_decodes)
{
    world_config_t config = plain(40, 4);
    config.sched.max_num_batched_tokens = 8;
    world_t *w = world_new(&config);
    add(w, 3, 12, 0);
    add(w, 30, 3, 0);
    step(w);
    for (int i = 0; i < 3; i++) {
        step(w); /* one decode and 7 prompt tokens each */
    }
    ck_assert_uint_eq(w->clients[0].n_output, 4);
    ck_assert_uint_eq(w->clients[1].n_output, 0);
    step(w);
    ck_assert_uint_eq(w->clients[1].n_output, 1);
    world_drain(w, 20);
    world_destroy(&w);
}
END_TEST

START_TEST(a_prefill_across_an_update_is_reported_mixed)
{
    world_config_t config = plain(40, 4);
    config.sched.max_num_batched_tokens = 8;
    world_t *w = world_new(&config);
    add(w, 20, 6, 0);
    step(w);
    world_new_weights(w);
    step(w);
    step(w);
    ck_assert_uint_eq(w->clients[0].n_output, 1);
    ck_assert_uint_eq(w->clients[0].n_mixed, 1);
    ck_assert_uint_eq(w->clients[0].kv_epoch[7], 0);
    ck_assert_uint_eq(w->clients[0].kv_epoch[8], 1);
    /* nothing of it but the two first blocks was cached, and those under epoch 0 */
    sampling_params_t p = world_greedy(1);
    request_t *probe = request_new(count_up(20), 20, &p);
    ck_assert_uint_eq(kv_cache_peek(w->kv, probe, 0), 8);
    ck_assert_uint_eq(kv_cache_peek(w->kv, probe, 1), 0);
    request_destroy(&probe);
    /* recomputed, it is all of the new weights, and says so */
    scheduler_recompute_all(w->sched);
    for (int i = 0; i < 3; i++) {
        step(w);
    }
    ck_assert_uint_eq(w->clients[0].n_output, 2);
    ck_assert_uint_eq(w->clients[0].n_snapshots, 2);
    ck_assert_uint_eq(w->clients[0].kv_epoch[0], 1);
    world_drain(w, 20);
    world_destroy(&w);
}
END_TEST

START_TEST(closed_admission_still_drains_what_was_preempted)
{
    world_config_t config = plain(40, 4);
    world_t *w = world_new(&config);
    add(w, 9, 3, 1);
    step(w);
    add(w, 9, 3, 0); /* before the preempted one in order, never started */
    scheduler_recompute_all(w->sched);
    ck_assert_uint_eq(scheduler_num_started(w->sched), 1);
    ck_assert_uint_eq(scheduler_num_waiting(w->sched), 2);
    while (scheduler_num_started(w->sched) > 0) {
        ck_assert(world_post(w, false));
        world_finish_step(w);
    }
    ck_assert(w->clients[0].ended && w->clients[1].n_output == 0);
    ck_assert(!world_post(w, false));
    world_drain(w, 10);
    world_destroy(&w);
}
END_TEST

START_TEST(too_many_weight_changes_end_in_an_error)
{
    heard_t heard = {0};
    world_config_t config = plain(1200, 4);
    config.sched.max_model_len = 4096;
    world_t *w = deaf_world(&config, &heard);
    sampling_params_t p = world_greedy(4000);
    lk_error_t err;
    ck_ok(world_add(w, count_up(2), 2, &p, 0, 0, 0, &err));
    for (uint32_t i = 0; i <= REQUEST_MAX_SPANS; i++) {
        ck_assert_int_eq(heard.finish, FINISH_NONE);
        w->epoch++;
        step_with(w, 9);
    }
    ck_assert_uint_eq(heard.n, REQUEST_MAX_SPANS);
    ck_assert_int_eq(heard.finish, FINISH_ERROR);
    ck_assert_ptr_nonnull(strstr(heard.error, "changed too often"));
    w->n_clients = 0;
    world_destroy(&w);
}
END_TEST

START_TEST(the_first_in_order_is_never_starved)
{
    world_config_t config = plain(6, 2);
    config.sched.max_model_len = 13;
    world_t *w = world_new(&config);
    add(w, 10, 2, 0);
    for (int i = 0; i < 200; i++) { /* a stream of small ones that would fit earlier */
        if (scheduler_num_waiting(w->sched) < 10) {
            add(w, 1, 3, 0);
        }
        step(w);
        if (i == 40) {
            add(w, 10, 2, 0);
        }
    }
    size_t large = 0;
    for (size_t i = 0; i < w->n_clients; i++) {
        large += w->clients[i].n_prompt == 10 && w->clients[i].ended;
    }
    ck_assert_uint_eq(large, 2);
    world_drain(w, 100);
    world_destroy(&w);
}
END_TEST

START_TEST(cache_hits_leave_a_token_to_compute)
{
    world_config_t config = plain(40, 4);
    world_t *w = world_new(&config);
    add(w, 16, 1, 0);
    world_drain(w, 5);
    add(w, 16, 1, 0);
    ck_assert(world_post(w, true));
    ck_assert_uint_eq(w->posted->seqs[0].start, 12);
    ck_assert_uint_eq(w->posted->seqs[0].n, 4);
    world_finish_step(w);
    add(w, 17, 1, 0);
    ck_assert(world_post(w, true));
    ck_assert_uint_eq(w->posted->seqs[0].start, 16);
    world_finish_step(w);
    world_destroy(&w);
}
END_TEST

START_TEST(equal_prompts_at_once_share_their_blocks)
{
    world_config_t config = plain(40, 4);
    world_t *w = world_new(&config);
    for (int i = 0; i < 4; i++) {
        add(w, 13, 3, 0);
    }
    ck_assert(world_post(w, true));
    ck_assert_uint_eq(kv_cache_used(w->kv), 16);
    world_finish_step(w);
    ck_assert_uint_eq(kv_cache_used(w->kv), 3 + 4);
    world_drain(w, 10);
    world_destroy(&w);
}
END_TEST

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* Bytes in use by malloc do not change, and neither does the number of free chunks: no step
 * allocates, not even for a moment. Growth happens at admission only. */
START_TEST(steps_do_not_allocate)
{
    world_config_t config = plain(100, 4);
    world_t *w = world_new(&config);
    for (int i = 0; i < 6; i++) {
        add(w, 5, 60, 0);
    }
    step(w);
    step(w);
    struct mallinfo2 before = mallinfo2();
    for (int i = 0; i < 40; i++) {
        ck_assert(world_post(w, true));
        world_finish_step(w);
    }
    struct mallinfo2 after = mallinfo2();
    ck_assert_uint_eq(before.uordblks, after.uordblks);
    ck_assert_uint_eq(before.ordblks, after.ordblks);
    world_drain(w, 100);
    world_destroy(&w);
}
END_TEST
#endif

Suite *test_suite(void)
{
    Suite *s = suite_create("sched");
    TCase *tc = tcase_create("sched");
    tcase_add_test(tc, what_can_never_fit_is_refused_with_its_size);
    tcase_add_test(tc, queue_limit_and_used_handles_are_refused);
    tcase_add_test(tc, a_lone_request_that_outgrows_the_pool_ends_with_an_error);
    tcase_add_test(tc, aborted_in_flight_keeps_its_blocks_until_the_step_is_over);
    tcase_add_test(tc, everything_can_end_in_flight);
    tcase_add_test(tc, destroying_with_a_posted_step_frees_all);
    tcase_add_test(tc, stop_conditions_in_order);
    tcase_add_test(tc, stops_are_masked_until_min_tokens);
    tcase_add_test(tc, max_model_len_ends_with_length);
    tcase_add_test(tc, a_broken_row_ends_its_request_only);
    tcase_add_test(tc, priority_goes_first_and_the_last_in_order_is_preempted);
    tcase_add_test(tc, a_long_prompt_is_chunked_beside_decodes);
    tcase_add_test(tc, a_prefill_across_an_update_is_reported_mixed);
    tcase_add_test(tc, closed_admission_still_drains_what_was_preempted);
    tcase_add_test(tc, too_many_weight_changes_end_in_an_error);
    tcase_add_test(tc, the_first_in_order_is_never_starved);
    tcase_add_test(tc, cache_hits_leave_a_token_to_compute);
    tcase_add_test(tc, equal_prompts_at_once_share_their_blocks);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    tcase_add_test(tc, steps_do_not_allocate);
#endif
    tcase_set_timeout(tc, 60);
    suite_add_tcase(s, tc);
    return s;
}
