/* Every message there and back, and everything that a hostile or another version's peer can send.
 */
#include "base/env.h"
#include "base/prng.h"
#include "proto/codec.h"
#include "proto/field_table.h"
#include "proto/limits.h"
#include "proto/msg_rand.h"
#include "proto/wire_reader.h"
#include "proto/wire_writer.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static lk_buf_t envelope, body;
static lk_prng_t prng;

static void setup(void)
{
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    lk_prng_seed(&prng, test_seed("codec"));
}

static void teardown(void)
{
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
}

static void encode(const msg_t *msg)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_clear(&envelope);
    lk_buf_clear(&body);
    lk_status_t status = msg_encode(msg, &envelope, &body, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
}

static lk_status_t decode(msg_t *out, lk_error_t *err)
{
    return msg_decode(envelope.data, envelope.len, body.data, body.len, out, err);
}

START_TEST(test_round_trip)
{
    const message_entry_t *entry = &message_table[_i];
    for (int round = 0; round < 200; round++) {
        msg_t sent, got;
        lk_error_t err = LK_ERROR_INIT;
        msg_rand(&prng, entry->type, &sent);
        encode(&sent);
        ck_assert_msg(decode(&got, &err) == LK_OK, "%s", err.text);
        ck_assert(msg_equal(&sent, &got));
        ck_assert(envelope.len <= WIRE_MAX_ENVELOPE);
        got.sequence++;
        ck_assert(!msg_equal(&sent, &got));
        msg_fini(&got);
        msg_fini(&sent);
    }
    ck_assert_str_eq(msg_type_name(entry->type), entry->name);
}
END_TEST

/* A decoded message's strings end with a NUL, its bins are aligned for u32 and u64. */
START_TEST(test_decoded_storage)
{
    msg_handle_t handles[2] = {{7}, {UINT64_MAX}};
    msg_t sent = {.type = MSG_ADD}, got;
    lk_error_t err = LK_ERROR_INIT;
    uint32_t ids[3] = {1, 2, 0xFFFFFFFFu};
    sent.add.id = msg_str("cmpl-1");
    sent.add.prompt = (msg_bin_t){ids, sizeof ids};
    sent.add.sampling.top_k = -1;
    sent.add.sampling.stop_token_ids = (msg_bin_t){ids, 4};
    encode(&sent);
    ck_ok(decode(&got, &err));
    ck_assert(msg_equal(&sent, &got));
    ck_assert_str_eq(msg_cstr(got.add.id), "cmpl-1");
    ck_assert_str_eq(msg_cstr(got.add.cache_salt), "");
    ck_assert_uint_eq((uintptr_t)got.add.prompt.data % 8, 0);
    ck_assert_uint_eq((uintptr_t)got.add.sampling.stop_token_ids.data % 8, 0);
    msg_fini(&got);
    msg_fini(&got);

    sent = (msg_t){.type = MSG_ABORT, .abort = {.client = 1, .handles = {handles, 2}}};
    encode(&sent);
    ck_ok(decode(&got, &err));
    ck_assert_uint_eq(got.abort.handles.count, 2);
    ck_assert_uint_eq(got.abort.handles.items[1].handle, UINT64_MAX);
    msg_fini(&got);
}
END_TEST

/* Writes a SEEN body by hand with n fields (it has three). */
static void seen_body(size_t n)
{
    wire_writer_t w = wire_writer(&body);
    lk_buf_clear(&body);
    wire_put_array(&w, n);
    for (size_t i = 0; i < n; i++) {
        if (i == 3) {
            wire_put_str(&w, "newer", 5);
        } else {
            wire_put_u64(&w, i + 1);
        }
    }
}

START_TEST(test_older_and_newer_peers)
{
    msg_t msg = {.type = MSG_SEEN}, got;
    lk_error_t err = LK_ERROR_INIT;
    encode(&msg);
    seen_body(5);
    ck_ok(decode(&got, &err));
    ck_assert(got.seen.rank == 1 && got.seen.generation == 2 && got.seen.number == 3);
    msg_fini(&got);
    seen_body(1);
    ck_ok(decode(&got, &err));
    ck_assert(got.seen.rank == 1 && got.seen.generation == 0 && got.seen.number == 0);
    msg_fini(&got);
    seen_body(0);
    ck_ok(decode(&got, &err));
    msg_fini(&got);
}
END_TEST

START_TEST(test_every_truncation)
{
    for (size_t t = 0; t < message_table_len; t++) {
        msg_t sent, got;
        msg_rand(&prng, message_table[t].type, &sent);
        encode(&sent);
        size_t step = body.len > 4096 ? body.len / 1000 : 1;
        for (size_t len = 0; len < body.len; len += step) {
            lk_error_t err = LK_ERROR_INIT;
            /* exactly so many bytes, so that a sanitizer sees a read beyond them */
            uint8_t *cut = malloc(len + 1);
            memcpy(cut, body.data, len);
            uint8_t *end = realloc(cut, len > 0 ? len : 1);
            ck_assert_int_eq(msg_decode(envelope.data, envelope.len, end, len, &got, &err),
                             LK_ERR_INVALID);
            ck_assert(strncmp(err.text, message_table[t].name, strlen(message_table[t].name)) == 0);
            free(end);
        }
        for (size_t len = 0; len < envelope.len; len++) {
            lk_error_t err = LK_ERROR_INIT;
            ck_assert_int_eq(msg_decode(envelope.data, len, body.data, body.len, &got, &err),
                             LK_ERR_INVALID);
            ck_assert(strncmp(err.text, "envelope", 8) == 0);
        }
        msg_fini(&sent);
    }
}
END_TEST

/* Any bit flip is refused or gives a message that encodes and decodes to itself. */
START_TEST(test_bit_flips)
{
    lk_buf_t again_envelope, again_body;
    lk_buf_init(&again_envelope, 0);
    lk_buf_init(&again_body, 0);
    size_t refused = 0, accepted = 0;
    for (int round = 0; round < 20000; round++) {
        msg_t sent, got, again;
        lk_error_t err = LK_ERROR_INIT;
        msg_rand(&prng, msg_rand_type(&prng), &sent);
        encode(&sent);
        lk_buf_t *which = lk_prng_below(&prng, 8) == 0 ? &envelope : &body;
        for (uint64_t n = 1 + lk_prng_below(&prng, 3); n > 0; n--) {
            which->data[lk_prng_below(&prng, which->len)] ^=
                (uint8_t)(1u << lk_prng_below(&prng, 8));
        }
        lk_status_t status = decode(&got, &err);
        if (status == LK_OK) {
            lk_buf_clear(&again_envelope);
            lk_buf_clear(&again_body);
            ck_ok(msg_encode(&got, &again_envelope, &again_body, &err));
            ck_ok(msg_decode(again_envelope.data, again_envelope.len, again_body.data,
                             again_body.len, &again, &err));
            ck_assert(msg_equal(&got, &again));
            msg_fini(&again);
            msg_fini(&got);
            accepted++;
        } else {
            ck_assert(status == LK_ERR_INVALID || status == LK_ERR_TOO_LARGE);
            ck_assert(err.text[0] != '\0');
            refused++;
        }
        msg_fini(&sent);
    }
    ck_assert_uint_gt(refused, 1000);
    ck_assert_uint_gt(accepted, 1000);
    lk_buf_fini(&again_envelope);
    lk_buf_fini(&again_body);
}
END_TEST

START_TEST(test_hostile_under_memory_cap)
{
    msg_t msg = {.type = MSG_OUTPUTS}, got;
    lk_error_t err = LK_ERROR_INIT;
    encode(&msg);
    test_memory_cap(512u << 20);
    ck_assert_int_eq(msg_decode(envelope.data, envelope.len, "\xdd\x0f\xff\xff\xff", 5, &got, &err),
                     LK_ERR_INVALID);
    ck_assert_int_eq(msg_decode(envelope.data, envelope.len, "\x93\x01\x02\xdd\x0f\xff\xff\xff\x90",
                                9, &got, &err),
                     LK_ERR_INVALID);
    ck_assert_int_eq(msg_decode("\xdd\x0f\xff\xff\xff", 5, body.data, body.len, &got, &err),
                     LK_ERR_INVALID);

    /* The most memory that a body can cost: as many one-byte records as a list may have. */
    wire_writer_t w = wire_writer(&body);
    for (int over = 0; over < 2; over++) {
        lk_buf_clear(&body);
        wire_put_array(&w, 3);
        wire_put_u64(&w, 0);
        wire_put_u64(&w, 0);
        wire_put_array(&w, MSG_MAX_LIST + (size_t)over);
        for (size_t i = 0; i < MSG_MAX_LIST + (size_t)over; i++) {
            wire_put_array(&w, 0);
        }
        lk_status_t status = decode(&got, &err);
        ck_assert_int_eq(status, over ? LK_ERR_TOO_LARGE : LK_OK);
        if (status == LK_OK) {
            ck_assert_uint_eq(got.outputs.outputs.count, MSG_MAX_LIST);
            msg_fini(&got);
        }
    }
    ck_assert_str_eq(err.text, "OUTPUTS: outputs: 65537 entries, at most 65536 are allowed");
}
END_TEST

/* Puts a value of a kind that no field of that kind takes. */
static void put_wrong(wire_writer_t *w, field_kind_t kind)
{
    switch (kind) {
    case FIELD_U64:
        wire_put_i64(w, -1);
        break;
    case FIELD_I64:
        wire_put_u64(w, UINT64_MAX);
        break;
    case FIELD_STR:
    case FIELD_TEXT:
        wire_put_bin(w, "x", 1);
        break;
    case FIELD_BIN:
    case FIELD_F64:
        wire_put_str(w, "x", 1);
        break;
    case FIELD_BOOL:
    case FIELD_REC:
    case FIELD_LIST:
        wire_put_u64(w, 1);
        break;
    }
}

static void put_default(wire_writer_t *w, field_kind_t kind)
{
    switch (kind) {
    case FIELD_U64:
    case FIELD_I64:
    case FIELD_F64:
        wire_put_u64(w, 0);
        break;
    case FIELD_BOOL:
        wire_put_bool(w, false);
        break;
    case FIELD_STR:
    case FIELD_TEXT:
        wire_put_str(w, "", 0);
        break;
    case FIELD_BIN:
        wire_put_bin(w, NULL, 0);
        break;
    case FIELD_REC:
    case FIELD_LIST:
        wire_put_array(w, 0);
        break;
    }
}

START_TEST(test_wrong_kind_names_the_field)
{
    for (size_t t = 0; t < message_table_len; t++) {
        const record_t *record = message_table[t].record();
        msg_t msg = {.type = message_table[t].type}, got;
        encode(&msg);
        for (size_t bad = 0; bad < record->n_fields; bad++) {
            wire_writer_t w = wire_writer(&body);
            lk_buf_clear(&body);
            wire_put_array(&w, record->n_fields);
            for (size_t i = 0; i < record->n_fields; i++) {
                (i == bad ? put_wrong : put_default)(&w, record->fields[i].kind);
            }
            lk_error_t err = LK_ERROR_INIT;
            char expected[128];
            snprintf(expected, sizeof expected, "%s: %s: expected", message_table[t].name,
                     record->fields[bad].name);
            ck_assert_int_eq(decode(&got, &err), LK_ERR_INVALID);
            ck_assert_msg(strncmp(err.text, expected, strlen(expected)) == 0, "%s", err.text);
        }
    }
}
END_TEST

START_TEST(test_bad_envelopes)
{
    static const struct {
        uint64_t version, type, role, rank;
        const char *magic, *text;
    } cases[] = {
        {2, 10, 0, 0, "LK", "envelope: version: 2"},
        {1, 9999, 0, 0, "LK", "envelope: type: 9999"},
        {1, 10, 1ull << 32, 0, "LK", "envelope: role"},
        {1, 10, 0, 1ull << 32, "LK", "envelope: rank"},
        {1, 10, 0, 0, "LL", "envelope: magic"},
    };
    msg_t msg = {.type = MSG_ADD}, got;
    encode(&msg);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lk_error_t err = LK_ERROR_INIT;
        wire_writer_t w = wire_writer(&envelope);
        lk_buf_clear(&envelope);
        wire_put_array(&w, 7);
        wire_put_str(&w, cases[i].magic, 2);
        wire_put_u64(&w, cases[i].version);
        wire_put_u64(&w, cases[i].type);
        wire_put_u64(&w, cases[i].role);
        wire_put_u64(&w, cases[i].rank);
        wire_put_u64(&w, 1);
        wire_put_u64(&w, 1);
        ck_assert_int_eq(decode(&got, &err), LK_ERR_INVALID);
        ck_assert_msg(strncmp(err.text, cases[i].text, strlen(cases[i].text)) == 0, "%s", err.text);
    }
}
END_TEST

START_TEST(test_encode_refuses)
{
    msg_t msg = {.type = MSG_CMD};
    lk_error_t err = LK_ERROR_INIT;
    char *big = calloc(1, MSG_MAX_STR + 2);
    memset(big, 'x', MSG_MAX_STR + 1);
    lk_buf_str(&envelope, "before");
    msg.cmd.spec = msg_str(big);
    ck_assert_int_eq(msg_encode(&msg, &envelope, &body, &err), LK_ERR_TOO_LARGE);
    ck_assert_str_eq(err.text, "CMD: spec: 33554433 bytes, at most 33554432 are allowed");
    msg.cmd.spec = msg_str("\xff");
    ck_assert_int_eq(msg_encode(&msg, &envelope, &body, &err), LK_ERR_INVALID);
    msg.cmd.spec = (msg_str_t){"a\0b", 3};
    ck_assert_int_eq(msg_encode(&msg, &envelope, &body, &err), LK_ERR_INVALID);
    ck_assert_uint_eq(envelope.len, 6);
    ck_assert_uint_eq(body.len, 0);
    free(big);
    lk_buf_t small;
    lk_buf_init(&small, 8);
    msg.cmd.spec = msg_str("a longer text than there is room for");
    ck_assert_int_eq(msg_encode(&msg, &envelope, &small, &err), LK_ERR_NO_MEMORY);
    lk_buf_fini(&small);
}
END_TEST

/* Why an engine is gone may name a file, whose name is bytes, or may have been cut. */
START_TEST(test_texts_for_people_always_go)
{
    msg_removal_t gone = {2, {"caf\xe9 \xe6\xa8\xa1\xe5\x9e\0.\xe6\xa8", 14}};
    msg_t msg = {.type = MSG_STATS}, got;
    lk_error_t err = LK_ERROR_INIT;
    msg.stats.removed.items = &gone;
    msg.stats.removed.count = 1;
    msg.stats.why = msg_str("\xc0\x80");
    encode(&msg);
    ck_assert_msg(decode(&got, &err) == LK_OK, "%s", err.text);
    ck_assert_str_eq(msg_cstr(got.stats.why), "??");
    ck_assert_str_eq(msg_cstr(got.stats.removed.items[0].why), "caf? \xe6\xa8\xa1???.??");
    ck_assert_uint_eq(got.stats.removed.items[0].rank, 2);
    msg_fini(&got);
}
END_TEST

/* A time, not a verdict: shared machines differ. Shown in the TAP output. */
START_TEST(test_speed_of_outputs)
{
    enum { RECORDS = 256, ROUNDS = 200 };
    static msg_output_t outputs[RECORDS];
    uint32_t token = 12345;
    for (size_t i = 0; i < RECORDS; i++) {
        outputs[i] = (msg_output_t){.handle = 1000 + i,
                                    .token_ids = {&token, sizeof token},
                                    .epoch = 3,
                                    .version = msg_str("step-3"),
                                    .stop_token = -1};
    }
    msg_t msg = {.type = MSG_OUTPUTS, .outputs = {.outputs = {outputs, RECORDS}}}, got;
    lk_error_t err = LK_ERROR_INIT;
    uint64_t encoding = 0, decoding = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t t0 = lk_env_now_ns(lk_env_real());
        encode(&msg);
        uint64_t t1 = lk_env_now_ns(lk_env_real());
        ck_ok(decode(&got, &err));
        decoding += lk_env_now_ns(lk_env_real()) - t1;
        encoding += t1 - t0;
        ck_assert(msg_equal(&msg, &got));
        msg_fini(&got);
    }
    printf("# OUTPUTS record: encode %.0f ns, decode %.0f ns, %zu bytes\n",
           (double)encoding / ROUNDS / RECORDS, (double)decoding / ROUNDS / RECORDS,
           body.len / RECORDS);
    fflush(stdout);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("codec");
    TCase *tc = tcase_create("codec");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, test_round_trip, 0, (int)message_table_len);
    tcase_add_test(tc, test_decoded_storage);
    tcase_add_test(tc, test_older_and_newer_peers);
    tcase_add_test(tc, test_every_truncation);
    tcase_add_test(tc, test_bit_flips);
    tcase_add_test(tc, test_hostile_under_memory_cap);
    tcase_add_test(tc, test_wrong_kind_names_the_field);
    tcase_add_test(tc, test_bad_envelopes);
    tcase_add_test(tc, test_encode_refuses);
    tcase_add_test(tc, test_texts_for_people_always_go);
    tcase_add_test(tc, test_speed_of_outputs);
    suite_add_tcase(suite, tc);
    return suite;
}
