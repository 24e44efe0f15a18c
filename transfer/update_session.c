#include "transfer/update_session.h"
#include "base/buf.h"
#include "base/check.h"
#include "proto/json_text.h"
#include "transfer/backends/backends.h"
#include "transfer/update_spec.h"
#include "transfer/wte_fields.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEPT_TEXT_MAX (4u << 20) /* of an update that is not under way */

struct update_session {
    const wte_ops_t *ops; /* in use now; NULL: not configured */
    void *engine;         /* its state */
    const wte_ops_t *configured;
    void *configured_engine, *disk_engine;
    bool visiting_disk;    /* ops is disk for one session, then `configured` again */
    bool configured_ready; /* meanwhile: that engine's state is READY */
    wte_context_t ctx;
    weight_sink_t sink;
    packed_options_t packing; /* of the last init_info */
    packed_options_t packing_next;
    int64_t announced; /* ranks that the init_info under way counts on; 0: it doesn't say */

    update_state_t state;
    update_verb_t posted; /* 0: none; else its outcome is still to come */
    bool entered;         /* the posted call was legal and had its effect here */
    update_spec_t spec;
    update_spec_t checked; /* of the last update that was checked, and its text */
    lk_buf_t checked_text;
    bool lent;                    /* `spec` is `checked`, for the time of the update */
    const wte_ops_t *checked_ops; /* and for which engine and defaults */
    packed_options_t checked_packing;
    uint32_t checked_rank, checked_ranks; /* and for which place */
    bool touched, stale;                  /* stale: a session begins over a failed one's remains */
    char canceled[256];                   /* why; empty: not canceled */
    wte_progress_t progress;              /* of the last update */
};

static const char *const verb_names[] = {
#define X(name, value, text) [value] = text,
    UPDATE_VERB_TABLE(X)
#undef X
};

const char *update_verb_name(update_verb_t verb)
{
    return verb >= 1 && verb < LK_ARRAY_LEN(verb_names) ? verb_names[verb] : "?";
}

const char *update_state_name(update_state_t state)
{
    switch (state) {
#define X(name)                                                                                    \
    case UPDATE_STATE_##name:                                                                      \
        return #name;
        UPDATE_STATE_TABLE(X)
#undef X
    }
    return "?";
}

/* ---- which call is legal in which state: NULL, or the text of the refusal ---- */

#define NOT_OPEN_UPDATE "start_weight_update must be called before update_weights."
#define NOT_OPEN_FINISH "finish_weight_update called without a matching start_weight_update."
#define ALREADY_OPEN                                                                               \
    "start_weight_update called while a weight update is already active. Call "                    \
    "finish_weight_update first."
#define INIT_OPEN                                                                                  \
    "init_weight_transfer_engine called while a weight update is active. Call "                    \
    "finish_weight_update or abort_weight_update first."
#define NOT_INITIALIZED "Weight transfer not initialized. Call init_weight_transfer_engine first."
#define INITIALISING    "init_weight_transfer_engine has not finished yet."
#define RECEIVING       "update_weights has not finished yet."

#define PREPARING "finish_weight_update has not finished yet."

#define N_STATES (UPDATE_STATE_PREPARING + 1)
#define N_VERBS  (UPDATE_VERB_SET_VERSION + 1)

static const char *const refusals[N_STATES][N_VERBS] = {
    [UPDATE_STATE_UNCONFIGURED] = {[UPDATE_VERB_START] = NOT_INITIALIZED,
                                   [UPDATE_VERB_UPDATE] = NOT_OPEN_UPDATE,
                                   [UPDATE_VERB_FINISH] = NOT_OPEN_FINISH},
    [UPDATE_STATE_INITIALISING] = {[UPDATE_VERB_INIT] = INITIALISING,
                                   [UPDATE_VERB_START] = INITIALISING,
                                   [UPDATE_VERB_UPDATE] = NOT_OPEN_UPDATE,
                                   [UPDATE_VERB_FINISH] = NOT_OPEN_FINISH},
    [UPDATE_STATE_READY] =
        {[UPDATE_VERB_UPDATE] = NOT_OPEN_UPDATE, [UPDATE_VERB_FINISH] = NOT_OPEN_FINISH},
    [UPDATE_STATE_OPEN] = {[UPDATE_VERB_INIT] = INIT_OPEN, [UPDATE_VERB_START] = ALREADY_OPEN},
    [UPDATE_STATE_RECEIVING] = {[UPDATE_VERB_INIT] = INIT_OPEN,
                                [UPDATE_VERB_START] = ALREADY_OPEN,
                                [UPDATE_VERB_UPDATE] = RECEIVING,
                                [UPDATE_VERB_FINISH] = RECEIVING},
    [UPDATE_STATE_PREPARING] = {[UPDATE_VERB_INIT] = INIT_OPEN,
                                [UPDATE_VERB_START] = ALREADY_OPEN,
                                [UPDATE_VERB_UPDATE] = PREPARING,
                                [UPDATE_VERB_FINISH] = PREPARING},
};

/* ---- the sink as the engine sees it: notes that bytes reached it ---- */

/* Bytes have come to the weights in force, or to a place that they may come to. */
static void note_touched(update_session_t *self)
{
    self->touched = self->touched || self->sink.ops->prepare == NULL;
}

static lk_status_t watched_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    update_session_t *self = ctx;
    return self->sink.ops->check(self->sink.ctx, tensors, n, err);
}

static lk_status_t watched_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    update_session_t *self = ctx;
    return self->sink.ops->plan(self->sink.ctx, tensors, n, err);
}

static void *watched_direct(void *ctx, size_t index)
{
    update_session_t *self = ctx;
    if (self->sink.ops->direct == NULL) {
        return NULL;
    }
    void *place = self->sink.ops->direct(self->sink.ctx, index);
    if (place != NULL) {
        note_touched(self);
    }
    return place;
}

static lk_status_t watched_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                                  lk_error_t *err)
{
    update_session_t *self = ctx;
    note_touched(self);
    return self->sink.ops->tensor(self->sink.ctx, index, bytes, len, err);
}

static device_t *watched_device(void *ctx)
{
    update_session_t *self = ctx;
    return self->sink.ops->device(self->sink.ctx);
}

static void *watched_device_direct(void *ctx, size_t index)
{
    update_session_t *self = ctx;
    void *place = self->sink.ops->device_direct(self->sink.ctx, index);
    if (place != NULL) {
        note_touched(self);
    }
    return place;
}

static lk_status_t watched_device_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                                         device_stream_t *stream, lk_error_t *err)
{
    update_session_t *self = ctx;
    note_touched(self);
    return self->sink.ops->device_tensor(self->sink.ctx, index, bytes, len, stream, err);
}

static lk_status_t watched_device_tensors(void *ctx, const weight_arrival_t *arrivals, size_t n,
                                          device_stream_t *stream, lk_error_t *err)
{
    update_session_t *self = ctx;
    self->touched = self->touched || n > 0;
    return weight_sink_device_tensors(&self->sink, arrivals, n, stream, err);
}

static bool watched_complete(void *ctx)
{
    update_session_t *self = ctx;
    return self->sink.ops->complete(self->sink.ctx);
}

static void watched_begin(void *ctx)
{
    update_session_t *self = ctx;
    self->sink.ops->begin(self->sink.ctx);
}

static lk_status_t watched_commit(void *ctx, lk_error_t *err)
{
    update_session_t *self = ctx;
    return self->sink.ops->commit(self->sink.ctx, err);
}

static digest_t watched_digest(void *ctx)
{
    update_session_t *self = ctx;
    return self->sink.ops->digest(self->sink.ctx);
}

#define WATCHED_OPS                                                                                \
    .check = watched_check, .plan = watched_plan, .direct = watched_direct,                        \
    .tensor = watched_tensor, .complete = watched_complete, .begin = watched_begin,                \
    .commit = watched_commit, .digest = watched_digest

static const weight_sink_ops_t watched_ops = {WATCHED_OPS};
static const weight_sink_ops_t watched_device_ops = {
    WATCHED_OPS,
    .device = watched_device,
    .device_direct = watched_device_direct,
    .device_tensor = watched_device_tensor,
    .device_tensors = watched_device_tensors,
};

/* ---- what a check has read ---- */

static void forget_checked(update_session_t *self)
{
    update_spec_fini(&self->checked);
    lk_buf_fini(&self->checked_text);
    self->lent = false;
}

/* Takes *spec over. Nothing is kept of updates that hold files open, nor without memory. */
static void keep_checked(update_session_t *self, update_spec_t *spec, const char *text, size_t len)
{
    forget_checked(self);
    if (spec->source_ops == NULL && spec->tensors != NULL) {
        lk_buf_append(&self->checked_text, text, len);
    }
    if (self->checked_text.len == 0 || self->checked_text.failed) {
        update_spec_fini(spec);
        return;
    }
    self->checked = *spec;
    self->checked_ops = self->ops;
    self->checked_rank = self->ctx.dp_rank;
    self->checked_ranks = self->ctx.dp_size;
    self->checked_packing = self->packing;
    *spec = (update_spec_t){0};
}

/* There is something that was read of the same text, for the same engine, place and defaults. */
static bool is_checked(const update_session_t *self, const char *text, size_t len)
{
    const packed_options_t *packing = &self->checked_packing;
    return self->checked_text.len == len && len > 0 && !self->lent &&
           self->checked_ops == self->ops && self->checked_rank == self->ctx.dp_rank &&
           self->checked_ranks == self->ctx.dp_size && packing->packed == self->packing.packed &&
           packing->buffer_size_bytes == self->packing.buffer_size_bytes &&
           packing->num_buffers == self->packing.num_buffers &&
           memcmp(self->checked_text.data, text, len) == 0;
}

static bool take_checked(update_session_t *self, const char *text, size_t len, update_spec_t *out)
{
    if (!is_checked(self, text, len)) {
        forget_checked(self);
        return false;
    }
    *out = self->checked;
    self->checked = (update_spec_t){0};
    self->lent = true;
    return true;
}

/* The update is over. Trainers send the same text again and again, and what was read of it stays
 * for the next time, unless it is large. */
static void give_back(update_session_t *self)
{
    if (self->lent && self->checked_text.len <= KEPT_TEXT_MAX) {
        self->checked = self->spec;
        self->spec = (update_spec_t){0};
        self->lent = false;
    } else {
        update_spec_fini(&self->spec);
    }
}

/* ---- life ---- */

update_session_t *update_session_new(const wte_ops_t *ops, const wte_context_t *ctx,
                                     const weight_sink_t *sink)
{
    update_session_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->ops = self->configured = ops;
    self->ctx = *ctx;
    self->sink = *sink;
    lk_buf_init(&self->checked_text, UPDATE_SPEC_MAX_BYTES);
    self->ctx.device = sink->ops->device != NULL ? sink->ops->device(sink->ctx) : NULL;
    self->ctx.largest_tensor_bytes = sink->ops->largest != NULL ? sink->ops->largest(sink->ctx) : 0;
    self->packing = PACKED_OPTIONS_DEFAULT;
    self->configured_engine = calloc(1, ops != NULL ? ops->state_size : 1);
    self->disk_engine = calloc(1, wte_disk.state_size);
    self->engine = self->configured_engine;
    if (self->configured_engine == NULL || self->disk_engine == NULL) {
        update_session_destroy(&self);
    }
    return self;
}

void update_session_destroy(update_session_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    update_session_t *self = *self_p;
    *self_p = NULL;
    if (self->configured != NULL && self->configured_engine != NULL) {
        self->configured->fini(self->configured_engine);
    }
    if (self->disk_engine != NULL) {
        wte_disk.fini(self->disk_engine);
    }
    free(self->configured_engine);
    free(self->disk_engine);
    update_spec_fini(&self->spec);
    forget_checked(self);
    free(self);
}

/* ---- checks ---- */

static lk_status_t not_configured(lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_STATE,
                        "Weight transfer not configured. Please set weight_transfer_config to "
                        "enable weight transfer.");
}

static lk_status_t check_configured(const update_session_t *self, update_verb_t verb,
                                    const char *spec, size_t spec_len, lk_error_t *err)
{
    if (verb < UPDATE_VERB_INIT || verb > UPDATE_VERB_SET_VERSION) {
        return lk_error_set(err, LK_ERR_INVALID, "unknown weight call %d", (int)verb);
    }
    bool free_of_it = verb == UPDATE_VERB_SET_VERSION ||
                      (verb == UPDATE_VERB_INIT && update_init_is_visit(spec, spec_len));
    return self->ops != NULL || free_of_it ? LK_OK : not_configured(err);
}

/* Which engine an init_info is for. It may name one: the configured one, or disk, which needs no
 * set-up and serves for one session. */
static lk_status_t pick_engine(const update_session_t *self, json_t *init_info,
                               const wte_ops_t **out, lk_error_t *err)
{
    const json_t *name = json_object_get(init_info, "backend");
    const char *text = json_string_value(name);
    if (name == NULL || json_is_null(name) ||
        (text != NULL && self->configured != NULL && strcmp(text, self->configured->name) == 0)) {
        *out = self->configured;
    } else if (text != NULL && strcmp(text, wte_disk.name) == 0) {
        *out = &wte_disk;
    } else {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info: 'backend' must be absent, \"disk\", or the one of "
                            "--weight-transfer-config");
    }
    (void)json_object_del(init_info, "backend"); /* engines don't know it; absent is well */
    return *out != NULL ? LK_OK : not_configured(err);
}

static lk_status_t parse_init(const update_session_t *self, const char *text, size_t len,
                              update_spec_t *out, lk_error_t *err)
{
    update_spec_t spec = {0};
    LK_RETURN_IF_ERROR(update_spec_init(&spec, text, len, err));
    const wte_ops_t *ops = NULL;
    lk_status_t st = pick_engine(self, json_object_get(spec.root, "init_info"), &ops, err);
    st = st == LK_OK ? ops->init_check(spec.info, &self->ctx, err) : st;
    if (st < 0) {
        update_spec_fini(&spec);
        return st;
    }
    spec.init_ops = ops;
    spec.packing = update_spec_packing(spec.info, PACKED_OPTIONS_DEFAULT);
    *out = spec;
    return LK_OK;
}

static wte_update_t wte_update(const update_spec_t *spec)
{
    return (wte_update_t){.tensors = spec->tensors,
                          .n_tensors = spec->n_tensors,
                          .packed = spec->packing.packed,
                          .packed_buffer_size_bytes = spec->packing.buffer_size_bytes,
                          .packed_num_buffers = spec->packing.num_buffers,
                          .update_info = spec->info,
                          .source = spec->source};
}

/* What the sink and the engine say of an update that has been read. */
static lk_status_t look_at(const update_session_t *self, const update_spec_t *spec, lk_error_t *err)
{
    const weight_sink_ops_t *sink = self->sink.ops;
    bool whole = self->ops->update_open != NULL && sink->check_whole != NULL;
    LK_RETURN_IF_ERROR(whole
                           ? sink->check_whole(self->sink.ctx, spec->tensors, spec->n_tensors, err)
                           : sink->check(self->sink.ctx, spec->tensors, spec->n_tensors, err));
    wte_update_t update = wte_update(spec);
    return self->state == UPDATE_STATE_OPEN /* else the order is refused, with its text */
               ? self->ops->update_check(self->engine, &update, err)
               : LK_OK;
}

static lk_status_t parse_update(const update_session_t *self, const char *text, size_t len,
                                update_spec_t *out, lk_error_t *err)
{
    update_spec_t spec = {0};
    bool whole = self->ops->update_open != NULL;
    LK_RETURN_IF_ERROR(whole ? update_spec_open(&spec, self->ops, &self->ctx, text, len, err)
                             : update_spec_update(&spec, self->ops->name, text, len,
                                                  self->ctx.dp_rank, self->ctx.dp_size,
                                                  self->packing, err));
    lk_status_t st = look_at(self, &spec, err);
    if (st < 0) {
        update_spec_fini(&spec);
        return st;
    }
    *out = spec;
    return LK_OK;
}

static lk_status_t parse_any(const update_session_t *self, update_verb_t verb, const char *text,
                             size_t len, update_spec_t *out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(check_configured(self, verb, text, len, err));
    switch (verb) {
    case UPDATE_VERB_INIT:
        return parse_init(self, text, len, out, err);
    case UPDATE_VERB_UPDATE:
        return parse_update(self, text, len, out, err);
    case UPDATE_VERB_FINISH:
        return update_spec_finish(text, len, err);
    case UPDATE_VERB_SET_VERSION:
        return update_spec_version(text, len, err);
    case UPDATE_VERB_START: /* older callers send a body here; none of it matters */
    case UPDATE_VERB_ABORT:
        break;
    }
    return LK_OK;
}

lk_status_t update_session_check(update_session_t *self, update_verb_t verb, const char *spec,
                                 size_t spec_len, lk_error_t *err)
{
    update_spec_t parsed = {0};
    if (verb == UPDATE_VERB_UPDATE && is_checked(self, spec, spec_len)) {
        LK_RETURN_IF_ERROR(check_configured(self, verb, spec, spec_len, err));
        return look_at(self, &self->checked, err);
    }
    lk_status_t st = parse_any(self, verb, spec, spec_len, &parsed, err);
    if (st >= 0 && verb == UPDATE_VERB_UPDATE) {
        keep_checked(self, &parsed, spec, spec_len);
    }
    update_spec_fini(&parsed);
    return st;
}

/* ---- post ---- */

/* The sink looks at the list again when it plans. */
static lk_status_t parse_posted(update_session_t *self, update_verb_t verb, const char *text,
                                size_t len, update_spec_t *out, lk_error_t *err)
{
    update_spec_t spec = {0};
    if (verb != UPDATE_VERB_UPDATE || !take_checked(self, text, len, &spec)) {
        return parse_any(self, verb, text, len, out, err);
    }
    wte_update_t update = wte_update(&spec);
    lk_status_t st = self->ops->update_check(self->engine, &update, err);
    if (st < 0) {
        update_spec_fini(&spec);
        return st;
    }
    *out = spec;
    return LK_OK;
}

/* How many ranks a trainer that said so many believes that there are. */
static int64_t announced_ranks(const json_t *init_info)
{
    int64_t world = wte_fields_int(init_info, "world_size", 0);
    return world > 0 ? LK_MAX(world - wte_fields_int(init_info, "rank_offset", 1), 0) : 0;
}

/* A trainer that has not heard of a rank's removal waits for it, or is waited for. */
static void say_who_is_here(const update_session_t *self, lk_error_t *err)
{
    int64_t here = (int64_t)self->ctx.dp_size * self->ctx.ranks_per_replica;
    if (self->announced != 0 && self->announced != here) {
        lk_error_t why = *err;
        lk_error_set(err, why.status,
                     "%.700s; init_info's world_size counts on %lld ranks, this cluster has %lld "
                     "now",
                     why.text, (long long)self->announced, (long long)here);
    }
}

/* The visit ends: the configured engine goes on where it was. */
static void leave_disk(update_session_t *self)
{
    if (!self->visiting_disk) {
        return;
    }
    self->ops->abort(self->engine);
    update_spec_fini(&self->spec);
    self->visiting_disk = false;
    self->ops = self->configured;
    self->engine = self->configured_engine;
    self->state = self->configured_ready ? UPDATE_STATE_READY : UPDATE_STATE_UNCONFIGURED;
}

static lk_status_t enter_init(update_session_t *self, update_spec_t *spec, lk_error_t *err)
{
    bool visit = spec->init_ops != self->configured;
    if (visit) {
        self->configured_ready =
            self->visiting_disk ? self->configured_ready : self->state == UPDATE_STATE_READY;
    }
    self->visiting_disk = visit;
    self->ops = spec->init_ops;
    self->engine = visit ? self->disk_engine : self->configured_engine;
    /* the older connection is gone either way */
    self->state = UPDATE_STATE_UNCONFIGURED;
    self->announced = announced_ranks(spec->info);
    lk_status_t st = self->ops->init_post(self->engine, spec->info, &self->ctx, err);
    if (st >= 0) {
        self->packing_next = spec->packing;
        self->state = UPDATE_STATE_INITIALISING;
    }
    return st < 0 ? st : LK_OK;
}

static lk_status_t enter_update(update_session_t *self, update_spec_t *spec, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(self->sink.ops->plan(self->sink.ctx, spec->tensors, spec->n_tensors, err));
    update_spec_fini(&self->spec);
    self->spec = *spec;
    *spec = (update_spec_t){0};
    wte_update_t update = wte_update(&self->spec);
    weight_sink_t watched = {self->sink.ops->device != NULL ? &watched_device_ops : &watched_ops,
                             self};
    lk_status_t st = self->ops->update_post(self->engine, &update, &watched, err);
    if (st < 0) {
        update_spec_fini(&self->spec);
        return st;
    }
    self->state = UPDATE_STATE_RECEIVING;
    return LK_OK;
}

static lk_status_t enter_finish(update_session_t *self, lk_error_t *err)
{
    if (!self->stale || self->sink.ops->complete(self->sink.ctx)) {
        return LK_OK;
    }
    char missing[512] = "some of them";
    if (self->sink.ops->missing != NULL) {
        self->sink.ops->missing(self->sink.ctx, missing, sizeof missing);
    }
    return lk_error_set(
        err, LK_ERR_STATE,
        "finish_weight_update: an earlier update failed halfway, so this one has to "
        "bring every tensor of the model. Missing: %s",
        missing);
}

static void enter_abort(update_session_t *self)
{
    if (self->state == UPDATE_STATE_RECEIVING || self->state == UPDATE_STATE_INITIALISING) {
        self->ops->abort(self->engine);
        self->state = UPDATE_STATE_UNCONFIGURED;
        update_spec_fini(&self->spec);
    } else if (self->state == UPDATE_STATE_OPEN || self->state == UPDATE_STATE_PREPARING) {
        self->state = UPDATE_STATE_READY;
    }
    leave_disk(self);
}

lk_status_t update_session_post(update_session_t *self, update_verb_t verb, const char *spec,
                                size_t spec_len, lk_error_t *err)
{
    self->posted = verb;
    self->entered = false;
    self->canceled[0] = '\0';
    LK_RETURN_IF_ERROR(check_configured(self, verb, spec, spec_len, err));
    const char *refusal = refusals[self->state][verb];
    if (refusal != NULL) {
        return lk_error_set(err, LK_ERR_STATE, "%s", refusal);
    }
    update_spec_t parsed = {0};
    LK_RETURN_IF_ERROR(parse_posted(self, verb, spec, spec_len, &parsed, err));
    lk_status_t st = LK_OK;
    self->entered = true;
    switch (verb) {
    case UPDATE_VERB_INIT:
        st = enter_init(self, &parsed, err);
        break;
    case UPDATE_VERB_START:
        self->stale = self->touched;
        self->sink.ops->begin(self->sink.ctx);
        self->state = UPDATE_STATE_OPEN;
        break;
    case UPDATE_VERB_UPDATE:
        st = enter_update(self, &parsed, err);
        break;
    case UPDATE_VERB_FINISH:
        st = enter_finish(self, err);
        break;
    case UPDATE_VERB_ABORT:
        enter_abort(self);
        break;
    case UPDATE_VERB_SET_VERSION:
        break;
    }
    update_spec_fini(&parsed);
    return st;
}

/* ---- test, cancel, outcome ---- */

static lk_status_t canceled_text(update_session_t *self, lk_status_t st, lk_error_t *err)
{
    if (st == LK_ERR_CANCELED && self->canceled[0] != '\0') {
        lk_error_set(err, st, "%s", self->canceled);
    }
    return st;
}

static lk_status_t test_prepare(update_session_t *self, lk_error_t *err)
{
    lk_status_t st = self->canceled[0] != '\0'
                         ? lk_error_set(err, LK_ERR_CANCELED, "finish_weight_update was aborted")
                         : self->sink.ops->prepare(self->sink.ctx, err);
    self->progress.moves++;
    if (st != LK_INPROGRESS) {
        self->state = UPDATE_STATE_OPEN; /* until the outcome */
    }
    return st;
}

lk_status_t update_session_test(update_session_t *self, lk_error_t *err)
{
    lk_status_t st = LK_OK;
    bool init = self->state == UPDATE_STATE_INITIALISING;
    if (init) {
        st = self->ops->init_test(self->engine, err);
        if (st == LK_OK) {
            self->state = UPDATE_STATE_READY;
            self->packing = self->packing_next;
        } else if (st < 0) {
            self->state = UPDATE_STATE_UNCONFIGURED;
        }
    } else if (self->state == UPDATE_STATE_RECEIVING) {
        st = self->ops->update_test(self->engine, err);
        if (st == LK_OK && self->sink.ops->device_settle != NULL) {
            st = self->sink.ops->device_settle(self->sink.ctx, err);
        }
        self->ops->progress(self->engine, &self->progress);
        if (st != LK_INPROGRESS) {
            give_back(self);
            self->state = st == LK_OK ? UPDATE_STATE_OPEN : UPDATE_STATE_UNCONFIGURED;
        }
    } else if (self->state == UPDATE_STATE_PREPARING) {
        st = test_prepare(self, err);
    }
    st = canceled_text(self, st, err);
    if (init && st < 0) {
        say_who_is_here(self, err);
    }
    return st;
}

void update_session_prepare(update_session_t *self)
{
    CHECK(self->state == UPDATE_STATE_OPEN && self->posted == UPDATE_VERB_FINISH && self->entered &&
          self->sink.ops->prepare != NULL);
    self->state = UPDATE_STATE_PREPARING;
}

void update_session_cancel(update_session_t *self, const char *why)
{
    bool moves = self->state == UPDATE_STATE_INITIALISING || self->state == UPDATE_STATE_RECEIVING;
    if (moves || self->state == UPDATE_STATE_PREPARING) {
        snprintf(self->canceled, sizeof self->canceled, "%s",
                 why[0] != '\0' ? why : "the call was cancelled");
    }
    if (moves) {
        self->ops->abort(self->engine);
    }
}

/* Some rank failed what this one may have done: back to what all ranks share. */
static void undo(update_session_t *self, update_verb_t verb)
{
    if (verb == UPDATE_VERB_INIT || verb == UPDATE_VERB_UPDATE) {
        self->ops->abort(self->engine);
        update_spec_fini(&self->spec);
        self->state = UPDATE_STATE_UNCONFIGURED;
        self->configured_ready = false; /* to the group, nothing is initialised now */
        leave_disk(self);
    } else if (verb == UPDATE_VERB_FINISH) {
        note_touched(self); /* none committed: no rank may use what it received */
        self->state = UPDATE_STATE_READY;
        leave_disk(self);
    }
}

lk_status_t update_session_outcome(update_session_t *self, update_verb_t verb, bool ok,
                                   lk_error_t *err)
{
    bool mine = self->posted == verb && self->entered;
    self->posted = 0;
    self->entered = false;
    if (!mine) {
        return LK_OK; /* refused here: it changed nothing */
    }
    if (!ok) {
        undo(self, verb);
    } else if (verb == UPDATE_VERB_FINISH) {
        LK_RETURN_IF_ERROR(self->sink.ops->commit(self->sink.ctx, err));
        self->touched = self->stale = false;
        self->state = UPDATE_STATE_READY;
        leave_disk(self);
    }
    return LK_OK;
}

void update_session_seat(update_session_t *self, uint32_t place, uint32_t n)
{
    CHECK(place < n && self->posted == 0);
    self->ctx.dp_rank = place;
    self->ctx.dp_size = n;
    forget_checked(self); /* it may depend on the place */
}

void update_session_reset(update_session_t *self)
{
    self->posted = 0;
    self->entered = false;
    if (self->ops != NULL) {
        undo(self, UPDATE_VERB_INIT);
    }
}

const char update_session_already_open[] = ALREADY_OPEN;

bool update_init_is_visit(const char *spec, size_t spec_len)
{
    json_t *root = json_text_read(spec != NULL ? spec : "", spec_len, 0, NULL);
    const json_t *name = json_object_get(json_object_get(root, "init_info"), "backend");
    bool visit = json_is_string(name);
    json_decref(root);
    return visit;
}

update_state_t update_session_state(const update_session_t *self)
{
    return self->state;
}

bool update_session_touched(const update_session_t *self)
{
    return self->touched;
}

void update_session_progress(const update_session_t *self, wte_progress_t *out)
{
    *out = self->progress;
    if (self->state == UPDATE_STATE_INITIALISING || self->state == UPDATE_STATE_RECEIVING) {
        self->ops->progress(self->engine, out);
    }
}

void update_session_describe(const update_session_t *self, json_t *object)
{
    if (self->ops != NULL && self->ops->describe != NULL) {
        self->ops->describe(self->engine, object);
    }
}

size_t update_session_pollfds(const update_session_t *self, struct pollfd *fds, size_t room)
{
    bool busy = self->state == UPDATE_STATE_INITIALISING || self->state == UPDATE_STATE_RECEIVING;
    return busy ? self->ops->pollfds(self->engine, fds, room) : 0;
}
