/*
 * fault.c: processes that stop (SIGSTOP) or die (SIGKILL), and the launcher that starts them again;
 * it kills one that was silent for too long. What else goes wrong has its place where it happens:
 * lost messages in net.c, torn streams in torn_stream.c, dying trainers in trainer.c.
 */
#include "base/check.h"
#include "coordinator/membership.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/checkers.h"
#include "tests/sim/mesh.h"
#include "tests/sim/net.h"

#include <stdio.h>
#include <stdlib.h>

enum { STOP, KILL, BREAK };
enum { ENDED, SILENT }; /* why a process dies */

static uint32_t n_nodes(const sim_t *self)
{
    return 1 + (uint32_t)(self->o.ranks + self->o.frontends);
}

static void schedule(sim_t *self, uint32_t what)
{
    uint64_t every_ms = what == STOP   ? self->o.stop_every_ms
                        : what == KILL ? self->o.kill_every_ms
                                       : self->o.break_every_ms;
    if (every_ms > 0) {
        sim_post(self, sim_around(self, every_ms * LK_MS_NS), SIM_EV_FAULT, what, 0, 0, NULL);
    }
}

void sim_fault_start(sim_t *self)
{
    self->stopped = calloc(n_nodes(self), sizeof *self->stopped);
    CHECK(self->stopped != NULL);
    schedule(self, STOP);
    schedule(self, KILL);
    schedule(self, BREAK);
}

void sim_fault_stop(sim_t *self)
{
    free(self->stopped);
}

bool sim_front_runs(const sim_t *self, uint32_t front)
{
    return self->fronts[front].client != NULL &&
           (self->stopped == NULL || !self->stopped[sim_node_front(self, front)]);
}

/* ---- death and birth ---- */

enum { KNOWS_GROUP = 1, KNOWS_WEIGHTS = 2 };

/* The newest number that the rank knows to be taken: who has committed does not know whether others
 * have published that already, and counts it. */
static uint64_t newest_number(const sim_rank_t *rank)
{
    const group_t *group = engine_core_group(rank->core);
    uint64_t taken = group->weights.taken + group->update.committing;
    return LK_MAX(sim_rank_weights(rank), taken);
}

/* The newest group epoch, the newest weights. */
static unsigned knows(const sim_t *self, uint32_t node)
{
    uint64_t group = 0, weights = 0;
    if (node == sim_node_coord()) {
        group = self->coord.epoch;
        weights = self->coord.weight_epoch;
    } else if (node <= self->o.ranks) {
        const sim_rank_t *rank = &self->ranks[node - 1];
        group = rank->core != NULL ? rank->enrol.epoch : 0;
        weights = rank->core != NULL ? newest_number(rank) : 0;
    } else if (self->fronts[node - 1 - self->o.ranks].client != NULL) {
        engine_client_info_t info;
        engine_client_info(self->fronts[node - 1 - self->o.ranks].client, &info);
        group = info.group_epoch;
        weights = info.weight_epoch;
    }
    return (group > 0 && group >= self->group_epoch ? KNOWS_GROUP : 0) |
           (group > 0 && weights >= self->weight_epoch ? KNOWS_WEIGHTS : 0);
}

/* When all who know have died there is a new cluster, of which nothing can be promised. Who is
 * stopped may not be asked. */
static bool is_last_witness(const sim_t *self, uint32_t node)
{
    unsigned others = 0;
    for (uint32_t n = 0; n < n_nodes(self); n++) {
        if (n != node && !(self->stopped != NULL && self->stopped[n])) {
            others |= knows(self, n);
        }
    }
    return knows(self, node) & ~others;
}

/* The launcher's word to this life of the coordinator, through a pipe; each later one is started
 * with it (sim_coord_start). */
static void tell_removed(sim_t *self, uint32_t rank)
{
    uint64_t life = sim_net_life(self, sim_node_coord());
    if (life != 0 && !sim_plants(self, SIM_CANARY_UNTOLD)) {
        sim_post(self, sim_latency_ns(self), SIM_EV_TOLD, rank, 0, life, NULL);
    }
}

void sim_fault_told(sim_t *self, uint32_t rank, uint64_t life)
{
    lk_error_t err = LK_ERROR_INIT;
    char line[64];
    if (sim_net_life(self, sim_node_coord()) != life) {
        return;
    }
    if (self->stopped != NULL &&
        self->stopped[sim_node_coord()]) { /* it reads it when it goes on */
        sim_post(self, LK_MS_NS, SIM_EV_TOLD, rank, 0, life, NULL);
        return;
    }
    snprintf(line, sizeof line, "removed %u killed by signal 9 (Killed)", rank);
    CHECKF(coordinator_on_launcher(self->coord.coordinator, line, &err) == LK_OK, "%s", err.text);
    sim_coord_wake(&self->coord);
}

static void start_again(sim_t *self, uint32_t node, bool for_good)
{
    if (!for_good) {
        sim_post(self, 1 + sim_below(self, self->o.restart_ms * LK_MS_NS + 1), SIM_EV_BORN, node, 0,
                 0, NULL);
        return;
    }
    uint32_t rank = node - 1;
    sim_log(self, "rank %u is removed", rank);
    self->removed[rank] = true;
    self->n_members--;
    self->result.removals++;
    tell_removed(self, rank);
}

static bool may_remove(const sim_t *self, uint32_t node)
{
    return node >= 1 && node <= self->o.ranks && self->n_members > 1;
}

static void kill_node(sim_t *self, uint32_t node, bool for_good, const char *why)
{
    if (sim_net_life(self, node) == 0 || is_last_witness(self, node)) {
        return;
    }
    sim_log(self, "node %u dies: %s", node, why);
    self->result.deaths++;
    if (self->stopped != NULL) {
        self->stopped[node] = false;
    }
    if (node == sim_node_coord()) {
        sim_coord_kill(&self->coord);
    } else if (node <= self->o.ranks) {
        sim_rank_kill(&self->ranks[node - 1]);
    } else {
        sim_front_kill(&self->fronts[node - 1 - self->o.ranks]);
    }
    start_again(self, node, for_good);
}

void sim_fault_kill(sim_t *self, uint32_t node)
{
    if (self->config.canary == SIM_CANARY_UNTOLD && node == sim_node_coord()) {
        return; /* its next life would miss the rank by itself, and say so */
    }
    bool for_good =
        self->o.removals > 0 && may_remove(self, node) && sim_chance(self, self->o.removals);
    kill_node(self, node, for_good, "SIGKILL");
}

void sim_fault_remove(sim_t *self, uint32_t rank)
{
    CHECK(may_remove(self, sim_node_rank(self, rank)));
    kill_node(self, sim_node_rank(self, rank), true, "SIGKILL");
}

void sim_fault_ended(sim_t *self, uint32_t node, const char *why)
{
    sim_log(self, "node %u ends itself: %s", node, why);
    sim_post(self, 0, SIM_EV_DIE, node, ENDED, sim_net_life(self, node), NULL);
}

void sim_fault_die(sim_t *self, uint32_t node, uint32_t why, uint64_t life)
{
    if (sim_net_life(self, node) != life || (why == SILENT && !self->stopped[node])) {
        return;
    }
    kill_node(self, node, false, why == SILENT ? "the launcher heard nothing of it" : "by itself");
    sim_fault_continue(self, node, life); /* if it may not die */
    if (why == ENDED && sim_net_life(self, node) == life) {
        sim_post(self, LK_SECOND_NS / 10, SIM_EV_DIE, node, ENDED, life, NULL);
    }
}

void sim_fault_born(sim_t *self, uint32_t node)
{
    if (node == sim_node_coord()) {
        sim_coord_start(&self->coord);
    } else if (node <= self->o.ranks) {
        sim_rank_start(&self->ranks[node - 1]);
    } else {
        sim_front_start(&self->fronts[node - 1 - self->o.ranks]);
    }
}

/* ---- stop ---- */

static void listen_again(sim_t *self, uint32_t node)
{
    if (node == sim_node_coord()) {
        sim_coord_listen(&self->coord);
        sim_coord_wake(&self->coord);
    } else if (node <= self->o.ranks) {
        sim_rank_listen(&self->ranks[node - 1]);
        sim_rank_wake(&self->ranks[node - 1], self->now_ns);
    } else {
        sim_front_listen(&self->fronts[node - 1 - self->o.ranks]);
    }
}

void sim_fault_stop_node(sim_t *self, uint32_t node, uint64_t ns)
{
    uint64_t patience = SIM_DEAD_AFTER_NS + sim_below(self, LK_SECOND_NS);
    ns = is_last_witness(self, node) ? LK_MIN(ns, SIM_DEAD_AFTER_NS / 5) : ns;
    sim_log(self, "node %u is stopped for %.3f s", node, (double)ns / LK_SECOND_NS);
    self->stopped[node] = true;
    sim_net_hold(self, node, ~0u);
    uint64_t life = sim_net_life(self, node);
    if (ns < patience) {
        sim_post(self, ns, SIM_EV_CONT, node, 0, life, NULL);
    } else {
        sim_post(self, patience, SIM_EV_DIE, node, SILENT, life, NULL);
    }
}

void sim_fault_continue(sim_t *self, uint32_t node, uint64_t life)
{
    if (!self->stopped[node] || sim_net_life(self, node) != life) {
        return;
    }
    sim_log(self, "node %u goes on", node);
    self->stopped[node] = false;
    listen_again(self, node);
}

/* ---- broken connections ---- */

static void break_connections(sim_t *self, uint32_t node)
{
    uint32_t other = (uint32_t)sim_below(self, n_nodes(self));
    uint32_t a = LK_MIN(node, other), b = LK_MAX(node, other);
    if (a == b || sim_net_life(self, a) == 0 || sim_net_life(self, b) == 0) {
        return;
    }
    if (a >= 1 && b <= self->o.ranks) {
        /* the cluster ends when its epochs break in a row without a death */
        if (self->mesh_breaks++ >= MEMBERSHIP_MAX_BREAKS - 2) {
            return;
        }
        sim_mesh_break(self->ranks[a - 1].mesh, self->ranks[b - 1].mesh);
    } else {
        sim_net_break(self, a, b);
    }
    self->result.breaks++;
}

/* ---- the dice ---- */

void sim_fault_act(sim_t *self, uint32_t what)
{
    if (self->phase != SIM_SAFETY) {
        return;
    }
    uint32_t node = (uint32_t)sim_below(self, n_nodes(self));
    if (what == KILL) {
        sim_fault_kill(self, node);
    } else if (what == BREAK) {
        break_connections(self, node);
    } else if (sim_net_life(self, node) != 0 && !self->stopped[node]) {
        uint64_t longest = self->o.stop_ms * LK_MS_NS;
        sim_fault_stop_node(self, node,
                            1 + sim_below(self, sim_chance(self, 50) ? longest : longest / 10 + 1));
    }
    schedule(self, what);
}

void sim_fault_heal(sim_t *self)
{
    for (uint32_t node = 0; node < n_nodes(self); node++) {
        sim_fault_continue(self, node, sim_net_life(self, node));
    }
}
