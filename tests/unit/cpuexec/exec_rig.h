/*
 * exec_rig.h: one or several CPU executors over a fixture model, sequences with block tables, and a
 * loop that drives a step on all ranks. Shared by the executor's tests.
 */
#ifndef LK_TESTS_UNIT_CPUEXEC_EXEC_RIG_H
#define LK_TESTS_UNIT_CPUEXEC_EXEC_RIG_H

#include "engine_core/exec/executor.h"
#include "tests/lib/ep_mem.h"

#define RIG_MAX_RANKS 8
#define RIG_MAX_LEN   256

#define RIG_MODELS                                                                                 \
    {                                                                                              \
        "llama3_rope_scaled", "llama_smol_tied", "llama_untied", "qwen2_bias", "qwen3",            \
            "qwen3_moe", "qwen3_moe_mixed",                                                        \
    }

typedef struct {
    const char *model; /* fixture's name */
    lk_dtype_t dtype;
    uint32_t ranks, threads, block_size; /* 0: 1, 1, 16 */
} rig_options_t;

typedef struct {
    model_config_t model;
    executor_config_t config; /* of rank 0 */
    uint32_t ranks;
    executor_t *exec[RIG_MAX_RANKS];
    ep_mem_t *mem;
    uint64_t step;
} rig_t;

/* Aborts the test on failure. */
void rig_open(rig_t *rig, const rig_options_t *options);
void rig_close(rig_t *rig);

/* A sequence with its block table, as the engine would hold it. */
typedef struct {
    uint32_t tokens[RIG_MAX_LEN];
    uint32_t blocks[RIG_MAX_LEN];
    uint32_t len;
} rig_seq_t;

/* Gives seq the blocks first, first + stride, ... modulo the number of blocks. */
void rig_seq_blocks(const rig_t *rig, rig_seq_t *seq, uint32_t first, uint32_t stride);

/* Posts batches[r] on every rank and tests them in turn until all are done. NULL: dummy batch. */
void rig_step(rig_t *rig, const exec_batch_t *const *batches, exec_result_t *results);
/* One sequence on rank 0 (dummies elsewhere): computes [start, start + n), logits of the last
 * n_logits positions copied to `out`. */
void rig_run(rig_t *rig, const rig_seq_t *seq, uint32_t start, uint32_t n, uint32_t n_logits,
             float *out);

float rig_logprob(const float *logits, uint32_t vocab, uint32_t token);
uint32_t rig_argmax(const float *logits, uint32_t vocab);

#endif
