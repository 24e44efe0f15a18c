/*
 * check_failures.c: a weight call that fails leaves the old weights, or a rank that says that it is
 * dirty; what is dirty or half updated does not step. Recomputed from the numbers in the ranks'
 * memory whenever a weight call is answered.
 */
#include "base/check.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/checkers.h"
#include "tests/sim/net.h"

#include <stdlib.h>

typedef struct {
    digest_t *good; /* [ranks]: of the set that was in force at the last look */
    uint64_t *epoch;
    bool *known;
} state_t;

static uint64_t gates_of(const sim_t *sim, uint32_t rank)
{
    return group_gates(engine_core_group(sim->ranks[rank].core));
}

/* New weights come with a new epoch; a half updated set is nobody's until it is dirty or whole. */
static void look(sim_t *sim, state_t *self, uint32_t rank)
{
    if (sim->ranks[rank].core == NULL || gates_of(sim, rank) & (GATE_DIRTY | GATE_SESSION)) {
        return;
    }
    const group_t *group = engine_core_group(sim->ranks[rank].core);
    if (group->phase != GROUP_MEMBER || group->held_apart || group->undecided) {
        return; /* it left the group between its commit and the word of the others, and knows it */
    }
    uint64_t epoch = group_weights(group)->epoch;
    digest_t now = sim_memory_digest(sim, rank);
    if (!self->known[rank] || self->epoch[rank] != epoch) {
        self->known[rank] = true;
        self->epoch[rank] = epoch;
        self->good[rank] = now;
    } else if (self->good[rank].lane[0] != now.lane[0] || self->good[rank].lane[1] != now.lane[1]) {
        sim_fail(sim, "weights",
                 "rank %u has not the weights of epoch %llu any more, and is not dirty", rank,
                 (unsigned long long)epoch);
    }
}

static void look_at_all(sim_t *sim, state_t *self)
{
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        look(sim, self, r);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->good == NULL) {
        self->good = calloc(sim->o.ranks, sizeof *self->good);
        self->epoch = calloc(sim->o.ranks, sizeof *self->epoch);
        self->known = calloc(sim->o.ranks, sizeof *self->known);
        CHECK(self->good != NULL && self->epoch != NULL && self->known != NULL);
    }
    switch (saw->kind) {
    case SIM_SAW_RANK_UP:
        self->known[saw->rank] = false;
        look(sim, self, saw->rank);
        break;
    case SIM_SAW_ANSWERED:
        if (saw->call->kind == SIM_CALL_UPDATE) {
            look_at_all(sim, self);
        }
        break;
    case SIM_SAW_PHASE:
        look_at_all(sim, self);
        break;
    case SIM_SAW_STEP_POST:
        if (gates_of(sim, saw->rank) != 0) {
            sim_fail(sim, "weights", "rank %u takes a step behind a closed gate (%llu)", saw->rank,
                     (unsigned long long)gates_of(sim, saw->rank));
        }
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    free(self->good);
    free(self->epoch);
    free(self->known);
}

const sim_checker_t check_failures = {
    .name = "weights", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
