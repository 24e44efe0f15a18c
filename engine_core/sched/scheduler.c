#include "engine_core/sched/scheduler.h"
#include "base/prng.h"
#include "engine_core/exec/sampler.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    request_t *head, *tail;
    size_t n;
} request_list_t;

/* A row of the posted step. The request is kept until the step is over, also when it has ended. */
typedef struct {
    request_t *r;
    uint32_t start, n;
    bool ended; /* towards the client; only its memory is left */
} batch_entry_t;

struct scheduler {
    scheduler_config_t config;
    kv_cache_t *kv;
    sampler_t *sampler;
    sched_output_fn output;
    void *output_ctx;

    request_list_t waiting, running; /* both in order of (priority, arrival_seq) */
    size_t n_started;                /* in either list, with `started` */
    request_t **buckets;             /* by (client, handle) */
    uint32_t bucket_mask;
    uint64_t next_seq, n_preemptions;

    bool posted;
    uint64_t epoch; /* of the posted step */
    exec_batch_t batch;
    exec_seq_t *seqs;       /* [max_num_seqs] */
    batch_entry_t *entries; /* [max_num_seqs] */
};

/* ---- lists and index ---- */

static bool before(const request_t *a, const request_t *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->arrival_seq < b->arrival_seq;
}

static void list_remove(request_list_t *list, request_t *r)
{
    *(r->prev != NULL ? &r->prev->next : &list->head) = r->next;
    *(r->next != NULL ? &r->next->prev : &list->tail) = r->prev;
    r->prev = r->next = NULL;
    list->n--;
}

static void list_insert_after(request_list_t *list, request_t *r, request_t *at)
{
    r->prev = at;
    r->next = at != NULL ? at->next : list->head;
    *(r->prev != NULL ? &r->prev->next : &list->head) = r;
    *(r->next != NULL ? &r->next->prev : &list->tail) = r;
    list->n++;
}

/* From the end: new arrivals and new admissions mostly belong there. */
static void list_insert(request_list_t *list, request_t *r)
{
    request_t *at = list->tail;
    while (at != NULL && before(r, at)) {
        at = at->prev;
    }
    list_insert_after(list, r, at);
}

/* From the front: preempted requests mostly belong there. */
static void list_insert_front(request_list_t *list, request_t *r)
{
    request_t *at = NULL;
    request_t *next = list->head;
    while (next != NULL && before(next, r)) {
        at = next;
        next = next->next;
    }
    list_insert_after(list, r, at);
}

static request_t **index_bucket(const scheduler_t *self, uint64_t client, uint64_t handle)
{
    return &self->buckets[lk_mix64(client ^ lk_mix64(handle)) & self->bucket_mask];
}

static request_t *index_find(const scheduler_t *self, uint64_t client, uint64_t handle)
{
    request_t *r = *index_bucket(self, client, handle);
    while (r != NULL && (r->client != client || r->handle != handle)) {
        r = r->hash_next;
    }
    return r;
}

static void index_remove(scheduler_t *self, request_t *r)
{
    request_t **link = index_bucket(self, r->client, r->handle);
    while (*link != r) {
        CHECK(*link != NULL);
        link = &(*link)->hash_next;
    }
    *link = r->hash_next;
    r->hash_next = NULL;
}

/* ---- life ---- */

scheduler_t *scheduler_new(const scheduler_config_t *config, kv_cache_t *kv, sched_output_fn fn,
                           void *ctx)
{
    CHECK(config->max_num_seqs > 0 && config->max_num_batched_tokens > 0);
    CHECK(config->vocab_size > 0 && config->n_eos <= MODEL_MAX_EOS);
    scheduler_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    uint64_t most = (uint64_t)config->max_waiting + config->max_num_seqs;
    uint32_t n_buckets = 64;
    while (n_buckets < most && n_buckets < 1u << 16) {
        n_buckets *= 2;
    }
    self->config = *config;
    self->kv = kv;
    self->output = fn;
    self->output_ctx = ctx;
    self->bucket_mask = n_buckets - 1;
    self->buckets = calloc(n_buckets, sizeof *self->buckets);
    self->seqs = calloc(config->max_num_seqs, sizeof *self->seqs);
    self->entries = calloc(config->max_num_seqs, sizeof *self->entries);
    self->sampler = sampler_new(config->vocab_size, config->processed_logprobs);
    if (self->buckets == NULL || self->seqs == NULL || self->entries == NULL ||
        self->sampler == NULL) {
        scheduler_destroy(&self);
        return NULL;
    }
    return self;
}

static void destroy_request(scheduler_t *self, request_t *r)
{
    kv_cache_release(self->kv, r);
    request_destroy(&r);
}

static void destroy_list(scheduler_t *self, request_list_t *list)
{
    while (list->head != NULL) {
        request_t *r = list->head;
        list_remove(list, r);
        destroy_request(self, r);
    }
}

void scheduler_destroy(scheduler_t **self_p)
{
    scheduler_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    if (self->posted) {
        scheduler_cancel_step(self);
    }
    destroy_list(self, &self->running);
    destroy_list(self, &self->waiting);
    sampler_destroy(&self->sampler);
    free(self->buckets);
    free(self->seqs);
    free(self->entries);
    free(self);
    *self_p = NULL;
}

static bool can_ever_fit(const scheduler_t *self, const request_t *r)
{
    return r->n_tokens <= (uint64_t)kv_cache_num_blocks(self->kv) * kv_cache_block_size(self->kv);
}

static lk_status_t check_size(const scheduler_t *self, const request_t *r, lk_error_t *err)
{
    if (r->n_prompt == 0) {
        return lk_error_set(err, LK_ERR_INVALID, "the prompt is empty");
    }
    if ((uint64_t)r->n_prompt + 1 > self->config.max_model_len) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "the prompt has %u tokens; with one token of output this is over "
                            "max_model_len=%u",
                            r->n_prompt, self->config.max_model_len);
    }
    uint64_t room = (uint64_t)kv_cache_num_blocks(self->kv) * kv_cache_block_size(self->kv);
    if (!can_ever_fit(self, r)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "the prompt has %u tokens; the KV cache holds %llu (%u blocks of %u)",
                            r->n_prompt, (unsigned long long)room, kv_cache_num_blocks(self->kv),
                            kv_cache_block_size(self->kv));
    }
    for (uint32_t i = 0; i < r->n_prompt; i++) {
        if (r->tokens[i] >= self->config.vocab_size) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "prompt token %u is %u; the vocabulary has %u tokens", i,
                                r->tokens[i], self->config.vocab_size);
        }
    }
    return LK_OK;
}

lk_status_t scheduler_add(scheduler_t *self, request_t *r, lk_error_t *err)
{
    CHECK(r->n_blocks == 0 && r->n_tokens == r->n_prompt && r->status == REQUEST_WAITING);
    LK_RETURN_IF_ERROR(check_size(self, r, err));
    LK_RETURN_IF_ERROR(sampling_params_check(&r->sampling, err));
    if (index_find(self, r->client, r->handle) != NULL) {
        return lk_error_set(err, LK_ERR_STATE, "handle %llu of front end %llu is in use",
                            (unsigned long long)r->handle, (unsigned long long)r->client);
    }
    if (self->waiting.n >= self->config.max_waiting) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%zu requests are waiting, the limit",
                            self->waiting.n);
    }
    r->arrival_seq = self->next_seq++;
    list_insert(&self->waiting, r);
    request_t **bucket = index_bucket(self, r->client, r->handle);
    r->hash_next = *bucket;
    *bucket = r;
    return LK_OK;
}

/* ---- the end of a request ---- */

/* Takes r out of everything; its memory goes now, or with the step that still uses it. */
static void retire(scheduler_t *self, request_t *r, finish_reason_t reason)
{
    list_remove(r->status == REQUEST_RUNNING ? &self->running : &self->waiting, r);
    index_remove(self, r);
    self->n_started -= r->started;
    r->status = REQUEST_FINISHED;
    r->finish_reason = reason;
    if (r->batch_slot >= 0) {
        self->entries[r->batch_slot].ended = true;
    } else {
        destroy_request(self, r);
    }
}

/* Ends r with an output that carries no tokens. */
static void finish_now(scheduler_t *self, request_t *r, finish_reason_t reason, const char *error)
{
    sched_output_t out = {.request = r,
                          .first = request_n_output(r),
                          .finish = reason,
                          .error = reason == FINISH_ERROR ? error : NULL};
    r->finish_reason = reason;
    self->output(self->output_ctx, &out);
    retire(self, r, reason);
}

bool scheduler_abort(scheduler_t *self, uint64_t client, uint64_t handle)
{
    request_t *r = index_find(self, client, handle);
    if (r == NULL) {
        return false;
    }
    finish_now(self, r, FINISH_ABORT, NULL);
    return true;
}

size_t scheduler_finish_all(scheduler_t *self, finish_reason_t reason, const char *error)
{
    size_t n = 0;
    for (; self->running.head != NULL; n++) {
        finish_now(self, self->running.head, reason, error);
    }
    for (; self->waiting.head != NULL; n++) {
        finish_now(self, self->waiting.head, reason, error);
    }
    return n;
}

static size_t drop_client_of(scheduler_t *self, request_list_t *list, uint64_t client)
{
    size_t n = 0;
    for (request_t *r = list->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->client == client) {
            retire(self, r, FINISH_ABORT);
            n++;
        }
    }
    return n;
}

size_t scheduler_drop_client(scheduler_t *self, uint64_t client)
{
    return drop_client_of(self, &self->running, client) +
           drop_client_of(self, &self->waiting, client);
}

/* ---- picking a batch ---- */

static void preempt(scheduler_t *self, request_t *r)
{
    CHECK(r->batch_slot < 0);
    kv_cache_release(self->kv, r);
    list_remove(&self->running, r);
    r->status = REQUEST_WAITING;
    r->n_preempted++;
    self->n_preemptions++;
    list_insert_front(&self->waiting, r);
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
                                    .n_logits = last ? 1 : 0};
    r->batch_slot = (int32_t)slot;
}

static void finish_too_large(scheduler_t *self, request_t *r)
{
    char text[160];
    snprintf(text, sizeof text,
             "the KV cache (%u blocks of %u tokens) is too small for this request, which has grown "
             "to %u tokens",
             kv_cache_num_blocks(self->kv), kv_cache_block_size(self->kv), r->n_tokens);
    finish_now(self, r, FINISH_ERROR, text);
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
        uint32_t n = LK_MIN(r->n_tokens - r->n_computed, budget);
        if (!make_room(self, r, r->n_computed + n)) {
            break; /* r was the last one */
        }
        batch_add(self, r, n);
        budget -= n;
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
    list_remove(&self->waiting, r);
    list_insert(&self->running, r);
    r->status = REQUEST_RUNNING;
    r->kv_snapshot_due = true;
    if (!r->started) {
        r->started = true;
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
        if (!can_ever_fit(self, r)) {
            finish_too_large(self, r); /* it filled the pool, and was preempted before it failed */
            continue;
        }
        if (self->running.n >= self->config.max_num_seqs || !admit_request(self, r, epoch)) {
            break; /* nobody overtakes it */
        }
        uint32_t n = LK_MIN(r->n_tokens - r->n_computed, budget);
        batch_add(self, r, n);
        budget -= n;
    }
}

const exec_batch_t *scheduler_schedule(scheduler_t *self, bool admit, uint64_t epoch, uint64_t step)
{
    CHECK(!self->posted);
    self->batch = (exec_batch_t){.seqs = self->seqs, .n_seqs = 0, .step = step};
    self->epoch = epoch;
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
    out->token = result->tokens[row];
    out->logprob = result->logprobs[row];
    out->rank = 1;
    out->n_top = r->sampling.logprobs > 0 ? 1 : 0;
    out->top_ids[0] = out->token;
    out->top_logprobs[0] = out->logprob;
    CHECK(out->token < self->config.vocab_size);
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
        finish_now(self, r, FINISH_ERROR, "the weights changed too often during this request");
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
        retire(self, r, out.finish);
    }
}

/* One live row of the step; row: of the result, if it has one. */
static void apply(scheduler_t *self, const batch_entry_t *entry, const exec_result_t *result,
                  size_t row)
{
    request_t *r = entry->r;
    if (!kv_cache_computed(self->kv, r, entry->start, entry->start + entry->n, self->epoch)) {
        finish_now(self, r, FINISH_ERROR, "the weights changed too often during this request");
        return;
    }
    if (r->n_computed < r->n_tokens) {
        return; /* a prefill chunk */
    }
    sample_t sample;
    lk_error_t err;
    if (!pick_token(self, r, result, row, &sample, &err)) {
        finish_now(self, r, FINISH_ERROR, err.text);
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
            destroy_request(self, entry->r);
        } else {
            CHECK(row + rows <= result->rows);
            apply(self, entry, result, row);
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
            destroy_request(self, self->entries[i].r);
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

/* ---- questions ---- */

size_t scheduler_num_waiting(const scheduler_t *self)
{
    return self->waiting.n;
}

size_t scheduler_num_running(const scheduler_t *self)
{
    return self->running.n;
}

size_t scheduler_num_started(const scheduler_t *self)
{
    return self->n_started;
}

uint64_t scheduler_num_preemptions(const scheduler_t *self)
{
    return self->n_preemptions;
}

static uint64_t oldest_epoch_in(const request_list_t *list, uint64_t oldest)
{
    for (const request_t *r = list->head; r != NULL; r = r->next) {
        /* epochs grow from span to span */
        if (r->n_weight_spans > 0) {
            oldest = LK_MIN(oldest, r->weight_spans[0].epoch);
        }
        if (r->n_kv_spans > 0) {
            oldest = LK_MIN(oldest, r->kv_spans[0].epoch);
        }
    }
    return oldest;
}

uint64_t scheduler_oldest_epoch(const scheduler_t *self, uint64_t otherwise)
{
    return oldest_epoch_in(&self->running, oldest_epoch_in(&self->waiting, otherwise));
}

static void verify_list(const scheduler_t *self, const request_list_t *list,
                        request_status_t status, request_t **all, size_t *n_all, size_t *n_started)
{
    size_t n = 0;
    const request_t *last = NULL;
    for (request_t *r = list->head; r != NULL; last = r, r = r->next) {
        CHECK(r->prev == last && (last == NULL || before(last, r)));
        CHECK(r->status == status && r->finish_reason == FINISH_NONE);
        CHECK(index_find(self, r->client, r->handle) == r);
        CHECK(status == REQUEST_RUNNING ? r->started : r->n_blocks == 0 && r->batch_slot < 0);
        CHECK(r->batch_slot < 0 || self->entries[r->batch_slot].r == r);
        CHECK(r->n_computed < r->n_tokens && r->n_tokens < self->config.max_model_len);
        CHECK(request_n_output(r) < r->sampling.max_tokens);
        CHECK(request_n_output(r) == 0 ||
              r->weight_spans[r->n_weight_spans - 1].end == request_n_output(r));
        *n_started += r->started;
        all[(*n_all)++] = r;
        n++;
    }
    CHECK(last == list->tail && n == list->n);
}

void scheduler_verify(const scheduler_t *self)
{
    size_t most = self->running.n + self->waiting.n + self->config.max_num_seqs;
    request_t **all = calloc(most, sizeof(request_t *));
    CHECK(all != NULL);
    size_t n_all = 0, n_started = 0, n_indexed = 0;
    CHECK(self->running.n <= self->config.max_num_seqs);
    verify_list(self, &self->running, REQUEST_RUNNING, all, &n_all, &n_started);
    verify_list(self, &self->waiting, REQUEST_WAITING, all, &n_all, &n_started);
    CHECK(n_started == self->n_started);
    for (uint32_t i = 0; i <= self->bucket_mask; i++) {
        for (const request_t *r = self->buckets[i]; r != NULL; r = r->hash_next) {
            n_indexed++;
        }
    }
    CHECK(n_indexed == n_all);
    CHECK(self->posted || self->batch.n_seqs == 0);
    for (size_t i = 0; i < self->batch.n_seqs; i++) {
        const batch_entry_t *entry = &self->entries[i];
        CHECK(entry->r->batch_slot == (int32_t)i);
        CHECK(entry->ended == (entry->r->status == REQUEST_FINISHED));
        if (entry->ended) {
            all[n_all++] = entry->r;
        }
    }
    kv_cache_verify(self->kv, all, n_all);
    free(all);
}
