/* group_decide.c: what a round's result does. Uses the result and replicated state only. */
#include "engine_core/dp/group_internal.h"
#include "base/check.h"

#include <stdlib.h>

static void push_done(group_t *self, pause_call_t call, uint64_t kind, uint64_t verb,
                      lk_status_t status, const char *text)
{
    group_action_t *a = group_push(self, GROUP_ACT_DONE, text);
    a->frontend = call.frontend;
    a->generation = call.generation;
    a->number = call.number;
    a->kind = kind;
    a->verb = verb;
    a->status = status;
    if (kind == CMD_UPDATE) {
        stream_update_answered(&self->streams[call.frontend], call.generation, call.number);
    }
}

/* A dirty group fails what it holds and refuses what comes, until a complete update. */
static void push_dirty(group_t *self, unsigned gates_before)
{
    if (!(gates_before & GATE_DIRTY) && (self->weights.gates & GATE_DIRTY)) {
        group_push(self, GROUP_ACT_DIRTY, self->weights.dirty_why);
    }
}

static void close_session(group_t *self, bool clean, const char *why)
{
    if (!self->weights.session) {
        return;
    }
    unsigned before = self->weights.gates;
    weight_state_close_session(&self->weights, clean, why);
    group_push(self, GROUP_ACT_SESSION_CLOSE, why);
    push_dirty(self, before);
}

/* ---- outcomes ---- */

void group_end_update(group_t *self)
{
    free(self->update.spec);
    self->update = (group_update_t){.phase = UPDATE_NONE};
}

static pause_call_t update_call(const group_t *self)
{
    return (pause_call_t){self->update.frontend, self->update.generation, self->update.number};
}

/* What the MIN of ok[f] says. A value that no rank can have voted counts as a failure. */
static lk_status_t voted_status(const group_t *self, const uint64_t *v, uint32_t f)
{
    uint64_t value = v[VEC_OK(self, f)];
    int64_t status = (int64_t)value - (int64_t)VOTE_OK;
    return value <= VOTE_OK && lk_status_is_valid(status) ? (lk_status_t)status : LK_ERR_INTERNAL;
}

/* DONE of an update that failed somewhere: my own text, or none when I only follow. */
static void push_failed(group_t *self, lk_status_t status)
{
    const lk_error_t *mine = &self->update.result;
    push_done(self, update_call(self), CMD_UPDATE, self->update.verb, status,
              mine->status == LK_OK ? "" : mine->text);
}

/* Why this update failed, as seen from here. */
static lk_error_t failure(const group_t *self)
{
    const lk_error_t *mine = &self->update.result;
    const char *name = update_verb_name(self->update.verb);
    lk_error_t why;
    if (mine->status == LK_OK) {
        lk_error_set(&why, LK_ERR_PEER, "%s failed on another rank", name);
    } else {
        lk_error_set(&why, mine->status, "%s failed: %s", name, mine->text);
    }
    return why;
}

/* Every rank has committed, or tried to; shadow: has prepared that, or tried to. */
static void decide_commit(group_t *self, lk_status_t status, bool same_content)
{
    unsigned before = self->weights.gates;
    if (status == LK_OK && same_content) {
        char version[WEIGHT_LABEL_MAX + 1];
        bool given = false;
        lk_error_t err;
        lk_status_t parsed = weight_version_parse(UPDATE_VERB_FINISH, self->update.spec,
                                                  self->update.spec_len, version, &given, &err);
        CHECKF(parsed == LK_OK, "a voted spec is ill-formed: %s", err.text);
        weight_state_commit(&self->weights, given ? version : NULL);
        group_renewed(self);
        group_push(self, GROUP_ACT_PUBLISH, NULL)->keep_kv = pause_keeps_kv(&self->pause);
        push_done(self, update_call(self), CMD_UPDATE, UPDATE_VERB_FINISH, LK_OK, NULL);
        return;
    }
    if (status == LK_OK) {
        status = lk_error_set(&self->update.result, LK_ERR_INVALID,
                              "the ranks hold different weights after the update");
    }
    weight_state_commit_failed(&self->weights, failure(self).text);
    self->spoiled = true;
    group_push(self, GROUP_ACT_UPDATE_OUTCOME, NULL)->verb = UPDATE_VERB_FINISH;
    push_dirty(self, before);
    push_failed(self, status);
}

static void decide_plain_outcome(group_t *self, lk_status_t status, bool clean)
{
    bool ok = status == LK_OK;
    update_verb_t verb = self->update.verb;
    unsigned before = self->weights.gates;
    weight_state_outcome(&self->weights, verb, ok, clean, ok ? "" : failure(self).text);
    group_action_t *a = group_push(self, GROUP_ACT_UPDATE_OUTCOME, NULL);
    a->verb = verb;
    a->ok = ok;
    push_dirty(self, before);
    if (ok) {
        push_done(self, update_call(self), CMD_UPDATE, verb, LK_OK, NULL);
    } else {
        push_failed(self, status);
    }
}

static void decide_outcome(group_t *self, const uint64_t *v)
{
    group_update_t *u = &self->update;
    lk_status_t status = voted_status(self, v, u->frontend);
    if (u->verb != UPDATE_VERB_FINISH) {
        decide_plain_outcome(self, status, v[VEC_CLEAN(self)] == 1);
    } else if (u->committing) {
        decide_commit(self, status, v[VEC_CONTENT(self)] == ~v[VEC_NCONTENT(self)]);
    } else if (status == LK_OK) {
        u->committing = true;
        u->phase = self->config.shadow ? UPDATE_BESIDE : UPDATE_CARRYING;
        group_push(self, GROUP_ACT_UPDATE_COMMIT, NULL);
        return;
    } else {
        push_failed(self, status); /* refused: the session stays as it was */
    }
    group_end_update(self);
}

/* ---- commands ---- */

static void answer_calls(group_t *self, lk_status_t status, const char *text)
{
    pause_t *pause = &self->pause;
    for (size_t i = 0; i < pause->n_calls; i++) {
        push_done(self, pause->calls[i], CMD_PAUSE, 0, status, text);
    }
    pause_clear_calls(pause);
}

static void lift(group_t *self, unsigned effects)
{
    if (effects & PAUSE_LIFT) {
        answer_calls(self, LK_ERR_CANCELED,
                     "superseded: the group was resumed before this pause "
                     "was complete");
    }
}

static void apply_pause(group_t *self, pause_call_t call, const command_t *command,
                        const uint64_t *v, uint64_t now_ns)
{
    if (command->mode < PAUSE_ABORT || command->mode > PAUSE_WAIT) {
        push_done(self, call, CMD_PAUSE, 0, LK_ERR_INVALID, "mode: must be abort, wait or keep");
    } else if (self->pause.n_calls >= GROUP_MAX_CALLS) {
        push_done(self, call, CMD_PAUSE, 0, LK_ERR_UNAVAILABLE,
                  "too many pause calls wait for their answer");
    } else {
        unsigned effects =
            pause_apply(&self->pause, call, (pause_mode_t)command->mode, command->clear_cache);
        /* The caller of a cancelled pause was told that it had no effect. Whether requests end is
         * no replicated state, so what this rank has received may decide, too; the group pauses
         * anyway. */
        bool cancelled = v[VEC_CANCEL(self, call.frontend)] == call.number ||
                         now_ns >= command->deadline_ns ||
                         stream_has_cancel(&self->streams[call.frontend], call.number);
        if ((effects & PAUSE_FINISH_ALL) && !cancelled) {
            group_push(self, GROUP_ACT_FINISH_ALL, NULL);
        }
    }
}

static void enter_update(group_t *self, pause_call_t call, command_t *command)
{
    group_update_t *u = &self->update;
    bool beside = command->verb != UPDATE_VERB_FINISH &&
                  update_verb_beside(command->verb, self->config.shadow);
    *u = (group_update_t){.phase = beside ? UPDATE_BESIDE : UPDATE_CARRYING,
                          .frontend = call.frontend,
                          .generation = call.generation,
                          .number = call.number,
                          .verb = (update_verb_t)command->verb,
                          .spec = command->spec,
                          .spec_len = command->spec_len};
    command->spec = NULL;
    const command_stream_t *stream = &self->streams[call.frontend];
    if (stream->generation == call.generation && stream->verdict.status != LK_OK) {
        /* cancelled here after the vote was out: the others will learn it from the outcome */
        group_update_done(self, &stream->verdict);
        return;
    }
    group_action_t *a = group_push(self, GROUP_ACT_UPDATE_ENTER, NULL);
    a->verb = u->verb;
    a->spec = u->spec;
    a->spec_len = u->spec_len;
}

static void relabel(group_t *self, pause_call_t call, const command_t *command)
{
    char version[WEIGHT_LABEL_MAX + 1];
    bool given = false;
    lk_error_t err;
    lk_status_t status = weight_version_parse(UPDATE_VERB_SET_VERSION, command->spec,
                                              command->spec_len, version, &given, &err);
    CHECKF(status == LK_OK && given, "a voted spec is ill-formed: %s", err.text);
    weight_state_relabel(&self->weights, version);
    group_push(self, GROUP_ACT_RELABEL, NULL);
    push_done(self, call, CMD_UPDATE, UPDATE_VERB_SET_VERSION, LK_OK, NULL);
}

/* The local verdict is looked at for its text only: that somebody refused is the vote's word. */
static void refuse_update(group_t *self, pause_call_t call, const command_t *command,
                          lk_status_t status)
{
    const command_stream_t *stream = &self->streams[call.frontend];
    bool mine = stream->generation == call.generation && stream->verdict.status != LK_OK;
    push_done(self, call, CMD_UPDATE, command->verb, status, mine ? stream->verdict.text : "");
}

static void apply_update(group_t *self, pause_call_t call, command_t *command, const uint64_t *v)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t voted = voted_status(self, v, call.frontend);
    bool known = command->verb >= UPDATE_VERB_INIT && command->verb <= UPDATE_VERB_SET_VERSION;
    update_verb_t verb = (update_verb_t)command->verb;
    bool clean = v[VEC_CLEAN(self)] == 1;
    if (!known || voted == LK_ERR_STATE) { /* "not configured" comes before any order of calls */
        refuse_update(self, call, command, known ? voted : LK_ERR_INVALID);
    } else if (weight_state_admit(&self->weights, verb, &err) < 0) {
        push_done(self, call, CMD_UPDATE, verb, err.status, err.text);
    } else if (verb == UPDATE_VERB_INIT && self->weights.session &&
               update_init_is_visit(command->spec, command->spec_len)) {
        push_done(self, call, CMD_UPDATE, verb, LK_ERR_STATE, update_session_already_open);
    } else if (voted != LK_OK) {
        refuse_update(self, call, command, voted);
    } else if (verb == UPDATE_VERB_SET_VERSION) {
        relabel(self, call, command);
    } else if (verb == UPDATE_VERB_ABORT) {
        close_session(self, clean, "the weight update was aborted");
        push_done(self, call, CMD_UPDATE, verb, LK_OK, NULL);
    } else {
        if (verb == UPDATE_VERB_INIT) {
            close_session(self, clean, "the transfer engine was initialised anew");
        }
        enter_update(self, call, command);
    }
}

static void apply_command(group_t *self, pause_call_t call, command_t *command, const uint64_t *v,
                          uint64_t now_ns)
{
    switch (command->kind) {
    case CMD_PAUSE:
        apply_pause(self, call, command, v, now_ns);
        break;
    case CMD_RESUME:
        lift(self, pause_resume(&self->pause));
        push_done(self, call, CMD_RESUME, 0, LK_OK, NULL);
        break;
    case CMD_CANCEL:
        lift(self, pause_cancel(&self->pause,
                                (pause_call_t){call.frontend, call.generation, command->target}));
        push_done(self, call, CMD_CANCEL, 0, LK_OK, NULL);
        break;
    case CMD_UPDATE:
        apply_update(self, call, command, v);
        break;
    default:
        push_done(self, call, command->kind, 0, LK_ERR_INVALID, "kind: unknown command");
    }
}

static bool agreed(const group_t *self, const uint64_t *v, uint32_t f)
{
    return v[VEC_GEN(self, f)] == ~v[VEC_NGEN(self, f)];
}

/* The votes name one cancelled PAUSE of a front end, the lowest. Whether a later one is cancelled,
 * too, is known in the next round, in which the first one is gone. */
static bool may_be_spared(const group_t *self, const uint64_t *v, uint32_t f,
                          const command_t *command)
{
    return command->kind == CMD_PAUSE && command->mode == PAUSE_ABORT &&
           v[VEC_CANCEL(self, f)] < command->number;
}

/* In the agreed order, up to the MIN; stops where an update is entered. UPDATEs wait while one is
 * carried out beside the steps. owed_frontend: whose ok entry was an outcome in this round and so
 * says nothing about a next UPDATE. Returns whether an UPDATE was among them. */
static bool apply_commands(group_t *self, const uint64_t *v, uint32_t owed_frontend,
                           uint64_t now_ns)
{
    bool any_update = false;
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        if (!agreed(self, v, f)) {
            continue;
        }
        group_done_t *done = &self->done[f];
        if (done->generation != v[VEC_GEN(self, f)]) {
            *done = (group_done_t){.generation = v[VEC_GEN(self, f)]};
        }
        while (done->number < v[VEC_SEEN(self, f)] &&
               (self->update.phase == UPDATE_NONE || self->update.phase == UPDATE_BESIDE)) {
            command_t *command = stream_voted_command(&self->streams[f], done->number + 1);
            bool held = f == owed_frontend || self->update.phase == UPDATE_BESIDE;
            if (command->kind == CMD_UPDATE && held) {
                break;
            }
            if (may_be_spared(self, v, f, command)) {
                self->more = true;
                break;
            }
            any_update |= command->kind == CMD_UPDATE;
            done->number++;
            apply_command(self, (pause_call_t){f, done->generation, done->number}, command, v,
                          now_ns);
            stream_applied(&self->streams[f], done->number);
        }
    }
    /* what one beside the steps holds up waits for its outcome, which is news when it comes */
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        self->more |= self->update.phase != UPDATE_BESIDE && agreed(self, v, f) &&
                      self->done[f].number < v[VEC_SEEN(self, f)];
    }
    return any_update;
}

/* ---- the round ---- */

typedef struct {
    bool run, paused;
    uint64_t epoch, wave;
} observed_t;

static observed_t observe(const group_t *self)
{
    return (observed_t){self->run, pause_is_paused(&self->pause), self->pause.epoch, self->wave};
}

static void push_report(group_t *self, observed_t before)
{
    observed_t now = observe(self);
    bool changed = before.run != now.run || before.paused != now.paused ||
                   before.epoch != now.epoch || before.wave != now.wave;
    /* On a standing group also without a change: FIRST_REQ's invitation names the round. */
    if (self->config.rank == 0 && (changed || !self->run)) {
        group_push(self, GROUP_ACT_REPORT, NULL);
    }
}

static bool decide_run(const group_t *self, const uint64_t *v)
{
    if (self->weights.gates != 0) {
        return false;
    }
    if (pause_is_paused(&self->pause)) {
        return pause_is_draining(&self->pause);
    }
    return self->config.lockstep ? v[VEC_IDLE] == 0 : true;
}

lk_status_t group_decide(group_t *self, const uint64_t *v, uint64_t now_ns, lk_error_t *err)
{
    CHECK(self->posted);
    if (self->phase != GROUP_MEMBER) {
        return group_join_decide(self, v, err);
    }
    if (v[VEC_TAG] != ~v[VEC_NTAG]) {
        return lk_error_set(err, LK_ERR_INTERNAL,
                            "group epoch %llu is broken: rank %u and its peers differ in round "
                            "%llu (own state %016llx)",
                            (unsigned long long)self->config.group_epoch,
                            group_name(self, self->config.rank), (unsigned long long)self->round,
                            (unsigned long long)group_hash(self));
    }
    observed_t before = observe(self);
    bool beside = self->update.phase == UPDATE_BESIDE;
    bool owed = self->update.phase == UPDATE_OWED;
    uint32_t owed_frontend = owed || beside ? self->update.frontend : UINT32_MAX;
    owed |= beside && v[VEC_OK(self, owed_frontend)] != VOTE_PENDING;
    self->more = false;
    if (owed) {
        decide_outcome(self, v);
    }
    bool any_update = apply_commands(self, v, owed_frontend, now_ns);
    if (owed || any_update) {
        self->voted_expired = false; /* such a round judges no timer: one that runs out is news */
    } else if (v[VEC_EXPIRED(self)] == 1) {
        close_session(self, v[VEC_CLEAN(self)] == 1,
                      "the weight update saw no call for the transfer timeout");
    }
    if (pause_is_draining(&self->pause) && v[VEC_QUIET] == 1) {
        pause_quiet(&self->pause);
    }
    if (self->pause.state == PAUSE_STATE_STOPPED && self->pause.n_calls > 0) {
        if (self->pause.clear_due) {
            group_push(self, GROUP_ACT_CLEAR_CACHE, NULL);
        }
        answer_calls(self, LK_OK, NULL);
    }
    self->run = decide_run(self, v);
    self->wave += before.run && !self->run;
    self->sc = 0;
    self->round++;
    self->posted = false;
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        stream_settle(&self->streams[f]);
    }
    push_report(self, before);
    return LK_OK;
}
