/* vec_avx512.h: the vector vocabulary of row_impl.h, attn_impl.h and gemm_impl.h in AVX-512. */
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef __m512 VF;
#define VL 16

INLINE __mmask16 first(size_t n)
{
    return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1);
}

INLINE VF v_zero(void)
{
    return _mm512_setzero_ps();
}

INLINE VF v_set1(float x)
{
    return _mm512_set1_ps(x);
}

INLINE VF v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

INLINE VF v_loadn(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps(first(n), p);
}

INLINE void v_store(float *p, VF v)
{
    _mm512_storeu_ps(p, v);
}

INLINE void v_storen(float *p, VF v, size_t n)
{
    _mm512_mask_storeu_ps(p, first(n), v);
}

INLINE VF v_add(VF a, VF b)
{
    return _mm512_add_ps(a, b);
}

INLINE VF v_sub(VF a, VF b)
{
    return _mm512_sub_ps(a, b);
}

INLINE VF v_mul(VF a, VF b)
{
    return _mm512_mul_ps(a, b);
}

INLINE VF v_div(VF a, VF b)
{
    return _mm512_div_ps(a, b);
}

INLINE VF v_max(VF a, VF b)
{
    return _mm512_max_ps(a, b);
}

INLINE VF v_min(VF a, VF b)
{
    return _mm512_min_ps(a, b);
}

INLINE VF v_fma(VF a, VF b, VF c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE VF v_round(VF a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE VF v_pow2(VF n)
{
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}

INLINE VF v_zero_below(VF x, float limit, VF v)
{
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(v, below, _mm512_setzero_ps());
}

INLINE VF v_bf16(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE VF v_load_bf16(const uint16_t *p)
{
    return v_bf16(_mm256_loadu_si256((const __m256i *)p));
}

INLINE VF v_loadn_bf16(const uint16_t *p, size_t n)
{
    return v_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}

INLINE void v_to_bf16(VF v, uint16_t *p, size_t n)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __m512i r = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}

/*
 * Lane sums of eight vectors into out[0..7], all by the same tree: within each quarter of four
 * lanes (0 + 2) + (1 + 3), then quarters likewise.
 */
INLINE void v_sum8(const VF *a, float *out)
{
    __m512d h[2];
    for (int i = 0; i < 2; i++, a += 4) {
        VF s = v_add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        VF t = v_add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        __m512d sd = _mm512_castps_pd(s), td = _mm512_castps_pd(t);
        h[i] = _mm512_castps_pd(v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(sd, td)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(sd, td))));
    }
    VF u = _mm512_castpd_ps(h[0]), v = _mm512_castpd_ps(h[1]);
    VF q = v_add(_mm512_shuffle_f32x4(u, v, 0x44), _mm512_shuffle_f32x4(u, v, 0xee));
    q = v_add(_mm512_shuffle_f32x4(q, q, 0x88), _mm512_shuffle_f32x4(q, q, 0xdd));
    _mm256_storeu_ps(out, _mm512_castps512_ps256(q));
}

#define TILE_NR(mr) 8

INLINE void v_reduce(const VF *acc, int nr, float *out)
{
    v_sum8(acc, out);
}

INLINE float v_sum(VF v)
{
    return _mm512_reduce_add_ps(v);
}

INLINE float v_hmax(VF v)
{
    return _mm512_reduce_max_ps(v);
}
