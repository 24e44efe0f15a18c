/* prompt_logprobs, echo and top logprobs against scripted engines. */
#include "api_frontend/logprobs_json.h"
#include "base/check.h"
#include "base/prng.h"
#include "tests/unit/api_frontend/completion_rig.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static double number(const fake_client_t *c, const char *path)
{
    const json_t *value = fc_get(c, path);
    ck_assert_msg(json_is_real(value), "%s in %s", path, c->text);
    return json_real_value(value);
}

static size_t count(const fake_client_t *c, const char *path)
{
    const json_t *value = fc_get(c, path);
    return json_is_object(value) ? json_object_size(value) : json_array_size(value);
}

START_TEST(test_completion)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":\"abcQ\",\"max_tokens\":1,\"prompt_logprobs\":2}");
    sent_t s = take_add();
    ck_assert_uint_eq(s.prompt_logprobs, 3);
    answer_scores(s, 1, 2, 2); /* in chunks, and once more from the start (a preemption) */
    answer_scores(s, 1, 1, 2);
    answer_scores(s, 2, 2, 2);
    ck_assert_uint_eq(api.held_logprobs, 12);
    answer(s, &(out_t){.text = "x", .finish = FINISH_LENGTH});
    ck_assert_int_eq(c.status, 200);
    ck_assert_uint_eq(count(&c, "choices.0.prompt_logprobs"), 4);
    ck_assert(json_is_null(fc_get(&c, "choices.0.prompt_logprobs.0")));
    ck_assert_uint_eq(count(&c, "choices.0.prompt_logprobs.2"), 2); /* one entry was no token */
    ck_assert_double_eq(number(&c, "choices.0.prompt_logprobs.2.99.logprob"), -2);
    ck_assert_int_eq(fc_int(&c, "choices.0.prompt_logprobs.2.99.rank"), 2);
    ck_assert_str_eq(fc_str(&c, "choices.0.prompt_logprobs.2.99.decoded_token"), "c");
    ck_assert_double_eq(number(&c, "choices.0.prompt_logprobs.2.80.logprob"), -0.25);
    ck_assert_int_eq(fc_int(&c, "choices.0.prompt_logprobs.2.80.rank"), 1);
    ck_assert(json_is_null(fc_get(&c, "choices.0.logprobs")));
    ck_assert_uint_eq(api.held_logprobs, 0);
    fc_fini(&c);
}
END_TEST

/* One choice scores the prompt for all of its choices. */
START_TEST(test_generate_with_choices)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/inference/v1/generate",
            "{\"token_ids\":[5,6],\"sampling_params\":{\"n\":2,\"max_tokens\":1,"
            "\"prompt_logprobs\":0}}");
    sent_t a = take_add(), b = take_add();
    if (a.choice != 0) {
        sent_t t = a;
        a = b;
        b = t;
    }
    ck_assert(a.prompt_logprobs == 1 && b.prompt_logprobs == 0);
    answer(b, &(out_t){.text = "x", .finish = FINISH_LENGTH});
    answer_scores(a, 1, 1, 0);
    answer(a, &(out_t){.text = "y", .finish = FINISH_LENGTH});
    ck_assert_int_eq(c.status, 200);
    ck_assert_uint_eq(count(&c, "prompt_logprobs"), 2);
    ck_assert_double_eq(number(&c, "prompt_logprobs.1.6.logprob"), -1);
    ck_assert(json_is_null(fc_get(&c, "prompt_logprobs.1.6.decoded_token")));
    ck_assert_ptr_null(fc_get(&c, "choices.0.prompt_logprobs"));
    fc_fini(&c);
}
END_TEST

START_TEST(test_echo_with_logprobs)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":[97,98],\"max_tokens\":2,\"echo\":true,\"logprobs\":1}");
    sent_t s = take_add();
    ck_assert_uint_eq(s.prompt_logprobs, 2);
    answer_scores(s, 1, 1, 1);
    answer(s, &(out_t){.text = "xy", .finish = FINISH_LENGTH, .logprobs = true, .n_top = 1});
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "abxy");
    ck_assert_uint_eq(count(&c, "choices.0.logprobs.tokens"), 4);
    ck_assert_str_eq(fc_str(&c, "choices.0.logprobs.tokens.1"), "b");
    ck_assert(json_is_null(fc_get(&c, "choices.0.logprobs.token_logprobs.0")));
    ck_assert(json_is_null(fc_get(&c, "choices.0.logprobs.top_logprobs.0")));
    ck_assert_double_eq(number(&c, "choices.0.logprobs.token_logprobs.1"), -1);
    ck_assert_double_eq(number(&c, "choices.0.logprobs.token_logprobs.3"), -1);
    ck_assert_int_eq(fc_int(&c, "choices.0.logprobs.text_offset.3"), 3);
    ck_assert_ptr_null(fc_get(&c, "choices.0.prompt_logprobs")); /* not asked for by that name */
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 2);
    fc_fini(&c);
}
END_TEST

/* max_tokens 0: the engine makes one token, which nobody sees. */
START_TEST(test_echo_only)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":\"ab\",\"max_tokens\":0,\"echo\":true,\"logprobs\":0}");
    sent_t s = take_add();
    ck_assert_uint_eq(s.max_tokens, 1);
    answer_scores(s, 1, 1, 0);
    answer(s, &(out_t){.text = "x", .finish = FINISH_LENGTH, .logprobs = true});
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "ab");
    ck_assert_uint_eq(count(&c, "choices.0.logprobs.tokens"), 2);
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "length");
    ck_assert_int_eq(fc_int(&c, "usage.completion_tokens"), 0);
    fc_fini(&c);
}
END_TEST

/* The prompt comes with each choice's first piece, and not again. */
START_TEST(test_echo_in_a_stream)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":\"ab\",\"max_tokens\":2,\"echo\":true,\"logprobs\":0,\"stream\":true,"
            "\"n\":2}");
    sent_t a = take_add(), b = take_add();
    ck_assert(a.prompt_logprobs == 1 && b.prompt_logprobs == 1);
    answer_scores(a, 1, 1, 0);
    answer_scores(b, 1, 1, 0);
    answer(a, &(out_t){.text = "x", .logprobs = true});
    ck_assert_ptr_nonnull(strstr(c.text, "\"text\":\"abx\""));
    ck_assert_ptr_nonnull(strstr(c.text, "\"token_logprobs\":[null,-1.0,-0.5]"));
    answer(a, &(out_t){.text = "y", .logprobs = true, .finish = FINISH_LENGTH});
    ck_assert_ptr_nonnull(strstr(c.text, "\"text\":\"y\""));
    answer(b, &(out_t){.text = "zz", .logprobs = true, .finish = FINISH_LENGTH});
    ck_assert_ptr_nonnull(strstr(c.text, "\"text\":\"abzz\""));
    ck_assert(c.stream_ended);
    ck_assert_uint_eq(api.held_logprobs, 0);
    fc_fini(&c);
}
END_TEST

/* What does not fit together is an error of the engine's, not a crash. */
START_TEST(test_misfits)
{
    for (int i = 0; i < 7; i++) {
        fake_client_t c;
        fc_call(&c, &api, "POST", "/v1/completions",
                i == 0 ? "{\"prompt\":\"abc\"}" : "{\"prompt\":\"abc\",\"prompt_logprobs\":1}");
        sent_t s = take_add();
        switch (i) {
        case 0: /* was not asked for */
        case 1: /* more tokens than the prompt has */
            answer_scores(s, 1, i == 0 ? 1 : 3, 1);
            break;
        case 2: /* the first one has none */
            answer_scores(s, 0, 1, 1);
            break;
        case 3: /* a gap */
            answer_scores(s, 2, 1, 1);
            break;
        case 4: /* more entries than were asked for */
            answer_scores(s, 1, 1, 2);
            break;
        case 5: /* another number of entries */
            answer_scores(s, 1, 1, 1);
            answer_scores(s, 2, 1, 0);
            break;
        case 6: /* a token too early */
            answer_scores(s, 1, 1, 1);
            answer(s, &(out_t){.text = "x"});
            break;
        }
        expect_error(&c, 502, NULL, "engine sent");
        ck_assert_uint_eq(api.held_logprobs, 0);
        fc_fini(&c);
    }
}
END_TEST

/* Aborted before the prompt was through: there is nothing to say about it. */
START_TEST(test_aborted_early)
{
    fake_client_t c, d;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":\"abc\",\"prompt_logprobs\":1,\"echo\":true,\"logprobs\":0}");
    answer_scores(take_add(), 1, 1, 1);
    fc_call(&d, &api, "POST", "/abort_requests", "{}");
    ck_assert_str_eq(fc_str(&c, "choices.0.finish_reason"), "abort");
    ck_assert(json_is_null(fc_get(&c, "choices.0.prompt_logprobs")));
    ck_assert(json_is_null(fc_get(&c, "choices.0.logprobs.token_logprobs.1")));
    ck_assert_str_eq(fc_str(&c, "choices.0.text"), "abc");
    fc_fini(&c);
    fc_fini(&d);
}
END_TEST

/* A key must be readable: jansson for one refuses a NUL in it. */
START_TEST(test_a_nul_is_named_by_its_id)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions",
            "{\"prompt\":[0,0,65],\"max_tokens\":1,\"echo\":true,\"logprobs\":0}");
    sent_t s = take_add();
    answer_scores(s, 1, 2, 0);
    answer(s, &(out_t){.text = "x", .finish = FINISH_LENGTH, .logprobs = true});
    ck_assert_ptr_nonnull(strstr(c.text, "\"tokens\":[\"token_id:0\",\"token_id:0\",\"A\",\"x\"]"));
    ck_assert_ptr_nonnull(strstr(c.text, "{\"token_id:0\":-1.0}"));
    fc_fini(&c);
}
END_TEST

/* While open replies hold as much as there may be, no more is taken in. */
START_TEST(test_held_logprobs_are_bounded)
{
    fake_client_t c;
    api.held_logprobs = (size_t)API_MAX_LOGPROBS + 1;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":\"abc\",\"prompt_logprobs\":1}");
    expect_error(&c, 503, NULL, "logprobs");
    fc_fini(&c);
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":\"abc\"}");
    (void)take_add();
    fc_gone(&c);
    fc_fini(&c);
    api.held_logprobs = 0;
}
END_TEST

/* Numbers look as printf's nine digits make them. */
START_TEST(test_numbers)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("numbers"));
    lk_buf_t out;
    lk_buf_init(&out, 0);
    static const float special[] = {0.0f,     -0.0f,   -1.0f,    -10.0f,    -100.5f, -9998.5f,
                                    -9999.0f, -1e9f,   -1e-5f,   -0.0001f,  -0.001f, -0.01f,
                                    -0.1f,    -0.125f, -1e-20f,  -0.99999f, 0.5f,    -1000.0f,
                                    -9.5f,    -1024.f, -0.0625f, -3e-4f,    -2e-39f, -99.99999f};
    for (size_t i = 0; i < 200000; i++) {
        float x = i < LK_ARRAY_LEN(special) ? special[i]
                                            : -(float)exp(-11.0 + 20.0 * lk_prng_unit(&prng));
        char want[40] = "-9999.0";
        if (x > -9999.0f) {
            snprintf(want, sizeof want, "%.9g", (double)x);
            strcat(want, strpbrk(want, ".e") == NULL ? ".0" : "");
        }
        lk_buf_clear(&out);
        logprobs_json_number(&out, x);
        if (strcmp(lk_buf_cstr(&out), want) != 0) {
            ck_abort_msg("%s, printf makes %s", lk_buf_cstr(&out), want);
        }
    }
    lk_buf_clear(&out);
    logprobs_json_number(&out, -INFINITY);
    logprobs_json_number(&out, NAN);
    ck_assert_str_eq(lk_buf_cstr(&out), "-9999.0-9999.0");
    lk_buf_fini(&out);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("prompt_logprobs");
    TCase *tc = tcase_create("prompt_logprobs");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, test_completion);
    tcase_add_test(tc, test_generate_with_choices);
    tcase_add_test(tc, test_echo_with_logprobs);
    tcase_add_test(tc, test_echo_only);
    tcase_add_test(tc, test_echo_in_a_stream);
    tcase_add_test(tc, test_misfits);
    tcase_add_test(tc, test_aborted_early);
    tcase_add_test(tc, test_a_nul_is_named_by_its_id);
    tcase_add_test(tc, test_held_logprobs_are_bounded);
    tcase_add_test(tc, test_numbers);
    suite_add_tcase(suite, tc);
    return suite;
}
