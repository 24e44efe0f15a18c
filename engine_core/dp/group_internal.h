/* group_internal.h: the inside of group.h, for group.c (events, votes) and group_decide.c. */
#ifndef LK_ENGINE_CORE_DP_GROUP_INTERNAL_H
#define LK_ENGINE_CORE_DP_GROUP_INTERNAL_H

#include "engine_core/dp/command_stream.h"
#include "engine_core/dp/group.h"

/* Where things are in the vector; A front ends. */
enum { VEC_IDLE, VEC_QUIET, VEC_TAG, VEC_NTAG, VEC_PER_FRONTEND };
#define VEC_GEN(g, f)    (VEC_PER_FRONTEND + (f))
#define VEC_NGEN(g, f)   (VEC_PER_FRONTEND + (g)->config.n_frontends + (f))
#define VEC_SEEN(g, f)   (VEC_PER_FRONTEND + 2 * (g)->config.n_frontends + (f))
#define VEC_OK(g, f)     (VEC_PER_FRONTEND + 3 * (g)->config.n_frontends + (f))
#define VEC_EXPIRED(g)   (VEC_PER_FRONTEND + 4 * (g)->config.n_frontends)
#define VEC_CLEAN(g)     (VEC_EXPIRED(g) + 1)
#define VEC_CONTENT(g)   (VEC_EXPIRED(g) + 2)
#define VEC_NCONTENT(g)  (VEC_EXPIRED(g) + 3)
#define VEC_CANCEL(g, f) (VEC_EXPIRED(g) + 4 + (f))
#define VEC_LEN(g)       (VEC_EXPIRED(g) + 4 + (g)->config.n_frontends)

/* ok[f]: VOTE_OK, or VOTE_OK + a negative status. The MIN is VOTE_OK iff every rank agrees, else
 * one failure that all ranks answer with. */
#define VOTE_OK      255u
#define VOTE_PENDING 0u /* what is carried out beside the steps has not ended here */

/* done[f], within the life of f that the group last agreed on. */
typedef struct {
    uint64_t generation, number;
} group_done_t;

/* BESIDE: carried out while steps and rounds go on: an INIT; shadow: an UPDATE or a commit, too. */
typedef enum { UPDATE_NONE, UPDATE_CARRYING, UPDATE_BESIDE, UPDATE_OWED } update_phase_t;

/* The one UPDATE that is carried out or whose outcome is owed. */
typedef struct {
    update_phase_t phase;
    bool committing;         /* FINISH: past its first outcome */
    bool ended, voted_ended; /* BESIDE: here, and as my last vote said; local */
    uint32_t frontend;
    uint64_t generation, number;
    update_verb_t verb;
    char *spec; /* owned */
    size_t spec_len;
    lk_error_t result; /* mine; local. The rest is replicated */
} group_update_t;

typedef struct {
    group_action_t action;
    char *text; /* owned */
} queued_action_t;

/* MEMBER: rounds as ever. OUTSIDE: no rounds. JOINING, LABEL: rounds 0 and 1 of a new epoch. */
typedef enum { GROUP_MEMBER, GROUP_OUTSIDE, GROUP_JOINING, GROUP_LABEL } group_phase_t;

struct group {
    group_config_t config; /* rank and size are the roster's place and n */
    roster_t roster;

    /* replicated */
    uint64_t round, wave;
    bool run;
    bool more; /* commands up to the last MIN are left for the next round */
    uint32_t sc;
    pause_t pause;
    weight_state_t weights;
    group_update_t update;
    group_done_t *done; /* [n_frontends] */
    group_phase_t phase;
    uint64_t weight_floor; /* of this epoch */
    uint32_t label_owner;  /* LABEL: the rank that sends the label */
    bool mixed;            /* the epoch was formed by ranks with different weights, and no complete
                              update has committed since */
    bool behind;           /* so; independent: some ranks wait for one, the others go on */

    /* local */
    bool in_step;      /* LABEL: its weights are those that the others have */
    bool behind_here;  /* this rank is one of those */
    bool fresh;        /* it holds what it loaded when it was started, in a group that existed */
    bool spoiled;      /* a session that did not commit was the last to write its weights */
    bool undecided;    /* it left between its commit and the group's word on it */
    bool held_apart;   /* its weights are not those that `weights` names, but */
    group_held_t held; /* these */
    char left_why[LK_ERROR_TEXT_MAX];
    command_stream_t *streams; /* [n_frontends] */
    bool posted;
    bool posted_idle; /* the vote was opened or joined, not due or owed */
    uint64_t announce_ns;
    bool voted_quiet, voted_expired;
    uint64_t invited; /* 1 + highest round a START invited me to; 0: none */
    bool foreign_start;

    queued_action_t *queue;
    size_t queue_head, queue_n, queue_cap;
    char *taken_text;
};

/* The DP rank at a place, for texts. */
static inline uint32_t group_name(const group_t *self, uint32_t place)
{
    return self->roster.ranks[place];
}
void group_seat(group_t *self, const roster_t *roster);
group_action_t *group_push(group_t *self, group_act_t act, const char *text);
/* No UPDATE is carried out or owed from now on. */
void group_end_update(group_t *self);

/* ---- group_join.c ---- */
size_t group_join_len(const group_t *self);
void group_join_vote(group_t *self, const group_view_t *view, uint64_t *vec);
lk_status_t group_join_decide(group_t *self, const uint64_t *v, lk_error_t *err);
/* A complete set has committed on every rank. */
void group_renewed(group_t *self);

#endif
