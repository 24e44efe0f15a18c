/* weight_table_shadow.c: the second set: made, completed, swapped. weight_table.h says how. */
#include "engine_core/exec/weight_table_internal.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define SLOT_COST 64 /* of a slot, in bytes: another rank's experts have no others */

/* Copies what only the live set has, a slice of it. True while there is more. */
static bool copy_some(weight_table_t *self)
{
    int64_t budget = WEIGHT_SINK_SLICE_BYTES;
    for (; self->prepared < self->n_slots; self->prepared++) {
        uint32_t i = (uint32_t)self->prepared;
        slot_state_t *state = &self->states[i];
        if (state->arrived || !state->differs) {
            continue;
        }
        if (budget <= 0) {
            return true;
        }
        const weight_slot_t *from = &self->live->slots[i];
        const weight_slot_t *to = &self->incoming->slots[i];
        uint64_t bytes = to->data != NULL ? to->numel * dtype_bytes(self->stored) : 0;
        uint64_t n = LK_MIN(bytes - self->prepared_at, (uint64_t)budget);
        if (n > 0) {
            memcpy((char *)to->data + self->prepared_at,
                   (const char *)from->data + self->prepared_at, n);
        }
        self->prepared_at += n;
        budget -= (int64_t)n + SLOT_COST;
        if (self->prepared_at < bytes) {
            return true;
        }
        weight_set_digest(self->incoming, i, from->digest);
        state->differs = false;
        self->prepared_at = 0;
    }
    return false;
}

lk_status_t weight_table_prepare(void *ctx, lk_error_t *err)
{
    weight_table_t *self = ctx;
    if (copy_some(self)) {
        return LK_INPROGRESS;
    }
    if (self->follower.prepare == NULL) {
        return LK_OK;
    }
    bool first = !self->followed;
    self->followed = true;
    return self->follower.prepare(self->follower.ctx, first, err);
}

/* What the session brought is marked `differs` since it came: from here on it is the old set that
 * lacks it. */
lk_status_t weight_table_flip(void *ctx, lk_error_t *err)
{
    weight_table_t *self = ctx;
    CHECK(self->prepared == self->n_slots);
    weight_set_t *live = self->incoming;
    self->incoming = self->live;
    self->live = live;
    if (self->follower.flip != NULL) {
        self->follower.flip(self->follower.ctx);
    }
    return LK_OK;
}

digest_t weight_table_incoming_digest(void *ctx)
{
    return ((const weight_table_t *)ctx)->incoming->digest;
}

lk_status_t weight_table_add_shadow(weight_table_t *self, lk_error_t *err)
{
    CHECK(!weight_table_has_shadow(self));
    weight_set_t *set = &self->sets[1];
    set->slots = calloc(self->n_slots, sizeof *set->slots);
    if (set->slots == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the table of %zu weights",
                            self->n_slots);
    }
    LK_RETURN_IF_ERROR(weight_table_allocate(self, &set->storage, err));
    memcpy(set->slots, self->live->slots, self->n_slots * sizeof *set->slots);
    for (size_t i = 0; i < self->n_slots; i++) {
        weight_slot_t *slot = &set->slots[i];
        if (self->states[i].owned) {
            slot->data = set->storage + self->states[i].place;
            memcpy(slot->data, self->live->slots[i].data, slot->numel * dtype_bytes(self->stored));
        }
    }
    for (size_t i = 0; i < self->n_slots; i++) {
        self->states[i].differs = false;
    }
    set->digest = self->live->digest;
    self->incoming = set;
    return LK_OK;
}

bool weight_table_has_shadow(const weight_table_t *self)
{
    return self->live != self->incoming;
}

void weight_table_follow(weight_table_t *self, const weight_follower_t *follower)
{
    self->follower = *follower;
}

const weight_slot_t *weight_table_incoming(const weight_table_t *self, const weight_slot_t *slot)
{
    return &self->incoming->slots[slot - self->live->slots];
}
