/* The contract of base/port.h, over every implementation: memory, ZeroMQ ipc, ZeroMQ tcp. */
#include "base/check.h"
#include "base/env.h"
#include "base/port.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_NS (20 * LK_SECOND_NS) /* the longest that a message may take before a test fails */

enum { MEM, ZMQ_IPC, ZMQ_TCP, N_IMPLS };
static int impl;
static port_mem_hub_t *hub;

static lk_status_t try_open(port_kind_t kind, bool bind, const char *address,
                            const port_peer_t *identity, lk_port_t **out, lk_error_t *err)
{
    return impl == MEM ? port_mem_open(hub, kind, bind, address, identity, out, err)
                       : port_zmq_open(kind, bind, address, identity, out, err);
}

static lk_port_t *open_port(port_kind_t kind, bool bind, const char *address, const char *name)
{
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    port_peer_t id = {.len = name != NULL ? strlen(name) : 0};
    memcpy(id.id, name != NULL ? name : "", id.len);
    lk_status_t status = try_open(kind, bind, address, name != NULL ? &id : NULL, &port, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
    return port;
}

/* An address to bind; peers connect to the port's own port_address. */
static const char *fresh_address(void)
{
    static char address[128];
    if (impl == ZMQ_TCP) {
        snprintf(address, sizeof address, "tcp://127.0.0.1:*");
    } else {
        port_ipc_address("test", address, sizeof address);
    }
    return address;
}

static lk_status_t wait_recv(lk_port_t *port, port_msg_t *msg, lk_error_t *err)
{
    uint64_t end = lk_env_now_ns(lk_env_real()) + WAIT_NS;
    for (;;) {
        lk_status_t status = port_recv(port, msg, err);
        if (status != LK_INPROGRESS || port_fd(port) < 0) {
            return status;
        }
        uint64_t now = lk_env_now_ns(lk_env_real());
        ck_assert_msg(now < end, "nothing came");
        struct pollfd pfd = {port_fd(port), POLLIN, 0};
        ck_assert_int_ge(poll(&pfd, 1, (int)((end - now) / LK_MS_NS) + 1), 0);
    }
}

static void expect_text(lk_port_t *port, const char *text, port_peer_t *peer)
{
    port_msg_t msg;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(wait_recv(port, &msg, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(msg.n_frames, 1);
    ck_assert_uint_eq(msg.frames[0].len, strlen(text));
    ck_assert_mem_eq(msg.frames[0].data, text, strlen(text));
    if (peer != NULL) {
        *peer = msg.peer;
    }
    port_msg_fini(port, &msg);
    port_msg_fini(port, &msg);
}

static lk_status_t send_text(lk_port_t *port, const port_peer_t *peer, const char *text)
{
    lk_error_t err;
    port_frame_t frame = {text, strlen(text)};
    return port_send(port, peer, &frame, 1, &err);
}

static void setup(void)
{
    hub = port_mem_hub_new();
}

static void teardown(void)
{
    port_mem_hub_destroy(&hub);
}

START_TEST(test_request_and_reply)
{
    impl = _i;
    lk_port_t *router = open_port(PORT_ROUTER, true, fresh_address(), NULL);
    lk_port_t *dealer = open_port(PORT_DEALER, false, port_address(router), "engine-1");
    port_msg_t msg;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(port_recv(router, &msg, &err), LK_INPROGRESS);
    ck_assert_int_eq(port_recv(dealer, &msg, &err), LK_INPROGRESS);
    port_frame_t frames[3] = {{"one", 3}, {NULL, 0}, {"\0\1\0", 3}};
    ck_ok(port_send(dealer, NULL, frames, 3, &err));
    ck_ok(wait_recv(router, &msg, &err));
    ck_assert_uint_eq(msg.n_frames, 3);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_uint_eq(msg.frames[i].len, frames[i].len);
        ck_assert(frames[i].len == 0 || memcmp(msg.frames[i].data, frames[i].data, 3) == 0);
    }
    ck_assert_uint_eq(msg.peer.len, 8);
    ck_assert_mem_eq(msg.peer.id, "engine-1", 8);
    ck_ok(send_text(router, &msg.peer, "reply"));
    port_msg_fini(router, &msg);
    expect_text(dealer, "reply", NULL);
    ck_assert_int_eq(port_recv(dealer, &msg, &err), LK_INPROGRESS);
    port_destroy(&dealer);
    port_destroy(&router);
    ck_assert_ptr_null(router);
    port_destroy(&router);
}
END_TEST

START_TEST(test_order_without_gaps)
{
    impl = _i;
    enum { N = 2000, PEERS = 3 };
    lk_port_t *router = open_port(PORT_ROUTER, true, fresh_address(), NULL);
    lk_port_t *dealers[PEERS];
    port_peer_t peers[PEERS];
    char text[32];
    for (int d = 0; d < PEERS; d++) {
        dealers[d] = open_port(PORT_DEALER, false, port_address(router), NULL);
        ck_ok(send_text(dealers[d], NULL, "hello"));
        expect_text(router, "hello", &peers[d]);
    }
    for (int i = 0; i < N; i++) {
        for (int d = 0; d < PEERS; d++) {
            snprintf(text, sizeof text, "up %d %d", d, i);
            ck_ok(send_text(dealers[d], NULL, text));
            snprintf(text, sizeof text, "down %d %d", d, i);
            ck_ok(send_text(router, &peers[d], text));
        }
    }
    int seen[PEERS] = {0};
    for (int i = 0; i < N * PEERS; i++) {
        port_msg_t msg;
        lk_error_t err = LK_ERROR_INIT;
        ck_ok(wait_recv(router, &msg, &err));
        int d, number;
        snprintf(text, sizeof text, "%.*s", (int)msg.frames[0].len,
                 (const char *)msg.frames[0].data);
        ck_assert_int_eq(sscanf(text, "up %d %d", &d, &number), 2);
        ck_assert_int_eq(number, seen[d]++);
        ck_assert_mem_eq(msg.peer.id, peers[d].id, peers[d].len);
        port_msg_fini(router, &msg);
    }
    for (int d = 0; d < PEERS; d++) {
        for (int i = 0; i < N; i++) {
            snprintf(text, sizeof text, "down %d %d", d, i);
            expect_text(dealers[d], text, NULL);
        }
        port_destroy(&dealers[d]);
    }
    port_destroy(&router);
}
END_TEST

START_TEST(test_unknown_peer)
{
    impl = _i;
    lk_port_t *router = open_port(PORT_ROUTER, true, fresh_address(), NULL);
    port_peer_t peer = {"nobody", 6};
    ck_assert_int_eq(send_text(router, &peer, "lost"), LK_ERR_UNAVAILABLE);
    lk_port_t *dealer = open_port(PORT_DEALER, false, port_address(router), "nobody");
    ck_ok(send_text(dealer, NULL, "here"));
    expect_text(router, "here", NULL);
    ck_ok(send_text(router, &peer, "found"));
    expect_text(dealer, "found", NULL); /* and not "lost" */
    port_destroy(&dealer);
    port_destroy(&router);
}
END_TEST

START_TEST(test_connect_before_bind)
{
    impl = _i;
    char address[128];
    lk_port_t *first = open_port(PORT_PULL, true, fresh_address(), NULL);
    snprintf(address, sizeof address, "%s", port_address(first));
    port_destroy(&first); /* an address that is free (again) */
    lk_port_t *push = open_port(PORT_PUSH, false, address, NULL);
    ck_ok(send_text(push, NULL, "early 1"));
    ck_ok(send_text(push, NULL, "early 2"));
    lk_port_t *pull = open_port(PORT_PULL, true, address, NULL);
    ck_ok(send_text(push, NULL, "late"));
    expect_text(pull, "early 1", NULL);
    expect_text(pull, "early 2", NULL);
    expect_text(pull, "late", NULL);
    port_destroy(&push);
    port_destroy(&pull);
}
END_TEST

START_TEST(test_push_pull)
{
    impl = _i;
    lk_port_t *pull = open_port(PORT_PULL, true, fresh_address(), NULL);
    lk_port_t *a = open_port(PORT_PUSH, false, port_address(pull), NULL);
    lk_port_t *b = open_port(PORT_PUSH, false, port_address(pull), NULL);
    ck_ok(send_text(a, NULL, "from a"));
    expect_text(pull, "from a", NULL);
    ck_ok(send_text(b, NULL, "from b"));
    expect_text(pull, "from b", NULL);
    port_destroy(&a);
    port_destroy(&b);
    port_destroy(&pull);
}
END_TEST

START_TEST(test_bound_push_without_peer)
{
    impl = _i;
    lk_port_t *push = open_port(PORT_PUSH, true, fresh_address(), NULL);
    ck_assert_int_eq(send_text(push, NULL, "to whom"), LK_ERR_UNAVAILABLE);
    ck_assert_int_eq(port_fd(push), -1);
    port_destroy(&push);
}
END_TEST

START_TEST(test_publish)
{
    impl = _i;
    lk_port_t *pub = open_port(PORT_PUB, true, fresh_address(), NULL);
    ck_ok(send_text(pub, NULL, "nobody listens"));
    lk_port_t *subs[2];
    port_msg_t msg;
    lk_error_t err;
    for (int i = 0; i < 2; i++) {
        subs[i] = open_port(PORT_SUB, false, port_address(pub), NULL);
    }
    for (int i = 0; i < 2; i++) { /* a subscription takes a moment: publish until it is there */
        uint64_t end = lk_env_now_ns(lk_env_real()) + WAIT_NS;
        do {
            ck_assert(lk_env_now_ns(lk_env_real()) < end);
            ck_ok(send_text(pub, NULL, "tick"));
            if (port_fd(subs[i]) >= 0) {
                struct pollfd pfd = {port_fd(subs[i]), POLLIN, 0};
                ck_assert_int_ge(poll(&pfd, 1, 2), 0);
            }
        } while (port_recv(subs[i], &msg, &err) != LK_OK);
        ck_assert_mem_eq(msg.frames[0].data, "tick", 4);
        port_msg_fini(subs[i], &msg);
    }
    port_destroy(&subs[0]);
    port_destroy(&pub);
    port_destroy(&subs[1]);
}
END_TEST

START_TEST(test_large_frames)
{
    impl = _i;
    size_t len = 8 << 20;
    uint8_t *data = malloc(len);
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("large"));
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = lk_prng_u64(&prng);
        memcpy(data + i, &word, 8);
    }
    lk_port_t *pull = open_port(PORT_PULL, true, fresh_address(), NULL);
    lk_port_t *push = open_port(PORT_PUSH, false, port_address(pull), NULL);
    lk_error_t err = LK_ERROR_INIT;
    port_frame_t frames[PORT_MAX_FRAMES];
    for (size_t i = 0; i < PORT_MAX_FRAMES; i++) {
        frames[i] = (port_frame_t){data + i, i % 2 == 0 ? len - i : i};
    }
    ck_ok(port_send(push, NULL, frames, PORT_MAX_FRAMES, &err));
    memset(data, 0xEE, 1); /* the caller's buffer is its own again */
    port_msg_t msg;
    ck_ok(wait_recv(pull, &msg, &err));
    ck_assert_uint_eq(msg.n_frames, PORT_MAX_FRAMES);
    for (size_t i = 1; i < PORT_MAX_FRAMES; i++) {
        ck_assert_uint_eq(msg.frames[i].len, frames[i].len);
        ck_assert(memcmp(msg.frames[i].data, frames[i].data, frames[i].len) == 0);
    }
    ck_assert_uint_eq(msg.frames[0].len, len);
    port_msg_fini(pull, &msg);
    port_frame_t huge = {data, PORT_MAX_MESSAGE + 1}; /* refused before a byte of it is read */
    ck_assert_int_eq(port_send(push, NULL, &huge, 1, &err), LK_ERR_TOO_LARGE);
    port_destroy(&push);
    port_destroy(&pull);
    free(data);
}
END_TEST

/* Sending between a drained recv and the wait must not swallow the wake-up (ZMQ_FD would). */
START_TEST(test_no_lost_wake_up)
{
    impl = _i;
    lk_port_t *router = open_port(PORT_ROUTER, true, fresh_address(), NULL);
    lk_port_t *dealer = open_port(PORT_DEALER, false, port_address(router), "d");
    port_peer_t peer;
    ck_ok(send_text(dealer, NULL, "hello"));
    expect_text(router, "hello", &peer);
    for (int i = 0; i < 1000; i++) {
        ck_ok(send_text(dealer, NULL, "ping"));
        ck_ok(send_text(router, &peer, "pong"));
        ck_ok(send_text(dealer, NULL, "ping"));
        ck_ok(send_text(router, &peer, "pong"));
        for (int k = 0; k < 2; k++) { /* one message per wake-up, the second left lying */
            if (port_fd(router) >= 0) {
                struct pollfd pfds[2] = {{port_fd(router), POLLIN, 0},
                                         {port_fd(dealer), POLLIN, 0}};
                ck_assert_int_gt(poll(&pfds[0], 1, (int)(WAIT_NS / LK_MS_NS)), 0);
                ck_assert_int_gt(poll(&pfds[1], 1, (int)(WAIT_NS / LK_MS_NS)), 0);
            }
            expect_text(router, "ping", NULL);
            expect_text(dealer, "pong", NULL);
        }
    }
    port_destroy(&dealer);
    port_destroy(&router);
}
END_TEST

START_TEST(test_bad_arguments)
{
    impl = _i;
    static const char *const addresses[] = {"", "ipc://", "udp://127.0.0.1:1", "tcp:/x",
                                            "nonsense"};
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    for (size_t i = 0; i < LK_ARRAY_LEN(addresses); i++) {
        err.text[0] = '\0';
        ck_assert_int_eq(try_open(PORT_PULL, true, addresses[i], NULL, &port, &err),
                         LK_ERR_INVALID);
        ck_assert(err.text[0] != '\0');
    }
    char longest[400] = "ipc://@";
    memset(longest + 7, 'x', 300);
    ck_assert_int_eq(try_open(PORT_PULL, true, longest, NULL, &port, &err), LK_ERR_INVALID);
    port_peer_t ids[] = {
        {.len = 0}, {.id = {0, 1}, .len = 2}, {.id = {1}, .len = PORT_MAX_PEER + 1}};
    for (size_t i = 0; i < LK_ARRAY_LEN(ids); i++) {
        ck_assert_int_eq(try_open(PORT_DEALER, false, "ipc://@x", &ids[i], &port, &err),
                         LK_ERR_INVALID);
    }
    lk_port_t *pull = open_port(PORT_PULL, true, fresh_address(), NULL);
    ck_assert_int_eq(try_open(PORT_PULL, true, port_address(pull), NULL, &port, &err), LK_ERR_IO);
    ck_assert(strstr(err.text, port_address(pull)) != NULL);
    ck_assert_ptr_null(port);
    port_destroy(&pull);
}
END_TEST

/* An engine that restarts under its name is the one that gets the answers. */
START_TEST(test_name_taken_over)
{
    impl = _i;
    lk_port_t *router = open_port(PORT_ROUTER, true, fresh_address(), NULL);
    lk_port_t *old = open_port(PORT_DEALER, false, port_address(router), "e0");
    port_peer_t peer;
    ck_ok(send_text(old, NULL, "old"));
    expect_text(router, "old", &peer);
    lk_port_t *fresh = open_port(PORT_DEALER, false, port_address(router), "e0");
    ck_ok(send_text(fresh, NULL, "new"));
    expect_text(router, "new", NULL);
    ck_ok(send_text(router, &peer, "for the new one"));
    expect_text(fresh, "for the new one", NULL);
    port_destroy(&old);
    port_destroy(&fresh);
    port_destroy(&router);
}
END_TEST

/* What was sent before the port is destroyed arrives; what cannot arrive does not hold it up. */
START_TEST(test_last_words)
{
    impl = _i;
    lk_port_t *pull = open_port(PORT_PULL, true, fresh_address(), NULL);
    lk_port_t *push = open_port(PORT_PUSH, false, port_address(pull), NULL);
    ck_ok(send_text(push, NULL, "last words"));
    port_destroy(&push);
    expect_text(pull, "last words", NULL);
    port_destroy(&pull);
    lk_port_t *nowhere =
        open_port(PORT_PUSH, false, impl == ZMQ_TCP ? "tcp://127.0.0.1:1" : "ipc://@nobody", NULL);
    ck_ok(send_text(nowhere, NULL, "into the void"));
    uint64_t start = lk_env_now_ns(lk_env_real());
    port_destroy(&nowhere);
    ck_assert(lk_env_now_ns(lk_env_real()) - start < 10 * LK_SECOND_NS);
}
END_TEST

Suite *test_suite(void)
{
    const struct {
        const char *name;
        const TTest *test;
    } tests[] = {
        {"request_and_reply", test_request_and_reply},
        {"order_without_gaps", test_order_without_gaps},
        {"unknown_peer", test_unknown_peer},
        {"connect_before_bind", test_connect_before_bind},
        {"push_pull", test_push_pull},
        {"bound_push_without_peer", test_bound_push_without_peer},
        {"publish", test_publish},
        {"large_frames", test_large_frames},
        {"no_lost_wake_up", test_no_lost_wake_up},
        {"bad_arguments", test_bad_arguments},
        {"name_taken_over", test_name_taken_over},
        {"last_words", test_last_words},
    };
    Suite *suite = suite_create("port");
    for (size_t i = 0; i < LK_ARRAY_LEN(tests); i++) {
        TCase *tc = tcase_create(tests[i].name);
        tcase_set_timeout(tc, 60);
        tcase_add_checked_fixture(tc, setup, teardown);
        tcase_add_loop_test(tc, tests[i].test, 0, N_IMPLS);
        suite_add_tcase(suite, tc);
    }
    return suite;
}
