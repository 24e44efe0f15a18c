/*
 * rl_weights.h: weight sets as a trainer holds them: any seed of a served model, in any of the
 * spellings that trainers use, and the sending of them.
 */
#ifndef LK_TESTS_CLUSTER_RL_WEIGHTS_H
#define LK_TESTS_CLUSTER_RL_WEIGHTS_H

#include "tests/cluster/rl_kit.h"

typedef struct {
    lst_tensor_t *t; /* names and data are owned */
    size_t n;
} rl_weights_t;

typedef enum {
    RL_CANONICAL,     /* as in the checkpoint file */
    RL_FUSED_LINEARS, /* qkv_proj, and gate_up_proj (of each expert) */
    RL_FUSED_EXPERTS, /* one gate_up_proj and one down_proj for all experts of a layer */
    RL_N_SPELLINGS
} rl_spelling_t;

/* Weight set `seed` of the model in dir, as make-model writes it; bfloat16 or float32. */
rl_weights_t rl_weights(const char *dir, uint64_t seed, lk_dtype_t dtype);
/* The same values under other names. */
rl_weights_t rl_spell(const rl_weights_t *from, rl_spelling_t spelling);
void rl_weights_fini(rl_weights_t *self);
const lst_tensor_t *rl_find(const rl_weights_t *self, const char *name);

/* {"update_info": ...} of these tensors; static storage, valid until the next call. */
const char *rl_update_info(const lst_tensor_t *tensors, size_t n);

/* start, update, finish; each must succeed. */
void rl_push(lst_t *lst, const rl_weights_t *weights, bool packed, const char *version);
/* Every rank has exactly these weights, this label, and is not dirty. */
void rl_assert_holds(lst_t *lst, const rl_weights_t *weights, const char *version);
void rl_must(lst_t *lst, lst_status_t status, const char *what);
/* The call fails with this status and a text that contains `text`. */
void rl_must_fail(lst_t *lst, lst_status_t status, lst_status_t want, const char *text);

/* What must not change when a call is refused: every rank's digest, version, epoch and state, and
 * one seeded completion. */
typedef struct {
    json_t *info, *tokens;
} rl_snapshot_t;
rl_snapshot_t rl_snapshot(const cluster_t *c);
void rl_assert_unchanged(const cluster_t *c, rl_snapshot_t *before);
void rl_snapshot_fini(rl_snapshot_t *snapshot);
json_t *rl_tokens_of(const cluster_t *c, uint32_t first, uint32_t n_tokens);

#endif
