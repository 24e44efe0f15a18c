/* Ids and texts against the reference library's, for every style of tokenizer. */
#include "tests/unit/tokenizer/fixture.h"

#include <stdio.h>

static const unsigned parse = TOKENIZER_PARSE_SPECIAL;

static void check_decode(const tokenizer_t *t, json_t *ids, bool skip_special, json_t *expected)
{
    if (json_is_null(expected)) {
        return; /* a token whose text the reference normalises and this code leaves as written */
    }
    size_t n = json_array_size(ids);
    uint32_t *a = malloc((n + 1) * sizeof *a);
    for (size_t i = 0; i < n; i++) {
        a[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    }
    lk_buf_t out;
    lk_buf_init(&out, 0);
    tokenizer_decode(t, a, n, skip_special, &out);
    ck_assert(!out.failed);
    ck_assert_msg(out.len == json_string_length(expected) &&
                      memcmp(lk_buf_cstr(&out), json_string_value(expected), out.len) == 0,
                  "decoded \"%s\", expected \"%s\"", lk_buf_cstr(&out),
                  json_string_value(expected));
    lk_buf_fini(&out);
    free(a);
}

START_TEST(qwen3_encodings_are_equal)
{
    tokenizer_t *t = fixture_tokenizer(QWEN3_DIR);
    json_t *cases = fixture_json("qwen3_tokenizer/encodings.json"), *one;
    size_t i;
    ck_assert_uint_eq(json_array_size(cases), 1011);
    json_array_foreach(cases, i, one)
    {
        json_t *text = json_object_get(one, "text"), *ids = json_object_get(one, "ids");
        fixture_check_ids(t, text, parse, ids);
        fixture_check_ids(t, text, parse | TOKENIZER_ADD_SPECIAL, ids);
    }
    ck_assert_uint_eq(tokenizer_vocab_size(t), 151669);
    ck_assert_uint_eq(tokenizer_eos_id(t), tokenizer_token_id(t, "<|im_end|>"));
    json_decref(cases);
    tokenizer_destroy(&t);
}
END_TEST

START_TEST(qwen3_chats_are_equal)
{
    tokenizer_t *t = fixture_tokenizer(QWEN3_DIR);
    json_t *cases = fixture_json("qwen3_tokenizer/chat.json"), *one;
    size_t i;
    json_array_foreach(cases, i, one)
    {
        json_t *text = json_object_get(one, "rendered"), *ids = json_object_get(one, "ids");
        fixture_check_ids(t, text, parse, ids);
        check_decode(t, ids, false, text);
    }
    json_decref(cases);
    tokenizer_destroy(&t);
}
END_TEST

static const char *const styles[] = {"gpt2",  "gpt2_prefix", "llama3",   "smollm2",
                                     "o200k", "deepseek",    "behaviors"};

START_TEST(styles_are_equal)
{
    char path[128];
    json_t *one;
    size_t i;
    snprintf(path, sizeof path, "tokenizers/%s", styles[_i]);
    tokenizer_t *t = fixture_tokenizer(fixture_path(path));
    snprintf(path, sizeof path, "tokenizers/%s/cases.json", styles[_i]);
    json_t *cases = fixture_json(path);
    ck_assert_uint_gt(json_array_size(cases), 200);
    json_array_foreach(cases, i, one)
    {
        json_t *text = json_object_get(one, "text");
        json_t *with_special = json_object_get(one, "with_special");
        fixture_check_ids(t, text, parse, json_object_get(one, "ids"));
        fixture_check_ids(t, text, 0, json_object_get(one, "plain"));
        fixture_check_ids(t, text, parse | TOKENIZER_ADD_SPECIAL, with_special);
        check_decode(t, with_special, false, json_object_get(one, "decoded"));
        check_decode(t, with_special, true, json_object_get(one, "skipped"));
    }
    json_decref(cases);
    tokenizer_destroy(&t);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("tokenizer_encode");
    TCase *tc = tcase_create("reference");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, qwen3_encodings_are_equal);
    tcase_add_test(tc, qwen3_chats_are_equal);
    tcase_add_loop_test(tc, styles_are_equal, 0, (int)(sizeof styles / sizeof styles[0]));
    suite_add_tcase(s, tc);
    return s;
}
