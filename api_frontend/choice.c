#include "api_frontend/choice.h"
#include "base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
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
    free(self->top_ids);
    free(self->top_logprobs);
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
    cap = LK_MAX(cap, 16);
    if (!grow((void **)&self->ids, cap, sizeof self->ids[0]) ||
        !grow((void **)&self->logprobs, cap, sizeof self->logprobs[0]) ||
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
        ok = ok && n_top <= 64 && out->logprobs.len == n * sizeof(float) &&
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
    if (self->n_output == 0 && n > 0) {
        self->n_top = self->params->sampling.logprobs >= 0 ? out->n_top : 0;
        self->cached_tokens = out->cached_tokens;
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

bool choice_has_news(const choice_t *self)
{
    return self->n > 0 || self->text.len > 0 || self->finish != FINISH_NONE;
}

/* ---- writing ---- */

static void put_ids(lk_buf_t *out, const char *name, const uint32_t *ids, size_t n)
{
    lk_buf_printf(out, ",\"%s\":[", name);
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(out, i > 0 ? ",%" PRIu32 : "%" PRIu32, ids[i]);
    }
    lk_buf_str(out, "]");
}

/* JSON has no infinities; what clients expect in their place is -9999. */
static void put_logprob(lk_buf_t *out, float x)
{
    if (isfinite(x) && x > -9999.0f) {
        char text[32];
        snprintf(text, sizeof text, "%.9g", (double)x); /* nine digits give a float32 back */
        lk_buf_str(out, text);
        lk_buf_str(out, strpbrk(text, ".e") == NULL ? ".0" : "");
    } else {
        lk_buf_str(out, "-9999.0");
    }
}

static void token_name(const choice_t *self, uint32_t id, lk_buf_t *out)
{
    lk_buf_clear(out);
    if (self->tokenizer == NULL || self->params->return_tokens_as_token_ids) {
        lk_buf_printf(out, "token_id:%" PRIu32, id);
    } else {
        tokenizer_token_text(self->tokenizer, id, out);
    }
}

static uint64_t code_points(const lk_buf_t *text)
{
    uint64_t n = 0;
    for (size_t i = 0; i < text->len; i++) {
        n += (text->data[i] & 0xC0) != 0x80;
    }
    return n;
}

/* The sampled token first, then the most likely ones; a name that repeats is left out. */
static void put_top(const choice_t *self, size_t i, lk_buf_t *name, lk_buf_t *out)
{
    const uint32_t *ids = self->top_ids + i * self->n_top;
    size_t start = out->len;
    lk_buf_str(out, "{");
    token_name(self, self->ids[i], name);
    lk_buf_json_str(out, lk_buf_cstr(name), name->len);
    lk_buf_str(out, ":");
    put_logprob(out, self->logprobs[i]);
    for (size_t k = 0; k < self->n_top; k++) {
        if (ids[k] == self->ids[i]) {
            continue;
        }
        token_name(self, ids[k], name);
        lk_buf_t key;
        lk_buf_init(&key, 0);
        lk_buf_json_str(&key, lk_buf_cstr(name), name->len);
        lk_buf_str(&key, ":");
        bool repeats = !key.failed && !out->failed &&
                       memmem(out->data + start, out->len - start, key.data, key.len) != NULL;
        if (!repeats) {
            lk_buf_str(out, ",");
            lk_buf_append(out, key.data, key.len);
            put_logprob(out, self->top_logprobs[i * self->n_top + k]);
        }
        lk_buf_fini(&key);
    }
    lk_buf_str(out, "}");
}

static void put_logprobs(choice_t *self, lk_buf_t *out)
{
    lk_buf_t name;
    lk_buf_init(&name, 0);
    lk_buf_str(out, ",\"logprobs\":{\"tokens\":[");
    for (size_t i = 0; i < self->n; i++) {
        token_name(self, self->ids[i], &name);
        lk_buf_str(out, i > 0 ? "," : "");
        lk_buf_json_str(out, lk_buf_cstr(&name), name.len);
    }
    lk_buf_str(out, "],\"token_logprobs\":[");
    for (size_t i = 0; i < self->n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        put_logprob(out, self->logprobs[i]);
    }
    lk_buf_str(out, "],\"top_logprobs\":[");
    for (size_t i = 0; i < self->n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        put_top(self, i, &name, out);
    }
    lk_buf_str(out, "],\"text_offset\":[");
    uint64_t offset = self->text_offset;
    for (size_t i = 0; i < self->n; i++) {
        lk_buf_printf(out, i > 0 ? ",%" PRIu64 : "%" PRIu64, offset);
        if (self->tokenizer != NULL) {
            lk_buf_clear(&name);
            tokenizer_token_text(self->tokenizer, self->ids[i], &name);
            offset += code_points(&name);
        }
    }
    self->text_offset = offset;
    lk_buf_str(out, "]}");
    lk_buf_fini(&name);
}

static void put_finish(const choice_t *self, lk_buf_t *out)
{
    static const char *const names[] = {
#define X(name, value, text) [value] = text,
        FINISH_REASON_TABLE(X)
#undef X
    };
    if (self->finish == FINISH_NONE) {
        lk_buf_str(out, ",\"finish_reason\":null,\"stop_reason\":null");
        return;
    }
    lk_buf_printf(out, ",\"finish_reason\":\"%s\",\"stop_reason\":", names[self->finish]);
    if (self->stop_string >= 0) {
        const char *stop = self->params->stops[self->stop_string];
        lk_buf_json_str(out, stop, strlen(stop));
    } else if (self->finish == FINISH_STOP && self->stop_token >= 0) {
        lk_buf_printf(out, "%" PRId64, self->stop_token);
    } else {
        lk_buf_str(out, "null");
    }
}

/* Which weights made what; with the end of the choice. */
static void put_versions(choice_t *self, lk_buf_t *out)
{
    lk_buf_str(out, ",\"weight_versions\":");
    span_list_json(&self->weights, out);
    bool mixed = span_lists_mix(&self->weights, &self->kv);
    for (size_t i = 0; i < self->n_history && !mixed; i++) {
        mixed = span_lists_mix(&self->weights, &self->history[i].spans);
    }
    if (mixed && self->kv_known) {
        lk_buf_str(out, ",\"kv_versions\":");
        span_list_json(&self->kv, out);
    }
    if (mixed || self->params->return_kv_history) {
        lk_buf_str(out, ",\"kv_history\":[");
        for (size_t i = 0; i < self->n_history; i++) {
            lk_buf_printf(out, "%s{\"at\":%" PRIu64 ",\"spans\":", i > 0 ? "," : "",
                          self->history[i].at);
            span_list_json(&self->history[i].spans, out);
            lk_buf_str(out, "}");
        }
        lk_buf_str(out, "]");
    }
}

void choice_json(choice_t *self, lk_buf_t *out)
{
    const completion_params_t *params = self->params;
    lk_buf_printf(out, "{\"index\":%" PRIu32 ",\"text\":", self->index);
    lk_buf_json_str(out, lk_buf_cstr(&self->text), self->text.len);
    if (params->sampling.logprobs >= 0) {
        put_logprobs(self, out);
    } else {
        lk_buf_str(out, ",\"logprobs\":null");
    }
    put_finish(self, out);
    if (params->return_token_ids || self->tokenizer == NULL) {
        put_ids(out, "token_ids", self->ids, self->n);
        if (!self->wrote) {
            put_ids(out, "prompt_token_ids", self->prompt->ids, self->prompt->n);
        }
    }
    if (self->finish != FINISH_NONE) {
        if (params->return_seed) {
            lk_buf_printf(out, ",\"seed\":%" PRIu64, params->sampling.seed);
        }
        put_versions(self, out);
    }
    lk_buf_str(out, "}");
    out->failed = out->failed || self->text.failed;
    self->wrote = true;
    if (self->deltas) {
        self->n = 0;
        lk_buf_clear(&self->text);
    }
}
