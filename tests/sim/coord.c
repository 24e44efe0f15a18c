/* coord.c: the coordinator's process: the real object between simulated sockets. */
#include "tests/sim/net.h"
#include "base/check.h"

static void reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    sim_t *sim = ctx;
    if (role == MSG_ROLE_ENGINE && rank < sim->o.ranks) {
        sim_net_send(sim, SIM_LINK_HANDSHAKE, sim_node_coord(), sim_node_rank(sim, rank), msg);
    } else if (role == MSG_ROLE_FRONTEND && rank < sim->o.frontends) {
        sim_net_send(sim, SIM_LINK_HANDSHAKE, sim_node_coord(), sim_node_front(sim, rank), msg);
    }
}

static void publish_stats(void *ctx, const msg_t *msg)
{
    sim_t *sim = ctx;
    for (uint32_t f = 0; f < sim->o.frontends; f++) {
        sim_net_send(sim, SIM_LINK_STATS, sim_node_coord(), sim_node_front(sim, f), msg);
    }
}

static void publish_wave(void *ctx, const msg_t *msg)
{
    sim_t *sim = ctx;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        sim_net_send(sim, SIM_LINK_WAVE, sim_node_coord(), sim_node_rank(sim, r), msg);
    }
}

/* Runs at `at_ns`, unless it does so earlier anyway. */
static void wake(sim_coord_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    at_ns = LK_MAX(at_ns, sim->now_ns);
    if (at_ns < self->wake_ns) {
        self->wake_ns = at_ns;
        sim_post(sim, at_ns - sim->now_ns, SIM_EV_COORD, 0, 0, 0, NULL);
    }
}

void sim_coord_wake(sim_coord_t *self)
{
    wake(self, self->sim->now_ns);
}

void sim_coord_start(sim_coord_t *self)
{
    sim_t *sim = self->sim;
    coordinator_config_t config = {.dp_size = (uint32_t)sim->o.ranks,
                                   .n_frontends = (uint32_t)sim->o.frontends,
                                   .config_hash = "sim",
                                   .events_address = "events",
                                   .stats_address = "stats",
                                   .wave_address = "wave",
                                   .handshake_timeout_ns = 120 * LK_SECOND_NS,
                                   .dead_after_ns = 5 * LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &sim->env,
                                   .host = {sim, reply, publish_stats, publish_wave}};
    self->coordinator = coordinator_new(&config);
    CHECK(self->coordinator != NULL);
    self->wake_ns = UINT64_MAX;
    wake(self, sim->now_ns);
}

void sim_coord_stop(sim_coord_t *self)
{
    coordinator_destroy(&self->coordinator);
}

void sim_coord_on_event(sim_coord_t *self, uint64_t at_ns)
{
    if (at_ns != self->wake_ns) {
        return; /* an earlier one came between */
    }
    self->wake_ns = UINT64_MAX;
    if (self->sim->stopped != NULL && self->sim->stopped[sim_node_coord()]) {
        return; /* until it goes on */
    }
    lk_status_t status = LK_OK;
    lk_error_t err = LK_ERROR_INIT;
    uint64_t next = coordinator_step(self->coordinator, &status, &err);
    if (status != LK_OK) {
        sim_fail(self->sim, "start", "the cluster can not start: %s", err.text);
    }
    wake(self, LK_MAX(next, self->sim->now_ns + 1));
}

void sim_coord_on_msg(sim_coord_t *self, const msg_t *msg)
{
    coordinator_on_message(self->coordinator, msg);
    wake(self, self->sim->now_ns);
}
