/*
 * group.h: one rank's view of its group: rounds, waves, commands and gates (protocol.md sections 2
 * to 9 and 14; the base variant, LAG = 0). A pure object: what arrives goes in, the next thing to
 * do and an ordered list of actions come out. No socket, clock, thread or executor inside.
 *
 * A round is an all-reduce (MIN) of a small vector. group_next says when to vote; group_vote
 * freezes this rank's contribution; group_decide applies the result. decide uses the result and
 * replicated state only, so all ranks take the same steps, pauses and transfers at the same point.
 *
 * Two modes.
 * - lockstep (experts spread over the ranks, size > 1): every rank runs the same sequence of ROUND,
 *   STEP and UPDATE. `run` says that the group steps until the next round, due after K steps; idle
 *   ranks run dummy steps.
 * - independent (dense models, or one rank): ranks step as they like while `run` is 1, which means
 *   "may step". Rounds carry commands only, are opened by news also while others step, and hold a
 *   rank at its own step boundary while its vote is out. No waves, no work rule, no dummy steps.
 *
 * The vector. Indexes 0..3+4A are those of protocol.md section 4; these follow:
 * - 4+4A expired: 1 if a session is open here and saw no call for the transfer timeout. When the
 *   MIN is 1 in a round that brings the session nothing, every rank's timer ran out and all close
 *   it together, as ABORT would. A rank whose timer runs out has news, once; the last one's round
 *   is the one that closes.
 * - 5+4A clean: 1 if the weights here were not touched by a session that did not commit. A session
 *   that ends without a commit makes the group dirty iff the MIN is 0.
 * - 6+4A content: hash of the weights just committed here, else 0; 7+4A: its complement. FINISH is
 *   agreed only if all ranks hold the same weights.
 * - 8+4A+f cancel[f]: lowest number of a PAUSE of f that waits here together with its CANCEL, or
 *   whose deadline was over at the vote; ~0 if there is none. The MIN is a PAUSE whose caller was
 *   told that it was rolled back. (The ranks and front ends of one host share a clock.)
 *
 * Four additions to section 6, all functions of replicated state:
 * - A round enters at most one UPDATE; commands after it in the agreed order wait for the round in
 *   which its outcome is agreed. `more` says that such commands are left, and makes the next round
 *   due at once, as `owed` does.
 * - An INIT, which may wait long for a trainer, is carried out beside the steps. Rounds go on, with
 *   ok[f] 0 where it has not ended; the first round in which it has ended everywhere is that of its
 *   outcome. Other UPDATEs wait for it, PAUSE and RESUME do not, not even in its own stream. To end
 *   it is news.
 * - FINISH has two outcome rounds. Before the first, each rank says whether it may commit (a dirty
 *   rank needs a complete set); a refusal changes nothing and leaves the session open. Between them
 *   each rank commits. The second publishes, or leaves all ranks dirty. (Shadow: see below.)
 * - A rank that drains while nothing steps (a gate is closed, or the mode is independent) has news
 *   when its last started request ends.
 *
 * Shadow swap (config.shadow, equal on all ranks): new weights are received into a second set
 * beside the steps; the live set is written by nobody. What differs from in place:
 * - `session` (open from a START's outcome to FINISH, ABORT, expiry or a new INIT) is replicated as
 *   ever and decides the order of calls, but is no gate: steps and rounds go on while it is set.
 * - An UPDATE, and a FINISH's second half, are carried out beside the steps as an INIT is: ok[f] is
 *   0 where it has not ended, the first round in which it has ended everywhere is that of its
 *   outcome, to end it is news, other UPDATEs wait and PAUSE and RESUME do not. START, and FINISH's
 *   first half, end at once where they are entered, and their outcome round comes before the next
 *   step, as in place.
 * - FINISH's first outcome: may every rank commit? A refusal changes nothing and leaves the session
 *   open. Then UPDATE_COMMIT means "complete the incoming set and what kernels keep beside it"
 *   (tensors that did not come are copied from the live set); no step sees any of it. content is
 *   voted by a rank that has ended this, and is that of the incoming set. Second outcome: all ranks
 *   succeeded and all contents are equal: PUBLISH, at which every rank flips (pointers only, it
 *   can't fail) in this round: between the same two steps of a lockstep group, and at its own step
 *   boundary in an independent one, whose vote holds it there. The epoch grows by 1.
 * - Whatever fails (a transfer or the completion on any rank, different contents, a cancel, ABORT,
 *   expiry, a new INIT) drops the incoming set and closes the session, except that a refused call
 *   or first half leaves it open. The live weights, epoch and label stay, dirty is never set, no
 *   request ends. A failed UPDATE also needs a new INIT, as in place.
 * - An UPDATE, and a FINISH's second half, can be cancelled until they have ended here; that rank
 *   then votes the failure. A vote that says "ended well" is never taken back.
 * - At PUBLISH requests recompute their KV unless a pause keeps it (keep without clear_cache). As
 * in place; but here requests that run are meant, too.
 * - When a peer of an independent group dies, what is beside the steps is forgotten and the rank
 *   goes on by itself; unless a vote that says it ended well is out, whose result others may have.
 *
 * A PAUSE(abort) whose CANCEL some rank held when it voted, or whose deadline was over then, ends
 * no request on any rank, since its caller was told that it was rolled back; nor does it on a rank
 * that has received the CANCEL since, or that decides after the deadline. A vote names only the
 * lowest such PAUSE of a front end: later aborting ones wait for the next round, as `more`.
 *
 * ok[f] is not 1 or 0 but 255, or 255 + the status of a refusal or failure (negative): so the MIN
 * is one status that all ranks answer with. Only a rank that refused or failed itself has a text;
 * one that follows has none. The order of calls (LK_ERR_STATE) is decided from replicated state,
 * with the same text on all ranks.
 */
#ifndef LK_ENGINE_CORE_DP_GROUP_H
#define LK_ENGINE_CORE_DP_GROUP_H

#include "engine_core/dp/weight_state.h"
#include "engine_core/pause/pause.h"
#include "engine_core/dp/allreduce.h"
#include "engine_core/dp/roster.h"

#define GROUP_MAX_FRONTENDS ((ALLREDUCE_MAX_LEN - 8) / 5)
#define GROUP_EPOCH_SKIP                                                                           \
    1000 /* weight epochs left out when the newest weights are lost: more than                     \
          * commits that the others could not have heard of */
#define GROUP_ANNOUNCE_NS (100 * LK_MS_NS)
#define GROUP_MAX_CALLS   4096 /* PAUSE calls that wait for an answer; more are refused */

typedef struct group group_t;

typedef struct {
    /* This rank's place among the members of the epoch, and their number (roster.h). */
    uint32_t rank, size, n_frontends;
    const roster_t *roster; /* who they are; NULL: ranks 0 to size - 1. Borrowed for group_new */
    uint64_t group_epoch;
    uint32_t sync_interval; /* K: steps between rounds of a running group; lockstep only */
    bool lockstep;
    bool shadow; /* --weight-swap shadow */
    bool
        doorbell; /* peers learn of my vote from the all-reduce itself; false: ANNOUNCE and START */
    /* The local verdict on a new UPDATE: complete validation without side effects. The verb is one
     * of the table's. */
    lk_status_t (*check)(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                         lk_error_t *err);
    void *check_ctx;
} group_config_t;

/* What the group looks at outside itself, as it stands at the call. */
typedef struct {
    bool work;         /* I have an unfinished request: waiting, running or frozen */
    bool quiet;        /* no request that was admitted is unfinished */
    bool clean;        /* no session that did not commit touched my weights; shadow: always */
    bool expired;      /* the open session saw no call for the transfer timeout */
    bool peer_waiting; /* a peer has posted group_round() (the doorbell) */
    uint64_t content;  /* hash of the weights committed, shadow: to be committed; looked at with a
                          FINISH's second outcome only */
    uint64_t held_content; /* hash of my live weights; looked at in a join round only */
} group_view_t;

typedef enum {
    GROUP_WAIT, /* nothing, until something arrives */
    GROUP_VOTE, /* group_vote, and post it */
    GROUP_STEP, /* lockstep: a step, with or without work. Independent: a step if there is work */
} group_next_t;

/* name, meaning (fields used) */
#define GROUP_ACT_TABLE(X)                                                                         \
    X(SEEN)         /* SEEN to the front end (frontend, generation, number) */                     \
    X(REPEAT)       /* the command came again: send its DONE again if it was answered */           \
    X(DONE)         /* answer (frontend, generation, number, kind, verb, status, text) */          \
    X(FINISH_ALL)   /* end every local request with "abort" */                                     \
    X(CLEAR_CACHE)  /* forget cached prefixes; frozen requests recompute their KV */               \
    X(UPDATE_ENTER) /* carry out (verb, spec), then group_update_done. INIT: beside the steps. */  \
    /* Shadow: UPDATE, too. FINISH: only say whether this rank may commit */                       \
    X(UPDATE_COMMIT) /* commit the finished session; shadow: prepare that, beside the steps. */    \
    /* Then group_update_done */                                                                   \
    X(UPDATE_OUTCOME) /* the group's verdict on what was carried out (verb, ok) */                 \
    X(SESSION_CLOSE)  /* abort the local session (text says why) */                                \
    X(PUBLISH)        /* new weights are in force: group_weights has epoch and label (keep_kv). */ \
    /* Shadow: flip to them first; this can't fail */                                              \
    X(RELABEL)  /* the label changed, the weights did not */                                       \
    X(DIRTY)    /* end every local request with an error (text) */                                 \
    X(REPORT)   /* rank 0: GROUP to the coordinator */                                             \
    X(ANNOUNCE) /* no doorbell: ANNOUNCE(group_round()) to the coordinator */

typedef enum {
#define X(name) GROUP_ACT_##name,
    GROUP_ACT_TABLE(X)
#undef X
} group_act_t;

/* Borrowed until the next group_next_action. */
typedef struct {
    group_act_t act;
    uint32_t frontend;
    uint64_t generation, number;
    uint64_t kind; /* cmd_kind_t of the answered command */
    uint64_t verb; /* update_verb_t, when kind is CMD_UPDATE */
    bool ok, keep_kv;
    lk_status_t status;
    const char *text; /* never NULL */
    const char *spec;
    size_t spec_len;
} group_action_t;

group_t *group_new(const group_config_t *config); /* NULL when out of memory */
void group_destroy(group_t **self_p);

/* The oldest action not taken yet. Actions are to be carried out in order, before anything else is
 * asked of the group. */
bool group_next_action(group_t *self, group_action_t *out);

/* ---- events that may come at any time ---- */
/* A command from outside, already checked for its group epoch; cmd->client is below n_frontends. */
void group_on_cmd(group_t *self, const msg_cmd_t *cmd);
/* A newer life of a front end announced itself without a command. */
void group_on_generation(group_t *self, uint32_t frontend, uint64_t generation);
void group_on_start(group_t *self, bool has_round, uint64_t round);
/* Makes an outstanding UPDATE fail: votes 0 if it is not carried out yet. True if it is being
 * carried out right now: the caller aborts the transfer. number 0: whichever, of any front end, but
 * not another caller's ABORT, which asks for the same, nor SET_VERSION, which is of no session. */
bool group_on_cancel_update(group_t *self, uint32_t frontend, uint64_t generation, uint64_t number,
                            const char *why);
/* Repeats ANNOUNCE while a vote on an idle group is out. */
void group_on_time(group_t *self, uint64_t now_ns);

/* ---- the collective sequence; only between steps ---- */
group_next_t group_next(const group_t *self, const group_view_t *view);
size_t group_vector_len(const group_t *self);
/* After GROUP_VOTE: freezes my contribution and writes it. */
void group_vote(group_t *self, const group_view_t *view, uint64_t now_ns, uint64_t *vec);
/* The result of the round. LK_ERR_INTERNAL: the ranks' states differ; the process must end. */
LK_MUST_USE lk_status_t group_decide(group_t *self, const uint64_t *v, uint64_t now_ns,
                                     lk_error_t *err);
/* A STEP of a lockstep group was taken (counts towards K). */
void group_step_done(group_t *self);
/* What UPDATE_ENTER or UPDATE_COMMIT asked for has ended here. */
void group_update_done(group_t *self, const lk_error_t *result);

/* ---- group epochs (docs/MEMBERSHIP.md): at any time ---- */

/* The epoch is over for this rank: a vote that is out, an update and the commands are forgotten.
 * clean: no session that did not commit touched the weights. An independent rank goes on stepping
 * unless a pause is in force or its weights are unusable. The caller has aborted vote, step and
 * transfer; in lockstep it ends every request. No effect outside. */
void group_leave(group_t *self, bool clean, const char *why);
/* A new epoch: the join rounds are next. fresh: the rank was just started. weight_floor: newest
 * weight epoch that any rank ever reported; equal on all ranks. roster: its members; NULL: as
 * before. */
void group_form(group_t *self, uint64_t group_epoch, uint64_t weight_floor, const roster_t *roster,
                bool fresh);
/* Outside a group: from now on this rank holds what a process that was just started holds. */
void group_reload(group_t *self);
/* Neither outside nor in the join rounds. */
bool group_is_member(const group_t *self);
/* Why the last epoch is over; NULL for a member. */
const char *group_left_why(const group_t *self);
/* Why no request may run here until a complete update, or NULL. */
const char *group_closed_why(const group_t *self);
/* Only a session that brings every tensor may commit. */
bool group_needs_complete(const group_t *self);
/* GATE_* as they hold for this rank. */
unsigned group_gates(const group_t *self);
/* The weights that this rank holds, which may not be those that the group is labelled with. */
typedef struct {
    uint64_t epoch;
    char version[WEIGHT_LABEL_MAX + 1];
} group_held_t;
const group_held_t *group_held(group_t *self);

/* ---- state, for reports and tests ---- */
uint64_t group_round(const group_t *self);
uint64_t group_wave(const group_t *self);
bool group_run(const group_t *self);
bool group_posted(const group_t *self);
/* My vote is out for a round that an update's outcome needs: peers may still be receiving. */
bool group_owes(const group_t *self);
/* A PAUSE was seen and is not applied yet. */
bool group_paused_local(const group_t *self);
const pause_t *group_pause(const group_t *self);
const weight_state_t *group_weights(const group_t *self);
/* An UPDATE is being carried out, or its outcome is not agreed. */
bool group_updating(const group_t *self);
uint64_t group_hash(const group_t *self);

#endif
