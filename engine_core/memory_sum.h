/*
 * memory_sum.h: what a rank will hold in memory, by its large parts, and whether that fits. Pure.
 * Not in the sum: the step's own buffers, which grow with the batch, and the program.
 */
#ifndef LK_ENGINE_CORE_MEMORY_SUM_H
#define LK_ENGINE_CORE_MEMORY_SUM_H

#include "base/status.h"

typedef struct {
    uint64_t weights; /* one set, with what kernels keep beside it */
    uint64_t shadow;  /* the second set; 0: in place */
    uint64_t staging; /* tensors on their way in, at most */
    uint64_t kv;
} memory_sum_t;

#define MEMORY_SUM_TEXT 256

/* "weights 1.05 GiB + second set 1.05 GiB + staging up to 1.00 GiB + KV 0.25 GiB = 3.35 GiB". */
void memory_sum_text(const memory_sum_t *self, char out[MEMORY_SUM_TEXT]);
/* UINT64_MAX when it exceeds that. */
uint64_t memory_sum_total(const memory_sum_t *self);
/* available: bytes for all ranks that start together here, which are n_ranks equal ones.
 * LK_ERR_INVALID with the sum and what is available, if that is less. */
LK_MUST_USE lk_status_t memory_sum_check(const memory_sum_t *self, uint64_t available,
                                         uint32_t n_ranks, lk_error_t *err);

#endif
