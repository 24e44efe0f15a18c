#include "transfer/trainer/lst_plan.h"
#include "base/check.h"
#include "transfer/packed_layout.h"
#include "transfer/trainer/lst.h"

#include <stdlib.h>

#define PARTS 8             /* of everything: no bucket is larger, ... */
#define LEAST (64ull << 20) /* ... but starting a broadcast must not show */
#define TRIES 60            /* sizes that are looked at, from the largest to a sixteenth */
/* An H200 with NVLink: ns to start a broadcast, bytes per ns on the wire and digested, beside it
 * and alone. Only their ratios matter. */
#define START_NS      20000.0
#define WIRE_RATE     368.0
#define DIGEST_BESIDE 450.0
#define DIGEST_ALONE  640.0

/* The size of a bucket that is not exceeded; its tensors are not split, so it can be. */
static uint64_t largest_bucket(const tensor_desc_t *descs, size_t n)
{
    uint64_t total = 0, bytes;
    for (size_t i = 0; i < n && total < PARTS * PACKED_BUFFER_SIZE_DEFAULT; i++) {
        total += tensor_desc_bytes(&descs[i], &bytes) ? LK_MIN(bytes, UINT64_MAX / 2) : 0;
    }
    return LK_MAX(LK_MIN(total / PARTS, PACKED_BUFFER_SIZE_DEFAULT), LEAST);
}

static uint64_t bytes_of(const tensor_desc_t *desc)
{
    uint64_t bytes = 0;
    return tensor_desc_bytes(desc, &bytes) ? bytes : 0; /* too large: begin says so */
}

/* Those that fill a bucket alone first, each half as it was. */
static void choose_order(lst_plan_t *self, uint64_t bucket)
{
    size_t at = 0;
    for (int large = 1; large >= 0; large--) {
        for (size_t i = 0; i < self->asked.n; i++) {
            if ((bytes_of(&self->asked.descs[i]) > bucket) == large) {
                self->order[at++] = i;
            }
        }
    }
}

/* When all is done with buckets of this size, in ns (packed_layout's rule): each bucket is digested
 * behind its broadcast and behind the bucket before. */
static double time_of(const lst_plan_t *self, uint64_t size)
{
    uint64_t bucket = 0, left = 0;
    double wire = 0, digested = 0;
    for (size_t i = 0; i < self->asked.n; i++) {
        left += bytes_of(&self->sent[i]);
    }
    for (size_t i = 0; i < self->asked.n; i++) {
        bucket += bytes_of(&self->sent[i]);
        if (bucket > size || (i + 1 == self->asked.n && bucket > 0)) {
            left -= bucket;
            wire += START_NS + (double)bucket / WIRE_RATE;
            double rate = left > bucket ? DIGEST_BESIDE : DIGEST_ALONE;
            digested = LK_MAX(digested, wire) + (double)bucket / rate;
            bucket = 0;
        }
    }
    return self->digests ? digested : wire;
}

static uint64_t choose_size(const lst_plan_t *self, uint64_t largest)
{
    uint64_t best = largest;
    double least = time_of(self, largest);
    for (uint64_t i = 1; i <= TRIES; i++) {
        uint64_t size = LK_MAX(largest - largest / 16 * 15 / TRIES * i, LEAST);
        double time = time_of(self, size);
        best = time < least ? size : best;
        least = LK_MIN(time, least);
    }
    return best;
}

static bool take_memory(lst_plan_t *self)
{
    size_t room = self->asked.n + 1;
    self->order = calloc(room, sizeof *self->order);
    self->sent = calloc(room, sizeof *self->sent);
    self->data = calloc(room, sizeof *self->data);
    return self->order != NULL && self->sent != NULL && self->data != NULL;
}

static lk_status_t make(lst_plan_t *self, const tensor_desc_t *descs, size_t n, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(tensor_list_copy(descs, n, &self->asked, err));
    if (!take_memory(self)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", n);
    }
    uint64_t largest = largest_bucket(descs, n);
    bool choose = self->packed && self->asked_size == 0;
    choose_order(self, choose && self->digests ? largest : UINT64_MAX);
    for (size_t i = 0; i < n; i++) {
        self->sent[i] = self->asked.descs[self->order[i]];
    }
    self->buffer_size = choose                  ? choose_size(self, largest)
                        : self->asked_size == 0 ? largest
                                                : self->asked_size;
    self->args = lst_update_args(self->sent, n, self->packed, self->buffer_size);
    return self->args != NULL
               ? LK_OK
               : lk_error_set(err, LK_ERR_INVALID,
                              "update_weights: a name is not UTF-8 (or out of memory)");
}

lk_status_t lst_plan_make(lst_plan_t *self, const tensor_desc_t *descs, const void *const *data,
                          size_t n, bool packed, uint64_t buffer_size, bool digests,
                          lk_error_t *err)
{
    if (self->packed != packed || self->asked_size != buffer_size || self->digests != digests ||
        !tensor_list_equal(&self->asked, descs, n)) {
        lst_plan_fini(self);
        self->packed = packed;
        self->asked_size = buffer_size;
        self->digests = digests;
        lk_status_t st = make(self, descs, n, err);
        if (st < 0) {
            lst_plan_fini(self);
            return st;
        }
    }
    for (size_t i = 0; i < n; i++) {
        self->data[i] = data[self->order[i]];
    }
    return LK_OK;
}

void lst_plan_fini(lst_plan_t *self)
{
    tensor_list_fini(&self->asked);
    free(self->order);
    free(self->sent);
    free(self->data);
    free(self->args);
    *self = (lst_plan_t){0};
}
