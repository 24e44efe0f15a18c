/* The coordinator's sockets: garbage from a peer is dropped, and the next one is served. */
#include "base/check.h"
#include "base/port.h"
#include "base/spawn.h"
#include "coordinator/coordinator_io.h"
#include "proto/codec.h"
#include "tests/lib/test_main.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#define WAIT_MS 20000

typedef struct {
    pthread_t thread;
    lk_config_t config;
    lk_loop_t *loop;
    int parent_fd; /* closing it ends the coordinator */
    int status_fd, its_status_fd;
    char address[300];
    int rc;
} world_t;

static world_t w;

static void *run(void *arg)
{
    w.rc = coordinator_io_run(&w.config, w.loop, &w.its_status_fd);
    return NULL;
}

static void setup(void)
{
    int pipe_fds[2], status[2];
    char program[] = "coordinator", flag[] = "--model", model[] = "none";
    char *argv[] = {program, flag, model, NULL};
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(config_parse(3, argv, &w.config, &err) == LK_OK, "%s", err.text);
    ck_assert_int_eq(pipe(pipe_fds), 0);
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, status), 0);
    w.parent_fd = pipe_fds[1];
    w.status_fd = status[0];
    w.its_status_fd = status[1];
    w.loop = loop_new(lk_env_real());
    loop_watch_parent(w.loop, pipe_fds[0]);
    ck_assert_int_eq(pthread_create(&w.thread, NULL, run, NULL), 0);
    size_t n = 0;
    char line[300];
    while (n == 0 || memchr(line, '\n', n) == NULL) {
        ssize_t got = read(w.status_fd, line + n, sizeof line - n);
        ck_assert_int_gt(got, 0);
        n += (size_t)got;
    }
    *(char *)memchr(line, '\n', n) = '\0'; /* beats follow */
    ck_assert_msg(strncmp(line, "ready ", 6) == 0, "%s", line);
    snprintf(w.address, sizeof w.address, "%s", line + 6);
}

static void teardown(void)
{
    close(w.parent_fd);
    ck_assert_int_eq(pthread_join(w.thread, NULL), 0);
    ck_assert_int_eq(w.rc, 0);
    close(w.status_fd);
    loop_destroy(&w.loop);
}

/* HELLO with flags that are not the coordinator's is answered with a refusal: it still works. */
static void expect_refusal(void)
{
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    ck_ok(port_zmq_open(PORT_DEALER, false, w.address, NULL, &port, &err));
    msg_t hello = {.type = MSG_HELLO, .sender_role = MSG_ROLE_ENGINE, .generation = 1};
    hello.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE, .config_hash = msg_str("other")};
    ck_ok(msg_encode(&hello, &envelope, &body, &err));
    port_frame_t frames[2] = {{envelope.data, envelope.len}, {body.data, body.len}};
    ck_ok(port_send(port, NULL, frames, 2, &err));
    port_msg_t in;
    lk_status_t status;
    while ((status = port_recv(port, &in, &err)) == LK_INPROGRESS) {
        struct pollfd fd = {port_fd(port), POLLIN, 0};
        ck_assert_int_gt(poll(&fd, 1, WAIT_MS), 0);
    }
    msg_t reply;
    ck_assert_int_eq(status, LK_OK);
    ck_ok(msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data, in.frames[1].len,
                     &reply, &err));
    ck_assert_int_eq(reply.type, MSG_INIT);
    ck_assert_ptr_nonnull(strstr(msg_cstr(reply.init.error), "other flags"));
    msg_fini(&reply);
    port_msg_fini(port, &in);
    port_destroy(&port);
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
}

START_TEST(test_garbage_is_dropped)
{
    static const int parts[] = {PORT_MAX_FRAMES + 1, 1, 2, 3, 100};
    void *ctx = zmq_ctx_new(), *socket = zmq_socket(ctx, ZMQ_DEALER);
    ck_assert_int_eq(zmq_connect(socket, w.address), 0);
    for (size_t i = 0; i < LK_ARRAY_LEN(parts); i++) {
        for (int part = 0; part < parts[i]; part++) {
            int flags = part + 1 < parts[i] ? ZMQ_SNDMORE : 0;
            ck_assert_int_eq(zmq_send(socket, "garbage", 7, flags), 7);
        }
    }
    /* an identity of another length than ours */
    void *named = zmq_socket(ctx, ZMQ_DEALER);
    char identity[200];
    memset(identity, 'x', sizeof identity);
    ck_assert_int_eq(zmq_setsockopt(named, ZMQ_ROUTING_ID, identity, sizeof identity), 0);
    ck_assert_int_eq(zmq_connect(named, w.address), 0);
    ck_assert_int_eq(zmq_send(named, "garbage", 7, 0), 7);
    zmq_close(named); /* lingers until it is sent */
    zmq_close(socket);
    zmq_ctx_term(ctx);
    expect_refusal();
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("coordinator_io");
    TCase *tc = tcase_create("sockets");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, test_garbage_is_dropped);
    suite_add_tcase(s, tc);
    return s;
}
