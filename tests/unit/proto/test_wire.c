/* The walk in front of msgpack-c, and reading and writing single values. */
#include "base/prng.h"
#include "proto/limits.h"
#include "proto/wire_reader.h"
#include "proto/wire_writer.h"
#include "tests/lib/test_main.h"

#include <string.h>

static const wire_limits_t limits = {1 << 20, 1000, 4};

static lk_status_t walk(const char *bytes, size_t len, lk_error_t *err)
{
    wire_shape_t shape;
    return wire_walk(bytes, len, &limits, &shape, err);
}

START_TEST(test_hostile_headers)
{
    /* Each claims far more than follows. msgpack-c alone would reserve gigabytes for some. */
    static const struct {
        const char *bytes;
        size_t len;
    } cases[] = {
#define HOSTILE(text) {text, sizeof text - 1}
        HOSTILE("\xdd\x0f\xff\xff\xff"),
        HOSTILE("\xdd\xff\xff\xff\xff\x00"),
        HOSTILE("\xdf\x7f\xff\xff\xff\x00"),
        HOSTILE("\xdf\xff\xff\xff\xff"),
        HOSTILE("\xdb\xff\xff\xff\xff"),
        HOSTILE("\xc6\xff\xff\xff\xff\x01"),
        HOSTILE("\xc9\xff\xff\xff\xff\x01"),
        HOSTILE("\xdc\xff\xff\x01"),
        HOSTILE("\xde\x00\x02\x01\x02\x03"),
        HOSTILE("\x92\x01"),
        HOSTILE("\xa5"
                "abcd"),
        HOSTILE("\xd9"),
        HOSTILE("\xcf\x00\x00"),
        HOSTILE("\xc1"),
        HOSTILE(""),
        HOSTILE("\x01\x02"),
        HOSTILE("\x92\xdd\x0f\xff\xff\xff\x01"),
        HOSTILE("\xc7"),
#undef HOSTILE
    };
    test_memory_cap(512u << 20);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lk_error_t err = LK_ERROR_INIT;
        wire_doc_t doc = {0};
        ck_assert_int_eq(walk(cases[i].bytes, cases[i].len, &err), LK_ERR_INVALID);
        ck_assert(strstr(err.text, "byte") != NULL);
        ck_assert_int_eq(wire_doc_init(&doc, cases[i].bytes, cases[i].len, &limits, &err),
                         LK_ERR_INVALID);
        ck_assert_ptr_null(doc.root);
    }
}
END_TEST

START_TEST(test_limits)
{
    lk_error_t err;
    static char many[1100], deep[64];
    memset(many, 0x01, sizeof many);
    memcpy(many, "\xdc\x03\xe7", 3); /* 999 values and the array itself */
    ck_ok(walk(many, 3 + 999, &err));
    memcpy(many, "\xdc\x03\xe8", 3);
    ck_assert_int_eq(walk(many, 3 + 1000, &err), LK_ERR_TOO_LARGE);
    memset(deep, '\x91', sizeof deep);
    deep[4] = '\x01';
    ck_ok(walk(deep, 5, &err));
    deep[4] = '\x91';
    deep[5] = '\x01';
    ck_assert_int_eq(walk(deep, 6, &err), LK_ERR_TOO_LARGE);
    wire_limits_t small = {4, 10, 4};
    wire_shape_t shape;
    ck_assert_int_eq(wire_walk("\xa4"
                               "abcd",
                               5, &small, &shape, &err),
                     LK_ERR_TOO_LARGE);
}
END_TEST

START_TEST(test_values)
{
    lk_buf_t buf;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_init(&buf, 0);
    wire_writer_t w = wire_writer(&buf);
    wire_put_array(&w, 11);
    wire_put_nil(&w);
    wire_put_u64(&w, UINT64_MAX);
    wire_put_i64(&w, INT64_MIN);
    wire_put_i64(&w, 7);
    wire_put_f64(&w, -0.5);
    wire_put_bool(&w, true);
    wire_put_bool(&w, false);
    wire_put_str(&w, "h\xC3\xA9", 3);
    wire_put_bin(&w, "\0\1\2", 3);
    wire_put_map(&w, 1);
    wire_put_str(&w, "key", 3);
    wire_put_u64(&w, 9);
    wire_put_array(&w, 0);
    ck_assert(!buf.failed);
    ck_assert_uint_eq(w.objects, 14);

    wire_doc_t doc = {0};
    ck_ok(wire_doc_init(&doc, buf.data, buf.len, &limits, &err));
    ck_assert_uint_eq(doc.shape.objects, 14);
    ck_assert_uint_eq(doc.shape.blobs, 3);
    ck_assert_uint_eq(doc.shape.bytes, 9);
    const wire_value_t *v;
    size_t n, len;
    uint64_t u = 1;
    int64_t i = 1;
    double f;
    bool b;
    const char *s;
    const void *bin;
    ck_assert(wire_array(doc.root, &v, &n) && n == 11);
    ck_assert_int_eq(wire_kind(wire_item(v, 0)), WIRE_NIL);
    ck_assert(wire_u64(wire_item(v, 1), &u) && u == UINT64_MAX);
    ck_assert(!wire_i64(wire_item(v, 1), &i) && i == 1);
    ck_assert(wire_i64(wire_item(v, 2), &i) && i == INT64_MIN);
    u = 1;
    ck_assert(!wire_u64(wire_item(v, 2), &u) && u == 1);
    ck_assert(wire_i64(wire_item(v, 3), &i) && i == 7);
    ck_assert(wire_f64(wire_item(v, 3), &f) && f == 7.0);
    ck_assert(wire_f64(wire_item(v, 4), &f) && f == -0.5);
    ck_assert(wire_bool(wire_item(v, 5), &b) && b);
    ck_assert(wire_bool(wire_item(v, 6), &b) && !b);
    ck_assert(wire_str(wire_item(v, 7), &s, &len) && len == 3 && memcmp(s, "h\xC3\xA9", 3) == 0);
    ck_assert(!wire_str(wire_item(v, 8), &s, &len));
    ck_assert(wire_bin(wire_item(v, 8), &bin, &len) && len == 3 && memcmp(bin, "\0\1\2", 3) == 0);
    ck_assert(wire_map(wire_item(v, 9), &n) && n == 1);
    ck_assert(wire_str(wire_map_key(wire_item(v, 9), 0), &s, &len) && len == 3);
    ck_assert(wire_u64(wire_map_value(wire_item(v, 9), 0), &u) && u == 9);
    ck_assert(wire_array(wire_item(v, 10), &v, &n) && n == 0);
    wire_doc_fini(&doc);
    wire_doc_fini(&doc);
    lk_buf_fini(&buf);
}
END_TEST

/* What the walk lets through, msgpack-c parses: random bytes with plausible headers. */
START_TEST(test_walk_agrees_with_parser)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("walk"));
    size_t accepted = 0;
    for (int round = 0; round < 200000; round++) {
        uint8_t bytes[24];
        size_t len = 1 + lk_prng_below(&prng, sizeof bytes);
        for (size_t k = 0; k < len; k++) {
            uint64_t r = lk_prng_u64(&prng);
            bytes[k] = (uint8_t)(r & 256 ? r % 4 : r & 512 ? 0xC0 + r % 32 : 0x80 + r % 64);
        }
        wire_doc_t doc = {0};
        wire_shape_t shape;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t walked = wire_walk(bytes, len, &limits, &shape, &err);
        ck_assert_msg(wire_doc_init(&doc, bytes, len, &limits, &err) == walked, "%s", err.text);
        accepted += walked == LK_OK;
        wire_doc_fini(&doc);
    }
    ck_assert_uint_gt(accepted, 100);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("wire");
    TCase *tc = tcase_create("wire");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_hostile_headers);
    tcase_add_test(tc, test_limits);
    tcase_add_test(tc, test_values);
    tcase_add_test(tc, test_walk_agrees_with_parser);
    suite_add_tcase(suite, tc);
    return suite;
}
