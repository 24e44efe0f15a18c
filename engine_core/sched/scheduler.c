#include "engine_core/sched/scheduler_internal.h"
#include "base/prng.h"

#include <stdlib.h>

/* ---- lists and index ---- */

static bool before(const request_t *a, const request_t *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->arrival_seq < b->arrival_seq;
}

void sched_list_remove(request_list_t *list, request_t *r)
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

void sched_list_insert(request_list_t *list, request_t *r)
{
    request_t *at = list->tail;
    while (at != NULL && before(r, at)) {
        at = at->prev;
    }
    list_insert_after(list, r, at);
}

void sched_list_insert_front(request_list_t *list, request_t *r)
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
    self->prompt_top_room = LK_MAX(config->vocab_size, SCHED_PROMPT_ENTRIES);
    self->prompt_top_ids = malloc(self->prompt_top_room * sizeof *self->prompt_top_ids);
    self->prompt_top_logprobs = malloc(self->prompt_top_room * sizeof *self->prompt_top_logprobs);
    if (self->buckets == NULL || self->seqs == NULL || self->entries == NULL ||
        self->sampler == NULL || self->prompt_top_ids == NULL ||
        self->prompt_top_logprobs == NULL) {
        scheduler_destroy(&self);
        return NULL;
    }
    return self;
}

void sched_destroy_request(scheduler_t *self, request_t *r)
{
    kv_cache_release(self->kv, r);
    request_destroy(&r);
}

static void destroy_list(scheduler_t *self, request_list_t *list)
{
    while (list->head != NULL) {
        request_t *r = list->head;
        sched_list_remove(list, r);
        sched_destroy_request(self, r);
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
    free(self->prompt_top_ids);
    free(self->prompt_top_logprobs);
    free(self);
    *self_p = NULL;
}

bool sched_can_ever_fit(const scheduler_t *self, const request_t *r)
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
    if (!sched_can_ever_fit(self, r)) {
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

static lk_status_t check_logprobs(const scheduler_t *self, const sampling_params_t *p,
                                  lk_error_t *err)
{
    int64_t most = self->config.vocab_size;
    if (p->logprobs > most) {
        return lk_error_set(err, LK_ERR_INVALID, "logprobs must be at most %u, is %d",
                            self->config.vocab_size, p->logprobs);
    }
    if (p->prompt_logprobs > most + 1) {
        return lk_error_set(err, LK_ERR_INVALID, "prompt_logprobs must be at most %u, is %u",
                            self->config.vocab_size, p->prompt_logprobs - 1);
    }
    return LK_OK;
}

lk_status_t scheduler_add(scheduler_t *self, request_t *r, lk_error_t *err)
{
    CHECK(r->n_blocks == 0 && r->n_tokens == r->n_prompt && r->status == REQUEST_WAITING);
    LK_RETURN_IF_ERROR(check_size(self, r, err));
    LK_RETURN_IF_ERROR(sampling_params_check(&r->sampling, err));
    LK_RETURN_IF_ERROR(check_logprobs(self, &r->sampling, err));
    if (index_find(self, r->client, r->handle) != NULL) {
        return lk_error_set(err, LK_ERR_STATE, "handle %llu of front end %llu is in use",
                            (unsigned long long)r->handle, (unsigned long long)r->client);
    }
    if (self->waiting.n >= self->config.max_waiting) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%zu requests are waiting, the limit",
                            self->waiting.n);
    }
    r->arrival_seq = self->next_seq++;
    sched_list_insert(&self->waiting, r);
    request_t **bucket = index_bucket(self, r->client, r->handle);
    r->hash_next = *bucket;
    *bucket = r;
    return LK_OK;
}

/* ---- the end of a request ---- */

void sched_retire(scheduler_t *self, request_t *r, finish_reason_t reason)
{
    sched_list_remove(r->status == REQUEST_RUNNING ? &self->running : &self->waiting, r);
    index_remove(self, r);
    self->n_started -= r->started;
    r->status = REQUEST_FINISHED;
    r->finish_reason = reason;
    if (r->batch_slot >= 0) {
        self->entries[r->batch_slot].ended = true;
    } else {
        sched_destroy_request(self, r);
    }
}

void sched_finish_now(scheduler_t *self, request_t *r, finish_reason_t reason, const char *error)
{
    sched_output_t out = {.request = r,
                          .first = request_n_output(r),
                          .finish = reason,
                          .error = reason == FINISH_ERROR ? error : NULL};
    r->finish_reason = reason;
    self->output(self->output_ctx, &out);
    sched_retire(self, r, reason);
}

bool scheduler_abort(scheduler_t *self, uint64_t client, uint64_t handle)
{
    request_t *r = index_find(self, client, handle);
    if (r == NULL) {
        return false;
    }
    sched_finish_now(self, r, FINISH_ABORT, NULL);
    return true;
}

size_t scheduler_finish_all(scheduler_t *self, finish_reason_t reason, const char *error)
{
    size_t n = 0;
    for (; self->running.head != NULL; n++) {
        sched_finish_now(self, self->running.head, reason, error);
    }
    for (; self->waiting.head != NULL; n++) {
        sched_finish_now(self, self->waiting.head, reason, error);
    }
    return n;
}

static size_t drop_client_of(scheduler_t *self, request_list_t *list, uint64_t client)
{
    size_t n = 0;
    for (request_t *r = list->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->client == client) {
            sched_retire(self, r, FINISH_ABORT);
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
