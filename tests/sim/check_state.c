/*
 * check_state.c: what a round decides is decided equally: in every vote all ranks are in the same
 * state. The product votes a hash of its state; here the parts are compared one by one.
 */
#include "base/check.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <string.h>

#define ROUNDS 8 /* ranks are at most one round apart */

typedef struct {
    uint64_t group_epoch, round;
    uint32_t rank;
    char text[320];
} seen_t;

typedef struct {
    seen_t seen[ROUNDS];
} state_t;

static void describe(const group_t *group, char *out, size_t room)
{
    const pause_t *pause = group_pause(group);
    const weight_state_t *weights = group_weights(group);
    snprintf(out, room, "run %d, wave %llu, %s, pause epoch %llu, gates %u, session %d, %llu (%s)",
             group_run(group), (unsigned long long)group_wave(group),
             pause_state_name(pause->state), (unsigned long long)pause->epoch, weights->gates,
             weights->session, (unsigned long long)weights->epoch, weights->version);
}

static void on_vote(sim_t *sim, state_t *self, uint32_t rank, uint64_t round)
{
    const sim_rank_t *r = &sim->ranks[rank];
    const group_t *group = engine_core_group(r->core);
    if (group->phase != GROUP_MEMBER) {
        return; /* what a new epoch starts from differs, and is what its first rounds are about */
    }
    seen_t *seen = &self->seen[round % ROUNDS], now = {r->enrol.epoch, round, rank, ""};
    describe(group, now.text, sizeof now.text);
    if (seen->text[0] == '\0' || seen->round != round || seen->group_epoch != r->enrol.epoch) {
        *seen = now;
    } else if (strcmp(seen->text, now.text) != 0) {
        sim_fail(sim, "rounds", "in round %llu rank %u is in another state than rank %u: %s; %s",
                 (unsigned long long)round, rank, seen->rank, now.text, seen->text);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    if (saw->kind == SIM_SAW_VOTE) {
        on_vote(sim, state, saw->rank, saw->round);
    }
}

const sim_checker_t check_state = {.name = "rounds", .state_size = sizeof(state_t), .saw = saw};
