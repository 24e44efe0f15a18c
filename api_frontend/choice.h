/*
 * choice.h: one choice of a completion: collects what its engine request gives (ids, logprobs,
 * text, spans of weights and KV) and writes it as JSON, whole or as deltas. Pure.
 */
#ifndef LK_API_FRONTEND_CHOICE_H
#define LK_API_FRONTEND_CHOICE_H

#include "api_frontend/prompt_scores.h"
#include "api_frontend/span_list.h"
#include "api_frontend/tokenizer/detokenizer.h"

/* KV of all positions as it stood when output token `at` was made. */
typedef struct {
    uint64_t at;
    span_list_t spans;
} kv_snapshot_t;

typedef struct {
    /* what is asked for; borrowed */
    const completion_params_t *params;
    const tokenizer_t *tokenizer; /* NULL: ids only */
    const prompt_ids_t *prompt;
    uint32_t index;
    bool deltas; /* written tokens are dropped after choice_json */

    /* tokens that were not written yet (all of them without deltas) */
    size_t n, cap;
    uint32_t *ids;
    float *logprobs;   /* [n], with params->sampling.logprobs >= 0 */
    uint32_t *ranks;   /* [n], 1 is the most likely; as logprobs */
    size_t n_top;      /* per token; fixed by the first output */
    uint32_t *top_ids; /* [n, n_top] */
    float *top_logprobs;
    lk_buf_t text;

    uint64_t n_output;          /* tokens so far, written ones included */
    uint64_t text_offset;       /* code points of the tokens written so far */
    bool wrote;                 /* a delta was written */
    detokenizer_t *detokenizer; /* NULL without a tokenizer */

    prompt_scores_t scores;       /* of the prompt; taken where the caller has initialised them */
    const prompt_scores_t *shown; /* those to write: its own, or another choice's of the prompt */

    span_list_t weights, kv;
    bool kv_known; /* a snapshot came: kv is complete */
    kv_snapshot_t *history;
    size_t n_history, cap_history;

    finish_reason_t finish; /* FINISH_NONE while it goes on */
    int64_t stop_token;
    int stop_string; /* index in params->stops, or -1 */
    uint64_t cached_tokens;
} choice_t;

LK_MUST_USE lk_status_t choice_init(choice_t *self, const completion_params_t *params,
                                    const tokenizer_t *tokenizer, const prompt_ids_t *prompt,
                                    uint32_t index, bool deltas, lk_error_t *err);
/* Accepts a zeroed choice. */
void choice_fini(choice_t *self);

/* Takes one output. finish and stop_string may change: a stop string ends the choice although the
 * engine goes on. LK_ERR_PEER for a message whose parts don't fit together; LK_ERR_NO_MEMORY. */
LK_MUST_USE lk_status_t choice_push(choice_t *self, const msg_output_t *out, lk_error_t *err);
/* Ends it from this side: its held-back text becomes final. */
void choice_end(choice_t *self, finish_reason_t finish);
/* Logprobs that are held, at 8 bytes. */
size_t choice_held(const choice_t *self);
/* "stop", "length"...; "" while it goes on. */
const char *choice_finish_name(finish_reason_t finish);
/* Something to write: tokens, text, or the end. */
bool choice_has_news(const choice_t *self);
/* The choice as a JSON object, in the shape of params->kind (choice_json.c). */
void choice_json(choice_t *self, lk_buf_t *out);

#endif
