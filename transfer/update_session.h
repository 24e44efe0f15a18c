/*
 * update_session.h: the state machine of one rank's weight-update session, over any transfer
 * engine and any sink. It is purely local: that a call is executed by all ranks or by none, at one
 * point of the collective sequence, is the group's business (engine_core/dp). The replicated gates
 * (session open, dirty) live there too; this object knows what this rank did.
 *
 * States:  UNCONFIGURED -> (init) -> INITIALISING -> READY <-> OPEN (start..finish) <-> RECEIVING
 * A failure in INITIALISING or RECEIVING goes to UNCONFIGURED: a connection that was cut in
 * mid-stream is closed, and the trainer has to initialise again. `touched` is set if any byte
 * reached the sink; then only a session that brings every tensor of the model can be finished.
 * INIT in an open session is refused: abort_weight_update first.
 *
 * Over a sink of two sets (weight_sink.h) nothing touches the weights in force: `touched` stays
 * false, and a session may bring any part of the model whatever came before. Between a FINISH and
 * its outcome then comes PREPARING.
 *
 * An init_info with {"backend": "disk"} brings in the disk engine whatever is configured, for one
 * session; after it the configured engine goes on where it was (unless it failed).
 */
#ifndef LK_TRANSFER_UPDATE_SESSION_H
#define LK_TRANSFER_UPDATE_SESSION_H

#include "transfer/weight_transfer_engine.h"

typedef struct update_session update_session_t;

/* verb, wire value, route/name */
#define UPDATE_VERB_TABLE(X)                                                                       \
    X(INIT, 1, "init_weight_transfer_engine")                                                      \
    X(START, 2, "start_weight_update")                                                             \
    X(UPDATE, 3, "update_weights")                                                                 \
    X(FINISH, 4, "finish_weight_update")                                                           \
    X(ABORT, 5, "abort_weight_update")                                                             \
    X(SET_VERSION, 6, "update_weight_version")

typedef enum {
#define X(name, value, text) UPDATE_VERB_##name = value,
    UPDATE_VERB_TABLE(X)
#undef X
} update_verb_t;

const char *update_verb_name(update_verb_t verb);

#define UPDATE_STATE_TABLE(X)                                                                      \
    X(UNCONFIGURED) X(INITIALISING) X(READY) X(OPEN) X(RECEIVING) X(PREPARING)
typedef enum {
#define X(name) UPDATE_STATE_##name,
    UPDATE_STATE_TABLE(X)
#undef X
} update_state_t;
const char *update_state_name(update_state_t state);

/* Ranks carry this call out beside their steps: an INIT; shadow (--weight-swap shadow): an UPDATE
 * and the second half of a FINISH, too. Calls other than weight calls need not wait for it. */
static inline bool update_verb_beside(uint64_t verb, bool shadow)
{
    return verb == UPDATE_VERB_INIT ||
           (shadow && (verb == UPDATE_VERB_UPDATE || verb == UPDATE_VERB_FINISH));
}

/* ops NULL: no --weight-transfer-config; every call but SET_VERSION is then refused with
 * "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.".
 * sink is copied; what its ctx points to outlives the session. */
update_session_t *update_session_new(const wte_ops_t *ops, const wte_context_t *ctx,
                                     const weight_sink_t *sink);
void update_session_destroy(update_session_t **self_p);

/* Complete validation of a call's JSON (`spec` is the request body: {"init_info": ...} or
 * {"update_info": ...} or {"weight_version": ...}), without looking at the session's state and
 * without changing what the session does: this is the `ok` that the rank votes before the
 * collective. It keeps what it has read of an update, so that a post of the same text is spared the
 * parsing. */
LK_MUST_USE lk_status_t update_session_check(update_session_t *self, update_verb_t verb,
                                             const char *spec, size_t spec_len, lk_error_t *err);

/* Enters a call (all ranks agreed). START, FINISH, ABORT and SET_VERSION end at once; INIT and
 * UPDATE go on in test. LK_ERR_STATE with the reference's text when the order is wrong. */
LK_MUST_USE lk_status_t update_session_post(update_session_t *self, update_verb_t verb,
                                            const char *spec, size_t spec_len, lk_error_t *err);
LK_MUST_USE lk_status_t update_session_test(update_session_t *self, lk_error_t *err);
/* For sinks of two sets, after a FINISH was posted and before its outcome: what commit needs; goes
 * on in test. */
void update_session_prepare(update_session_t *self);
/* Ends a posted call; test then returns LK_ERR_CANCELED with `why`. Idempotent. */
void update_session_cancel(update_session_t *self, const char *why);

/* The group's verdict on the last call, after its outcome round. For a FINISH that committed: calls
 * sink.commit. For a failed INIT/UPDATE on any rank: drops back to what all ranks share
 * (UNCONFIGURED). For a failed FINISH: READY with `touched` set. A call that post refused for its
 * order or its body changed nothing, and its outcome changes nothing. */
LK_MUST_USE lk_status_t update_session_outcome(update_session_t *self, update_verb_t verb, bool ok,
                                               lk_error_t *err);

/* True for an INIT whose init_info names its engine: such a one does not end an open session. */
bool update_init_is_visit(const char *spec, size_t spec_len);
extern const char update_session_already_open[]; /* the text of that refusal */

/* From now on this rank is at that place of so many: what an INIT is checked against and carried
 * out with. Nothing is posted or open. */
void update_session_seat(update_session_t *self, uint32_t place, uint32_t n);

/* The group is over: whatever is posted or open ends, and the engine's connection with it. What was
 * touched stays so. */
void update_session_reset(update_session_t *self);

update_state_t update_session_state(const update_session_t *self);
/* Bytes of the open session (or of a failed one) reached the sink. Cleared by a committed finish.
 */
bool update_session_touched(const update_session_t *self);
void update_session_progress(const update_session_t *self, wte_progress_t *out);
/* Adds what the engine in use says of itself (wte_ops_t.describe) to an object. */
void update_session_describe(const update_session_t *self, json_t *object);
size_t update_session_pollfds(const update_session_t *self, struct pollfd *fds, size_t room);

#endif
