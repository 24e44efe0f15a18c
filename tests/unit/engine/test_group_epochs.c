/* Deaths and new group epochs of engine cores in one process: what ends, what goes on, who holds
 * what, and what opens the group again. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/engine/core_cluster.h"

#include <stdlib.h>
#include <string.h>

static const cc_config_t moe = {
    .n_ranks = 3, .n_frontends = 2, .sync_interval = 4, .moe = true, .doorbell = true};
static const cc_config_t moe_no_doorbell = {
    .n_ranks = 3, .n_frontends = 1, .sync_interval = 2, .moe = true, .doorbell = false};
static const cc_config_t dense = {
    .n_ranks = 3, .n_frontends = 2, .sync_interval = 4, .moe = false, .doorbell = true};
static const cc_config_t *const layouts[] = {&moe, &moe_no_doorbell, &dense};
#define N_LAYOUTS (int)LK_ARRAY_LEN(layouts)

static cc_t *new_cluster(const cc_config_t *layout, const char *name)
{
    cc_config_t config = *layout;
    config.num_blocks = 128;
    config.seed = test_seed(name);
    return cc_new(&config);
}

static void add_everywhere(cc_t *cc, uint32_t max_tokens)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        cc_add(cc, r % cc->config.n_frontends, r, 5 + r, max_tokens);
    }
}

/* One request on this rank; how it ends. */
static finish_reason_t ask(cc_t *cc, uint32_t rank)
{
    size_t i = cc_add(cc, 0, rank, 6, 4);
    cc_settle(cc);
    return cc->requests[i].finish;
}

static void expect_serves(cc_t *cc, bool yes)
{
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert_int_eq(ask(cc, r), yes ? FINISH_LENGTH : FINISH_ERROR);
    }
}

static const weight_state_t *weights(const cc_t *cc, uint32_t rank)
{
    return group_weights(engine_core_group(cc->engines[rank]));
}

/* ---- no update was made ---- */

START_TEST(test_group_opens_by_itself)
{
    cc_t *cc = new_cluster(layouts[_i], "opens");
    for (unsigned mask = 1; mask < 8; mask++) { /* any ranks, also all */
        size_t first = cc->n_requests;
        add_everywhere(cc, 60);
        cc_run(cc, 200);
        cc_kill(cc, mask, "rank x closed its mesh connection");
        for (size_t i = first; i < cc->n_requests; i++) {
            const cc_request_t *r = &cc->requests[i];
            bool ends = cc->config.moe || (mask >> r->rank & 1);
            if (ends && r->finish != FINISH_LENGTH) {
                ck_assert_int_eq(r->finish, FINISH_ERROR);
                ck_assert_int_eq(r->error_status, LK_ERR_UNAVAILABLE);
                ck_assert(r->error[0] == '\0' || strstr(r->error, "rank x closed") != NULL);
            }
        }
        cc_form(cc, 0);
        cc_settle(cc);
        for (size_t i = first; i < cc->n_requests; i++) { /* nobody else was harmed */
            const cc_request_t *r = &cc->requests[i];
            bool ended = cc->config.moe || (mask >> r->rank & 1);
            ck_assert(r->finish == FINISH_LENGTH || (ended && r->finish == FINISH_ERROR));
        }
        expect_serves(cc, true);
        ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
        ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
        expect_serves(cc, true);
    }
    cc_destroy(&cc);
}
END_TEST

/* Outside a group: commands are dropped; a lockstep rank refuses requests, by name, and a dense one
 * takes them. */
START_TEST(test_outside)
{
    cc_t *cc = new_cluster(layouts[_i], "outside");
    cc_kill(cc, 4u, "rank 2 closed its mesh connection");
    ck_assert_str_eq(engine_core_left(cc->engines[0]), "rank 2 closed its mesh connection");
    ck_assert_str_eq(cc->left[1], "rank 2 closed its mesh connection");
    size_t i = cc_add(cc, 0, 0, 6, 4);
    msg_t pause = {.type = MSG_CMD, .generation = 1};
    pause.cmd = (msg_cmd_t){.client = 0,
                            .generation = 1,
                            .number = 1,
                            .kind = CMD_PAUSE,
                            .mode = PAUSE_KEEP,
                            .group_epoch = cc->group_epoch};
    engine_core_on_message(cc->engines[0], 0, &pause);
    cc_link_t *link = &cc->links[0][0];
    for (int k = 0; k < 200; k++) {
        for (; link->n > 0; link->head++, link->n--) {
            cc_queued_t *q = &link->items[link->head % 512];
            engine_core_on_message(cc->engines[0], 0, &q->msg);
            free(q->prompt);
        }
        engine_core_step(cc->engines[0]);
    }
    if (cc->config.moe) {
        ck_assert_int_eq(cc->requests[i].finish, FINISH_ERROR);
        ck_assert_int_eq(cc->requests[i].error_status, LK_ERR_UNAVAILABLE);
        ck_assert_ptr_nonnull(strstr(cc->requests[i].error, "rank 2 closed its mesh connection"));
    } else {
        ck_assert_int_eq(cc->requests[i].finish, FINISH_LENGTH);
    }
    cc_form(cc, 0);
    cc_settle(cc);
    expect_serves(cc, true);
    cc_destroy(&cc);
}
END_TEST

/* ---- others are newer ---- */

static void update_then_lose(cc_t *cc, unsigned mask)
{
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_session(cc, "step-1"));
    cc_kill(cc, mask, "rank 1 closed its mesh connection");
    cc_form(cc, 1);
    cc_settle(cc);
}

static void expect_update_opens(cc_t *cc, const char *version)
{
    ck_assert_int_eq(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL), LK_ERR_STATE);
    ck_ok(cc_init_transfer(cc)); /* a new group knows no transfer engine */
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_ok(cc_update(cc, 0, 1));
    if (!cc->config.shadow) { /* a part of the model is not enough */
        ck_assert_int_eq(cc_finish(cc, version), LK_ERR_STATE);
    }
    ck_ok(cc_update(cc, 1, cc->n_tensors - 1));
    ck_ok(cc_finish(cc, version));
    expect_serves(cc, true);
    for (uint32_t r = 0; r < cc->config.n_ranks; r++) {
        ck_assert_uint_eq(weights(cc, r)->epoch, weights(cc, 0)->epoch);
        ck_assert_str_eq(weights(cc, r)->version, version);
    }
}

START_TEST(test_lockstep_group_waits_for_an_update)
{
    cc_t *cc = new_cluster(layouts[_i], "waits");
    update_then_lose(cc, 2u);
    expect_serves(cc, false);
    const cc_request_t *refused = &cc->requests[cc->n_requests - 1];
    ck_assert_int_eq(refused->error_status, LK_ERR_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(refused->error, "unusable until a complete update: group epoch"));
    ck_assert_ptr_nonnull(strstr(refused->error, "rank 0: weight epoch 1; rank 1: weight epoch 0, "
                                                 "as loaded when it was started"));
    /* what each holds is said of each, the label included */
    cc_utility(cc, "weight_info", "");
    ck_assert_ptr_nonnull(strstr(cc->utility[0], "\"version\": \"step-1\", \"epoch\": 1"));
    ck_assert_ptr_nonnull(strstr(cc->utility[1], "\"version\": \"default\", \"epoch\": 0"));
    ck_assert_ptr_nonnull(strstr(cc->utility[0], "\"dirty\": true"));
    ck_assert_str_eq(weights(cc, 1)->version, "step-1"); /* the group's */
    /* control works meanwhile, and another death changes nothing of it */
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    cc_kill(cc, 4u, "rank 2 closed its mesh connection");
    cc_form(cc, 1);
    cc_settle(cc);
    expect_serves(cc, false);
    expect_update_opens(cc, "step-2");
    ck_assert_uint_eq(weights(cc, 0)->epoch, 2);
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_dense_survivors_go_on)
{
    cc_t *cc = new_cluster(&dense, "go on");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_session(cc, "step-1"));
    add_everywhere(cc, 60);
    cc_run(cc, 100);
    size_t first = cc->n_requests - 3;
    cc_kill(cc, 2u, "rank 1 closed its mesh connection");
    cc_form(cc, 1);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[first].finish, FINISH_LENGTH);
    ck_assert_int_eq(cc->requests[first + 2].finish, FINISH_LENGTH);
    ck_assert_int_eq(ask(cc, 0), FINISH_LENGTH);
    ck_assert_int_eq(ask(cc, 1), FINISH_ERROR);
    ck_assert_ptr_nonnull(strstr(cc->requests[cc->n_requests - 1].error, "weight epoch 0"));
    ck_assert_int_eq(ask(cc, 2), FINISH_LENGTH);
    cc_advance(cc, LK_SECOND_NS);
    ck_assert_uint_eq(cc->load[1].gates, GATE_DIRTY);
    ck_assert_uint_eq(cc->load[0].gates, 0);
    /* once more, with the waiting rank alive: it keeps waiting */
    cc_kill(cc, 1u, "rank 0 closed its mesh connection");
    cc_form(cc, 1);
    cc_settle(cc);
    ck_assert_int_eq(ask(cc, 0), FINISH_ERROR);
    ck_assert_int_eq(ask(cc, 1), FINISH_ERROR);
    ck_assert_int_eq(ask(cc, 2), FINISH_LENGTH);
    expect_update_opens(cc, "step-2");
    cc_destroy(&cc);
}
END_TEST

/* Nobody is left who holds the newest weights, but the coordinator knows that there were some. */
START_TEST(test_all_are_older)
{
    cc_t *cc = new_cluster(layouts[_i], "older");
    update_then_lose(cc, 7u);
    expect_serves(cc, false);
    ck_assert_ptr_nonnull(
        strstr(cc->requests[cc->n_requests - 1].error, "nobody holds epoch 1, the newest"));
    expect_update_opens(cc, "step-2");
    /* an epoch is never used for other weights, and one more commit may have died unheard of */
    ck_assert_uint_eq(weights(cc, 0)->epoch, 2 + GROUP_EPOCH_SKIP);
    cc_destroy(&cc);
}
END_TEST

/* A label alone does not make other weights; who comes back learns it. */
START_TEST(test_label_is_learnt)
{
    cc_t *cc = new_cluster(layouts[_i], "label");
    char spec[400], label[257];
    memset(label, 'x', 256);
    label[256] = '\0';
    snprintf(spec, sizeof spec, "{\"new_version\": \"%s\"}", label);
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_SET_VERSION, false, spec));
    cc_kill(cc, 1u, "rank 0 closed its mesh connection");
    cc_form(cc, 0);
    cc_settle(cc);
    expect_serves(cc, true);
    /* the newcomer is the reference here, having the lowest rank: equal weights, no update ever */
    for (uint32_t r = 1; r < 3; r++) {
        ck_assert_str_eq(weights(cc, r)->version, weights(cc, 0)->version);
    }
    cc_destroy(&cc);
}
END_TEST

/* ---- in the middle of things ---- */

START_TEST(test_touched_weights_are_dirty)
{
    cc_t *cc = new_cluster(layouts[_i], "touched");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    ck_ok(cc_update(cc, 0, 2));
    cc_kill(cc, 4u, "rank 2 closed its mesh connection");
    cc_form(cc, 0);
    cc_settle(cc);
    ck_assert_int_eq(ask(cc, 0), FINISH_ERROR);
    ck_assert_ptr_nonnull(strstr(cc->requests[cc->n_requests - 1].error, "half updated"));
    ck_assert_int_eq(ask(cc, 2), cc->config.moe ? FINISH_ERROR : FINISH_LENGTH);
    expect_update_opens(cc, "step-1");
    cc_destroy(&cc);
}
END_TEST

START_TEST(test_untouched_session_is_forgotten)
{
    cc_t *cc = new_cluster(layouts[_i], "untouched");
    ck_ok(cc_init_transfer(cc));
    ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
    cc_kill(cc, 1u, "rank 0 closed its mesh connection");
    cc_form(cc, 0);
    cc_settle(cc);
    expect_serves(cc, true);
    cc_destroy(&cc);
}
END_TEST

/* At any point of a commit: afterwards the group is closed, or all ranks hold one set; and no
 * weight epoch that some rank had is given to other weights, though nobody else may know of it. */
START_TEST(test_death_in_a_commit)
{
    cc_config_t layout = *layouts[_i % N_LAYOUTS];
    layout.shadow = _i >= N_LAYOUTS;
    for (int point = 0; point < 40; point++) {
        cc_t *cc = new_cluster(&layout, "commit");
        ck_ok(cc_init_transfer(cc));
        ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_START, false, NULL));
        ck_ok(cc_update(cc, 0, cc->n_tensors));
        cc_call(cc, 0, CMD_UPDATE, UPDATE_VERB_FINISH, false, "{\"weight_version\": \"step-1\"}",
                ~0u);
        for (int k = 0; k < point; k++) {
            cc_event(cc);
            cc_note_epoch(cc);
        }
        uint64_t given = weights(cc, 1)->epoch;
        cc_kill(cc, 2u, "rank 1 closed its mesh connection");
        cc_form(cc, 0);
        cc_settle(cc);
        bool open = ask(cc, 0) == FINISH_LENGTH;
        if (open && cc->config.moe) {
            ck_assert_int_eq(ask(cc, 1), FINISH_LENGTH);
        }
        given = open ? LK_MAX(given, weights(cc, 0)->epoch) : given;
        expect_update_opens(cc, "step-2");
        ck_assert_uint_gt(weights(cc, 0)->epoch, given);
        cc_destroy(&cc);
    }
}
END_TEST

/* ---- pauses ---- */

START_TEST(test_pause_stays_in_force)
{
    cc_t *cc = new_cluster(layouts[_i], "paused");
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    cc_kill(cc, 2u, "rank 1 closed its mesh connection");
    size_t i = cc_add(cc, 0, 0, 6, 4);
    cc_form(cc, 0);
    i = cc_add(cc, 0, 1, 6, 4);
    cc_settle(cc);
    ck_assert_int_eq(cc->requests[i].finish, FINISH_NONE);
    for (uint32_t r = 0; r < 3; r++) {
        ck_assert(pause_is_paused(group_pause(engine_core_group(cc->engines[r]))));
    }
    /* it is nobody's: a rolled-back pause does not lift it */
    ck_ok(cc_do(cc, CMD_PAUSE, PAUSE_KEEP, false, NULL));
    ck_ok(cc_do(cc, CMD_CANCEL, 1, false, NULL));
    ck_assert_int_eq(cc->requests[i].finish, FINISH_NONE);
    ck_ok(cc_do(cc, CMD_RESUME, 0, false, NULL));
    ck_assert_int_eq(cc->requests[i].finish, FINISH_LENGTH);
    cc_destroy(&cc);
}
END_TEST

/* Its call was never answered "paused": it is rolled back. */
START_TEST(test_drain_is_lifted)
{
    cc_t *cc = new_cluster(layouts[_i], "drain");
    add_everywhere(cc, 190);
    cc_run(cc, 60);
    size_t call = cc_call(cc, 0, CMD_PAUSE, PAUSE_WAIT, false, NULL, ~0u);
    for (int k = 0; group_pause(engine_core_group(cc->engines[0]))->state != PAUSE_STATE_DRAINING;
         k++) {
        ck_assert_int_lt(k, 10000);
        cc_event(cc);
    }
    cc_kill(cc, 4u, "rank 2 closed its mesh connection");
    cc_form(cc, 0);
    cc_settle(cc);
    expect_serves(cc, true);
    ck_assert_uint_eq(cc->calls[call].done, 0);
    cc_destroy(&cc);
}
END_TEST

/* ---- the next epoch breaks, too ---- */

START_TEST(test_death_while_forming)
{
    for (int point = 0; point < 30; point++) {
        cc_t *cc = new_cluster(layouts[_i], "forming");
        ck_ok(cc_do(cc, CMD_UPDATE, UPDATE_VERB_SET_VERSION, false, "{\"new_version\": \"v\"}"));
        cc_kill(cc, 4u, "rank 2 closed its mesh connection");
        cc_form(cc, 0);
        cc_run(cc, (size_t)point);
        cc_kill(cc, 2u, "rank 1 closed its mesh connection");
        cc_form(cc, 0);
        cc_settle(cc);
        expect_serves(cc, true);
        for (uint32_t r = 0; r < 3; r++) { /* it is not lost on the way */
            ck_assert_str_eq(weights(cc, r)->version, "v");
        }
        cc_destroy(&cc);
    }
}
END_TEST

static lk_status_t no_check(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                            lk_error_t *err)
{
    return LK_OK;
}

/* A rank that was just started and never got into a group does not know whose weights are the
 * newest, nor whether a pause is in force: it steps with nothing. */
START_TEST(test_nobody_steps_before_it_has_joined)
{
    group_config_t config = {.rank = 1,
                             .size = 3,
                             .n_frontends = 1,
                             .group_epoch = 5,
                             .sync_interval = 4,
                             .doorbell = true,
                             .check = no_check};
    group_t *group = group_new(&config);
    ck_assert(group_run(group)); /* the first epoch of all has no join rounds */
    group_form(group, 5, 0, NULL, true);
    ck_assert(!group_run(group));
    group_leave(group, true, "rank 0 closed its mesh connection");
    ck_assert(!group_run(group));
    group_form(group, 6, 0, NULL, false);
    ck_assert(!group_run(group));
    group_destroy(&group);
}
END_TEST

/* One join round of two groups by hand; the texts name DP ranks, not places. */
static void join(group_t **groups, const group_view_t *views)
{
    uint64_t votes[2][ALLREDUCE_MAX_LEN];
    lk_error_t err = LK_ERROR_INIT;
    size_t n = group_vector_len(groups[0]);
    ck_assert_uint_eq(group_vector_len(groups[1]), n);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(group_next(groups[i], &views[i]), GROUP_VOTE);
        group_vote(groups[i], &views[i], 0, votes[i]);
    }
    for (size_t k = 0; k < n; k++) {
        votes[0][k] = LK_MIN(votes[0][k], votes[1][k]);
    }
    for (int i = 0; i < 2; i++) {
        ck_assert_msg(group_decide(groups[i], votes[0], 0, &err) == LK_OK, "%s", err.text);
    }
}

START_TEST(test_survivors_join_by_place)
{
    static const roster_t rosters[2] = {{.n = 2, .place = 0, .ranks = {1, 2}},
                                        {.n = 2, .place = 1, .ranks = {1, 2}}};
    const group_view_t views[2] = {{.quiet = true, .clean = true, .held_content = 5},
                                   {.quiet = true, .clean = true, .held_content = 6}};
    group_t *groups[2];
    for (int i = 0; i < 2; i++) {
        group_config_t config = {.rank = 1 + (uint32_t)i,
                                 .size = 3,
                                 .n_frontends = 1,
                                 .group_epoch = 1,
                                 .sync_interval = 4,
                                 .doorbell = true,
                                 .check = no_check};
        groups[i] = group_new(&config);
        group_leave(groups[i], true, "rank 0 closed its mesh connection");
        group_form(groups[i], 2, 0, &rosters[i], false);
        ck_assert_uint_eq(group_vector_len(groups[i]), 5 * 2); /* of two members, not three ranks */
    }
    join(groups, views);
    for (int i = 0; i < 2; i++) {
        ck_assert(group_is_member(groups[i]));
        ck_assert(group_needs_complete(groups[i]));
    }
    ck_assert_ptr_null(group_closed_why(groups[0])); /* the reference is at place 0 */
    ck_assert_ptr_nonnull(strstr(group_closed_why(groups[1]), "(rank 1: weight epoch 0; rank 2: "));
    /* who reports the group's state is the first member, whatever its rank */
    group_action_t a;
    bool reports[2] = {false, false};
    for (int i = 0; i < 2; i++) {
        while (group_next_action(groups[i], &a)) {
            reports[i] |= a.act == GROUP_ACT_REPORT;
        }
    }
    ck_assert(reports[0] && !reports[1]);
    /* who knows another list is not of this group */
    uint64_t mine[ALLREDUCE_MAX_LEN], other[ALLREDUCE_MAX_LEN];
    roster_t wrong = {.n = 2, .place = 1, .ranks = {0, 2}};
    lk_error_t err = LK_ERROR_INIT;
    for (int i = 0; i < 2; i++) {
        group_leave(groups[i], true, "x");
        group_form(groups[i], 3, 0, i == 0 ? &rosters[0] : &wrong, false);
        group_vote(groups[i], &views[i], 0, i == 0 ? mine : other);
    }
    for (size_t k = 0; k < group_vector_len(groups[0]); k++) {
        mine[k] = LK_MIN(mine[k], other[k]);
    }
    ck_assert_int_eq(group_decide(groups[0], mine, 0, &err), LK_ERR_INTERNAL);
    ck_assert_ptr_nonnull(strstr(err.text, "ranks 2 and 1 are set up differently"));
    group_destroy(&groups[0]);
    group_destroy(&groups[1]);
}
END_TEST

/* Weights that are loaded anew are a new process's; a pause stays. */
START_TEST(test_reloaded_ranks_are_fresh)
{
    static const roster_t alone = {.n = 1, .place = 0, .ranks = {2}};
    group_config_t config = {.rank = 2,
                             .size = 3,
                             .n_frontends = 1,
                             .group_epoch = 1,
                             .sync_interval = 4,
                             .lockstep = true,
                             .doorbell = true,
                             .check = no_check};
    for (uint64_t floor = 0; floor < 2; floor++) {
        group_t *group = group_new(&config);
        group_view_t view = {.quiet = true, .clean = true, .held_content = 5};
        uint64_t vec[ALLREDUCE_MAX_LEN];
        lk_error_t err = LK_ERROR_INIT;
        group_leave(group, false, "rank 0 closed its mesh connection");
        group_reload(group);
        group_form(group, 2, floor, &alone, false);
        group_vote(group, &view, 0, vec);
        ck_assert_msg(group_decide(group, vec, 0, &err) == LK_OK, "%s", err.text);
        ck_assert(group_is_member(group));
        ck_assert_int_eq(group_closed_why(group) != NULL, floor > 0);
        ck_assert_uint_eq(group_held(group)->epoch, 0);
        ck_assert_uint_eq(group_weights(group)->epoch, floor > 0 ? floor + GROUP_EPOCH_SKIP : 0);
        group_destroy(&group);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("group_epochs");
    TCase *tc = tcase_create("group_epochs");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, test_group_opens_by_itself, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_outside, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_lockstep_group_waits_for_an_update, 0, 2);
    tcase_add_test(tc, test_dense_survivors_go_on);
    tcase_add_loop_test(tc, test_all_are_older, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_label_is_learnt, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_touched_weights_are_dirty, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_untouched_session_is_forgotten, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_death_in_a_commit, 0, 2 * N_LAYOUTS);
    tcase_add_loop_test(tc, test_pause_stays_in_force, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_drain_is_lifted, 0, N_LAYOUTS);
    tcase_add_loop_test(tc, test_death_while_forming, 0, N_LAYOUTS);
    tcase_add_test(tc, test_nobody_steps_before_it_has_joined);
    tcase_add_test(tc, test_survivors_join_by_place);
    tcase_add_test(tc, test_reloaded_ranks_are_fresh);
    suite_add_tcase(s, tc);
    return s;
}
