/* scheduler_step.c: picks the next batch, and applies what came of it. */
#include "engine_core/sched/scheduler_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- picking a batch ---- */

static void preempt(scheduler_t *self, request_t *r)
{
    CHECK(r->batch_slot < 0);
    kv_cache_release(self->kv, r);
    sched_list_remove(&self->running, r);
    r->status = REQUEST_WAITING;
    r->n_preempted++;
    self->n_preemptions++;
    sched_list_insert_front(&self->waiting, r);
}

/* How many positions of r this step computes; 0: none, for want of rows of logits. */
static uint32_t chunk_of(scheduler_t *self, const request_t *r, uint32_t budget)
{
    uint32_t n = LK_MIN(r->n_tokens - r->n_computed, budget);
    if (request_scores_prompt(r)) {
        uint32_t most = LK_MAX(SCHED_STEP_ENTRIES / r->sampling.prompt_logprobs, 1);
        n = LK_MIN(LK_MIN(n, most), self->prompt_rows_left);
        self->prompt_rows_left -= n;
    }
    return n;
}

static void batch_add(scheduler_t *self, request_t *r, uint32_t n)
{
    size_t slot = self->batch.n_seqs++;
    CHECK(slot < self->config.max_num_seqs && n > 0);
    bool last = r->n_computed + n == r->n_tokens;
    self->entries[slot] = (batch_entry_t){.r = r, .start = r->n_computed, .n = n};
    self->seqs[slot] = (exec_seq_t){.tokens = r->tokens,
                                    .start = r->n_computed,
                                    .n = n,
                                    .blocks = r->blocks,
                                    .n_logits = request_scores_prompt(r) ? n
                                                : last                   ? 1
                                                                         : 0};
    r->batch_slot = (int32_t)slot;
}

static void finish_too_large(scheduler_t *self, request_t *r)
{
    char text[160];
    snprintf(text, sizeof text,
             "the KV cache (%u blocks of %u tokens) is too small for this request, which has grown "
             "to %u tokens",
             kv_cache_num_blocks(self->kv), kv_cache_block_size(self->kv), r->n_tokens);
    sched_finish_now(self, r, FINISH_ERROR, text);
}

/* Blocks for r up to n_positions, from requests later in order if need be. False if r itself had to
 * give way (or ended: it is alone and the pool is too small). */
static bool make_room(scheduler_t *self, request_t *r, uint32_t n_positions)
{
    while (!kv_cache_grow(self->kv, r, n_positions)) {
        request_t *victim = self->running.tail;
        if (victim != r) {
            preempt(self, victim);
        } else if (self->running.n > 1) {
            preempt(self, r);
            return false;
        } else {
            finish_too_large(self, r);
            return false;
        }
    }
    return true;
}

static uint32_t schedule_running(scheduler_t *self, uint32_t budget)
{
    for (request_t *r = self->running.head, *next; r != NULL && budget > 0; r = next) {
        uint32_t n = chunk_of(self, r, budget);
        if (!make_room(self, r, r->n_computed + n)) {
            break; /* r was the last one */
        }
        if (n > 0) {
            batch_add(self, r, n);
            budget -= n;
        }
        next = r->next; /* only now: the ones behind r may have been preempted */
    }
    return budget;
}

static bool admit_request(scheduler_t *self, request_t *r, uint64_t epoch)
{
    if (!kv_cache_fits(self->kv, r, epoch, r->n_tokens) || !kv_cache_match(self->kv, r, epoch)) {
        return false;
    }
    CHECK(kv_cache_grow(self->kv, r, r->n_tokens));
    sched_list_remove(&self->waiting, r);
    sched_list_insert(&self->running, r);
    r->status = REQUEST_RUNNING;
    r->kv_snapshot_due = true;
    if (!r->started) {
        r->started = true;
        r->scheduled_ns = self->now_ns;
        r->n_cached = r->n_computed;
        self->n_started++;
    }
    return true;
}

static void schedule_waiting(scheduler_t *self, bool admit, uint64_t epoch, uint32_t budget)
{
    for (request_t *r = self->waiting.head, *next; r != NULL && budget > 0; r = next) {
        next = r->next;
        if (!admit && !r->started) {
            continue;
        }
        if (!sched_can_ever_fit(self, r)) {
            finish_too_large(self, r); /* it filled the pool, and was preempted before it failed */
            continue;
        }
        if (self->running.n >= self->config.max_num_seqs ||
            (request_scores_prompt(r) && self->prompt_rows_left == 0) ||
            !admit_request(self, r, epoch)) {
            break; /* nobody overtakes it */
        }
        uint32_t n = chunk_of(self, r, budget);
        batch_add(self, r, n);
        budget -= n;
    }
}

const exec_batch_t *scheduler_schedule(scheduler_t *self, bool admit, uint64_t epoch, uint64_t step,
                                       uint64_t now_ns)
{
    CHECK(!self->posted);
    self->batch = (exec_batch_t){.seqs = self->seqs, .n_seqs = 0, .step = step};
    self->epoch = epoch;
    self->now_ns = now_ns;
    self->prompt_rows_left = self->config.max_prompt_rows > 0 ? self->config.max_prompt_rows
                                                              : self->config.max_num_batched_tokens;
    uint64_t preemptions = self->n_preemptions;
    uint32_t budget = schedule_running(self, self->config.max_num_batched_tokens);
    /* What was just preempted would come straight back and be thrown out again. */
    if (self->n_preemptions == preemptions) {
        schedule_waiting(self, admit, epoch, budget);
    }
    self->posted = self->batch.n_seqs > 0;
    return &self->batch;
}

/* ---- applying a result ---- */

/* Ids that may not come yet: eos ids and stop tokens while min_tokens is not reached. */
static size_t banned_ids(const scheduler_t *self, const request_t *r,
                         uint32_t out[MODEL_MAX_EOS + REQUEST_MAX_STOP_TOKENS])
{
    size_t n = 0;
    if (request_n_output(r) < r->sampling.min_tokens) {
        for (uint32_t i = 0; i < self->config.n_eos; i++) {
            out[n++] = self->config.eos_token_ids[i];
        }
        for (uint32_t i = 0; i < r->sampling.n_stop_tokens; i++) {
            out[n++] = r->sampling.stop_tokens[i];
        }
    }
    return n;
}

static bool pick_token(scheduler_t *self, const request_t *r, const exec_result_t *result,
                       size_t row, sample_t *out, lk_error_t *err)
{
    if (result->logits != NULL) {
        uint32_t banned[MODEL_MAX_EOS + REQUEST_MAX_STOP_TOKENS];
        size_t n_banned = banned_ids(self, r, banned);
        return sampler_sample(self->sampler, r, result->logits + row * self->config.vocab_size,
                              banned, n_banned, out, err) == LK_OK;
    }
    *out = (sample_t){.token = result->tokens[row],
                      .logprob = result->logprobs[row],
                      .rank = 1,
                      .n_top = r->sampling.logprobs > 0 ? 1 : 0,
                      .top_ids = &result->tokens[row],
                      .top_logprobs = &result->logprobs[row]};
    CHECK(out->token < self->config.vocab_size);
    return true;
}

/* The logprob of prompt token `index`. An executor that picks tokens itself knows of no other one.
 */
static bool score_token(scheduler_t *self, const request_t *r, uint32_t index,
                        const exec_result_t *result, size_t row, sample_t *out, lk_error_t *err)
{
    uint32_t k = r->sampling.prompt_logprobs - 1;
    if (result->logits != NULL) {
        return sampler_score(self->sampler, r, index,
                             result->logits + row * self->config.vocab_size, k, out, err) == LK_OK;
    }
    bool same = result->tokens[row] == r->tokens[index];
    *out = (sample_t){.token = r->tokens[index],
                      .logprob = same ? result->logprobs[row] : -INFINITY,
                      .rank = same ? 1 : 2,
                      .n_top = k > 0 ? 1 : 0,
                      .top_ids = &result->tokens[row],
                      .top_logprobs = &result->logprobs[row]};
    return true;
}

/* Gives out the logprobs of prompt tokens [start + 1, end], as far as there are any; row: of
 * position start. False: r has ended. */
static bool score_prompt(scheduler_t *self, request_t *r, uint32_t start, uint32_t end,
                         const exec_result_t *result, size_t row)
{
    sched_output_t out = {.request = r, .prompt_first = start + 1, .epoch = self->epoch};
    for (uint32_t i = start + 1; i < end + 1 && i < r->n_prompt; i++, row++) {
        sample_t sample;
        lk_error_t err;
        if (!score_token(self, r, i, result, row, &sample, &err)) {
            sched_finish_now(self, r, FINISH_ERROR, err.text);
            return false;
        }
        uint32_t at = out.n_prompt++, k = out.n_prompt_top = sample.n_top;
        self->prompt_logprobs[at] = sample.logprob;
        self->prompt_ranks[at] = sample.rank;
        if (k > 0) {
            memcpy(self->prompt_top_ids + at * k, sample.top_ids, k * sizeof(uint32_t));
            memcpy(self->prompt_top_logprobs + at * k, sample.top_logprobs, k * sizeof(float));
        }
        bool full = at + 1 == SCHED_PROMPT_ROWS || (at + 2) * k > self->prompt_top_room;
        if (full || i == end || i + 1 == r->n_prompt) {
            out.prompt_logprobs = self->prompt_logprobs;
            out.prompt_ranks = self->prompt_ranks;
            out.prompt_top_ids = self->prompt_top_ids;
            out.prompt_top_logprobs = self->prompt_top_logprobs;
            self->output(self->output_ctx, &out);
            out.prompt_first = i + 1;
            out.n_prompt = 0;
        }
    }
    r->prompt_scored = end >= r->n_prompt;
    return true;
}

static finish_reason_t stop_reason(const scheduler_t *self, request_t *r)
{
    const sampling_params_t *p = &r->sampling;
    uint32_t token = r->tokens[r->n_tokens - 1];
    uint32_t index = request_n_output(r) - 1;
    if (index >= p->min_tokens) {
        for (uint32_t i = 0; i < self->config.n_eos && !p->ignore_eos; i++) {
            if (token == self->config.eos_token_ids[i]) {
                return FINISH_STOP;
            }
        }
        for (uint32_t i = 0; i < p->n_stop_tokens; i++) {
            if (token == p->stop_tokens[i]) {
                r->stop_token = token;
                return FINISH_STOP;
            }
        }
    }
    if (index + 1 >= p->max_tokens || r->n_tokens >= self->config.max_model_len) {
        return FINISH_LENGTH;
    }
    return FINISH_NONE;
}

static void append_token(scheduler_t *self, request_t *r, const sample_t *sample)
{
    uint32_t index = request_n_output(r);
    if (!request_append_weight_span(r, index, self->epoch)) {
        sched_finish_now(self, r, FINISH_ERROR,
                         "the weights changed too often during this request");
        return;
    }
    CHECK(r->n_tokens < r->cap_tokens);
    r->tokens[r->n_tokens++] = sample->token;
    bool with_logprobs = r->sampling.logprobs >= 0;
    sched_output_t out = {
        .request = r,
        .first = index,
        .n = 1,
        .logprobs = with_logprobs ? &sample->logprob : NULL,
        .ranks = with_logprobs ? &sample->rank : NULL,
        .n_top = with_logprobs ? sample->n_top : 0,
        .top_ids = sample->top_ids,
        .top_logprobs = sample->top_logprobs,
        .epoch = self->epoch,
        .kv_snapshot = r->kv_snapshot_due,
        .finish = stop_reason(self, r),
    };
    r->finish_reason = out.finish;
    r->kv_snapshot_due = false;
    self->output(self->output_ctx, &out);
    if (out.finish != FINISH_NONE) {
        sched_retire(self, r, out.finish);
    }
}

/* One live sequence of the step; row: its first one in the result, of n_rows. */
static void apply(scheduler_t *self, const batch_entry_t *entry, const exec_result_t *result,
                  size_t row, size_t n_rows)
{
    request_t *r = entry->r;
    if (!kv_cache_computed(self->kv, r, entry->start, entry->start + entry->n, self->epoch)) {
        sched_finish_now(self, r, FINISH_ERROR,
                         "the weights changed too often during this request");
        return;
    }
    if (request_scores_prompt(r) &&
        !score_prompt(self, r, entry->start, entry->start + entry->n, result, row)) {
        return;
    }
    if (r->n_computed < r->n_tokens) {
        return; /* a prefill chunk */
    }
    sample_t sample;
    lk_error_t err;
    if (!pick_token(self, r, result, row + n_rows - 1, &sample, &err)) {
        sched_finish_now(self, r, FINISH_ERROR, err.text);
        return;
    }
    append_token(self, r, &sample);
}

void scheduler_update(scheduler_t *self, const exec_result_t *result)
{
    CHECK(self->posted);
    self->posted = false;
    size_t row = 0;
    for (size_t i = 0; i < self->batch.n_seqs; i++) {
        batch_entry_t *entry = &self->entries[i];
        size_t rows = self->seqs[i].n_logits;
        entry->r->batch_slot = -1;
        if (entry->ended) {
            sched_destroy_request(self, entry->r);
        } else {
            CHECK(row + rows <= result->rows);
            apply(self, entry, result, row, rows);
        }
        row += rows;
    }
    CHECK(row == result->rows);
    self->batch.n_seqs = 0;
}

void scheduler_cancel_step(scheduler_t *self)
{
    CHECK(self->posted);
    self->posted = false;
    for (size_t i = 0; i < self->batch.n_seqs; i++) {
        self->entries[i].r->batch_slot = -1;
        if (self->entries[i].ended) {
            sched_destroy_request(self, self->entries[i].r);
        }
    }
    self->batch.n_seqs = 0;
}

void scheduler_recompute_all(scheduler_t *self)
{
    CHECK(!self->posted);
    while (self->running.tail != NULL) {
        preempt(self, self->running.tail);
    }
    kv_cache_reset_prefixes(self->kv);
}
