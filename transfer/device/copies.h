/*
 * copies.h: the second kernel: bytes to other places in a device's memory, many runs per launch,
 * by as many blocks of threads as the rest of the device's work leaves to it. Starting one of the
 * driver's own copies takes longer than most tensors need, and those take the whole device.
 */
#ifndef LK_TRANSFER_DEVICE_COPIES_H
#define LK_TRANSFER_DEVICE_COPIES_H

#include <stdint.h>

#define COPIES_THREADS 512u /* of a block */
#define COPIES_VECTORS 4u   /* of 16 bytes, of a thread, read before the first is written */
#define COPIES_CHUNK   (COPIES_THREADS * COPIES_VECTORS * 16u) /* bytes of a block at once */
#define COPIES_ITEMS   96u

typedef struct {
    uint64_t src, dst; /* addresses in the device's memory, of any alignment */
    uint64_t bytes;
    uint32_t first_chunk; /* chunks of the items before */
} copies_item_t;

/* A launch: the kernel's one argument, passed by value. */
typedef struct {
    uint32_t n_items, n_chunks;
    copies_item_t items[COPIES_ITEMS];
} copies_launch_t;

/* Adds a run; false: the launch is full. The first of a launch always fits. */
static inline int copies_add(copies_launch_t *self, uint64_t src, uint64_t dst, uint64_t bytes)
{
    uint64_t chunks = (bytes + COPIES_CHUNK - 1) / COPIES_CHUNK;
    if (self->n_items == COPIES_ITEMS ||
        (self->n_items > 0 && chunks > (uint64_t)INT32_MAX - self->n_chunks)) {
        return 0;
    }
    copies_item_t *item = &self->items[self->n_items++];
    item->src = src;
    item->dst = dst;
    item->bytes = bytes;
    item->first_chunk = self->n_chunks;
    self->n_chunks += (uint32_t)chunks;
    return 1;
}

#endif
