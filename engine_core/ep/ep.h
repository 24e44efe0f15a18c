/*
 * ep.h: all-to-all of variable-sized byte buffers among the DP ranks of an expert-parallel group.
 * Every rank posts the same sequence of exchanges (same tags); a rank with nothing to send posts
 * empty buffers. One exchange is posted at a time.
 */
#ifndef LK_ENGINE_CORE_EP_EP_H
#define LK_ENGINE_CORE_EP_EP_H

#include "base/status.h"

#define EP_MAX_RANKS 1024

typedef struct {
    const void *data;
    size_t len;
} ep_buf_t;

typedef struct ep_ops {
    /* send[0..size-1], one per rank. send[own rank] is ignored: the caller keeps that share itself.
     * The buffers are borrowed until test is done. tag: (step << 16 | layer << 1 | phase), equal on
     * all ranks; a peer's exchange with another tag is LK_ERR_PEER ("out of step"). */
    lk_status_t (*post)(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err);
    /* INPROGRESS, or OK with recv[0..size-1] filled (recv[own] is empty), valid until the next
     * post; or LK_ERR_PEER naming the rank that is gone. */
    lk_status_t (*test)(void *ctx, ep_buf_t *recv, lk_error_t *err);
    /* Forgets what is posted. Idempotent. */
    void (*abort)(void *ctx);
} ep_ops_t;

typedef struct {
    const ep_ops_t *ops;
    void *ctx;
    uint32_t rank, size;
} ep_t;

/* One rank: post and test succeed at once. */
ep_t ep_local(void);

#endif
