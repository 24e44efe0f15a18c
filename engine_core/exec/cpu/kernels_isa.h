/*
 * kernels_isa.h: the tables of single instruction sets; kernels.c chooses among them. Each is one
 * file that defines a small vector vocabulary and includes the bodies in *_impl.h.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_KERNELS_ISA_H
#define LK_ENGINE_CORE_EXEC_CPU_KERNELS_ISA_H

#include "engine_core/exec/cpu/kernels.h"

#if defined(__x86_64__)
extern const kernels_t kernels_avx2;       /* AVX2 and FMA */
extern const kernels_t kernels_avx512;     /* AVX-512 F, BW, VL, DQ */
extern const kernels_t kernels_avx512bf16; /* and AVX512-BF16's dot products */
#endif

#endif
