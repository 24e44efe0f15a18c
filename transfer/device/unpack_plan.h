/* unpack_plan.h: from pieces to launches of the unpack kernel (unpack.h) or, for pieces that are
 * only moved, of the copy kernel (copies.h). Pure. */
#ifndef LK_TRANSFER_DEVICE_UNPACK_PLAN_H
#define LK_TRANSFER_DEVICE_UNPACK_PLAN_H

#include "transfer/device/unpack.h"
#include "transfer/device_ops.h"

/* The first UNPACK_ITEMS (or fewer) of n pieces as one launch; returns how many pieces were taken.
 * out->n_units is 0 if all of them are empty. Pieces are independent of each other. */
size_t unpack_plan(const device_piece_t *pieces, size_t n, unpack_launch_t *out);
/* Only moved: no cast, no digest, no gaps. */
bool unpack_is_copy(const device_piece_t *piece);
/* LK_ERR_UNSUPPORTED for a pair of dtypes that dtype_convert refuses. */
LK_MUST_USE lk_status_t unpack_check(const device_piece_t *pieces, size_t n, lk_error_t *err);

#endif
