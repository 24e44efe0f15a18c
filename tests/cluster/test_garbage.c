/* Garbage on every socket of a cluster that a process of this user can find: the ZeroMQ ones, as
 * messages and as bytes, and the ranks' mesh. Nothing crashes, no request is lost or changed, no
 * memory is taken for what a header claims. */
#include "base/buf.h"
#include "base/check.h"
#include "base/port.h"
#include "base/prng.h"
#include "engine_core/dp/mesh_internal.h"
#include "proto/codec.h"
#include "proto/limits.h"
#include "proto/msg_rand.h"
#include "proto/wire_json.h"
#include "tests/lib/test_main.h"
#include "tests/lib/witness.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_SOCKETS 64
#define MAX_GROWTH  (256ull << 20) /* bytes that a process may have grown by garbage */

static cluster_t shared;
static const cluster_t *c = &shared;
static witness_t witness;

/* ---- finding them ---- */

typedef struct {
    char name[112]; /* abstract, without the zero byte in front */
} address_t;

static bool is_open_in(pid_t pid, unsigned long inode)
{
    char want[64], path[96], target[128];
    snprintf(want, sizeof want, "socket:[%lu]", inode);
    for (int fd = 0; fd < 1024; fd++) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n > 0) {
            target[n] = '\0';
            if (strcmp(target, want) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* Listening abstract sockets of the cluster's processes, once each. */
static size_t find_sockets(address_t *out)
{
    pid_t pids[16];
    size_t n_pids = cluster_pids(c, "lockstep-", pids, LK_ARRAY_LEN(pids)), n = 0;
    FILE *f = fopen("/proc/net/unix", "r");
    ck_assert_ptr_nonnull(f);
    char line[512], name[112];
    while (fgets(line, sizeof line, f) != NULL) {
        unsigned long flags, inode;
        if (sscanf(line, "%*s %*s %*s %lx %*s %*s %lu @%111s", &flags, &inode, name) != 3 ||
            !(flags & 0x10000) || strncmp(name, "lockstep-", 9) != 0) {
            continue;
        }
        for (size_t i = 0; i < n_pids && i < LK_ARRAY_LEN(pids); i++) {
            if (is_open_in(pids[i], inode)) {
                ck_assert_uint_lt(n, MAX_SOCKETS);
                memcpy(out[n++].name, name, sizeof name);
                break;
            }
        }
    }
    fclose(f);
    return n;
}

static const struct {
    const char *part; /* of the name */
    bool is_zmq;
    port_kind_t kind; /* to talk to it */
} known[] = {
    {"-events", true, PORT_PUSH},      {"-stats", true, PORT_SUB},
    {"-wave", true, PORT_SUB},         {"-input", true, PORT_DEALER},
    {"-output", true, PORT_PUSH},      {"-trainer", true, PORT_DEALER},
    {"-handshake", true, PORT_DEALER}, /* last: it begins the coordinator's other names */
    {"-mesh-", false, PORT_SUB},
};

static size_t kind_of(const address_t *a)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(known); i++) {
        if (strstr(a->name, known[i].part) != NULL) {
            return i;
        }
    }
    ck_abort_msg("this test does not know the socket %s", a->name);
    return 0;
}

START_TEST(every_kind_of_socket_is_found)
{
    static address_t all[MAX_SOCKETS];
    size_t n = find_sockets(all), seen[LK_ARRAY_LEN(known)] = {0};
    for (size_t i = 0; i < n; i++) {
        seen[kind_of(&all[i])]++;
    }
    for (size_t i = 0; i < LK_ARRAY_LEN(known); i++) {
        ck_assert_msg(seen[i] > 0, "no socket named ...%s was found", known[i].part);
    }
}
END_TEST

/* ---- requests meanwhile ---- */

#define N_BUSY 12
static tokens_t expected[N_BUSY];

static void busy_body(unsigned i, char *out, size_t room)
{
    snprintf(out, room,
             "{\"prompt\":\"busy, number %u\",\"max_tokens\":300,\"seed\":%u,\"ignore_eos\":true,"
             "\"logprobs\":0,\"return_token_ids\":true,\"return_tokens_as_token_ids\":true}",
             i, i);
}

static void start_busy(cluster_async_t *calls)
{
    for (unsigned i = 0; i < N_BUSY; i++) {
        char body[256];
        busy_body(i, body, sizeof body);
        calls[i] = cluster_call_async(c, "POST", "/v1/completions", body);
    }
}

static void join_busy(cluster_async_t *calls, tokens_t *out)
{
    for (unsigned i = 0; i < N_BUSY; i++) {
        int status;
        json_t *reply = cluster_join(&calls[i], 60, &status);
        char *text = json_dumps(reply, JSON_COMPACT);
        ck_assert_msg(status == 200, "a request in flight got %d %s", status, text);
        free(text);
        take_tokens(choice(reply, 0), &out[i]);
        json_decref(reply);
    }
}

static void check_busy(cluster_async_t *calls)
{
    static tokens_t got[N_BUSY];
    join_busy(calls, got);
    for (unsigned i = 0; i < N_BUSY; i++) {
        check_same_tokens(&expected[i], &got[i], "a request in flight");
    }
    witness_check(&witness, c);
}

static void setup(void)
{
    static char model[300];
    const char *args[] = {"--dtype",
                          "float32",
                          "--data-parallel-size",
                          "2",
                          "--enable-expert-parallel",
                          "--max-model-len",
                          "1024",
                          "--kv-cache-memory-bytes",
                          "16777216",
                          NULL};
    cluster_make_model("qwen3_moe", 7, model, sizeof model);
    cluster_start(&shared, model, args);
    cluster_async_t calls[N_BUSY];
    start_busy(calls);
    join_busy(calls, expected);
    witness_take(&witness, c, MAX_GROWTH);
}

static void teardown(void)
{
    witness_fini(&witness);
    ck_assert_int_eq(cluster_stop(&shared), 0);
}

/* ---- messages ---- */

static lk_port_t *open_port(const address_t *a, port_kind_t kind)
{
    char address[sizeof a->name + 8];
    snprintf(address, sizeof address, "ipc://@%.111s", a->name);
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(port_zmq_open(kind, false, address, NULL, &port, &err) == LK_OK, "%s", err.text);
    return port;
}

/* No frames that anybody can decode: random ones, too many, and messages cut short. */
static void send_garbage(lk_port_t *port, lk_prng_t *prng)
{
    static uint8_t noise[4096];
    port_frame_t frames[PORT_MAX_FRAMES];
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    lk_error_t err = LK_ERROR_INIT;
    for (size_t i = 0; i < sizeof noise; i++) {
        noise[i] = (uint8_t)lk_prng_below(prng, 256);
    }
    size_t n = 2;
    uint64_t kind = lk_prng_below(prng, 5);
    if (kind == 0) { /* frames of noise, some empty */
        n = 1 + lk_prng_below(prng, PORT_MAX_FRAMES);
        for (size_t i = 0; i < n; i++) {
            frames[i] = (port_frame_t){noise, lk_prng_below(prng, 3) * lk_prng_below(prng, 1024)};
        }
    } else {
        msg_t msg;
        msg_rand(prng, msg_rand_type(prng), &msg);
        ck_assert_int_eq(msg_encode(&msg, &envelope, &body, &err), LK_OK);
        msg_fini(&msg);
        frames[0] = (port_frame_t){envelope.data, envelope.len};
        frames[1] = (port_frame_t){body.data, body.len};
        if (kind == 1) { /* a body cut short */
            frames[1].len = lk_prng_below(prng, body.len);
        } else if (kind == 2) { /* an envelope cut short */
            frames[0].len = lk_prng_below(prng, envelope.len);
        } else if (kind == 3) { /* something else as its body */
            frames[1] = (port_frame_t){"\xdd\xff\xff\xff\xff", 5};
        } else { /* a frame too many */
            frames[2] = (port_frame_t){noise, 16};
            n = 3;
        }
    }
    (void)!port_send(port, NULL, frames, n, &err); /* a full queue is as good */
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
}

START_TEST(garbage_messages_are_dropped)
{
    static address_t all[MAX_SOCKETS];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("garbage messages"));
    cluster_async_t calls[N_BUSY];
    start_busy(calls);
    size_t n = find_sockets(all);
    for (size_t i = 0; i < n; i++) {
        size_t k = kind_of(&all[i]);
        if (!known[k].is_zmq || known[k].kind == PORT_SUB) {
            continue;
        }
        lk_port_t *port = open_port(&all[i], known[k].kind);
        for (int j = 0; j < 500; j++) {
            send_garbage(port, &prng);
        }
        port_destroy(&port);
    }
    check_busy(calls);
}
END_TEST

/* ---- calls on the trainer's socket ---- */

#define M(text) text, sizeof(text) - 1
static const struct {
    const char *body;
    size_t len;
    const char *param;
} calls_by_trainer[] = {
    {M(""), "body"},
    {M("\xc0"), "body"},
    {M("\x91\x01"), "body"},
    {M("\xc1"), "body"},
    {M("\xdd\xff\xff\xff\xff"), "body"},      /* an array of 2^32 - 1 */
    {M("\xdf\xff\xff\xff\xff\xa1x"), "body"}, /* a map of as many */
    {M("\xdb\xff\xff\xff\xff"), "body"},      /* a text */
    {M("\xc6\xff\xff\xff\xff"), "body"},      /* bytes */
    {M("\x81\x01\x02"), "body"},              /* a key that is a number */
    {M("\x81\xa4"
       "call\xa5"
       "pau"),
     "body"}, /* cut short */
    {M("\x81\xa4"
       "call\xa2\xff\xfe"),
     "body"}, /* no UTF-8 */
    {M("\x81\xa4"
       "call\xa3"
       "a\0b"),
     "body"}, /* a NUL */
    {M("\x82\xa4"
       "call\xa1"
       "a\xa4"
       "call\xa1"
       "b"),
     "body"}, /* twice */
    {M("\x81\xa4"
       "call\xc7\x01\x05\x00"),
     "body"}, /* an extension type */
    {M("\x81\xa4"
       "call\x05"),
     "call"},
    {M("\x81\xa4"
       "call\xa4"
       "nope"),
     "call"},
    {M("\x80"), "call"},
    {M("\x82\xa4"
       "call\xa5"
       "pause\xa4"
       "mode\x05"),
     "mode"},
    {M("\x82\xa4"
       "call\xa5"
       "pause\xa4"
       "mode\xa6"
       "softly"),
     "mode"},
    {M("\x82\xa4"
       "call\xa5"
       "pause\xa9"
       "timeout_s\xcb\x7f\xf8\0\0\0\0\0\0"), /* NaN */
     "body"},
    {M("\x82\xa4"
       "call\xa5"
       "pause\xaf"
       "idempotency_key\x05"),
     "idempotency_key"},
    {M("\x82\xa4"
       "call\xa5"
       "pause\xa9"
       "admin_key\x05"),
     "admin_key"},
    {M("\x82\xa4"
       "call\xae"
       "update_weights\xab"
       "update_info\x05"),
     "update_info"},
};

typedef struct {
    lk_port_t *port;
    json_t *reply;
    char id[9];
} answer_t;

static bool has_answer(void *ctx)
{
    static const wire_limits_t limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    answer_t *a = ctx;
    port_msg_t msg;
    lk_error_t err = LK_ERROR_INIT;
    if (port_recv(a->port, &msg, &err) != LK_OK) {
        return false;
    }
    wire_doc_t doc = {0};
    ck_assert_uint_eq(msg.n_frames, 2);
    ck_assert_uint_eq(msg.frames[0].len, 8);
    memcpy(a->id, msg.frames[0].data, 8);
    ck_assert_int_eq(wire_doc_init(&doc, msg.frames[1].data, msg.frames[1].len, &limits, &err),
                     LK_OK);
    ck_assert_int_eq(wire_to_json(doc.root, &a->reply, &err), LK_OK);
    wire_doc_fini(&doc);
    port_msg_fini(a->port, &msg);
    return true;
}

START_TEST(bad_trainer_calls_name_the_field)
{
    lk_error_t err = LK_ERROR_INIT;
    answer_t a = {0};
    ck_assert_int_eq(port_zmq_open(PORT_DEALER, false, c->trainer, NULL, &a.port, &err), LK_OK);
    for (size_t i = 0; i < LK_ARRAY_LEN(calls_by_trainer); i++) {
        char id[9];
        snprintf(id, sizeof id, "call%04zu", i);
        port_frame_t frames[2] = {{id, 8}, {calls_by_trainer[i].body, calls_by_trainer[i].len}};
        ck_assert_int_eq(port_send(a.port, NULL, frames, 2, &err), LK_OK);
        wait_for(has_answer, &a, 20, "the trainer's call is answered");
        ck_assert_str_eq(a.id, id);
        char *text = json_dumps(a.reply, JSON_COMPACT);
        json_int_t status = json_int_at(a.reply, "status");
        ck_assert_msg(status >= 400 && status < 500, "call %zu: %s", i, text);
        const json_t *param = json_object_get(json_object_get(a.reply, "error"), "param");
        ck_assert_msg(json_is_string(param) &&
                          strcmp(json_string_value(param), calls_by_trainer[i].param) == 0,
                      "call %zu: param is not '%s': %s", i, calls_by_trainer[i].param, text);
        free(text);
        json_decref(a.reply);
    }
    port_destroy(&a.port);
    witness_check(&witness, c);
}
END_TEST

/* ---- bytes ---- */

static int connect_abstract(const address_t *a)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t n = strlen(a->name);
    memcpy(name.sun_path + 1, a->name, n);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ck_assert_int_ge(fd, 0);
    if (connect(fd, (struct sockaddr *)&name,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)) != 0) {
        ck_assert_msg(errno == EAGAIN, "connect to %s: %s", a->name, strerror(errno));
        close(fd); /* its queue is full */
        return -1;
    }
    return fd;
}

#define GREETING                                                                                   \
    "\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"               \
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
#define READY "\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER"

static const struct {
    const char *bytes;
    size_t len;
} openings[] = {
    {M("")},
    {M("GET / HTTP/1.1\r\n\r\n")},
    {M(GREETING)},
    {M(GREETING "\4\xff garbage")},
    {M(GREETING "\6\x7f\xff\xff\xff\xff\xff\xff\xff")},         /* a command of 2^63 - 1 bytes */
    {M(GREETING READY "\2\x7f\xff\xff\xff\xff\xff\xff\xff")},   /* a frame of as many */
    {M(GREETING READY "\2\0\0\0\0\x3f\xff\xff\xff")},           /* one of 1 GiB, never sent */
    {M(GREETING READY "\1\0\1\0\1\0\1\0\1\0\1\0\1\0\1\0\1\0")}, /* a message without an end */
    {M("LKSM garbage that is longer than a header of the mesh is, and then some")},
};

/* A frame of the mesh from nobody: of all kinds, also a hello for a rank that is connected. */
static size_t mesh_frame(lk_prng_t *prng, uint8_t *out)
{
    static const uint64_t lengths[] = {0, 7, sizeof(mesh_hello_t), 1ull << 20, UINT64_MAX};
    mesh_header_t head = {.magic = MESH_MAGIC,
                          .version = MESH_VERSION,
                          .kind = (uint16_t)(FRAME_HELLO + lk_prng_below(prng, 4)),
                          .epoch = lk_prng_below(prng, 3),
                          .seq = lk_prng_below(prng, 4),
                          .length = lengths[lk_prng_below(prng, LK_ARRAY_LEN(lengths))]};
    mesh_hello_t hello = {(uint32_t)lk_prng_below(prng, 4), 2};
    memcpy(out, &head, sizeof head);
    memcpy(out + sizeof head, &hello, sizeof hello);
    return sizeof head + sizeof hello;
}

START_TEST(garbage_bytes_are_dropped)
{
    static address_t all[MAX_SOCKETS];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("garbage bytes"));
    cluster_async_t calls[N_BUSY];
    start_busy(calls);
    size_t n = find_sockets(all), n_open = 0;
    int open_fds[MAX_SOCKETS * (LK_ARRAY_LEN(openings) + 32)];
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < LK_ARRAY_LEN(openings) + 32; k++) {
            uint8_t noise[512];
            const void *bytes = noise;
            size_t len = lk_prng_below(&prng, sizeof noise);
            for (size_t b = 0; b < len; b++) {
                noise[b] = (uint8_t)lk_prng_below(&prng, 256);
            }
            if (k < LK_ARRAY_LEN(openings)) {
                bytes = openings[k].bytes;
                len = openings[k].len;
            } else if (!known[kind_of(&all[i])].is_zmq && k % 2 == 0) {
                len = mesh_frame(&prng, noise);
            }
            int fd = connect_abstract(&all[i]);
            if (fd < 0) {
                continue;
            }
            (void)!send(fd, bytes, len, MSG_NOSIGNAL);
            if (lk_prng_below(&prng, 2) == 0) {
                close(fd);
            } else {
                open_fds[n_open++] = fd; /* silent from here on */
            }
        }
    }
    check_busy(calls);
    for (size_t i = 0; i < n_open; i++) {
        close(open_fds[i]);
    }
    witness_check(&witness, c);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("garbage");
    TCase *tc = tcase_create("garbage");
    tcase_set_timeout(tc, 120);
    tcase_add_unchecked_fixture(tc, setup, teardown);
    tcase_add_test(tc, every_kind_of_socket_is_found);
    tcase_add_test(tc, garbage_messages_are_dropped);
    tcase_add_test(tc, bad_trainer_calls_name_the_field);
    tcase_add_test(tc, garbage_bytes_are_dropped);
    suite_add_tcase(s, tc);
    return s;
}
