#include "api_frontend/api.h"
#include "api_frontend/completion.h"
#include "base/check.h"
#include "base/hash.h"
#include "proto/json_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a body that stays known: smaller ones are read at once, larger ones take much memory. */
#define KNOWN_BODY_MIN (16u << 10)
#define KNOWN_BODY_MAX (512u << 10)

static const api_route_t routes[] = {
#define ROUTE(method, path, call, handler, key, body, limit)                                       \
    {#method, path, call, api_handle_##handler, API_KEY_##key, API_BODY_##body, limit},
#include "api_frontend/routes.def"
#undef ROUTE
};

lk_status_t api_init(api_t *self, const lk_config_t *config, const lk_env_t *env,
                     engine_client_t *client, const tokenizer_t *tokenizer, lk_error_t *err)
{
    *self = (api_t){.config = config, .env = env, .client = client, .tokenizer = tokenizer};
    const char *model =
        config->served_model_name[0] != '\0' ? config->served_model_name : config->model;
    size_t n = strlen(model);
    if (n == 0 || n >= sizeof self->model) {
        return lk_error_set(err, LK_ERR_INVALID, "the model's name must have 1 to %zu bytes",
                            sizeof self->model - 1);
    }
    memcpy(self->model, model, n + 1);
    self->cache = reply_cache_new(API_CACHE_ENTRIES);
    if (self->cache == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    lk_buf_init(&self->known_text, KNOWN_BODY_MAX);
    return LK_OK;
}

void api_fini(api_t *self)
{
    while (self->completions != NULL) {
        completion_discard(self->completions);
    }
    reply_cache_destroy(&self->cache);
    lk_buf_fini(&self->known_text);
    json_decref(self->known_body);
    self->known_body = NULL;
}

void api_tick(api_t *self)
{
    completion_tick_all(self);
}

const api_route_t *api_find_route(const char *method, const char *path, bool *method_ok,
                                  char allow[32])
{
    const api_route_t *found = NULL;
    *method_ok = false;
    for (size_t i = 0; i < LK_ARRAY_LEN(routes); i++) {
        if (strcmp(routes[i].path, path) == 0) {
            found = &routes[i];
            snprintf(allow, 32, "%s", routes[i].method);
            *method_ok = strcmp(routes[i].method, method) == 0;
        }
    }
    return found;
}

const api_route_t *api_find_call(const char *name)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(routes); i++) {
        if (name[0] != '\0' && strcmp(routes[i].call, name) == 0) {
            return &routes[i];
        }
    }
    return NULL;
}

static bool key_ok(const api_t *self, const api_call_t *call)
{
    const char *wanted = call->route->key == API_KEY_API     ? self->config->api_key
                         : call->route->key == API_KEY_ADMIN ? self->config->admin_key
                                                             : "";
    return wanted[0] == '\0' || lk_secret_equal(wanted, call->key);
}

/* About what jansson would take for a text, from the bytes that start its values: a small number or
 * string, an array, an object, a member of an object. At most, for anything malformed. */
static size_t json_memory(const char *text, size_t len)
{
    size_t bytes = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        if (in_string) {
            in_string = text[i] != '"';
            i += text[i] == '\\';
            continue;
        }
        switch (text[i]) {
        case '"':
            in_string = true;
            break;
        case ',':
            bytes += 48;
            break;
        case ':':
            bytes += 96;
            break;
        case '[':
            bytes += 160;
            break;
        case '{':
            bytes += 400;
            break;
        }
    }
    return bytes + len;
}

#define JSON_MEMORY_PER_BYTE 401 /* at most */

static bool refuse_json(api_call_t *call, const json_error_t *error)
{
    enum json_error_code code = json_error_code(error);
    bool nul = code == json_error_null_character;
    api_call_error(call, 400, "body", "Invalid JSON format: %s%s at byte %d",
                   code == json_error_invalid_utf8 ? "this is not UTF-8: " : "",
                   nul ? "a string with \\u0000 in it, which is not supported," : error->text,
                   error->position);
    return false;
}

/* Nobody changes a body that was read of a text, so calls may share it. */
static json_t *read_text(api_t *self, const api_call_t *call, json_error_t *error)
{
    lk_buf_t *known = &self->known_text;
    bool keeps = call->route->call[0] != '\0' && call->raw_len >= KNOWN_BODY_MIN &&
                 call->raw_len <= KNOWN_BODY_MAX;
    if (keeps && self->known_body != NULL && known->len == call->raw_len &&
        memcmp(known->data, call->raw_body, known->len) == 0) {
        return json_incref(self->known_body);
    }
    json_t *body = json_text_read(call->raw_body, call->raw_len, JSON_DECODE_ANY, error);
    if (keeps && body != NULL) {
        json_decref(self->known_body);
        lk_buf_clear(known);
        lk_buf_append(known, call->raw_body, call->raw_len);
        self->known_body = known->failed ? NULL : json_incref(body);
    }
    return body;
}

/* False: the call was answered. */
static bool parse_body(api_t *self, api_call_t *call)
{
    api_body_kind_t kind = call->route->body;
    if (call->raw_body != NULL && kind != API_BODY_NONE) {
        if (call->raw_len > call->route->body_limit) {
            api_call_error(call, 413, "body", "the body has %zu bytes, at most %zu are allowed",
                           call->raw_len, call->route->body_limit);
            return false;
        }
        bool small = call->raw_len <= API_MAX_JSON_MEMORY / JSON_MEMORY_PER_BYTE;
        size_t memory = small ? 0 : json_memory(call->raw_body, call->raw_len);
        if (memory > API_MAX_JSON_MEMORY) {
            api_call_error(call, 413, "body",
                           "the body has too many values: they would take %zu MiB, at most %u are "
                           "allowed",
                           memory >> 20, API_MAX_JSON_MEMORY >> 20);
            return false;
        }
        size_t blank = 0;
        while (blank < call->raw_len && strchr(" \t\r\n", call->raw_body[blank]) != NULL &&
               call->raw_body[blank] != '\0') {
            blank++;
        }
        if (blank < call->raw_len) {
            json_error_t error;
            call->body = read_text(self, call, &error);
            if (call->body == NULL) {
                return refuse_json(call, &error);
            }
        }
    }
    if (call->body != NULL && !json_is_object(call->body)) {
        api_call_error(call, 400, "body", "Request body must be a JSON object");
        return false;
    }
    if (call->body == NULL && kind == API_BODY_REQUIRED) {
        api_call_error(call, 400, "body", "Invalid JSON format: the body is empty");
        return false;
    }
    return true;
}

/* What else belongs to a call besides its key. */
static uint64_t content_of(const api_call_t *call)
{
    uint64_t h = 0;
    const json_t *parts[2] = {call->body, call->query};
    for (size_t i = 0; i < 2; i++) {
        uint64_t part = parts[i] != NULL ? json_text_hash(parts[i]) : 0;
        h = lk_hash64(&part, sizeof part, h + i);
    }
    return h;
}

/* False: the call was answered or waits for another's answer. */
static bool first_of_its_key(api_t *self, api_call_t *call)
{
    if (call->idempotency_key[0] == '\0' || call->route->call[0] == '\0' ||
        strcmp(call->route->method, "GET") == 0) {
        return true;
    }
    switch (reply_cache_enter(self->cache, call, call->route->call, content_of(call))) {
    case REPLY_CACHE_RUN:
        return true;
    case REPLY_CACHE_TAKEN:
        return false;
    case REPLY_CACHE_OTHER:
        api_call_error(call, 400, "Idempotency-Key",
                       "this Idempotency-Key was used before with other arguments");
        return false;
    case REPLY_CACHE_FULL:
        break;
    }
    api_call_error(call, 503, "Idempotency-Key", "too many calls with idempotency keys in flight");
    return false;
}

void api_long_work(api_t *self, size_t bytes, bool begins)
{
    if (bytes >= API_LONG_WORK_BYTES && self->on_long_work != NULL) {
        self->on_long_work(self->on_long_work_ctx, begins);
    }
}

void api_dispatch(api_t *self, api_call_t *call)
{
    if (!key_ok(self, call)) {
        api_call_error(call, 401, "Authorization", "this call needs the %s key",
                       call->route->key == API_KEY_API ? "API" : "admin");
        return;
    }
    size_t bytes = call->raw_body != NULL ? call->raw_len : 0;
    api_long_work(self, bytes, true);
    if (parse_body(self, call) && first_of_its_key(self, call)) {
        call->route->handler(self, call);
    }
    api_long_work(self, bytes, false);
}

void api_limits(const api_t *self, completion_limits_t *out)
{
    engine_client_info_t info;
    engine_client_info(self->client, &info);
    *out = (completion_limits_t){
        .model = self->model,
        .max_model_len = info.max_model_len,
        .vocab_size = info.vocab_size,
        .max_logprobs = self->config->max_logprobs,
        .tokenizer = self->tokenizer,
    };
}

void api_call_fail(api_call_t *call, lk_status_t status, const char *param, const char *text)
{
    api_call_error(call, lk_status_http(status), param, "%s", text);
}
