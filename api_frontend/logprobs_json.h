/*
 * logprobs_json.h: how logprobs look in replies: as the maps of /v1/completions (keyed by the
 * tokens' texts), as the content list of /inference/v1/generate, and as prompt_logprobs (keyed by
 * ids). Pure.
 */
#ifndef LK_API_FRONTEND_LOGPROBS_JSON_H
#define LK_API_FRONTEND_LOGPROBS_JSON_H

#include "api_frontend/tokenizer/tokenizer.h"
#include "base/hash.h"

/* A token and the most likely ones at its place, itself among them or not. A top id of UINT32_MAX
 * is no token. */
typedef struct {
    uint32_t id, rank;
    float logprob;
    size_t n_top;
    const uint32_t *top_ids;
    const float *top_logprobs;
} scored_token_t;

/* What tokens are called: by their text; "token_id:7" where ids are asked for, there is no
 * tokenizer, or the text holds a NUL, which many JSON readers refuse in a key. */
typedef struct {
    const tokenizer_t *tokenizer; /* NULL: none */
    bool as_ids;
    lk_buf_t text;       /* scratch */
    lk_hash128_t *taken; /* names in the map that is being written; [n_slots], zero: free */
    size_t n_slots;
} token_names_t;

void token_names_init(token_names_t *self, const tokenizer_t *tokenizer, bool as_ids);
void token_names_fini(token_names_t *self);

/* JSON has no infinities; what clients expect in their place is -9999. */
void logprobs_json_number(lk_buf_t *out, float logprob);
/* "name" */
void logprobs_json_name(token_names_t *names, uint32_t id, lk_buf_t *out);
/* {name: logprob, ...}: the token first; a name that repeats is left out. */
void logprobs_json_map(token_names_t *names, const scored_token_t *token, lk_buf_t *out);
/* {"token", "token_id", "logprob", "rank", "top_logprobs": [...]} */
void logprobs_json_content(const scored_token_t *token, lk_buf_t *out);
/* {"id": {"logprob", "rank", "decoded_token"}, ...}: the token first. tokenizer NULL: no texts. */
void logprobs_json_prompt(const tokenizer_t *tokenizer, const scored_token_t *token, lk_buf_t *text,
                          lk_buf_t *out);

#endif
