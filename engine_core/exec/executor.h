/*
 * executor.h: what computes a forward pass. Implementations: cpu/ (default), null (an oracle for
 * tests), store (weights in a device's memory, and no forward pass). The engine owns scheduling,
 * block tables and sampling; the executor owns the weights (through its weight table), the physical
 * KV memory, and the arithmetic.
 *
 * A step is post / test / abort. Between post and the end of test the batch and all it points to
 * are borrowed. test does a bounded piece of work per call (a layer, say) and returns INPROGRESS
 * until the step is done, also while it waits for peers in an expert exchange, so that the engine's
 * loop can serve its sockets. A batch without sequences is a dummy step: an expert-parallel
 * executor takes part in every exchange of it, others return OK at once.
 *
 * Invariance: a sequence's logits depend on its own tokens and KV only; not on its neighbours, on
 * chunking, on block numbers, or on the number of ranks (decision 16): bit-equal.
 */
#ifndef LK_ENGINE_CORE_EXEC_EXECUTOR_H
#define LK_ENGINE_CORE_EXEC_EXECUTOR_H

#include "engine_core/ep/ep.h"
#include "engine_core/exec/weight_table.h"

typedef struct {
    const uint32_t *tokens; /* the request's tokens from position 0; at least start + n of them */
    uint32_t start, n;      /* positions [start, start + n) are computed and their KV written */
    const uint32_t
        *blocks;       /* position p lives in block blocks[p / block_size], slot p % block_size */
    uint32_t n_logits; /* logits are wanted for the last n_logits of the n positions */
} exec_seq_t;

typedef struct {
    const exec_seq_t *seqs;
    size_t n_seqs;
    uint64_t step; /* equal on all ranks of an expert-parallel group; part of exchange tags */
} exec_batch_t;

/* Rows in the order of seqs, then of positions; sum of n_logits rows. Valid until the next post. */
typedef struct {
    size_t rows;
    const float *logits;    /* [rows, vocab_size]; NULL for executors that pick tokens themselves */
    const uint32_t *tokens; /* [rows], only when logits is NULL */
    const float *logprobs;  /* [rows], only when logits is NULL */
} exec_result_t;

typedef struct {
    const char *model_dir;
    const model_config_t *model;
    lk_dtype_t dtype; /* F32 or BF16: storage and KV; F32 arithmetic accumulates in float32 */
    bool shadow;      /* a second set of weights, for updates beside the steps (weight_table.h) */
    bool load_dummy;  /* --load-format dummy */
    uint64_t dummy_seed;
    uint32_t block_size; /* positions per KV block */
    uint32_t num_blocks;
    uint32_t max_seqs, max_tokens; /* upper bounds of one batch: sequences, positions */
    uint32_t max_rows;             /* and rows of logits; 0: max_tokens */
    uint32_t threads;
    ep_t ep;               /* ep_local() for dense models and single ranks */
    uint32_t device_index; /* GPU of this rank, counted on modulo how many there are */
    bool no_digests;       /* of weights; a store only */
} executor_config_t;

typedef struct executor executor_t;

typedef struct executor_ops {
    const char *name; /* "cpu", "null" */
    lk_status_t (*open)(const executor_config_t *config, executor_t **out, lk_error_t *err);
    void (*close)(executor_t *self);
    weight_table_t *(*weights)(executor_t *self);
    /* (optional) Where updates go, if not into the table; weights then has names and no data. */
    weight_sink_t (*sink)(executor_t *self);
    /* (optional) Why it generates nothing: an executor that has it never gets a batch with
     * sequences. */
    const char *(*refusal)(const executor_t *self);
    /* Bytes of KV per block, for sizing num_blocks before open. */
    uint64_t (*kv_block_bytes)(const executor_config_t *config);
    /* Bytes of one set of weights here, with what is kept beside it; before open. */
    uint64_t (*weight_bytes)(const executor_config_t *config);
    lk_status_t (*step_post)(executor_t *self, const exec_batch_t *batch, lk_error_t *err);
    lk_status_t (*step_test)(executor_t *self, exec_result_t *out, lk_error_t *err);
    /* After step_test returned INPROGRESS: true if the step goes on only when the exchange moves
     * (its descriptors tell when), false if test has more to compute and should be called again at
     * once. */
    bool (*step_waits)(const executor_t *self);
    void (*step_abort)(executor_t *self);
} executor_ops_t;

/* Base of every implementation: first member. */
struct executor {
    const executor_ops_t *ops;
};

/* Where this executor's weights are updated. */
weight_sink_t executor_sink(executor_t *self);

/* NULL if unknown. */
const executor_ops_t *executor_find(const char *name);
extern const executor_ops_t executor_cpu_ops;
extern const executor_ops_t executor_null_ops;
extern const executor_ops_t executor_cuda_store_ops;
extern const executor_ops_t executor_host_store_ops;

/* The null executor's next token, for checkers: a hash of the weight set's digest and of the tokens
 * of positions 0..pos in order. Never one of the model's eos ids. */
uint32_t executor_null_token(const model_config_t *model, digest_t weights, const uint32_t *tokens,
                             uint32_t n_tokens);

#endif
