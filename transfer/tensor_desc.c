#include "transfer/tensor_desc.h"

#include "base/check.h"

#include <stdio.h>
#include <string.h>

static const struct {
    size_t bytes;
    const char *safetensors, *torch;
} dtypes[LK_DTYPE_COUNT] = {
#define X(name, bytes, st, torch) [LK_DTYPE_##name] = {bytes, st, torch},
    LK_DTYPE_TABLE(X)
#undef X
};

size_t dtype_bytes(lk_dtype_t dtype)
{
    CHECK((unsigned)dtype < LK_DTYPE_COUNT);
    return dtypes[dtype].bytes;
}

const char *dtype_torch_name(lk_dtype_t dtype)
{
    CHECK((unsigned)dtype < LK_DTYPE_COUNT);
    return dtypes[dtype].torch;
}

const char *dtype_safetensors_name(lk_dtype_t dtype)
{
    CHECK((unsigned)dtype < LK_DTYPE_COUNT);
    return dtypes[dtype].safetensors;
}

bool dtype_parse(const char *text, lk_dtype_t *out)
{
    for (unsigned i = 0; i < LK_DTYPE_COUNT; i++) {
        if (strcmp(text, dtypes[i].safetensors) == 0 || strcmp(text, dtypes[i].torch) == 0) {
            *out = (lk_dtype_t)i;
            return true;
        }
    }
    return false;
}

bool tensor_desc_numel(const tensor_desc_t *t, uint64_t *numel)
{
    if (t->ndim > TENSOR_MAX_DIMS) {
        return false;
    }
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->ndim; i++) {
        if (__builtin_mul_overflow(n, t->shape[i], &n) || n > INT64_MAX) {
            return false;
        }
    }
    *numel = n;
    return true;
}

bool tensor_desc_bytes(const tensor_desc_t *t, uint64_t *bytes)
{
    uint64_t n, total;
    if (!tensor_desc_numel(t, &n) || __builtin_mul_overflow(n, dtype_bytes(t->dtype), &total) ||
        total > INT64_MAX) {
        return false;
    }
    *bytes = total;
    return true;
}

void tensor_desc_shape_text(const tensor_desc_t *t, char *out, size_t room)
{
    CHECK(room > 0);
    size_t len = 0;
    uint32_t ndim = LK_MIN(t->ndim, (uint32_t)TENSOR_MAX_DIMS);
    for (uint32_t i = 0; i < ndim && len < room; i++) {
        len += (size_t)snprintf(out + len, room - len, "%s%llu", i == 0 ? "[" : ", ",
                                (unsigned long long)t->shape[i]);
    }
    if (len < room) {
        snprintf(out + len, room - len, "%s", ndim == 0 ? "[]" : "]");
    }
}

static uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float lk_bf16_to_f32(uint16_t x)
{
    return bits_float((uint32_t)x << 16);
}

uint16_t lk_f32_to_bf16(float x)
{
    uint32_t bits = float_bits(x);
    /* A NaN's payload may lie in the bits that are cut off: keep it a (quiet) NaN. */
    uint16_t nan = (uint16_t)((bits >> 16) | 0x40u);
    uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

/* Both directions compute every case and select, so that loops over them can be vectorised. */
float lk_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(x & 0x7FFFu) << 13;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    uint32_t special = magnitude | 0x7F800000u; /* infinity, NaN */
    /* put the fraction behind an implicit one, take the one away again */
    uint32_t subnormal = float_bits(bits_float(magnitude | 0x38800000u) - 0x1p-14f);
    uint32_t bits = magnitude >= 0x0F800000u ? special : normal;
    bits = magnitude < 0x00800000u ? subnormal : bits;
    return bits_float(sign | bits);
}

uint16_t lk_f32_to_f16(float x)
{
    uint32_t bits = float_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
    /* Below 2^-14 results are multiples of 2^-24. Adding 0.5, whose last place is 2^-24, makes the
     * adder do the rounding. */
    uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    half = magnitude < 0x38800000u ? small : half;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half; /* 65520 and above round to infinity */
    half = magnitude > 0x7F800000u ? nan : half;
    return (uint16_t)(sign | half);
}

/* double to float with "round to odd": a second rounding to fewer bits is then correct. */
static float f64_to_f32_odd(double x)
{
    float f = (float)x;
    if (x != x || (double)f == x) {
        return f;
    }
    uint32_t bits = float_bits(f);
    bool away = (double)(f < 0 ? -f : f) > (x < 0 ? -x : x);
    if (away) {
        bits--; /* towards zero; also takes infinity to the largest finite value */
    }
    return bits_float(bits | 1u);
}

/* One loop per pair, so that each can be vectorised. Elements are moved with memcpy because
 * neither side promises alignment. */
#define CONVERT_LOOP(dst_type, src_type, expression)                                               \
    for (size_t i = 0; i < n; i++) {                                                               \
        src_type x;                                                                                \
        memcpy(&x, (const char *)src + i * sizeof x, sizeof x);                                    \
        dst_type y = (expression);                                                                 \
        memcpy((char *)dst + i * sizeof y, &y, sizeof y);                                          \
    }                                                                                              \
    return LK_OK

#define PAIR(dst_dtype, src_dtype) ((int)(dst_dtype)*LK_DTYPE_COUNT + (int)(src_dtype))

/* GCC vectorises the loops at O3 only. */
#if defined(__clang__)
#define VECTORISED
#else
#define VECTORISED __attribute__((optimize("O3")))
#endif

VECTORISED static inline __attribute__((always_inline)) lk_status_t
convert(void *restrict dst, lk_dtype_t dst_dtype, const void *restrict src, lk_dtype_t src_dtype,
        size_t n)
{
    switch (PAIR(dst_dtype, src_dtype)) {
    case PAIR(LK_DTYPE_F32, LK_DTYPE_BF16):
        CONVERT_LOOP(float, uint16_t, lk_bf16_to_f32(x));
    case PAIR(LK_DTYPE_F32, LK_DTYPE_F16):
        CONVERT_LOOP(float, uint16_t, lk_f16_to_f32(x));
    case PAIR(LK_DTYPE_F32, LK_DTYPE_F64):
        CONVERT_LOOP(float, double, (float)x);
    case PAIR(LK_DTYPE_BF16, LK_DTYPE_F32):
        CONVERT_LOOP(uint16_t, float, lk_f32_to_bf16(x));
    case PAIR(LK_DTYPE_BF16, LK_DTYPE_F16):
        CONVERT_LOOP(uint16_t, uint16_t, lk_f32_to_bf16(lk_f16_to_f32(x)));
    case PAIR(LK_DTYPE_BF16, LK_DTYPE_F64):
        CONVERT_LOOP(uint16_t, double, lk_f32_to_bf16(f64_to_f32_odd(x)));
    case PAIR(LK_DTYPE_F16, LK_DTYPE_F32):
        CONVERT_LOOP(uint16_t, float, lk_f32_to_f16(x));
    case PAIR(LK_DTYPE_F16, LK_DTYPE_BF16):
        CONVERT_LOOP(uint16_t, uint16_t, lk_f32_to_f16(lk_bf16_to_f32(x)));
    case PAIR(LK_DTYPE_F16, LK_DTYPE_F64):
        CONVERT_LOOP(uint16_t, double, lk_f32_to_f16(f64_to_f32_odd(x)));
    case PAIR(LK_DTYPE_F64, LK_DTYPE_F32):
        CONVERT_LOOP(double, float, (double)x);
    case PAIR(LK_DTYPE_F64, LK_DTYPE_BF16):
        CONVERT_LOOP(double, uint16_t, (double)lk_bf16_to_f32(x));
    case PAIR(LK_DTYPE_F64, LK_DTYPE_F16):
        CONVERT_LOOP(double, uint16_t, (double)lk_f16_to_f32(x));
    default:
        return LK_ERR_UNSUPPORTED;
    }
}

/* The same loops for several instruction sets, picked at run time by an if, not an ifunc, which
 * sanitizers can't follow. */
#define DEFINE_CONVERT(suffix, attributes)                                                         \
    VECTORISED attributes static lk_status_t convert_##suffix(                                     \
        void *restrict dst, lk_dtype_t dst_dtype, const void *restrict src, lk_dtype_t src_dtype,  \
        size_t n)                                                                                  \
    {                                                                                              \
        return convert(dst, dst_dtype, src, src_dtype, n);                                         \
    }

DEFINE_CONVERT(base, )
#if defined(__x86_64__)
DEFINE_CONVERT(avx2, __attribute__((target("avx2"))))
DEFINE_CONVERT(avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,"
                                             "prefer-vector-width=512"))))
#endif

lk_status_t dtype_convert(void *restrict dst, lk_dtype_t dst_dtype, const void *restrict src,
                          lk_dtype_t src_dtype, size_t n)
{
    if (dst_dtype == src_dtype) {
        if (n > 0) {
            memcpy(dst, src, n * dtype_bytes(src_dtype));
        }
        return LK_OK;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        return convert_avx512(dst, dst_dtype, src, src_dtype, n);
    }
    if (__builtin_cpu_supports("avx2")) {
        return convert_avx2(dst, dst_dtype, src, src_dtype, n);
    }
#endif
    return convert_base(dst, dst_dtype, src, src_dtype, n);
}
