#include "api_frontend/completion_internal.h"
#include "base/check.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void destroy(completion_t *self)
{
    api_t *api = self->api;
    *(self->prev != NULL ? &self->prev->next : &api->completions) = self->next;
    if (self->next != NULL) {
        self->next->prev = self->prev;
    }
    api->n_completions--;
    for (size_t i = 0; i < self->n_slots; i++) {
        if (self->slots[i].open) {
            engine_client_abort(api->client, self->slots[i].handle);
        }
        completion_count_held(self, &self->slots[i], 0);
        choice_fini(&self->slots[i].choice);
    }
    api->held_logprobs -= self->params.reserved_logprobs;
    completion_params_fini(&self->params);
    free(self);
}

void completion_discard(completion_t *self)
{
    api_call_t *call = self->call;
    completion_count_rest(self, FINISH_ABORT);
    destroy(self);
    api_call_discard(call);
}

static void on_gone(api_call_t *call)
{
    completion_discard(call->state);
}

/* ---- writing ---- */

static void put_head(const completion_t *self, lk_buf_t *out)
{
    bool generate = self->params.kind == COMPLETION_GENERATE;
    lk_buf_printf(out,
                  generate ? "{\"request_id\":\"%s\",\"created\":%" PRId64 ",\"model\":"
                           : "{\"id\":\"%s\",\"object\":\"text_completion\",\"created\":%" PRId64
                             ",\"model\":",
                  self->id, self->call->unix_time);
    lk_buf_json_str(out, self->api->model, strlen(self->api->model));
    if (generate) {
        lk_buf_printf(out, ",\"output_mode\":\"%s\"", self->params.text ? "text" : "tokens");
    }
    lk_buf_str(out, ",\"choices\":[");
}

/* Of /inference/v1/generate, which has one prompt; with the whole reply, or the stream's first. */
static void put_prompt(const completion_t *self, lk_buf_t *out)
{
    if (self->params.kind == COMPLETION_GENERATE && self->params.prompt_logprobs >= 0) {
        lk_buf_str(out, ",\"prompt_logprobs\":");
        prompt_scores_json(&self->slots[0].choice.scores, (size_t)self->params.prompt_logprobs,
                           self->slots[0].choice.tokenizer, out);
    }
    if (self->params.kind != COMPLETION_GENERATE || !self->params.return_token_ids) {
        return;
    }
    const prompt_ids_t *prompt = &self->params.prompts[0];
    lk_buf_str(out, ",\"prompt_token_ids\":[");
    for (size_t i = 0; i < prompt->n; i++) {
        lk_buf_printf(out, i > 0 ? ",%" PRIu32 : "%" PRIu32, prompt->ids[i]);
    }
    lk_buf_str(out, "]");
}

static void put_usage(const completion_t *self, lk_buf_t *out)
{
    uint64_t prompt = 0, output = 0, cached = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        const choice_t *c = &self->slots[i].choice;
        output += c->n_output;
        if (i % self->params.n == 0) {
            prompt += c->prompt->n;
            cached += c->cached_tokens;
        }
    }
    lk_buf_printf(out,
                  "{\"prompt_tokens\":%" PRIu64 ",\"completion_tokens\":%" PRIu64
                  ",\"total_tokens\":%" PRIu64
                  ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu64 "}}",
                  prompt, output, prompt + output, cached);
}

/* False: the client does not read, and self is gone. */
static bool send(completion_t *self, const lk_buf_t *data)
{
    if (!self->begun) {
        self->begun = true;
        api_call_stream_begin(self->call);
    }
    self->last_data_ns = lk_env_now_ns(self->api->env);
    if (data->failed || !api_call_stream_data(self->call, (const char *)data->data, data->len)) {
        LK_WARN("%s: the client does not read its stream, the request is aborted", self->id);
        completion_discard(self);
        return false;
    }
    return true;
}

static void finish_stream(completion_t *self)
{
    lk_buf_t out;
    lk_buf_init(&out, 0);
    if (self->params.include_usage) {
        lk_buf_str(&out, "data: ");
        put_head(self, &out);
        lk_buf_str(&out, "],\"usage\":");
        put_usage(self, &out);
        lk_buf_str(&out, "}\n\n");
    }
    lk_buf_str(&out, "data: [DONE]\n\n");
    if (send(self, &out)) {
        api_call_t *call = self->call;
        destroy(self);
        api_call_stream_end(call);
    }
    lk_buf_fini(&out);
}

static void finish_whole(completion_t *self)
{
    lk_buf_t out;
    lk_buf_init(&out, 0);
    api_t *api = self->api;
    size_t long_work = 8 * api->held_logprobs;
    api_long_work(api, long_work, true);
    put_head(self, &out);
    for (size_t i = 0; i < self->n_slots; i++) {
        lk_buf_str(&out, i > 0 ? "," : "");
        choice_json(&self->slots[i].choice, &out);
    }
    lk_buf_str(&out, "]");
    put_prompt(self, &out);
    lk_buf_str(&out, ",\"usage\":");
    put_usage(self, &out);
    lk_buf_str(&out, "}");
    api_call_t *call = self->call;
    destroy(self);
    if (out.failed) {
        api_call_error(call, 500, NULL, "out of memory");
    } else {
        api_call_reply(call, 200, lk_buf_cstr(&out), out.len);
    }
    lk_buf_fini(&out);
    api_long_work(api, long_work, false);
}

/* One answer, or an error event where the status line is already out. */
static void fail(completion_t *self, int http_status, const char *param, const char *text)
{
    LK_INFO("%s: failed with %d: %s", self->id, http_status, text);
    completion_count_rest(self, FINISH_ERROR);
    if (!self->begun) {
        api_call_t *call = self->call;
        char name[64];
        snprintf(name, sizeof name, "%s", param != NULL ? param : "");
        destroy(self);
        api_call_error(call, http_status, name, "%s", text);
        return;
    }
    lk_buf_t out;
    lk_buf_init(&out, 0);
    lk_buf_str(&out, "data: ");
    api_error_json(&out, http_status, param, text);
    lk_buf_str(&out, "\n\ndata: [DONE]\n\n");
    if (send(self, &out)) {
        api_call_t *call = self->call;
        destroy(self);
        api_call_stream_end(call);
    }
    lk_buf_fini(&out);
}

/* Writes what is new of a choice. False: self is gone. */
static bool emit(completion_t *self, slot_t *slot)
{
    if (!self->params.stream || !choice_has_news(&slot->choice)) {
        return true;
    }
    lk_buf_t out;
    lk_buf_init(&out, 0);
    lk_buf_str(&out, "data: ");
    put_head(self, &out);
    choice_json(&slot->choice, &out);
    lk_buf_str(&out, "]");
    if (!self->begun) {
        put_prompt(self, &out);
    }
    lk_buf_str(&out, self->params.include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
    bool ok = send(self, &out);
    lk_buf_fini(&out);
    return ok;
}

static void finish_if_done(completion_t *self)
{
    if (self->n_unfinished == 0) {
        if (self->params.stream) {
            finish_stream(self);
        } else {
            finish_whole(self);
        }
    }
}

/* ---- events ---- */

static void on_output(void *ctx, uint64_t handle, const msg_output_t *out)
{
    slot_t *slot = ctx;
    completion_t *self = slot->owner;
    slot->open = out->finish_reason == FINISH_NONE;
    if (out->finish_reason == FINISH_ERROR) {
        lk_status_t status = lk_status_is_valid(out->error_status) && out->error_status < 0
                                 ? (lk_status_t)out->error_status
                                 : LK_ERR_INTERNAL;
        fail(self, lk_status_http(status), NULL,
             out->error.len > 0 ? out->error.ptr : "the engine gave up the request");
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = choice_push(&slot->choice, out, &err);
    if (status != LK_OK) {
        LK_ERROR("%s: %s", self->id, err.text);
        fail(self, lk_status_http(status), NULL, err.text);
        return;
    }
    completion_count_held(self, slot, choice_held(&slot->choice));
    completion_count_tokens(self, slot, out, out->token_ids.len / sizeof(uint32_t));
    bool ended = slot->choice.finish != FINISH_NONE;
    if (ended) {
        completion_count_end(self, slot, slot->choice.finish);
    }
    if (ended && slot->open) { /* a stop string */
        engine_client_abort(self->api->client, slot->handle);
        slot->open = false;
    }
    if (!emit(self, slot)) {
        return;
    }
    completion_count_held(self, slot, choice_held(&slot->choice));
    if (ended) {
        self->n_unfinished--;
        finish_if_done(self);
    }
}

/* Ends the open choices with what they have. Returns how many. */
static size_t abort_choices(completion_t *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        slot_t *slot = &self->slots[i];
        if (!slot->open) {
            continue;
        }
        engine_client_abort(self->api->client, slot->handle);
        slot->open = false;
        choice_end(&slot->choice, FINISH_ABORT);
        completion_count_end(self, slot, FINISH_ABORT);
        self->n_unfinished--;
        n++;
        if (!emit(self, slot)) {
            return n;
        }
    }
    finish_if_done(self);
    return n;
}

static bool named(const completion_t *self, const json_t *ids)
{
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const char *id = json_string_value(json_array_get(ids, i));
        if (strcmp(id, self->id) == 0 || strcmp(id, self->bare_id) == 0) {
            return true;
        }
    }
    return json_array_size(ids) == 0;
}

size_t api_abort_completions(api_t *self, const json_t *ids)
{
    size_t n = 0;
    for (completion_t *c = self->completions; c != NULL;) {
        completion_t *next = c->next;
        if (named(c, ids)) {
            n += abort_choices(c);
        }
        c = next;
    }
    return n;
}

void completion_tick_all(api_t *api)
{
    uint64_t now = lk_env_now_ns(api->env);
    for (completion_t *c = api->completions; c != NULL;) {
        completion_t *next = c->next;
        if (c->params.stream && now - c->last_data_ns >= API_PING_NS) {
            static uint8_t text[] = ": ping\n\n";
            const lk_buf_t ping = {.data = text, .len = sizeof text - 1};
            (void)!send(c, &ping);
        }
        c = next;
    }
}

/* ---- start ---- */

static void add_choices(completion_t *self, const completion_limits_t *limits)
{
    const completion_params_t *params = &self->params;
    for (size_t i = 0; i < self->n_slots; i++) {
        slot_t *slot = &self->slots[i];
        const prompt_ids_t *prompt = &params->prompts[i / params->n];
        engine_request_t request = {
            .id = self->id,
            .choice = (uint32_t)(i % params->n),
            .prompt = prompt->ids,
            .n_prompt = prompt->n,
            .sampling = params->sampling,
            .priority = params->priority,
            .cache_salt = params->cache_salt,
            .rank = self->call->rank,
            .session = self->call->session,
        };
        slot->max_tokens = completion_params_max_tokens(params, i / params->n, limits);
        request.sampling.max_tokens = slot->max_tokens;
        if (slot->choice.shown != &slot->choice.scores) {
            request.sampling.prompt_logprobs = 0; /* another choice's request brings them */
        }
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status =
            engine_client_add(self->api->client, &request, on_output, slot, &slot->handle, &err);
        if (status != LK_OK) {
            fail(self, lk_status_http(status),
                 status == LK_ERR_INVALID ? "X-data-parallel-rank" : NULL, err.text);
            return;
        }
        slot->open = self->added = true;
    }
}

/* The client's own id where it gave one; the prefix is the one its vLLM counterpart has. */
static void make_id(completion_t *self)
{
    const char *prefix = self->params.kind == COMPLETION_GENERATE ? "generate-tokens-" : "cmpl-";
    const char *own =
        self->params.request_id != NULL ? self->params.request_id : self->call->request_id;
    const lk_env_t *env = self->api->env;
    if (own[0] != '\0') {
        snprintf(self->id, sizeof self->id, "%s%s", prefix, own);
    } else {
        snprintf(self->id, sizeof self->id, "%s%016" PRIx64 "%016" PRIx64, prefix,
                 lk_env_random_u64(env), lk_env_random_u64(env));
    }
    self->bare_id = self->id + strlen(prefix);
}

static completion_t *make(api_t *api, api_call_t *call, completion_params_t *params)
{
    size_t n = params->n_prompts * params->n;
    completion_t *self = calloc(1, sizeof *self + n * sizeof self->slots[0]);
    if (self == NULL) {
        completion_params_fini(params);
        return NULL;
    }
    self->api = api;
    self->call = call;
    self->params = *params;
    self->n_slots = self->n_unfinished = n;
    self->started_ns = self->last_data_ns = lk_env_now_ns(api->env);
    make_id(self);
    self->next = api->completions;
    if (self->next != NULL) {
        self->next->prev = self;
    }
    api->completions = self;
    api->n_completions++;
    api->held_logprobs += params->reserved_logprobs;
    call->state = self;
    call->on_gone = on_gone;
    return self;
}

/* A prompt is scored by its first choice; in a stream, which can't wait for that, by each. */
static void set_scores(completion_t *self, size_t i)
{
    const completion_params_t *params = &self->params;
    size_t first = params->stream ? i : i - i % params->n;
    choice_t *choice = &self->slots[i].choice;
    if (params->sampling.prompt_logprobs > 0 && first == i) {
        prompt_scores_init(&choice->scores, choice->prompt,
                           (size_t)params->sampling.prompt_logprobs - 1);
    }
    choice->shown = &self->slots[first].choice.scores;
}

static void start(api_t *api, api_call_t *call, completion_kind_t kind)
{
    if (api->draining) {
        api->metrics.refused++;
        api_call_error(call, 503, NULL, "the server is shutting down");
        return;
    }
    completion_limits_t limits;
    api_limits(api, &limits);
    if (limits.max_model_len == 0) { /* what is asked can not be judged yet */
        api->metrics.refused++;
        api_call_error(call, 503, NULL, "the engines have not been heard of yet; try again");
        return;
    }
    completion_params_t params;
    const char *param;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = completion_params_parse(kind, call->body, &limits, &params, &param, &err);
    if (status != LK_OK) {
        api->metrics.refused++;
        api_call_fail(call, status, param, err.text);
        return;
    }
    if ((params.sampling.logprobs >= 0 || params.sampling.prompt_logprobs > 0) &&
        api->held_logprobs + params.reserved_logprobs > API_MAX_LOGPROBS) {
        api->metrics.refused++;
        completion_params_fini(&params);
        api_call_error(call, 503, NULL,
                       "open replies hold %zu logprobs, the limit; try again when some are done",
                       api->held_logprobs);
        return;
    }
    if (!params.has_seed) {
        params.sampling.seed = lk_env_random_u64(api->env) >> 1; /* fits a JSON integer */
    }
    completion_t *self = make(api, call, &params);
    if (self == NULL) {
        api_call_error(call, 500, NULL, "out of memory");
        return;
    }
    for (size_t i = 0; i < self->n_slots; i++) {
        slot_t *slot = &self->slots[i];
        slot->owner = self;
        /* without text and stop strings no token needs to be looked up */
        bool names = kind == COMPLETION_OPENAI || self->params.text || self->params.n_stops > 0;
        status = choice_init(&slot->choice, &self->params, names ? api->tokenizer : NULL,
                             &self->params.prompts[i / self->params.n], (uint32_t)i,
                             self->params.stream, &err);
        if (status != LK_OK) {
            fail(self, lk_status_http(status), status == LK_ERR_INVALID ? "stop" : NULL, err.text);
            return;
        }
        set_scores(self, i);
    }
    LK_DEBUG("%s: %zu prompts, the first of %zu tokens, n %" PRIu64 ", max_tokens %" PRIu64
             ", rank %" PRId64 "%s%s",
             self->id, self->params.n_prompts, self->params.prompts[0].n, self->params.n,
             completion_params_max_tokens(&self->params, 0, &limits), call->rank,
             call->session != 0 ? ", of a session" : "", self->params.stream ? ", stream" : "");
    add_choices(self, &limits);
}

void api_handle_completions(api_t *api, api_call_t *call)
{
    start(api, call, COMPLETION_OPENAI);
}

void api_handle_generate(api_t *api, api_call_t *call)
{
    start(api, call, COMPLETION_GENERATE);
}
