/*
 * forward_impl.h: the state that forward.c and attention.c share. Phases are entered by every
 * worker of the team; nothing in them allocates.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_FORWARD_IMPL_H
#define LK_ENGINE_CORE_EXEC_CPU_FORWARD_IMPL_H

#include "engine_core/exec/cpu/forward.h"

/* Query positions [token, token + n) of one sequence, attended to together. */
typedef struct {
    uint32_t seq, token, n;
} tile_t;

/* A worker's own scratch. */
typedef struct {
    float *row;    /* widest row of the model */
    float *scores; /* [ATTN_ROWS][ld_scores] */
    float *out;    /* [ATTN_ROWS][head_dim] */
} scratch_t;

struct forward {
    const cpu_model_t *model;
    team_t *team;
    compute_t compute;
    uint32_t threads;
    uint32_t max_seqs, max_tokens, max_rows, num_blocks, block_size, slots, max_positions;
    size_t ld_scores, head_bytes, block_bytes; /* of K or V of one head; of one layer's block */
    arena_t arena, kv_arena, logits_arena;

    uint8_t *kv;
    float *logits; /* [max_rows, vocab] */

    /* the step's batch */
    const exec_seq_t *seqs;
    uint32_t n_seqs, n_tokens, n_rows, n_tiles;
    uint32_t *token_seq, *token_pos; /* [max_tokens] */
    uint32_t *row_token;             /* [max_tokens] */
    tile_t *tiles;                   /* [max_tokens] */
    uint32_t head_done;              /* columns */
    uint32_t head_end;

    float *h;         /* [tokens, hidden] */
    void *x;          /* [tokens, max(hidden, heads * head_dim)]: inputs of products, dtype */
    float *q, *k, *v; /* [tokens, heads * head_dim] */
    float *cos, *sin; /* [tokens, head_dim / 2] */
    float *gate, *up; /* [tokens, intermediate] */
    void *act;
    float *router_in; /* [tokens, hidden]: what the router sees, not rounded to bf16 */
    float *router;    /* [tokens, experts] */
    scratch_t *scratch;
    uint32_t layer; /* of the running team function */
};

/* q, k and v of all tokens from x (attention.c). */
void attention_project(forward_t *f, worker_t *w, const cpu_layer_t *l);
/* Norms and rotates heads, scales q, stores k and v into the KV blocks. */
void attention_store(forward_t *f, worker_t *w, const cpu_layer_t *l);
/* Attention of every tile; its outputs replace x. */
void attention_run(forward_t *f, worker_t *w);
/* Query positions of one tile. */
uint32_t attention_tile_positions(const model_config_t *m);

#endif
