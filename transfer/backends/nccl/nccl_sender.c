#include "transfer/backends/nccl/nccl_sender.h"
#include "base/check.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NO_SLOT NCCL_SLOTS_MAX

static void forget_update(nccl_sender_t *self)
{
    free(self->buckets);
    self->buckets = NULL;
    self->n_buckets = self->next = self->done = 0;
    self->calling = false;
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

lk_status_t nccl_sender_begin(nccl_sender_t *self, const tensor_desc_t *tensors,
                              const void *const *data, size_t n, bool packed, uint64_t buffer_size,
                              uint32_t num_buffers, lk_error_t *err)
{
    CHECK(self->link.phase == NCCL_LINK_UP);
    forget_update(self);
    LK_RETURN_IF_ERROR(
        packed_layout(tensors, n, packed, buffer_size, &self->buckets, &self->n_buckets, err));
    self->tensors = tensors;
    self->data = data;
    self->packed = packed;
    self->next_slot = 0;
    self->bytes = 0;
    uint64_t most = 0;
    for (size_t i = 0; i < self->n_buckets; i++) {
        const packed_bucket_t *b = &self->buckets[i];
        self->bytes += b->bytes;
        most = b->bytes > most && place_of(self, b) == NULL ? b->bytes : most;
    }
    lk_status_t st = nccl_link_stage(&self->link, num_buffers, most, err);
    if (st < 0) {
        forget_update(self);
        return st;
    }
    nccl_link_touch(&self->link);
    return LK_OK;
}

/* Copies the bucket's tensors together. */
static lk_status_t pack(nccl_sender_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    device_t *device = link->device;
    self->slot = self->next_slot;
    self->next_slot = (self->next_slot + 1) % link->n_slots;
    self->place = link->slots[self->slot];
    LK_RETURN_IF_ERROR(
        device->ops->stream_wait(device, link->local, link->slot_free[self->slot], err));
    uint8_t *to = self->place;
    for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
        uint64_t size = tensor_size(self, i);
        LK_RETURN_IF_ERROR(device->ops->copy(device, to, self->data[i], size, link->local, err));
        to += size;
    }
    device_event_t *packed = link->local_done[self->next % NCCL_WINDOW];
    LK_RETURN_IF_ERROR(device->ops->event_record(device, packed, link->local, err));
    return device->ops->stream_wait(device, link->wire, packed, err);
}

static lk_status_t call(nccl_sender_t *self, const packed_bucket_t *bucket, lk_error_t *err)
{
    nccl_link_t *link = &self->link;
    self->slot = NO_SLOT;
    self->place = place_of(self, bucket);
    if (self->place == NULL) {
        LK_RETURN_IF_ERROR(pack(self, bucket, err));
    }
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
        if (self->calling) {
            st = self->link.ops->poll(self->link.comm, err);
        } else if (bucket->bytes > 0) {
            st = call(self, bucket, err);
        } else {
            self->slot = NO_SLOT;
        }
        self->calling = st == LK_INPROGRESS;
        if (st != LK_OK) {
            return st;
        }
        LK_RETURN_IF_ERROR(follow(self, err));
        self->next++;
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
    if (st >= 0 && self->done == self->n_buckets) {
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

void nccl_sender_cancel(nccl_sender_t *self)
{
    if (self->next > 0 || self->calling) {
        nccl_link_abort(&self->link);
    }
    forget_update(self);
}

void nccl_sender_fini(nccl_sender_t *self)
{
    forget_update(self);
    nccl_link_fini(&self->link);
    memset(self, 0, sizeof *self);
}
