#include "transfer/digest.h"

#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"

#include <string.h>

static const uint64_t lane_constant[2] = {0x6c6f636b73746570ull, 0x7765696768747321ull};

#define GOLDEN 0x9E3779B97F4A7C15ull
#define MUL1   0xBF58476D1CE4E5B9ull
#define MUL2   0x94D049BB133111EBull

/* The inner loop, on vectors of eight 64-bit lanes. The same text is compiled for several
 * instruction sets (64-bit multiplications dominate: AVX-512DQ has one) and picked at run time by
 * an if, not an ifunc, which sanitizers can't follow. */
#define LANES 8
typedef uint64_t vec_t __attribute__((vector_size(8 * LANES)));

/* The index's mix starts with (z ^ z >> 30) * MUL1, z = index + lane constant + GOLDEN. Over 2^30
 * indices z >> 30 is one K, so z = top + low (top a multiple of RUN, low below RUN) gives
 * (top ^ K's top) * MUL1 + (low ^ K's low) * MUL1: the first term is a scalar per RUN elements, the
 * second one of RUN values. Blocks start at indices that are multiples of RUN, so that low starts
 * at a constant, `lead`, and one step from a top to the next lies at a known place of the block. */
#define RUN 64

typedef struct {
    uint64_t k; /* z >> 30, for which `low` holds */
    vec_t low[RUN / LANES];
} run_table_t;

static inline uint64_t z_of(unsigned lane, uint64_t index)
{
    return index + lane_constant[lane] + GOLDEN;
}

/* Vector v of a block holds, in its lane j, the block's element of this number. per_word elements
 * share a 64-bit word of memory (2 float32, 4 bf16), so that shifts and masks take them apart
 * without a shuffle. Little-endian. */
static inline __attribute__((always_inline)) vec_t element_of(unsigned v, unsigned per_word)
{
    const vec_t ramp = {0, 1, 2, 3, 4, 5, 6, 7};
    return ramp * per_word + v / per_word * (LANES * per_word) + v % per_word;
}

static inline __attribute__((always_inline)) void fill_table(run_table_t *table, unsigned lane,
                                                             uint64_t index, unsigned per_word)
{
    const uint64_t lead = z_of(lane, 0) % RUN;
    table->k = z_of(lane, index) >> 30;
    for (unsigned v = 0; v < RUN / LANES; v++) {
        table->low[v] = (((element_of(v, per_word) + lead) % RUN) ^ (table->k % RUN)) * MUL1;
    }
}

/* What a kernel reads, and what it stores if it has somewhere to. */
typedef enum {
    KERNEL_F32,
    KERNEL_BF16,
    KERNEL_F32_TO_BF16,
    KERNEL_BF16_TO_F32,
    N_KERNELS
} kernel_t;

static const struct {
    lk_dtype_t dtype, stored;
} kernel_dtypes[N_KERNELS] = {
    [KERNEL_F32] = {LK_DTYPE_F32, LK_DTYPE_F32},
    [KERNEL_BF16] = {LK_DTYPE_BF16, LK_DTYPE_BF16},
    [KERNEL_F32_TO_BF16] = {LK_DTYPE_F32, LK_DTYPE_BF16},
    [KERNEL_BF16_TO_F32] = {LK_DTYPE_BF16, LK_DTYPE_F32},
};

typedef uint32_t halfvec_t __attribute__((vector_size(4 * 2 * LANES)));
typedef uint16_t quartvec_t __attribute__((vector_size(2 * 2 * LANES)));

/* lk_f32_to_bf16 on a vector; the result as the bits of float32s. */
static inline __attribute__((always_inline)) halfvec_t round_to_bf16(halfvec_t x)
{
    halfvec_t nan = (halfvec_t)((x & 0x7FFFFFFFu) > 0x7F800000u);
    halfvec_t rounded = x + 0x7FFFu + ((x >> 16) & 1u);
    return ((rounded & ~nan) | ((x | 0x400000u) & nan)) & 0xFFFF0000u;
}

/* Loads a vector of words, stores its elements in dst unless that is NULL. */
static inline __attribute__((always_inline)) vec_t load_words(const char *from, char *dst,
                                                              kernel_t kernel)
{
    vec_t words;
    memcpy(&words, from, sizeof words);
    if (kernel == KERNEL_F32_TO_BF16) {
        halfvec_t rounded = round_to_bf16((halfvec_t)words);
        quartvec_t narrow = __builtin_convertvector(rounded >> 16, quartvec_t);
        if (dst != NULL) {
            memcpy(dst, &narrow, sizeof narrow);
        }
        return (vec_t)rounded;
    }
    if (dst != NULL && kernel == KERNEL_BF16_TO_F32) {
        for (unsigned half = 0; half < 2; half++) {
            quartvec_t narrow;
            memcpy(&narrow, from + half * sizeof narrow, sizeof narrow);
            halfvec_t wide = __builtin_convertvector(narrow, halfvec_t) << 16;
            memcpy(dst + half * sizeof wide, &wide, sizeof wide);
        }
    } else if (dst != NULL) {
        memcpy(dst, &words, sizeof words);
    }
    return words;
}

/* Element k of each word, as the bits of a float32. */
static inline __attribute__((always_inline)) vec_t bits_of(vec_t words, unsigned k,
                                                           unsigned per_word)
{
    if (per_word == 2) {
        return k == 0 ? words & 0xFFFFFFFFull : words >> 32;
    }
    return (k == 0 ? words << 16 : words >> (16 * k - 16)) & 0xFFFF0000ull;
}

/* From (z ^ z >> 30) * MUL1 of the index to the element's term. */
static inline __attribute__((always_inline)) vec_t mix_rest(vec_t x, vec_t bits)
{
    x = (x ^ (x >> 27)) * MUL2;
    x ^= x >> 31;
    x ^= bits;
    x += GOLDEN;
    x = (x ^ (x >> 30)) * MUL1;
    x = (x ^ (x >> 27)) * MUL2;
    return x ^ (x >> 31);
}

/* The first term of a lane for a block's elements before and behind the step to the next top. */
static inline __attribute__((always_inline)) vec_t
top_of(unsigned lane, unsigned v, unsigned per_word, uint64_t before, uint64_t behind)
{
    const vec_t stepped = (vec_t)(element_of(v, per_word) + z_of(lane, 0) % RUN >= RUN);
    return before + ((behind - before) & stepped);
}

/* Adds whole blocks, the first of which starts at `first`, a multiple of RUN, stores them in dst
 * unless that is NULL, and returns the number of elements they have. Stops early where z >> 30
 * changes within a block. */
static inline __attribute__((always_inline)) uint64_t
mix_blocks(digest_t *acc, char *dst, const char *data, uint64_t n, uint64_t first, kernel_t kernel)
{
    const unsigned size = kernel == KERNEL_BF16 || kernel == KERNEL_BF16_TO_F32 ? 2 : 4;
    const unsigned stored = kernel == KERNEL_BF16 || kernel == KERNEL_F32_TO_BF16 ? 2 : 4;
    const unsigned per_word = 8 / size;
    run_table_t table[2];
    uint64_t behind[2], i = 0;
    vec_t sum0 = {0}, sum1 = {0};
    for (unsigned l = 0; l < 2; l++) {
        fill_table(&table[l], l, first, per_word);
        behind[l] = ((z_of(l, first) ^ table[l].k) / RUN * RUN) * MUL1;
    }
    for (; i + RUN <= n; i += RUN) {
        uint64_t before[2];
        for (unsigned l = 0; l < 2; l++) {
            uint64_t next = z_of(l, first + i) + RUN;
            if (next >> 30 != table[l].k) {
                goto out;
            }
            before[l] = behind[l];
            behind[l] = ((next ^ table[l].k) / RUN * RUN) * MUL1;
        }
        vec_t words = {0};
#pragma GCC unroll 8
        for (unsigned v = 0; v < RUN / LANES; v++) {
            if (v % per_word == 0) {
                uint64_t at = i + v * LANES;
                words =
                    load_words(data + at * size, dst != NULL ? dst + at * stored : NULL, kernel);
            }
            vec_t bits = bits_of(words, v % per_word, per_word);
            sum0 += mix_rest(table[0].low[v] + top_of(0, v, per_word, before[0], behind[0]), bits);
            sum1 += mix_rest(table[1].low[v] + top_of(1, v, per_word, before[1], behind[1]), bits);
        }
    }
out:
    for (int j = 0; j < LANES; j++) {
        acc->lane[0] += sum0[j];
        acc->lane[1] += sum1[j];
    }
    return i;
}

typedef uint64_t (*mix_fn)(digest_t *acc, char *dst, const char *data, uint64_t n, uint64_t first);

/* A test of dst per vector would get in the way of the compiler's scheduling: hence both calls. */
#define DEFINE_KERNEL(kernel, suffix, attributes)                                                  \
    attributes static uint64_t mix_##kernel##_##suffix(digest_t *acc, char *dst, const char *data, \
                                                       uint64_t n, uint64_t first)                 \
    {                                                                                              \
        return dst != NULL ? mix_blocks(acc, dst, data, n, first, kernel)                          \
                           : mix_blocks(acc, NULL, data, n, first, kernel);                        \
    }
#define DEFINE_KERNELS(suffix, attributes)                                                         \
    DEFINE_KERNEL(KERNEL_F32, suffix, attributes)                                                  \
    DEFINE_KERNEL(KERNEL_BF16, suffix, attributes)                                                 \
    DEFINE_KERNEL(KERNEL_F32_TO_BF16, suffix, attributes)                                          \
    DEFINE_KERNEL(KERNEL_BF16_TO_F32, suffix, attributes)                                          \
    static const mix_fn kernels_##suffix[N_KERNELS] = {                                            \
        mix_KERNEL_F32_##suffix, mix_KERNEL_BF16_##suffix, mix_KERNEL_F32_TO_BF16_##suffix,        \
        mix_KERNEL_BF16_TO_F32_##suffix};

DEFINE_KERNELS(base, )
#if defined(__x86_64__)
DEFINE_KERNELS(avx2, __attribute__((target("avx2"))))
DEFINE_KERNELS(avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
#endif

static const mix_fn *pick_kernels(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        return kernels_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        return kernels_avx2;
    }
#endif
    return kernels_base;
}

static void mix_one(digest_t *acc, uint64_t bits, uint64_t index)
{
    for (int l = 0; l < 2; l++) {
        acc->lane[l] += lk_mix64(lk_mix64(index + lane_constant[l]) ^ bits);
    }
}

/* Fewer elements than a block: one by one. */
static void add_few(digest_t *acc, char *dst, const char *data, uint64_t n, uint64_t first,
                    kernel_t kernel)
{
    lk_dtype_t dtype = kernel_dtypes[kernel].dtype, stored = kernel_dtypes[kernel].stored;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t half;
        uint32_t bits;
        if (dtype == LK_DTYPE_BF16) {
            memcpy(&half, data + i * sizeof half, sizeof half);
            bits = (uint32_t)half << 16;
        } else {
            memcpy(&bits, data + i * sizeof bits, sizeof bits);
        }
        if (stored == LK_DTYPE_BF16 && dtype == LK_DTYPE_F32) {
            float value;
            memcpy(&value, &bits, sizeof value);
            bits = (uint32_t)lk_f32_to_bf16(value) << 16;
        }
        mix_one(acc, bits, first + i);
        half = (uint16_t)(bits >> 16);
        if (dst != NULL && stored == LK_DTYPE_BF16) {
            memcpy(dst + i * sizeof half, &half, sizeof half);
        } else if (dst != NULL) {
            memcpy(dst + i * sizeof bits, &bits, sizeof bits);
        }
    }
}

/* Blocks by the kernel; one by one what lies before and behind them, and a block that it leaves
 * out. */
static void add_bits(digest_t *acc, char *dst, const char *data, uint64_t n, uint64_t first,
                     kernel_t kernel)
{
    const mix_fn mix = pick_kernels()[kernel];
    size_t size = dtype_bytes(kernel_dtypes[kernel].dtype);
    size_t stored = dtype_bytes(kernel_dtypes[kernel].stored);
    for (uint64_t i = 0; i < n;) {
        char *to = dst != NULL ? dst + i * stored : NULL;
        uint64_t done = 0;
        if ((first + i) % RUN == 0) {
            done = mix(acc, to, data + i * size, n - i, first + i);
        }
        if (done == 0) {
            done = LK_MIN(n - i, RUN - (first + i) % RUN);
            add_few(acc, to, data + i * size, done, first + i, kernel);
        }
        i += done;
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

/* Any other pair: rounds to `stored`, widens to float32, block by block through the L1 cache. */
static lk_status_t add_converted(digest_t *acc, char *dst, const char *data, lk_dtype_t dtype,
                                 lk_dtype_t stored, uint64_t n, uint64_t first)
{
    enum { BLOCK = 512 };
    uint64_t scratch[BLOCK]; /* room for any dtype */
    float wide[BLOCK];
    for (uint64_t i = 0; i < n; i += BLOCK) {
        uint64_t count = LK_MIN(n - i, (uint64_t)BLOCK);
        char *rounded = dst != NULL ? dst + i * dtype_bytes(stored) : (char *)scratch;
        LK_RETURN_IF_ERROR(
            dtype_convert(rounded, stored, data + i * dtype_bytes(dtype), dtype, count));
        if (stored == LK_DTYPE_BF16) {
            add_bits(acc, NULL, rounded, count, first + i, KERNEL_BF16);
            continue;
        }
        LK_RETURN_IF_ERROR(dtype_convert(wide, LK_DTYPE_F32, rounded, stored, count));
        add_bits(acc, NULL, (const char *)wide, count, first + i, KERNEL_F32);
    }
    return LK_OK;
}

lk_status_t digest_store(digest_t *acc, void *dst, const void *data, lk_dtype_t dtype,
                         lk_dtype_t stored, uint64_t n, uint64_t first)
{
    if (is_float(dtype) != is_float(stored) || (!is_float(dtype) && dtype != stored)) {
        return LK_ERR_UNSUPPORTED;
    }
    if (!is_float(dtype)) {
        add_integers(acc, data, dtype, n, first);
        return dst != NULL ? dtype_convert(dst, stored, data, dtype, n) : LK_OK;
    }
    for (kernel_t k = 0; k < N_KERNELS; k++) {
        if (kernel_dtypes[k].dtype == dtype && kernel_dtypes[k].stored == stored) {
            add_bits(acc, dst, data, n, first, k);
            return LK_OK;
        }
    }
    return add_converted(acc, dst, data, dtype, stored, n, first);
}

lk_status_t digest_add(digest_t *acc, const void *data, lk_dtype_t dtype, lk_dtype_t stored,
                       uint64_t n, uint64_t first)
{
    return digest_store(acc, NULL, data, dtype, stored, n, first);
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
