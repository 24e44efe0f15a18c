/*
 * logits_row.h: passes over one row of logits, in vector registers where it matters. Sums have a
 * fixed order, so that results are a function of the row only. Rows need no alignment.
 */
#ifndef LK_ENGINE_CORE_EXEC_LOGITS_ROW_H
#define LK_ENGINE_CORE_EXEC_LOGITS_ROW_H

#include <stdbool.h>
#include <stdint.h>

/* Values below this (natural logarithm) have no probability: exp_neg gives 0. */
#define LOGITS_ROW_FLOOR (-87.0f)
#define LOGITS_ROW_BLOCK 1024 /* entries per partial sum */

typedef struct {
    float value;
    uint32_t id;
} row_entry_t;

/* The one order of a row: value descending, then id ascending. */
static inline bool row_entry_before(row_entry_t a, row_entry_t b)
{
    return a.value != b.value ? a.value > b.value : a.id < b.id;
}

/* Maximum; *bad: the row holds a NaN. */
float logits_row_max(const float *x, uint32_t n, bool *bad);
/* Lowest id of a value that is there. */
uint32_t logits_row_find(const float *x, uint32_t n, float value);
uint32_t logits_row_count_above(const float *x, uint32_t n, float limit);
/* Sum of exp(x - max); max is the row's maximum. */
double logits_row_exp_sum(const float *x, uint32_t n, float max);
/* z = (z - max) / temperature, mass = exp(z) (0 below LOGITS_ROW_FLOOR). */
void logits_row_soften(float *z, float *mass, uint32_t n, float max, float temperature);
/* mass = 0 for every entry behind `last` in the order of z. */
void logits_row_cut(const float *z, float *mass, uint32_t n, row_entry_t last);
/* Sum of mass; partial[i]: of block i. */
double logits_row_sum(const float *mass, uint32_t n, double *partial);
/* The first k in order; entries of -inf are left out. Returns how many; out has room for k. */
uint32_t logits_row_top(const float *x, uint32_t n, uint32_t k, row_entry_t *out);
/* The same with k = n, faster where k is a good part of n. scratch: [n], as out. */
uint32_t logits_row_sort(const float *x, uint32_t n, row_entry_t *out, row_entry_t *scratch);

#endif
