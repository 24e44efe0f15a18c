#include "engine_core/engine_link.h"
#include "base/log.h"
#include "proto/codec.h"

#include <stdio.h>

lk_status_t engine_link_open(engine_link_t *self, port_kind_t kind, const char *address,
                             const port_peer_t *identity, uint32_t rank, uint64_t generation,
                             const char *name, lk_error_t *err)
{
    *self = (engine_link_t){.rank = rank, .generation = generation};
    snprintf(self->name, sizeof self->name, "%s", name);
    snprintf(self->address, sizeof self->address, "%s", address);
    if (port_zmq_open(kind, false, address, identity, &self->port, err) < 0) {
        return lk_error_prefix(err, "%s at %s", name, address);
    }
    return LK_OK;
}

void engine_link_close(engine_link_t *self)
{
    port_destroy(&self->port);
}

void engine_link_send(engine_link_t *self, engine_link_scratch_t *scratch, const msg_t *msg)
{
    lk_error_t err = LK_ERROR_INIT;
    msg_t full = *msg;
    full.sender_role = MSG_ROLE_ENGINE;
    full.sender_rank = self->rank;
    full.generation = self->generation;
    full.sequence = ++self->sequence;
    lk_buf_clear(&scratch->envelope);
    lk_buf_clear(&scratch->body);
    lk_status_t status = msg_encode(&full, &scratch->envelope, &scratch->body, &err);
    if (status == LK_OK) {
        port_frame_t frames[2] = {{scratch->envelope.data, scratch->envelope.len},
                                  {scratch->body.data, scratch->body.len}};
        status = port_send(self->port, NULL, frames, 2, &err);
    }
    if (status < 0 && !self->lossy) {
        LK_ERROR("a %s message to %s is lost: %s", msg_type_name(msg->type), self->name, err.text);
    }
    self->lossy = status < 0;
}

lk_status_t engine_link_recv(engine_link_t *self, msg_t *out)
{
    for (;;) {
        lk_error_t err = LK_ERROR_INIT;
        port_msg_t in;
        lk_status_t status = port_recv(self->port, &in, &err);
        if (status == LK_INPROGRESS) {
            return status;
        }
        if (status == LK_OK) {
            if (in.n_frames == 2) {
                status = msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data,
                                    in.frames[1].len, out, &err);
            } else {
                status = lk_error_set(&err, LK_ERR_INVALID, "%zu frames", in.n_frames);
            }
            port_msg_fini(self->port, &in);
        }
        if (status == LK_OK) {
            return LK_OK;
        }
        LK_WARN("a message from %s is dropped: %s", self->name, err.text);
    }
}
