#include "base/check.h"
#include "base/hash.h"
#include "transfer/digest.h"
#include "transfer/trainer/lst.h"

#include <stdlib.h>
#include <string.h>

/* Canonical names seen so far and what was digested for them: open addressing. */
typedef struct {
    char *name; /* NULL: free */
    digest_t digest;
} digest_slot_t;

typedef struct {
    digest_slot_t *slots;
    size_t n_slots, used;
    lk_dtype_t stored;
    const tensor_desc_t *desc; /* the incoming tensor of the moment */
    const void *data;
} digest_set_t;

static digest_slot_t *slot_of(digest_set_t *set, const char *name)
{
    size_t at = (size_t)lk_hash64(name, strlen(name), 0) & (set->n_slots - 1);
    while (set->slots[at].name != NULL && strcmp(set->slots[at].name, name) != 0) {
        at = (at + 1) & (set->n_slots - 1);
    }
    return &set->slots[at];
}

static bool grow(digest_set_t *set)
{
    digest_set_t bigger = *set;
    bigger.n_slots = set->n_slots > 0 ? 2 * set->n_slots : 1024;
    bigger.slots = calloc(bigger.n_slots, sizeof *bigger.slots);
    if (bigger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < set->n_slots; i++) {
        if (set->slots[i].name != NULL) {
            *slot_of(&bigger, set->slots[i].name) = set->slots[i];
        }
    }
    free(set->slots);
    *set = bigger;
    return true;
}

static lk_status_t digest_piece(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    digest_set_t *set = ctx;
    digest_t digest = {{0}};
    const uint8_t *bytes =
        (const uint8_t *)set->data + piece->offset * dtype_bytes(set->desc->dtype);
    if (digest_add(&digest, bytes, set->desc->dtype, set->stored, piece->numel, 0) < 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "'%s' cannot be digested as %s", piece->name,
                            dtype_torch_name(set->stored));
    }
    if (2 * set->used >= set->n_slots && !grow(set)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for digests");
    }
    digest_slot_t *slot = slot_of(set, piece->name);
    if (slot->name == NULL) {
        slot->name = strdup(piece->name);
        if (slot->name == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for digests");
        }
        set->used++;
    }
    slot->digest = digest; /* a tensor that comes again replaces itself */
    return LK_OK;
}

lst_status_t lst_digest(lst_t *self, const lst_tensor_t *tensors, size_t n, char out[33])
{
    STATIC_ASSERT(DIGEST_HEX_SIZE == 33, "size of a digest's text");
    self->err = LK_ERROR_INIT;
    if (!self->knows_model) {
        return (lst_status_t)lk_error_set(
            &self->err, LK_ERR_STATE,
            "the answer to init_weight_transfer_engine did not say how "
            "ranks store weights; call lst_init_tcp or lst_init_shm first");
    }
    tensor_desc_t *descs = NULL;
    const void **data = NULL;
    digest_set_t set = {.stored = self->stored};
    lk_status_t st = lst_describe(tensors, n, &descs, &data, &self->err);
    for (size_t i = 0; i < n && st >= 0; i++) {
        set.desc = &descs[i];
        set.data = data[i];
        st = name_rules_expand(&self->dims, &descs[i], digest_piece, &set, &self->err);
    }
    digest_t total = {{0}};
    for (size_t i = 0; i < set.n_slots; i++) {
        if (set.slots[i].name != NULL) {
            digest_set_add(&total, set.slots[i].name, set.slots[i].digest);
            free(set.slots[i].name);
        }
    }
    free(set.slots);
    free(descs);
    free(data);
    if (st < 0) {
        return (lst_status_t)st;
    }
    digest_hex(total, out);
    return LST_OK;
}
