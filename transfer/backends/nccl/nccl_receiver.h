/*
 * nccl_receiver.h: the receiving half of an NCCL transfer. Rank 0 is the trainer; the order and
 * boundaries of broadcasts are vLLM's: unpacked, one per tensor in its own dtype; packed, one of
 * bytes per bucket (transfer/packed_layout.h). Buckets of no bytes are not broadcast.
 *
 * A bucket whose tensors lie in the sink as they do in the bucket is received in place. Any other
 * goes through a slot of the ring, while the next one is on the wire. The whole pipeline is
 * enqueued ahead; the host only watches it.
 */
#ifndef LK_TRANSFER_NCCL_RECEIVER_H
#define LK_TRANSFER_NCCL_RECEIVER_H

#include "transfer/backends/nccl/nccl_link.h"
#include "transfer/packed_layout.h"
#include "transfer/weight_transfer_engine.h"

typedef enum {
    NCCL_RECEIVER_CLOSED,
    NCCL_RECEIVER_MEETS, /* gets the id from the trainer's store */
    NCCL_RECEIVER_JOINS,
    NCCL_RECEIVER_READY,
    NCCL_RECEIVER_RECEIVES,
    NCCL_RECEIVER_CANCELED
} nccl_receiver_phase_t;

struct tcpstore_client;

typedef struct {
    wte_context_t ctx;
    nccl_receiver_phase_t phase;
    nccl_link_t link;
    struct tcpstore_client *store;
    char host[256];
    uint16_t port;
    uint32_t world_size, rank;

    wte_update_t load;
    weight_sink_t sink;
    packed_bucket_t *buckets;
    size_t n_buckets, next, done; /* [done, next) are under way */
    bool calling;                 /* the broadcast of bucket `next` is on its way */
    void *place;                  /* of bucket `next` */
    weight_arrival_t *arrivals;   /* its tensors, for the sink */
    uint64_t unsent;              /* bytes of the buckets from next + 1 on, once it is called */
    uint32_t slot, next_slot;     /* NCCL_SLOTS_MAX: in place */
    wte_progress_t progress;
    nccl_times_t times;
} nccl_receiver_t;

/* Where the ranks meet, of a checked init_info. */
typedef struct {
    bool has_id;
    uint8_t id[NCCL_ID_BYTES];
    const char *host;
    uint16_t port;
    uint32_t world_size, rank;
    uint32_t slots; /* staging to have ready; bytes 0: none yet */
    uint64_t slot_bytes;
} nccl_meeting_t;

/* Starts; an older communicator is aborted first. */
LK_MUST_USE lk_status_t nccl_receiver_open(nccl_receiver_t *self, const nccl_comm_ops_t *ops,
                                           const wte_context_t *ctx, const nccl_meeting_t *meeting,
                                           lk_error_t *err);
LK_MUST_USE lk_status_t nccl_receiver_open_step(nccl_receiver_t *self, lk_error_t *err);
/* That an update could begin now. */
LK_MUST_USE lk_status_t nccl_receiver_check(nccl_receiver_t *self, lk_error_t *err);
LK_MUST_USE lk_status_t nccl_receiver_begin(nccl_receiver_t *self, const wte_update_t *update,
                                            const weight_sink_t *sink, lk_error_t *err);
LK_MUST_USE lk_status_t nccl_receiver_step(nccl_receiver_t *self, lk_error_t *err);
void nccl_receiver_abort(nccl_receiver_t *self);
void nccl_receiver_progress(const nccl_receiver_t *self, wte_progress_t *out);
size_t nccl_receiver_pollfds(const nccl_receiver_t *self, struct pollfd *fds, size_t room);
void nccl_receiver_fini(nccl_receiver_t *self);

#endif
