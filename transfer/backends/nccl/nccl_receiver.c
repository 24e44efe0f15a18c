#include "transfer/backends/nccl/nccl_receiver.h"
#include "base/check.h"
#include "base/log.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/tcp/tcp_stream.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_SLOT NCCL_SLOTS_MAX
/* Buckets enqueued per call: the caller's loop has other work, too. */
#define STEP_MOST NCCL_WINDOW

static void forget_update(nccl_receiver_t *self)
{
    free(self->buckets);
    free(self->arrivals);
    self->buckets = NULL;
    self->arrivals = NULL;
    self->n_buckets = self->next = self->done = 0;
    self->calling = false;
    self->load = (wte_update_t){0};
    self->progress.waiting_for[0] = '\0';
}

static void receiver_close(nccl_receiver_t *self, nccl_receiver_phase_t phase)
{
    tcpstore_client_destroy(&self->store);
    nccl_link_abort(&self->link);
    forget_update(self);
    self->phase = phase;
}

void nccl_receiver_fini(nccl_receiver_t *self)
{
    receiver_close(self, NCCL_RECEIVER_CLOSED);
    nccl_link_fini(&self->link);
    memset(self, 0, sizeof *self);
}

/* ---- init ---- */

static byte_stream_t *dial(void *ctx)
{
    nccl_receiver_t *self = ctx;
    return tcp_stream_dial(self->host, self->port, self->ctx.env);
}

lk_status_t nccl_receiver_open(nccl_receiver_t *self, const nccl_comm_ops_t *ops,
                               const wte_context_t *ctx, const nccl_meeting_t *meeting,
                               lk_error_t *err)
{
    receiver_close(self, NCCL_RECEIVER_CLOSED);
    self->ctx = *ctx;
    self->world_size = meeting->world_size;
    self->rank = meeting->rank;
    LK_RETURN_IF_ERROR(nccl_link_open(&self->link, ops, ctx->nccl_library, ctx->device, ctx->env,
                                      ctx->no_progress_ns, err));
    if (meeting->slot_bytes > 0 &&
        nccl_link_stage(&self->link, meeting->slots, meeting->slot_bytes, err) < 0) {
        /* not needed yet, and the update may need less */
        LK_WARN("NCCL: %s", err->text);
        *err = LK_ERROR_INIT;
    }
    if (meeting->has_id) {
        nccl_link_start(&self->link, meeting->id, self->world_size, self->rank);
        self->phase = NCCL_RECEIVER_JOINS;
        return LK_OK;
    }
    snprintf(self->host, sizeof self->host, "%s", meeting->host);
    self->port = meeting->port;
    uint32_t nonce = (uint32_t)lk_env_random_u64(ctx->env);
    self->store =
        tcpstore_client_new((tcpstore_dialer_t){dial, self}, ctx->env, ctx->no_progress_ns, nonce);
    if (self->store == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->phase = NCCL_RECEIVER_MEETS;
    return LK_OK;
}

static lk_status_t meet(nccl_receiver_t *self, lk_error_t *err)
{
    uint8_t id[NCCL_ID_BYTES];
    lk_status_t st = tcpstore_client_step(self->store, id, err);
    if (st == LK_OK) {
        tcpstore_client_destroy(&self->store);
        nccl_link_start(&self->link, id, self->world_size, self->rank);
        self->phase = NCCL_RECEIVER_JOINS;
    }
    return st;
}

lk_status_t nccl_receiver_open_step(nccl_receiver_t *self, lk_error_t *err)
{
    if (self->phase == NCCL_RECEIVER_CANCELED) {
        self->phase = NCCL_RECEIVER_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the initialisation was aborted");
    }
    if (self->phase != NCCL_RECEIVER_MEETS && self->phase != NCCL_RECEIVER_JOINS) {
        return lk_error_set(err, LK_ERR_STATE, "no initialisation is under way");
    }
    lk_status_t st = self->phase == NCCL_RECEIVER_MEETS ? meet(self, err) : LK_OK;
    st = st == LK_OK ? nccl_link_step(&self->link, err) : st;
    if (st == LK_OK) {
        self->phase = NCCL_RECEIVER_READY;
        LK_INFO("NCCL %s (%s): rank %u of %u, on %s", self->link.library->version,
                self->link.library->path, self->rank, self->world_size, self->ctx.device->text);
    } else if (st < 0) {
        receiver_close(self, NCCL_RECEIVER_CLOSED);
    }
    return st;
}

/* ---- update ---- */

lk_status_t nccl_receiver_check(nccl_receiver_t *self, lk_error_t *err)
{
    if (self->phase != NCCL_RECEIVER_READY) {
        return lk_error_set(err, LK_ERR_STATE,
                            "NCCL weight transfer not initialized. Call "
                            "init_weight_transfer_engine first.");
    }
    lk_error_t why = LK_ERROR_INIT;
    if (self->link.ops->poll(self->link.comm, &why) < 0) {
        return lk_error_set(err, LK_ERR_STATE, "%.700s. Call init_weight_transfer_engine again.",
                            why.text);
    }
    return LK_OK;
}

static uint64_t tensor_size(const nccl_receiver_t *self, size_t index)
{
    uint64_t bytes = 0;
    bool fits = tensor_desc_bytes(&self->load.tensors[index], &bytes);
    CHECK(fits); /* packed_layout has added them up */
    return bytes;
}

/* Where the bucket can be received in place: all its tensors lie in the sink as in the bucket. */
static void *place_of(const nccl_receiver_t *self, const packed_bucket_t *bucket)
{
    uint8_t *start = NULL;
    uint64_t at = 0;
    for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
        uint64_t size = tensor_size(self, i);
        if (size > 0) {
            uint8_t *place = self->sink.ops->device_direct(self->sink.ctx, i);
            if (place == NULL || (start != NULL && place != start + at)) {
                return NULL;
            }
            start = start != NULL ? start : place;
        }
        at += size;
    }
    return start;
}

/* Staging for the largest bucket that needs it. */
static lk_status_t stage(nccl_receiver_t *self, lk_error_t *err)
{
    uint64_t most = 0;
    for (size_t i = 0; i < self->n_buckets; i++) {
        const packed_bucket_t *b = &self->buckets[i];
        if (b->bytes > most && place_of(self, b) == NULL) {
            most = b->bytes;
        }
    }
    return nccl_link_stage(&self->link, self->load.packed_num_buffers, most, err);
}

lk_status_t nccl_receiver_begin(nccl_receiver_t *self, const wte_update_t *update,
                                const weight_sink_t *sink, lk_error_t *err)
{
    CHECK(self->phase == NCCL_RECEIVER_READY);
    CHECK(sink->ops->device != NULL);
    forget_update(self);
    LK_RETURN_IF_ERROR(packed_layout(update->tensors, update->n_tensors, update->packed,
                                     update->packed_buffer_size_bytes, &self->buckets,
                                     &self->n_buckets, err));
    self->load = *update;
    self->sink = *sink;
    self->next_slot = 0;
    self->progress = (wte_progress_t){.tensors_total = update->n_tensors};
    for (size_t i = 0; i < self->n_buckets; i++) {
        self->progress.bytes_total += self->buckets[i].bytes;
    }
    self->unsent = self->progress.bytes_total;
    size_t most = 1;
    for (size_t i = 0; i < self->n_buckets; i++) {
        most = LK_MAX(most, self->buckets[i].count);
    }
    self->arrivals = calloc(most, sizeof *self->arrivals);
    lk_status_t st = self->arrivals != NULL ? stage(self, err)
                                            : lk_error_set(err, LK_ERR_NO_MEMORY,
                                                           "out of memory for %zu tensors", most);
    if (st < 0) {
        forget_update(self);
        return st;
    }
    self->times = (nccl_times_t){.begun_ns = lk_env_now_ns(self->link.env)};
    nccl_link_touch(&self->link);
    self->phase = NCCL_RECEIVER_RECEIVES;
    return LK_OK;
}

/* Puts the next bucket's broadcast on the wire. */
static lk_status_t call(nccl_receiver_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    self->slot = NO_SLOT;
    self->place = place_of(self, bucket);
    if (self->place == NULL) {
        self->slot = self->next_slot;
        self->next_slot = (self->next_slot + 1) % link->n_slots;
        self->place = link->slots[self->slot];
        LK_RETURN_IF_ERROR(
            device->ops->stream_wait(device, link->wire, link->slot_free[self->slot], err));
    }
    const tensor_desc_t *first = &self->load.tensors[bucket->first];
    lk_dtype_t dtype = self->load.packed ? LK_DTYPE_U8 : first->dtype;
    return link->ops->broadcast(link->comm, self->place, bucket->bytes / dtype_bytes(dtype), dtype,
                                link->wire, err);
}

/* The bucket is on the wire: what happens to it behind that. */
static lk_status_t follow(nccl_receiver_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    device_event_t *wire_done = link->wire_done[self->next % NCCL_WINDOW];
    if (bucket->bytes > 0) {
        LK_RETURN_IF_ERROR(device->ops->event_record(device, wire_done, link->wire, err));
        LK_RETURN_IF_ERROR(device->ops->stream_wait(device, link->local, wire_done, err));
    }
    const uint8_t *at = self->place;
    for (size_t i = 0; i < bucket->count; i++) {
        uint64_t size = tensor_size(self, bucket->first + i);
        self->arrivals[i] = (weight_arrival_t){bucket->first + i, at, (size_t)size};
        at += size;
    }
    self->unsent -= bucket->bytes;
    device->beside = self->unsent > bucket->bytes; /* else the wire is done sooner, anyway */
    lk_status_t st =
        weight_sink_device_tensors(&self->sink, self->arrivals, bucket->count, link->local, err);
    device->beside = false;
    LK_RETURN_IF_ERROR(st);
    if (bucket->bytes > 0 && self->slot != NO_SLOT) {
        LK_RETURN_IF_ERROR(
            device->ops->event_record(device, link->slot_free[self->slot], link->local, err));
    }
    return device->ops->event_record(device, link->local_done[self->next % NCCL_WINDOW],
                                     link->local, err);
}

/* Enqueues what there is room for. */
static lk_status_t enqueue(nccl_receiver_t *self, lk_error_t *err)
{
    for (size_t most = STEP_MOST;
         self->next < self->n_buckets && self->next - self->done < NCCL_WINDOW && most > 0;
         most--) {
        const packed_bucket_t *bucket = &self->buckets[self->next];
        lk_status_t st = LK_OK;
        if (self->calling) {
            st = self->link.ops->poll(self->link.comm, err);
        } else if (bucket->bytes > 0) {
            st = call(self, bucket, err);
        } else {
            self->place = self->link.warm; /* any address: nothing is read */
        }
        self->calling = st == LK_INPROGRESS;
        if (st != LK_OK) {
            return st;
        }
        LK_RETURN_IF_ERROR(follow(self, bucket, err));
        self->next++;
    }
    return LK_OK;
}

/* Takes note of what has been done. */
static lk_status_t retire(nccl_receiver_t *self, lk_error_t *err)
{
    device_t *device = self->link.device;
    while (self->done < self->next) {
        lk_status_t st =
            device->ops->event_test(device, self->link.local_done[self->done % NCCL_WINDOW], err);
        if (st != LK_OK) {
            return st;
        }
        const packed_bucket_t *bucket = &self->buckets[self->done++];
        self->progress.tensors_done += bucket->count;
        self->progress.bytes_done += bucket->bytes;
        nccl_link_touch(&self->link);
    }
    return LK_OK;
}

static lk_status_t too_silent(const nccl_receiver_t *self, double silent_s, lk_error_t *err)
{
    const packed_bucket_t *b = &self->buckets[self->done];
    const tensor_desc_t *t = &self->load.tensors[b->first];
    return lk_error_set(err, LK_ERR_TIMEOUT,
                        "the trainer (rank 0 of %u) sent nothing for %.1f s: bucket %zu of %zu "
                        "(from tensor '%s', %" PRIu64 " bytes) has not arrived. It died, or sends "
                        "other sizes than it announced",
                        self->world_size, silent_s, self->done + 1, self->n_buckets, t->name,
                        b->bytes);
}

lk_status_t nccl_receiver_step(nccl_receiver_t *self, lk_error_t *err)
{
    if (self->phase == NCCL_RECEIVER_CANCELED) {
        self->phase = NCCL_RECEIVER_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the update was aborted");
    }
    if (self->phase != NCCL_RECEIVER_RECEIVES) {
        return lk_error_set(err, LK_ERR_STATE, "no update is under way");
    }
    lk_status_t st = enqueue(self, err);
    if (st >= 0) {
        lk_status_t retired = retire(self, err);
        st = retired < 0 ? retired : st;
    }
    if (st >= 0) {
        lk_status_t clocked =
            nccl_link_clock(&self->link, &self->times, self->done, self->next, err);
        st = clocked < 0 ? clocked : st;
    }
    if (st >= 0 && self->done == self->n_buckets) {
        nccl_link_log_times(&self->link, &self->times, "received", self->progress.bytes_done);
        forget_update(self);
        self->phase = NCCL_RECEIVER_READY;
        return LK_OK;
    }
    double silent_s;
    if (st >= 0 && !self->calling) {
        lk_status_t polled = self->link.ops->poll(self->link.comm, err);
        st = polled < 0 ? polled : st;
    }
    if (st >= 0 && nccl_link_silent(&self->link, &silent_s)) {
        st = too_silent(self, silent_s, err);
    }
    if (st < 0) {
        receiver_close(self, NCCL_RECEIVER_CLOSED);
        return st;
    }
    return LK_INPROGRESS;
}

/* ---- the rest ---- */

void nccl_receiver_abort(nccl_receiver_t *self)
{
    if (self->phase == NCCL_RECEIVER_MEETS || self->phase == NCCL_RECEIVER_JOINS ||
        self->phase == NCCL_RECEIVER_RECEIVES) {
        receiver_close(self, NCCL_RECEIVER_CANCELED);
    }
}

void nccl_receiver_progress(const nccl_receiver_t *self, wte_progress_t *out)
{
    *out = self->progress;
    out->soon = self->phase == NCCL_RECEIVER_RECEIVES &&
                (self->calling || self->done + 1 == self->n_buckets);
    size_t room = sizeof out->waiting_for;
    if (self->phase == NCCL_RECEIVER_MEETS) {
        tcpstore_client_waits_for(self->store, out->waiting_for, room);
    } else if (self->phase == NCCL_RECEIVER_JOINS) {
        snprintf(out->waiting_for, room, "the other ranks of %u to join the communicator",
                 self->world_size);
    } else if (self->phase == NCCL_RECEIVER_RECEIVES && self->done < self->n_buckets) {
        snprintf(out->waiting_for, room, "trainer (rank 0 of %u), bucket %zu of %zu",
                 self->world_size, self->done + 1, self->n_buckets);
    }
}

size_t nccl_receiver_pollfds(const nccl_receiver_t *self, struct pollfd *fds, size_t room)
{
    return self->phase == NCCL_RECEIVER_MEETS ? tcpstore_client_pollfds(self->store, fds, room) : 0;
}
