/*
 * design_frontend_pause.c: the old design, behind the interface of engine_core/dp/group.h, so that
 * the same engines, front ends and coordinator run on it (this program is linked with it instead of
 * group.c): the front end remembers that it paused and does not wait; a rank acts on what it
 * receives, when it receives it. START_DP_WAVE lets a rank step; a rank that has work steps and has
 * the others told; every K steps a vote asks whether anybody has work.
 *
 * A rank in a forward pass, in a vote or in a weight call reads nothing: what arrives is queued.
 * So two ranks can be in different collectives, each waiting for the other. Finding that is what
 * this file is for.
 */
#include "base/check.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/design.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const bool sim_design_frontend_pause = true;

/* What waits for the end of a step, a vote or a weight call. */
typedef struct waiting {
    struct waiting *next;
    msg_cmd_t cmd; /* kind 0: a START for `round` */
    uint64_t round;
    char *spec;
} waiting_t;

/* The product's struct has all that is needed but the queue and these flags. */
typedef struct {
    group_t base;
    waiting_t *queue;
    bool in_step;
    uint64_t *generation, *seen; /* [n_frontends] */
} old_group_t;

static old_group_t *old(const group_t *self)
{
    return (old_group_t *)(uintptr_t)self;
}

group_t *group_new(const group_config_t *config)
{
    old_group_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->base.config = *config;
    self->generation = calloc(config->n_frontends, sizeof *self->generation);
    self->seen = calloc(config->n_frontends, sizeof *self->seen);
    CHECK(self->generation != NULL && self->seen != NULL);
    pause_init(&self->base.pause);
    weight_state_init(&self->base.weights, false);
    self->base.run = !config->lockstep;
    if (config->rank == 0) {
        group_push(&self->base, GROUP_ACT_REPORT, NULL);
    }
    return &self->base;
}

void group_destroy(group_t **self_p)
{
    if (*self_p == NULL) {
        return;
    }
    old_group_t *self = old(*self_p);
    while (self->queue != NULL) {
        waiting_t *next = self->queue->next;
        free(self->queue->spec);
        free(self->queue);
        self->queue = next;
    }
    for (size_t i = 0; i < self->base.queue_n; i++) {
        free(self->base.queue[(self->base.queue_head + i) % self->base.queue_cap].text);
    }
    free(self->base.queue);
    free(self->base.taken_text);
    free(self->base.update.spec);
    free(self->generation);
    free(self->seen);
    pause_fini(&self->base.pause);
    free(self);
    *self_p = NULL;
}

/* ---- actions: as in the product ---- */

group_action_t *group_push(group_t *self, group_act_t act, const char *text)
{
    if (self->queue_n == self->queue_cap) {
        size_t cap = self->queue_cap == 0 ? 32 : 2 * self->queue_cap;
        queued_action_t *queue = calloc(cap, sizeof *queue);
        CHECK(queue != NULL);
        for (size_t i = 0; i < self->queue_n; i++) {
            queue[i] = self->queue[(self->queue_head + i) % self->queue_cap];
        }
        free(self->queue);
        self->queue = queue;
        self->queue_cap = cap;
        self->queue_head = 0;
    }
    queued_action_t *q = &self->queue[(self->queue_head + self->queue_n++) % self->queue_cap];
    *q = (queued_action_t){.action = {.act = act, .text = ""}};
    if (text != NULL && text[0] != '\0') {
        q->text = strdup(text);
        CHECK(q->text != NULL);
        q->action.text = q->text;
    }
    return &q->action;
}

bool group_next_action(group_t *self, group_action_t *out)
{
    free(self->taken_text);
    self->taken_text = NULL;
    if (self->queue_n == 0) {
        return false;
    }
    queued_action_t *q = &self->queue[self->queue_head];
    *out = q->action;
    self->taken_text = q->text;
    self->queue_head = (self->queue_head + 1) % self->queue_cap;
    self->queue_n--;
    return true;
}

static void push_done(group_t *self, uint32_t f, uint64_t generation, uint64_t number,
                      uint64_t kind, uint64_t verb, lk_status_t status, const char *text)
{
    group_action_t *a = group_push(self, GROUP_ACT_DONE, text);
    a->frontend = f;
    a->generation = generation;
    a->number = number;
    a->kind = kind;
    a->verb = verb;
    a->status = status;
}

/* ---- commands, one by one, when they are read ---- */

static void answer(group_t *self, const msg_cmd_t *cmd, lk_status_t status, const char *text)
{
    push_done(self, (uint32_t)cmd->client, cmd->generation, cmd->number, cmd->kind, cmd->verb,
              status, text);
}

static void relabel(group_t *self, const msg_cmd_t *cmd, const char *spec)
{
    char version[WEIGHT_LABEL_MAX + 1];
    bool given = false;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status =
        weight_version_parse(UPDATE_VERB_SET_VERSION, spec, strlen(spec), version, &given, &err);
    if (status == LK_OK) {
        weight_state_relabel(&self->weights, version);
        group_push(self, GROUP_ACT_RELABEL, NULL);
    }
    answer(self, cmd, status, err.text);
}

static void apply_update(group_t *self, const msg_cmd_t *cmd, char **spec)
{
    lk_error_t err = LK_ERROR_INIT;
    update_verb_t verb = (update_verb_t)cmd->verb;
    lk_status_t status =
        self->config.check(self->config.check_ctx, verb, *spec, strlen(*spec), &err);
    if (status == LK_OK) {
        status = weight_state_admit(&self->weights, verb, &err);
    }
    if (status != LK_OK) {
        answer(self, cmd, status, err.text);
    } else if (verb == UPDATE_VERB_SET_VERSION) {
        relabel(self, cmd, *spec);
    } else if (verb == UPDATE_VERB_ABORT) {
        if (self->weights.gates & GATE_SESSION) {
            weight_state_close_session(&self->weights, true, "aborted");
            group_push(self, GROUP_ACT_SESSION_CLOSE, "aborted");
        }
        answer(self, cmd, LK_OK, NULL);
    } else {
        self->update = (group_update_t){.phase = UPDATE_CARRYING,
                                        .frontend = (uint32_t)cmd->client,
                                        .generation = cmd->generation,
                                        .number = cmd->number,
                                        .verb = verb,
                                        .spec = *spec,
                                        .spec_len = strlen(*spec)};
        *spec = NULL;
        group_action_t *a = group_push(self, GROUP_ACT_UPDATE_ENTER, NULL);
        a->verb = verb;
        a->spec = self->update.spec;
        a->spec_len = self->update.spec_len;
    }
}

static void apply(group_t *self, const msg_cmd_t *cmd, uint64_t round, char **spec)
{
    switch (cmd->kind) {
    case 0: /* START: one of an older wave says so itself */
        if (round >= self->round) {
            self->run = true;
        }
        break;
    case CMD_PAUSE:
        self->pause.state = cmd->mode == PAUSE_WAIT ? PAUSE_STATE_DRAINING : PAUSE_STATE_STOPPED;
        if (cmd->mode == PAUSE_ABORT) {
            group_push(self, GROUP_ACT_FINISH_ALL, NULL);
        }
        if (cmd->clear_cache) {
            group_push(self, GROUP_ACT_CLEAR_CACHE, NULL);
        }
        answer(self, cmd, LK_OK, NULL);
        break;
    case CMD_UPDATE:
        apply_update(self, cmd, spec);
        break;
    default: /* RESUME, CANCEL */
        self->pause.state = PAUSE_STATE_RUNNING;
        answer(self, cmd, LK_OK, NULL);
    }
}

static void read_queue(old_group_t *self)
{
    group_t *g = &self->base;
    while (self->queue != NULL && !self->in_step && !g->posted && g->update.phase == UPDATE_NONE) {
        waiting_t *w = self->queue;
        self->queue = w->next;
        apply(g, &w->cmd, w->round, &w->spec);
        free(w->spec);
        free(w);
    }
}

static void enqueue(old_group_t *self, const msg_cmd_t *cmd, uint64_t round)
{
    waiting_t *w = calloc(1, sizeof *w), **tail = &self->queue;
    CHECK(w != NULL);
    w->round = round;
    if (cmd != NULL) {
        w->cmd = *cmd;
        w->spec = strdup(msg_cstr(cmd->spec));
        CHECK(w->spec != NULL);
    }
    while (*tail != NULL) {
        tail = &(*tail)->next;
    }
    *tail = w;
    read_queue(self);
}

void group_on_cmd(group_t *base, const msg_cmd_t *cmd)
{
    old_group_t *self = old(base);
    uint32_t f = (uint32_t)cmd->client;
    if (cmd->generation > self->generation[f]) {
        self->generation[f] = cmd->generation;
        self->seen[f] = 0;
    }
    if (cmd->generation < self->generation[f] || cmd->number > self->seen[f] + 1) {
        return;
    }
    bool again = cmd->number <= self->seen[f];
    self->seen[f] += !again;
    group_action_t *a = group_push(base, GROUP_ACT_SEEN, NULL);
    a->frontend = f;
    a->generation = cmd->generation;
    a->number = self->seen[f];
    if (again) {
        a = group_push(base, GROUP_ACT_REPEAT, NULL);
        a->frontend = f;
        a->generation = cmd->generation;
        a->number = cmd->number;
    } else {
        enqueue(self, cmd, 0);
    }
}

void group_on_generation(group_t *self, uint32_t frontend, uint64_t generation)
{
}

void group_on_start(group_t *self, bool has_round, uint64_t round)
{
    enqueue(old(self), NULL, round);
}

bool group_on_cancel_update(group_t *self, uint32_t frontend, uint64_t generation, uint64_t number,
                            const char *why)
{
    return false; /* who sits in a broadcast reads nothing */
}

void group_on_time(group_t *self, uint64_t now_ns)
{
}

/* ---- steps and votes ---- */

group_next_t group_next(const group_t *const_self, const group_view_t *view)
{
    old_group_t *self = old(const_self);
    group_t *g = &self->base;
    if (g->posted || g->update.phase != UPDATE_NONE) {
        return GROUP_WAIT;
    }
    if (!g->run && view->work && !pause_is_paused(&g->pause)) {
        g->run = true;
        group_push(g, GROUP_ACT_ANNOUNCE, NULL);
    }
    if (!g->run) {
        return GROUP_WAIT;
    }
    if (g->sc >= g->config.sync_interval) {
        return GROUP_VOTE;
    }
    self->in_step = true;
    return GROUP_STEP;
}

size_t group_vector_len(const group_t *self)
{
    return 1;
}

void group_vote(group_t *self, const group_view_t *view, uint64_t now_ns, uint64_t *vec)
{
    self->posted = true;
    vec[0] = !view->work || self->pause.state == PAUSE_STATE_STOPPED; /* idle */
}

lk_status_t group_decide(group_t *self, const uint64_t *v, uint64_t now_ns, lk_error_t *err)
{
    (void)now_ns;
    self->run = v[0] == 0;
    self->wave += !self->run;
    self->round++;
    self->sc = 0;
    self->posted = false;
    if (self->config.rank == 0) {
        group_push(self, GROUP_ACT_REPORT, NULL);
    }
    read_queue(old(self));
    return LK_OK;
}

void group_step_done(group_t *self)
{
    old(self)->in_step = false;
    self->sc++;
    read_queue(old(self));
}

/* ---- weight calls ---- */

void group_end_update(group_t *self)
{
    free(self->update.spec);
    self->update = (group_update_t){.phase = UPDATE_NONE};
}

void group_update_done(group_t *self, const lk_error_t *result)
{
    group_update_t *u = &self->update;
    bool ok = result->status == LK_OK;
    if (u->verb == UPDATE_VERB_FINISH && ok && !u->committing) {
        u->committing = true;
        group_push(self, GROUP_ACT_UPDATE_COMMIT, NULL);
        return;
    }
    if (u->verb == UPDATE_VERB_FINISH && ok) {
        weight_state_commit(&self->weights, NULL);
        group_push(self, GROUP_ACT_PUBLISH, NULL)->keep_kv = false;
    } else if (u->verb != UPDATE_VERB_FINISH) {
        weight_state_outcome(&self->weights, u->verb, ok, true, result->text);
        group_action_t *a = group_push(self, GROUP_ACT_UPDATE_OUTCOME, NULL);
        a->verb = u->verb;
        a->ok = ok;
    }
    push_done(self, u->frontend, u->generation, u->number, CMD_UPDATE, u->verb, result->status,
              result->text);
    group_end_update(self);
    read_queue(old(self));
}

/* ---- state ---- */

/* The old design has one group epoch: who leaves it stays outside. */
void group_leave(group_t *self, bool clean, const char *why)
{
    snprintf(self->left_why, sizeof self->left_why, "%s", why);
    self->phase = GROUP_OUTSIDE;
    self->run = false;
}

void group_form(group_t *self, uint64_t group_epoch, uint64_t weight_floor, const roster_t *roster,
                bool fresh)
{
    CHECKF(false, "the old design forms no second group");
}

void group_reload(group_t *self)
{
    CHECKF(false, "the old design forms no second group");
}

bool group_is_member(const group_t *self)
{
    return self->phase == GROUP_MEMBER;
}

const char *group_left_why(const group_t *self)
{
    return self->phase == GROUP_MEMBER ? NULL : self->left_why;
}

const char *group_closed_why(const group_t *self)
{
    return self->weights.gates & GATE_DIRTY ? self->weights.dirty_why : NULL;
}

bool group_needs_complete(const group_t *self)
{
    return self->weights.gates & GATE_DIRTY;
}

unsigned group_gates(const group_t *self)
{
    return self->weights.gates;
}

const group_held_t *group_held(group_t *self)
{
    self->held.epoch = self->weights.epoch;
    snprintf(self->held.version, sizeof self->held.version, "%s", self->weights.version);
    return &self->held;
}

uint64_t group_round(const group_t *self)
{
    return self->round;
}

uint64_t group_wave(const group_t *self)
{
    return self->wave;
}

bool group_run(const group_t *self)
{
    return self->run;
}

bool group_posted(const group_t *self)
{
    return self->posted;
}

bool group_owes(const group_t *self)
{
    return false;
}

bool group_paused_local(const group_t *self)
{
    return pause_is_paused(&self->pause);
}

const pause_t *group_pause(const group_t *self)
{
    return &self->pause;
}

const weight_state_t *group_weights(const group_t *self)
{
    return &self->weights;
}

bool group_updating(const group_t *self)
{
    return self->update.phase != UPDATE_NONE;
}

uint64_t group_hash(const group_t *self)
{
    return 0;
}
