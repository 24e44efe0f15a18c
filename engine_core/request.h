/*
 * request.h: one sequence to generate, as the engine sees it. n > 1 of a client's request arrives
 * as n requests that differ in `choice`.
 */
#ifndef LK_ENGINE_CORE_REQUEST_H
#define LK_ENGINE_CORE_REQUEST_H

#include "base/hash.h"
#include "base/status.h"

/* name, wire value, "finish_reason" of the HTTP reply */
#define FINISH_REASON_TABLE(X)                                                                     \
    X(NONE, 0, "")                                                                                 \
    X(STOP, 1, "stop")                                                                             \
    X(LENGTH, 2, "length")                                                                         \
    X(ABORT, 3, "abort")                                                                           \
    X(ERROR, 4, "error")
typedef enum {
#define X(name, value, text) FINISH_##name = value,
    FINISH_REASON_TABLE(X)
#undef X
} finish_reason_t;

typedef enum { REQUEST_WAITING, REQUEST_RUNNING, REQUEST_FINISHED } request_status_t;

#define REQUEST_MAX_STOP_TOKENS 64
#define SAMPLING_MAX_LOGPROBS 64 /* most top-k logprobs per position; --max-logprobs caps it further */

typedef struct {
    float temperature; /* 0: greedy */
    float top_p;       /* (0, 1]; 1: off */
    float min_p;       /* [0, 1]; 0: off */
    int32_t top_k;     /* <= 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    uint64_t seed;     /* Philox key, with `choice`; always set (the front end draws one) */
    uint32_t max_tokens, min_tokens;
    bool ignore_eos;
    int32_t logprobs;  /* -1: none; 0: the sampled token's; k: and the k most likely */
    uint32_t n_stop_tokens;
    uint32_t stop_tokens[REQUEST_MAX_STOP_TOKENS];
} sampling_params_t;

/* Half-open span [start, end) of token or position indexes and the weights they belong to. */
typedef struct {
    uint64_t epoch;
    uint32_t start, end;
} epoch_span_t;

#define REQUEST_MAX_SPANS 1024 /* beyond this the request ends with an error rather than lie */

typedef struct request {
    uint64_t client, handle; /* front end index and its handle: the reply address */
    uint32_t choice;
    char id[128]; /* external id, for logs only */
    sampling_params_t sampling;
    int64_t priority; /* lower first */
    lk_hash128_t salt; /* of cache_salt; zero if none */

    uint32_t *tokens; /* prompt then output; capacity n_prompt + max_tokens */
    uint32_t n_prompt, n_tokens;
    uint32_t n_computed; /* positions whose KV is in the block table */
    uint32_t n_cached;   /* of the prompt, at first admission: from the prefix cache */

    uint32_t *blocks; /* block table */
    uint32_t n_blocks, cap_blocks;

    /* which weights made output token i / computed the KV of position p (decision 1) */
    epoch_span_t *weight_spans;
    uint32_t n_weight_spans;
    epoch_span_t *kv_spans;
    uint32_t n_kv_spans;
    /* Set when the KV changed otherwise than by appending at the current epoch (recomputation,
     * cache hit at admission): the next output carries a snapshot of kv_spans. */
    bool kv_snapshot_due;

    request_status_t status;
    finish_reason_t finish_reason;
    int64_t stop_token; /* the stop token id that ended it, or -1 */
    uint32_t n_preempted;
    uint64_t arrival_ns, arrival_seq;
    struct request *prev, *next; /* scheduler's lists */
} request_t;

/* Copies the prompt. NULL when out of memory. */
request_t *request_new(const uint32_t *prompt, uint32_t n_prompt, const sampling_params_t *sampling);
void request_destroy(request_t **self_p); /* blocks must have been released */

static inline uint32_t request_n_output(const request_t *r)
{
    return r->n_tokens - r->n_prompt;
}

#endif
