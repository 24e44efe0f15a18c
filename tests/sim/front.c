/* front.c: a front end's process: the handshake, and the real engine client between simulated
 * sockets. */
#include "tests/sim/net.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS (50 * LK_MS_NS)

static uint32_t node_of(const sim_front_t *self)
{
    return sim_node_front(self->sim, self->index);
}

/* *sequence: of the newest one over that connection */
static void send_numbered(sim_front_t *self, sim_link_t link, uint32_t to, uint64_t to_life,
                          const msg_t *msg, uint64_t *sequence)
{
    msg_t m = *msg;
    m.sender_role = MSG_ROLE_FRONTEND;
    m.sender_rank = self->index;
    m.generation = self->generation;
    m.sequence = ++*sequence;
    sim_net_send(self->sim, link, node_of(self), to, to_life, &m);
}

static void send_msg(sim_front_t *self, sim_link_t link, uint32_t to, uint64_t to_life,
                     const msg_t *msg)
{
    send_numbered(self, link, to, to_life, msg, &self->sequence);
}

static lk_status_t send_engine(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    sim_front_t *self = ctx;
    if (self->known[rank] == 0) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %u is not connected", rank);
    }
    send_numbered(self, SIM_LINK_INPUT, sim_node_rank(self->sim, rank), self->known[rank], msg,
                  &self->said[rank]);
    return LK_OK;
}

static lk_status_t send_coordinator(void *ctx, const msg_t *msg, lk_error_t *err)
{
    send_msg(ctx, SIM_LINK_EVENTS, sim_node_coord(), 0, msg);
    return LK_OK;
}

/* Nothing but the handshake is read before INIT. */
void sim_front_listen(sim_front_t *self)
{
    sim_t *sim = self->sim;
    bool stopped = sim->stopped != NULL && sim->stopped[node_of(self)];
    sim_net_hold(sim, node_of(self),
                 stopped                ? ~0u
                 : self->client == NULL ? ~(1u << SIM_LINK_HANDSHAKE)
                                        : 0);
}

static void say_hello(sim_front_t *self)
{
    engine_client_info_t info = {0};
    if (self->client != NULL) {
        engine_client_info(self->client, &info);
    }
    self->hello_ns = self->sim->now_ns;
    char input[64];
    snprintf(input, sizeof input, "input %u %llu", self->index,
             (unsigned long long)self->generation);
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND,
                              .rank = self->index,
                              .pid = self->generation,
                              .config_hash = msg_str("sim"),
                              .input_address = msg_str(input),
                              .output_address = msg_str(input),
                              .left_epoch = info.group_epoch,
                              .weight_epoch = info.weight_epoch};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), 0, &msg);
}

static void say_ready(sim_front_t *self)
{
    msg_t msg = {.type = MSG_READY};
    msg.ready = (msg_ready_t){.role = MSG_ROLE_FRONTEND, .rank = self->index};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), 0, &msg);
}

void sim_front_start(sim_front_t *self)
{
    sim_t *sim = self->sim;
    self->generation = sim_fresh_life(sim);
    self->sequence = self->heartbeat_ns = 0;
    self->known = calloc(sim->o.ranks, sizeof *self->known);
    self->said = calloc(sim->o.ranks, sizeof *self->said);
    CHECK(self->known != NULL && self->said != NULL);
    sim_net_up(sim, node_of(self), self->generation);
    sim_front_listen(self);
    say_hello(self);
    sim_post(sim, TICK_NS, SIM_EV_FRONT, self->index, 0, self->generation, NULL);
}

void sim_front_kill(sim_front_t *self)
{
    if (self->generation == 0) {
        return;
    }
    engine_client_destroy(&self->client);
    free(self->known);
    free(self->said);
    self->known = self->said = NULL;
    sim_net_down(self->sim, node_of(self));
    self->generation = 0;
    sim_requests_lost(self->sim, self->index);
    sim_calls_lost(self->sim, self->index);
}

bool sim_front_serves(const sim_front_t *self, uint64_t epoch)
{
    engine_client_info_t info;
    if (self->client == NULL) {
        return false;
    }
    engine_client_info(self->client, &info);
    return info.whole && info.group_epoch == epoch;
}

static void on_init(sim_front_t *self, const msg_init_t *init)
{
    sim_t *sim = self->sim;
    if (init->error.len > 0) {
        sim_fault_ended(sim, node_of(self), msg_cstr(init->error));
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
    sim_net_subscribe(sim, node_of(self));
    sim_front_listen(self);
    say_ready(self);
}

void sim_front_on_msg(sim_front_t *self, const msg_t *msg)
{
    if (msg->type == MSG_INIT) {
        if (self->client == NULL) {
            on_init(self, &msg->init);
        }
        return;
    }
    if (msg->type == MSG_ROLLCALL) {
        say_hello(self);
        say_ready(self);
        return;
    }
    if (self->client == NULL) {
        return; /* what else the handshake brings */
    }
    if (msg->type == MSG_ENGINE_HERE) { /* an old life does not come back */
        const msg_engine_here_t *here = &msg->engine_here;
        if (here->generation > self->known[here->rank]) {
            self->known[here->rank] = here->generation;
            self->said[here->rank] = 0;
        }
    }
    engine_client_on_msg(self->client, msg);
}

void sim_front_on_tick(sim_front_t *self, uint64_t generation)
{
    sim_t *sim = self->sim;
    if (generation != self->generation) {
        return; /* of a process that is over */
    }
    bool runs = sim->stopped == NULL || !sim->stopped[node_of(self)];
    if (self->client == NULL && runs && sim->now_ns - self->hello_ns >= LK_SECOND_NS) {
        say_hello(self);
    } else if (self->client != NULL && runs) {
        engine_client_poll(self->client);
        if (sim->now_ns - self->heartbeat_ns >= LK_SECOND_NS) {
            self->heartbeat_ns = sim->now_ns;
            msg_t msg = {.type = MSG_HEARTBEAT};
            msg.heartbeat = (msg_heartbeat_t){MSG_ROLE_FRONTEND, self->index, 0};
            send_msg(self, SIM_LINK_EVENTS, sim_node_coord(), 0, &msg);
        }
    }
    sim_post(sim, TICK_NS, SIM_EV_FRONT, self->index, 0, generation, NULL);
}
