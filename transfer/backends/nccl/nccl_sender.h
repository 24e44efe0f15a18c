/*
 * nccl_sender.h: the sending half of an NCCL transfer: rank 0, tensors in this process's device
 * memory, vLLM's order and boundaries (nccl_receiver.h). A bucket whose tensors lie back to back in
 * memory is sent from where it lies; any other is copied together in a slot of the ring while the
 * one before it is on the wire.
 */
#ifndef LK_TRANSFER_NCCL_SENDER_H
#define LK_TRANSFER_NCCL_SENDER_H

#include "transfer/backends/nccl/nccl_link.h"
#include "transfer/packed_layout.h"

typedef struct {
    nccl_link_t link;
    const tensor_desc_t *tensors; /* of the update under way */
    const void *const *data;
    bool packed;
    packed_bucket_t *buckets;
    size_t n_buckets, next, done;
    bool placed;  /* bucket `next` lies at `place`, or will when the local stream is there */
    bool calling; /* its broadcast is on its way */
    void *place;
    uint32_t slot, next_slot;
    uint64_t bytes;
    nccl_times_t times;
} nccl_sender_t;

/* tensors and data (device memory, complete) are borrowed until step is done. The link is up.
 * Nothing is sent yet, but the first bucket is packed meanwhile. */
LK_MUST_USE lk_status_t nccl_sender_begin(nccl_sender_t *self, const tensor_desc_t *tensors,
                                          const void *const *data, size_t n, bool packed,
                                          uint64_t buffer_size, uint32_t num_buffers,
                                          lk_error_t *err);
/* INPROGRESS; OK: every rank has everything; or an error: then the link is down. */
LK_MUST_USE lk_status_t nccl_sender_step(nccl_sender_t *self, lk_error_t *err);
/* Something is about to happen: call step again without sleeping. */
bool nccl_sender_soon(const nccl_sender_t *self);
/* Ends what is under way, and with it the link, unless nothing was sent yet; waits until the
 * tensors are no longer read. */
void nccl_sender_cancel(nccl_sender_t *self);
void nccl_sender_fini(nccl_sender_t *self);

#endif
