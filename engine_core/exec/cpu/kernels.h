/*
 * kernels.h: the arithmetic of a forward pass on one thread, as a table per instruction set.
 *
 * The invariance rule (decision 16): every output element is computed with one order of operations
 * that depends on the shapes k, head_dim and on the element's own position in its sequence, never
 * on the number of rows, on where a row stands among them, or on how work is cut into calls.
 * Results may differ between two tables, never within one. kernels_ref is the plain C version: the
 * fallback, and what the others are tested against.
 *
 * bf16 products round x to bf16 (nearest even) first; sums are float32.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_KERNELS_H
#define LK_ENGINE_CORE_EXEC_CPU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* y[m, n] = x[m, k] . w[n, k] + bias[n], or y += that. x and w are float or bf16 (uint16_t),
 * y and bias float32. */
typedef struct {
    const void *x;
    size_t ldx; /* elements between rows of x */
    const void *w;
    const float *bias; /* NULL: none */
    float *y;
    size_t ldy;
    uint32_t m, n, k;
    bool add;
} gemm_t;

/* Computes rows [m0, m1) of columns [n0, n1). */
typedef void (*gemm_fn)(const gemm_t *g, uint32_t m0, uint32_t m1, uint32_t n0, uint32_t n1);

#define ATTN_ROWS     16 /* query rows of one call */
#define KV_SLOT_ALIGN 16 /* slots per block are padded to a multiple of this */

/*
 * Attention of up to ATTN_ROWS query rows that share a sequence and a KV head.
 * A KV block of one head holds K as [head_dim][slots] and V as [slots][head_dim]: keys run along
 * vector lanes, so that scores need no horizontal sums. Position p is in slot p % block_size of
 * block blocks[p / block_size].
 */
typedef struct {
    const float *q[ATTN_ROWS]; /* [head_dim], already scaled by 1/sqrt(head_dim) */
    float *out[ATTN_ROWS];     /* [head_dim] */
    uint32_t len[ATTN_ROWS];   /* positions a row sees: its own position + 1 */
    uint32_t rows;
    const uint8_t *k, *v; /* of this layer and head, in block 0 */
    size_t block_stride;  /* bytes between blocks */
    const uint32_t *blocks;
    uint32_t block_size, slots, head_dim;
    float *scores; /* scratch [ATTN_ROWS][ld_scores], 64-byte aligned */
    size_t ld_scores;
} attn_t;

typedef struct {
    const char *name;
    gemm_fn gemm_f32, gemm_bf16;
    /* y = x / sqrt(mean(x^2) + eps) * w; y may be x */
    void (*rms_norm)(const float *x, const float *w, float eps, uint32_t n, float *y);
    /* y = gate * sigmoid(gate) * up; y may be either */
    void (*silu_mul)(const float *gate, const float *up, uint32_t n, float *y);
    void (*to_bf16)(const float *x, uint32_t n, uint16_t *y);
    void (*attn_f32)(const attn_t *a);
    void (*attn_bf16)(const attn_t *a);
} kernels_t;

extern const kernels_t kernels_ref;

/* The best table of this processor; the choice never changes within a process. */
const kernels_t *kernels_best(void);
/* Tables that run on this processor, kernels_ref first; NULL after the last. */
const kernels_t *kernels_at(size_t i);

#endif
