/* engine_link.h: a port and the envelopes of one engine on it. */
#ifndef LK_ENGINE_CORE_ENGINE_LINK_H
#define LK_ENGINE_CORE_ENGINE_LINK_H

#include "base/buf.h"
#include "base/port.h"
#include "proto/messages.h"

typedef struct {
    lk_port_t *port; /* NULL: not open */
    char address[256];
    char name[48]; /* "front end 0's input", for texts */
    uint32_t rank;
    uint64_t generation, sequence;
    bool lossy; /* the last send failed: said once */
} engine_link_t;

typedef struct {
    lk_buf_t envelope, body;
} engine_link_scratch_t;

/* Connects over ZeroMQ. identity: of a DEALER, or NULL. */
LK_MUST_USE lk_status_t engine_link_open(engine_link_t *self, port_kind_t kind, const char *address,
                                         const port_peer_t *identity, uint32_t rank,
                                         uint64_t generation, const char *name, lk_error_t *err);
void engine_link_close(engine_link_t *self);
/* Fills the envelope, encodes and queues. A failure is logged, once until the next success; the gap
 * in the sequence tells the receiver (proto/msg_track.h). */
void engine_link_send(engine_link_t *self, engine_link_scratch_t *scratch, const msg_t *msg);
/* INPROGRESS when there is nothing. A frame that is no message is logged and skipped. The caller
 * owns *out (msg_fini). */
LK_MUST_USE lk_status_t engine_link_recv(engine_link_t *self, msg_t *out);

#endif
