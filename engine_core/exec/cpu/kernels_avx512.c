/* kernels_avx512.c: AVX-512 without bf16 instructions (Skylake-X to Ice Lake). */
#include "engine_core/exec/cpu/kernels_isa.h"

#if defined(__x86_64__)
#include "engine_core/exec/cpu/vec_avx512.h"

/* Thirty-two bf16: even ones in the upper halves after a shift, odd ones as they stand. */
typedef __m512i BX;
#define B_STEP 32

INLINE BX b_load(const uint16_t *p)
{
    return _mm512_loadu_si512(p);
}

INLINE BX b_loadn(const uint16_t *p, size_t n)
{
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}

INLINE VF b_even(BX x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

INLINE VF b_odd(BX x)
{
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE VF b_mac(VF acc, BX x, BX w)
{
    return v_fma(b_odd(x), b_odd(w), v_fma(b_even(x), b_even(w), acc));
}

#define F_MR         3
#define B_MR         2
#define A_DV         4
#define KERNELS      kernels_avx512
#define KERNELS_NAME "avx512"
#include "engine_core/exec/cpu/isa_impl.h"
#endif
