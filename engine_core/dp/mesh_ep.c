/* Expert exchange: ep_ops over the mesh. Written from the caller's buffers, read into one of two
 * buffers per peer that grow to the largest exchange and stay. */
#include "base/check.h"
#include "engine_core/dp/mesh_internal.h"

#include <stdlib.h>

lk_status_t mesh_ep_header(mesh_t *self, mesh_conn_t *conn, uint8_t **body, lk_error_t *err)
{
    const mesh_header_t *head = &conn->head;
    uint64_t mine = self->ex.seq;
    if (head->seq < mine) {
        return LK_OK; /* of an exchange that was aborted here: dropped */
    }
    /* its next exchange can only begin once it has my share of this one */
    if (head->seq > mine + (self->ex.posted ? 1 : 0)) {
        return lk_error_set(err, LK_ERR_PEER,
                            "is out of step: it sends exchange %llu, this is %llu",
                            (unsigned long long)head->seq, (unsigned long long)mine);
    }
    mesh_ex_slot_t *slot = &self->peers[conn->rank].exchanges[head->seq & 1];
    if (slot->used && slot->seq == head->seq) {
        return lk_error_set(err, LK_ERR_PEER, "sent exchange %llu twice",
                            (unsigned long long)head->seq);
    }
    if (head->length > slot->cap) {
        free(slot->data);
        slot->cap = 0;
        slot->data = malloc(head->length);
        if (slot->data == NULL) {
            return lk_error_set(err, LK_ERR_PEER, "sends %llu bytes, for which there is no memory",
                                (unsigned long long)head->length);
        }
        slot->cap = head->length;
    }
    slot->used = true;
    slot->complete = false;
    slot->seq = head->seq;
    slot->tag = head->tag;
    slot->len = head->length;
    *body = slot->data;
    return LK_OK;
}

lk_status_t mesh_ep_frame(mesh_t *self, mesh_conn_t *conn, lk_error_t *err)
{
    mesh_ex_slot_t *slot = &self->peers[conn->rank].exchanges[conn->head.seq & 1];
    if (conn->head.seq >= self->ex.seq && slot->used && slot->seq == conn->head.seq) {
        slot->complete = true;
    }
    return LK_OK;
}

static lk_status_t ep_post(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    mesh_t *self = ctx;
    CHECKF(!self->ex.posted, "an exchange is out already");
    LK_RETURN_IF_ERROR(mesh_any_dead(self, err));
    for (uint32_t i = 0; i < self->n; i++) {
        if (i != self->place && send[i].len > MESH_MAX_EXCHANGE) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "%zu bytes for rank %u, at most %llu",
                                send[i].len, self->members[i], MESH_MAX_EXCHANGE);
        }
    }
    self->ex.posted = true;
    self->ex.tag = tag;
    self->stats.exchanges++;
    for (uint32_t i = 0; i < self->n; i++) {
        uint32_t r = self->members[i];
        mesh_conn_t *conn = self->peers[r].conn;
        if (i == self->place) {
            continue;
        }
        CHECKF(conn != NULL && !conn->ex_active, "rank %u is not ready for an exchange", r);
        conn->ex_head = mesh_header(self, FRAME_EXCHANGE, self->ex.seq, tag, send[i].len);
        conn->ex_data = send[i].data;
        conn->ex_sent = 0;
        conn->ex_active = true;
        self->stats.exchange_bytes += sizeof conn->ex_head + send[i].len;
        mesh_pump(self, r);
    }
    return LK_OK;
}

/* OK: rank's share is here and mine is sent. */
static lk_status_t test_peer(mesh_t *self, uint32_t rank, lk_error_t *err)
{
    const mesh_peer_t *peer = &self->peers[rank];
    const mesh_ex_slot_t *slot = &peer->exchanges[self->ex.seq & 1];
    for (int look = 0;; look++) {
        bool here = slot->used && slot->seq == self->ex.seq;
        if (here && slot->tag != self->ex.tag) {
            return lk_error_set(
                err, LK_ERR_PEER, "rank %u is out of step: its exchange has tag %#llx, mine %#llx",
                rank, (unsigned long long)slot->tag, (unsigned long long)self->ex.tag);
        }
        if (here && slot->complete && !peer->conn->ex_active) {
            return LK_OK;
        }
        LK_RETURN_IF_ERROR(mesh_peer_status(self, rank, err));
        if (look == 1) {
            return LK_INPROGRESS;
        }
        mesh_pump(self, rank);
    }
}

static lk_status_t ep_test(void *ctx, ep_buf_t *recv, lk_error_t *err)
{
    mesh_t *self = ctx;
    lk_status_t all = LK_OK;
    CHECKF(self->ex.posted, "no exchange is out");
    for (uint32_t r = 0; r < self->size; r++) {
        if (mesh_is_peer(self, r)) {
            lk_status_t one = test_peer(self, r, err);
            LK_RETURN_IF_ERROR(one);
            all = one == LK_INPROGRESS ? one : all;
        }
    }
    if (all != LK_OK) {
        return all;
    }
    for (uint32_t i = 0; i < self->n; i++) {
        const mesh_ex_slot_t *slot = &self->peers[self->members[i]].exchanges[self->ex.seq & 1];
        recv[i] = i == self->place ? (ep_buf_t){NULL, 0} : (ep_buf_t){slot->data, slot->len};
    }
    self->ex.posted = false;
    self->ex.seq++;
    return LK_OK;
}

static bool is_share_missing(const mesh_t *self, uint32_t rank)
{
    const mesh_ex_slot_t *slot = &self->peers[rank].exchanges[self->ex.seq & 1];
    return self->ex.posted && !(slot->used && slot->seq == self->ex.seq && slot->complete);
}

void mesh_exchange_missing(const mesh_t *self, char *out, size_t room)
{
    mesh_list(self, is_share_missing, out, room);
}

static void ep_abort(void *ctx)
{
    mesh_t *self = ctx;
    if (!self->ex.posted) {
        return;
    }
    for (uint32_t r = 0; r < self->size; r++) {
        if (mesh_is_peer(self, r) && self->peers[r].conn != NULL) {
            mesh_conn_cancel_exchange(self->peers[r].conn);
        }
    }
    self->ex.posted = false;
    self->ex.seq++; /* what still comes for it is dropped */
}

static const ep_ops_t mesh_ep_ops = {ep_post, ep_test, ep_abort};

ep_t mesh_ep(mesh_t *self)
{
    return (ep_t){&mesh_ep_ops, self, self->place, self->n};
}
