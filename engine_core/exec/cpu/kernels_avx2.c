/* kernels_avx2.c: AVX2 and FMA (Haswell and later, Zen). */
#include "engine_core/exec/cpu/kernels_isa.h"

#if defined(__x86_64__)
#include "engine_core/exec/cpu/vec_avx2.h"

/* Sixteen bf16: even ones in the upper halves after a shift, odd ones as they stand. */
typedef __m256i BX;
#define B_STEP 16

INLINE BX b_load(const uint16_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

INLINE BX b_loadn(const uint16_t *p, size_t n)
{
    uint16_t part[B_STEP] = {0};
    memcpy(part, p, n * sizeof *p);
    return b_load(part);
}

INLINE VF b_even(BX x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE VF b_odd(BX x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}

INLINE VF b_mac(VF acc, BX x, BX w)
{
    return v_fma(b_odd(x), b_odd(w), v_fma(b_even(x), b_even(w), acc));
}

#define F_MR         3
#define B_MR         2
#define A_DV         2
#define KERNELS      kernels_avx2
#define KERNELS_NAME "avx2"
#include "engine_core/exec/cpu/isa_impl.h"
#endif
