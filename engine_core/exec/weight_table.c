#include "engine_core/exec/weight_table.h"

#include "base/check.h"
#include "base/hash.h"
#include "engine_core/exec/model_tensors.h"
#include "engine_core/exec/weight_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE (2u << 20) /* bytes */
#define NO_SLOT   UINT32_MAX

/* What the table knows of a slot beside what executors see. */
typedef struct {
    bool owned;
    bool arrived;   /* since `begin` */
    bool agrees[2]; /* by spelling (canonical, tied alias): arrived with the value that is stored */
    size_t name;    /* offset in names */
    uint64_t place; /* byte offset in the storage; only if owned */
} slot_state_t;

struct weight_table {
    model_config_t config;
    name_rules_dims_t dims;
    lk_dtype_t stored;
    uint32_t first_expert, end_expert; /* of this rank */
    weight_slot_t *slots;
    slot_state_t *states;
    size_t n_slots, cap_slots;
    char *names; /* all names, NUL-terminated; slots point into it */
    size_t names_len, names_cap;
    uint32_t *buckets; /* open addressing: slot numbers */
    size_t n_buckets;  /* a power of two */
    char *storage;
    uint64_t storage_bytes;
    digest_t digest; /* of the loaded slots */
    size_t n_arrived;
    weight_plan_t plan;
};

uint32_t ep_first_expert(uint32_t num_experts, uint32_t rank, uint32_t size)
{
    return (uint32_t)((uint64_t)rank * num_experts / size);
}

/* ---- building ---- */

/* Gives an offset, because the array moves while it grows. */
static bool append_name(weight_table_t *self, const char *name, size_t *offset)
{
    size_t len = strlen(name) + 1;
    if (self->names_len + len > self->names_cap) {
        size_t cap = LK_MAX(self->names_cap * 2, self->names_len + len + 4096);
        char *grown = realloc(self->names, cap);
        if (grown == NULL) {
            return false;
        }
        self->names = grown;
        self->names_cap = cap;
    }
    memcpy(self->names + self->names_len, name, len);
    *offset = self->names_len;
    self->names_len += len;
    return true;
}

static bool grow_slots(weight_table_t *self)
{
    if (self->n_slots < self->cap_slots) {
        return true;
    }
    size_t cap = LK_MAX(self->cap_slots * 2, (size_t)256);
    weight_slot_t *slots = realloc(self->slots, cap * sizeof *slots);
    if (slots != NULL) {
        self->slots = slots;
    }
    slot_state_t *states = realloc(self->states, cap * sizeof *states);
    if (states != NULL) {
        self->states = states;
    }
    if (slots == NULL || states == NULL) {
        return false;
    }
    self->cap_slots = cap;
    return true;
}

static lk_status_t add_slot(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    weight_table_t *self = ctx;
    slot_state_t state = {.owned = true};
    if (!grow_slots(self) || !append_name(self, tensor->name, &state.name)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the table of %zu weights",
                            self->n_slots);
    }
    if (tensor->expert >= 0) {
        uint32_t expert = (uint32_t)tensor->expert;
        state.owned = expert >= self->first_expert && expert < self->end_expert;
    }
    if (state.owned) {
        uint64_t start = self->storage_bytes;
        if (!tensor->joins) {
            start = (start + WEIGHT_ALIGNMENT - 1) / WEIGHT_ALIGNMENT * WEIGHT_ALIGNMENT;
        }
        state.place = start;
        /* no overflow: MODEL_MAX_LAYERS x 1024 experts x 2^37 elements and their like */
        self->storage_bytes = start + tensor->numel * dtype_bytes(self->stored);
        if (self->storage_bytes > INT64_MAX) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "the model's weights exceed 2^63 bytes");
        }
    }
    self->states[self->n_slots] = state;
    self->slots[self->n_slots] = (weight_slot_t){
        .ndim = tensor->ndim,
        .shape = {tensor->shape[0], tensor->shape[1]},
        .numel = tensor->numel,
    };
    self->n_slots++;
    return LK_OK;
}

static lk_status_t allocate(weight_table_t *self, lk_error_t *err)
{
    bool huge = self->storage_bytes >= HUGE_PAGE;
    uint64_t unit = huge ? HUGE_PAGE : WEIGHT_ALIGNMENT;
    uint64_t bytes = (self->storage_bytes + unit - 1) / unit * unit;
    self->n_buckets = 16;
    while (self->n_buckets < 2 * self->n_slots) {
        self->n_buckets *= 2;
    }
    self->buckets = malloc(self->n_buckets * sizeof *self->buckets);
    self->storage = bytes <= SIZE_MAX / 2 ? aligned_alloc(unit, bytes) : NULL;
    if (self->storage == NULL || self->buckets == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %llu bytes of weights",
                            (unsigned long long)bytes);
    }
    if (huge) {
        madvise(self->storage, bytes, MADV_HUGEPAGE); /* a hint; not every kernel takes it */
    }
    return LK_OK;
}

static void finish_slots(weight_table_t *self)
{
    memset(self->buckets, 0xFF, self->n_buckets * sizeof *self->buckets);
    for (size_t i = 0; i < self->n_slots; i++) {
        weight_slot_t *slot = &self->slots[i];
        slot->name = self->names + self->states[i].name;
        if (self->states[i].owned) {
            slot->data = self->storage + self->states[i].place;
        }
        size_t at = lk_hash64(slot->name, strlen(slot->name), 0) & (self->n_buckets - 1);
        while (self->buckets[at] != NO_SLOT) {
            at = (at + 1) & (self->n_buckets - 1);
        }
        self->buckets[at] = (uint32_t)i;
    }
}

weight_table_t *weight_table_new(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                                 uint32_t ep_size, lk_error_t *err)
{
    CHECK(stored == LK_DTYPE_F32 || stored == LK_DTYPE_BF16);
    CHECK(ep_size > 0 && ep_rank < ep_size);
    weight_table_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the weight table");
        return NULL;
    }
    self->config = *config;
    self->stored = stored;
    model_config_dims(config, &self->dims);
    self->first_expert = ep_first_expert(config->num_experts, ep_rank, ep_size);
    self->end_expert = ep_first_expert(config->num_experts, ep_rank + 1, ep_size);
    if (model_tensors_each(config, add_slot, self, err) < 0 || allocate(self, err) < 0) {
        weight_table_destroy(&self);
        return NULL;
    }
    finish_slots(self);
    return self;
}

void weight_table_destroy(weight_table_t **self_p)
{
    weight_table_t *self = self_p != NULL ? *self_p : NULL;
    if (self == NULL) {
        return;
    }
    weight_plan_fini(&self->plan);
    free(self->storage);
    free(self->buckets);
    free(self->names);
    free(self->states);
    free(self->slots);
    free(self);
    *self_p = NULL;
}

/* ---- questions ---- */

static uint32_t find_slot(const weight_table_t *self, const char *name)
{
    size_t at = lk_hash64(name, strlen(name), 0) & (self->n_buckets - 1);
    while (self->buckets[at] != NO_SLOT) {
        if (strcmp(self->slots[self->buckets[at]].name, name) == 0) {
            return self->buckets[at];
        }
        at = (at + 1) & (self->n_buckets - 1);
    }
    return NO_SLOT;
}

const weight_slot_t *weight_table_find(const weight_table_t *self, const char *name)
{
    uint32_t slot = find_slot(self, name);
    return slot != NO_SLOT ? &self->slots[slot] : NULL;
}

size_t weight_table_count(const weight_table_t *self)
{
    return self->n_slots;
}

const weight_slot_t *weight_table_at(const weight_table_t *self, size_t i)
{
    CHECK(i < self->n_slots);
    return &self->slots[i];
}

const model_config_t *weight_table_config(const weight_table_t *self)
{
    return &self->config;
}

lk_dtype_t weight_table_dtype(const weight_table_t *self)
{
    return self->stored;
}

uint64_t weight_table_bytes(const weight_table_t *self)
{
    return self->storage_bytes;
}

digest_t weight_table_digest(const weight_table_t *self)
{
    return self->digest;
}

/* ---- storing ---- */

static void set_digest(weight_table_t *self, uint32_t i, digest_t digest)
{
    weight_slot_t *slot = &self->slots[i];
    if (slot->loaded) {
        digest_set_remove(&self->digest, slot->name, slot->digest);
    }
    slot->digest = digest;
    slot->loaded = true;
    digest_set_add(&self->digest, slot->name, digest);
}

/* Casts a tensor into the slot if it has storage, and digests what is stored. bytes may be the
 * slot's own storage. */
static digest_t store_and_digest(weight_table_t *self, const weight_slot_t *slot, const char *bytes,
                                 lk_dtype_t dtype)
{
    digest_t digest = {{0, 0}};
    void *to = bytes != slot->data ? slot->data : NULL;
    lk_status_t status = digest_store(&digest, to, bytes, dtype, self->stored, slot->numel, 0);
    CHECK(status == LK_OK); /* plans hold floating dtypes only */
    return digest;
}

/* A tied embedding that arrived under its other name already: the values must agree. */
static lk_status_t compare_spelling(weight_table_t *self, const weight_piece_t *piece,
                                    const char *bytes, lk_dtype_t dtype, lk_error_t *err)
{
    const weight_slot_t *slot = &self->slots[piece->slot];
    digest_t digest = {{0, 0}};
    lk_status_t status = digest_add(&digest, bytes, dtype, self->stored, slot->numel, 0);
    CHECK(status == LK_OK);
    if (!digest_equal(digest, slot->digest)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %s: differs from %s, but the model's embeddings are tied: both "
                            "name one tensor",
                            piece->alias ? "lm_head.weight" : slot->name,
                            piece->alias ? slot->name : "lm_head.weight");
    }
    self->states[piece->slot].agrees[piece->alias] = true;
    return LK_OK;
}

static lk_status_t store_piece(weight_table_t *self, const weight_piece_t *piece, const char *bytes,
                               lk_dtype_t dtype, lk_error_t *err)
{
    slot_state_t *state = &self->states[piece->slot];
    if (state->agrees[!piece->alias] && !state->agrees[piece->alias]) {
        return compare_spelling(self, piece, bytes, dtype, err);
    }
    set_digest(self, piece->slot, store_and_digest(self, &self->slots[piece->slot], bytes, dtype));
    state->agrees[piece->alias] = true;
    state->agrees[!piece->alias] = false; /* sent again: the other one has to follow */
    self->n_arrived += !state->arrived;
    state->arrived = true;
    return LK_OK;
}

/* ---- the sink ---- */

static lk_status_t make_plan(weight_table_t *self, const tensor_desc_t *tensors, size_t n,
                             weight_plan_t *out, lk_error_t *err)
{
    offenders_t offenders = {.n = 0};
    weight_plan_t plan;
    LK_RETURN_IF_ERROR(weight_plan_build(self, &self->dims, tensors, n, &offenders, &plan, err));
    lk_status_t status = offenders_finish(&offenders, err);
    if (status < 0) {
        weight_plan_fini(&plan);
        return status;
    }
    *out = plan;
    return LK_OK;
}

static lk_status_t sink_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    weight_plan_t plan;
    LK_RETURN_IF_ERROR(make_plan(ctx, tensors, n, &plan, err));
    weight_plan_fini(&plan);
    return LK_OK;
}

static lk_status_t sink_check_whole(void *ctx, const tensor_desc_t *tensors, size_t n,
                                    lk_error_t *err)
{
    return weight_table_check_whole(ctx, tensors, n, err);
}

static lk_status_t sink_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    weight_table_t *self = ctx;
    weight_plan_t plan;
    LK_RETURN_IF_ERROR(make_plan(self, tensors, n, &plan, err));
    weight_plan_fini(&self->plan);
    self->plan = plan;
    return LK_OK;
}

/* The pieces of the tensor must lie in the storage as they do in the tensor. */
static void *sink_direct(void *ctx, size_t index)
{
    weight_table_t *self = ctx;
    CHECK(index < self->plan.n_items);
    const weight_item_t *item = &self->plan.items[index];
    const weight_piece_t *pieces = &self->plan.pieces[item->first_piece];
    char *start = item->n_pieces > 0 ? self->slots[pieces[0].slot].data : NULL;
    if (start == NULL || item->dtype != self->stored) {
        return NULL;
    }
    for (size_t i = 0; i < item->n_pieces; i++) {
        const slot_state_t *state = &self->states[pieces[i].slot];
        const char *data = self->slots[pieces[i].slot].data;
        /* The second spelling of a tied embedding is compared with the first, not laid over it. */
        bool compared = state->agrees[!pieces[i].alias] && !state->agrees[pieces[i].alias];
        bool tied_twice = self->plan.twice == pieces[i].slot;
        if (data != start + pieces[i].offset * dtype_bytes(self->stored) || compared ||
            tied_twice) {
            return NULL;
        }
    }
    return start;
}

static lk_status_t sink_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                               lk_error_t *err)
{
    weight_table_t *self = ctx;
    CHECK(index < self->plan.n_items);
    const weight_item_t *item = &self->plan.items[index];
    if (len != item->bytes) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %zu of the list (%s): %zu bytes came, expected %llu", index,
                            self->slots[self->plan.pieces[item->first_piece].slot].name, len,
                            (unsigned long long)item->bytes);
    }
    for (size_t i = 0; i < item->n_pieces; i++) {
        const weight_piece_t *piece = &self->plan.pieces[item->first_piece + i];
        const char *from = (const char *)bytes + piece->offset * dtype_bytes(item->dtype);
        LK_RETURN_IF_ERROR(store_piece(self, piece, from, item->dtype, err));
    }
    return LK_OK;
}

static bool sink_complete(void *ctx)
{
    const weight_table_t *self = ctx;
    return self->n_arrived == self->n_slots;
}

static void sink_missing(void *ctx, char *out, size_t room)
{
    enum { NAMED = 4 };
    const weight_table_t *self = ctx;
    size_t n = 0, len = 0;
    out[0] = '\0';
    for (size_t i = 0; i < self->n_slots; i++) {
        if (!self->states[i].arrived && n++ < NAMED && len < room) {
            len += (size_t)snprintf(out + len, room - len, "%s%s", n > 1 ? ", " : "",
                                    self->slots[i].name);
        }
    }
    if (n > NAMED && len < room) {
        snprintf(out + len, room - len, " and %zu more", n - NAMED);
    }
}

static void sink_begin(void *ctx)
{
    weight_table_t *self = ctx;
    for (size_t i = 0; i < self->n_slots; i++) {
        self->states[i].arrived = false;
        self->states[i].agrees[0] = self->states[i].agrees[1] = false;
    }
    self->n_arrived = 0;
}

static lk_status_t sink_commit(void *ctx, lk_error_t *err)
{
    return LK_OK; /* every tensor is in its place already; executors follow the digest */
}

static digest_t sink_digest(void *ctx)
{
    return weight_table_digest(ctx);
}

static const weight_sink_ops_t sink_ops = {
    .check = sink_check,
    .check_whole = sink_check_whole,
    .plan = sink_plan,
    .direct = sink_direct,
    .tensor = sink_tensor,
    .complete = sink_complete,
    .missing = sink_missing,
    .begin = sink_begin,
    .commit = sink_commit,
    .digest = sink_digest,
};

weight_sink_t weight_table_sink(weight_table_t *self)
{
    return (weight_sink_t){.ops = &sink_ops, .ctx = self};
}

/* ---- generated weights ---- */

typedef struct {
    weight_table_t *table;
    uint64_t seed;
    uint32_t next; /* slots are in the enumeration's order */
} filler_t;

static lk_status_t fill_slot(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    filler_t *f = ctx;
    uint32_t i = f->next++;
    const weight_slot_t *slot = &f->table->slots[i];
    lk_dtype_t stored = f->table->stored;
    digest_t digest = {{0, 0}};
    float scratch[1024];
    for (uint64_t at = 0; at < slot->numel; at += LK_ARRAY_LEN(scratch)) {
        uint64_t n = LK_MIN(slot->numel - at, (uint64_t)LK_ARRAY_LEN(scratch));
        void *to = scratch;
        if (slot->data != NULL) {
            to = (char *)slot->data + at * dtype_bytes(stored);
        }
        LK_RETURN_IF_ERROR(model_tensor_random(tensor, f->seed, stored, at, n, to));
        LK_RETURN_IF_ERROR(digest_add(&digest, to, stored, stored, n, at));
    }
    set_digest(f->table, i, digest);
    return LK_OK;
}

lk_status_t weight_table_fill(weight_table_t *self, uint64_t seed, lk_error_t *err)
{
    filler_t filler = {.table = self, .seed = seed};
    return model_tensors_each(&self->config, fill_slot, &filler, err);
}
