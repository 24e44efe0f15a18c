#include "transfer/backends/ipc/ipc_exports.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define OPEN_FILES 16u /* at once; torch has one for 10000 exports */

static int compare(const void *a, const void *b)
{
    const ipc_known_t *x = a, *y = b;
    int names = strcmp(x->name, y->name);
    return names != 0 ? names : x->counter < y->counter ? -1 : x->counter > y->counter;
}

static ipc_known_t known_of(const ipc_export_t *export)
{
    ipc_known_t known = {.counter = export->counter};
    memcpy(known.name, export->counter_name, sizeof known.name);
    return known;
}

static void free_room(ipc_exports_t *self)
{
    for (size_t i = 0; i < self->n_releases; i++) {
        ipc_counter_close(self->releases[i].counts);
    }
    free(self->exports);
    free(self->merged);
    free(self->counters);
    free(self->releases);
    self->exports = self->merged = NULL;
    self->counters = NULL;
    self->releases = NULL;
    self->n_releases = 0;
    self->under_way = self->prepared = false;
}

static lk_status_t check_files(const ipc_handles_t *handles, lk_error_t *err)
{
    for (size_t i = 0; i < handles->n; i++) {
        const char *name = handles->exports[i].counter_name;
        if (i == 0 || strcmp(name, handles->exports[i - 1].counter_name) != 0) {
            LK_RETURN_IF_ERROR(ipc_counter_check(name, err));
        }
    }
    return LK_OK;
}

lk_status_t ipc_exports_begin(ipc_exports_t *self, const ipc_handles_t *handles, lk_error_t *err)
{
    CHECK(!self->under_way);
    LK_RETURN_IF_ERROR(check_files(handles, err));
    size_t n = handles->n;
    self->exports = calloc(n + 1, sizeof *self->exports);
    self->merged = calloc(n + self->n_known + 1, sizeof *self->merged);
    self->counters = calloc(n + 1, sizeof *self->counters);
    self->releases = calloc(n + 1, sizeof *self->releases);
    if (self->exports == NULL || self->merged == NULL || self->counters == NULL ||
        self->releases == NULL) {
        free_room(self);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu exports", n);
    }
    self->under_way = true;
    return LK_OK;
}

bool ipc_exports_passed(const ipc_exports_t *self, const ipc_export_t *export)
{
    ipc_known_t key = known_of(export);
    const ipc_known_t *known =
        self->n_known > 0 ? bsearch(&key, self->known, self->n_known, sizeof key, compare) : NULL;
    return known != NULL && known->passed;
}

/* Each of the update's exports once. */
static void sort(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
{
    ipc_known_t *list = self->exports;
    size_t n = 0;
    bool in_order = true; /* as torch makes them */
    for (size_t i = 0; i < handles->n; i++) {
        list[i] = known_of(&handles->exports[i]);
        list[i].passed = i < n_passed;
        in_order = in_order && (i == 0 || compare(&list[i - 1], &list[i]) < 0);
    }
    if (!in_order) {
        qsort(list, handles->n, sizeof *list, compare);
    }
    for (size_t i = 0; i < handles->n; i++) {
        if (n > 0 && compare(&list[n - 1], &list[i]) == 0) {
            list[n - 1].passed |= list[i].passed;
        } else {
            list[n++] = list[i];
        }
    }
    self->n_exports = n;
}

/* Finds the counts of those that are not known yet, file by file. */
static void find_counts(ipc_exports_t *self)
{
    size_t k = 0, n = 0;
    for (size_t i = 0; i < self->n_exports;) {
        ipc_release_t release = {.name = self->exports[i].name, .counters = &self->counters[n]};
        for (; i < self->n_exports && strcmp(self->exports[i].name, release.name) == 0; i++) {
            const ipc_known_t *export = &self->exports[i];
            while (k < self->n_known && compare(&self->known[k], export) < 0) {
                k++;
            }
            if (k == self->n_known || compare(&self->known[k], export) != 0) {
                self->counters[n++] = export->counter;
                release.n++;
            }
        }
        if (release.n > 0) {
            self->releases[self->n_releases++] = release;
        }
    }
}

/* Adds the sorted exports to those that are known; to none if they would be too many. */
static void merge(ipc_exports_t *self)
{
    size_t n = self->n_exports, out = 0;
    size_t before = n + self->n_known <= LK_MAX(n, (size_t)IPC_EXPORTS_MAX) ? self->n_known : 0;
    for (size_t i = 0, k = 0; i < n || k < before; out++) {
        int order = k == before ? -1 : i == n ? 1 : compare(&self->exports[i], &self->known[k]);
        self->merged[out] = order <= 0 ? self->exports[i] : self->known[k];
        self->merged[out].passed |= order == 0 && self->known[k].passed;
        i += order <= 0;
        k += order >= 0;
    }
    self->n_merged = out;
}

void ipc_exports_prepare(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
{
    CHECK(self->under_way && !self->prepared);
    sort(self, handles, n_passed);
    find_counts(self);
    merge(self);
    for (size_t i = 0; i < self->n_releases && i < OPEN_FILES; i++) {
        lk_error_t later = LK_ERROR_INIT; /* it is tried again */
        (void)!ipc_counter_open(self->releases[i].name, &self->releases[i].counts, &later);
    }
    self->prepared = true;
}

static void take_off(ipc_release_t *release)
{
    lk_error_t gone = LK_ERROR_INIT; /* with its trainer: then nobody counts */
    if (release->counts == NULL &&
        ipc_counter_open(release->name, &release->counts, &gone) != LK_OK) {
        return;
    }
    ipc_counter_release(release->counts, release->counters, release->n);
    ipc_counter_close(release->counts);
    release->counts = NULL;
}

void ipc_exports_end(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
{
    if (!self->under_way) {
        return;
    }
    if (!self->prepared) {
        ipc_exports_prepare(self, handles, n_passed);
    }
    for (size_t i = 0; i < self->n_releases; i++) {
        take_off(&self->releases[i]);
    }
    free(self->known);
    self->known = self->merged;
    self->n_known = self->n_merged;
    self->merged = NULL;
    free_room(self);
}

void ipc_exports_fini(ipc_exports_t *self)
{
    CHECK(!self->under_way);
    free(self->known);
    *self = (ipc_exports_t){0};
}
