#include "engine_core/exec/store/device_table.h"

#include "base/check.h"
#include "engine_core/exec/model_tensors.h"
#include "engine_core/exec/weight_plan.h"
#include "transfer/device/device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_STAGES 2
#define PIECES   96 /* handed to the device at once */

typedef struct {
    bool arrived;   /* since `begin` */
    bool agrees[2]; /* by spelling (canonical, tied alias): arrived with the value that is stored */
    bool pending;   /* what is enqueued for it will add to its lanes */
    bool loaded;
    digest_t digest;
} state_t;

/* A buffer pair that host bytes go through. */
typedef struct {
    void *host, *device;
    device_event_t *passed; /* the device has read both */
} stage_t;

struct device_table {
    weight_table_t *names;
    name_rules_dims_t dims;
    lk_dtype_t stored;
    device_t *device;
    size_t n_slots;
    state_t *states;
    char *storage; /* device */
    /* device and page-locked host: [n_slots + 1][2]. The last is for the second spelling of a tied
     * embedding, which is compared, not stored. */
    uint64_t *lanes, *lanes_host;
    size_t n_pending;
    bool undigested;   /* see device_table_set_digests */
    uint32_t compared; /* slot whose second spelling is in the last lanes, or UINT32_MAX */
    bool compared_alias;
    device_stream_t *own;     /* host bytes, clearing, reading back */
    device_event_t *cleared;  /* the lanes, for the plan at hand */
    device_stream_t *ordered; /* the last stream that waits for it */
    stage_t stages[N_STAGES];
    size_t next_stage;
    digest_t digest; /* of the loaded slots */
    size_t n_arrived;
    weight_plans_t plans;
};

/* ---- life ---- */

static lk_status_t make_memory(device_table_t *self, lk_error_t *err)
{
    const device_ops_t *ops = self->device->ops;
    uint64_t lane_bytes = (self->n_slots + 1) * sizeof(digest_t);
    uint64_t bytes = weight_table_bytes(self->names);
    LK_RETURN_IF_ERROR(ops->alloc(self->device, bytes, (void **)&self->storage, err));
    LK_RETURN_IF_ERROR(ops->alloc(self->device, lane_bytes, (void **)&self->lanes, err));
    LK_RETURN_IF_ERROR(ops->alloc_host(self->device, lane_bytes, (void **)&self->lanes_host, err));
    LK_RETURN_IF_ERROR(ops->stream_new(self->device, &self->own, err));
    LK_RETURN_IF_ERROR(ops->event_new(self->device, &self->cleared, err));
    for (size_t i = 0; i < N_STAGES; i++) {
        stage_t *stage = &self->stages[i];
        LK_RETURN_IF_ERROR(ops->alloc_host(self->device, DEVICE_TABLE_STAGING, &stage->host, err));
        LK_RETURN_IF_ERROR(ops->alloc(self->device, DEVICE_TABLE_STAGING, &stage->device, err));
        LK_RETURN_IF_ERROR(ops->event_new(self->device, &stage->passed, err));
    }
    LK_RETURN_IF_ERROR(ops->zero(self->device, self->storage, bytes, self->own, err));
    return device_wait(self->device, self->own, err);
}

device_table_t *device_table_new(device_t *device, const model_config_t *config, lk_dtype_t stored,
                                 uint32_t ep_rank, uint32_t ep_size, lk_error_t *err)
{
    device_table_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the weight table");
        return NULL;
    }
    self->device = device;
    self->stored = stored;
    self->compared = UINT32_MAX;
    model_config_dims(config, &self->dims);
    self->names = weight_table_new_names(config, stored, ep_rank, ep_size, err);
    if (self->names == NULL) {
        goto err_destroy;
    }
    self->n_slots = weight_table_count(self->names);
    self->states = calloc(self->n_slots, sizeof *self->states);
    if (self->states == NULL) {
        lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the weight table");
        goto err_destroy;
    }
    if (make_memory(self, err) < 0) {
        goto err_destroy;
    }
    return self;

err_destroy:
    device_table_destroy(&self);
    return NULL;
}

void device_table_destroy(device_table_t **self_p)
{
    device_table_t *self = self_p != NULL ? *self_p : NULL;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    const device_ops_t *ops = self->device->ops;
    for (size_t i = 0; i < N_STAGES; i++) {
        ops->event_destroy(self->device, self->stages[i].passed);
        ops->free(self->device, self->stages[i].device);
        ops->free_host(self->device, self->stages[i].host);
    }
    ops->event_destroy(self->device, self->cleared);
    ops->stream_destroy(self->device, self->own);
    ops->free_host(self->device, self->lanes_host);
    ops->free(self->device, self->lanes);
    ops->free(self->device, self->storage);
    weight_plans_fini(&self->plans);
    weight_table_destroy(&self->names);
    free(self->states);
    free(self);
}

void device_table_set_digests(device_table_t *self, bool digests)
{
    self->undigested = !digests;
}

/* ---- questions ---- */

weight_table_t *device_table_names(device_table_t *self)
{
    return self->names;
}

void *device_table_data(const device_table_t *self, size_t slot)
{
    uint64_t offset;
    return weight_table_place(self->names, slot, &offset) ? self->storage + offset : NULL;
}

lk_status_t device_table_read(device_table_t *self, size_t slot, void *out, lk_error_t *err)
{
    const weight_slot_t *shape = weight_table_at(self->names, slot);
    const void *data = device_table_data(self, slot);
    if (data == NULL) {
        return lk_error_set(err, LK_ERR_NOT_FOUND, "tensor %s: another rank has it", shape->name);
    }
    LK_RETURN_IF_ERROR(self->device->ops->copy(
        self->device, out, data, shape->numel * dtype_bytes(self->stored), self->own, err));
    return device_wait(self->device, self->own, err);
}

/* ---- digests ---- */

static void forget_digest(device_table_t *self, size_t slot)
{
    state_t *state = &self->states[slot];
    if (state->loaded && !self->undigested) {
        digest_set_remove(&self->digest, weight_table_at(self->names, slot)->name, state->digest);
    }
    state->loaded = false;
}

static void set_digest(device_table_t *self, size_t slot, digest_t digest)
{
    forget_digest(self, slot);
    self->states[slot].digest = digest;
    self->states[slot].loaded = true;
    if (!self->undigested) {
        digest_set_add(&self->digest, weight_table_at(self->names, slot)->name, digest);
    }
}

/* What was enqueued and never settled is of an update that failed: nobody knows those tensors. */
static void drop_pending(device_table_t *self)
{
    for (size_t i = 0; i < self->n_slots && self->n_pending > 0; i++) {
        if (self->states[i].pending) {
            forget_digest(self, i);
            self->states[i].pending = false;
            self->n_pending--;
        }
    }
    self->compared = UINT32_MAX;
}

static lk_status_t check_spellings(device_table_t *self, lk_error_t *err)
{
    uint32_t slot = self->compared;
    if (slot == UINT32_MAX) {
        return LK_OK;
    }
    self->compared = UINT32_MAX;
    digest_t second;
    memcpy(&second, self->lanes_host + 2 * self->n_slots, sizeof second);
    if (digest_equal(second, self->states[slot].digest)) {
        self->states[slot].agrees[self->compared_alias] = true;
        return LK_OK;
    }
    const char *name = weight_table_at(self->names, slot)->name;
    return lk_error_set(err, LK_ERR_INVALID,
                        "tensor %s: differs from %s, but the model's embeddings are tied: both "
                        "name one tensor",
                        self->compared_alias ? "lm_head.weight" : name,
                        self->compared_alias ? name : "lm_head.weight");
}

/* The lanes as the device has them now; without digests nobody looks at them, unless spellings are
 * compared. */
static lk_status_t read_lanes(device_table_t *self, lk_error_t *err)
{
    uint64_t bytes = (self->n_slots + 1) * sizeof(digest_t);
    if (self->undigested && self->compared == UINT32_MAX) {
        memset(self->lanes_host, 0, bytes);
        return LK_OK;
    }
    LK_RETURN_IF_ERROR(self->device->ops->copy(self->device, self->lanes_host, self->lanes, bytes,
                                               self->own, err));
    return device_wait(self->device, self->own, err);
}

static lk_status_t settle(void *ctx, lk_error_t *err)
{
    device_table_t *self = ctx;
    if (self->n_pending == 0 && self->compared == UINT32_MAX) {
        return LK_OK;
    }
    lk_status_t status = read_lanes(self, err);
    if (status != LK_OK) {
        drop_pending(self);
        return status;
    }
    for (size_t i = 0; i < self->n_slots && self->n_pending > 0; i++) {
        if (self->states[i].pending) {
            digest_t digest;
            memcpy(&digest, self->lanes_host + 2 * i, sizeof digest);
            set_digest(self, i, digest);
            self->states[i].pending = false;
            self->n_pending--;
        }
    }
    return check_spellings(self, err);
}

/* ---- storing ---- */

/* Pieces for the device, which takes PIECES of them at once. */
typedef struct {
    device_table_t *table;
    device_stream_t *stream;
    size_t n;
    device_piece_t pieces[PIECES];
} batch_t;

static lk_status_t flush(batch_t *batch, lk_error_t *err)
{
    device_t *device = batch->table->device;
    size_t n = batch->n;
    batch->n = 0;
    return n > 0 ? device->ops->unpack(device, batch->pieces, n, batch->stream, err) : LK_OK;
}

/* Elements [first, first + n) of a slot, from device memory, into place and digest. */
static lk_status_t add_piece(batch_t *batch, uint32_t slot, bool compare, const void *bytes,
                             lk_dtype_t dtype, uint64_t first, uint64_t n, lk_error_t *err)
{
    device_table_t *self = batch->table;
    char *place = compare ? NULL : device_table_data(self, slot);
    place = place != NULL ? place + first * dtype_bytes(self->stored) : NULL;
    bool compared = compare || self->plans.plan.twice == slot; /* spellings, by their digests */
    bool digests = !self->undigested || compared;
    if (!digests && (place == NULL || place == bytes)) {
        return LK_OK; /* neither to be moved nor to be digested */
    }
    uint64_t *lanes = self->lanes + 2 * (compare ? self->n_slots : slot);
    batch->pieces[batch->n++] =
        (device_piece_t){.src = bytes,
                         .src_dtype = dtype,
                         .dst_dtype = self->stored,
                         .dst = place != bytes ? place : NULL, /* there already: digest it */
                         .rows = 1,
                         .cols = n,
                         .dst_pitch = n,
                         .first = first,
                         .lanes = digests ? lanes : NULL};
    return batch->n == PIECES ? flush(batch, err) : LK_OK;
}

/* The bookkeeping of a piece that is about to arrive; true if it is only to be compared with the
 * tied embedding's other spelling. */
static bool note_arrival(device_table_t *self, const weight_piece_t *piece)
{
    state_t *state = &self->states[piece->slot];
    if (state->agrees[!piece->alias] && !state->agrees[piece->alias]) {
        self->compared = piece->slot;
        self->compared_alias = piece->alias;
        return true;
    }
    state->agrees[piece->alias] = true;
    state->agrees[!piece->alias] = false; /* sent again: the other one has to follow */
    self->n_arrived += !state->arrived;
    state->arrived = true;
    self->n_pending += !state->pending;
    state->pending = true;
    return false;
}

/* Work on a caller's stream comes after the lanes have been cleared. */
static lk_status_t order_after_clearing(device_table_t *self, device_stream_t *stream,
                                        lk_error_t *err)
{
    if (self->ordered != stream && stream != self->own) {
        LK_RETURN_IF_ERROR(
            self->device->ops->stream_wait(self->device, stream, self->cleared, err));
        self->ordered = stream;
    }
    return LK_OK;
}

static lk_status_t check_length(const device_table_t *self, size_t index, size_t len,
                                lk_error_t *err)
{
    CHECK(index < self->plans.plan.n_items);
    const weight_item_t *item = &self->plans.plan.items[index];
    if (len == item->bytes) {
        return LK_OK;
    }
    uint32_t slot = self->plans.plan.pieces[item->first_piece].slot;
    return lk_error_set(
        err, LK_ERR_INVALID, "tensor %zu of the list (%s): %zu bytes came, expected %llu", index,
        weight_table_at(self->names, slot)->name, len, (unsigned long long)item->bytes);
}

static lk_status_t sink_device_tensors(void *ctx, const weight_arrival_t *arrivals, size_t n,
                                       device_stream_t *stream, lk_error_t *err)
{
    device_table_t *self = ctx;
    batch_t batch = {.table = self, .stream = stream};
    LK_RETURN_IF_ERROR(order_after_clearing(self, stream, err));
    for (size_t a = 0; a < n; a++) {
        LK_RETURN_IF_ERROR(check_length(self, arrivals[a].index, arrivals[a].len, err));
        const weight_item_t *item = &self->plans.plan.items[arrivals[a].index];
        for (size_t i = 0; i < item->n_pieces; i++) {
            const weight_piece_t *piece = &self->plans.plan.pieces[item->first_piece + i];
            const char *from =
                (const char *)arrivals[a].bytes + piece->offset * dtype_bytes(item->dtype);
            bool compare = note_arrival(self, piece);
            LK_RETURN_IF_ERROR(add_piece(&batch, piece->slot, compare, from, item->dtype, 0,
                                         weight_table_at(self->names, piece->slot)->numel, err));
        }
    }
    return flush(&batch, err);
}

static lk_status_t sink_device_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                                      device_stream_t *stream, lk_error_t *err)
{
    weight_arrival_t arrival = {index, bytes, len};
    return sink_device_tensors(ctx, &arrival, 1, stream, err);
}

/* ---- from host memory ---- */

/* The next pair of buffers, once the device has read what was in it. */
static lk_status_t take_stage(device_table_t *self, stage_t **out, lk_error_t *err)
{
    stage_t *stage = &self->stages[self->next_stage];
    self->next_stage = (self->next_stage + 1) % N_STAGES;
    lk_status_t status;
    do {
        status = self->device->ops->event_test(self->device, stage->passed, err);
    } while (status == LK_INPROGRESS);
    *out = stage;
    return status;
}

static lk_status_t upload(device_table_t *self, uint32_t slot, bool compare, const char *bytes,
                          lk_dtype_t dtype, uint64_t first, uint64_t n, lk_error_t *err)
{
    const device_ops_t *ops = self->device->ops;
    size_t size = dtype_bytes(dtype);
    stage_t *stage;
    batch_t batch = {.table = self, .stream = self->own};
    LK_RETURN_IF_ERROR(take_stage(self, &stage, err));
    memcpy(stage->host, bytes, n * size);
    LK_RETURN_IF_ERROR(
        ops->copy(self->device, stage->device, stage->host, n * size, self->own, err));
    LK_RETURN_IF_ERROR(add_piece(&batch, slot, compare, stage->device, dtype, first, n, err));
    LK_RETURN_IF_ERROR(flush(&batch, err));
    return ops->event_record(self->device, stage->passed, self->own, err);
}

static lk_status_t sink_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                               lk_error_t *err)
{
    device_table_t *self = ctx;
    LK_RETURN_IF_ERROR(check_length(self, index, len, err));
    const weight_item_t *item = &self->plans.plan.items[index];
    size_t size = dtype_bytes(item->dtype);
    uint64_t most = DEVICE_TABLE_STAGING / size;
    for (size_t i = 0; i < item->n_pieces; i++) {
        const weight_piece_t *piece = &self->plans.plan.pieces[item->first_piece + i];
        const char *from = (const char *)bytes + piece->offset * size;
        uint64_t numel = weight_table_at(self->names, piece->slot)->numel;
        bool compare = note_arrival(self, piece);
        for (uint64_t at = 0; at < numel; at += most) {
            LK_RETURN_IF_ERROR(upload(self, piece->slot, compare, from + at * size, item->dtype, at,
                                      LK_MIN(numel - at, most), err));
        }
    }
    return LK_OK;
}

/* ---- the rest of the sink ---- */

static lk_status_t sink_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    device_table_t *self = ctx;
    return weight_plans_check(&self->plans, self->names, &self->dims, tensors, n, err);
}

static lk_status_t sink_check_whole(void *ctx, const tensor_desc_t *tensors, size_t n,
                                    lk_error_t *err)
{
    const device_table_t *self = ctx;
    return weight_table_check_whole(self->names, tensors, n, err);
}

static lk_status_t clear_lanes(device_table_t *self, lk_error_t *err)
{
    const device_ops_t *ops = self->device->ops;
    drop_pending(self);
    self->ordered = NULL;
    LK_RETURN_IF_ERROR(ops->zero(self->device, self->lanes, (self->n_slots + 1) * sizeof(digest_t),
                                 self->own, err));
    return ops->event_record(self->device, self->cleared, self->own, err);
}

static lk_status_t sink_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    device_table_t *self = ctx;
    LK_RETURN_IF_ERROR(sink_check(self, tensors, n, err));
    LK_RETURN_IF_ERROR(clear_lanes(self, err));
    weight_plans_enter(&self->plans, tensors, n);
    return LK_OK;
}

static device_t *sink_device(void *ctx)
{
    return ((device_table_t *)ctx)->device;
}

/* The pieces of the tensor must lie in the storage as they do in the tensor. */
static void *sink_device_direct(void *ctx, size_t index)
{
    device_table_t *self = ctx;
    CHECK(index < self->plans.plan.n_items);
    const weight_item_t *item = &self->plans.plan.items[index];
    const weight_piece_t *pieces = &self->plans.plan.pieces[item->first_piece];
    char *start = item->n_pieces > 0 ? device_table_data(self, pieces[0].slot) : NULL;
    if (start == NULL || item->dtype != self->stored) {
        return NULL;
    }
    for (size_t i = 0; i < item->n_pieces; i++) {
        const state_t *state = &self->states[pieces[i].slot];
        /* The second spelling of a tied embedding is compared with the first, not laid over it. */
        bool compared = state->agrees[!pieces[i].alias] && !state->agrees[pieces[i].alias];
        if ((char *)device_table_data(self, pieces[i].slot) !=
                start + pieces[i].offset * dtype_bytes(self->stored) ||
            compared || self->plans.plan.twice == pieces[i].slot) {
            return NULL;
        }
    }
    return start;
}

/* Fused spellings included: the largest run of elements that one incoming tensor can name. */
static uint64_t sink_largest(void *ctx)
{
    device_table_t *self = ctx;
    const model_config_t *config = weight_table_config(self->names);
    uint64_t most = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        const weight_slot_t *slot = weight_table_at(self->names, i);
        bool of_expert = strstr(slot->name, ".mlp.experts.") != NULL;
        uint64_t together = of_expert ? 2 * (uint64_t)LK_MAX(config->num_experts, 1u) : 3;
        bool alone = slot->ndim < 2 || strstr(slot->name, "embed_tokens") != NULL ||
                     strstr(slot->name, "lm_head") != NULL;
        most = LK_MAX(most, slot->numel * (alone ? 1 : together));
    }
    return most * dtype_bytes(self->stored);
}

static bool sink_complete(void *ctx)
{
    const device_table_t *self = ctx;
    return self->n_arrived == self->n_slots && self->n_pending == 0;
}

static void sink_missing(void *ctx, char *out, size_t room)
{
    enum { NAMED = 4 };
    const device_table_t *self = ctx;
    size_t n = 0, len = 0;
    out[0] = '\0';
    for (size_t i = 0; i < self->n_slots; i++) {
        if (!self->states[i].arrived && n++ < NAMED && len < room) {
            len += (size_t)snprintf(out + len, room - len, "%s%s", n > 1 ? ", " : "",
                                    weight_table_at(self->names, i)->name);
        }
    }
    if (n > NAMED && len < room) {
        snprintf(out + len, room - len, " and %zu more", n - NAMED);
    }
}

static void sink_begin(void *ctx)
{
    device_table_t *self = ctx;
    drop_pending(self);
    for (size_t i = 0; i < self->n_slots; i++) {
        self->states[i].arrived = false;
        self->states[i].agrees[0] = self->states[i].agrees[1] = false;
    }
    self->n_arrived = 0;
}

static lk_status_t sink_commit(void *ctx, lk_error_t *err)
{
    return settle(ctx, err);
}

static digest_t sink_digest(void *ctx)
{
    return ((const device_table_t *)ctx)->digest;
}

static const weight_sink_ops_t sink_ops = {
    .check = sink_check,
    .check_whole = sink_check_whole,
    .plan = sink_plan,
    .tensor = sink_tensor,
    .device = sink_device,
    .device_direct = sink_device_direct,
    .device_tensor = sink_device_tensor,
    .device_tensors = sink_device_tensors,
    .device_settle = settle,
    .largest = sink_largest,
    .complete = sink_complete,
    .missing = sink_missing,
    .begin = sink_begin,
    .commit = sink_commit,
    .digest = sink_digest,
    .incoming = sink_digest,
};

weight_sink_t device_table_sink(device_table_t *self)
{
    return (weight_sink_t){.ops = &sink_ops, .ctx = self};
}

/* ---- first load ---- */

lk_status_t device_table_load(device_table_t *self, const char *dir, lk_error_t *err)
{
    weight_sink_t sink = device_table_sink(self);
    return weight_table_load_into(self->names, &sink, dir, err);
}

typedef struct {
    device_table_t *table;
    uint64_t seed;
    uint32_t next; /* slots are in the enumeration's order */
    uint32_t threads;
    char *scratch; /* [DEVICE_TABLE_STAGING] */
} filler_t;

/* A thread's share of a piece of a tensor. */
typedef struct {
    const model_tensor_t *tensor;
    uint64_t seed, first, n;
    lk_dtype_t dtype;
    void *out;
    lk_status_t status;
} share_t;

static void *fill_share(void *arg)
{
    share_t *s = arg;
    s->status = model_tensor_random(s->tensor, s->seed, s->dtype, s->first, s->n, s->out);
    return NULL;
}

/* Elements [first, first + n) into the scratch memory. Threads that can't be had are done here. */
static lk_status_t generate(filler_t *f, const model_tensor_t *tensor, uint64_t first, uint64_t n)
{
    enum { MOST = 64, WORTH = 1 << 16 /* elements */ };
    share_t shares[MOST];
    pthread_t threads[MOST];
    bool started[MOST] = {false};
    lk_dtype_t dtype = f->table->stored;
    uint64_t count = LK_MIN(LK_MIN((uint64_t)f->threads, (uint64_t)MOST), n / WORTH + 1);
    lk_status_t status = LK_OK;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t from = n * i / count, to = n * (i + 1) / count;
        shares[i] = (share_t){.tensor = tensor,
                              .seed = f->seed,
                              .first = first + from,
                              .n = to - from,
                              .dtype = dtype,
                              .out = f->scratch + from * dtype_bytes(dtype)};
        started[i] = i > 0 && pthread_create(&threads[i], NULL, fill_share, &shares[i]) == 0;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (started[i]) {
            pthread_join(threads[i], NULL);
        } else {
            fill_share(&shares[i]);
        }
        status = status == LK_OK ? shares[i].status : status;
    }
    return status;
}

static lk_status_t fill_slot(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    filler_t *f = ctx;
    device_table_t *self = f->table;
    uint32_t slot = f->next++;
    uint64_t most = DEVICE_TABLE_STAGING / dtype_bytes(self->stored);
    self->n_pending++;
    self->states[slot].pending = true;
    if (self->undigested && device_table_data(self, slot) == NULL) {
        return LK_OK;
    }
    for (uint64_t at = 0; at < tensor->numel; at += most) {
        uint64_t n = LK_MIN(tensor->numel - at, most);
        if (generate(f, tensor, at, n) < 0) {
            return lk_error_set(err, LK_ERR_UNSUPPORTED, "%s can't be generated as %s",
                                tensor->name, dtype_torch_name(self->stored));
        }
        LK_RETURN_IF_ERROR(upload(self, slot, false, f->scratch, self->stored, at, n, err));
    }
    return LK_OK;
}

lk_status_t device_table_fill(device_table_t *self, uint64_t seed, uint32_t threads,
                              lk_error_t *err)
{
    filler_t filler = {
        .table = self, .seed = seed, .threads = threads, .scratch = malloc(DEVICE_TABLE_STAGING)};
    if (filler.scratch == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for generated weights");
    }
    lk_status_t status = clear_lanes(self, err);
    if (status == LK_OK) {
        status = model_tensors_each(weight_table_config(self->names), fill_slot, &filler, err);
    }
    free(filler.scratch);
    return status == LK_OK ? settle(self, err) : status;
}
