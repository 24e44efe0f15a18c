#include "transfer/digest.h"

#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"

#include <string.h>

static const uint64_t lane_constant[2] = {0x6c6f636b73746570ull, 0x7765696768747321ull};

/* The inner loop, on vectors of eight 64-bit lanes. The same text is compiled for several
 * instruction sets (64-bit multiplications dominate: AVX-512DQ has one) and picked at run time by
 * an if, not an ifunc, which sanitizers can't follow. */
#define LANES 8
typedef uint64_t vec_t __attribute__((vector_size(8 * LANES)));

#define MIX64(x)                                                                                   \
    do {                                                                                           \
        (x) += 0x9E3779B97F4A7C15ull;                                                              \
        (x) = ((x) ^ ((x) >> 30)) * 0xBF58476D1CE4E5B9ull;                                         \
        (x) = ((x) ^ ((x) >> 27)) * 0x94D049BB133111EBull;                                         \
        (x) ^= (x) >> 31;                                                                          \
    } while (0)

/* Adds the whole vectors of n elements and returns how many those are. per_word elements share a
 * 64-bit word of memory (2 float32, 4 bf16): lane j of a load holds elements per_word * j + k, so
 * that shifts and masks take them apart without a shuffle. Little-endian. */
static inline __attribute__((always_inline)) uint64_t
mix_words(digest_t *acc, const void *data, uint64_t n, uint64_t first, unsigned per_word)
{
    const vec_t ramp = {0, 1, 2, 3, 4, 5, 6, 7};
    const unsigned step = LANES * per_word;
    vec_t index0 = first + lane_constant[0] + ramp * per_word;
    vec_t index1 = first + lane_constant[1] + ramp * per_word;
    vec_t sum0 = {0}, sum1 = {0};
    uint64_t i = 0;
    for (; i + step <= n; i += step) {
        vec_t words;
        memcpy(&words, (const char *)data + i * (8 / per_word), sizeof words);
#pragma GCC unroll 4
        for (unsigned k = 0; k < per_word; k++) {
            vec_t bits =
                per_word == 4 ? words << (48 - 16 * k) >> 48 << 16 : words << (32 - 32 * k) >> 32;
            vec_t a = index0 + k, b = index1 + k;
            MIX64(a);
            MIX64(b);
            a ^= bits;
            b ^= bits;
            MIX64(a);
            MIX64(b);
            sum0 += a;
            sum1 += b;
        }
        index0 += step;
        index1 += step;
    }
    for (int j = 0; j < LANES; j++) {
        acc->lane[0] += sum0[j];
        acc->lane[1] += sum1[j];
    }
    return i;
}

#define DEFINE_KERNELS(suffix, attributes)                                                         \
    attributes static uint64_t mix_f32_##suffix(digest_t *acc, const void *data, uint64_t n,       \
                                                uint64_t first)                                    \
    {                                                                                              \
        return mix_words(acc, data, n, first, 2);                                                  \
    }                                                                                              \
    attributes static uint64_t mix_bf16_##suffix(digest_t *acc, const void *data, uint64_t n,      \
                                                 uint64_t first)                                   \
    {                                                                                              \
        return mix_words(acc, data, n, first, 4);                                                  \
    }

DEFINE_KERNELS(base, )
#if defined(__x86_64__)
DEFINE_KERNELS(avx2, __attribute__((target("avx2"))))
DEFINE_KERNELS(avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
#endif

typedef uint64_t (*mix_fn)(digest_t *acc, const void *data, uint64_t n, uint64_t first);

static mix_fn pick_kernel(bool bf16)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        return bf16 ? mix_bf16_avx512 : mix_f32_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        return bf16 ? mix_bf16_avx2 : mix_f32_avx2;
    }
#endif
    return bf16 ? mix_bf16_base : mix_f32_base;
}

static void mix_one(digest_t *acc, uint64_t bits, uint64_t index)
{
    for (int l = 0; l < 2; l++) {
        acc->lane[l] += lk_mix64(lk_mix64(index + lane_constant[l]) ^ bits);
    }
}

static void add_f32(digest_t *acc, const void *data, uint64_t n, uint64_t first)
{
    for (uint64_t i = pick_kernel(false)(acc, data, n, first); i < n; i++) {
        uint32_t bits;
        memcpy(&bits, (const char *)data + i * sizeof bits, sizeof bits);
        mix_one(acc, bits, first + i);
    }
}

static void add_bf16(digest_t *acc, const void *data, uint64_t n, uint64_t first)
{
    for (uint64_t i = pick_kernel(true)(acc, data, n, first); i < n; i++) {
        uint16_t raw;
        memcpy(&raw, (const char *)data + i * sizeof raw, sizeof raw);
        mix_one(acc, (uint64_t)raw << 16, first + i);
    }
}

/* Integers: the value as int64. */
static void add_integers(digest_t *acc, const void *data, lk_dtype_t dtype, uint64_t n,
                         uint64_t first)
{
    for (uint64_t i = 0; i < n; i++) {
        const char *at = (const char *)data + i * dtype_bytes(dtype);
        int64_t value = 0;
        if (dtype == LK_DTYPE_I64) {
            memcpy(&value, at, sizeof value);
        } else if (dtype == LK_DTYPE_I32) {
            int32_t x;
            memcpy(&x, at, sizeof x);
            value = x;
        } else if (dtype == LK_DTYPE_I8) {
            value = *(const int8_t *)at;
        } else {
            value = *(const uint8_t *)at;
        }
        mix_one(acc, (uint64_t)value, first + i);
    }
}

static bool is_float(lk_dtype_t dtype)
{
    return dtype == LK_DTYPE_F32 || dtype == LK_DTYPE_BF16 || dtype == LK_DTYPE_F16 ||
           dtype == LK_DTYPE_F64;
}

/* Rounds to `stored`, widens to float32, block by block through the L1 cache. */
static lk_status_t add_converted(digest_t *acc, const void *data, lk_dtype_t dtype,
                                 lk_dtype_t stored, uint64_t n, uint64_t first)
{
    enum { BLOCK = 512 };
    uint64_t rounded[BLOCK]; /* room for any dtype */
    float wide[BLOCK];
    for (uint64_t i = 0; i < n; i += BLOCK) {
        uint64_t count = LK_MIN(n - i, (uint64_t)BLOCK);
        const void *at = (const char *)data + i * dtype_bytes(dtype);
        LK_RETURN_IF_ERROR(dtype_convert(rounded, stored, at, dtype, count));
        if (stored == LK_DTYPE_BF16) {
            add_bf16(acc, rounded, count, first + i);
            continue;
        }
        LK_RETURN_IF_ERROR(dtype_convert(wide, LK_DTYPE_F32, rounded, stored, count));
        add_f32(acc, wide, count, first + i);
    }
    return LK_OK;
}

lk_status_t digest_add(digest_t *acc, const void *data, lk_dtype_t dtype, lk_dtype_t stored,
                       uint64_t n, uint64_t first)
{
    if (is_float(dtype) != is_float(stored) || (!is_float(dtype) && dtype != stored)) {
        return LK_ERR_UNSUPPORTED;
    }
    if (!is_float(dtype)) {
        add_integers(acc, data, dtype, n, first);
    } else if (dtype == LK_DTYPE_BF16 && (stored == LK_DTYPE_BF16 || stored == LK_DTYPE_F32)) {
        add_bf16(acc, data, n, first);
    } else if (dtype == LK_DTYPE_F32 && stored == LK_DTYPE_F32) {
        add_f32(acc, data, n, first);
    } else {
        return add_converted(acc, data, dtype, stored, n, first);
    }
    return LK_OK;
}

static digest_t set_term(const char *name, digest_t tensor)
{
    digest_t term;
    for (int l = 0; l < 2; l++) {
        uint64_t key = lk_mix64(lk_hash64(name, strlen(name), (uint64_t)l));
        term.lane[l] = lk_mix64(key ^ tensor.lane[l]);
    }
    return term;
}

void digest_set_add(digest_t *set, const char *canonical_name, digest_t tensor)
{
    digest_t term = set_term(canonical_name, tensor);
    set->lane[0] += term.lane[0];
    set->lane[1] += term.lane[1];
}

void digest_set_remove(digest_t *set, const char *canonical_name, digest_t tensor)
{
    digest_t term = set_term(canonical_name, tensor);
    set->lane[0] -= term.lane[0];
    set->lane[1] -= term.lane[1];
}

bool digest_equal(digest_t a, digest_t b)
{
    return a.lane[0] == b.lane[0] && a.lane[1] == b.lane[1];
}

void digest_hex(digest_t d, char out[DIGEST_HEX_SIZE])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++) {
        out[i] = digits[d.lane[i / 16] >> (60 - 4 * (i % 16)) & 15u];
    }
    out[32] = '\0';
}
