#include "engine_core/dp/group_internal.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

void group_seat(group_t *self, const roster_t *roster)
{
    self->roster = *roster;
    self->config.rank = roster->place;
    self->config.size = roster->n;
}

group_t *group_new(const group_config_t *config)
{
    CHECK(config->size >= 1 && config->rank < config->size && config->sync_interval >= 1);
    CHECK(config->n_frontends >= 1 && config->n_frontends <= GROUP_MAX_FRONTENDS);
    group_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->config = *config;
    self->config.roster = NULL;
    roster_t all = roster_of_all(config->size, config->rank);
    group_seat(self, config->roster != NULL ? config->roster : &all);
    pause_init(&self->pause);
    weight_state_init(&self->weights, config->shadow);
    self->done = calloc(config->n_frontends, sizeof *self->done);
    self->streams = calloc(config->n_frontends, sizeof *self->streams);
    self->queue_cap = 32;
    self->queue = calloc(self->queue_cap, sizeof *self->queue);
    if (self->done == NULL || self->streams == NULL || self->queue == NULL) {
        group_destroy(&self);
        return NULL;
    }
    for (uint32_t f = 0; f < config->n_frontends; f++) {
        stream_init(&self->streams[f], config->shadow);
    }
    self->run = !config->lockstep;
    if (self->config.rank == 0) {
        group_push(self, GROUP_ACT_REPORT, NULL);
    }
    return self;
}

void group_destroy(group_t **self_p)
{
    group_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    for (size_t f = 0; self->streams != NULL && f < self->config.n_frontends; f++) {
        stream_fini(&self->streams[f]);
    }
    for (size_t i = 0; i < self->queue_n; i++) {
        free(self->queue[(self->queue_head + i) % self->queue_cap].text);
    }
    free(self->queue);
    free(self->taken_text);
    free(self->streams);
    free(self->done);
    free(self->update.spec);
    pause_fini(&self->pause);
    free(self);
    *self_p = NULL;
}

/* ---- actions ---- */

group_action_t *group_push(group_t *self, group_act_t act, const char *text)
{
    if (self->queue_n == self->queue_cap) {
        size_t cap = 2 * self->queue_cap;
        queued_action_t *queue = calloc(cap, sizeof *queue);
        CHECKF(queue != NULL, "out of memory for %zu actions", cap);
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

/* ---- events ---- */

static void push_receipt(group_t *self, group_act_t act, uint32_t f, uint64_t number)
{
    group_action_t *a = group_push(self, act, NULL);
    a->frontend = f;
    a->generation = self->streams[f].generation;
    a->number = number;
}

static void check_update(group_t *self, command_stream_t *stream, const msg_cmd_t *cmd)
{
    lk_error_t *verdict = &stream->verdict;
    if (cmd->verb < UPDATE_VERB_INIT || cmd->verb > UPDATE_VERB_SET_VERSION) {
        lk_error_set(verdict, LK_ERR_INVALID, "verb: unknown value %llu",
                     (unsigned long long)cmd->verb);
        return;
    }
    update_verb_t verb = (update_verb_t)cmd->verb;
    lk_error_t err = LK_ERROR_INIT;
    if (self->config.check(self->config.check_ctx, verb, msg_cstr(cmd->spec), cmd->spec.len, &err) <
        0) {
        *verdict = err;
    }
}

void group_on_cmd(group_t *self, const msg_cmd_t *cmd)
{
    CHECK(cmd->client < self->config.n_frontends);
    uint32_t f = (uint32_t)cmd->client;
    command_stream_t *stream = &self->streams[f];
    stream_receipt_t receipt = stream_receive(stream, cmd);
    switch (receipt) {
    case STREAM_NEW:
        if (cmd->kind == CMD_UPDATE) {
            check_update(self, stream, cmd);
        }
        push_receipt(self, GROUP_ACT_SEEN, f, cmd->number);
        break;
    case STREAM_REPEATED:
        push_receipt(self, GROUP_ACT_SEEN, f, stream->seen);
        push_receipt(self, GROUP_ACT_REPEAT, f, cmd->number);
        break;
    case STREAM_GAP:
    case STREAM_BUSY: /* says from where to send again */
        push_receipt(self, GROUP_ACT_SEEN, f, stream->seen);
        break;
    case STREAM_OLD_LIFE:
        break;
    }
}

void group_on_generation(group_t *self, uint32_t frontend, uint64_t generation)
{
    CHECK(frontend < self->config.n_frontends);
    (void)stream_follow(&self->streams[frontend], generation); /* false: it knows of a newer one */
}

void group_on_start(group_t *self, bool has_round, uint64_t round)
{
    if (!has_round) {
        self->foreign_start = true;
        return;
    }
    /* A peer is at most one round ahead; anything further is no invitation of this group. */
    if (round >= self->round && round <= self->round + 1) {
        self->invited = LK_MAX(self->invited, round + 1);
    }
}

/* A call that ends with the session, or begins one. */
static bool of_session(uint64_t verb)
{
    return verb != UPDATE_VERB_ABORT && verb != UPDATE_VERB_SET_VERSION;
}

bool group_on_cancel_update(group_t *self, uint32_t frontend, uint64_t generation, uint64_t number,
                            const char *why)
{
    const group_update_t *u = &self->update;
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        command_stream_t *stream = &self->streams[f];
        bool asked = number == 0 ? of_session(stream->update_verb)
                                 : f == frontend && generation == stream->generation &&
                                       number == stream->update_number;
        bool entered = u->phase != UPDATE_NONE && u->frontend == f &&
                       u->generation == stream->generation && u->number == stream->update_number;
        if (asked && stream->update_outstanding && !entered && stream->verdict.status == LK_OK) {
            lk_error_set(&stream->verdict, LK_ERR_CANCELED, "%s", why);
        }
    }
    return ((u->phase == UPDATE_CARRYING && !u->committing) ||
            (u->phase == UPDATE_BESIDE && !u->ended)) &&
           (number == 0 ||
            (u->frontend == frontend && u->generation == generation && u->number == number));
}

void group_on_time(group_t *self, uint64_t now_ns)
{
    if (!self->config.doorbell && self->posted && self->posted_idle &&
        now_ns - self->announce_ns >= GROUP_ANNOUNCE_NS) {
        self->announce_ns = now_ns;
        group_push(self, GROUP_ACT_ANNOUNCE, NULL);
    }
}

/* ---- rounds ---- */

/* Something to tell the group that my last vote did not say. */
static bool has_news(const group_t *self, const group_view_t *view)
{
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        if (stream_has_news(&self->streams[f])) {
            return true;
        }
    }
    const group_update_t *u = &self->update;
    if (u->phase == UPDATE_BESIDE && u->ended && !u->voted_ended) {
        return true;
    }
    bool session = self->weights.session;
    bool stands = !self->config.lockstep || !self->run;
    return self->foreign_start || (session && view->expired && !self->voted_expired) ||
           (pause_is_draining(&self->pause) && stands && view->quiet && !self->voted_quiet);
}

group_next_t group_next(const group_t *self, const group_view_t *view)
{
    if (self->phase == GROUP_JOINING || self->phase == GROUP_LABEL) {
        return self->posted ? GROUP_WAIT : GROUP_VOTE;
    }
    bool may_step = self->run && !self->behind_here;
    if (self->phase == GROUP_OUTSIDE) {
        return may_step ? GROUP_STEP : GROUP_WAIT;
    }
    if (self->posted || self->update.phase == UPDATE_CARRYING) {
        return GROUP_WAIT;
    }
    if (self->update.phase == UPDATE_OWED || self->more) {
        return GROUP_VOTE;
    }
    if (self->config.lockstep && self->run) {
        return self->sc >= self->config.sync_interval ? GROUP_VOTE : GROUP_STEP;
    }
    bool work = self->config.lockstep && view->work && !pause_is_paused(&self->pause) &&
                self->weights.gates == 0;
    bool joins = view->peer_waiting || self->invited > self->round;
    if (work || joins || has_news(self, view)) {
        return GROUP_VOTE;
    }
    return may_step ? GROUP_STEP : GROUP_WAIT;
}

size_t group_vector_len(const group_t *self)
{
    return self->phase == GROUP_MEMBER ? VEC_LEN(self) : group_join_len(self);
}

uint64_t group_hash(const group_t *self)
{
    const group_update_t *u = &self->update;
    bool owed = u->phase != UPDATE_NONE; /* OWED or BESIDE: nobody votes while CARRYING */
    uint64_t words[] = {self->config.group_epoch,
                        self->config.n_frontends,
                        self->config.lockstep,
                        self->config.shadow,
                        self->config.sync_interval,
                        self->round,
                        self->wave,
                        self->run,
                        self->more,
                        self->mixed,
                        self->behind,
                        (uint64_t)u->phase,
                        owed ? u->committing : 0,
                        owed ? u->frontend : 0,
                        owed ? u->generation : 0,
                        owed ? u->number : 0,
                        owed ? (uint64_t)u->verb : 0};
    uint64_t hash = lk_hash64(words, sizeof words, 0);
    hash = lk_hash64(self->done, self->config.n_frontends * sizeof *self->done, hash);
    return weight_state_hash(&self->weights, pause_hash(&self->pause, hash));
}

void group_vote(group_t *self, const group_view_t *view, uint64_t now_ns, uint64_t *vec)
{
    CHECK(!self->posted && self->update.phase != UPDATE_CARRYING);
    if (self->phase != GROUP_MEMBER) {
        group_join_vote(self, view, vec);
        return;
    }
    const group_update_t *u = &self->update;
    bool owes = u->phase == UPDATE_OWED, beside = u->phase == UPDATE_BESIDE;
    self->posted_idle = !owes && !self->more && !(self->config.lockstep && self->run);
    vec[VEC_IDLE] = !view->work;
    vec[VEC_QUIET] = view->quiet;
    vec[VEC_TAG] = group_hash(self);
    vec[VEC_NTAG] = ~vec[VEC_TAG];
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        command_stream_t *stream = &self->streams[f];
        stream_freeze(stream);
        vec[VEC_GEN(self, f)] = stream->generation;
        vec[VEC_NGEN(self, f)] = ~stream->generation;
        vec[VEC_SEEN(self, f)] = stream->seen;
        vec[VEC_CANCEL(self, f)] = stream_cancelled_pause(stream, now_ns);
        bool outcome = (owes || beside) && u->frontend == f;
        const lk_error_t *verdict = outcome ? &u->result : &stream->verdict;
        vec[VEC_OK(self, f)] = outcome && beside && !u->ended
                                   ? VOTE_PENDING
                                   : (uint64_t)((int64_t)VOTE_OK + verdict->status);
    }
    vec[VEC_EXPIRED(self)] = view->expired;
    vec[VEC_CLEAN(self)] = view->clean;
    bool committed = u->committing && (owes || (beside && u->ended));
    vec[VEC_CONTENT(self)] = committed ? view->content : 0;
    vec[VEC_NCONTENT(self)] = ~vec[VEC_CONTENT(self)];

    self->posted = true;
    self->voted_quiet = view->quiet;
    self->voted_expired = view->expired;
    self->update.voted_ended = self->update.ended;
    self->foreign_start = false;
    if (self->posted_idle && !self->config.doorbell) {
        self->announce_ns = now_ns;
        group_push(self, GROUP_ACT_ANNOUNCE, NULL);
    }
}

void group_step_done(group_t *self)
{
    if (self->config.lockstep && self->phase == GROUP_MEMBER) {
        CHECK(self->run && !self->posted && self->sc < self->config.sync_interval);
        self->sc++;
    }
}

void group_update_done(group_t *self, const lk_error_t *result)
{
    group_update_t *u = &self->update;
    u->result = *result;
    if (u->phase == UPDATE_BESIDE) {
        CHECK(!u->ended);
        u->ended = true;
    } else {
        CHECK(u->phase == UPDATE_CARRYING);
        u->phase = UPDATE_OWED;
    }
}

/* ---- state ---- */

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
    return self->posted && self->update.phase == UPDATE_OWED;
}

bool group_paused_local(const group_t *self)
{
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        if (stream_has_pause(&self->streams[f])) {
            return true;
        }
    }
    return false;
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
