/* fault.c: processes that stop for a while. What else goes wrong has its place where it happens:
 * lost messages in net.c, torn streams in torn_stream.c, dying trainers in trainer.c. */
#include "base/check.h"
#include "tests/sim/checkers.h"
#include "tests/sim/net.h"

#include <stdlib.h>

static uint32_t n_nodes(const sim_t *self)
{
    return 1 + (uint32_t)(self->o.ranks + self->o.frontends);
}

static void schedule(sim_t *self)
{
    if (self->o.stop_every_ms > 0) {
        sim_post(self, sim_around(self, self->o.stop_every_ms * LK_MS_NS), SIM_EV_FAULT, 0, 0, 0,
                 NULL);
    }
}

void sim_fault_start(sim_t *self)
{
    self->stopped = calloc(n_nodes(self), sizeof *self->stopped);
    CHECK(self->stopped != NULL);
    schedule(self);
}

void sim_fault_stop(sim_t *self)
{
    free(self->stopped);
}

bool sim_front_runs(const sim_t *self, uint32_t front)
{
    return self->stopped == NULL || !self->stopped[sim_node_front(self, front)];
}

static void stop_node(sim_t *self, uint32_t node, uint64_t ns)
{
    sim_log(self, "node %u is stopped for %.3f s", node, (double)ns / LK_SECOND_NS);
    self->stopped[node] = true;
    sim_net_hold(self, node, ~0u);
    sim_post(self, ns, SIM_EV_CONT, node, 0, 0, NULL);
}

void sim_fault_continue(sim_t *self, uint32_t node)
{
    if (!self->stopped[node]) {
        return;
    }
    sim_log(self, "node %u goes on", node);
    self->stopped[node] = false;
    sim_net_hold(self, node, 0);
    if (node == sim_node_coord()) {
        sim_coord_wake(&self->coord);
    } else if (node <= self->o.ranks) {
        sim_rank_wake(&self->ranks[node - 1], self->now_ns);
    }
}

void sim_fault_act(sim_t *self)
{
    if (self->phase != SIM_SAFETY) {
        return;
    }
    uint32_t node = (uint32_t)sim_below(self, n_nodes(self));
    if (!self->stopped[node]) {
        uint64_t longest = self->o.stop_ms * LK_MS_NS;
        stop_node(self, node,
                  1 + sim_below(self, sim_chance(self, 50) ? longest : longest / 10 + 1));
    }
    schedule(self);
}

void sim_fault_heal(sim_t *self)
{
    for (uint32_t node = 0; node < n_nodes(self); node++) {
        sim_fault_continue(self, node);
    }
}
