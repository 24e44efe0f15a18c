/*
 * prompt_scores.h: the logprobs of one prompt's tokens, collected from the engine's outputs. Pure.
 */
#ifndef LK_API_FRONTEND_PROMPT_SCORES_H
#define LK_API_FRONTEND_PROMPT_SCORES_H

#include "api_frontend/completion_params.h"
#include "api_frontend/logprobs_json.h"

typedef struct {
    const prompt_ids_t *prompt; /* borrowed */
    size_t max_top;             /* entries per token, at most */
    size_t n;                   /* tokens that are known; the first one has no logprob */
    size_t n_top;               /* entries per token; fixed by the first output */
    float *logprobs;            /* [prompt->n], as the three below */
    uint32_t *ranks;
    uint32_t *top_ids; /* [prompt->n, n_top] */
    float *top_logprobs;
} prompt_scores_t; /* {0} is empty, and takes nothing */

/* Allocates nothing yet. */
void prompt_scores_init(prompt_scores_t *self, const prompt_ids_t *prompt, size_t max_top);
void prompt_scores_fini(prompt_scores_t *self);
/* The part of an output that concerns the prompt. LK_ERR_PEER when it does not fit together. */
LK_MUST_USE lk_status_t prompt_scores_take(prompt_scores_t *self, const msg_output_t *out,
                                           lk_error_t *err);
bool prompt_scores_complete(const prompt_scores_t *self);
/* Logprobs that are held, at 8 bytes. */
size_t prompt_scores_held(const prompt_scores_t *self);
/* Token i, from 1 on; borrows. */
scored_token_t prompt_scores_at(const prompt_scores_t *self, size_t i);
/* [null, {...}, ...] with at most n_top entries beside each token's own; null while it is not
 * complete. */
void prompt_scores_json(const prompt_scores_t *self, size_t n_top, const tokenizer_t *tokenizer,
                        lk_buf_t *out);

#endif
