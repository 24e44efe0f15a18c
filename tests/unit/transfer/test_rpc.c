#include "base/buf.h"
#include "base/check.h"
#include "proto/wire_json.h"
#include "tests/lib/test_main.h"
#include "transfer/trainer/rpc.h"

#include <poll.h>
#include <string.h>

static uint64_t now_ns;
static uint8_t counter;

static uint64_t fake_now(void *ctx)
{
    return now_ns;
}

static void fake_random(void *ctx, void *buf, size_t len)
{
    memset(buf, ++counter, len);
}

static const lk_env_t env = {NULL, fake_now, fake_random};
static port_mem_hub_t *hub;
static lk_port_t *server;
static rpc_t *rpc;
static lk_error_t err;

static void setup(void)
{
    lk_port_t *dealer = NULL;
    now_ns = LK_SECOND_NS;
    counter = 0;
    err = LK_ERROR_INIT;
    hub = port_mem_hub_new();
    ck_ok(port_mem_open(hub, PORT_ROUTER, true, "ipc://@trainer", NULL, &server, &err));
    ck_ok(port_mem_open(hub, PORT_DEALER, false, "ipc://@trainer", NULL, &dealer, &err));
    rpc = rpc_new(dealer, &env, "the key", "trainer");
    ck_assert_ptr_nonnull(rpc);
}

static void teardown(void)
{
    rpc_destroy(&rpc);
    rpc_destroy(&rpc);
    port_destroy(&server);
    port_mem_hub_destroy(&hub);
}

/* A call as the server sees it. */
typedef struct {
    port_peer_t peer;
    uint8_t id[8];
    json_t *map;
} seen_t;

static seen_t take(void)
{
    static const wire_limits_t limits = {1 << 20, 1 << 16, 16};
    port_msg_t msg = {0};
    seen_t seen = {0};
    wire_doc_t doc = {0};
    ck_ok(port_recv(server, &msg, &err));
    ck_assert_uint_eq(msg.n_frames, 2);
    ck_assert_uint_eq(msg.frames[0].len, 8);
    memcpy(seen.id, msg.frames[0].data, 8);
    seen.peer = msg.peer;
    ck_ok(wire_doc_init(&doc, msg.frames[1].data, msg.frames[1].len, &limits, &err));
    ck_ok(wire_to_json(doc.root, &seen.map, &err));
    wire_doc_fini(&doc);
    port_msg_fini(server, &msg);
    return seen;
}

static bool nothing_came(void)
{
    port_msg_t msg = {0};
    return port_recv(server, &msg, &err) == LK_INPROGRESS;
}

static void answer_bytes(const seen_t *seen, const void *id, size_t id_len, const void *body,
                         size_t len)
{
    port_frame_t frames[2] = {{id, id_len}, {body, len}};
    ck_ok(port_send(server, &seen->peer, frames, 2, &err));
}

static void answer(const seen_t *seen, const char *json)
{
    json_t *map = json_loads(json, 0, NULL);
    ck_assert_ptr_nonnull(map);
    lk_buf_t body;
    lk_buf_init(&body, 0);
    wire_writer_t writer = wire_writer(&body);
    wire_put_json(&writer, map);
    answer_bytes(seen, seen->id, 8, body.data, body.len);
    lk_buf_fini(&body);
    json_decref(map);
}

static const char *text(const seen_t *seen, const char *field)
{
    return json_string_value(json_object_get(seen->map, field));
}

START_TEST(call_and_answer)
{
    json_t *args = json_pack("{s:s}", "mode", "keep"), *reply = NULL;
    ck_ok(rpc_post(rpc, "pause", args, 60 * LK_SECOND_NS, &err));
    json_decref(args);
    ck_assert(rpc_busy(rpc));
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    seen_t seen = take();
    ck_assert_str_eq(text(&seen, "call"), "pause");
    ck_assert_str_eq(text(&seen, "mode"), "keep");
    ck_assert_str_eq(text(&seen, "admin_key"), "the key");
    ck_assert_uint_eq(strlen(text(&seen, "idempotency_key")), 32);
    answer(&seen, "{\"status\": 200, \"message\": \"done\", \"n\": [1, -2, 2.5, null, true]}");
    ck_ok(rpc_test(rpc, &reply, &err));
    ck_assert_str_eq(json_string_value(json_object_get(reply, "message")), "done");
    ck_assert_uint_eq(json_array_size(json_object_get(reply, "n")), 5);
    ck_assert(!rpc_busy(rpc));
    json_decref(reply);
    json_decref(seen.map);
}
END_TEST

START_TEST(sent_again_under_the_same_key)
{
    json_t *reply = NULL;
    ck_ok(rpc_post(rpc, "resume", NULL, 60 * LK_SECOND_NS, &err));
    seen_t first = take();
    now_ns += 10 * LK_SECOND_NS - 1;
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    ck_assert(nothing_came());
    now_ns += 1;
    ck_assert_uint_le(rpc_wake_ns(rpc), now_ns);
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    seen_t second = take();
    ck_assert_int_eq(memcmp(first.id, second.id, 8), 0);
    ck_assert_str_eq(text(&first, "idempotency_key"), text(&second, "idempotency_key"));
    now_ns += 19 * LK_SECOND_NS; /* ever more slowly */
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    ck_assert(nothing_came());
    answer(&second, "{\"status\": 200}");
    answer(&first, "{\"status\": 200}");
    ck_ok(rpc_test(rpc, &reply, &err));
    json_decref(reply);
    /* the second answer is not the next call's */
    ck_ok(rpc_post(rpc, "pause", NULL, 60 * LK_SECOND_NS, &err));
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    seen_t next = take();
    ck_assert_int_ne(memcmp(first.id, next.id, 8), 0);
    ck_assert_str_ne(text(&first, "idempotency_key"), text(&next, "idempotency_key"));
    json_decref(first.map);
    json_decref(second.map);
    json_decref(next.map);
}
END_TEST

START_TEST(deadline)
{
    json_t *reply = NULL;
    ck_ok(rpc_post(rpc, "weight_info", NULL, 5 * LK_SECOND_NS, &err));
    now_ns += 5 * LK_SECOND_NS;
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_ERR_TIMEOUT);
    ck_assert_str_eq(err.text, "weight_info: no answer from trainer within 5.0 s");
    ck_assert(!rpc_busy(rpc));
    ck_assert_ptr_null(strstr(err.text, "the key"));
}
END_TEST

static const struct {
    const char *body;
    size_t len;
} nonsense[] = {
    {"", 0},                     /* nothing */
    {"\xc1", 1},                 /* reserved byte */
    {"\xdf\xff\xff\xff\xff", 5}, /* a map that claims 2^32 entries */
    {"\xa2ok", 3},               /* a text instead of a map */
    {"\x81\xa6status\xa3"
     "200",
     12},                                         /* status is a text */
    {"\x82\xa6status\xcc\xc8\xa1x\xc4\x01z", 14}, /* bytes have no JSON */
    {"\x81\xa6status\xcc\xc8\x00", 11},           /* something behind */
};

START_TEST(answers_that_make_no_sense)
{
    json_t *reply = NULL;
    ck_ok(rpc_post(rpc, "resume", NULL, 60 * LK_SECOND_NS, &err));
    seen_t seen = take();
    /* another id, a short id: somebody else's answer */
    answer_bytes(&seen, "12345678", 8, "\x81\xa6status\xcc\xc8", 10);
    answer_bytes(&seen, seen.id, 7, "\x81\xa6status\xcc\xc8", 10);
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
    answer_bytes(&seen, seen.id, 8, nonsense[_i].body, nonsense[_i].len);
    ck_assert_int_lt(rpc_test(rpc, &reply, &err), 0);
    ck_assert_ptr_nonnull(strstr(err.text, "resume: the answer of trainer makes no sense"));
    ck_assert_ptr_null(reply);
    json_decref(seen.map);
}
END_TEST

/* The front end ends before it has answered: the call ends, too, and the next one finds its heir.
 */
START_TEST(lost_connection)
{
    char address[128];
    lk_port_t *router = NULL, *dealer = NULL;
    json_t *reply = NULL;
    port_msg_t msg;
    port_ipc_address("trainer", address, sizeof address);
    for (int life = 0; life < 2; life++) {
        ck_ok(port_zmq_open(PORT_ROUTER, true, address, NULL, &router, &err));
        if (life == 0) {
            ck_ok(port_zmq_open(PORT_DEALER, false, address, NULL, &dealer, &err));
            rpc_destroy(&rpc);
            rpc = rpc_new(dealer, &env, NULL, "trainer");
        }
        ck_ok(rpc_post(rpc, "pause", NULL, 60 * LK_SECOND_NS, &err));
        while (port_recv(router, &msg, &err) == LK_INPROGRESS) {
            poll(NULL, 0, 1);
        }
        port_msg_fini(router, &msg);
        ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_INPROGRESS);
        port_destroy(&router);
        lk_status_t status;
        while ((status = rpc_test(rpc, &reply, &err)) == LK_INPROGRESS) {
            poll(NULL, 0, 1);
        }
        ck_assert_int_eq(status, LK_ERR_PEER);
        ck_assert_ptr_nonnull(strstr(err.text, "pause: the connection to the front end at trainer "
                                               "was lost before its answer came"));
        ck_assert(!rpc_busy(rpc));
    }
}
END_TEST

START_TEST(error_without_a_text)
{
    json_t *reply = NULL;
    ck_ok(rpc_post(rpc, "resume", NULL, 60 * LK_SECOND_NS, &err));
    seen_t seen = take();
    answer(&seen, "{\"status\": 409, \"error\": {\"code\": 409}}");
    ck_assert_int_eq(rpc_test(rpc, &reply, &err), LK_ERR_STATE);
    ck_assert_str_eq(err.text, "resume: the cluster gave no reason");
    json_decref(seen.map);
}
END_TEST

START_TEST(too_large_is_not_sent)
{
    json_t *list = json_array(), *args = json_pack("{s:o}", "list", list);
    for (int i = 0; i < 1 << 20; i++) {
        json_array_append_new(list, json_null());
    }
    ck_assert_int_eq(rpc_post(rpc, "update_weights", args, LK_SECOND_NS, &err), LK_ERR_TOO_LARGE);
    ck_assert(nothing_came());
    json_decref(args);
    ck_ok(rpc_post(rpc, "resume", NULL, LK_SECOND_NS, &err));
    seen_t seen = take();
    json_decref(seen.map);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("rpc");
    TCase *tc = tcase_create("rpc");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, call_and_answer);
    tcase_add_test(tc, sent_again_under_the_same_key);
    tcase_add_test(tc, deadline);
    tcase_add_loop_test(tc, answers_that_make_no_sense, 0, LK_ARRAY_LEN(nonsense));
    tcase_add_test(tc, lost_connection);
    tcase_add_test(tc, error_without_a_text);
    tcase_add_test(tc, too_large_is_not_sent);
    suite_add_tcase(suite, tc);
    return suite;
}
