/*
 * packed_layout.h: which tensors share a packed buffer. Both sides compute it from sizes alone.
 * vLLM's NCCL rule: append tensors until the running total is strictly greater than the buffer
 * size, the crossing tensor included; flush; repeat; the last partial buffer is flushed too.
 */
#ifndef LK_TRANSFER_PACKED_LAYOUT_H
#define LK_TRANSFER_PACKED_LAYOUT_H

#include "transfer/tensor_desc.h"

#define PACKED_BUFFER_SIZE_DEFAULT (1ull << 30)

typedef struct {
    size_t first, count; /* tensors of this bucket */
    uint64_t bytes;
} packed_bucket_t;

/* Unpacked is one bucket per tensor. Buckets of zero bytes are kept (count > 0). Caller frees
 * *buckets with free(). */
LK_MUST_USE lk_status_t packed_layout(const tensor_desc_t *tensors, size_t n, bool packed,
                                      uint64_t buffer_size, packed_bucket_t **buckets,
                                      size_t *n_buckets, lk_error_t *err);

#endif
