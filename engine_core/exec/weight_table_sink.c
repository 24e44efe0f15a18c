/* weight_table_sink.c: what arrives goes into the incoming set, a slice per call. */
#include "engine_core/exec/weight_table_internal.h"

#include "base/check.h"

#include <stdio.h>

#define SLICE (WEIGHT_SINK_SLICE_BYTES / 4) /* elements per call */

/* ---- storing ---- */

/* Casts elements [at, at + n) into the slot if it has storage, and digests what is stored. bytes
 * may be the slot's own storage. */
static void store_and_digest(const weight_table_t *self, const weight_slot_t *slot,
                             const char *bytes, lk_dtype_t dtype, uint64_t at, uint64_t n,
                             digest_t *digest)
{
    char *to = bytes != slot->data && slot->data != NULL
                   ? (char *)slot->data + at * dtype_bytes(self->stored)
                   : NULL;
    lk_status_t status =
        digest_store(digest, to, bytes + at * dtype_bytes(dtype), dtype, self->stored, n, at);
    CHECK(status == LK_OK); /* plans hold floating dtypes only */
}

/* A tied embedding that arrived under its other name already: the values must agree. */
static bool is_second_spelling(const weight_table_t *self, const weight_piece_t *piece)
{
    const slot_state_t *state = &self->states[piece->slot];
    return state->agrees[!piece->alias] && !state->agrees[piece->alias];
}

/* The whole piece has been digested. */
static lk_status_t end_piece(weight_table_t *self, const weight_piece_t *piece, digest_t digest,
                             lk_error_t *err)
{
    slot_state_t *state = &self->states[piece->slot];
    const weight_slot_t *slot = &self->incoming->slots[piece->slot];
    if (is_second_spelling(self, piece)) {
        if (!digest_equal(digest, slot->digest)) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "tensor %s: differs from %s, but the model's embeddings are tied: "
                                "both name one tensor",
                                piece->alias ? "lm_head.weight" : slot->name,
                                piece->alias ? slot->name : "lm_head.weight");
        }
        state->agrees[piece->alias] = true;
        return LK_OK;
    }
    weight_set_digest(self->incoming, piece->slot, digest);
    state->agrees[piece->alias] = true;
    state->agrees[!piece->alias] = false; /* sent again: the other one has to follow */
    self->n_arrived += !state->arrived;
    state->arrived = true;
    return LK_OK;
}

/* The next n elements of the piece at most; the piece ends with its last ones. */
static lk_status_t store_some(weight_table_t *self, const weight_piece_t *piece, const char *bytes,
                              lk_dtype_t dtype, uint64_t *n, lk_error_t *err)
{
    const weight_slot_t *slot = &self->incoming->slots[piece->slot];
    store_t *store = &self->store;
    *n = LK_MIN(*n, slot->numel - store->at);
    if (is_second_spelling(self, piece)) { /* only compared */
        lk_status_t status = digest_add(&store->digest, bytes + store->at * dtype_bytes(dtype),
                                        dtype, self->stored, *n, store->at);
        CHECK(status == LK_OK);
    } else {
        self->states[piece->slot].differs = true;
        store_and_digest(self, slot, bytes, dtype, store->at, *n, &store->digest);
    }
    store->at += *n;
    if (store->at < slot->numel) {
        return LK_OK;
    }
    digest_t digest = store->digest;
    store->digest = (digest_t){{0, 0}};
    store->at = 0;
    store->piece++;
    return end_piece(self, piece, digest, err);
}

/* ---- the sink ---- */

static lk_status_t sink_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    weight_table_t *self = ctx;
    return weight_plans_check(&self->plans, self, &self->dims, tensors, n, err);
}

static lk_status_t sink_check_whole(void *ctx, const tensor_desc_t *tensors, size_t n,
                                    lk_error_t *err)
{
    return weight_table_check_whole(ctx, tensors, n, err);
}

static lk_status_t sink_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    weight_table_t *self = ctx;
    LK_RETURN_IF_ERROR(sink_check(self, tensors, n, err));
    weight_plans_enter(&self->plans, tensors, n);
    self->store = (store_t){0};
    return LK_OK;
}

/* The pieces of the tensor must lie in the storage as they do in the tensor. */
static void *sink_direct(void *ctx, size_t index)
{
    weight_table_t *self = ctx;
    CHECK(index < self->plans.plan.n_items);
    const weight_item_t *item = &self->plans.plan.items[index];
    const weight_piece_t *pieces = &self->plans.plan.pieces[item->first_piece];
    char *start = item->n_pieces > 0 ? self->incoming->slots[pieces[0].slot].data : NULL;
    if (start == NULL || item->dtype != self->stored) {
        return NULL;
    }
    for (size_t i = 0; i < item->n_pieces; i++) {
        const char *data = self->incoming->slots[pieces[i].slot].data;
        /* The second spelling of a tied embedding is compared with the first, not laid over it. */
        bool compared = is_second_spelling(self, &pieces[i]);
        bool tied_twice = self->plans.plan.twice == pieces[i].slot;
        if (data != start + pieces[i].offset * dtype_bytes(self->stored) || compared ||
            tied_twice) {
            return NULL;
        }
    }
    for (size_t i = 0; i < item->n_pieces; i++) {
        self->states[pieces[i].slot].differs = true;
    }
    return start;
}

static lk_status_t sink_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                               lk_error_t *err)
{
    weight_table_t *self = ctx;
    store_t *store = &self->store;
    CHECK(index < self->plans.plan.n_items && (!store->under_way || store->index == index));
    const weight_item_t *item = &self->plans.plan.items[index];
    if (len != item->bytes) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %zu of the list (%s): %zu bytes came, expected %llu", index,
                            self->live->slots[self->plans.plan.pieces[item->first_piece].slot].name,
                            len, (unsigned long long)item->bytes);
    }
    store->under_way = true;
    store->index = index;
    lk_status_t status = LK_OK;
    for (uint64_t budget = SLICE, n; status == LK_OK && store->piece < item->n_pieces;
         budget -= n) {
        if (budget == 0) {
            return LK_INPROGRESS;
        }
        const weight_piece_t *piece = &self->plans.plan.pieces[item->first_piece + store->piece];
        n = budget;
        status =
            store_some(self, piece, (const char *)bytes + piece->offset * dtype_bytes(item->dtype),
                       item->dtype, &n, err);
    }
    *store = (store_t){0};
    return status;
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
                                    self->live->slots[i].name);
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
    self->store = (store_t){0};
    self->prepared = 0;
    self->prepared_at = 0;
    self->followed = false;
}

static lk_status_t sink_commit(void *ctx, lk_error_t *err)
{
    return LK_OK; /* every tensor is in its place already; executors follow the digest */
}

static digest_t sink_digest(void *ctx)
{
    return weight_table_digest(ctx);
}

#define SINK_OPS                                                                                   \
    .check = sink_check, .check_whole = sink_check_whole, .plan = sink_plan,                       \
    .direct = sink_direct, .tensor = sink_tensor, .complete = sink_complete,                       \
    .missing = sink_missing, .begin = sink_begin, .digest = sink_digest

static const weight_sink_ops_t sink_ops = {SINK_OPS, .commit = sink_commit};
static const weight_sink_ops_t shadow_sink_ops = {
    SINK_OPS,
    .prepare = weight_table_prepare,
    .commit = weight_table_flip,
    .incoming = weight_table_incoming_digest,
};

weight_sink_t weight_table_sink(weight_table_t *self)
{
    return (weight_sink_t){.ops = weight_table_has_shadow(self) ? &shadow_sink_ops : &sink_ops,
                           .ctx = self};
}
