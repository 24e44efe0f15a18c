/*
 * digest.h: order-free digests of tensors and of weight sets.
 *
 * A tensor's digest has two 64-bit lanes. Lane l is the sum modulo 2^64 over the elements, in the
 * checkpoint's row-major order, of mix64(mix64(index + C[l]) ^ bits), where mix64 is
 * splitmix64's finaliser (base/prng.h), C = {0x6c6f636b73746570, 0x7765696768747321} and bits are
 * those of the value as float32 (integers: the value as int64). It does not depend on packing, on
 * the order of arrival, or on whether bf16 values are stored as bf16 or float32. The value is the
 * one stored.
 *
 * A weight set's digest is the sum over its tensors, lane by lane, of
 * mix64(mix64(XXH3_64(canonical name, seed l)) ^ lane l of the tensor's digest) (two lanes again).
 */
#ifndef LK_TRANSFER_DIGEST_H
#define LK_TRANSFER_DIGEST_H

#include "transfer/tensor_desc.h"

typedef struct {
    uint64_t lane[2];
} digest_t;

#define DIGEST_HEX_SIZE 33 /* 32 lower-case hex digits and a NUL: lane 0 then lane 1 */

/* Adds n elements, the first of which has index `first` in its tensor. data is in `dtype`; it is
 * rounded to `stored` (nearest even) before it is digested. */
LK_MUST_USE lk_status_t digest_add(digest_t *acc, const void *data, lk_dtype_t dtype,
                                   lk_dtype_t stored, uint64_t n, uint64_t first);
/* The same, and stores the elements in dst as `stored`, in one pass over memory. dst and data don't
 * overlap. */
LK_MUST_USE lk_status_t digest_store(digest_t *acc, void *dst, const void *data, lk_dtype_t dtype,
                                     lk_dtype_t stored, uint64_t n, uint64_t first);
/* Adds one tensor to a set's digest. */
void digest_set_add(digest_t *set, const char *canonical_name, digest_t tensor);
/* Takes it out again (the sum is a group). */
void digest_set_remove(digest_t *set, const char *canonical_name, digest_t tensor);
bool digest_equal(digest_t a, digest_t b);
void digest_hex(digest_t d, char out[DIGEST_HEX_SIZE]);

#endif
