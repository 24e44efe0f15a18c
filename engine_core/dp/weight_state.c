#include "engine_core/dp/weight_state.h"
#include "base/check.h"
#include "base/hash.h"
#include "proto/json_text.h"
#include "proto/messages.h"

#include <stdio.h>
#include <string.h>

void weight_state_init(weight_state_t *self, bool shadow)
{
    memset(self, 0, sizeof *self);
    self->shadow = shadow;
    snprintf(self->version, sizeof self->version, "default");
}

/* What each verb needs, in the order in which it is looked at. */
typedef struct {
    bool awake, configured;
    int session; /* 1: open, 0: closed, -1: either */
    const char *session_error;
} verb_rule_t;

static const verb_rule_t rules[] = {
    /* A new INIT replaces a transfer group whose trainer is gone; it ends that one's session. */
    [UPDATE_VERB_INIT] = {true, false, -1, NULL},
    [UPDATE_VERB_START] = {true, true, 0,
                           "start_weight_update called while a weight update is already active. "
                           "Call finish_weight_update first."},
    [UPDATE_VERB_UPDATE] = {true, false, 1,
                            "start_weight_update must be called before update_weights."},
    [UPDATE_VERB_FINISH] = {true, false, 1,
                            "finish_weight_update called without a matching start_weight_update."},
    [UPDATE_VERB_ABORT] = {false, false, -1, NULL},
    [UPDATE_VERB_SET_VERSION] = {false, false, -1, NULL},
};

lk_status_t weight_state_admit(const weight_state_t *self, update_verb_t verb, lk_error_t *err)
{
    CHECK(verb >= UPDATE_VERB_INIT && verb <= UPDATE_VERB_SET_VERSION);
    const verb_rule_t *rule = &rules[verb];
    if (rule->awake && (self->gates & GATE_ASLEEP)) {
        return lk_error_set(err, LK_ERR_STATE,
                            "%s called while the engine is asleep. Call wake_up "
                            "first.",
                            update_verb_name(verb));
    }
    if (rule->session >= 0 && rule->session != self->session) {
        return lk_error_set(err, LK_ERR_STATE, "%s", rule->session_error);
    }
    if (rule->configured && !self->configured) {
        return lk_error_set(err, LK_ERR_STATE,
                            "Weight transfer not initialized. Call init_weight_transfer_engine "
                            "first.");
    }
    return LK_OK;
}

void weight_state_mark_dirty(weight_state_t *self, const char *why)
{
    self->gates |= GATE_DIRTY;
    lk_text(self->dirty_why, sizeof self->dirty_why, "%s", why);
}

/* A session did not commit; with shadow swap it wrote nothing that is in use. */
static void spoil(weight_state_t *self, const char *why)
{
    if (!self->shadow) {
        weight_state_mark_dirty(self, why);
    }
}

void weight_state_close_session(weight_state_t *self, bool clean, const char *why)
{
    if (!self->session) {
        return;
    }
    self->session = false;
    self->gates &= ~GATE_SESSION;
    if (!clean) {
        spoil(self, why);
    }
}

void weight_state_outcome(weight_state_t *self, update_verb_t verb, bool ok, bool clean,
                          const char *why)
{
    switch (verb) {
    case UPDATE_VERB_INIT:
        self->configured = ok;
        break;
    case UPDATE_VERB_START:
        if (ok) {
            self->session = true;
            self->gates |= self->shadow ? 0 : GATE_SESSION;
        }
        break;
    case UPDATE_VERB_UPDATE:
        if (!ok) { /* any failure ends the session, and what moved the bytes is in an unknown state
                    */
            self->configured = false;
            weight_state_close_session(self, clean, why);
        }
        break;
    case UPDATE_VERB_FINISH:
    case UPDATE_VERB_ABORT:
    case UPDATE_VERB_SET_VERSION:
        CHECKF(false, "%s has no plain outcome", update_verb_name(verb));
    }
}

void weight_state_commit(weight_state_t *self, const char *version)
{
    self->session = false;
    self->gates &= ~(GATE_SESSION | GATE_DIRTY);
    self->dirty_why[0] = '\0';
    self->epoch = self->taken = self->taken + 1;
    if (version != NULL) {
        weight_state_relabel(self, version);
    }
}

void weight_state_commit_failed(weight_state_t *self, const char *why)
{
    weight_state_close_session(self, false, why);
}

void weight_state_relabel(weight_state_t *self, const char *version)
{
    snprintf(self->version, sizeof self->version, "%s", version);
}

uint64_t weight_state_hash(const weight_state_t *self, uint64_t seed)
{
    uint64_t words[] = {self->gates,      self->session, self->shadow,
                        self->configured, self->epoch,   self->taken};
    return lk_hash64(self->version, strlen(self->version), lk_hash64(words, sizeof words, seed));
}

lk_status_t weight_version_parse(update_verb_t verb, const char *spec, size_t spec_len, char *out,
                                 bool *given, lk_error_t *err)
{
    *given = false;
    json_t *root = NULL;
    if (spec_len > 0) {
        json_error_t json_err;
        root = json_text_read(spec, spec_len, 0, &json_err);
        if (!json_is_object(root)) {
            json_decref(root);
            return lk_error_set(err, LK_ERR_INVALID, "%s: the body is no JSON object",
                                update_verb_name(verb));
        }
    }
    const char *field = "weight_version";
    json_t *value = json_object_get(root, field);
    if (value == NULL && verb == UPDATE_VERB_SET_VERSION) {
        field = "new_version";
        value = json_object_get(root, field);
    }
    lk_status_t status = LK_OK;
    if (value == NULL || json_is_null(value)) {
        if (verb == UPDATE_VERB_SET_VERSION) {
            status = lk_error_set(err, LK_ERR_INVALID, "new_version: a string is required");
        }
    } else if (!json_is_string(value)) {
        status = lk_error_set(err, LK_ERR_INVALID, "%s: must be a string", field);
    } else if (json_string_length(value) > WEIGHT_LABEL_MAX) {
        status = lk_error_set(err, LK_ERR_TOO_LARGE, "%s: at most %d bytes, got %zu", field,
                              WEIGHT_LABEL_MAX, json_string_length(value));
    } else {
        memcpy(out, json_string_value(value), json_string_length(value));
        out[json_string_length(value)] = '\0';
        *given = true;
    }
    json_decref(root);
    return status;
}
