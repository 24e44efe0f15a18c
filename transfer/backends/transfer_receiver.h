/*
 * transfer_receiver.h: a rank's half of the frame protocol (transfer_frame.h) over byte streams.
 * The tcp, mem and shm engines are this object plus a way to connect. Zeroed memory is a closed
 * receiver. Memory: one staging buffer per lane, as large as the largest bucket with a tensor that
 * could not be received in place; kept for later updates.
 */
#ifndef LK_TRANSFER_TRANSFER_RECEIVER_H
#define LK_TRANSFER_TRANSFER_RECEIVER_H

#include "transfer/backends/byte_stream.h"
#include "transfer/backends/transfer_frame.h"
#include "transfer/packed_layout.h"
#include "transfer/weight_transfer_engine.h"

/* Payload bytes that one receiver_step moves or hands on, about: it runs between the slices of a
 * forward pass. */
#define RECEIVER_STEP_BYTES (1u << 20)

typedef enum {
    RECEIVER_CLOSED,    /* never opened, failed or aborted */
    RECEIVER_OPENING,   /* connecting and saying hello */
    RECEIVER_IDLE,      /* ready for an update */
    RECEIVER_RECEIVING, /* inside one */
    RECEIVER_CANCELED   /* aborted; the next step says so */
} receiver_phase_t;

typedef struct transfer_lane transfer_lane_t;

typedef struct {
    receiver_phase_t phase;
    wte_context_t ctx;
    char token[TRANSFER_TOKEN_MAX + 1];
    char peer[128];
    transfer_lane_t *lanes;
    size_t n_lanes;
    size_t turn;                 /* lane that the next step begins with */
    transfer_lane_t *delivering; /* has handed over a slice of a tensor: the others wait */
    uint64_t session;
    uint64_t update;       /* counts from 1 */
    uint64_t progress_ns;  /* when something last moved */
    bool unchecked;        /* the trainer sends no bucket digests */
    const uint8_t *window; /* see receiver_set_window */
    uint64_t window_slots;

    wte_update_t load;
    weight_sink_t sink;
    packed_bucket_t *buckets;
    size_t n_buckets;
    wte_progress_t progress;
} transfer_receiver_t;

/* Starts to connect and to say hello. Takes over the streams, on failure too; replaces older ones.
 */
LK_MUST_USE lk_status_t receiver_open(transfer_receiver_t *self, const wte_context_t *ctx,
                                      const char *token, byte_stream_t *const *streams, size_t n,
                                      lk_error_t *err);
/* INPROGRESS, OK when the trainer has welcomed every lane, or an error (then closed). */
LK_MUST_USE lk_status_t receiver_open_step(transfer_receiver_t *self, lk_error_t *err);

/* The first lane's stream, of an open receiver. Borrowed. */
byte_stream_t *receiver_stream(const transfer_receiver_t *self);
/* Payloads are in a ring of `slots` slots, which the caller owns and keeps mapped until the
 * receiver is closed. For an open receiver of one lane, before its first update. */
void receiver_set_window(transfer_receiver_t *self, const uint8_t *window, uint64_t slots);

/* LK_ERR_STATE if not open, or if the trainer has hung up: nothing of a new update was lost, so it
 * is no failure that a retry would repair. No side effects. */
LK_MUST_USE lk_status_t receiver_check(const transfer_receiver_t *self, const char *backend,
                                       lk_error_t *err);
LK_MUST_USE lk_status_t receiver_begin(transfer_receiver_t *self, const wte_update_t *update,
                                       const weight_sink_t *sink, lk_error_t *err);
/* INPROGRESS; OK when all is in the sink and acknowledged; or an error. After an error in
 * mid-stream the connection is closed: what is under way on it can't be told from a later update's
 * bytes. */
LK_MUST_USE lk_status_t receiver_step(transfer_receiver_t *self, lk_error_t *err);

/* Idempotent. Keeps an idle connection; ends one in use, and the next step is LK_ERR_CANCELED. */
void receiver_abort(transfer_receiver_t *self);
void receiver_progress(const transfer_receiver_t *self, wte_progress_t *out);
size_t receiver_pollfds(const transfer_receiver_t *self, struct pollfd *fds, size_t room);
/* Back to zeroed. Accepts zeroed. */
void receiver_fini(transfer_receiver_t *self);

#endif
