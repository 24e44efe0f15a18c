/* choice_json.c: how a choice is written. */
#include "api_frontend/choice.h"
#include "base/check.h"

#include <inttypes.h>
#include <string.h>

static void put_ids(lk_buf_t *out, const char *name, const uint32_t *ids, size_t n)
{
    lk_buf_printf(out, ",\"%s\":[", name);
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(out, i > 0 ? ",%" PRIu32 : "%" PRIu32, ids[i]);
    }
    lk_buf_str(out, "]");
}

static uint64_t code_points(const lk_buf_t *text)
{
    uint64_t n = 0;
    for (size_t i = 0; i < text->len; i++) {
        n += (text->data[i] & 0xC0) != 0x80;
    }
    return n;
}

static scored_token_t token_at(const choice_t *self, size_t i)
{
    return (scored_token_t){.id = self->ids[i],
                            .rank = self->ranks[i],
                            .logprob = self->logprobs[i],
                            .n_top = self->n_top,
                            .top_ids = self->top_ids + i * self->n_top,
                            .top_logprobs = self->top_logprobs + i * self->n_top};
}

/* ---- /v1/completions: four lists, the echoed prompt's tokens first ---- */

/* Of the prompt, in this piece of the reply. */
static size_t n_echoed(const choice_t *self)
{
    return self->params->echo && !self->wrote ? self->prompt->n : 0;
}

/* Token i of those lists, the first n_echo of which are the prompt's. False: without a logprob. */
static bool listed_token(const choice_t *self, size_t i, size_t n_echo, scored_token_t *out)
{
    if (i >= n_echo) {
        *out = token_at(self, i - n_echo);
        return true;
    }
    if (i == 0 || !prompt_scores_complete(self->shown) || self->shown->prompt == NULL) {
        *out = (scored_token_t){.id = self->prompt->ids[i]};
        return false;
    }
    *out = prompt_scores_at(self->shown, i);
    /* prompt_logprobs may ask for more of them */
    out->n_top = LK_MIN(out->n_top, (size_t)self->params->sampling.logprobs);
    return true;
}

static void put_offsets(choice_t *self, size_t n, size_t n_echo, lk_buf_t *out)
{
    lk_buf_t text;
    lk_buf_init(&text, 0);
    uint64_t offset = self->text_offset;
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(out, i > 0 ? ",%" PRIu64 : "%" PRIu64, offset);
        if (self->tokenizer != NULL) {
            uint32_t id = i < n_echo ? self->prompt->ids[i] : self->ids[i - n_echo];
            lk_buf_clear(&text);
            tokenizer_token_text(self->tokenizer, id, &text);
            offset += code_points(&text);
        }
    }
    self->text_offset = offset;
    lk_buf_fini(&text);
}

static void put_logprobs(choice_t *self, lk_buf_t *out)
{
    size_t n_echo = n_echoed(self), n = n_echo + self->n;
    scored_token_t token;
    token_names_t names;
    token_names_init(&names, self->tokenizer, self->params->return_tokens_as_token_ids);
    lk_buf_str(out, ",\"logprobs\":{\"tokens\":[");
    for (size_t i = 0; i < n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        (void)listed_token(self, i, n_echo, &token);
        logprobs_json_name(&names, token.id, out);
    }
    lk_buf_str(out, "],\"token_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        if (listed_token(self, i, n_echo, &token)) {
            logprobs_json_number(out, token.logprob);
        } else {
            lk_buf_str(out, "null");
        }
    }
    lk_buf_str(out, "],\"top_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        lk_buf_str(out, i > 0 ? "," : "");
        if (listed_token(self, i, n_echo, &token)) {
            logprobs_json_map(&names, &token, out);
        } else {
            lk_buf_str(out, "null");
        }
    }
    lk_buf_str(out, "],\"text_offset\":[");
    put_offsets(self, n, n_echo, out);
    lk_buf_str(out, "]}");
    out->failed = out->failed || names.text.failed;
    token_names_fini(&names);
}

/* ---- /inference/v1/generate: ids instead of names ---- */

static void put_content(const choice_t *self, lk_buf_t *out)
{
    lk_buf_str(out, ",\"logprobs\":{\"content\":[");
    for (size_t i = 0; i < self->n; i++) {
        scored_token_t token = token_at(self, i);
        lk_buf_str(out, i > 0 ? "," : "");
        logprobs_json_content(&token, out);
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

/* The echoed prompt as it was sent, or what its ids say. */
static void put_text(choice_t *self, lk_buf_t *out)
{
    const prompt_ids_t *prompt = self->prompt;
    lk_buf_str(out, ",\"text\":");
    if (n_echoed(self) == 0) {
        lk_buf_json_str(out, lk_buf_cstr(&self->text), self->text.len);
        return;
    }
    lk_buf_t text;
    lk_buf_init(&text, 0);
    if (prompt->text != NULL) {
        lk_buf_append(&text, prompt->text, prompt->text_len);
    } else if (self->tokenizer != NULL) {
        tokenizer_decode(self->tokenizer, prompt->ids, prompt->n, self->params->skip_special_tokens,
                         &text);
    }
    lk_buf_append(&text, self->text.data, self->text.len);
    lk_buf_json_str(out, lk_buf_cstr(&text), text.len);
    out->failed = out->failed || text.failed;
    lk_buf_fini(&text);
}

void choice_json(choice_t *self, lk_buf_t *out)
{
    const completion_params_t *params = self->params;
    bool generate = params->kind == COMPLETION_GENERATE;
    lk_buf_printf(out, "{\"index\":%" PRIu32, self->index);
    if (params->text) {
        put_text(self, out);
    }
    if (params->sampling.logprobs < 0) {
        lk_buf_str(out, ",\"logprobs\":null");
    } else if (generate) {
        put_content(self, out);
    } else {
        put_logprobs(self, out);
    }
    put_finish(self, out);
    if (!generate && params->prompt_logprobs >= 0) { /* of the other one: beside the choices */
        lk_buf_str(out, ",\"prompt_logprobs\":");
        prompt_scores_json(self->shown, (size_t)params->prompt_logprobs, self->tokenizer, out);
    }
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
