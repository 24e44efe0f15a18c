/*
 * model_fixture.h: the checkpoints of tests/fixtures/models, and what a trainer that holds one of
 * them sends (trainer_parameters.json).
 */
#ifndef LK_TESTS_EXEC_MODEL_FIXTURE_H
#define LK_TESTS_EXEC_MODEL_FIXTURE_H

#include "engine_core/exec/weight_table.h"

/* True under sanitizers, which answer impossible allocations and RLIMIT_AS in their own way. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#define N_MODEL_FIXTURES 7
extern const char *const model_fixtures[N_MODEL_FIXTURES];

/* All of these fail the test on any error. */

/* "FIXTURES/models/NAME", valid until the next call. */
const char *model_fixture_dir(const char *name);
void model_fixture_config(const char *name, model_config_t *out);
/* Empty table of the fixture; the caller destroys it. */
weight_table_t *model_fixture_table(const char *name, lk_dtype_t stored, uint32_t rank,
                                    uint32_t size);
/* The same, loaded. */
weight_table_t *model_fixture_load(const char *name, lk_dtype_t stored, uint32_t rank,
                                   uint32_t size);

typedef struct {
    tensor_desc_t *descs;
    void **data;
    char **sha256; /* hex, of the trainer's bytes */
    size_t n;
} trainer_list_t;

/* The trainer's list, with bytes put together from `source` (loaded, bf16, all experts). */
void trainer_list_init(trainer_list_t *list, const char *name, const weight_table_t *source);
/* The checkpoint's own spelling instead: one tensor per slot. sha256 is NULL. */
void trainer_list_init_split(trainer_list_t *list, const weight_table_t *source);
void trainer_list_convert(trainer_list_t *list, lk_dtype_t dtype);
void trainer_list_shuffle(trainer_list_t *list, uint64_t seed);
void trainer_list_fini(trainer_list_t *list);

/* begin, plan, every tensor; through direct() pointers when `direct`. */
lk_status_t trainer_list_send(const trainer_list_t *list, weight_table_t *table, bool direct,
                              lk_error_t *err);

#endif
