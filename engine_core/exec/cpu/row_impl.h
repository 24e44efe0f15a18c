/*
 * row_impl.h: kernels that work on one row, over an ISA file's vector vocabulary:
 *   VF, VL, v_zero, v_set1, v_load, v_store, v_loadn, v_storen (first n lanes; loads zero the rest)
 *   v_add, v_sub, v_mul, v_div, v_fma, v_max and v_min (the second operand if either is NaN),
 *   v_round (to nearest), v_pow2 (2^n, n integral in -126..127),
 *   v_zero_below(x, limit, v) (0 where x < limit, else v), v_sum, v_hmax (over all lanes, one
 * tree), v_to_bf16(v, p, n) (stores n rounded lanes)
 */

/* e^x for x <= 88; 0 below -87. Cephes' expf: argument reduction by ln 2, polynomial of degree 5.
 */
INLINE VF v_exp(VF x)
{
    VF y = v_max(v_set1(-88.0f), x);
    VF n = v_round(v_mul(y, v_set1(1.44269504088896341f)));
    VF r = v_fma(n, v_set1(-0.693359375f), y);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    VF p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(v_mul(p, r), r, v_add(r, v_set1(1.0f)));
    return v_zero_below(x, -87.0f, v_mul(p, v_pow2(n)));
}

static void rms_norm(const float *x, const float *w, float eps, uint32_t n, float *y)
{
    VF acc = v_zero();
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        VF v = v_load(x + i);
        acc = v_fma(v, v, acc);
    }
    if (i < n) {
        VF v = v_loadn(x + i, n - i);
        acc = v_fma(v, v, acc);
    }
    VF scale = v_set1(1.0f / __builtin_sqrtf(v_sum(acc) / (float)n + eps));
    for (i = 0; i < n; i += VL) {
        uint32_t c = n - i < VL ? n - i : VL;
        v_storen(y + i, v_mul(v_mul(v_loadn(x + i, c), scale), v_loadn(w + i, c)), c);
    }
}

static void silu_mul(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i += VL) {
        uint32_t c = n - i < VL ? n - i : VL;
        VF g = v_loadn(gate + i, c);
        /* beyond 87 sigmoid is 0 to float32's precision; the bound keeps 2^n in range */
        VF e = v_exp(v_min(v_set1(87.0f), v_sub(v_zero(), g)));
        VF s = v_div(g, v_add(v_set1(1.0f), e));
        v_storen(y + i, v_mul(s, v_loadn(up + i, c)), c);
    }
}

static void to_bf16(const float *x, uint32_t n, uint16_t *y)
{
    for (uint32_t i = 0; i < n; i += VL) {
        uint32_t c = n - i < VL ? n - i : VL;
        v_to_bf16(v_loadn(x + i, c), y + i, c);
    }
}

static void scale_row(float *x, float factor, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += VL) {
        uint32_t c = n - i < VL ? n - i : VL;
        v_storen(x + i, v_mul(v_loadn(x + i, c), v_set1(factor)), c);
    }
}

/* Scores of row r to exponentials, in place; returns their sum. What lies beyond the row's length,
 * up to n_blocks blocks, and the padding of each block become 0. */
static float softmax_row(const attn_t *a, uint32_t r, uint32_t n_blocks)
{
    float *p = a->scores + r * a->ld_scores;
    const uint32_t len = a->len[r];
    const uint32_t used = (len + a->block_size - 1) / a->block_size;
    for (uint32_t b = 0; b < used; b++) {
        uint32_t left = len - b * a->block_size;
        for (uint32_t s = left < a->block_size ? left : a->block_size; s < a->slots; s++) {
            p[(size_t)b * a->slots + s] = -__builtin_inff();
        }
    }
    const size_t n = (size_t)used * a->slots;
    VF top = v_set1(-__builtin_inff());
    for (size_t i = 0; i < n; i += VL) {
        top = v_max(top, v_load(p + i));
    }
    top = v_set1(v_hmax(top));
    VF sum = v_zero();
    for (size_t i = 0; i < n; i += VL) {
        VF e = v_exp(v_sub(v_load(p + i), top));
        v_store(p + i, e);
        sum = v_add(sum, e);
    }
    memset(p + n, 0, ((size_t)n_blocks * a->slots - n) * sizeof *p);
    return v_sum(sum);
}
