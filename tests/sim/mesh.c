#include "tests/sim/mesh.h"
#include "base/check.h"
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t tag;
    size_t len;
    uint8_t data[];
} mesh_share_t;

/* What has arrived at a rank from one peer. A peer may be one round and one exchange ahead. */
typedef struct {
    uint64_t votes; /* rounds */
    mesh_share_t *shares[2];
    size_t n_shares;
    mesh_share_t *taken; /* handed out by the last test */
    uint64_t last_ns;
} mesh_inbox_t;

typedef struct {
    sim_mesh_t *mesh;
    uint32_t rank;
    mesh_inbox_t *from; /* [size] */
    /* votes */
    uint64_t next;        /* rounds posted so far */
    uint64_t most_votes;  /* of any peer: rounds that have arrived */
    uint32_t votes_here;  /* peers whose vote of the posted round is here */
    uint32_t shares_here; /* peers whose next share is here */
    bool vote_out;
    uint64_t *votes[2];
    size_t votes_len[2];
    /* exchange */
    bool ex_out;
    uint64_t ex_tag;
} mesh_member_t;

struct sim_mesh {
    sim_t *sim;
    uint32_t size;
    mesh_member_t *members;
    sim_mesh_stats_t stats;
};

/* ---- wire ---- */

static void send_to(mesh_member_t *me, uint32_t to, sim_event_kind_t kind, uint64_t n, void *data)
{
    sim_t *sim = me->mesh->sim;
    uint64_t *last = &me->mesh->members[to].from[me->rank].last_ns;
    uint64_t at = sim->now_ns + sim_latency_ns(sim);
    at = LK_MAX(at, *last);
    *last = at;
    sim_post(sim, at - sim->now_ns, kind, me->rank, to, n, data);
}

void sim_mesh_on_vote(sim_mesh_t *self, const sim_event_t *event)
{
    mesh_member_t *to = &self->members[event->b];
    to->from[event->a].votes = event->n + 1;
    to->most_votes = LK_MAX(to->most_votes, event->n + 1);
    to->votes_here += to->vote_out && event->n + 1 == to->next;
    sim_rank_wake(&self->sim->ranks[event->b], self->sim->now_ns);
}

void sim_mesh_on_exchange(sim_mesh_t *self, const sim_event_t *event)
{
    mesh_inbox_t *in = &self->members[event->b].from[event->a];
    const mesh_share_t *share = event->data;
    CHECK(in->n_shares < 2);
    size_t bytes = sizeof *share + share->len;
    in->shares[in->n_shares] = malloc(bytes);
    CHECK(in->shares[in->n_shares] != NULL);
    memcpy(in->shares[in->n_shares++], share, bytes);
    self->members[event->b].shares_here += in->n_shares == 1;
    sim_rank_wake(&self->sim->ranks[event->b], self->sim->now_ns);
}

/* ---- votes ---- */

static lk_status_t vote_post(void *ctx, uint64_t round, const uint64_t *vec, size_t n,
                             lk_error_t *err)
{
    mesh_member_t *me = ctx;
    sim_mesh_t *mesh = me->mesh;
    CHECKF(!me->vote_out && round == me->next && n <= ALLREDUCE_MAX_LEN, "rank %u posts round %llu",
           me->rank, (unsigned long long)round);
    size_t slot = round % 2;
    me->votes[slot] = realloc(me->votes[slot], n * sizeof *vec);
    CHECK(me->votes[slot] != NULL);
    memcpy(me->votes[slot], vec, n * sizeof *vec);
    me->votes_len[slot] = n;
    me->vote_out = true;
    me->next = round + 1;
    me->votes_here = 0;
    for (uint32_t p = 0; p < mesh->size; p++) {
        me->votes_here += me->from[p].votes > round;
    }
    sim_saw(
        mesh->sim,
        &(sim_saw_t){.kind = SIM_SAW_VOTE, .rank = me->rank, .round = round, .vec = vec, .n = n});
    for (uint32_t to = 0; to < mesh->size; to++) {
        if (to != me->rank) {
            mesh->stats.votes++;
            mesh->stats.vote_bytes += n * sizeof *vec;
            send_to(me, to, SIM_EV_VOTE, round, NULL);
        }
    }
    return LK_OK;
}

static lk_status_t vote_test(void *ctx, uint64_t *out, lk_error_t *err)
{
    mesh_member_t *me = ctx;
    sim_mesh_t *mesh = me->mesh;
    CHECK(me->vote_out);
    uint64_t round = me->next - 1;
    if (me->votes_here < mesh->size - 1) {
        return LK_INPROGRESS;
    }
    size_t slot = round % 2, n = me->votes_len[slot];
    memcpy(out, me->votes[slot], n * sizeof *out);
    bool own = mesh->size > 1 && sim_plants(mesh->sim, SIM_CANARY_OWN_VOTE);
    for (uint32_t p = 0; !own && p < mesh->size; p++) {
        const mesh_member_t *peer = &mesh->members[p];
        if (peer->votes_len[slot] != n) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u votes with another length", p);
        }
        for (size_t i = 0; i < n; i++) {
            out[i] = LK_MIN(out[i], peer->votes[slot][i]);
        }
    }
    me->vote_out = false;
    sim_saw(mesh->sim,
            &(sim_saw_t){
                .kind = SIM_SAW_DECIDED, .rank = me->rank, .round = round, .vec = out, .n = n});
    return LK_OK;
}

static bool vote_peer_waiting(void *ctx, uint64_t round)
{
    return ((mesh_member_t *)ctx)->most_votes > round;
}

/* Appends "1, 3" of the ranks for which `late` is true. */
static void list_ranks(const mesh_member_t *me,
                       bool (*late)(const mesh_member_t *me, uint32_t peer), char *out, size_t room)
{
    size_t n = 0;
    out[0] = '\0';
    for (uint32_t p = 0; p < me->mesh->size && n < room; p++) {
        if (p != me->rank && late(me, p)) {
            n += (size_t)snprintf(out + n, room - n, "%s%u", n > 0 ? ", " : "", p);
        }
    }
}

static bool vote_is_late(const mesh_member_t *me, uint32_t peer)
{
    return me->vote_out && me->from[peer].votes < me->next;
}

static void vote_missing(void *ctx, char *out, size_t room)
{
    list_ranks(ctx, vote_is_late, out, room);
}

static void vote_abort(void *ctx)
{
    ((mesh_member_t *)ctx)->vote_out = false;
}

/* ---- expert exchange ---- */

static lk_status_t ex_post(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    mesh_member_t *me = ctx;
    sim_mesh_t *mesh = me->mesh;
    CHECK(!me->ex_out);
    me->ex_out = true;
    me->ex_tag = tag;
    for (uint32_t to = 0; to < mesh->size; to++) {
        free(me->from[to].taken);
        me->from[to].taken = NULL;
        if (to == me->rank) {
            continue;
        }
        mesh_share_t *share = malloc(sizeof *share + send[to].len);
        CHECK(share != NULL);
        *share = (mesh_share_t){tag, send[to].len};
        if (send[to].len > 0) {
            memcpy(share->data, send[to].data, send[to].len);
        }
        mesh->stats.exchanges++;
        mesh->stats.exchange_bytes += send[to].len;
        send_to(me, to, SIM_EV_EXCHANGE, tag, share);
    }
    return LK_OK;
}

static bool share_is_late(const mesh_member_t *me, uint32_t peer)
{
    return me->ex_out && me->from[peer].n_shares == 0;
}

static lk_status_t ex_test(void *ctx, ep_buf_t *recv, lk_error_t *err)
{
    mesh_member_t *me = ctx;
    sim_mesh_t *mesh = me->mesh;
    CHECK(me->ex_out);
    if (me->shares_here < mesh->size - 1) {
        return LK_INPROGRESS;
    }
    for (uint32_t p = 0; p < mesh->size; p++) {
        if (p == me->rank) {
            continue;
        }
        if (me->from[p].shares[0]->tag != me->ex_tag) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u is out of step: exchange %llx, not %llx",
                                p, (unsigned long long)me->from[p].shares[0]->tag,
                                (unsigned long long)me->ex_tag);
        }
    }
    for (uint32_t p = 0; p < mesh->size; p++) {
        mesh_inbox_t *in = &me->from[p];
        recv[p] = (ep_buf_t){0};
        if (p != me->rank) {
            in->taken = in->shares[0];
            in->shares[0] = in->shares[1];
            in->n_shares--;
            me->shares_here -= in->n_shares == 0;
            recv[p] = (ep_buf_t){in->taken->data, in->taken->len};
        }
    }
    me->ex_out = false;
    return LK_OK;
}

static void ex_abort(void *ctx)
{
    ((mesh_member_t *)ctx)->ex_out = false;
}

/* ---- views ---- */

allreduce_t sim_mesh_allreduce(sim_mesh_t *self, uint32_t rank)
{
    static const allreduce_ops_t with_doorbell = {vote_post, vote_test, vote_peer_waiting,
                                                  vote_missing, vote_abort};
    static const allreduce_ops_t without = {vote_post, vote_test, NULL, vote_missing, vote_abort};
    return (allreduce_t){self->sim->o.doorbell ? &with_doorbell : &without, &self->members[rank],
                         rank, self->size};
}

ep_t sim_mesh_ep(sim_mesh_t *self, uint32_t rank)
{
    static const ep_ops_t ops = {ex_post, ex_test, ex_abort};
    return (ep_t){&ops, &self->members[rank], rank, self->size};
}

void sim_mesh_vote_missing(const sim_mesh_t *self, uint32_t rank, char *out, size_t room)
{
    list_ranks(&self->members[rank], vote_is_late, out, room);
}

void sim_mesh_step_missing(const sim_mesh_t *self, uint32_t rank, char *out, size_t room)
{
    list_ranks(&self->members[rank], share_is_late, out, room);
}

const sim_mesh_stats_t *sim_mesh_stats(const sim_mesh_t *self)
{
    return &self->stats;
}

sim_mesh_t *sim_mesh_new(sim_t *sim)
{
    sim_mesh_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->sim = sim;
    self->size = (uint32_t)sim->o.ranks;
    self->members = calloc(self->size, sizeof *self->members);
    CHECK(self->members != NULL);
    for (uint32_t r = 0; r < self->size; r++) {
        self->members[r] = (mesh_member_t){
            .mesh = self, .rank = r, .from = calloc(self->size, sizeof(mesh_inbox_t))};
        CHECK(self->members[r].from != NULL);
    }
    return self;
}

void sim_mesh_destroy(sim_mesh_t **self_p)
{
    sim_mesh_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    for (uint32_t r = 0; r < self->size; r++) {
        mesh_member_t *m = &self->members[r];
        for (uint32_t p = 0; p < self->size; p++) {
            free(m->from[p].taken);
            for (size_t i = 0; i < m->from[p].n_shares; i++) {
                free(m->from[p].shares[i]);
            }
        }
        free(m->votes[0]);
        free(m->votes[1]);
        free(m->from);
    }
    free(self->members);
    free(self);
    *self_p = NULL;
}
