/*
 * pause.h: the replicated pause state of a group (protocol.md sections 2 and 6): paused, draining,
 * sole, epoch, and the PAUSE calls that wait for their answer. It is equal on all ranks that have
 * finished the same round, and lives here and nowhere else.
 *
 * A pure table-driven machine. The group calls it from inside decide only, in the agreed order of
 * commands; it says what is to be done locally (pause_effect_t) and which calls are to be answered.
 *
 *   RUNNING --abort, keep--> STOPPED         DRAINING --quiet--> STOPPED
 *   RUNNING --wait---------> DRAINING        any --resume, cancel of the sole pause--> RUNNING
 *
 * The stricter of two pauses wins (abort, then keep, then wait), so a wait on a stopped group
 * changes nothing.
 */
#ifndef LK_ENGINE_CORE_PAUSE_PAUSE_H
#define LK_ENGINE_CORE_PAUSE_PAUSE_H

#include "proto/messages.h"

#define PAUSE_STATE_TABLE(X) X(RUNNING) X(DRAINING) X(STOPPED)
typedef enum {
#define X(name) PAUSE_STATE_##name,
    PAUSE_STATE_TABLE(X)
#undef X
        PAUSE_STATE_COUNT
} pause_state_t;

/* CANCEL_SOLE: of the only pause since the group was last unpaused. CANCEL_OTHER: of any other
 * number: no effect, so that nobody lifts a pause that somebody else was told of. */
#define PAUSE_EVENT_TABLE(X)                                                                       \
    X(ABORT) X(KEEP) X(WAIT) X(RESUME) X(CANCEL_SOLE) X(CANCEL_OTHER) X(QUIET)
typedef enum {
#define X(name) PAUSE_EVENT_##name,
    PAUSE_EVENT_TABLE(X)
#undef X
        PAUSE_EVENT_COUNT
} pause_event_t;

const char *pause_state_name(pause_state_t state);
const char *pause_event_name(pause_event_t event);

/* What a transition asks for. */
typedef enum {
    PAUSE_FINISH_ALL = 1, /* end every local request now (mode abort) */
    PAUSE_LIFT = 2,       /* calls that are not answered yet are superseded */
    PAUSE_NEW_EPOCH = 4,
    PAUSE_IMPOSSIBLE = 8, /* the event can't happen in this state */
} pause_effect_t;

/* One row of the table, for tests. */
typedef struct {
    pause_state_t next;
    unsigned effects; /* pause_effect_t bits */
} pause_transition_t;
pause_transition_t pause_transition(pause_state_t state, pause_event_t event);

/* A command's place in the agreed order. */
typedef struct {
    uint32_t frontend;
    uint64_t generation, number;
} pause_call_t;

typedef struct {
    pause_state_t state;
    uint64_t epoch; /* +1 for every PAUSE, RESUME or effective CANCEL applied */
    bool has_sole;  /* exactly one PAUSE was applied since the group was last unpaused: */
    pause_call_t sole;
    bool clear_due;      /* a call that is not answered yet asked for cleared caches */
    bool cleared;        /* some call since the group was last unpaused did */
    pause_call_t *calls; /* applied and not answered, oldest first; owned */
    size_t n_calls, cap_calls;
} pause_t;

/* A zeroed pause_t is a running group. */
void pause_init(pause_t *self);
void pause_fini(pause_t *self);

/* PAUSE: the effects to carry out. The call waits in `calls`. mode is one of pause_mode_t. */
unsigned pause_apply(pause_t *self, pause_call_t call, pause_mode_t mode, bool clear_cache);
/* RESUME. With PAUSE_LIFT the caller answers `calls` as superseded, then calls
 * pause_clear_calls. */
unsigned pause_resume(pause_t *self);
/* CANCEL of `target` (same front end and generation as the CANCEL). */
unsigned pause_cancel(pause_t *self, pause_call_t target);
/* The voted `quiet` is 1: a drain is over. */
void pause_quiet(pause_t *self);

void pause_clear_calls(pause_t *self);

/* The group epoch is over: calls are forgotten, a drain is lifted, a stop stays. */
void pause_leave(pause_t *self);
/* A new one begins: paused by nobody in particular, or running; pause epoch 0. */
void pause_form(pause_t *self, bool paused, bool cleared);

static inline bool pause_is_paused(const pause_t *self)
{
    return self->state != PAUSE_STATE_RUNNING;
}
static inline bool pause_is_draining(const pause_t *self)
{
    return self->state == PAUSE_STATE_DRAINING;
}
/* Frozen requests are to keep their KV over a change of weights: a stop in force that never asked
 * for cleared caches (decision 6). */
static inline bool pause_keeps_kv(const pause_t *self)
{
    return self->state == PAUSE_STATE_STOPPED && !self->cleared;
}
/* Hash of all of it, for the group's tag. */
uint64_t pause_hash(const pause_t *self, uint64_t seed);

#endif
