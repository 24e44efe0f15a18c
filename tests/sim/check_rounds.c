/*
 * check_rounds.c: every rank runs the same sequence of collectives (rounds, the steps of a lockstep
 * group), and every round has one result. All of it within one group epoch; who has formed a newer
 * one ends it for everybody. A collective transfer is the same one on all ranks that
 * enter it between the same two rounds; a rank that has heard of its cancellation stays out.
 */
#include "tests/sim/checkers.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

#define WINDOW 1024 /* entries of the sequence that are kept */
#define ROUNDS 8

typedef struct {
    char what; /* 'r'ound, 's'tep */
    uint64_t n;
} entry_t;

typedef struct {
    uint64_t epoch; /* of the group: the newest */
    entry_t log[WINDOW];
    uint64_t length;
    uint64_t *at; /* [ranks]: entries that the rank has been through */
    struct {
        uint64_t round, hash;
        bool used;
    } results[ROUNDS];
    struct {
        uint64_t round, n;
        bool used;
    } transfers[ROUNDS]; /* entered behind that round */
    uint64_t *round;     /* [ranks]: the last one that the rank voted in */
} state_t;

static const char *what_text(char what)
{
    return what == 'r' ? "round" : "step";
}

static void enter(sim_t *sim, state_t *self, uint32_t rank, char what, uint64_t n)
{
    uint64_t at = self->at[rank]++;
    if (at == self->length) {
        self->log[self->length++ % WINDOW] = (entry_t){what, n};
        return;
    }
    if (at + WINDOW <= self->length) {
        sim_fail(sim, "rounds", "rank %u is %llu collectives behind", rank,
                 (unsigned long long)(self->length - at));
        return;
    }
    const entry_t *e = &self->log[at % WINDOW];
    if (e->what != what || e->n != n) {
        sim_fail(sim, "rounds", "collective %llu of the group is %s %llu, rank %u enters %s %llu",
                 (unsigned long long)at, what_text(e->what), (unsigned long long)e->n, rank,
                 what_text(what), (unsigned long long)n);
    }
}

static void check_result(sim_t *sim, state_t *self, const sim_saw_t *saw)
{
    uint64_t hash = lk_hash64(saw->vec, saw->n * sizeof *saw->vec, 0), i = saw->round % ROUNDS;
    if (!self->results[i].used || self->results[i].round != saw->round) {
        self->results[i].used = true;
        self->results[i].round = saw->round;
        self->results[i].hash = hash;
    } else if (self->results[i].hash != hash) {
        sim_fail(sim, "rounds", "round %llu has another result on rank %u than elsewhere",
                 (unsigned long long)saw->round, saw->rank);
    }
    sim->result.rounds += saw->rank == 0;
}

static void enter_transfer(sim_t *sim, state_t *self, uint32_t rank, uint64_t n)
{
    uint64_t round = self->round[rank], i = round % ROUNDS;
    if (!self->transfers[i].used || self->transfers[i].round != round) {
        self->transfers[i].used = true;
        self->transfers[i].round = round;
        self->transfers[i].n = n;
    } else if (self->transfers[i].n != n) {
        sim_fail(sim, "rounds", "rank %u enters transfer %llu behind round %llu, others %llu", rank,
                 (unsigned long long)n, (unsigned long long)round,
                 (unsigned long long)self->transfers[i].n);
    }
}

static void on_formed(sim_t *sim, state_t *self, const sim_saw_t *saw)
{
    if (saw->epoch <= self->epoch) {
        return; /* a later one checks */
    }
    self->epoch = saw->epoch;
    self->length = 0;
    memset(self->at, 0, sim->o.ranks * sizeof *self->at);
    memset(self->round, 0, sim->o.ranks * sizeof *self->round);
    memset(self->results, 0, sizeof self->results);
    memset(self->transfers, 0, sizeof self->transfers);
    sim->result.epochs++;
}

static void check_epoch(sim_t *sim, const state_t *self, const sim_saw_t *saw)
{
    if (saw->epoch != self->epoch) {
        sim_fail(sim, "rounds", "rank %u is at round %llu of group epoch %llu; the newest is %llu",
                 saw->rank, (unsigned long long)saw->round, (unsigned long long)saw->epoch,
                 (unsigned long long)self->epoch);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->at == NULL) {
        self->at = calloc(sim->o.ranks, sizeof *self->at);
        self->round = calloc(sim->o.ranks, sizeof *self->round);
        CHECK(self->at != NULL && self->round != NULL);
    }
    switch (saw->kind) {
    case SIM_SAW_FORMED:
        on_formed(sim, self, saw);
        break;
    case SIM_SAW_VOTE:
        check_epoch(sim, self, saw);
        enter(sim, self, saw->rank, 'r', saw->round);
        self->round[saw->rank] = saw->round;
        break;
    case SIM_SAW_STEP_POST:
        if (sim->o.moe && sim->o.ranks > 1) {
            enter(sim, self, saw->rank, 's', saw->batch->step);
        }
        break;
    case SIM_SAW_TRANSFER:
        enter_transfer(sim, self, saw->rank, saw->n);
        break;
    case SIM_SAW_DECIDED:
        check_epoch(sim, self, saw);
        check_result(sim, self, saw);
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    free(((state_t *)state)->at);
    free(((state_t *)state)->round);
}

const sim_checker_t check_rounds = {
    .name = "rounds", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
