/*
 * engine_client.h: this front end's side of the protocol with the engines and the coordinator.
 * Pure: no socket, clock or thread; messages go out through ops and come in through
 * engine_client_on_msg, deadlines are looked at in engine_client_poll.
 *
 * Requests: a handle each, exactly one terminal output each.
 * Control calls (protocol.md section 10): a numbered stream of commands to every rank. This object
 * keeps no pause state: what is paused is what the ranks answer.
 *
 * Callbacks may call any function here but engine_client_destroy. They may come before the function
 * that was given them returns (an engine is dead).
 */
#ifndef LK_API_FRONTEND_ENGINE_CLIENT_H
#define LK_API_FRONTEND_ENGINE_CLIENT_H

#include "base/env.h"
#include "proto/messages.h"
#include "transfer/update_session.h"

typedef struct engine_client engine_client_t;

typedef struct {
    void *ctx;
    /* Queues one message; borrows it for the call. An error means that it was not queued (the
     * engine has not said ENGINE_HERE, or its queue is full). */
    lk_status_t (*send_engine)(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err);
    lk_status_t (*send_coordinator)(void *ctx, const msg_t *msg, lk_error_t *err);
    const lk_env_t *env;
} engine_client_ops_t;

typedef struct {
    uint32_t client, n_clients; /* front end index, and how many there are */
    uint32_t n_ranks;
    bool shadow;                  /* --weight-swap shadow: see update_verb_beside */
    bool expert_parallel;         /* until STATS says: a dead rank ends the requests of all */
    uint64_t generation;          /* higher than any earlier life's */
    uint64_t control_timeout_ns;  /* default deadline of control calls and utilities */
    uint64_t transfer_timeout_ns; /* backstop of INIT and UPDATE, whose real deadline (no progress)
                                     is the engines' */
    uint32_t max_requests;        /* open at once */
} engine_client_config_t;

engine_client_t *engine_client_new(const engine_client_config_t *config,
                                   const engine_client_ops_t *ops);
/* Calls no callback. */
void engine_client_destroy(engine_client_t **self_p);

/* A message from an engine or the coordinator. Senders are not trusted: a rank or a number out of
 * range is dropped and counted. */
void engine_client_on_msg(engine_client_t *self, const msg_t *msg);
/* Deadlines and resending; at least every 100 ms. */
void engine_client_poll(engine_client_t *self);

/* ---- requests ---- */

typedef struct {
    const char *id; /* for logs */
    uint32_t choice;
    const uint32_t *prompt;
    size_t n_prompt;
    msg_sampling_t sampling;
    int64_t priority;
    const char *cache_salt; /* NULL: none */
    int64_t rank;           /* < 0: by session or load */
    uint64_t session;       /* router_session of its session; 0: none */
} engine_request_t;

/* One message's share of the request. finish_reason is not 0 in the last one; one that this object
 * makes itself (a dead engine) is FINISH_ERROR without tokens. Borrowed for the call. */
typedef void (*engine_output_fn)(void *ctx, uint64_t handle, const msg_output_t *out);

/* Everything in *request is copied or sent. LK_ERR_UNAVAILABLE: dead or unreachable engine, or too
 * many requests; LK_ERR_INVALID: no such rank. fn is never called after an error. */
LK_MUST_USE lk_status_t engine_client_add(engine_client_t *self, const engine_request_t *request,
                                          engine_output_fn fn, void *ctx, uint64_t *handle,
                                          lk_error_t *err);
/* Forgets the request and tells its engine; no further callback. False: it has ended already. */
bool engine_client_abort(engine_client_t *self, uint64_t handle);
size_t engine_client_num_requests(const engine_client_t *self);

/* ---- control calls and utilities ---- */

typedef struct {
    uint32_t rank;
    bool answered;
    lk_status_t status;
    const char *text; /* never NULL */
    const char *body; /* JSON or ""; never NULL */
} engine_answer_t;

typedef struct {
    lk_status_t status; /* of the whole call */
    const char *text;   /* never NULL; "" when LK_OK */
    size_t n_answers;
    const engine_answer_t *answers; /* one of each member, by rank */
} engine_result_t;

/* Called exactly once per call. Borrowed for the call. */
typedef void (*engine_result_fn)(void *ctx, const engine_result_t *result);

#define ENGINE_CLIENT_NO_DEADLINE UINT64_MAX
#define ENGINE_CLIENT_MAX_CALLS   1024 /* commands and utilities open at once; more get 503 */
#define ENGINE_CLIENT_RESEND_NS   (1 * LK_SECOND_NS)
#define ENGINE_CLIENT_MAX_SPEC    (32u << 20) /* bytes of an UPDATE's JSON */

/* timeout_ns 0: the default, which for PAUSE_WAIT is none. A deadline that passes answers
 * LK_ERR_TIMEOUT naming ranks, and rolls the pause back. */
void engine_client_pause(engine_client_t *self, pause_mode_t mode, bool clear_cache,
                         uint64_t timeout_ns, engine_result_fn fn, void *ctx);
void engine_client_resume(engine_client_t *self, uint64_t timeout_ns, engine_result_fn fn,
                          void *ctx);
/* spec is the request's JSON body, copied; bytes beyond what the verb needs are passed on as they
 * are. Other calls queue behind it until every rank has answered, but
 * behind one that is carried out beside the steps only weight calls do. ABORT first sends
 * CANCEL_UPDATE for whatever is in flight. */
void engine_client_update(engine_client_t *self, update_verb_t verb, const char *spec,
                          size_t spec_len, uint64_t timeout_ns, engine_result_fn fn, void *ctx);
/* Asks every rank; a dead rank's answer is LK_ERR_UNAVAILABLE. The result's status is the first
 * one that failed, with its text. */
void engine_client_utility(engine_client_t *self, const char *method, const char *args,
                           uint64_t timeout_ns, engine_result_fn fn, void *ctx);

/* Answers every open call with LK_ERR_UNAVAILABLE. Requests go on. */
void engine_client_end_calls(engine_client_t *self, const char *why);

/* ---- what is known of the group ---- */

typedef struct {
    bool serving;  /* the coordinator's word: every engine is READY in group_epoch */
    bool whole;    /* and every one of them was HERE in it */
    bool closed;   /* the last epoch broke: engine_client_closed_reason */
    bool lockstep; /* a rank's death ends the requests of all */
    bool run, paused;
    uint64_t group_epoch, wave, round;
    uint64_t weight_epoch; /* the newest of any rank, ever */
    uint64_t gates;        /* GATE_*: of any rank */
    uint64_t max_model_len, num_blocks, vocab_size;
    uint32_t n_ranks;   /* of the cluster, whoever is a member */
    uint32_t n_members; /* ranks that are not removed */
    uint32_t n_dead;    /* of them */
    uint64_t dropped;   /* messages that made no sense */
} engine_client_info_t;

void engine_client_info(const engine_client_t *self, engine_client_info_t *out);
/* The rank's newest report, or NULL when there is none yet, or no rank any more. Valid until the
 * next message. */
const msg_load_t *engine_client_load(const engine_client_t *self, uint32_t rank);
/* Why control calls, in lockstep also requests, are refused until the group is formed anew; or
 * NULL. Valid until the next call. */
const char *engine_client_closed_reason(const engine_client_t *self);
/* Why the rank is dead, or NULL. Valid until the next call. */
const char *engine_client_dead_reason(const engine_client_t *self, uint32_t rank);
/* Why the rank was removed and does not come back, or NULL. Such a one counts as no member and is
 * not dead: no command is sent to it and none waits for it. Valid until the next message. */
const char *engine_client_removed_reason(const engine_client_t *self, uint32_t rank);

#endif
