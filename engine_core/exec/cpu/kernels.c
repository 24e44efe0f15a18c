#include "engine_core/exec/cpu/kernels.h"
#include "engine_core/exec/cpu/kernels_isa.h"

#include "base/check.h"

static bool always(void)
{
    return true;
}

#if defined(__x86_64__)
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static bool has_avx512bf16(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

/* From the plainest to the fastest. */
static const struct {
    const kernels_t *table;
    bool (*supported)(void);
} tables[] = {
    {&kernels_ref, always},
#if defined(__x86_64__)
    {&kernels_avx2, has_avx2},
    {&kernels_avx512, has_avx512},
    {&kernels_avx512bf16, has_avx512bf16},
#endif
};

const kernels_t *kernels_at(size_t i)
{
    for (size_t j = 0; j < LK_ARRAY_LEN(tables); j++) {
        if (tables[j].supported() && i-- == 0) {
            return tables[j].table;
        }
    }
    return NULL;
}

const kernels_t *kernels_best(void)
{
    const kernels_t *best = &kernels_ref;
    for (size_t j = 0; j < LK_ARRAY_LEN(tables); j++) {
        if (tables[j].supported()) {
            best = tables[j].table;
        }
    }
    return best;
}
