/*
 * weight_plan.h: a list of incoming tensors resolved against a weight table: which slot each
 * contiguous piece of each tensor goes to. Pure: it looks at the table's names and shapes only.
 */
#ifndef LK_ENGINE_CORE_EXEC_WEIGHT_PLAN_H
#define LK_ENGINE_CORE_EXEC_WEIGHT_PLAN_H

#include "engine_core/exec/weight_table.h"
#include "transfer/tensor_list.h"

/* Collects the texts of everything that is wrong into one error: as many as fit, then "and N
 * more". */
typedef struct {
    char text[LK_ERROR_TEXT_MAX];
    size_t len;
    size_t n, left_out;
} offenders_t;

void offenders_add(offenders_t *self, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* LK_OK if there are none, else LK_ERR_INVALID with "N tensors do not fit the model: ...". */
LK_MUST_USE lk_status_t offenders_finish(const offenders_t *self, lk_error_t *err);

typedef struct {
    uint32_t slot;   /* index in the table */
    bool alias;      /* arrived as lm_head.weight of a tied model */
    uint64_t offset; /* first element within the incoming tensor */
} weight_piece_t;

typedef struct {
    size_t first_piece, n_pieces;
    lk_dtype_t dtype;
    uint64_t bytes;
} weight_item_t;

typedef struct {
    weight_item_t *items; /* one per incoming tensor, in order */
    size_t n_items;
    weight_piece_t *pieces;
    size_t n_pieces, cap_pieces;
    uint32_t
        twice; /* slot that the list has in both spellings of a tied embedding, or UINT32_MAX */
} weight_plan_t;

/* Resolves n tensors. What is wrong with them goes to `offenders` and the rest is still resolved,
 * so that one answer names them all. Errors are LK_ERR_NO_MEMORY only. *out is written on success;
 * the caller ends it with weight_plan_fini. */
LK_MUST_USE lk_status_t weight_plan_build(const weight_table_t *table,
                                          const name_rules_dims_t *dims,
                                          const tensor_desc_t *tensors, size_t n,
                                          offenders_t *offenders, weight_plan_t *out,
                                          lk_error_t *err);
/* Accepts NULL and a zeroed plan; leaves it empty. */
void weight_plan_fini(weight_plan_t *plan);

/* A list is checked before it is planned, and the next update nearly always brings the same one:
 * what is known of it is kept. Zeroed is empty. */
typedef struct {
    weight_plan_t plan;    /* in force */
    weight_plan_t checked; /* of the last list that was checked and was not that of `plan` */
    tensor_list_t plan_of, checked_of;
} weight_plans_t;

/* LK_ERR_INVALID names all offenders. `plan` stays as it is. */
LK_MUST_USE lk_status_t weight_plans_check(weight_plans_t *self, const weight_table_t *table,
                                           const name_rules_dims_t *dims,
                                           const tensor_desc_t *tensors, size_t n, lk_error_t *err);
/* Puts the plan of a list that was checked last, or is that of `plan`, in force. */
void weight_plans_enter(weight_plans_t *self, const tensor_desc_t *tensors, size_t n);
void weight_plans_fini(weight_plans_t *self);

#endif
