#include "transfer/backends/ipc/ipc_exports.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

STATIC_ASSERT(IPC_FILES_MAX <= UINT8_MAX, "file_of has bytes");

static bool has(const uint64_t *bits, uint32_t place)
{
    return (bits[place / 64] >> place % 64 & 1) != 0;
}

static void set(uint64_t *bits, uint32_t place)
{
    bits[place / 64] |= 1ull << place % 64;
}

/* ---- files ---- */

/* Its number, or n_files. Most exports are in the file of the one before, at `hint`. */
static size_t find_file(const ipc_exports_t *self, const char *name, size_t hint)
{
    if (hint < self->n_files && strcmp(self->files[hint]->name, name) == 0) {
        return hint;
    }
    size_t i = 0;
    while (i < self->n_files && strcmp(self->files[i]->name, name) != 0) {
        i++;
    }
    return i;
}

/* Forgets the oldest that the update at hand does not use; false if it uses all. */
static bool make_room(ipc_exports_t *self)
{
    if (self->n_files < IPC_FILES_MAX) {
        return true;
    }
    for (size_t i = 0; i < self->n_files; i++) {
        if (!self->files[i]->used) {
            free(self->files[i]);
            self->n_files--;
            memmove(&self->files[i], &self->files[i + 1],
                    (self->n_files - i) * sizeof self->files[0]);
            return true;
        }
    }
    return false;
}

static lk_status_t add_file(ipc_exports_t *self, const char *name, lk_error_t *err)
{
    if (!make_room(self)) {
        return lk_error_set(err, LK_ERR_TOO_LARGE,
                            "Invalid update_info for ipc: the handles name more than %u files of "
                            "reference counts",
                            IPC_FILES_MAX);
    }
    LK_RETURN_IF_ERROR(ipc_counter_check(name, err));
    ipc_file_t *file = calloc(1, sizeof *file);
    if (file == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for exports");
    }
    memcpy(file->name, name, strlen(name) + 1);
    file->used = true;
    self->files[self->n_files++] = file;
    return LK_OK;
}

/* Those that are known are marked and checked first: they are not forgotten for new ones. */
static lk_status_t find_files(ipc_exports_t *self, const ipc_handles_t *handles, lk_error_t *err)
{
    size_t file = 0;
    for (size_t i = 0; i < self->n_files; i++) {
        self->files[i]->used = false;
    }
    for (size_t i = 0; i < handles->n; i++) {
        const char *name = handles->exports[i].counter_name;
        file = find_file(self, name, file);
        if (file < self->n_files && !self->files[file]->used) {
            LK_RETURN_IF_ERROR(ipc_counter_check(name, err));
            self->files[file]->used = true;
        }
    }
    for (size_t i = 0; i < handles->n; i++) {
        const char *name = handles->exports[i].counter_name;
        file = find_file(self, name, file);
        if (file == self->n_files) {
            LK_RETURN_IF_ERROR(add_file(self, name, err));
        }
    }
    return LK_OK;
}

/* ---- an update ---- */

lk_status_t ipc_exports_begin(ipc_exports_t *self, const ipc_handles_t *handles, lk_error_t *err)
{
    CHECK(!self->under_way);
    LK_RETURN_IF_ERROR(find_files(self, handles, err));
    self->file_of = malloc(handles->n + 1);
    if (self->file_of == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu exports", handles->n);
    }
    size_t file = 0;
    for (size_t i = 0; i < handles->n; i++) {
        file = find_file(self, handles->exports[i].counter_name, file);
        self->file_of[i] = (uint8_t)file;
    }
    self->under_way = true;
    return LK_OK;
}

static ipc_file_t *file_of(const ipc_exports_t *self, size_t i)
{
    return self->files[self->file_of[i]];
}

bool ipc_exports_passed(const ipc_exports_t *self, const ipc_handles_t *handles, size_t i)
{
    CHECK(self->under_way);
    return has(file_of(self, i)->passed, handles->exports[i].counter);
}

static void open_counts(ipc_file_t *file)
{
    lk_error_t gone = LK_ERROR_INIT; /* with its trainer: then nobody counts */
    if (file->counts == NULL) {
        (void)!ipc_counter_open(file->name, &file->counts, &gone);
    }
}

void ipc_exports_prepare(ipc_exports_t *self, const ipc_handles_t *handles)
{
    CHECK(self->under_way);
    for (size_t i = 0; i < handles->n; i++) {
        ipc_file_t *file = file_of(self, i);
        if (file->used && !has(file->known, handles->exports[i].counter)) {
            file->used = false; /* looked at */
            open_counts(file);
        }
    }
}

void ipc_exports_end(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
{
    if (!self->under_way) {
        return;
    }
    ipc_exports_prepare(self, handles);
    for (size_t i = 0; i < handles->n; i++) {
        ipc_file_t *file = file_of(self, i);
        uint32_t place = handles->exports[i].counter;
        if (!has(file->known, place) && file->counts != NULL) {
            ipc_counter_release(file->counts, place);
        }
        set(file->known, place);
        if (i < n_passed) {
            set(file->passed, place);
        }
    }
    for (size_t i = 0; i < self->n_files; i++) {
        ipc_counter_close(self->files[i]->counts);
        self->files[i]->counts = NULL;
    }
    free(self->file_of);
    self->file_of = NULL;
    self->under_way = false;
}

void ipc_exports_fini(ipc_exports_t *self)
{
    CHECK(!self->under_way);
    for (size_t i = 0; i < self->n_files; i++) {
        free(self->files[i]);
    }
    *self = (ipc_exports_t){0};
}
