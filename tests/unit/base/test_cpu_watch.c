#include "base/check.h"
#include "base/cpu_watch.h"
#include "base/env.h"
#include "tests/lib/test_main.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process that computes until it is stopped. */
START_TEST(test_computing_and_stopped)
{
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (volatile unsigned i = 0;; i++) {
        }
    }
    const lk_env_t *env = lk_env_real();
    cpu_watch_t watch = {0};
    ck_assert(!cpu_watch_look(&watch, pid, lk_env_now_ns(env))); /* nothing to compare yet */
    while (!cpu_watch_look(&watch, pid, lk_env_now_ns(env))) {
        poll(NULL, 0, 10);
    }
    ck_assert_int_eq(kill(pid, SIGSTOP), 0);
    while (cpu_watch_look(&watch, pid, lk_env_now_ns(env))) {
        poll(NULL, 0, 10);
    }
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
    uint64_t now = watch.at_ns + CPU_WATCH_NS;
    ck_assert(!cpu_watch_look(&watch, pid, now)); /* nobody stands still, too */
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("cpu_watch");
    TCase *tc = tcase_create("cpu_watch");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_computing_and_stopped);
    suite_add_tcase(s, tc);
    return s;
}
