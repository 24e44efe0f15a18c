/* What only the ZeroMQ ports have: hostile frames, other users, forks. */
#include "base/env.h"
#include "base/port.h"
#include "tests/lib/test_main.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

static lk_port_t *open_port(port_kind_t kind, bool bind, const char *address)
{
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(port_zmq_open(kind, bind, address, NULL, &port, &err) == LK_OK, "%s", err.text);
    return port;
}

static lk_status_t wait_recv(lk_port_t *port, port_msg_t *msg, lk_error_t *err)
{
    lk_status_t status;
    while ((status = port_recv(port, msg, err)) == LK_INPROGRESS) {
        struct pollfd pfd = {port_fd(port), POLLIN, 0};
        ck_assert_int_gt(poll(&pfd, 1, 20000), 0);
    }
    return status;
}

START_TEST(test_too_many_frames)
{
    char address[128];
    port_ipc_address("frames", address, sizeof address);
    lk_port_t *router = open_port(PORT_ROUTER, true, address);
    void *ctx = zmq_ctx_new();
    void *dealer = zmq_socket(ctx, ZMQ_DEALER);
    ck_assert_int_eq(zmq_connect(dealer, address), 0);
    for (int n = PORT_MAX_FRAMES; n <= PORT_MAX_FRAMES + 3; n += 3) {
        for (int i = 0; i < n; i++) {
            ck_assert_int_ge(zmq_send(dealer, "x", 1, i + 1 < n ? ZMQ_SNDMORE : 0), 0);
        }
        ck_assert_int_ge(zmq_send(dealer, "after", 5, 0), 0);
    }
    port_msg_t msg;
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(wait_recv(router, &msg, &err));
    ck_assert_uint_eq(msg.n_frames, PORT_MAX_FRAMES);
    port_msg_fini(router, &msg);
    ck_ok(wait_recv(router, &msg, &err));
    port_msg_fini(router, &msg);
    ck_assert_int_eq(wait_recv(router, &msg, &err), LK_ERR_INVALID);
    ck_assert(strstr(err.text, "message of 11 frames, at most 8") != NULL);
    ck_ok(wait_recv(router, &msg, &err)); /* the next one is whole */
    ck_assert_uint_eq(msg.n_frames, 1);
    ck_assert_mem_eq(msg.frames[0].data, "after", 5);
    port_msg_fini(router, &msg);
    zmq_close(dealer);
    zmq_ctx_term(ctx);
    port_destroy(&router);
}
END_TEST

/* Connects as `uid` in a child. 1: the port greeted us; 0: it closed the connection at once. */
static int greeted_as(const char *address, uid_t uid)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct sockaddr_un to = {.sun_family = AF_UNIX};
        size_t len = strlen(address) - strlen("ipc://@");
        memcpy(to.sun_path + 1, address + strlen("ipc://@"), len);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        struct timeval limit = {20, 0};
        char byte;
        if (setuid(uid) != 0 ||
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
            connect(fd, (struct sockaddr *)&to,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) != 0) {
            _exit(2);
        }
        ssize_t n = read(fd, &byte, 1);
        _exit(n == 1 ? 1 : n == 0 || errno == ECONNRESET ? 0 : 3);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

START_TEST(test_other_users_are_refused)
{
    char address[128];
    port_ipc_address("users", address, sizeof address);
    lk_port_t *router = open_port(PORT_ROUTER, true, address);
    ck_assert_int_eq(greeted_as(address, geteuid()), 1);
    if (geteuid() == 0) { /* only root can become somebody else */
        ck_assert_int_eq(greeted_as(address, 65534), 0);
        ck_assert_int_eq(greeted_as(address, geteuid()), 1);
    }
    port_destroy(&router);
}
END_TEST

#ifndef __SANITIZE_THREAD__ /* which can't follow threads that start after a fork */
/* A child that inherited ports opens its own context, and may drop what it inherited. */
START_TEST(test_fork)
{
    char address[128];
    port_ipc_address("fork", address, sizeof address);
    lk_port_t *router = open_port(PORT_ROUTER, true, address);
    pid_t pid = fork();
    if (pid == 0) {
        lk_port_t *dealer = NULL;
        lk_error_t err;
        port_msg_t msg;
        port_frame_t frame = {"child", 5};
        port_destroy(&router);
        if (port_zmq_open(PORT_DEALER, false, address, NULL, &dealer, &err) != LK_OK ||
            port_send(dealer, NULL, &frame, 1, &err) != LK_OK ||
            wait_recv(dealer, &msg, &err) != LK_OK) {
            _exit(1);
        }
        port_msg_fini(dealer, &msg);
        port_destroy(&dealer);
        _exit(0);
    }
    port_msg_t msg;
    lk_error_t err;
    ck_ok(wait_recv(router, &msg, &err));
    ck_assert_mem_eq(msg.frames[0].data, "child", 5);
    ck_ok(port_send(router, &msg.peer, msg.frames, 1, &err));
    port_msg_fini(router, &msg);
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    port_destroy(&router);
}
END_TEST
#endif

/* A peer that ends is noticed by whoever counts. */
START_TEST(test_losses)
{
    char address[128];
    port_ipc_address("losses", address, sizeof address);
    lk_port_t *router = open_port(PORT_ROUTER, true, address);
    lk_port_t *dealer = open_port(PORT_DEALER, false, address);
    lk_error_t err = LK_ERROR_INIT;
    port_frame_t frame = {"x", 1};
    port_msg_t msg;
    for (uint64_t life = 1; life <= 2; life++) {
        ck_assert_uint_eq(port_losses(dealer), life - 1);
        ck_ok(port_send(dealer, NULL, &frame, 1, &err));
        ck_ok(wait_recv(router, &msg, &err));
        port_msg_fini(router, &msg);
        ck_assert_uint_eq(port_losses(dealer), life - 1);
        port_destroy(&router);
        for (int i = 0; port_losses(dealer) < life; i++) {
            ck_assert_int_lt(i, 20000);
            poll(NULL, 0, 1);
        }
        router = open_port(PORT_ROUTER, true, address);
    }
    port_destroy(&dealer);
    port_destroy(&router);
}
END_TEST

START_TEST(test_addresses)
{
    char a[128], b[128];
    port_ipc_address("input-0", a, sizeof a);
    port_ipc_address("input-0", b, sizeof b);
    ck_assert_str_ne(a, b);
    ck_assert_int_eq(strncmp(a, "ipc://@lockstep-", 16), 0);
    ck_assert_str_eq(a + 16 + 32, "-input-0");
    lk_port_t *pull = open_port(PORT_PULL, true, "tcp://127.0.0.1:*");
    ck_assert_int_eq(strncmp(port_address(pull), "tcp://127.0.0.1:", 16), 0);
    ck_assert_int_ne(port_address(pull)[16], '*');
    lk_port_t *abstract = open_port(PORT_PULL, true, a);
    ck_assert_str_eq(port_address(abstract), a);
    port_destroy(&abstract);
    port_destroy(&pull);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("port_zmq");
    TCase *tc = tcase_create("port_zmq");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_too_many_frames);
    tcase_add_test(tc, test_other_users_are_refused);
#ifndef __SANITIZE_THREAD__
    tcase_add_test(tc, test_fork);
#endif
    tcase_add_test(tc, test_losses);
    tcase_add_test(tc, test_addresses);
    suite_add_tcase(suite, tc);
    return suite;
}
