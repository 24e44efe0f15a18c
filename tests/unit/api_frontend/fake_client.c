#include "tests/unit/api_frontend/fake_client.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    api_call_t base;
    fake_client_t *client;
} fake_call_t;

static fake_client_t *client_of(api_call_t *call)
{
    return ((fake_call_t *)call)->client;
}

static void add(fake_client_t *c, const char *data, size_t len)
{
    c->text = realloc(c->text, c->len + len + 1);
    CHECK(c->text != NULL);
    memcpy(c->text + c->len, data, len);
    c->len += len;
    c->text[c->len] = '\0';
}

static void reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    fake_client_t *c = client_of(call);
    CHECK(c->status == 0);
    c->status = http_status;
    add(c, body, len);
    if (call->content_type != NULL) {
        return; /* no JSON */
    }
    c->json = json_loads(c->text, JSON_ALLOW_NUL, NULL);
    CHECKF(c->json != NULL, "not JSON: %s", c->text);
}

static void stream_begin(api_call_t *call)
{
    fake_client_t *c = client_of(call);
    CHECK(c->status == 0);
    c->status = 200;
    c->streaming = true;
}

static bool stream_data(api_call_t *call, const char *data, size_t len)
{
    fake_client_t *c = client_of(call);
    CHECK(c->streaming && !c->stream_ended);
    add(c, data, len);
    return !c->deaf;
}

static void stream_end(api_call_t *call)
{
    client_of(call)->stream_ended = true;
}

static void destroy(api_call_t *call)
{
    fake_client_t *c = client_of(call);
    if (c != NULL) {
        CHECK(!c->ended);
        c->ended = true;
        c->discarded = c->status == 0 || (c->streaming && !c->stream_ended);
        c->call = NULL;
    }
    free(call);
}

static const api_call_ops_t ops = {reply, stream_begin, stream_data, stream_end, destroy};

void fc_call_with(fake_client_t *c, api_t *api, const char *method, const char *path,
                  const char *body, const char *idempotency_key, const char *key)
{
    memset(c, 0, sizeof *c);
    c->text = strdup("");
    fake_call_t *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    c->call = &call->base;
    call->client = c;
    call->base.ops = &ops;
    call->base.rank = -1;
    call->base.unix_time = 1700000000;
    call->base.raw_body = body;
    call->base.raw_len = body != NULL ? strlen(body) : 0;
    snprintf(call->base.idempotency_key, sizeof call->base.idempotency_key, "%s",
             idempotency_key != NULL ? idempotency_key : "");
    snprintf(call->base.key, sizeof call->base.key, "%s", key != NULL ? key : "");
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", path);
    char *query = strchr(copy, '?');
    if (query != NULL) {
        *query++ = '\0';
        call->base.query = json_object();
        for (char *save = NULL, *item = strtok_r(query, "&", &save); item != NULL;
             item = strtok_r(NULL, "&", &save)) {
            char *value = strchr(item, '=');
            CHECK(value != NULL);
            *value++ = '\0';
            json_object_set_new(call->base.query, item, json_string(value));
        }
    }
    bool method_ok;
    char allow[32];
    call->base.route = api_find_route(method, copy, &method_ok, allow);
    CHECKF(call->base.route != NULL && method_ok, "%s %s", method, copy);
    api_dispatch(api, &call->base);
}

void fc_call(fake_client_t *c, api_t *api, const char *method, const char *path, const char *body)
{
    fc_call_with(c, api, method, path, body, NULL, NULL);
}

void fc_gone(fake_client_t *c)
{
    if (c->call != NULL) {
        api_call_client_gone(c->call);
    }
}

void fc_fini(fake_client_t *c)
{
    if (c->call != NULL) { /* still open: the API may end it after the test's client is gone */
        ((fake_call_t *)c->call)->client = NULL;
        c->call->gone = true;
    }
    free(c->text);
    json_decref(c->json);
}

const json_t *fc_get(const fake_client_t *c, const char *path)
{
    const json_t *value = c->json;
    char copy[256];
    snprintf(copy, sizeof copy, "%s", path);
    for (char *save = NULL, *item = strtok_r(copy, ".", &save); item != NULL && value != NULL;
         item = strtok_r(NULL, ".", &save)) {
        value = json_is_array(value) ? json_array_get(value, (size_t)atoi(item))
                                     : json_object_get(value, item);
    }
    return value;
}

const char *fc_str(const fake_client_t *c, const char *path)
{
    const char *text = json_string_value(fc_get(c, path));
    return text != NULL ? text : "(none)";
}

int64_t fc_int(const fake_client_t *c, const char *path)
{
    const json_t *value = fc_get(c, path);
    return json_is_integer(value) ? json_integer_value(value) : INT64_MIN;
}
