/* check_resources.c: when everything has ended nothing is held any more. */
#include "tests/sim/checkers.h"

typedef struct {
    char nothing;
} state_t;

static void check_rank(sim_t *sim, const sim_rank_t *rank)
{
    const scheduler_t *s = engine_core_scheduler(rank->core);
    uint32_t used = kv_cache_used(engine_core_kv(rank->core));
    size_t requests = scheduler_num_running(s) + scheduler_num_waiting(s);
    if (requests > 0 || used > 0) {
        sim_fail(sim, "resources", "rank %u still holds %zu requests and %u KV blocks", rank->rank,
                 requests, used);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    if (saw->kind != SIM_SAW_END) {
        return;
    }
    for (uint32_t r = 0; r < sim->o.ranks && sim->phase == SIM_DONE; r++) {
        if (!sim->removed[r]) {
            check_rank(sim, &sim->ranks[r]);
        }
    }
    for (uint32_t f = 0; f < sim->o.frontends && sim->phase == SIM_DONE; f++) {
        size_t n = engine_client_num_requests(sim->fronts[f].client);
        if (n > 0) {
            sim_fail(sim, "resources", "front end %u still has %zu requests", f, n);
        }
    }
}

const sim_checker_t check_resources = {
    .name = "resources", .state_size = sizeof(state_t), .saw = saw};
