#include "api_frontend/completion_params.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <string.h>

static tokenizer_t *tokenizer;

static void setup(void)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tokenizer_write_bytes(test_tmpdir(), 300, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(tokenizer_load(test_tmpdir(), &tokenizer, &err) == LK_OK, "%s", err.text);
}

static void teardown(void)
{
    tokenizer_destroy(&tokenizer);
}

static completion_limits_t limits(bool with_tokenizer)
{
    return (completion_limits_t){.model = "m",
                                 .max_model_len = 64,
                                 .vocab_size = 300,
                                 .max_logprobs = 20,
                                 .tokenizer = with_tokenizer ? tokenizer : NULL};
}

static lk_status_t parse(const char *text, bool with_tokenizer, completion_params_t *out,
                         json_t **body, const char **param, lk_error_t *err)
{
    *body = json_loads(text, 0, NULL);
    ck_assert_msg(*body != NULL, "test body is no JSON: %s", text);
    completion_limits_t l = limits(with_tokenizer);
    return completion_params_parse(COMPLETION_OPENAI, *body, &l, out, param, err);
}

static const struct {
    const char *body, *param, *text; /* text: part of the message */
    lk_status_t status;
} bad[] = {
    {"{}", "prompt", "prompt is missing", LK_ERR_INVALID},
    {"{\"prompt\":null}", "prompt", "prompt is missing", LK_ERR_INVALID},
    {"{\"prompt\":5}", "prompt", "not an integer", LK_ERR_INVALID},
    {"{\"prompt\":{}}", "prompt", "not an object", LK_ERR_INVALID},
    {"{\"prompt\":[]}", "prompt", "an empty array", LK_ERR_INVALID},
    {"{\"prompt\":[[]]}", "prompt", "at least one token", LK_ERR_INVALID},
    {"{\"prompt\":[[1],2]}", "prompt", "prompt[1]", LK_ERR_INVALID},
    {"{\"prompt\":[1,\"a\"]}", "prompt", "prompt[1] must be a token id, not a string",
     LK_ERR_INVALID},
    {"{\"prompt\":[1,-2]}", "prompt", "prompt[1] is token id -2", LK_ERR_INVALID},
    {"{\"prompt\":[1,300]}", "prompt", "outside the vocabulary of 300", LK_ERR_INVALID},
    {"{\"prompt\":[1.5]}", "prompt", "must be", LK_ERR_INVALID},
    {"{\"prompt\":[1,4294967297]}", "prompt", "4294967297", LK_ERR_INVALID},
    {"{\"prompt\":[1,2,3],\"max_tokens\":62}", "max_tokens",
     "maximum context length is 64 tokens, but 65 were asked for: 3 in the prompt and 62",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"max_tokens\":0}", "max_tokens", "from 1", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"max_tokens\":\"5\"}", "max_tokens", "an integer, not a string",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"max_tokens\":1.5}", "max_tokens", "not a real number", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"max_tokens\":99999999999}", "max_tokens", "to 2147483647", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"min_tokens\":17}", "min_tokens", "above max_tokens 16", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"n\":0}", "n", "from 1", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"n\":5000}", "n", "to 4096", LK_ERR_INVALID},
    {"{\"prompt\":[[1],[2]],\"n\":4000}", "prompt", "too many", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"n\":true}", "n", "not true", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"temperature\":-0.1}", "temperature", "from 0", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"temperature\":\"hot\"}", "temperature", "a number, not a string",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"top_p\":0}", "top_p", "above 0", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"top_p\":1.01}", "top_p", "from 0 to 1", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"min_p\":2}", "min_p", "from 0 to 1", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"top_k\":-2}", "top_k", "from -1", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"repetition_penalty\":0}", "repetition_penalty", "above 0", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"presence_penalty\":3}", "presence_penalty", "from -2 to 2", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"frequency_penalty\":-3}", "frequency_penalty", "from -2", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logprobs\":21}", "logprobs", "from 0 to 20", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logprobs\":true}", "logprobs", "an integer", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"seed\":\"x\"}", "seed", "an integer", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"ignore_eos\":1}", "ignore_eos", "true or false", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stream\":\"yes\"}", "stream", "true or false", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stream_options\":{}}", "stream_options", "needs", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stream\":true,\"stream_options\":{\"include_usage\":1}}", "stream_options",
     "include_usage", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stop\":[\"\"]}", "stop", "none empty", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stop\":[1]}", "stop", "strings", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stop_token_ids\":5}", "stop_token_ids", "an array", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"stop_token_ids\":[400]}", "stop_token_ids", "stop_token_ids[0]",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"cache_salt\":\"\"}", "cache_salt", "1 to 1024", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"priority\":\"high\"}", "priority", "an integer", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"user\":5}", "user", "a string", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"model\":5}", "model", "a string", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"model\":\"other\"}", "model", "does not exist", LK_ERR_NOT_FOUND},
    {"{\"prompt\":[1],\"best_of\":2}", "best_of", "equal n", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"echo\":1}", "echo", "true or false", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"echo\":true,\"max_tokens\":-1}", "max_tokens", "from 0", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"suffix\":\"x\"}", "suffix", "not supported", LK_ERR_UNSUPPORTED},
    {"{\"prompt\":[1],\"logit_bias\":{\"300\":5}}", "logit_bias", "\"300\" is no token id",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logit_bias\":{\"-1\":5}}", "logit_bias", "\"-1\" is no", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logit_bias\":{\"1x\":5}}", "logit_bias", "\"1x\" is no", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logit_bias\":{\"1\":101}}", "logit_bias", "from -100 to 100",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logit_bias\":{\"1\":\"5\"}}", "logit_bias", "must be a number",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logit_bias\":[5]}", "logit_bias", "an object", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"bad_words\":\"x\"}", "bad_words", "an array", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"bad_words\":[\"\"]}", "bad_words", "none empty", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"bad_words\":[7]}", "bad_words", "strings", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"allowed_token_ids\":[300]}", "allowed_token_ids", "outside the vocabulary",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"allowed_token_ids\":5}", "allowed_token_ids", "an array", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"structured_outputs\":{\"regex\":\"a\"}}", "structured_outputs",
     "not supported", LK_ERR_UNSUPPORTED},
    {"{\"prompt\":[1],\"prompt_logprobs\":21}", "prompt_logprobs", "from 0 to 20, not 21",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"prompt_logprobs\":-2}", "prompt_logprobs", "from 0 to 20", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"prompt_logprobs\":-1}", "prompt_logprobs",
     "all 300 tokens of the vocabulary; at most 20", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"prompt_logprobs\":true}", "prompt_logprobs", "an integer", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"prompt_logprobs\":1,\"stream\":true}", "prompt_logprobs", "stream",
     LK_ERR_INVALID},
    {"{\"prompt\":[1],\"logprobs\":-1}", "logprobs", "all 300", LK_ERR_INVALID},
    {"{\"prompt\":[1],\"response_format\":{\"type\":\"json_object\"}}", "response_format",
     "not supported", LK_ERR_UNSUPPORTED},
    {"{\"prompt\":[1],\"allowed_token_ids\":[]}", "allowed_token_ids", "1 to", LK_ERR_INVALID},
};

START_TEST(test_bad_bodies)
{
    completion_params_t params = {.n = 99};
    json_t *body;
    const char *param = "unset";
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = parse(bad[_i].body, true, &params, &body, &param, &err);
    ck_assert_msg(status == bad[_i].status, "%s: status %d", bad[_i].body, status);
    ck_assert_msg(strcmp(param, bad[_i].param) == 0, "%s: param %s", bad[_i].body, param);
    ck_assert_msg(strstr(err.text, bad[_i].text) != NULL, "%s: %s", bad[_i].body, err.text);
    ck_assert_uint_eq(params.n, 99); /* nothing was written */
    json_decref(body);
}
END_TEST

START_TEST(test_defaults)
{
    completion_params_t p;
    json_t *body;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(parse("{\"prompt\":[1,2],\"unknown\":{\"x\":[1]},\"echo\":false,"
                           "\"logit_bias\":null,\"best_of\":1,\"suffix\":\"\","
                           "\"response_format\":{\"type\":\"text\"}}",
                           false, &p, &body, &param, &err),
                     LK_OK);
    ck_assert_uint_eq(p.n_prompts, 1);
    ck_assert_uint_eq(p.prompts[0].n, 2);
    ck_assert_uint_eq(p.n, 1);
    ck_assert_uint_eq(p.sampling.max_tokens, 16);
    ck_assert_double_eq(p.sampling.temperature, 1);
    ck_assert_double_eq(p.sampling.top_p, 1);
    ck_assert_double_eq(p.sampling.repetition_penalty, 1);
    ck_assert_int_eq(p.sampling.logprobs, -1);
    ck_assert(!p.has_seed && !p.stream && p.skip_special_tokens);
    ck_assert_ptr_null(p.cache_salt);
    completion_params_fini(&p);
    json_decref(body);
}
END_TEST

START_TEST(test_everything)
{
    completion_params_t p;
    json_t *body;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(
        parse("{\"model\":\"m\",\"prompt\":[\"hi\",[7,8,9]],\"n\":2,\"max_tokens\":null,"
              "\"min_tokens\":3,\"temperature\":0,\"top_p\":0.5,\"top_k\":5,"
              "\"min_p\":0.25,\"seed\":-3,\"stop\":[\"a\",\"bc\"],"
              "\"stop_token_ids\":[5,6],\"ignore_eos\":true,\"logprobs\":0,"
              "\"stream\":true,\"stream_options\":{\"include_usage\":true},"
              "\"priority\":-9,\"cache_salt\":\"v1\",\"presence_penalty\":-2}",
              true, &p, &body, &param, &err),
        LK_OK);
    ck_assert_uint_eq(p.n_prompts, 2);
    ck_assert_uint_eq(p.prompts[0].ids[p.prompts[0].n - 1], 'i');
    ck_assert_uint_eq(p.prompts[1].ids[2], 9);
    completion_limits_t l = limits(true);
    ck_assert_uint_eq(completion_params_max_tokens(&p, 1, &l), 61); /* null: all the room */
    ck_assert_uint_eq(p.sampling.min_tokens, 3);
    ck_assert_double_eq(p.sampling.min_p, 0.25);
    ck_assert(p.has_seed && p.sampling.seed == (uint64_t)-3);
    ck_assert_uint_eq(p.n_stops, 2);
    ck_assert_str_eq(p.stops[1], "bc");
    ck_assert_uint_eq(p.sampling.stop_token_ids.len, 8);
    ck_assert_int_eq(p.sampling.logprobs, 0);
    ck_assert_int_eq(p.priority, -9);
    ck_assert_str_eq(p.cache_salt, "v1");
    ck_assert(p.include_usage);
    completion_params_fini(&p);
    json_decref(body);
}
END_TEST

static lk_status_t parse_limited(const char *text, int64_t max_logprobs, uint64_t vocab,
                                 completion_params_t *out, json_t **body, const char **param,
                                 lk_error_t *err)
{
    completion_limits_t l = {
        .model = "m", .max_model_len = 1u << 20, .vocab_size = vocab, .max_logprobs = max_logprobs};
    *body = json_loads(text, 0, NULL);
    return completion_params_parse(COMPLETION_OPENAI, *body, &l, out, param, err);
}

/* -1 where all are allowed, and what a reply can hold. */
START_TEST(test_how_many_logprobs)
{
    completion_params_t p;
    json_t *body;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    static const int64_t allow_all[] = {-1, 300, 5000};
    for (size_t i = 0; i < LK_ARRAY_LEN(allow_all); i++) {
        ck_assert_int_eq(parse_limited("{\"prompt\":[1],\"logprobs\":-1,\"prompt_logprobs\":-1}",
                                       allow_all[i], 300, &p, &body, &param, &err),
                         LK_OK);
        ck_assert(p.sampling.logprobs == 300 && p.sampling.prompt_logprobs == 301);
        completion_params_fini(&p);
        json_decref(body);
        ck_assert_int_eq(parse_limited("{\"prompt\":[1],\"logprobs\":301}", allow_all[i], 300, &p,
                                       &body, &param, &err),
                         LK_ERR_INVALID);
        json_decref(body);
    }
    /* 2 * 4000 tokens of 100 001 logprobs are more than a reply holds, or a stream brings */
    static const char *const whole[] = {
        "{\"prompt\":[1],\"n\":2,\"logprobs\":-1,\"max_tokens\":4000}",
        "{\"prompt\":[1],\"n\":2,\"logprobs\":-1,\"max_tokens\":4000,\"stream\":true}"};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(parse_limited(whole[i], -1, 100000, &p, &body, &param, &err),
                         LK_ERR_INVALID);
        ck_assert_str_eq(param, "logprobs");
        ck_assert_ptr_nonnull(strstr(err.text, "up to 800008000 logprobs"));
        ck_assert_ptr_nonnull(strstr(err.text, "at most 4194304"));
        json_decref(body);
    }
    /* few per token have more room, and a stream of them all */
    static const struct {
        const char *more;
        lk_status_t status;
    } few[] = {{"30000", LK_OK}, {"60000", LK_ERR_INVALID}, {"60000,\"stream\":true", LK_OK}};
    for (size_t i = 0; i < LK_ARRAY_LEN(few); i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"prompt\":[1],\"n\":64,\"logprobs\":20,\"max_tokens\":%s}",
                 few[i].more);
        ck_assert_int_eq(parse_limited(text, -1, 100000, &p, &body, &param, &err), few[i].status);
        if (few[i].status == LK_OK) {
            ck_assert_uint_eq(p.reserved_logprobs, 0);
            completion_params_fini(&p);
        }
        json_decref(body);
    }
    static const char many[] = "{\"prompt\":[1],\"n\":2,\"logprobs\":99,\"max_tokens\":10}";
    ck_assert_int_eq(parse_limited(many, -1, 100000, &p, &body, &param, &err), LK_OK);
    ck_assert_uint_eq(p.reserved_logprobs, 2 * 10 * 100);
    completion_params_fini(&p);
    json_decref(body);
    char prompt[4096] = "{\"max_tokens\":1,\"prompt_logprobs\":-1,\"prompt\":[1";
    for (int i = 0; i < 90; i++) {
        strcat(prompt, ",1");
    }
    strcat(prompt, "]}");
    ck_assert_int_eq(parse_limited(prompt, -1, 100000, &p, &body, &param, &err), LK_ERR_INVALID);
    ck_assert_str_eq(param, "prompt_logprobs");
    json_decref(body);
    /* one token's must fit a message */
    ck_assert_int_eq(parse_limited("{\"prompt\":[1],\"logprobs\":-1,\"max_tokens\":1}", -1, 9000000,
                                   &p, &body, &param, &err),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "at most 8388608"));
    json_decref(body);
}
END_TEST

START_TEST(test_echo)
{
    completion_params_t p;
    json_t *body;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(parse("{\"prompt\":\"hi\",\"echo\":true,\"max_tokens\":0,\"logprobs\":2}",
                           true, &p, &body, &param, &err),
                     LK_OK);
    ck_assert(p.echo && p.echo_only && p.prompt_logprobs == -1);
    ck_assert(p.sampling.max_tokens == 1 && p.sampling.prompt_logprobs == 3);
    ck_assert_uint_eq(p.prompts[0].text_len, 2);
    completion_params_fini(&p);
    json_decref(body);
    ck_assert_int_eq(
        parse("{\"prompt\":[1],\"echo\":true,\"max_tokens\":null}", true, &p, &body, &param, &err),
        LK_OK);
    ck_assert(p.echo && !p.echo_only && p.sampling.prompt_logprobs == 0);
    ck_assert(p.sampling.max_tokens == 0 && p.prompts[0].text == NULL);
    completion_params_fini(&p);
    json_decref(body);
}
END_TEST

START_TEST(test_without_tokenizer)
{
    static const char *const bodies[] = {"{\"prompt\":\"hi\"}", "{\"prompt\":[\"hi\"]}",
                                         "{\"prompt\":[1],\"stop\":\"x\"}"};
    for (size_t i = 0; i < LK_ARRAY_LEN(bodies); i++) {
        completion_params_t p;
        json_t *body;
        const char *param;
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_eq(parse(bodies[i], false, &p, &body, &param, &err), LK_ERR_UNSUPPORTED);
        ck_assert_ptr_nonnull(strstr(err.text, "no tokenizer.json"));
        ck_assert_str_eq(param, i < 2 ? "prompt" : "stop");
        json_decref(body);
    }
}
END_TEST

START_TEST(test_rules)
{
    completion_params_t p;
    json_t *body;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(parse("{\"prompt\":[1],\"logit_bias\":{\"7\":-100,\"9\":2.5},"
                        "\"allowed_token_ids\":[7,8,7],\"bad_words\":[\"ab\"]}",
                        true, &p, &body, &param, &err) == LK_OK,
                  "%s", err.text);
    ck_assert_uint_eq(p.sampling.bias_ids.len, 8);
    ck_assert_uint_eq(p.bias_ids[0] + p.bias_ids[1], 16);
    ck_assert_float_eq(p.bias_values[p.bias_ids[1] == 9], 2.5f);
    ck_assert_uint_eq(p.sampling.allowed_token_ids.len, 12);
    /* the tokenizer knows bytes only: the word with its space is longer, so it is not another one
     */
    ck_assert_uint_eq(p.sampling.bad_words.len, 12);
    ck_assert_uint_eq(p.bad_ids[0], 2);
    ck_assert_uint_eq(p.bad_ids[1], 'a');
    ck_assert_uint_eq(p.bad_ids[2], 'b');
    completion_params_fini(&p);
    json_decref(body);
    ck_assert_int_eq(
        parse("{\"prompt\":[1],\"bad_words\":[\"a\"]}", false, &p, &body, &param, &err),
        LK_ERR_UNSUPPORTED);
    ck_assert_str_eq(param, "bad_words");
    json_decref(body);
}
END_TEST

START_TEST(test_long_prompts)
{
    completion_params_t p;
    json_t *body = json_object(), *ids = json_array();
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    for (int i = 0; i < 64; i++) {
        json_array_append_new(ids, json_integer(1));
    }
    json_object_set_new(body, "prompt", ids);
    completion_limits_t l = limits(true);
    ck_assert_int_eq(completion_params_parse(COMPLETION_OPENAI, body, &l, &p, &param, &err),
                     LK_ERR_INVALID);
    ck_assert_str_eq(param, "prompt");
    ck_assert_ptr_nonnull(strstr(err.text, "the prompt has 64"));
    json_decref(body);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("completion_params");
    TCase *tc = tcase_create("completion_params");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, test_bad_bodies, 0, (int)LK_ARRAY_LEN(bad));
    tcase_add_test(tc, test_defaults);
    tcase_add_test(tc, test_everything);
    tcase_add_test(tc, test_how_many_logprobs);
    tcase_add_test(tc, test_echo);
    tcase_add_test(tc, test_without_tokenizer);
    tcase_add_test(tc, test_rules);
    tcase_add_test(tc, test_long_prompts);
    suite_add_tcase(suite, tc);
    return suite;
}
