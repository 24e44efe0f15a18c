#include "base/check.h"
#include "base/hash.h"
#include "transfer/device/device.h"
#include "transfer/digest.h"
#include "transfer/trainer/lst.h"

#include <stdlib.h>
#include <string.h>

/* Canonical names seen so far and what is to be digested for them: open addressing. */
typedef struct {
    char *name; /* NULL: free */
    const void *data;
    lk_dtype_t dtype;
    uint64_t numel;
    digest_t digest;
} digest_slot_t;

typedef struct {
    digest_slot_t *slots;
    size_t n_slots, used;
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

static lk_status_t note_piece(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    digest_set_t *set = ctx;
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
    /* a tensor that comes again replaces itself */
    slot->data = (const uint8_t *)set->data + piece->offset * dtype_bytes(set->desc->dtype);
    slot->dtype = set->desc->dtype;
    slot->numel = piece->numel;
    return LK_OK;
}

static lk_status_t unsupported(const digest_slot_t *slot, lk_dtype_t stored, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_UNSUPPORTED, "'%s' cannot be digested as %s", slot->name,
                        dtype_torch_name(stored));
}

static lk_status_t digest_here(digest_set_t *set, lk_dtype_t stored, lk_error_t *err)
{
    for (size_t i = 0; i < set->n_slots; i++) {
        digest_slot_t *slot = &set->slots[i];
        if (slot->name != NULL &&
            digest_add(&slot->digest, slot->data, slot->dtype, stored, slot->numel, 0) < 0) {
            return unsupported(slot, stored, err);
        }
    }
    return LK_OK;
}

/* All of them with the device's kernel; lanes is device memory for one digest per used slot. */
static lk_status_t run_on(device_t *device, device_stream_t *stream, digest_set_t *set,
                          lk_dtype_t stored, uint64_t *lanes, digest_t *out, lk_error_t *err)
{
    uint64_t bytes = set->used * sizeof *out;
    LK_RETURN_IF_ERROR(device->ops->zero(device, lanes, bytes, stream, err));
    size_t at = 0;
    for (size_t i = 0; i < set->n_slots; i++) {
        const digest_slot_t *slot = &set->slots[i];
        if (slot->name != NULL) {
            device_piece_t piece = {.src = slot->data,
                                    .src_dtype = slot->dtype,
                                    .dst_dtype = stored,
                                    .rows = 1,
                                    .cols = slot->numel,
                                    .dst_pitch = slot->numel,
                                    .lanes = lanes + 2 * at++};
            if (device->ops->unpack(device, &piece, 1, stream, err) < 0) {
                return err->status == LK_ERR_UNSUPPORTED ? unsupported(slot, stored, err)
                                                         : err->status;
            }
        }
    }
    LK_RETURN_IF_ERROR(device->ops->copy(device, out, lanes, bytes, stream, err));
    LK_RETURN_IF_ERROR(device_wait(device, stream, err));
    at = 0;
    for (size_t i = 0; i < set->n_slots; i++) {
        if (set->slots[i].name != NULL) {
            set->slots[i].digest = out[at++];
        }
    }
    return LK_OK;
}

static lk_status_t digest_on(device_t *device, digest_set_t *set, lk_dtype_t stored,
                             lk_error_t *err)
{
    const device_ops_t *ops = device->ops;
    device_stream_t *stream = NULL;
    void *lanes = NULL, *out = NULL;
    uint64_t bytes = set->used * sizeof(digest_t);
    lk_status_t st = ops->stream_new(device, &stream, err);
    st = st == LK_OK ? ops->alloc(device, bytes, &lanes, err) : st;
    st = st == LK_OK ? ops->alloc_host(device, bytes, &out, err) : st;
    st = st == LK_OK ? run_on(device, stream, set, stored, lanes, out, err) : st;
    ops->stream_destroy(device, stream);
    ops->free(device, lanes);
    ops->free_host(device, out);
    return st;
}

lst_status_t lst_digest(lst_t *self, const lst_tensor_t *tensors, size_t n, char out[33])
{
    STATIC_ASSERT(DIGEST_HEX_SIZE == 33, "size of a digest's text");
    self->err = LK_ERROR_INIT;
    if (!self->knows_model) {
        return (lst_status_t)lk_error_set(
            &self->err, LK_ERR_STATE,
            "the answer to init_weight_transfer_engine did not say how "
            "ranks store weights; call lst_init_tcp, lst_init_shm, lst_init_nccl or lst_init_ipc "
            "first");
    }
    tensor_desc_t *descs = NULL;
    const void **data = NULL;
    digest_set_t set = {0};
    lk_status_t st = lst_describe(tensors, n, &descs, &data, &self->err);
    for (size_t i = 0; i < n && st >= 0; i++) {
        set.desc = &descs[i];
        set.data = data[i];
        st = name_rules_expand(&self->dims, &descs[i], note_piece, &set, &self->err);
    }
    device_t *device = self->ipc_up ? self->ipc_device : lst_nccl_device(self);
    if (st >= 0) {
        st = device != NULL ? digest_on(device, &set, self->stored, &self->err)
                            : digest_here(&set, self->stored, &self->err);
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
