#include "base/buf.h"
#include "base/check.h"
#include "transfer/backends/shm/shm_stream.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/backends/transfer_frame.h"
#include "transfer/trainer/lst.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_FDS 1024
#define TICK_MS 100 /* deadlines are looked at so often; input and room to send wake at once */
/* How long the cluster may take to say why a transfer broke. */
#define REASON_NS (10 * LK_SECOND_NS)

/* Sleeps until the socket, a rank, or (if watched) the listener has something. */
static void wait_for_any(lst_t *self, bool accepting)
{
    struct pollfd fds[MAX_FDS];
    size_t n = 0;
    fds[n++] = (struct pollfd){.fd = rpc_fd(self->rpc), .events = POLLIN};
    if (accepting) {
        fds[n++] = (struct pollfd){.fd = self->listener, .events = POLLIN};
    }
    if (self->sender != NULL) {
        n += sender_pollfds(self->sender, fds + n, MAX_FDS - n);
    }
    uint64_t now = lk_env_now_ns(self->env), wake = rpc_wake_ns(self->rpc);
    bool due = wake <= now;
    (void)poll(fds, n, due ? 0 : TICK_MS); /* whoever is woken looks for itself */
}

void lst_drop_ranks(lst_t *self)
{
    sender_destroy(&self->sender);
    lst_nccl_drop(self);
    lst_ipc_drop(self);
    if (self->listener >= 0) {
        close(self->listener);
        self->listener = -1;
    }
    shm_ring_fini(&self->ring); /* after the sender, which writes to it */
    self->knows_model = false;
}

/* ---- init ---- */

static void random_token(const lk_env_t *env, char out[33])
{
    uint8_t bytes[16];
    env->random(env->ctx, bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

static uint32_t dim(const json_t *model, const char *name)
{
    json_int_t n = json_integer_value(json_object_get(model, name));
    return n > 0 && n <= UINT32_MAX ? (uint32_t)n : 0;
}

void lst_learn_model(lst_t *self, const json_t *reply)
{
    const json_t *first = json_array_get(json_object_get(reply, "ranks"), 0);
    const json_t *model = json_object_get(reply, "model");
    model = model != NULL ? model : json_object_get(first, "model");
    const char *stored = json_string_value(json_object_get(first, "storage_dtype"));
    self->knows_model =
        json_is_object(model) && stored != NULL && dtype_parse(stored, &self->stored);
    self->digests = !json_is_false(json_object_get(first, "weight_digests"));
    self->dims = (name_rules_dims_t){.num_layers = dim(model, "num_layers"),
                                     .num_attention_heads = dim(model, "num_attention_heads"),
                                     .num_key_value_heads = dim(model, "num_key_value_heads"),
                                     .head_dim = dim(model, "head_dim"),
                                     .num_experts = dim(model, "num_experts"),
                                     .tied = json_is_true(json_object_get(model, "tied"))};
}

/* Accepts ranks and waits for the answer, whichever comes first. */
static lk_status_t meet_ranks(lst_t *self)
{
    json_t *reply = NULL;
    lk_status_t called = LK_INPROGRESS, greeted = LK_INPROGRESS;
    uint64_t start = lk_env_now_ns(self->env);
    while (called == LK_INPROGRESS || greeted == LK_INPROGRESS) {
        byte_stream_t *stream;
        while ((stream = self->ring.map != NULL ? shm_accept(self->listener, self->ring.fd)
                                                : tcp_accept(self->listener)) != NULL) {
            sender_add(self->sender, stream);
        }
        greeted = sender_greet(self->sender);
        if (called == LK_INPROGRESS) {
            called = rpc_test(self->rpc, &reply, &self->err);
        }
        if (called < 0) {
            return called;
        }
        uint64_t waited = lk_env_now_ns(self->env) - start;
        if (greeted == LK_INPROGRESS && waited > self->no_progress_ns) {
            char missing[512];
            sender_missing(self->sender, missing, sizeof missing);
            rpc_drop(self->rpc);
            json_decref(reply);
            return lk_error_set(&self->err, LK_ERR_TIMEOUT,
                                "init_weight_transfer_engine: not connected after %.1f s: %s",
                                (double)waited / 1e9, missing);
        }
        if (called == LK_INPROGRESS || greeted == LK_INPROGRESS) {
            wait_for_any(self, true);
        }
    }
    lst_learn_model(self, reply);
    json_decref(reply);
    return LK_OK;
}

/* Sends init_info (taken over) with this trainer's place in the group, and meets the ranks. */
static lst_status_t init_ranks(lst_t *self, json_t *info)
{
    json_t *args = json_pack("{s:o}", "init_info", info);
    bool whole = self->sender != NULL && args != NULL &&
                 json_object_set_new(info, "rank_offset", json_integer(1)) == 0 &&
                 json_object_set_new(info, "world_size", json_integer(self->n_ranks + 1)) == 0;
    lk_status_t st = whole ? rpc_post(self->rpc, "init_weight_transfer_engine", args,
                                      self->timeout_ns + self->no_progress_ns, &self->err)
                           : lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
    json_decref(args);
    st = st >= 0 ? meet_ranks(self) : st;
    if (st < 0) {
        lst_drop_ranks(self);
    }
    return (lst_status_t)st;
}

lst_status_t lst_init_tcp(lst_t *self, const lst_tcp_options_t *options)
{
    static const lst_tcp_options_t defaults = {0};
    const lst_tcp_options_t *o = options != NULL ? options : &defaults;
    const char *bind_host = o->bind_host != NULL ? o->bind_host : "127.0.0.1";
    const char *host = o->advertise_host != NULL ? o->advertise_host : bind_host;
    unsigned connections = o->connections > 0 ? o->connections : 1;
    if (connections > TRANSFER_LANES_MAX) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_INVALID, "connections: at most %u",
                                          TRANSFER_LANES_MAX);
    }
    lst_status_t asked = lst_count_ranks(self);
    if (asked != LST_OK) {
        return asked;
    }
    char token[33];
    uint16_t port = 0;
    lst_drop_ranks(self);
    lk_status_t st = tcp_listen(bind_host, o->port, (int)(self->n_ranks * connections),
                                &self->listener, &port, &self->err);
    if (st < 0) {
        return (lst_status_t)st;
    }
    random_token(self->env, token);
    self->sender = sender_new(self->env, self->no_progress_ns, token, self->n_ranks, connections);
    json_t *info = json_pack("{s:s, s:i, s:s, s:i}", "master_address", host, "master_port",
                             (int)port, "session_token", token, "connections", (int)connections);
    explicit_bzero(token, sizeof token);
    return init_ranks(self, info);
}

lst_status_t lst_init_shm(lst_t *self, const lst_shm_options_t *options)
{
    static const lst_shm_options_t defaults = {0};
    const lst_shm_options_t *o = options != NULL ? options : &defaults;
    lst_status_t asked = lst_count_ranks(self);
    if (asked != LST_OK) {
        return asked;
    }
    char token[33], name[64], secret[33];
    lst_drop_ranks(self);
    random_token(self->env, token);
    random_token(self->env, secret);
    snprintf(name, sizeof name, "lockstep-weights-%s", secret);
    uint64_t slots = o->ring_bytes > 0 ? o->ring_bytes / TRANSFER_CHUNK_BYTES +
                                             (o->ring_bytes % TRANSFER_CHUNK_BYTES != 0)
                                       : SHM_RING_SLOTS_DEFAULT;
    lk_status_t st = shm_ring_create(&self->ring, slots, &self->err);
    st = st >= 0 ? shm_listen(name, (int)self->n_ranks, &self->listener, &self->err) : st;
    if (st < 0) {
        lst_drop_ranks(self);
        return (lst_status_t)st;
    }
    self->sender = sender_new(self->env, self->no_progress_ns, token, self->n_ranks, 1);
    if (self->sender != NULL) {
        sender_set_window(self->sender, self->ring.map, slots);
        sender_set_checked(self->sender, !o->unchecked);
    }
    json_t *info = json_pack("{s:s, s:I, s:s}", "segment", name, "bytes",
                             (json_int_t)self->ring.bytes, "session_token", token);
    explicit_bzero(token, sizeof token);
    return init_ranks(self, info);
}

/* ---- update ---- */

lk_status_t lst_describe(const lst_tensor_t *tensors, size_t n, tensor_desc_t **descs_out,
                         const void ***data_out, lk_error_t *err)
{
    tensor_desc_t *descs = calloc(n + 1, sizeof *descs);
    const void **data = calloc(n + 1, sizeof *data);
    lk_status_t st = descs != NULL && data != NULL
                         ? LK_OK
                         : lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", n);
    for (size_t i = 0; i < n && st == LK_OK; i++) {
        const lst_tensor_t *t = &tensors[i];
        uint64_t bytes = 0;
        if (t->name == NULL || t->name[0] == '\0' || strlen(t->name) > TENSOR_NAME_MAX) {
            st = lk_error_set(err, LK_ERR_INVALID, "tensors[%zu] needs a name of 1 to %d bytes", i,
                              TENSOR_NAME_MAX);
        } else if (t->dtype == NULL || !dtype_parse(t->dtype, &descs[i].dtype)) {
            st = lk_error_set(err, LK_ERR_INVALID, "'%s' has the unknown dtype %.40s", t->name,
                              t->dtype != NULL ? t->dtype : "NULL");
        } else if (t->ndim > TENSOR_MAX_DIMS) {
            st = lk_error_set(err, LK_ERR_INVALID, "'%s' has more than %d dimensions", t->name,
                              TENSOR_MAX_DIMS);
        } else {
            descs[i].name = t->name;
            descs[i].ndim = t->ndim;
            memcpy(descs[i].shape, t->shape, t->ndim * sizeof t->shape[0]);
            data[i] = t->data;
            if (!tensor_desc_bytes(&descs[i], &bytes) || (bytes > 0 && t->data == NULL)) {
                st =
                    lk_error_set(err, LK_ERR_INVALID, "'%s' is too large, or has no data", t->name);
            }
        }
    }
    if (st < 0) {
        free(descs);
        free(data);
        return st;
    }
    *descs_out = descs;
    *data_out = data;
    return LK_OK;
}

char *lst_update_args(const tensor_desc_t *descs, size_t n, bool packed, uint64_t buffer_size)
{
    lk_buf_t out;
    bool utf8 = true;
    lk_buf_init(&out, 0);
    lk_buf_str(&out, "{\"update_info\":{\"names\":[");
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(descs[i].name);
        utf8 = utf8 && lk_utf8_valid(descs[i].name, len);
        lk_buf_append(&out, ",", i > 0);
        lk_buf_json_str(&out, descs[i].name, len);
    }
    lk_buf_str(&out, "],\"dtype_names\":[");
    for (size_t i = 0; i < n; i++) {
        const char *name = dtype_torch_name(descs[i].dtype);
        lk_buf_append(&out, ",", i > 0);
        lk_buf_json_str(&out, name, strlen(name));
    }
    lk_buf_str(&out, "],\"shapes\":[");
    for (size_t i = 0; i < n; i++) {
        lk_buf_str(&out, i > 0 ? ",[" : "[");
        for (uint32_t d = 0; d < descs[i].ndim; d++) {
            lk_buf_printf(&out, d > 0 ? ",%" PRIu64 : "%" PRIu64, descs[i].shape[d]);
        }
        lk_buf_append(&out, "]", 1);
    }
    lk_buf_printf(&out, "],\"packed\":%s,\"packed_buffer_size_bytes\":%" PRIu64 "}}",
                  packed ? "true" : "false", buffer_size);
    (void)lk_buf_cstr(&out);
    if (!utf8 || out.failed) {
        lk_buf_fini(&out);
        return NULL;
    }
    return (char *)out.data;
}

lk_status_t lst_ask_for_the_reason(lst_t *self, const lk_error_t *sent)
{
    uint64_t until = lk_env_now_ns(self->env) + REASON_NS;
    lk_error_t theirs = LK_ERROR_INIT;
    lk_status_t st = LK_INPROGRESS;
    json_t *reply = NULL;
    while (st == LK_INPROGRESS && lk_env_now_ns(self->env) < until) {
        st = rpc_test(self->rpc, &reply, &theirs);
        if (st == LK_INPROGRESS) {
            wait_for_any(self, false);
        }
    }
    json_decref(reply);
    rpc_drop(self->rpc);
    return st < 0 ? lk_error_set(&self->err, sent->status, "%s; the cluster says: %s", sent->text,
                                 theirs.text)
                  : lk_error_set(&self->err, sent->status, "%s", sent->text);
}

/* Sends while looking out for an early refusal. */
static lk_status_t send_all(lst_t *self)
{
    json_t *reply = NULL;
    lk_status_t called = LK_INPROGRESS, sent = LK_INPROGRESS;
    uint64_t sent_ns = 0;
    while (called == LK_INPROGRESS || sent == LK_INPROGRESS) {
        lk_error_t send_err = LK_ERROR_INIT;
        if (sent == LK_INPROGRESS) {
            sent = sender_step(self->sender, &send_err);
            sent_ns = lk_env_now_ns(self->env);
        }
        if (called == LK_INPROGRESS) {
            called = rpc_test(self->rpc, &reply, &self->err);
        }
        if (called < 0) {
            sender_cancel(self->sender, self->err.text);
            return called;
        }
        if (sent < 0) {
            json_decref(reply);
            return called == LK_INPROGRESS
                       ? lst_ask_for_the_reason(self, &send_err)
                       : lk_error_set(&self->err, send_err.status, "%s", send_err.text);
        }
        if (sent == LK_OK && called == LK_INPROGRESS &&
            lk_env_now_ns(self->env) - sent_ns > self->timeout_ns) {
            rpc_drop(self->rpc);
            return lk_error_set(&self->err, LK_ERR_TIMEOUT,
                                "update_weights: every rank has all bytes, but the cluster did not "
                                "answer within %.1f s",
                                (double)self->timeout_ns / 1e9);
        }
        if (called == LK_INPROGRESS || sent == LK_INPROGRESS) {
            wait_for_any(self, false);
        }
    }
    lst_keep_reply(self, reply);
    return LK_OK;
}

static lk_status_t update(lst_t *self, const tensor_desc_t *descs, const void *const *data,
                          size_t n, const lst_update_options_t *options, uint64_t *bytes)
{
    bool packed = options != NULL && options->packed;
    uint64_t buffer_size = options != NULL ? options->packed_buffer_size_bytes : 0;
    if (lst_nccl_up(self)) {
        return lst_nccl_update(self, descs, data, n, packed, buffer_size, bytes);
    }
    buffer_size = buffer_size > 0 ? buffer_size : PACKED_BUFFER_SIZE_DEFAULT;
    LK_RETURN_IF_ERROR(sender_begin(self->sender, descs, data, n, packed, buffer_size, &self->err));
    char *args = lst_update_args(descs, n, packed, buffer_size);
    /* the deadline is of progress (sender) and of silence afterwards: none that size could pass */
    lk_status_t st = args != NULL
                         ? rpc_post_text(self->rpc, "update_weights", args, strlen(args),
                                         UINT64_MAX / 4, &self->err)
                         : lk_error_set(&self->err, LK_ERR_INVALID,
                                        "update_weights: a name is not UTF-8 (or out of memory)");
    free(args);
    if (st < 0) {
        sender_cancel(self->sender, self->err.text);
        return st;
    }
    st = send_all(self);
    *bytes = sender_bytes(self->sender);
    return st;
}

lst_status_t lst_update(lst_t *self, const lst_tensor_t *tensors, size_t n,
                        const lst_update_options_t *options)
{
    self->err = LK_ERROR_INIT;
    if (self->ipc_up) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_STATE,
                                          "update_weights: over CUDA IPC the tensors' handles are "
                                          "sent, with lst_call");
    }
    if (!lst_nccl_up(self) && (self->sender == NULL || !sender_usable(self->sender))) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_STATE,
                                          "update_weights: not connected to the ranks. Call "
                                          "lst_init_tcp, lst_init_shm or lst_init_nccl first.");
    }
    tensor_desc_t *descs = NULL;
    const void **data = NULL;
    lk_status_t st = lst_describe(tensors, n, &descs, &data, &self->err);
    if (st < 0) {
        return (lst_status_t)st;
    }
    uint64_t start = lk_env_now_ns(self->env), bytes = 0;
    st = update(self, descs, data, n, options, &bytes);
    free(descs);
    free(data);
    if (st == LK_OK) {
        lst_stats_t *s = &self->stats;
        s->last_transfer_s = (double)(lk_env_now_ns(self->env) - start) / (double)LK_SECOND_NS;
        s->transfer_s += s->last_transfer_s;
        s->last_bytes = bytes;
        s->bytes += s->last_bytes;
        s->updates++;
    }
    return (lst_status_t)st;
}
