#include "coordinator/coordinator.h"
#include "base/check.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Loads are collected for so long before they are published: one message to each front end per
 * period whatever the ranks send. Changes of wave, pause, health go out at once. */
#define STATS_PERIOD_NS (100 * LK_MS_NS)
/* A pause, a death, an update are told at once; but each rank reports them by itself, and to
 * publish all ranks' state for each of them would cost the square of their number. */
#define URGENT_PERIOD_NS (5 * LK_MS_NS)

#define ROLLCALL_NS (200 * LK_MS_NS)

struct coordinator {
    coordinator_config_t config;
    engine_registry_t *registry;
    membership_t *membership;
    uint64_t started_ns, stepped_ns, rollcall_ns;
    bool served; /* every engine was READY at least once */
    lk_status_t failed;
    lk_error_t failure;
    /* newest group report; a cache */
    uint64_t group_epoch;
    uint64_t round, wave, epoch;
    bool run, paused, any_group;
    /* publication */
    bool urgent, changed;
    uint64_t published_ns;
    uint64_t dropped; /* messages that made no sense */
    uint64_t sequence;
};

static msg_t message(coordinator_t *self, msg_type_t type)
{
    msg_t msg = {.type = type,
                 .sender_role = MSG_ROLE_COORDINATOR,
                 .generation = LK_MAX(self->config.life, 1u),
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

/* What was cached of an older epoch's group says nothing about the new one. */
static void forget_group(coordinator_t *self, uint64_t epoch)
{
    if (self->group_epoch != epoch) {
        self->group_epoch = epoch;
        self->any_group = self->run = self->paused = false;
        self->round = self->wave = self->epoch = 0;
    }
}

/* Tells a member where everybody is. */
static void send_init(void *ctx, const member_t *to)
{
    coordinator_t *self = ctx;
    const coordinator_config_t *c = &self->config;
    msg_name_t *names = calloc(2 * (size_t)c->n_frontends + c->dp_size, sizeof *names);
    msg_member_t *members = calloc(c->dp_size, sizeof *members);
    size_t n = 0;
    if (names == NULL || members == NULL) {
        free(names);
        free(members);
        fail(self, LK_ERR_NO_MEMORY, "no memory for the address list");
        return;
    }
    msg_name_t *inputs = names, *outputs = inputs + c->n_frontends,
               *mesh = outputs + c->n_frontends;
    for (size_t i = 0; i < engine_registry_count(self->registry); i++) {
        const member_t *m = engine_registry_at(self->registry, i);
        if (m->role == MSG_ROLE_ENGINE && !m->removed) {
            members[n].rank = m->rank;
            mesh[n++].text = msg_str(m->mesh);
        } else if (m->role != MSG_ROLE_ENGINE) {
            inputs[m->rank].text = msg_str(m->input);
            outputs[m->rank].text = msg_str(m->output);
        }
    }
    msg_t msg = message(self, MSG_INIT);
    msg.init = (msg_init_t){.group_epoch = membership_epoch(self->membership),
                            .dp_size = c->dp_size,
                            .n_frontends = c->n_frontends,
                            .inputs = {inputs, c->n_frontends},
                            .outputs = {outputs, c->n_frontends},
                            .mesh = {mesh, n},
                            .members = {members, n},
                            .events_address = msg_str(c->events_address),
                            .stats_address = msg_str(c->stats_address),
                            .wave_address = msg_str(c->wave_address),
                            .weight_floor = membership_weight_floor(self->membership),
                            .revision = membership_revision(self->membership)};
    c->host.reply(c->host.ctx, to->role, to->rank, to->generation, &msg);
    free(names);
    free(members);
    if (to->role == MSG_ROLE_ENGINE) {
        forget_group(self, msg.init.group_epoch);
    }
}

static void send_dissolve(void *ctx, uint64_t epoch, int64_t lost, const char *why)
{
    coordinator_t *self = ctx;
    const coordinator_config_t *c = &self->config;
    msg_t msg = message(self, MSG_DISSOLVE);
    msg.dissolve = (msg_dissolve_t){.group_epoch = epoch, .lost = lost, .why = msg_str(why)};
    for (uint32_t r = 0; r < c->dp_size; r++) {
        const member_t *m = engine_registry_find(self->registry, MSG_ROLE_ENGINE, r);
        if (m->generation != 0 && !m->removed) {
            c->host.reply(c->host.ctx, MSG_ROLE_ENGINE, r, m->generation, &msg);
        }
    }
    self->urgent = true;
}

static bool computes(void *ctx, const member_t *m, uint64_t now_ns)
{
    const coordinator_host_t *host = &((coordinator_t *)ctx)->config.host;
    return host->computes(host->ctx, m, now_ns);
}

coordinator_t *coordinator_new(const coordinator_config_t *config)
{
    coordinator_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->config = *config;
    self->started_ns = lk_env_now_ns(config->env);
    self->stepped_ns = self->started_ns;
    self->registry = engine_registry_new(config->dp_size, config->n_frontends, config->config_hash);
    if (self->registry != NULL) {
        membership_ops_t ops = {self, send_init, send_dissolve,
                                config->host.computes != NULL ? computes : NULL};
        self->membership = membership_new(self->registry, &ops, config->life << 32);
    }
    if (self->membership == NULL) {
        coordinator_destroy(&self);
    }
    return self;
}

void coordinator_destroy(coordinator_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        membership_destroy(&(*self_p)->membership);
        engine_registry_destroy(&(*self_p)->registry);
        free(*self_p);
        *self_p = NULL;
    }
}

bool coordinator_serving(const coordinator_t *self)
{
    return self->failed == LK_OK && membership_state(self->membership) == MEMBERSHIP_SERVING;
}

static void on_hello(coordinator_t *self, const msg_t *msg, uint64_t now_ns)
{
    lk_error_t err = LK_ERROR_INIT;
    uint64_t revision = membership_revision(self->membership);
    membership_state_t state = membership_state(self->membership);
    if (membership_hello(self->membership, msg, now_ns, &err) != LK_OK) {
        LK_WARN("handshake refused: %s", err.text);
        msg_t reply = message(self, MSG_INIT);
        reply.init.error = msg_str(err.text);
        self->config.host.reply(self->config.host.ctx, (uint32_t)msg->hello.role,
                                (uint32_t)msg->hello.rank, msg->generation, &reply);
    }
    self->urgent |= revision != membership_revision(self->membership) ||
                    state != membership_state(self->membership);
}

/* At the start all ranks must have loaded the same; later the ranks compare by themselves. (A group
 * that an earlier life of this coordinator formed may be in the middle of an update.) */
static bool check_digests(coordinator_t *self)
{
    if (membership_epoch(self->membership) != 1 || membership_adopted(self->membership)) {
        return true;
    }
    const member_t *first = NULL;
    for (uint32_t r = 0; r < self->config.dp_size; r++) {
        const member_t *m = engine_registry_at(self->registry, r);
        first = first == NULL && !m->removed ? m : first;
        if (!m->removed && strcmp(m->digest, first->digest) != 0) {
            lk_error_t err = LK_ERROR_INIT;
            lk_error_set(&err, LK_ERR_STATE,
                         "engine %u loaded other weights than engine %u (digest %s, not %s)", r,
                         first->rank, m->digest, first->digest);
            fail(self, LK_ERR_STATE, err.text);
            return false;
        }
    }
    return true;
}

static void on_ready(coordinator_t *self, const msg_t *msg, uint64_t now_ns)
{
    lk_error_t err = LK_ERROR_INIT;
    if (msg->ready.error.len > 0) {
        lk_error_set(&err, LK_ERR_UNAVAILABLE, "%s %llu can not start: %s",
                     member_role_name((uint32_t)msg->ready.role),
                     (unsigned long long)msg->ready.rank, msg_cstr(msg->ready.error));
        if ((self->served || self->config.life > 1) && self->config.shrinks) {
            LK_WARN("%s", err.text);
        } else {
            fail(self, LK_ERR_UNAVAILABLE, err.text);
        }
        return;
    }
    bool before = coordinator_serving(self);
    if (membership_ready(self->membership, msg, now_ns, &err) != LK_OK) {
        LK_WARN("%s", err.text);
        self->dropped++;
        return;
    }
    if (!before && coordinator_serving(self)) {
        if (!self->served && !check_digests(self)) {
            return;
        }
        self->served = true;
        LK_INFO("all %u engines are in group epoch %llu", engine_registry_engines(self->registry),
                (unsigned long long)membership_epoch(self->membership));
    }
    self->urgent = true;
}

static void start(coordinator_t *self, uint64_t round, uint64_t epoch, uint64_t wave)
{
    msg_t msg = message(self, MSG_START_DP_WAVE);
    msg.start_dp_wave = (msg_start_dp_wave_t){.round = round,
                                              .epoch = epoch,
                                              .wave = wave,
                                              .has_round = true,
                                              .group_epoch = membership_epoch(self->membership)};
    self->config.host.wave(self->config.host.ctx, &msg);
}

static void on_group(coordinator_t *self, const msg_group_t *g)
{
    if (g->group_epoch != self->group_epoch || (self->any_group && g->round <= self->round)) {
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
    membership_note_weights(self->membership, load->weight_epoch);
    self->changed = true;
    self->urgent |= relabelled;
}

void coordinator_on_message(coordinator_t *self, const msg_t *msg)
{
    uint64_t now_ns = lk_env_now_ns(self->config.env);
    bool back = false;
    if (msg->type != MSG_HELLO && !engine_registry_heard(self->registry, msg, now_ns, &back)) {
        self->dropped++; /* a stranger's, or of a life that is over */
        return;
    }
    if (back) {
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
        if (msg->announce.group_epoch != self->group_epoch) {
            break;
        }
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
        membership_note_weights(self->membership, msg->heartbeat.weight_epoch);
        membership_note_epoch(self->membership, msg->heartbeat.group_epoch, now_ns);
        break;
    default:
        self->dropped++;
        LK_DEBUG("a message %s from %s %u has no meaning here", msg_type_name(msg->type),
                 member_role_name(msg->sender_role), msg->sender_rank);
    }
}

/* ---- the launcher ---- */

/* "12" and what follows it; NULL unless text begins with a number as one is written. */
static const char *parse_rank(const char *text, uint64_t *out)
{
    size_t n = strspn(text, "0123456789");
    if (n == 0 || n > 6 || (n > 1 && text[0] == '0')) {
        return NULL;
    }
    *out = strtoull(text, NULL, 10);
    return text + n;
}

static lk_status_t remove_rank(coordinator_t *self, uint64_t rank, const char *why, lk_error_t *err)
{
    if (!membership_remove(self->membership, rank, why, lk_env_now_ns(self->config.env))) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "the launcher removes rank %llu: it is the last of %u, or none of them",
                            (unsigned long long)rank, self->config.dp_size);
    }
    self->urgent = true;
    return LK_OK;
}

lk_status_t coordinator_on_launcher(coordinator_t *self, const char *line, lk_error_t *err)
{
    static const char verb[] = "removed ";
    uint64_t rank = 0;
    bool known = strncmp(line, verb, sizeof verb - 1) == 0;
    const char *rest = known ? parse_rank(line + sizeof verb - 1, &rank) : NULL;
    if (rest == NULL || rest[0] != ' ' || rest[1] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID,
                            "the launcher says '%.100s', not 'removed RANK WHY'", line);
    }
    return remove_rank(self, rank, rest + 1, err);
}

lk_status_t coordinator_remove_all(coordinator_t *self, const char *ranks, lk_error_t *err)
{
    const char *rest = ranks;
    while (rest[0] != '\0') {
        uint64_t rank = 0;
        rest = parse_rank(rest, &rank);
        if (rest == NULL || (rest[0] != ',' && rest[0] != '\0') ||
            (rest[0] == ',' && rest[1] == '\0')) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "--removed-ranks %.100s: ranks separated by commas", ranks);
        }
        rest += rest[0] == ',';
        LK_RETURN_IF_ERROR(remove_rank(self, rank, "in an earlier life of the coordinator", err));
    }
    return LK_OK;
}

static void publish(coordinator_t *self, uint64_t now_ns)
{
    const coordinator_config_t *c = &self->config;
    size_t n = engine_registry_count(self->registry);
    msg_load_t *loads = calloc(c->dp_size, sizeof *loads);
    msg_name_t *dead = calloc(n, sizeof *dead);
    msg_removal_t *removed = calloc(c->dp_size, sizeof *removed);
    char(*texts)[192] = calloc(n, sizeof *texts);
    size_t n_dead = 0, n_loads = 0, n_removed = 0;
    if (loads != NULL && dead != NULL && removed != NULL && texts != NULL) {
        msg_t msg = message(self, MSG_STATS);
        msg_stats_t *s = &msg.stats;
        for (size_t i = 0; i < n; i++) {
            const member_t *m = engine_registry_at(self->registry, i);
            if (m->dead) {
                lk_text(texts[n_dead], sizeof texts[0], "%s %u: %s", member_role_name(m->role),
                        m->rank, m->expelled_why);
                dead[n_dead].text = msg_str(texts[n_dead]);
                n_dead++;
            }
            if (m->removed) {
                removed[n_removed++] = (msg_removal_t){m->rank, msg_str(m->removed_why)};
            }
            if (m->role != MSG_ROLE_ENGINE || m->removed) {
                continue;
            }
            loads[n_loads] = m->load;
            loads[n_loads++].rank = m->rank;
            s->num_blocks += m->num_blocks;
            s->vocab_size = m->vocab_size;
            s->lockstep |= m->lockstep;
            if (s->max_model_len == 0 || m->max_model_len < s->max_model_len) {
                s->max_model_len = m->max_model_len;
            }
        }
        s->serving = coordinator_serving(self);
        s->group_epoch = membership_epoch(self->membership);
        s->why = msg_str(s->serving ? "" : membership_cause(self->membership));
        s->weight_epoch = membership_weights(self->membership);
        s->wave = self->wave;
        s->round = self->round;
        s->run = self->run;
        s->paused = self->paused;
        s->loads.items = loads;
        s->loads.count = n_loads;
        s->dead.items = dead;
        s->dead.count = n_dead;
        s->removed.items = removed;
        s->removed.count = n_removed;
        c->host.stats(c->host.ctx, &msg);
        self->urgent = self->changed = false;
    }
    /* Out of memory: nothing was published; the next period tries again. */
    self->published_ns = now_ns;
    free(loads);
    free(dead);
    free(removed);
    free(texts);
}

static void look_for_silence(coordinator_t *self, uint64_t now_ns)
{
    const coordinator_config_t *c = &self->config;
    /* Stopped, or starved: what others said meanwhile may still be on its way to us. */
    if (now_ns - self->stepped_ns > c->dead_after_ns / 2) {
        engine_registry_forgive(self->registry, now_ns);
    }
    self->stepped_ns = now_ns;
    if (membership_expire(self->membership, now_ns, c->dead_after_ns)) {
        self->urgent = true;
        LK_ERROR("a process is silent; see the stats of the front ends");
    }
}

/* A later life of the coordinator knows nobody's address: everybody is asked to come. */
static void call_the_roll(coordinator_t *self, uint64_t now_ns)
{
    const coordinator_host_t *host = &self->config.host;
    bool all = engine_registry_all(self->registry, MSG_ROLE_ENGINE, MEMBER_HELLO) &&
               engine_registry_all(self->registry, MSG_ROLE_FRONTEND, MEMBER_HELLO);
    if (self->config.life <= 1 || self->served || all ||
        (self->rollcall_ns != 0 && now_ns - self->rollcall_ns < ROLLCALL_NS)) {
        return;
    }
    self->rollcall_ns = now_ns;
    msg_t msg = message(self, MSG_ROLLCALL);
    msg.rollcall.life = self->config.life;
    host->wave(host->ctx, &msg);
    host->stats(host->ctx, &msg);
}

/* Before there is a group there is none. One that was found as it is is whole until it is known not
 * to be: its READYs are on their way, and to say meanwhile that it does not serve would end what
 * runs in it. */
static bool may_publish(const coordinator_t *self)
{
    return membership_epoch(self->membership) > 0 &&
           !(membership_adopted(self->membership) &&
             membership_state(self->membership) == MEMBERSHIP_CONNECTING);
}

/* Between two publications. */
static uint64_t patience(const coordinator_t *self)
{
    return self->urgent    ? URGENT_PERIOD_NS
           : self->changed ? STATS_PERIOD_NS
                           : self->config.heartbeat_ns;
}

uint64_t coordinator_step(coordinator_t *self, lk_status_t *status, lk_error_t *err)
{
    const coordinator_config_t *c = &self->config;
    uint64_t now_ns = lk_env_now_ns(c->env);
    /* a later life waits for whoever the launcher starts again, or gives up */
    bool first = !self->served && c->life <= 1;
    if (first && now_ns - self->started_ns > c->handshake_timeout_ns) {
        char who[512];
        bool inited = membership_epoch(self->membership) > 0;
        member_state_t want = inited ? MEMBER_READY : MEMBER_HELLO;
        engine_registry_missing(self->registry, want, who, sizeof who);
        lk_error_t late = LK_ERROR_INIT;
        lk_error_set(&late, LK_ERR_TIMEOUT, "not ready after %.0f s: %s %s",
                     (double)c->handshake_timeout_ns / 1e9, who,
                     inited ? "did not join the group" : "did not finish loading");
        fail(self, LK_ERR_TIMEOUT, late.text);
    }
    look_for_silence(self, now_ns);
    call_the_roll(self, now_ns);
    if (may_publish(self) && now_ns - self->published_ns >= patience(self)) {
        publish(self, now_ns);
    }
    lk_error_t broken = LK_ERROR_INIT;
    if (membership_check(self->membership, &broken) < 0) {
        fail(self, broken.status, broken.text);
    }
    *status = self->failed;
    if (self->failed != LK_OK && err != NULL) {
        *err = self->failure;
    }
    uint64_t next = now_ns + LK_MIN(c->heartbeat_ns, c->life > 1 ? ROLLCALL_NS : 500 * LK_MS_NS);
    if (may_publish(self)) {
        next = LK_MIN(next, self->published_ns + patience(self));
    }
    return next;
}
