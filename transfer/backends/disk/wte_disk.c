/* A directory of safetensors on a file system that every rank sees. There is no peer: each rank
 * reads the files itself, with reads of a bounded size and not through the mapping, because a file
 * that shrinks meanwhile must be an error and not a signal. */
#include "base/check.h"
#include "transfer/backends/backends.h"
#include "transfer/safetensors.h"
#include "transfer/wte_fields.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define STEP_BYTES (1u << 20) /* read or handed on per update_test, about */
#define READ_BYTES (512u << 10)

typedef enum { DISK_CLOSED, DISK_IDLE, DISK_READING, DISK_CANCELED } disk_phase_t;

typedef struct {
    disk_phase_t phase;
    bool opening; /* init_post without its init_test */
    wte_update_t load;
    weight_sink_t sink;
    const safetensors_t *files;
    size_t at;       /* tensor being read */
    uint64_t done;   /* its bytes */
    uint8_t *target; /* NULL before its first byte */
    uint8_t *staging;
    uint64_t staging_size;
    wte_progress_t progress;
} disk_t;

/* What update_open found. */
typedef struct {
    safetensors_t *files;
    tensor_desc_t *descs;
} disk_source_t;

static const wte_field_t init_fields[] = {
    WTE_WORLD_FIELDS,
    WTE_PACKED_FIELDS,
};

static const wte_field_t update_fields[] = {
    {"path", WTE_FIELD_STRING, true, 1, PATH_MAX - 1},
    WTE_PACKED_FIELDS,
};

/* ---- where weights may come from ---- */

/* Both resolved. */
static bool is_below(const char *path, const char *dir)
{
    size_t len = strlen(dir);
    while (len > 0 && dir[len - 1] == '/') {
        len--;
    }
    return strncmp(path, dir, len) == 0 && (path[len] == '/' || path[len] == '\0');
}

/* dirs is a comma-separated list. One that does not exist allows nothing. */
static bool is_allowed(const char *path, const char *dirs)
{
    for (const char *p = dirs != NULL ? dirs : ""; *p != '\0';) {
        size_t len = strcspn(p, ",");
        char dir[PATH_MAX], resolved[PATH_MAX];
        if (len > 0 && len < sizeof dir) {
            memcpy(dir, p, len);
            dir[len] = '\0';
            if (realpath(dir, resolved) != NULL && is_below(path, resolved)) {
                return true;
            }
        }
        p += len + (p[len] == ',');
    }
    return false;
}

static lk_status_t resolve_path(const char *path, const wte_context_t *ctx, char out[PATH_MAX],
                                lk_error_t *err)
{
    struct stat st;
    if (path[0] != '/') {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid update_info for disk: 'path' must be absolute, not '%.200s'",
                            path);
    }
    if (realpath(path, out) == NULL || stat(out, &st) != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid update_info for disk: 'path' %.300s: %s",
                            path, strerror(errno));
    }
    /* of a place that is not allowed not even its kind is told */
    if (!is_allowed(out, ctx->allowed_weight_dirs)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid update_info for disk: 'path' %.300s is not below a directory "
                            "of --allowed-weight-dirs",
                            path);
    }
    if (!S_ISDIR(st.st_mode)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid update_info for disk: 'path' %.300s is not a directory", path);
    }
    return LK_OK;
}

/* Without the buffers that old Llama checkpoints carry. */
static lk_status_t list_tensors(disk_source_t *source, size_t *n_out, lk_error_t *err)
{
    size_t total = safetensors_count(source->files), n = 0;
    source->descs = calloc(total + 1, sizeof *source->descs);
    if (source->descs == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", total);
    }
    for (size_t i = 0; i < total; i++) {
        const safetensors_entry_t *entry = safetensors_at(source->files, i);
        if (!safetensors_is_rotary_buffer(entry->desc.name)) {
            source->descs[n++] = entry->desc;
        }
    }
    *n_out = n;
    return LK_OK;
}

static void disk_update_close(void *handle)
{
    disk_source_t *source = handle;
    if (source != NULL) {
        safetensors_close(&source->files);
        free(source->descs);
        free(source);
    }
}

static lk_status_t disk_update_open(const json_t *update_info, const wte_context_t *ctx,
                                    wte_source_t *out, lk_error_t *err)
{
    char path[PATH_MAX];
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_disk.name, update_info, update_fields,
                                        LK_ARRAY_LEN(update_fields), err));
    LK_RETURN_IF_ERROR(
        resolve_path(json_string_value(json_object_get(update_info, "path")), ctx, path, err));
    disk_source_t *source = calloc(1, sizeof *source);
    if (source == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    size_t n = 0;
    lk_status_t st = safetensors_open(path, &source->files, err);
    if (st < 0 && err != NULL && (st == LK_ERR_IO || st == LK_ERR_NOT_FOUND)) {
        st = err->status = LK_ERR_INVALID; /* the caller named it */
    }
    st = st == LK_OK ? list_tensors(source, &n, err) : st;
    if (st < 0) {
        disk_update_close(source);
        return st;
    }
    *out = (wte_source_t){source->descs, n, source};
    return LK_OK;
}

/* ---- init: nothing to connect to ---- */

static lk_status_t disk_init_check(const json_t *init_info, const wte_context_t *ctx,
                                   lk_error_t *err)
{
    LK_RETURN_IF_ERROR(wte_fields_check("init_info", wte_disk.name, init_info, init_fields,
                                        LK_ARRAY_LEN(init_fields), err));
    return wte_fields_world(wte_disk.name, init_info,
                            (int64_t)ctx->dp_size * ctx->ranks_per_replica, err);
}

static void disk_fini(void *state)
{
    disk_t *self = state;
    free(self->staging);
    *self = (disk_t){0};
}

static lk_status_t disk_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    disk_t *self = state;
    LK_RETURN_IF_ERROR(disk_init_check(init_info, ctx, err));
    disk_fini(self);
    self->opening = true;
    return LK_OK;
}

static lk_status_t disk_init_test(void *state, lk_error_t *err)
{
    disk_t *self = state;
    if (self->phase == DISK_CANCELED) {
        self->phase = DISK_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the initialisation was aborted");
    }
    if (!self->opening) {
        return lk_error_set(err, LK_ERR_STATE, "no initialisation is under way");
    }
    self->opening = false;
    self->phase = DISK_IDLE;
    return LK_OK;
}

/* ---- updates ---- */

static lk_status_t disk_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    const disk_t *self = state;
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_disk.name, update->update_info,
                                        update_fields, LK_ARRAY_LEN(update_fields), err));
    return self->phase == DISK_IDLE ? LK_OK
                                    : lk_error_set(err, LK_ERR_STATE,
                                                   "disk weight transfer not initialized. Call "
                                                   "init_weight_transfer_engine first.");
}

static lk_status_t disk_update_post(void *state, const wte_update_t *update,
                                    const weight_sink_t *sink, lk_error_t *err)
{
    disk_t *self = state;
    LK_RETURN_IF_ERROR(disk_update_check(state, update, err));
    CHECK(update->source != NULL || update->n_tensors == 0);
    self->load = *update;
    self->sink = *sink;
    self->files = update->source != NULL ? ((disk_source_t *)update->source)->files : NULL;
    self->at = 0;
    self->done = 0;
    self->target = NULL;
    self->progress = (wte_progress_t){.tensors_total = update->n_tensors};
    for (size_t i = 0; i < update->n_tensors; i++) {
        uint64_t bytes = 0;
        bool fits = tensor_desc_bytes(&update->tensors[i], &bytes);
        CHECK(fits && bytes <= UINT64_MAX - self->progress.bytes_total); /* they are in files */
        self->progress.bytes_total += bytes;
    }
    self->phase = DISK_READING;
    return LK_OK;
}

static lk_status_t choose_target(disk_t *self, uint64_t bytes, lk_error_t *err)
{
    if (self->sink.ops->direct != NULL && bytes > 0) {
        self->target = self->sink.ops->direct(self->sink.ctx, self->at);
        if (self->target != NULL) {
            return LK_OK;
        }
    }
    if (self->staging_size < bytes || self->staging == NULL) {
        free(self->staging);
        self->staging = malloc(bytes > 0 ? bytes : 1);
        self->staging_size = self->staging != NULL ? bytes : 0;
        if (self->staging == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a tensor of %llu bytes",
                                (unsigned long long)bytes);
        }
    }
    self->target = self->staging;
    return LK_OK;
}

/* A piece of the tensor, or a slice of what the sink does with it. */
static lk_status_t read_some(disk_t *self, uint64_t *cost, lk_error_t *err)
{
    const tensor_desc_t *desc = &self->load.tensors[self->at];
    const safetensors_entry_t *entry = safetensors_find(self->files, desc->name);
    CHECK(entry != NULL);
    if (self->target == NULL) {
        LK_RETURN_IF_ERROR(choose_target(self, entry->bytes, err));
    }
    uint64_t n = LK_MIN(entry->bytes - self->done, (uint64_t)READ_BYTES);
    if (n > 0) {
        LK_RETURN_IF_ERROR(
            safetensors_read(self->files, entry, self->done, self->target + self->done, n, err));
        self->done += n;
        self->progress.bytes_done += n;
        *cost += n;
    }
    if (self->done == entry->bytes) {
        lk_status_t st =
            self->sink.ops->tensor(self->sink.ctx, self->at, self->target, entry->bytes, err);
        *cost += LK_MIN(entry->bytes, (uint64_t)WEIGHT_SINK_SLICE_BYTES);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        self->progress.tensors_done++;
        self->at++;
        self->done = 0;
        self->target = NULL;
    }
    return LK_OK;
}

static void end_update(disk_t *self, disk_phase_t phase)
{
    self->phase = phase;
    self->files = NULL;
    self->load = (wte_update_t){0};
    self->progress.waiting_for[0] = '\0';
    free(self->staging);
    self->staging = NULL;
    self->staging_size = 0;
}

static lk_status_t disk_update_test(void *state, lk_error_t *err)
{
    disk_t *self = state;
    if (self->phase == DISK_CANCELED) {
        self->phase = DISK_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the update was aborted");
    }
    if (self->phase != DISK_READING) {
        return lk_error_set(err, LK_ERR_STATE, "no update is under way");
    }
    self->progress.moves++;
    for (uint64_t cost = 0; cost < STEP_BYTES && self->at < self->load.n_tensors; cost += 64) {
        lk_error_t inner = LK_ERROR_INIT;
        if (read_some(self, &cost, &inner) < 0) {
            lk_error_set(err, inner.status, "tensor %zu of %zu, '%s': %s", self->at + 1,
                         self->load.n_tensors, self->load.tensors[self->at].name, inner.text);
            end_update(self, DISK_CLOSED);
            return inner.status;
        }
    }
    if (self->at == self->load.n_tensors) {
        end_update(self, DISK_IDLE);
        return LK_OK;
    }
    snprintf(self->progress.waiting_for, sizeof self->progress.waiting_for,
             "file system, tensor %zu of %zu", self->at + 1, self->load.n_tensors);
    return LK_INPROGRESS;
}

static void disk_abort(void *state)
{
    disk_t *self = state;
    if (self->opening || self->phase == DISK_READING) {
        self->opening = false;
        end_update(self, DISK_CANCELED);
    }
}

static void disk_progress(const void *state, wte_progress_t *out)
{
    *out = ((const disk_t *)state)->progress;
}

static size_t disk_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return 0; /* there is always work at hand */
}

const wte_ops_t wte_disk = {
    .abi_version = WTE_ABI_VERSION,
    .name = "disk",
    .state_size = sizeof(disk_t),
    .init_check = disk_init_check,
    .init_post = disk_init_post,
    .init_test = disk_init_test,
    .update_open = disk_update_open,
    .update_close = disk_update_close,
    .update_check = disk_update_check,
    .update_post = disk_update_post,
    .update_test = disk_update_test,
    .abort = disk_abort,
    .progress = disk_progress,
    .pollfds = disk_pollfds,
    .fini = disk_fini,
};
