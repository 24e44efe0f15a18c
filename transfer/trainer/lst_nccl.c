#include "base/base64.h"
#include "base/check.h"
#include "transfer/backends/nccl/nccl_sender.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/device/device.h"
#include "transfer/trainer/lst.h"
#include "transfer/trainer/lst_plan.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A device has no descriptor to wait for: it is looked at so often. */
#define LOOK_NS 50000l

struct lst_nccl {
    const nccl_comm_ops_t *ops;
    device_t *device;
    bool device_borrowed;
    nccl_sender_t sender;
    lst_plan_t plan;
    tcpstore_server_t *store; /* while ranks meet */
    uint8_t id[NCCL_ID_BYTES];
    uint32_t world_size, num_buffers;
};

static lst_nccl_t *part(lst_t *self)
{
    if (self->nccl == NULL) {
        self->nccl = calloc(1, sizeof *self->nccl);
        if (self->nccl != NULL) {
            self->nccl->ops = &nccl_lib_ops;
        }
    }
    return self->nccl;
}

lk_status_t lst_nccl_use(lst_t *self, const nccl_comm_ops_t *ops, device_t *device)
{
    lst_nccl_t *nccl = part(self);
    if (nccl == NULL) {
        return LK_ERR_NO_MEMORY;
    }
    nccl->ops = ops;
    nccl->device = device;
    nccl->device_borrowed = true;
    return LK_OK;
}

bool lst_nccl_up(const lst_t *self)
{
    return self->nccl != NULL && self->nccl->sender.link.phase == NCCL_LINK_UP;
}

device_t *lst_nccl_device(const lst_t *self)
{
    return lst_nccl_up(self) ? self->nccl->device : NULL;
}

void lst_nccl_drop(lst_t *self)
{
    if (self->nccl != NULL) {
        tcpstore_server_destroy(&self->nccl->store);
        nccl_sender_cancel(&self->nccl->sender);
        nccl_link_abort(&self->nccl->sender.link);
    }
}

void lst_nccl_fini(lst_t *self)
{
    if (self->nccl != NULL) {
        lst_nccl_drop(self);
        nccl_sender_fini(&self->nccl->sender);
        lst_plan_fini(&self->nccl->plan);
        if (!self->nccl->device_borrowed) {
            device_close(&self->nccl->device);
        }
        free(self->nccl);
        self->nccl = NULL;
    }
}

/* Sleeps until the cluster or a worker says something, or the device is to be looked at: at once,
 * when what it does is about to end. */
static void wait_for_any(lst_t *self, bool sending)
{
    bool soon = sending && nccl_sender_soon(&self->nccl->sender);
    struct timespec look = {.tv_nsec = soon ? 0 : LOOK_NS};
    struct pollfd fds[64];
    size_t n = 0;
    fds[n++] = (struct pollfd){.fd = rpc_fd(self->rpc), .events = POLLIN};
    if (self->nccl->store != NULL) {
        size_t more = tcpstore_server_pollfds(self->nccl->store, fds + n, LK_ARRAY_LEN(fds) - n);
        n += LK_MIN(more, LK_ARRAY_LEN(fds) - n);
    }
    (void)ppoll(fds, n, &look, NULL);
}

/* ---- init ---- */

/* Serves the store until every rank has joined, then hands the id out and joins, too. */
static lk_status_t meet(lst_t *self, lk_error_t *err)
{
    lst_nccl_t *nccl = self->nccl;
    nccl_link_t *link = &nccl->sender.link;
    if (nccl->store != NULL) {
        tcpstore_server_step(nccl->store);
        int64_t joined = tcpstore_server_workers(nccl->store);
        double silent_s;
        if (joined < nccl->world_size && nccl_link_silent(link, &silent_s)) {
            return lk_error_set(err, LK_ERR_TIMEOUT,
                                "the store counts %lld of %u ranks after %.1f s (this trainer is "
                                "one of them)",
                                (long long)joined, nccl->world_size, silent_s);
        }
        if (joined < nccl->world_size) {
            return LK_INPROGRESS;
        }
        if (link->phase == NCCL_LINK_DOWN) {
            uint8_t pickled[PICKLE_UNIQUE_ID_BYTES];
            pickle_unique_id_write(nccl->id, pickled);
            if (!tcpstore_server_set(nccl->store, TCPSTORE_ID_KEY, pickled, sizeof pickled)) {
                return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
            }
        }
    }
    if (link->phase == NCCL_LINK_DOWN) {
        nccl_link_start(link, nccl->id, nccl->world_size, 0);
    }
    return nccl_link_step(link, err);
}

static lk_status_t wait_for_ranks(lst_t *self)
{
    json_t *reply = NULL;
    lk_status_t called = LK_INPROGRESS, met = LK_INPROGRESS;
    lk_error_t met_err = LK_ERROR_INIT;
    while (called == LK_INPROGRESS || met == LK_INPROGRESS) {
        met = met == LK_INPROGRESS ? meet(self, &met_err) : met;
        if (called == LK_INPROGRESS) {
            called = rpc_test(self->rpc, &reply, &self->err);
        }
        if (called < 0) {
            return called;
        }
        if (met < 0) {
            json_decref(reply);
            return called == LK_INPROGRESS
                       ? lst_ask_for_the_reason(self, &met_err)
                       : lk_error_set(&self->err, met_err.status, "%s", met_err.text);
        }
        if (called == LK_INPROGRESS || met == LK_INPROGRESS) {
            wait_for_any(self, false);
        }
    }
    lst_learn_model(self, reply);
    json_decref(reply);
    return LK_OK;
}

static lk_status_t serve_store(lst_t *self, const lst_nccl_options_t *o, json_t *info)
{
    const char *bind_host = o->bind_host != NULL ? o->bind_host : "127.0.0.1";
    const char *host = o->advertise_host != NULL ? o->advertise_host : bind_host;
    int fd = -1;
    uint16_t port = 0;
    LK_RETURN_IF_ERROR(tcp_listen(bind_host, o->port, 64, &fd, &port, &self->err));
    self->nccl->store = tcpstore_server_new(fd);
    /* the master of a store counts itself first */
    bool ok = self->nccl->store != NULL &&
              tcpstore_server_set(self->nccl->store, TCPSTORE_WORKERS_KEY, "1", 1) &&
              json_object_set_new(info, "master_address", json_string(host)) == 0 &&
              json_object_set_new(info, "master_port", json_integer(port)) == 0;
    return ok ? LK_OK : lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
}

static lk_status_t fill_info(lst_t *self, const lst_nccl_options_t *o, json_t *info)
{
    lst_nccl_t *nccl = self->nccl;
    if (o->store) {
        LK_RETURN_IF_ERROR(serve_store(self, o, info));
    } else {
        char text[BASE64_SIZE(NCCL_ID_BYTES)];
        base64_encode(nccl->id, NCCL_ID_BYTES, text);
        if (json_object_set_new(info, "nccl_unique_id_b64", json_string(text)) != 0) {
            return lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
        }
    }
    uint64_t bytes =
        o->packed_buffer_size_bytes > 0 ? o->packed_buffer_size_bytes : PACKED_BUFFER_SIZE_DEFAULT;
    bool ok = json_object_set_new(info, "rank_offset", json_integer(1)) == 0 &&
              json_object_set_new(info, "world_size", json_integer(nccl->world_size)) == 0 &&
              json_object_set_new(info, "packed", json_boolean(o->packed)) == 0 &&
              json_object_set_new(info, "packed_buffer_size_bytes",
                                  json_integer((json_int_t)bytes)) == 0 &&
              json_object_set_new(info, "packed_num_buffers", json_integer(nccl->num_buffers)) == 0;
    return ok ? LK_OK : lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
}

static lk_status_t init(lst_t *self, const lst_nccl_options_t *o)
{
    lst_nccl_t *nccl = part(self);
    json_t *info = json_object(), *args = json_pack("{s:o}", "init_info", info);
    lk_status_t st = nccl != NULL && args != NULL
                         ? LK_OK
                         : lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
    if (st == LK_OK && nccl->device != NULL && !nccl->device_borrowed &&
        nccl->device->index != o->device) {
        nccl_sender_fini(&nccl->sender);
        device_close(&nccl->device);
    }
    if (st == LK_OK && nccl->device == NULL) {
        st = device_open("cuda", o->device, &nccl->device, &self->err);
    }
    st = st == LK_OK ? nccl_link_open(&nccl->sender.link, nccl->ops, o->library, nccl->device,
                                      self->env, self->no_progress_ns, &self->err)
                     : st;
    st = st == LK_OK ? nccl->ops->unique_id(nccl->sender.link.library, nccl->id, &self->err) : st;
    if (st == LK_OK) {
        nccl->world_size = self->n_ranks + 1;
        nccl->num_buffers = o->packed_num_buffers > 0 ? o->packed_num_buffers : 2;
        st = fill_info(self, o, info);
    }
    st = st == LK_OK ? rpc_post(self->rpc, "init_weight_transfer_engine", args,
                                self->timeout_ns + self->no_progress_ns, &self->err)
                     : st;
    json_decref(args);
    return st == LK_OK ? wait_for_ranks(self) : st;
}

lst_status_t lst_init_nccl(lst_t *self, const lst_nccl_options_t *options)
{
    static const lst_nccl_options_t defaults = {0};
    const lst_nccl_options_t *o = options != NULL ? options : &defaults;
    lst_status_t asked = lst_count_ranks(self);
    if (asked != LST_OK) {
        return asked;
    }
    lst_drop_ranks(self);
    lk_status_t st = init(self, o);
    if (st < 0) {
        rpc_drop(self->rpc);
        lst_drop_ranks(self);
    } else {
        tcpstore_server_destroy(&self->nccl->store);
    }
    return (lst_status_t)st;
}

/* ---- update ---- */

/* Sends while looking out for an early refusal. */
static lk_status_t send_all(lst_t *self)
{
    nccl_sender_t *sender = &self->nccl->sender;
    json_t *reply = NULL;
    lk_status_t called = LK_INPROGRESS, sent = LK_INPROGRESS;
    uint64_t sent_ns = 0;
    while (called == LK_INPROGRESS || sent == LK_INPROGRESS) {
        lk_error_t send_err = LK_ERROR_INIT;
        if (sent == LK_INPROGRESS) {
            sent = nccl_sender_step(sender, &send_err);
            sent_ns = lk_env_now_ns(self->env);
        }
        if (called == LK_INPROGRESS) {
            called = rpc_test(self->rpc, &reply, &self->err);
        }
        if (called < 0) {
            nccl_sender_cancel(sender);
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
            wait_for_any(self, sent == LK_INPROGRESS);
        }
    }
    lst_keep_reply(self, reply);
    return LK_OK;
}

lk_status_t lst_nccl_update(lst_t *self, const tensor_desc_t *descs, const void *const *data,
                            size_t n, bool packed, uint64_t buffer_size, uint64_t *bytes)
{
    nccl_sender_t *sender = &self->nccl->sender;
    lst_plan_t *plan = &self->nccl->plan;
    LK_RETURN_IF_ERROR(
        lst_plan_make(plan, descs, data, n, packed, buffer_size, self->digests, &self->err));
    LK_RETURN_IF_ERROR(nccl_sender_begin(sender, plan->sent, plan->data, n, packed,
                                         plan->buffer_size, self->nccl->num_buffers, &self->err));
    *bytes = sender->bytes;
    lk_status_t st = rpc_post_text(self->rpc, "update_weights", plan->args, strlen(plan->args),
                                   UINT64_MAX / 4, &self->err);
    if (st < 0) {
        nccl_sender_cancel(sender);
        return st;
    }
    return send_all(self);
}
