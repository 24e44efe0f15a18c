#include "api_frontend/logprobs_json.h"
#include "base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_TOKEN UINT32_MAX

/* x as "%.9g" writes it, several times faster, for [0.0001, 9999). Returns the length; 0: it is out
 * of the range, or so near the middle between two decimals that only exact arithmetic can tell. */
static size_t put_nine_digits(char *text, double x)
{
    static const double limits[] = {1e-3, 1e-2, 1e-1, 1, 1e1, 1e2, 1e3, 1e4};
    static const double powers[] = {1e12, 1e11, 1e10, 1e9, 1e8, 1e7, 1e6, 1e5};
    if (!(x >= 1e-4 && x < 9999)) {
        return 0;
    }
    int i = 0;
    while (x >= limits[i]) {
        i++;
    }
    double scaled = x * powers[i], floored = floor(scaled), rest = scaled - floored;
    uint64_t digits = (uint64_t)floored + (rest > 0.5);
    if (fabs(rest - 0.5) < 1e-5 || digits < 100000000 || digits >= 1000000000) {
        return 0;
    }
    char d[9];
    for (int k = 9; k-- > 0; digits /= 10) {
        d[k] = (char)('0' + digits % 10);
    }
    int whole = i - 3, last = 9; /* digits before the point, if above 0; digits that are shown */
    while (d[last - 1] == '0') {
        last--;
    }
    size_t n = 0;
    for (int k = 0; k < whole; k++) {
        text[n++] = d[k];
    }
    if (whole <= 0) {
        text[n++] = '0';
    }
    if (last > whole) {
        text[n++] = '.';
    }
    for (int k = whole; k < last; k++) {
        text[n++] = k < 0 ? '0' : d[k];
    }
    return n;
}

void logprobs_json_number(lk_buf_t *out, float x)
{
    char text[32] = "-";
    size_t n = put_nine_digits(text + 1, -(double)x);
    if (n > 0) {
        lk_buf_append(out, text, n + 1);
        lk_buf_str(out, memchr(text, '.', n + 1) == NULL ? ".0" : "");
    } else if (isfinite(x) && x > -9999.0f) {
        snprintf(text, sizeof text, "%.9g", (double)x); /* nine digits give a float32 back */
        lk_buf_str(out, text);
        lk_buf_str(out, strpbrk(text, ".e") == NULL ? ".0" : "");
    } else {
        lk_buf_str(out, "-9999.0");
    }
}

static void put_u32(lk_buf_t *out, uint32_t x)
{
    char text[10];
    size_t n = sizeof text;
    do {
        text[--n] = (char)('0' + x % 10);
        x /= 10;
    } while (x > 0);
    lk_buf_append(out, text + n, sizeof text - n);
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
    lk_buf_str(&self->text, "token_id:");
    put_u32(&self->text, id);
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
    bool ids = names->tokenizer == NULL || names->as_ids; /* which never repeat */
    if (!ids && !out->failed && !take_name(names, out->data + key, out->len - key)) {
        out->len = before;
        return;
    }
    lk_buf_str(out, ":");
    logprobs_json_number(out, logprob);
}

void logprobs_json_map(token_names_t *names, const scored_token_t *token, lk_buf_t *out)
{
    bool ids = names->tokenizer == NULL || names->as_ids;
    if (!ids && !forget_names(names, token->n_top + 1)) {
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
    lk_buf_str(out, "{\"token\":\"token_id:");
    put_u32(out, id);
    lk_buf_str(out, "\",\"token_id\":");
    put_u32(out, id);
    lk_buf_str(out, ",\"logprob\":");
    logprobs_json_number(out, logprob);
    lk_buf_str(out, ",\"rank\":");
    put_u32(out, rank);
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
    lk_buf_str(list->out, list->n++ > 0 ? ",\"" : "\"");
    put_u32(list->out, id);
    lk_buf_str(list->out, "\":{\"logprob\":");
    logprobs_json_number(list->out, logprob);
    lk_buf_str(list->out, ",\"rank\":");
    put_u32(list->out, rank);
    lk_buf_str(list->out, ",\"decoded_token\":");
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
