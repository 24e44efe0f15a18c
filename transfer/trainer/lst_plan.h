/*
 * lst_plan.h: what an NCCL update of a list of tensors needs, kept for the next one, which nearly
 * always brings the same list: the order in which they are sent, the size of a bucket, and the
 * body of the call.
 *
 * Where the caller left the bucket size to the library, and the ranks digest what comes, both are
 * chosen so that little is left to do when the last broadcast is done: a rank digests a bucket
 * while the next is on the wire, but nothing hides the last one's. Tensors that are larger than a
 * bucket go first, and the size is the one with which all is done soonest, by the rates of an H200.
 * Without digests the largest buckets are best, in the caller's order. Boundaries on the wire are
 * vLLM's for the list and the size that the call names.
 */
#ifndef LK_TRANSFER_TRAINER_LST_PLAN_H
#define LK_TRANSFER_TRAINER_LST_PLAN_H

#include "transfer/tensor_list.h"

typedef struct {
    tensor_list_t asked; /* as the caller gave it; zeroed: there is no plan */
    bool packed, digests;
    uint64_t asked_size;
    size_t *order;       /* [asked.n] tensor i of the wire is the caller's order[i] */
    tensor_desc_t *sent; /* [asked.n] in that order; names are asked's */
    const void **data;   /* [asked.n] likewise, of the update at hand */
    uint64_t buffer_size;
    char *args; /* the call's body */
} lst_plan_t;

/* A plan for this list and this update's data (which may be NULL for tensors of no bytes). Does
 * next to nothing if the list is that of the plan at hand. buffer_size 0: choose. digests: the
 * ranks make them. On failure there is no plan. */
LK_MUST_USE lk_status_t lst_plan_make(lst_plan_t *self, const tensor_desc_t *descs,
                                      const void *const *data, size_t n, bool packed,
                                      uint64_t buffer_size, bool digests, lk_error_t *err);
/* Accepts a zeroed plan, and leaves one. */
void lst_plan_fini(lst_plan_t *self);

#endif
