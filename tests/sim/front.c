/* front.c: a front end's process: the handshake, and the real engine client between simulated
 * sockets. */
#include "tests/sim/net.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define TICK_NS (50 * LK_MS_NS)

static void send_msg(sim_front_t *self, sim_link_t link, uint32_t to, const msg_t *msg)
{
    msg_t m = *msg;
    m.sender_role = MSG_ROLE_FRONTEND;
    m.sender_rank = self->index;
    m.generation = self->generation;
    m.sequence = ++self->sequence;
    sim_net_send(self->sim, link, sim_node_front(self->sim, self->index), to, &m);
}

static lk_status_t send_engine(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    sim_front_t *self = ctx;
    if (!self->known[rank]) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %u is not connected", rank);
    }
    send_msg(self, SIM_LINK_INPUT, sim_node_rank(self->sim, rank), msg);
    return LK_OK;
}

static lk_status_t send_coordinator(void *ctx, const msg_t *msg, lk_error_t *err)
{
    send_msg(ctx, SIM_LINK_EVENTS, sim_node_coord(), msg);
    return LK_OK;
}

void sim_front_start(sim_front_t *self)
{
    sim_t *sim = self->sim;
    self->generation = sim->now_ns;
    self->known = calloc(sim->o.ranks, sizeof *self->known);
    CHECK(self->known != NULL);
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND,
                              .rank = self->index,
                              .config_hash = msg_str("sim"),
                              .input_address = msg_str("input"),
                              .output_address = msg_str("output")};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), &msg);
    /* nothing else is read before INIT */
    sim_net_hold(sim, sim_node_front(sim, self->index), ~(1u << SIM_LINK_HANDSHAKE));
    sim_post(sim, TICK_NS, SIM_EV_FRONT, self->index, 0, 0, NULL);
}

void sim_front_stop(sim_front_t *self)
{
    engine_client_destroy(&self->client);
    free(self->known);
    self->known = NULL;
}

static void on_init(sim_front_t *self, const msg_init_t *init)
{
    sim_t *sim = self->sim;
    if (init->error.len > 0) {
        sim_fail(sim, "start", "front end %u is refused: %s", self->index, msg_cstr(init->error));
        return;
    }
    engine_client_config_t config = {.client = self->index,
                                     .n_clients = (uint32_t)sim->o.frontends,
                                     .n_ranks = (uint32_t)sim->o.ranks,
                                     .shadow = sim->o.swap == 1,
                                     .expert_parallel = sim->o.moe && sim->o.ranks > 1,
                                     .generation = self->generation,
                                     .control_timeout_ns = sim->o.control_timeout_ms * LK_MS_NS,
                                     .transfer_timeout_ns =
                                         20 * sim->o.transfer_timeout_ms * LK_MS_NS,
                                     .max_requests = UINT32_MAX};
    self->client = engine_client_new(
        &config, &(engine_client_ops_t){self, send_engine, send_coordinator, &sim->env});
    CHECK(self->client != NULL);
    sim_net_hold(sim, sim_node_front(sim, self->index), 0);
    msg_t msg = {.type = MSG_READY};
    msg.ready = (msg_ready_t){.role = MSG_ROLE_FRONTEND, .rank = self->index};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), &msg);
}

void sim_front_on_msg(sim_front_t *self, const msg_t *msg)
{
    if (msg->type == MSG_INIT) {
        on_init(self, &msg->init);
        return;
    }
    if (self->client == NULL) {
        return;
    }
    if (msg->type == MSG_ENGINE_HERE) {
        self->known[msg->engine_here.rank] = true;
    }
    engine_client_on_msg(self->client, msg);
    if (msg->type == MSG_STATS && msg->stats.serving) {
        self->serving = true;
    }
}

void sim_front_on_tick(sim_front_t *self)
{
    sim_t *sim = self->sim;
    if (self->client != NULL && sim_front_runs(sim, self->index)) {
        engine_client_poll(self->client);
        if (sim->now_ns - self->heartbeat_ns >= LK_SECOND_NS) {
            self->heartbeat_ns = sim->now_ns;
            msg_t msg = {.type = MSG_HEARTBEAT};
            msg.heartbeat = (msg_heartbeat_t){MSG_ROLE_FRONTEND, self->index};
            send_msg(self, SIM_LINK_EVENTS, sim_node_coord(), &msg);
        }
    }
    sim_post(sim, TICK_NS, SIM_EV_FRONT, self->index, 0, 0, NULL);
}
