/*
 * nccl_link.h: what both ends of an NCCL transfer share: bringing a communicator up (after an older
 * one has ended; with vLLM's warm-up all-reduce of one float32), its two streams, a ring of staging
 * buffers, and its end. Nothing blocks, but nccl_link_abort for as long as a device still writes.
 *
 * Extra device memory: the ring, n_slots * slot_bytes, and 8 bytes. Everything is allocated before
 * the first update; nccl_link_stage allocates again only when an update needs larger slots than any
 * before it.
 */
#ifndef LK_TRANSFER_NCCL_LINK_H
#define LK_TRANSFER_NCCL_LINK_H

#include "base/env.h"
#include "transfer/backends/nccl/nccl_comm.h"

#define NCCL_SLOTS_MAX 8u
#define NCCL_WINDOW    32u /* buckets under way at once */

typedef enum {
    NCCL_LINK_DOWN,
    NCCL_LINK_OLD_ENDS, /* waits until aborted communicators have ended */
    NCCL_LINK_FORMS,
    NCCL_LINK_WARMS_UP,
    NCCL_LINK_UP
} nccl_link_phase_t;

/* When an update got how far, as seen by the host; for the log. */
typedef struct {
    uint64_t begun_ns, called_ns; /* the first broadcast is enqueued */
    uint64_t first_ns, wire_ns;   /* the first, the last broadcast has run */
    uint64_t done_ns;             /* all behind it, too */
    size_t n_wire;                /* broadcasts that have */
} nccl_times_t;

typedef struct {
    const nccl_comm_ops_t *ops;
    const nccl_library_t *library;
    device_t *device; /* NULL: not opened */
    const lk_env_t *env;
    uint64_t no_progress_ns, progress_ns;
    int abort_wait_ms;

    nccl_link_phase_t phase;
    nccl_comm_t *comm;
    uint8_t id[NCCL_ID_BYTES];
    uint32_t world_size, rank;
    bool called; /* the warm-up is enqueued, or on its way */
    float *warm; /* device: two */

    device_stream_t *wire;  /* what NCCL does */
    device_stream_t *local; /* packing, unpacking, digests */
    /* per bucket under way: the wire is done with it; the local stream is */
    device_event_t *wire_done[NCCL_WINDOW], *local_done[NCCL_WINDOW];

    uint32_t n_slots;
    uint64_t slot_bytes;
    void *slots[NCCL_SLOTS_MAX];
    device_event_t *slot_free[NCCL_SLOTS_MAX]; /* its last user is through */
} nccl_link_t;

/* Loads the library and makes streams and events; again: nothing, or for another library. A zeroed
 * link is not opened. On failure it is as before. */
LK_MUST_USE lk_status_t nccl_link_open(nccl_link_t *self, const nccl_comm_ops_t *ops,
                                       const char *library, device_t *device, const lk_env_t *env,
                                       uint64_t no_progress_ns, lk_error_t *err);
/* Ends everything; accepts a zeroed link. Waits as abort does. */
void nccl_link_fini(nccl_link_t *self);

/* Starts to form a communicator; the link is down. */
void nccl_link_start(nccl_link_t *self, const uint8_t id[NCCL_ID_BYTES], uint32_t world_size,
                     uint32_t rank);
/* INPROGRESS; OK: it is up; or an error, and it is down again. */
LK_MUST_USE lk_status_t nccl_link_step(nccl_link_t *self, lk_error_t *err);
/* Down, and nothing of this link writes to device memory any more (after abort_wait_ms, 5 s, it
 * gives up waiting, and says so in the log). Idempotent. */
void nccl_link_abort(nccl_link_t *self);

/* At least `slots` buffers (at most NCCL_SLOTS_MAX are had, and one at least) of `bytes` each.
 * Nothing may be under way. */
LK_MUST_USE lk_status_t nccl_link_stage(nccl_link_t *self, uint32_t slots, uint64_t bytes,
                                        lk_error_t *err);

/* Takes the times of buckets [times->n_wire, next), of which [0, done) are through. */
LK_MUST_USE lk_status_t nccl_link_clock(nccl_link_t *self, nccl_times_t *times, size_t done,
                                        size_t next, lk_error_t *err);
/* The update is done: takes that time, and writes one line to the log, at its level DEBUG. */
void nccl_link_log_times(const nccl_link_t *self, nccl_times_t *times, const char *what,
                         uint64_t bytes);

/* Something moved. */
void nccl_link_touch(nccl_link_t *self);
/* True if nothing has for too long; *silent_s: for how long. */
bool nccl_link_silent(const nccl_link_t *self, double *silent_s);

#endif
