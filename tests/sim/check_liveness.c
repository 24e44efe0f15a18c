/*
 * check_liveness.c: once nobody asks for more and nothing fails any more, every request and every
 * call ends within a bound of virtual time; the report says who waits for whom.
 */
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    uint64_t bound_ns;
} state_t;

/* Every deadline may have to pass a few times, and all that was asked for has to be computed. */
static uint64_t bound_ns(const sim_t *sim)
{
    const sim_options_t *o = &sim->o;
    if (sim->config.frontend_pause) {
        return 60 * LK_SECOND_NS;
    }
    uint64_t deadlines = 4 * (o->control_timeout_ms + o->transfer_timeout_ms) * LK_MS_NS;
    uint64_t slow = o->slow_rank > 0 ? o->slow_rank : 1;
    uint64_t steps = (o->clients + o->ranks) * (o->max_prompt + o->max_output + 16);
    uint64_t step_ns = 2 * slow * o->step_us * 1000 + 8 * o->latency_us * 1000;
    return 30 * LK_SECOND_NS + 4 * o->restart_ms * LK_MS_NS + deadlines + 4 * steps * step_ns;
}

void sim_fail_stuck(sim_t *sim, const char *what)
{
    char text[3500];
    sim_describe(sim, text, sizeof text);
    size_t n = strlen(text), room = sizeof text;
    for (size_t i = 0; i < sim->n_calls && n < room; i++) {
        if (sim->calls[i]->open) {
            n += (size_t)snprintf(text + n, room - n, "\n  call %zu (%s) has no answer", i,
                                  sim_call_name(sim->calls[i]));
        }
    }
    for (size_t i = 0; i < sim->n_requests && n < room; i++) {
        if (sim->requests[i]->open) {
            n += (size_t)snprintf(text + n, room - n, "\n  request %zu does not end", i);
        }
    }
    sim_fail(sim, "liveness", "%s:%s", what, text);
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    if (saw->kind == SIM_SAW_PHASE) {
        ((state_t *)state)->bound_ns = bound_ns(sim);
    }
}

static void after(sim_t *sim, void *state)
{
    uint64_t waited = sim->now_ns - sim->phase_ns;
    if ((sim->phase == SIM_HEAL || sim->phase == SIM_PROBE) &&
        waited > ((const state_t *)state)->bound_ns) {
        char what[128];
        snprintf(what, sizeof what,
                 "nothing is asked for any more, and after %.1f s (%s) there is no end",
                 (double)waited / LK_SECOND_NS, sim_phase_name(sim->phase));
        sim_fail_stuck(sim, what);
    }
}

const sim_checker_t check_liveness = {.name = "liveness",
                                      .any_design = true,
                                      .state_size = sizeof(state_t),
                                      .saw = saw,
                                      .after = after};
