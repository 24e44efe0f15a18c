/* Starting and ending: whatever ends a cluster leaves no process (and sockets leave no files). */
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "engine_core/exec/model_maker.h"
#include "tests/lib/cluster.h"
#include "tests/lib/test_main.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *model(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/models/%s", test_fixtures(), name);
    return path;
}

static const char *const args_null2[] = {
    "--device", "null", "--data-parallel-size", "2", "--enable-expert-parallel", NULL};

START_TEST(sigterm_ends_cleanly)
{
    cluster_t c;
    cluster_start(&c, model("qwen3_moe"), args_null2);
    json_decref(cluster_call(&c, "GET", "/health", NULL, 200, NULL));
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* Ctrl-C reaches the whole foreground group of a terminal: here, the launcher's process only has to
 * cope with SIGINT, and with a second one. */
START_TEST(two_sigints_end_cleanly)
{
    cluster_t c;
    cluster_start(&c, model("qwen3_moe"), args_null2);
    kill(c.launcher, SIGINT);
    kill(c.launcher, SIGINT);
    ck_assert_int_eq(cluster_wait_gone(&c, 20), 0);
}
END_TEST

START_TEST(killed_launcher_takes_all_along)
{
    cluster_t c;
    cluster_start(&c, model("qwen3_moe"), args_null2);
    kill(c.launcher, SIGKILL);
    ck_assert_int_eq(cluster_wait_gone(&c, 20), 128 + SIGKILL);
}
END_TEST

/* A model with room for a request that does not end within this test. */
static const char *long_model(void)
{
    static char path[512];
    model_maker_t maker;
    lk_error_t err = LK_ERROR_INIT;
    model_maker_init(&maker, ARCH_QWEN3_MOE);
    maker.max_position_embeddings = 8000000;
    snprintf(path, sizeof path, "%s/long", test_tmpdir());
    ck_assert_msg(model_maker_write(&maker, path, &err) == LK_OK, "%s", err.text);
    return path;
}

static bool is_running(void *ctx)
{
    json_t *info = cluster_call(ctx, "GET", "/server_info", NULL, 200, NULL);
    bool running = json_int_at(info, "engines.0.running") > 0;
    json_decref(info);
    return running;
}

/* An engine in the middle of endless work never waits for anything, and still notices. */
START_TEST(killed_launcher_takes_a_busy_engine_along)
{
    static const char *const args[] = {"--device", "null", NULL};
    cluster_t c;
    cluster_start(&c, long_model(), args);
    cluster_async_t request =
        cluster_call_async(&c, "POST", "/v1/completions",
                           "{\"prompt\":[9],\"max_tokens\":7000000,\"ignore_eos\":true}");
    wait_for(is_running, &c, 30, "the request runs");
    pid_t frontend;
    ck_assert_uint_eq(cluster_pids(&c, "lockstep-api", &frontend, 1), 1);
    kill(c.launcher,
         SIGSTOP); /* it cannot stop the engine, nor can the front end end the request */
    kill(frontend, SIGKILL);
    kill(c.launcher, SIGKILL);
    ck_assert_int_eq(cluster_wait_gone(&c, 20), 128 + SIGKILL);
    int status;
    json_decref(cluster_join(&request, 20, &status));
    ck_assert_int_ne(status, 200);
}
END_TEST

static const char *const children[] = {"lockstep-coordinator", "lockstep-engine", "lockstep-api"};
/* Nothing is started again, whether it was ready when it died or not. */
static const char *const no_restarts[] = {"--device",
                                          "null",
                                          "--data-parallel-size",
                                          "2",
                                          "--enable-expert-parallel",
                                          "--engine-restarts",
                                          "0",
                                          NULL};

START_TEST(any_killed_child_ends_the_cluster_by_name)
{
    cluster_t c;
    cluster_start(&c, model("qwen3_moe"), no_restarts);
    pid_t pids[4];
    ck_assert_uint_gt(cluster_pids(&c, children[_i], pids, LK_ARRAY_LEN(pids)), 0);
    kill(pids[0], SIGKILL);
    ck_assert_int_eq(cluster_wait_gone(&c, 20), 1);
    FILE *f = fopen(c.log, "r");
    ck_assert_ptr_nonnull(f);
    char line[4096];
    bool named = false;
    while (fgets(line, sizeof line, f) != NULL) {
        named |= strstr(line, "ended: killed by signal 9") != NULL;
    }
    fclose(f);
    ck_assert_msg(named, "the log does not say which child was killed");
}
END_TEST

/* At random moments of the start: the launcher, then each kind of child. */
START_TEST(killed_in_mid_start_leaves_nothing)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("mid-start"));
    for (int round = 0; round < 8; round++) {
        cluster_t c;
        cluster_spawn(&c, model("qwen3_moe"), no_restarts);
        uint64_t end_ns = lk_env_now_ns(lk_env_real()) + lk_prng_below(&prng, 400) * LK_MS_NS;
        const char *victim = round % 4 == 3 ? NULL : children[round % 4];
        pid_t pid = victim == NULL ? c.launcher : 0;
        while (lk_env_now_ns(lk_env_real()) < end_ns) {
            usleep(1000);
        }
        while (victim != NULL && cluster_pids(&c, victim, &pid, 1) == 0) {
            usleep(1000); /* until it has been started */
        }
        kill(pid, SIGKILL);
        int rc = cluster_wait_gone(&c, 20);
        ck_assert_int_ne(rc, 0);
    }
}
END_TEST

START_TEST(bad_starts_are_refused_with_the_reason)
{
    static const struct {
        const char *args[4], *text;
    } cases[] = {
        {{"--data-parallel-size", "0"}, "--data-parallel-size must be from 1"},
        {{"--no-such-flag"}, "unknown flag --no-such-flag"},
        {{"--weight-swap", "nowhere"}, "--weight-swap"},
        {{"--host", "0.0.0.0"}, "--insecure"},
        {{"--weight-transfer-config", "{\"backend\":\"pigeon\"}"}, "pigeon"},
        {{"--dtype", "float16"}, "float16"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        cluster_t c;
        cluster_spawn(&c, model("qwen3"), cases[i].args);
        ck_assert(!cluster_wait_ready(&c, 30));
        ck_assert_int_ne(cluster_wait_gone(&c, 20), 0);
        FILE *f = fopen(c.log, "r");
        char text[16384];
        size_t n = fread(text, 1, sizeof text - 1, f);
        text[n] = '\0';
        fclose(f);
        ck_assert_msg(strstr(text, cases[i].text) != NULL, "'%s' is not in:\n%s", cases[i].text,
                      text);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("lifecycle");
    TCase *tc = tcase_create("lifecycle");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, sigterm_ends_cleanly);
    tcase_add_test(tc, two_sigints_end_cleanly);
    tcase_add_test(tc, killed_launcher_takes_all_along);
    tcase_add_test(tc, killed_launcher_takes_a_busy_engine_along);
    tcase_add_loop_test(tc, any_killed_child_ends_the_cluster_by_name, 0, LK_ARRAY_LEN(children));
    tcase_add_test(tc, killed_in_mid_start_leaves_nothing);
    tcase_add_test(tc, bad_starts_are_refused_with_the_reason);
    suite_add_tcase(s, tc);
    return s;
}
