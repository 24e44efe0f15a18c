/* engine_actions.c: carries out what the group decided, and weight calls. */
#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"
#include "engine_core/engine_internal.h"

/* ---- weight calls ---- */

lk_status_t engine_check_update(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                                lk_error_t *err)
{
    engine_core_t *self = ctx;
    LK_RETURN_IF_ERROR(update_session_check(self->session, verb, spec, spec_len, err));
    if (verb == UPDATE_VERB_FINISH || verb == UPDATE_VERB_SET_VERSION) {
        char version[WEIGHT_LABEL_MAX + 1];
        bool given;
        LK_RETURN_IF_ERROR(weight_version_parse(verb, spec, spec_len, version, &given, err));
    }
    return LK_OK;
}

static void update_done(engine_core_t *self, const lk_error_t *result)
{
    bool carried_out = self->updating; /* else the progress is an older call's */
    self->updating = false;
    self->update_seconds = (double)(engine_now(self) - self->update_since_ns) / LK_SECOND_NS;
    update_session_progress(self->session, &self->update_last);
    if (self->update_verb == UPDATE_VERB_UPDATE && carried_out) {
        *(result->status < 0 ? &self->updates_failed : &self->updates) += 1;
        self->update_tensors += self->update_last.tensors_done;
        self->update_bytes += self->update_last.bytes_done;
        self->update_ns += engine_now(self) - self->update_since_ns;
    }
    if (result->status < 0) {
        LK_WARN("engine %u: %s failed: %s", self->config.rank, update_verb_name(self->update_verb),
                result->text);
    }
    group_update_done(self->group, result);
}

static void note_content(engine_core_t *self, digest_t digest)
{
    self->content = lk_hash64(&digest, sizeof digest, 0);
}

/* While dirty only a complete set may be committed: what was written before is of no set. */
static lk_status_t check_complete(engine_core_t *self, lk_error_t *err)
{
    if (!group_needs_complete(self->group) || self->sink.ops->complete(self->sink.ctx)) {
        return LK_OK;
    }
    char missing[512] = "some tensors";
    if (self->sink.ops->missing != NULL) {
        self->sink.ops->missing(self->sink.ctx, missing, sizeof missing);
    }
    return lk_error_set(err, LK_ERR_STATE,
                        "finish_weight_update: an earlier update failed halfway (%s), so this one "
                        "has to bring every tensor of the model; missing: %s",
                        group_weights(self->group)->dirty_why, missing);
}

static void enter_update(engine_core_t *self, const group_action_t *a)
{
    lk_error_t err = LK_ERROR_INIT;
    self->update_verb = (update_verb_t)a->verb;
    self->update_since_ns = engine_now(self);
    self->update_last = (wte_progress_t){0};
    lk_status_t status = LK_OK;
    if (a->verb == UPDATE_VERB_FINISH) {
        status = check_complete(self, &err);
    }
    if (status == LK_OK) {
        status = update_session_post(self->session, self->update_verb, a->spec, a->spec_len, &err);
    }
    if (status < 0 || a->verb == UPDATE_VERB_FINISH) {
        update_done(self, &err);
        return;
    }
    self->updating = true;
}

/* Beside steps a transfer gets as much time as they, in turns: a token may take twice as long, not
 * longer. While a step waits for peers the time is nobody's. */
static bool steps_go_first(const engine_core_t *self)
{
    const executor_t *executor = self->config.executor;
    bool steps = self->step_posted
                     ? !executor->ops->step_waits(executor)
                     : group_run(self->group) && scheduler_num_started(self->scheduler) > 0;
    return steps && engine_now(self) < self->update_resume_ns;
}

bool engine_advance_update(engine_core_t *self)
{
    if (!self->updating || steps_go_first(self)) {
        return false;
    }
    lk_error_t err = LK_ERROR_INIT;
    wte_progress_t progress;
    uint64_t start = engine_now(self);
    lk_status_t status = update_session_test(self->session, &err);
    uint64_t end = engine_now(self);
    self->update_resume_ns = end + (end - start);
    if (status == LK_INPROGRESS) {
        update_session_progress(self->session, &progress);
        bool moved = progress.moves != self->update_moves;
        self->update_moves = progress.moves;
        self->update_soon = progress.soon;
        return moved;
    }
    if (status == LK_OK && self->update_verb == UPDATE_VERB_FINISH) {
        note_content(self, self->sink.ops->incoming(self->sink.ctx));
    }
    update_done(self, &err);
    return true;
}

/* Leaves an open session, whatever it has received; what that means for the weights is the
 * group's word (dirty). */
static void leave_session(engine_core_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    if (update_session_post(self->session, UPDATE_VERB_ABORT, "", 0, &err) < 0 ||
        update_session_outcome(self->session, UPDATE_VERB_ABORT, true, &err) < 0) {
        LK_WARN("engine %u: abort_weight_update: %s", self->config.rank, err.text);
    }
}

void engine_abandon_update(engine_core_t *self, const char *why)
{
    lk_error_t err = LK_ERROR_INIT;
    if (self->updating) {
        update_session_cancel(self->session, why);
        (void)!update_session_test(self->session, &err); /* ends with `why` */
        self->updating = false;
    }
    if (update_session_state(self->session) == UPDATE_STATE_OPEN) {
        leave_session(self);
    }
}

static void commit(engine_core_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    if (self->config.shadow) { /* beside the steps; PUBLISH then flips */
        update_session_prepare(self->session);
        self->updating = true;
        return;
    }
    engine_announce_silence(self, true); /* a large model takes its time */
    if (update_session_outcome(self->session, UPDATE_VERB_FINISH, true, &err) == LK_OK) {
        note_content(self, self->sink.ops->digest(self->sink.ctx));
    }
    engine_announce_silence(self, false);
    update_done(self, &err);
}

static void update_outcome(engine_core_t *self, const group_action_t *a)
{
    lk_error_t err = LK_ERROR_INIT;
    update_verb_t verb = (update_verb_t)a->verb;
    self->session_active_ns = engine_now(self);
    if (update_session_outcome(self->session, verb, a->ok, &err) < 0) {
        LK_WARN("engine %u: %s: %s", self->config.rank, update_verb_name(verb), err.text);
    }
    /* The group's session is over; this rank may not have entered the call that ended it. */
    bool open = group_weights(self->group)->session;
    if (!open && update_session_state(self->session) == UPDATE_STATE_OPEN) {
        leave_session(self);
    }
}

/* Outputs that are not sent yet borrow the labels that are about to change. */
static void set_label(engine_core_t *self)
{
    const weight_state_t *weights = group_weights(self->group);
    engine_flush(self);
    version_labels_set(&self->labels, weights->epoch, weights->version);
}

static void flip(engine_core_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    CHECK(!self->step_posted);
    lk_status_t status = update_session_outcome(self->session, UPDATE_VERB_FINISH, true, &err);
    CHECKF(status == LK_OK, "a prepared set could not be put in force: %s", err.text);
}

static void publish(engine_core_t *self, bool keep_kv)
{
    const weight_state_t *weights = group_weights(self->group);
    self->renewed = true;
    if (self->config.shadow) {
        flip(self);
    }
    if (!keep_kv) {
        scheduler_recompute_all(self->scheduler);
    }
    set_label(self);
    version_labels_forget_before(&self->labels,
                                 scheduler_oldest_epoch(self->scheduler, weights->epoch));
    LK_INFO("engine %u: weights of epoch %llu (%s) are in force", self->config.rank,
            (unsigned long long)weights->epoch, weights->version);
}

static void on_dirty(engine_core_t *self, const char *why)
{
    LK_WARN("engine %u: the weights are unusable until a complete update: %s", self->config.rank,
            why);
    self->finish_status = LK_ERR_UNAVAILABLE;
    scheduler_finish_all(self->scheduler, FINISH_ERROR, why);
    self->finish_status = LK_ERR_INTERNAL;
}

/* ---- replies and reports ---- */

/* One SEEN stands for all commands up to its number, so the newest replaces an older one. */
static void note_seen(engine_core_t *self, const group_action_t *a)
{
    receipt_t *receipt = &self->receipts[a->frontend];
    if (!receipt->due) {
        self->receipts_due++;
        receipt->since_ns = engine_now(self);
    }
    receipt->due = true;
    receipt->generation = a->generation;
    receipt->number = a->number;
}

/* A DONE says as much. */
static void drop_receipt(engine_core_t *self, const group_action_t *done)
{
    receipt_t *receipt = &self->receipts[done->frontend];
    if (receipt->due && receipt->generation == done->generation &&
        receipt->number <= done->number) {
        receipt->due = false;
        self->receipts_due--;
    }
}

void engine_send_receipts(engine_core_t *self, bool busy)
{
    if (self->receipts_due == 0) {
        return;
    }
    uint64_t now = engine_now(self);
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        receipt_t *receipt = &self->receipts[f];
        if (!receipt->due || (busy && now - receipt->since_ns < RECEIPT_NS)) {
            continue;
        }
        msg_t msg = {.type = MSG_SEEN};
        msg.seen = (msg_seen_t){self->config.rank, receipt->generation, receipt->number};
        receipt->due = false;
        self->receipts_due--;
        self->config.host.to_frontend(self->config.host.ctx, f, &msg);
    }
}

static void send_done(engine_core_t *self, const group_action_t *a)
{
    msg_t msg = {.type = MSG_DONE};
    msg.done = (msg_done_t){.rank = self->config.rank,
                            .generation = a->generation,
                            .number = a->number,
                            .status = a->status,
                            .text = msg_str(a->text),
                            .body = engine_done_body(self, a),
                            .pause_epoch = group_pause(self->group)->epoch,
                            .round = group_round(self->group),
                            .wave = group_wave(self->group),
                            .weight_epoch = group_weights(self->group)->epoch};
    if (a->kind == CMD_UPDATE) {
        self->session_active_ns = engine_now(self);
    }
    engine_flush(self); /* what the call ended comes before its answer */
    drop_receipt(self, a);
    reply_log_add(self->replies, a->frontend, &msg.done);
    self->config.host.to_frontend(self->config.host.ctx, a->frontend, &msg);
}

static void repeat_done(engine_core_t *self, const group_action_t *a)
{
    const msg_done_t *done = reply_log_find(self->replies, a->frontend, a->generation, a->number);
    if (done != NULL) {
        msg_t msg = {.type = MSG_DONE};
        msg.done = *done;
        self->config.host.to_frontend(self->config.host.ctx, a->frontend, &msg);
    }
}

void engine_report_group_if_due(engine_core_t *self)
{
    if (!self->group_report_due) {
        return;
    }
    self->group_report_due = false;
    msg_t msg = {.type = MSG_GROUP};
    msg.group = (msg_group_t){.round = group_round(self->group),
                              .wave = group_wave(self->group),
                              .run = group_run(self->group),
                              .paused = pause_is_paused(group_pause(self->group)),
                              .epoch = group_pause(self->group)->epoch,
                              .group_epoch = self->config.group_epoch};
    self->config.host.to_coordinator(self->config.host.ctx, &msg);
}

static void send_announce(engine_core_t *self)
{
    msg_t msg = {.type = MSG_ANNOUNCE};
    msg.announce = (msg_announce_t){.rank = self->config.rank,
                                    .round = group_round(self->group),
                                    .epoch = group_pause(self->group)->epoch,
                                    .wave = group_wave(self->group),
                                    .group_epoch = self->config.group_epoch};
    self->config.host.to_coordinator(self->config.host.ctx, &msg);
}

static void take_action(engine_core_t *self, const group_action_t *a)
{
    switch (a->act) {
    case GROUP_ACT_SEEN:
        note_seen(self, a);
        break;
    case GROUP_ACT_REPEAT:
        repeat_done(self, a);
        break;
    case GROUP_ACT_DONE:
        send_done(self, a);
        break;
    case GROUP_ACT_FINISH_ALL:
        scheduler_finish_all(self->scheduler, FINISH_ABORT, NULL);
        break;
    case GROUP_ACT_CLEAR_CACHE:
        scheduler_recompute_all(self->scheduler);
        break;
    case GROUP_ACT_UPDATE_ENTER:
        enter_update(self, a);
        break;
    case GROUP_ACT_UPDATE_COMMIT:
        commit(self);
        break;
    case GROUP_ACT_UPDATE_OUTCOME:
        update_outcome(self, a);
        break;
    case GROUP_ACT_SESSION_CLOSE:
        LK_WARN("engine %u: the update session is closed: %s", self->config.rank, a->text);
        leave_session(self);
        break;
    case GROUP_ACT_PUBLISH:
        publish(self, a->keep_kv);
        break;
    case GROUP_ACT_RELABEL:
        set_label(self);
        break;
    case GROUP_ACT_DIRTY:
        on_dirty(self, a->text);
        break;
    case GROUP_ACT_REPORT:
        self->group_report_due = true;
        break;
    case GROUP_ACT_ANNOUNCE:
        send_announce(self);
        break;
    }
}

void engine_take_actions(engine_core_t *self)
{
    group_action_t action;
    while (!self->failed && group_next_action(self->group, &action)) {
        take_action(self, &action);
    }
}
