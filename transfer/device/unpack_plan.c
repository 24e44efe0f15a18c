#include "transfer/device/unpack_plan.h"

#include "base/check.h"
#include "transfer/device/unpack_thread.h"

#include <stdlib.h>

/* Below so many units a device isn't full; shorter units fill it better. */
#define ENOUGH_UNITS 1024u

STATIC_ASSERT(UNPACK_F32 == (int)LK_DTYPE_F32 && UNPACK_BF16 == (int)LK_DTYPE_BF16 &&
                  UNPACK_F16 == (int)LK_DTYPE_F16 && UNPACK_F64 == (int)LK_DTYPE_F64 &&
                  UNPACK_I64 == (int)LK_DTYPE_I64 && UNPACK_I32 == (int)LK_DTYPE_I32 &&
                  UNPACK_I8 == (int)LK_DTYPE_I8 && UNPACK_U8 == (int)LK_DTYPE_U8,
              "the kernel's dtypes are lk_dtype_t's");

typedef struct {
    uint64_t first, numel;
    const device_piece_t *piece;
} sort_key_t;

/* By first index, then the longest first: what a group's units skip is short. */
static int compare_keys(const void *a, const void *b)
{
    const sort_key_t *x = a, *y = b;
    if (x->first != y->first) {
        return x->first < y->first ? -1 : 1;
    }
    return x->numel > y->numel ? -1 : x->numel < y->numel;
}

static unpack_item_t make_item(const sort_key_t *key)
{
    const device_piece_t *piece = key->piece;
    return (unpack_item_t){.src = (uint64_t)(uintptr_t)piece->src,
                           .dst = (uint64_t)(uintptr_t)piece->dst,
                           .numel = key->numel,
                           .cols = piece->cols,
                           .pitch = piece->rows > 1 ? piece->dst_pitch : piece->cols,
                           .lanes = (uint64_t)(uintptr_t)piece->lanes,
                           .src_dtype = piece->src_dtype,
                           .dst_dtype = piece->dst_dtype};
}

static uint64_t units_of(const unpack_launch_t *launch, uint32_t group, uint32_t chunks)
{
    uint64_t unit = (uint64_t)chunks * UNPACK_CHUNK;
    return (launch->items[launch->groups[group].first].numel + unit - 1) / unit;
}

static uint64_t total_units(const unpack_launch_t *launch, uint32_t chunks)
{
    uint64_t total = 0;
    for (uint32_t g = 0; g < launch->n_groups; g++) {
        total += units_of(launch, g, chunks);
    }
    return total;
}

static void cut_units(unpack_launch_t *launch)
{
    launch->chunks = UNPACK_CHUNKS;
    while (launch->chunks > 1 && total_units(launch, launch->chunks) < ENOUGH_UNITS) {
        launch->chunks /= 2;
    }
    for (uint32_t g = 0; g < launch->n_groups; g++) {
        launch->groups[g].first_unit = launch->n_units;
        launch->n_units += (uint32_t)units_of(launch, g, launch->chunks);
    }
}

size_t unpack_plan(const device_piece_t *pieces, size_t n, unpack_launch_t *out)
{
    sort_key_t keys[UNPACK_ITEMS];
    uint32_t n_keys = 0;
    size_t taken = 0;
    uint64_t chunks = 0; /* at most 2^31 blocks fit into a launch */
    for (; taken < n && n_keys < UNPACK_ITEMS; taken++) {
        const device_piece_t *piece = &pieces[taken];
        uint64_t numel = piece->rows * piece->cols;
        chunks += numel / UNPACK_CHUNK + 1;
        if (chunks > INT32_MAX && n_keys > 0) {
            break;
        }
        if (numel > 0) {
            keys[n_keys++] = (sort_key_t){piece->first, numel, piece};
        }
    }
    qsort(keys, n_keys, sizeof keys[0], compare_keys);
    out->n_groups = out->n_units = 0;
    out->n_items = n_keys;
    for (uint32_t i = 0; i < n_keys; i++) {
        unpack_group_t *last = out->n_groups > 0 ? &out->groups[out->n_groups - 1] : NULL;
        if (last == NULL || last->index != keys[i].first || last->count == UNPACK_GROUP) {
            last = &out->groups[out->n_groups++];
            *last = (unpack_group_t){.index = keys[i].first, .first = i};
        }
        last->count++;
        out->items[i] = make_item(&keys[i]);
        last->digests |= out->items[i].lanes != 0;
    }
    cut_units(out);
    return taken;
}

bool unpack_is_copy(const device_piece_t *piece)
{
    return piece->lanes == NULL && piece->dst != NULL && piece->src_dtype == piece->dst_dtype &&
           (piece->rows == 1 || piece->dst_pitch == piece->cols);
}

static bool is_float(lk_dtype_t dtype)
{
    return dtype <= LK_DTYPE_F64;
}

lk_status_t unpack_check(const device_piece_t *pieces, size_t n, lk_error_t *err)
{
    for (size_t i = 0; i < n; i++) {
        lk_dtype_t from = pieces[i].src_dtype, to = pieces[i].dst_dtype;
        if (from != to && (!is_float(from) || !is_float(to))) {
            return lk_error_set(err, LK_ERR_UNSUPPORTED, "cannot convert %s to %s",
                                dtype_torch_name(from), dtype_torch_name(to));
        }
        CHECK(pieces[i].rows <= 1 || pieces[i].dst == NULL ||
              pieces[i].dst_pitch >= pieces[i].cols);
    }
    return LK_OK;
}
