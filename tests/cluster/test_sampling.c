/* Sampling on real clusters: seeded requests give the same tokens whatever the batch, the rank and
 * the number of ranks; prompt_logprobs are what generation says of the same tokens. */
#include "base/check.h"
#include "tests/lib/completions.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char model[300];

static void make_model(void)
{
    cluster_make_model("qwen3_moe", 11, model, sizeof model);
}

static void start(cluster_t *c, unsigned dp, const char *const *more)
{
    char ranks[16];
    const char *args[24] = {"--data-parallel-size", ranks, "--max-logprobs", "-1",
                            "--enable-expert-parallel"};
    size_t n = dp > 1 ? 5 : 4;
    snprintf(ranks, sizeof ranks, "%u", dp);
    for (size_t i = 0; more != NULL && more[i] != NULL; i++) {
        args[n++] = more[i];
    }
    cluster_start(c, model, args);
}

/* ---- seeds ---- */

#define N_PROMPTS 3
#define N_CHOICES 3
static const char *const prompts[N_PROMPTS] = {"[7,7,9]", "[300,12,45,1,2,3,4,5,6,7,8,9]", "[81]"};
static const char ask[] =
    "{\"prompt\":%s,\"n\":3,\"max_tokens\":20,\"temperature\":0.9,\"top_p\":0.95,\"top_k\":80,"
    "\"repetition_penalty\":1.1,\"frequency_penalty\":0.2,\"seed\":%d,\"logprobs\":0,"
    "\"ignore_eos\":true,\"return_token_ids\":true}";

static tokens_t first[N_PROMPTS * N_CHOICES];

static void check_choices(const json_t *reply, size_t n_prompts, size_t prompt, const char *what)
{
    static tokens_t got;
    ck_assert_uint_eq(json_array_size(json_object_get(reply, "choices")), n_prompts * N_CHOICES);
    for (size_t i = 0; i < n_prompts * N_CHOICES; i++) {
        tokens_t *want = &first[prompt * N_CHOICES + i];
        take_tokens(choice(reply, i), &got);
        ck_assert_uint_eq(got.n, 20);
        if (want->n == 0) {
            *want = got;
        }
        check_same_tokens(want, &got, what);
    }
}

/* Alone on every rank; all prompts in one call; and that call beside others that come and go. */
static void check_seeds(const cluster_t *c, unsigned dp)
{
    char what[64], all[256];
    snprintf(all, sizeof all, "[%s,%s,%s]", prompts[0], prompts[1], prompts[2]);
    for (size_t p = 0; p < N_PROMPTS; p++) {
        for (unsigned rank = 0; rank < dp; rank++) {
            snprintf(what, sizeof what, "DP %u, rank %u, prompt %zu", dp, rank, p);
            json_t *reply = complete_on(c, (int)rank, ask, prompts[p], 1234);
            check_choices(reply, 1, p, what);
            json_decref(reply);
        }
    }
    cluster_async_t others[4];
    for (int i = 0; i < 4; i++) {
        char body[256];
        snprintf(body, sizeof body,
                 "{\"prompt\":[%d,5,6],\"max_tokens\":%d,\"temperature\":1.2,\"n\":%d,\"seed\":%d}",
                 i, 10 + 17 * i, 1 + i, i);
        others[i] = cluster_call_async(c, "POST", "/v1/completions", body);
    }
    snprintf(what, sizeof what, "DP %u, all at once", dp);
    for (int round = 0; round < 2; round++) {
        json_t *reply = complete(c, ask, all, 1234);
        check_choices(reply, N_PROMPTS, 0, what);
        json_decref(reply);
    }
    for (int i = 0; i < 4; i++) {
        int status;
        json_decref(cluster_join(&others[i], 60, &status));
        ck_assert_int_eq(status, 200);
    }
}

START_TEST(seeds_give_the_same_tokens_everywhere)
{
    static const unsigned sizes[] = {1, 2, 4};
    static const char *const cramped[] = {"--max-num-batched-tokens", "16", "--max-num-seqs", "5",
                                          NULL};
    for (size_t i = 0; i < LK_ARRAY_LEN(sizes); i++) {
        cluster_t c;
        start(&c, sizes[i], i == 1 ? cramped : NULL);
        check_seeds(&c, sizes[i]);
        if (sizes[i] == 1) { /* and not because everything is the same */
            json_t *reply = complete(&c, ask, prompts[0], 1235);
            static tokens_t other;
            take_tokens(choice(reply, 0), &other);
            ck_assert_mem_ne(other.ids, first[0].ids, 20 * sizeof other.ids[0]);
            ck_assert_mem_ne(first[1].ids, first[0].ids, 20 * sizeof other.ids[0]);
            json_decref(reply);
        }
        ck_assert_int_eq(cluster_stop(&c), 0);
    }
}
END_TEST

/* ---- prompt_logprobs ---- */

#define TOP 3

static double number_of(const json_t *value)
{
    ck_assert(json_is_real(value));
    return json_real_value(value);
}

/* Entry `at` of prompt_logprobs is what was said when its token was generated. */
static void check_entry(const json_t *entry, json_int_t id, double logprob, json_t *top, int at)
{
    char key[32];
    snprintf(key, sizeof key, "%lld", (long long)id);
    const json_t *own = json_object_get(entry, key);
    ck_assert_msg(own != NULL, "prompt position %d has no entry for its token %s", at, key);
    ck_assert_msg(number_of(json_object_get(own, "logprob")) == logprob,
                  "prompt position %d: %.9g, generated with %.9g", at,
                  number_of(json_object_get(own, "logprob")), logprob);
    ck_assert_uint_eq(json_object_size(entry), json_object_size(top));
    const char *name;
    json_t *value;
    json_object_foreach(top, name, value)
    {
        const json_t *other = json_object_get(entry, name + strlen("token_id:"));
        ck_assert_msg(other != NULL, "prompt position %d lacks %s", at, name);
        ck_assert_double_eq(number_of(json_object_get(other, "logprob")), number_of(value));
        ck_assert_int_ge(json_int_at(other, "rank"), 1);
    }
}

/* Generates, then scores the prompt with what came behind it. */
static json_t *scored_body(const cluster_t *c, const char *prompt, const char *sampling,
                           json_t **generated)
{
    *generated = complete(c,
                          "{\"prompt\":%s,\"max_tokens\":40,\"logprobs\":%d,\"ignore_eos\":true,"
                          "\"return_token_ids\":true,\"return_tokens_as_token_ids\":true,%s}",
                          prompt, TOP, sampling);
    json_t *ids = json_loads(prompt, 0, NULL);
    json_array_extend(ids, json_object_get(choice(*generated, 0), "token_ids"));
    json_t *body =
        json_pack("{s:o,s:i,s:i}", "prompt", ids, "max_tokens", 1, "prompt_logprobs", TOP);
    char text[256];
    snprintf(text, sizeof text, "{%s}", sampling);
    json_t *params = json_loads(text, 0, NULL);
    json_object_update(body, params);
    json_decref(params);
    return body;
}

static void check_scored(const json_t *reply, const json_t *generated, const char *prompt)
{
    static tokens_t got;
    json_t *ids = json_loads(prompt, 0, NULL);
    size_t n = json_array_size(ids);
    json_decref(ids);
    const json_t *scores = json_object_get(choice(reply, 0), "prompt_logprobs");
    const json_t *tops =
        json_object_get(json_object_get(choice(generated, 0), "logprobs"), "top_logprobs");
    take_tokens(choice(generated, 0), &got);
    ck_assert_uint_eq(json_array_size(scores), n + got.n);
    ck_assert(json_is_null(json_array_get(scores, 0)));
    ck_assert_int_eq(json_int_at(reply, "usage.prompt_tokens_details.cached_tokens"), 0);
    for (size_t i = 0; i < got.n; i++) {
        check_entry(json_array_get(scores, n + i), got.ids[i], got.logprobs[i],
                    json_array_get(tops, i), (int)(n + i));
    }
}

/* Scores all prompts alone, then all at once, `growing` requests of higher priority beside them. */
static void check_prompts(const cluster_t *c, const char *sampling, size_t growing)
{
    enum { TIMES = 6 };
    cluster_async_t grow[4];
    ck_assert_uint_le(growing, LK_ARRAY_LEN(grow));
    json_t *generated[N_PROMPTS];
    char *bodies[N_PROMPTS];
    for (int p = 0; p < N_PROMPTS; p++) {
        json_t *body = scored_body(c, prompts[p], sampling, &generated[p]);
        bodies[p] = json_dumps(body, JSON_COMPACT);
        json_decref(body);
        int status; /* the prefix cache has all of it, but for this it is not read */
        json_t *reply = cluster_call(c, "POST", "/v1/completions", bodies[p], 200, &status);
        check_scored(reply, generated[p], prompts[p]);
        json_decref(reply);
    }
    for (size_t i = 0; i < growing; i++) {
        char rank[40];
        snprintf(rank, sizeof rank, "X-data-parallel-rank: %zu", i % 2);
        const char *headers[] = {rank, NULL};
        grow[i] = cluster_call_async_with(c, "POST", "/v1/completions",
                                          "{\"prompt\":[1],\"max_tokens\":60,\"n\":2,"
                                          "\"ignore_eos\":true,\"priority\":-5}",
                                          headers);
    }
    cluster_async_t calls[TIMES * N_PROMPTS];
    for (int i = 0; i < TIMES * N_PROMPTS; i++) {
        calls[i] = cluster_call_async(c, "POST", "/v1/completions", bodies[i % N_PROMPTS]);
    }
    for (int i = 0; i < TIMES * N_PROMPTS; i++) {
        int status;
        json_t *reply = cluster_join(&calls[i], 60, &status);
        ck_assert_int_eq(status, 200);
        check_scored(reply, generated[i % N_PROMPTS], prompts[i % N_PROMPTS]);
        json_decref(reply);
    }
    for (size_t i = 0; i < growing; i++) {
        int status;
        json_decref(cluster_join(&grow[i], 60, &status));
        ck_assert_int_eq(status, 200);
    }
    for (int p = 0; p < N_PROMPTS; p++) {
        json_decref(generated[p]);
        free(bodies[p]);
    }
}

/* Raw ones in one piece; then in chunks of a step's budget, beside others and with preemptions;
 * processed ones, of which filters leave now few and now many. */
START_TEST(prompts_are_scored_as_they_are_generated)
{
    static const char *const cramped[] = {"--max-num-batched-tokens",
                                          "7",
                                          "--num-gpu-blocks-override",
                                          "9",
                                          "--block-size",
                                          "8",
                                          "--max-model-len",
                                          "64",
                                          NULL};
    static const char *const processed[] = {"--logprobs-mode", "processed_logprobs", NULL};
    cluster_t c;
    start(&c, 1, NULL);
    check_prompts(&c, "\"temperature\":0", 0);
    check_prompts(&c, "\"temperature\":1,\"seed\":5", 0);
    ck_assert_int_eq(cluster_stop(&c), 0);
    start(&c, 2, cramped);
    check_prompts(&c, "\"temperature\":1,\"seed\":5,\"min_tokens\":1", 4);
    load_t load;
    read_load(&c, &load);
    ck_assert_int_gt(load.preemptions, 0);
    ck_assert_int_eq(cluster_stop(&c), 0);
    start(&c, 1, processed);
    check_prompts(&c, "\"temperature\":0.8,\"top_p\":0.7,\"seed\":6,\"repetition_penalty\":1.2", 0);
    check_prompts(&c, "\"temperature\":0.8,\"top_k\":2,\"seed\":7", 0);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- the whole vocabulary ---- */

static void check_whole(const json_t *map, const char *member, size_t vocab)
{
    double sum = 0;
    const char *key;
    json_t *value;
    ck_assert_uint_eq(json_object_size(map), vocab);
    json_object_foreach((json_t *)map, key, value)
    {
        sum += exp(number_of(member != NULL ? json_object_get(value, member) : value));
    }
    ck_assert_double_eq_tol(sum, 1.0, 1e-4);
}

START_TEST(all_of_the_vocabulary)
{
    cluster_t c;
    start(&c, 1, NULL);
    json_t *reply = complete(&c, "{\"prompt\":[1,2,3],\"max_tokens\":4,\"logprobs\":-1,"
                                 "\"prompt_logprobs\":-1,\"return_tokens_as_token_ids\":true,"
                                 "\"ignore_eos\":true}");
    const json_t *tops =
        json_object_get(json_object_get(choice(reply, 0), "logprobs"), "top_logprobs");
    const json_t *scores = json_object_get(choice(reply, 0), "prompt_logprobs");
    size_t vocab = json_object_size(json_array_get(tops, 0));
    ck_assert_uint_gt(vocab, 258);
    for (size_t i = 0; i < 4; i++) {
        check_whole(json_array_get(tops, i), NULL, vocab);
    }
    check_whole(json_array_get(scores, 1), "logprob", vocab);
    check_whole(json_array_get(scores, 2), "logprob", vocab);
    json_decref(reply);
    reply = refused(&c, 400, "{\"prompt\":[1],\"logprobs\":%zu}", vocab + 1);
    ck_assert_str_eq(json_text_at(reply, "error.param"), "logprobs");
    json_decref(reply);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("sampling");
    TCase *tc = tcase_create("sampling");
    tcase_set_timeout(tc, 120);
    tcase_add_unchecked_fixture(tc, make_model, NULL);
    tcase_add_test(tc, seeds_give_the_same_tokens_everywhere);
    tcase_add_test(tc, prompts_are_scored_as_they_are_generated);
    tcase_add_test(tc, all_of_the_vocabulary);
    suite_add_tcase(s, tc);
    return s;
}
