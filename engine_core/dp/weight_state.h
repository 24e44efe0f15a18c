/*
 * weight_state.h: the replicated half of weight updates: the gates (session, dirty, asleep) of
 * protocol.md section 14.4, whether a transfer engine is initialised, the weight epoch and its
 * label. Changed by commands and their outcomes inside decide only, so equal on all ranks. With
 * shadow swap a session is no gate, and nothing makes the group dirty: nobody writes the live
 * weights.
 *
 * admit() decides the order of calls identically on all ranks; an order error changes nothing. The
 * rank's own session (transfer/update_session.h) mirrors it and is entered only after admit.
 */
#ifndef LK_ENGINE_CORE_DP_WEIGHT_STATE_H
#define LK_ENGINE_CORE_DP_WEIGHT_STATE_H

#include "transfer/update_session.h"

#define WEIGHT_LABEL_MAX 256 /* bytes of a label */

typedef struct {
    unsigned gates;  /* GATE_* bits (proto/messages.h): while any is set nobody steps */
    bool session;    /* one is open; in place also GATE_SESSION */
    bool shadow;     /* for life */
    bool configured; /* the last INIT succeeded on every rank */
    uint64_t epoch;  /* of the weights; the next committed FINISH has taken + 1 */
    uint64_t taken;  /* newest epoch that may have been given to any weights, >= epoch */
    char version[WEIGHT_LABEL_MAX + 1];
    char dirty_why[LK_ERROR_TEXT_MAX]; /* with GATE_DIRTY */
} weight_state_t;

void weight_state_init(weight_state_t *self, bool shadow);

/* LK_OK, or LK_ERR_STATE with the text that clients of this API know. */
LK_MUST_USE lk_status_t weight_state_admit(const weight_state_t *self, update_verb_t verb,
                                           lk_error_t *err);

/* The agreed outcome of INIT, START, UPDATE. clean: no rank's weights were touched by the session.
 * FINISH has commit or mark_dirty instead. */
void weight_state_outcome(weight_state_t *self, update_verb_t verb, bool ok, bool clean,
                          const char *why);
/* The open session ends without a commit (ABORT, its deadline, a new INIT). */
void weight_state_close_session(weight_state_t *self, bool clean, const char *why);
/* A FINISH that every rank carried out. version NULL keeps the label. complete: every tensor of the
 * model arrived; only that cleans a dirty group. */
void weight_state_commit(weight_state_t *self, const char *version);
/* A commit that failed on some rank. */
void weight_state_commit_failed(weight_state_t *self, const char *why);
/* Only a complete update cleans it. */
void weight_state_mark_dirty(weight_state_t *self, const char *why);
void weight_state_relabel(weight_state_t *self, const char *version);

uint64_t weight_state_hash(const weight_state_t *self, uint64_t seed);

/* Reads "weight_version" (or, for SET_VERSION, also "new_version") of a call's JSON into
 * out[WEIGHT_LABEL_MAX + 1]; *given is false when it is absent or null. LK_ERR_INVALID when it is
 * no string, too long, or absent where it is required (SET_VERSION). An empty spec is {}. */
LK_MUST_USE lk_status_t weight_version_parse(update_verb_t verb, const char *spec, size_t spec_len,
                                             char *out, bool *given, lk_error_t *err);

#endif
