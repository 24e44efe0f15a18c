#include "engine_core/engine_internal.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* To the next look at a transfer that has no descriptor to wait for. */
#define SOON_NS (LK_MS_NS / 10)

static void on_scheduler_output(void *ctx, const sched_output_t *output)
{
    engine_core_t *self = ctx;
    self->generation_tokens += output->n;
    if (output->first == 0 && output->n > 0) {
        self->prompt_tokens += output->request->n_prompt - output->request->n_cached;
    }
    outbox_add(self->outbox, output, &self->labels, self->finish_status, self->stepped_ns);
    if (outbox_is_full(self->outbox)) {
        engine_flush(self);
    }
}

static lk_status_t make_group(engine_core_t *self, lk_error_t *err)
{
    const engine_core_config_t *config = &self->config;
    if (config->n_frontends < 1 || config->n_frontends > GROUP_MAX_FRONTENDS) {
        return lk_error_set(err, LK_ERR_INVALID, "%u front ends: 1 to %d are possible",
                            config->n_frontends, (int)GROUP_MAX_FRONTENDS);
    }
    self->group =
        group_new(&(group_config_t){.rank = config->rank,
                                    .size = config->dp_size,
                                    .roster = config->roster.n > 0 ? &config->roster : NULL,
                                    .n_frontends = config->n_frontends,
                                    .group_epoch = config->group_epoch,
                                    .sync_interval = config->sync_interval,
                                    .lockstep = config->lockstep && config->dp_size > 1,
                                    .shadow = config->shadow,
                                    .doorbell = config->allreduce.ops->peer_waiting != NULL,
                                    .check = engine_check_update,
                                    .check_ctx = self});
    return self->group != NULL ? LK_OK : lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
}

/* What is in force here, for the join rounds. */
static void note_held(engine_core_t *self)
{
    digest_t digest = self->sink.ops->digest(self->sink.ctx);
    self->held_content = lk_hash64(&digest, sizeof digest, 0);
}

/* The executor's weights, and the session that brings new ones. */
static lk_status_t make_session(engine_core_t *self, lk_error_t *err)
{
    const engine_core_config_t *config = &self->config;
    wte_context_t wte = {.dp_rank = config->roster.place,
                         .dp_size = config->roster.n,
                         .ranks_per_replica = 1,
                         .env = config->env,
                         .no_progress_ns = config->transfer_timeout_ns,
                         .allowed_weight_dirs = config->allowed_weight_dirs,
                         .nccl_library = config->nccl_library};
    self->sink = executor_sink(config->executor);
    CHECK(config->shadow == (self->sink.ops->prepare != NULL));
    self->session = update_session_new(config->wte, &wte, &self->sink);
    return self->session != NULL ? LK_OK : lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
}

static lk_status_t make_parts(engine_core_t *self, lk_error_t *err)
{
    const engine_core_config_t *config = &self->config;
    LK_RETURN_IF_ERROR(make_session(self, err));
    self->kv = kv_cache_new(config->num_blocks, config->block_size, config->enable_prefix_caching);
    if (self->kv != NULL) {
        self->scheduler = scheduler_new(&config->scheduler, self->kv, on_scheduler_output, self);
    }
    self->outbox = outbox_new(config->n_frontends);
    self->replies = reply_log_new(config->n_frontends);
    self->lives = calloc(config->n_frontends, sizeof *self->lives);
    self->tracks = calloc(config->n_frontends, sizeof *self->tracks);
    if (self->scheduler == NULL || self->outbox == NULL || self->replies == NULL ||
        self->lives == NULL || self->tracks == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    return LK_OK;
}

lk_status_t engine_core_new(const engine_core_config_t *config, engine_core_t **out,
                            lk_error_t *err)
{
    engine_core_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->config = *config;
    if (config->roster.n == 0) {
        self->config.roster = roster_of_all(config->dp_size, config->rank);
    }
    self->finish_status = LK_ERR_INTERNAL;
    lk_buf_init(&self->text, 1u << 20);
    lk_status_t status = version_labels_init(&self->labels)
                             ? make_group(self, err)
                             : lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for labels");
    if (status == LK_OK) {
        status = make_parts(self, err);
    }
    if (status < 0) {
        engine_core_destroy(&self);
        return status;
    }
    if (config->rejoin) {
        note_held(self);
        group_form(self->group, config->group_epoch, config->weight_floor, NULL, true);
    }
    engine_take_actions(self);
    *out = self;
    return LK_OK;
}

void engine_core_destroy(engine_core_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    engine_core_t *self = *self_p;
    *self_p = NULL;
    if (self->step_posted) {
        self->config.executor->ops->step_abort(self->config.executor);
        if (!self->step_is_dummy) {
            scheduler_cancel_step(self->scheduler);
        }
    }
    scheduler_destroy(&self->scheduler);
    kv_cache_destroy(&self->kv);
    update_session_destroy(&self->session);
    outbox_destroy(&self->outbox);
    reply_log_destroy(&self->replies);
    group_destroy(&self->group);
    version_labels_fini(&self->labels);
    lk_buf_fini(&self->text);
    free(self->lives);
    free(self->tracks);
    free(self);
}

/* ---- failure ---- */

static void abort_collectives(engine_core_t *self, bool step_too)
{
    if (self->step_posted && step_too) {
        self->config.executor->ops->step_abort(self->config.executor);
        self->step_posted = false;
        if (!self->step_is_dummy) {
            scheduler_cancel_step(self->scheduler);
        }
    }
    self->config.allreduce.ops->abort(self->config.allreduce.ctx);
}

void engine_fail(engine_core_t *self, const lk_error_t *why)
{
    if (self->failed) {
        return;
    }
    self->failed = true;
    self->failure = *why;
    LK_ERROR("engine %u ends: %s", self->config.rank, why->text);
    abort_collectives(self, true);
    if (self->updating) {
        update_session_cancel(self->session, why->text);
    }
    /* the requests are as good as ever elsewhere or later: a client may try again */
    self->finish_status = LK_ERR_UNAVAILABLE;
    scheduler_finish_all(self->scheduler, FINISH_ERROR, why->text);
    engine_flush(self);
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        msg_t msg = {.type = MSG_ENGINE_DEAD};
        msg.engine_dead = (msg_engine_dead_t){self->config.rank, msg_str(why->text)};
        self->config.host.to_frontend(self->config.host.ctx, f, &msg);
    }
}

/* ---- group epochs ---- */

static void tell_left(engine_core_t *self, int64_t lost, const char *why)
{
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        msg_t msg = {.type = MSG_LEFT};
        msg.left = (msg_left_t){.rank = self->config.rank,
                                .group_epoch = self->config.group_epoch,
                                .lockstep = engine_lockstep(self),
                                .lost = lost,
                                .why = msg_str(why)};
        self->config.host.to_frontend(self->config.host.ctx, f, &msg);
    }
}

void engine_core_leave(engine_core_t *self, int64_t lost, const char *why)
{
    if (self->failed || self->left) {
        return;
    }
    self->left = true;
    engine_take_actions(self);
    abort_collectives(self, engine_lockstep(self));
    engine_abandon_update(self, why);
    update_session_reset(self->session);
    group_leave(self->group, !update_session_touched(self->session), why);
    LK_WARN("engine %u leaves group epoch %llu: %s", self->config.rank,
            (unsigned long long)self->config.group_epoch, why);
    if (engine_lockstep(self)) {
        /* the requests are as good as ever elsewhere or later: a client may try again */
        char text[LK_ERROR_TEXT_MAX];
        engine_left_text(self, text, sizeof text);
        self->finish_status = LK_ERR_UNAVAILABLE;
        scheduler_finish_all(self->scheduler, FINISH_ERROR, text);
        self->finish_status = LK_ERR_INTERNAL;
    }
    engine_take_actions(self);
    engine_flush(self); /* what happened to its requests comes before the news */
    tell_left(self, lost, why);
}

void engine_peer_error(engine_core_t *self, const lk_error_t *err)
{
    const engine_host_t *host = &self->config.host;
    engine_core_leave(self, host->lost_rank != NULL ? host->lost_rank(host->ctx) : -1, err->text);
}

const char *engine_core_left(const engine_core_t *self)
{
    return self->left ? group_left_why(self->group) : NULL;
}

void engine_left_text(const engine_core_t *self, char *out, size_t room)
{
    snprintf(out, room,
             "group epoch %llu of the engines is over (%s) and a new one is being formed; "
             "try again",
             (unsigned long long)self->config.group_epoch, group_left_why(self->group));
}

void engine_core_form(engine_core_t *self, uint64_t group_epoch, uint64_t weight_floor,
                      const roster_t *roster)
{
    engine_core_leave(self, -1, "a newer group epoch has begun");
    self->left = false;
    self->config.group_epoch = group_epoch;
    self->steps_before = self->steps;
    if (roster != NULL) {
        self->config.roster = *roster;
        update_session_seat(self->session, roster->place, roster->n);
    }
    note_held(self);
    group_form(self->group, group_epoch, weight_floor, roster, false);
    LK_INFO("engine %u has entered group epoch %llu: %u of %u ranks", self->config.rank,
            (unsigned long long)group_epoch, self->config.roster.n, self->config.dp_size);
}

void engine_core_reload(engine_core_t *self, const roster_t *roster)
{
    CHECK(engine_lockstep(self) && self->left && !self->step_posted && !self->updating);
    self->config.roster = *roster;
    update_session_destroy(&self->session);
    self->config.executor = NULL;
    engine_announce_silence(self, true);
}

lk_status_t engine_core_reloaded(engine_core_t *self, executor_t *executor, lk_error_t *err)
{
    CHECK(self->session == NULL && scheduler_num_running(self->scheduler) == 0 &&
          scheduler_num_waiting(self->scheduler) == 0);
    self->config.executor = executor;
    LK_RETURN_IF_ERROR(make_session(self, err));
    (void)kv_cache_reset_prefixes(self->kv); /* of other weights, and in memory that is gone */
    group_reload(self->group);
    note_held(self);
    self->content = 0;
    engine_announce_silence(self, false);
    return LK_OK;
}

uint64_t engine_core_group_epoch(const engine_core_t *self)
{
    return self->config.group_epoch;
}

void engine_core_drop_frontend(engine_core_t *self, uint32_t frontend)
{
    scheduler_drop_client(self->scheduler, frontend);
    outbox_drop(self->outbox, frontend);
}

/* ---- the collective sequence ---- */

static group_view_t view_of(const engine_core_t *self)
{
    const allreduce_t *ar = &self->config.allreduce;
    size_t waiting = scheduler_num_waiting(self->scheduler);
    size_t running = scheduler_num_running(self->scheduler);
    bool session = group_weights(self->group)->session;
    return (group_view_t){.work = waiting + running > 0,
                          .quiet = scheduler_num_started(self->scheduler) == 0,
                          .clean = !update_session_touched(self->session),
                          .expired = session && !group_updating(self->group) &&
                                     engine_now(self) - self->session_active_ns >=
                                         self->config.transfer_timeout_ns,
                          .peer_waiting = ar->ops->peer_waiting != NULL &&
                                          ar->ops->peer_waiting(ar->ctx, group_round(self->group)),
                          .content = self->content,
                          .held_content = self->held_content};
}

static bool post_vote(engine_core_t *self, const group_view_t *view)
{
    const allreduce_t *ar = &self->config.allreduce;
    lk_error_t err = LK_ERROR_INIT;
    uint64_t round = group_round(self->group);
    group_vote(self->group, view, engine_now(self), self->vec);
    engine_start_watch(self, &self->vote_watch);
    self->votes++;
    if (ar->ops->post(ar->ctx, round, self->vec, group_vector_len(self->group), &err) < 0) {
        engine_peer_error(self, &err);
    }
    return true;
}

static bool advance_vote(engine_core_t *self)
{
    const allreduce_t *ar = &self->config.allreduce;
    lk_error_t err = LK_ERROR_INIT;
    if (!group_posted(self->group)) {
        return false;
    }
    lk_status_t status = ar->ops->test(ar->ctx, self->vec, &err);
    if (status == LK_INPROGRESS) {
        return false;
    }
    if (status == LK_ERR_PEER) {
        engine_peer_error(self, &err);
    } else if (status < 0 || group_decide(self->group, self->vec, engine_now(self), &err) < 0) {
        engine_fail(self, &err);
    }
    return true;
}

/* Independent ranks have no dummy steps. */
static bool has_step_work(const engine_core_t *self, bool admit)
{
    return scheduler_num_started(self->scheduler) > 0 ||
           (admit && scheduler_num_waiting(self->scheduler) > 0);
}

/* Counted from the epoch's first one, so that it is equal on all ranks. */
static uint64_t group_step(const engine_core_t *self)
{
    return self->steps - self->steps_before;
}

static void fail_step(engine_core_t *self, lk_status_t status, const lk_error_t *err)
{
    if (status == LK_ERR_PEER && engine_lockstep(self)) {
        engine_peer_error(self, err);
    } else if (status < 0) {
        engine_fail(self, err);
    }
}

static bool post_step(engine_core_t *self)
{
    bool lockstep = engine_lockstep(self);
    bool admit = !pause_is_paused(group_pause(self->group));
    if (!lockstep && !has_step_work(self, admit)) {
        return false;
    }
    executor_t *executor = self->config.executor;
    const exec_batch_t *batch =
        scheduler_schedule(self->scheduler, admit, group_weights(self->group)->epoch,
                           group_step(self), engine_now(self));
    self->step_is_dummy = batch->n_seqs == 0;
    if (self->step_is_dummy) {
        if (!lockstep) {
            return false; /* its one request has just ended with an error */
        }
        self->dummy = (exec_batch_t){.step = group_step(self)};
        batch = &self->dummy;
    }
    lk_error_t err = LK_ERROR_INIT;
    engine_start_watch(self, &self->step_watch);
    self->step_posted = true;
    bool renewed = self->renewed; /* the executor may copy the weights first */
    self->renewed = false;
    if (renewed) {
        engine_announce_silence(self, true);
    }
    lk_status_t posted = executor->ops->step_post(executor, batch, &err);
    if (renewed) {
        engine_announce_silence(self, false);
    }
    fail_step(self, posted, &err);
    return true;
}

static bool advance_step(engine_core_t *self)
{
    executor_t *executor = self->config.executor;
    exec_result_t result = {0};
    lk_error_t err = LK_ERROR_INIT;
    if (!self->step_posted) {
        return false;
    }
    lk_status_t status = executor->ops->step_test(executor, &result, &err);
    if (status == LK_INPROGRESS) {
        return !executor->ops->step_waits(executor);
    }
    if (status < 0) {
        fail_step(self, status, &err);
        return true;
    }
    self->step_posted = false;
    self->stepped_ns = engine_now(self);
    self->steps++;
    self->dummy_steps += self->step_is_dummy;
    if (!self->step_is_dummy) {
        scheduler_update(self->scheduler, &result);
    }
    if (self->recompute_due) {
        self->recompute_due = false;
        scheduler_recompute_all(self->scheduler);
    }
    group_step_done(self->group);
    return true;
}

/* What the group does next; only at a step boundary. */
static bool next_collective(engine_core_t *self)
{
    if (self->step_posted || group_posted(self->group)) {
        return false;
    }
    group_view_t view = view_of(self);
    switch (group_next(self->group, &view)) {
    case GROUP_WAIT:
        return false;
    case GROUP_VOTE:
        return post_vote(self, &view);
    case GROUP_STEP:
        return post_step(self);
    }
    return false;
}

static void send_to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    engine_core_t *self = ctx;
    self->config.host.to_frontend(self->config.host.ctx, frontend, msg);
}

void engine_flush(engine_core_t *self)
{
    outbox_flush(self->outbox, self->config.rank, self->steps, send_to_frontend, self);
}

bool engine_core_step(engine_core_t *self)
{
    if (self->failed) {
        return false;
    }
    /* 1. what is under way: a step or a vote; a weight call */
    bool moved = advance_step(self);
    moved = moved || advance_vote(self);
    if (!self->failed && self->updating) { /* some calls go on beside the steps */
        engine_take_actions(self);
        moved |= engine_advance_update(self);
    }
    /* 2. what the last round decided */
    engine_take_actions(self);
    /* 3. the next collective, if nothing is under way */
    if (!self->failed) {
        moved |= next_collective(self);
        group_on_time(self->group, engine_now(self));
        engine_take_actions(self);
    }
    /* 4. tokens and errors to the front ends, one message each */
    engine_flush(self);
    engine_send_receipts(self, moved || engine_core_waits_for_peers(self));
    /* 5. what the coordinator and the operator should know */
    engine_note_pause(self);
    engine_report_group_if_due(self);
    if (!self->failed) {
        engine_report_if_due(self);
        engine_check_watches(self);
    }
    return moved && !self->failed;
}

/* ---- messages ---- */

static bool from_itself(const engine_core_t *self, uint32_t frontend, uint64_t client,
                        const msg_t *msg)
{
    if (frontend < self->config.n_frontends && client == frontend) {
        return true;
    }
    LK_WARN("engine %u: %s for front end %llu came from front end %u; dropped", self->config.rank,
            msg_type_name(msg->type), (unsigned long long)client, frontend);
    return false;
}

/* 0: not said. Outside a group nothing is of its epoch; commands may come before the join rounds
 * are over here. */
static bool is_of_epoch(const engine_core_t *self, uint64_t epoch, const msg_t *msg)
{
    bool is =
        (epoch == self->config.group_epoch || (epoch == 0 && msg->type != MSG_CMD)) && !self->left;
    if (!is) {
        LK_DEBUG("engine %u: %s of group epoch %llu; dropped", self->config.rank,
                 msg_type_name(msg->type), (unsigned long long)epoch);
    }
    return is;
}

/* A process, not its command stream, which may begin anew within one: a newer life has no use for
 * what an older one asked for, and an older one's messages come too late. */
static bool is_of_life(engine_core_t *self, uint32_t frontend, const msg_t *msg)
{
    if (frontend >= self->config.n_frontends) {
        return true; /* the coordinator, or nobody */
    }
    uint64_t *life = &self->lives[frontend];
    if (msg->generation < *life) {
        LK_DEBUG("engine %u: %s of an older life of front end %u; dropped", self->config.rank,
                 msg_type_name(msg->type), frontend);
        return false;
    }
    if (msg->generation > *life) {
        if (*life != 0) {
            LK_INFO("engine %u: front end %u has restarted", self->config.rank, frontend);
            engine_core_drop_frontend(self, frontend);
        }
        *life = msg->generation;
        group_on_generation(self->group, frontend, msg->generation);
    }
    return true;
}

/* Commands come again by themselves. Requests do not: their front end has to know. */
static void look_for_gap(engine_core_t *self, uint32_t frontend, const msg_t *msg)
{
    if (frontend < self->config.n_frontends &&
        msg_track_gap(&self->tracks[frontend], msg->generation, msg->sequence)) {
        LK_WARN("engine %u: messages of front end %u are lost; a connection broke",
                self->config.rank, frontend);
        msg_t missed = {.type = MSG_MISSED};
        missed.missed = (msg_missed_t){self->config.rank, msg->generation};
        self->config.host.to_frontend(self->config.host.ctx, frontend, &missed);
    }
}

static void on_cancel_update(engine_core_t *self, uint32_t frontend, const msg_cancel_update_t *c)
{
    const char *why = c->why.len > 0 ? msg_cstr(c->why) : "the update was cancelled";
    if (group_on_cancel_update(self->group, frontend, c->generation, c->number, why) &&
        self->updating) {
        update_session_cancel(self->session, why);
    }
}

void engine_core_on_message(engine_core_t *self, uint32_t frontend, const msg_t *msg)
{
    if (self->failed || !is_of_life(self, frontend, msg)) {
        return;
    }
    look_for_gap(self, frontend, msg);
    switch (msg->type) {
    case MSG_ADD:
        if (from_itself(self, frontend, msg->add.client, msg)) {
            engine_on_add(self, frontend, &msg->add);
        }
        break;
    case MSG_ABORT:
        if (from_itself(self, frontend, msg->abort.client, msg)) {
            engine_on_abort(self, frontend, &msg->abort);
        }
        break;
    case MSG_CMD:
        if (from_itself(self, frontend, msg->cmd.client, msg)) {
            if (is_of_epoch(self, msg->cmd.group_epoch, msg)) {
                group_on_cmd(self->group, &msg->cmd);
            }
        }
        break;
    case MSG_CANCEL_UPDATE:
        if (from_itself(self, frontend, msg->cancel_update.client, msg)) {
            on_cancel_update(self, frontend, &msg->cancel_update);
        }
        break;
    case MSG_UTILITY:
        if (from_itself(self, frontend, msg->utility.client, msg)) {
            engine_on_utility(self, frontend, &msg->utility);
        }
        break;
    case MSG_START_DP_WAVE:
        if (is_of_epoch(self, msg->start_dp_wave.group_epoch, msg)) {
            group_on_start(self->group, msg->start_dp_wave.has_round, msg->start_dp_wave.round);
        }
        break;
    case MSG_HEARTBEAT: /* its number has said all */
        break;
    default:
        LK_WARN("engine %u: %s is no message for an engine; dropped", self->config.rank,
                msg_type_name(msg->type));
    }
    engine_take_actions(self);
}

/* ---- waiting ---- */

bool engine_core_waits_for_peers(const engine_core_t *self)
{
    return self->step_posted || group_posted(self->group) || self->updating;
}

uint64_t engine_core_deadline(const engine_core_t *self)
{
    uint64_t now = engine_now(self);
    uint64_t deadline =
        self->reported_ns + (self->report_pending ? REPORT_INTERVAL_NS : self->config.heartbeat_ns);
    if (engine_core_waits_for_peers(self)) {
        deadline = LK_MIN(deadline, now + REPORT_INTERVAL_NS);
    }
    if (self->receipts_due > 0) {
        deadline = LK_MIN(deadline, now + RECEIPT_NS);
    }
    struct pollfd fd;
    if (self->updating && update_session_pollfds(self->session, &fd, 1) == 0) {
        deadline = LK_MIN(deadline, now + (self->update_soon ? 0 : SOON_NS));
    }
    uint64_t expires = self->session_active_ns + self->config.transfer_timeout_ns;
    if (group_weights(self->group)->session && expires > now) {
        deadline = LK_MIN(deadline, expires);
    }
    return deadline;
}

size_t engine_core_pollfds(const engine_core_t *self, struct pollfd *fds, size_t room)
{
    return self->updating ? update_session_pollfds(self->session, fds, room) : 0;
}

const lk_error_t *engine_core_failed(const engine_core_t *self)
{
    return self->failed ? &self->failure : NULL;
}

/* ---- shutdown ---- */

void engine_core_begin_drain(engine_core_t *self)
{
    self->draining = true;
}

bool engine_core_drained(const engine_core_t *self)
{
    bool empty =
        scheduler_num_waiting(self->scheduler) + scheduler_num_running(self->scheduler) == 0;
    bool lockstep = engine_lockstep(self);
    return self->failed || (empty && !(lockstep && group_run(self->group)));
}

void engine_core_abort_all(engine_core_t *self)
{
    scheduler_finish_all(self->scheduler, FINISH_ABORT, NULL);
    engine_flush(self);
}

/* ---- state ---- */

uint64_t engine_core_steps(const engine_core_t *self)
{
    return self->steps;
}

uint64_t engine_core_dummy_steps(const engine_core_t *self)
{
    return self->dummy_steps;
}

const group_t *engine_core_group(const engine_core_t *self)
{
    return self->group;
}

const scheduler_t *engine_core_scheduler(const engine_core_t *self)
{
    return self->scheduler;
}

const kv_cache_t *engine_core_kv(const engine_core_t *self)
{
    return self->kv;
}
