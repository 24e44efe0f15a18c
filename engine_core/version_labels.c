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
    self->labels[self->n++] = (version_label_t){0, label};
    return true;
}

void version_labels_fini(version_labels_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        free(self->labels[i].label);
    }
    free(self->labels);
    *self = (version_labels_t){0};
}

void version_labels_set(version_labels_t *self, uint64_t epoch, const char *label)
{
    char *copy = strdup(label);
    CHECKF(copy != NULL, "out of memory");
    uint64_t newest = self->labels[self->n - 1].epoch;
    CHECKF(epoch >= newest, "epoch %llu after %llu", (unsigned long long)epoch,
           (unsigned long long)newest);
    if (epoch == newest) {
        free(self->labels[self->n - 1].label);
        self->labels[self->n - 1].label = copy;
        return;
    }
    if (self->n == self->cap) {
        size_t cap = 2 * self->cap;
        version_label_t *labels = realloc(self->labels, cap * sizeof *labels);
        CHECKF(labels != NULL, "out of memory for %zu labels", cap);
        self->labels = labels;
        self->cap = cap;
    }
    self->labels[self->n++] = (version_label_t){epoch, copy};
}

const char *version_labels_get(const version_labels_t *self, uint64_t epoch)
{
    size_t i = self->n;
    while (i > 0 && self->labels[i - 1].epoch > epoch) { /* mostly it is the newest */
        i--;
    }
    CHECKF(i > 0 && self->labels[i - 1].epoch == epoch, "epoch %llu has no label",
           (unsigned long long)epoch);
    return self->labels[i - 1].label;
}

void version_labels_forget_before(version_labels_t *self, uint64_t epoch)
{
    size_t old = 0;
    while (old + 1 < self->n && self->labels[old].epoch < epoch) {
        free(self->labels[old++].label);
    }
    memmove(self->labels, self->labels + old, (self->n - old) * sizeof *self->labels);
    self->n -= old;
}
