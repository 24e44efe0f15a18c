/*
 * engine_core.h: one DP rank: scheduler, executor, group and update session driven by one loop body
 * (engine_core_step). No socket, clock or thread of its own: messages come in through
 * engine_core_on_message and go out through host ops, time through env, collectives through the
 * all-reduce and the executor's expert exchange. engine_io.h puts sockets around it; tests put
 * several into one process.
 *
 * Everything long is posted and tested, so messages are taken in while a step, a vote or a weight
 * transfer is under way. Only a round's result starts, stops or pauses anything that concerns the
 * group (dp/group.h); ADD and ABORT touch the local scheduler only.
 *
 * A dead peer ends the group epoch, not the engine (docs/MEMBERSHIP.md): engine_core_left says why
 * until engine_core_form begins the next one. An error of its own ends the engine: every request
 * fails with a retryable error, the front ends are told (ENGINE_DEAD), and engine_core_failed says
 * why.
 */
#ifndef LK_ENGINE_CORE_ENGINE_CORE_H
#define LK_ENGINE_CORE_ENGINE_CORE_H

#include "engine_core/dp/group.h"
#include "engine_core/sched/scheduler.h"

typedef struct engine_core engine_core_t;

/* Where messages go; msg is borrowed for the call. The host fills the envelope. Never blocks. */
typedef struct {
    void *ctx;
    void (*to_frontend)(void *ctx, uint32_t frontend, const msg_t *msg);
    void (*to_coordinator)(void *ctx, const msg_t *msg);
    /* (optional) Peers that the step under way waits for, "1, 3"; "" if none or unknown. */
    void (*step_waits_for)(void *ctx, char *out, size_t room);
    /* (optional) The rank whose death is behind a collective's LK_ERR_PEER; -1 if unknown. */
    int64_t (*lost_rank)(void *ctx);
    /* (optional) Something long begins or is over: who watches this process is to be patient. */
    void (*patience)(void *ctx, bool begins);
} engine_host_t;

typedef struct {
    uint32_t rank, dp_size, n_frontends; /* rank, dp_size: of the cluster, whoever is a member */
    roster_t roster;                     /* of group_epoch; n 0: every rank */
    uint64_t group_epoch;
    bool shadow;           /* --weight-swap shadow: the executor has two sets of weights */
    bool rejoin;           /* it joins a group that existed: group_epoch begins with join rounds */
    uint64_t weight_floor; /* then: newest weight epoch that any rank ever reported */
    bool lockstep;         /* experts are spread over the ranks: they step together (dp/group.h) */
    uint32_t sync_interval;
    bool reject_while_paused; /* --paused-admission reject */
    uint64_t heartbeat_ns, dead_after_ns, control_timeout_ns, transfer_timeout_ns;
    scheduler_config_t scheduler;
    uint32_t num_blocks, block_size;
    bool enable_prefix_caching;
    const model_config_t *model; /* borrowed, as all below */
    executor_t *executor;
    allreduce_t allreduce;
    const char *allowed_weight_dirs; /* see wte_context_t */
    const char *nccl_library;        /* see wte_context_t */
    const wte_ops_t *wte;            /* NULL: no --weight-transfer-config */
    const lk_env_t *env;
    engine_host_t host;
} engine_core_config_t;

LK_MUST_USE lk_status_t engine_core_new(const engine_core_config_t *config, engine_core_t **out,
                                        lk_error_t *err);
/* Says nothing to anybody. */
void engine_core_destroy(engine_core_t **self_p);

/* A message of front end `frontend` (its own index is checked against it), or of the coordinator
 * (ENGINE_FROM_COORDINATOR). What makes no sense is refused or dropped, never trusted. */
#define ENGINE_FROM_COORDINATOR UINT32_MAX
void engine_core_on_message(engine_core_t *self, uint32_t frontend, const msg_t *msg);

/* One iteration. True if it moved something: call again soon, without waiting. */
bool engine_core_step(engine_core_t *self);
/* Something is posted whose progress needs engine_core_step and shows on no message socket: wait on
 * the mesh's and the transfer's descriptors too. */
bool engine_core_waits_for_peers(const engine_core_t *self);
/* When to call step next if nothing arrives (monotonic). */
uint64_t engine_core_deadline(const engine_core_t *self);
size_t engine_core_pollfds(const engine_core_t *self, struct pollfd *fds, size_t room);

/* NULL while alive. */
const lk_error_t *engine_core_failed(const engine_core_t *self);

/* ---- group epochs (docs/MEMBERSHIP.md) ---- */

/* The group epoch is over, as why says; lost: the rank to blame, -1 if unknown. Ends what is under
 * way, tells the front ends (LEFT). In lockstep every request ends with a retryable error;
 * independent ranks go on with theirs if they can. No effect outside a group. */
void engine_core_leave(engine_core_t *self, int64_t lost, const char *why);
/* NULL in a group; else why the last one is over: left by engine_core_leave, or because a
 * collective failed. */
const char *engine_core_left(const engine_core_t *self);
/* A new epoch begins, with the same front ends and all-reduce (which starts from round 0), and
 * these members (NULL: the same). A group that is not left yet is left. */
void engine_core_form(engine_core_t *self, uint64_t group_epoch, uint64_t weight_floor,
                      const roster_t *roster);
/* The executor is to be opened anew, for another share of the experts: nothing uses the old one, or
 * its weights, from here on until engine_core_reloaded; only destroy and leave may come between.
 * Outside a group, in lockstep. Who watches this process is told to be patient. */
void engine_core_reload(engine_core_t *self, const roster_t *roster);
/* With the new one, which holds what a process that starts would. LK_ERR_NO_MEMORY. */
LK_MUST_USE lk_status_t engine_core_reloaded(engine_core_t *self, executor_t *executor,
                                             lk_error_t *err);
uint64_t engine_core_group_epoch(const engine_core_t *self);
/* A front end's old life is over: its requests and outputs are dropped. */
void engine_core_drop_frontend(engine_core_t *self, uint32_t frontend);

/* Shutdown (decision 18): new requests are refused from now on. */
void engine_core_begin_drain(engine_core_t *self);
/* Nothing is left to do here, and no peer needs this rank's steps. */
bool engine_core_drained(const engine_core_t *self);
/* Ends every request with its partial tokens, and says so. */
void engine_core_abort_all(engine_core_t *self);

/* Forward passes so far; dummy ones alone. */
uint64_t engine_core_steps(const engine_core_t *self);
uint64_t engine_core_dummy_steps(const engine_core_t *self);
const group_t *engine_core_group(const engine_core_t *self);
const scheduler_t *engine_core_scheduler(const engine_core_t *self);
const kv_cache_t *engine_core_kv(const engine_core_t *self);

#endif
