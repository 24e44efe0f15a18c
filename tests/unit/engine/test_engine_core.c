/* Engine cores in one process: generation, pauses and weight updates with every token checked. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/engine/core_cluster.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const cc_config_t layouts[] = {
    {.n_ranks = 1, .n_frontends = 1, .sync_interval = 4, .moe = false, .doorbell = true},
    {.n_ranks = 1, .n_frontends = 2, .sync_interval = 4, .moe = true, .doorbell = true},
    {.n_ranks = 2, .n_frontends = 2, .sync_interval = 4, .moe = true, .doorbell = true},
    {.n_ranks = 3, .n_frontends = 1, .sync_interval = 2, .moe = true, .doorbell = false},
    {.n_ranks = 4, .n_frontends = 2, .sync_interval = 8, .moe = true, .doorbell = true},
    {.n_ranks = 4, .n_frontends = 2, .sync_interval = 4, .moe = false, .doorbell = true},
};
#define N_LAYOUTS (int)LK_ARRAY_LEN(layouts)

static cc_t *new_cluster(int layout, const char *name)
{
    cc_config_t config = layouts[layout];
    config.num_blocks = 128;
    config.seed = test_seed(name) + (uint64_t)layout;
    return cc_new(&config);
}

static void add_everywhere(cc_t *cc, uint32_t n_prompt, uint32_t max_tokens)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        cc_add(cc, r % cc->config.n_frontends, r, n_prompt + r, max_tokens + r);
    }
}

static uint32_t n_output(const cc_request_t *r)
{
    return r->n_tokens - r->n_prompt;
}

/* Runs until request i has at least n tokens. */
static void run_until(cc_t *cc, size_t i, uint32_t n)
{
    for (int k = 0; n_output(&cc->requests[i]) < n; k++) {
        ck_assert_int_lt(k, 100000);
        ck_assert(cc_event(cc));
    }
}

static void expect_all_length(const cc_t *cc)
{
    for (size_t i = 0; i < cc->n_requests; i++) {
        ck_assert_msg(cc->requests[i].finish == FINISH_LENGTH, "request %zu: finish %d %s", i,
                      cc->requests[i].finish, cc->requests[i].error);
    }
}

/* No request is left, so no block is held. */
static void expect_kv_free(const cc_t *cc)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert_uint_eq(kv_cache_used(engine_core_kv(cc->engines[r])), 0);
    }
}

START_TEST(test_generate)
{
    cc_t *cc = new_cluster(_i, "generate");
    cc_settle(cc);
    ck_assert_uint_eq(cc_steps(cc), 0);
    for (int k = 0; k < 5; k++) {
        add_everywhere(cc, 3 + (uint32_t)k * 5, 6);
    }
    cc_settle(cc);
    expect_all_length(cc);
    expect_kv_free(cc);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert(!group_run(engine_core_group(cc->engines[r])) || !cc->config.moe ||
                  cc->config.n_ranks == 1);
        if (cc->config.moe) { /* the same number of steps on every rank */
            ck_assert_uint_eq(engine_core_steps(cc->engines[r]), engine_core_steps(cc->engines[0]));
        }
    }
    uint64_t steps = cc_steps(cc);
    cc_advance(cc, 3 * LK_SECOND_NS);
    ck_assert_uint_eq(cc_steps(cc), steps); /* idle is idle */
    ck_assert_uint_ge(cc->heartbeats, 3 * cc->config.n_ranks);
    cc_destroy(&cc);
}
END_TEST

/* One rank has work, the others run dummy steps. */
START_TEST(test_dummy_steps)
{
    cc_t *cc = new_cluster(2, "dummy");
    cc_add(cc, 0, 1, 5, 9);
    cc_settle(cc);
    expect_all_length(cc);
    ck_assert_uint_eq(engine_core_steps(cc->engines[0]), engine_core_dummy_steps(cc->engines[0]));
    ck_assert_uint_lt(engine_core_dummy_steps(cc->engines[1]), cc->config.sync_interval);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_pause_keep)
{
    for (int clear = 0; clear < 2; clear++) {
        cc_t *cc = new_cluster(_i, "keep");
        add_everywhere(cc, 6, 40);
        run_until(cc, 0, 5);
        ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, clear, NULL));
        ck_assert_uint_gt(cc_unfinished(cc), 0);
        uint64_t steps = cc_steps(cc);
        uint32_t used = kv_cache_used(engine_core_kv(cc->engines[0]));
        ck_assert_int_eq(used == 0, clear);
        cc_add(cc, 0, 0, 4, 3);
        cc_settle(cc);
        ck_assert_uint_eq(cc_steps(cc), steps);
        ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
        expect_all_length(cc);
        ck_assert_uint_eq(cc->requests[0].n_snapshots, clear ? 2 : 1);
        cc_destroy(&cc);
    }
}
END_TEST

/* The answer says that the command was received. */
START_TEST(test_answer_saves_the_receipt)
{
    cc_t *cc = new_cluster(1, "receipt");
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    for (size_t i = 0; i < 2; i++) {
        ck_assert_uint_eq(cc->calls[i].done, 1);
        ck_assert_uint_eq(cc->calls[i].seen, 0);
    }
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_pause_abort_and_wait)
{
    cc_t *cc = new_cluster(_i, "abort");
    add_everywhere(cc, 6, 100);
    run_until(cc, 0, 5);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_ABORT, true, NULL));
    for (size_t i = 0; i < cc->n_requests; i++) {
        ck_assert_int_eq(cc->requests[i].finish, FINISH_ABORT);
    }
    ck_assert_uint_ge(n_output(&cc->requests[0]), 5); /* partial tokens */
    expect_kv_free(cc);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));

    size_t first = cc->n_requests;
    add_everywhere(cc, 6, 12);
    run_until(cc, first, 2);
    size_t call = cc_call(cc, 0, CMD_PAUSE, PAUSE_WAIT, true, NULL, ~0u);
    cc_run(cc, 20);
    size_t late = cc_add(cc, 0, 0, 7, 3);
    cc_settle(cc);
    ck_ok(cc_status(cc, call));
    json_t *body = json_loads(cc->calls[call].body[0], 0, NULL);
    ck_assert_uint_eq((uint64_t)json_integer_value(json_object_get(body, "steps")),
                      engine_core_steps(cc->engines[0]));
    json_decref(body);
    ck_assert_int_eq(cc->requests[first].finish, FINISH_LENGTH);
    uint64_t steps = cc_steps(cc);
    cc_advance(cc, LK_SECOND_NS);
    ck_assert_uint_eq(cc_steps(cc), steps);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    ck_assert_int_eq(cc->requests[late].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* The caller's deadline: a call that reached some ranks only is rolled back; nothing was lost. */
START_TEST(test_partial_pause)
{
    cc_t *cc = new_cluster(_i, "partial");
    if (cc->config.n_ranks > 1) {
        add_everywhere(cc, 6, 30);
        size_t pause = cc_call(cc, 0, CMD_PAUSE, PAUSE_ABORT, true, NULL, 1u);
        cc_settle(cc);
        expect_all_length(cc);
        ck_assert_uint_eq(cc->calls[pause].seen, 1u);
        ck_assert_uint_eq(cc->calls[pause].done, 0);
        cc_advance(cc, LK_SECOND_NS); /* the next report is up to 100 ms away */
        ck_assert(cc->load[0].paused_local && !cc->load[0].paused);
        size_t cancel = cc_call(cc, 0, CMD_CANCEL, cc->calls[pause].number, false, NULL, 1u);
        cc_settle(cc);
        cc_resend(cc, pause, CMD_PAUSE, PAUSE_ABORT, true, ~1u);
        cc_resend(cc, cancel, CMD_CANCEL, cc->calls[pause].number, false, ~1u);
        cc_settle(cc);
        ck_ok(cc_status(cc, cancel));
        cc_add(cc, 0, 0, 4, 4);
        cc_settle(cc);
        expect_all_length(cc);
    }
    cc_destroy(&cc);
}
END_TEST

/* An answer that was lost is given again, word for word. */
START_TEST(test_repeated_commands)
{
    cc_t *cc = new_cluster(_i, "repeat");
    size_t call = cc_call(cc, 0, CMD_PAUSE, PAUSE_KEEP, false, NULL, ~0u);
    cc_settle(cc);
    ck_ok(cc_status(cc, call));
    uint64_t round = group_round(engine_core_group(cc->engines[0]));
    cc_resend(cc, call, CMD_PAUSE, PAUSE_KEEP, false, ~0u);
    cc_resend(cc, call, CMD_PAUSE, PAUSE_KEEP, false, ~0u);
    cc_settle(cc);
    ck_assert_uint_eq(cc->calls[call].repeats, 2 * cc->config.n_ranks);
    ck_assert_uint_eq(group_round(engine_core_group(cc->engines[0])), round);
    cc_destroy(&cc);
}
END_TEST

/* ---- weight updates ---- */

/* Nobody pauses: the session gates the steps itself, and frozen requests recompute their KV. */
START_TEST(test_update_without_pause)
{
    cc_t *cc = new_cluster(_i, "update");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 60);
    run_until(cc, 0, 7);
    ck_ok(cc_session(cc, "step-1"));
    expect_all_length(cc);
    const cc_request_t *r = &cc->requests[0];
    ck_assert_str_eq(r->version, "step-1");
    ck_assert_uint_eq(r->n_weight_spans, 2);
    ck_assert_uint_eq(r->n_snapshots, 2);
    ck_assert_uint_eq(r->n_kv_spans, 1); /* all of it recomputed under the new weights */
    ck_assert_uint_eq(r->kv_spans[0].epoch, 1);
    /* cached prefixes of the old weights match nothing */
    size_t again = cc_add(cc, 0, 0, 6, 4);
    cc_settle(cc);
    ck_assert_uint_eq(cc->requests[again].epochs[0], 1);
    cc_destroy(&cc);
}
END_TEST

/* A user's keep pause with clear_cache=false: the KV stays, and stays mixed. */
START_TEST(test_update_under_keep)
{
    cc_t *cc = new_cluster(_i, "under keep");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 60);
    run_until(cc, 0, 7);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(cc_session(cc, "a"));
    ck_ok(cc_session(cc, "b"));
    ck_assert_uint_gt(cc_unfinished(cc), 0); /* the session's end lifts no pause */
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    expect_all_length(cc);
    const cc_request_t *r = &cc->requests[0];
    ck_assert_uint_eq(r->n_snapshots, 1);
    ck_assert_uint_eq(r->n_weight_spans, 2);
    ck_assert_uint_eq(r->weight_spans[1].epoch, 2);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_update_in_parts)
{
    cc_t *cc = new_cluster(_i, "parts");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 30);
    run_until(cc, 0, 3);
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    size_t half = cc->n_tensors / 2;
    ck_ok(cc_update(cc, 0, half));
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL)); /* opens no gate */
    ck_assert_uint_gt(cc_unfinished(cc), 0);
    ck_ok(cc_update(cc, half, cc->n_tensors - half));
    ck_ok(cc_finish(cc, "parts"));
    expect_all_length(cc);
    /* part of the model is an update too, when nothing was broken before */
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_ok(cc_update(cc, 1, 1));
    ck_ok(cc_finish(cc, "part"));
    cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    expect_all_length(cc);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_dirty_and_repair)
{
    cc_t *cc = new_cluster(_i, "dirty");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 60);
    run_until(cc, 0, 3);
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_ok(cc_update(cc, 0, 2));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_ABORT, false, NULL));
    for (size_t i = 0; i < cc->n_requests; i++) { /* frozen ones end, and say why */
        ck_assert_int_eq(cc->requests[i].finish, FINISH_ERROR);
        ck_assert_int_eq(cc->requests[i].error_status, LK_ERR_UNAVAILABLE);
        ck_assert_ptr_nonnull(strstr(cc->requests[i].error, "aborted"));
    }
    size_t refused = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[refused].error_status, LK_ERR_UNAVAILABLE);
    cc_utility(cc, "weight_info", "");
    json_t *info = json_loads(cc->utility[0], 0, NULL);
    ck_assert(json_is_true(json_object_get(info, "dirty")));
    ck_assert_str_eq(json_string_value(json_object_get(info, "state")), "dirty");
    json_decref(info);

    /* part of the model does not repair it, and the refusal names what is missing */
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_ok(cc_update(cc, 1, cc->n_tensors - 1));
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_FINISH, false, NULL), LK_ERR_STATE);
    ck_assert_ptr_nonnull(strstr(cc->calls[cc->n_calls - 1].text[0], cc->descs[0].name));
    ck_ok(cc_update(cc, 0, 1));
    ck_ok(cc_finish(cc, "repaired"));
    size_t served = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[served].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* The trainer dies in the middle: an error, dirty, and a new session repairs it. */
START_TEST(test_trainer_dies)
{
    cc_t *cc = new_cluster(_i, "dies");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    cc_start_sending(cc, 0, cc->n_tensors);
    size_t call = cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_UPDATE, false,
                          cc_update_spec(cc, 0, cc->n_tensors), ~0u);
    for (int i = 0; sender_bytes(cc->sender) == 0; i++) {
        ck_assert_int_lt(i, 10000);
        cc_sweep(cc);
    }
    cc_kill_trainer(cc);
    cc_settle(cc);
    ck_assert_int_eq(cc_status(cc, call), LK_ERR_PEER);
    ck_assert_uint_eq(group_weights(engine_core_group(cc->engines[0]))->gates, GATE_DIRTY);
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL), LK_ERR_STATE);
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_session(cc, "again"));
    cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    expect_all_length(cc);
    cc_destroy(&cc);
}
END_TEST

/* The trainer stays silent: the no-progress deadline; untouched weights stay good. */
START_TEST(test_trainer_is_silent)
{
    cc_t *cc = new_cluster(_i, "silent");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    size_t call =
        cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_UPDATE, false, cc_update_spec(cc, 0, 2), ~0u);
    cc_settle(cc);
    ck_assert_uint_eq(cc->calls[call].done, 0);
    cc_utility(cc, "weight_info", ""); /* answered meanwhile */
    json_t *info = json_loads(cc->utility[0], 0, NULL);
    ck_assert_str_eq(json_string_value(json_object_get(info, "state")), "updating");
    json_decref(info);
    cc_advance(cc, 31 * LK_SECOND_NS);
    ck_assert_int_eq(cc_status(cc, call), LK_ERR_TIMEOUT);
    ck_assert_uint_eq(group_weights(engine_core_group(cc->engines[0]))->gates, 0);
    cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    expect_all_length(cc);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_session_expires)
{
    cc_t *cc = new_cluster(_i, "expires");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 20);
    run_until(cc, 0, 2);
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    cc_advance(cc, 29 * LK_SECOND_NS);
    ck_assert_uint_eq(group_weights(engine_core_group(cc->engines[0]))->gates, GATE_SESSION);
    cc_advance(cc, 2 * LK_SECOND_NS);
    ck_assert_uint_eq(group_weights(engine_core_group(cc->engines[0]))->gates, 0);
    expect_all_length(cc);
    ck_assert_uint_eq(cc->requests[0].n_snapshots, 1); /* nothing changed, nothing recomputed */
    ck_ok(cc_session(cc, "later"));                    /* and the next one works */
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_cancel_update)
{
    cc_t *cc = new_cluster(_i, "cancel");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    size_t call =
        cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_UPDATE, false, cc_update_spec(cc, 0, 2), ~0u);
    cc_settle(cc);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        msg_t msg = {.type = MSG_CANCEL_UPDATE};
        msg.cancel_update = (msg_cancel_update_t){.client = 0, .why = msg_str("the caller left")};
        cc_send(cc, 0, r, &msg);
    }
    cc_settle(cc);
    ck_assert_int_eq(cc_status(cc, call), LK_ERR_CANCELED);
    ck_assert_str_eq(cc->calls[call].text[0], "the caller left");
    ck_assert_uint_eq(group_weights(engine_core_group(cc->engines[0]))->gates, 0);
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_session(cc, "after"));
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_refused_updates)
{
    cc_t *cc = new_cluster(_i, "refused");
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_INIT, false, "{\"init_info\": {\"x\": 1}}"),
                     LK_ERR_INVALID);
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_UPDATE, false, "{}"), LK_ERR_STATE);
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_UPDATE, false,
                           "{\"update_info\": {\"names\": [\"no.such.tensor\"], \"dtype_names\": "
                           "[\"float32\"], \"shapes\": [[2]]}}"),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(cc->calls[cc->n_calls - 1].text[0], "no.such.tensor"));
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_FINISH, false, "{\"weight_version\": 7}"),
                     LK_ERR_INVALID);
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_ABORT, false, NULL));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_SET_VERSION, false, "{\"new_version\": \"named\"}"));
    size_t i = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_str_eq(cc->requests[i].version, "named");
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_not_configured)
{
    cc_config_t config = layouts[2];
    config.num_blocks = 64;
    config.no_transfer = true;
    config.seed = test_seed("not configured");
    cc_t *cc = cc_new(&config);
    for (update_verb_t verb = UPDATE_VERB_INIT; verb <= UPDATE_VERB_ABORT; verb++) {
        ck_assert_int_eq(cc_do(cc, CMD_UPDATE, verb, false, NULL), LK_ERR_STATE);
        ck_assert_str_eq(cc->calls[cc->n_calls - 1].text[0],
                         "Weight transfer not configured. Please set weight_transfer_config to "
                         "enable weight transfer.");
    }
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_SET_VERSION, false, "{\"new_version\": \"x\"}"));
    cc_destroy(&cc);
}
END_TEST

/* What may take long is announced before, and taken back after: nobody takes a rank for dead. */
START_TEST(test_long_work_is_announced)
{
    cc_t *cc = new_cluster(_i, "announced");
    ck_ok(cc_init_transfer(cc));
    ck_assert_uint_eq(cc->silences, 0);
    ck_ok(cc_session(cc, "v"));
    add_everywhere(cc, 4, 4);
    cc_settle(cc);
    ck_assert_uint_eq(cc->silences, 2 * cc->config.n_ranks); /* the commit, and the step after it */
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert_uint_eq(cc->silence_ms[r], 0);
    }
    cc_destroy(&cc);
}
END_TEST

/* ---- trouble ---- */

START_TEST(test_dead_peer)
{
    cc_t *cc = new_cluster(2, "dead");
    add_everywhere(cc, 6, 100);
    run_until(cc, 0, 5);
    allreduce_mem_kill(cc->hub, 1);
    ep_mem_kill(cc->ep, 1);
    for (int i = 0; engine_core_left(cc->engines[0]) == NULL; i++) {
        ck_assert_int_lt(i, 10000);
        engine_core_step(cc->engines[0]);
        for (uint32_t to = 0; to < 2; to++) {
            if (allreduce_mem_in_flight(cc->hub, 0, to)) {
                allreduce_mem_deliver(cc->hub, 0, to);
            }
        }
    }
    ck_assert_ptr_null(engine_core_failed(cc->engines[0]));
    ck_assert_ptr_nonnull(strstr(cc->left[0], "rank 1"));
    ck_assert_ptr_nonnull(strstr(cc->requests[0].error, "rank 1"));
    ck_assert_int_eq(cc->requests[0].finish, FINISH_ERROR);
    ck_assert_int_eq(cc->requests[0].error_status, LK_ERR_UNAVAILABLE);
    cc_destroy(&cc);
}
END_TEST

/* A rank that takes no part any more: named first, given up later. */
START_TEST(test_watchdog)
{
    cc_t *cc = new_cluster(4, "watchdog");
    msg_t msg = {.type = MSG_CMD};
    msg.cmd = (msg_cmd_t){
        .client = 0, .generation = 1, .number = 1, .kind = CMD_RESUME, .group_epoch = 3};
    engine_core_on_message(cc->engines[0], 0, &msg);
    cc->next_number[0] = 2;
    for (int i = 0; i < 59; i++) {
        engine_core_step(cc->engines[0]);
        cc->now_ns += LK_SECOND_NS;
    }
    ck_assert_ptr_null(engine_core_left(cc->engines[0]));
    cc->now_ns += 2 * LK_SECOND_NS;
    engine_core_step(cc->engines[0]);
    ck_assert_ptr_nonnull(engine_core_left(cc->engines[0]));
    ck_assert_ptr_nonnull(strstr(cc->left[0], "rank 1, 2, 3 took no part in round"));
    cc_destroy(&cc);
}
END_TEST

static void send_add(cc_t *cc, msg_add_t add)
{
    cc->n_requests++;
    cc_request_t *r = &cc->requests[cc->n_requests - 1];
    *r = (cc_request_t){.frontend = 0, .rank = 0};
    msg_t msg = {.type = MSG_ADD, .add = add};
    msg.add.handle = cc->n_requests;
    cc_send(cc, 0, 0, &msg);
}

START_TEST(test_bad_requests)
{
    cc_t *cc = new_cluster(_i, "bad");
    static uint32_t ids[300];
    for (size_t i = 0; i < 300; i++) {
        ids[i] = 5;
    }
    static const uint32_t outside[] = {5, 97};
    msg_sampling_t fine = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 4, .logprobs = -1};
    msg_add_t good = {.sampling = fine, .prompt = {ids, 16}};
    msg_add_t bad[12];
    for (size_t i = 0; i < 12; i++) {
        bad[i] = good;
    }
    bad[0].prompt.len = 0;
    bad[1].prompt.len = 7;
    bad[2].prompt = (msg_bin_t){ids, sizeof ids};
    bad[3].prompt = (msg_bin_t){outside, sizeof outside};
    bad[4].sampling.temperature = NAN;
    bad[5].sampling.top_p = 1.5;
    bad[6].sampling.logprobs = INT64_MAX;
    bad[7].sampling.stop_token_ids = (msg_bin_t){ids, sizeof ids};
    bad[8].sampling.stop_token_ids = (msg_bin_t){ids, 3};
    bad[9].sampling.max_tokens = 0;
    bad[10].sampling.repetition_penalty = -1;
    bad[11].sampling.min_p = INFINITY;
    for (size_t i = 0; i < 12; i++) {
        send_add(cc, bad[i]);
    }
    cc_settle(cc);
    for (size_t i = 0; i < 12; i++) {
        ck_assert_msg(cc->requests[i].finish == FINISH_ERROR &&
                          cc->requests[i].error_status == LK_ERR_INVALID &&
                          cc->requests[i].error[0] != '\0',
                      "bad request %zu", i);
    }
    ck_assert_uint_eq(cc_steps(cc), 0);
    size_t ok = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[ok].finish, FINISH_LENGTH);
    /* messages that are none of an engine's, or of another front end */
    msg_t msg = {.type = MSG_STATS};
    cc_send(cc, 0, 0, &msg);
    msg = (msg_t){.type = MSG_ABORT};
    msg.abort.client = 77;
    cc_send(cc, 0, 0, &msg);
    msg = (msg_t){.type = MSG_CMD};
    msg.cmd = (msg_cmd_t){.client = 0,
                          .generation = 1,
                          .number = 1,
                          .kind = CMD_PAUSE,
                          .mode = PAUSE_KEEP,
                          .group_epoch = 99};
    cc_send(cc, 0, 0, &msg);
    cc_settle(cc);
    ck_assert(!pause_is_paused(group_pause(engine_core_group(cc->engines[0]))));
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_abort_request)
{
    cc_t *cc = new_cluster(_i, "abort request");
    size_t a = cc_add(cc, 0, 0, 6, 150), b = cc_add(cc, 0, 0, 9, 20);
    run_until(cc, a, 3);
    cc_abort(cc, a);
    cc_abort(cc, a);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[a].finish, FINISH_ABORT);
    ck_assert_int_eq(cc->requests[b].finish, FINISH_LENGTH);
    expect_kv_free(cc);
    cc_destroy(&cc);
}
END_TEST

/* What ended before the label changed, and was not sent yet, says the label that it had. */
START_TEST(test_abort_meets_a_new_label)
{
    cc_t *cc = new_cluster(0, "new label");
    ck_assert_uint_eq(cc->config.n_ranks, 1);
    engine_core_t *engine = cc->engines[0];
    size_t a = cc_add(cc, 0, 0, 6, 150);
    run_until(cc, a, 3);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));

    static const char spec[] = "{\"new_version\": \"another\"}";
    size_t call = cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_SET_VERSION, false, spec, 0); /* by hand */
    msg_t msg = {.type = MSG_CMD, .generation = cc->generation[0]};
    msg.cmd = (msg_cmd_t){.generation = cc->generation[0],
                          .number = cc->calls[call].number,
                          .kind = CMD_UPDATE,
                          .verb = UPDATE_VERB_SET_VERSION,
                          .spec = {spec, sizeof spec - 1},
                          .group_epoch = 3};
    engine_core_on_message(engine, 0, &msg);
    engine_core_step(engine); /* the vote is out */
    ck_assert(group_posted(engine_core_group(engine)));
    msg_handle_t handle = {a + 1};
    msg = (msg_t){.type = MSG_ABORT, .generation = cc->generation[0]};
    msg.abort.handles.items = &handle;
    msg.abort.handles.count = 1;
    engine_core_on_message(engine, 0, &msg);
    engine_core_step(engine); /* the label changes */
    ck_assert_str_eq(group_weights(engine_core_group(engine))->version, "another");
    ck_assert_int_eq(cc->requests[a].finish, FINISH_ABORT);
    ck_assert_str_eq(cc->requests[a].span_version, "default");
    cc_destroy(&cc);
}
END_TEST

/* Labels are kept for as long as a request refers to their epoch, and no longer. */
START_TEST(test_labels_of_a_long_request)
{
    cc_t *cc = new_cluster(0, "labels");
    ck_ok(cc_init_transfer(cc));
    size_t a = cc_add(cc, 0, 0, 6, 200);
    char version[32];
    for (int i = 0; i < 12; i++) {
        run_until(cc, a, 3 * (uint32_t)(i + 1));
        ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, true, NULL));
        snprintf(version, sizeof version, "v%d", i);
        ck_ok(cc_session(cc, version));
        cc_call(cc, 0, CMD_RESUME, 0, false, NULL, ~0u);
    }
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[a].finish, FINISH_LENGTH);
    ck_assert_str_eq(cc->requests[a].span_version, "default");
    ck_assert_str_eq(cc->requests[a].version, version);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_paused_admission_reject)
{
    cc_config_t config = layouts[2];
    config.num_blocks = 64;
    config.reject_while_paused = true;
    config.seed = test_seed("reject");
    cc_t *cc = cc_new(&config);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    size_t i = cc_add(cc, 0, 1, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[i].error_status, LK_ERR_UNAVAILABLE);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    i = cc_add(cc, 0, 1, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[i].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* A front end's new life: the old one's requests are forgotten, its numbers start anew. */
START_TEST(test_frontend_restart)
{
    cc_t *cc = new_cluster(_i, "restart");
    size_t old = cc_add(cc, 0, 0, 6, 150);
    run_until(cc, old, 3);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    cc->generation[0] = 2;
    cc->next_number[0] = 1;
    cc->n_calls = 0;
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    ck_assert_int_eq(cc->requests[old].finish, FINISH_NONE);
    expect_kv_free(cc);
    size_t i = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[i].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* A gap in what a front end says is reported to it, once. */
START_TEST(test_lost_messages_are_reported)
{
    cc_t *cc = new_cluster(_i, "lost");
    for (uint64_t n = 1; n <= 6; n++) {
        msg_t msg = {.type = MSG_HEARTBEAT, .sequence = n};
        if (n == 3 || n == 4) {
            continue;
        }
        ck_assert_uint_eq(cc->missed[0], n > 5);
        cc_send(cc, 0, 0, &msg);
        cc_settle(cc);
    }
    ck_assert_uint_eq(cc->missed[0], 1);
    cc->generation[0] = 2; /* a new life whose first message is missing */
    msg_t msg = {.type = MSG_HEARTBEAT, .sequence = 2};
    cc_send(cc, 0, 0, &msg);
    cc_settle(cc);
    ck_assert_uint_eq(cc->missed[0], 2);
    /* and a front end can see what it misses */
    uint64_t beats = cc->beats[0];
    cc_advance(cc, 10 * LK_SECOND_NS);
    cc_settle(cc);
    ck_assert_uint_gt(cc->beats[0], beats);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_utilities)
{
    cc_t *cc = new_cluster(_i, "utilities");
    static const char *const methods[] = {"weight_info", "is_paused", "reset_prefix_cache",
                                          "status"};
    for (size_t m = 0; m < 4; m++) {
        cc_utility(cc, methods[m], "");
        for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
            ck_ok(cc->utility_status[r]);
            json_t *body = json_loads(cc->utility[r], JSON_REJECT_DUPLICATES, NULL);
            ck_assert_msg(json_is_object(body), "%s: %s", methods[m], cc->utility[r]);
            json_decref(body);
        }
    }
    cc_utility(cc, "format_disk", "");
    ck_assert_int_eq(cc->utility_status[0], LK_ERR_NOT_FOUND);
    cc_destroy(&cc);
}
END_TEST

/* Blocks that requests hold are not reset, unless those requests are to compute them again. */
START_TEST(test_reset_of_running_requests)
{
    cc_t *cc = new_cluster(_i, "reset");
    add_everywhere(cc, 6, 40);
    run_until(cc, 0, 5);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    cc_settle(cc);
    uint32_t before = cc->requests[0].n_snapshots;
    cc_utility(cc, "reset_prefix_cache", "{}");
    ck_assert_str_eq(cc->utility[0], "{\"success\": false}");
    cc_utility(cc, "reset_prefix_cache", "{\"reset_running_requests\":true}");
    ck_assert_str_eq(cc->utility[0], "{\"success\": true}");
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    expect_all_length(cc);
    ck_assert_uint_eq(cc->requests[0].n_snapshots, before + 1);
    cc_destroy(&cc);
}
END_TEST

/* What /metrics shows of pauses, votes and transfers. */
START_TEST(test_reported_figures)
{
    cc_t *cc = new_cluster(_i, "figures");
    ck_ok(cc_init_transfer(cc));
    add_everywhere(cc, 6, 40);
    run_until(cc, 0, 5);
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    cc_advance(cc, 3 * LK_SECOND_NS);
    cc_settle(cc);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) { /* an open window counts */
        ck_assert_uint_eq(cc->load[r].pauses, 1);
        ck_assert_uint_ge(cc->load[r].paused_ns, 2 * LK_SECOND_NS); /* as of the last report */
        ck_assert_uint_eq(cc->load[r].last_pause_ns, cc->load[r].paused_ns);
    }
    ck_ok(cc_session(cc, "a"));
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    expect_all_length(cc);
    cc_advance(cc, 2 * LK_SECOND_NS); /* the newest report is out */
    cc_settle(cc);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        const msg_load_t *l = &cc->load[r];
        ck_assert_uint_eq(l->pauses, 2);
        ck_assert_uint_lt(l->last_pause_ns, l->paused_ns);
        ck_assert_uint_ge(l->paused_ns, 3 * LK_SECOND_NS);
        ck_assert_uint_eq(l->votes, l->round); /* every round has the votes of all */
        ck_assert_uint_eq(l->updates, 1);
        ck_assert_uint_eq(l->updates_failed, 0);
        ck_assert_uint_eq(l->update_tensors, cc->n_tensors);
        ck_assert_uint_gt(l->update_bytes, 4 * cc->n_tensors);
        ck_assert_uint_eq(l->kv_blocks, 128);
        ck_assert_uint_gt(l->block_size, 0);
    }
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_drain)
{
    cc_t *cc = new_cluster(_i, "drain");
    add_everywhere(cc, 6, 20);
    run_until(cc, 0, 2);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        engine_core_begin_drain(cc->engines[r]);
    }
    size_t late = cc_add(cc, 0, 0, 5, 5);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[late].error_status, LK_ERR_UNAVAILABLE);
    ck_assert_int_eq(cc->requests[0].finish, FINISH_LENGTH);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert(engine_core_drained(cc->engines[r]));
    }
    cc_destroy(&cc);
}
END_TEST

/* ---- random runs ---- */

static void random_call(cc_t *cc)
{
    if (cc->n_calls >= CC_MAX_CALLS - 16) {
        return;
    }
    uint32_t f = (uint32_t)lk_prng_below(&cc->prng, cc->config.n_frontends);
    uint64_t x = lk_prng_below(&cc->prng, 10);
    if (x < 5) {
        cc_call(cc, f, CMD_PAUSE, 1 + lk_prng_below(&cc->prng, 3), x & 1u, NULL, ~0u);
    } else if (x < 9) {
        cc_call(cc, f, CMD_RESUME, 0, false, NULL, ~0u);
    } else if (cc->next_number[f] > 1) {
        cc_call(cc, f, CMD_CANCEL, cc->next_number[f] - 1, false, NULL, ~0u);
    }
}

static void random_run(uint64_t seed)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, seed);
    cc_config_t config = {.n_ranks = 1 + (uint32_t)lk_prng_below(&prng, CC_MAX_RANKS),
                          .n_frontends = 1 + (uint32_t)lk_prng_below(&prng, CC_MAX_FRONTENDS),
                          .sync_interval = 1 + (uint32_t)lk_prng_below(&prng, 6),
                          .moe = lk_prng_below(&prng, 2) == 0,
                          .doorbell = lk_prng_below(&prng, 2) == 0,
                          .num_blocks = 24 + (uint32_t)lk_prng_below(&prng, 60),
                          .seed = seed};
    cc_t *cc = cc_new(&config);
    ck_ok(cc_init_transfer(cc));
    uint64_t sessions = 0;
    for (int i = 0; i < 700; i++) {
        uint64_t x = lk_prng_below(&prng, 200);
        if (x < 12 && cc->n_requests < CC_MAX_REQUESTS - 8) {
            cc_add(cc, (uint32_t)lk_prng_below(&prng, config.n_frontends),
                   (uint32_t)lk_prng_below(&prng, config.n_ranks),
                   1 + (uint32_t)lk_prng_below(&prng, 40), 1 + (uint32_t)lk_prng_below(&prng, 25));
        } else if (x < 17) {
            random_call(cc);
        } else if (x == 17 && cc->n_requests > 0) {
            cc_abort(cc, lk_prng_below(&prng, cc->n_requests));
        } else if (x == 18 && sessions < 4) {
            char version[16];
            snprintf(version, sizeof version, "v%d", (int)++sessions);
            ck_ok(cc_session(cc, version));
        } else {
            cc_event(cc);
        }
    }
    cc_settle(cc);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    ck_assert_uint_eq(cc_unfinished(cc), 0);
    expect_kv_free(cc);
    for (size_t i = 0; i < cc->n_calls; i++) {
        cc_status(cc, i);
    }
    cc_destroy(&cc);
}

START_TEST(test_random_runs)
{
    uint64_t seed = test_seed("random cores") + (uint64_t)_i * 1000000;
    for (uint64_t i = 0; i < 60; i++) {
        random_run(seed + i);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("engine_core");
    TCase *tc = tcase_create("directed");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_generate, 0, N_LAYOUTS);
    tcase_add_test(tc, test_dummy_steps);
    tcase_add_loop_test(tc, test_pause_keep, 0, N_LAYOUTS);
    tcase_add_test(tc, test_answer_saves_the_receipt);
    tcase_add_loop_test(tc, test_pause_abort_and_wait, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_partial_pause, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_repeated_commands, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_update_without_pause, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_update_under_keep, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_update_in_parts, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_dirty_and_repair, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_trainer_dies, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_trainer_is_silent, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_session_expires, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_cancel_update, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_refused_updates, 0, N_LAYOUTS);
    tcase_add_test(tc, test_not_configured);
    tcase_add_loop_test(tc, test_long_work_is_announced, 0, N_LAYOUTS);
    tcase_add_test(tc, test_dead_peer);
    tcase_add_test(tc, test_watchdog);
    tcase_add_loop_test(tc, test_bad_requests, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_abort_request, 0, N_LAYOUTS);
    tcase_add_test(tc, test_abort_meets_a_new_label);
    tcase_add_test(tc, test_labels_of_a_long_request);
    tcase_add_test(tc, test_paused_admission_reject);
    tcase_add_loop_test(tc, test_frontend_restart, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_lost_messages_are_reported, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_utilities, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_reset_of_running_requests, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_reported_figures, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_drain, 0, N_LAYOUTS);
    suite_add_tcase(s, tc);
    TCase *random = tcase_create("random");
    tcase_set_timeout(random, 120);
    tcase_add_loop_test(random, test_random_runs, 0, 4);
    suite_add_tcase(s, random);
    return s;
}
