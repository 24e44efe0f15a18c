/* POST /v1/completions against scripted engines, without sockets. */
#include "tests/unit/api_frontend/completion_rig.h"

#include <stdio.h>
#include <string.h>

/* ---- whole replies ---- */

START_TEST(test_text)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":\"abc\",\"max_tokens\":5,\"return_seed\":true}");
    sent_t s = take_add();
    ck_assert_uint_eq(s.max_tokens, 5);
    answer(s, &(out_t){.text = "He"});
    ck_assert(!c.ended);
    answer(s, &(out_t){.text = "llo", .finish = FINISH_LENGTH});
    ck_assert(c.ended);
    ck_assert_int_eq(c.status, 200);
    ck_assert_str_eq(fc_str(&c, "object"), "text_completion");
    ck_assert_str_eq(fc_str(&c, "model"), "m");
    ck_assert_int_eq(fc_int(&c, "created"), 1700000000);
    ck_assert(strncmp(fc_str(&c, "id"), "cmpl-", 5) == 0);
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "Hello");
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "length");
    ck_assert(json_is_null(fc_get(&c, "choices.0.logprobs")));
    ck_assert(json_is_null(fc_get(&c, "choices.0.stop_reason")));
    ck_assert_ptr_null(fc_get(&c, "choices.0.token_ids"));
    ck_assert_int_eq(fc_int(&c, "choices.0.seed"), (int64_t)s.seed);
    ck_assert_str_eq(fc_str(&c, "choices.0.weight_versions.0.version"), "default");
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.0.end"), 5);
    ck_assert_ptr_null(fc_get(&c, "choices.0.kv_versions"));
    ck_assert_ptr_null(fc_get(&c, "choices.0.kv_history"));
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 5);
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens"), fc_int(&c, "usage.total_tokens") - 5);
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens_details.cached_tokens"), 2);
    ck_assert_ptr_null(api.completions);
    fc_fini(&c);
}
END_TEST

START_TEST(test_ids_and_logprobs)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":[1,2,3],\"logprobs\":2,\"return_token_ids\":true,"
            "\"return_tokens_as_token_ids\":true}");
    answer(take_add(),
           &(out_t){.text = "xy", .finish = FINISH_LENGTH, .logprobs = true, .n_top = 2});
    ck_assert_int_eq(fc_int(&c, "choices.0.token_ids.1"), 'y');
    ck_assert_int_eq(fc_int(&c, "choices.0.prompt_token_ids.2"), 3);
    ck_assert_str_eq(fc_str(&c, "choices.0.logprobs.tokens.0"), "token_id:120");
    const json_t *lp = fc_get(&c, "choices.0.logprobs.token_logprobs.1");
    ck_assert_double_eq(json_real_value(lp), -1.0);
    const json_t *top = fc_get(&c, "choices.0.logprobs.top_logprobs.0");
    ck_assert_uint_eq(json_object_size(top), 2);
    ck_assert_double_eq(json_real_value(json_object_get(top, "token_id:120")), -0.5);
    /* JSON has no infinity */
    ck_assert_double_eq(json_real_value(json_object_get(top, "token_id:66")), -9999.0);
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.text_offset.1"), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_logprobs_zero)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"logprobs\":0}");
    answer(take_add(), &(out_t){.text = "x", .finish = FINISH_LENGTH, .logprobs = true});
    ck_assert_str_eq(fc_str(&c, "choices.0.logprobs.tokens.0"), "x");
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.logprobs.top_logprobs")), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_prompt_major_order)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[[1],[2,2]],\"n\":2,\"seed\":5}");
    sent_t s[4];
    for (int i = 0; i < 4; i++) {
        s[i] = take_add();
    }
    ck_assert_uint_eq(s[0].seed, 5);
    static const char *const texts[] = {"a", "b", "c", "d"};
    for (int i = 3; i >= 0; i--) { /* whatever comes first */
        sent_t *one = NULL;
        for (int k = 0; k < 4; k++) { /* handles are given in order */
            int before = 0;
            for (int m = 0; m < 4; m++) {
                before += s[m].handle < s[k].handle;
            }
            one = before == i ? &s[k] : one;
        }
        ck_assert_uint_eq(one->choice, (uint64_t)i % 2);
        answer(*one, &(out_t){.text = texts[i], .finish = FINISH_LENGTH});
    }
    for (int i = 0; i < 4; i++) {
        char path[32];
        snprintf(path, sizeof path, "choices.%d.text", i);
        ck_assert_str_eq(fc_str(&c, path), texts[i]);
        snprintf(path, sizeof path, "choices.%d.index", i);
        ck_assert_int_eq(fc_int(&c, path), i);
    }
    ck_assert_int_eq(fc_int(&c, "usage.prompt_tokens"), 3);
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 4);
    fc_fini(&c);
}
END_TEST

START_TEST(test_stop_string)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":[1],\"stop\":[\"zz\",\"lo\"],\"return_token_ids\":true}");
    sent_t s = take_add();
    answer(s, &(out_t){.text = "hel"});
    answer(s, &(out_t){.text = "lox"});
    ck_assert(c.ended);
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "hel");
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "stop");
    ck_assert_str_eq(fc_str(&c, "choices.0.stop_reason"), "lo");
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.token_ids")), 5);
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.0.end"), 5);
    ck_assert_uint_eq(fg_count(&g, s.rank, MSG_ABORT), 1);
    answer(s, &(out_t){.text = "late", .finish = FINISH_ABORT});
    fc_fini(&c);
}
END_TEST

START_TEST(test_stop_token)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"stop_token_ids\":[46]}");
    answer(take_add(), &(out_t){.text = "ab.", .finish = FINISH_STOP, .stop_token = '.'});
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "ab"); /* its text is not wanted */
    ck_assert_int_eq(fc_int(&c, "choices.0.stop_reason"), '.');
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 3);
    fc_fini(&c);
}
END_TEST

START_TEST(test_weight_and_kv_versions)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1,2,3]}");
    sent_t s = take_add();
    const msg_span_t whole[] = {{msg_str("v1"), 1, 0, 3}};
    answer(s, &(out_t){.text = "ab", .version = "v1", .kv = whole, .n_kv = 1});
    answer(s, &(out_t){.text = "c", .epoch = 2, .version = "v2"}); /* keeps its KV */
    answer(s, &(out_t){.text = "d", .epoch = 2, .version = "v2"});
    const msg_span_t again[] = {{msg_str("v3"), 3, 0, 7}}; /* recomputed */
    answer(s, &(out_t){.text = "e",
                       .epoch = 3,
                       .version = "v3",
                       .kv = again,
                       .n_kv = 1,
                       .finish = FINISH_LENGTH});
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.0.end"), 2);
    ck_assert_str_eq(fc_str(&c, "choices.0.weight_versions.1.version"), "v2");
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.1.start"), 2);
    ck_assert_int_eq(fc_int(&c, "choices.0.weight_versions.2.epoch"), 3);
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.weight_versions")), 3);
    /* at the end all KV is of epoch 3 */
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.kv_versions")), 1);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_versions.0.end"), 7);
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.kv_history")), 2);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_history.0.at"), 0);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_history.1.at"), 4);
    ck_assert_str_eq(fc_str(&c, "choices.0.kv_history.1.spans.0.version"), "v3");
    fc_fini(&c);
}
END_TEST

START_TEST(test_engine_spans_win)
{
    /* the epoch got another label after its first tokens */
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1,2,3]}");
    sent_t s = take_add();
    answer(s, &(out_t){.text = "ab", .version = "old"});
    msg_span_t span = {msg_str("new"), 1, 0, 2};
    msg_output_t out = {.handle = s.handle, .finish_reason = FINISH_ABORT, .stop_token = -1};
    out.weight_spans.items = &span;
    out.weight_spans.count = 1;
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.rank = s.rank;
    msg.outputs.outputs.items = &out;
    msg.outputs.outputs.count = 1;
    engine_client_on_msg(g.client, &msg);
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "abort");
    ck_assert_str_eq(fc_str(&c, "choices.0.weight_versions.0.version"), "new");
    ck_assert_uint_eq(json_array_size(fc_get(&c, "choices.0.weight_versions")), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_kv_versions_of_kept_cache)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1,2,3]}");
    sent_t s = take_add();
    const msg_span_t whole[] = {{msg_str("v1"), 1, 0, 3}};
    answer(s, &(out_t){.text = "ab", .version = "v1", .kv = whole, .n_kv = 1});
    answer(s, &(out_t){.text = "cd", .epoch = 2, .version = "v2", .finish = FINISH_LENGTH});
    /* token 2, at position 5, was made from [0, 4) of epoch 1 and position 4, computed with it */
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_versions.0.end"), 4);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_versions.1.epoch"), 2);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_versions.1.start"), 4);
    ck_assert_int_eq(fc_int(&c, "choices.0.kv_versions.1.end"), 6);
    fc_fini(&c);
}
END_TEST

START_TEST(test_ids_only)
{
    fake_client_t c, text;
    fc_call(&text, &api, "POST", "/v1/completions", "{\"prompt\":\"abc\"}");
    expect_error(&text, 400, "prompt", "no tokenizer.json");
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"logprobs\":0}");
    answer(take_add(), &(out_t){.text = "x", .finish = FINISH_LENGTH, .logprobs = true});
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "");
    ck_assert_int_eq(fc_int(&c, "choices.0.token_ids.0"), 'x');
    ck_assert_str_eq(fc_str(&c, "choices.0.logprobs.tokens.0"), "token_id:120");
    fc_fini(&c);
    fc_fini(&text);
}
END_TEST

/* ---- errors ---- */

START_TEST(test_bad_requests)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":");
    expect_error(&c, 400, "body", "Invalid JSON format");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", "[1]");
    expect_error(&c, 400, "body", "must be a JSON object");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", NULL);
    expect_error(&c, 400, "body", "empty");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"prompt\":[2]}");
    expect_error(&c, 400, "body", "duplicate");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":\"two\"}");
    expect_error(&c, 400, "n", "n must be an integer");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"model\":\"gpt\"}");
    expect_error(&c, 404, "model", "does not exist");
    fc_fini(&c);
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
    ck_assert_uint_eq(g.queues[0].n + g.queues[1].n, 0);
}
END_TEST

START_TEST(test_engine_error_ends_all_choices)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":2}");
    sent_t s = take_add();
    msg_output_t out = {.handle = s.handle,
                        .finish_reason = FINISH_ERROR,
                        .error = msg_str("the weights are dirty"),
                        .error_status = LK_ERR_UNAVAILABLE};
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.rank = s.rank;
    msg.outputs.outputs.items = &out;
    msg.outputs.outputs.count = 1;
    engine_client_on_msg(g.client, &msg);
    expect_error(&c, 503, NULL, "the weights are dirty");
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_ABORT) + fg_count(&g, 1, MSG_ABORT), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_dead_engine)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1]}");
    sent_t s = take_add();
    msg_t msg = {.type = MSG_ENGINE_DEAD};
    msg.engine_dead = (msg_engine_dead_t){s.rank, msg_str("out of memory")};
    engine_client_on_msg(g.client, &msg);
    expect_error(&c, 503, NULL, "out of memory");
    fc_fini(&c);
}
END_TEST

START_TEST(test_misfit_output)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"logprobs\":1}");
    sent_t s = take_add();
    answer(s, &(out_t){.text = "abc"}); /* without the logprobs */
    expect_error(&c, 502, NULL, "does not fit together");
    ck_assert_uint_eq(fg_count(&g, s.rank, MSG_ABORT), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_draining)
{
    fake_client_t c;
    api.draining = true;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1]}");
    expect_error(&c, 503, NULL, "shutting down");
    fc_fini(&c);
}
END_TEST

START_TEST(test_keys)
{
    config.api_key = "secret";
    fake_client_t c;
    fc_call_with(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1]}", NULL, "secret2");
    expect_error(&c, 401, "Authorization", "API key");
    fc_fini(&c);
    fc_call_with(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1]}", NULL, "secret");
    ck_assert_int_eq(c.status, 0);
    fc_gone(&c);
    fc_fini(&c);
}
END_TEST

/* ---- streams ---- */

static const char stream_body[] = "{\"prompt\":[1],\"stream\":true,"
                                  "\"stream_options\":{\"include_usage\":true}}";

START_TEST(test_stream)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    ck_assert_int_eq(c.status, 0); /* an error could still be a proper one */
    sent_t s = take_add();
    answer(s, &(out_t){.text = "H\xc3"});
    ck_assert_int_eq(c.status, 200);
    ck_assert_ptr_nonnull(strstr(c.text, "\"text\":\"H\""));
    answer(s, &(out_t){.text = "\xa9", .finish = FINISH_LENGTH});
    ck_assert(c.ended && c.stream_ended);
    /* four events: two deltas, usage, [DONE] */
    size_t events = 0;
    for (const char *p = c.text; (p = strstr(p, "\n\n")) != NULL; p += 2) {
        events++;
    }
    ck_assert_uint_eq(events, 4);
    ck_assert(strncmp(c.text, "data: {\"id\":\"cmpl-", 18) == 0);
    ck_assert_ptr_nonnull(strstr(c.text, "\"text\":\"\xc3\xa9\"")); /* never a split character */
    ck_assert_ptr_nonnull(strstr(c.text, "\"finish_reason\":null"));
    ck_assert_ptr_nonnull(strstr(c.text, "\"finish_reason\":\"length\""));
    ck_assert_ptr_nonnull(strstr(c.text,
                                 "\"weight_versions\":[{\"version\":\"default\",\"epoch\":1,"
                                 "\"start\":0,\"end\":3}]"));
    ck_assert_ptr_nonnull(strstr(c.text, "\"choices\":[],\"usage\":{\"prompt_tokens\":1,"
                                         "\"completion_tokens\":3,\"total_tokens\":4"));
    ck_assert_str_eq(c.text + c.len - 14, "data: [DONE]\n\n");
    fc_fini(&c);
}
END_TEST

START_TEST(test_stream_error_midway)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    sent_t s = take_add();
    answer(s, &(out_t){.text = "H"});
    msg_t msg = {.type = MSG_ENGINE_DEAD};
    msg.engine_dead = (msg_engine_dead_t){s.rank, msg_str("x")};
    engine_client_on_msg(g.client, &msg);
    ck_assert(c.stream_ended);
    const char *p = strstr(c.text, "data: {\"error\":{\"message\":\"engine ");
    ck_assert_ptr_nonnull(p);
    ck_assert_ptr_nonnull(strstr(p, "\"code\":503}}\n\ndata: [DONE]\n\n"));
    fc_fini(&c);
}
END_TEST

START_TEST(test_stream_error_first)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    sent_t s = take_add();
    msg_t msg = {.type = MSG_ENGINE_DEAD};
    msg.engine_dead = (msg_engine_dead_t){s.rank, msg_str("x")};
    engine_client_on_msg(g.client, &msg);
    ck_assert(!c.streaming);
    expect_error(&c, 503, NULL, "engine");
    fc_fini(&c);
}
END_TEST

START_TEST(test_client_gone)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[[1],[2]],\"stream\":true}");
    sent_t a = take_add(), b = take_add();
    answer(a, &(out_t){.text = "H"});
    fc_gone(&c);
    ck_assert(c.ended && c.discarded);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_ABORT) + fg_count(&g, 1, MSG_ABORT), 2);
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
    answer(b, &(out_t){.text = "x", .finish = FINISH_ABORT});
    fc_fini(&c);
}
END_TEST

START_TEST(test_slow_reader)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    sent_t s = take_add();
    answer(s, &(out_t){.text = "H"});
    c.deaf = true;
    answer(s, &(out_t){.text = "e"});
    ck_assert(c.ended && c.discarded);
    ck_assert_uint_eq(fg_count(&g, s.rank, MSG_ABORT), 1);
    fc_fini(&c);
}
END_TEST

START_TEST(test_ping)
{
    fake_client_t c, whole;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    fc_call(&whole, &api, "POST", "/v1/completions", "{\"prompt\":[1]}");
    fg_advance(&g, API_PING_NS - 1);
    api_tick(&api);
    ck_assert_uint_eq(c.len, 0);
    fg_advance(&g, 1);
    api_tick(&api);
    api_tick(&api);
    ck_assert_str_eq(c.text, ": ping\n\n");
    ck_assert_uint_eq(whole.len, 0);
    fg_advance(&g, API_PING_NS);
    c.deaf = true;
    api_tick(&api);
    ck_assert(c.discarded);
    fc_gone(&whole);
    fc_fini(&whole);
    fc_fini(&c);
}
END_TEST

START_TEST(test_abort_requests)
{
    fake_client_t a, b, c;
    fc_call(&a, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":2}");
    fc_call(&b, &api, "POST", "/v1/completions", stream_body);
    sent_t first = take_add();
    answer(first, &(out_t){.text = "partial"});
    fc_call(&c, &api, "POST", "/abort_requests", "{\"request_ids\":[\"cmpl-other\"]}");
    ck_assert_int_eq(fc_int(&c, "aborted"), 0);
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/abort_requests", "{\"request_ids\":[5]}");
    expect_error(&c, 400, "request_ids", "strings");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/abort_requests", "{}");
    ck_assert_int_eq(fc_int(&c, "aborted"), 3);
    ck_assert_str_eq(fc_str(&c, "status"), "aborted");
    fc_fini(&c);
    ck_assert(a.ended && b.ended && b.stream_ended);
    ck_assert_str_eq(fc_str(&a, "choices.0.finish_reason"), "abort");
    ck_assert_ptr_nonnull(strstr(a.text, "partial"));
    ck_assert_ptr_nonnull(strstr(b.text, "\"finish_reason\":\"abort\""));
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
    fc_fini(&a);
    fc_fini(&b);
}
END_TEST

START_TEST(test_shutdown_with_open_streams)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", stream_body);
    api_fini(&api);
    ck_assert(c.discarded);
    fc_fini(&c);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("completions");
    TCase *tc = tcase_create("text");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, test_text);
    tcase_add_test(tc, test_ids_and_logprobs);
    tcase_add_test(tc, test_logprobs_zero);
    tcase_add_test(tc, test_prompt_major_order);
    tcase_add_test(tc, test_stop_string);
    tcase_add_test(tc, test_stop_token);
    tcase_add_test(tc, test_weight_and_kv_versions);
    tcase_add_test(tc, test_engine_spans_win);
    tcase_add_test(tc, test_kv_versions_of_kept_cache);
    tcase_add_test(tc, test_bad_requests);
    tcase_add_test(tc, test_engine_error_ends_all_choices);
    tcase_add_test(tc, test_dead_engine);
    tcase_add_test(tc, test_misfit_output);
    tcase_add_test(tc, test_draining);
    tcase_add_test(tc, test_keys);
    tcase_add_test(tc, test_stream);
    tcase_add_test(tc, test_stream_error_midway);
    tcase_add_test(tc, test_stream_error_first);
    tcase_add_test(tc, test_client_gone);
    tcase_add_test(tc, test_slow_reader);
    tcase_add_test(tc, test_ping);
    tcase_add_test(tc, test_abort_requests);
    tcase_add_test(tc, test_shutdown_with_open_streams);
    suite_add_tcase(suite, tc);
    TCase *ids = tcase_create("ids only");
    tcase_add_checked_fixture(ids, setup_ids_only, teardown);
    tcase_add_test(ids, test_ids_only);
    suite_add_tcase(suite, ids);
    return suite;
}
