/* allowed_token_ids, bad_words and logit_bias: alone, and through the sampler. */
#include "base/prng.h"
#include "engine_core/exec/sampler.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BIN(array)                                                                                 \
    (msg_bin_t)                                                                                    \
    {                                                                                              \
        array, sizeof array                                                                        \
    }

static logit_rules_t *read_ok(const msg_sampling_t *m, uint32_t vocab)
{
    logit_rules_t *rules = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(logit_rules_read(m, vocab, &rules, &err) == LK_OK, "%s", err.text);
    return rules;
}

START_TEST(nothing_asked_is_nothing)
{
    msg_sampling_t m = {0};
    ck_assert_ptr_null(read_ok(&m, 8));
}
END_TEST

START_TEST(only_allowed_ids_are_left)
{
    uint32_t allowed[] = {5, 2, 5};
    msg_sampling_t m = {.allowed_token_ids = BIN(allowed)};
    logit_rules_t *rules = read_ok(&m, 8);
    float row[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    logit_rules_apply(rules, NULL, 0, row);
    for (uint32_t t = 0; t < 8; t++) {
        ck_assert(t == 2 || t == 5 ? row[t] == (float)t : row[t] == -INFINITY);
    }
    logit_rules_destroy(&rules);
}
END_TEST

START_TEST(bad_words_end_is_banned_behind_their_start)
{
    uint32_t words[] = {1, 3, 2, 4, 6, 3, 1, 1, 0}; /* "3", "4 6", "1 1 0" */
    msg_sampling_t m = {.bad_words = BIN(words)};
    logit_rules_t *rules = read_ok(&m, 8);
    static const struct {
        uint32_t output[4], n;
        int banned; /* besides 3 */
    } cases[] = {{{0}, 0, -1},   {{4}, 1, 6},       {{4, 5}, 2, -1},   {{1}, 1, -1},
                 {{1, 1}, 2, 0}, {{1, 1, 1}, 3, 0}, {{1, 1, 4}, 3, 6}, {{6, 4}, 2, 6}};
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        float row[8] = {0};
        logit_rules_apply(rules, cases[i].output, cases[i].n, row);
        for (int t = 0; t < 8; t++) {
            bool banned = t == 3 || t == cases[i].banned;
            ck_assert_msg((row[t] == -INFINITY) == banned, "case %zu, id %d", i, t);
        }
    }
    logit_rules_destroy(&rules);
}
END_TEST

START_TEST(misfits_are_refused_by_name)
{
    uint32_t ids[] = {1, 8}, one[] = {1}, cut[] = {3, 1}, none[] = {0}, outside[] = {1, 9};
    float values[] = {1.0f}, large[] = {101.0f}, nan[] = {NAN};
    const struct {
        msg_sampling_t m;
        const char *text;
    } bad[] = {
        {{.bias_ids = BIN(ids), .bias_values = BIN(values)}, "logit_bias: 2 ids with 1 values"},
        {{.bias_values = BIN(values)}, "logit_bias: 0 ids"},
        {{.bias_ids = BIN(one), .bias_values = BIN(large)}, "logit_bias must be from -100"},
        {{.bias_ids = BIN(one), .bias_values = BIN(nan)}, "logit_bias must be from -100"},
        {{.bias_ids = {one, 3}}, "logit_bias: 3 bytes"},
        {{.allowed_token_ids = BIN(ids)}, "allowed_token_ids: token id 8"},
        {{.bad_words = BIN(cut)}, "bad_words: a word of 3 ids, 1 are left"},
        {{.bad_words = BIN(none)}, "bad_words: a word of 0 ids"},
        {{.bad_words = BIN(outside)}, "bad_words: token id 9"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        logit_rules_t *rules = NULL;
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_eq(logit_rules_read(&bad[i].m, 8, &rules, &err), LK_ERR_INVALID);
        ck_assert_ptr_null(rules);
        ck_assert_msg(strstr(err.text, bad[i].text) != NULL, "%s", err.text);
    }
}
END_TEST

static request_t *make_request(float temperature)
{
    sampling_params_t p = {.temperature = temperature,
                           .top_p = 1.0f,
                           .repetition_penalty = 1.0f,
                           .max_tokens = 64,
                           .logprobs = 0};
    uint32_t prompt = 1;
    request_t *r = request_new(&prompt, 1, &p);
    ck_assert_ptr_nonnull(r);
    return r;
}

/* Pearson's test on fixed logits and fixed seeds, as in test_sampler.c: 7 ids are left, so 6
 * degrees of freedom; chi-square above 22.5 has probability 0.001 for a right sampler. */
START_TEST(frequencies_follow_the_biased_distribution)
{
    enum { VOCAB = 16, DRAWS = 40000 };
    float logits[VOCAB];
    double p[VOCAB] = {0}, total = 0.0;
    uint32_t allowed[] = {1, 2, 3, 5, 8, 11, 13, 15}, words[] = {1, 13};
    uint32_t ids[] = {2, 5, 13, 0};
    float biases[] = {1.5f, -0.75f, 50.0f, 100.0f}; /* of what is banned: without effect */
    for (uint32_t t = 0; t < VOCAB; t++) {
        logits[t] = 0.3f * (float)((t * 7) % VOCAB) - 2.0f;
    }
    for (size_t i = 0; i < LK_ARRAY_LEN(allowed); i++) {
        uint32_t t = allowed[i];
        double bias = t == 2 ? 1.5 : t == 5 ? -0.75 : 0.0;
        p[t] = t == 13 ? 0.0 : exp(((double)logits[t] + bias) / 1.5);
        total += p[t];
    }
    msg_sampling_t m = {.allowed_token_ids = BIN(allowed),
                        .bad_words = BIN(words),
                        .bias_ids = BIN(ids),
                        .bias_values = BIN(biases)};
    request_t *r = make_request(1.5f);
    r->rules = read_ok(&m, VOCAB);
    sampler_t *sampler = sampler_new(VOCAB, true);
    double counts[VOCAB] = {0}, chi = 0.0;
    for (uint32_t i = 0; i < DRAWS; i++) {
        r->sampling.seed = i / 4;
        r->choice = i % 4;
        sample_t got;
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_eq(sampler_sample(sampler, r, logits, NULL, 0, &got, &err), LK_OK);
        counts[got.token]++;
        ck_assert_double_eq_tol((double)got.logprob, log(p[got.token] / total), 1e-4);
    }
    for (uint32_t t = 0; t < VOCAB; t++) {
        double want = DRAWS * p[t] / total;
        ck_assert(want > 0 || counts[t] == 0);
        chi += want > 0 ? (counts[t] - want) * (counts[t] - want) / want : 0;
    }
    ck_assert_msg(chi < 22.5, "chi-square %g", chi);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

/* Greedy follows the rules too; raw logprobs stay the model's own. */
START_TEST(greedy_follows_rules)
{
    float logits[4] = {0.0f, 3.0f, 2.0f, 1.0f};
    uint32_t words[] = {1, 1}, ids[] = {3};
    float biases[] = {5.0f};
    msg_sampling_t m = {.bad_words = BIN(words), .bias_ids = BIN(ids), .bias_values = BIN(biases)};
    request_t *r = make_request(0.0f);
    r->rules = read_ok(&m, 4);
    sampler_t *sampler = sampler_new(4, false);
    sample_t got;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(sampler_sample(sampler, r, logits, NULL, 0, &got, &err), LK_OK);
    ck_assert_uint_eq(got.token, 3);
    ck_assert_uint_eq(got.rank, 3);
    double sum = exp(0.0) + exp(3.0) + exp(2.0) + exp(1.0);
    ck_assert_double_eq_tol((double)got.logprob, 1.0 - log(sum), 1e-5);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("logit_rules");
    TCase *tc = tcase_create("logit_rules");
    tcase_add_test(tc, nothing_asked_is_nothing);
    tcase_add_test(tc, only_allowed_ids_are_left);
    tcase_add_test(tc, bad_words_end_is_banned_behind_their_start);
    tcase_add_test(tc, misfits_are_refused_by_name);
    tcase_add_test(tc, frequencies_follow_the_biased_distribution);
    tcase_add_test(tc, greedy_follows_rules);
    suite_add_tcase(suite, tc);
    return suite;
}
