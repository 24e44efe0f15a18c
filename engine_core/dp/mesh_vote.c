/* Votes: allreduce_ops over the mesh. Every rank sends its vector to every other one and takes the
 * MIN itself: one hop, and at 4 + 4A entries the bytes do not matter. */
#include "base/check.h"
#include "engine_core/dp/mesh_internal.h"

#include <string.h>

static mesh_vote_slot_t *slot_of(const mesh_t *self, uint32_t rank, uint64_t round)
{
    return &self->peers[rank].votes[round & 1];
}

static bool has_vote(const mesh_t *self, uint32_t rank, uint64_t round)
{
    const mesh_vote_slot_t *slot = slot_of(self, rank, round);
    return slot->used && slot->round == round;
}

lk_status_t mesh_vote_header(mesh_t *self, mesh_conn_t *conn, uint8_t **body, lk_error_t *err)
{
    const mesh_header_t *head = &conn->head;
    if (head->length % 8 != 0 || head->length > sizeof conn->vote) {
        return lk_error_set(err, LK_ERR_PEER, "sent a vote of %llu bytes",
                            (unsigned long long)head->length);
    }
    if (self->vote.any_done && head->seq <= self->vote.done) {
        return LK_OK; /* of a round that is decided: dropped */
    }
    const mesh_vote_slot_t *slot = slot_of(self, (uint32_t)conn->rank, head->seq);
    if (slot->used && slot->round != head->seq) {
        return lk_error_set(err, LK_ERR_PEER, "voted in round %llu while round %llu is not decided",
                            (unsigned long long)head->seq, (unsigned long long)slot->round);
    }
    *body = (uint8_t *)conn->vote;
    return LK_OK;
}

lk_status_t mesh_vote_frame(mesh_t *self, mesh_conn_t *conn, lk_error_t *err)
{
    const mesh_header_t *head = &conn->head;
    if (conn->body == NULL || (self->vote.any_done && head->seq <= self->vote.done)) {
        return LK_OK;
    }
    mesh_vote_slot_t *slot = slot_of(self, (uint32_t)conn->rank, head->seq);
    slot->used = true;
    slot->round = head->seq;
    slot->n = head->length / 8;
    memcpy(slot->vec, conn->vote, head->length);
    return LK_OK;
}

static lk_status_t vote_post(void *ctx, uint64_t round, const uint64_t *vec, size_t n,
                             lk_error_t *err)
{
    mesh_t *self = ctx;
    CHECKF(!self->vote.posted, "a vote is out already");
    CHECK(n > 0 && n <= ALLREDUCE_MAX_LEN);
    LK_RETURN_IF_ERROR(mesh_any_dead(self, err));
    memcpy(self->vote.vec, vec, n * sizeof *vec);
    self->vote.n = n;
    self->vote.round = round;
    self->vote.posted = true;
    mesh_header_t head = mesh_header(self, FRAME_VOTE, round, 0, n * sizeof *vec);
    for (uint32_t r = 0; r < self->size; r++) {
        mesh_peer_t *peer = &self->peers[r];
        if (!mesh_is_peer(self, r)) {
            continue;
        }
        CHECKF(peer->conn != NULL, "not connected to rank %u", r);
        mesh_conn_queue(peer->conn, &head, vec);
        self->stats.votes_sent++;
        self->stats.vote_bytes += sizeof head + head.length;
        mesh_pump(self, r);
    }
    return LK_OK;
}

static lk_status_t vote_test(void *ctx, uint64_t *out, lk_error_t *err)
{
    mesh_t *self = ctx;
    uint64_t round = self->vote.round;
    bool complete = true;
    CHECKF(self->vote.posted, "no vote is out");
    for (uint32_t r = 0; r < self->size; r++) {
        if (!mesh_is_peer(self, r)) {
            continue;
        }
        if (!has_vote(self, r, round) || mesh_conn_has_output(self->peers[r].conn)) {
            mesh_pump(self, r);
        }
        if (!has_vote(self, r, round)) {
            LK_RETURN_IF_ERROR(mesh_peer_status(self, r, err));
            complete = false;
        } else if (slot_of(self, r, round)->n != self->vote.n) {
            return lk_error_set(
                err, LK_ERR_PEER, "rank %u voted with %zu entries in round %llu, rank %u with %zu",
                r, slot_of(self, r, round)->n, (unsigned long long)round, self->rank, self->vote.n);
        }
    }
    if (!complete) {
        return LK_INPROGRESS;
    }
    memcpy(out, self->vote.vec, self->vote.n * sizeof *out);
    for (uint32_t r = 0; r < self->size; r++) {
        if (!mesh_is_peer(self, r)) {
            continue;
        }
        mesh_vote_slot_t *slot = slot_of(self, r, round);
        for (size_t i = 0; i < self->vote.n; i++) {
            out[i] = LK_MIN(out[i], slot->vec[i]);
        }
        slot->used = false;
    }
    self->vote.posted = false;
    self->vote.done = round;
    self->vote.any_done = true;
    return LK_OK;
}

static bool vote_peer_waiting(void *ctx, uint64_t round)
{
    const mesh_t *self = ctx;
    for (uint32_t r = 0; r < self->size; r++) {
        if (mesh_is_peer(self, r) && has_vote(self, r, round)) {
            return true;
        }
    }
    return false;
}

static bool vote_is_missing(const mesh_t *self, uint32_t rank)
{
    return self->vote.posted && !has_vote(self, rank, self->vote.round);
}

static void vote_missing(void *ctx, char *out, size_t room)
{
    mesh_list(ctx, vote_is_missing, out, room);
}

static void vote_abort(void *ctx)
{
    mesh_t *self = ctx;
    self->vote.posted = false;
}

static const allreduce_ops_t vote_ops = {vote_post, vote_test, vote_peer_waiting, vote_missing,
                                         vote_abort};

allreduce_t mesh_allreduce(mesh_t *self)
{
    return (allreduce_t){&vote_ops, self, self->place, self->n};
}
