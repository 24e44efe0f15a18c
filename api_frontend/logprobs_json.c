#include "api_frontend/logprobs_json.h"
#include "base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_TOKEN UINT32_MAX

void logprobs_json_number(lk_buf_t *out, float x)
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

/* ---- names ---- */

void token_names_init(token_names_t *self, const tokenizer_t *tokenizer, bool as_ids)
{
    *self = (token_names_t){.tokenizer = tokenizer, .as_ids = as_ids};
    lk_buf_init(&self->text, 0);
}

void token_names_fini(token_names_t *self)
{
    lk_buf_fini(&self->text);
    free(self->taken);
}

static void name_of(token_names_t *self, uint32_t id)
{
    lk_buf_clear(&self->text);
    if (self->tokenizer != NULL && !self->as_ids) {
        tokenizer_token_text(self->tokenizer, id, &self->text);
        if (self->text.len == 0 || memchr(self->text.data, 0, self->text.len) == NULL) {
            return;
        }
        lk_buf_clear(&self->text);
    }
    lk_buf_printf(&self->text, "token_id:%" PRIu32, id);
}

void logprobs_json_name(token_names_t *names, uint32_t id, lk_buf_t *out)
{
    name_of(names, id);
    lk_buf_json_str(out, lk_buf_cstr(&names->text), names->text.len);
}

/* Empties the set of names, with room for n. False when out of memory. */
static bool forget_names(token_names_t *self, size_t n)
{
    size_t slots = 16;
    while (slots < 2 * n) {
        slots *= 2;
    }
    if (slots > self->n_slots) {
        lk_hash128_t *more = realloc(self->taken, slots * sizeof *more);
        if (more == NULL) {
            return false;
        }
        self->taken = more;
        self->n_slots = slots;
    }
    memset(self->taken, 0, self->n_slots * sizeof *self->taken);
    return true;
}

/* False if the name (its JSON, in which different bytes may look alike) is there already. */
static bool take_name(token_names_t *self, const void *json, size_t len)
{
    const lk_hash128_t none = {0};
    lk_hash128_t hash = lk_hash128(json, len, 0);
    size_t i = hash.lo & (self->n_slots - 1);
    while (!lk_hash128_equal(self->taken[i], none)) {
        if (lk_hash128_equal(self->taken[i], hash)) {
            return false;
        }
        i = (i + 1) & (self->n_slots - 1);
    }
    self->taken[i] = hash;
    return true;
}

/* ,"name":logprob */
static void put_entry(token_names_t *names, uint32_t id, float logprob, bool first, lk_buf_t *out)
{
    size_t before = out->len;
    lk_buf_str(out, first ? "" : ",");
    size_t key = out->len;
    logprobs_json_name(names, id, out);
    if (!out->failed && !take_name(names, out->data + key, out->len - key)) {
        out->len = before;
        return;
    }
    lk_buf_str(out, ":");
    logprobs_json_number(out, logprob);
}

void logprobs_json_map(token_names_t *names, const scored_token_t *token, lk_buf_t *out)
{
    if (!forget_names(names, token->n_top + 1)) {
        out->failed = true;
        return;
    }
    lk_buf_str(out, "{");
    put_entry(names, token->id, token->logprob, true, out);
    for (size_t k = 0; k < token->n_top; k++) {
        if (token->top_ids[k] != token->id && token->top_ids[k] != NO_TOKEN) {
            put_entry(names, token->top_ids[k], token->top_logprobs[k], false, out);
        }
    }
    lk_buf_str(out, "}");
}

/* ---- by ids ---- */

/* Calls fn for the token, then for the most likely others with their ranks: of equal ones all have
 * the best. */
static void each(const scored_token_t *token,
                 void (*fn)(void *ctx, uint32_t id, float logprob, uint32_t rank), void *ctx)
{
    fn(ctx, token->id, token->logprob, token->rank);
    uint32_t rank = 1;
    for (size_t k = 0; k < token->n_top; k++) {
        const float *values = token->top_logprobs;
        rank = k > 0 && values[k] < values[k - 1] ? (uint32_t)k + 1 : rank;
        if (token->top_ids[k] != token->id && token->top_ids[k] != NO_TOKEN) {
            fn(ctx, token->top_ids[k], values[k], rank);
        }
    }
}

typedef struct {
    const tokenizer_t *tokenizer;
    lk_buf_t *text, *out;
    size_t n;
} list_t;

static void put_token(lk_buf_t *out, uint32_t id, float logprob, uint32_t rank)
{
    lk_buf_printf(
        out, "{\"token\":\"token_id:%" PRIu32 "\",\"token_id\":%" PRIu32 ",\"logprob\":", id, id);
    logprobs_json_number(out, logprob);
    lk_buf_printf(out, ",\"rank\":%" PRIu32, rank);
}

static void put_listed(void *ctx, uint32_t id, float logprob, uint32_t rank)
{
    list_t *list = ctx;
    lk_buf_str(list->out, list->n++ > 0 ? "," : "");
    put_token(list->out, id, logprob, rank);
    lk_buf_str(list->out, "}");
}

void logprobs_json_content(const scored_token_t *token, lk_buf_t *out)
{
    put_token(out, token->id, token->logprob, token->rank);
    lk_buf_str(out, ",\"top_logprobs\":[");
    if (token->n_top > 0) {
        each(token, put_listed, &(list_t){.out = out});
    }
    lk_buf_str(out, "]}");
}

static void put_keyed(void *ctx, uint32_t id, float logprob, uint32_t rank)
{
    list_t *list = ctx;
    lk_buf_printf(list->out, "%s\"%" PRIu32 "\":{\"logprob\":", list->n++ > 0 ? "," : "", id);
    logprobs_json_number(list->out, logprob);
    lk_buf_printf(list->out, ",\"rank\":%" PRIu32 ",\"decoded_token\":", rank);
    if (list->tokenizer != NULL) {
        lk_buf_clear(list->text);
        tokenizer_token_text(list->tokenizer, id, list->text);
        lk_buf_json_str(list->out, lk_buf_cstr(list->text), list->text->len);
    } else {
        lk_buf_str(list->out, "null");
    }
    lk_buf_str(list->out, "}");
}

void logprobs_json_prompt(const tokenizer_t *tokenizer, const scored_token_t *token, lk_buf_t *text,
                          lk_buf_t *out)
{
    lk_buf_str(out, "{");
    each(token, put_keyed, &(list_t){tokenizer, text, out, 0});
    lk_buf_str(out, "}");
}
