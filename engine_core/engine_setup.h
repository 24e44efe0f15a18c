/*
 * engine_setup.h: from flags and a checkpoint directory to an executor and the sizes of a rank.
 * What is wrong with the flags is said before anything is loaded.
 */
#ifndef LK_ENGINE_CORE_ENGINE_SETUP_H
#define LK_ENGINE_CORE_ENGINE_SETUP_H

#include "base/config.h"
#include "engine_core/exec/executor.h"
#include "engine_core/memory_sum.h"
#include "transfer/weight_transfer_engine.h"

#include <limits.h>

typedef struct {
    model_config_t model;
    const executor_ops_t *ops;
    const wte_ops_t *wte;                   /* NULL: no --weight-transfer-config */
    char allowed_weight_dirs[2 * PATH_MAX]; /* see wte_context_t */
    lk_dtype_t dtype;                       /* of weights and KV */
    bool shadow;                            /* --weight-swap shadow */
    bool lockstep;                          /* mixture of experts, spread over several ranks */
    uint32_t max_model_len, block_size, num_blocks, threads;
    /* for all ranks that start together here; when setup_check looked, before any of them can have
     * loaded */
    uint64_t available_bytes;
    uint32_t sharing_ranks;
    /* after engine_setup_open: */
    uint32_t prompt_rows; /* see scheduler_config_t */
    memory_sum_t memory;
    executor_t *executor;
} engine_setup_t;

/* Flags and config.json. Refusals name the flag or the field. */
LK_MUST_USE lk_status_t engine_setup_check(const lk_config_t *config, engine_setup_t *out,
                                           lk_error_t *err);
/* Sizes the KV memory and opens the executor, which loads the weights; takes as long as that.
 * LK_ERR_INVALID when --max-model-len positions do not fit into the KV memory, or, in shadow mode,
 * when both sets of weights with the rest do not fit into the memory that was available. */
LK_MUST_USE lk_status_t engine_setup_open(engine_setup_t *self, const lk_config_t *config, ep_t ep,
                                          lk_error_t *err);
void engine_setup_fini(engine_setup_t *self);

#endif
