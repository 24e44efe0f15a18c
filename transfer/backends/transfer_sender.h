/*
 * transfer_sender.h: the trainer's half of the frame protocol (transfer_frame.h): greets every
 * rank's lanes, then sends the same buckets to all of them from one thread, straight from the
 * caller's memory, or packed into a window that all of them map. Nothing blocks; the owner steps it
 * and polls its descriptors.
 */
#ifndef LK_TRANSFER_TRANSFER_SENDER_H
#define LK_TRANSFER_TRANSFER_SENDER_H

#include "base/env.h"
#include "transfer/backends/byte_stream.h"
#include "transfer/packed_layout.h"

#include <poll.h>

typedef struct transfer_sender transfer_sender_t;

/* token is copied. n_ranks and lanes at least 1. NULL: no memory. */
transfer_sender_t *sender_new(const lk_env_t *env, uint64_t no_progress_ns, const char *token,
                              uint32_t n_ranks, uint32_t lanes);
/* Closes every connection. */
void sender_destroy(transfer_sender_t **self_p);

/* Payloads go through a ring of `slots` slots (transfer_frame.h), which the caller owns and which
 * outlives the sender. One lane only; before the first sender_begin. */
void sender_set_window(transfer_sender_t *self, uint8_t *window, uint64_t slots);
/* Without bucket digests (the default is with); before the first sender_greet. */
void sender_set_checked(transfer_sender_t *self, bool checked);

/* Takes over an accepted connection that has yet to say hello. A stranger (wrong token, rank out of
 * range, garbage) is told so, closed, and otherwise ignored. */
void sender_add(transfer_sender_t *self, byte_stream_t *stream);
/* OK when every rank's lanes are there, else INPROGRESS. A rank that comes again replaces its
 * older connection. */
LK_MUST_USE lk_status_t sender_greet(transfer_sender_t *self);
/* "rank 1 (1 of 2 connections), rank 3; refused: wrong session token from 10.0.0.7:4000" */
void sender_missing(const transfer_sender_t *self, char *out, size_t room);

/* Starts an update. descs, data (one pointer per tensor) and what they point to live until step is
 * done. */
LK_MUST_USE lk_status_t sender_begin(transfer_sender_t *self, const tensor_desc_t *descs,
                                     const void *const *data, size_t n, bool packed,
                                     uint64_t buffer_size, lk_error_t *err);
/* INPROGRESS; OK when every rank has acknowledged every bucket; or an error that names the rank,
 * bucket and tensor (then every connection is closed). Sends nothing to a rank that has not said
 * GO, so an update that the ranks refuse can be dropped with sender_cancel and sent again later. */
LK_MUST_USE lk_status_t sender_step(transfer_sender_t *self, lk_error_t *err);
/* Ends an update. Keeps the connections if no rank has entered it; closes them otherwise. */
void sender_cancel(transfer_sender_t *self, const char *why);
/* False after an error: greet again with a new sender. */
bool sender_usable(const transfer_sender_t *self);

/* Payload bytes sent in this update, all ranks together. */
uint64_t sender_bytes(const transfer_sender_t *self);
/* Fills at most room descriptors; returns how many. */
size_t sender_pollfds(const transfer_sender_t *self, struct pollfd *fds, size_t room);

#endif
