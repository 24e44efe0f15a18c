/*
 * ipc_exports.h: which exports of a trainer have been taken in, so that the reference count of each
 * is taken off once, however often its arguments come, and no event is waited for twice. Torch
 * never uses a count for a second export, so a count's file and place name an export for good.
 *
 * Order of calls in an update: begin -> (prepare) -> end.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_IPC_EXPORTS_H
#define LK_TRANSFER_BACKENDS_IPC_IPC_EXPORTS_H

#include "transfer/backends/ipc/ipc_counter.h"
#include "transfer/backends/ipc/ipc_handles.h"

#define IPC_EXPORTS_MAX 32768u /* that are remembered */

typedef struct {
    char name[IPC_COUNTER_NAME_MAX];
    uint32_t counter;
    bool passed; /* its event, recorded when it was made, has been seen to have happened */
} ipc_known_t;

/* Counts of one file that are to be taken off. */
typedef struct {
    const char *name;
    ipc_counts_t *counts; /* NULL: it is opened for a moment at the end */
    const uint32_t *counters;
    size_t n;
} ipc_release_t;

typedef struct {
    ipc_known_t *known; /* sorted; their counts have been taken off */
    size_t n_known;
    /* of the update at hand; taken when it begins, so that its end can't fail */
    ipc_known_t *exports, *merged; /* merged: what will be known */
    uint32_t *counters;
    ipc_release_t *releases;
    size_t n_exports; /* sorted, each once */
    size_t n_merged, n_releases;
    bool under_way, prepared;
} ipc_exports_t;

/* An update's counts are to be taken off at its end. Checks that the trainer's files are there. On
 * failure there is no update. */
LK_MUST_USE lk_status_t ipc_exports_begin(ipc_exports_t *self, const ipc_handles_t *handles,
                                          lk_error_t *err);
/* Its event has been seen to have happened in an update before. */
bool ipc_exports_passed(const ipc_exports_t *self, const ipc_export_t *export);
/* Does the work of `end` that can be done before, while a device is busy; the first n_passed
 * exports' events have happened, and no more of them will be looked at. */
void ipc_exports_prepare(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed);
/* The update is over: the exports have been read, or won't be. Nothing if none is under way. */
void ipc_exports_end(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed);
/* Forgets all; accepts a zeroed one, and leaves one. No update is under way. */
void ipc_exports_fini(ipc_exports_t *self);

#endif
