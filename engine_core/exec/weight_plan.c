#include "engine_core/exec/weight_plan.h"

#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- offenders ---- */

/* What stays free behind the texts for the sentence's head and its "; and N more". */
#define OFFENDERS_RESERVE 96

void offenders_add(offenders_t *self, const char *fmt, ...)
{
    char one[512];
    va_list ap;
    va_start(ap, fmt);
    int len = vsnprintf(one, sizeof one, fmt, ap);
    va_end(ap);
    size_t add = LK_MIN((size_t)LK_MAX(len, 0), sizeof one - 1);
    self->n++;
    if (self->left_out > 0 || self->len + add + 2 > sizeof self->text - OFFENDERS_RESERVE) {
        self->left_out++;
        return;
    }
    self->len += (size_t)snprintf(self->text + self->len, sizeof self->text - self->len, "%s%s",
                                  self->len > 0 ? "; " : "", one);
}

lk_status_t offenders_finish(const offenders_t *self, lk_error_t *err)
{
    if (self->n == 0) {
        return LK_OK;
    }
    if (self->n == 1) {
        return lk_error_set(err, LK_ERR_INVALID, "%s", self->text);
    }
    if (self->left_out == 0) {
        return lk_error_set(err, LK_ERR_INVALID, "%zu tensors do not fit the model: %s", self->n,
                            self->text);
    }
    return lk_error_set(err, LK_ERR_INVALID, "%zu tensors do not fit the model: %s; and %zu more",
                        self->n, self->text, self->left_out);
}

/* ---- plan ---- */

typedef struct {
    const weight_table_t *table;
    const tensor_desc_t *tensors;
    size_t index;       /* of the tensor being expanded */
    uint32_t *taken[2]; /* per slot and spelling: 1 + index of the tensor that has it, 0: none */
    bool offended;      /* the tensor being expanded is in the list already */
    offenders_t *offenders;
    weight_plan_t plan;
} builder_t;

static bool slot_fits(const weight_slot_t *slot, const name_piece_t *piece)
{
    return slot->ndim == piece->ndim && slot->shape[0] == piece->shape[0] &&
           (slot->ndim < 2 || slot->shape[1] == piece->shape[1]);
}

static void offend_unknown(builder_t *b, const name_piece_t *piece)
{
    const char *name = b->tensors[b->index].name;
    if (strcmp(name, piece->name) == 0) {
        offenders_add(b->offenders, "tensor %s: the model has no such tensor", name);
    } else {
        offenders_add(b->offenders, "tensor %s: the model has no %s", name, piece->name);
    }
    b->offended = true;
}

static void offend_shape(builder_t *b, const name_piece_t *piece, const weight_slot_t *slot)
{
    const char *name = b->tensors[b->index].name;
    char got[160], want[160];
    tensor_desc_t as_piece = {.ndim = piece->ndim};
    tensor_desc_t as_slot = {.ndim = slot->ndim, .shape = {slot->shape[0], slot->shape[1]}};
    memcpy(as_piece.shape, piece->shape, sizeof as_piece.shape);
    tensor_desc_shape_text(&as_piece, got, sizeof got);
    tensor_desc_shape_text(&as_slot, want, sizeof want);
    if (strcmp(name, piece->name) == 0) {
        offenders_add(b->offenders, "tensor %s: shape %s, the model has %s", name, got, want);
    } else {
        offenders_add(b->offenders, "tensor %s: its %s would be %s, the model has %s", name,
                      piece->name, got, want);
    }
    b->offended = true;
}

static bool grow_pieces(weight_plan_t *plan)
{
    if (plan->n_pieces < plan->cap_pieces) {
        return true;
    }
    size_t cap = LK_MAX(plan->cap_pieces * 2, (size_t)64);
    weight_piece_t *pieces = realloc(plan->pieces, cap * sizeof *pieces);
    if (pieces == NULL) {
        return false;
    }
    plan->pieces = pieces;
    plan->cap_pieces = cap;
    return true;
}

static lk_status_t add_piece(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    builder_t *b = ctx;
    const tensor_desc_t *tensor = &b->tensors[b->index];
    if (b->offended) {
        return LK_OK; /* one line per tensor is enough */
    }
    const weight_slot_t *slot = weight_table_find(b->table, piece->name);
    if (slot == NULL) {
        offend_unknown(b, piece);
        return LK_OK;
    }
    if (!slot_fits(slot, piece)) {
        offend_shape(b, piece, slot);
        return LK_OK;
    }
    uint32_t i = (uint32_t)(slot - weight_table_at(b->table, 0));
    /* The only rule that renames without a fused suffix is the tied embedding's. */
    bool alias =
        strcmp(tensor->name, "lm_head.weight") == 0 && strcmp(piece->name, tensor->name) != 0;
    uint32_t *taken = &b->taken[alias][i];
    if (*taken != 0) {
        offenders_add(b->offenders, "tensor %s: %s is in the list twice, first as %s", tensor->name,
                      piece->name, b->tensors[*taken - 1].name);
        b->offended = true;
        return LK_OK;
    }
    if (!grow_pieces(&b->plan)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the plan of an update");
    }
    *taken = (uint32_t)b->index + 1;
    if (b->taken[!alias][i] != 0) {
        b->plan.twice = i;
    }
    b->plan.pieces[b->plan.n_pieces++] =
        (weight_piece_t){.slot = i, .alias = alias, .offset = piece->offset};
    return LK_OK;
}

static bool dtype_is_float(lk_dtype_t dtype)
{
    return dtype == LK_DTYPE_F32 || dtype == LK_DTYPE_BF16 || dtype == LK_DTYPE_F16 ||
           dtype == LK_DTYPE_F64;
}

static lk_status_t add_tensor(builder_t *b, const name_rules_dims_t *dims, lk_error_t *err)
{
    const tensor_desc_t *tensor = &b->tensors[b->index];
    weight_item_t *item = &b->plan.items[b->index];
    lk_error_t why = LK_ERROR_INIT;
    *item = (weight_item_t){.first_piece = b->plan.n_pieces, .dtype = tensor->dtype};
    b->offended = false;
    if (!dtype_is_float(tensor->dtype)) {
        offenders_add(b->offenders,
                      "tensor %.255s: dtype %s, expected float32, bfloat16, float16 or float64",
                      tensor->name, dtype_torch_name(tensor->dtype));
        return LK_OK;
    }
    lk_status_t status = name_rules_expand(dims, tensor, add_piece, b, &why);
    if (status == LK_ERR_NO_MEMORY) {
        return lk_error_set(err, status, "%s", why.text);
    }
    if (status < 0) {
        offenders_add(b->offenders, "%s", why.text);
    } else if (!b->offended) {
        bool fits = tensor_desc_bytes(tensor, &item->bytes);
        CHECK(fits); /* its elements are those of slots, which have storage */
    }
    item->n_pieces = b->plan.n_pieces - item->first_piece;
    return LK_OK;
}

lk_status_t weight_plan_build(const weight_table_t *table, const name_rules_dims_t *dims,
                              const tensor_desc_t *tensors, size_t n, offenders_t *offenders,
                              weight_plan_t *out, lk_error_t *err)
{
    builder_t b = {.table = table, .tensors = tensors, .offenders = offenders};
    size_t n_slots = weight_table_count(table);
    b.taken[0] = calloc(n_slots, sizeof(uint32_t));
    b.taken[1] = calloc(n_slots, sizeof(uint32_t));
    b.plan.items = calloc(n + 1, sizeof *b.plan.items);
    b.plan.n_items = n;
    b.plan.twice = UINT32_MAX;
    lk_status_t status = LK_OK;
    if (b.taken[0] == NULL || b.taken[1] == NULL || b.plan.items == NULL || n >= UINT32_MAX) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    }
    for (b.index = 0; b.index < n && status == LK_OK; b.index++) {
        status = add_tensor(&b, dims, err);
    }
    free(b.taken[0]);
    free(b.taken[1]);
    if (status < 0) {
        weight_plan_fini(&b.plan);
        return status;
    }
    *out = b.plan;
    return LK_OK;
}

void weight_plan_fini(weight_plan_t *plan)
{
    if (plan != NULL) {
        free(plan->items);
        free(plan->pieces);
        *plan = (weight_plan_t){0};
    }
}

/* ---- lists that come again ---- */

static void drop(weight_plan_t *plan, tensor_list_t *of)
{
    weight_plan_fini(plan);
    tensor_list_fini(of);
}

static lk_status_t build_whole(const weight_table_t *table, const name_rules_dims_t *dims,
                               const tensor_desc_t *tensors, size_t n, weight_plan_t *out,
                               lk_error_t *err)
{
    offenders_t offenders = {.n = 0};
    weight_plan_t plan;
    LK_RETURN_IF_ERROR(weight_plan_build(table, dims, tensors, n, &offenders, &plan, err));
    lk_status_t status = offenders_finish(&offenders, err);
    if (status < 0) {
        weight_plan_fini(&plan);
        return status;
    }
    *out = plan;
    return LK_OK;
}

lk_status_t weight_plans_check(weight_plans_t *self, const weight_table_t *table,
                               const name_rules_dims_t *dims, const tensor_desc_t *tensors,
                               size_t n, lk_error_t *err)
{
    if (tensor_list_equal(&self->plan_of, tensors, n) ||
        tensor_list_equal(&self->checked_of, tensors, n)) {
        return LK_OK;
    }
    weight_plan_t plan;
    tensor_list_t list;
    LK_RETURN_IF_ERROR(build_whole(table, dims, tensors, n, &plan, err));
    lk_status_t status = tensor_list_copy(tensors, n, &list, err);
    if (status < 0) {
        weight_plan_fini(&plan);
        return status;
    }
    drop(&self->checked, &self->checked_of);
    self->checked = plan;
    self->checked_of = list;
    return LK_OK;
}

void weight_plans_enter(weight_plans_t *self, const tensor_desc_t *tensors, size_t n)
{
    if (tensor_list_equal(&self->plan_of, tensors, n)) {
        return;
    }
    CHECK(tensor_list_equal(&self->checked_of, tensors, n));
    drop(&self->plan, &self->plan_of);
    self->plan = self->checked;
    self->plan_of = self->checked_of;
    self->checked = (weight_plan_t){0};
    self->checked_of = (tensor_list_t){0};
}

void weight_plans_fini(weight_plans_t *self)
{
    drop(&self->plan, &self->plan_of);
    drop(&self->checked, &self->checked_of);
}
