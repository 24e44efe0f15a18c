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

struct group {
    group_config_t config;

    /* replicated */
    uint64_t round, wave;
    bool run;
    bool more; /* commands up to the last MIN are left for the next round */
    uint32_t sc;
    pause_t pause;
    weight_state_t weights;
    group_update_t update;
    group_done_t *done; /* [n_frontends] */

    /* local */
    command_stream_t *streams; /* [n_frontends] */
    bool posted;
    bool posted_idle; /* the vote was opened or joined, not due or owed */
    uint64_t announce_ns;
    bool voted_quiet, voted_expired;
    uint64_t invited; /* 1 + highest round a START invited me to; 0: none */
    bool foreign_start;
    bool alone; /* group_lose_peers */

    queued_action_t *queue;
    size_t queue_head, queue_n, queue_cap;
    char *taken_text;
};

group_action_t *group_push(group_t *self, group_act_t act, const char *text);
/* No UPDATE is carried out or owed from now on. */
void group_end_update(group_t *self);

#endif
