#include "engine_core/version_labels.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

bool version_labels_init(version_labels_t *self)
{
    *self = (version_labels_t){.cap = 16};
    self->labels = calloc(self->cap, sizeof *self->labels);
    char *label = strdup("default");
    if (self->labels == NULL || label == NULL) {
        free(label);
        version_labels_fini(self);
        return false;
    }
    self->labels[self->n++] = label;
    return true;
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
        size_t cap = 2 * self->cap;
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
