#include "base/loop.h"
#include "tests/lib/test_main.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

START_TEST(test_deadlines)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    uint64_t start = now();
    loop_wait(loop, NULL, 0, 0); /* long ago: looks and returns */
    ck_assert(now() - start < 5 * LK_SECOND_NS);
    loop_wait(loop, NULL, 0, start + 30 * LK_MS_NS);
    ck_assert(now() >= start + 30 * LK_MS_NS);
    ck_assert_ptr_null(loop_stop_reason(loop));
    loop_destroy(&loop);
    ck_assert_ptr_null(loop);
    loop_destroy(&loop);
}
END_TEST

START_TEST(test_descriptors)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    struct pollfd pfds[3] = {{fds[0], POLLIN, 99}, {fds[1], POLLOUT, 0}, {-1, POLLIN, 99}};
    loop_wait(loop, pfds, 3, UINT64_MAX);
    ck_assert_int_eq(pfds[0].revents, 0);
    ck_assert_int_eq(pfds[1].revents, POLLOUT);
    ck_assert_int_eq(pfds[2].revents, 0);
    ck_assert_int_eq(write(fds[1], "x", 1), 1);
    loop_wait(loop, pfds, 1, UINT64_MAX);
    ck_assert_int_eq(pfds[0].revents, POLLIN);
    char byte;
    ck_assert_int_eq(read(fds[0], &byte, 1), 1);
    loop_wait(loop, pfds, 1, now());
    ck_assert_int_eq(pfds[0].revents, 0);
    loop_destroy(&loop);
}
END_TEST

START_TEST(test_signals_wake)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    loop_catch_signals(loop);
    ck_assert_ptr_null(loop_stop_reason(loop));
    pid_t child = fork();
    if (child == 0) {
        kill(getppid(), _i);
        _exit(0);
    }
    while (loop_stop_reason(loop) == NULL) {
        loop_wait(loop, NULL, 0, UINT64_MAX); /* the test's timeout is the only other way out */
    }
    ck_assert_str_eq(loop_stop_reason(loop), _i == SIGINT ? "SIGINT" : "SIGTERM");
    waitpid(child, NULL, 0);
    raise(SIGTERM); /* a second one changes nothing */
    raise(SIGPIPE); /* ignored */
    ck_assert_str_eq(loop_stop_reason(loop), _i == SIGINT ? "SIGINT" : "SIGTERM");
    loop_wait(loop, NULL, 0, now());
    uint64_t start = now();
    loop_wait(loop, NULL, 0, start + 20 * LK_MS_NS); /* stopping, but no spinning */
    ck_assert(now() >= start + 20 * LK_MS_NS);
    loop_destroy(&loop);
}
END_TEST

START_TEST(test_parent)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_NONBLOCK), 0);
    loop_watch_parent(loop, fds[0]);
    loop_wait(loop, NULL, 0, now());
    ck_assert_ptr_null(loop_stop_reason(loop));
    close(fds[1]);
    loop_wait(loop, NULL, 0, UINT64_MAX);
    ck_assert_str_eq(loop_stop_reason(loop), "launcher is gone");
    uint64_t start = now();
    loop_wait(loop, NULL, 0, start + 20 * LK_MS_NS);
    ck_assert(now() >= start + 20 * LK_MS_NS);
    loop_destroy(&loop);
}
END_TEST

typedef struct {
    int n;
    char lines[8][LOOP_LINE_MAX];
} heard_t;

static void on_line(void *ctx, const char *line)
{
    heard_t *heard = ctx;
    ck_assert_int_lt(heard->n, 8);
    snprintf(heard->lines[heard->n++], LOOP_LINE_MAX, "%s", line);
}

/* Lines come in pieces, several at once, or too long; the end is the end all the same. */
START_TEST(test_lines_of_the_parent)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    heard_t heard = {0};
    int fds[2];
    char long_line[2 * LOOP_LINE_MAX];
    ck_assert_int_eq(pipe2(fds, O_NONBLOCK), 0);
    loop_watch_parent(loop, fds[0]);
    ck_assert_int_eq(write(fds[1], "nobody listens\n", 15), 15);
    loop_wait(loop, NULL, 0, UINT64_MAX);
    loop_hear_parent(loop, on_line, &heard);
    ck_assert_int_eq(write(fds[1], "remo", 4), 4);
    loop_wait(loop, NULL, 0, UINT64_MAX);
    ck_assert_int_eq(heard.n, 0);
    ck_assert_int_eq(write(fds[1], "ved 1 x\n\nlast\n", 14), 14);
    loop_wait(loop, NULL, 0, UINT64_MAX);
    ck_assert_int_eq(heard.n, 3);
    ck_assert_str_eq(heard.lines[0], "removed 1 x");
    ck_assert_str_eq(heard.lines[1], "");
    ck_assert_str_eq(heard.lines[2], "last");
    memset(long_line, 'y', sizeof long_line);
    long_line[sizeof long_line - 1] = '\n';
    ck_assert_int_eq(write(fds[1], long_line, sizeof long_line), (ssize_t)sizeof long_line);
    while (heard.n < 4) {
        loop_wait(loop, NULL, 0, UINT64_MAX);
    }
    ck_assert_uint_eq(strlen(heard.lines[3]), LOOP_LINE_MAX - 1);
    ck_assert_ptr_null(loop_stop_reason(loop));
    close(fds[1]);
    loop_wait(loop, NULL, 0, UINT64_MAX);
    ck_assert_str_eq(loop_stop_reason(loop), "launcher is gone");
    ck_assert_int_eq(heard.n, 4);
    loop_destroy(&loop);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("loop");
    TCase *tc = tcase_create("loop");
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, test_deadlines);
    tcase_add_test(tc, test_descriptors);
    tcase_add_loop_test(tc, test_signals_wake, SIGINT, SIGINT + 1);
    tcase_add_loop_test(tc, test_signals_wake, SIGTERM, SIGTERM + 1);
    tcase_add_test(tc, test_parent);
    tcase_add_test(tc, test_lines_of_the_parent);
    suite_add_tcase(suite, tc);
    return suite;
}
