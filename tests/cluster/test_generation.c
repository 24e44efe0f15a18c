/* Generation on real clusters: the fixtures' expected tokens over HTTP, bit-equal for every DP
 * size, rank and batch, and under preemption. */
#include "base/check.h"
#include "tests/lib/completions.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the fixtures ---- */

#define N_GREEDY  24
#define MAX_CASES 8

static const struct {
    const char *name;
    unsigned dp[3];
    bool ep;
} fixtures[] = {
    {"llama3_rope_scaled", {1}, false},
    {"llama_smol_tied", {1}, false},
    {"llama_untied", {1}, false},
    {"qwen2_bias", {1}, false},
    {"qwen3", {1, 2}, false},
    {"qwen3_moe", {1, 2, 4}, true},
    {"qwen3_moe_mixed", {1, 2, 4}, true},
};

static const char *fixture_path(const char *name, const char *file)
{
    static char path[2][512];
    static unsigned turn;
    char *out = path[turn++ % 2];
    snprintf(out, sizeof path[0], "%s/models/%s%s%s", test_fixtures(), name, *file ? "/" : "",
             file);
    return out;
}

static void check_expected(const json_t *expected, const tokens_t *got, const char *what)
{
    const json_t *ids = json_object_get(expected, "greedy");
    const json_t *logprobs = json_object_get(expected, "greedy_logprobs");
    ck_assert_uint_eq(json_array_size(ids), N_GREEDY);
    ck_assert_uint_eq(got->n, N_GREEDY);
    for (size_t i = 0; i < N_GREEDY; i++) {
        ck_assert_msg(got->ids[i] == json_integer_value(json_array_get(ids, i)),
                      "%s: token %zu is %lld", what, i, (long long)got->ids[i]);
        double want = json_real_value(json_array_get(logprobs, i));
        ck_assert_msg(fabs(got->logprobs[i] - want) <= 1e-3, "%s: logprob %zu is %.9g, not %.9g",
                      what, i, got->logprobs[i], want);
    }
}

/* Every prompt on every rank, and all at once; bit-equal to what the first cluster said. */
static void check_fixture(const cluster_t *c, unsigned dp, const json_t *cases, tokens_t *first)
{
    static tokens_t got;
    char what[64];
    json_t *prompts = json_array();
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i);
        json_array_append(prompts, json_object_get(one, "prompt"));
        char *prompt = json_dumps(json_object_get(one, "prompt"), JSON_COMPACT);
        for (unsigned rank = 0; rank < dp; rank++) {
            snprintf(what, sizeof what, "DP %u, rank %u, prompt %zu", dp, rank, i);
            json_t *reply = complete_on(c, (int)rank,
                                        "{\"prompt\":%s,\"max_tokens\":24,\"temperature\":0,"
                                        "\"ignore_eos\":true,\"logprobs\":0}",
                                        prompt);
            take_tokens(choice(reply, 0), &got);
            json_decref(reply);
            check_expected(one, &got, what);
            if (first[i].n == 0) {
                first[i] = got;
            }
            check_same_tokens(&first[i], &got, what);
        }
        free(prompt);
    }
    char *all = json_dumps(prompts, JSON_COMPACT);
    json_t *reply = complete(c,
                             "{\"prompt\":%s,\"max_tokens\":24,\"temperature\":0,"
                             "\"ignore_eos\":true,\"logprobs\":0}",
                             all);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        snprintf(what, sizeof what, "DP %u, all at once, prompt %zu", dp, i);
        take_tokens(choice(reply, i), &got);
        check_same_tokens(&first[i], &got, what);
    }
    json_decref(reply);
    json_decref(prompts);
    free(all);
}

START_TEST(fixtures_give_the_expected_tokens)
{
    static tokens_t first[MAX_CASES];
    json_t *expected = json_load_file(fixture_path(fixtures[_i].name, "expected.json"), 0, NULL);
    const json_t *cases = json_object_get(expected, "cases");
    ck_assert_uint_gt(json_array_size(cases), 0);
    ck_assert_uint_le(json_array_size(cases), MAX_CASES);
    for (size_t k = 0; k < LK_ARRAY_LEN(fixtures[_i].dp) && fixtures[_i].dp[k] > 0; k++) {
        char dp[16];
        snprintf(dp, sizeof dp, "%u", fixtures[_i].dp[k]);
        const char *args[] = {"--dtype",
                              "float32",
                              "--data-parallel-size",
                              dp,
                              fixtures[_i].ep ? "--enable-expert-parallel" : NULL,
                              NULL};
        cluster_t c;
        cluster_start(&c, fixture_path(fixtures[_i].name, ""), args);
        check_fixture(&c, fixtures[_i].dp[k], cases, first);
        ck_assert_int_eq(cluster_stop(&c), 0);
    }
    json_decref(expected);
}
END_TEST

START_TEST(without_a_tokenizer_ids_work_and_text_is_refused)
{
    cluster_t c;
    const char *args[] = {"--dtype", "float32", NULL};
    cluster_start(&c, fixture_path("qwen3", ""), args);
    json_t *reply = refused(&c, 400, "{\"prompt\":\"hello\"}");
    ck_assert_str_eq(json_text_at(reply, "error.param"), "prompt");
    ck_assert_ptr_nonnull(strstr(json_text_at(reply, "error.message"), "tokenizer.json"));
    json_decref(reply);
    reply = refused(&c, 400, "{\"prompt\":[1],\"stop\":\"x\"}");
    ck_assert_str_eq(json_text_at(reply, "error.param"), "stop");
    json_decref(reply);
    reply = complete(&c, "{\"prompt\":[1,2],\"max_tokens\":3,\"logprobs\":1}");
    ck_assert_uint_eq(json_array_size(json_object_get(choice(reply, 0), "token_ids")), 3);
    ck_assert_str_eq(json_text_at(reply, "choices.0.text"), "");
    json_decref(reply);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* 8 requests of 9 blocks each on 24 blocks: some have to give way, and nobody can tell. */
START_TEST(preemption_changes_no_token)
{
    static tokens_t alone[8], got;
    char model[300];
    cluster_t c;
    const char *args[] = {"--dtype", "float32", "--num-gpu-blocks-override", "24", NULL};
    cluster_make_model("qwen3", 3, model, sizeof model);
    cluster_start(&c, model, args);
    static const char ask[] = "{\"prompt\":\"preempted, number %u\",\"max_tokens\":120,"
                              "\"seed\":%u,\"ignore_eos\":true,\"logprobs\":0,"
                              "\"return_token_ids\":true}";
    for (unsigned i = 0; i < 8; i++) {
        json_t *reply = complete(&c, ask, i, i);
        take_tokens(choice(reply, 0), &alone[i]);
        json_decref(reply);
    }
    load_t before, after;
    read_load(&c, &before);
    ck_assert_int_eq(before.preemptions, 0);
    cluster_async_t calls[8];
    for (unsigned i = 0; i < 8; i++) {
        char body[256];
        snprintf(body, sizeof body, ask, i, i);
        calls[i] = cluster_call_async(&c, "POST", "/v1/completions", body);
    }
    for (unsigned i = 0; i < 8; i++) {
        int status;
        json_t *reply = cluster_join(&calls[i], 60, &status);
        ck_assert_int_eq(status, 200);
        take_tokens(choice(reply, 0), &got);
        check_same_tokens(&alone[i], &got, "preempted");
        json_decref(reply);
    }
    read_load(&c, &after);
    ck_assert_msg(after.preemptions > 0, "nothing was preempted");
    wait_quiet(&c, "all blocks are free");
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("generation");
    TCase *tc = tcase_create("generation");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, fixtures_give_the_expected_tokens, 0, LK_ARRAY_LEN(fixtures));
    tcase_add_test(tc, without_a_tokenizer_ids_work_and_text_is_refused);
    tcase_add_test(tc, preemption_changes_no_token);
    suite_add_tcase(s, tc);
    return s;
}
