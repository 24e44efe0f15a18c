/*
 * copies_thread.h: what one thread of the copy kernel does with a chunk of an item, in the common
 * subset of C and CUDA C++, so that a test can run every thread on the CPU.
 */
#ifndef LK_TRANSFER_DEVICE_COPIES_THREAD_H
#define LK_TRANSFER_DEVICE_COPIES_THREAD_H

#include "transfer/device/copies.h"
#include "transfer/device/unpack_thread.h"

#ifdef __CUDACC__
typedef uint4 copies_vector_t;
#define COPIES_LOAD(p)     __ldcs((const copies_vector_t *)(p))
#define COPIES_STORE(p, v) __stcs((copies_vector_t *)(p), v)
#else
typedef struct {
    uint64_t half[2];
} copies_vector_t;
#define COPIES_LOAD(p)     (*(const copies_vector_t *)(p))
#define COPIES_STORE(p, v) (*(copies_vector_t *)(p) = (v))
#endif

/* Which item a chunk of the launch belongs to. */
UNPACK_FN uint32_t copies_item_of(const copies_launch_t *launch, uint32_t chunk)
{
    uint32_t low = 0, high = launch->n_items;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (launch->items[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Bytes one by one: of what is not aligned, and of an end. */
UNPACK_FN void copies_bytes(const copies_item_t *item, uint64_t from, uint64_t to, uint32_t thread)
{
    for (uint64_t i = from + thread; i < to; i += COPIES_THREADS) {
        ((uint8_t *)item->dst)[i] = ((const uint8_t *)item->src)[i];
    }
}

UNPACK_FN void copies_thread(const copies_item_t *item, uint32_t chunk, uint32_t thread)
{
    const uint64_t start = (uint64_t)(chunk - item->first_chunk) * COPIES_CHUNK;
    const uint64_t end = start + COPIES_CHUNK < item->bytes ? start + COPIES_CHUNK : item->bytes;
    if (((item->src | item->dst) & 15) != 0) {
        copies_bytes(item, start, end, thread);
        return;
    }
    const uint64_t whole = end / 16 * 16;
    const uint64_t at = start + 16 * thread, step = 16 * COPIES_THREADS;
    copies_vector_t v[COPIES_VECTORS];
    UNPACK_UNROLL
    for (uint32_t k = 0; k < COPIES_VECTORS; k++) {
        if (at + k * step < whole) {
            v[k] = COPIES_LOAD(item->src + at + k * step);
        }
    }
    UNPACK_UNROLL
    for (uint32_t k = 0; k < COPIES_VECTORS; k++) {
        if (at + k * step < whole) {
            COPIES_STORE(item->dst + at + k * step, v[k]);
        }
    }
    copies_bytes(item, whole, end, thread);
}

#endif
