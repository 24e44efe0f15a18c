#include "api_frontend/choice.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define MAX_HISTORY 4096 /* snapshots; one per preemption or recomputation */

lk_status_t choice_init(choice_t *self, const completion_params_t *params,
                        const tokenizer_t *tokenizer, const prompt_ids_t *prompt, uint32_t index,
                        bool deltas, lk_error_t *err)
{
    *self = (choice_t){
        .params = params,
        .tokenizer = tokenizer,
        .prompt = prompt,
        .index = index,
        .deltas = deltas,
        .stop_token = -1,
        .stop_string = -1,
    };
    self->shown = &self->scores;
    lk_buf_init(&self->text, 0);
    if (tokenizer == NULL) {
        return LK_OK;
    }
    detokenizer_options_t options = {
        .skip_special = params->skip_special_tokens,
        .include_stop = params->include_stop_str_in_output,
        .min_tokens = (uint32_t)params->sampling.min_tokens,
        .stops = params->stops,
        .n_stops = params->n_stops,
    };
    return detokenizer_new(tokenizer, &options, &self->detokenizer, err);
}

static void clear_history(choice_t *self)
{
    for (size_t i = 0; i < self->n_history; i++) {
        span_list_fini(&self->history[i].spans);
    }
    self->n_history = 0;
}

void choice_fini(choice_t *self)
{
    free(self->ids);
    free(self->logprobs);
    free(self->ranks);
    free(self->top_ids);
    free(self->top_logprobs);
    prompt_scores_fini(&self->scores);
    lk_buf_fini(&self->text);
    detokenizer_destroy(&self->detokenizer);
    span_list_fini(&self->weights);
    span_list_fini(&self->kv);
    clear_history(self);
    free(self->history);
    memset(self, 0, sizeof *self);
}

/* ---- taking ---- */

static bool grow(void **array, size_t cap, size_t item)
{
    void *p = realloc(*array, cap * item + 1); /* + 1: n_top may be 0 */
    if (p != NULL) {
        *array = p;
    }
    return p != NULL;
}

static bool reserve(choice_t *self, size_t more)
{
    if (self->n + more <= self->cap) {
        return true;
    }
    size_t cap = LK_MAX(self->cap * 2, self->n + more);
    cap = LK_MAX(cap, self->n_top <= 64 ? 16 : 1);
    if (!grow((void **)&self->ids, cap, sizeof self->ids[0]) ||
        !grow((void **)&self->logprobs, cap, sizeof self->logprobs[0]) ||
        !grow((void **)&self->ranks, cap, sizeof self->ranks[0]) ||
        !grow((void **)&self->top_ids, cap, self->n_top * sizeof self->top_ids[0]) ||
        !grow((void **)&self->top_logprobs, cap, self->n_top * sizeof self->top_logprobs[0])) {
        return false;
    }
    self->cap = cap;
    return true;
}

static lk_status_t check_shape(const choice_t *self, const msg_output_t *out, size_t n,
                               lk_error_t *err)
{
    bool ok = out->token_ids.len % sizeof(uint32_t) == 0 && out->finish_reason <= FINISH_ERROR;
    if (self->params->sampling.logprobs >= 0 && n > 0) {
        size_t n_top = out->n_top;
        ok = ok && out->logprobs.len == n * sizeof(float) &&
             out->ranks.len == n * sizeof(uint32_t) &&
             out->top_ids.len == n * n_top * sizeof(uint32_t) &&
             out->top_logprobs.len == n * n_top * sizeof(float) &&
             (self->n_output == 0 || n_top == self->n_top);
    }
    return ok ? LK_OK
              : lk_error_set(err, LK_ERR_PEER,
                             "the engine sent an output that does not fit together");
}

/* Copies them behind what is there; they count only once self->n says so. (What a message holds is
 * not aligned.) */
static void copy_tokens(choice_t *self, const msg_output_t *out, size_t n)
{
    if (n == 0) {
        return;
    }
    memcpy(self->ids + self->n, out->token_ids.data, n * sizeof self->ids[0]);
    if (self->params->sampling.logprobs >= 0) {
        size_t k = self->n_top;
        memcpy(self->logprobs + self->n, out->logprobs.data, n * sizeof self->logprobs[0]);
        memcpy(self->ranks + self->n, out->ranks.data, n * sizeof self->ranks[0]);
        if (k > 0) {
            memcpy(self->top_ids + self->n * k, out->top_ids.data, n * k * sizeof(uint32_t));
            memcpy(self->top_logprobs + self->n * k, out->top_logprobs.data, n * k * sizeof(float));
        }
    }
}

/* Follows the KV of all positions by the rule in engine_core/request.h: token j, at index
 * n_output, was made from positions [0, P + j). */
static void follow_kv(choice_t *self, const msg_output_t *out, size_t n)
{
    uint64_t p = self->prompt->n, j = self->n_output;
    const char *version = msg_cstr(out->version);
    if (out->kv_snapshot) {
        span_list_clear(&self->kv);
        for (size_t i = 0; i < out->kv_spans.count; i++) {
            const msg_span_t *s = &out->kv_spans.items[i];
            span_list_append(&self->kv, msg_cstr(s->version), s->epoch, s->start, s->end);
        }
        self->kv_known = true;
        if (self->n_history < MAX_HISTORY) {
            if (self->n_history == self->cap_history) {
                size_t cap = LK_MAX(self->cap_history * 2, 2);
                CHECK(grow((void **)&self->history, cap, sizeof self->history[0]));
                self->cap_history = cap;
            }
            kv_snapshot_t *s = &self->history[self->n_history++];
            *s = (kv_snapshot_t){.at = j};
            for (size_t i = 0; i < self->kv.n; i++) {
                const span_t *k = &self->kv.items[i];
                span_list_append(&s->spans, k->version, k->epoch, k->start, k->end);
            }
        }
    } else {
        span_list_append(&self->kv, version, out->epoch, p + j - 1, p + j);
    }
    if (n > 1) {
        span_list_append(&self->kv, version, out->epoch, p + j, p + j + n - 1);
    }
}

/* Text of the n new ids. *used: up to the one that completed a stop string. The id that made the
 * engine stop has no text unless stop strings are wanted in the output. */
static lk_status_t detokenize(choice_t *self, finish_reason_t finish, size_t n, size_t *used,
                              lk_error_t *err)
{
    *used = n;
    if (self->detokenizer == NULL) {
        return LK_OK;
    }
    bool hide_last = n > 0 && finish == FINISH_STOP && !self->params->include_stop_str_in_output;
    size_t shown = hide_last ? n - 1 : n, u;
    LK_RETURN_IF_ERROR(
        detokenizer_push(self->detokenizer, self->ids + self->n, shown, &self->text, &u, err));
    self->stop_string = detokenizer_stop(self->detokenizer);
    if (self->stop_string >= 0) {
        *used = u;
    }
    return LK_OK;
}

/* The engine's own spans, which know of labels that were given later. Those followed here stand in
 * where the choice ends on this side. */
static void take_engine_spans(choice_t *self, const msg_output_t *out)
{
    size_t n = out->weight_spans.count;
    if (n == 0 || out->weight_spans.items[n - 1].end != self->n_output) {
        return;
    }
    span_list_clear(&self->weights);
    for (size_t i = 0; i < n; i++) {
        const msg_span_t *s = &out->weight_spans.items[i];
        span_list_append(&self->weights, msg_cstr(s->version), s->epoch, s->start, s->end);
    }
}

lk_status_t choice_push(choice_t *self, const msg_output_t *out, lk_error_t *err)
{
    if (self->finish != FINISH_NONE) {
        return LK_OK;
    }
    size_t n = out->token_ids.len / sizeof(uint32_t), used;
    LK_RETURN_IF_ERROR(check_shape(self, out, n, err));
    LK_RETURN_IF_ERROR(prompt_scores_take(&self->scores, out, err));
    if (n > 0 && !prompt_scores_complete(&self->scores)) {
        return lk_error_set(err, LK_ERR_PEER,
                            "the engine sent a token before all of its prompt's logprobs");
    }
    if (self->n_output == 0 && n > 0) {
        self->n_top = self->params->sampling.logprobs >= 0 ? out->n_top : 0;
        self->cached_tokens = out->cached_tokens;
    }
    if (self->params->echo_only) { /* the engine's one token is nobody's */
        if (out->finish_reason != FINISH_NONE) {
            choice_end(self, (finish_reason_t)out->finish_reason);
        }
        return LK_OK;
    }
    if (!reserve(self, n)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    copy_tokens(self, out, n);
    LK_RETURN_IF_ERROR(detokenize(self, (finish_reason_t)out->finish_reason, n, &used, err));
    self->n += used;
    if (used > 0) {
        follow_kv(self, out, used);
    }
    span_list_append(&self->weights, msg_cstr(out->version), out->epoch, self->n_output,
                     self->n_output + used);
    self->n_output += used;
    if (self->stop_string >= 0) {
        choice_end(self, FINISH_STOP);
    } else if (out->finish_reason != FINISH_NONE) {
        self->stop_token = out->stop_token;
        take_engine_spans(self, out);
        choice_end(self, (finish_reason_t)out->finish_reason);
    }
    return LK_OK;
}

void choice_end(choice_t *self, finish_reason_t finish)
{
    self->finish = finish;
    if (self->detokenizer != NULL) {
        lk_error_t err;
        /* The text is the request's own; what can fail is memory, which shows in text.failed. */
        (void)!detokenizer_finish(self->detokenizer, &self->text, &err);
    }
}

size_t choice_held(const choice_t *self)
{
    size_t per_token = self->params->sampling.logprobs >= 0 ? 1 + self->n_top : 0;
    return self->n * per_token + prompt_scores_held(&self->scores);
}

bool choice_has_news(const choice_t *self)
{
    return self->n > 0 || self->text.len > 0 || self->finish != FINISH_NONE;
}
