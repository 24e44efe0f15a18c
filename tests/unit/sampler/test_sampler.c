#include "base/prng.h"
#include "engine_core/exec/logits_row.h"
#include "engine_core/exec/sampler.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static sampling_params_t greedy(void)
{
    return (sampling_params_t){
        .top_p = 1.0f, .repetition_penalty = 1.0f, .max_tokens = 64, .logprobs = -1};
}

static request_t *make_request(const sampling_params_t *p, const uint32_t *tokens,
                               uint32_t n_prompt, uint32_t n_output)
{
    request_t *r = request_new(tokens, n_prompt, p);
    ck_assert_ptr_nonnull(r);
    for (uint32_t i = 0; i < n_output; i++) {
        r->tokens[r->n_tokens++] = tokens[n_prompt + i];
    }
    return r;
}

/* ---- a plain reference: everything in double, everything sorted ---- */

typedef struct {
    double z, p;
    uint32_t id;
} ref_t;

static int ref_order(const void *a, const void *b)
{
    const ref_t *x = a, *y = b;
    if (x->z != y->z) {
        return x->z > y->z ? -1 : 1;
    }
    return x->id < y->id ? -1 : 1;
}

static int ref_by_id(const void *a, const void *b)
{
    const ref_t *x = a, *y = b;
    return x->id < y->id ? -1 : 1;
}

static double ref_uniform(const request_t *r)
{
    uint32_t key[2] = {(uint32_t)r->sampling.seed, (uint32_t)(r->sampling.seed >> 32)};
    uint32_t counter[4] = {r->n_tokens - r->n_prompt, r->choice, 0, 0}, out[4];
    lk_philox4x32(key, counter, out);
    return (double)(((uint64_t)out[1] << 32 | out[0]) >> 11) * 0x1.0p-53;
}

static void ref_penalise(const request_t *r, const float *logits, uint32_t vocab, double *x)
{
    const sampling_params_t *p = &r->sampling;
    for (uint32_t t = 0; t < vocab; t++) {
        uint32_t any = 0, output = 0;
        for (uint32_t i = 0; i < r->n_tokens; i++) {
            any += r->tokens[i] == t;
            output += r->tokens[i] == t && i >= r->n_prompt;
        }
        x[t] = logits[t];
        if (any > 0) {
            x[t] = x[t] > 0 ? x[t] / (double)p->repetition_penalty
                            : x[t] * (double)p->repetition_penalty;
        }
        if (output > 0) {
            x[t] -= (double)p->frequency_penalty * output + (double)p->presence_penalty;
        }
    }
}

/* Fills e with what is kept, in order; returns how many. *margin: how near any decision was to
 * going the other way, so that float32 can be excused. */
static uint32_t ref_filter(const request_t *r, const float *logits, uint32_t vocab, ref_t *e,
                           double *margin)
{
    const sampling_params_t *p = &r->sampling;
    double *x = calloc(vocab, sizeof *x), max = -INFINITY;
    ref_penalise(r, logits, vocab, x);
    for (uint32_t t = 0; t < vocab; t++) {
        max = fmax(max, x[t]);
    }
    for (uint32_t t = 0; t < vocab; t++) {
        e[t].id = t;
        e[t].z = (x[t] - max) / (double)p->temperature;
        e[t].p = exp(e[t].z);
    }
    free(x);
    qsort(e, vocab, sizeof *e, ref_order);
    uint32_t n = vocab;
    *margin = 1.0;
    if (p->top_k > 0 && (uint32_t)p->top_k < n) {
        n = (uint32_t)p->top_k;
        *margin = fmin(*margin, e[n - 1].z - e[n].z);
    }
    if (p->top_p < 1.0f) {
        double total = 0.0, reached = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            total += e[i].p;
        }
        uint32_t i = 0;
        while (i < n && reached < total * (double)p->top_p) {
            reached += e[i++].p;
            *margin = fmin(*margin, fabs(reached / total - (double)p->top_p));
        }
        n = i < n ? i : n;
    }
    if (p->min_p > 0.0f) {
        uint32_t i = 0;
        while (i < n && e[i].p >= (double)p->min_p) {
            i++;
        }
        for (uint32_t j = 0; j < n; j++) {
            *margin = fmin(*margin, fabs(e[j].p - (double)p->min_p));
        }
        n = i;
    }
    return n;
}

static uint32_t ref_sample(const request_t *r, ref_t *e, uint32_t n, double *margin)
{
    qsort(e, n, sizeof *e, ref_by_id);
    double total = 0.0, reached = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        total += e[i].p;
    }
    double target = ref_uniform(r) * total;
    uint32_t token = e[n - 1].id;
    bool found = false;
    for (uint32_t i = 0; i < n; i++) {
        reached += e[i].p;
        *margin = fmin(*margin, fabs(reached - target) / total);
        if (!found && reached > target) {
            token = e[i].id;
            found = true;
        }
    }
    return token;
}

static sampling_params_t random_params(lk_prng_t *prng, uint32_t vocab)
{
    sampling_params_t p = greedy();
    p.temperature = 0.2f + 2.0f * (float)lk_prng_unit(prng);
    p.seed = lk_prng_u64(prng);
    if (lk_prng_below(prng, 2)) {
        p.top_k = (int32_t)(1 + lk_prng_below(prng, 2 * vocab));
    }
    if (lk_prng_below(prng, 2)) {
        p.top_p = 0.01f + 0.99f * (float)lk_prng_unit(prng);
    }
    if (lk_prng_below(prng, 2)) {
        p.min_p = 0.3f * (float)lk_prng_unit(prng);
    }
    if (lk_prng_below(prng, 2)) {
        p.repetition_penalty = 0.5f + 1.5f * (float)lk_prng_unit(prng);
        p.presence_penalty = -1.0f + 2.0f * (float)lk_prng_unit(prng);
        p.frequency_penalty = -1.0f + 2.0f * (float)lk_prng_unit(prng);
    }
    return p;
}

/* Every combination of filters and penalties against the reference; a decision nearer than 1e-5 to
 * the other one is left out, and must be rare. */
START_TEST(agrees_with_the_plain_reference)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("sampler reference"));
    int close = 0;
    enum { ROUNDS = 3000 };
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t vocab = (uint32_t)(1 + lk_prng_below(&prng, 700));
        float *logits = calloc(vocab, sizeof *logits);
        ref_t *e = calloc(vocab, sizeof *e);
        float spread = lk_prng_below(&prng, 2) ? 1.0f : 6.0f;
        for (uint32_t t = 0; t < vocab; t++) {
            logits[t] = spread * (float)lk_prng_normal(&prng);
        }
        uint32_t history[40];
        for (int i = 0; i < 40; i++) {
            history[i] = (uint32_t)lk_prng_below(&prng, vocab);
        }
        sampling_params_t p = random_params(&prng, vocab);
        request_t *r = make_request(&p, history, 10, (uint32_t)lk_prng_below(&prng, 31));
        sampler_t *sampler = sampler_new(vocab, false);
        sample_t got;
        lk_error_t err;
        double margin;
        uint32_t n = ref_filter(r, logits, vocab, e, &margin);
        uint32_t want = ref_sample(r, e, n, &margin);
        ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
        if (margin < 1e-5) {
            close++;
        } else {
            ck_assert_msg(got.token == want,
                          "round %d: %u, reference %u (vocab %u T %g k %d p %g min_p %g rep %g)",
                          round, got.token, want, vocab, (double)p.temperature, p.top_k,
                          (double)p.top_p, (double)p.min_p, (double)p.repetition_penalty);
        }
        sampler_destroy(&sampler);
        request_destroy(&r);
        free(logits);
        free(e);
    }
    ck_assert_int_lt(close, ROUNDS / 10);
}
END_TEST

/* Every length around the vector width; every value of the range against the C library. */
START_TEST(row_passes_agree_with_plain_loops)
{
    enum { MOST = 2100 };
    static float x[MOST], z[MOST], mass[MOST];
    double partial[MOST / LOGITS_ROW_BLOCK + 1];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("row passes"));
    for (uint32_t n = 1; n <= MOST; n += n < 40 ? 1 : 173) {
        float max = -INFINITY;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = 5.0f - 100.0f * (float)lk_prng_unit(&prng);
            max = fmaxf(max, x[i]);
        }
        bool bad;
        ck_assert(logits_row_max(x, n, &bad) == max && !bad);
        ck_assert(x[logits_row_find(x, n, max)] == max);
        double sum = 0.0;
        memcpy(z, x, sizeof x);
        logits_row_soften(z, mass, n, max, 0.5f);
        for (uint32_t i = 0; i < n; i++) {
            double want = exp((double)z[i]);
            ck_assert(z[i] == (x[i] - max) / 0.5f);
            ck_assert((mass[i] > 0.0f) == (z[i] >= LOGITS_ROW_FLOOR));
            ck_assert(mass[i] == 0.0f || fabs((double)mass[i] - want) < 3e-7 * want);
            sum += exp((double)x[i] - (double)max);
        }
        ck_assert_double_eq_tol(logits_row_exp_sum(x, n, max), sum, 1e-5 * sum);
        row_entry_t last = {.value = z[n / 2], .id = n / 2};
        z[n - 1] = z[n / 2]; /* an equal one behind it */
        logits_row_cut(z, mass, n, last);
        uint32_t above = 0;
        double left = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            bool keep = z[i] > last.value || (z[i] == last.value && i <= last.id);
            ck_assert(keep || mass[i] == 0.0f);
            ck_assert(!keep || mass[i] > 0.0f || z[i] < LOGITS_ROW_FLOOR || i == n - 1);
            above += z[i] > last.value;
            left += (double)mass[i];
        }
        ck_assert_uint_eq(logits_row_count_above(z, n, last.value), above);
        ck_assert_double_eq_tol(logits_row_sum(mass, n, partial), left, 1e-9);
    }
}
END_TEST

/* Pearson's test on fixed logits and fixed seeds, so the outcome is the same every time. 15 degrees
 * of freedom: chi-square above 37.7 has probability 0.001 for a right sampler. */
START_TEST(frequencies_follow_the_distribution)
{
    enum { VOCAB = 16, DRAWS = 40000 };
    float logits[VOCAB];
    double p[VOCAB], total = 0.0;
    for (int t = 0; t < VOCAB; t++) {
        logits[t] = 0.3f * (float)((t * 7) % VOCAB) - 2.0f;
        p[t] = exp((double)logits[t] / 1.5);
        total += p[t];
    }
    sampling_params_t params = greedy();
    params.temperature = 1.5f;
    uint32_t prompt = 1;
    request_t *r = make_request(&params, &prompt, 1, 0);
    sampler_t *sampler = sampler_new(VOCAB, false);
    double counts[VOCAB] = {0}, chi = 0.0;
    for (uint32_t i = 0; i < DRAWS; i++) {
        r->sampling.seed = i / 4;
        r->choice = i % 4;
        sample_t got;
        lk_error_t err;
        ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
        counts[got.token]++;
    }
    for (int t = 0; t < VOCAB; t++) {
        double want = DRAWS * p[t] / total;
        chi += (counts[t] - want) * (counts[t] - want) / want;
    }
    ck_assert_msg(chi < 37.7, "chi-square %g", chi);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

static uint32_t sample_one(sampler_t *sampler, const sampling_params_t *p, const float *logits,
                           uint32_t choice, uint32_t n_output)
{
    uint32_t tokens[64] = {0};
    request_t *r = make_request(p, tokens, 1, n_output);
    r->choice = choice;
    sample_t got;
    lk_error_t err;
    ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
    request_destroy(&r);
    return got.token;
}

START_TEST(a_token_depends_on_seed_choice_and_position_only)
{
    enum { VOCAB = 1000 };
    static float logits[VOCAB];
    lk_prng_t prng;
    lk_prng_seed(&prng, 5);
    for (int t = 0; t < VOCAB; t++) {
        logits[t] = (float)lk_prng_normal(&prng);
    }
    sampling_params_t p = greedy();
    p.temperature = 1.0f;
    p.seed = 0x123456789abcdef0ull;
    sampler_t *one = sampler_new(VOCAB, false), *other = sampler_new(VOCAB, false);
    uint32_t forwards[32][4];
    for (uint32_t pos = 0; pos < 32; pos++) {
        for (uint32_t c = 0; c < 4; c++) {
            forwards[pos][c] = sample_one(one, &p, logits, c, pos);
        }
    }
    int equal_choice = 0, equal_position = 0;
    for (uint32_t pos = 32; pos-- > 0;) {
        for (uint32_t c = 4; c-- > 0;) {
            ck_assert_uint_eq(sample_one(other, &p, logits, c, pos), forwards[pos][c]);
            equal_choice += c > 0 && forwards[pos][c] == forwards[pos][0];
            equal_position += pos > 0 && forwards[pos][c] == forwards[pos - 1][c];
        }
    }
    ck_assert_int_lt(equal_choice, 10);
    ck_assert_int_lt(equal_position, 10);
    sampler_destroy(&one);
    sampler_destroy(&other);
}
END_TEST

START_TEST(greedy_takes_the_lowest_id_among_equals)
{
    float logits[40];
    for (int t = 0; t < 40; t++) {
        logits[t] = t == 11 || t == 23 || t == 39 ? 2.0f : -1.0f;
    }
    sampling_params_t p = greedy();
    sampler_t *sampler = sampler_new(40, false);
    ck_assert_uint_eq(sample_one(sampler, &p, logits, 0, 0), 11);
    p.temperature = 1.0f;
    p.top_k = 1; /* the same order */
    ck_assert_uint_eq(sample_one(sampler, &p, logits, 0, 0), 11);
    p.top_k = 0;
    p.top_p = 1e-9f;
    ck_assert_uint_eq(sample_one(sampler, &p, logits, 0, 0), 11);
    p.top_p = 1.0f;
    p.temperature = 1e-30f;
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t t = sample_one(sampler, &p, logits, 0, i);
        ck_assert(t == 11 || t == 23 || t == 39);
    }
    sampler_destroy(&sampler);
}
END_TEST

/* 0.5, 0.25, 0.125, 0.125: cuts at, below and above exact sums; equal ones by id. */
START_TEST(top_p_keeps_the_shortest_prefix)
{
    float logits[4] = {logf(0.125f), logf(0.5f), logf(0.125f), logf(0.25f)};
    const struct {
        float top_p;
        uint32_t mask;
    } cases[] = {{0.49f, 2},         {0.51f, 2 | 8}, {0.74f, 2 | 8},
                 {0.76f, 2 | 8 | 1}, {0.9f, 15},     {1.0f, 15}};
    sampler_t *sampler = sampler_new(4, false);
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        sampling_params_t p = greedy();
        p.temperature = 1.0f;
        p.top_p = cases[i].top_p;
        uint32_t seen = 0;
        for (uint64_t seed = 0; seed < 200; seed++) {
            p.seed = seed;
            seen |= 1u << sample_one(sampler, &p, logits, 0, 0);
        }
        ck_assert_uint_eq(seen, cases[i].mask);
    }
    sampler_destroy(&sampler);
}
END_TEST

START_TEST(flat_and_wide_rows_are_cut_exactly)
{
    enum { VOCAB = 5000 };
    static float logits[VOCAB];
    sampler_t *sampler = sampler_new(VOCAB, false);
    sampling_params_t p = greedy();
    p.temperature = 1.0f;
    for (int k = 0; k < 2; k++) {
        p.top_k = k == 0 ? 100 : 0;
        p.top_p = k == 0 ? 1.0f : 0.02f;
        for (uint64_t seed = 0; seed < 100; seed++) {
            p.seed = seed;
            ck_assert_uint_lt(sample_one(sampler, &p, logits, 0, 0), 100);
        }
    }
    for (int t = 0; t < VOCAB; t++) { /* far below the histogram's range */
        logits[t] = t == 0 ? 0.0f : -50.0f - 0.001f * (float)t;
    }
    p.top_p = 1.0f;
    p.top_k = 3000;
    ck_assert_uint_eq(sample_one(sampler, &p, logits, 0, 0), 0);
    sampler_destroy(&sampler);
}
END_TEST

START_TEST(raw_logprobs_are_the_models_own)
{
    enum { VOCAB = 300 };
    float logits[VOCAB];
    double total = 0.0;
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("raw"));
    for (int t = 0; t < VOCAB; t++) {
        logits[t] = 30.0f + 4.0f * (float)lk_prng_normal(&prng);
    }
    logits[7] = logits[9] = 60.0f; /* tie at the top, beyond what the draws reach */
    for (int t = 0; t < VOCAB; t++) {
        total += exp((double)logits[t]);
    }
    sampling_params_t p = greedy();
    p.temperature = 0.7f;
    p.top_k = 50;
    p.repetition_penalty = 1.3f;
    p.logprobs = 5;
    uint32_t history[3] = {7, 1, 2};
    request_t *r = make_request(&p, history, 2, 1);
    sampler_t *sampler = sampler_new(VOCAB, false);
    sample_t got;
    lk_error_t err;
    ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
    ck_assert_double_eq_tol((double)got.logprob, (double)logits[got.token] - log(total), 1e-4);
    uint32_t rank = 1;
    for (int t = 0; t < VOCAB; t++) {
        rank += logits[t] > logits[got.token];
    }
    ck_assert_uint_eq(got.rank, rank);
    ck_assert_uint_eq(got.n_top, 5);
    ck_assert_uint_eq(got.top_ids[0], 7);
    ck_assert_uint_eq(got.top_ids[1], 9);
    for (int i = 1; i < 5; i++) {
        ck_assert(got.top_logprobs[i] <= got.top_logprobs[i - 1]);
    }
    float logprob;
    sampler_logprob(sampler, logits, got.token, &logprob, &rank);
    ck_assert(logprob == got.logprob && rank == got.rank);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

START_TEST(processed_logprobs_cover_what_is_left)
{
    float logits[6] = {1.0f, 3.0f, 2.0f, 0.0f, -1.0f, 2.5f};
    sampling_params_t p = greedy();
    p.temperature = 2.0f;
    p.top_k = 3;
    p.logprobs = 6;
    uint32_t history = 0, banned[2] = {5, 99};
    request_t *r = make_request(&p, &history, 1, 0);
    sampler_t *sampler = sampler_new(6, true);
    sample_t got;
    lk_error_t err;
    ck_ok(sampler_sample(sampler, r, logits, banned, 2, &got, &err));
    double total = exp(1.5) + exp(1.0) + exp(0.5);
    ck_assert_uint_eq(got.n_top, 6); /* as asked, whatever is left */
    for (int i = 3; i < 6; i++) {
        ck_assert(got.top_ids[i] == SAMPLER_NO_TOKEN && got.top_logprobs[i] == -INFINITY);
    }
    const uint32_t ids[3] = {1, 2, 0};
    for (int i = 0; i < 3; i++) {
        ck_assert_uint_eq(got.top_ids[i], ids[i]);
        ck_assert_double_eq_tol((double)got.top_logprobs[i],
                                (double)logits[ids[i]] / 2.0 - log(total), 1e-5);
    }
    ck_assert(got.logprob == got.top_logprobs[got.rank - 1]);
    r->sampling.temperature = 0.0f;
    ck_ok(sampler_sample(sampler, r, logits, banned, 2, &got, &err));
    ck_assert_uint_eq(got.token, 1);
    ck_assert_uint_eq(got.n_top, 6);
    ck_assert(got.top_ids[4] == 4 && got.top_ids[5] == SAMPLER_NO_TOKEN);
    ck_assert_uint_eq(got.rank, 1);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

/* The radix sort and the heap give one order, ties, zeros and infinities included. */
START_TEST(rows_are_sorted_alike)
{
    enum { MOST = 3000 };
    static float x[MOST];
    static row_entry_t heap[MOST], sorted[MOST], scratch[MOST];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("row sort"));
    for (int round = 0; round < 40; round++) {
        uint32_t n = 1 + (uint32_t)lk_prng_below(&prng, MOST);
        for (uint32_t i = 0; i < n; i++) {
            uint64_t kind = lk_prng_below(&prng, 10);
            x[i] = kind == 0   ? -INFINITY
                   : kind == 1 ? 0.0f
                   : kind == 2 ? -0.0f
                   : kind == 3 ? (float)lk_prng_below(&prng, 5)
                               : 30.0f * (float)lk_prng_normal(&prng);
        }
        uint32_t have = logits_row_top(x, n, n, heap);
        ck_assert_uint_eq(logits_row_sort(x, n, sorted, scratch), have);
        for (uint32_t i = 0; i < have; i++) {
            if (sorted[i].id != heap[i].id || sorted[i].value != heap[i].value) {
                ck_abort_msg("round %d: place %u is %u, not %u", round, i, sorted[i].id,
                             heap[i].id);
            }
        }
    }
}
END_TEST

/* All of a vocabulary, in order, summing to 1. */
START_TEST(logprobs_of_the_whole_vocabulary)
{
    enum { VOCAB = 5000 };
    static float logits[VOCAB];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("whole vocabulary"));
    for (int i = 0; i < VOCAB; i++) {
        logits[i] = 3.0f * (float)lk_prng_normal(&prng);
    }
    sampling_params_t p = greedy();
    p.temperature = 1.0f;
    p.logprobs = VOCAB + 7;
    uint32_t history = 0;
    request_t *r = make_request(&p, &history, 1, 0);
    sampler_t *sampler = sampler_new(VOCAB, false);
    sample_t got;
    lk_error_t err;
    ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
    ck_assert_uint_eq(got.n_top, VOCAB);
    double sum = 0.0;
    for (int i = 0; i < VOCAB; i++) {
        sum += exp((double)got.top_logprobs[i]);
        float logprob;
        uint32_t rank;
        ck_assert(i == 0 || got.top_logprobs[i] <= got.top_logprobs[i - 1]);
        if (i % 97 == 0) {
            uint32_t id = got.top_ids[i];
            float given = got.top_logprobs[i];
            sampler_logprob(sampler, logits, id, &logprob, &rank);
            ck_assert(logprob == given && rank == (uint32_t)i + 1);
        }
    }
    ck_assert_double_eq_tol(sum, 1.0, 1e-4);
    sampler_destroy(&sampler);
    request_destroy(&r);
}
END_TEST

/* Prompt tokens against the plain reference: raw, and what they would have been drawn from. */
START_TEST(prompt_logprobs_agree_with_the_reference)
{
    enum { VOCAB = 50, LEN = 12 };
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("prompt logprobs"));
    sampler_t *raw = sampler_new(VOCAB, false), *processed = sampler_new(VOCAB, true);
    int left_out = 0, close = 0;
    for (int round = 0; round < 1000; round++) {
        float logits[VOCAB];
        uint32_t prompt[LEN];
        for (int i = 0; i < VOCAB; i++) {
            logits[i] = 2.0f * (float)lk_prng_normal(&prng);
        }
        for (int i = 0; i < LEN; i++) {
            prompt[i] = (uint32_t)lk_prng_below(&prng, VOCAB);
        }
        sampling_params_t p = random_params(&prng, VOCAB);
        p.prompt_logprobs = 4;
        request_t *r = make_request(&p, prompt, LEN, 0);
        uint32_t index = 1 + (uint32_t)lk_prng_below(&prng, LEN - 1), token = prompt[index];
        sample_t got;
        lk_error_t err;
        float logprob;
        uint32_t rank;
        ck_ok(sampler_score(raw, r, index, logits, 3, &got, &err));
        ck_assert(got.token == token && got.n_top == 3);
        float best = got.top_logprobs[0];
        sample_t copy = got;
        sampler_logprob(raw, logits, token, &logprob, &rank);
        ck_assert(copy.logprob == logprob && copy.rank == rank && best >= logprob);

        request_t *view = make_request(&p, prompt, index, 0);
        ref_t e[VOCAB];
        double margin, total = 0.0, want = -INFINITY;
        uint32_t n = ref_filter(view, logits, VOCAB, e, &margin);
        for (uint32_t i = 0; i < n; i++) {
            total += e[i].p;
        }
        for (uint32_t i = 0; i < n; i++) {
            want = e[i].id == token ? log(e[i].p / total) : want;
        }
        ck_ok(sampler_score(processed, r, index, logits, 3, &got, &err));
        close += margin < 1e-5;
        left_out += want == -INFINITY;
        if (margin >= 1e-5) {
            ck_assert_msg(want == (double)got.logprob || fabs(want - (double)got.logprob) < 1e-4,
                          "round %d: %g, reference %g", round, (double)got.logprob, want);
            ck_assert_uint_eq(got.top_ids[0], e[0].id);
            ck_assert(n >= 3 || got.top_ids[2] == SAMPLER_NO_TOKEN);
        }
        request_destroy(&view);
        request_destroy(&r);
    }
    ck_assert(left_out > 50 && left_out < 950 && close < 100);
    float broken[VOCAB] = {[3] = NAN};
    uint32_t prompt[2] = {1, 2};
    sampling_params_t p = greedy();
    request_t *r = make_request(&p, prompt, 2, 0);
    sample_t got;
    lk_error_t err;
    ck_assert_int_eq(sampler_score(raw, r, 1, broken, 0, &got, &err), LK_ERR_INTERNAL);
    ck_assert_ptr_nonnull(strstr(err.text, "prompt token 1"));
    ck_assert_int_eq(sampler_score(processed, r, 1, broken, 0, &got, &err), LK_ERR_INTERNAL);
    request_destroy(&r);
    sampler_destroy(&raw);
    sampler_destroy(&processed);
}
END_TEST

START_TEST(banned_ids_never_come)
{
    float logits[3] = {9.0f, 8.0f, 1.0f};
    uint32_t history = 0, banned[3] = {0, 1, 2};
    sampler_t *sampler = sampler_new(3, false);
    sample_t got;
    lk_error_t err;
    for (int hot = 0; hot < 2; hot++) {
        sampling_params_t p = greedy();
        p.temperature = (float)hot;
        request_t *r = make_request(&p, &history, 1, 0);
        ck_ok(sampler_sample(sampler, r, logits, banned, 2, &got, &err));
        ck_assert_uint_eq(got.token, 2);
        ck_assert_int_eq(sampler_sample(sampler, r, logits, banned, 3, &got, &err),
                         LK_ERR_INTERNAL);
        request_destroy(&r);
    }
    sampler_destroy(&sampler);
}
END_TEST

START_TEST(broken_rows_are_refused)
{
    enum { VOCAB = 37 };
    float logits[VOCAB];
    uint32_t history = 0;
    sampler_t *sampler = sampler_new(VOCAB, false);
    sample_t got;
    lk_error_t err;
    for (int hot = 0; hot < 2; hot++) {
        sampling_params_t p = greedy();
        p.temperature = (float)hot;
        request_t *r = make_request(&p, &history, 1, 0);
        for (int at = 0; at < VOCAB; at++) {
            for (int kind = 0; kind < 2; kind++) {
                memset(logits, 0, sizeof logits);
                logits[at] = kind == 0 ? NAN : INFINITY;
                ck_assert_int_eq(sampler_sample(sampler, r, logits, NULL, 0, &got, &err),
                                 LK_ERR_INTERNAL);
            }
        }
        for (int t = 0; t < VOCAB; t++) {
            logits[t] = -INFINITY;
        }
        ck_assert_int_eq(sampler_sample(sampler, r, logits, NULL, 0, &got, &err), LK_ERR_INTERNAL);
        logits[30] = -1e30f;
        ck_ok(sampler_sample(sampler, r, logits, NULL, 0, &got, &err));
        ck_assert_uint_eq(got.token, 30);
        r->sampling.repetition_penalty = 1e-38f;
        logits[0] = 1e30f;
        ck_assert_int_eq(sampler_sample(sampler, r, logits, NULL, 0, &got, &err), LK_ERR_INTERNAL);
        request_destroy(&r);
    }
    sampler_destroy(&sampler);
}
END_TEST

START_TEST(parameters_out_of_range_are_named)
{
    const struct {
        const char *field;
        size_t offset;
        float bad;
    } cases[] = {
        {"temperature", offsetof(sampling_params_t, temperature), -0.1f},
        {"temperature", offsetof(sampling_params_t, temperature), NAN},
        {"top_p", offsetof(sampling_params_t, top_p), 0.0f},
        {"top_p", offsetof(sampling_params_t, top_p), NAN},
        {"min_p", offsetof(sampling_params_t, min_p), 1.5f},
        {"repetition_penalty", offsetof(sampling_params_t, repetition_penalty), 0.0f},
        {"presence_penalty", offsetof(sampling_params_t, presence_penalty), 2.5f},
        {"frequency_penalty", offsetof(sampling_params_t, frequency_penalty), NAN},
    };
    lk_error_t err;
    sampling_params_t p = greedy();
    ck_ok(sampling_params_check(&p, &err));
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        p = greedy();
        memcpy((char *)&p + cases[i].offset, &cases[i].bad, sizeof(float));
        ck_assert_int_eq(sampling_params_check(&p, &err), LK_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(err.text, cases[i].field));
    }
    p = greedy();
    p.min_tokens = 65;
    ck_assert_int_eq(sampling_params_check(&p, &err), LK_ERR_INVALID);
    p = greedy();
    p.logprobs = -2;
    ck_assert_int_eq(sampling_params_check(&p, &err), LK_ERR_INVALID);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("sampler");
    TCase *tc = tcase_create("sampler");
    tcase_add_test(tc, agrees_with_the_plain_reference);
    tcase_add_test(tc, row_passes_agree_with_plain_loops);
    tcase_add_test(tc, frequencies_follow_the_distribution);
    tcase_add_test(tc, a_token_depends_on_seed_choice_and_position_only);
    tcase_add_test(tc, greedy_takes_the_lowest_id_among_equals);
    tcase_add_test(tc, top_p_keeps_the_shortest_prefix);
    tcase_add_test(tc, flat_and_wide_rows_are_cut_exactly);
    tcase_add_test(tc, raw_logprobs_are_the_models_own);
    tcase_add_test(tc, processed_logprobs_cover_what_is_left);
    tcase_add_test(tc, rows_are_sorted_alike);
    tcase_add_test(tc, logprobs_of_the_whole_vocabulary);
    tcase_add_test(tc, prompt_logprobs_agree_with_the_reference);
    tcase_add_test(tc, banned_ids_never_come);
    tcase_add_test(tc, broken_rows_are_refused);
    tcase_add_test(tc, parameters_out_of_range_are_named);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(s, tc);
    return s;
}
