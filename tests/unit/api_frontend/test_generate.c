/* POST /inference/v1/generate against scripted engines, and where requests go. */
#include "base/check.h"
#include "tests/unit/api_frontend/completion_rig.h"

#include <stdio.h>
#include <string.h>

static const char path[] = "/inference/v1/generate";

START_TEST(test_ids_in_ids_out)
{
    fake_client_t c;
    fc_call(
        &c, &api, "POST", path,
        "{\"request_id\":\"r-7\",\"model\":\"m\",\"token_ids\":[5,6,7],\"return_token_ids\":true,"
        "\"sampling_params\":{\"temperature\":0,\"max_tokens\":2,\"logprobs\":1,"
        "\"output_kind\":2}}");
    sent_t s = take_add();
    ck_assert_uint_eq(s.max_tokens, 2);
    answer(s, &(out_t){.text = "xy",
                       .finish = FINISH_LENGTH,
                       .logprobs = true,
                       .n_top = 2,
                       .version = "v3",
                       .epoch = 3});
    ck_assert_int_eq(c.status, 200);
    ck_assert_str_eq(fc_str(&c, "request_id"), "generate-tokens-r-7");
    ck_assert_str_eq(fc_str(&c, "output_mode"), "tokens");
    ck_assert_str_eq(fc_str(&c, "model"), "m");
    ck_assert_int_eq(fc_int(&c, "prompt_token_ids.2"), 7);
    ck_assert_ptr_null(fc_get(&c, "choices.0.text"));
    ck_assert_int_eq(fc_int(&c, "choices.0.token_ids.1"), 'y');
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "length");
    ck_assert_str_eq(fc_str(&c, "choices.0.logprobs.content.0.token"), "token_id:120");
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.content.0.token_id"), 'x');
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.content.0.rank"), 1);
    ck_assert_double_eq(json_real_value(fc_get(&c, "choices.0.logprobs.content.1.logprob")), -1.0);
    const json_t *top = fc_get(&c, "choices.0.logprobs.content.0.top_logprobs");
    ck_assert_uint_eq(json_array_size(top), 2);
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.content.0.top_logprobs.0.token_id"), 'x');
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.content.0.top_logprobs.1.rank"), 2);
    ck_assert_str_eq(fc_str(&c, "choices.0.weight_versions.0.version"), "v3");
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.0.end"), 2);
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens"), 3);
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 2);
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens_details.cached_tokens"), 2);
    fc_fini(&c);
}
END_TEST

START_TEST(test_room_left_is_the_default)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[5,6,7],\"sampling_params\":{}}");
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(take_add().max_tokens, info.max_model_len - 3);
    fc_gone(&c);
    fc_fini(&c);
}
END_TEST

/* A front end that was started again hears of the engines late: that is no fault of the request. */
START_TEST(test_engines_not_heard_of)
{
    fake_client_t c;
    fg_reopen_early(&g);
    api.client = g.client;
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[5,6,7],\"sampling_params\":{}}");
    ck_assert_int_eq(c.status, 503);
    fc_fini(&c);
}
END_TEST

START_TEST(test_several_choices)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[5],\"sampling_params\":{\"n\":2,\"seed\":9}}");
    sent_t a = take_add(), b = take_add();
    ck_assert(a.choice + b.choice == 1 && a.seed == 9 && b.seed == 9);
    answer(a, &(out_t){.text = "a", .finish = FINISH_STOP, .stop_token = 'a'});
    answer(b, &(out_t){.text = "bb", .finish = FINISH_LENGTH});
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices")), 2);
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens"), 1);
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 3);
    for (int i = 0; i < 2; i++) {
        const json_t *choice = json_array_get(fc_get(&c, "choices"), (size_t)i);
        ck_assert_uint_eq(json_array_size(json_object_get(choice, "weight_versions")), 1);
    }
    fc_fini(&c);
}
END_TEST

START_TEST(test_stream)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path,
            "{\"token_ids\":[5],\"stream\":true,\"stream_options\":{\"include_usage\":true},"
            "\"sampling_params\":{\"n\":2}}");
    sent_t a = take_add(), b = take_add();
    answer(a, &(out_t){.text = "a", .version = "v1"});
    ck_assert_ptr_null(strstr(c.text, "weight_versions"));
    answer(a, &(out_t){.text = "bc", .version = "v2", .epoch = 2, .finish = FINISH_LENGTH});
    ck_assert_ptr_nonnull(strstr(
        c.text, "\"weight_versions\":[{\"version\":\"v1\",\"epoch\":1,\"start\":0,\"end\":1},"
                "{\"version\":\"v2\",\"epoch\":2,\"start\":1,\"end\":3}]"));
    ck_assert_ptr_nonnull(strstr(c.text, "\"token_ids\":[98,99]"));
    /* the other one is aborted before its first token */
    fake_client_t abort;
    char body[128];
    const char *id = strstr(c.text, "\"request_id\":\"") + strlen("\"request_id\":\"");
    snprintf(body, sizeof body, "{\"request_ids\":[\"%.*s\"]}", (int)strcspn(id, "\""), id);
    fc_call(&abort, &api, "POST", "/inference/v1/abort_requests", body);
    ck_assert_int_eq(fc_int(&abort, "aborted"), 1);
    ck_assert_uint_eq(fg_count(&g, b.rank, MSG_ABORT), 1);
    ck_assert_ptr_nonnull(strstr(c.text, "\"finish_reason\":\"abort\""));
    ck_assert_ptr_nonnull(strstr(c.text, "\"weight_versions\":[]"));
    ck_assert_ptr_nonnull(strstr(c.text, "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":3"));
    ck_assert(c.ended && strcmp(c.text + c.len - 14, "data: [DONE]\n\n") == 0);
    fc_fini(&abort);
    fc_fini(&c);
}
END_TEST

START_TEST(test_partial_tokens_after_abort)
{
    fake_client_t c, d;
    fc_call(&c, &api, "POST", path,
            "{\"request_id\":\"mine\",\"token_ids\":[5],\"sampling_params\":{\"logprobs\":0}}");
    answer(take_add(), &(out_t){.text = "abc", .logprobs = true});
    fc_call(&d, &api, "POST", "/inference/v1/abort_requests", "{\"request_ids\":[\"other\"]}");
    ck_assert_int_eq(fc_int(&d, "aborted"), 0);
    fc_fini(&d);
    fc_call(&d, &api, "POST", "/inference/v1/abort_requests", "{\"request_ids\":[\"mine\"]}");
    ck_assert_int_eq(fc_int(&d, "aborted"), 1);
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "abort");
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.token_ids")), 3);
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.logprobs.content")), 3);
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.logprobs.content.0.top_logprobs")), 0);
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.0.end"), 3);
    fc_fini(&c);
    fc_fini(&d);
}
END_TEST

START_TEST(test_abort_must_name)
{
    fake_client_t c, d;
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[5],\"sampling_params\":{}}");
    fc_call(&d, &api, "POST", "/inference/v1/abort_requests", "{}");
    expect_error(&d, 400, "request_ids", "Missing 'request_ids'");
    fc_fini(&d);
    fc_call(&d, &api, "POST", "/inference/v1/abort_requests", "{\"request_ids\":[]}");
    ck_assert_int_eq(fc_int(&d, "aborted"), 0);
    ck_assert(!c.ended);
    fc_fini(&d);
    fc_gone(&c);
    fc_fini(&c);
}
END_TEST

START_TEST(test_text_mode)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path,
            "{\"token_ids\":[5],\"output_mode\":\"text\",\"sampling_params\":{\"stop\":\"lo\"}}");
    answer(take_add(), &(out_t){.text = "hellox"});
    ck_assert_str_eq(fc_str(&c, "output_mode"), "text");
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "hel");
    ck_assert_str_eq(fc_str(&c, "choices.0.stop_reason"), "lo");
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.token_ids")), 5);
    fc_fini(&c);
}
END_TEST

START_TEST(test_stop_string_without_text)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[5],\"sampling_params\":{\"stop\":[\"lo\"]}}");
    answer(take_add(), &(out_t){.text = "hellox"});
    ck_assert(c.ended);
    ck_assert_ptr_null(fc_get(&c, "choices.0.text"));
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.token_ids")), 5);
    fc_fini(&c);
}
END_TEST

static const struct {
    const char *body, *param, *text;
} bad[] = {
    {"{\"token_ids\":[1]}", "sampling_params", "must be an object, not nothing"},
    {"{\"token_ids\":[1],\"sampling_params\":[]}", "sampling_params", "not an array"},
    {"{\"sampling_params\":{}}", "token_ids", "not nothing"},
    {"{\"token_ids\":[],\"sampling_params\":{}}", "token_ids", "at least one token"},
    {"{\"token_ids\":\"text\",\"sampling_params\":{}}", "token_ids", "not a string"},
    {"{\"token_ids\":[-1],\"sampling_params\":{}}", "token_ids", "token id -1"},
    {"{\"token_ids\":[[1]],\"sampling_params\":{}}", "token_ids", "token_ids[0]"},
    {"{\"token_ids\":[1],\"sampling_params\":{\"temperature\":-1}}", "temperature", "from 0"},
    {"{\"token_ids\":[1],\"sampling_params\":{\"max_tokens\":0}}", "max_tokens", "from 1"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"request_id\":\"a b\"}", "request_id",
     "printable"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"request_id\":\"\"}", "request_id", "1 to 128"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"request_id\":7}", "request_id", "string"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"output_mode\":\"both\"}", "output_mode",
     "\"tokens\" or"},
    {"{\"token_ids\":[1],\"sampling_params\":{\"detokenize\":false},\"output_mode\":\"text\"}",
     "output_mode", "detokenize"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"features\":{\"x\":1}}", "features",
     "not supported"},
    {"{\"token_ids\":[1],\"sampling_params\":{\"structured_outputs\":{\"regex\":\"a\"}}}",
     "structured_outputs", "not supported"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"kv_transfer_params\":{}}", "kv_transfer_params",
     "not supported"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"cache_salt\":\"\"}", "cache_salt", "1 to 1024"},
    {"{\"token_ids\":[1],\"sampling_params\":{},\"priority\":\"high\"}", "priority", "integer"},
};

START_TEST(test_bad_requests)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path, bad[_i].body);
    expect_error(&c, 400, bad[_i].param, bad[_i].text);
    fc_fini(&c);
    ck_assert_uint_eq(g.queues[0].n + g.queues[1].n, 0);
}
END_TEST

START_TEST(test_text_without_tokenizer)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path,
            "{\"token_ids\":[1],\"sampling_params\":{},\"output_mode\":\"text\"}");
    expect_error(&c, 400, "output_mode", "no tokenizer.json");
    fc_fini(&c);
    fc_call(&c, &api, "POST", path, "{\"token_ids\":[1],\"sampling_params\":{}}");
    answer(take_add(), &(out_t){.text = "x", .finish = FINISH_LENGTH});
    ck_assert_int_eq(fc_int(&c, "choices.0.token_ids.0"), 'x');
    fc_fini(&c);
}
END_TEST

/* What the engine gets besides the ids. */
START_TEST(test_priority_and_salt)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", path,
            "{\"token_ids\":[1],\"sampling_params\":{},\"priority\":-3,\"cache_salt\":\"v9\"}");
    const msg_t *msg = fg_take(&g, 0, MSG_ADD);
    msg = msg != NULL ? msg : fg_take(&g, 1, MSG_ADD);
    ck_assert_ptr_nonnull(msg);
    ck_assert_int_eq(msg->add.priority, -3);
    ck_assert_str_eq(msg_cstr(msg->add.cache_salt), "v9");
    fc_gone(&c);
    fc_fini(&c);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("generate");
    TCase *tc = tcase_create("generate");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, test_ids_in_ids_out);
    tcase_add_test(tc, test_room_left_is_the_default);
    tcase_add_test(tc, test_engines_not_heard_of);
    tcase_add_test(tc, test_several_choices);
    tcase_add_test(tc, test_stream);
    tcase_add_test(tc, test_partial_tokens_after_abort);
    tcase_add_test(tc, test_abort_must_name);
    tcase_add_test(tc, test_text_mode);
    tcase_add_test(tc, test_stop_string_without_text);
    tcase_add_test(tc, test_priority_and_salt);
    tcase_add_loop_test(tc, test_bad_requests, 0, LK_ARRAY_LEN(bad));
    suite_add_tcase(suite, tc);
    TCase *ids = tcase_create("ids only");
    tcase_add_checked_fixture(ids, setup_ids_only, teardown);
    tcase_add_test(ids, test_text_without_tokenizer);
    suite_add_tcase(suite, ids);
    return suite;
}
