#include "transfer/backends/nccl/nccl_sender.h"
#include "base/check.h"
#include "transfer/device/device.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NO_SLOT NCCL_SLOTS_MAX
#define PIECES  96 /* handed to the device at once */

static void forget_update(nccl_sender_t *self)
{
    free(self->buckets);
    self->buckets = NULL;
    self->n_buckets = self->next = self->done = 0;
    self->calling = self->placed = false;
    self->tensors = NULL;
    self->data = NULL;
}

static uint64_t tensor_size(const nccl_sender_t *self, size_t index)
{
    uint64_t bytes = 0;
    bool fits = tensor_desc_bytes(&self->tensors[index], &bytes);
    CHECK(fits); /* packed_layout has added them up */
    return bytes;
}

/* Where the bucket lies as a whole; NULL if it doesn't. Broadcasting is in place, but rank 0 only
 * reads. */
static void *place_of(const nccl_sender_t *self, const packed_bucket_t *bucket)
{
    const uint8_t *start = NULL;
    uint64_t at = 0;
    for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
        uint64_t size = tensor_size(self, i);
        const uint8_t *data = self->data[i];
        if (size > 0 && start != NULL && data != start + at) {
            return NULL;
        }
        start = size > 0 && start == NULL ? data : start;
        at += size;
    }
    return (void *)start;
}

/* Copies the bucket's tensors together. */
static lk_status_t gather(nccl_sender_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    device_piece_t pieces[PIECES];
    size_t n = 0;
    uint8_t *to = self->place;
    lk_status_t st = LK_OK;
    device->beside = self->next > 0; /* the first: there is no broadcast yet */
    for (size_t i = 0; i < bucket->count && st == LK_OK; i++) {
        uint64_t size = tensor_size(self, bucket->first + i);
        pieces[n++] = (device_piece_t){.src = self->data[bucket->first + i],
                                       .src_dtype = LK_DTYPE_U8,
                                       .dst_dtype = LK_DTYPE_U8,
                                       .dst = to,
                                       .rows = 1,
                                       .cols = size,
                                       .dst_pitch = size};
        to += size;
        if (n == PIECES || i + 1 == bucket->count) {
            st = device->ops->unpack(device, pieces, n, link->local, err);
            n = 0;
        }
    }
    device->beside = false;
    return st;
}

static lk_status_t pack(nccl_sender_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    self->slot = self->next_slot;
    self->next_slot = (self->next_slot + 1) % link->n_slots;
    self->place = link->slots[self->slot];
    LK_RETURN_IF_ERROR(
        device->ops->stream_wait(device, link->local, link->slot_free[self->slot], err));
    LK_RETURN_IF_ERROR(gather(self, bucket, err));
    device_event_t *packed = link->local_done[self->next % NCCL_WINDOW];
    LK_RETURN_IF_ERROR(device->ops->event_record(device, packed, link->local, err));
    return device->ops->stream_wait(device, link->wire, packed, err);
}

/* Sees to it that the next bucket lies in one place. */
static lk_status_t place(nccl_sender_t *self, lk_error_t *err)
{
    const packed_bucket_t *bucket = &self->buckets[self->next];
    if (self->placed) {
        return LK_OK;
    }
    self->slot = NO_SLOT;
    self->place = place_of(self, bucket);
    if (self->place == NULL && bucket->bytes > 0) {
        LK_RETURN_IF_ERROR(pack(self, bucket, err));
    }
    self->placed = true;
    return LK_OK;
}

lk_status_t nccl_sender_begin(nccl_sender_t *self, const tensor_desc_t *tensors,
                              const void *const *data, size_t n, bool packed, uint64_t buffer_size,
                              uint32_t num_buffers, lk_error_t *err)
{
    CHECK(self->link.phase == NCCL_LINK_UP && self->n_buckets == 0);
    forget_update(self);
    LK_RETURN_IF_ERROR(
        packed_layout(tensors, n, packed, buffer_size, &self->buckets, &self->n_buckets, err));
    self->tensors = tensors;
    self->data = data;
    self->packed = packed;
    self->next_slot = 0;
    self->bytes = 0;
    self->times = (nccl_times_t){.begun_ns = lk_env_now_ns(self->link.env)};
    uint64_t most = 0;
    for (size_t i = 0; i < self->n_buckets; i++) {
        const packed_bucket_t *b = &self->buckets[i];
        self->bytes += b->bytes;
        most = b->bytes > most && place_of(self, b) == NULL ? b->bytes : most;
    }
    lk_status_t st = nccl_link_stage(&self->link, num_buffers, most, err);
    if (st == LK_OK && self->n_buckets > 0) {
        st = place(self, err); /* while the ranks get ready */
    }
    if (st < 0) {
        forget_update(self);
        return st;
    }
    nccl_link_touch(&self->link);
    return LK_OK;
}

static lk_status_t call(nccl_sender_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    lk_dtype_t dtype = self->packed ? LK_DTYPE_U8 : self->tensors[bucket->first].dtype;
    return link->ops->broadcast(link->comm, self->place, bucket->bytes / dtype_bytes(dtype), dtype,
                                link->wire, err);
}

static lk_status_t follow(nccl_sender_t *self, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    if (self->slot != NO_SLOT) {
        LK_RETURN_IF_ERROR(
            device->ops->event_record(device, link->slot_free[self->slot], link->wire, err));
    }
    return device->ops->event_record(device, link->wire_done[self->next % NCCL_WINDOW], link->wire,
                                     err);
}

static lk_status_t enqueue(nccl_sender_t *self, lk_error_t *err)
{
    while (self->next < self->n_buckets && self->next - self->done < NCCL_WINDOW) {
        const packed_bucket_t *bucket = &self->buckets[self->next];
        lk_status_t st = LK_OK;
        LK_RETURN_IF_ERROR(place(self, err));
        if (self->calling) {
            st = self->link.ops->poll(self->link.comm, err);
        } else if (bucket->bytes > 0) {
            st = call(self, bucket, err);
        }
        self->calling = st == LK_INPROGRESS;
        if (st != LK_OK) {
            return st;
        }
        LK_RETURN_IF_ERROR(follow(self, err));
        self->next++;
        self->placed = false;
    }
    return LK_OK;
}

static lk_status_t retire(nccl_sender_t *self, lk_error_t *err)
{
    device_t *device = self->link.device;
    while (self->done < self->next) {
        lk_status_t st =
            device->ops->event_test(device, self->link.wire_done[self->done % NCCL_WINDOW], err);
        if (st != LK_OK) {
            return st;
        }
        self->done++;
        nccl_link_touch(&self->link);
    }
    return LK_OK;
}

lk_status_t nccl_sender_step(nccl_sender_t *self, lk_error_t *err)
{
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
        nccl_link_log_times(&self->link, &self->times, "sent", self->bytes);
        forget_update(self);
        return LK_OK;
    }
    if (st >= 0 && !self->calling) {
        lk_status_t polled = self->link.ops->poll(self->link.comm, err);
        st = polled < 0 ? polled : st;
    }
    double silent_s;
    if (st >= 0 && nccl_link_silent(&self->link, &silent_s)) {
        const packed_bucket_t *b = &self->buckets[self->done];
        st = lk_error_set(err, LK_ERR_TIMEOUT,
                          "no progress for %.1f s: bucket %zu of %zu (from tensor '%s', %" PRIu64
                          " bytes) was not taken by all of %u ranks",
                          silent_s, self->done + 1, self->n_buckets, self->tensors[b->first].name,
                          b->bytes, self->link.world_size - 1);
    }
    if (st < 0) {
        nccl_link_abort(&self->link);
        forget_update(self);
        return st;
    }
    return LK_INPROGRESS;
}

bool nccl_sender_soon(const nccl_sender_t *self)
{
    return self->calling || self->done + 1 == self->n_buckets;
}

void nccl_sender_cancel(nccl_sender_t *self)
{
    nccl_link_t *link = &self->link;
    lk_error_t ignored = LK_ERROR_INIT; /* a device that has failed reads nothing more, either */
    if (self->next > 0 || self->calling) {
        nccl_link_abort(link);
    } else if (self->placed && device_wait(link->device, link->local, &ignored) < 0) {
        nccl_link_abort(link);
    }
    forget_update(self);
}

void nccl_sender_fini(nccl_sender_t *self)
{
    forget_update(self);
    nccl_link_fini(&self->link);
    memset(self, 0, sizeof *self);
}
