#include "tests/sim/checkers.h"
#include "base/check.h"

#include <stdlib.h>

static const sim_checker_t *const list[] = {&check_requests, &check_kv,        &check_blocks,
                                            &check_weights,  &check_failures,  &check_pause,
                                            &check_modes,    &check_rounds,    &check_state,
                                            &check_liveness, &check_resources, &check_scenario};

struct sim_checks {
    void *states[LK_ARRAY_LEN(list)]; /* NULL: not used in this design */
};

sim_checks_t *sim_checks_new(const sim_t *sim)
{
    sim_checks_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    for (size_t i = 0; i < LK_ARRAY_LEN(list); i++) {
        if (!sim->config.frontend_pause || list[i]->any_design) {
            self->states[i] = calloc(1, list[i]->state_size);
            CHECK(self->states[i] != NULL);
        }
    }
    return self;
}

void sim_checks_destroy(sim_t *sim, sim_checks_t **self_p)
{
    sim_checks_t *self = *self_p;
    for (size_t i = 0; self != NULL && i < LK_ARRAY_LEN(list); i++) {
        if (self->states[i] != NULL && list[i]->fini != NULL) {
            list[i]->fini(sim, self->states[i]);
        }
        free(self->states[i]);
    }
    free(self);
    *self_p = NULL;
}

void sim_saw(sim_t *sim, const sim_saw_t *saw)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(list) && !sim->result.failed; i++) {
        if (sim->checks->states[i] != NULL) {
            list[i]->saw(sim, sim->checks->states[i], saw);
        }
    }
}

void sim_checks_after(sim_t *sim)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(list) && !sim->result.failed; i++) {
        if (sim->checks->states[i] != NULL && list[i]->after != NULL) {
            list[i]->after(sim, sim->checks->states[i]);
        }
    }
}
