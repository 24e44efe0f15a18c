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
 *
 * Shadow swap (weight_table_add_shadow): a second set of the same layout, to which the sink's
 * sessions go. commit swaps the two by their pointers. The set that was live until then lacks what
 * the session brought, and only that: a flag per tensor says so, and prepare copies, from the live
 * set, those tensors that a flag is set for and that the session at hand has not brought. So a
 * partial update gives what it would in place; whoever sends all tensors, or the same ones every
 * time, copies nothing; and a session that failed halfway is repaired in the same way. Copying at
 * the flip or behind it instead would either stop the steps or touch weights that a session may be
 * writing already.
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
/* Names, shapes and places without storage, for weights that live in another memory: every slot's
 * data is NULL. Nothing can be loaded or received into it. */
weight_table_t *weight_table_new_names(const model_config_t *config, lk_dtype_t stored,
                                       uint32_t ep_rank, uint32_t ep_size, lk_error_t *err);
void weight_table_destroy(weight_table_t **self_p);

/* Loads every tensor of a checkpoint directory (one file or an index). Missing, unknown or
 * ill-shaped tensors are refused by name, all of them listed, before anything is stored. Rotary
 * frequency buffers that old Llama checkpoints carry are skipped. */
LK_MUST_USE lk_status_t weight_table_load(weight_table_t *self, const char *dir, lk_error_t *err);
/* The same into any sink of such a model; the sink's plan is then the checkpoint's. */
LK_MUST_USE lk_status_t weight_table_load_into(const weight_table_t *names,
                                               const weight_sink_t *sink, const char *dir,
                                               lk_error_t *err);
/* Checks a list of tensors that has to be a whole model: also names what none of them covers. */
LK_MUST_USE lk_status_t weight_table_check_whole(const weight_table_t *self,
                                                 const tensor_desc_t *descs, size_t n,
                                                 lk_error_t *err);
/* Random weights (--load-format dummy): a function of seed and name only, equal on all ranks. */
LK_MUST_USE lk_status_t weight_table_fill(weight_table_t *self, uint64_t seed, lk_error_t *err);

/* What an executor keeps beside the weights of each set, e.g. re-packed for its kernels. */
typedef struct {
    /* The incoming set is complete: builds what belongs to it, a slice per call, INPROGRESS until
     * all is there. first: the first call for this set, whatever came of an earlier one. */
    lk_status_t (*prepare)(void *ctx, bool first, lk_error_t *err);
    /* The sets have been swapped. */
    void (*flip)(void *ctx);
    void *ctx;
} weight_follower_t;

/* Storage of one set: what weight_table_bytes would be, without making it. */
uint64_t weight_table_size(const model_config_t *config, lk_dtype_t stored, uint32_t ep_rank,
                           uint32_t ep_size);
/* Adds the second set, a copy of the first, after a load. Once. LK_ERR_NO_MEMORY. */
LK_MUST_USE lk_status_t weight_table_add_shadow(weight_table_t *self, lk_error_t *err);
bool weight_table_has_shadow(const weight_table_t *self);
/* follower->prepare and flip are called from the sink's; its ctx outlives the sessions. */
void weight_table_follow(weight_table_t *self, const weight_follower_t *follower);
/* The same tensor in the incoming set; `slot` itself without a shadow. */
const weight_slot_t *weight_table_incoming(const weight_table_t *self, const weight_slot_t *slot);

/* NULL if the model has no such tensor. Canonical names only. Of the live set, as everything below;
 * a slot belongs to its set for life, so it is the incoming one's after a flip. */
const weight_slot_t *weight_table_find(const weight_table_t *self, const char *name);
size_t weight_table_count(const weight_table_t *self);
const weight_slot_t *weight_table_at(const weight_table_t *self, size_t i);
/* Byte offset of slot i in the storage; false if another rank owns it. */
bool weight_table_place(const weight_table_t *self, size_t i, uint64_t *offset);
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
