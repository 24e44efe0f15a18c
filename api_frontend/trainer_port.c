#include "api_frontend/trainer_port.h"
#include "base/check.h"
#include "base/log.h"
#include "proto/json_text.h"
#include "proto/limits.h"
#include "proto/wire_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ID_BYTES 8

typedef struct {
    api_call_t base;
    trainer_port_t *owner;
    port_peer_t peer;
    uint8_t id[ID_BYTES];
    json_t *text; /* what base.raw_body points to, or NULL */
} trainer_call_t;

void trainer_port_init(trainer_port_t *self, api_t *api, lk_port_t *port)
{
    *self = (trainer_port_t){.api = api, .port = port};
}

static void send_map(trainer_port_t *self, const port_peer_t *peer, const uint8_t *id, json_t *map)
{
    lk_buf_t body;
    lk_buf_init(&body, 0);
    wire_writer_t writer = wire_writer(&body);
    wire_put_json(&writer, map);
    port_frame_t frames[2] = {{id, ID_BYTES}, {body.data, body.len}};
    lk_error_t err = LK_ERROR_INIT;
    if (!body.failed && self->port != NULL &&
        port_send(self->port, peer, frames, 2, &err) != LK_OK) {
        LK_WARN("a trainer is gone before its reply: %s", err.text);
    }
    lk_buf_fini(&body);
}

static void reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    trainer_call_t *tc = (trainer_call_t *)call;
    json_t *map = json_text_read(body, len, 0, NULL);
    CHECK(json_is_object(map)); /* handlers reply with objects */
    json_t *text = json_object_get(map, "status");
    if (text != NULL) { /* {"status": "paused"}: the code takes its place */
        json_object_set(map, "state", text);
    }
    json_object_set_new(map, "status", json_integer(http_status));
    send_map(tc->owner, &tc->peer, tc->id, map);
    json_decref(map);
}

static void destroy(api_call_t *call)
{
    trainer_call_t *tc = (trainer_call_t *)call;
    tc->owner->n_open--;
    json_decref(tc->text);
    free(tc);
}

static const api_call_ops_t ops = {.reply = reply, .destroy = destroy};

static lk_status_t read_body(const port_frame_t *frame, json_t **out, lk_error_t *err)
{
    static const wire_limits_t limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    wire_doc_t doc = {0};
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, frame->data, frame->len, &limits, err));
    lk_status_t status = wire_to_json(doc.root, out, err);
    wire_doc_fini(&doc);
    return status;
}

/* Takes a text field out of the map. False: it is there and unusable. */
static bool take_text(json_t *map, const char *name, char *out, size_t room)
{
    json_t *value = json_object_get(map, name);
    out[0] = '\0';
    bool ok = value == NULL || (json_is_string(value) && json_string_length(value) < room);
    if (ok && value != NULL) {
        snprintf(out, room, "%s", json_string_value(value));
        json_object_del(map, name);
    }
    return ok;
}

/* Takes the arguments as one text, which then is the call's body as in HTTP. False: answered. */
static bool take_json(trainer_call_t *tc)
{
    api_call_t *call = &tc->base;
    json_t *text = json_object_get(call->body, "json");
    if (text == NULL) {
        return true;
    }
    if (!json_is_string(text)) {
        api_call_error(call, 400, "json", "json must be the text of a JSON object");
        return false;
    }
    if (json_object_size(call->body) > 1) {
        api_call_error(call, 400, "json", "json excludes other arguments");
        return false;
    }
    tc->text = json_incref(text);
    call->raw_body = json_string_value(text);
    call->raw_len = json_string_length(text);
    json_decref(call->body);
    call->body = NULL;
    return true;
}

void trainer_port_on_message(trainer_port_t *self, const port_peer_t *peer,
                             const port_frame_t *frames, size_t n_frames)
{
    if (n_frames != 2 || frames[0].len != ID_BYTES) {
        self->dropped++;
        return;
    }
    trainer_call_t *tc = calloc(1, sizeof *tc);
    if (tc == NULL) {
        self->dropped++;
        return;
    }
    api_call_t *call = &tc->base;
    *call = (api_call_t){.ops = &ops, .rank = -1, .unix_time = (int64_t)time(NULL)};
    tc->owner = self;
    tc->peer = *peer;
    memcpy(tc->id, frames[0].data, ID_BYTES);
    self->n_open++;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = read_body(&frames[1], &call->body, &err);
    char name[64] = "";
    if (status != LK_OK) {
        api_call_error(call, lk_status_http(status), "body", "%s", err.text);
    } else if (!json_is_object(call->body)) {
        api_call_error(call, 400, "body", "the body must be a map");
    } else if (self->n_open > TRAINER_MAX_OPEN) {
        api_call_error(call, 503, NULL, "too many calls are open");
    } else if (!take_text(call->body, "idempotency_key", call->idempotency_key,
                          sizeof call->idempotency_key)) {
        api_call_error(call, 400, "idempotency_key", "idempotency_key must be a short text");
    } else if (!take_text(call->body, "admin_key", call->key, sizeof call->key)) {
        api_call_error(call, 400, "admin_key", "admin_key must be a short text");
    } else if (!take_text(call->body, "call", name, sizeof name) ||
               (call->route = api_find_call(name)) == NULL) {
        api_call_error(call, 404, "call", "there is no call \"%s\"", name);
    } else if (take_json(tc)) {
        api_dispatch(self->api, call);
    }
}

bool trainer_port_drain(trainer_port_t *self, size_t budget)
{
    for (size_t i = 0; i < budget; i++) {
        port_msg_t msg;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status = port_recv(self->port, &msg, &err);
        if (status == LK_INPROGRESS) {
            return false;
        }
        if (status != LK_OK) {
            self->dropped++;
            continue;
        }
        trainer_port_on_message(self, &msg.peer, msg.frames, msg.n_frames);
        port_msg_fini(self->port, &msg);
    }
    return true;
}
