/* Processes that are started again: what a restarted rank holds, what the others do meanwhile, and
 * when everything ends instead. */
#include "base/check.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/completions.h"
#include "tests/lib/test_main.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static const char *const flags[] = {"--device",
                                    "null",
                                    "--data-parallel-size",
                                    "2",
                                    "--enable-expert-parallel",
                                    "--weight-transfer-config",
                                    "{\"backend\":\"tcp\"}",
                                    "--engine-restarts",
                                    "3",
                                    NULL};

typedef struct {
    cluster_t c;
    rl_weights_t weights;
} world_t;

static void start(world_t *w, bool moe)
{
    const char *model = rl_make_model(moe ? ARCH_QWEN3_MOE : ARCH_QWEN3, 3, 8000000);
    w->weights = rl_weights(model, 4, LK_DTYPE_BF16);
    cluster_start(&w->c, model, flags);
}

static void stop(world_t *w)
{
    ck_assert_int_eq(cluster_stop(&w->c), 0);
    rl_weights_fini(&w->weights);
}

static void push(world_t *w, const char *version)
{
    lst_t *lst = rl_open(&w->c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    rl_push(lst, &w->weights, true, version);
    rl_assert_holds(lst, &w->weights, version);
    lst_close(&lst);
}

typedef struct {
    const cluster_t *c;
    json_int_t epoch;
} question_t;

static bool serves_epoch(void *ctx)
{
    question_t *q = ctx;
    json_t *info = cluster_call(q->c, "GET", "/server_info", NULL, 200, NULL);
    bool yes = json_int_at(info, "group.group_epoch") >= q->epoch &&
               strcmp(json_text_at(info, "state"), "dead") != 0 &&
               strcmp(json_text_at(info, "state"), "forming") != 0;
    json_decref(info);
    return yes;
}

static void wait_epoch(const cluster_t *c, json_int_t epoch)
{
    wait_for(serves_epoch, &(question_t){c, epoch}, 20, "the next group epoch serves");
}

static int ask(world_t *w, int rank, json_t **reply)
{
    char headers[64];
    const char *body = "{\"prompt\":[5,6,7],\"max_tokens\":4,\"seed\":1}";
    snprintf(headers, sizeof headers, "X-data-parallel-rank: %d\r\n", rank);
    return cluster_call_with(&w->c, "POST", "/v1/completions", headers, body, strlen(body), reply);
}

static void expect_refused(world_t *w, int rank, const char *text)
{
    json_t *reply;
    ck_assert_int_eq(ask(w, rank, &reply), 503);
    const char *message = json_text_at(reply, "error.message");
    ck_assert_msg(strstr(message, text) != NULL, "'%s' is not in: %s", text, message);
    json_decref(reply);
}

static void expect_serves(world_t *w, int rank)
{
    json_t *reply;
    ck_assert_int_eq(ask(w, rank, &reply), 200);
    json_decref(reply);
}

static bool says_dirty(void *ctx)
{
    json_t *health = cluster_call(ctx, "GET", "/health", NULL, 200, NULL);
    bool yes = strcmp(json_text_at(health, "state"), "dirty") == 0;
    json_decref(health);
    return yes;
}

/* Expert parallel: everybody waits for an update, and it is said who holds what. */
START_TEST(others_are_newer)
{
    world_t w;
    start(&w, true);
    push(&w, "step-1");
    kill(rl_pid_of(&w.c, 1), SIGKILL);
    wait_epoch(&w.c, 2);
    for (int r = 0; r < 2; r++) {
        expect_refused(&w, r,
                       "unusable until a complete update: group epoch 2 was formed by ranks "
                       "with different weights (rank 0: weight epoch 1; rank 1: weight epoch "
                       "0, as loaded when it was started)");
    }
    json_t *info = cluster_call(&w.c, "GET", "/weight_info", NULL, 200, NULL);
    ck_assert(json_is_false(json_object_get(info, "consistent")));
    ck_assert_str_eq(json_text_at(info, "ranks.0.version"), "step-1");
    ck_assert_str_eq(json_text_at(info, "ranks.1.version"), "default");
    ck_assert_int_eq(json_int_at(info, "ranks.1.epoch"), 0);
    ck_assert_ptr_nonnull(strstr(json_text_at(info, "ranks.1.dirty_reason"), "group epoch 2"));
    json_decref(info);
    /* it is what the coordinator last heard of the ranks */
    wait_for(says_dirty, &w.c, 20, "/health says dirty");
    push(&w, "step-2");
    for (int r = 0; r < 2; r++) {
        expect_serves(&w, r);
    }
    stop(&w);
}
END_TEST

/* Dense: the others go on, and get the requests. */
START_TEST(dense_others_go_on)
{
    world_t w;
    start(&w, false);
    push(&w, "step-1");
    cluster_async_t request = rl_complete(&w.c, 0, 5, 8, 20000);
    rl_wait_tokens(&w.c);
    kill(rl_pid_of(&w.c, 1), SIGKILL);
    wait_epoch(&w.c, 2);
    json_t *reply;
    rl_join(&request, "length", &reply); /* not harmed */
    json_decref(reply);
    expect_refused(&w, 1, "different weights");
    for (int i = 0; i < 6; i++) {
        json_decref(complete(&w.c, "{\"prompt\":[5,6,%d],\"max_tokens\":2}", i));
    }
    push(&w, "step-2");
    expect_serves(&w, 1);
    stop(&w);
}
END_TEST

/* Nobody is left who holds the newest weights: the coordinator remembers that there were some. */
START_TEST(all_ranks_are_older)
{
    world_t w;
    start(&w, _i);
    push(&w, "step-1");
    wait_epoch(&w.c, 1);
    pid_t pids[2] = {rl_pid_of(&w.c, 0), rl_pid_of(&w.c, 1)};
    kill(pids[0], SIGSTOP); /* so that no two epochs come of it */
    kill(pids[1], SIGKILL);
    kill(pids[0], SIGKILL);
    wait_epoch(&w.c, 2);
    expect_refused(&w, 0, "nobody holds epoch 1, the newest");
    push(&w, "step-2");
    json_t *info = cluster_call(&w.c, "GET", "/weight_info", NULL, 200, NULL);
    /* no number that lost weights may have had is given again (docs/MEMBERSHIP.md) */
    ck_assert_int_eq(json_int_at(info, "ranks.0.epoch"), 1 + 1000 + 1);
    json_decref(info);
    expect_serves(&w, 1);
    stop(&w);
}
END_TEST

/* A rank that nobody can kill in time wakes up in a world that went on without it. */
START_TEST(expelled_rank_ends_itself)
{
    static const char *const args[] = {"--device",
                                       "null",
                                       "--data-parallel-size",
                                       "2",
                                       "--enable-expert-parallel",
                                       "--heartbeat-interval",
                                       "0.2",
                                       "--heartbeat-timeout",
                                       "1.5",
                                       NULL};
    cluster_t c;
    cluster_start(&c, rl_fixture("qwen3_moe"), args);
    pid_t engine = rl_pid_of(&c, 1);
    kill(c.launcher, SIGSTOP);
    kill(engine, SIGSTOP);
    int status = 0;
    do { /* the coordinator notices */
        json_decref(cluster_call(&c, "GET", "/health", NULL, 0, &status));
    } while (status == 200);
    kill(engine, SIGCONT);
    for (int i = 0; !rl_log_says(&c, "engine 1 ends: the coordinator refuses: engine 1, process");
         i++) {
        ck_assert_msg(i < 1000, "the expelled engine does not end itself");
        usleep(10000);
    }
    ck_assert(rl_log_says(&c, "was expelled: silent for"));
    kill(c.launcher, SIGCONT);
    wait_epoch(&c, 2);
    json_decref(cluster_call(&c, "POST", "/v1/completions", rl_body(5, 8, 4), 200, NULL));
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

START_TEST(used_up_restarts_end_everything_by_name)
{
    static const char *const args[] = {"--device", "null", "--data-parallel-size", "2", NULL};
    cluster_t c;
    cluster_start(&c, rl_fixture("qwen3"), args);
    pid_t first = rl_pid_of(&c, 1);
    kill(first, SIGKILL);
    wait_epoch(&c, 2);
    kill(rl_pid_of(&c, 0), SIGKILL); /* another's restarts are its own */
    wait_epoch(&c, 3);
    kill(rl_pid_of(&c, 1), SIGKILL);
    ck_assert_int_eq(cluster_wait_gone(&c, 20), 1);
    ck_assert(rl_log_says(&c, "engine 1 ended: killed by signal 9 (Killed); it was started again 1 "
                              "times, as often as --engine-restarts allows"));
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("restarts");
    TCase *tc = tcase_create("restarts");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, others_are_newer);
    tcase_add_test(tc, dense_others_go_on);
    tcase_add_loop_test(tc, all_ranks_are_older, 0, 2);
    tcase_add_test(tc, expelled_rank_ends_itself);
    tcase_add_test(tc, used_up_restarts_end_everything_by_name);
    suite_add_tcase(s, tc);
    return s;
}
