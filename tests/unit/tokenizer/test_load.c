/* What is refused at load and how, settings that matter, and inputs that must not hurt. */
#include "base/env.h"
#include "base/prng.h"
#include "tests/unit/tokenizer/fixture.h"

#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define BL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define MODEL                                                                                      \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"
#define STEPS "\"pre_tokenizer\":" BL ",\"decoder\":" BL
#define DEC   "\"decoder\":" BL

/* Parses; on an error the status and the beginning of the text have to be these. */
static void expect(const char *json, const char *config, lk_status_t status, const char *text)
{
    lk_error_t err = LK_ERROR_INIT;
    tokenizer_t *t = NULL;
    lk_status_t got =
        tokenizer_parse(json, strlen(json), config, config == NULL ? 0 : strlen(config), &t, &err);
    ck_assert_msg(got == status, "%.200s: got %s \"%s\", expected %s", json, lk_status_name(got),
                  err.text, lk_status_name(status));
    ck_assert(status == LK_OK || t == NULL);
    ck_assert_msg(status == LK_OK || strncmp(err.text, text, strlen(text)) == 0,
                  "error \"%s\", expected \"%s...\"", err.text, text);
    tokenizer_destroy(&t);
}

static const struct {
    const char *json;
    lk_status_t status;
    const char *text;
} refused[] = {
    {"", LK_ERR_INVALID, "tokenizer.json: is not JSON"},
    {"{", LK_ERR_INVALID, "tokenizer.json: is not JSON"},
    {"[1]", LK_ERR_INVALID, "tokenizer.json: is not a JSON object"},
    {"{\"a\":\"\xC3(\"}", LK_ERR_INVALID, "tokenizer.json: is not JSON"},
    {"{\"a\":1,\"a\":2}", LK_ERR_INVALID, "tokenizer.json: is not JSON"},
    {"{}", LK_ERR_INVALID, "tokenizer.json: model is missing"},
    {"{\"model\":7}", LK_ERR_INVALID, "tokenizer.json: model is not an object"},
    {"{\"model\":{\"type\":\"Unigram\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: model.type \"Unigram\""},
    {"{\"model\":{\"type\":\"WordPiece\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: model.type \"WordPiece\""},
    {"{\"model\":{\"byte_fallback\":true}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: model.byte_fallback"},
    {"{\"model\":{\"dropout\":0.1}}", LK_ERR_UNSUPPORTED, "tokenizer.json: model.dropout"},
    {"{\"model\":{\"end_of_word_suffix\":\"</w>\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: model.end_of_word_suffix"},
    {"{\"model\":{\"vocab\":{}}}", LK_ERR_INVALID, "tokenizer.json: model.vocab is missing"},
    {"{\"model\":{\"vocab\":[]}}", LK_ERR_INVALID, "tokenizer.json: model.vocab is not an object"},
    {"{\"model\":{\"vocab\":{\"a\":\"0\"}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: token \"a\": id is no integer"},
    {"{\"model\":{\"vocab\":{\"a\":-1}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: token \"a\" has id -1"},
    {"{\"model\":{\"vocab\":{\"a\":1048576}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: token \"a\" has id 1048576"},
    {"{\"model\":{\"vocab\":{\"a\":9223372036854775807}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: token \"a\" has id 9223372036854775807"},
    {"{\"model\":{\"vocab\":{\"a\":92233720368547758070}}}", LK_ERR_INVALID,
     "tokenizer.json: is not JSON"},
    {"{\"model\":{\"vocab\":{\"a\":3,\"b\":3}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: tokens \"a\" and \"b\" have the same id 3"},
    {"{\"model\":{\"vocab\":{\"\":3}}}", LK_ERR_INVALID,
     "tokenizer.json: model.vocab: token with id 3 has 0 bytes"},
    {"{\"model\":{\"vocab\":{\"a\":0}}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges is missing"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b c\"]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0] is neither"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0] is neither"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",5]]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0] is neither"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\" a\"]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0] is neither"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0]: token \"b\" is not in model.vocab"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", LK_ERR_INVALID,
     "tokenizer.json: model.merges[0]: token \"aa\" is not in model.vocab"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"u\"}}", LK_ERR_INVALID,
     "tokenizer.json: model.unk_token"},
    {"{" MODEL "}", LK_ERR_UNSUPPORTED, "tokenizer.json: pre_tokenizer has no ByteLevel"},
    {"{" MODEL ",\"normalizer\":{\"type\":\"Lowercase\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: normalizer.type \"Lowercase\""},
    {"{" MODEL ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"
     "{\"type\":\"Strip\"}]}}",
     LK_ERR_UNSUPPORTED, "tokenizer.json: normalizer.normalizers[1].type \"Strip\""},
    {"{" MODEL ",\"normalizer\":{\"type\":\"Sequence\"}}", LK_ERR_INVALID,
     "tokenizer.json: normalizer.normalizers is missing"},
    {"{" MODEL ",\"normalizer\":{}}", LK_ERR_INVALID, "tokenizer.json: normalizer.type is missing"},
    {"{" MODEL ",\"pre_tokenizer\":{\"type\":\"Metaspace\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: pre_tokenizer.type \"Metaspace\""},
    {"{" MODEL ",\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}", LK_ERR_INVALID,
     "tokenizer.json: pre_tokenizer.add_prefix_space is missing"},
    {"{" MODEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" BL "," BL "]}}",
     LK_ERR_UNSUPPORTED, "tokenizer.json: pre_tokenizer.pretokenizers[1]: nothing is supported"},
    {"{" MODEL "," STEPS ",\"post_processor\":{\"type\":\"BertProcessing\"}}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: post_processor.type \"BertProcessing\""},
    {"{" MODEL "," STEPS ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}}",
     LK_ERR_INVALID, "tokenizer.json: post_processor.single has no Sequence A"},
    {"{" MODEL "," STEPS ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":["
     "{\"SpecialToken\":{\"id\":\"s\"}},{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":"
     "{\"s\":{\"ids\":[77]}}}}",
     LK_ERR_INVALID, "tokenizer.json: post_processor.special_tokens: \"s\": ids[0]"},
    {"{" MODEL ",\"pre_tokenizer\":" BL "}", LK_ERR_UNSUPPORTED,
     "tokenizer.json: decoder is missing"},
    {"{" MODEL ",\"pre_tokenizer\":" BL ",\"decoder\":{\"type\":\"Metaspace\"}}",
     LK_ERR_UNSUPPORTED, "tokenizer.json: decoder.type \"Metaspace\""},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"content\":\"x\"}]}", LK_ERR_INVALID,
     "tokenizer.json: added_tokens[0].id is missing"},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":9}]}", LK_ERR_INVALID,
     "tokenizer.json: added_tokens[0].content is missing"},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":1,\"content\":\"x\"}]}", LK_ERR_INVALID,
     "tokenizer.json: added_tokens[0]: tokens \"b\" and \"x\" have the same id 1"},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":9,\"content\":\"b\"}]}", LK_ERR_INVALID,
     "tokenizer.json: added_tokens[0]: token \"b\" has id 9 here and 1 before"},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":99999999,\"content\":\"x\"}]}", LK_ERR_INVALID,
     "tokenizer.json: added_tokens[0]: token \"x\" has id 99999999"},
    {"{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":9,\"content\":\"x\",\"special\":1}]}",
     LK_ERR_INVALID, "tokenizer.json: added_tokens[0].special is not true or false"},
};

START_TEST(bad_files_are_refused_by_name)
{
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        expect(refused[i].json, NULL, refused[i].status, refused[i].text);
    }
    expect("{" MODEL "," STEPS "}", NULL, LK_OK, "");
}
END_TEST

static const struct {
    const char *pattern; /* as it stands in JSON */
    lk_status_t status;
    const char *text; /* after "tokenizer.json: pre_tokenizer.pattern: " */
} patterns[] = {
    {"", LK_ERR_INVALID, "pattern has 0 bytes"},
    {"(a", LK_ERR_INVALID, "not a regular expression"},
    {"[a", LK_ERR_INVALID, "not a regular expression"},
    {"a\\\\", LK_ERR_INVALID, "at byte 1: a backslash ends the pattern"},
    {"\\\\h+", LK_ERR_UNSUPPORTED, "at byte 0: \\h is not supported"},
    {"\\\\Ka", LK_ERR_UNSUPPORTED, "at byte 0: \\K is not supported"},
    {"[a[bc]]", LK_ERR_UNSUPPORTED, "at byte 2: a character class inside another"},
    {"[a-z&&[^b]]", LK_ERR_UNSUPPORTED, "at byte 4: an intersection"},
    {"a{1,2}+", LK_ERR_UNSUPPORTED, "at byte 5: a + after an interval"},
    {"(*UTF)a", LK_ERR_UNSUPPORTED, "at byte 0: a verb"},
    {"(?R)", LK_ERR_UNSUPPORTED, "at byte 0: this kind of group"},
    {"[\\\\W]", LK_ERR_UNSUPPORTED, "at byte 1: \\W inside a character class"},
    {"(?i:'s)|[^\\\\s\\\\p{L}]?\\\\p{L}+|\\\\s+(?!\\\\S)", LK_OK, ""},
};

START_TEST(patterns_are_checked)
{
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        char json[1024], text[256];
        snprintf(json, sizeof json,
                 "{" MODEL "," DEC ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
                 "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\","
                 "\"invert\":false}," BL "]}}",
                 patterns[i].pattern);
        snprintf(text, sizeof text, "tokenizer.json: pre_tokenizer.pretokenizers[0].pattern: %s",
                 patterns[i].text);
        expect(json, NULL, patterns[i].status, text);
    }
}
END_TEST

START_TEST(bad_configs_are_refused_by_name)
{
    const char *json = "{" MODEL "," STEPS "}";
    expect(json, "{", LK_ERR_INVALID, "tokenizer_config.json: is not JSON");
    expect(json, "{\"add_bos_token\":true}", LK_ERR_INVALID,
           "tokenizer_config.json: add_bos_token is true, but bos_token is not a token");
    expect(json, "{\"add_bos_token\":1}", LK_ERR_INVALID,
           "tokenizer_config.json: add_bos_token is not true or false");
    expect(json, "{\"added_tokens_decoder\":{\"x\":{\"content\":\"y\"}}}", LK_ERR_INVALID,
           "tokenizer_config.json: added_tokens_decoder.x: the key is not an id");
    expect(json, "{\"added_tokens_decoder\":{\"1\":{\"content\":\"y\"}}}", LK_ERR_INVALID,
           "tokenizer_config.json: added_tokens_decoder.1: tokens \"b\" and \"y\"");
    expect(json, "{\"added_tokens_decoder\":{\"5\":7}}", LK_ERR_INVALID,
           "tokenizer_config.json: added_tokens_decoder.5 is not an object");
}
END_TEST

static void expect_ids(const tokenizer_t *t, const char *text, unsigned flags, const char *want)
{
    uint32_t *ids;
    size_t n;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tokenizer_encode(t, text, strlen(text), flags, &ids, &n, &err) == LK_OK, "%s",
                  err.text);
    lk_buf_t got;
    lk_buf_init(&got, 0);
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(&got, i == 0 ? "%u" : " %u", ids[i]);
    }
    ck_assert_str_eq(lk_buf_cstr(&got), want);
    lk_buf_fini(&got);
    free(ids);
}

START_TEST(config_settings_reach_the_tokenizer)
{
    static const char json[] =
        "{" MODEL "," STEPS ",\"added_tokens\":[{\"id\":5,\"content\":\"<e>\",\"special\":true}],"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
        "\"<e>\"}},{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<e>\":{\"ids\":[5]}}}}";
    static const struct {
        const char *config, *ids;
    } cases[] = {
        {NULL, "5 2 5 2"},
        {"{}", "5 2 5 2"},
        {"{\"bos_token\":\"<e>\",\"add_bos_token\":true}", "5 2 5 2"},
        {"{\"bos_token\":\"<e>\",\"add_bos_token\":false}", "2 5 2"},
        {"{\"bos_token\":\"a\",\"add_bos_token\":true}", "0 5 2 5 2"},
        {"{\"eos_token\":{\"content\":\"<e>\"},\"add_eos_token\":true}", "5 2 5 2 5"},
        {"{\"eos_token\":\"zz\",\"added_tokens_decoder\":{\"9\":{\"content\":\"zz\"}},"
         "\"add_eos_token\":true}",
         "5 2 5 2 9"},
        {"{\"added_tokens_decoder\":{\"7\":{\"content\":\"ab<e>ab\"}}}", "5 2 5 2"},
        {"{\"added_tokens_decoder\":{\"7\":{\"content\":\"ab<e>ab\",\"normalized\":false}}}",
         "5 7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *config = cases[i].config;
        tokenizer_t *t = NULL;
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_msg(tokenizer_parse(json, sizeof json - 1, config,
                                      config == NULL ? 0 : strlen(config), &t, &err) == LK_OK,
                      "%s", err.text);
        expect_ids(t, "ab<e>ab", TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, cases[i].ids);
        tokenizer_destroy(&t);
    }
}
END_TEST

START_TEST(bad_texts_are_refused)
{
    static const char json[] = "{" MODEL "," STEPS "}";
    tokenizer_t *t = NULL;
    lk_error_t err = LK_ERROR_INIT;
    uint32_t *ids = NULL;
    size_t n = 0;
    ck_ok(tokenizer_parse(json, sizeof json - 1, NULL, 0, &t, &err));
    ck_assert_int_eq(tokenizer_encode(t, "ab\xE2\x82", 4, 0, &ids, &n, &err), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "the text is not UTF-8 at byte 2");
    ck_assert_int_eq(tokenizer_encode(t, "abc", 3, 0, &ids, &n, &err), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "the text has byte 0x63, for which the tokenizer has no token");
    ck_assert_int_eq(tokenizer_encode(t, "", TOKENIZER_MAX_TEXT + 1u, 0, &ids, &n, &err),
                     LK_ERR_TOO_LARGE);
    ck_assert(ids == NULL && n == 0);
    ck_ok(tokenizer_encode(t, "", 0, 0, &ids, &n, &err));
    ck_assert(ids != NULL && n == 0);
    free(ids);
    tokenizer_destroy(&t);
}
END_TEST

START_TEST(missing_and_odd_files)
{
    char path[1200];
    tokenizer_t *t = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(tokenizer_load(test_tmpdir(), &t, &err), LK_ERR_NOT_FOUND);
    ck_assert_int_eq(tokenizer_load("/nonexistent/dir", &t, &err), LK_ERR_NOT_FOUND);
    snprintf(path, sizeof path, "%s/tokenizer.json", test_tmpdir());
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    ck_assert_int_eq(tokenizer_load(test_tmpdir(), &t, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "is not a regular file"));
    ck_assert_int_eq(unlink(path), 0);
    FILE *file = fopen(path, "w");
    ck_assert_int_eq(ftruncate(fileno(file), (off_t)TOKENIZER_MAX_FILE + 1), 0);
    fclose(file);
    ck_assert_int_eq(tokenizer_load(test_tmpdir(), &t, &err), LK_ERR_TOO_LARGE);
    ck_assert_ptr_null(t);
}
END_TEST

/* Repeats `unit` up to about `size` bytes after `head`. */
static char *bomb(const char *head, const char *unit, size_t size)
{
    size_t n = strlen(head), u = strlen(unit);
    char *text = malloc(n + size + u + 1);
    memcpy(text, head, n);
    for (; n < size; n += u) {
        memcpy(text + n, unit, u);
    }
    text[n] = '\0';
    return text;
}

static void expect_bomb(const char *head, const char *unit, size_t size, lk_status_t status)
{
    char *json = bomb(head, unit, size);
    expect(json, NULL, status, "tokenizer.json: ");
    free(json);
}

START_TEST(huge_counts_stay_in_bounds)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct rlimit limit = {.rlim_cur = 1024u << 20, .rlim_max = 1024u << 20};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
#endif
    expect_bomb("{\"a\":[", "[],", 40u << 20, LK_ERR_TOO_LARGE);
    expect_bomb("{\"a\":[", "{},", 40u << 20, LK_ERR_TOO_LARGE);
    expect_bomb("{\"a\":[", "0,", 40u << 20, LK_ERR_TOO_LARGE);
    expect_bomb("{\"a\":[", "\"\",", 40u << 20, LK_ERR_TOO_LARGE);
    expect_bomb("{\"a\":", "[", 40u << 20, LK_ERR_TOO_LARGE);
    expect_bomb("{\"a\":\"", "x", 40u << 20, LK_ERR_INVALID); /* never closed */
    expect_bomb("{\"a\":[", "\"\",", 11u << 20, LK_ERR_INVALID);
    expect_bomb("{\"a\":[", "[],", 3u << 20, LK_ERR_INVALID); /* under the limits, not JSON */
}
END_TEST

/* Texts whose cost would be quadratic in a simple encoder: each takes seconds there, or minutes,
 * and the test's timeout is the check. */
START_TEST(long_texts_are_not_quadratic)
{
    tokenizer_t *t = fixture_tokenizer(QWEN3_DIR);
    static const char *const units[] = {"a",
                                        "abcdefghij",
                                        " ",
                                        "\n",
                                        " \n",
                                        "0",
                                        "!",
                                        "\xE4\xBD\xA0",
                                        "e\xCC\x81\xCC\xA3",
                                        "ab",
                                        "'",
                                        "a ",
                                        "\xCC\x81\xCC\xA3",
                                        "<|im_start",
                                        "<",
                                        "\xE2\x80\xA8"};
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        char *text = bomb("", units[i], i == 0 ? 1u << 20 : 1u << 18);
        uint32_t *ids;
        size_t n;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status =
            tokenizer_encode(t, text, strlen(text), TOKENIZER_PARSE_SPECIAL, &ids, &n, &err);
        ck_assert_msg(status == LK_OK, "%s: %s", units[i], err.text);
        lk_buf_t out;
        lk_buf_init(&out, 0);
        tokenizer_decode(t, ids, n, false, &out);
        if (units[i][0] != 'e' && (uint8_t)units[i][0] != 0xCC) { /* NFC changes these */
            ck_assert_str_eq(lk_buf_cstr(&out), text);
        }
        lk_buf_fini(&out);
        free(ids);
        free(text);
    }
    tokenizer_destroy(&t);
}
END_TEST

/* Every id of the real vocabulary as its text, and no two with the same bytes. */
START_TEST(token_texts)
{
    tokenizer_t *t = fixture_tokenizer(QWEN3_DIR);
    size_t len;
    ck_assert_ptr_null(tokenizer_token_bytes(t, 151669, &len));
    ck_assert_uint_eq(len, 0);
    const uint8_t *bytes = tokenizer_token_bytes(t, 151645, &len);
    ck_assert_uint_eq(len, 10);
    ck_assert_int_eq(memcmp(bytes, "<|im_end|>", 10), 0);
    ck_assert(tokenizer_is_special(t, 151645) && !tokenizer_is_special(t, 151657));
    ck_assert(!tokenizer_is_special(t, 9707) && !tokenizer_is_special(t, UINT32_MAX));
    lk_buf_t out;
    lk_buf_init(&out, 0);
    tokenizer_token_text(t, 1879, &out);
    ck_assert_str_eq(lk_buf_cstr(&out), " world");
    lk_buf_clear(&out);
    uint32_t half = tokenizer_token_id(t, "\xC3\xA2"); /* the byte 0xE2 */
    tokenizer_token_text(t, half, &out);
    ck_assert_str_eq(lk_buf_cstr(&out), "\xEF\xBF\xBD");
    lk_buf_clear(&out);
    tokenizer_token_text(t, 151669, &out);
    ck_assert_uint_eq(out.len, 0);
    lk_buf_fini(&out);
    ck_assert_uint_eq(tokenizer_token_id(t, "no such token"), TOKENIZER_NO_ID);
    tokenizer_destroy(&t);
}
END_TEST

START_TEST(bytes_tokenizer_writes_and_reads)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(tokenizer_write_bytes(test_tmpdir(), 257, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "vocab_size 257"));
    ck_assert_int_eq(tokenizer_write_bytes("/nonexistent/dir", 300, &err), LK_ERR_IO);
    ck_ok(tokenizer_write_bytes(test_tmpdir(), 258, &err));
    tokenizer_t *t = fixture_tokenizer(test_tmpdir());
    ck_assert_uint_eq(tokenizer_vocab_size(t), 258);
    ck_assert_uint_eq(tokenizer_bos_id(t), TOKENIZER_BYTES_BOS);
    ck_assert_uint_eq(tokenizer_eos_id(t), TOKENIZER_BYTES_EOS);
    for (uint32_t b = 0; b < 256; b++) {
        size_t len;
        const uint8_t *bytes = tokenizer_token_bytes(t, b, &len);
        ck_assert(len == 1 && bytes[0] == b);
    }
    expect_ids(t, "a \xC3\xA9<|eos|>", TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_SPECIAL,
               "97 32 195 169 257");
    expect_ids(t, "<|e", TOKENIZER_PARSE_SPECIAL, "60 124 101");
    tokenizer_destroy(&t);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("tokenizer_load");
    TCase *tc = tcase_create("load");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, bad_files_are_refused_by_name);
    tcase_add_test(tc, patterns_are_checked);
    tcase_add_test(tc, bad_configs_are_refused_by_name);
    tcase_add_test(tc, config_settings_reach_the_tokenizer);
    tcase_add_test(tc, bad_texts_are_refused);
    tcase_add_test(tc, missing_and_odd_files);
    tcase_add_test(tc, huge_counts_stay_in_bounds);
    tcase_add_test(tc, long_texts_are_not_quadratic);
    tcase_add_test(tc, token_texts);
    tcase_add_test(tc, bytes_tokenizer_writes_and_reads);
    suite_add_tcase(s, tc);
    return s;
}
