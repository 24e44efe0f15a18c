#include "engine_core/exec/sampler.h"
#include "base/prng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/*
 * All filters keep a prefix of one order, (value descending, id ascending). So they only move a
 * cut: the last (value, id) that is kept. Nothing is ever sorted but the few entries of a reply.
 * Where the cut has to be searched among many, a histogram over the distance from the maximum
 * narrows it to one bucket, and a quickselect finds it there.
 */
#define LANES            16 /* independent accumulators, so that the compiler uses vector registers */
#define BUCKETS          512
#define BUCKETS_PER_UNIT 16.0f

typedef struct {
    float z; /* ln(p / p of the most likely), <= 0; before temperature and filters: the logit */
    uint32_t id;
} entry_t;

struct sampler {
    uint32_t vocab_size;
    bool processed;
    float *work;      /* [vocab_size] logits after penalties and bans, then z */
    float *mass;      /* [vocab_size] exp(z) */
    entry_t *entries; /* [vocab_size] */
    uint32_t *counts; /* [vocab_size] occurrences in the output */
    uint32_t *seen;   /* [vocab_size] == stamp: in prompt or output */
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
    self->entries = malloc(vocab_size * sizeof *self->entries);
    self->counts = malloc(vocab_size * sizeof *self->counts);
    self->seen = calloc(vocab_size, sizeof *self->seen);
    if (self->work == NULL || self->mass == NULL || self->entries == NULL || self->counts == NULL ||
        self->seen == NULL) {
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
    free(self->entries);
    free(self->counts);
    free(self->seen);
    free(self);
    *self_p = NULL;
}

/* ---- passes over a row ---- */

/* exp(x) for x <= 0, within 2 ulp; 0 below -87. Own code, so that it is inlined into vector loops
 * and the same on every C library. Range reduction and polynomial: Cephes, expf. */
static inline float exp_neg(float x)
{
    float c = x < -87.0f ? -87.0f : x;
    float rounded =
        c * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: integer in the mantissa */
    float k = rounded - 12582912.0f;
    float r = c - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits = (int32_t)((uint32_t)bits + ((uint32_t)(int32_t)k << 23));
    memcpy(&p, &bits, sizeof p);
    return x < -87.0f ? 0.0f : p;
}

/* Maximum of the row; *bad when it holds a NaN. */
static float row_max(const float *x, uint32_t n, bool *bad)
{
    float best[LANES];
    int32_t nan[LANES] = {0};
    for (int k = 0; k < LANES; k++) {
        best[k] = -INFINITY;
    }
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            float v = x[i + k];
            nan[k] |= v != v;
            best[k] = v > best[k] ? v : best[k];
        }
    }
    for (; i < n; i++) {
        nan[0] |= x[i] != x[i];
        best[0] = x[i] > best[0] ? x[i] : best[0];
    }
    for (int k = 1; k < LANES; k++) {
        nan[0] |= nan[k];
        best[0] = best[k] > best[0] ? best[k] : best[0];
    }
    *bad = nan[0] != 0;
    return best[0];
}

/* Sum of exp(x - max); blocks are added up in double. */
static double row_exp_sum(const float *x, uint32_t n, float max)
{
    double total = 0.0;
    uint32_t i = 0;
    while (i + LANES <= n) {
        float sum[LANES] = {0};
        uint32_t end = LK_MIN(n, i + 64 * LANES);
        for (; i + LANES <= end; i += LANES) {
            for (int k = 0; k < LANES; k++) {
                sum[k] += exp_neg(x[i + k] - max);
            }
        }
        for (int k = 0; k < LANES; k++) {
            total += (double)sum[k];
        }
    }
    for (; i < n; i++) {
        total += (double)exp_neg(x[i] - max);
    }
    return total;
}

static uint32_t row_count_above(const float *x, uint32_t n, float limit)
{
    int32_t count[LANES] = {0};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            count[k] += x[i + k] > limit;
        }
    }
    for (; i < n; i++) {
        count[0] += x[i] > limit;
    }
    uint32_t total = 0;
    for (int k = 0; k < LANES; k++) {
        total += (uint32_t)count[k];
    }
    return total;
}

/* work = (work - max) / temperature, mass = exp(work). */
static void scale_row(sampler_t *self, float max, float temperature)
{
    float *restrict z = self->work;
    float *restrict mass = self->mass;
    uint32_t n = self->vocab_size, i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            z[i + k] = (z[i + k] - max) / temperature;
            mass[i + k] = exp_neg(z[i + k]);
        }
    }
    for (; i < n; i++) {
        z[i] = (z[i] - max) / temperature;
        mass[i] = exp_neg(z[i]);
    }
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

/* ---- the order (z descending, id ascending) ---- */

static inline bool entry_before(entry_t a, entry_t b)
{
    return a.z != b.z ? a.z > b.z : a.id < b.id;
}

static void sift_down(entry_t *heap, uint32_t n, uint32_t i)
{
    for (;;) {
        uint32_t last = i, child = 2 * i + 1;
        if (child < n && entry_before(heap[last], heap[child])) {
            last = child;
        }
        if (child + 1 < n && entry_before(heap[last], heap[child + 1])) {
            last = child + 1;
        }
        if (last == i) {
            return;
        }
        entry_t t = heap[i];
        heap[i] = heap[last];
        heap[last] = t;
        i = last;
    }
}

/* The first k of the row in order into out (a heap with the last of them on top, then sorted).
 * Entries of -inf are left out; returns how many there are. */
static uint32_t row_top(const float *x, uint32_t n, uint32_t k, entry_t *out)
{
    uint32_t have = 0, i = 0;
    for (; i < n && have < k; i++) {
        if (x[i] > -INFINITY) {
            out[have++] = (entry_t){.z = x[i], .id = i};
        }
    }
    for (uint32_t h = have / 2; h-- > 0;) {
        sift_down(out, have, h);
    }
    for (; i < n && have > 0; i++) {
        if (x[i] > out[0].z) { /* an equal one with a higher id comes after */
            out[0] = (entry_t){.z = x[i], .id = i};
            sift_down(out, have, 0);
        }
    }
    for (uint32_t end = have; end > 1; end--) {
        entry_t t = out[0];
        out[0] = out[end - 1];
        out[end - 1] = t;
        sift_down(out, end - 1, 0);
    }
    return have;
}

/* Where the search for a cut stands: entries of which the first `count` are wanted, or the shortest
 * prefix with at least `mass` (the larger of both conditions ends it; the unused one is 0). */
typedef struct {
    uint32_t count;
    double mass;
} quota_t;

/* The entry with which the quota is met, in the order; entries are rearranged. n > 0. When the
 * quota is more than there is (rounding), the last one. */
static entry_t select_cut(const sampler_t *self, entry_t *e, uint32_t n, quota_t quota)
{
    uint64_t draw = n;
    for (;;) {
        CHECK(n > 0);
        if (n == 1) {
            return e[0];
        }
        draw = lk_mix64(draw);
        entry_t pivot = e[draw % n];
        uint32_t front = 0; /* e[0..front) come before the pivot */
        double mass = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            if (entry_before(e[i], pivot)) {
                mass += (double)self->mass[e[i].id];
                entry_t t = e[front];
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

static inline bool kept(float z, uint32_t id, entry_t cut)
{
    return z > cut.z || (z == cut.z && id <= cut.id);
}

/* Moves the cut to where the quota is met among what it keeps now. */
static entry_t find_cut(sampler_t *self, entry_t cut, quota_t quota)
{
    uint32_t counts[BUCKETS] = {0};
    double mass[BUCKETS] = {0.0};
    uint32_t n = self->vocab_size;
    for (uint32_t i = 0; i < n; i++) {
        if (kept(self->work[i], i, cut)) {
            uint32_t b = bucket_of(self->work[i]);
            counts[b]++;
            mass[b] += (double)self->mass[i];
        }
    }
    uint32_t b = 0, last = 0;
    for (; b < BUCKETS; b++) {
        if (counts[b] == 0) {
            continue;
        }
        last = b;
        if (counts[b] >= quota.count && mass[b] >= quota.mass) {
            break;
        }
        quota.count = quota.count > counts[b] ? quota.count - counts[b] : 0;
        quota.mass -= mass[b];
    }
    if (b == BUCKETS) {
        return cut; /* all of it */
    }
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (bucket_of(self->work[i]) == last && kept(self->work[i], i, cut)) {
            self->entries[m++] = (entry_t){.z = self->work[i], .id = i};
        }
    }
    return select_cut(self, self->entries, m, quota);
}

/* ---- sampling ---- */

static entry_t apply_filters(sampler_t *self, const sampling_params_t *p)
{
    /* -inf (banned, or probability 0 after exp) is never kept */
    entry_t cut = {.z = -87.0f, .id = UINT32_MAX};
    if (p->top_k > 0 && (uint32_t)p->top_k < self->vocab_size) {
        if (p->top_k <= SAMPLING_MAX_LOGPROBS) {
            uint32_t n = row_top(self->work, self->vocab_size, (uint32_t)p->top_k, self->entries);
            entry_t last = self->entries[n - 1];
            cut = last.z < cut.z ? cut : last;
        } else {
            cut = find_cut(self, cut, (quota_t){.count = (uint32_t)p->top_k});
        }
    }
    if (p->top_p < 1.0f) {
        double total = 0.0;
        for (uint32_t i = 0; i < self->vocab_size; i++) {
            total += kept(self->work[i], i, cut) ? (double)self->mass[i] : 0.0;
        }
        cut = find_cut(self, cut, (quota_t){.count = 1, .mass = total * (double)p->top_p});
    }
    if (p->min_p > 0.0f) {
        float limit = logf(p->min_p); /* p >= min_p * p_max */
        if (limit > cut.z) {
            cut = (entry_t){.z = limit, .id = UINT32_MAX};
        }
    }
    return cut;
}

static double uniform_draw(const request_t *r)
{
    const uint32_t key[2] = {(uint32_t)r->sampling.seed, (uint32_t)(r->sampling.seed >> 32)};
    const uint32_t counter[4] = {request_n_output(r), r->choice, 0, 0};
    uint32_t out[4];
    lk_philox4x32(key, counter, out);
    uint64_t bits = (uint64_t)out[1] << 32 | out[0];
    return (double)(bits >> 11) * 0x1.0p-53;
}

/* Draws among the kept ones and gives all others z = -inf. *total: mass of the kept. */
static uint32_t draw_token(sampler_t *self, const request_t *r, entry_t cut, double *total)
{
    uint32_t m = 0;
    double sum = 0.0;
    for (uint32_t i = 0; i < self->vocab_size; i++) {
        if (kept(self->work[i], i, cut)) {
            self->entries[m++].id = i;
            sum += (double)self->mass[i];
        }
    }
    CHECK(m > 0);
    double target = uniform_draw(r) * sum, reached = 0.0;
    uint32_t token = self->entries[m - 1].id;
    for (uint32_t i = 0; i < m; i++) {
        reached += (double)self->mass[self->entries[i].id];
        if (reached > target) {
            token = self->entries[i].id;
            break;
        }
    }
    *total = sum;
    return token;
}

/* log-softmax of values x, with maximum max and sum of exp(x - max): the drawn token's and the
 * k largest. */
static void fill_logprobs(sampler_t *self, const float *x, float max, double sum, int32_t k,
                          sample_t *out)
{
    double base = (double)max + log(sum);
    out->logprob = (float)((double)x[out->token] - base);
    out->rank = 1 + row_count_above(x, self->vocab_size, x[out->token]);
    out->n_top = 0;
    if (k > 0) {
        out->n_top = row_top(x, self->vocab_size, (uint32_t)k, self->entries);
        for (uint32_t i = 0; i < out->n_top; i++) {
            out->top_ids[i] = self->entries[i].id;
            out->top_logprobs[i] = (float)((double)self->entries[i].z - base);
        }
    }
}

static uint32_t row_find(const float *x, uint32_t n, float value)
{
    for (uint32_t i = 0; i < n; i++) {
        if (x[i] == value) {
            return i;
        }
    }
    CHECK(false);
    return 0;
}

/* Puts penalties and bans into work; returns the row to choose from, and its maximum. */
static const float *adjust_row(sampler_t *self, const request_t *r, const float *logits,
                               const uint32_t *banned, size_t n_banned, float *max)
{
    bool penalties = has_penalties(&r->sampling);
    if (!penalties && n_banned == 0 && r->sampling.temperature == 0.0f) {
        return logits; /* greedy needs no copy */
    }
    memcpy(self->work, logits, self->vocab_size * sizeof *logits);
    if (penalties) {
        apply_penalties(self, r);
    }
    for (size_t i = 0; i < n_banned; i++) {
        if (banned[i] < self->vocab_size) {
            self->work[banned[i]] = -INFINITY;
        }
    }
    if (penalties || n_banned > 0) {
        bool bad;
        *max = row_max(self->work, self->vocab_size, &bad);
        CHECK(!bad);
    }
    return self->work;
}

lk_status_t sampler_sample(sampler_t *self, const request_t *r, const float *logits,
                           const uint32_t *banned, size_t n_banned, sample_t *out, lk_error_t *err)
{
    const sampling_params_t *p = &r->sampling;
    bool bad;
    float raw_max = row_max(logits, self->vocab_size, &bad);
    if (bad || raw_max == INFINITY) {
        return lk_error_set(err, LK_ERR_INTERNAL, "the logits of output token %u hold %s",
                            request_n_output(r), bad ? "a NaN" : "an infinity");
    }
    float max = raw_max;
    const float *row =
        raw_max == -INFINITY ? logits : adjust_row(self, r, logits, banned, n_banned, &max);
    if (max == INFINITY) {
        return lk_error_set(err, LK_ERR_INTERNAL, "penalties overflow at output token %u",
                            request_n_output(r));
    }
    if (max == -INFINITY) {
        return lk_error_set(err, LK_ERR_INTERNAL, "no token is left to choose from at output %u",
                            request_n_output(r));
    }
    bool want = p->logprobs >= 0, raw = !self->processed;
    if (p->temperature == 0.0f) {
        out->token = row_find(row, self->vocab_size, max);
        if (want && !raw) {
            fill_logprobs(self, row, max, row_exp_sum(row, self->vocab_size, max), p->logprobs,
                          out);
        }
    } else {
        scale_row(self, max, p->temperature);
        entry_t cut = apply_filters(self, p);
        double total;
        out->token = draw_token(self, r, cut, &total);
        if (want && !raw) {
            for (uint32_t i = 0; i < self->vocab_size; i++) {
                self->work[i] = kept(self->work[i], i, cut) ? self->work[i] : -INFINITY;
            }
            fill_logprobs(self, self->work, 0.0f, total, p->logprobs, out);
        }
    }
    if (want && raw) {
        fill_logprobs(self, logits, raw_max, row_exp_sum(logits, self->vocab_size, raw_max),
                      p->logprobs, out);
    }
    return LK_OK;
}

void sampler_logprob(sampler_t *self, const float *logits, uint32_t token, float *logprob,
                     uint32_t *rank)
{
    bool bad;
    float max = row_max(logits, self->vocab_size, &bad);
    CHECK(token < self->vocab_size && !bad);
    sample_t sample = {.token = token};
    fill_logprobs(self, logits, max, row_exp_sum(logits, self->vocab_size, max), 0, &sample);
    *logprob = sample.logprob;
    *rank = sample.rank;
}
