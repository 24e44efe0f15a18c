#include "api_frontend/router.h"
#include "base/check.h"
#include "base/hash.h"

#include <string.h>

void router_init(router_t *self, uint32_t n_ranks, uint32_t client, uint32_t n_clients)
{
    CHECK(n_ranks > 0 && n_ranks <= ROUTER_MAX_RANKS && client < n_clients);
    memset(self, 0, sizeof *self);
    self->n_ranks = n_ranks;
    self->n_clients = n_clients;
    /* front ends start at different ranks, or all would fill rank 0 first */
    self->start = (uint32_t)((uint64_t)n_ranks * client / n_clients);
}

void router_report(router_t *self, uint64_t rank, uint64_t waiting, uint64_t running,
                   double kv_usage)
{
    if (rank >= self->n_ranks) {
        return;
    }
    router_rank_t *r = &self->ranks[rank];
    r->waiting = waiting;
    r->running = running;
    r->kv_usage = kv_usage >= 0 && kv_usage <= 1 ? kv_usage : 1;
}

void router_set_dead(router_t *self, uint32_t rank, bool dead)
{
    CHECK(rank < self->n_ranks);
    self->ranks[rank].dead = dead;
}

void router_set_avoided(router_t *self, uint32_t rank, bool avoided)
{
    CHECK(rank < self->n_ranks);
    self->ranks[rank].avoided = avoided;
}

static bool is_out(const router_rank_t *r)
{
    return r->dead || r->avoided;
}

static double load_of(const router_t *self, const router_rank_t *r)
{
    double mine = (double)self->n_clients * (double)r->in_flight;
    double reported = (double)r->waiting + (double)r->running;
    return LK_MAX(mine, reported);
}

static double score(const router_t *self, const router_rank_t *r)
{
    double s = load_of(self, r);
    if (r->waiting > 0 && r->kv_usage > 0.5) {
        s += (double)r->waiting * 6 * (r->kv_usage - 0.5);
    }
    return s;
}

static lk_status_t take(router_t *self, uint32_t picked, uint32_t *rank)
{
    self->ranks[picked].in_flight++;
    self->ranks[picked].waiting += self->n_clients;
    *rank = picked;
    return LK_OK;
}

uint64_t router_session(const char *name, size_t len)
{
    uint64_t h = lk_hash64(name, len, 0x5e55);
    return h != 0 ? h : 1;
}

static uint32_t best_by_session(const router_t *self, uint64_t session)
{
    double total = 0;
    uint32_t alive = 0;
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        if (!is_out(&self->ranks[r])) {
            total += load_of(self, &self->ranks[r]);
            alive++;
        }
    }
    double limit = ROUTER_SESSION_FACTOR * total / LK_MAX(alive, 1u) + (double)ROUTER_SESSION_SLACK;
    uint32_t best = UINT32_MAX;
    uint64_t best_hash = 0;
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        const router_rank_t *rank = &self->ranks[r];
        uint64_t hash = lk_hash64(&r, sizeof r, session);
        /* somebody is at or below the mean, so one is always left */
        if (!is_out(rank) && load_of(self, rank) <= limit &&
            (best == UINT32_MAX || hash > best_hash)) {
            best = r;
            best_hash = hash;
        }
    }
    return best;
}

static uint32_t best_by_score(router_t *self)
{
    uint32_t best = UINT32_MAX;
    double best_score = 0;
    uint32_t next = self->start;
    for (uint32_t i = 0; i < self->n_ranks; i++) {
        uint32_t r = next;
        next =
            r + 1 < self->n_ranks ? r + 1 : 0; /* a division per rank would be the longest part */
        if (is_out(&self->ranks[r])) {
            continue;
        }
        double s = score(self, &self->ranks[r]);
        if (best == UINT32_MAX || s < best_score) {
            best = r;
            best_score = s;
        }
    }
    self->start = (self->start + 1) % self->n_ranks;
    return best;
}

lk_status_t router_pick(router_t *self, int64_t pin, uint64_t session, uint32_t *rank,
                        lk_error_t *err)
{
    if (pin >= 0) {
        if (pin >= self->n_ranks) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "data parallel rank %lld does not exist: there are %u ranks",
                                (long long)pin, self->n_ranks);
        }
        if (self->ranks[pin].dead) {
            return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %lld is dead", (long long)pin);
        }
        return take(self, (uint32_t)pin, rank);
    }
    uint32_t best = session != 0 ? best_by_session(self, session) : best_by_score(self);
    if (best == UINT32_MAX) { /* better a refusal with its reason than none */
        for (uint32_t r = 0; r < self->n_ranks; r++) {
            self->ranks[r].avoided = false;
        }
        best = best_by_score(self);
    }
    if (best == UINT32_MAX) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "every engine is dead");
    }
    return take(self, best, rank);
}

void router_done(router_t *self, uint32_t rank)
{
    CHECK(rank < self->n_ranks && self->ranks[rank].in_flight > 0);
    self->ranks[rank].in_flight--;
}
