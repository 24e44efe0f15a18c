/*
 * msg_track.h: which messages of one sender have come over one connection, by their envelopes. A
 * connection that breaks and is made anew loses what was under way; no socket says so.
 */
#ifndef LK_PROTO_MSG_TRACK_H
#define LK_PROTO_MSG_TRACK_H

#include "proto/messages.h"

typedef struct {
    uint64_t generation, sequence; /* of the newest one */
} msg_track_t;

/* What the life has sent so far was for another receiver. */
void msg_track_begin(msg_track_t *self, uint64_t generation, uint64_t sequence);
/* True if messages before this one are missing. A life's first one has number 1, unless
 * msg_track_begin said otherwise; 0 is not numbered. */
bool msg_track_gap(msg_track_t *self, uint64_t generation, uint64_t sequence);

#endif
