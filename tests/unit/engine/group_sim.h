/*
 * group_sim.h: a cluster of group objects in one process, with everything around them replaced by a
 * seeded random scheduler: which message, vote, step or transfer goes on next. No executor and no
 * sockets. It checks safety at every event (see check_* in group_sim.c) and, at the end, liveness.
 */
#ifndef LK_TESTS_GROUP_SIM_H
#define LK_TESTS_GROUP_SIM_H

#include "base/prng.h"
#include "engine_core/dp/group.h"
#include "tests/lib/allreduce_mem.h"

#define SIM_MAX_RANKS     4
#define SIM_MAX_FRONTENDS 3
#define SIM_MAX_CALLS     64
#define SIM_MAX_QUEUE     256
#define SIM_MAX_LOG       65536

typedef struct {
    uint32_t n_ranks, n_frontends, sync_interval;
    bool lockstep, doorbell, shadow;
    unsigned loss;        /* percent of STARTs that are lost */
    bool random_failures; /* transfers fail now and then, on one rank */
    bool cancels;         /* sim_cancel_update is used */
    uint64_t seed;
} sim_config_t;

/* A control call as its front end sees it. */
typedef struct {
    msg_cmd_t cmd;
    unsigned sent, seen, done, cancelled; /* bit per rank */
    lk_status_t status[SIM_MAX_RANKS];
    char text[SIM_MAX_RANKS][256];
    uint64_t lifts[SIM_MAX_RANKS];
    bool acknowledged; /* done on every rank, with LK_OK */
} sim_call_t;

typedef struct {
    uint64_t generation, next;
    size_t n_calls;
    sim_call_t calls[SIM_MAX_CALLS];
} sim_frontend_t;

typedef struct {
    msg_cmd_t items[SIM_MAX_QUEUE];
    size_t head, n;
    bool blocked; /* delivers nothing until unblocked */
} sim_link_t;

typedef struct {
    struct sim *sim;
    uint32_t rank;
    group_t *group;
    allreduce_t allreduce;
    uint32_t waiting;
    uint32_t running[64]; /* steps each one still needs */
    size_t n_running;
    bool in_step;
    uint64_t steps, work_steps;
    size_t log_at; /* collectives entered so far */
    bool carrying, committing;
    bool never_ends; /* what is beside the steps here does not end by itself */
    update_verb_t verb;
    uint64_t carrying_round;
    bool touched, expired;
    uint64_t content, live; /* of the set to be committed, of the one that steps use */
    uint64_t lifts, aborted, cleared, published, failed;
    bool was_paused;
    uint64_t starts[SIM_MAX_QUEUE]; /* invitations under way */
    size_t n_starts;
} sim_rank_t;

typedef struct sim {
    sim_config_t config;
    lk_prng_t prng;
    allreduce_mem_t *hub;
    sim_rank_t ranks[SIM_MAX_RANKS];
    sim_frontend_t frontends[SIM_MAX_FRONTENDS];
    sim_link_t links[SIM_MAX_FRONTENDS][SIM_MAX_RANKS];
    uint64_t log[SIM_MAX_LOG]; /* the one collective sequence */
    size_t log_n;
    uint64_t now_ns, events;
    uint64_t refuse;         /* bit per rank: refuses the next UPDATEs it is asked about */
    bool complete;           /* updates bring the whole model */
    bool cancelled;          /* a transfer may be left waiting for a rank that was cancelled */
    int64_t content_differs; /* rank that ends up with other weights, or -1 */
    msg_group_t cached;      /* the coordinator's newest report */
} sim_t;

void sim_init(sim_t *self, const sim_config_t *config);
void sim_fini(sim_t *self);

/* A call of front end f to the ranks in `mask` (the rest can be sent later with sim_send). Returns
 * its index in calls. */
size_t sim_call(sim_t *self, uint32_t f, uint64_t kind, uint64_t mode_target_or_verb,
                bool clear_cache, unsigned mask);
void sim_send(sim_t *self, uint32_t f, size_t call, unsigned mask);
/* The oldest command under way from f to rank arrives now. */
void sim_deliver(sim_t *self, uint32_t f, uint32_t rank);
#define sim_pause(s, f, mode, clear) sim_call((s), (f), CMD_PAUSE, (mode), (clear), ~0u)
#define sim_resume(s, f)             sim_call((s), (f), CMD_RESUME, 0, false, ~0u)
#define sim_update(s, f, verb)       sim_call((s), (f), CMD_UPDATE, (verb), false, ~0u)
/* A new life of front end f: its links are cut (what is under way may be lost), numbers start anew.
 */
void sim_restart_frontend(sim_t *self, uint32_t f);
void sim_add(sim_t *self, uint32_t rank, uint32_t steps);
void sim_cancel_update(sim_t *self, uint32_t rank, uint32_t f, uint64_t number);

/* Runs one random enabled event; false when there is none. */
bool sim_event(sim_t *self);
/* Runs until nothing is enabled; fails the test after max_events. */
void sim_settle(sim_t *self, uint64_t max_events);

/* The call's status, equal on all ranks; fails the test if a rank did not answer. */
lk_status_t sim_status(const sim_t *self, uint32_t f, size_t call);
bool sim_answered(const sim_t *self, uint32_t f, size_t call);
uint64_t sim_steps(const sim_t *self); /* of all ranks */

#endif
