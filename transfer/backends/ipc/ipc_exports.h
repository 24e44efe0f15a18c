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

/* That are remembered, and that an update may name. Torch has one for 10000 exports of a process;
 * the oldest is forgotten when there are too many. */
#define IPC_FILES_MAX 64u

typedef struct {
    char name[IPC_COUNTER_NAME_MAX];
    uint64_t known[(IPC_COUNTERS + 63) / 64];  /* a bit per place: its count has been taken off */
    uint64_t passed[(IPC_COUNTERS + 63) / 64]; /* its event, recorded when it was made, has been
                                                  seen to have happened */
    bool used;                                 /* by the update at hand */
    ipc_counts_t *counts;                      /* open; NULL: not, or not yet */
} ipc_file_t;

typedef struct {
    ipc_file_t *files[IPC_FILES_MAX]; /* the oldest first */
    size_t n_files;
    /* of the update at hand; taken when it begins, so that its end can't fail */
    uint8_t *file_of; /* of each export */
    bool under_way;
} ipc_exports_t;

/* An update's counts are to be taken off at its end. Checks that the trainer's files are there, and
 * not too many. On failure there is no update. */
LK_MUST_USE lk_status_t ipc_exports_begin(ipc_exports_t *self, const ipc_handles_t *handles,
                                          lk_error_t *err);
/* The event of export i of the update at hand has been seen to have happened in one before. */
bool ipc_exports_passed(const ipc_exports_t *self, const ipc_handles_t *handles, size_t i);
/* Does the work of `end` that can be done before, while a device is busy. */
void ipc_exports_prepare(ipc_exports_t *self, const ipc_handles_t *handles);
/* The update is over: the exports have been read, or won't be; the first n_passed exports' events
 * have happened. Nothing if none is under way. */
void ipc_exports_end(ipc_exports_t *self, const ipc_handles_t *handles, size_t n_passed);
/* Forgets all; accepts a zeroed one, and leaves one. No update is under way. */
void ipc_exports_fini(ipc_exports_t *self);

#endif
