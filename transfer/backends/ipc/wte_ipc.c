#include "transfer/backends/ipc/wte_ipc.h"

#include "base/check.h"
#include "transfer/backends/ipc/ipc_exports.h"
#include "transfer/backends/ipc/ipc_memory.h"
#include "transfer/device/device.h"
#include "transfer/wte_fields.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    PHASE_CLOSED,   /* not initialised, or failed */
    PHASE_IDLE,     /* ready for an update */
    PHASE_WAITING,  /* for the trainer's events */
    PHASE_COPYING,  /* the device reads the trainer's memory */
    PHASE_CANCELED, /* aborted; the next test says so */
} phase_t;

/* A batch of tensors is copied when it has so many, or so many bytes; the first is small, so that
 * the device starts, and later ones are larger: between two launches it has less to do. */
#define BATCH_TENSORS   48u
#define BATCH_BYTES     (256ull << 20)
#define BATCH_BYTES_MAX (2ull << 30)

/* Of the text of handles that stay known for when they come again. */
#define KEPT_TEXT_MAX (4u << 20)

/* Where the time of an update goes, in ns. */
typedef struct {
    uint64_t read;   /* the handles */
    uint64_t open;   /* the trainer's memory */
    uint64_t events; /* until all were seen to have happened and all copies were enqueued */
    uint64_t copies; /* from there until the device was done */
    uint64_t end;    /* taking counts off, closing memory */
} times_t;

typedef struct {
    phase_t phase;
    wte_context_t ctx;
    device_t *device;
    device_stream_t *stream;
    ipc_memory_t memory;
    ipc_exports_t exports;

    wte_update_t update;
    weight_sink_t sink;
    ipc_handles_t handles; /* of the update at hand */
    json_t *handles_info;  /* what they were read of */
    size_t n_passed;       /* handles whose events have happened */
    size_t n_enqueued;     /* tensors */
    uint64_t packed_at;    /* of the next tensor in the packed buffer */
    uint64_t batch_bytes;
    device_event_t *event; /* of handle n_passed, once it is open */
    uint64_t progress_ns, stage_ns;
    times_t times, last_times;

    json_t *checked_info; /* the last that was checked, and its handles */
    ipc_handles_t checked;
    wte_progress_t progress;
} ipc_state_t;

static const wte_field_t init_fields[] = {WTE_WORLD_FIELDS, WTE_PACKED_FIELDS};
static const wte_field_t update_fields[] = {
    WTE_UPDATE_FIELDS,
    {"ipc_handles", WTE_FIELD_ANY, false, 0, 0},
    {"ipc_handles_pickled", WTE_FIELD_ANY, false, 0, 0},
    {"tensor_sizes", WTE_FIELD_ANY, false, 0, 0},
};

/* ---- the trainer's events ---- */

static void close_event(ipc_state_t *self)
{
    self->device->ops->event_destroy(self->device, self->event);
    self->event = NULL;
}

/* Has it been waited for, in an update before or in the last step of this one? */
static bool has_passed(const ipc_state_t *self, size_t i)
{
    const ipc_export_t *export = &self->handles.exports[i];
    if (!export->wait || (i > 0 && export[-1].wait &&
                          memcmp(export->event, export[-1].event, DEVICE_IPC_HANDLE_SIZE) == 0)) {
        return true;
    }
    return ipc_exports_passed(&self->exports, &self->handles, i);
}

/* Whether handle n_passed may be read. Its event is looked at rather than waited for on the
 * stream: an event of a trainer that hangs must not block what can't be taken back. */
static lk_status_t test_event(ipc_state_t *self, lk_error_t *err)
{
    const device_ops_t *ops = self->device->ops;
    if (self->event == NULL) {
        if (has_passed(self, self->n_passed)) {
            return LK_OK;
        }
        LK_RETURN_IF_ERROR(ops->ipc_event(self->device, self->handles.exports[self->n_passed].event,
                                          &self->event, err));
    }
    lk_status_t status = ops->event_test(self->device, self->event, err);
    if (status == LK_OK) {
        close_event(self);
        self->progress_ns = lk_env_now_ns(self->ctx.env);
    }
    return status;
}

/* ---- an update's end ---- */

/* The time since the last call goes to *stage. */
static void count_time(ipc_state_t *self, uint64_t *stage)
{
    uint64_t now = lk_env_now_ns(self->ctx.env);
    *stage += now - self->stage_ns;
    self->stage_ns = now;
}

static void forget_checked(ipc_state_t *self)
{
    json_decref(self->checked_info);
    self->checked_info = NULL;
    ipc_handles_fini(&self->checked);
}

/* Trainers whose memory stays where it is send the same handles again and again: what was read of
 * them stays for the next time, unless it is large. What they name is looked at anew each time. */
static void keep_handles(ipc_state_t *self)
{
    const json_t *text = json_object_get(self->handles_info, "ipc_handles_pickled");
    forget_checked(self);
    if (json_string_length(text) <= KEPT_TEXT_MAX) {
        self->checked = self->handles;
        self->checked_info = self->handles_info;
    } else {
        ipc_handles_fini(&self->handles);
        json_decref(self->handles_info);
    }
    self->handles = (ipc_handles_t){0};
    self->handles_info = NULL;
}

/* Nothing of it runs any more. */
static void end_update(ipc_state_t *self, phase_t next)
{
    close_event(self);
    ipc_exports_end(&self->exports, &self->handles, self->n_passed);
    keep_handles(self);
    ipc_memory_close(&self->memory);
    self->progress.waiting_for[0] = '\0';
    self->phase = next;
    count_time(self, &self->times.end);
    self->last_times = self->times;
    self->times = (times_t){0};
}

/* The device may be reading the trainer's memory still; that takes milliseconds. */
static void drain(ipc_state_t *self)
{
    lk_error_t ignored = LK_ERROR_INIT; /* a device that failed reads nothing */
    if (self->n_enqueued > 0) {
        (void)!device_wait(self->device, self->stream, &ignored);
    }
}

static void close_all(ipc_state_t *self)
{
    if (self->device == NULL) {
        return;
    }
    drain(self);
    if (self->phase == PHASE_WAITING || self->phase == PHASE_COPYING) {
        end_update(self, PHASE_CLOSED);
    }
    ipc_memory_fini(&self->memory);
    ipc_exports_fini(&self->exports);
    forget_checked(self);
    self->phase = PHASE_CLOSED;
}

/* ---- ops ---- */

static lk_status_t ipc_init_check(const json_t *init_info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    LK_RETURN_IF_ERROR(wte_fields_check("init_info", wte_ipc.name, init_info, init_fields,
                                        LK_ARRAY_LEN(init_fields), err));
    if (ctx->device == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "the ipc engine needs weights on a GPU (--device cuda-store)");
    }
    return wte_fields_world(wte_ipc.name, init_info, (int64_t)ctx->dp_size * ctx->ranks_per_replica,
                            err);
}

static lk_status_t ipc_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                                 lk_error_t *err)
{
    ipc_state_t *self = state;
    LK_RETURN_IF_ERROR(ipc_init_check(init_info, ctx, err));
    close_all(self);
    self->ctx = *ctx;
    self->device = ctx->device;
    if (self->stream == NULL) {
        LK_RETURN_IF_ERROR(self->device->ops->stream_new(self->device, &self->stream, err));
    }
    self->phase = PHASE_IDLE;
    return LK_OK;
}

static lk_status_t ipc_init_test(void *state, lk_error_t *err)
{
    ipc_state_t *self = state;
    if (self->phase == PHASE_CANCELED) {
        self->phase = PHASE_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "aborted");
    }
    return LK_OK;
}

static lk_status_t check_fields(const ipc_state_t *self, const wte_update_t *update,
                                ipc_handles_t *out, lk_error_t *err)
{
    if (self->phase != PHASE_IDLE) {
        return lk_error_set(err, LK_ERR_STATE,
                            "ipc: not initialised. Call init_weight_transfer_engine first.");
    }
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_ipc.name, update->update_info,
                                        update_fields, LK_ARRAY_LEN(update_fields), err));
    if (update->n_tensors == 0) {
        *out = (ipc_handles_t){0};
        return LK_OK;
    }
    return ipc_handles_parse(update, self->device->uuid, out, err);
}

/* An update is checked up to twice before it is posted, and may come again. Its handles are read
 * once: what was checked is kept, with a reference to its update_info, so that the address stands
 * for it (the session has the same one for the same text). */
static lk_status_t ipc_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    ipc_state_t *self = state;
    if (self->phase == PHASE_IDLE && self->checked_info != NULL &&
        self->checked_info == update->update_info) {
        return LK_OK;
    }
    ipc_handles_t handles;
    uint64_t since = self->phase == PHASE_IDLE ? lk_env_now_ns(self->ctx.env) : 0;
    LK_RETURN_IF_ERROR(check_fields(self, update, &handles, err));
    forget_checked(self);
    self->checked = handles;
    self->checked_info = json_incref((json_t *)update->update_info);
    self->times = (times_t){0};
    self->stage_ns = since;
    count_time(self, &self->times.read);
    return LK_OK;
}

static uint64_t bytes_of(const wte_update_t *update, size_t i)
{
    uint64_t bytes;
    bool fits = tensor_desc_bytes(&update->tensors[i], &bytes);
    CHECK(fits);
    return bytes;
}

static void start_progress(ipc_state_t *self)
{
    self->progress = (wte_progress_t){.tensors_total = self->update.n_tensors};
    for (size_t i = 0; i < self->update.n_tensors; i++) {
        self->progress.bytes_total += bytes_of(&self->update, i);
    }
    snprintf(self->progress.waiting_for, sizeof self->progress.waiting_for,
             "the trainer's events on %s", self->device->text);
    self->progress_ns = lk_env_now_ns(self->ctx.env);
}

static lk_status_t ipc_update_post(void *state, const wte_update_t *update,
                                   const weight_sink_t *sink, lk_error_t *err)
{
    ipc_state_t *self = state;
    CHECK(sink->ops->device != NULL);
    LK_RETURN_IF_ERROR(ipc_update_check(self, update, err));
    self->stage_ns = lk_env_now_ns(self->ctx.env);
    LK_RETURN_IF_ERROR(ipc_exports_begin(&self->exports, &self->checked, err));
    self->handles = self->checked;
    self->handles_info = self->checked_info;
    self->checked = (ipc_handles_t){0};
    self->checked_info = NULL;
    self->update = *update;
    self->sink = *sink;
    self->n_passed = self->n_enqueued = 0;
    self->packed_at = 0;
    self->batch_bytes = BATCH_BYTES;
    start_progress(self);
    lk_status_t status = ipc_memory_open(&self->memory, self->device, &self->handles, err);
    if (status < 0) {
        end_update(self, PHASE_IDLE);
        return status;
    }
    count_time(self, &self->times.open);
    self->phase = PHASE_WAITING;
    return LK_OK;
}

/* Enqueues the copies of tensors up to `end`. */
static lk_status_t enqueue(ipc_state_t *self, size_t end, lk_error_t *err)
{
    weight_arrival_t arrivals[BATCH_TENSORS];
    while (self->n_enqueued < end) {
        size_t n = 0;
        for (; n < BATCH_TENSORS && self->n_enqueued < end; n++, self->n_enqueued++) {
            size_t i = self->n_enqueued;
            uint64_t bytes = bytes_of(&self->update, i);
            const char *at =
                ipc_memory_at(&self->memory, &self->handles, self->update.packed ? 0 : i);
            arrivals[n] =
                (weight_arrival_t){.index = i, .bytes = at + self->packed_at, .len = bytes};
            self->packed_at += self->update.packed ? bytes : 0;
        }
        LK_RETURN_IF_ERROR(weight_sink_device_tensors(&self->sink, arrivals, n, self->stream, err));
    }
    return LK_OK;
}

/* Looks at events in turn and enqueues batches of tensors whose events have happened: opening an
 * event takes long, and meanwhile the device works. INPROGRESS: an event has not happened. */
static lk_status_t start_copies(ipc_state_t *self, lk_error_t *err)
{
    bool packed = self->update.packed;
    uint64_t bytes = 0;
    lk_status_t status = LK_OK;
    while (self->n_passed < self->handles.n && status == LK_OK) {
        status = test_event(self, err);
        if (status == LK_OK) {
            bytes += self->handles.exports[self->n_passed++].bytes;
        }
        if (!packed &&
            (bytes >= self->batch_bytes || self->n_passed - self->n_enqueued == BATCH_TENSORS)) {
            LK_RETURN_IF_ERROR(enqueue(self, self->n_passed, err));
            bytes = 0;
            self->batch_bytes = LK_MIN(2 * self->batch_bytes, BATCH_BYTES_MAX);
        }
    }
    if (status < 0) {
        return status;
    }
    size_t end = !packed ? self->n_passed : status == LK_OK ? self->update.n_tensors : 0;
    LK_RETURN_IF_ERROR(enqueue(self, end, err));
    return status;
}

static lk_status_t out_of_time(const ipc_state_t *self, lk_error_t *err)
{
    if (lk_env_now_ns(self->ctx.env) - self->progress_ns < self->ctx.no_progress_ns) {
        return LK_INPROGRESS;
    }
    return lk_error_set(err, LK_ERR_TIMEOUT, "ipc: nothing moved for %.1f s; waiting for %s",
                        (double)self->ctx.no_progress_ns / (double)LK_SECOND_NS,
                        self->progress.waiting_for);
}

static lk_status_t advance(ipc_state_t *self, lk_error_t *err)
{
    if (self->phase == PHASE_WAITING) {
        lk_status_t status = start_copies(self, err);
        if (status == LK_INPROGRESS) {
            return out_of_time(self, err);
        }
        LK_RETURN_IF_ERROR(status);
        snprintf(self->progress.waiting_for, sizeof self->progress.waiting_for, "%s",
                 self->device->text);
        self->phase = PHASE_COPYING;
        ipc_exports_prepare(&self->exports, &self->handles); /* the device is busy */
        self->progress_ns = lk_env_now_ns(self->ctx.env);
        count_time(self, &self->times.events);
    }
    lk_status_t status = self->device->ops->stream_test(self->device, self->stream, err);
    return status == LK_INPROGRESS ? out_of_time(self, err) : status;
}

static lk_status_t ipc_update_test(void *state, lk_error_t *err)
{
    ipc_state_t *self = state;
    if (self->phase == PHASE_CANCELED) {
        self->phase = PHASE_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "aborted");
    }
    CHECK(self->phase == PHASE_WAITING || self->phase == PHASE_COPYING);
    lk_status_t status = advance(self, err);
    if (status == LK_INPROGRESS) {
        return status;
    }
    count_time(self, self->phase == PHASE_COPYING ? &self->times.copies : &self->times.events);
    if (status == LK_OK) {
        self->progress.tensors_done = self->progress.tensors_total;
        self->progress.bytes_done = self->progress.bytes_total;
    } else {
        drain(self);
    }
    end_update(self, status == LK_OK ? PHASE_IDLE : PHASE_CLOSED);
    return status;
}

static void ipc_abort(void *state)
{
    ipc_state_t *self = state;
    if (self->phase == PHASE_WAITING || self->phase == PHASE_COPYING) {
        drain(self);
        end_update(self, PHASE_CANCELED);
    }
}

static void ipc_progress(const void *state, wte_progress_t *out)
{
    const ipc_state_t *self = state;
    *out = self->progress;
    out->soon = self->phase == PHASE_COPYING;
}

/* There is nothing to poll: what it waits for is on the device. */
static size_t ipc_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return 0;
}

static void ipc_fini(void *state)
{
    ipc_state_t *self = state;
    close_all(self);
    if (self->stream != NULL) {
        self->device->ops->stream_destroy(self->device, self->stream);
    }
    memset(self, 0, sizeof *self);
}

static void ipc_describe(const void *state, json_t *object)
{
    const ipc_state_t *self = state;
    const times_t *t = &self->last_times;
    const struct {
        const char *key;
        uint64_t ns;
    } times[] = {{"ipc_read_us", t->read},
                 {"ipc_open_us", t->open},
                 {"ipc_events_us", t->events},
                 {"ipc_copies_us", t->copies},
                 {"ipc_end_us", t->end}};
    (void)json_object_set_new(object, "gpu_uuid", json_string(self->device->uuid));
    for (size_t i = 0; i < LK_ARRAY_LEN(times); i++) {
        (void)json_object_set_new(object, times[i].key,
                                  json_integer((json_int_t)(times[i].ns / 1000)));
    }
}

const wte_ops_t wte_ipc = {
    .abi_version = WTE_ABI_VERSION,
    .name = "ipc",
    .state_size = sizeof(ipc_state_t),
    .init_check = ipc_init_check,
    .init_post = ipc_init_post,
    .init_test = ipc_init_test,
    .update_check = ipc_update_check,
    .update_post = ipc_update_post,
    .update_test = ipc_update_test,
    .abort = ipc_abort,
    .progress = ipc_progress,
    .describe = ipc_describe,
    .pollfds = ipc_pollfds,
    .fini = ipc_fini,
};
