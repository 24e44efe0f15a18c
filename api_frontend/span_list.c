#include "api_frontend/span_list.h"
#include "base/check.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void span_list_clear(span_list_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        free(self->items[i].version);
    }
    self->n = 0;
}

void span_list_fini(span_list_t *self)
{
    if (self != NULL) {
        span_list_clear(self);
        free(self->items);
        *self = (span_list_t){0};
    }
}

void span_list_append(span_list_t *self, const char *version, uint64_t epoch, uint64_t start,
                      uint64_t end)
{
    if (start >= end) {
        return;
    }
    if (self->n > 0) {
        span_t *last = &self->items[self->n - 1];
        if (last->epoch == epoch && last->end == start && strcmp(last->version, version) == 0) {
            last->end = end;
            return;
        }
    }
    if (self->n == self->cap) {
        size_t cap = self->cap == 0 ? 4 : self->cap * 2;
        span_t *items = realloc(self->items, cap * sizeof items[0]);
        CHECKF(items != NULL, "out of memory");
        self->items = items;
        self->cap = cap;
    }
    char *copy = strdup(version);
    CHECKF(copy != NULL, "out of memory");
    self->items[self->n++] = (span_t){copy, epoch, start, end};
}

bool span_lists_mix(const span_list_t *a, const span_list_t *b)
{
    const span_list_t *lists[2] = {a, b};
    const span_t *first = NULL;
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; lists[k] != NULL && i < lists[k]->n; i++) {
            const span_t *s = &lists[k]->items[i];
            first = first != NULL ? first : s;
            if (s->epoch != first->epoch) {
                return true;
            }
        }
    }
    return false;
}

void span_list_json(const span_list_t *self, lk_buf_t *out)
{
    lk_buf_str(out, "[");
    for (size_t i = 0; i < self->n; i++) {
        const span_t *s = &self->items[i];
        lk_buf_str(out, i > 0 ? ",{\"version\":" : "{\"version\":");
        lk_buf_json_str(out, s->version, strlen(s->version));
        lk_buf_printf(out, ",\"epoch\":%" PRIu64 ",\"start\":%" PRIu64 ",\"end\":%" PRIu64 "}",
                      s->epoch, s->start, s->end);
    }
    lk_buf_str(out, "]");
}
