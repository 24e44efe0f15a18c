/*
 * version_labels.h: the label (`weight_version`) of every weight epoch that a live request can
 * still refer to. A label belongs to its epoch's weights: a later label for the same epoch replaces
 * it in all that is said about that epoch from then on.
 */
#ifndef LK_ENGINE_CORE_VERSION_LABELS_H
#define LK_ENGINE_CORE_VERSION_LABELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t epoch;
    char *label; /* owned */
} version_label_t;

typedef struct {
    version_label_t *labels; /* by epoch; with gaps: a rank that joins a group adopts its epoch */
    size_t n, cap;
} version_labels_t;

/* epoch 0 is "default". False when out of memory; *self is then empty. */
bool version_labels_init(version_labels_t *self);
void version_labels_fini(version_labels_t *self);
/* epoch: the newest one, or a later one. Ends the process when out of memory. */
void version_labels_set(version_labels_t *self, uint64_t epoch, const char *label);
/* Valid until the epoch's label is replaced or forgotten. */
const char *version_labels_get(const version_labels_t *self, uint64_t epoch);
/* Nothing refers to an epoch before this one any more. The newest is always kept. */
void version_labels_forget_before(version_labels_t *self, uint64_t epoch);

#endif
