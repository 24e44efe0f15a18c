#include "engine_core/exec/cpu/product.h"

#include "base/check.h"

#include <string.h>

#define COLUMN_ALIGN 8  /* every tile's width divides it */
#define COLUMNS_MIN  32 /* a few microseconds of one row's work */
#define COLUMNS_MAX  256
#define UNITS        4 /* per worker and product, so that a late worker costs a quarter */
#define INPUT_BYTES  (160 * 1024) /* of x that one unit goes over; stays in a level 2 cache */
#define ROW_ALIGN    12           /* multiple of every tile's height */

/* How a product of m rows and n columns is cut. */
typedef struct {
    uint32_t rows, cols;    /* of one unit */
    uint32_t across, units; /* units per row of units, in all */
} cut_t;

static cut_t cut(const compute_t *c, uint32_t workers, uint32_t m, uint32_t n, uint32_t k)
{
    cut_t out;
    out.cols = (n / (workers * UNITS) + COLUMN_ALIGN - 1) / COLUMN_ALIGN * COLUMN_ALIGN;
    out.cols = LK_MIN(LK_MAX(out.cols, COLUMNS_MIN), COLUMNS_MAX);
    uint32_t rows = (uint32_t)(INPUT_BYTES / (k * compute_bytes(c))) / ROW_ALIGN * ROW_ALIGN;
    out.rows = LK_MAX(rows, ROW_ALIGN);
    if (m <= out.rows + out.rows / 2) {
        out.rows = LK_MAX(m, 1);
    }
    out.across = (n + out.cols - 1) / out.cols;
    out.units = out.across * ((m + out.rows - 1) / out.rows);
    return out;
}

/* The part of unit u: rows [m0, m1), columns [n0, n1). */
typedef struct {
    uint32_t m0, m1, n0, n1;
} part_t;

static part_t part(const cut_t *c, uint32_t u, uint32_t m, uint32_t n)
{
    part_t p = {.m0 = u / c->across * c->rows, .n0 = u % c->across * c->cols};
    p.m1 = LK_MIN(p.m0 + c->rows, m);
    p.n1 = LK_MIN(p.n0 + c->cols, n);
    return p;
}

static gemm_fn gemm_of(const compute_t *c)
{
    return c->bf16 ? c->kernels->gemm_bf16 : c->kernels->gemm_f32;
}

void product_run(const compute_t *c, worker_t *w, const gemm_t *g, uint32_t n)
{
    gemm_fn gemm = gemm_of(c);
    uint32_t unit = team_take(w), first = 0;
    for (uint32_t i = 0; i < n; i++) {
        const cut_t ct = cut(c, w->n, g[i].m, g[i].n, g[i].k);
        for (; unit < first + ct.units; unit = team_take(w)) {
            part_t p = part(&ct, unit - first, g[i].m, g[i].n);
            gemm(&g[i], p.m0, p.m1, p.n0, p.n1);
        }
        first += ct.units;
    }
}

void compute_input(const compute_t *c, const float *x, uint32_t n, void *y)
{
    if (c->bf16) {
        c->kernels->to_bf16(x, n, y);
    } else if (x != y) {
        memcpy(y, x, n * sizeof *x);
    }
}

static void gate_up_part(const compute_t *c, const mlp_t *m, const mlp_segment_t *s, part_t p)
{
    const size_t esz = compute_bytes(c), inter = m->inter;
    gemm_t g = {
        .x = (const uint8_t *)m->x + s->row * m->ldx * esz,
        .ldx = m->ldx,
        .w = s->weights->gate,
        .y = m->gate + s->row * inter,
        .ldy = inter,
        .m = s->rows,
        .n = m->inter,
        .k = m->hidden,
    };
    gemm_fn gemm = gemm_of(c);
    gemm(&g, p.m0, p.m1, p.n0, p.n1);
    g.w = s->weights->up;
    g.y = m->up + s->row * inter;
    gemm(&g, p.m0, p.m1, p.n0, p.n1);
    for (uint32_t r = p.m0; r < p.m1; r++) {
        size_t at = (s->row + r) * inter + p.n0;
        c->kernels->silu_mul(m->gate + at, m->up + at, p.n1 - p.n0, m->gate + at);
        compute_input(c, m->gate + at, p.n1 - p.n0, (uint8_t *)m->act + at * esz);
    }
}

static void down_part(const compute_t *c, const mlp_t *m, const mlp_segment_t *s, part_t p)
{
    const gemm_t g = {
        .x = (const uint8_t *)m->act + (size_t)s->row * m->inter * compute_bytes(c),
        .ldx = m->inter,
        .w = s->weights->down,
        .y = m->y + (size_t)s->row * m->hidden,
        .ldy = m->hidden,
        .m = s->rows,
        .n = m->hidden,
        .k = m->inter,
        .add = m->add,
    };
    gemm_of(c)(&g, p.m0, p.m1, p.n0, p.n1);
}

/* One phase over all segments of a product with n columns and depth k. */
static void each_part(const compute_t *c, worker_t *w, const mlp_t *m, uint32_t n, uint32_t k,
                      void (*fn)(const compute_t *, const mlp_t *, const mlp_segment_t *, part_t))
{
    uint32_t unit = team_take(w), first = 0;
    for (uint32_t i = 0; i < m->n_segments; i++) {
        const mlp_segment_t *s = &m->segments[i];
        const cut_t ct = cut(c, w->n, s->rows, n, k);
        for (; unit < first + ct.units; unit = team_take(w)) {
            fn(c, m, s, part(&ct, unit - first, s->rows, n));
        }
        first += ct.units;
    }
}

void mlp_run(const compute_t *c, worker_t *w, const mlp_t *m)
{
    each_part(c, w, m, m->inter, m->hidden, gate_up_part);
    team_barrier(w);
    each_part(c, w, m, m->hidden, m->inter, down_part);
}
