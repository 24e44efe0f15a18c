/* Shadow swap over whole engines: tokens flow while weights come in, every one is of the weights of
 * its epoch, and whatever fails leaves the old ones. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/engine/core_cluster.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

static const cc_config_t layouts[] = {
    {.n_ranks = 1, .n_frontends = 1, .sync_interval = 4, .moe = false, .doorbell = true},
    {.n_ranks = 2, .n_frontends = 2, .sync_interval = 4, .moe = true, .doorbell = true},
    {.n_ranks = 3, .n_frontends = 1, .sync_interval = 2, .moe = true, .doorbell = false},
    {.n_ranks = 4, .n_frontends = 2, .sync_interval = 4, .moe = false, .doorbell = true},
};
#define N_LAYOUTS (int)LK_ARRAY_LEN(layouts)

static cc_t *new_cluster(int layout, const char *name)
{
    cc_config_t config = layouts[layout];
    config.num_blocks = 160;
    config.shadow = true;
    config.seed = test_seed(name) + (uint64_t)layout;
    cc_t *cc = cc_new(&config);
    ck_ok(cc_init_transfer(cc));
    return cc;
}

static void add_everywhere(cc_t *cc, uint32_t n_prompt, uint32_t max_tokens)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        cc_add(cc, r % cc->config.n_frontends, r, n_prompt + r, max_tokens + r);
    }
}

static uint32_t n_output(const cc_t *cc, size_t i)
{
    return cc->requests[i].n_tokens - cc->requests[i].n_prompt;
}

static void event(cc_t *cc)
{
    ck_assert(cc_event(cc));
    cc_note_epoch(cc);
}

static bool answered(const cc_t *cc, size_t call)
{
    return cc->calls[call].done == (1u << cc->config.n_ranks) - 1;
}

/* Runs until every rank has answered; requests go on meanwhile. */
static lk_status_t finish_call(cc_t *cc, size_t call)
{
    for (int i = 0; !answered(cc, call); i++) {
        ck_assert_int_lt(i, 400000);
        event(cc);
    }
    return cc_status(cc, call);
}

static lk_status_t call(cc_t *cc, update_verb_t verb, const char *spec)
{
    return finish_call(cc, cc_call(cc, 0, CMD_UPDATE, verb, false, spec, ~0u));
}

static size_t post_update(cc_t *cc, size_t first, size_t n)
{
    return cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_UPDATE, false, cc_update_spec(cc, first, n), ~0u);
}

static lk_status_t update(cc_t *cc, size_t first, size_t n)
{
    cc_new_values(cc, first, n);
    cc_start_sending(cc, first, n);
    return finish_call(cc, post_update(cc, first, n));
}

static void expect_epoch(const cc_t *cc, uint64_t epoch)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        const weight_state_t *weights = group_weights(engine_core_group(cc->engines[r]));
        ck_assert_uint_eq(weights->epoch, epoch);
        ck_assert_uint_eq(weights->gates, 0);
        ck_assert(!weights->session);
        digest_t digest = weight_table_digest(cc->executors[r]->ops->weights(cc->executors[r]));
        ck_assert(digest_equal(digest, cc->digests[epoch % CC_MAX_EPOCHS]));
    }
}

static void expect_all_length(const cc_t *cc)
{
    for (size_t i = 0; i < cc->n_requests; i++) {
        ck_assert_msg(cc->requests[i].finish == FINISH_LENGTH, "request %zu: finish %d %s", i,
                      cc->requests[i].finish, cc->requests[i].error);
    }
}

/* A transfer that stands still stops nobody: requests come and end in the old epoch, others pause
 * and resume. Then it goes on, and a long request lives through the flip. */
START_TEST(test_tokens_flow_during_a_transfer)
{
    cc_t *cc = new_cluster(_i, "flow");
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    size_t sent = post_update(cc, 0, cc->n_tensors);
    add_everywhere(cc, 6, 30);
    cc_settle(cc);
    expect_all_length(cc);
    ck_assert(!answered(cc, sent));
    uint32_t other = cc->config.n_frontends - 1;
    size_t pause = cc_call(cc, other, CMD_PAUSE, PAUSE_KEEP, true, NULL, ~0u);
    ck_ok(finish_call(cc, pause));
    ck_ok(finish_call(cc, cc_call(cc, other, CMD_RESUME, 0, false, NULL, ~0u)));
    cc_utility(cc, "weight_info", "");
    json_t *info = json_loads(cc->utility[0], 0, NULL);
    ck_assert_str_eq(json_string_value(json_object_get(info, "weight_swap")), "shadow");
    ck_assert(json_is_true(json_object_get(info, "session_open")));
    ck_assert_str_eq(json_string_value(json_object_get(info, "state")), "receiving");
    json_decref(info);

    size_t first = cc->n_requests;
    add_everywhere(cc, 6, 150);
    while (n_output(cc, first) < 5) {
        event(cc);
    }
    cc_new_values(cc, 0, cc->n_tensors);
    cc_start_sending(cc, 0, cc->n_tensors);
    ck_ok(finish_call(cc, sent));
    ck_ok(call(cc, UPDATE_VERB_FINISH, "{\"weight_version\": \"step-1\"}"));
    expect_epoch(cc, 1);
    ck_assert_int_eq(cc->requests[first].finish, FINISH_NONE);
    cc_settle(cc);
    expect_all_length(cc);
    const cc_request_t *r = &cc->requests[first];
    ck_assert_str_eq(r->version, "step-1");
    ck_assert_uint_eq(r->n_weight_spans, 2);
    ck_assert_uint_eq(r->n_snapshots, 2);
    ck_assert_uint_eq(r->n_kv_spans, 1); /* recomputed under the new weights */
    ck_assert_uint_eq(r->kv_spans[0].epoch, 1);
    for (size_t i = 0; i < first; i++) {
        ck_assert_uint_eq(cc->requests[i].epochs[0], 0);
    }
    cc_destroy(&cc);
}
END_TEST

/* A user's keep pause without clear_cache keeps the KV over a flip, too. */
START_TEST(test_flip_under_keep)
{
    cc_t *cc = new_cluster(_i, "flip under keep");
    add_everywhere(cc, 6, 60);
    while (n_output(cc, 0) < 7) {
        event(cc);
    }
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    ck_ok(update(cc, 0, cc->n_tensors));
    ck_ok(call(cc, UPDATE_VERB_FINISH, NULL));
    expect_epoch(cc, 1);
    ck_assert_uint_gt(cc_unfinished(cc), 0);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    expect_all_length(cc);
    ck_assert_uint_eq(cc->requests[0].n_snapshots, 1);
    ck_assert_uint_eq(cc->requests[0].n_weight_spans, 2);
    cc_destroy(&cc);
}
END_TEST

/* Whatever ends a session but its FINISH: requests that run notice nothing. */
START_TEST(test_failures_leave_the_old_weights)
{
    cc_t *cc = new_cluster(_i, "shadow failures");
    add_everywhere(cc, 6, 150);
    size_t watched = cc->n_requests - 1;
    while (n_output(cc, watched) < 3) {
        event(cc);
    }
    ck_ok(call(cc, UPDATE_VERB_START, NULL)); /* aborted after bytes came */
    ck_ok(update(cc, 0, 2));
    ck_ok(call(cc, UPDATE_VERB_ABORT, NULL));
    expect_epoch(cc, 0);

    ck_ok(call(cc, UPDATE_VERB_START, NULL)); /* the trainer dies halfway */
    cc_new_values(cc, 0, cc->n_tensors);
    cc_start_sending(cc, 0, cc->n_tensors);
    size_t sent = post_update(cc, 0, cc->n_tensors);
    while (sender_bytes(cc->sender) == 0) {
        event(cc);
    }
    cc_kill_trainer(cc);
    ck_assert_int_eq(finish_call(cc, sent), LK_ERR_PEER);
    expect_epoch(cc, 0);
    ck_assert_int_eq(call(cc, UPDATE_VERB_START, NULL), LK_ERR_STATE);
    cc_settle(cc);
    expect_all_length(cc);
    ck_assert_uint_eq(cc->requests[watched].n_snapshots, 1); /* nothing was recomputed */

    ck_ok(cc_init_transfer(cc)); /* the deadline of a session that nobody calls */
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    ck_ok(update(cc, 1, 2));
    cc_advance(cc, 31 * LK_SECOND_NS);
    expect_epoch(cc, 0);
    ck_ok(call(cc, UPDATE_VERB_START, NULL)); /* and of a transfer that does not move */
    sent = post_update(cc, 0, 2);
    cc_advance(cc, 31 * LK_SECOND_NS);
    ck_assert_int_eq(cc_status(cc, sent), LK_ERR_TIMEOUT);
    expect_epoch(cc, 0);

    ck_ok(cc_init_transfer(cc)); /* part of the model is enough, whatever came before */
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    ck_ok(update(cc, 1, 1));
    ck_ok(call(cc, UPDATE_VERB_FINISH, NULL));
    expect_epoch(cc, 1);
    ck_assert(!digest_equal(cc->digests[0], cc->digests[1]));
    add_everywhere(cc, 6, 5);
    cc_settle(cc);
    expect_all_length(cc);
    cc_destroy(&cc);
}
END_TEST

/* One rank receives other bytes: nobody flips. */
START_TEST(test_different_contents_are_never_put_in_force)
{
    cc_t *cc = new_cluster(_i, "shadow differs");
    if (cc->config.n_ranks == 1) {
        cc_destroy(&cc);
        return;
    }
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    ck_ok(update(cc, 0, cc->n_tensors));
    /* as if a tensor had come otherwise on rank 1 */
    weight_sink_t sink = weight_table_sink(cc->executors[1]->ops->weights(cc->executors[1]));
    lk_error_t err = LK_ERROR_INIT;
    uint64_t bytes;
    ck_assert(tensor_desc_bytes(&cc->descs[0], &bytes));
    ck_ok(sink.ops->plan(sink.ctx, cc->descs, 1, &err));
    ((float *)cc->data[0])[0] += 1;
    ck_ok(weight_sink_store(&sink, 0, cc->data[0], bytes, &err));
    add_everywhere(cc, 6, 20);
    ck_assert_int_eq(call(cc, UPDATE_VERB_FINISH, NULL), LK_ERR_INVALID);
    expect_epoch(cc, 0);
    cc_settle(cc);
    expect_all_length(cc);
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    ck_ok(update(cc, 0, 1));
    ck_ok(call(cc, UPDATE_VERB_FINISH, NULL));
    expect_epoch(cc, 1);
    cc_destroy(&cc);
}
END_TEST

/* A dense rank loses its peer in the middle of a transfer, and goes on with the old weights. */
START_TEST(test_dense_rank_goes_on_alone)
{
    cc_t *cc = new_cluster(3, "shadow alone");
    ck_ok(call(cc, UPDATE_VERB_START, NULL));
    post_update(cc, 0, cc->n_tensors); /* whose trainer sends nothing */
    cc_settle(cc);
    size_t i = cc_add(cc, 0, 0, 6, 40);
    allreduce_mem_kill(cc->hub, 2);
    cc_call(cc, 0, CMD_RESUME, 0, false, NULL, 1u); /* makes a round */
    for (int k = 0; k < 1000; k++) {
        cc_sweep(cc);
    }
    ck_assert_ptr_null(engine_core_failed(cc->engines[0]));
    ck_assert(!group_updating(engine_core_group(cc->engines[0])));
    ck_assert_int_eq(cc->requests[i].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* ---- random runs: sessions of every kind and fate, with requests and pauses all the while ---- */

typedef struct {
    lk_prng_t prng;
    size_t open; /* the weight call under way, or SIZE_MAX */
    update_verb_t verb;
    int stage; /* of the session: 0 none, 1 started, 2 received */
    bool configured;
    uint64_t committed, failed;
} driver_t;

static void post(cc_t *cc, driver_t *d, update_verb_t verb, const char *spec)
{
    d->verb = verb;
    d->open = cc_call(cc, 0, CMD_UPDATE, verb, false, spec, ~0u);
}

static void post_random_update(cc_t *cc, driver_t *d)
{
    size_t first = lk_prng_below(&d->prng, cc->n_tensors);
    size_t n = 1 + lk_prng_below(&d->prng, cc->n_tensors - first);
    cc_new_values(cc, first, n);
    cc_start_sending(cc, first, n);
    post(cc, d, UPDATE_VERB_UPDATE, cc_update_spec(cc, first, n));
}

/* The next call of the session when the last one is answered. */
static void drive(cc_t *cc, driver_t *d)
{
    if (d->open != SIZE_MAX) {
        if (!answered(cc, d->open)) {
            return;
        }
        lk_status_t status = cc_status(cc, d->open);
        d->open = SIZE_MAX;
        if (d->verb == UPDATE_VERB_FINISH) {
            d->committed += status == LK_OK;
            ck_ok(status);
        }
        d->failed += status != LK_OK;
        d->configured = d->configured && (d->verb != UPDATE_VERB_UPDATE || status == LK_OK);
        d->stage = status != LK_OK || d->verb >= UPDATE_VERB_FINISH ? 0
                   : d->verb == UPDATE_VERB_START                   ? 1
                                                                    : 2;
    }
    if (cc->n_calls >= CC_MAX_CALLS - 24) {
        return;
    }
    if (d->configured && cc->sending) {
        return; /* the trainer still takes in the last acknowledgements */
    }
    if (!d->configured || cc->sender == NULL) { /* a new INIT drops an open session */
        ck_ok(cc_init_transfer(cc));
        d->configured = true;
        d->stage = 0;
    } else if (d->stage == 0) {
        post(cc, d, UPDATE_VERB_START, NULL);
    } else if (d->stage == 1) {
        post_random_update(cc, d);
    } else {
        uint64_t x = lk_prng_below(&d->prng, 6);
        if (x == 0) {
            post(cc, d, UPDATE_VERB_ABORT, NULL);
        } else if (x == 1) {
            post_random_update(cc, d);
        } else {
            post(cc, d, UPDATE_VERB_FINISH, "{\"weight_version\": \"v\"}");
        }
    }
}

static void random_pause(cc_t *cc, driver_t *d)
{
    uint32_t f = cc->config.n_frontends - 1;
    if (f > 0 && cc->n_calls < CC_MAX_CALLS - 24) {
        uint64_t x = lk_prng_below(&d->prng, 6);
        if (x < 3) {
            cc_call(cc, f, CMD_PAUSE, 1 + lk_prng_below(&d->prng, 3), x & 1u, NULL, ~0u);
        } else {
            cc_call(cc, f, CMD_RESUME, 0, false, NULL, ~0u);
        }
    }
}

static uint64_t random_run(uint64_t seed)
{
    driver_t d = {.open = SIZE_MAX};
    lk_prng_seed(&d.prng, seed);
    cc_config_t config = {.n_ranks = 1 + (uint32_t)lk_prng_below(&d.prng, CC_MAX_RANKS),
                          .n_frontends = 1 + (uint32_t)lk_prng_below(&d.prng, CC_MAX_FRONTENDS),
                          .sync_interval = 1 + (uint32_t)lk_prng_below(&d.prng, 6),
                          .moe = lk_prng_below(&d.prng, 2) == 0,
                          .doorbell = lk_prng_below(&d.prng, 2) == 0,
                          .num_blocks = 24 + (uint32_t)lk_prng_below(&d.prng, 60),
                          .shadow = true,
                          .seed = seed};
    cc_t *cc = cc_new(&config);
    for (int i = 0; i < 6000; i++) {
        uint64_t x = lk_prng_below(&d.prng, 1500);
        if (x < 24 && cc->n_requests < CC_MAX_REQUESTS - 8 && cc_unfinished(cc) < 48) {
            cc_add(cc, (uint32_t)lk_prng_below(&d.prng, config.n_frontends),
                   (uint32_t)lk_prng_below(&d.prng, config.n_ranks),
                   1 + (uint32_t)lk_prng_below(&d.prng, 40),
                   1 + (uint32_t)lk_prng_below(&d.prng, 40));
        } else if (x < 30) {
            random_pause(cc, &d);
        } else if (x < 33 && cc->n_requests > 0) {
            cc_abort(cc, lk_prng_below(&d.prng, cc->n_requests));
        } else if (x == 33 && cc->sending) {
            cc_kill_trainer(cc);
        } else {
            drive(cc, &d);
            cc_event(cc);
        }
        cc_note_epoch(cc);
    }
    for (int i = 0; cc_event(cc); i++) {
        ck_assert_int_lt(i, 400000);
        cc_note_epoch(cc);
    }
    size_t resume = cc_call(cc, config.n_frontends - 1, CMD_RESUME, 0, false, NULL, ~0u);
    ck_ok(finish_call(cc, resume));
    if (d.open != SIZE_MAX) {
        (void)!finish_call(cc, d.open);
    }
    cc_settle(cc);
    ck_assert_uint_eq(cc_unfinished(cc), 0);
    for (size_t i = 0; i < cc->n_requests; i++) {
        ck_assert_msg(cc->requests[i].finish != FINISH_ERROR, "seed %llx: %s",
                      (unsigned long long)seed, cc->requests[i].error);
    }
    cc_destroy(&cc);
    return d.committed;
}

START_TEST(test_random_runs)
{
    uint64_t seed = test_seed("random shadow") + (uint64_t)_i * 1000000, committed = 0;
    for (uint64_t i = 0; i < 6; i++) {
        committed += random_run(seed + i);
    }
    ck_assert_uint_gt(committed, 6);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("engine_shadow");
    TCase *tc = tcase_create("directed");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_tokens_flow_during_a_transfer, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_flip_under_keep, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_failures_leave_the_old_weights, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_different_contents_are_never_put_in_force, 0, N_LAYOUTS);
    tcase_add_test(tc, test_dense_rank_goes_on_alone);
    suite_add_tcase(s, tc);
    TCase *random = tcase_create("random");
    tcase_set_timeout(random, 120);
    tcase_add_loop_test(random, test_random_runs, 0, 4);
    suite_add_tcase(s, random);
    return s;
}
