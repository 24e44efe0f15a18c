#include "engine_core/exec/weight_table_internal.h"

#include "base/check.h"
#include "base/hash.h"
#include "engine_core/exec/model_tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE (2u << 20) /* bytes */
#define NO_SLOT   UINT32_MAX

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
    weight_slot_t *slots = realloc(self->live->slots, cap * sizeof *slots);
    if (slots != NULL) {
        self->live->slots = slots;
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
    self->live->slots[self->n_slots] = (weight_slot_t){
        .ndim = tensor->ndim,
        .shape = {tensor->shape[0], tensor->shape[1]},
        .numel = tensor->numel,
    };
    self->n_slots++;
    return LK_OK;
}

lk_status_t weight_table_allocate(const weight_table_t *self, char **out, lk_error_t *err)
{
    bool huge = self->storage_bytes >= HUGE_PAGE;
    uint64_t unit = huge ? HUGE_PAGE : WEIGHT_ALIGNMENT;
    uint64_t bytes = (self->storage_bytes + unit - 1) / unit * unit;
    char *storage = bytes <= SIZE_MAX / 2 ? aligned_alloc(unit, bytes) : NULL;
    if (storage == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %llu bytes of weights",
                            (unsigned long long)bytes);
    }
    if (huge) {
        madvise(storage, bytes, MADV_HUGEPAGE); /* a hint; not every kernel takes it */
    }
    *out = storage;
    return LK_OK;
}

static lk_status_t allocate(weight_table_t *self, lk_error_t *err)
{
    self->n_buckets = 16;
    while (self->n_buckets < 2 * self->n_slots) {
        self->n_buckets *= 2;
    }
    self->buckets = malloc(self->n_buckets * sizeof *self->buckets);
    if (self->buckets == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the table of %zu weights",
                            self->n_slots);
    }
    return self->names_only ? LK_OK : weight_table_allocate(self, &self->live->storage, err);
}

static void finish_slots(weight_table_t *self)
{
    memset(self->buckets, 0xFF, self->n_buckets * sizeof *self->buckets);
    for (size_t i = 0; i < self->n_slots; i++) {
        weight_slot_t *slot = &self->live->slots[i];
        slot->name = self->names + self->states[i].name;
        if (self->states[i].owned && !self->names_only) {
            slot->data = self->live->storage + self->states[i].place;
        }
        size_t at = lk_hash64(slot->name, strlen(slot->name), 0) & (self->n_buckets - 1);
        while (self->buckets[at] != NO_SLOT) {
            at = (at + 1) & (self->n_buckets - 1);
        }
        self->buckets[at] = (uint32_t)i;
    }
}

static void init_shape(weight_table_t *self, const model_config_t *config, lk_dtype_t stored,
                       uint32_t ep_rank, uint32_t ep_size)
{
    self->live = self->incoming = &self->sets[0];
    self->config = *config;
    self->stored = stored;
    model_config_dims(config, &self->dims);
    self->first_expert = ep_first_expert(config->num_experts, ep_rank, ep_size);
    self->end_expert = ep_first_expert(config->num_experts, ep_rank + 1, ep_size);
}

static weight_table_t *new_table(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                                 uint32_t ep_size, bool names_only, lk_error_t *err)
{
    CHECK(stored == LK_DTYPE_F32 || stored == LK_DTYPE_BF16);
    CHECK(ep_size > 0 && ep_rank < ep_size);
    weight_table_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the weight table");
        return NULL;
    }
    init_shape(self, config, stored, ep_rank, ep_size);
    self->names_only = names_only;
    if (model_tensors_each(config, add_slot, self, err) < 0 || allocate(self, err) < 0) {
        weight_table_destroy(&self);
        return NULL;
    }
    finish_slots(self);
    return self;
}

weight_table_t *weight_table_new(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                                 uint32_t ep_size, lk_error_t *err)
{
    return new_table(config, stored, ep_rank, ep_size, false, err);
}

weight_table_t *weight_table_new_names(const model_config_t *config, lk_dtype_t stored,
                                       uint32_t ep_rank, uint32_t ep_size, lk_error_t *err)
{
    return new_table(config, stored, ep_rank, ep_size, true, err);
}

void weight_table_destroy(weight_table_t **self_p)
{
    weight_table_t *self = self_p != NULL ? *self_p : NULL;
    if (self == NULL) {
        return;
    }
    weight_plans_fini(&self->plans);
    for (size_t i = 0; i < LK_ARRAY_LEN(self->sets); i++) {
        free(self->sets[i].storage);
        free(self->sets[i].slots);
    }
    free(self->buckets);
    free(self->names);
    free(self->states);
    free(self);
    *self_p = NULL;
}

uint64_t weight_table_size(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                           uint32_t ep_size)
{
    weight_table_t counted = {.n_slots = 0};
    lk_error_t err;
    init_shape(&counted, config, stored, ep_rank, ep_size);
    lk_status_t status = model_tensors_each(config, add_slot, &counted, &err);
    free(counted.names);
    free(counted.states);
    free(counted.live->slots);
    return status == LK_OK ? counted.storage_bytes : UINT64_MAX;
}

/* ---- questions ---- */

static uint32_t find_slot(const weight_table_t *self, const char *name)
{
    size_t at = lk_hash64(name, strlen(name), 0) & (self->n_buckets - 1);
    while (self->buckets[at] != NO_SLOT) {
        if (strcmp(self->live->slots[self->buckets[at]].name, name) == 0) {
            return self->buckets[at];
        }
        at = (at + 1) & (self->n_buckets - 1);
    }
    return NO_SLOT;
}

const weight_slot_t *weight_table_find(const weight_table_t *self, const char *name)
{
    uint32_t slot = find_slot(self, name);
    return slot != NO_SLOT ? &self->live->slots[slot] : NULL;
}

size_t weight_table_count(const weight_table_t *self)
{
    return self->n_slots;
}

const weight_slot_t *weight_table_at(const weight_table_t *self, size_t i)
{
    CHECK(i < self->n_slots);
    return &self->live->slots[i];
}

bool weight_table_place(const weight_table_t *self, size_t i, uint64_t *offset)
{
    CHECK(i < self->n_slots);
    *offset = self->states[i].place;
    return self->states[i].owned;
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
    return self->live->digest;
}

void weight_set_digest(weight_set_t *set, uint32_t i, digest_t digest)
{
    weight_slot_t *slot = &set->slots[i];
    if (slot->loaded) {
        digest_set_remove(&set->digest, slot->name, slot->digest);
    }
    slot->digest = digest;
    slot->loaded = true;
    digest_set_add(&set->digest, slot->name, digest);
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
    const weight_slot_t *slot = &f->table->live->slots[i];
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
    weight_set_digest(f->table->live, i, digest);
    f->table->states[i].differs = true;
    return LK_OK;
}

lk_status_t weight_table_fill(weight_table_t *self, uint64_t seed, lk_error_t *err)
{
    filler_t filler = {.table = self, .seed = seed};
    return model_tensors_each(&self->config, fill_slot, &filler, err);
}
