#include "engine_core/exec/logits_row.h"
#include "base/check.h"

#include <math.h>
#include <string.h>

#define LANES 16 /* independent accumulators, so that the compiler uses vector registers */

/* Written with the compiler's vectors because it doesn't vectorise exp_neg by itself. */
typedef float vec_t __attribute__((vector_size(16)));
typedef int32_t ivec_t __attribute__((vector_size(16)));
#define WIDTH 4

static inline vec_t load(const float *p)
{
    vec_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vec_t v)
{
    memcpy(p, &v, sizeof v);
}

/* The last n < WIDTH entries, filled up. */
static inline vec_t load_tail(const float *p, uint32_t n, float fill)
{
    vec_t v = {fill, fill, fill, fill};
    memcpy(&v, p, n * sizeof *p);
    return v;
}

static inline vec_t select_vec(ivec_t mask, vec_t a, vec_t b)
{
    return (vec_t)((mask & (ivec_t)a) | (~mask & (ivec_t)b));
}

/* exp(x) for x <= 0 within 2 ulp; own code, so that tokens do not depend on the C library. Range
 * reduction and polynomial: Cephes, expf. */
static inline vec_t exp_neg(vec_t x)
{
    const vec_t floor_vec = {LOGITS_ROW_FLOOR, LOGITS_ROW_FLOOR, LOGITS_ROW_FLOOR,
                             LOGITS_ROW_FLOOR};
    ivec_t inside = x >= floor_vec;
    vec_t c = select_vec(inside, x, floor_vec);
    vec_t rounded =
        c * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: integer in the mantissa */
    vec_t k = rounded - 12582912.0f;
    vec_t r = c - k * 0.693359375f + k * 2.12194440e-4f;
    vec_t p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec_t bits = (ivec_t)p + ((ivec_t)rounded << 23); /* the low 9 bits of `rounded` are k's */
    return (vec_t)(bits & inside);
}

float logits_row_max(const float *x, uint32_t n, bool *bad)
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

uint32_t logits_row_find(const float *x, uint32_t n, float value)
{
    uint32_t i = 0;
    while (i < n && x[i] != value) {
        i++;
    }
    CHECK(i < n);
    return i;
}

uint32_t logits_row_count_above(const float *x, uint32_t n, float limit)
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

double logits_row_exp_sum(const float *x, uint32_t n, float max)
{
    double total = 0.0;
    uint32_t i = 0;
    while (i + WIDTH <= n) {
        vec_t sum = {0}; /* float within a block, double over blocks */
        uint32_t end = LK_MIN(n, i + LOGITS_ROW_BLOCK);
        for (; i + WIDTH <= end; i += WIDTH) {
            sum += exp_neg(load(x + i) - max);
        }
        total += (double)sum[0] + (double)sum[1] + (double)sum[2] + (double)sum[3];
    }
    if (i < n) {
        vec_t e = exp_neg(load_tail(x + i, n - i, -INFINITY) - max);
        total += (double)e[0] + (double)e[1] + (double)e[2] + (double)e[3];
    }
    return total;
}

void logits_row_soften(float *z, float *mass, uint32_t n, float max, float temperature)
{
    uint32_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec_t v = (load(z + i) - max) / temperature;
        store(z + i, v);
        store(mass + i, exp_neg(v));
    }
    if (i < n) {
        vec_t v = (load_tail(z + i, n - i, -INFINITY) - max) / temperature;
        vec_t e = exp_neg(v);
        memcpy(z + i, &v, (n - i) * sizeof *z);
        memcpy(mass + i, &e, (n - i) * sizeof *mass);
    }
}

void logits_row_cut(const float *z, float *mass, uint32_t n, row_entry_t last)
{
    uint32_t i = 0, equal_end = last.id < n ? last.id + 1 : n;
    vec_t limit = {last.value, last.value, last.value, last.value};
    for (; i + WIDTH <= equal_end; i += WIDTH) {
        store(mass + i, (vec_t)((load(z + i) >= limit) & (ivec_t)load(mass + i)));
    }
    for (; i < equal_end; i++) {
        mass[i] = z[i] >= last.value ? mass[i] : 0.0f;
    }
    for (; i + WIDTH <= n; i += WIDTH) {
        store(mass + i, (vec_t)((load(z + i) > limit) & (ivec_t)load(mass + i)));
    }
    for (; i < n; i++) {
        mass[i] = z[i] > last.value ? mass[i] : 0.0f;
    }
}

double logits_row_sum(const float *mass, uint32_t n, double *partial)
{
    double total = 0.0;
    for (uint32_t start = 0; start < n; start += LOGITS_ROW_BLOCK) {
        double lanes[LANES] = {0.0}, sum = 0.0;
        uint32_t i = start, end = LK_MIN(n, start + LOGITS_ROW_BLOCK);
        for (; i + LANES <= end; i += LANES) {
            for (int k = 0; k < LANES; k++) {
                lanes[k] += (double)mass[i + k];
            }
        }
        for (; i < end; i++) {
            sum += (double)mass[i];
        }
        for (int k = 0; k < LANES; k++) {
            sum += lanes[k];
        }
        partial[start / LOGITS_ROW_BLOCK] = sum;
        total += sum;
    }
    return total;
}

/* Heap with the last in order on top. */
static void sift_down(row_entry_t *heap, uint32_t n, uint32_t i)
{
    for (;;) {
        uint32_t last = i, child = 2 * i + 1;
        if (child < n && row_entry_before(heap[last], heap[child])) {
            last = child;
        }
        if (child + 1 < n && row_entry_before(heap[last], heap[child + 1])) {
            last = child + 1;
        }
        if (last == i) {
            return;
        }
        row_entry_t t = heap[i];
        heap[i] = heap[last];
        heap[last] = t;
        i = last;
    }
}

uint32_t logits_row_top(const float *x, uint32_t n, uint32_t k, row_entry_t *out)
{
    uint32_t have = 0, i = 0;
    for (; i < n && have < k; i++) {
        if (x[i] > -INFINITY) {
            out[have++] = (row_entry_t){.value = x[i], .id = i};
        }
    }
    for (uint32_t h = have / 2; h-- > 0;) {
        sift_down(out, have, h);
    }
    for (; i < n && have > 0; i++) {
        if (x[i] > out[0].value) { /* an equal one with a higher id comes after */
            out[0] = (row_entry_t){.value = x[i], .id = i};
            sift_down(out, have, 0);
        }
    }
    for (uint32_t end = have; end > 1; end--) {
        row_entry_t t = out[0];
        out[0] = out[end - 1];
        out[end - 1] = t;
        sift_down(out, end - 1, 0);
    }
    return have;
}

/* Grows as the value falls. Both zeros are one value. */
static inline uint32_t falling_key(float value)
{
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

/* Radix sort by digits of 11 bits, the lowest first; stable, so that equal ones stay in order of
 * their ids. */
uint32_t logits_row_sort(const float *x, uint32_t n, row_entry_t *out, row_entry_t *scratch)
{
    enum { DIGIT = 11, PASSES = 3 };
    uint32_t counts[PASSES][1u << DIGIT] = {{0}}, have = 0;
    const uint32_t mask = (1u << DIGIT) - 1;
    row_entry_t *from = scratch, *to = out;
    for (uint32_t i = 0; i < n; i++) {
        if (x[i] > -INFINITY) {
            uint32_t key = falling_key(x[i]);
            from[have++] = (row_entry_t){.value = x[i], .id = i};
            for (int p = 0; p < PASSES; p++) {
                counts[p][key >> (p * DIGIT) & mask]++;
            }
        }
    }
    for (int p = 0; p < PASSES; p++) {
        uint32_t at = 0;
        for (uint32_t d = 0; d <= mask; d++) {
            uint32_t count = counts[p][d];
            counts[p][d] = at;
            at += count;
        }
        for (uint32_t i = 0; i < have; i++) {
            to[counts[p][falling_key(from[i].value) >> (p * DIGIT) & mask]++] = from[i];
        }
        row_entry_t *t = from;
        from = to;
        to = t;
    }
    return have; /* an odd number of passes ends in out */
}
