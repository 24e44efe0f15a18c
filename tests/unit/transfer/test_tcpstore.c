#include "base/buf.h"
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/tcp/tcp_stream.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- a clock that moves only when told ---- */

static uint64_t now_ns;

static uint64_t told_now(void *ctx)
{
    return now_ns;
}

static const lk_env_t told_env = {.now_ns = told_now};

/* ---- a stream that plays a recording: what the peer says, and what was said to it ---- */

typedef struct {
    byte_stream_t base;
    const uint8_t *says;
    size_t len, at, piece; /* at most `piece` bytes per read and write */
    bool closes;           /* after the last byte, instead of silence */
    bool refuses;
    lk_buf_t heard;
} script_t;

static lk_status_t script_connect(byte_stream_t *base, lk_error_t *err)
{
    script_t *self = (script_t *)base;
    return self->refuses ? LK_INPROGRESS : LK_OK;
}

static lk_status_t script_readv(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                                lk_error_t *err)
{
    script_t *self = (script_t *)base;
    size_t take = LK_MIN(LK_MIN(iov[0].iov_len, self->piece), self->len - self->at);
    if (take == 0) {
        return self->closes ? lk_error_set(err, LK_ERR_PEER, "closed the connection")
                            : LK_INPROGRESS;
    }
    memcpy(iov[0].iov_base, self->says + self->at, take);
    self->at += take;
    *moved = take;
    return LK_OK;
}

static lk_status_t script_writev(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                                 lk_error_t *err)
{
    script_t *self = (script_t *)base;
    *moved = LK_MIN(iov[0].iov_len, self->piece);
    lk_buf_append(&self->heard, iov[0].iov_base, *moved);
    return LK_OK;
}

static int script_fd(const byte_stream_t *base)
{
    return -1;
}

static void script_destroy(byte_stream_t *base)
{
}

static const byte_stream_ops_t script_ops = {.connect = script_connect,
                                             .readv = script_readv,
                                             .writev = script_writev,
                                             .fd = script_fd,
                                             .destroy = script_destroy};

static int dials;

static byte_stream_t *script_dial(void *ctx)
{
    script_t *self = ctx;
    self->base.ops = &script_ops;
    snprintf(self->base.peer, sizeof self->base.peer, "10.0.0.1:29500");
    self->at = 0;
    dials++;
    return &self->base;
}

static tcpstore_client_t *client_of(script_t *script, uint32_t nonce)
{
    dials = 0;
    tcpstore_client_t *client = tcpstore_client_new((tcpstore_dialer_t){script_dial, script},
                                                    &told_env, 30 * LK_SECOND_NS, nonce);
    ck_assert_ptr_nonnull(client);
    return client;
}

/* ---- the recording ---- */

static json_t *recording;

static void add_hex(lk_buf_t *buf, const char *hex)
{
    for (size_t i = 0; hex[i] != '\0'; i += 2) {
        char two[3] = {hex[i], hex[i + 1], '\0'};
        uint8_t byte = (uint8_t)strtoul(two, NULL, 16);
        lk_buf_append(buf, &byte, 1);
    }
}

/* The first n messages of one side. */
static void recorded(const char *kind, const char *from, size_t n, lk_buf_t *out)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/wire/tcpstore.json", test_fixtures());
    if (recording == NULL) {
        recording = json_load_file(path, 0, NULL);
        ck_assert_ptr_nonnull(recording);
    }
    lk_buf_init(out, 0);
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(json_object_get(recording, kind), "log"), i, entry)
    {
        if (i < n && strcmp(json_string_value(json_object_get(entry, "frm")), from) == 0) {
            add_hex(out, json_string_value(json_object_get(entry, "hex")));
        }
    }
}

#define WORKER_MESSAGES 8u /* up to the answer to GET */
#define RECORDED_NONCE  414u

static const char *const kinds[] = {"plain", "libuv"};

START_TEST(the_client_says_what_torch_says)
{
    for (size_t piece = 1; piece < 300; piece = piece * 4 + 1) {
        lk_buf_t says, hears;
        recorded(kinds[_i], "server", WORKER_MESSAGES, &says);
        recorded(kinds[_i], "client", WORKER_MESSAGES, &hears);
        script_t script = {.says = says.data, .len = says.len, .piece = piece};
        tcpstore_client_t *client = client_of(&script, RECORDED_NONCE);
        uint8_t id[NCCL_ID_BYTES];
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_msg(tcpstore_client_step(client, id, &err) == LK_OK, "%s", err.text);
        for (int i = 0; i < NCCL_ID_BYTES; i++) {
            ck_assert_uint_eq(id[i], (uint8_t)i);
        }
        ck_assert_int_eq(tcpstore_client_workers(client), 2);
        ck_assert_uint_eq(script.heard.len, hears.len);
        ck_assert_mem_eq(script.heard.data, hears.data, hears.len);
        tcpstore_client_destroy(&client);
        lk_buf_fini(&script.heard);
        lk_buf_fini(&says);
        lk_buf_fini(&hears);
    }
    json_decref(recording);
    recording = NULL;
}
END_TEST

/* ---- what goes wrong, and what it says ---- */

#define P(text) text, sizeof(text) - 1
#define PONG    "\x07\0\0\0"
#define COUNTED "\x01\0\0\0\0\0\0\0"

static const struct {
    const char *says;
    size_t len;
    bool closes;
    lk_status_t status;
    const char *text;
} failures[] = {
    {P(""), false, LK_ERR_TIMEOUT, "to answer the ping"},
    {P("\x07\0\0"), false, LK_ERR_TIMEOUT, "to answer the ping"},
    {P("HTTP/1.1 400 Bad Request"), false, LK_ERR_PEER, "is this a TCPStore?"},
    {P("\x07\0\0"), true, LK_ERR_TIMEOUT, "closed the connection"},
    {P(PONG), true, LK_ERR_PEER, "closed the connection"},
    {P(PONG), false, LK_ERR_TIMEOUT, "to count this worker"},
    {P(PONG "\0\0\0\0\0\0\0\0"), false, LK_ERR_PEER, "counts 0 workers"},
    {P(PONG COUNTED), false, LK_ERR_TIMEOUT, "once all workers have joined); it had counted 1"},
    {P(PONG COUNTED), true, LK_ERR_PEER, "closed the connection"},
    {P(PONG COUNTED "\1"), false, LK_ERR_PEER, "canceled the wait"},
    {P(PONG COUNTED "\0"), false, LK_ERR_TIMEOUT, "to send the id"},
    {P(PONG COUNTED "\0\xff\xff\xff\xff\xff\xff\xff\xff"), false, LK_ERR_PEER, "is no id"},
    {P(PONG COUNTED "\0\x01\0\x01\0\0\0\0\0"), false, LK_ERR_PEER, "65537 bytes is no id"},
    {P(PONG COUNTED "\0\x04\0\0\0\0\0\0\0abc"), false, LK_ERR_TIMEOUT, "to send the id"},
    {P(PONG COUNTED "\0\0\0\0\0\0\0\0\0"), false, LK_ERR_INVALID, "pickle: no PROTO"},
    {P(PONG COUNTED "\0\x04\0\0\0\0\0\0\0\x80\x04N."), false, LK_ERR_INVALID,
     "no pickled ncclUniqueId"},
};

START_TEST(failures_have_names)
{
    script_t script = {.says = (const uint8_t *)failures[_i].says,
                       .len = failures[_i].len,
                       .piece = 3,
                       .closes = failures[_i].closes};
    tcpstore_client_t *client = client_of(&script, 7);
    uint8_t id[NCCL_ID_BYTES];
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t st;
    while ((st = tcpstore_client_step(client, id, &err)) == LK_INPROGRESS) {
        now_ns += LK_SECOND_NS / 2;
        ck_assert_uint_lt(now_ns, 40 * LK_SECOND_NS);
    }
    ck_assert_msg(st == failures[_i].status, "%d %s", st, err.text);
    ck_assert_msg(strstr(err.text, failures[_i].text) != NULL, "%s", err.text);
    ck_assert_ptr_nonnull(strstr(err.text, "10.0.0.1:29500"));
    tcpstore_client_destroy(&client);
    lk_buf_fini(&script.heard);
}
END_TEST

START_TEST(connections_are_tried_again_until_the_store_has_counted)
{
    script_t script = {.says = (const uint8_t *)"", .piece = 64, .closes = true};
    tcpstore_client_t *client = client_of(&script, 7);
    uint8_t id[NCCL_ID_BYTES];
    lk_error_t err = LK_ERROR_INIT;
    for (int i = 0; i < 10; i++) {
        ck_assert_int_eq(tcpstore_client_step(client, id, &err), LK_INPROGRESS);
        ck_assert_int_eq(tcpstore_client_step(client, id, &err), LK_INPROGRESS); /* not at once */
        ck_assert_int_eq(dials, i + 1);
        now_ns += LK_SECOND_NS / 4;
    }
    script.refuses = true;
    snprintf(script.base.note, sizeof script.base.note, "Connection refused");
    ck_assert_int_eq(tcpstore_client_step(client, id, &err), LK_INPROGRESS);
    char text[512];
    tcpstore_client_waits_for(client, text, sizeof text);
    ck_assert_str_eq(text, "10.0.0.1:29500 to accept a connection (last: Connection refused)");
    tcpstore_client_destroy(&client);
    lk_buf_fini(&script.heard);
}
END_TEST

/* ---- over sockets ---- */

typedef struct {
    tcpstore_server_t *server;
    uint16_t port;
} live_t;

static live_t live_new(void)
{
    live_t live = {0};
    int fd = -1;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tcp_listen("127.0.0.1", 0, 8, &fd, &live.port, &err) == LK_OK, "%s", err.text);
    live.server = tcpstore_server_new(fd);
    ck_assert_ptr_nonnull(live.server);
    return live;
}

static byte_stream_t *live_dial(void *ctx)
{
    return tcp_stream_dial("127.0.0.1", ((live_t *)ctx)->port, lk_env_real());
}

static void wait_for(const live_t *live, tcpstore_client_t *const *clients, size_t n)
{
    struct pollfd fds[16];
    size_t used = tcpstore_server_pollfds(live->server, fds, 8);
    used = LK_MIN(used, 8u);
    for (size_t i = 0; i < n; i++) {
        used += tcpstore_client_pollfds(clients[i], fds + used, 1);
    }
    (void)poll(fds, used, 100);
}

START_TEST(three_workers_meet_at_the_store)
{
    enum { N = 3 };
    live_t live = live_new();
    tcpstore_client_t *clients[N];
    lk_status_t st[N];
    uint8_t sent[NCCL_ID_BYTES], ids[N][NCCL_ID_BYTES], pickled[PICKLE_UNIQUE_ID_BYTES];
    memset(sent, 0x5a, sizeof sent);
    pickle_unique_id_write(sent, pickled);
    for (size_t i = 0; i < N; i++) {
        clients[i] = tcpstore_client_new((tcpstore_dialer_t){live_dial, &live}, lk_env_real(),
                                         20 * LK_SECOND_NS, (uint32_t)i);
        st[i] = LK_INPROGRESS;
    }
    bool set = false;
    for (size_t done = 0; done < N;) {
        tcpstore_server_step(live.server);
        if (!set && tcpstore_server_workers(live.server) == N) {
            ck_assert_uint_eq(done, 0);
            set = tcpstore_server_set(live.server, TCPSTORE_ID_KEY, pickled, sizeof pickled);
            ck_assert(set);
        }
        for (size_t i = 0; i < N; i++) {
            lk_error_t err = LK_ERROR_INIT;
            if (st[i] == LK_INPROGRESS) {
                st[i] = tcpstore_client_step(clients[i], ids[i], &err);
                ck_assert_msg(st[i] >= 0, "%s", err.text);
                done += st[i] == LK_OK;
            }
        }
        wait_for(&live, clients, N);
    }
    for (size_t i = 0; i < N; i++) {
        ck_assert_mem_eq(ids[i], sent, sizeof sent);
        tcpstore_client_destroy(&clients[i]);
    }
    tcpstore_server_destroy(&live.server);
}
END_TEST

/* A peer that says `bytes` (in pieces) and hears until `want` bytes came or it is closed. */
static size_t talk(live_t *live, const uint8_t *bytes, size_t len, size_t piece, uint8_t *heard,
                   size_t want, bool *closed)
{
    byte_stream_t *stream = live_dial(live);
    lk_error_t err = LK_ERROR_INIT;
    size_t sent = 0, got = 0;
    *closed = false;
    while (stream->ops->connect(stream, &err) == LK_INPROGRESS) {
        tcpstore_server_step(live->server);
    }
    for (int idle = 0; idle < 200 && !*closed && (sent < len || got < want); idle++) {
        struct iovec out = {(void *)(bytes + sent), LK_MIN(piece, len - sent)};
        size_t moved = 0;
        if (sent < len && stream->ops->writev(stream, &out, 1, &moved, &err) == LK_OK) {
            sent += moved;
            idle = 0;
        }
        tcpstore_server_step(live->server);
        struct iovec in = {heard + got, 4096 - got};
        lk_status_t st = stream->ops->readv(stream, &in, 1, &moved, &err);
        if (st == LK_OK) {
            got += moved;
            idle = 0;
        } else if (st == LK_INPROGRESS) {
            struct pollfd fd = {.fd = stream->ops->fd(stream), .events = POLLIN};
            (void)poll(&fd, 1, sent < len ? 0 : 5);
        }
        *closed = st < 0;
    }
    byte_stream_destroy(&stream);
    return got;
}

START_TEST(the_server_answers_as_torch_does)
{
    live_t live = live_new();
    lk_buf_t says, hears;
    recorded(kinds[_i], "client", SIZE_MAX, &says);
    recorded(kinds[_i], "server", SIZE_MAX, &hears);
    /* the recorded store had been counted by its master, and had the id */
    size_t len;
    uint8_t pickled[PICKLE_UNIQUE_ID_BYTES], id[NCCL_ID_BYTES], heard[4096];
    for (len = 0; len < sizeof id; len++) {
        id[len] = (uint8_t)len;
    }
    pickle_unique_id_write(id, pickled);
    ck_assert(tcpstore_server_set(live.server, TCPSTORE_WORKERS_KEY, "1", 1));
    ck_assert(tcpstore_server_set(live.server, TCPSTORE_ID_KEY, pickled, sizeof pickled));
    bool closed;
    size_t got = talk(&live, says.data, says.len, 7, heard, hears.len, &closed);
    ck_assert(!closed);
    ck_assert_uint_eq(got, hears.len);
    ck_assert_mem_eq(heard, hears.data, hears.len);
    lk_buf_fini(&says);
    lk_buf_fini(&hears);
    json_decref(recording);
    recording = NULL;
    tcpstore_server_destroy(&live.server);
}
END_TEST

#define HELLO "\0\xce\xf7\x85\x3c"

static const struct {
    const char *bytes;
    size_t len;
} rude[] = {
    {P("GET / HTTP/1.1\r\n")},
    {P("\0\xce\xf7\x85\x3d")},
    {P("\x0d\1\0\0\0")},                              /* before VALIDATE */
    {P(HELLO HELLO)},                                 /* twice */
    {P(HELLO "\x63")},                                /* no such request */
    {P(HELLO "\3\xff\xff\xff\xff\xff\xff\xff\xff")},  /* a key of 2^64 - 1 bytes */
    {P(HELLO "\6\xff\xff\xff\xff\xff\xff\xff\x7f")},  /* 2^63 keys */
    {P(HELLO "\1\1\0\0\0\0\0\0\0k\0\0\0\0\1\0\0\0")}, /* a value of 4 GB */
    {P(HELLO "\4\1\0\0\0\0\0\0\0k\xff\xff\xff\xff\xff\xff\xff\x7f"
             "\4\1\0\0\0\0\0\0\0k\1\0\0\0\0\0\0\0")}, /* a counter that overflows */
};

START_TEST(rude_peers_lose_their_connection)
{
    live_t live = live_new();
    uint8_t heard[4096];
    bool closed;
    (void)talk(&live, (const uint8_t *)rude[_i].bytes, rude[_i].len, 64, heard, 4096, &closed);
    ck_assert(closed);
    /* and others do not notice */
    size_t got = talk(&live, (const uint8_t *)HELLO "\x0d\1\2\3\4", 10, 64, heard, 4, &closed);
    ck_assert(!closed && got == 4);
    ck_assert_mem_eq(heard, "\1\2\3\4", 4);
    tcpstore_server_destroy(&live.server);
}
END_TEST

/* More answers than are kept for it: one would be missing, and it couldn't know which. */
START_TEST(a_peer_that_asks_without_reading_is_closed)
{
    static const uint8_t says[] = HELLO "\3\1\0\0\0\0\0\0\0k\3\1\0\0\0\0\0\0\0k"
                                        "\3\1\0\0\0\0\0\0\0k\3\1\0\0\0\0\0\0\0k";
    static uint8_t value[TCPSTORE_MAX_VALUE], heard[4096];
    live_t live = live_new();
    lk_error_t err = LK_ERROR_INIT;
    ck_assert(tcpstore_server_set(live.server, "k", value, sizeof value));
    byte_stream_t *stream = live_dial(&live);
    lk_status_t st;
    while (stream->ops->connect(stream, &err) == LK_INPROGRESS) {
        tcpstore_server_step(live.server);
    }
    size_t moved = 0;
    struct iovec out = {(void *)says, sizeof says - 1}, in = {heard, sizeof heard};
    ck_assert_int_eq(stream->ops->writev(stream, &out, 1, &moved, &err), LK_OK);
    ck_assert_uint_eq(moved, sizeof says - 1);
    st = LK_INPROGRESS;
    for (int idle = 0; idle < 200 && st == LK_INPROGRESS; idle++) {
        struct pollfd fd = {.fd = stream->ops->fd(stream), .events = POLLIN};
        tcpstore_server_step(live.server);
        (void)poll(&fd, 1, 5);
        do {
            st = stream->ops->readv(stream, &in, 1, &moved, &err);
        } while (st == LK_OK);
    }
    ck_assert_int_lt(st, 0);
    byte_stream_destroy(&stream);
    tcpstore_server_destroy(&live.server);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("tcpstore");
    TCase *tc = tcase_create("client");
    tcase_add_loop_test(tc, the_client_says_what_torch_says, 0, 2);
    tcase_add_loop_test(tc, failures_have_names, 0, (int)LK_ARRAY_LEN(failures));
    tcase_add_test(tc, connections_are_tried_again_until_the_store_has_counted);
    suite_add_tcase(suite, tc);
    tc = tcase_create("server");
    tcase_add_test(tc, three_workers_meet_at_the_store);
    tcase_add_loop_test(tc, the_server_answers_as_torch_does, 0, 2);
    tcase_add_test(tc, a_peer_that_asks_without_reading_is_closed);
    tcase_add_loop_test(tc, rude_peers_lose_their_connection, 0, (int)LK_ARRAY_LEN(rude));
    suite_add_tcase(suite, tc);
    return suite;
}
