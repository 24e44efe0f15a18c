#include "transfer/backends/ipc/wte_ipc.h"

#include "base/check.h"
#include "transfer/backends/ipc/ipc_counter.h"
#include "transfer/backends/ipc/ipc_handles.h"
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

#define BATCH_TENSORS 48u            /* a batch of tensors is copied when it has so many */
#define BATCH_BYTES   (256ull << 20) /* or so many bytes */
#define MEMORY_MAX    32768u         /* exports that are remembered */

/* Memory of the trainer that is open here. */
typedef struct {
    uint8_t handle[DEVICE_IPC_HANDLE_SIZE];
    char *at;
    uint64_t bytes;
    bool used; /* by the update at hand */
} mapping_t;

/* An export that came before. Torch never uses a count for a second export, so this names one for
 * good. */
typedef struct {
    char name[IPC_COUNTER_NAME_MAX];
    uint32_t counter;
    bool passed; /* its event, recorded when it was made, has been seen to have happened */
} known_t;

typedef struct {
    known_t *exports; /* sorted by compare_known */
    size_t n;
} known_list_t;

/* What release_counts works in; taken when an update starts, so that its end can't fail. */
typedef struct {
    known_t *exports, *merged;
    uint32_t *counters;
} room_t;

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
    mapping_t *mappings;
    size_t n_mappings, room;

    wte_update_t update;
    weight_sink_t sink;
    ipc_handles_t handles; /* of the update at hand */
    size_t *mapping_of;    /* [handles.n] */
    size_t n_passed;       /* handles whose events have happened */
    size_t n_enqueued;     /* tensors */
    uint64_t packed_at;    /* of the next tensor in the packed buffer */
    device_event_t *event; /* of handle n_passed, once it is open */
    bool counted;          /* the counts of `handles` are ours to take off */
    known_list_t known;    /* whose counts have been taken off */
    room_t for_counts;     /* while `counted` */
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

/* ---- the trainer's memory ---- */

static void close_mapping(ipc_state_t *self, size_t i)
{
    self->device->ops->ipc_close(self->device, self->mappings[i].at);
    self->mappings[i] = self->mappings[--self->n_mappings];
}

/* Ends those that the last update did not use: the trainer may have freed that memory. */
static void close_unused(ipc_state_t *self)
{
    for (size_t i = self->n_mappings; i > 0; i--) {
        if (!self->mappings[i - 1].used) {
            close_mapping(self, i - 1);
        }
    }
}

static void mark_unused(ipc_state_t *self)
{
    for (size_t i = 0; i < self->n_mappings; i++) {
        self->mappings[i].used = false;
    }
}

/* Its number, or n_mappings. Looks from `hint` on: updates come in the same order. */
static size_t find_mapping(const ipc_state_t *self, const uint8_t *handle, size_t hint)
{
    for (size_t i = 0; i < self->n_mappings; i++) {
        size_t at = (hint + i) % self->n_mappings;
        if (memcmp(self->mappings[at].handle, handle, DEVICE_IPC_HANDLE_SIZE) == 0) {
            return at;
        }
    }
    return self->n_mappings;
}

/* Its number is n_mappings before. */
static lk_status_t open_mapping(ipc_state_t *self, const uint8_t *handle, lk_error_t *err)
{
    if (self->n_mappings == self->room) {
        size_t room = LK_MAX(2 * self->room, (size_t)16);
        mapping_t *grown = realloc(self->mappings, room * sizeof *grown);
        if (grown == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
        }
        self->mappings = grown;
        self->room = room;
    }
    mapping_t mapping = {.at = NULL};
    void *at;
    LK_RETURN_IF_ERROR(self->device->ops->ipc_open(self->device, handle, &at, &mapping.bytes, err));
    mapping.at = at;
    memcpy(mapping.handle, handle, DEVICE_IPC_HANDLE_SIZE);
    self->mappings[self->n_mappings++] = mapping;
    return LK_OK;
}

/* Opens what the update reads, and checks that it is all there: reading beyond would break the
 * device for good. */
static lk_status_t open_memory(ipc_state_t *self, lk_error_t *err)
{
    mark_unused(self);
    self->mapping_of = calloc(self->handles.n + 1, sizeof *self->mapping_of);
    if (self->mapping_of == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
    }
    size_t found = 0;
    for (size_t i = 0; i < self->handles.n; i++) {
        const ipc_export_t *export = &self->handles.exports[i];
        bool same = i > 0 && memcmp(export->memory, export[-1].memory, DEVICE_IPC_HANDLE_SIZE) == 0;
        found = same ? found : find_mapping(self, export->memory, found + 1);
        if (found == self->n_mappings) {
            LK_RETURN_IF_ERROR(open_mapping(self, export->memory, err));
        }
        mapping_t *mapping = &self->mappings[found];
        self->mapping_of[i] = found;
        mapping->used = true;
        if (export->offset > mapping->bytes || export->bytes > mapping->bytes - export->offset) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "Invalid update_info for ipc: bytes %llu to %llu of a memory of "
                                "%llu bytes",
                                (unsigned long long)export->offset,
                                (unsigned long long)(export->offset + export->bytes),
                                (unsigned long long)mapping->bytes);
        }
    }
    return LK_OK;
}

static const char *address_of(const ipc_state_t *self, size_t export)
{
    return self->mappings[self->mapping_of[export]].at + self->handles.exports[export].offset;
}

/* ---- reference counts: one off per export, however often its arguments come ---- */

static int compare_known(const void *a, const void *b)
{
    const known_t *x = a, *y = b;
    int names = strcmp(x->name, y->name);
    return names != 0 ? names : x->counter < y->counter ? -1 : x->counter > y->counter;
}

static known_t known_of(const ipc_export_t *export)
{
    known_t known = {.counter = export->counter};
    memcpy(known.name, export->counter_name, sizeof known.name);
    return known;
}

static const known_t *find_known(const ipc_state_t *self, const ipc_export_t *export)
{
    known_t key = known_of(export);
    return self->known.n == 0 ? NULL
                              : bsearch(&key, self->known.exports, self->known.n,
                                        sizeof *self->known.exports, compare_known);
}

static void forget_known(ipc_state_t *self)
{
    free(self->known.exports);
    self->known = (known_list_t){0};
}

static lk_status_t check_counters(const ipc_state_t *self, lk_error_t *err)
{
    for (size_t i = 0; i < self->handles.n; i++) {
        const char *name = self->handles.exports[i].counter_name;
        if (i == 0 || strcmp(name, self->handles.exports[i - 1].counter_name) != 0) {
            LK_RETURN_IF_ERROR(ipc_counter_check(name, err));
        }
    }
    return LK_OK;
}

/* The exports of this update, sorted, each once. */
static size_t list_exports(const ipc_state_t *self, known_t *out)
{
    size_t n = 0;
    for (size_t i = 0; i < self->handles.n; i++) {
        out[i] = known_of(&self->handles.exports[i]);
        out[i].passed = i < self->n_passed;
    }
    qsort(out, self->handles.n, sizeof *out, compare_known);
    for (size_t i = 0; i < self->handles.n; i++) {
        if (n > 0 && compare_known(&out[n - 1], &out[i]) == 0) {
            out[n - 1].passed |= out[i].passed;
        } else {
            out[n++] = out[i];
        }
    }
    return n;
}

/* Takes the counts of those off that are not known yet, file by file. */
static void take_off(const ipc_state_t *self, const known_t *exports, size_t n, uint32_t *counters)
{
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        const char *name = exports[i].name;
        uint32_t n_counters = 0;
        for (; i < n && strcmp(exports[i].name, name) == 0; i++) {
            while (k < self->known.n && compare_known(&self->known.exports[k], &exports[i]) < 0) {
                k++;
            }
            if (k == self->known.n || compare_known(&self->known.exports[k], &exports[i]) != 0) {
                counters[n_counters++] = exports[i].counter;
            }
        }
        lk_error_t gone = LK_ERROR_INIT; /* with its trainer: then nobody counts */
        if (n_counters > 0) {
            (void)!ipc_counter_release(name, counters, n_counters, &gone);
        }
    }
}

/* Adds n sorted exports to those that are known; to none if they would be too many. */
static void remember(ipc_state_t *self, const known_t *exports, size_t n, known_t *merged)
{
    size_t before = n + self->known.n <= LK_MAX(n, (size_t)MEMORY_MAX) ? self->known.n : 0;
    size_t out = 0;
    for (size_t i = 0, k = 0; i < n || k < before; out++) {
        int order = k == before ? -1
                    : i == n    ? 1
                                : compare_known(&exports[i], &self->known.exports[k]);
        merged[out] = order <= 0 ? exports[i] : self->known.exports[k];
        merged[out].passed |= order == 0 && self->known.exports[k].passed;
        i += order <= 0;
        k += order >= 0;
    }
    free(self->known.exports);
    self->known = (known_list_t){merged, out};
}

static void free_room(room_t *room)
{
    free(room->exports);
    free(room->merged);
    free(room->counters);
    *room = (room_t){0};
}

static lk_status_t take_room(ipc_state_t *self, lk_error_t *err)
{
    size_t n = self->handles.n;
    room_t room = {.exports = calloc(n + 1, sizeof *room.exports),
                   .merged = calloc(n + self->known.n + 1, sizeof *room.merged),
                   .counters = calloc(n + 1, sizeof *room.counters)};
    if (room.exports == NULL || room.merged == NULL || room.counters == NULL) {
        free_room(&room);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu exports", n);
    }
    self->for_counts = room;
    return LK_OK;
}

static void release_counts(ipc_state_t *self)
{
    room_t *room = &self->for_counts;
    size_t n = list_exports(self, room->exports);
    take_off(self, room->exports, n, room->counters);
    remember(self, room->exports, n, room->merged);
    room->merged = NULL;
    free_room(room);
}

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
    const known_t *known = find_known(self, export);
    return known != NULL && known->passed;
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

/* Nothing of it runs any more. */
static void end_update(ipc_state_t *self, phase_t next)
{
    close_event(self);
    if (self->counted) {
        release_counts(self);
    }
    self->counted = false;
    ipc_handles_fini(&self->handles);
    free(self->mapping_of);
    self->mapping_of = NULL;
    close_unused(self);
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

static void forget_checked(ipc_state_t *self)
{
    json_decref(self->checked_info);
    self->checked_info = NULL;
    ipc_handles_fini(&self->checked);
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
    mark_unused(self);
    close_unused(self);
    forget_known(self);
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

/* An update is checked up to twice before it is posted. Its handles are read once: what was checked
 * is kept, with a reference to its update_info, so that the address stands for it. */
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
    self->handles = self->checked;
    self->checked = (ipc_handles_t){0};
    forget_checked(self);
    self->stage_ns = lk_env_now_ns(self->ctx.env);
    lk_status_t status = check_counters(self, err);
    status = status < 0 ? status : take_room(self, err);
    if (status < 0) {
        ipc_handles_fini(&self->handles);
        return status;
    }
    self->counted = true;
    self->update = *update;
    self->sink = *sink;
    self->n_passed = self->n_enqueued = 0;
    self->packed_at = 0;
    start_progress(self);
    status = open_memory(self, err);
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
            const char *at = address_of(self, self->update.packed ? 0 : i);
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
            (bytes >= BATCH_BYTES || self->n_passed - self->n_enqueued == BATCH_TENSORS)) {
            LK_RETURN_IF_ERROR(enqueue(self, self->n_passed, err));
            bytes = 0;
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
    *out = ((const ipc_state_t *)state)->progress;
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
    free(self->mappings);
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
