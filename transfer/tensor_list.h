/*
 * tensor_list.h: a copy of a list of tensors, names included: trainers send the same list again and
 * again, and what it took to understand it need not be done again.
 */
#ifndef LK_TRANSFER_TENSOR_LIST_H
#define LK_TRANSFER_TENSOR_LIST_H

#include "transfer/tensor_desc.h"

typedef struct {
    tensor_desc_t *descs; /* with their names: one allocation */
    size_t n;
} tensor_list_t;

/* *out is written on success; the caller ends it with tensor_list_fini. */
LK_MUST_USE lk_status_t tensor_list_copy(const tensor_desc_t *descs, size_t n, tensor_list_t *out,
                                         lk_error_t *err);
/* The same names, dtypes and shapes in the same order. A zeroed list equals none, not even an empty
 * one. */
bool tensor_list_equal(const tensor_list_t *self, const tensor_desc_t *descs, size_t n);
/* Accepts a zeroed list, and leaves one. */
void tensor_list_fini(tensor_list_t *self);

#endif
