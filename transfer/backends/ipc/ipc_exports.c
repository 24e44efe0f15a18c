#include "transfer/backends/ipc/ipc_exports.h"

#include "base/check.h"
#include "transfer/backends/ipc/ipc_counter.h"

#include <stdlib.h>
#include <string.h>

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
    free(self->exports);
    free(self->merged);
    free(self->counters);
    self->exports = self->merged = NULL;
    self->counters = NULL;
    self->under_way = self->sorted = false;
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
    if (self->exports == NULL || self->merged == NULL || self->counters == NULL) {
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

void ipc_exports_sort(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
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
    self->sorted = true;
}

/* Takes the counts of those off that are not known yet, file by file. */
static void take_off(ipc_exports_t *self)
{
    size_t k = 0;
    for (size_t i = 0; i < self->n_exports;) {
        const char *name = self->exports[i].name;
        uint32_t n_counters = 0;
        for (; i < self->n_exports && strcmp(self->exports[i].name, name) == 0; i++) {
            const ipc_known_t *export = &self->exports[i];
            while (k < self->n_known && compare(&self->known[k], export) < 0) {
                k++;
            }
            if (k == self->n_known || compare(&self->known[k], export) != 0) {
                self->counters[n_counters++] = export->counter;
            }
        }
        lk_error_t gone = LK_ERROR_INIT; /* with its trainer: then nobody counts */
        if (n_counters > 0) {
            (void)!ipc_counter_release(name, self->counters, n_counters, &gone);
        }
    }
}

/* Adds the sorted exports to those that are known; to none if they would be too many. */
static void remember(ipc_exports_t *self)
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
    free(self->known);
    self->known = self->merged;
    self->n_known = out;
    self->merged = NULL;
}

void ipc_exports_end(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed)
{
    if (!self->under_way) {
        return;
    }
    if (!self->sorted) {
        ipc_exports_sort(self, handles, n_passed);
    }
    take_off(self);
    remember(self);
    free_room(self);
}

void ipc_exports_fini(ipc_exports_t *self)
{
    CHECK(!self->under_way);
    free(self->known);
    *self = (ipc_exports_t){0};
}
