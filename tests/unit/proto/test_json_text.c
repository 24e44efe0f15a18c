#include "base/check.h"
#include "base/prng.h"
#include "proto/json_text.h"
#include "tests/lib/test_main.h"

#include <stdlib.h>
#include <string.h>

#define FLAGS JSON_DECODE_ANY

/* In memory of exactly its size, so that a sanitizer sees a read past the end. */
static json_t *read_exactly(const char *text, size_t len, size_t flags, json_error_t *error)
{
    char *copy = malloc(len > 0 ? len : 1);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, text, len);
    json_t *made = json_text_read(copy, len, flags, error);
    free(copy);
    return made;
}

/* The same verdict, value and error as jansson's. */
static void compare(const char *text, size_t len, size_t flags)
{
    json_error_t ours, theirs;
    memset(&ours, 0, sizeof ours);
    json_t *a = read_exactly(text, len, flags, &ours);
    json_t *b = json_loadb(text, len, JSON_REJECT_DUPLICATES | flags, &theirs);
    ck_assert_msg((a == NULL) == (b == NULL), "%.*s: %s", (int)len, text, theirs.text);
    if (a == NULL) {
        ck_assert_str_eq(ours.text, theirs.text);
        ck_assert_int_eq(ours.position, theirs.position);
        return;
    }
    ck_assert_msg(json_equal(a, b), "%.*s", (int)len, text);
    ck_assert(json_text_hash(a) == json_text_hash(b));
    lk_buf_t out;
    lk_buf_init(&out, 0);
    json_text_write(&out, a);
    char *dumped = json_dumps(b, JSON_COMPACT | JSON_ENCODE_ANY);
    json_t *again = json_loadb((char *)out.data, out.len, JSON_DECODE_ANY, NULL);
    ck_assert_msg(json_equal(again, b), "%s, %s", lk_buf_cstr(&out), dumped);
    json_decref(again);
    lk_buf_fini(&out);
    free(dumped);
    json_decref(a);
    json_decref(b);
}

static const char *const texts[] = {
    "",
    " ",
    "{}",
    " [ ] ",
    "[1,2,3]",
    "{\"a\":1,\"b\":[true,false,null]}",
    "{\"a\":1,\"a\":2}",
    "[1,]",
    "[,1]",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\":1,}",
    "{a:1}",
    "[1 2]",
    "[1]x",
    "[1",
    "\"open",
    "7",
    "\"text\"",
    "truely",
    "[true1]",
    "[nul]",
    "[TRUE]",
    "0",
    "-0",
    "-",
    "01",
    "-01",
    "1.",
    "1.5",
    ".5",
    "-1.5e3",
    "1e",
    "1e+",
    "1E+2",
    "1e999",
    "1e-999",
    "-0.0",
    "+1",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "999999999999999999",
    "1234567890123456789",
    "123456789012345678901234567890",
    "0.1234567890123456789012345678901234567890123456789012345678901234567890",
    "\"\\u00e4\\u20ac\\uD83D\\ude00\"",
    "\"\\ud83d\"",
    "\"\\ude00\"",
    "\"\\ud83dx\"",
    "\"\\ud83d\\u0041\"",
    "\"\\u0000\"",
    "{\"\\u0000\":1}",
    "{\"a\\u0062\":1,\"ab\":2}",
    "\"\\u12\"",
    "\"\\u12G4\"",
    "\"\\x\"",
    "\"\\",
    "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
    "\"a\nb\"",
    "\"a\x7f\"",
    "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"",
    "\"\xc3\"",
    "\"\xc0\x80\"",
    "\"\xed\xa0\x80\"",
    "\"\xf5\x80\x80\x80\"",
    "\xef\xbb\xbf{}",
    "\xc3\xa4",
    "[\"a\"\t,\r\n\"b\"]",
    "[\f1]",
    "{\"\":{\"\":[]}}",
};

START_TEST(as_jansson_reads_it)
{
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        compare(texts[i], strlen(texts[i]), FLAGS);
        compare(texts[i], strlen(texts[i]), 0);
    }
    compare("[1]\0", 4, 0);
    compare("\"a\0b\"", 5, FLAGS);
}
END_TEST

/* Around the number of bytes that are looked at together, and with something odd at each place. */
START_TEST(long_strings)
{
    static const char *const odd[] = {"\"", "\\n", "\\", "\n", "\xc3\xa4", "\xc3", "\\u00e4", "\0"};
    char text[256];
    for (size_t len = 0; len < 100; len++) {
        for (size_t k = 0; k < sizeof odd / sizeof odd[0]; k++) {
            for (size_t at = len > 70 ? len - 70 : 0; at <= len; at++) {
                size_t n = odd[k][0] != '\0' ? strlen(odd[k]) : 1;
                text[0] = '"';
                memset(text + 1, 'x', len);
                memcpy(text + 1 + at, odd[k], n);
                size_t end = LK_MAX(len, at + n);
                text[1 + end] = '"';
                compare(text, end + 2, FLAGS);
                compare(text, end + 1, FLAGS);
            }
        }
    }
}
END_TEST

START_TEST(deep)
{
    char text[5000];
    for (size_t depth = 1; depth <= 2100; depth += depth < 70 ? 1 : 400) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        compare(text, 2 * depth, 0);
        compare(text, 2 * depth - 1, 0);
    }
}
END_TEST

/* Texts that are damaged in one or two places. */
START_TEST(damaged)
{
    static const char whole[] =
        "{\"update_info\": {\"names\": [\"a.b\", \"c\\u00e4\"], \"shapes\": [[2, 3], []], "
        "\"packed\": true, \"x\": -1.25e2, \"\xc3\xa4\": null, \"big\": 123456789012345678}}";
    static const char bytes[] = "{}[]\",:\\ u0e-.1tfn\n\xc3\xa4\x80";
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("json_text"));
    for (int round = 0; round < 30000; round++) {
        char text[sizeof whole];
        memcpy(text, whole, sizeof whole);
        size_t len = sizeof whole - 1;
        for (uint64_t n = 1 + lk_prng_below(&prng, 2); n > 0; n--) {
            text[lk_prng_below(&prng, len)] = bytes[lk_prng_below(&prng, sizeof bytes)];
        }
        len -= lk_prng_below(&prng, 4) == 0 ? lk_prng_below(&prng, len) : 0;
        compare(text, len, 0);
    }
}
END_TEST

START_TEST(equal_values_have_equal_hashes)
{
    static const char *const different[] = {"null",
                                            "true",
                                            "false",
                                            "0",
                                            "1",
                                            "-1",
                                            "0.5",
                                            "\"\"",
                                            "\"a\"",
                                            "[]",
                                            "{}",
                                            "[[]]",
                                            "[1]",
                                            "[1,2]",
                                            "[2,1]",
                                            "[[1],2]",
                                            "{\"a\":1}",
                                            "{\"a\":2}",
                                            "{\"b\":1}",
                                            "{\"a\":1,\"b\":2}",
                                            "{\"a\":2,\"b\":1}",
                                            "{\"a\":\"b\"}",
                                            "{\"b\":\"a\"}",
                                            "\"1\"",
                                            "1.0"};
    enum { N = sizeof different / sizeof different[0] };
    uint64_t hashes[N];
    for (size_t i = 0; i < N; i++) {
        json_t *value = json_text_read(different[i], strlen(different[i]), FLAGS, NULL);
        ck_assert_ptr_nonnull(value);
        hashes[i] = json_text_hash(value);
        json_decref(value);
        for (size_t k = 0; k < i; k++) {
            ck_assert_msg(hashes[i] != hashes[k], "%s, %s", different[i], different[k]);
        }
    }
    static const char one[] = "{\"a\":1,\"b\":{\"c\":2,\"d\":-0.0}}";
    static const char other[] = "{ \"b\" : {\"d\": 0.0, \"c\" : 2}, \"a\" : 1 }";
    json_t *a = json_text_read(one, strlen(one), 0, NULL);
    json_t *b = json_text_read(other, strlen(other), 0, NULL);
    ck_assert(json_text_hash(a) == json_text_hash(b));
    json_decref(a);
    json_decref(b);
}
END_TEST

/* What does not fit marks the buffer. */
START_TEST(written_within_a_limit)
{
    json_t *value = json_pack("{s:[i,f,b,n,s]}", "a", 1, 0.5, 1, "t\x01\"\\\n");
    lk_buf_t out;
    lk_buf_init(&out, 0);
    json_text_write(&out, value);
    ck_assert_str_eq(lk_buf_cstr(&out), "{\"a\":[1,0.5,true,null,\"t\\u0001\\\"\\\\\\u000a\"]}");
    size_t len = out.len;
    lk_buf_fini(&out);
    lk_buf_init(&out, len - 1);
    json_text_write(&out, value);
    ck_assert(out.failed);
    lk_buf_fini(&out);
    json_decref(value);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("json_text");
    TCase *tc = tcase_create("json_text");
    tcase_add_test(tc, as_jansson_reads_it);
    tcase_add_test(tc, long_strings);
    tcase_add_test(tc, deep);
    tcase_add_test(tc, damaged);
    tcase_add_test(tc, equal_values_have_equal_hashes);
    tcase_add_test(tc, written_within_a_limit);
    suite_add_tcase(suite, tc);
    return suite;
}
