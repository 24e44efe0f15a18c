/*
 * product.h: matrix products and gated MLPs shared out among a team's workers. Work is cut along
 * columns first, and along rows when the rows' inputs would not stay in a core's cache; neither cut
 * changes a result.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_PRODUCT_H
#define LK_ENGINE_CORE_EXEC_CPU_PRODUCT_H

#include "engine_core/exec/cpu/cpu_model.h"
#include "engine_core/exec/cpu/kernels.h"
#include "engine_core/exec/cpu/team.h"

/* What every part of a step needs: kernels and the dtype of weights, KV and products' inputs. */
typedef struct {
    const kernels_t *kernels;
    bool bf16;
} compute_t;

/* One phase: n products that have no order among themselves. No barrier at its end. */
void product_run(const compute_t *c, worker_t *w, const gemm_t *g, uint32_t n);

/* Rows [row, row + rows) go through one MLP: the whole batch in a dense layer, an expert's tokens
 * in a sparse one. */
typedef struct {
    const mlp_weights_t *weights;
    uint32_t row, rows;
} mlp_segment_t;

typedef struct {
    const mlp_segment_t *segments;
    uint32_t n_segments;
    uint32_t hidden, inter;
    const void *x; /* [rows, ldx], dtype */
    size_t ldx;
    float *gate, *up; /* scratch [rows, inter] */
    void *act;        /* scratch [rows, inter], dtype */
    float *y;         /* [rows, hidden]; += if add */
    bool add;
} mlp_t;

/* Two phases with a barrier between; none at the end. */
void mlp_run(const compute_t *c, worker_t *w, const mlp_t *m);

/* Writes a float32 row as input of products: rounds to bf16 or copies. */
void compute_input(const compute_t *c, const float *x, uint32_t n, void *y);
static inline size_t compute_bytes(const compute_t *c)
{
    return c->bf16 ? sizeof(uint16_t) : sizeof(float);
}

#endif
