/*
 * request.h: one sequence to generate, as the engine sees it. n > 1 of a client's request arrives
 * as n requests that differ in `choice`.
 */
#ifndef LK_ENGINE_CORE_REQUEST_H
#define LK_ENGINE_CORE_REQUEST_H

#include "base/check.h"
#include "base/hash.h"
#include "base/status.h"
#include "engine_core/exec/logit_rules.h"
#include "proto/messages.h" /* finish_reason_t */

typedef enum { REQUEST_WAITING, REQUEST_RUNNING, REQUEST_FINISHED } request_status_t;

#define REQUEST_MAX_STOP_TOKENS 64

typedef struct {
    float temperature;                                             /* 0: greedy */
    float top_p;                                                   /* (0, 1]; 1: off */
    float min_p;                                                   /* [0, 1]; 0: off */
    int32_t top_k;                                                 /* <= 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    uint64_t seed; /* Philox key, with `choice`; always set (the front end draws one) */
    uint32_t max_tokens, min_tokens;
    bool ignore_eos;
    int32_t logprobs;         /* -1: none; 0: the sampled token's; k: and the k most likely */
    uint32_t prompt_logprobs; /* 0: none; 1 + k: each prompt token's, and the k most likely */
    uint32_t n_stop_tokens;
    uint32_t stop_tokens[REQUEST_MAX_STOP_TOKENS];
} sampling_params_t;

/* Every field within its range, named in the text if not (ids of stop tokens are not looked at). */
LK_MUST_USE lk_status_t sampling_params_check(const sampling_params_t *p, lk_error_t *err);

/* Half-open span [start, end) of token or position indexes and the weights they belong to. */
typedef struct {
    uint64_t epoch;
    uint32_t start, end;
} epoch_span_t;

#define REQUEST_MAX_SPANS  1024 /* beyond this the request ends with an error rather than lie */
#define REQUEST_MAX_TOKENS (1u << 24) /* prompt + max_tokens */

/*
 * How a checker rebuilds the KV that every output token was made from (decision 1). P = n_prompt.
 *
 * Output token j is made by a step under weights e that ends with KV for positions [0, P + j); the
 * last of them, P + j - 1, is always computed by that very step. (So the KV of token j itself, at
 * position P + j, is computed by the step that makes token j + 1, under the weights of that step.)
 * - If the output that carries token j says kv_snapshot, kv_spans at that moment are the weights of
 *   all of [0, P + j).
 * - If not, the KV of [0, P + j - 1) is as it was at token j - 1, and position P + j - 1 is e's.
 * The first output of a request has a snapshot (it is mixed when a chunked prefill straddled an
 * update), and so has the first output after every preemption or recomputation. An output without
 * tokens says nothing about KV.
 */

typedef struct request {
    uint64_t client, handle; /* front end index and its handle: the reply address */
    uint32_t choice;
    char id[128]; /* external id, for logs only */
    sampling_params_t sampling;
    logit_rules_t *rules; /* owned; NULL: none */
    int64_t priority;     /* lower first */
    lk_hash128_t salt;    /* of cache_salt; zero if none */

    uint32_t *tokens; /* prompt then output; capacity n_prompt + max_tokens (cap_tokens) */
    uint32_t cap_tokens;
    uint32_t n_prompt, n_tokens;
    uint32_t n_computed; /* positions whose KV is in the block table */
    uint32_t n_cached;   /* of the prompt, at first admission: from the prefix cache */
    bool prompt_scored;  /* its prompt logprobs are out */

    uint32_t *blocks; /* block table */
    uint32_t n_blocks, cap_blocks;

    /* which weights made output token i / computed the KV of position p (decision 1) */
    epoch_span_t *weight_spans;
    uint32_t n_weight_spans, cap_weight_spans;
    epoch_span_t *kv_spans;
    uint32_t n_kv_spans, cap_kv_spans;
    /* Set at every admission, first or again: the next output token carries a snapshot. */
    bool kv_snapshot_due;

    request_status_t status;
    finish_reason_t finish_reason;
    int64_t stop_token; /* the stop token id that ended it, or -1 */
    uint32_t n_preempted;
    uint64_t arrival_ns, arrival_seq;
    uint64_t scheduled_ns; /* first admission */

    /* the scheduler's own */
    struct request *prev, *next; /* waiting or running list */
    struct request *hash_next;
    bool started;       /* was admitted before */
    int32_t batch_slot; /* in the posted step, or -1 */
} request_t;

/* Copies the prompt. The caller has clipped max_tokens to what the model has room for. NULL when
 * out of memory, or over REQUEST_MAX_TOKENS. */
request_t *request_new(const uint32_t *prompt, uint32_t n_prompt,
                       const sampling_params_t *sampling);
void request_destroy(request_t **self_p); /* blocks must have been released */

/* Output token `i` (the next one) is of epoch. False over REQUEST_MAX_SPANS or out of memory. */
LK_MUST_USE bool request_append_weight_span(request_t *self, uint32_t i, uint64_t epoch);
/* Positions [start, end) have KV of epoch; start is where the last span ends. False as above. */
LK_MUST_USE bool request_append_kv_span(request_t *self, uint32_t start, uint32_t end,
                                        uint64_t epoch);

static inline uint32_t request_n_output(const request_t *r)
{
    return r->n_tokens - r->n_prompt;
}

/* Logits are wanted at every position that is computed, so none may come from the prefix cache. A
 * preemption before the end of the prompt starts it over. */
static inline bool request_scores_prompt(const request_t *r)
{
    return r->sampling.prompt_logprobs > 0 && !r->prompt_scored;
}

#endif
