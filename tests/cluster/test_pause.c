/*
 * Pause and resume with real processes, for an expert-parallel group and for independent ranks.
 * That a group stands still is read from the step and token counters of every rank. The null
 * executor makes the steps, where the content does not matter.
 */
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "tests/cluster/rl_kit.h"
#include "tests/lib/test_main.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#define POLLS 10 /* questions over which nothing may move */

typedef struct {
    const char *name;
    model_arch_t arch;
    const char *flag; /* NULL: dense */
} layout_t;

static const layout_t layouts[] = {
    {"expert-parallel", ARCH_QWEN3_MOE, "--enable-expert-parallel"},
    {"dense", ARCH_QWEN3, NULL},
};

/* DP=2 on the null executor, with requests of any length. */
static void start(cluster_t *c, const layout_t *layout, const char *const *more)
{
    const char *args[32] = {"--device",        "null",   "--data-parallel-size", "2",
                            "--max-model-len", "4194304"};
    size_t n = 6;
    if (layout->flag != NULL) {
        args[n++] = layout->flag;
    }
    while (more != NULL && *more != NULL) {
        args[n++] = *more++;
    }
    cluster_start(c, rl_make_model(layout->arch, 7, 4194304), args);
    printf("# %s\n", layout->name);
}

/* ---- every mode, cache and load, both ways ---- */

#define N_BUSY       4
#define DRAIN_TOKENS 30000 /* long enough to be seen running, short enough to be waited for */

static const char *const modes[] = {"abort", "wait", "keep"};

/* An idle group is paused without a forward pass, by one round; a rank that was invited to it
 * before it had the command opens another one. */
static void check_cost(const counters_t *before, const counters_t *after, bool was_idle)
{
    for (size_t r = 0; was_idle && r < after->n_ranks; r++) {
        ck_assert_int_eq(after->rank[r].steps, before->rank[r].steps);
        ck_assert_int_eq(after->rank[r].dummy_steps, before->rank[r].dummy_steps);
        ck_assert_int_ge(after->rank[r].rounds, before->rank[r].rounds + 1);
        ck_assert_int_le(after->rank[r].rounds,
                         before->rank[r].rounds + (json_int_t)after->n_ranks);
    }
}

/* A request that comes while paused waits, and runs after the resume. */
static cluster_async_t queue_one(const cluster_t *c, json_int_t waiting)
{
    cluster_async_t a = rl_complete(c, 0, 77, 5, 3);
    rl_wait_waiting(c, waiting + 1);
    ck_assert(cluster_async_pending(&a));
    return a;
}

static json_int_t cached_tokens(const cluster_t *c, uint32_t first)
{
    json_t *reply;
    cluster_async_t a = rl_complete(c, 1, first, 64, 1);
    rl_join(&a, "length", &reply);
    json_int_t n = json_int_at(reply, "usage.prompt_tokens_details.cached_tokens");
    json_decref(reply);
    return n;
}

static void pause_and_resume(const cluster_t *c, lst_t *lst, rl_way_t way, const char *mode,
                             bool clear, bool load)
{
    char args[128];
    const char *text;
    uint32_t first = (uint32_t)lk_env_random_u64(lk_env_real()) % 1000;
    bool wait = strcmp(mode, "wait") == 0;
    printf("# %s %s, clear_cache %d, %s\n", way == RL_HTTP ? "http" : "trainer", mode, clear,
           load ? "busy" : "idle");
    fflush(stdout);
    cluster_async_t busy[N_BUSY];
    if (load) {
        for (int i = 0; i < N_BUSY; i++) {
            busy[i] = rl_complete(c, (unsigned)i % 2, (uint32_t)i * 40, 20,
                                  wait ? DRAIN_TOKENS : RL_ENDLESS);
        }
        rl_wait_busy(c, N_BUSY);
    } else {
        cached_tokens(c, first);
        ck_assert_int_gt(cached_tokens(c, first), 0);
        rl_wait_idle(c);
    }
    counters_t before = rl_counters(c);
    snprintf(args, sizeof args, "{\"mode\":\"%s\",\"clear_cache\":%s}", mode,
             clear ? "true" : "false");
    ck_assert_msg(rl_call(c, lst, way, "pause", args, &text) == 200, "%s", text);
    ck_assert_ptr_nonnull(strstr(text, "\"paused\""));
    counters_t after = rl_counters(c);
    check_cost(&before, &after, !load);
    rl_assert_frozen(c, POLLS);
    ck_assert_int_eq(rl_call(c, lst, way, "is_paused", NULL, &text), 200);
    ck_assert_ptr_nonnull(strstr(text, "true"));

    json_t *reply;
    bool keep = strcmp(mode, "keep") == 0;
    json_int_t waiting = rl_waiting(&after);
    for (int i = 0; load && i < N_BUSY && !keep; i++) {
        const json_t *choice = rl_join(&busy[i], wait ? "length" : "abort", &reply);
        ck_assert_uint_gt(json_array_size(json_object_get(choice, "token_ids")), 0);
        json_decref(reply);
    }
    for (int i = 0; load && keep && i < N_BUSY; i++) {
        ck_assert(cluster_async_pending(&busy[i]));
    }
    cluster_async_t queued = queue_one(c, waiting);
    rl_assert_frozen(c, POLLS);

    ck_assert_msg(rl_call(c, lst, way, "resume", NULL, &text) == 200, "%s", text);
    ck_assert_ptr_nonnull(strstr(text, "\"resumed\""));
    rl_join(&queued, "length", &reply);
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), 3);
    json_decref(reply);
    if (load && keep) {
        rl_wait_tokens(c);
        rl_abort_requests(c);
    }
    for (int i = 0; load && keep && i < N_BUSY; i++) {
        rl_join(&busy[i], "abort", &reply);
        json_decref(reply);
    }
    rl_wait_idle(c);
    if (!load) {
        ck_assert(clear == (cached_tokens(c, first) == 0));
    }
}

START_TEST(every_mode_both_ways)
{
    cluster_t c;
    start(&c, &layouts[_i], NULL);
    lst_t *lst = rl_open(&c);
    for (int i = 0; i < 24; i++) {
        pause_and_resume(&c, lst, i & 1 ? RL_TRAINER : RL_HTTP, modes[i / 8], i & 2, i & 4);
    }
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- wait: drains what runs, holds what waits ---- */

static const char *const one_seq[] = {"--max-num-seqs", "1", NULL};

static cluster_async_t post(const cluster_t *c, const char *path)
{
    return cluster_call_async(c, "POST", path, "{}");
}

START_TEST(wait_drains_running_and_holds_waiting)
{
    cluster_t c;
    start(&c, &layouts[_i], one_seq);
    cluster_async_t running[2], waiting[2], pause;
    json_t *reply;
    int status;
    for (int i = 0; i < 2; i++) {
        running[i] = rl_complete(&c, (unsigned)i, (uint32_t)i, 4, DRAIN_TOKENS);
    }
    rl_wait_busy(&c, 2);
    for (int i = 0; i < 2; i++) {
        waiting[i] = rl_complete(&c, (unsigned)i, (uint32_t)i, 4, 5);
    }
    rl_wait_waiting(&c, 2);
    pause = post(&c, "/pause?mode=wait");
    reply = cluster_join(&pause, 60, &status);
    ck_assert_int_eq(status, 200);
    json_decref(reply);
    for (int i = 0; i < 2; i++) {
        rl_join(&running[i], "length", &reply);
        ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), DRAIN_TOKENS);
        json_decref(reply);
        ck_assert(cluster_async_pending(&waiting[i]));
    }
    rl_assert_frozen(&c, POLLS);
    counters_t held = rl_counters(&c);
    ck_assert_int_eq(rl_waiting(&held), 2);
    ck_assert_int_eq(rl_running(&held), 0);
    json_decref(cluster_call(&c, "POST", "/resume", "{}", 200, NULL));
    for (int i = 0; i < 2; i++) {
        rl_join(&waiting[i], "length", &reply);
        json_decref(reply);
    }
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- calls that meet ---- */

static const char *error_text(const json_t *reply)
{
    return json_text_at(reply, "error.message");
}

static void start_endless(const cluster_t *c, cluster_async_t busy[2])
{
    for (int i = 0; i < 2; i++) {
        busy[i] = rl_complete(c, (unsigned)i, (uint32_t)i, 4, RL_ENDLESS);
    }
    rl_wait_busy(c, 2);
}

static void end_endless(const cluster_t *c, cluster_async_t busy[2])
{
    json_t *reply;
    rl_abort_requests(c);
    for (int i = 0; i < 2; i++) {
        rl_join(&busy[i], "abort", &reply);
        json_decref(reply);
    }
}

static void resume_supersedes_a_pending_wait(const cluster_t *c)
{
    int status;
    cluster_async_t pause = post(c, "/pause?mode=wait");
    rl_wait_pause_state(c, "DRAINING");
    rl_wait_tokens(c); /* it drains: what runs goes on */
    ck_assert(cluster_async_pending(&pause));
    json_decref(cluster_call(c, "POST", "/resume", "{}", 200, NULL));
    json_t *reply = cluster_join(&pause, 30, &status);
    ck_assert_int_eq(status, 409);
    ck_assert_ptr_nonnull(strstr(error_text(reply), "superseded"));
    json_decref(reply);
    rl_wait_pause_state(c, "RUNNING");
    rl_wait_tokens(c);
}

static void a_wait_that_takes_too_long_is_rolled_back(const cluster_t *c)
{
    json_t *reply =
        cluster_call(c, "POST", "/pause", "{\"mode\":\"wait\",\"timeout_s\":0.5}", 504, NULL);
    const char *text = error_text(reply);
    ck_assert_msg(strstr(text, "pause was not completed within 0.5 s: ranks 0, 1 did not finish") !=
                          NULL &&
                      strstr(text, "rolled back") != NULL,
                  "%s", text);
    json_decref(reply);
    rl_wait_pause_state(c, "RUNNING");
    rl_wait_tokens(c);
    reply = cluster_call(c, "GET", "/is_paused", NULL, 200, NULL);
    ck_assert(json_is_false(json_object_get(reply, "is_paused")));
    json_decref(reply);
}

/* The stricter of the two wins for what runs, and both are answered. */
static void a_keep_meets_a_wait(const cluster_t *c)
{
    int status;
    cluster_async_t wait = post(c, "/pause?mode=wait");
    cluster_async_t keep = post(c, "/pause?mode=keep&clear_cache=false");
    json_decref(cluster_join(&wait, 30, &status));
    ck_assert_int_eq(status, 200);
    json_decref(cluster_join(&keep, 30, &status));
    ck_assert_int_eq(status, 200);
    rl_assert_frozen(c, POLLS);
    counters_t now = rl_counters(c);
    ck_assert_int_eq(rl_running(&now) + rl_waiting(&now), 2);
    for (int i = 0; i < 3; i++) { /* and again, in any mode: nothing happens */
        json_decref(cluster_call(c, "POST", i % 2 ? "/pause?mode=wait" : "/pause?mode=keep", "{}",
                                 200, NULL));
    }
    rl_assert_frozen(c, POLLS);
    for (int i = 0; i < 3; i++) {
        json_decref(cluster_call(c, "POST", "/resume", "{}", 200, NULL));
    }
    rl_wait_tokens(c);
}

static void an_abort_meets_a_keep(const cluster_t *c, cluster_async_t busy[2])
{
    int status;
    json_t *reply;
    cluster_async_t keep = post(c, "/pause?mode=keep");
    cluster_async_t abort = post(c, "/pause?mode=abort");
    json_decref(cluster_join(&keep, 30, &status));
    ck_assert_int_eq(status, 200);
    json_decref(cluster_join(&abort, 30, &status));
    ck_assert_int_eq(status, 200);
    for (int i = 0; i < 2; i++) {
        const json_t *choice = rl_join(&busy[i], "abort", &reply);
        ck_assert_uint_gt(json_array_size(json_object_get(choice, "token_ids")), 0);
        json_decref(reply);
    }
    rl_assert_frozen(c, POLLS);
    json_decref(cluster_call(c, "POST", "/resume", "{}", 200, NULL));
}

START_TEST(calls_that_meet)
{
    cluster_t c;
    cluster_async_t busy[2];
    start(&c, &layouts[_i], NULL);
    start_endless(&c, busy);
    resume_supersedes_a_pending_wait(&c);
    a_wait_that_takes_too_long_is_rolled_back(&c);
    a_keep_meets_a_wait(&c);
    an_abort_meets_a_keep(&c, busy);
    start_endless(&c, busy);
    end_endless(&c, busy);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- an engine that does not answer ---- */

static pid_t engine_pid(const cluster_t *c, size_t rank)
{
    char what[64];
    pid_t pids[RL_MAX_RANKS];
    snprintf(what, sizeof what, "--data-parallel-rank");
    size_t n = cluster_pids(c, "lockstep-engine", pids, LK_ARRAY_LEN(pids));
    ck_assert_uint_gt(n, rank);
    for (size_t i = 0; i < n; i++) {
        char path[64], text[8192];
        snprintf(path, sizeof path, "/proc/%d/cmdline", (int)pids[i]);
        FILE *f = fopen(path, "r");
        ck_assert_ptr_nonnull(f);
        size_t len = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        text[len] = '\0';
        const char *at = memmem(text, len, what, strlen(what));
        size_t value = at != NULL ? (size_t)strtoul(at + strlen(what) + 1, NULL, 10) : 0;
        if (value == rank) {
            return pids[i];
        }
    }
    ck_abort_msg("no engine of rank %zu", rank);
    return 0;
}

static const char *const patient[] = {"--heartbeat-timeout", "60", NULL};

START_TEST(a_stopped_engine_is_named_and_the_pause_rolled_back)
{
    cluster_t c;
    cluster_async_t busy[2];
    start(&c, &layouts[_i], patient);
    start_endless(&c, busy);
    pid_t pid = engine_pid(&c, 1);
    for (size_t m = 0; m < LK_ARRAY_LEN(modes); m++) {
        char path[64];
        snprintf(path, sizeof path, "/pause?mode=%s&timeout_s=0.5", modes[m]);
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        json_t *reply = cluster_call(&c, "POST", path, "{}", 504, NULL);
        ck_assert_msg(strstr(error_text(reply), "rank 1 did not receive it") != NULL, "%s",
                      error_text(reply));
        json_decref(reply);
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
        rl_wait_pause_state(&c, "RUNNING");
        rl_wait_tokens(&c);
        /* neither of the two was ended, not even by an abort that reached rank 0 only */
        ck_assert(cluster_async_pending(&busy[0]) && cluster_async_pending(&busy[1]));
    }
    json_decref(cluster_call(&c, "POST", "/pause?mode=keep", "{}", 200, NULL));
    rl_assert_frozen(&c, POLLS);
    json_decref(cluster_call(&c, "POST", "/resume", "{}", 200, NULL));
    end_endless(&c, busy);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- requests that come while paused ---- */

START_TEST(admission_can_be_refused_while_paused)
{
    static const char *const reject[] = {"--paused-admission", "reject", NULL};
    cluster_t c;
    start(&c, &layouts[_i], reject);
    json_decref(cluster_call(&c, "POST", "/pause?mode=keep", "{}", 200, NULL));
    for (int i = 0; i < 4; i++) {
        json_t *reply = cluster_call(&c, "POST", "/v1/completions", rl_body(1, 4, 3), 503, NULL);
        ck_assert_str_eq(error_text(reply), "generation is paused");
        json_decref(reply);
    }
    rl_assert_frozen(&c, POLLS);
    json_decref(cluster_call(&c, "POST", "/resume", "{}", 200, NULL));
    json_decref(cluster_call(&c, "POST", "/v1/completions", rl_body(1, 4, 3), 200, NULL));

    static const struct {
        const char *path, *body, *param;
    } bad[] = {{"/pause?mode=invalid", "{}", "query.mode"},
               {"/pause", "{\"mode\":3}", "mode"},
               {"/pause", "{\"clear_cache\":\"perhaps\"}", "clear_cache"},
               {"/pause?clear_cache=2", "{}", "query.clear_cache"},
               {"/pause?timeout_s=-1", "{}", "query.timeout_s"},
               {"/pause", "{\"timeout_s\":1e300}", "timeout_s"},
               {"/resume", "{\"timeout_s\":\"soon\"}", "timeout_s"},
               {"/pause", "[]", "body"},
               {"/pause", "{", "body"}};
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        json_t *reply = cluster_call(&c, "POST", bad[i].path, bad[i].body, 400, NULL);
        const char *param =
            json_string_value(json_object_get(json_object_get(reply, "error"), "param"));
        ck_assert_msg(param == NULL ? strcmp(bad[i].param, "body") == 0
                                    : strcmp(param, bad[i].param) == 0,
                      "%s %s: param %s", bad[i].path, bad[i].body, param != NULL ? param : "null");
        json_decref(reply);
    }
    json_t *reply = cluster_call(&c, "GET", "/is_paused", NULL, 200, NULL);
    ck_assert(json_is_false(json_object_get(reply, "is_paused")));
    json_decref(reply);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- the content: pauses do not show in what is generated ---- */

#define N_TOKENS 300

START_TEST(paused_streams_say_the_same)
{
    static const char *const cpu[] = {
        "--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32", NULL};
    cluster_t c;
    cluster_start(&c, rl_fixture("qwen3_moe"), cpu);
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("paused-streams"));
    json_t *want[2], *got[2], *reply;
    cluster_async_t run[2];
    for (int i = 0; i < 2; i++) {
        run[i] = rl_complete(&c, (unsigned)i, (uint32_t)i * 50, 30, N_TOKENS);
    }
    for (int i = 0; i < 2; i++) {
        want[i] = json_incref(json_object_get(rl_join(&run[i], "length", &reply), "token_ids"));
        json_decref(reply);
    }
    for (int i = 0; i < 2; i++) {
        run[i] = rl_complete(&c, (unsigned)i, (uint32_t)i * 50, 30, N_TOKENS);
    }
    unsigned pauses = 0;
    while (cluster_async_pending(&run[0]) || cluster_async_pending(&run[1])) {
        char path[80];
        snprintf(path, sizeof path, "/pause?mode=keep&clear_cache=%s",
                 lk_prng_below(&prng, 2) ? "true" : "false");
        json_decref(cluster_call(&c, "POST", path, "{}", 200, NULL));
        rl_assert_frozen(&c, (int)lk_prng_below(&prng, 3));
        json_decref(cluster_call(&c, "POST", "/resume", "{}", 200, NULL));
        pauses++;
    }
    printf("# %u pauses\n", pauses);
    for (int i = 0; i < 2; i++) {
        got[i] = json_object_get(rl_join(&run[i], "length", &reply), "token_ids");
        ck_assert_msg(json_equal(got[i], want[i]), "stream %d differs", i);
        json_decref(reply);
    }
    /* what an abort leaves is a prefix of it */
    run[0] = rl_complete(&c, 0, 0, 30, N_TOKENS);
    counters_t before = rl_counters(&c), now = before;
    while (rl_tokens(&now) == rl_tokens(&before)) {
        now = rl_counters(&c);
    }
    json_decref(cluster_call(&c, "POST", "/pause", "{}", 200, NULL));
    int status;
    reply = cluster_join(&run[0], 30, &status);
    const json_t *partial =
        json_object_get(json_array_get(json_object_get(reply, "choices"), 0), "token_ids");
    ck_assert_uint_gt(json_array_size(partial), 0);
    for (size_t i = 0; i < json_array_size(partial); i++) {
        ck_assert(json_equal(json_array_get(partial, i), json_array_get(want[0], i)));
    }
    json_decref(reply);
    for (int i = 0; i < 2; i++) {
        json_decref(want[i]);
    }
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("pause");
    TCase *tc = tcase_create("pause");
    tcase_set_timeout(tc, 120);
    int n = LK_ARRAY_LEN(layouts);
    tcase_add_loop_test(tc, every_mode_both_ways, 0, n);
    tcase_add_loop_test(tc, wait_drains_running_and_holds_waiting, 0, n);
    tcase_add_loop_test(tc, calls_that_meet, 0, n);
    tcase_add_loop_test(tc, a_stopped_engine_is_named_and_the_pause_rolled_back, 0, n);
    tcase_add_loop_test(tc, admission_can_be_refused_while_paused, 0, n);
    tcase_add_test(tc, paused_streams_say_the_same);
    suite_add_tcase(s, tc);
    return s;
}
