/*
 * weight_table.h: canonical checkpoint name -> destination. One table serves the first load and
 * every update, so fused, tied, sharded and per-expert tensors have one rule
 * (transfer/name_rules.h). The storage belongs to the table and its pointers never move while the
 * table lives.
 *
 * Expert parallelism: rank r of D owns experts floor(r*E/D) .. floor((r+1)*E/D)-1
 * (ep_first_expert). Tensors of other ranks' experts have no storage here (data NULL) but are
 * digested when they arrive, so that every rank's digest covers the whole model and equals the
 * trainer's.
 *
 * Layout, for executors that run several projections as one product: q_proj, k_proj and v_proj of a
 * layer (weights; biases likewise) lie one directly behind the other, so q's data is a
 * [q rows + k rows + v rows, hidden] matrix; gate_proj and up_proj of an MLP or of one expert too,
 * as [2 x intermediate, hidden]. Every such group, and every other tensor, starts at a multiple of
 * WEIGHT_ALIGNMENT bytes.
 */
#ifndef LK_ENGINE_CORE_EXEC_WEIGHT_TABLE_H
#define LK_ENGINE_CORE_EXEC_WEIGHT_TABLE_H

#include "engine_core/exec/model_config.h"
#include "transfer/weight_sink.h"

typedef struct weight_table weight_table_t;

#define WEIGHT_ALIGNMENT 64

typedef struct {
    const char *name; /* canonical */
    uint32_t ndim;
    uint64_t shape[2]; /* [out, in] for matrices, [n] for norms and biases */
    uint64_t numel;
    void *data; /* storage dtype, contiguous; NULL if another rank owns it */
    digest_t digest;
    bool loaded;
} weight_slot_t;

/* stored: LK_DTYPE_F32 or LK_DTYPE_BF16 (norm weights and biases too). config is copied. NULL with
 * LK_ERR_NO_MEMORY in err when the storage can't be had. */
weight_table_t *weight_table_new(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                                 uint32_t ep_size, lk_error_t *err);
void weight_table_destroy(weight_table_t **self_p);

/* Loads every tensor of a checkpoint directory (one file or an index). Missing, unknown or
 * ill-shaped tensors are refused by name, all of them listed, before anything is stored. Rotary
 * frequency buffers that old Llama checkpoints carry are skipped. */
LK_MUST_USE lk_status_t weight_table_load(weight_table_t *self, const char *dir, lk_error_t *err);
/* Checks a list of tensors that has to be a whole model: also names what none of them covers. */
LK_MUST_USE lk_status_t weight_table_check_whole(const weight_table_t *self,
                                                 const tensor_desc_t *descs, size_t n,
                                                 lk_error_t *err);
/* Random weights (--load-format dummy): a function of seed and name only, equal on all ranks. */
LK_MUST_USE lk_status_t weight_table_fill(weight_table_t *self, uint64_t seed, lk_error_t *err);

/* NULL if the model has no such tensor. Canonical names only. */
const weight_slot_t *weight_table_find(const weight_table_t *self, const char *name);
size_t weight_table_count(const weight_table_t *self);
const weight_slot_t *weight_table_at(const weight_table_t *self, size_t i);
const model_config_t *weight_table_config(const weight_table_t *self);
lk_dtype_t weight_table_dtype(const weight_table_t *self);
/* Bytes of storage on this rank. */
uint64_t weight_table_bytes(const weight_table_t *self);
digest_t weight_table_digest(const weight_table_t *self);

/* The sink of updates; valid as long as the table. Within a session a tensor may be sent again and
 * the last one counts, but the two spellings of a tied embedding must agree: the one that differs
 * is LK_ERR_INVALID when it arrives, and is not stored. */
weight_sink_t weight_table_sink(weight_table_t *self);

uint32_t ep_first_expert(uint32_t num_experts, uint32_t rank, uint32_t size);

#endif
