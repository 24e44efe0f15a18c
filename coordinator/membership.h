/*
 * membership.h: which group epoch there is, who is in it, and when it is over: M of
 * docs/MEMBERSHIP.md. A pure state machine over the table of members (engine_registry.h); time
 * comes in with each call, what is to be sent goes out through ops.
 *
 *   GATHERING -> CONNECTING -> SERVING; any break leads back to GATHERING and to the next epoch.
 */
#ifndef LK_COORDINATOR_MEMBERSHIP_H
#define LK_COORDINATOR_MEMBERSHIP_H

#include "coordinator/engine_registry.h"

/* An epoch that breaks without a death is a defect that the next one will have, too. */
#define MEMBERSHIP_MAX_BREAKS 8

#define MEMBERSHIP_STATE_TABLE(X) X(GATHERING) X(CONNECTING) X(SERVING)
typedef enum {
#define X(name) MEMBERSHIP_##name,
    MEMBERSHIP_STATE_TABLE(X)
#undef X
} membership_state_t;
const char *membership_state_name(membership_state_t state);

typedef struct membership membership_t;

typedef struct {
    void *ctx;
    /* INIT of the current epoch, with all addresses as they stand. */
    void (*init)(void *ctx, const member_t *to);
    /* To every engine, dead or not, that may still be in `epoch` or an older one. */
    void (*dissolve)(void *ctx, uint64_t epoch, int64_t lost, const char *why);
    /* (optional) A silent member is known to compute: it is at work, not stopped. Asked from half
     * the limit on. */
    bool (*computes)(void *ctx, const member_t *m, uint64_t now_ns);
} membership_ops_t;

/* The registry is borrowed. */
/* first_revision: of INITs; higher than any of the coordinator's earlier lives. */
membership_t *membership_new(engine_registry_t *registry, const membership_ops_t *ops,
                             uint64_t first_revision);
void membership_destroy(membership_t **self_p);

/* The rank does not come back; "removed" of M. removed_why of the rank becomes `why`, also if it
 * was removed before. False: there is no such rank, or it is the last one. */
bool membership_remove(membership_t *self, uint64_t rank, const char *why, uint64_t now_ns);

/* A HELLO. An error is the text of the refusal; it changes nothing. LK_ERR_INVALID: unknown rank,
 * another configuration, an address too long; LK_ERR_STATE: a removed rank, a life that is over
 * (expelled, or replaced by a newer one), or a second process as the same life. */
LK_MUST_USE lk_status_t membership_hello(membership_t *self, const msg_t *msg, uint64_t now_ns,
                                         lk_error_t *err);
/* LK_ERR_STATE when it is not of the current epoch, or nobody was INITed so. */
LK_MUST_USE lk_status_t membership_ready(membership_t *self, const msg_t *msg, uint64_t now_ns,
                                         lk_error_t *err);
/* A report of the weights that a rank holds. */
void membership_note_weights(membership_t *self, uint64_t weight_epoch);
/* A front end has heard of this group epoch. If it is newer than the current one, that one ends:
 * everybody drops what is of an older epoch than the newest one heard of. */
void membership_note_epoch(membership_t *self, uint64_t group_epoch, uint64_t now_ns);
/* Expels engines that were silent for longer than limit_ns, and marks such front ends dead. True if
 * anything changed. */
bool membership_expire(membership_t *self, uint64_t now_ns, uint64_t limit_ns);

membership_state_t membership_state(const membership_t *self);
/* Of the last INIT; 0: none yet. */
uint64_t membership_epoch(const membership_t *self);
/* This coordinator found the current epoch as it is, formed by an earlier life of it. */
bool membership_adopted(const membership_t *self);
/* Newest weight epoch that was reported before the current group epoch was formed. */
/* Of what INIT says now. */
uint64_t membership_revision(const membership_t *self);
uint64_t membership_weight_floor(const membership_t *self);
/* Newest weight epoch that anybody has heard of. */
uint64_t membership_weights(const membership_t *self);
/* Why the last epoch broke; "" if none did. */
const char *membership_cause(const membership_t *self);
/* LK_ERR_INTERNAL: epochs break again and again though nobody dies. */
LK_MUST_USE lk_status_t membership_check(const membership_t *self, lk_error_t *err);

#endif
