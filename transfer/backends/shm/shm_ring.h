/*
 * shm_ring.h: the memory that a trainer and the ranks of its host share. A sealed memfd: it has no
 * name, so that nothing is left in /dev/shm however a process ends, and it can't shrink, so that no
 * reader is killed by a missing page. Ranks get it over the control socket (shm_stream.h).
 */
#ifndef LK_TRANSFER_SHM_RING_H
#define LK_TRANSFER_SHM_RING_H

#include "transfer/backends/transfer_frame.h"

#define SHM_RING_SLOTS_MIN 2u
#define SHM_RING_SLOTS_MAX (1u << 20)
/* Deep enough that both sides work at the same time, small enough to stay in a last-level cache. */
#define SHM_RING_SLOTS_DEFAULT 8u

typedef struct {
    uint8_t *map; /* NULL: none */
    uint64_t bytes;
    int fd; /* the trainer's; -1 at a rank. Meaningful while map is not NULL */
} shm_ring_t;

/* A writable ring with all its pages in place. */
LK_MUST_USE lk_status_t shm_ring_create(shm_ring_t *out, uint64_t slots, lk_error_t *err);
/* Maps a received ring read-only, after checking that it has `bytes` bytes and is sealed. Takes
 * over fd, on failure too. */
LK_MUST_USE lk_status_t shm_ring_map(shm_ring_t *out, int fd, uint64_t bytes, lk_error_t *err);
/* Accepts zeroed; leaves it zeroed. */
void shm_ring_fini(shm_ring_t *self);

#endif
