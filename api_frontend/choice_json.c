/* choice_json.c: how a choice is written. */
#include "api_frontend/choice.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

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

/* ---- /inference/v1/generate: ids instead of names ---- */

static void put_token(lk_buf_t *out, uint32_t id, float logprob, uint32_t rank)
{
    lk_buf_printf(
        out, "{\"token\":\"token_id:%" PRIu32 "\",\"token_id\":%" PRIu32 ",\"logprob\":", id, id);
    put_logprob(out, logprob);
    lk_buf_printf(out, ",\"rank\":%" PRIu32, rank);
}

/* The sampled token first, then the most likely others. Of equal ones all have the best rank. */
static void put_content_top(const choice_t *self, size_t i, lk_buf_t *out)
{
    const uint32_t *ids = self->top_ids + i * self->n_top;
    const float *values = self->top_logprobs + i * self->n_top;
    lk_buf_str(out, ",\"top_logprobs\":[");
    if (self->n_top > 0) {
        put_token(out, self->ids[i], self->logprobs[i], self->ranks[i]);
        lk_buf_str(out, "}");
    }
    uint32_t rank = 1;
    for (size_t k = 0; k < self->n_top; k++) {
        rank = k > 0 && values[k] < values[k - 1] ? (uint32_t)k + 1 : rank;
        if (ids[k] != self->ids[i]) {
            lk_buf_str(out, ",");
            put_token(out, ids[k], values[k], rank);
            lk_buf_str(out, "}");
        }
    }
    lk_buf_str(out, "]");
}

static void put_content(const choice_t *self, lk_buf_t *out)
{
    lk_buf_str(out, ",\"logprobs\":{\"content\":[");
    for (size_t i = 0; i < self->n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        put_token(out, self->ids[i], self->logprobs[i], self->ranks[i]);
        put_content_top(self, i, out);
        lk_buf_str(out, "}");
    }
    lk_buf_str(out, "]}");
}

/* ---- both ---- */

const char *choice_finish_name(finish_reason_t finish)
{
    static const char *const names[] = {
#define X(name, value, text) [value] = text,
        FINISH_REASON_TABLE(X)
#undef X
    };
    return names[finish];
}

static void put_finish(const choice_t *self, lk_buf_t *out)
{
    if (self->finish == FINISH_NONE) {
        lk_buf_str(out, ",\"finish_reason\":null,\"stop_reason\":null");
        return;
    }
    lk_buf_printf(out,
                  ",\"finish_reason\":\"%s\",\"stop_reason\":", choice_finish_name(self->finish));
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
    bool generate = params->kind == COMPLETION_GENERATE;
    lk_buf_printf(out, "{\"index\":%" PRIu32, self->index);
    if (params->text) {
        lk_buf_str(out, ",\"text\":");
        lk_buf_json_str(out, lk_buf_cstr(&self->text), self->text.len);
    }
    if (params->sampling.logprobs < 0) {
        lk_buf_str(out, ",\"logprobs\":null");
    } else if (generate) {
        put_content(self, out);
    } else {
        put_logprobs(self, out);
    }
    put_finish(self, out);
    if (generate) {
        put_ids(out, "token_ids", self->ids, self->n);
    } else if (params->return_token_ids || self->tokenizer == NULL) {
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
