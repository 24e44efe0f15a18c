#include "base/buf.h"
#include "base/check.h"
#include "base/config.h"
#include "base/hash.h"
#include "base/prng.h"
#include "base/status.h"
#include "tests/lib/test_main.h"

#include <string.h>

START_TEST(error_text_is_cut_and_prefixed)
{
    lk_error_t err = LK_ERROR_INIT;
    char longtext[3000];
    memset(longtext, 'x', sizeof longtext);
    longtext[sizeof longtext - 1] = '\0';
    ck_assert_int_eq(lk_error_set(&err, LK_ERR_INVALID, "%s", longtext), LK_ERR_INVALID);
    ck_assert_uint_eq(strlen(err.text), LK_ERROR_TEXT_MAX - 1);
    lk_error_set(&err, LK_ERR_STATE, "inner");
    ck_assert_int_eq(lk_error_prefix(&err, "outer %d", 7), LK_ERR_STATE);
    ck_assert_str_eq(err.text, "outer 7: inner");
    ck_assert_int_eq(lk_error_set(NULL, LK_ERR_IO, "nobody listens"), LK_ERR_IO);
}
END_TEST

START_TEST(a_text_is_cut_between_characters)
{
    char out[8];
    lk_text(out, sizeof out, "%s", "abcdefg");
    ck_assert_str_eq(out, "abcdefg");
    lk_text(out, sizeof out, "%s", "abcdefgh");
    ck_assert_str_eq(out, "abcdefg");
    lk_text(out, sizeof out, "%s", "abcd\xe6\xa8\xa1"); /* fits */
    ck_assert_str_eq(out, "abcd\xe6\xa8\xa1");
    lk_text(out, sizeof out, "%s", "abcde\xe6\xa8\xa1");
    ck_assert_str_eq(out, "abcde");
    lk_text(out, sizeof out, "%s", "abcd\xf0\x9f\x98\x80");
    ck_assert_str_eq(out, "abcd");
}
END_TEST

START_TEST(status_table_is_consistent)
{
    ck_assert_str_eq(lk_status_name(LK_ERR_STATE), "ERR_STATE");
    ck_assert_int_eq(lk_status_http(LK_ERR_STATE), 409);
    ck_assert(lk_status_is_valid(-5) && !lk_status_is_valid(-99));
}
END_TEST

START_TEST(buffer_keeps_its_limit)
{
    lk_buf_t buf;
    lk_buf_init(&buf, 4);
    lk_buf_append(&buf, "abcd", 4);
    ck_assert(!buf.failed);
    lk_buf_append(&buf, "e", 1);
    ck_assert(buf.failed);
    ck_assert_uint_eq(buf.len, 4);
    lk_buf_fini(&buf);
    lk_buf_fini(&buf);
    lk_buf_fini(NULL);
}
END_TEST

START_TEST(json_string_escapes_and_repairs)
{
    lk_buf_t buf;
    lk_buf_init(&buf, 0);
    lk_buf_json_str(&buf, "a\"\\\n\xC3\xA9\xFF\xC3", 8);
    ck_assert_str_eq(lk_buf_cstr(&buf), "\"a\\\"\\\\\\u000a\xC3\xA9\xEF\xBF\xBD\xEF\xBF\xBD\"");
    lk_buf_fini(&buf);
}
END_TEST

/* Known answers of the Random123 distribution (kat_vectors, philox4x32 10). */
START_TEST(philox_known_answers)
{
    uint32_t out[4];
    lk_philox4x32((uint32_t[2]){0, 0}, (uint32_t[4]){0, 0, 0, 0}, out);
    ck_assert_uint_eq(out[0], 0x6627e8d5u);
    ck_assert_uint_eq(out[1], 0xe169c58du);
    ck_assert_uint_eq(out[2], 0xbc57ac4cu);
    ck_assert_uint_eq(out[3], 0x9b00dbd8u);
    uint32_t f = 0xffffffffu;
    lk_philox4x32((uint32_t[2]){f, f}, (uint32_t[4]){f, f, f, f}, out);
    ck_assert_uint_eq(out[0], 0x408f276du);
    ck_assert_uint_eq(out[3], 0x6d5451fdu);
}
END_TEST

START_TEST(prng_is_a_function_of_its_seed)
{
    lk_prng_t a, b;
    uint64_t seed = test_seed("prng");
    lk_prng_seed(&a, seed);
    lk_prng_seed(&b, seed);
    for (int i = 0; i < 100; i++) {
        ck_assert_uint_eq(lk_prng_u64(&a), lk_prng_u64(&b));
        ck_assert_uint_lt(lk_prng_below(&a, 7), 7);
        lk_prng_below(&b, 7);
    }
}
END_TEST

START_TEST(secrets_compare_whole)
{
    ck_assert(lk_secret_equal("abc", "abc"));
    ck_assert(!lk_secret_equal("abc", "abcd"));
    ck_assert(!lk_secret_equal("", "a"));
}
END_TEST

START_TEST(flags_are_parsed_and_refused_by_name)
{
    lk_config_t c;
    lk_error_t err = LK_ERROR_INIT;
    const char *good[] = {"lockstep",
                          "/m",
                          "--port=9",
                          "--no-enable-prefix-caching",
                          "--data-parallel-size",
                          "4",
                          "--tensor-parallel-size",
                          "1",
                          "--enforce-eager",
                          "--max-logprobs",
                          "-1"};
    ck_ok(config_parse(LK_ARRAY_LEN(good), (char *const *)good, &c, &err));
    ck_assert_str_eq(c.model, "/m");
    ck_assert_uint_eq(c.port, 9);
    ck_assert_uint_eq(c.data_parallel_size, 4);
    ck_assert(!c.enable_prefix_caching);
    ck_assert_int_eq(c.max_logprobs, -1);
    ck_assert_uint_eq(c.dp_sync_interval, 32);

    static const struct {
        const char *argv[3], *text;
    } bad[] = {
        {{"--nonsense"}, "unknown flag --nonsense"},
        {{"--port"}, "--port needs a value"},
        {{"--port", "x"}, "--port takes a number"},
        {{"--port", "-1"}, "--port takes a number"},
        {{"--port", "70000"}, "from 0 to 65535"},
        {{"--device", "tpu"}, "--device must be one of"},
        {{"--tensor-parallel-size", "2"}, "--tensor-parallel-size 2 is not supported"},
        {{"--insecure=1"}, "takes no value"},
        {{"--heartbeat-timeout", "nan"}, "--heartbeat-timeout must be from"},
        {{"a", "b"}, "unexpected argument 'b'"},
        {{"/tmp/caf\xe9"}, "argument 1 ('/tmp/caf?') is not UTF-8"},
        {{"--model", "/tmp/caf\xe9"}, "argument 2 ('/tmp/caf?') is not UTF-8"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        const char *argv[4] = {"lockstep", bad[i].argv[0], bad[i].argv[1], bad[i].argv[2]};
        int argc = argv[2] == NULL ? 2 : 3;
        ck_assert_int_lt(config_parse(argc, (char *const *)argv, &c, &err), 0);
        ck_assert_msg(strstr(err.text, bad[i].text) != NULL, "'%s' has no '%s'", err.text,
                      bad[i].text);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("base");
    TCase *tc = tcase_create("base");
    tcase_add_test(tc, error_text_is_cut_and_prefixed);
    tcase_add_test(tc, a_text_is_cut_between_characters);
    tcase_add_test(tc, status_table_is_consistent);
    tcase_add_test(tc, buffer_keeps_its_limit);
    tcase_add_test(tc, json_string_escapes_and_repairs);
    tcase_add_test(tc, philox_known_answers);
    tcase_add_test(tc, prng_is_a_function_of_its_seed);
    tcase_add_test(tc, secrets_compare_whole);
    tcase_add_test(tc, flags_are_parsed_and_refused_by_name);
    suite_add_tcase(s, tc);
    return s;
}
