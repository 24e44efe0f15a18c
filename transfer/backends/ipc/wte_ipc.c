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

/* Memory of the trainer that is open here. */
typedef struct {
    uint8_t handle[DEVICE_IPC_HANDLE_SIZE];
    char *at;
    uint64_t bytes;
    bool used; /* by the update at hand */
} mapping_t;

typedef struct {
    phase_t phase;
    wte_context_t ctx;
    device_t *device;
    device_stream_t *stream;
    mapping_t *mappings;
    size_t n_mappings, room;

    wte_update_t update;
    weight_sink_t sink;
    ipc_handles_t handles;   /* of the update at hand */
    ipc_handles_t released;  /* of the one before: their counts have been taken off */
    device_event_t **events; /* [handles.n]; NULL where there is nothing to wait for */
    size_t next_event;
    bool counted; /* the counts of `handles` are ours to take off */
    uint64_t progress_ns;
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

static mapping_t *find_mapping(ipc_state_t *self, const uint8_t *handle)
{
    for (size_t i = 0; i < self->n_mappings; i++) {
        if (memcmp(self->mappings[i].handle, handle, DEVICE_IPC_HANDLE_SIZE) == 0) {
            return &self->mappings[i];
        }
    }
    return NULL;
}

static lk_status_t open_mapping(ipc_state_t *self, const uint8_t *handle, mapping_t **out,
                                lk_error_t *err)
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
    *out = &self->mappings[self->n_mappings++];
    **out = mapping;
    return LK_OK;
}

/* Opens what the update reads, and checks that it is all there: reading beyond would break the
 * device for good. */
static lk_status_t open_memory(ipc_state_t *self, lk_error_t *err)
{
    mark_unused(self);
    for (size_t i = 0; i < self->handles.n; i++) {
        const ipc_export_t *export = &self->handles.exports[i];
        mapping_t *mapping = find_mapping(self, export->memory);
        if (mapping == NULL) {
            LK_RETURN_IF_ERROR(open_mapping(self, export->memory, &mapping, err));
        }
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

static const char *address_of(ipc_state_t *self, const ipc_export_t *export)
{
    const mapping_t *mapping = find_mapping(self, export->memory);
    CHECK(mapping != NULL);
    return mapping->at + export->offset;
}

/* ---- the trainer's events ---- */

static void close_events(ipc_state_t *self)
{
    for (size_t i = 0; self->events != NULL && i < self->handles.n; i++) {
        self->device->ops->event_destroy(self->device, self->events[i]);
    }
    free(self->events);
    self->events = NULL;
}

static lk_status_t open_events(ipc_state_t *self, lk_error_t *err)
{
    self->events = calloc(self->handles.n + 1, sizeof *self->events);
    if (self->events == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for events");
    }
    self->next_event = 0;
    for (size_t i = 0; i < self->handles.n; i++) {
        const ipc_export_t *export = &self->handles.exports[i];
        if (export->wait) {
            LK_RETURN_IF_ERROR(
                self->device->ops->ipc_event(self->device, export->event, &self->events[i], err));
        }
    }
    return LK_OK;
}

/* They are looked at rather than waited for on the stream: an event of a trainer that hangs must
 * not block what can't be taken back. */
static lk_status_t test_events(ipc_state_t *self, lk_error_t *err)
{
    for (; self->next_event < self->handles.n; self->next_event++) {
        device_event_t *event = self->events[self->next_event];
        if (event != NULL) {
            lk_status_t status = self->device->ops->event_test(self->device, event, err);
            if (status != LK_OK) {
                return status;
            }
            self->progress_ns = lk_env_now_ns(self->ctx.env);
        }
    }
    return LK_OK;
}

/* ---- reference counts: one off per export, however often its arguments come ---- */

static bool same_export(const ipc_export_t *a, const ipc_export_t *b)
{
    return a->counter == b->counter && strcmp(a->counter_name, b->counter_name) == 0;
}

static int compare_exports(const void *a, const void *b)
{
    const ipc_export_t *x = a, *y = b;
    int names = strcmp(x->counter_name, y->counter_name);
    return names != 0 ? names : x->counter < y->counter ? -1 : x->counter > y->counter;
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

/* Both lists are sorted here; `handles` becomes `released`. */
static void release_counts(ipc_state_t *self)
{
    ipc_handles_t *now = &self->handles, *before = &self->released;
    qsort(now->exports, now->n, sizeof *now->exports, compare_exports);
    size_t b = 0;
    for (size_t i = 0; i < now->n; i++) {
        const ipc_export_t *export = &now->exports[i];
        while (b < before->n && compare_exports(&before->exports[b], export) < 0) {
            b++;
        }
        bool again = (b < before->n && same_export(&before->exports[b], export)) ||
                     (i > 0 && same_export(&now->exports[i - 1], export));
        lk_error_t gone = LK_ERROR_INIT; /* with its trainer: then nobody counts */
        if (!again) {
            (void)!ipc_counter_release(export->counter_name, export->counter, &gone);
        }
    }
    ipc_handles_fini(before);
    *before = *now;
    *now = (ipc_handles_t){0};
}

/* ---- an update's end ---- */

/* Nothing of it runs any more. */
static void end_update(ipc_state_t *self, phase_t next)
{
    close_events(self);
    if (self->counted) {
        release_counts(self);
    }
    self->counted = false;
    ipc_handles_fini(&self->handles);
    close_unused(self);
    self->progress.waiting_for[0] = '\0';
    self->phase = next;
}

/* The device may be reading the trainer's memory still; that takes milliseconds. */
static void drain(ipc_state_t *self)
{
    lk_error_t ignored = LK_ERROR_INIT; /* a device that failed reads nothing */
    if (self->phase == PHASE_COPYING) {
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
    mark_unused(self);
    close_unused(self);
    ipc_handles_fini(&self->released);
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

static lk_status_t ipc_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    ipc_handles_t handles;
    LK_RETURN_IF_ERROR(check_fields(state, update, &handles, err));
    ipc_handles_fini(&handles);
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
    LK_RETURN_IF_ERROR(check_fields(self, update, &self->handles, err));
    lk_status_t status = check_counters(self, err);
    if (status < 0) {
        ipc_handles_fini(&self->handles);
        return status;
    }
    self->counted = true;
    self->update = *update;
    self->sink = *sink;
    start_progress(self);
    status = open_memory(self, err);
    status = status == LK_OK ? open_events(self, err) : status;
    if (status < 0) {
        end_update(self, PHASE_IDLE);
        return status;
    }
    self->phase = PHASE_WAITING;
    return LK_OK;
}

/* Everything at once: the device works through it while we look at other things. */
static lk_status_t start_copying(ipc_state_t *self, lk_error_t *err)
{
    size_t n = self->update.n_tensors;
    weight_arrival_t *arrivals = calloc(n + 1, sizeof *arrivals);
    if (arrivals == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", n);
    }
    uint64_t offset = 0; /* in the packed buffer */
    for (size_t i = 0; i < n; i++) {
        const ipc_export_t *export = &self->handles.exports[self->update.packed ? 0 : i];
        arrivals[i] = (weight_arrival_t){.index = i,
                                         .bytes = address_of(self, export) + offset,
                                         .len = bytes_of(&self->update, i)};
        offset += self->update.packed ? arrivals[i].len : 0;
    }
    /* from here on the device may read, even if the rest can't be enqueued */
    self->phase = PHASE_COPYING;
    lk_status_t status = weight_sink_device_tensors(&self->sink, arrivals, n, self->stream, err);
    free(arrivals);
    snprintf(self->progress.waiting_for, sizeof self->progress.waiting_for, "%s",
             self->device->text);
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
        lk_status_t status = test_events(self, err);
        if (status == LK_INPROGRESS) {
            return out_of_time(self, err);
        }
        LK_RETURN_IF_ERROR(status);
        LK_RETURN_IF_ERROR(start_copying(self, err));
        self->progress_ns = lk_env_now_ns(self->ctx.env);
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
    (void)json_object_set_new(object, "gpu_uuid", json_string(self->device->uuid));
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
