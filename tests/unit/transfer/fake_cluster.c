#include "tests/unit/transfer/fake_cluster.h"
#include "base/check.h"
#include "base/port.h"
#include "proto/wire_json.h"
#include "transfer/backends/ipc/wte_ipc.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/device/device.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake_cluster {
    pthread_t thread;
    pthread_mutex_t mutex; /* held while a call is answered: what follows is the thread's then */
    atomic_bool stop;
    lk_port_t *port;
    char endpoint[128];
    fake_script_t script;
    mem_sink_t *sinks[FAKE_RANKS];
    device_t *devices[FAKE_RANKS]; /* NULL: host memory */
    update_session_t *sessions[FAKE_RANKS];
    bool paused;
    uint64_t epoch;
    char version[64];
    char last[4096], shown[4096];
};

static json_t *refusal(int code, const char *text, bool plain)
{
    return plain ? json_pack("{s:i, s:s}", "status", code, "error", text)
                 : json_pack("{s:i, s:{s:s, s:i}}", "status", code, "error", "message", text,
                             "code", code);
}

/* Posts to every rank, and steps all until each is done, as a front end and its engines do. */
static json_t *weight_call(fake_cluster_t *self, update_verb_t verb, const json_t *args,
                           const char *message)
{
    char *spec = json_dumps(args, 0);
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t worst = LK_OK, st[FAKE_RANKS];
    for (int r = 0; r < FAKE_RANKS; r++) {
        lk_error_t one = LK_ERROR_INIT;
        if (update_session_check(self->sessions[r], verb, spec, strlen(spec), &one) < 0) {
            free(spec);
            return refusal(lk_status_http(one.status), one.text, self->script.plain_error);
        }
    }
    for (int r = 0; r < FAKE_RANKS; r++) {
        lk_error_t one = LK_ERROR_INIT;
        bool away = self->script.rank_1_stays_away && r == 1 && verb == UPDATE_VERB_INIT;
        st[r] =
            away ? LK_OK : update_session_post(self->sessions[r], verb, spec, strlen(spec), &one);
        if (st[r] < 0 && worst == LK_OK) {
            worst = st[r];
            err = one;
        }
        st[r] = st[r] == LK_OK && !away ? LK_INPROGRESS : st[r];
    }
    free(spec);
    bool busy = worst == LK_OK;
    while (busy && !atomic_load(&self->stop)) {
        busy = false;
        for (int r = 0; r < FAKE_RANKS; r++) {
            lk_error_t one = LK_ERROR_INIT;
            if (st[r] == LK_INPROGRESS) {
                st[r] = update_session_test(self->sessions[r], &one);
                busy = busy || st[r] == LK_INPROGRESS;
                if (st[r] < 0 && worst == LK_OK) {
                    worst = st[r];
                    err = one;
                }
            }
        }
        if (busy) {
            struct pollfd fds[8];
            size_t n = 0;
            for (int r = 0; r < FAKE_RANKS; r++) {
                n += update_session_pollfds(self->sessions[r], fds + n, 8 - n);
            }
            (void)poll(fds, n, 5);
        }
    }
    for (int r = 0; r < FAKE_RANKS; r++) {
        lk_status_t out = update_session_outcome(self->sessions[r], verb, worst == LK_OK, &err);
        CHECK(out == LK_OK);
    }
    return worst == LK_OK ? json_pack("{s:i, s:s}", "status", 200, "message", message)
                          : refusal(lk_status_http(worst), err.text, self->script.plain_error);
}

static json_t *init_call(fake_cluster_t *self, const json_t *args)
{
    json_t *reply = weight_call(self, UPDATE_VERB_INIT, args, "Weight transfer initialized");
    if (json_integer_value(json_object_get(reply, "status")) == 200 && !self->script.no_model) {
        json_t *ranks = json_array();
        for (int r = 0; r < FAKE_RANKS; r++) {
            json_array_append_new(ranks,
                                  json_pack("{s:i, s:s, s:{s:i, s:i, s:i, s:i, s:i, s:b}}", "rank",
                                            r, "storage_dtype", "float32", "model", "num_layers", 1,
                                            "num_attention_heads", 2, "num_key_value_heads", 1,
                                            "head_dim", 4, "num_experts", 0, "tied", 0));
        }
        json_object_set_new(reply, "ranks", ranks);
    }
    return reply;
}

static json_t *weight_info(fake_cluster_t *self)
{
    json_t *ranks = json_array();
    for (int r = 0; r < FAKE_RANKS; r++) {
        char hex[DIGEST_HEX_SIZE];
        weight_sink_t sink = mem_sink(self->sinks[r]);
        digest_hex(sink.ops->digest(sink.ctx), hex);
        json_array_append_new(
            ranks, json_pack("{s:i, s:s, s:I, s:s, s:b, s:s}", "rank", r, "version", self->version,
                             "epoch", (json_int_t)self->epoch, "digest", hex, "dirty",
                             (int)update_session_touched(self->sessions[r]), "state",
                             update_state_name(update_session_state(self->sessions[r]))));
    }
    return json_pack("{s:i, s:s, s:o}", "status", 200, "weight_version", self->version, "ranks",
                     ranks);
}

static json_t *handle(fake_cluster_t *self, const json_t *args)
{
    const char *call = json_string_value(json_object_get(args, "call"));
    CHECK(call != NULL);
    if (self->script.refuse != NULL && strcmp(self->script.refuse, call) == 0) {
        return refusal(self->script.code, self->script.text, self->script.plain_error);
    }
    if (strcmp(call, "pause") == 0 || strcmp(call, "resume") == 0) {
        self->paused = strcmp(call, "pause") == 0;
        return json_pack("{s:i, s:s}", "status", 200, "message", call);
    }
    if (strcmp(call, "is_paused") == 0) {
        return json_pack("{s:i, s:b}", "status", 200, "is_paused", (int)self->paused);
    }
    if (strcmp(call, "reset_prefix_cache") == 0) {
        return json_pack("{s:i, s:b}", "status", 200, "success", 1);
    }
    if (strcmp(call, "get_world_size") == 0) {
        return json_pack("{s:i, s:i}", "status", 200, "world_size", FAKE_RANKS);
    }
    if (strcmp(call, "weight_info") == 0) {
        return weight_info(self);
    }
    if (strcmp(call, "init_weight_transfer_engine") == 0) {
        return init_call(self, args);
    }
    if (strcmp(call, "start_weight_update") == 0) {
        return weight_call(self, UPDATE_VERB_START, args, "Weight update started");
    }
    if (strcmp(call, "update_weights") == 0) {
        self->sinks[1]->fail_at = self->script.sink_fails_at;
        return weight_call(self, UPDATE_VERB_UPDATE, args, "Weights updated");
    }
    if (strcmp(call, "abort_weight_update") == 0) {
        return weight_call(self, UPDATE_VERB_ABORT, args, "Weight update aborted");
    }
    if (strcmp(call, "update_weight_version") == 0) {
        return weight_call(self, UPDATE_VERB_SET_VERSION, args, "ok");
    }
    if (strcmp(call, "finish_weight_update") == 0) {
        json_t *reply = weight_call(self, UPDATE_VERB_FINISH, args, "Weight update finished");
        const char *version = json_string_value(json_object_get(args, "weight_version"));
        if (json_integer_value(json_object_get(reply, "status")) == 200) {
            self->epoch++;
            snprintf(self->version, sizeof self->version, "%s",
                     version != NULL ? version : self->version);
        }
        return reply;
    }
    return refusal(404, "no such call", false);
}

static void answer(fake_cluster_t *self, const port_msg_t *msg)
{
    static const wire_limits_t limits = {64u << 20, 1u << 20, 32};
    lk_error_t err = LK_ERROR_INIT;
    wire_doc_t doc = {0};
    json_t *args = NULL;
    CHECK(msg->n_frames == 2 && msg->frames[0].len == 8);
    lk_status_t st = wire_doc_init(&doc, msg->frames[1].data, msg->frames[1].len, &limits, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    st = wire_to_json(doc.root, &args, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    wire_doc_fini(&doc);
    const char *more = json_string_value(json_object_get(args, "json"));
    if (more != NULL) { /* the arguments as one text */
        json_t *parsed = json_loads(more, JSON_REJECT_DUPLICATES, NULL);
        CHECK(json_is_object(parsed) && json_object_update_missing(args, parsed) == 0);
        json_decref(parsed);
        json_object_del(args, "json");
    }
    char *text = json_dumps(args, JSON_COMPACT);
    snprintf(self->last, sizeof self->last, "%s", text);
    free(text);
    json_t *reply = handle(self, args);
    if (self->script.lacks != NULL) {
        json_object_del(reply, self->script.lacks);
    }
    lk_buf_t body;
    lk_buf_init(&body, 0);
    wire_writer_t writer = wire_writer(&body);
    wire_put_json(&writer, reply);
    port_frame_t frames[2] = {msg->frames[0], {body.data, body.len}};
    st = port_send(self->port, &msg->peer, frames, 2, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    lk_buf_fini(&body);
    json_decref(reply);
    json_decref(args);
}

static void *run(void *arg)
{
    fake_cluster_t *self = arg;
    while (!atomic_load(&self->stop)) {
        port_msg_t msg = {0};
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t st = port_recv(self->port, &msg, &err);
        if (st == LK_OK) {
            pthread_mutex_lock(&self->mutex);
            answer(self, &msg);
            pthread_mutex_unlock(&self->mutex);
            port_msg_fini(self->port, &msg);
            continue;
        }
        struct pollfd fd = {.fd = port_fd(self->port), .events = POLLIN};
        (void)poll(&fd, 1, 5); /* `stop` is looked at in between */
    }
    /* whoever made the socket's last use is to end it: the thread that owned it */
    port_destroy(&self->port);
    return NULL;
}

fake_cluster_t *fake_cluster_new(const tensor_desc_t *model, size_t n, fake_script_t script)
{
    fake_cluster_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->script = script;
    snprintf(self->version, sizeof self->version, "default");
    port_ipc_address("fake", self->endpoint, sizeof self->endpoint);
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t st = port_zmq_open(PORT_ROUTER, true, self->endpoint, NULL, &self->port, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    uint64_t no_progress_ns =
        (uint64_t)((script.no_progress_s > 0 ? script.no_progress_s : 20) * LK_SECOND_NS);
    const wte_ops_t *engine = script.nccl ? &wte_nccl : script.ipc ? &wte_ipc : wte_find("tcp");
    for (uint32_t r = 0; r < FAKE_RANKS; r++) {
        wte_context_t ctx = {.dp_rank = r,
                             .dp_size = FAKE_RANKS,
                             .ranks_per_replica = 1,
                             .env = lk_env_real(),
                             .no_progress_ns = no_progress_ns};
        self->sinks[r] = mem_sink_new(model, n);
        if (script.nccl || script.ipc) {
            st = device_open("host", 0, &self->devices[r], &err);
            CHECKF(st == LK_OK, "%s", err.text);
            self->sinks[r]->device = self->devices[r];
        }
        weight_sink_t sink = mem_sink(self->sinks[r]);
        self->sessions[r] = update_session_new(engine, &ctx, &sink);
        CHECK(self->sessions[r] != NULL);
    }
    pthread_mutex_init(&self->mutex, NULL);
    int rc = pthread_create(&self->thread, NULL, run, self);
    CHECK(rc == 0);
    return self;
}

void fake_cluster_destroy(fake_cluster_t **self_p)
{
    fake_cluster_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    atomic_store(&self->stop, true);
    pthread_join(self->thread, NULL);
    for (int r = 0; r < FAKE_RANKS; r++) {
        update_session_destroy(&self->sessions[r]);
        mem_sink_destroy(&self->sinks[r]);
        device_close(&self->devices[r]);
    }
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

const char *fake_cluster_endpoint(const fake_cluster_t *self)
{
    return self->endpoint;
}

/* The last call's answer has left, and all that its thread did for it is to be seen. */
static void await_answer(fake_cluster_t *self)
{
    pthread_mutex_lock(&self->mutex);
    pthread_mutex_unlock(&self->mutex);
}

mem_sink_t *fake_cluster_sink(fake_cluster_t *self, unsigned rank)
{
    await_answer(self);
    return self->sinks[rank];
}

const char *fake_cluster_last(fake_cluster_t *self)
{
    pthread_mutex_lock(&self->mutex);
    memcpy(self->shown, self->last, sizeof self->shown);
    pthread_mutex_unlock(&self->mutex);
    return self->shown;
}

void fake_cluster_script(fake_cluster_t *self, fake_script_t script)
{
    pthread_mutex_lock(&self->mutex);
    self->script = script;
    pthread_mutex_unlock(&self->mutex);
}
