/* What the parameters of POST /v1/completions promise, on a real cluster (DP 2, expert parallel).
 */
#include "base/check.h"
#include "tests/lib/completions.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static cluster_t shared;
static char shared_model[300];
#define SHARED_DP 2

static void setup(void)
{
    const char *args[] = {"--dtype",
                          "float32",
                          "--data-parallel-size",
                          "2",
                          "--enable-expert-parallel",
                          "--max-model-len",
                          "1024",
                          NULL};
    cluster_make_model("qwen3_moe", 7, shared_model, sizeof shared_model);
    cluster_start(&shared, shared_model, args);
}

static void teardown(void)
{
    ck_assert_int_eq(cluster_stop(&shared), 0);
}

/* ---- text, several prompts, seeds ---- */

START_TEST(text_goes_in_and_comes_out)
{
    json_t *text = complete(&shared, "{\"prompt\":\"hello\",\"max_tokens\":32,\"seed\":5,"
                                     "\"return_token_ids\":true,\"logprobs\":0}");
    const json_t *one = choice(text, 0);
    json_t *bytes = json_pack("[i,i,i,i,i]", 'h', 'e', 'l', 'l', 'o');
    ck_assert(json_equal(json_object_get(one, "prompt_token_ids"), bytes));
    ck_assert_int_eq(json_int_at(text, "usage.prompt_tokens"), 5);
    ck_assert_int_eq(json_int_at(text, "usage.completion_tokens"), 32);
    ck_assert_int_eq(json_int_at(text, "usage.total_tokens"), 37);
    ck_assert_str_eq(json_text_at(text, "object"), "text_completion");
    ck_assert_str_eq(json_text_at(text, "choices.0.finish_reason"), "length");

    json_t *ids = complete(&shared, "{\"prompt\":[104,101,108,108,111],\"max_tokens\":32,"
                                    "\"seed\":5,\"return_token_ids\":true,\"logprobs\":0}");
    const json_t *written = json_object_get(one, "text");
    check_text(choice(ids, 0), json_string_value(written), json_string_length(written));
    static tokens_t a, b;
    take_tokens(one, &a);
    take_tokens(choice(ids, 0), &b);
    check_same_tokens(&a, &b, "ids instead of text");
    json_decref(text);
    json_decref(ids);
    json_decref(bytes);
}
END_TEST

/* One seeded request, alone on a rank (-1: anywhere). */
static void seeded(const cluster_t *c, int rank, const char *prompt, unsigned seed, tokens_t *out)
{
    json_t *reply = complete_on(c, rank,
                                "{\"prompt\":%s,\"max_tokens\":24,\"seed\":%u,\"ignore_eos\":true,"
                                "\"return_token_ids\":true,\"logprobs\":0}",
                                prompt, seed);
    take_tokens(choice(reply, 0), out);
    json_decref(reply);
}

START_TEST(a_seed_gives_the_same_tokens_anywhere)
{
    static tokens_t first, other, got;
    seeded(&shared, 0, "\"seeded\"", 11, &first);
    seeded(&shared, 1, "\"seeded\"", 11, &got);
    check_same_tokens(&first, &got, "rank 1");
    seeded(&shared, 0, "\"seeded\"", 12, &other);
    ck_assert_msg(memcmp(first.ids, other.ids, first.n * sizeof first.ids[0]) != 0,
                  "seeds 11 and 12 give the same tokens");

    cluster_async_t busy[8];
    for (unsigned i = 0; i < LK_ARRAY_LEN(busy); i++) {
        char body[128];
        snprintf(body, sizeof body, "{\"prompt\":\"neighbour %u\",\"max_tokens\":400,\"n\":2}", i);
        busy[i] = cluster_call_async(&shared, "POST", "/v1/completions", body);
    }
    for (int rank = 0; rank < SHARED_DP; rank++) {
        seeded(&shared, rank, "\"seeded\"", 11, &got);
        check_same_tokens(&first, &got, "among others");
    }
    for (unsigned i = 0; i < LK_ARRAY_LEN(busy); i++) {
        int status;
        json_decref(cluster_join(&busy[i], 60, &status));
        ck_assert_int_eq(status, 200);
    }
}
END_TEST

START_TEST(prompts_times_n_come_in_order)
{
    static const char *const prompts[] = {"\"one\"", "\"another\""};
    static tokens_t alone, got;
    json_t *reply = complete(&shared, "{\"prompt\":[\"one\",\"another\"],\"n\":3,\"seed\":3,"
                                      "\"max_tokens\":24,\"ignore_eos\":true,\"logprobs\":0,"
                                      "\"return_token_ids\":true}");
    ck_assert_uint_eq(json_array_size(json_object_get(reply, "choices")), 6);
    for (size_t i = 0; i < 6; i++) {
        size_t length = json_array_size(json_object_get(choice(reply, i), "prompt_token_ids"));
        ck_assert_uint_eq(length, i < 3 ? 3 : 7);
    }
    for (size_t p = 0; p < 2; p++) { /* the first of n is what n = 1 gives, the others are not */
        seeded(&shared, -1, prompts[p], 3, &alone);
        take_tokens(choice(reply, 3 * p), &got);
        check_same_tokens(&alone, &got, prompts[p]);
        for (size_t i = 1; i < 3; i++) {
            take_tokens(choice(reply, 3 * p + i), &got);
            ck_assert(memcmp(alone.ids, got.ids, alone.n * sizeof alone.ids[0]) != 0);
        }
    }
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens"), 10);
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), 6 * 24);
    json_decref(reply);
}
END_TEST

/* ---- where a choice ends ---- */

START_TEST(stop_ids_end_a_choice)
{
    static tokens_t all, got;
    seeded(&shared, -1, "\"stop\"", 21, &all);
    size_t at = 0; /* the first place of the id at 9 */
    while (all.ids[at] != all.ids[9]) {
        at++;
    }
    json_t *reply = complete(&shared,
                             "{\"prompt\":\"stop\",\"max_tokens\":24,\"seed\":21,\"logprobs\":0,"
                             "\"ignore_eos\":true,\"return_token_ids\":true,"
                             "\"stop_token_ids\":[%lld]}",
                             (long long)all.ids[at]);
    take_tokens(choice(reply, 0), &got);
    ck_assert_uint_eq(got.n, at + 1);
    ck_assert_int_eq(got.ids[at], all.ids[at]);
    ck_assert_str_eq(json_text_at(reply, "choices.0.finish_reason"), "stop");
    ck_assert_int_eq(json_int_at(reply, "choices.0.stop_reason"), all.ids[at]);
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), (json_int_t)at + 1);
    json_decref(reply);

    reply = complete(&shared,
                     "{\"prompt\":\"stop\",\"max_tokens\":24,\"min_tokens\":24,\"seed\":21,"
                     "\"ignore_eos\":true,\"return_token_ids\":true,\"stop_token_ids\":[%lld]}",
                     (long long)all.ids[at]);
    const json_t *ids = json_object_get(choice(reply, 0), "token_ids");
    ck_assert_uint_eq(json_array_size(ids), 24);
    for (size_t i = 0; i + 1 < 24; i++) {
        ck_assert_int_ne(json_integer_value(json_array_get(ids, i)), all.ids[at]);
    }
    json_decref(reply);
}
END_TEST

START_TEST(stop_strings_cut_the_text)
{
    static const char text_of[] = "{\"prompt\":\"strings\",\"max_tokens\":200,\"seed\":4,"
                                  "\"ignore_eos\":true%s}";
    json_t *whole = complete(&shared, text_of, "");
    const json_t *written = json_object_get(choice(whole, 0), "text");
    const char *text = json_string_value(written), *end = text + json_string_length(written);
    /* two printable characters in a row, so from two tokens, not at the start */
    char stop[3] = "";
    for (const char *p = text + 16; p + 1 < end && stop[0] == '\0'; p++) {
        if (p[0] >= '0' && p[0] < 'z' && p[0] != '\\' && p[1] >= '0' && p[1] < 'z' &&
            p[1] != '\\') {
            snprintf(stop, sizeof stop, "%.2s", p);
        }
    }
    ck_assert_msg(stop[0] != '\0', "no stop string in '%s'", text);
    size_t before = (size_t)((char *)memmem(text, (size_t)(end - text), stop, 2) - text);
    for (int keep = 0; keep <= 1; keep++) {
        char more[128];
        snprintf(more, sizeof more,
                 ",\"stop\":[\"no such text\",\"%s\"],\"include_stop_str_in_output\":%s", stop,
                 keep ? "true" : "false");
        json_t *cut = complete(&shared, text_of, more);
        check_text(choice(cut, 0), text, before + (keep ? 2 : 0));
        ck_assert_str_eq(json_text_at(cut, "choices.0.finish_reason"), "stop");
        ck_assert_str_eq(json_text_at(cut, "choices.0.stop_reason"), stop);
        ck_assert_int_lt(json_int_at(cut, "usage.completion_tokens"), 200);
        json_decref(cut);
    }
    json_decref(whole);
}
END_TEST

#define EOS 257 /* of make-model */

START_TEST(eos_ends_a_choice_unless_ignored)
{
    static const char ask[] = "{\"prompt\":\"eos\",\"n\":64,\"max_tokens\":64,\"seed\":9,"
                              "\"return_token_ids\":true,\"return_tokens_as_token_ids\":true,"
                              "\"logprobs\":0,\"temperature\":1.5,"
                              "\"ignore_eos\":%s}";
    static tokens_t on, off;
    json_t *honoured = complete(&shared, ask, "false"), *ignored = complete(&shared, ask, "true");
    size_t stopped = 0;
    for (size_t i = 0; i < 64; i++) {
        take_tokens(choice(honoured, i), &on);
        take_tokens(choice(ignored, i), &off);
        ck_assert_uint_eq(off.n, 64);
        ck_assert(memcmp(on.ids, off.ids, on.n * sizeof on.ids[0]) == 0);
        const json_t *one = choice(honoured, i);
        bool stop = strcmp(json_text_at(one, "finish_reason"), "stop") == 0;
        ck_assert(stop || on.n == 64);
        ck_assert(!stop || on.ids[on.n - 1] == EOS);
        ck_assert(json_is_null(json_object_get(one, "stop_reason")));
        stopped += stop;
        for (size_t k = 0; k + 1 < on.n; k++) {
            ck_assert_int_ne(on.ids[k], EOS);
        }
    }
    ck_assert_msg(stopped > 0, "none of 64 choices of 64 tokens met the eos id: choose others");
    json_decref(honoured);
    json_decref(ignored);
}
END_TEST

START_TEST(max_tokens_bounds_a_choice)
{
    json_t *reply = complete(&shared, "{\"prompt\":[1,2,3],\"ignore_eos\":true}");
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), 16);
    json_decref(reply);
    reply = complete(&shared, "{\"prompt\":[1,2,3],\"max_tokens\":1,\"ignore_eos\":true}");
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), 1);
    json_decref(reply);
    /* null: all the room there is */
    reply =
        complete(&shared, "{\"prompt\":\"%01020d\",\"max_tokens\":null,\"ignore_eos\":true}", 0);
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens"), 1020);
    ck_assert_int_eq(json_int_at(reply, "usage.completion_tokens"), 4);
    ck_assert_str_eq(json_text_at(reply, "choices.0.finish_reason"), "length");
    json_decref(reply);
}
END_TEST

/* ---- logprobs ---- */

START_TEST(logprobs_have_k_alternatives)
{
    static const int ks[] = {0, 1, 5, 20};
    static tokens_t first, got;
    for (size_t j = 0; j < LK_ARRAY_LEN(ks); j++) {
        json_t *reply = complete(&shared,
                                 "{\"prompt\":\"logprobs\",\"max_tokens\":24,\"seed\":8,"
                                 "\"logprobs\":%d,\"return_token_ids\":true,"
                                 "\"return_tokens_as_token_ids\":true,\"ignore_eos\":true}",
                                 ks[j]);
        take_tokens(choice(reply, 0), &got);
        first = j == 0 ? got : first;
        check_same_tokens(&first, &got, "another k");
        const json_t *logprobs = json_object_get(choice(reply, 0), "logprobs");
        for (size_t i = 0; i < got.n; i++) {
            char name[32];
            snprintf(name, sizeof name, "token_id:%lld", (long long)got.ids[i]);
            const json_t *names = json_object_get(logprobs, "tokens");
            ck_assert_str_eq(json_string_value(json_array_get(names, i)), name);
            json_t *top = json_array_get(json_object_get(logprobs, "top_logprobs"), i);
            size_t n = json_object_size(top);
            ck_assert_msg(n == (size_t)ks[j] || n == (size_t)ks[j] + 1, "%zu entries for k = %d", n,
                          ks[j]);
            ck_assert_double_eq(json_real_value(json_object_get(top, name)), got.logprobs[i]);
            double sum = 0;
            const char *key;
            json_t *value;
            json_object_foreach(top, key, value)
            {
                ck_assert_int_eq(strncmp(key, "token_id:", 9), 0);
                sum += exp(json_real_value(value));
            }
            ck_assert_double_le(sum, 1 + 1e-5);
        }
        json_decref(reply);
    }
    json_t *reply = complete(&shared, "{\"prompt\":\"logprobs\",\"max_tokens\":2}");
    ck_assert(json_is_null(json_object_get(choice(reply, 0), "logprobs")));
    ck_assert_ptr_null(json_object_get(choice(reply, 0), "token_ids"));
    json_decref(reply);
}
END_TEST

/* A greedy token is the most likely one. */
START_TEST(greedy_takes_the_most_likely)
{
    json_t *reply = complete(&shared, "{\"prompt\":\"greedy\",\"max_tokens\":24,\"temperature\":0,"
                                      "\"logprobs\":3,\"return_tokens_as_token_ids\":true}");
    const json_t *logprobs = json_object_get(choice(reply, 0), "logprobs");
    const json_t *tops = json_object_get(logprobs, "top_logprobs");
    for (size_t i = 0; i < json_array_size(tops); i++) {
        double own =
            json_real_value(json_array_get(json_object_get(logprobs, "token_logprobs"), i));
        json_t *top = json_array_get(tops, i);
        ck_assert_uint_eq(json_object_size(top), 3);
        const char *key;
        json_t *value;
        json_object_foreach(top, key, value)
        {
            ck_assert_double_le(json_real_value(value), own);
        }
    }
    json_decref(reply);
}
END_TEST

/* ---- the prefix cache ---- */

START_TEST(cached_prefixes_are_reported_and_change_nothing)
{
    static tokens_t cold, warm;
    static const char ask[] = "{\"prompt\":\"cached? %0100d\",\"max_tokens\":16,\"seed\":2,"
                              "\"logprobs\":0,\"return_token_ids\":true%s}";
    json_t *reply = complete_on(&shared, 1, ask, 77, ""); /* 108 tokens */
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 0);
    take_tokens(choice(reply, 0), &cold);
    json_decref(reply);
    reply = complete_on(&shared, 1, ask, 77, "");
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 96);
    take_tokens(choice(reply, 0), &warm);
    check_same_tokens(&cold, &warm, "from the cache");
    json_decref(reply);
    /* another salt, another start, another rank: nothing to find */
    reply = complete_on(&shared, 1, ask, 77, ",\"cache_salt\":\"mine\"");
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 0);
    take_tokens(choice(reply, 0), &warm);
    check_same_tokens(&cold, &warm, "with a salt");
    json_decref(reply);
    reply = complete_on(&shared, 0, ask, 77, "");
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 0);
    take_tokens(choice(reply, 0), &warm);
    check_same_tokens(&cold, &warm, "on the other rank");
    json_decref(reply);
    json_decref(cluster_call(&shared, "POST", "/reset_prefix_cache", NULL, 200, NULL));
    reply = complete_on(&shared, 1, ask, 77, "");
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 0);
    json_decref(reply);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("completions");
    TCase *tc = tcase_create("completions");
    tcase_set_timeout(tc, 120);
    tcase_add_unchecked_fixture(tc, setup, teardown);
    tcase_add_test(tc, text_goes_in_and_comes_out);
    tcase_add_test(tc, a_seed_gives_the_same_tokens_anywhere);
    tcase_add_test(tc, prompts_times_n_come_in_order);
    tcase_add_test(tc, stop_ids_end_a_choice);
    tcase_add_test(tc, stop_strings_cut_the_text);
    tcase_add_test(tc, eos_ends_a_choice_unless_ignored);
    tcase_add_test(tc, max_tokens_bounds_a_choice);
    tcase_add_test(tc, logprobs_have_k_alternatives);
    tcase_add_test(tc, greedy_takes_the_most_likely);
    tcase_add_test(tc, cached_prefixes_are_reported_and_change_nothing);
    suite_add_tcase(s, tc);
    return s;
}
