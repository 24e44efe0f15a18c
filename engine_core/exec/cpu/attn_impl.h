/*
 * attn_impl.h: body of attention, included once per KV type by an ISA file, which defines
 *   A(name), A_ELT              name with the type's suffix, element of KV
 *   A_LOAD(p), A_LOADN(p, n)    VL elements as floats; the first n and zeros
 *   A_DV                        vectors of head_dim per pass over V
 * and the v_ vocabulary. Without an include guard.
 *
 * Order per row: a score is one running sum over head_dim; the exponentials are summed by lane in
 * order of position, then by one tree; an output element is one running sum over positions. Slots
 * beyond a row's length count as probability zero, which changes no sum.
 */

/* Scores of `rows` rows against the VL keys at k. */
INLINE void A(score)(const attn_t *a, uint32_t row, const A_ELT *k, float *scores, const int rows)
{
    const float *q[8];
    VF acc[8];
    UNROLL
    for (int r = 0; r < rows; r++) {
        q[r] = a->q[row + (uint32_t)r];
        acc[r] = v_zero();
    }
    for (uint32_t d = 0; d < a->head_dim; d++, k += a->slots) {
        VF kv = A_LOAD(k);
        UNROLL
        for (int r = 0; r < rows; r++) {
            acc[r] = v_fma(v_set1(q[r][d]), kv, acc[r]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        v_store(scores + (size_t)r * a->ld_scores, acc[r]);
    }
}

static void A(scores)(const attn_t *a, uint32_t row, uint32_t rows, uint32_t n_blocks)
{
    float *out = a->scores + row * a->ld_scores;
    for (uint32_t b = 0; b < n_blocks; b++) {
        const A_ELT *k = (const A_ELT *)(a->k + a->blocks[b] * a->block_stride);
        for (uint32_t s = 0; s < a->slots; s += VL) {
            float *to = out + (size_t)b * a->slots + s;
            switch (rows) {
            case 1:
                A(score)(a, row, k + s, to, 1);
                break;
            case 2:
                A(score)(a, row, k + s, to, 2);
                break;
            case 3:
                A(score)(a, row, k + s, to, 3);
                break;
            case 4:
                A(score)(a, row, k + s, to, 4);
                break;
            case 5:
                A(score)(a, row, k + s, to, 5);
                break;
            case 6:
                A(score)(a, row, k + s, to, 6);
                break;
            case 7:
                A(score)(a, row, k + s, to, 7);
                break;
            default:
                A(score)(a, row, k + s, to, 8);
                break;
            }
        }
    }
}

/* out[row..row+rows) of dimensions [d, d + dv * VL) += p . V; `tail` counts the valid dimensions of
 * the last vector, or is VL. */
INLINE void A(values)(const attn_t *a, uint32_t row, uint32_t len, uint32_t d, uint32_t tail,
                      const int rows, const int dv)
{
    const float *p = a->scores + row * a->ld_scores;
    VF acc[4][4];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < dv; i++) {
            acc[r][i] = v_zero();
        }
    }
    for (uint32_t b = 0, pos = 0; pos < len; b++, p += a->slots) {
        const A_ELT *v = (const A_ELT *)(a->v + a->blocks[b] * a->block_stride) + d;
        uint32_t n = len - pos < a->block_size ? len - pos : a->block_size;
        for (uint32_t s = 0; s < n; s++, v += a->head_dim) {
            VF vv[4];
            UNROLL
            for (int i = 0; i < dv; i++) {
                vv[i] = i < dv - 1 || tail == VL ? A_LOAD(v + i * VL) : A_LOADN(v + i * VL, tail);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                VF pr = v_set1(p[(size_t)r * a->ld_scores + s]);
                UNROLL
                for (int i = 0; i < dv; i++) {
                    acc[r][i] = v_fma(pr, vv[i], acc[r][i]);
                }
            }
        }
        pos += n;
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *out = a->out[row + (uint32_t)r] + d;
        UNROLL
        for (int i = 0; i < dv; i++) {
            v_storen(out + i * VL, acc[r][i], i < dv - 1 ? VL : tail);
        }
    }
}

INLINE void A(values_rows)(const attn_t *a, uint32_t row, uint32_t len, const int rows)
{
    uint32_t d = 0;
    for (; d + A_DV * VL <= a->head_dim; d += A_DV * VL) {
        A(values)(a, row, len, d, VL, rows, A_DV);
    }
    for (; d < a->head_dim; d += VL) {
        A(values)(a, row, len, d, a->head_dim - d < VL ? a->head_dim - d : VL, rows, 1);
    }
}

static void A(attn)(const attn_t *a)
{
    uint32_t longest = 0;
    for (uint32_t r = 0; r < a->rows; r++) {
        longest = a->len[r] > longest ? a->len[r] : longest;
    }
    const uint32_t n_blocks = (longest + a->block_size - 1) / a->block_size;
    for (uint32_t r = 0; r < a->rows; r += 8) {
        A(scores)(a, r, a->rows - r < 8 ? a->rows - r : 8, n_blocks);
    }
    float inverse[ATTN_ROWS];
    for (uint32_t r = 0; r < a->rows; r++) {
        inverse[r] = 1.0f / softmax_row(a, r, n_blocks);
    }
    for (uint32_t r = 0; r < a->rows; r += 4) {
        switch (a->rows - r) {
        case 1:
            A(values_rows)(a, r, longest, 1);
            break;
        case 2:
            A(values_rows)(a, r, longest, 2);
            break;
        case 3:
            A(values_rows)(a, r, longest, 3);
            break;
        default:
            A(values_rows)(a, r, longest, 4);
            break;
        }
    }
    for (uint32_t r = 0; r < a->rows; r++) {
        scale_row(a->out[r], inverse[r], a->head_dim);
    }
}
