#include "transfer/trainer/rpc.h"
#include "base/check.h"
#include "proto/limits.h"
#include "proto/wire_json.h"

#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESEND_FIRST_NS (10 * LK_SECOND_NS)
#define LOOK_NS         (200 * LK_MS_NS) /* between two looks at the connection */
#define RESEND_SOON_NS  (100 * LK_MS_NS) /* the socket's queue was full */

struct rpc {
    lk_port_t *port;
    const lk_env_t *env;
    char *admin_key;
    char endpoint[128];
    uint64_t next_id;

    bool busy;
    char call[64];
    uint64_t id; /* as sent: little-endian */
    lk_buf_t body;
    uint64_t start_ns, deadline_ns, resend_ns, resend_every_ns;
    uint64_t losses; /* of the connection, when the call was made */
};

rpc_t *rpc_new(lk_port_t *port, const lk_env_t *env, const char *admin_key, const char *endpoint)
{
    rpc_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        port_destroy(&port);
        return NULL;
    }
    self->port = port;
    self->env = env;
    /* ids of an earlier life of this process must not match */
    self->next_id = lk_env_random_u64(env);
    lk_buf_init(&self->body, WIRE_MAX_BODY);
    snprintf(self->endpoint, sizeof self->endpoint, "%s", endpoint);
    (void)port_losses(port); /* counts from now on */
    self->admin_key = admin_key != NULL ? strdup(admin_key) : NULL;
    if (admin_key != NULL && self->admin_key == NULL) {
        rpc_destroy(&self);
    }
    return self;
}

void rpc_destroy(rpc_t **self_p)
{
    rpc_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    port_destroy(&self->port);
    if (self->body.data != NULL) {
        explicit_bzero(self->body.data, self->body.cap); /* it held the key */
    }
    lk_buf_fini(&self->body);
    if (self->admin_key != NULL) {
        explicit_bzero(self->admin_key, strlen(self->admin_key));
        free(self->admin_key);
    }
    free(self);
}

bool rpc_busy(const rpc_t *self)
{
    return self->busy;
}

void rpc_drop(rpc_t *self)
{
    self->busy = false;
    lk_buf_clear(&self->body);
}

int rpc_fd(const rpc_t *self)
{
    return port_fd(self->port);
}

uint64_t rpc_wake_ns(const rpc_t *self)
{
    uint64_t look_ns = lk_env_now_ns(self->env) + LOOK_NS;
    return !self->busy ? UINT64_MAX : LK_MIN(look_ns, LK_MIN(self->deadline_ns, self->resend_ns));
}

static lk_status_t send_body(rpc_t *self, lk_error_t *err)
{
    port_frame_t frames[2] = {{&self->id, sizeof self->id}, {self->body.data, self->body.len}};
    lk_status_t st = port_send(self->port, NULL, frames, 2, err);
    uint64_t now = lk_env_now_ns(self->env);
    if (st == LK_ERR_UNAVAILABLE) { /* queued nowhere: soon again */
        self->resend_ns = now + RESEND_SOON_NS;
        return LK_OK;
    }
    self->resend_ns = now + self->resend_every_ns;
    self->resend_every_ns *= 2;
    return st;
}

static void put_text(json_t *map, const char *key, const char *value)
{
    if (value != NULL) {
        json_object_set_new(map, key, json_string(value));
    }
}

/* What every call has beside its arguments. */
static json_t *new_call(rpc_t *self, const char *call, const json_t *args)
{
    uint8_t random[16];
    char key[33];
    json_t *map = json_object();
    if (map == NULL || (args != NULL && json_object_update(map, (json_t *)args) != 0)) {
        json_decref(map);
        return NULL;
    }
    self->env->random(self->env->ctx, random, sizeof random);
    for (size_t i = 0; i < sizeof random; i++) {
        snprintf(key + 2 * i, 3, "%02x", random[i]);
    }
    put_text(map, "call", call);
    put_text(map, "idempotency_key", key);
    put_text(map, "admin_key", self->admin_key);
    return map;
}

/* Sends {"call": call, ...args}, or, with a text, {"call": call, "json": text}. */
static lk_status_t post(rpc_t *self, const char *call, const json_t *args, const char *text,
                        size_t text_len, uint64_t timeout_ns, lk_error_t *err)
{
    rpc_drop(self);
    json_t *map = new_call(self, call, args);
    json_t *json = text != NULL ? json_stringn_nocheck(text, text_len) : NULL;
    if (map == NULL || (text != NULL && json_object_set_new(map, "json", json) != 0)) {
        json_decref(map);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the call %s", call);
    }
    wire_writer_t writer = wire_writer(&self->body);
    wire_put_json(&writer, map);
    json_decref(map);
    if (self->body.failed || writer.objects > WIRE_MAX_OBJECTS) {
        lk_buf_clear(&self->body);
        return lk_error_set(err, LK_ERR_TOO_LARGE, "the call %s is too large to be sent", call);
    }
    snprintf(self->call, sizeof self->call, "%s", call);
    self->id = htole64(self->next_id++);
    self->start_ns = lk_env_now_ns(self->env);
    self->deadline_ns = self->start_ns + timeout_ns;
    self->resend_every_ns = RESEND_FIRST_NS;
    self->losses = port_losses(self->port);
    self->busy = true;
    lk_status_t st = send_body(self, err);
    if (st < 0) {
        rpc_drop(self);
    }
    return st;
}

lk_status_t rpc_post(rpc_t *self, const char *call, const json_t *args, uint64_t timeout_ns,
                     lk_error_t *err)
{
    return post(self, call, args, NULL, 0, timeout_ns, err);
}

lk_status_t rpc_post_text(rpc_t *self, const char *call, const char *args, size_t len,
                          uint64_t timeout_ns, lk_error_t *err)
{
    return post(self, call, NULL, args, len, timeout_ns, err);
}

/* The status whose HTTP code this is. */
static lk_status_t status_of_code(int64_t code)
{
    if (code == 500) {
        return LK_ERR_INTERNAL; /* several share it */
    }
#define X(name, value, http, text)                                                                 \
    if (code == (http)) {                                                                          \
        return LK_##name;                                                                          \
    }
    LK_STATUS_TABLE(X)
#undef X
    return code >= 400 && code < 500 ? LK_ERR_INVALID : LK_ERR_INTERNAL;
}

static lk_status_t failed_call(const rpc_t *self, int64_t code, const json_t *map, lk_error_t *err)
{
    const json_t *error = json_object_get(map, "error");
    const json_t *message = json_is_object(error) ? json_object_get(error, "message") : error;
    lk_status_t st = status_of_code(code);
    return lk_error_set(err, st < 0 ? st : LK_ERR_INTERNAL, "%s: %s", self->call,
                        json_is_string(message) ? json_string_value(message)
                                                : "the cluster gave no reason");
}

/* Owns *out on OK. LK_INPROGRESS: an answer to some other call. */
static lk_status_t read_reply(const rpc_t *self, const port_msg_t *msg, json_t **out,
                              lk_error_t *err)
{
    static const wire_limits_t limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    if (msg->n_frames != 2 || msg->frames[0].len != sizeof self->id ||
        memcmp(msg->frames[0].data, &self->id, sizeof self->id) != 0) {
        return LK_INPROGRESS;
    }
    wire_doc_t doc = {0};
    json_t *map = NULL;
    lk_status_t st = wire_doc_init(&doc, msg->frames[1].data, msg->frames[1].len, &limits, err);
    if (st == LK_OK) {
        st = wire_to_json(doc.root, &map, err);
    }
    wire_doc_fini(&doc);
    if (st == LK_OK && !json_is_integer(json_object_get(map, "status"))) {
        json_decref(map);
        st = lk_error_set(err, LK_ERR_PEER, "no status in it");
    }
    if (st != LK_OK) {
        return lk_error_prefix(err, "%s: the answer of %s makes no sense", self->call,
                               self->endpoint);
    }
    *out = map;
    return LK_OK;
}

lk_status_t rpc_test(rpc_t *self, json_t **reply, lk_error_t *err)
{
    CHECK(self->busy);
    for (;;) {
        port_msg_t msg = {0};
        lk_status_t st = port_recv(self->port, &msg, err);
        if (st == LK_INPROGRESS) {
            break;
        }
        json_t *map = NULL;
        if (st == LK_OK) {
            st = read_reply(self, &msg, &map, err);
            port_msg_fini(self->port, &msg);
        }
        if (st == LK_INPROGRESS) {
            continue;
        }
        rpc_drop(self);
        if (st < 0) {
            return st;
        }
        int64_t code = json_integer_value(json_object_get(map, "status"));
        if (code != 200) {
            st = failed_call(self, code, map, err);
            json_decref(map);
            return st;
        }
        *reply = map;
        return LK_OK;
    }
    /* The front end's next life would carry the call out a second time: only the caller knows
     * whether that is well. */
    if (port_losses(self->port) != self->losses) {
        rpc_drop(self);
        return lk_error_set(err, LK_ERR_PEER,
                            "%s: the connection to the front end at %s was lost before its answer "
                            "came; whether the call was carried out is not known",
                            self->call, self->endpoint);
    }
    uint64_t now = lk_env_now_ns(self->env);
    if (now >= self->deadline_ns) {
        rpc_drop(self);
        return lk_error_set(err, LK_ERR_TIMEOUT, "%s: no answer from %s within %.1f s", self->call,
                            self->endpoint, (double)(now - self->start_ns) / 1e9);
    }
    if (now >= self->resend_ns) {
        LK_RETURN_IF_ERROR(send_body(self, err));
    }
    return LK_INPROGRESS;
}
