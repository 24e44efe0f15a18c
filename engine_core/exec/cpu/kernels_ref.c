/*
 * kernels_ref.c: the kernels as one would read them aloud. Sixteen partial sums per dot product
 * let the compiler use whatever vectors the target has without changing the order.
 */
#include "engine_core/exec/cpu/kernels.h"

#include <math.h>
#include <string.h>

#define LANES 16

static inline float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static float sum_lanes(const float acc[LANES])
{
    float s[LANES];
    memcpy(s, acc, sizeof s);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) {
            s[i] += s[i + width];
        }
    }
    return s[0];
}

static float dot_f32(const float *x, const float *w, uint32_t k)
{
    float acc[LANES] = {0};
    uint32_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            acc[l] += x[i + l] * w[i + l];
        }
    }
    for (int l = 0; i + l < k; l++) {
        acc[l] += x[i + l] * w[i + l];
    }
    return sum_lanes(acc);
}

static float dot_bf16(const uint16_t *x, const uint16_t *w, uint32_t k)
{
    float acc[LANES] = {0};
    uint32_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            acc[l] += from_bf16(x[i + l]) * from_bf16(w[i + l]);
        }
    }
    for (int l = 0; i + l < k; l++) {
        acc[l] += from_bf16(x[i + l]) * from_bf16(w[i + l]);
    }
    return sum_lanes(acc);
}

static void put(const gemm_t *g, uint32_t m, uint32_t n, float dot)
{
    float *y = g->y + m * g->ldy + n;
    if (g->bias != NULL) {
        dot += g->bias[n];
    }
    *y = g->add ? *y + dot : dot;
}

static void gemm_f32(const gemm_t *g, uint32_t m0, uint32_t m1, uint32_t n0, uint32_t n1)
{
    for (uint32_t n = n0; n < n1; n++) {
        for (uint32_t m = m0; m < m1; m++) {
            put(g, m, n,
                dot_f32((const float *)g->x + m * g->ldx, (const float *)g->w + (size_t)n * g->k,
                        g->k));
        }
    }
}

static void gemm_bf16(const gemm_t *g, uint32_t m0, uint32_t m1, uint32_t n0, uint32_t n1)
{
    for (uint32_t n = n0; n < n1; n++) {
        for (uint32_t m = m0; m < m1; m++) {
            put(g, m, n,
                dot_bf16((const uint16_t *)g->x + m * g->ldx,
                         (const uint16_t *)g->w + (size_t)n * g->k, g->k));
        }
    }
}

static void rms_norm(const float *x, const float *w, float eps, uint32_t n, float *y)
{
    float scale = 1.0f / sqrtf(dot_f32(x, x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) {
        y[i] = x[i] * scale * w[i];
    }
}

static void silu_mul(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++) {
        y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

static void to_bf16(const float *x, uint32_t n, uint16_t *y)
{
    for (uint32_t i = 0; i < n; i++) {
        y[i] = round_bf16(x[i]);
    }
}

/* Element i of K or V. */
static inline float kv_at(const uint8_t *base, size_t i, bool bf16)
{
    return bf16 ? from_bf16(((const uint16_t *)base)[i]) : ((const float *)base)[i];
}

static void attn_row(const attn_t *a, uint32_t row, bool bf16)
{
    const uint32_t d_n = a->head_dim, len = a->len[row];
    float *p = a->scores, *out = a->out[row];
    float top = -INFINITY, sum = 0;
    for (uint32_t pos = 0; pos < len; pos++) {
        const uint8_t *k = a->k + a->blocks[pos / a->block_size] * a->block_stride;
        uint32_t slot = pos % a->block_size;
        float s = 0;
        for (uint32_t d = 0; d < d_n; d++) {
            s += a->q[row][d] * kv_at(k, (size_t)d * a->slots + slot, bf16);
        }
        p[pos] = s;
        top = fmaxf(top, s);
    }
    memset(out, 0, d_n * sizeof *out);
    for (uint32_t pos = 0; pos < len; pos++) {
        const uint8_t *v = a->v + a->blocks[pos / a->block_size] * a->block_stride;
        uint32_t slot = pos % a->block_size;
        float e = expf(p[pos] - top);
        sum += e;
        for (uint32_t d = 0; d < d_n; d++) {
            out[d] += e * kv_at(v, (size_t)slot * d_n + d, bf16);
        }
    }
    for (uint32_t d = 0; d < d_n; d++) {
        out[d] /= sum;
    }
}

static void attn_f32(const attn_t *a)
{
    for (uint32_t r = 0; r < a->rows; r++) {
        attn_row(a, r, false);
    }
}

static void attn_bf16(const attn_t *a)
{
    for (uint32_t r = 0; r < a->rows; r++) {
        attn_row(a, r, true);
    }
}

const kernels_t kernels_ref = {
    .name = "plain",
    .gemm_f32 = gemm_f32,
    .gemm_bf16 = gemm_bf16,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_bf16 = to_bf16,
    .attn_f32 = attn_f32,
    .attn_bf16 = attn_bf16,
};
