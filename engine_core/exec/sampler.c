#include "engine_core/exec/sampler.h"
#include "base/prng.h"
#include "engine_core/exec/logits_row.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/*
 * All filters keep a prefix of one order, (value descending, id ascending). So they only move a
 * cut: the last (value, id) that is kept. Nothing is ever sorted but the few entries of a reply.
 * Where the cut has to be searched among many, a histogram over the distance from the maximum
 * narrows it to one bucket, and a quickselect finds it there.
 */
#define BUCKETS          512
#define BUCKETS_PER_UNIT 16.0f
#define SMALL_TOP_K      64 /* found with a heap instead */

struct sampler {
    uint32_t vocab_size;
    bool processed;
    float *work;          /* [vocab_size] logits after penalties and bans, then z */
    float *mass;          /* [vocab_size] exp(z); 0 once it is filtered out */
    double *partial;      /* [vocab_size / LOGITS_ROW_BLOCK, rounded up] sums of mass */
    row_entry_t *entries; /* [vocab_size] */
    row_entry_t *scratch; /* [vocab_size] */
    uint32_t *top_ids;    /* [vocab_size] of the newest sample */
    float *top_logprobs;  /* [vocab_size] */
    uint32_t *counts;     /* [vocab_size] occurrences in the output */
    uint32_t *seen;       /* [vocab_size] == stamp: in prompt or output */
    uint32_t stamp;
};

sampler_t *sampler_new(uint32_t vocab_size, bool processed_logprobs)
{
    CHECK(vocab_size > 0);
    sampler_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->vocab_size = vocab_size;
    self->processed = processed_logprobs;
    self->work = malloc(vocab_size * sizeof *self->work);
    self->mass = malloc(vocab_size * sizeof *self->mass);
    self->partial = malloc((vocab_size / LOGITS_ROW_BLOCK + 1) * sizeof *self->partial);
    self->entries = malloc(vocab_size * sizeof *self->entries);
    self->scratch = malloc(vocab_size * sizeof *self->scratch);
    self->top_ids = malloc(vocab_size * sizeof *self->top_ids);
    self->top_logprobs = malloc(vocab_size * sizeof *self->top_logprobs);
    self->counts = malloc(vocab_size * sizeof *self->counts);
    self->seen = calloc(vocab_size, sizeof *self->seen);
    if (self->work == NULL || self->mass == NULL || self->partial == NULL ||
        self->entries == NULL || self->scratch == NULL || self->top_ids == NULL ||
        self->top_logprobs == NULL || self->counts == NULL || self->seen == NULL) {
        sampler_destroy(&self);
    }
    return self;
}

void sampler_destroy(sampler_t **self_p)
{
    sampler_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    free(self->work);
    free(self->mass);
    free(self->partial);
    free(self->entries);
    free(self->scratch);
    free(self->top_ids);
    free(self->top_logprobs);
    free(self->counts);
    free(self->seen);
    free(self);
    *self_p = NULL;
}

/* ---- penalties and bans ---- */

static bool has_penalties(const sampling_params_t *p)
{
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f;
}

static void apply_penalties(sampler_t *self, const request_t *r)
{
    const sampling_params_t *p = &r->sampling;
    if (++self->stamp == 0) {
        memset(self->seen, 0, self->vocab_size * sizeof *self->seen);
        self->stamp = 1;
    }
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        uint32_t t = r->tokens[i];
        CHECK(t < self->vocab_size);
        if (self->seen[t] != self->stamp) {
            self->seen[t] = self->stamp;
            self->counts[t] = 0;
            float x = self->work[t];
            self->work[t] = x > 0.0f ? x / p->repetition_penalty : x * p->repetition_penalty;
        }
        self->counts[t] += i >= r->n_prompt;
    }
    for (uint32_t i = r->n_prompt; i < r->n_tokens; i++) {
        uint32_t t = r->tokens[i];
        if (self->counts[t] > 0) {
            self->work[t] -= p->frequency_penalty * (float)self->counts[t] + p->presence_penalty;
            self->counts[t] = 0; /* once per id */
        }
    }
}

/* ---- filters ---- */

/* Where the search for a cut stands: entries of which the first `count` are wanted, or the shortest
 * prefix with at least `mass` (the larger of both conditions ends it; the unused one is 0). */
typedef struct {
    uint32_t count;
    double mass;
} quota_t;

/* The entry with which the quota is met, in the order; entries are rearranged. n > 0. When the
 * quota is more than there is (rounding), the last one. */
static row_entry_t select_cut(const sampler_t *self, row_entry_t *e, uint32_t n, quota_t quota)
{
    uint64_t draw = n;
    for (;;) {
        CHECK(n > 0);
        if (n == 1) {
            return e[0];
        }
        draw = lk_mix64(draw);
        row_entry_t pivot = e[draw % n];
        uint32_t front = 0; /* e[0..front) come before the pivot */
        double mass = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            if (row_entry_before(e[i], pivot)) {
                mass += (double)self->mass[e[i].id];
                row_entry_t t = e[front];
                e[front++] = e[i];
                e[i] = t;
            }
        }
        if (front > 0 && front >= quota.count && mass >= quota.mass) {
            n = front;
            continue;
        }
        mass += (double)self->mass[pivot.id];
        if (front + 1 >= quota.count && mass >= quota.mass) {
            return pivot;
        }
        if (front + 1 == n) {
            return pivot;
        }
        /* go on behind the pivot: move it out of the way */
        for (uint32_t i = front; i < n; i++) {
            if (e[i].id == pivot.id) {
                e[i] = e[front];
                e[front] = pivot;
                break;
            }
        }
        e += front + 1;
        n -= front + 1;
        quota.count = quota.count > front + 1 ? quota.count - (front + 1) : 0;
        quota.mass -= mass;
    }
}

static inline uint32_t bucket_of(float z)
{
    float d = -z * BUCKETS_PER_UNIT;
    return d < (float)(BUCKETS - 1) ? (uint32_t)d : BUCKETS - 1;
}

/* The entry with which the quota is met among those that are left. *all when they don't meet it. */
static row_entry_t find_cut(sampler_t *self, quota_t quota, bool *all)
{
    uint32_t counts[BUCKETS] = {0};
    double mass[BUCKETS] = {0.0};
    uint32_t n = self->vocab_size;
    for (uint32_t i = 0; i < n; i++) {
        if (self->mass[i] > 0.0f) {
            uint32_t b = bucket_of(self->work[i]);
            counts[b]++;
            mass[b] += (double)self->mass[i];
        }
    }
    uint32_t b = 0;
    while (b < BUCKETS && (counts[b] == 0 || counts[b] < quota.count || mass[b] < quota.mass)) {
        quota.count = quota.count > counts[b] ? quota.count - counts[b] : 0;
        quota.mass -= mass[b];
        b++;
    }
    *all = b == BUCKETS;
    if (*all) {
        return (row_entry_t){0};
    }
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (self->mass[i] > 0.0f && bucket_of(self->work[i]) == b) {
            self->entries[m++] = (row_entry_t){.value = self->work[i], .id = i};
        }
    }
    return select_cut(self, self->entries, m, quota);
}

static void cut_at_quota(sampler_t *self, quota_t quota)
{
    bool all;
    row_entry_t last = find_cut(self, quota, &all);
    if (!all) {
        logits_row_cut(self->work, self->mass, self->vocab_size, last);
    }
}

/* Sets the mass of all that is filtered out to 0. (Banned ids have none from the start.) */
static void apply_filters(sampler_t *self, const sampling_params_t *p)
{
    uint32_t n = self->vocab_size;
    if (p->top_k > 0 && p->top_k <= SMALL_TOP_K && (uint32_t)p->top_k < n) {
        uint32_t have = logits_row_top(self->work, n, (uint32_t)p->top_k, self->entries);
        logits_row_cut(self->work, self->mass, n, self->entries[have - 1]);
    } else if (p->top_k > 0 && (uint32_t)p->top_k < n) {
        cut_at_quota(self, (quota_t){.count = (uint32_t)p->top_k});
    }
    if (p->top_p < 1.0f) {
        double total = logits_row_sum(self->mass, n, self->partial);
        cut_at_quota(self, (quota_t){.count = 1, .mass = total * (double)p->top_p});
    }
    if (p->min_p > 0.0f) { /* p >= min_p * p_max */
        logits_row_cut(self->work, self->mass, n,
                       (row_entry_t){.value = logf(p->min_p), .id = UINT32_MAX});
    }
}

/* ---- sampling ---- */

static double uniform_draw(const request_t *r)
{
    const uint32_t key[2] = {(uint32_t)r->sampling.seed, (uint32_t)(r->sampling.seed >> 32)};
    const uint32_t counter[4] = {request_n_output(r), r->choice, 0, 0};
    uint32_t out[4];
    lk_philox4x32(key, counter, out);
    uint64_t bits = (uint64_t)out[1] << 32 | out[0];
    return (double)(bits >> 11) * 0x1.0p-53;
}

/* Draws in proportion to mass. *total: its sum. */
static uint32_t draw_token(sampler_t *self, const request_t *r, double *total)
{
    double sum = logits_row_sum(self->mass, self->vocab_size, self->partial);
    CHECK(sum > 0.0);
    double target = uniform_draw(r) * sum, reached = 0.0;
    uint32_t block = 0, token = UINT32_MAX;
    uint32_t last_block = (self->vocab_size - 1) / LOGITS_ROW_BLOCK;
    while (block < last_block && reached + self->partial[block] <= target) {
        reached += self->partial[block++];
    }
    uint32_t start = block * LOGITS_ROW_BLOCK;
    uint32_t end = LK_MIN(start + LOGITS_ROW_BLOCK, self->vocab_size);
    for (uint32_t i = start; i < end && reached <= target; i++) {
        reached += (double)self->mass[i];
        token = self->mass[i] > 0.0f ? i : token;
    }
    /* Rounding may lead into a last block without mass: then the last one before it that has any.
     */
    for (uint32_t i = start; token == UINT32_MAX; i--) {
        CHECK(i > 0);
        token = self->mass[i - 1] > 0.0f ? i - 1 : token;
    }
    *total = sum;
    return token;
}

/* The first k of x in order, into entries; how many there are. */
static uint32_t find_top(sampler_t *self, const float *x, uint32_t k)
{
    const uint32_t n = self->vocab_size;
    if (k > SMALL_TOP_K && k > n / 32) {
        return LK_MIN(k, logits_row_sort(x, n, self->entries, self->scratch));
    }
    return k > 0 ? logits_row_top(x, n, k, self->entries) : 0;
}

/* log-softmax of values x, with maximum max and sum of exp(x - max): of out->token and of the k
 * largest. */
static void fill_logprobs(sampler_t *self, const float *x, float max, double sum, uint32_t k,
                          sample_t *out)
{
    double base = (double)max + log(sum);
    k = LK_MIN(k, self->vocab_size);
    out->logprob = (float)((double)x[out->token] - base);
    out->rank = 1 + logits_row_count_above(x, self->vocab_size, x[out->token]);
    out->n_top = k;
    out->top_ids = self->top_ids;
    out->top_logprobs = self->top_logprobs;
    uint32_t have = find_top(self, x, k);
    for (uint32_t i = 0; i < k; i++) {
        bool there = i < have;
        self->top_ids[i] = there ? self->entries[i].id : SAMPLER_NO_TOKEN;
        self->top_logprobs[i] = there ? (float)((double)self->entries[i].value - base) : -INFINITY;
    }
}

/* Puts penalties and bans into work; returns the row to choose from, and its maximum. */
static const float *adjust_row(sampler_t *self, const request_t *r, const float *logits,
                               const uint32_t *banned, size_t n_banned, float *max)
{
    bool penalties = has_penalties(&r->sampling), rules = r->rules != NULL;
    if (!penalties && !rules && n_banned == 0 && r->sampling.temperature == 0.0f) {
        return logits; /* greedy needs no copy */
    }
    memcpy(self->work, logits, self->vocab_size * sizeof *logits);
    if (rules) {
        logit_rules_apply(r->rules, r->tokens + r->n_prompt, request_n_output(r), self->work);
    }
    if (penalties) {
        apply_penalties(self, r);
    }
    for (size_t i = 0; i < n_banned; i++) {
        if (banned[i] < self->vocab_size) {
            self->work[banned[i]] = -INFINITY;
        }
    }
    if (penalties || rules || n_banned > 0) {
        bool bad;
        *max = logits_row_max(self->work, self->vocab_size, &bad);
        CHECK(!bad);
    }
    return self->work;
}

/* Maximum of the model's row, and of the one to choose from (penalties, rules and bans applied),
 * which is returned. NULL: an error. */
static const float *open_row(sampler_t *self, const request_t *r, const float *logits,
                             const uint32_t *banned, size_t n_banned, float *raw_max, float *max,
                             lk_error_t *err)
{
    bool bad;
    *max = *raw_max = logits_row_max(logits, self->vocab_size, &bad);
    if (bad || *raw_max == INFINITY) {
        lk_error_set(err, LK_ERR_INTERNAL, "the logits of output token %u hold %s",
                     request_n_output(r), bad ? "a NaN" : "an infinity");
        return NULL;
    }
    const float *row =
        *raw_max == -INFINITY ? logits : adjust_row(self, r, logits, banned, n_banned, max);
    if (*max == INFINITY) {
        lk_error_set(err, LK_ERR_INTERNAL, "penalties overflow at output token %u",
                     request_n_output(r));
        return NULL;
    }
    if (*max == -INFINITY) {
        lk_error_set(err, LK_ERR_INTERNAL, "no token is left to choose from at output %u",
                     request_n_output(r));
        return NULL;
    }
    return row;
}

/* Work and mass become the distribution that is drawn from; row is in work. */
static void soften_row(sampler_t *self, const sampling_params_t *p, float max)
{
    logits_row_soften(self->work, self->mass, self->vocab_size, max, p->temperature);
    apply_filters(self, p);
}

/* Processed logprobs of out->token and the k most likely; total: the sum of mass. */
static void fill_processed(sampler_t *self, double total, uint32_t k, sample_t *out)
{
    for (uint32_t i = 0; i < self->vocab_size; i++) {
        self->work[i] = self->mass[i] > 0.0f ? self->work[i] : -INFINITY;
    }
    fill_logprobs(self, self->work, 0.0f, total, k, out);
}

lk_status_t sampler_sample(sampler_t *self, const request_t *r, const float *logits,
                           const uint32_t *banned, size_t n_banned, sample_t *out, lk_error_t *err)
{
    const sampling_params_t *p = &r->sampling;
    float raw_max, max;
    const float *row = open_row(self, r, logits, banned, n_banned, &raw_max, &max, err);
    if (row == NULL) {
        return LK_ERR_INTERNAL;
    }
    bool want = p->logprobs >= 0, raw = !self->processed;
    uint32_t n = self->vocab_size, k = want ? (uint32_t)p->logprobs : 0;
    if (p->temperature == 0.0f) {
        out->token = logits_row_find(row, n, max);
        if (want && !raw) {
            fill_logprobs(self, row, max, logits_row_exp_sum(row, n, max), k, out);
        }
    } else {
        double total;
        soften_row(self, p, max);
        out->token = draw_token(self, r, &total);
        if (want && !raw) {
            fill_processed(self, total, k, out);
        }
    }
    if (want && raw) {
        fill_logprobs(self, logits, raw_max, logits_row_exp_sum(logits, n, raw_max), k, out);
    }
    return LK_OK;
}

lk_status_t sampler_score(sampler_t *self, const request_t *r, uint32_t index, const float *logits,
                          uint32_t k, sample_t *out, lk_error_t *err)
{
    CHECK(index >= 1 && index < r->n_prompt && r->tokens[index] < self->vocab_size);
    request_t view = *r; /* as if the prompt ended before it */
    view.n_prompt = view.n_tokens = index;
    const uint32_t n = self->vocab_size;
    float raw_max, max;
    out->token = r->tokens[index];
    if (!self->processed) {
        bool bad;
        raw_max = logits_row_max(logits, n, &bad);
        if (bad || !isfinite(raw_max)) {
            return lk_error_set(err, LK_ERR_INTERNAL, "the logits before prompt token %u hold %s",
                                index, bad ? "a NaN" : "infinities");
        }
        fill_logprobs(self, logits, raw_max, logits_row_exp_sum(logits, n, raw_max), k, out);
        return LK_OK;
    }
    const float *row = open_row(self, &view, logits, NULL, 0, &raw_max, &max, err);
    if (row == NULL) {
        return LK_ERR_INTERNAL;
    }
    if (r->sampling.temperature == 0.0f) {
        fill_logprobs(self, row, max, logits_row_exp_sum(row, n, max), k, out);
    } else {
        soften_row(self, &r->sampling, max);
        fill_processed(self, logits_row_sum(self->mass, n, self->partial), k, out);
    }
    return LK_OK;
}

void sampler_logprob(sampler_t *self, const float *logits, uint32_t token, float *logprob,
                     uint32_t *rank)
{
    bool bad;
    float max = logits_row_max(logits, self->vocab_size, &bad);
    CHECK(token < self->vocab_size && !bad);
    sample_t sample = {.token = token};
    fill_logprobs(self, logits, max, logits_row_exp_sum(logits, self->vocab_size, max), 0, &sample);
    *logprob = sample.logprob;
    *rank = sample.rank;
}
