/*
 * gemm_impl.h: body of one matrix product, included once per element type by an ISA file, which
 * defines
 *   G(name)               name with the type's suffix
 *   G_ELT, G_VEC, G_STEP  element, vector of G_STEP elements
 *   G_LOAD(p), G_LOADN(p, n)  whole vector; the first n elements and zeros
 *   G_MAC(acc, x, w)      acc + x . w, lane by lane
 *   G_MR                  rows of the largest tile (2 to 4); TILE_NR(1) >= TILE_NR(m) for others
 * and v_reduce, TILE_NR. Deliberately without an include guard.
 *
 * Each (row, column) has one vector accumulator that runs over k in order and one reduction tree,
 * so neither the tile's size nor its place matter. All of k is done at once: a tile of weights is
 * used for every row of the block while it is in the cache. The first rows of a strip fetch the
 * weights of the strip after next: rows are short, and the hardware's own streams stop at each
 * row's end.
 */

INLINE void G(tile)(const gemm_t *g, uint32_t m, uint32_t n, uint32_t n1, const int mr,
                    const bool fetch)
{
    const int nr = TILE_NR(mr);
    const G_ELT *x = (const G_ELT *)g->x + m * g->ldx;
    const size_t k = g->k;
    /* Columns past the end repeat the last one and are not stored. */
    const G_ELT *w[8];
    UNROLL
    for (int j = 0; j < nr; j++) {
        uint32_t col = n + (uint32_t)j < n1 ? n + (uint32_t)j : n1 - 1;
        w[j] = (const G_ELT *)g->w + col * k;
    }
    VF acc[4][8];
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int j = 0; j < nr; j++) {
            acc[i][j] = v_zero();
        }
    }
    size_t p = 0;
    for (; p + G_STEP <= k; p += G_STEP) {
        G_VEC xv[4];
        UNROLL
        for (int i = 0; i < mr; i++) {
            xv[i] = G_LOAD(x + i * g->ldx + p);
        }
        UNROLL
        for (int j = 0; j < nr; j++) {
            G_VEC wv = G_LOAD(w[j] + p);
            if (fetch) {
                __builtin_prefetch(w[j] + p + 2 * nr * k, 0, 2);
            }
            UNROLL
            for (int i = 0; i < mr; i++) {
                acc[i][j] = G_MAC(acc[i][j], xv[i], wv);
            }
        }
    }
    if (p < k) {
        G_VEC xv[4];
        UNROLL
        for (int i = 0; i < mr; i++) {
            xv[i] = G_LOADN(x + i * g->ldx + p, k - p);
        }
        UNROLL
        for (int j = 0; j < nr; j++) {
            G_VEC wv = G_LOADN(w[j] + p, k - p);
            UNROLL
            for (int i = 0; i < mr; i++) {
                acc[i][j] = G_MAC(acc[i][j], xv[i], wv);
            }
        }
    }
    const int cols = (int)(n1 - n) < nr ? (int)(n1 - n) : nr;
    UNROLL
    for (int i = 0; i < mr; i++) {
        float dot[8];
        v_reduce(acc[i], nr, dot);
        float *y = g->y + (m + (uint32_t)i) * g->ldy + n;
        for (int j = 0; j < cols; j++) {
            float d = g->bias != NULL ? dot[j] + g->bias[n + (uint32_t)j] : dot[j];
            y[j] = g->add ? y[j] + d : d;
        }
    }
}

/* Rows [m, m1), fewer than 4 of them. */
INLINE void G(strip)(const gemm_t *g, uint32_t m, uint32_t m1, uint32_t n, uint32_t n1,
                     const bool fetch)
{
    switch (m1 - m) {
    case 1:
        G(tile)(g, m, n, n1, 1, fetch);
        break;
    case 2:
        G(tile)(g, m, n, n1, 2, fetch);
        break;
    case 3:
        G(tile)(g, m, n, n1, 3, fetch);
        break;
    default:
        break;
    }
}

static void G(gemm)(const gemm_t *g, uint32_t m0, uint32_t m1, uint32_t n0, uint32_t n1)
{
    const uint32_t rows = m1 - m0, whole = m0 + rows / G_MR * G_MR;
    if (rows < G_MR) {
        const uint32_t nr = rows == 1 ? TILE_NR(1) : TILE_NR(2);
        for (uint32_t n = n0; n < n1; n += nr) {
            G(strip)(g, m0, m1, n, n1, true);
        }
        return;
    }
    for (uint32_t n = n0; n < n1; n += TILE_NR(G_MR)) {
        const uint32_t end = n + TILE_NR(G_MR) < n1 ? n + TILE_NR(G_MR) : n1;
        G(tile)(g, m0, n, end, G_MR, true);
        for (uint32_t m = m0 + G_MR; m < whole; m += G_MR) {
            G(tile)(g, m, n, end, G_MR, false);
        }
        G(strip)(g, whole, m1, n, end, false);
    }
}
