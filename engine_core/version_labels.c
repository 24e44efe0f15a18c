#include "engine_core/version_labels.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

void version_labels_init(version_labels_t *self)
{
    *self = (version_labels_t){0};
    version_labels_set(self, 0, "default");
}

void version_labels_fini(version_labels_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        free(self->labels[i]);
    }
    free(self->labels);
    *self = (version_labels_t){0};
}

void version_labels_set(version_labels_t *self, uint64_t epoch, const char *label)
{
    char *copy = strdup(label);
    CHECKF(copy != NULL, "out of memory");
    CHECK(epoch >= self->first && epoch - self->first <= self->n);
    size_t i = epoch - self->first;
    if (i == self->n && self->n == self->cap) {
        size_t cap = self->cap == 0 ? 16 : 2 * self->cap;
        char **labels = realloc(self->labels, cap * sizeof *labels);
        CHECKF(labels != NULL, "out of memory for %zu labels", cap);
        self->labels = labels;
        self->cap = cap;
    }
    if (i < self->n) {
        free(self->labels[i]);
    } else {
        self->n++;
    }
    self->labels[i] = copy;
}

const char *version_labels_get(const version_labels_t *self, uint64_t epoch)
{
    CHECKF(epoch >= self->first && epoch - self->first < self->n, "epoch %llu has no label",
           (unsigned long long)epoch);
    return self->labels[epoch - self->first];
}

void version_labels_forget_before(version_labels_t *self, uint64_t epoch)
{
    if (self->n <= 1 || epoch <= self->first) {
        return;
    }
    size_t old = epoch - self->first < self->n ? (size_t)(epoch - self->first) : self->n - 1;
    for (size_t i = 0; i < old; i++) {
        free(self->labels[i]);
    }
    memmove(self->labels, self->labels + old, (self->n - old) * sizeof *self->labels);
    self->first += old;
    self->n -= old;
}
