/* kernels_avx512bf16.c: AVX-512 with bf16 dot products (Cooper Lake, Sapphire Rapids, Zen 4). */
#include "engine_core/exec/cpu/kernels_isa.h"

#if defined(__x86_64__)
#include "engine_core/exec/cpu/vec_avx512.h"

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

INLINE VF b_mac(VF acc, BX x, BX w)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
}

#define F_MR         3
#define B_MR         3
#define A_DV         4
#define KERNELS      kernels_avx512bf16
#define KERNELS_NAME "avx512bf16"
#include "engine_core/exec/cpu/isa_impl.h"
#endif
