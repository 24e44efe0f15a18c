#include "api_frontend/prompt_scores.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

void prompt_scores_init(prompt_scores_t *self, const prompt_ids_t *prompt, size_t max_top)
{
    *self = (prompt_scores_t){.prompt = prompt, .max_top = max_top, .n = 1};
}

void prompt_scores_fini(prompt_scores_t *self)
{
    free(self->logprobs);
    free(self->ranks);
    free(self->top_ids);
    free(self->top_logprobs);
    *self = (prompt_scores_t){0};
}

static bool fits(const prompt_scores_t *self, const msg_output_t *out, size_t n)
{
    size_t first = out->prompt_first, top = out->n_prompt_top;
    return self->prompt != NULL && first >= 1 && first <= self->n && first <= self->prompt->n &&
           n <= self->prompt->n - first && top <= self->max_top &&
           (self->logprobs == NULL || top == self->n_top) &&
           out->prompt_logprobs.len == n * sizeof(float) &&
           out->prompt_ranks.len == n * sizeof(uint32_t) &&
           out->prompt_top_ids.len == n * top * sizeof(uint32_t) &&
           out->prompt_top_logprobs.len == n * top * sizeof(float);
}

/* + 1: neither length is ever 0. The front end bounds the product (completion_logprobs.c). */
static bool make_room(prompt_scores_t *self)
{
    size_t n = self->prompt->n, top = n * self->n_top + 1;
    self->ranks = malloc((n + 1) * sizeof *self->ranks);
    self->top_ids = malloc(top * sizeof *self->top_ids);
    self->top_logprobs = malloc(top * sizeof *self->top_logprobs);
    self->logprobs = malloc((n + 1) * sizeof *self->logprobs);
    return self->ranks != NULL && self->top_ids != NULL && self->top_logprobs != NULL &&
           self->logprobs != NULL;
}

lk_status_t prompt_scores_take(prompt_scores_t *self, const msg_output_t *out, lk_error_t *err)
{
    size_t n = out->prompt_logprobs.len / sizeof(float), first = out->prompt_first;
    if (n == 0) {
        return LK_OK;
    }
    if (!fits(self, out, n)) {
        return lk_error_set(err, LK_ERR_PEER,
                            "the engine sent prompt logprobs that do not fit together");
    }
    if (self->logprobs == NULL) {
        self->n_top = out->n_prompt_top;
        if (!make_room(self)) {
            const prompt_ids_t *prompt = self->prompt;
            size_t max_top = self->max_top;
            prompt_scores_fini(self);
            prompt_scores_init(self, prompt, max_top);
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for prompt logprobs");
        }
    }
    size_t k = self->n_top;
    memcpy(self->logprobs + first, out->prompt_logprobs.data, n * sizeof(float));
    memcpy(self->ranks + first, out->prompt_ranks.data, n * sizeof(uint32_t));
    if (k > 0) {
        memcpy(self->top_ids + first * k, out->prompt_top_ids.data, n * k * sizeof(uint32_t));
        memcpy(self->top_logprobs + first * k, out->prompt_top_logprobs.data,
               n * k * sizeof(float));
    }
    self->n = first + n;
    return LK_OK;
}

bool prompt_scores_complete(const prompt_scores_t *self)
{
    return self->prompt == NULL || self->n == self->prompt->n;
}

size_t prompt_scores_held(const prompt_scores_t *self)
{
    return self->logprobs != NULL ? self->prompt->n * (1 + self->n_top) : 0;
}

scored_token_t prompt_scores_at(const prompt_scores_t *self, size_t i)
{
    CHECK(i >= 1 && i < self->n);
    return (scored_token_t){.id = self->prompt->ids[i],
                            .rank = self->ranks[i],
                            .logprob = self->logprobs[i],
                            .n_top = self->n_top,
                            .top_ids = self->top_ids + i * self->n_top,
                            .top_logprobs = self->top_logprobs + i * self->n_top};
}

void prompt_scores_json(const prompt_scores_t *self, size_t n_top, const tokenizer_t *tokenizer,
                        lk_buf_t *out)
{
    if (self->prompt == NULL || !prompt_scores_complete(self)) {
        lk_buf_str(out, "null");
        return;
    }
    lk_buf_t text;
    lk_buf_init(&text, 0);
    lk_buf_str(out, "[null");
    for (size_t i = 1; i < self->prompt->n; i++) {
        scored_token_t token = prompt_scores_at(self, i);
        token.n_top = LK_MIN(token.n_top, n_top);
        lk_buf_str(out, ",");
        logprobs_json_prompt(tokenizer, &token, &text, out);
    }
    lk_buf_str(out, "]");
    lk_buf_fini(&text);
}
