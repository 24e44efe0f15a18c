#include "engine_core/exec/cpu/forward_impl.h"

#include "base/check.h"

#include <math.h>
#include <string.h>

/* Query rows per tile: a whole number of positions when a KV head has few query heads. */
uint32_t attention_tile_positions(const model_config_t *m)
{
    uint32_t group = m->num_heads / m->num_kv_heads;
    return group < ATTN_ROWS ? ATTN_ROWS / group : 1;
}

void attention_project(forward_t *f, worker_t *w, const cpu_layer_t *l)
{
    const model_config_t *m = &f->model->config;
    const uint32_t q = m->num_heads * m->head_dim, kv = m->num_kv_heads * m->head_dim;
    const gemm_t base = {.x = f->x, .ldx = m->hidden_size, .m = f->n_tokens, .k = m->hidden_size};
    gemm_t g[3] = {base, base, base};
    g[0].w = l->q, g[0].bias = l->q_bias, g[0].y = f->q, g[0].n = q, g[0].ldy = q;
    g[1].w = l->k, g[1].bias = l->k_bias, g[1].y = f->k, g[1].n = kv, g[1].ldy = kv;
    g[2].w = l->v, g[2].bias = l->v_bias, g[2].y = f->v, g[2].n = kv, g[2].ldy = kv;
    product_run(&f->compute, w, g, 3);
}

/* Rotates pairs (i, i + half): Transformers' rotate_half. */
static void rope(float *head, const float *cos, const float *sin, uint32_t half, float scale)
{
    for (uint32_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = (a * cos[i] - b * sin[i]) * scale;
        head[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

/* K and V of one position and head into their slot. */
static void store_kv(const forward_t *f, const worker_t *w, const float *k, const float *v,
                     uint8_t *kb, uint8_t *vb, uint32_t slot)
{
    const uint32_t d_n = f->model->config.head_dim;
    if (f->compute.bf16) {
        uint16_t *kt = (uint16_t *)kb + slot, *vt = (uint16_t *)vb + (size_t)slot * d_n;
        uint16_t *rounded = (uint16_t *)f->scratch[w->id].row;
        f->compute.kernels->to_bf16(k, d_n, rounded);
        for (uint32_t d = 0; d < d_n; d++) {
            kt[(size_t)d * f->slots] = rounded[d];
        }
        f->compute.kernels->to_bf16(v, d_n, vt);
        return;
    }
    float *kt = (float *)kb + slot;
    for (uint32_t d = 0; d < d_n; d++) {
        kt[(size_t)d * f->slots] = k[d];
    }
    memcpy((float *)vb + (size_t)slot * d_n, v, d_n * sizeof *v);
}

static uint8_t *kv_layer(const forward_t *f, uint32_t layer)
{
    return f->kv + (size_t)layer * f->num_blocks * f->block_bytes;
}

void attention_store(forward_t *f, worker_t *w, const cpu_layer_t *l)
{
    const model_config_t *m = &f->model->config;
    const kernels_t *kernels = f->compute.kernels;
    const uint32_t d_n = m->head_dim, half = d_n / 2;
    const float scale = 1.0f / sqrtf((float)d_n);
    for (uint32_t t = team_take(w); t < f->n_tokens; t = team_take(w)) {
        const float *cos = f->cos + (size_t)t * half, *sin = f->sin + (size_t)t * half;
        for (uint32_t i = 0; i < m->num_heads; i++) {
            float *q = f->q + ((size_t)t * m->num_heads + i) * d_n;
            if (l->q_norm != NULL) {
                kernels->rms_norm(q, l->q_norm, m->rms_norm_eps, d_n, q);
            }
            rope(q, cos, sin, half, scale);
        }
        const exec_seq_t *s = &f->seqs[f->token_seq[t]];
        const uint32_t pos = f->token_pos[t];
        uint8_t *block = kv_layer(f, f->layer) + s->blocks[pos / f->block_size] * f->block_bytes;
        for (uint32_t i = 0; i < m->num_kv_heads; i++) {
            float *k = f->k + ((size_t)t * m->num_kv_heads + i) * d_n;
            if (l->k_norm != NULL) {
                kernels->rms_norm(k, l->k_norm, m->rms_norm_eps, d_n, k);
            }
            rope(k, cos, sin, half, 1.0f);
            store_kv(f, w, k, f->v + ((size_t)t * m->num_kv_heads + i) * d_n,
                     block + i * f->head_bytes, block + (m->num_kv_heads + i) * f->head_bytes,
                     pos % f->block_size);
        }
    }
}

/* Heads [head, head + heads) of KV head kv_head, for all positions of a tile. */
static void attend(forward_t *f, worker_t *w, const tile_t *tile, uint32_t kv_head, uint32_t head,
                   uint32_t heads)
{
    const model_config_t *m = &f->model->config;
    const uint32_t d_n = m->head_dim;
    const exec_seq_t *s = &f->seqs[tile->seq];
    scratch_t *scratch = &f->scratch[w->id];
    attn_t a = {
        .k = kv_layer(f, f->layer) + kv_head * f->head_bytes,
        .v = kv_layer(f, f->layer) + (m->num_kv_heads + kv_head) * f->head_bytes,
        .block_stride = f->block_bytes,
        .blocks = s->blocks,
        .block_size = f->block_size,
        .slots = f->slots,
        .head_dim = d_n,
        .scores = scratch->scores,
        .ld_scores = f->ld_scores,
    };
    for (uint32_t t = tile->token; t < tile->token + tile->n; t++) {
        for (uint32_t i = head; i < head + heads; i++, a.rows++) {
            a.q[a.rows] = f->q + ((size_t)t * m->num_heads + i) * d_n;
            a.out[a.rows] = scratch->out + (size_t)a.rows * d_n;
            a.len[a.rows] = f->token_pos[t] + 1;
        }
    }
    (f->compute.bf16 ? f->compute.kernels->attn_bf16 : f->compute.kernels->attn_f32)(&a);
    for (uint32_t r = 0; r < a.rows; r++) {
        size_t at = ((size_t)(tile->token + r / heads) * m->num_heads + head + r % heads) * d_n;
        compute_input(&f->compute, a.out[r], d_n,
                      (uint8_t *)f->x + at * compute_bytes(&f->compute));
    }
}

void attention_run(forward_t *f, worker_t *w)
{
    const model_config_t *m = &f->model->config;
    const uint32_t group = m->num_heads / m->num_kv_heads;
    const uint32_t parts = (group + ATTN_ROWS - 1) / ATTN_ROWS; /* of a KV head's query heads */
    const uint32_t per_tile = m->num_kv_heads * parts, units = f->n_tiles * per_tile;
    for (uint32_t u = team_take(w); u < units; u = team_take(w)) {
        /* the last tiles of a sequence see most positions: start with them */
        const tile_t *tile = &f->tiles[f->n_tiles - 1 - u / per_tile];
        uint32_t kv_head = u % per_tile / parts, part = u % parts;
        uint32_t first = part * ATTN_ROWS, n = LK_MIN(group - first, ATTN_ROWS);
        attend(f, w, tile, kv_head, kv_head * group + first, n);
    }
}
