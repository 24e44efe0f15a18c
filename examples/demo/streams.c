#include "examples/demo/streams.h"
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "deploy/client/http_client.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    streams_t *owner;
    bool open;
    stream_record_t record;
    bool done;        /* its finish_reason came */
    bool broken;      /* an error came */
    uint64_t last_ns; /* of its newest token; 0 before the first */
} slot_t;

struct streams {
    streams_config_t config;
    http_streams_t *http;
    lk_prng_t prng;
    slot_t *slots;
    stream_record_t *records;
    size_t n_records, cap_records;
    uint64_t tokens, started;
    uint64_t per_set[STREAMS_MAX_SETS];
    uint64_t longest_gap_ns;
    char failure[512];
};

static void fail(streams_t *self, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void fail(streams_t *self, const char *fmt, ...)
{
    if (self->failure[0] == '\0') {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(self->failure, sizeof self->failure, fmt, ap);
        va_end(ap);
    }
}

streams_t *streams_new(const streams_config_t *config)
{
    streams_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->config = *config;
    self->http = http_streams_new();
    self->slots = calloc(config->n_streams, sizeof *self->slots);
    CHECK(self->http != NULL && self->slots != NULL);
    lk_prng_seed(&self->prng, config->seed);
    for (uint32_t i = 0; i < config->n_streams; i++) {
        self->slots[i].owner = self;
    }
    return self;
}

void streams_destroy(streams_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    streams_t *self = *self_p;
    http_streams_destroy(&self->http);
    for (uint32_t i = 0; i < self->config.n_streams; i++) {
        stream_record_fini(&self->slots[i].record);
    }
    for (size_t i = 0; i < self->n_records; i++) {
        stream_record_fini(&self->records[i]);
    }
    free(self->slots);
    free(self->records);
    free(self);
    *self_p = NULL;
}

/* "set-12" -> 12, "default" -> 0; UINT64_MAX for anything else: the checker then finds no such set.
 */
static uint64_t set_number(const char *version)
{
    unsigned long long k;
    if (version != NULL && strcmp(version, "default") == 0) {
        return 0;
    }
    return version != NULL && sscanf(version, "set-%llu", &k) == 1 ? k : UINT64_MAX;
}

/* [{version, start, end}...]; NULL when empty. */
static epoch_span_t *parse_spans(const json_t *array, size_t *n)
{
    *n = json_array_size(array);
    epoch_span_t *spans = calloc(*n + 1, sizeof *spans);
    CHECK(spans != NULL);
    size_t i;
    json_t *row;
    json_array_foreach(array, i, row)
    {
        spans[i].epoch = set_number(json_string_value(json_object_get(row, "version")));
        spans[i].start = (uint32_t)json_integer_value(json_object_get(row, "start"));
        spans[i].end = (uint32_t)json_integer_value(json_object_get(row, "end"));
    }
    return spans;
}

static void take_prompt(stream_record_t *r, const json_t *ids)
{
    if (r->prompt != NULL || !json_is_array(ids)) {
        return;
    }
    r->n_prompt = (uint32_t)json_array_size(ids);
    r->prompt = calloc(r->n_prompt + 1, sizeof *r->prompt);
    CHECK(r->prompt != NULL);
    for (uint32_t i = 0; i < r->n_prompt; i++) {
        r->prompt[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    }
}

static void take_tokens(slot_t *slot, const json_t *choice)
{
    streams_t *self = slot->owner;
    stream_record_t *r = &slot->record;
    const json_t *ids = json_object_get(choice, "token_ids");
    const json_t *logprobs = json_object_get(json_object_get(choice, "logprobs"), "token_logprobs");
    size_t n = json_array_size(ids);
    if (n == 0) {
        return;
    }
    if (json_array_size(logprobs) != n) {
        fail(self, "a chunk has %zu token_ids but %zu logprobs", n, json_array_size(logprobs));
        return;
    }
    if (r->n_tokens + n > r->cap_tokens) {
        r->cap_tokens = (r->n_tokens + (uint32_t)n) * 2;
        r->tokens = realloc(r->tokens, r->cap_tokens * sizeof *r->tokens);
        r->logprobs = realloc(r->logprobs, r->cap_tokens * sizeof *r->logprobs);
        CHECK(r->tokens != NULL && r->logprobs != NULL);
    }
    for (size_t i = 0; i < n; i++) {
        r->tokens[r->n_tokens] = (uint32_t)json_integer_value(json_array_get(ids, i));
        r->logprobs[r->n_tokens] = (float)json_number_value(json_array_get(logprobs, i));
        r->n_tokens++;
    }
    self->tokens += n;
    uint64_t now_ns = lk_env_now_ns(lk_env_real());
    if (slot->last_ns != 0) {
        self->longest_gap_ns = LK_MAX(self->longest_gap_ns, now_ns - slot->last_ns);
    }
    slot->last_ns = now_ns;
}

static void take_end(slot_t *slot, const json_t *choice)
{
    stream_record_t *r = &slot->record;
    const json_t *reason = json_object_get(choice, "finish_reason");
    if (!json_is_string(reason)) {
        return;
    }
    bool aborted = strcmp(json_string_value(reason), "abort") == 0;
    if (strcmp(json_string_value(reason), "length") != 0 &&
        strcmp(json_string_value(reason), "stop") != 0 &&
        !(aborted && slot->owner->config.may_end_early)) {
        fail(slot->owner, "a stream ended with finish_reason %s", json_string_value(reason));
    }
    slot->done = true;
    r->spans = parse_spans(json_object_get(choice, "weight_versions"), &r->n_spans);
    const json_t *history = json_object_get(choice, "kv_history");
    r->n_history = json_array_size(history);
    r->history = calloc(r->n_history + 1, sizeof *r->history);
    CHECK(r->history != NULL);
    for (size_t i = 0; i < r->n_history; i++) {
        const json_t *row = json_array_get(history, i);
        r->history[i].at = (uint32_t)json_integer_value(json_object_get(row, "at"));
        r->history[i].spans = parse_spans(json_object_get(row, "spans"), &r->history[i].n_spans);
    }
}

static void on_data(void *ctx, const char *text, size_t len)
{
    slot_t *slot = ctx;
    if (strcmp(text, "[DONE]") == 0) {
        return;
    }
    json_t *chunk = json_loadb(text, len, JSON_ALLOW_NUL, NULL);
    bool error = chunk == NULL || json_object_get(chunk, "error") != NULL;
    if (error && slot->owner->config.may_end_early) {
        slot->broken = true;
    } else if (error) {
        fail(slot->owner, "a stream got: %.400s", text);
    }
    const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
    if (choice != NULL) {
        take_prompt(&slot->record, json_object_get(choice, "prompt_token_ids"));
        take_tokens(slot, choice);
        take_end(slot, choice);
    }
    json_decref(chunk);
}

static void on_end(void *ctx, int status, const char *error, const char *body)
{
    slot_t *slot = ctx;
    streams_t *self = slot->owner;
    slot->open = false;
    bool ok = status == 200 && error[0] == '\0' && slot->done && !slot->broken;
    if (self->config.may_end_early && (!ok || slot->record.n_tokens == 0)) {
        stream_record_fini(&slot->record);
        return;
    }
    if (!ok) {
        fail(self, "a stream ended with status %d %s %.300s", status, error, body);
        stream_record_fini(&slot->record);
        return;
    }
    if (self->n_records == self->cap_records) {
        self->cap_records = self->cap_records == 0 ? 64 : self->cap_records * 2;
        self->records = realloc(self->records, self->cap_records * sizeof *self->records);
        CHECK(self->records != NULL);
    }
    for (size_t i = 0; i < slot->record.n_spans; i++) {
        const epoch_span_t *s = &slot->record.spans[i];
        if (s->epoch < STREAMS_MAX_SETS) {
            self->per_set[s->epoch] += s->end - s->start;
        }
    }
    self->records[self->n_records++] = slot->record;
    memset(&slot->record, 0, sizeof slot->record);
}

/* Starts a stream with a fresh prompt, seed and length. */
static void start(slot_t *slot)
{
    static const http_stream_events_t events = {on_data, on_end};
    streams_t *self = slot->owner;
    const streams_config_t *c = &self->config;
    uint64_t seed = lk_prng_u64(&self->prng) >> 2; /* jansson's integers are signed */
    uint32_t n_max =
        c->max_tokens / 2 + (uint32_t)lk_prng_below(&self->prng, c->max_tokens / 2 + 1);
    lk_buf_t body;
    lk_buf_init(&body, 0);
    lk_buf_str(&body, "{\"prompt\":");
    if (c->texts != NULL) {
        const char *text = c->texts[self->started % c->n_texts];
        lk_buf_json_str(&body, text, strlen(text));
    } else {
        uint32_t n = 1 + (uint32_t)lk_prng_below(&self->prng, 2 * c->prompt_tokens);
        for (uint32_t i = 0; i < n; i++) {
            /* ids from 8 on: below are specials in made-up models */
            lk_buf_printf(&body, "%s%llu", i == 0 ? "[" : ",",
                          8 + (unsigned long long)lk_prng_below(&self->prng, c->vocab_size - 8));
        }
        lk_buf_str(&body, "]");
    }
    lk_buf_printf(
        &body,
        ",\"max_tokens\":%u,\"temperature\":1.0,\"top_p\":0.95,\"seed\":%llu,\"logprobs\":0,"
        "\"stream\":true,\"ignore_eos\":%s,\"return_token_ids\":true,\"return_tokens_as_token_"
        "ids\":true,\"return_kv_history\":true}",
        n_max, (unsigned long long)seed, c->texts != NULL ? "false" : "true");
    slot->record.sampling = (sampling_params_t){.temperature = 1.0f,
                                                .top_p = 0.95f,
                                                .repetition_penalty = 1.0f,
                                                .seed = seed,
                                                .max_tokens = n_max,
                                                .ignore_eos = c->texts == NULL};
    slot->done = slot->broken = false;
    slot->last_ns = 0;
    char url[600];
    snprintf(url, sizeof url, "%s/v1/completions", c->url);
    CHECK(http_streams_post(self->http, url, lk_buf_cstr(&body), NULL, &events, slot) != NULL);
    slot->open = true;
    self->started++;
    lk_buf_fini(&body);
}

size_t streams_poll(streams_t *self, int timeout_ms, bool closing)
{
    for (uint32_t i = 0; i < self->config.n_streams; i++) {
        if (!self->slots[i].open && !closing && self->failure[0] == '\0') {
            start(&self->slots[i]);
        }
    }
    return http_streams_poll(self->http, timeout_ms);
}

const char *streams_failure(const streams_t *self)
{
    return self->failure[0] != '\0' ? self->failure : NULL;
}

uint64_t streams_tokens(const streams_t *self)
{
    return self->tokens;
}

uint64_t streams_tokens_of(const streams_t *self, uint64_t set)
{
    return set < STREAMS_MAX_SETS ? self->per_set[set] : 0;
}

double streams_longest_gap(streams_t *self)
{
    double gap = (double)self->longest_gap_ns / 1e9;
    self->longest_gap_ns = 0;
    return gap;
}

const stream_record_t *streams_records(const streams_t *self, size_t *n)
{
    *n = self->n_records;
    return self->records;
}
