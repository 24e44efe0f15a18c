#include "api_frontend/api_call.h"
#include "api_frontend/reply_cache.h"
#include "base/check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *phrase(int http_status)
{
    switch (http_status) {
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 409:
        return "Conflict";
    case 413:
        return "Content Too Large";
    case 502:
        return "Bad Gateway";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
    default:
        return "Internal Server Error";
    }
}

void api_error_json(lk_buf_t *out, int http_status, const char *param, const char *message)
{
    lk_buf_str(out, "{\"error\":{\"message\":");
    lk_buf_json_str(out, message, strlen(message));
    lk_buf_printf(out, ",\"type\":\"%s\",\"param\":", phrase(http_status));
    if (param != NULL && param[0] != '\0') {
        lk_buf_json_str(out, param, strlen(param));
    } else {
        lk_buf_str(out, "null");
    }
    lk_buf_printf(out, ",\"code\":%d}}", http_status);
}

static void end(api_call_t *call)
{
    json_decref(call->body);
    json_decref(call->query);
    call->body = call->query = NULL;
    call->ops->destroy(call);
}

void api_call_reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    if (call->cached != NULL) {
        /* others with the same key get the same answer, now and later */
        struct reply_cache_entry *entry = call->cached;
        call->cached = NULL;
        reply_cache_finish(entry, http_status, body, len);
    }
    if (!call->gone) {
        call->ops->reply(call, http_status, body, len);
    }
    end(call);
}

void api_call_ok(api_call_t *call, json_t *object)
{
    char *text = object != NULL ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (text == NULL) {
        api_call_error(call, 500, NULL, "out of memory");
        return;
    }
    api_call_reply(call, 200, text, strlen(text));
    free(text);
}

void api_call_error(api_call_t *call, int http_status, const char *param, const char *fmt, ...)
{
    char message[16384];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    lk_buf_t out;
    lk_buf_init(&out, 0);
    api_error_json(&out, http_status, param, message);
    api_call_reply(call, http_status, lk_buf_cstr(&out), out.len);
    lk_buf_fini(&out);
}

void api_call_stream_begin(api_call_t *call)
{
    CHECK(call->ops->stream_begin != NULL);
    if (!call->gone) {
        call->ops->stream_begin(call);
    }
}

bool api_call_stream_data(api_call_t *call, const char *data, size_t len)
{
    return !call->gone && call->ops->stream_data(call, data, len);
}

void api_call_stream_end(api_call_t *call)
{
    if (!call->gone) {
        call->ops->stream_end(call);
    }
    end(call);
}

void api_call_discard(api_call_t *call)
{
    CHECK(call->cached == NULL);
    end(call);
}

void api_call_client_gone(api_call_t *call)
{
    call->gone = true;
    if (call->on_gone != NULL) {
        call->on_gone(call);
    }
}

/* ---- arguments ---- */

static const json_t *find(api_call_t *call, const char *name, bool *in_query)
{
    const json_t *value = json_object_get(call->query, name);
    *in_query = value != NULL;
    if (value == NULL) {
        value = json_object_get(call->body, name);
    }
    snprintf(call->arg_param, sizeof call->arg_param, "%s%s", *in_query ? "query." : "", name);
    return json_is_null(value) ? NULL : value;
}

static bool refuse(api_call_t *call, const char *what)
{
    char param[sizeof call->arg_param];
    snprintf(param, sizeof param, "%s", call->arg_param);
    api_call_error(call, 400, param, "%s must be %s", param, what);
    return false;
}

bool api_arg_bool(api_call_t *call, const char *name, bool *out)
{
    static const char *const yes[] = {"true", "True", "1", "yes", "on"};
    static const char *const no[] = {"false", "False", "0", "no", "off"};
    bool in_query;
    const json_t *value = find(call, name, &in_query);
    if (value == NULL) {
        return true;
    }
    if (json_is_boolean(value)) {
        *out = json_is_true(value);
        return true;
    }
    for (size_t i = 0; in_query && i < LK_ARRAY_LEN(yes); i++) {
        bool is_yes = strcmp(json_string_value(value), yes[i]) == 0;
        if (is_yes || strcmp(json_string_value(value), no[i]) == 0) {
            *out = is_yes;
            return true;
        }
    }
    return refuse(call, "true or false");
}

bool api_arg_seconds(api_call_t *call, const char *name, double *out)
{
    bool in_query;
    const json_t *value = find(call, name, &in_query);
    if (value == NULL) {
        return true;
    }
    double x = NAN;
    if (json_is_number(value)) {
        x = json_number_value(value);
    } else if (in_query) {
        const char *text = json_string_value(value);
        char *tail;
        x = strtod(text, &tail);
        x = *tail == '\0' && tail != text ? x : NAN;
    }
    if (!(x > 0 && x <= 1e6)) {
        return refuse(call, "a number of seconds above 0 and at most 1000000");
    }
    *out = x;
    return true;
}

bool api_arg_str(api_call_t *call, const char *name, const char **out)
{
    bool in_query;
    const json_t *value = find(call, name, &in_query);
    if (value != NULL && !json_is_string(value)) {
        return refuse(call, "a string");
    }
    *out = value != NULL ? json_string_value(value) : *out;
    return true;
}

bool api_arg_choice(api_call_t *call, const char *name, const char *const *names, int *out)
{
    const char *text = NULL;
    if (!api_arg_str(call, name, &text)) {
        return false;
    }
    char what[256] = "one of";
    for (int i = 0; text != NULL && names[i] != NULL; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return true;
        }
        size_t used = strlen(what);
        snprintf(what + used, sizeof what - used, "%s %s", i > 0 ? "," : "", names[i]);
    }
    return text == NULL || refuse(call, what);
}
