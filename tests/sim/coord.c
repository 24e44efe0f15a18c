/* coord.c: the coordinator's process: the real object between simulated sockets. */
#include "tests/sim/net.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

static void reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    sim_t *sim = ctx;
    if (msg->type == MSG_INIT) {
        sim->coord.epoch = msg->init.group_epoch;
    }
    if (role == MSG_ROLE_ENGINE && rank < sim->o.ranks) {
        sim_net_send(sim, SIM_LINK_HANDSHAKE, sim_node_coord(), sim_node_rank(sim, rank),
                     generation, msg);
    } else if (role == MSG_ROLE_FRONTEND && rank < sim->o.frontends) {
        sim_net_send(sim, SIM_LINK_HANDSHAKE, sim_node_coord(), sim_node_front(sim, rank),
                     generation, msg);
    }
}

/* To whoever is there now. */
static void publish(sim_t *sim, sim_link_t link, uint32_t node, const msg_t *msg)
{
    uint64_t life = sim_net_life(sim, node);
    if (life != 0) {
        sim_net_send(sim, link, sim_node_coord(), node, life, msg);
    }
}

static void publish_stats(void *ctx, const msg_t *msg)
{
    sim_t *sim = ctx;
    if (msg->type == MSG_STATS) {
        sim->coord.weight_epoch = msg->stats.weight_epoch;
    }
    for (uint32_t f = 0; f < sim->o.frontends; f++) {
        publish(sim, SIM_LINK_STATS, sim_node_front(sim, f), msg);
    }
}

static void publish_wave(void *ctx, const msg_t *msg)
{
    sim_t *sim = ctx;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        publish(sim, SIM_LINK_WAVE, sim_node_rank(sim, r), msg);
    }
}

/* Runs at `at_ns`, unless it does so earlier anyway. */
static void wake_at(sim_coord_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    at_ns = LK_MAX(at_ns, sim->now_ns);
    if (self->coordinator != NULL && at_ns < self->wake_ns) {
        self->wake_ns = at_ns;
        sim_post(sim, at_ns - sim->now_ns, SIM_EV_COORD, 0, 0, 0, NULL);
    }
}

void sim_coord_wake(sim_coord_t *self)
{
    wake_at(self, self->sim->now_ns);
}

static bool is_stopped(const sim_t *sim)
{
    return sim->stopped != NULL && sim->stopped[sim_node_coord()];
}

void sim_coord_listen(sim_coord_t *self)
{
    sim_net_hold(self->sim, sim_node_coord(), is_stopped(self->sim) ? ~0u : 0);
}

void sim_coord_start(sim_coord_t *self)
{
    sim_t *sim = self->sim;
    coordinator_config_t config = {.dp_size = (uint32_t)sim->o.ranks,
                                   .n_frontends = (uint32_t)sim->o.frontends,
                                   .shrinks = true,
                                   .config_hash = "sim",
                                   .events_address = "events",
                                   .stats_address = "stats",
                                   .wave_address = "wave",
                                   .life = ++self->life,
                                   .handshake_timeout_ns = 120 * LK_SECOND_NS,
                                   .dead_after_ns = SIM_DEAD_AFTER_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &sim->env,
                                   .host = {sim, reply, publish_stats, publish_wave}};
    self->coordinator = coordinator_new(&config);
    CHECK(self->coordinator != NULL);
    char removed[2048] = "";
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        size_t n = strlen(removed);
        if (sim->removed[r]) {
            snprintf(removed + n, sizeof removed - n, "%s%u", n > 0 ? "," : "", r);
        }
    }
    lk_error_t err = LK_ERROR_INIT;
    CHECKF(coordinator_remove_all(self->coordinator, removed, &err) == LK_OK, "%s", err.text);
    self->wake_ns = UINT64_MAX;
    sim_net_up(sim, sim_node_coord(), self->life);
    sim_coord_wake(self);
}

void sim_coord_kill(sim_coord_t *self)
{
    if (self->coordinator != NULL) {
        coordinator_destroy(&self->coordinator);
        sim_net_down(self->sim, sim_node_coord());
        self->wake_ns = UINT64_MAX;
        self->epoch = self->weight_epoch = 0;
    }
}

void sim_coord_on_event(sim_coord_t *self, uint64_t at_ns)
{
    if (at_ns != self->wake_ns || self->coordinator == NULL) {
        return; /* an earlier one came between, or it was another process's */
    }
    self->wake_ns = UINT64_MAX;
    if (is_stopped(self->sim)) {
        return; /* until it goes on */
    }
    lk_status_t status = LK_OK;
    lk_error_t err = LK_ERROR_INIT;
    uint64_t next = coordinator_step(self->coordinator, &status, &err);
    if (status != LK_OK) {
        sim_fail(self->sim, "coordinator", "the cluster ends: %s", err.text);
    }
    wake_at(self, LK_MAX(next, self->sim->now_ns + 1));
}

void sim_coord_on_msg(sim_coord_t *self, const msg_t *msg)
{
    coordinator_on_message(self->coordinator, msg);
    sim_coord_wake(self);
}
