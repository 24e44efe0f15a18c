/*
 * isa_impl.h: builds one kernels_t. An ISA file defines the vocabulary (vec_*.h), BX (a vector of
 * B_STEP bf16), b_load, b_loadn, b_mac, B_MR, F_MR, A_DV, KERNELS and KERNELS_NAME, then includes
 * this.
 */
#include "engine_core/exec/cpu/row_impl.h"

#define G(name)          name##_f32
#define G_ELT            float
#define G_VEC            VF
#define G_STEP           VL
#define G_LOAD(p)        v_load(p)
#define G_LOADN(p, n)    v_loadn(p, n)
#define G_MAC(acc, x, w) v_fma(x, w, acc)
#define G_MR             F_MR
#include "engine_core/exec/cpu/gemm_impl.h"
#undef G
#undef G_ELT
#undef G_VEC
#undef G_STEP
#undef G_LOAD
#undef G_LOADN
#undef G_MAC
#undef G_MR

#define G(name)          name##_bf16
#define G_ELT            uint16_t
#define G_VEC            BX
#define G_STEP           B_STEP
#define G_LOAD(p)        b_load(p)
#define G_LOADN(p, n)    b_loadn(p, n)
#define G_MAC(acc, x, w) b_mac(acc, x, w)
#define G_MR             B_MR
#include "engine_core/exec/cpu/gemm_impl.h"

#define A(name)       name##_f32
#define A_ELT         float
#define A_LOAD(p)     v_load(p)
#define A_LOADN(p, n) v_loadn(p, n)
#include "engine_core/exec/cpu/attn_impl.h"
#undef A
#undef A_ELT
#undef A_LOAD
#undef A_LOADN

#define A(name)       name##_bf16
#define A_ELT         uint16_t
#define A_LOAD(p)     v_load_bf16(p)
#define A_LOADN(p, n) v_loadn_bf16(p, n)
#include "engine_core/exec/cpu/attn_impl.h"

const kernels_t KERNELS = {
    .name = KERNELS_NAME,
    .gemm_f32 = gemm_f32,
    .gemm_bf16 = gemm_bf16,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_bf16 = to_bf16,
    .attn_f32 = attn_f32,
    .attn_bf16 = attn_bf16,
};
