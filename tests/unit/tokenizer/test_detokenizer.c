/* Streamed text: equal to the whole decoding, whole characters only, stop strings held back. */
#include "api_frontend/tokenizer/detokenizer.h"
#include "api_frontend/tokenizer/stop_matcher.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/prng.h"
#include "tests/unit/tokenizer/fixture.h"

#include <stdio.h>

/* What a caller sees of one stream. */
typedef struct {
    lk_buf_t text;
    size_t n_used;
    int stop;
} stream_t;

/* Feeds ids in random portions; each delta has to be valid UTF-8 by itself. */
static stream_t run_stream(const tokenizer_t *t, const detokenizer_options_t *options,
                           const uint32_t *ids, size_t n, lk_prng_t *prng)
{
    stream_t s = {0};
    lk_buf_t delta;
    detokenizer_t *d;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_init(&s.text, 0);
    lk_buf_init(&delta, 0);
    ck_assert_msg(detokenizer_new(t, options, &d, &err) == LK_OK, "%s", err.text);
    bool used_all = true;
    for (size_t i = 0; i < n && used_all;) {
        size_t portion = 1 + lk_prng_below(prng, 4), used;
        portion = portion < n - i ? portion : n - i;
        lk_buf_clear(&delta);
        ck_ok(detokenizer_push(d, ids + i, portion, &delta, &used, &err));
        ck_assert(utf8_check(lk_buf_cstr(&delta), delta.len, NULL));
        lk_buf_append(&s.text, delta.data, delta.len);
        s.n_used += used;
        used_all = used == portion && detokenizer_stop(d) < 0;
        i += portion;
    }
    lk_buf_clear(&delta);
    ck_ok(detokenizer_finish(d, &delta, &err));
    ck_assert(detokenizer_stop(d) < 0 || delta.len == 0);
    lk_buf_append(&s.text, delta.data, delta.len);
    s.stop = detokenizer_stop(d);
    lk_buf_fini(&delta);
    detokenizer_destroy(&d);
    return s;
}

static void check_equal_to_decode(const tokenizer_t *t, const uint32_t *ids, size_t n,
                                  lk_prng_t *prng)
{
    for (int skip = 0; skip < 2; skip++) {
        detokenizer_options_t options = {.skip_special = skip == 1};
        lk_buf_t whole;
        lk_buf_init(&whole, 0);
        tokenizer_decode(t, ids, n, skip == 1, &whole);
        stream_t s = run_stream(t, &options, ids, n, prng);
        ck_assert_uint_eq(s.n_used, n);
        ck_assert_str_eq(lk_buf_cstr(&s.text), lk_buf_cstr(&whole));
        ck_assert_uint_eq(s.text.len, whole.len);
        lk_buf_fini(&s.text);
        lk_buf_fini(&whole);
    }
}

START_TEST(qwen3_round_trips)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("round_trips"));
    tokenizer_t *t = fixture_tokenizer(QWEN3_DIR);
    json_t *cases = fixture_json("qwen3_tokenizer/encodings.json"), *one;
    size_t i;
    json_array_foreach(cases, i, one)
    {
        json_t *list = json_object_get(one, "ids");
        uint32_t ids[4096];
        size_t n = json_array_size(list);
        ck_assert_uint_le(n, 4096);
        for (size_t k = 0; k < n; k++) {
            ids[k] = (uint32_t)json_integer_value(json_array_get(list, k));
        }
        check_equal_to_decode(t, ids, n, &prng);
    }
    json_decref(cases);
    tokenizer_destroy(&t);
}
END_TEST

/* Ids as a random model samples them: parts of characters, special, unused. */
START_TEST(random_ids_stream_as_they_decode)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("random_ids"));
    tokenizer_t *t = fixture_tokenizer(fixture_path("tokenizers/llama3"));
    uint32_t vocab = tokenizer_vocab_size(t) + 20;
    for (int round = 0; round < 500; round++) {
        uint32_t ids[64];
        size_t n = lk_prng_below(&prng, 64);
        for (size_t i = 0; i < n; i++) {
            /* the first 300 are mostly single bytes */
            ids[i] = (uint32_t)lk_prng_below(&prng, round % 2 == 0 ? vocab : 300);
        }
        check_equal_to_decode(t, ids, n, &prng);
    }
    tokenizer_destroy(&t);
}
END_TEST

/* A tokenizer whose ids 0 to 255 are the bytes. */
static tokenizer_t *bytes_tokenizer(void)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tokenizer_write_bytes(test_tmpdir(), 300, &err) == LK_OK, "%s", err.text);
    return fixture_tokenizer(test_tmpdir());
}

/* The definition of stopping, by brute force: the first end, of those the longest string. */
static int find_stop(const char *text, size_t len, const char *const *stops, size_t n_stops,
                     size_t min_tokens, size_t *end)
{
    for (size_t e = min_tokens + 1; e <= len; e++) {
        int best = -1;
        for (size_t i = 0; i < n_stops; i++) {
            size_t n = strlen(stops[i]);
            bool longer = best < 0 || n > strlen(stops[best]);
            if (n <= e && memcmp(text + e - n, stops[i], n) == 0 && longer) {
                best = (int)i;
            }
        }
        if (best >= 0) {
            *end = e;
            return best;
        }
    }
    return -1;
}

START_TEST(stop_strings_cut_the_text)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("stops"));
    tokenizer_t *t = bytes_tokenizer();
    int stopped = 0;
    for (int round = 0; round < 4000; round++) {
        char text[64], strings[3][8];
        const char *stops[3];
        uint32_t ids[64];
        size_t n = lk_prng_below(&prng, 40), n_stops = 1 + lk_prng_below(&prng, 3), end;
        for (size_t i = 0; i < n; i++) {
            text[i] = (char)('a' + lk_prng_below(&prng, 2));
            ids[i] = (uint8_t)text[i];
        }
        text[n] = '\0';
        for (size_t i = 0; i < n_stops; i++) {
            size_t len = 1 + lk_prng_below(&prng, 6);
            for (size_t k = 0; k < len; k++) {
                strings[i][k] = (char)('a' + lk_prng_below(&prng, 2));
            }
            strings[i][len] = '\0';
            stops[i] = strings[i];
        }
        uint32_t min_tokens = (uint32_t)lk_prng_below(&prng, 6);
        detokenizer_options_t options = {.include_stop = round % 2 == 1,
                                         .min_tokens = min_tokens,
                                         .stops = stops,
                                         .n_stops = n_stops};
        int want = find_stop(text, n, stops, n_stops, min_tokens, &end);
        stream_t s = run_stream(t, &options, ids, n, &prng);
        ck_assert_int_eq(s.stop >= 0, want >= 0);
        if (want >= 0) {
            ck_assert_str_eq(stops[s.stop], stops[want]);
            ck_assert_uint_eq(s.n_used, end);
            text[options.include_stop ? end : end - strlen(stops[want])] = '\0';
            stopped++;
        }
        ck_assert_str_eq(lk_buf_cstr(&s.text), text);
        lk_buf_fini(&s.text);
    }
    ck_assert_int_gt(stopped, 1000);
    tokenizer_destroy(&t);
}
END_TEST

/* Pushes the bytes of text as ids of the bytes tokenizer; returns all text given out so far. */
static const char *push_text(detokenizer_t *d, const char *text, lk_buf_t *out)
{
    for (; *text != '\0'; text++) {
        uint32_t id = (uint8_t)*text;
        ck_ok(detokenizer_push(d, &id, 1, out, NULL, NULL));
    }
    return lk_buf_cstr(out);
}

START_TEST(only_possible_beginnings_are_held_back)
{
    const char *const stops[] = {"</s>", "\xE2\x82\xAC!"};
    detokenizer_options_t options = {.stops = stops, .n_stops = 2};
    tokenizer_t *t = bytes_tokenizer();
    detokenizer_t *d;
    lk_buf_t out;
    lk_buf_init(&out, 0);
    ck_ok(detokenizer_new(t, &options, &d, NULL));
    ck_assert_str_eq(push_text(d, "a<", &out), "a");
    ck_assert_str_eq(push_text(d, "b", &out), "a<b");
    ck_assert_str_eq(push_text(d, "</", &out), "a<b");
    ck_assert_str_eq(push_text(d, "<", &out), "a<b</");
    ck_assert_str_eq(push_text(d, "\xE2\x82", &out), "a<b</"); /* not whole yet */
    ck_assert_str_eq(push_text(d, "\xAC", &out), "a<b</<");
    ck_assert_str_eq(push_text(d, "?", &out), "a<b</<\xE2\x82\xAC?");
    ck_assert_str_eq(push_text(d, "\xE2\x82\xAC!xyz", &out), "a<b</<\xE2\x82\xAC?");
    ck_assert_int_eq(detokenizer_stop(d), 1);
    ck_ok(detokenizer_finish(d, &out, NULL));
    ck_assert_str_eq(lk_buf_cstr(&out), "a<b</<\xE2\x82\xAC?");
    detokenizer_destroy(&d);
    lk_buf_fini(&out);
    tokenizer_destroy(&t);
}
END_TEST

START_TEST(an_unfinished_end_is_flushed)
{
    const char *const stops[] = {"</s>"};
    detokenizer_options_t options = {.stops = stops, .n_stops = 1};
    tokenizer_t *t = bytes_tokenizer();
    detokenizer_t *d;
    lk_buf_t out;
    lk_buf_init(&out, 0);
    ck_ok(detokenizer_new(t, &options, &d, NULL));
    ck_assert_str_eq(push_text(d, "x</s\xF0\x9F\x98", &out), "x");
    ck_ok(detokenizer_finish(d, &out, NULL));
    ck_assert_str_eq(lk_buf_cstr(&out), "x</s" UTF8_REPLACEMENT);
    ck_assert_str_eq(push_text(d, "later", &out), "x</s" UTF8_REPLACEMENT);
    detokenizer_destroy(&d);
    lk_buf_fini(&out);
    tokenizer_destroy(&t);
}
END_TEST

START_TEST(a_full_buffer_is_an_error)
{
    detokenizer_options_t options = {.skip_special = true};
    tokenizer_t *t = bytes_tokenizer();
    detokenizer_t *d;
    lk_error_t err = LK_ERROR_INIT;
    uint32_t ids[] = {'a', 'b', 'c'};
    lk_buf_t out;
    lk_buf_init(&out, 2);
    ck_ok(detokenizer_new(t, &options, &d, NULL));
    ck_assert_int_eq(detokenizer_push(d, ids, 3, &out, NULL, &err), LK_ERR_TOO_LARGE);
    ck_assert_str_ne(err.text, "");
    detokenizer_destroy(&d);
    lk_buf_fini(&out);
    tokenizer_destroy(&t);
}
END_TEST

static void expect_stop_error(const char *const *stops, size_t n, const char *text)
{
    stop_matcher_t *m = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(stop_matcher_new(stops, n, &m, &err), LK_ERR_INVALID);
    ck_assert_ptr_null(m);
    ck_assert_msg(strstr(err.text, text) != NULL, "%s", err.text);
}

START_TEST(bad_stop_strings_are_refused)
{
    static char huge[STOP_MATCHER_MAX_BYTES + 2];
    static const char *many[STOP_MATCHER_MAX_STRINGS + 1];
    memset(huge, 'a', sizeof huge - 1);
    for (size_t i = 0; i <= STOP_MATCHER_MAX_STRINGS; i++) {
        many[i] = "x";
    }
    const char *empty[] = {"a", ""}, *broken[] = {"a", "b", "\xC3("}, *large[] = {huge};
    expect_stop_error(empty, 2, "stop[1] is empty");
    expect_stop_error(broken, 3, "stop[2] is not UTF-8");
    expect_stop_error(large, 1, "stop[0]");
    expect_stop_error(many, STOP_MATCHER_MAX_STRINGS + 1, "257");
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("detokenizer");
    TCase *tc = tcase_create("streams");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, qwen3_round_trips);
    tcase_add_test(tc, random_ids_stream_as_they_decode);
    tcase_add_test(tc, stop_strings_cut_the_text);
    tcase_add_test(tc, only_possible_beginnings_are_held_back);
    tcase_add_test(tc, an_unfinished_end_is_flushed);
    tcase_add_test(tc, a_full_buffer_is_an_error);
    tcase_add_test(tc, bad_stop_strings_are_refused);
    suite_add_tcase(s, tc);
    return s;
}
