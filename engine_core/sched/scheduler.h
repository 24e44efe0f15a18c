/*
 * scheduler.h: continuous batching under a token budget. Running requests first (decode and the
 * rest of chunked prefills, in order of arrival within priority), then waiting ones while admission
 * is open and blocks, budget and max_num_seqs allow. When blocks are short the latest running
 * request is preempted: its blocks are released, it goes back to the head of its priority's waiting
 * queue, and its KV (prompt and output) is recomputed. A waiting request is admitted when the
 * blocks of all it has (prompt and output) are there; nobody overtakes it within its priority, and
 * no admission happens in a step that preempted. So the first in order always advances.
 *
 * Ends, in this order: an eos id (unless ignore_eos) -> "stop"; a stop token -> "stop" with
 * stop_token set; max_tokens or max_model_len -> "length". Stops count from output token min_tokens
 * on; before that eos ids and stop tokens are masked out of sampling.
 *
 * Pure: no clock, no executor, no allocation in schedule() and update() except a request's block
 * table at admission and its spans when the epoch changes. The engine alternates schedule() and
 * update() or cancel_step(). The output callback must not call the scheduler.
 */
#ifndef LK_ENGINE_CORE_SCHED_SCHEDULER_H
#define LK_ENGINE_CORE_SCHED_SCHEDULER_H

#include "engine_core/exec/executor.h"
#include "engine_core/kv/kv_cache.h"

typedef struct scheduler scheduler_t;

typedef struct {
    uint32_t max_num_seqs, max_num_batched_tokens, max_model_len;
    uint32_t vocab_size;
    uint32_t eos_token_ids[MODEL_MAX_EOS];
    uint32_t n_eos;
    uint32_t max_waiting;     /* queue limit; add beyond it is LK_ERR_UNAVAILABLE */
    bool processed_logprobs;  /* --logprobs-mode processed_logprobs (sampler.h) */
    uint32_t max_prompt_rows; /* rows of logits for prompt logprobs in one step, beside one per
                                 request; 0: max_num_batched_tokens */
} scheduler_config_t;

/* What one request got from a step (or at its end). Borrowed for the callback. */
typedef struct {
    const request_t *request;
    uint32_t first, n;         /* output tokens [first, first + n) are new */
    const float *logprobs;     /* [n], when sampling.logprobs >= 0 */
    const uint32_t *ranks;     /* [n], 1 = most likely */
    uint32_t n_top;            /* entries per token below, at most logprobs (an executor that picks
                                * tokens itself gives 1: the token) */
    const uint32_t *top_ids;   /* [n, n_top] */
    const float *top_logprobs; /* [n, n_top] */
    /* Prompt logprobs: of prompt tokens [prompt_first, prompt_first + n_prompt), in outputs of
     * their own (n is 0) before the first token. */
    uint32_t prompt_first, n_prompt;
    const float *prompt_logprobs; /* [n_prompt] */
    const uint32_t *prompt_ranks;
    uint32_t n_prompt_top;
    const uint32_t *prompt_top_ids; /* [n_prompt, n_prompt_top] */
    const float *prompt_top_logprobs;
    uint64_t epoch;         /* weights that made the n tokens */
    bool kv_snapshot;       /* request->kv_spans is to be sent (see request.h) */
    finish_reason_t finish; /* FINISH_NONE while it goes on */
    const char *error;      /* with FINISH_ERROR */
} sched_output_t;
typedef void (*sched_output_fn)(void *ctx, const sched_output_t *output);

/* kv is borrowed. NULL when out of memory. max_num_seqs and max_num_batched_tokens are at least 1.
 */
scheduler_t *scheduler_new(const scheduler_config_t *config, kv_cache_t *kv, sched_output_fn fn,
                           void *ctx);
void scheduler_destroy(scheduler_t **self_p);

/* Takes ownership of r on success. A request that can never fit, an id outside the vocabulary or a
 * parameter out of range is LK_ERR_INVALID; a (client, handle) in use is LK_ERR_STATE. */
LK_MUST_USE lk_status_t scheduler_add(scheduler_t *self, request_t *r, lk_error_t *err);
/* Ends one request; emits its output with FINISH_ABORT. False if there is no such request (it has
 * ended already: not an error). Legal while a step is posted: its row is then ignored in update,
 * and its blocks are kept until update or cancel_step, as the executor may still write to them. */
bool scheduler_abort(scheduler_t *self, uint64_t client, uint64_t handle);
/* Ends all; returns how many. error is for FINISH_ERROR. Legal while a step is posted, as abort. */
size_t scheduler_finish_all(scheduler_t *self, finish_reason_t reason, const char *error);
/* Ends all of one front end without emitting anything (it is gone). */
size_t scheduler_drop_client(scheduler_t *self, uint64_t client);

/* Picks the next batch. admit false: no request that never ran is taken in (preempted ones come
 * back, or a drain would not end). The batch may be empty: then nothing is posted here and update
 * must not be called. epoch: weights of this step; now_ns: when it is. Valid until update or
 * cancel_step. May emit one output: a request that, alone, outgrows the pool ends with
 * FINISH_ERROR. */
const exec_batch_t *scheduler_schedule(scheduler_t *self, bool admit, uint64_t epoch, uint64_t step,
                                       uint64_t now_ns);
/* Applies a step's result: KV bookkeeping, sampling, stop conditions; emits outputs. */
void scheduler_update(scheduler_t *self, const exec_result_t *result);
/* The step failed or was aborted: nothing of it counts. */
void scheduler_cancel_step(scheduler_t *self);

/* Preempts every running request (KV recomputed when scheduled again) and forgets cached prefixes.
 * Not while a step is posted. */
void scheduler_recompute_all(scheduler_t *self);

size_t scheduler_num_waiting(const scheduler_t *self); /* includes preempted ones */
size_t scheduler_num_running(const scheduler_t *self);
/* Requests that were admitted before and are frozen or preempted, or running: what mode `wait`
 * drains. */
size_t scheduler_num_started(const scheduler_t *self);
uint64_t scheduler_num_preemptions(const scheduler_t *self);
/* The least weight epoch in the spans of any request; `otherwise` if that is less or there is none.
 */
uint64_t scheduler_oldest_epoch(const scheduler_t *self, uint64_t otherwise);
void scheduler_verify(const scheduler_t *self);

#endif
