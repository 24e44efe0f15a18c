/* completion_internal.h: the inside of completion.h, for completion.c (life, events, writing) and
 * completion_figures.c (what is counted of it). */
#ifndef LK_API_FRONTEND_COMPLETION_INTERNAL_H
#define LK_API_FRONTEND_COMPLETION_INTERNAL_H

#include "api_frontend/choice.h"
#include "api_frontend/completion.h"

/* One choice and its engine request. */
typedef struct {
    completion_t *owner;
    choice_t choice;
    uint64_t handle;
    uint64_t max_tokens;
    uint64_t first_token_ns, last_token_ns; /* 0: no token yet */
    uint64_t prefill_ns;                    /* as the engine says */
    size_t held;                            /* its part of api->held_logprobs */
    bool open;                              /* the engine works on it */
    bool counted;                           /* its end is in the metrics */
} slot_t;

struct completion {
    api_t *api;
    api_call_t *call;
    struct completion *prev, *next;
    completion_params_t params;
    char id[160];
    const char *bare_id; /* in id, behind the prefix */
    bool added;          /* an engine got one of its requests */
    bool begun;          /* bytes of the stream are out */
    uint64_t started_ns, last_data_ns;
    size_t n_slots, n_unfinished;
    slot_t slots[];
};

/* n new tokens of a slot are in. */
void completion_count_tokens(completion_t *self, slot_t *slot, const msg_output_t *out, size_t n);
/* A slot has ended; once for each. */
void completion_count_end(completion_t *self, slot_t *slot, finish_reason_t finish);
/* The call ends with an error, or without an answer. */
void completion_count_rest(completion_t *self, finish_reason_t finish);
/* A slot now holds that many logprobs. */
void completion_count_held(completion_t *self, slot_t *slot, size_t held);

#endif
