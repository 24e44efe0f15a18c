/*
 * unpack.h: what the one kernel does with tensors that have arrived in a device's memory: per item
 * it rounds the elements to the dtype they are stored in, writes them to their place, and digests
 * what is stored (transfer/digest.h). An item is a device_piece_t (transfer/device_ops.h).
 *
 * The index half of a digest, mix64(index + C), does not depend on the tensor. Items are therefore
 * worked on in groups of equal first index: a thread mixes its eight indices once and uses them
 * for every item of the group, which nearly halves the 64-bit multiplications, the kernel's
 * bottleneck. A unit is what one block of threads does: the same indices of each item of a group.
 */
#ifndef LK_TRANSFER_DEVICE_UNPACK_H
#define LK_TRANSFER_DEVICE_UNPACK_H

#include <stdint.h>

#define UNPACK_THREADS 256u /* of a block, or of a team of a block */
#define UNPACK_TEAMS   3u   /* that fill a multiprocessor */
#define UNPACK_VECTOR  8u   /* consecutive elements of a thread */
#define UNPACK_VECTORS 1u
#define UNPACK_CHUNK   (UNPACK_THREADS * UNPACK_VECTOR * UNPACK_VECTORS)
#define UNPACK_CHUNKS  8u /* of a unit, at most */
#define UNPACK_GROUP   8u /* items, at most */
#define UNPACK_ITEMS   96u

typedef struct {
    uint64_t src; /* address in the device's memory, of any alignment */
    uint64_t dst; /* aligned to its dtype; 0: digest only */
    uint64_t numel;
    uint64_t cols, pitch;          /* element i goes to (i / cols) * pitch + i % cols of dst */
    uint64_t lanes;                /* address of two u64 to add to; 0: no digest */
    uint32_t src_dtype, dst_dtype; /* lk_dtype_t */
} unpack_item_t;

/* Bytes that the threads of a team share: a group's items, and a sum per item, lane and thread. */
#define UNPACK_SHARED (UNPACK_GROUP * ((uint32_t)sizeof(unpack_item_t) + 2 * UNPACK_THREADS * 8))

typedef struct {
    uint64_t index;        /* of the items' first elements, for digests */
    uint32_t first, count; /* items; the first is the longest */
    uint32_t first_unit;   /* units of the groups before */
    uint32_t digests;      /* some item has lanes */
} unpack_group_t;

/* A launch: the kernel's one argument, passed by value. */
typedef struct {
    uint32_t n_groups, n_units;
    uint32_t chunks; /* of a unit */
    uint32_t n_items;
    unpack_group_t groups[UNPACK_ITEMS];
    unpack_item_t items[UNPACK_ITEMS];
} unpack_launch_t;

#endif
