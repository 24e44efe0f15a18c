#include "base/check.h"
#include "base/loop.h"
#include "base/spawn.h"
#include "tests/lib/test_main.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_MS 20000

static spawn_t start(const char *how, char *const *env)
{
    const char *path = getenv("LK_TEST_SPAWN_CHILD");
    ck_assert_ptr_nonnull(path);
    char *argv[] = {(char *)(uintptr_t)path, (char *)(uintptr_t)how, NULL};
    spawn_spec_t spec = {"engine 1", path, argv, env, -1, -1, true};
    spawn_t child = SPAWN_INIT;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(spawn_start(&spec, &child, &err) == LK_OK, "%s", err.text);
    return child;
}

static lk_status_t wait_ready(spawn_t *child, const char **text, lk_error_t *err)
{
    lk_status_t status;
    while ((status = spawn_ready(child, text, err)) == LK_INPROGRESS) {
        struct pollfd pfd = {child->status_fd, POLLIN, 0};
        ck_assert_int_gt(poll(&pfd, 1, WAIT_MS), 0);
    }
    return status;
}

static void wait_end(spawn_t *child)
{
    lk_error_t err = LK_ERROR_INIT;
    struct pollfd pfd = {child->pid_fd, POLLIN, 0};
    ck_assert_int_gt(poll(&pfd, 1, WAIT_MS), 0);
    ck_assert_msg(spawn_reap(child, &err) == LK_OK, "%s", err.text);
    ck_ok(spawn_reap(child, &err));
}

START_TEST(test_ready_and_terminate)
{
    spawn_t child = start("serve", NULL);
    const char *text = NULL;
    char how[64];
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(wait_ready(&child, &text, &err) == LK_OK, "%s", err.text);
    int pid = 0;
    ck_assert_int_eq(sscanf(text, "pid=%d", &pid), 1);
    ck_assert_int_eq(pid, child.pid);
    ck_assert_int_eq(spawn_reap(&child, &err), LK_INPROGRESS);
    spawn_describe(&child, how, sizeof how);
    ck_assert_str_eq(how, "runs");
    spawn_kill(&child, SIGTERM);
    wait_end(&child);
    spawn_describe(&child, how, sizeof how);
    ck_assert_str_eq(how, "exit code 15");
    spawn_kill(&child, SIGKILL); /* nobody's number any more: nothing */
    spawn_fini(&child);
    spawn_fini(&child);
}
END_TEST

/* What comes after "ready". */
START_TEST(test_beats)
{
    spawn_t child = start("beats", NULL);
    const char *text = NULL;
    lk_error_t err = LK_ERROR_INIT;
    bool patience, patient = false;
    size_t beats = 0;
    ck_assert_msg(wait_ready(&child, &text, &err) == LK_OK, "%s", err.text);
    wait_end(&child);
    while (child.status_fd >= 0) { /* until its end */
        beats += spawn_beats(&child, &patience);
        patient |= patience;
    }
    ck_assert_uint_eq(beats, 3);
    ck_assert(patient);
    ck_assert_str_eq(child.last, "out of luck. twice");
    ck_assert_uint_eq(spawn_beats(&child, &patience), 0);
    spawn_fini(&child);
    /* one that never reads its end, and one that has none */
    int fds[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    for (int i = 0; i < 10000; i++) {
        spawn_child_beat(fds[1], false);
    }
    close(fds[0]);
    spawn_child_beat(fds[1], false);
    spawn_child_beat(-1, false);
    close(fds[1]);
}
END_TEST

START_TEST(test_ends_with_the_pipe)
{
    spawn_t child = start("serve", NULL);
    const char *text;
    char how[64];
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(wait_ready(&child, &text, &err));
    close(child.parent_fd);
    child.parent_fd = -1;
    wait_end(&child);
    spawn_describe(&child, how, sizeof how);
    ck_assert_str_eq(how, "exit code 7");
    spawn_fini(&child);
}
END_TEST

START_TEST(test_errors)
{
    const char *text;
    lk_error_t err = LK_ERROR_INIT;
    spawn_t child = start("error", NULL);
    ck_assert_int_eq(wait_ready(&child, &text, &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "engine 1: no model here");
    wait_end(&child);
    spawn_fini(&child);

    child = start("silent", NULL);
    wait_end(&child);
    ck_assert_int_eq(wait_ready(&child, &text, &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "engine 1 ended without saying that it is ready: exit code 3");
    spawn_fini(&child);

    char *argv[] = {(char *)(uintptr_t) "x", NULL};
    spawn_spec_t spec = {"engine 2", "/nonexistent/program", argv, NULL, -1, -1, false};
    child = SPAWN_INIT;
    ck_ok(spawn_start(&spec, &child, &err));
    ck_assert_int_eq(wait_ready(&child, &text, &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "engine 2: /nonexistent/program: No such file or directory");
    wait_end(&child);
    spawn_fini(&child);

    char *env[] = {(char *)(uintptr_t) "A=b", (char *)(uintptr_t) "LK_STATUS_FD=77", NULL};
    child = start("serve", env); /* the launcher's own variables are not handed on */
    ck_ok(wait_ready(&child, &text, &err));
    spawn_kill(&child, SIGKILL);
    wait_end(&child);
    char how[64];
    spawn_describe(&child, how, sizeof how);
    ck_assert_str_eq(how, "killed by signal 9 (Killed)");
    spawn_fini(&child);
}
END_TEST

START_TEST(test_no_leaked_descriptors)
{
    for (int i = 0; i < 5; i++) { /* without CLOEXEC: the worst neighbour */
        ck_assert_int_ge(open("/dev/null", O_RDONLY), 0);
    }
    const char *text;
    lk_error_t err = LK_ERROR_INIT;
    spawn_t first = start("descriptors", NULL), second = start("descriptors", NULL);
    ck_ok(wait_ready(&second, &text, &err));
    ck_assert_str_eq(text, "0,1,2,3,4");
    ck_ok(wait_ready(&first, &text, &err));
    ck_assert_str_eq(text, "0,1,2,3,4");
    /* the second child does not hold the first one's pipe open */
    spawn_fini(&first);
    int status;
    ck_assert_int_eq(waitpid(first.pid, &status, 0), first.pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    spawn_kill(&second, SIGKILL);
    wait_end(&second);
    spawn_fini(&second);
}
END_TEST

/* The launcher is killed: its child, which looks at nothing, ends too. */
START_TEST(test_dies_with_killed_launcher)
{
    ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0); /* so that we can see it end */
    spawn_t launcher = start("launcher", NULL);
    const char *text = NULL;
    int grandchild = 0;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(wait_ready(&launcher, &text, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(sscanf(text, "pid=%d", &grandchild) == 1, "%s", text);
    ck_assert_int_eq(kill(grandchild, 0), 0);
    int fd = (int)syscall(SYS_pidfd_open, grandchild, 0);
    ck_assert_int_ge(fd, 0);
    spawn_kill(&launcher, SIGKILL);
    wait_end(&launcher);
    struct pollfd pfd = {fd, POLLIN, 0};
    ck_assert_int_gt(poll(&pfd, 1, WAIT_MS), 0);
    spawn_fini(&launcher);
}
END_TEST

/* A launcher that catches signals stops a child that it has just started. */
START_TEST(test_signal_before_exec)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    loop_catch_signals(loop);
    for (int i = 0; i < 20; i++) {
        char how[64];
        spawn_t child = start("stubborn", NULL);
        spawn_kill(&child, SIGTERM);
        wait_end(&child);
        spawn_describe(&child, how, sizeof how);
        ck_assert_str_eq(how, "killed by signal 15 (Terminated)");
        spawn_fini(&child);
    }
    ck_assert_ptr_null(loop_stop_reason(loop));
    loop_destroy(&loop);
}
END_TEST

START_TEST(test_child_side)
{
    int parent_fd, status_fd;
    lk_error_t err = LK_ERROR_INIT;
    unsetenv("LK_PARENT_FD");
    unsetenv("LK_STATUS_FD");
    ck_ok(spawn_child_fds(&parent_fd, &status_fd, &err));
    ck_assert_int_eq(parent_fd, -1);
    ck_assert_int_eq(status_fd, -1);
    spawn_child_report(&status_fd, true, "by hand");
    static const char *const bad[] = {"", "x", "3x", "-1", "999", "99999999999999999999"};
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        setenv("LK_PARENT_FD", bad[i], 1);
        ck_assert_int_eq(spawn_child_fds(&parent_fd, &status_fd, &err), LK_ERR_INVALID);
        ck_assert_int_eq(strncmp(err.text, "LK_PARENT_FD=", 13), 0);
    }
}
END_TEST

START_TEST(test_a_child_is_told)
{
    spawn_t child = start("echo", NULL);
    const char *text = NULL;
    lk_error_t err = LK_ERROR_INIT;
    bool patience;
    ck_assert_msg(wait_ready(&child, &text, &err) == LK_OK, "%s", err.text);
    ck_assert(spawn_tell(&child, "removed 3 one\nline"));
    wait_end(&child);
    while (child.status_fd >= 0) {
        spawn_beats(&child, &patience);
    }
    ck_assert_str_eq(child.last, "removed 3 one line");
    signal(SIGPIPE, SIG_IGN);
    ck_assert(!spawn_tell(&child, "anybody there?"));
    spawn_fini(&child);
    ck_assert(!spawn_tell(&child, "anybody there?"));
    /* one that does not read: nothing waits for it */
    child = start("stubborn", NULL);
    ck_assert_msg(wait_ready(&child, &text, &err) == LK_OK, "%s", err.text);
    char line[2 * SPAWN_LINE_MAX];
    memset(line, 'x', sizeof line - 1);
    line[sizeof line - 1] = '\0';
    int told = 0;
    while (spawn_tell(&child, line)) {
        ck_assert_int_lt(told++, 100000);
    }
    ck_assert_int_gt(told, 10);
    spawn_kill(&child, SIGKILL);
    wait_end(&child);
    spawn_fini(&child);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("spawn");
    TCase *tc = tcase_create("spawn");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_ready_and_terminate);
    tcase_add_test(tc, test_beats);
    tcase_add_test(tc, test_ends_with_the_pipe);
    tcase_add_test(tc, test_errors);
    tcase_add_test(tc, test_no_leaked_descriptors);
    tcase_add_test(tc, test_dies_with_killed_launcher);
    tcase_add_test(tc, test_signal_before_exec);
    tcase_add_test(tc, test_child_side);
    tcase_add_test(tc, test_a_child_is_told);
    suite_add_tcase(suite, tc);
    return suite;
}
