#include "coordinator/coordinator.h"
#include "base/check.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Loads are collected for so long before they are published: one message to each front end per
 * period whatever the ranks send. Changes of wave, pause, health go out at once. */
#define STATS_PERIOD_NS (100 * LK_MS_NS)

struct coordinator {
    coordinator_config_t config;
    engine_registry_t *registry;
    uint64_t started_ns;
    bool inited, serving;
    lk_status_t failed;
    lk_error_t failure;
    /* newest group report; a cache */
    uint64_t round, wave, epoch;
    bool run, paused, any_group;
    /* publication */
    bool urgent, changed;
    uint64_t published_ns;
    uint64_t dropped; /* messages that made no sense */
    uint64_t sequence;
};

coordinator_t *coordinator_new(const coordinator_config_t *config)
{
    coordinator_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->config = *config;
    self->started_ns = lk_env_now_ns(config->env);
    self->registry = engine_registry_new(config->dp_size, config->n_frontends, config->config_hash);
    if (self->registry == NULL) {
        coordinator_destroy(&self);
    }
    return self;
}

void coordinator_destroy(coordinator_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        engine_registry_destroy(&(*self_p)->registry);
        free(*self_p);
        *self_p = NULL;
    }
}

bool coordinator_serving(const coordinator_t *self)
{
    return self->serving;
}

static msg_t message(coordinator_t *self, msg_type_t type)
{
    msg_t msg = {.type = type,
                 .sender_role = MSG_ROLE_COORDINATOR,
                 .generation = 1,
                 .sequence = ++self->sequence};
    return msg;
}

static void fail(coordinator_t *self, lk_status_t status, const char *text)
{
    if (self->failed == LK_OK) {
        self->failed = status;
        lk_error_set(&self->failure, status, "%s", text);
    }
}

/* Everybody has said HELLO: tell everybody where everybody is. */
static void send_inits(coordinator_t *self)
{
    const coordinator_config_t *c = &self->config;
    msg_name_t *names = calloc(2 * (size_t)c->n_frontends + c->dp_size, sizeof *names);
    if (names == NULL) {
        fail(self, LK_ERR_NO_MEMORY, "no memory for the address list");
        return;
    }
    msg_name_t *inputs = names, *outputs = inputs + c->n_frontends,
               *mesh = outputs + c->n_frontends;
    for (size_t i = 0; i < engine_registry_count(self->registry); i++) {
        const member_t *m = engine_registry_at(self->registry, i);
        if (m->role == MSG_ROLE_ENGINE) {
            mesh[m->rank].text = msg_str(m->mesh);
        } else {
            inputs[m->rank].text = msg_str(m->input);
            outputs[m->rank].text = msg_str(m->output);
        }
    }
    msg_t msg = message(self, MSG_INIT);
    msg.init = (msg_init_t){.group_epoch = 1,
                            .dp_size = c->dp_size,
                            .n_frontends = c->n_frontends,
                            .inputs = {inputs, c->n_frontends},
                            .outputs = {outputs, c->n_frontends},
                            .mesh = {mesh, c->dp_size},
                            .events_address = msg_str(c->events_address),
                            .stats_address = msg_str(c->stats_address),
                            .wave_address = msg_str(c->wave_address)};
    for (size_t i = 0; i < engine_registry_count(self->registry); i++) {
        member_t *m = engine_registry_at(self->registry, i);
        m->state = MEMBER_INITED;
        c->host.reply(c->host.ctx, m->role, m->rank, &msg);
    }
    free(names);
    self->inited = true;
}

static void on_hello(coordinator_t *self, const msg_t *msg, uint64_t now_ns)
{
    lk_error_t err = LK_ERROR_INIT;
    if (engine_registry_hello(self->registry, msg, now_ns, &err) != LK_OK) {
        LK_WARN("handshake refused: %s", err.text);
        msg_t reply = message(self, MSG_INIT);
        reply.init.error = msg_str(err.text);
        self->config.host.reply(self->config.host.ctx, (uint32_t)msg->hello.role,
                                (uint32_t)msg->hello.rank, &reply);
        return;
    }
    if (!self->inited && engine_registry_all(self->registry, MSG_ROLE_ENGINE, MEMBER_HELLO) &&
        engine_registry_all(self->registry, MSG_ROLE_FRONTEND, MEMBER_HELLO)) {
        send_inits(self);
    }
}

static void on_ready(coordinator_t *self, const msg_t *msg, uint64_t now_ns)
{
    lk_error_t err = LK_ERROR_INIT;
    if (msg->ready.error.len > 0) {
        lk_error_set(&err, LK_ERR_UNAVAILABLE, "%s %llu can not start: %s",
                     member_role_name((uint32_t)msg->ready.role),
                     (unsigned long long)msg->ready.rank, msg_cstr(msg->ready.error));
        fail(self, LK_ERR_UNAVAILABLE, err.text);
        return;
    }
    if (engine_registry_ready(self->registry, msg, now_ns, &err) != LK_OK) {
        LK_WARN("%s", err.text);
        self->dropped++;
        return;
    }
    if (!self->serving && engine_registry_all(self->registry, MSG_ROLE_ENGINE, MEMBER_READY)) {
        const member_t *first = engine_registry_at(self->registry, 0);
        for (uint32_t r = 1; r < self->config.dp_size; r++) {
            const member_t *m = engine_registry_at(self->registry, r);
            if (strcmp(m->digest, first->digest) != 0) {
                lk_error_set(&err, LK_ERR_STATE,
                             "engine %u loaded other weights than engine 0 (digest %s, not %s)", r,
                             m->digest, first->digest);
                fail(self, LK_ERR_STATE, err.text);
                return;
            }
        }
        self->serving = true;
        LK_INFO("all %u engines are ready, weights %s", self->config.dp_size, first->digest);
    }
    self->urgent = true;
}

static void start(coordinator_t *self, uint64_t round, uint64_t epoch, uint64_t wave)
{
    msg_t msg = message(self, MSG_START_DP_WAVE);
    msg.start_dp_wave =
        (msg_start_dp_wave_t){.round = round, .epoch = epoch, .wave = wave, .has_round = true};
    self->config.host.wave(self->config.host.ctx, &msg);
}

static void on_group(coordinator_t *self, const msg_group_t *g)
{
    if (self->any_group && g->round <= self->round) {
        return; /* newest round wins */
    }
    self->urgent |= !self->any_group || g->run != self->run || g->paused != self->paused ||
                    g->wave != self->wave;
    self->any_group = true;
    self->round = g->round;
    self->wave = g->wave;
    self->run = g->run;
    self->paused = g->paused;
    self->epoch = g->epoch;
}

static void on_load(coordinator_t *self, const msg_load_t *load)
{
    member_t *m = engine_registry_find(self->registry, MSG_ROLE_ENGINE, load->rank);
    if (m == NULL) {
        self->dropped++;
        return;
    }
    bool relabelled = m->load.weight_epoch != load->weight_epoch || m->load.gates != load->gates ||
                      m->load.paused != load->paused;
    m->load = *load;
    snprintf(m->load_version, sizeof m->load_version, "%s", msg_cstr(load->weight_version));
    m->load.weight_version = msg_str(m->load_version);
    self->changed = true;
    self->urgent |= relabelled;
}

void coordinator_on_message(coordinator_t *self, const msg_t *msg)
{
    uint64_t now_ns = lk_env_now_ns(self->config.env);
    if (msg->type != MSG_HELLO &&
        engine_registry_heard(self->registry, msg->sender_role, msg->sender_rank, now_ns)) {
        LK_WARN("%s %u speaks again", member_role_name(msg->sender_role), msg->sender_rank);
        self->urgent = true;
    }
    switch (msg->type) {
    case MSG_HELLO:
        on_hello(self, msg, now_ns);
        break;
    case MSG_READY:
        on_ready(self, msg, now_ns);
        break;
    case MSG_ANNOUNCE:
        start(self, msg->announce.round, msg->announce.epoch, msg->announce.wave);
        break;
    case MSG_FIRST_REQ:
        /* A latency hint: the group is invited to the round it is known to wait at. Stale is
         * harmless. */
        if (!self->run && !self->paused) {
            start(self, self->round, self->epoch, self->wave);
        }
        break;
    case MSG_GROUP:
        on_group(self, &msg->group);
        break;
    case MSG_LOAD:
        on_load(self, &msg->load_report.load);
        break;
    case MSG_HEARTBEAT:
        break;
    default:
        self->dropped++;
        LK_DEBUG("a message %s from %s %u has no meaning here", msg_type_name(msg->type),
                 member_role_name(msg->sender_role), msg->sender_rank);
    }
}

static void publish(coordinator_t *self, uint64_t now_ns)
{
    const coordinator_config_t *c = &self->config;
    size_t n = engine_registry_count(self->registry);
    msg_load_t *loads = calloc(c->dp_size, sizeof *loads);
    msg_name_t *dead = calloc(n, sizeof *dead);
    char(*texts)[96] = calloc(n, sizeof *texts);
    size_t n_dead = 0;
    if (loads != NULL && dead != NULL && texts != NULL) {
        msg_t msg = message(self, MSG_STATS);
        msg_stats_t *s = &msg.stats;
        for (size_t i = 0; i < n; i++) {
            const member_t *m = engine_registry_at(self->registry, i);
            if (m->dead) {
                snprintf(texts[n_dead], sizeof texts[0], "%s %u: silent for %.1f s",
                         member_role_name(m->role), m->rank,
                         (double)(now_ns - m->last_heard_ns) / 1e9);
                dead[n_dead].text = msg_str(texts[n_dead]);
                n_dead++;
            }
            if (m->role != MSG_ROLE_ENGINE) {
                continue;
            }
            loads[m->rank] = m->load;
            loads[m->rank].rank = m->rank;
            s->num_blocks += m->num_blocks;
            s->vocab_size = m->vocab_size;
            if (s->max_model_len == 0 || m->max_model_len < s->max_model_len) {
                s->max_model_len = m->max_model_len;
            }
        }
        s->serving = self->serving;
        s->group_epoch = 1;
        s->wave = self->wave;
        s->round = self->round;
        s->run = self->run;
        s->paused = self->paused;
        s->loads.items = loads;
        s->loads.count = c->dp_size;
        s->dead.items = dead;
        s->dead.count = n_dead;
        c->host.stats(c->host.ctx, &msg);
        self->urgent = self->changed = false;
    }
    /* Out of memory: nothing was published; the next period tries again. */
    self->published_ns = now_ns;
    free(loads);
    free(dead);
    free(texts);
}

uint64_t coordinator_step(coordinator_t *self, lk_status_t *status, lk_error_t *err)
{
    const coordinator_config_t *c = &self->config;
    uint64_t now_ns = lk_env_now_ns(c->env);
    if (!self->serving && now_ns - self->started_ns > c->handshake_timeout_ns) {
        char who[512];
        member_state_t want = self->inited ? MEMBER_READY : MEMBER_HELLO;
        engine_registry_missing(self->registry, want, who, sizeof who);
        lk_error_t late = LK_ERROR_INIT;
        lk_error_set(&late, LK_ERR_TIMEOUT, "not ready after %.0f s: %s %s",
                     (double)c->handshake_timeout_ns / 1e9, who,
                     self->inited ? "did not finish loading" : "did not say HELLO");
        fail(self, LK_ERR_TIMEOUT, late.text);
    }
    if (self->serving && engine_registry_expire(self->registry, now_ns, c->dead_after_ns)) {
        self->urgent = true;
        LK_ERROR("a process is silent; see the stats of the front ends");
    }
    if (self->serving) {
        uint64_t age = now_ns - self->published_ns;
        if (self->urgent || (self->changed && age >= STATS_PERIOD_NS) || age >= c->heartbeat_ns) {
            publish(self, now_ns);
        }
    }
    *status = self->failed;
    if (self->failed != LK_OK && err != NULL) {
        *err = self->failure;
    }
    uint64_t next = now_ns + LK_MIN(c->heartbeat_ns, 500 * LK_MS_NS);
    if (self->serving && self->changed) {
        next = LK_MIN(next, self->published_ns + STATS_PERIOD_NS);
    }
    return next;
}
