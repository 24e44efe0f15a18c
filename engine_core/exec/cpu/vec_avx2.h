/* vec_avx2.h: the vector vocabulary of row_impl.h, attn_impl.h and gemm_impl.h in AVX2 and FMA. */
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef __m256 VF;
#define VL 8

INLINE __m256i first(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n > 8 ? 8 : n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE VF v_zero(void)
{
    return _mm256_setzero_ps();
}

INLINE VF v_set1(float x)
{
    return _mm256_set1_ps(x);
}

INLINE VF v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

INLINE VF v_loadn(const float *p, size_t n)
{
    return _mm256_maskload_ps(p, first(n));
}

INLINE void v_store(float *p, VF v)
{
    _mm256_storeu_ps(p, v);
}

INLINE void v_storen(float *p, VF v, size_t n)
{
    _mm256_maskstore_ps(p, first(n), v);
}

INLINE VF v_add(VF a, VF b)
{
    return _mm256_add_ps(a, b);
}

INLINE VF v_sub(VF a, VF b)
{
    return _mm256_sub_ps(a, b);
}

INLINE VF v_mul(VF a, VF b)
{
    return _mm256_mul_ps(a, b);
}

INLINE VF v_div(VF a, VF b)
{
    return _mm256_div_ps(a, b);
}

INLINE VF v_max(VF a, VF b)
{
    return _mm256_max_ps(a, b);
}

INLINE VF v_min(VF a, VF b)
{
    return _mm256_min_ps(a, b);
}

INLINE VF v_fma(VF a, VF b, VF c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE VF v_round(VF a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE VF v_pow2(VF n)
{
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

INLINE VF v_zero_below(VF x, float limit, VF v)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ), v);
}

INLINE VF v_load_bf16(const uint16_t *p)
{
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE VF v_loadn_bf16(const uint16_t *p, size_t n)
{
    uint16_t part[8] = {0};
    memcpy(part, p, n * sizeof *p);
    return v_load_bf16(part);
}

INLINE void v_to_bf16(VF v, uint16_t *p, size_t n)
{
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i r = _mm256_srli_epi32(_mm256_blendv_epi8(up, nan, is_nan), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    if (n == 8) {
        _mm_storeu_si128((__m128i *)p, packed);
    } else {
        uint16_t part[8];
        _mm_storeu_si128((__m128i *)part, packed);
        memcpy(p, part, n * sizeof *p);
    }
}

/* Lane sums of four vectors, all by the same tree: (0 + 2) + (1 + 3) in each half, then halves. */
INLINE void v_sum4(const VF *a, float *out)
{
    VF s = v_add(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    VF t = v_add(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    __m256d sd = _mm256_castps_pd(s), td = _mm256_castps_pd(t);
    VF q = v_add(_mm256_castpd_ps(_mm256_unpacklo_pd(sd, td)),
                 _mm256_castpd_ps(_mm256_unpackhi_pd(sd, td)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
}

/* Sixteen registers: a tile holds at most twelve sums. */
#define TILE_NR(mr) ((mr) == 1 ? 8 : 4)

INLINE void v_reduce(const VF *acc, int nr, float *out)
{
    for (int j = 0; j < nr; j += 4) {
        v_sum4(acc + j, out + j);
    }
}

INLINE float v_sum(VF v)
{
    VF a[4] = {v, v, v, v};
    float out[4];
    v_sum4(a, out);
    return out[0];
}

INLINE float v_hmax(VF v)
{
    float lane[VL], top;
    v_store(lane, v);
    top = lane[0];
    for (int i = 1; i < VL; i++) {
        top = lane[i] > top ? lane[i] : top;
    }
    return top;
}
