/*
 * unpack_thread.h: what one thread of the unpack kernel does, in the common subset of C and CUDA
 * C++, so that a unit test can run every thread of a launch on the CPU. The conversions are those
 * of transfer/tensor_desc.c bit for bit, NaNs included.
 */
#ifndef LK_TRANSFER_DEVICE_UNPACK_THREAD_H
#define LK_TRANSFER_DEVICE_UNPACK_THREAD_H

#include "transfer/device/unpack.h"

#ifdef __CUDACC__
#define UNPACK_FN     static __device__ __forceinline__
#define UNPACK_RARE   static __device__ __noinline__
#define UNPACK_UNROLL _Pragma("unroll")
#else
#include <string.h>
#define UNPACK_FN   static inline
#define UNPACK_RARE static
#define UNPACK_UNROLL
#endif

/* lk_dtype_t's order (tensor_desc.h), which this file can't include: asserted where it can be */
enum {
    UNPACK_F32,
    UNPACK_BF16,
    UNPACK_F16,
    UNPACK_F64,
    UNPACK_I64,
    UNPACK_I32,
    UNPACK_I8,
    UNPACK_U8
};

#define UNPACK_PER_THREAD (UNPACK_VECTOR * UNPACK_VECTORS)

/* x times a constant: three multiply-adds, where compilers make three and an addition. */
UNPACK_FN uint64_t unpack_times(uint64_t x, uint32_t low, uint32_t high)
{
#ifdef __CUDACC__
    uint64_t product;
    asm("{\n\t.reg .u32 a, b, l, h;\n\t.reg .u64 p;\n\t"
        "mov.b64 {a, b}, %1;\n\t"
        "mul.wide.u32 p, a, %2;\n\t"
        "mov.b64 {l, h}, p;\n\t"
        "mad.lo.u32 h, a, %3, h;\n\t"
        "mad.lo.u32 h, b, %2, h;\n\t"
        "mov.b64 %0, {l, h};\n\t}"
        : "=l"(product)
        : "l"(x), "r"(low), "r"(high));
    return product;
#else
    return x * ((uint64_t)high << 32 | low);
#endif
}

/* mix64 (base/prng.h) behind its first addition. */
UNPACK_FN uint64_t unpack_mix_rest(uint64_t x)
{
    x = unpack_times(x ^ x >> 30, 0x1CE4E5B9u, 0xBF58476Du);
    x = unpack_times(x ^ x >> 27, 0x133111EBu, 0x94D049BBu);
    return x ^ x >> 31;
}

#define UNPACK_GOLDEN 0x9E3779B97F4A7C15ull

/* ---- memory ---- */

UNPACK_FN uint32_t unpack_word(uint64_t address)
{
#ifdef __CUDACC__
    return *(const uint32_t *)address;
#else
    uint32_t x;
    memcpy(&x, (const void *)(uintptr_t)address, sizeof x);
    return x;
#endif
}

/* n (a multiple of 4) words from an address of any alignment. Reads only whole 4-byte words that
 * hold a wanted byte, so never beyond the page of one. */
UNPACK_FN void unpack_load(uint64_t address, uint32_t *out, const uint32_t n)
{
#ifdef __CUDACC__
    if ((address & 15u) == 0) {
        UNPACK_UNROLL
        for (uint32_t i = 0; i < n; i += 4) {
            uint4 v = *(const uint4 *)(address + 4u * i);
            out[i] = v.x;
            out[i + 1] = v.y;
            out[i + 2] = v.z;
            out[i + 3] = v.w;
        }
        return;
    }
#endif
    const uint32_t shift = (uint32_t)(address & 3u) * 8u;
    const uint64_t base = address & ~(uint64_t)3u;
    uint32_t low = unpack_word(base);
    if (shift == 0) {
        out[0] = low;
        UNPACK_UNROLL
        for (uint32_t i = 1; i < n; i++) {
            out[i] = unpack_word(base + 4u * i);
        }
        return;
    }
    UNPACK_UNROLL
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t high = unpack_word(base + 4u * (i + 1));
        out[i] = low >> shift | high << (32u - shift);
        low = high;
    }
}

UNPACK_FN uint64_t unpack_load_bytes(uint64_t address, uint32_t n)
{
    uint64_t x = 0;
    for (uint32_t i = 0; i < n; i++) {
        x |= (uint64_t) * (const uint8_t *)(uintptr_t)(address + i) << (8u * i);
    }
    return x;
}

UNPACK_FN void unpack_store_bytes(uint64_t address, uint64_t x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        *(uint8_t *)(uintptr_t)(address + i) = (uint8_t)(x >> (8u * i));
    }
}

UNPACK_FN void unpack_store(uint64_t address, const uint32_t *words, const uint32_t n)
{
#ifdef __CUDACC__
    if ((address & 15u) == 0) {
        UNPACK_UNROLL
        for (uint32_t i = 0; i < n; i += 4) {
            *(uint4 *)(address + 4u * i) =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
        return;
    }
#endif
    UNPACK_UNROLL
    for (uint32_t i = 0; i < n; i++) {
        unpack_store_bytes(address + 4u * i, words[i], 4);
    }
}

/* ---- values, as bits of a float32 ---- */

UNPACK_FN float unpack_float(uint32_t bits)
{
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

UNPACK_FN uint32_t unpack_bits(float x)
{
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

UNPACK_FN double unpack_double(uint64_t bits)
{
#ifdef __CUDACC__
    return __longlong_as_double((long long)bits);
#else
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

/* The upper half is the result. */
UNPACK_FN uint32_t unpack_round_bf16(uint32_t bits)
{
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return ((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : rounded) & 0xFFFF0000u;
}

UNPACK_FN uint32_t unpack_f16(uint32_t x)
{
    const uint32_t sign = (x & 0x8000u) << 16;
    const uint32_t magnitude = (x & 0x7FFFu) << 13;
    const uint32_t subnormal =
        unpack_bits(unpack_float(magnitude | 0x38800000u) - 6.103515625e-05f /* 2^-14 */);
    uint32_t bits =
        magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : magnitude + ((127u - 15u) << 23);
    bits = magnitude < 0x00800000u ? subnormal : bits;
    return sign | bits;
}

/* NaNs by hand: processors differ in what they keep of one. `odd`: rounded so that a second
 * rounding, to fewer bits, is correct. */
UNPACK_FN uint32_t unpack_f64(uint64_t raw, int odd)
{
    const double x = unpack_double(raw);
    if ((raw & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull) {
        return (uint32_t)(raw >> 32 & 0x80000000u) | 0x7FC00000u |
               (uint32_t)(raw >> 29 & 0x7FFFFFu);
    }
    const float f = (float)x;
    uint32_t bits = unpack_bits(f);
    if (!odd || (double)f == x) {
        return bits;
    }
    if ((double)(f < 0 ? -f : f) > (x < 0 ? -x : x)) {
        bits--;
    }
    return bits | 1u;
}

UNPACK_FN uint32_t unpack_round_f16(uint32_t bits)
{
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
    const uint32_t small = unpack_bits(unpack_float(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    half = magnitude < 0x38800000u ? small : half;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? nan : half;
    return sign | half;
}

UNPACK_FN uint64_t unpack_to_f64(uint32_t bits)
{
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint64_t)(bits & 0x80000000u) << 32 | 0x7FF8000000000000ull |
               (uint64_t)(bits & 0x7FFFFFu) << 29;
    }
    const double x = (double)unpack_float(bits);
#ifdef __CUDACC__
    return (uint64_t)__double_as_longlong(x);
#else
    uint64_t raw;
    memcpy(&raw, &x, sizeof raw);
    return raw;
#endif
}

/* ---- one element: any dtypes, any alignment, any pitch ---- */

UNPACK_FN uint32_t unpack_dtype_bytes(uint32_t dtype)
{
    return dtype == UNPACK_F64 || dtype == UNPACK_I64    ? 8u
           : dtype == UNPACK_F32 || dtype == UNPACK_I32  ? 4u
           : dtype == UNPACK_BF16 || dtype == UNPACK_F16 ? 2u
                                                         : 1u;
}

UNPACK_FN uint64_t unpack_place(const unpack_item_t *item, uint64_t index)
{
    return item->pitch == item->cols ? index
                                     : index / item->cols * item->pitch + index % item->cols;
}

/* Stores the element; returns the bits that its digest takes. */
UNPACK_FN uint64_t unpack_element(const unpack_item_t *item, uint64_t index)
{
    const uint32_t from = item->src_dtype, to = item->dst_dtype;
    const uint32_t size = unpack_dtype_bytes(from);
    const uint64_t raw = unpack_load_bytes(item->src + index * size, size);
    uint64_t stored = raw, bits = raw;
    switch (from) {
    case UNPACK_BF16:
        bits = raw << 16;
        break;
    case UNPACK_F16:
        bits = unpack_f16((uint32_t)raw);
        break;
    case UNPACK_F64:
        bits = unpack_f64(raw, to == UNPACK_BF16 || to == UNPACK_F16);
        break;
    case UNPACK_I32:
        bits = (uint64_t)(int64_t)(int32_t)raw;
        break;
    case UNPACK_I8:
        bits = (uint64_t)(int64_t)(int8_t)raw;
        break;
    default:
        break;
    }
    if (from != to) {
        if (to == UNPACK_BF16) {
            bits = unpack_round_bf16((uint32_t)bits);
            stored = bits >> 16;
        } else if (to == UNPACK_F16) {
            stored = unpack_round_f16((uint32_t)bits);
            bits = unpack_f16((uint32_t)stored);
        } else if (to == UNPACK_F64) {
            stored = unpack_to_f64((uint32_t)bits);
            bits = unpack_f64(stored, 0);
        } else {
            stored = bits;
        }
    }
    if (item->dst != 0) {
        const uint32_t width = unpack_dtype_bytes(to);
        unpack_store_bytes(item->dst + unpack_place(item, index) * width, stored, width);
    }
    return bits;
}

/* ---- eight elements ---- */

/* Whether unpack_vector can do it: rows that a vector never crosses. */
UNPACK_FN int unpack_by_vectors(const unpack_item_t *item)
{
    return item->src_dtype <= UNPACK_F16 &&
           (item->dst_dtype <= UNPACK_BF16 || item->dst_dtype == item->src_dtype) &&
           (item->pitch == item->cols || item->cols % UNPACK_VECTOR == 0);
}

/* Loads, rounds and stores UNPACK_VECTOR elements; out: bits of the stored values. */
UNPACK_FN void unpack_vector(const unpack_item_t *item, uint64_t index, uint32_t *out)
{
    const uint32_t from = item->src_dtype, to = item->dst_dtype;
    const uint64_t place = unpack_place(item, index);
    uint32_t words[UNPACK_VECTOR];
    if (from == UNPACK_F32) {
        unpack_load(item->src + index * 4u, words, 8);
        UNPACK_UNROLL
        for (uint32_t k = 0; k < UNPACK_VECTOR; k++) {
            out[k] = words[k];
        }
    } else {
        unpack_load(item->src + index * 2u, words, 4);
        UNPACK_UNROLL
        for (uint32_t k = 0; k < UNPACK_VECTOR; k += 2) {
            out[k] = words[k / 2] << 16;
            out[k + 1] = words[k / 2] & 0xFFFF0000u;
        }
        if (from == UNPACK_F16) {
            UNPACK_UNROLL
            for (uint32_t k = 0; k < UNPACK_VECTOR; k++) {
                out[k] = unpack_f16(out[k] >> 16);
            }
        }
    }
    if (from != to && to == UNPACK_BF16) {
        UNPACK_UNROLL
        for (uint32_t k = 0; k < UNPACK_VECTOR; k += 2) {
            out[k] = unpack_round_bf16(out[k]);
            out[k + 1] = unpack_round_bf16(out[k + 1]);
            words[k / 2] = out[k] >> 16 | out[k + 1];
        }
    }
    if (item->dst == 0) {
        return;
    }
    if (to == UNPACK_F32) {
        unpack_store(item->dst + place * 4u, out, 8);
    } else {
        unpack_store(item->dst + place * 2u, words, 4);
    }
}

/* ---- a thread's share of a chunk ---- */

UNPACK_FN uint64_t unpack_mix_index(uint64_t index, uint32_t lane)
{
    return unpack_mix_rest(index + (lane == 0 ? 0x6c6f636b73746570ull : 0x7765696768747321ull) +
                           UNPACK_GOLDEN);
}

/* The index half of the digest, for both lanes, with the upper word of the addition that the
 * value's half begins with: a float's bits touch the lower word only. */
UNPACK_FN void unpack_mix_indices(uint64_t first, uint32_t thread,
                                  uint64_t (*mixed)[UNPACK_PER_THREAD])
{
    UNPACK_UNROLL
    for (uint32_t k = 0; k < UNPACK_PER_THREAD; k++) {
        const uint64_t index = first + k / UNPACK_VECTOR * (UNPACK_CHUNK / UNPACK_VECTORS) +
                               thread * UNPACK_VECTOR + k % UNPACK_VECTOR;
        mixed[0][k] = unpack_mix_index(index, 0) + (UNPACK_GOLDEN >> 32 << 32);
        mixed[1][k] = unpack_mix_index(index, 1) + (UNPACK_GOLDEN >> 32 << 32);
    }
}

/* The term of a float32's bits. */
UNPACK_FN uint64_t unpack_term(uint32_t bits, uint64_t mixed)
{
    const uint32_t low = (uint32_t)mixed ^ bits, high = (uint32_t)(mixed >> 32);
#ifdef __CUDACC__
    /* A multiplication by one that the compiler can't see through: multiplies and additions have
     * units of their own, and the additions' is the fuller. */
    uint64_t x = (uint64_t)low * gridDim.y + (uint32_t)UNPACK_GOLDEN;
#else
    uint64_t x = (uint64_t)low + (uint32_t)UNPACK_GOLDEN;
#endif
    x += (uint64_t)high << 32;
    return unpack_mix_rest(x);
}

typedef struct {
    uint64_t lane[2];
} unpack_sum_t;

/* Elements that no vector holds: few, or of dtypes and places that are rare. A function of its own,
 * so that the vectors' loop keeps its registers. */
UNPACK_RARE unpack_sum_t unpack_one_by_one(const unpack_item_t *item, uint64_t index, uint32_t n,
                                           uint64_t first)
{
    unpack_sum_t sum = {{0, 0}};
    for (uint32_t k = 0; k < n; k++) {
        const uint64_t bits = unpack_element(item, index + k);
        if (item->lanes != 0) {
            for (uint32_t l = 0; l < 2; l++) {
                sum.lane[l] += unpack_mix_rest((unpack_mix_index(first + index + k, l) ^ bits) +
                                               UNPACK_GOLDEN);
            }
        }
    }
    return sum;
}

/* Elements [chunk, chunk + UNPACK_CHUNK) of an item, those of one thread; adds to lanes. first: the
 * index in its tensor of the item's first element. */
UNPACK_FN void unpack_thread(const unpack_item_t *item, uint64_t first, uint64_t chunk,
                             uint32_t thread, const uint64_t (*mixed)[UNPACK_PER_THREAD],
                             uint64_t *lanes)
{
    const int vectors = unpack_by_vectors(item), digests = item->lanes != 0;
    UNPACK_UNROLL
    for (uint32_t v = 0; v < UNPACK_VECTORS; v++) {
        const uint64_t index = chunk + v * (UNPACK_CHUNK / UNPACK_VECTORS) + thread * UNPACK_VECTOR;
        if (index >= item->numel) {
            continue;
        }
        const uint64_t left = item->numel - index;
        if (!vectors || left < UNPACK_VECTOR) {
            const unpack_sum_t sum = unpack_one_by_one(
                item, index, left < UNPACK_VECTOR ? (uint32_t)left : UNPACK_VECTOR, first);
            lanes[0] += sum.lane[0];
            lanes[1] += sum.lane[1];
            continue;
        }
        uint32_t bits[UNPACK_VECTOR];
        unpack_vector(item, index, bits);
        if (digests) {
            UNPACK_UNROLL
            for (uint32_t k = 0; k < UNPACK_VECTOR; k += 2) { /* a sum of three is one addition */
                const uint64_t *m0 = mixed[0] + v * UNPACK_VECTOR + k;
                const uint64_t *m1 = mixed[1] + v * UNPACK_VECTOR + k;
                lanes[0] += unpack_term(bits[k], m0[0]) + unpack_term(bits[k + 1], m0[1]);
                lanes[1] += unpack_term(bits[k], m1[0]) + unpack_term(bits[k + 1], m1[1]);
            }
        }
    }
}

#endif
