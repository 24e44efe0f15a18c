#include "tests/sim/mesh.h"
#include "base/check.h"
#include "base/hash.h"
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { FRAME_HELLO, FRAME_VOTE, FRAME_SHARE, FRAME_BYE, FRAME_EOF } frame_kind_t;

typedef struct {
    frame_kind_t kind;
    uint64_t from_attempt, to_attempt, epoch;
    uint64_t n; /* VOTE: round; SHARE: tag; BYE: the rank to blame */
    size_t len;
    uint8_t data[];
} frame_t;

/* What has arrived from one peer. A peer may be one round and one exchange ahead. */
typedef struct {
    uint64_t attempt; /* of the peer, in this epoch */
    bool member, hello, dead;
    int64_t lost;
    char why[160];
    uint64_t votes; /* rounds */
    frame_t *vote[2];
    frame_t *shares[2], *taken; /* taken: handed out by the last test */
    size_t n_shares;
    uint64_t last_ns;
} peer_t;

/* Somebody who knows our address before we know that we are to connect. */
typedef struct {
    uint32_t rank;
    uint64_t attempt, epoch;
    bool gone;
} early_t;

struct sim_mesh {
    sim_t *sim;
    uint32_t rank, size; /* of the cluster */
    roster_t roster;     /* of the group */
    uint64_t attempt, epoch;
    char address[48];
    bool joined;
    peer_t *peers; /* [size] */
    early_t *early;
    size_t n_early, cap_early;
    uint32_t n_hello, n_dead;
    /* votes */
    uint64_t next;       /* rounds posted so far */
    uint64_t most_votes; /* of any peer: rounds that have arrived */
    uint32_t votes_here; /* peers whose vote of the posted round is here */
    bool vote_out;
    uint64_t *vote;
    size_t vote_len;
    /* exchange */
    bool ex_out;
    uint64_t ex_tag;
    uint32_t shares_here; /* peers whose next share is here */
};

static bool is_peer(const sim_mesh_t *self, uint32_t rank)
{
    return rank != self->rank && self->peers[rank].member;
}

/* ---- the wire ---- */

static frame_t *frame_new(const sim_mesh_t *self, uint32_t to, frame_kind_t kind, uint64_t n,
                          const void *data, size_t len)
{
    frame_t *frame = malloc(sizeof *frame + len);
    CHECK(frame != NULL);
    *frame = (frame_t){kind, self->attempt, self->peers[to].attempt, self->epoch, n, len};
    if (len > 0) {
        memcpy(frame->data, data, len);
    }
    return frame;
}

static void send_frame(sim_mesh_t *self, uint32_t to, frame_kind_t kind, uint64_t n,
                       const void *data, size_t len)
{
    sim_t *sim = self->sim;
    frame_t *frame = frame_new(self, to, kind, n, data, len);
    uint64_t *last = &sim->mesh_last_ns[self->rank * self->size + to];
    uint64_t at = sim->now_ns + sim_latency_ns(sim);
    at = LK_MAX(at, *last);
    *last = at;
    sim_post(sim, at - sim->now_ns, SIM_EV_MESH, self->rank, to, kind, frame);
}

static void mark_dead(peer_t *peer, sim_mesh_t *self, int64_t lost, const char *why)
{
    if (!peer->dead) {
        peer->dead = true;
        peer->lost = lost;
        snprintf(peer->why, sizeof peer->why, "%s", why);
        self->n_dead++;
    }
}

static void on_end(sim_mesh_t *self, uint32_t from, const frame_t *frame)
{
    char why[160];
    peer_t *peer = &self->peers[from];
    if (frame->kind == FRAME_BYE) {
        snprintf(why, sizeof why, "rank %u left the group: %s", from, (const char *)frame->data);
        mark_dead(peer, self, (int64_t)frame->n, why);
    } else {
        snprintf(why, sizeof why, "rank %u closed its mesh connection", from);
        mark_dead(peer, self, from, why);
    }
}

static void on_hello(sim_mesh_t *self, uint32_t from, const frame_t *frame)
{
    peer_t *peer = &self->peers[from];
    if (frame->epoch == self->epoch && frame->from_attempt == peer->attempt && !peer->hello) {
        peer->hello = true;
        self->n_hello++;
    }
}

static void keep_early(sim_mesh_t *self, uint32_t from, const frame_t *frame)
{
    if (frame->kind == FRAME_HELLO) {
        if (self->n_early == self->cap_early) {
            self->cap_early = 2 * self->cap_early + 8;
            self->early = realloc(self->early, self->cap_early * sizeof *self->early);
            CHECK(self->early != NULL);
        }
        self->early[self->n_early++] = (early_t){from, frame->from_attempt, frame->epoch, false};
    }
    for (size_t i = 0; i < self->n_early; i++) {
        self->early[i].gone |= frame->kind != FRAME_HELLO && self->early[i].rank == from &&
                               self->early[i].attempt == frame->from_attempt;
    }
}

static frame_t *copy_of(const frame_t *frame)
{
    size_t bytes = sizeof *frame + frame->len;
    frame_t *copy = malloc(bytes);
    CHECK(copy != NULL);
    memcpy(copy, frame, bytes);
    return copy;
}

static void on_vote(sim_mesh_t *self, uint32_t from, const frame_t *frame)
{
    peer_t *peer = &self->peers[from];
    free(peer->vote[frame->n % 2]);
    peer->vote[frame->n % 2] = copy_of(frame);
    peer->votes = frame->n + 1;
    self->most_votes = LK_MAX(self->most_votes, peer->votes);
    self->votes_here += self->vote_out && peer->votes == self->next;
}

static void on_share(sim_mesh_t *self, uint32_t from, const frame_t *frame)
{
    peer_t *peer = &self->peers[from];
    CHECK(peer->n_shares < 2);
    peer->shares[peer->n_shares++] = copy_of(frame);
    self->shares_here += peer->n_shares == 1;
}

void sim_mesh_on_frame(sim_t *sim, const sim_event_t *event)
{
    const frame_t *frame = event->data;
    sim_rank_t *rank = &sim->ranks[event->b];
    sim_mesh_t *self = rank->mesh;
    sim_trace(sim, lk_hash64(frame->data, frame->len, frame->n));
    if (self == NULL || self->attempt != frame->to_attempt) {
        return; /* the connection that this came over is closed */
    }
    if (!self->joined) {
        keep_early(self, event->a, frame);
    } else if (frame->kind == FRAME_HELLO) {
        on_hello(self, event->a, frame);
    } else if (frame->from_attempt == self->peers[event->a].attempt) {
        switch (frame->kind) {
        case FRAME_VOTE:
            on_vote(self, event->a, frame);
            break;
        case FRAME_SHARE:
            on_share(self, event->a, frame);
            break;
        default:
            on_end(self, event->a, frame);
        }
    }
    sim_rank_wake(rank, sim->now_ns);
}

/* ---- connecting and leaving ---- */

static void fresh_attempt(sim_mesh_t *self)
{
    self->attempt = ++self->sim->mesh_attempts;
    snprintf(self->address, sizeof self->address, "mesh %u %llu", self->rank,
             (unsigned long long)self->attempt);
}

static void forget_peers(sim_mesh_t *self)
{
    for (uint32_t p = 0; p < self->size; p++) {
        peer_t *peer = &self->peers[p];
        for (size_t i = 0; i < peer->n_shares; i++) {
            free(peer->shares[i]);
        }
        free(peer->taken);
        free(peer->vote[0]);
        free(peer->vote[1]);
        *peer = (peer_t){0};
    }
    self->n_early = 0;
    self->n_hello = self->n_dead = self->votes_here = self->shares_here = 0;
    self->next = self->most_votes = 0;
    self->vote_out = self->ex_out = self->joined = false;
}

static void say_end(sim_mesh_t *self, frame_kind_t kind, int64_t lost, const char *why)
{
    for (uint32_t p = 0; self->joined && p < self->size; p++) {
        if (is_peer(self, p)) {
            send_frame(self, p, kind, (uint64_t)lost, why, strlen(why) + 1);
        }
    }
}

void sim_mesh_break(sim_mesh_t *self, sim_mesh_t *peer)
{
    bool connected = self->joined && peer->joined && self->epoch == peer->epoch &&
                     self->peers[peer->rank].hello && peer->peers[self->rank].hello;
    if (connected) {
        send_frame(self, peer->rank, FRAME_EOF, 0, NULL, 0);
        send_frame(peer, self->rank, FRAME_EOF, 0, NULL, 0);
    }
}

const char *sim_mesh_address(const sim_mesh_t *self)
{
    return self->address;
}

void sim_mesh_connect(sim_mesh_t *self, uint64_t epoch, const roster_t *roster,
                      const msg_name_t *addresses)
{
    CHECK(!self->joined);
    self->epoch = epoch;
    self->joined = true;
    self->roster = *roster;
    for (uint32_t i = 0; i < roster->n; i++) {
        unsigned rank;
        unsigned long long attempt;
        CHECK(sscanf(msg_cstr(addresses[i].text), "mesh %u %llu", &rank, &attempt) == 2);
        CHECK(rank == roster->ranks[i]);
        self->peers[rank].attempt = attempt;
        self->peers[rank].member = true;
    }
    for (size_t i = 0; i < self->n_early; i++) {
        const early_t *e = &self->early[i];
        peer_t *peer = &self->peers[e->rank];
        if (peer->member && e->attempt == peer->attempt && e->epoch == epoch && !peer->hello) {
            peer->hello = true;
            self->n_hello++;
            if (e->gone) {
                mark_dead(peer, self, e->rank, "a rank closed its mesh connection");
            }
        }
    }
    for (uint32_t p = 0; p < self->size; p++) {
        if (is_peer(self, p)) {
            send_frame(self, p, FRAME_HELLO, 0, NULL, 0);
        }
    }
}

/* As the product's: the first that said no good-bye, or else the first. */
static const peer_t *first_dead(const sim_mesh_t *self)
{
    const peer_t *found = NULL;
    for (uint32_t p = self->size; self->n_dead > 0 && p-- > 0;) {
        const peer_t *peer = &self->peers[p];
        bool plain = peer->dead && peer->lost == (int64_t)p;
        if (peer->dead && (found == NULL || plain || found->lost != found - self->peers)) {
            found = peer;
        }
    }
    return found;
}

lk_status_t sim_mesh_poll(const sim_mesh_t *self, lk_error_t *err)
{
    const peer_t *dead = first_dead(self);
    return dead != NULL ? lk_error_set(err, LK_ERR_PEER, "%s", dead->why) : LK_OK;
}

lk_status_t sim_mesh_connect_test(const sim_mesh_t *self, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(sim_mesh_poll(self, err));
    return self->n_hello == self->roster.n - 1 ? LK_OK : LK_INPROGRESS;
}

int64_t sim_mesh_lost(const sim_mesh_t *self)
{
    const peer_t *dead = first_dead(self);
    return dead != NULL ? dead->lost : -1;
}

void sim_mesh_leave(sim_mesh_t *self, int64_t lost, const char *why)
{
    say_end(self, FRAME_BYE, lost, why);
    forget_peers(self);
    fresh_attempt(self);
}

/* ---- votes ---- */

static lk_status_t vote_post(void *ctx, uint64_t round, const uint64_t *vec, size_t n,
                             lk_error_t *err)
{
    sim_mesh_t *self = ctx;
    sim_t *sim = self->sim;
    LK_RETURN_IF_ERROR(sim_mesh_poll(self, err));
    CHECKF(self->joined && !self->vote_out && round == self->next && n <= ALLREDUCE_MAX_LEN,
           "rank %u posts round %llu", self->rank, (unsigned long long)round);
    self->vote = realloc(self->vote, n * sizeof *vec);
    CHECK(self->vote != NULL);
    memcpy(self->vote, vec, n * sizeof *vec);
    self->vote_len = n;
    self->vote_out = true;
    self->next = round + 1;
    self->votes_here = 0;
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_VOTE,
                              .rank = self->rank,
                              .epoch = self->epoch,
                              .round = round,
                              .vec = vec,
                              .n = n});
    for (uint32_t p = 0; p < self->size; p++) {
        self->votes_here += self->peers[p].votes > round;
        if (is_peer(self, p)) {
            sim->mesh_stats.votes++;
            sim->mesh_stats.vote_bytes += n * sizeof *vec;
            send_frame(self, p, FRAME_VOTE, round, vec, n * sizeof *vec);
        }
    }
    return LK_OK;
}

static lk_status_t min_of_all(const sim_mesh_t *self, uint64_t round, uint64_t *out,
                              lk_error_t *err)
{
    size_t n = self->vote_len;
    memcpy(out, self->vote, n * sizeof *out);
    bool own = self->roster.n > 1 && sim_plants(self->sim, SIM_CANARY_OWN_VOTE);
    for (uint32_t p = 0; !own && p < self->size; p++) {
        const frame_t *vote = self->peers[p].vote[round % 2];
        if (!is_peer(self, p)) {
            continue;
        }
        if (vote->len != n * sizeof *out) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u votes with another length", p);
        }
        for (size_t i = 0; i < n; i++) {
            uint64_t value;
            memcpy(&value, vote->data + i * sizeof value, sizeof value);
            out[i] = LK_MIN(out[i], value);
        }
    }
    return LK_OK;
}

static lk_status_t vote_test(void *ctx, uint64_t *out, lk_error_t *err)
{
    sim_mesh_t *self = ctx;
    CHECK(self->vote_out);
    uint64_t round = self->next - 1;
    if (self->votes_here < self->roster.n - 1) {
        for (uint32_t p = 0; self->n_dead > 0 && p < self->size; p++) {
            const peer_t *peer = &self->peers[p];
            if (peer->dead && peer->votes <= round) {
                return lk_error_set(err, LK_ERR_PEER, "%s", peer->why);
            }
        }
        return LK_INPROGRESS;
    }
    LK_RETURN_IF_ERROR(min_of_all(self, round, out, err));
    self->vote_out = false;
    sim_saw(self->sim, &(sim_saw_t){.kind = SIM_SAW_DECIDED,
                                    .rank = self->rank,
                                    .epoch = self->epoch,
                                    .round = round,
                                    .vec = out,
                                    .n = self->vote_len});
    return LK_OK;
}

static bool vote_peer_waiting(void *ctx, uint64_t round)
{
    return ((sim_mesh_t *)ctx)->most_votes > round;
}

/* Appends "1, 3" of the ranks for which `late` is true. */
static void list_ranks(const sim_mesh_t *self, bool (*late)(const sim_mesh_t *self, uint32_t peer),
                       char *out, size_t room)
{
    size_t n = 0;
    out[0] = '\0';
    for (uint32_t p = 0; p < self->size && n < room; p++) {
        if (is_peer(self, p) && late(self, p)) {
            n += (size_t)snprintf(out + n, room - n, "%s%u", n > 0 ? ", " : "", p);
        }
    }
}

static bool vote_is_late(const sim_mesh_t *self, uint32_t peer)
{
    return self->vote_out && self->peers[peer].votes < self->next;
}

void sim_mesh_vote_missing(const sim_mesh_t *self, char *out, size_t room)
{
    list_ranks(self, vote_is_late, out, room);
}

static void vote_missing(void *ctx, char *out, size_t room)
{
    sim_mesh_vote_missing(ctx, out, room);
}

static void vote_abort(void *ctx)
{
    ((sim_mesh_t *)ctx)->vote_out = false;
}

/* ---- expert exchange ---- */

static lk_status_t ex_post(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    sim_mesh_t *self = ctx;
    LK_RETURN_IF_ERROR(sim_mesh_poll(self, err));
    CHECK(self->joined && !self->ex_out);
    self->ex_out = true;
    self->ex_tag = tag;
    for (uint32_t i = 0; i < self->roster.n; i++) {
        uint32_t p = self->roster.ranks[i];
        free(self->peers[p].taken);
        self->peers[p].taken = NULL;
        if (p != self->rank) {
            self->sim->mesh_stats.exchanges++;
            self->sim->mesh_stats.exchange_bytes += send[i].len;
            send_frame(self, p, FRAME_SHARE, tag, send[i].data, send[i].len);
        }
    }
    return LK_OK;
}

static bool share_is_late(const sim_mesh_t *self, uint32_t peer)
{
    return self->ex_out && self->peers[peer].n_shares == 0;
}

void sim_mesh_step_missing(const sim_mesh_t *self, char *out, size_t room)
{
    list_ranks(self, share_is_late, out, room);
}

static lk_status_t ex_test(void *ctx, ep_buf_t *recv, lk_error_t *err)
{
    sim_mesh_t *self = ctx;
    CHECK(self->ex_out);
    if (self->shares_here < self->roster.n - 1) {
        for (uint32_t p = 0; self->n_dead > 0 && p < self->size; p++) {
            if (self->peers[p].dead && share_is_late(self, p)) {
                return lk_error_set(err, LK_ERR_PEER, "%s", self->peers[p].why);
            }
        }
        return LK_INPROGRESS;
    }
    for (uint32_t p = 0; p < self->size; p++) {
        if (is_peer(self, p) && self->peers[p].shares[0]->n != self->ex_tag) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u is out of step: exchange %llx, not %llx",
                                p, (unsigned long long)self->peers[p].shares[0]->n,
                                (unsigned long long)self->ex_tag);
        }
    }
    for (uint32_t i = 0; i < self->roster.n; i++) {
        peer_t *peer = &self->peers[self->roster.ranks[i]];
        recv[i] = (ep_buf_t){0};
        if (i != self->roster.place) {
            peer->taken = peer->shares[0];
            peer->shares[0] = peer->shares[1];
            peer->n_shares--;
            self->shares_here -= peer->n_shares == 0;
            recv[i] = (ep_buf_t){peer->taken->data, peer->taken->len};
        }
    }
    self->ex_out = false;
    return LK_OK;
}

static void ex_abort(void *ctx)
{
    ((sim_mesh_t *)ctx)->ex_out = false;
}

/* ---- views, life ---- */

allreduce_t sim_mesh_allreduce(sim_mesh_t *self)
{
    static const allreduce_ops_t with_doorbell = {vote_post, vote_test, vote_peer_waiting,
                                                  vote_missing, vote_abort};
    static const allreduce_ops_t without = {vote_post, vote_test, NULL, vote_missing, vote_abort};
    return (allreduce_t){self->sim->o.doorbell ? &with_doorbell : &without, self, self->rank,
                         self->size};
}

ep_t sim_mesh_ep(sim_mesh_t *self)
{
    static const ep_ops_t ops = {ex_post, ex_test, ex_abort};
    return (ep_t){&ops, self, self->rank, self->size};
}

sim_mesh_t *sim_mesh_new(sim_t *sim, uint32_t rank)
{
    sim_mesh_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->sim = sim;
    self->rank = rank;
    self->size = (uint32_t)sim->o.ranks;
    self->peers = calloc(self->size, sizeof *self->peers);
    CHECK(self->peers != NULL);
    fresh_attempt(self);
    return self;
}

void sim_mesh_destroy(sim_mesh_t **self_p)
{
    sim_mesh_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    say_end(self, FRAME_EOF, -1, "");
    forget_peers(self);
    free(self->early);
    free(self->vote);
    free(self->peers);
    free(self);
    *self_p = NULL;
}
