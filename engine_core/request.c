#include "engine_core/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

lk_status_t sampling_params_check(const sampling_params_t *p, lk_error_t *err)
{
    if (!isfinite(p->temperature) || p->temperature < 0.0f) {
        return lk_error_set(err, LK_ERR_INVALID, "temperature must be at least 0, is %g",
                            (double)p->temperature);
    }
    if (!(p->top_p > 0.0f && p->top_p <= 1.0f)) {
        return lk_error_set(err, LK_ERR_INVALID, "top_p must be in (0, 1], is %g",
                            (double)p->top_p);
    }
    if (!(p->min_p >= 0.0f && p->min_p <= 1.0f)) {
        return lk_error_set(err, LK_ERR_INVALID, "min_p must be in [0, 1], is %g",
                            (double)p->min_p);
    }
    if (!isfinite(p->repetition_penalty) || p->repetition_penalty <= 0.0f) {
        return lk_error_set(err, LK_ERR_INVALID, "repetition_penalty must be above 0, is %g",
                            (double)p->repetition_penalty);
    }
    if (!(fabsf(p->presence_penalty) <= 2.0f)) {
        return lk_error_set(err, LK_ERR_INVALID, "presence_penalty must be in [-2, 2], is %g",
                            (double)p->presence_penalty);
    }
    if (!(fabsf(p->frequency_penalty) <= 2.0f)) {
        return lk_error_set(err, LK_ERR_INVALID, "frequency_penalty must be in [-2, 2], is %g",
                            (double)p->frequency_penalty);
    }
    if (p->max_tokens < 1) {
        return lk_error_set(err, LK_ERR_INVALID, "max_tokens must be at least 1, is 0");
    }
    if (p->min_tokens > p->max_tokens) {
        return lk_error_set(err, LK_ERR_INVALID, "min_tokens must be at most max_tokens=%u, is %u",
                            p->max_tokens, p->min_tokens);
    }
    if (p->logprobs < -1) {
        return lk_error_set(err, LK_ERR_INVALID, "logprobs must be at least -1, is %d",
                            p->logprobs);
    }
    if (p->n_stop_tokens > REQUEST_MAX_STOP_TOKENS) {
        return lk_error_set(err, LK_ERR_INVALID, "stop_token_ids: at most %d, are %u",
                            REQUEST_MAX_STOP_TOKENS, p->n_stop_tokens);
    }
    return LK_OK;
}

request_t *request_new(const uint32_t *prompt, uint32_t n_prompt, const sampling_params_t *sampling)
{
    uint64_t capacity = (uint64_t)n_prompt + sampling->max_tokens;
    if (capacity > REQUEST_MAX_TOKENS) {
        return NULL;
    }
    request_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->sampling = *sampling;
    self->tokens = malloc(LK_MAX(capacity, 1) * sizeof *self->tokens);
    if (self->tokens == NULL) {
        request_destroy(&self);
        return NULL;
    }
    self->cap_tokens = (uint32_t)capacity;
    if (n_prompt > 0) {
        memcpy(self->tokens, prompt, n_prompt * sizeof *prompt);
    }
    self->n_prompt = self->n_tokens = n_prompt;
    /* The first spans never fail afterwards. */
    self->cap_weight_spans = self->cap_kv_spans = 4;
    self->weight_spans = malloc(self->cap_weight_spans * sizeof *self->weight_spans);
    self->kv_spans = malloc(self->cap_kv_spans * sizeof *self->kv_spans);
    if (self->weight_spans == NULL || self->kv_spans == NULL) {
        request_destroy(&self);
        return NULL;
    }
    self->stop_token = -1;
    self->batch_slot = -1;
    return self;
}

void request_destroy(request_t **self_p)
{
    request_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    CHECK(self->n_blocks == 0);
    logit_rules_destroy(&self->rules);
    free(self->tokens);
    free(self->blocks);
    free(self->weight_spans);
    free(self->kv_spans);
    free(self);
    *self_p = NULL;
}

static bool append_span(epoch_span_t **spans, uint32_t *n, uint32_t *cap, uint32_t start,
                        uint32_t end, uint64_t epoch)
{
    CHECKF(start == (*n > 0 ? (*spans)[*n - 1].end : 0), "span starts at %u", start);
    CHECK(end > start);
    if (*n > 0 && (*spans)[*n - 1].epoch == epoch) {
        (*spans)[*n - 1].end = end;
        return true;
    }
    if (*n == REQUEST_MAX_SPANS) {
        return false;
    }
    if (*n == *cap) {
        epoch_span_t *more = realloc(*spans, 2 * *cap * sizeof *more);
        if (more == NULL) {
            return false;
        }
        *spans = more;
        *cap *= 2;
    }
    (*spans)[(*n)++] = (epoch_span_t){.epoch = epoch, .start = start, .end = end};
    return true;
}

bool request_append_weight_span(request_t *self, uint32_t i, uint64_t epoch)
{
    return append_span(&self->weight_spans, &self->n_weight_spans, &self->cap_weight_spans, i,
                       i + 1, epoch);
}

bool request_append_kv_span(request_t *self, uint32_t start, uint32_t end, uint64_t epoch)
{
    return append_span(&self->kv_spans, &self->n_kv_spans, &self->cap_kv_spans, start, end, epoch);
}
