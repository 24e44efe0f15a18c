/*
 * enrol.h: how one rank gets into a group epoch and out of it: E of docs/MEMBERSHIP.md. A pure
 * table-driven machine: events go in, a set of things to do comes out, to be done in the order of
 * their bits.
 *
 *   OUTSIDE -> CALLING (said HELLO) -> CONNECTING (has INIT, the mesh connects) -> MEMBER
 *
 * Whatever ends an epoch leads back to CALLING; only a refusal leads to ENDED.
 */
#ifndef LK_ENGINE_CORE_DP_ENROL_H
#define LK_ENGINE_CORE_DP_ENROL_H

#include <stdbool.h>
#include <stdint.h>

#define ENROL_REPEAT_NS 1000000000ull /* between two HELLOs */

#define ENROL_STATE_TABLE(X) X(OUTSIDE) X(CALLING) X(CONNECTING) X(MEMBER) X(ENDED)
typedef enum {
#define X(name) ENROL_##name,
    ENROL_STATE_TABLE(X)
#undef X
        ENROL_N_STATES
} enrol_state_t;

/* LOADED: the weights are there. INIT_NEW: of an epoch that was not left yet; INIT_SAME: of the one
 * this rank is in or enters, with other addresses; INIT_AGAIN: word for word. CONNECTED: the mesh
 * of that epoch. LOST: the epoch is over. REFUSED by the coordinator. ROLLCALL: a new life of the
 * coordinator. TICK: ENROL_REPEAT_NS have passed. */
#define ENROL_EVENT_TABLE(X)                                                                       \
    X(LOADED)                                                                                      \
    X(INIT_NEW) X(INIT_SAME) X(INIT_AGAIN) X(CONNECTED) X(LOST) X(REFUSED) X(ROLLCALL) X(TICK)
typedef enum {
#define X(name) ENROL_ON_##name,
    ENROL_EVENT_TABLE(X)
#undef X
        ENROL_N_EVENTS
} enrol_event_t;

const char *enrol_state_name(enrol_state_t state);
const char *enrol_event_name(enrol_event_t event);

typedef enum {
    ENROL_LEAVE = 1,   /* engine_core_leave, mesh_leave: a fresh mesh address */
    ENROL_HELLO = 2,   /* with enrol's left, member_of and revision */
    ENROL_CONNECT = 4, /* the mesh of enrol's epoch */
    ENROL_RELINK = 8,  /* take over changed addresses of front ends */
    ENROL_FORM = 16,   /* engine_core_form */
    ENROL_READY = 32,  /* READY of enrol's epoch */
    ENROL_HERE = 64,   /* to every front end */
    ENROL_END = 128,   /* the process ends itself, by name */
    ENROL_IMPOSSIBLE = 256
} enrol_action_t;

typedef struct {
    enrol_state_t next;
    unsigned actions;
} enrol_transition_t;

/* One row of the table, for tests. */
enrol_transition_t enrol_transition(enrol_state_t state, enrol_event_t event);

typedef struct {
    enrol_state_t state;
    uint64_t epoch;    /* CONNECTING, MEMBER: of the group; else the newest it was told of */
    uint64_t revision; /* of the newest INIT that it followed */
    uint64_t left;     /* the last epoch that was left, or not entered; 0: none */
    uint64_t said_ns;
} enrol_t;

/* Each returns enrol_action_t bits. A zeroed enrol_t is OUTSIDE. */
unsigned enrol_on(enrol_t *self, enrol_event_t event, uint64_t now_ns);
/* mine: it was made for this attempt, that is, names the mesh address of the last HELLO. Whoever
 * entered an epoch that was made for an earlier one would break it with the HELLO that is under
 * way, and could be one attempt behind for ever. */
unsigned enrol_on_init(enrol_t *self, uint64_t epoch, uint64_t revision, bool mine,
                       uint64_t now_ns);
/* DISSOLVE of the coordinator. */
unsigned enrol_on_dissolve(enrol_t *self, uint64_t epoch, uint64_t now_ns);
unsigned enrol_on_time(enrol_t *self, uint64_t now_ns);

/* The epoch it is in; 0: none. */
uint64_t enrol_member_of(const enrol_t *self);

#endif
