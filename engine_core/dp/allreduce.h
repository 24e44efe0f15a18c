/*
 * allreduce.h: the all-reduce (MIN of u64 vectors) that rounds are made of. protocol.md section 13.
 */
#ifndef LK_ENGINE_CORE_DP_ALLREDUCE_H
#define LK_ENGINE_CORE_DP_ALLREDUCE_H

#include "base/status.h"

#define ALLREDUCE_MAX_LEN 1288 /* 8 + 5A entries of A <= 256 front ends; 5R of R <= 256 ranks */

typedef struct allreduce_ops {
    /* Sends my vector of round `round` (n entries, copied). One vote is out at a time. */
    lk_status_t (*post)(void *ctx, uint64_t round, const uint64_t *vec, size_t n, lk_error_t *err);
    /* INPROGRESS; OK with the MIN over all ranks in out[n]; LK_ERR_PEER naming a rank that is gone
     * or whose vector has another length. A peer may be one round ahead: two slots by round. */
    lk_status_t (*test)(void *ctx, uint64_t *out, lk_error_t *err);
    /* The doorbell: has a peer posted this round? */
    bool (*peer_waiting)(void *ctx, uint64_t round);
    /* Ranks whose vote for the posted round is missing, as "1, 3"; for error texts. */
    void (*missing)(void *ctx, char *out, size_t room);
    void (*abort)(void *ctx);
} allreduce_ops_t;

typedef struct {
    const allreduce_ops_t *ops;
    void *ctx;
    uint32_t rank, size;
} allreduce_t;

#endif
