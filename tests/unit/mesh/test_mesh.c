/* What only the mesh has: connecting, group epochs, frames of a peer that is not one of ours. */
#include "base/check.h"
#include "base/prng.h"
#include "engine_core/dp/mesh_internal.h"
#include "tests/lib/test_main.h"
#include "tests/lib/test_mesh.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static mesh_t *meshes[TEST_MESH_MAX];

static void teardown(void)
{
    for (uint32_t r = 0; r < TEST_MESH_MAX; r++) {
        mesh_destroy(&meshes[r]);
    }
}

static int raw_connect(const char *address)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t len = strlen(address) - strlen("unix:@");
    struct timeval limit = {20, 0};
    memcpy(to.sun_path + 1, address + strlen("unix:@"), len);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
        connect(fd, (struct sockaddr *)&to,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) != 0) {
        return -1;
    }
    return fd;
}

static void raw_send(int fd, const void *data, size_t len)
{
    ck_assert_int_eq(send(fd, data, len, MSG_NOSIGNAL), (ssize_t)len);
}

static void raw_frame(int fd, uint16_t kind, uint64_t epoch, uint64_t seq, uint64_t tag,
                      uint64_t length, const void *body)
{
    mesh_header_t head = {MESH_MAGIC, MESH_VERSION, kind, epoch, seq, tag, length};
    raw_send(fd, &head, sizeof head);
    if (body != NULL) {
        raw_send(fd, body, length);
    }
}

/* meshes[0] is rank 0 of a group of `size` in epoch 5; nobody is connected. */
static void open_rank_0(uint32_t size)
{
    const char *addresses[TEST_MESH_MAX] = {0};
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(mesh_new(0, &meshes[0], &err));
    ck_ok(mesh_connect_post(meshes[0], 5, size, NULL, addresses, &err));
}

/* A raw socket that plays rank 1 of 2. */
static int open_with_raw_peer(void)
{
    lk_error_t err = LK_ERROR_INIT;
    mesh_hello_t hello = {1, 2};
    open_rank_0(2);
    int fd = raw_connect(mesh_address(meshes[0]));
    ck_assert_int_ge(fd, 0);
    raw_frame(fd, FRAME_HELLO, 5, 0, 0, sizeof hello, &hello);
    ck_ok(mesh_connect_test(meshes[0], &err));
    return fd;
}

/* What meshes[0] says once it has read everything. */
static void expect_dead(const char *text)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(mesh_poll(meshes[0], &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, text);
    ck_assert_int_eq(mesh_poll(meshes[0], &err), LK_ERR_PEER); /* it stays so */
    ck_assert_str_eq(err.text, text);
}

START_TEST(test_connect_in_any_order)
{
    enum { SIZE = 4 };
    const char *addresses[SIZE];
    lk_error_t err = LK_ERROR_INIT;
    char text[64];
    for (uint32_t r = 0; r < SIZE; r++) {
        ck_ok(mesh_new(r, &meshes[r], &err));
        addresses[r] = mesh_address(meshes[r]);
        ck_assert_int_eq(strncmp(addresses[r], "unix:@lockstep-mesh-", 20), 0);
    }
    /* the highest rank is told first: its connections wait for the others' INIT */
    for (uint32_t r = SIZE; r-- > 0;) {
        for (uint32_t k = 0; k < SIZE; k++) {
            ck_ok(mesh_poll(meshes[k], &err));
        }
        ck_ok(mesh_connect_post(meshes[r], 9, SIZE, NULL, addresses, &err));
        if (r > 0) {
            ck_assert_int_eq(mesh_connect_test(meshes[r], &err), LK_INPROGRESS);
        }
    }
    mesh_missing(meshes[3], text, sizeof text);
    ck_assert_str_eq(text, "0"); /* told last, it has not answered yet */
    test_deadline_t deadline = test_deadline();
    for (uint32_t done = 0; done < SIZE;) {
        done = 0;
        for (uint32_t r = 0; r < SIZE; r++) {
            lk_status_t status = mesh_connect_test(meshes[r], &err);
            ck_assert_msg(status >= 0, "%s", err.text);
            done += status == LK_OK;
        }
        test_not_over(deadline);
    }
    mesh_missing(meshes[3], text, sizeof text);
    ck_assert_str_eq(text, "");
    struct pollfd pfds[8];
    ck_assert_uint_eq(mesh_pollfds(meshes[3], pfds, 8), 1 + SIZE - 1);
}
END_TEST

START_TEST(test_death_has_a_name)
{
    lk_error_t err = LK_ERROR_INIT;
    test_mesh_open(meshes, 3, 1);
    mesh_destroy(&meshes[2]);
    ck_assert_int_eq(mesh_poll(meshes[0], &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "rank 2 closed its mesh connection");
    ck_assert_int_eq(mesh_poll(meshes[1], &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "rank 2 closed its mesh connection");
}
END_TEST

/* Who leaves says because of whom, so that its own end of file is taken for no death. */
START_TEST(test_leaving_is_no_death)
{
    lk_error_t err = LK_ERROR_INIT;
    for (int dead = 0; dead < 2;
         dead++) { /* rank 1 sees the dead rank's end of file, too, or not */
        test_mesh_open(meshes, 3, 1);
        char old[128];
        snprintf(old, sizeof old, "%s", mesh_address(meshes[0]));
        ck_assert_int_eq(mesh_lost(meshes[1]), -1);
        if (dead) {
            mesh_destroy(&meshes[2]);
        }
        ck_ok(mesh_leave(meshes[0], 2, "rank 2 closed its mesh connection", &err));
        ck_assert_int_eq(mesh_poll(meshes[1], &err), LK_ERR_PEER);
        ck_assert_str_eq(err.text,
                         dead ? "rank 2 closed its mesh connection"
                              : "rank 0 left the group: rank 2 closed its mesh connection");
        ck_assert_int_eq(mesh_lost(meshes[1]), 2);
        ck_ok(mesh_leave(meshes[1], 2, err.text, &err));
        if (!dead) {
            ck_ok(mesh_leave(meshes[2], -1, "told to", &err));
        } else {
            ck_ok(mesh_new(2, &meshes[2], &err));
        }
        ck_assert_str_ne(mesh_address(meshes[0]), old);
        ck_assert_int_lt(raw_connect(old), 0); /* nobody listens there any more */
        test_mesh_connect(meshes, 3, 2);
        ck_assert_int_eq(mesh_lost(meshes[1]), -1);
        teardown();
    }
}
END_TEST

/* The group forms again: nothing of the old epoch is left, votes and exchanges start anew. */
START_TEST(test_new_epoch)
{
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value = 1, out;
    test_mesh_open(meshes, 3, 1);
    allreduce_t a = mesh_allreduce(meshes[0]), b = mesh_allreduce(meshes[1]);
    ep_buf_t nothing[3] = {{0}}, recv[3];
    ck_ok(a.ops->post(a.ctx, 1000, &value, 1, &err));
    ck_ok(b.ops->post(b.ctx, 1000, &value, 1, &err));
    ep_t ex = mesh_ep(meshes[0]);
    ck_ok(ex.ops->post(ex.ctx, 77, nothing, &err));
    mesh_destroy(&meshes[2]);
    ck_assert_int_eq(a.ops->test(a.ctx, &out, &err), LK_ERR_PEER);
    ex.ops->abort(ex.ctx);
    ck_ok(mesh_new(2, &meshes[2], &err));
    test_mesh_connect(meshes, 3, 2);
    for (uint32_t r = 0; r < 3; r++) {
        allreduce_t votes = mesh_allreduce(meshes[r]);
        value = 10 + r;
        ck_ok(votes.ops->post(votes.ctx, 0, &value, 1, &err));
        ex = mesh_ep(meshes[r]);
        ck_ok(ex.ops->post(ex.ctx, 1, nothing, &err));
    }
    for (uint32_t r = 0; r < 3; r++) {
        allreduce_t votes = mesh_allreduce(meshes[r]);
        ex = mesh_ep(meshes[r]);
        lk_status_t vote, exchange;
        test_deadline_t deadline = test_deadline();
        while ((vote = votes.ops->test(votes.ctx, &out, &err)) == LK_INPROGRESS) {
            test_not_over(deadline);
        }
        while ((exchange = ex.ops->test(ex.ctx, recv, &err)) == LK_INPROGRESS) {
            test_not_over(deadline);
        }
        ck_assert_msg(vote == LK_OK && exchange == LK_OK, "%s", err.text);
        ck_assert_uint_eq(out, 10);
    }
}
END_TEST

/* A connection of a later epoch waits; one of an earlier epoch is sent away. */
START_TEST(test_hello_of_other_epochs)
{
    lk_error_t err = LK_ERROR_INIT;
    mesh_hello_t hello = {1, 2};
    const char *addresses[2] = {0};
    char byte;
    open_rank_0(2);
    int old = raw_connect(mesh_address(meshes[0])), fresh = raw_connect(mesh_address(meshes[0]));
    raw_frame(old, FRAME_HELLO, 4, 0, 0, sizeof hello, &hello);
    raw_frame(fresh, FRAME_HELLO, 6, 0, 0, sizeof hello, &hello);
    ck_assert_int_eq(mesh_connect_test(meshes[0], &err), LK_INPROGRESS);
    ck_assert_int_eq(recv(old, &byte, 1, 0), 0);
    ck_assert_int_eq(recv(fresh, &byte, 1, MSG_DONTWAIT), -1);
    ck_ok(mesh_connect_post(meshes[0], 6, 2, NULL, addresses, &err));
    ck_ok(mesh_connect_test(meshes[0], &err));
    mesh_header_t head;
    ck_assert_int_eq(recv(fresh, &head, sizeof head, MSG_WAITALL), sizeof head);
    ck_assert_uint_eq(head.epoch, 6);
    close(old);
    close(fresh);
}
END_TEST

START_TEST(test_strangers_change_nothing)
{
    lk_error_t err = LK_ERROR_INIT;
    mesh_hello_t wrong = {7, 2};
    open_rank_0(2);
    int silent = raw_connect(mesh_address(meshes[0]));
    int garbage = raw_connect(mesh_address(meshes[0]));
    int other = raw_connect(mesh_address(meshes[0]));
    int gone = raw_connect(mesh_address(meshes[0]));
    static const char noise[100] = "GET / HTTP/1.1";
    raw_send(garbage, noise, sizeof noise);
    raw_frame(other, FRAME_HELLO, 5, 0, 0, sizeof wrong, &wrong);
    close(gone);
    ck_assert_int_eq(mesh_connect_test(meshes[0], &err), LK_INPROGRESS);
    char byte;
    ssize_t n = recv(garbage, &byte, 1, 0);
    ck_assert(n == 0 || errno == ECONNRESET); /* unread bytes make it a reset */
    n = recv(other, &byte, 1, 0);
    ck_assert(n == 0 || errno == ECONNRESET);
    mesh_hello_t hello = {1, 2};
    int fd = raw_connect(mesh_address(meshes[0]));
    raw_frame(fd, FRAME_HELLO, 5, 0, 0, sizeof hello, &hello);
    ck_ok(mesh_connect_test(meshes[0], &err));
    close(silent);
    close(garbage);
    close(other);
    close(fd);
}
END_TEST

/* A forged hello of a rank that is there must not cost the group that rank. */
START_TEST(test_second_connection_of_a_rank_is_closed)
{
    lk_error_t err = LK_ERROR_INIT;
    static const mesh_hello_t hellos[] = {{1, 2}, {1, 3}};
    int fd = open_with_raw_peer();
    for (size_t i = 0; i < LK_ARRAY_LEN(hellos); i++) {
        int again = raw_connect(mesh_address(meshes[0]));
        raw_frame(again, FRAME_HELLO, 5, 0, 0, sizeof hellos[i], &hellos[i]);
        struct pollfd closed = {.fd = again, .events = POLLIN};
        while (poll(&closed, 1, 1) == 0) {
            ck_ok(mesh_poll(meshes[0], &err));
        }
        char byte;
        ssize_t n = recv(again, &byte, 1, 0);
        ck_assert(n == 0 || errno == ECONNRESET);
        ck_ok(mesh_poll(meshes[0], &err));
        close(again);
    }
    close(fd);
}
END_TEST

START_TEST(test_other_users_are_refused)
{
    lk_error_t err = LK_ERROR_INIT;
    if (geteuid() != 0) { /* only root can become somebody else */
        return;
    }
    open_rank_0(2);
    int ready[2];
    ck_assert_int_eq(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        char byte;
        int fd = setuid(65534) == 0 ? raw_connect(mesh_address(meshes[0])) : -1;
        if (fd < 0 || write(ready[1], "c", 1) != 1) {
            _exit(2);
        }
        ssize_t n = read(fd, &byte, 1);
        _exit(n == 0 || errno == ECONNRESET ? 0 : 1);
    }
    char byte;
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    ck_assert_int_eq(mesh_connect_test(meshes[0], &err), LK_INPROGRESS);
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
END_TEST

START_TEST(test_other_group_size)
{
    lk_error_t err = LK_ERROR_INIT;
    mesh_hello_t hello = {1, 4};
    open_rank_0(2);
    int fd = raw_connect(mesh_address(meshes[0]));
    raw_frame(fd, FRAME_HELLO, 5, 0, 0, sizeof hello, &hello);
    ck_assert_int_eq(mesh_connect_test(meshes[0], &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "rank 1 knows a group of 4 ranks, rank 0 one of 2");
    close(fd);
}
END_TEST

START_TEST(test_nobody_listens)
{
    lk_error_t err = LK_ERROR_INIT;
    const char *addresses[2][2] = {{"unix:@lockstep-no-such-listener", ""}, {"tcp://x", ""}};
    static const char *const texts[2] = {
        "rank 0 does not listen on the mesh: Connection refused",
        "rank 0 has a bad address: mesh address 'tcp://x': expected unix:@NAME"};
    for (int i = 0; i < 2; i++) {
        ck_ok(mesh_new(1, &meshes[1], &err));
        ck_ok(mesh_connect_post(meshes[1], 1, 2, NULL, addresses[i], &err));
        ck_assert_int_eq(mesh_connect_test(meshes[1], &err), LK_ERR_PEER);
        ck_assert_str_eq(err.text, texts[i]);
        mesh_destroy(&meshes[1]);
    }
}
END_TEST

/* Each hostile frame ends its sender, by name; nothing is reserved for what it claims. */
START_TEST(test_hostile_frames)
{
    static const struct {
        uint16_t kind;
        uint64_t seq, length;
        const char *text;
    } cases[] = {
        {FRAME_VOTE, 1, 7, "rank 1 sent a vote of 7 bytes"},
        {FRAME_VOTE, 1, 8 * (ALLREDUCE_MAX_LEN + 1), "rank 1 sent a vote of 10312 bytes"},
        {FRAME_EXCHANGE, 0, UINT64_MAX, "rank 1 sent a frame of 18446744073709551615 bytes"},
        {FRAME_EXCHANGE, 0, MESH_MAX_EXCHANGE + 1, "rank 1 sent a frame of 1073741825 bytes"},
        {FRAME_EXCHANGE, 1, 0, "rank 1 is out of step: it sends exchange 1, this is 0"},
        {FRAME_HELLO, 0, 8, "rank 1 sent frame 1 after its hello"},
        {99, 0, 0, "rank 1 sent a frame of unknown kind 99"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        int fd = open_with_raw_peer();
        raw_frame(fd, cases[i].kind, 5, cases[i].seq, 0, cases[i].length, NULL);
        expect_dead(cases[i].text);
        close(fd);
        mesh_destroy(&meshes[0]);
    }
    int fd = open_with_raw_peer();
    static const char noise[sizeof(mesh_header_t)] = "not a header";
    raw_send(fd, noise, sizeof noise);
    expect_dead("rank 1 sent what is no mesh frame of version 1");
    close(fd);
}
END_TEST

START_TEST(test_two_rounds_or_exchanges_ahead)
{
    uint64_t value = 1;
    int fd = open_with_raw_peer();
    raw_frame(fd, FRAME_VOTE, 5, 7, 0, 8, &value);
    raw_frame(fd, FRAME_VOTE, 5, 8, 0, 8, &value);
    raw_frame(fd, FRAME_VOTE, 5, 9, 0, 8, &value);
    expect_dead("rank 1 voted in round 9 while round 7 is not decided");
    close(fd);
    mesh_destroy(&meshes[0]);
    fd = open_with_raw_peer();
    raw_frame(fd, FRAME_EXCHANGE, 5, 0, 0, 0, NULL);
    raw_frame(fd, FRAME_EXCHANGE, 5, 0, 0, 0, NULL);
    expect_dead("rank 1 sent exchange 0 twice");
    close(fd);
}
END_TEST

/* Frames of another epoch, or of a round that is decided, are read and dropped. */
START_TEST(test_late_messages_are_dropped)
{
    lk_error_t err = LK_ERROR_INIT;
    int fd = open_with_raw_peer();
    allreduce_t votes = mesh_allreduce(meshes[0]);
    uint64_t mine = 50, theirs = 40, wrong = 1, out = 0;
    static uint8_t bulk[100000];
    raw_frame(fd, FRAME_VOTE, 4, 3, 0, 8, &wrong);
    raw_frame(fd, FRAME_EXCHANGE, 4, 3, 0, sizeof bulk, bulk);
    raw_frame(fd, FRAME_VOTE, 5, 3, 0, 8, &theirs);
    ck_ok(votes.ops->post(votes.ctx, 3, &mine, 1, &err));
    ck_ok(votes.ops->test(votes.ctx, &out, &err));
    ck_assert_uint_eq(out, 40);
    raw_frame(fd, FRAME_VOTE, 5, 3, 0, 8, &wrong);
    ck_ok(mesh_poll(meshes[0], &err));
    ck_assert(!votes.ops->peer_waiting(votes.ctx, 3));
    raw_frame(fd, FRAME_VOTE, 5, 4, 0, 8, &theirs);
    ck_ok(votes.ops->post(votes.ctx, 4, &mine, 1, &err));
    ck_ok(votes.ops->test(votes.ctx, &out, &err));
    ck_assert_uint_eq(out, 40);
    close(fd);
}
END_TEST

/* Votes pass while a large exchange is half written, and an aborted one leaves whole frames. */
START_TEST(test_vote_beside_exchange)
{
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value = 4, out;
    size_t len = 4 << 20;
    uint8_t *bulk = calloc(1, len);
    ep_buf_t send[2] = {{bulk, len}, {bulk, len}}, recv[2];
    bool aborted = _i == 1;
    test_mesh_open(meshes, 2, 1);
    ep_t ex[2] = {mesh_ep(meshes[0]), mesh_ep(meshes[1])};
    allreduce_t votes[2] = {mesh_allreduce(meshes[0]), mesh_allreduce(meshes[1])};
    for (int r = 0; r < 2; r++) {
        ck_ok(ex[r].ops->post(ex[r].ctx, 1, send, &err));
        ck_ok(votes[r].ops->post(votes[r].ctx, 1, &value, 1, &err));
    }
    if (aborted) {
        for (int r = 0; r < 2; r++) {
            ex[r].ops->abort(ex[r].ctx);
        }
        memset(bulk, 0xEE, len); /* the caller's own again */
    }
    test_deadline_t deadline = test_deadline();
    for (int done = 0; done < 2;) {
        for (int r = 0; r < 2; r++) {
            lk_status_t status = votes[r].ops->test(votes[r].ctx, &out, &err);
            ck_assert_msg(status >= 0, "%s", err.text);
            if (status == LK_OK) {
                ck_assert_uint_eq(out, 4);
                ck_ok(votes[r].ops->post(votes[r].ctx, 2, &value, 1, &err));
                done++;
            }
        }
        test_not_over(deadline);
    }
    for (int r = 0; aborted && r < 2; r++) {
        ck_ok(ex[r].ops->post(ex[r].ctx, 2, send, &err));
    }
    for (int r = 0; r < 2; r++) {
        lk_status_t status;
        while ((status = ex[r].ops->test(ex[r].ctx, recv, &err)) == LK_INPROGRESS) {
            test_mesh_poll(meshes, 2);
            test_not_over(deadline);
        }
        ck_assert_msg(status == LK_OK, "%s", err.text);
        ck_assert_uint_eq(recv[1 - r].len, len);
        ck_assert(memcmp(recv[1 - r].data, bulk, len) == 0);
    }
    mesh_stats_t stats;
    mesh_stats(meshes[0], &stats);
    ck_assert_uint_eq(stats.votes_sent, 2);
    ck_assert_uint_eq(stats.exchanges, aborted ? 2 : 1);
    ck_assert_uint_ge(stats.exchange_bytes, len);
    free(bulk);
}
END_TEST

/* Any bytes after the hello end the peer or are taken as frames; never a crash. */
START_TEST(test_random_bytes)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("frames"));
    for (int round = 0; round < 300; round++) {
        lk_error_t err = LK_ERROR_INIT;
        int fd = open_with_raw_peer();
        for (int k = 0; k < 20; k++) {
            uint64_t length = lk_prng_below(&prng, 64) * (1 + lk_prng_below(&prng, 2) * 7);
            uint8_t body[512];
            for (size_t i = 0; i < sizeof body; i++) {
                body[i] = (uint8_t)lk_prng_u64(&prng);
            }
            mesh_header_t head = {MESH_MAGIC,
                                  MESH_VERSION,
                                  (uint16_t)(2 + lk_prng_below(&prng, 2)),
                                  4 + lk_prng_below(&prng, 2),
                                  lk_prng_below(&prng, 3),
                                  lk_prng_below(&prng, 2),
                                  length};
            if (lk_prng_below(&prng, 12) == 0) {
                ((uint8_t *)&head)[lk_prng_below(&prng, sizeof head)] ^= 1u
                                                                         << lk_prng_below(&prng, 8);
            }
            if (send(fd, &head, sizeof head, MSG_NOSIGNAL) < 0 ||
                send(fd, body, length, MSG_NOSIGNAL) < 0) {
                break; /* we were thrown out */
            }
            lk_status_t status = mesh_poll(meshes[0], &err);
            ck_assert(status == LK_OK || status == LK_ERR_PEER);
        }
        close(fd);
        ck_assert_int_eq(mesh_poll(meshes[0], &err), LK_ERR_PEER);
        mesh_destroy(&meshes[0]);
    }
}
END_TEST

/* Ranks 0, 2 and 5 of a larger cluster: texts name ranks, exchanges go by place. */
START_TEST(test_some_ranks_only)
{
    enum { N = 3 };
    static const uint32_t ranks[N] = {0, 2, 5};
    const char *addresses[N];
    lk_error_t err = LK_ERROR_INIT;
    char text[64];
    for (uint32_t i = 0; i < N; i++) {
        ck_ok(mesh_new(ranks[i], &meshes[i], &err));
        addresses[i] = mesh_address(meshes[i]);
    }
    for (uint32_t i = 0; i < N; i++) {
        ck_ok(mesh_connect_post(meshes[i], 3, N, ranks, addresses, &err));
    }
    mesh_missing(meshes[0], text, sizeof text);
    ck_assert_str_eq(text, "2, 5");
    /* a rank that is no member is a stranger */
    mesh_hello_t hello = {1, N};
    char byte;
    int stranger = raw_connect(addresses[0]);
    raw_frame(stranger, FRAME_HELLO, 3, 0, 0, sizeof hello, &hello);
    test_deadline_t deadline = test_deadline();
    for (uint32_t done = 0; done < N;) {
        done = 0;
        for (uint32_t i = 0; i < N; i++) {
            lk_status_t status = mesh_connect_test(meshes[i], &err);
            ck_assert_msg(status >= 0, "%s", err.text);
            done += status == LK_OK;
        }
        test_not_over(deadline);
    }
    ck_ok(mesh_poll(meshes[0], &err));
    ck_assert_int_eq(recv(stranger, &byte, 1, 0), 0);
    close(stranger);
    for (uint32_t i = 0; i < N; i++) {
        allreduce_t votes = mesh_allreduce(meshes[i]);
        ck_assert(votes.rank == i && votes.size == N);
        uint64_t value = 10 - i;
        ck_ok(votes.ops->post(votes.ctx, 0, &value, 1, &err));
        if (i == 0) {
            votes.ops->missing(votes.ctx, text, sizeof text);
            ck_assert_str_eq(text, "2, 5");
        }
        ep_t ex = mesh_ep(meshes[i]);
        ck_assert(ex.rank == i && ex.size == N);
        ep_buf_t send[N];
        static uint8_t bytes[N][N];
        for (uint32_t k = 0; k < N; k++) {
            bytes[i][k] = (uint8_t)(10 * i + k);
            send[k] = (ep_buf_t){&bytes[i][k], 1};
        }
        ck_ok(ex.ops->post(ex.ctx, 1, send, &err));
    }
    for (uint32_t i = 0; i < N; i++) {
        allreduce_t votes = mesh_allreduce(meshes[i]);
        ep_t ex = mesh_ep(meshes[i]);
        uint64_t out = 0;
        ep_buf_t got[N];
        lk_status_t vote, exchange;
        while ((vote = votes.ops->test(votes.ctx, &out, &err)) == LK_INPROGRESS) {
            test_not_over(deadline);
        }
        while ((exchange = ex.ops->test(ex.ctx, got, &err)) == LK_INPROGRESS) {
            test_not_over(deadline);
        }
        ck_assert_msg(vote == LK_OK && exchange == LK_OK, "%s", err.text);
        ck_assert_uint_eq(out, 8);
        for (uint32_t k = 0; k < N; k++) {
            ck_assert_uint_eq(got[k].len, k != i);
            ck_assert(k == i || *(const uint8_t *)got[k].data == 10 * k + i);
        }
    }
    mesh_destroy(&meshes[1]);
    ck_assert_int_eq(mesh_poll(meshes[0], &err), LK_ERR_PEER);
    ck_assert_str_eq(err.text, "rank 2 closed its mesh connection");
    ck_assert_int_eq(mesh_lost(meshes[0]), 2);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("mesh");
    TCase *tc = tcase_create("mesh");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, NULL, teardown);
    tcase_add_test(tc, test_connect_in_any_order);
    tcase_add_test(tc, test_death_has_a_name);
    tcase_add_test(tc, test_leaving_is_no_death);
    tcase_add_test(tc, test_new_epoch);
    tcase_add_test(tc, test_hello_of_other_epochs);
    tcase_add_test(tc, test_strangers_change_nothing);
    tcase_add_test(tc, test_second_connection_of_a_rank_is_closed);
    tcase_add_test(tc, test_other_users_are_refused);
    tcase_add_test(tc, test_other_group_size);
    tcase_add_test(tc, test_nobody_listens);
    tcase_add_test(tc, test_hostile_frames);
    tcase_add_test(tc, test_two_rounds_or_exchanges_ahead);
    tcase_add_test(tc, test_late_messages_are_dropped);
    tcase_add_loop_test(tc, test_vote_beside_exchange, 0, 2);
    tcase_add_test(tc, test_random_bytes);
    tcase_add_test(tc, test_some_ranks_only);
    suite_add_tcase(suite, tc);
    return suite;
}
