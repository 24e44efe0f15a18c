#include "engine_core/exec/cpu/forward_impl.h"

#include "base/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Products of one forward_head call, so that the engine's loop is served between. */
#define HEAD_OPERATIONS (1ull << 31)
#define HEAD_COLUMNS    1024 /* of a slice, at least and in multiples */

static uint32_t padded_slots(uint32_t block_size)
{
    return (block_size + KV_SLOT_ALIGN - 1) / KV_SLOT_ALIGN * KV_SLOT_ALIGN;
}

static uint64_t layer_block_bytes(const executor_config_t *config)
{
    const model_config_t *m = config->model;
    return 2ull * m->num_kv_heads * padded_slots(config->block_size) * m->head_dim *
           dtype_bytes(config->dtype);
}

uint64_t forward_kv_block_bytes(const executor_config_t *config)
{
    return layer_block_bytes(config) * config->model->num_layers;
}

static uint32_t widest(const model_config_t *m)
{
    uint32_t q = m->num_heads * m->head_dim;
    return LK_MAX(LK_MAX(m->hidden_size, q), m->intermediate_size);
}

static bool has_dense_layer(const model_config_t *m)
{
    for (uint32_t l = 0; l < m->num_layers; l++) {
        if (m->num_experts == 0 || !m->moe_layer[l]) {
            return true;
        }
    }
    return false;
}

static void list_buffers(void *arg, arena_t *a)
{
    forward_t *f = arg;
    const model_config_t *m = &f->model->config;
    const size_t t = f->max_tokens, esz = compute_bytes(&f->compute);
    const uint32_t q = m->num_heads * m->head_dim, kv = m->num_kv_heads * m->head_dim;
    const uint32_t inter = has_dense_layer(m) ? m->intermediate_size : 0;
    f->token_seq = arena_take(a, t, sizeof *f->token_seq);
    f->token_pos = arena_take(a, t, sizeof *f->token_pos);
    f->row_token = arena_take(a, t, sizeof *f->row_token);
    f->tiles = arena_take(a, t, sizeof *f->tiles);
    f->h = arena_take(a, t * m->hidden_size, sizeof *f->h);
    f->x = arena_take(a, t * LK_MAX(m->hidden_size, q), esz);
    f->q = arena_take(a, t * q, sizeof *f->q);
    f->k = arena_take(a, t * kv, sizeof *f->k);
    f->v = arena_take(a, t * kv, sizeof *f->v);
    f->cos = arena_take(a, t * (m->head_dim / 2), sizeof *f->cos);
    f->sin = arena_take(a, t * (m->head_dim / 2), sizeof *f->sin);
    f->gate = arena_take(a, t * inter, sizeof *f->gate);
    f->up = arena_take(a, t * inter, sizeof *f->up);
    f->act = arena_take(a, t * inter, esz);
    f->router_in = arena_take(a, m->num_experts > 0 ? t * m->hidden_size : 0, sizeof *f->router_in);
    f->router = arena_take(a, t * m->num_experts, sizeof *f->router);
    f->scratch = arena_take(a, f->threads, sizeof *f->scratch);
    for (uint32_t i = 0; i < f->threads; i++) {
        scratch_t s;
        s.row = arena_take(a, widest(m), sizeof *s.row);
        s.scores = arena_take(a, ATTN_ROWS * f->ld_scores, sizeof *s.scores);
        s.out = arena_take(a, (size_t)ATTN_ROWS * m->head_dim, sizeof *s.out);
        if (f->scratch != NULL) {
            f->scratch[i] = s;
        }
    }
}

static void list_kv(void *arg, arena_t *a)
{
    forward_t *f = arg;
    f->kv = arena_take(a, (size_t)f->model->config.num_layers * f->num_blocks, f->block_bytes);
}

static void list_logits(void *arg, arena_t *a)
{
    forward_t *f = arg;
    f->logits = arena_take(a, (size_t)f->max_rows * f->model->config.vocab_size, sizeof(float));
}

lk_status_t forward_new(const forward_options_t *o, forward_t **out, lk_error_t *err)
{
    const executor_config_t *config = o->config;
    const model_config_t *m = config->model;
    forward_t *f = calloc(1, sizeof *f);
    if (f == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the forward pass");
    }
    f->model = o->model;
    f->team = o->team;
    f->compute = (compute_t){.kernels = o->kernels, .bf16 = config->dtype == LK_DTYPE_BF16};
    f->threads = config->threads;
    f->max_seqs = config->max_seqs;
    f->max_tokens = config->max_tokens;
    f->max_rows =
        config->max_rows > 0 ? LK_MIN(config->max_rows, config->max_tokens) : config->max_tokens;
    f->num_blocks = config->num_blocks;
    f->block_size = config->block_size;
    f->slots = padded_slots(config->block_size);
    const uint64_t room = (uint64_t)config->num_blocks * config->block_size;
    f->max_positions = (uint32_t)LK_MIN(room, m->max_position_embeddings);
    f->ld_scores = (size_t)(f->max_positions + f->block_size - 1) / f->block_size * f->slots;
    f->head_bytes = (size_t)f->slots * m->head_dim * dtype_bytes(config->dtype);
    f->block_bytes = (size_t)layer_block_bytes(config);
    if (arena_init(&f->arena, list_buffers, f, "step buffers", err) < 0 ||
        arena_init(&f->kv_arena, list_kv, f, "KV blocks", err) < 0 ||
        arena_init(&f->logits_arena, list_logits, f, "logits", err) < 0) {
        forward_destroy(&f);
        return LK_ERR_NO_MEMORY;
    }
    *out = f;
    return LK_OK;
}

void forward_destroy(forward_t **self_p)
{
    forward_t *f = *self_p;
    if (f == NULL) {
        return;
    }
    *self_p = NULL;
    arena_fini(&f->arena);
    arena_fini(&f->kv_arena);
    arena_fini(&f->logits_arena);
    free(f);
}

/* ---- the batch ---- */

static lk_status_t check_seq(const forward_t *f, size_t i, const exec_seq_t *s, lk_error_t *err)
{
    if (s->n == 0 || s->n_logits > s->n) {
        return lk_error_set(err, LK_ERR_INVALID, "sequence %zu: %u positions, logits of %u", i,
                            s->n, s->n_logits);
    }
    if ((uint64_t)s->start + s->n > f->max_positions) {
        return lk_error_set(err, LK_ERR_INVALID, "sequence %zu: positions %u + %u exceed %u", i,
                            s->start, s->n, f->max_positions);
    }
    for (uint32_t p = s->start; p < s->start + s->n; p++) {
        if (s->tokens[p] >= f->model->config.vocab_size) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "sequence %zu: token %u at position %u is not in "
                                "the vocabulary of %u",
                                i, s->tokens[p], p, f->model->config.vocab_size);
        }
    }
    for (uint32_t b = 0; b <= (s->start + s->n - 1) / f->block_size; b++) {
        if (s->blocks[b] >= f->num_blocks) {
            return lk_error_set(err, LK_ERR_INVALID, "sequence %zu: block %u is %u of %u", i, b,
                                s->blocks[b], f->num_blocks);
        }
    }
    return LK_OK;
}

lk_status_t forward_begin(forward_t *f, const exec_batch_t *batch, lk_error_t *err)
{
    if (batch->n_seqs > f->max_seqs) {
        return lk_error_set(err, LK_ERR_INVALID, "batch of %zu sequences exceeds %u", batch->n_seqs,
                            f->max_seqs);
    }
    uint64_t tokens = 0, rows = 0;
    for (size_t i = 0; i < batch->n_seqs; i++) {
        LK_RETURN_IF_ERROR(check_seq(f, i, &batch->seqs[i], err));
        tokens += batch->seqs[i].n;
        rows += batch->seqs[i].n_logits;
    }
    if (tokens > f->max_tokens) {
        return lk_error_set(err, LK_ERR_INVALID, "batch of %llu tokens exceeds %u",
                            (unsigned long long)tokens, f->max_tokens);
    }
    if (rows > f->max_rows) {
        return lk_error_set(err, LK_ERR_INVALID, "batch of %llu rows of logits exceeds %u",
                            (unsigned long long)rows, f->max_rows);
    }
    f->seqs = batch->seqs;
    f->n_seqs = (uint32_t)batch->n_seqs;
    f->n_tokens = f->n_rows = f->n_tiles = f->head_done = 0;
    const uint32_t per_tile = attention_tile_positions(&f->model->config);
    for (uint32_t i = 0; i < f->n_seqs; i++) {
        const exec_seq_t *s = &f->seqs[i];
        for (uint32_t j = 0; j < s->n; j++, f->n_tokens++) {
            if (j % per_tile == 0) {
                f->tiles[f->n_tiles++] = (tile_t){i, f->n_tokens, LK_MIN(per_tile, s->n - j)};
            }
            if (j >= s->n - s->n_logits) {
                f->row_token[f->n_rows++] = f->n_tokens;
            }
            f->token_seq[f->n_tokens] = i;
            f->token_pos[f->n_tokens] = s->start + j;
        }
    }
    return LK_OK;
}

uint32_t forward_tokens(const forward_t *f)
{
    return f->n_tokens;
}

uint32_t forward_rows(const forward_t *f)
{
    return f->n_rows;
}

const void *forward_expert_input(const forward_t *f)
{
    return f->x;
}

const float *forward_router(const forward_t *f)
{
    return f->router;
}

float *forward_residual(forward_t *f)
{
    return f->h;
}

const float *forward_logits(const forward_t *f)
{
    return f->logits;
}

/* ---- phases: each is entered by every worker; units are tokens, rows or tiles ---- */

static void phase_embed(forward_t *f, worker_t *w)
{
    const cpu_model_t *m = f->model;
    const uint32_t hidden = m->config.hidden_size, half = m->config.head_dim / 2;
    for (uint32_t t = team_take(w); t < f->n_tokens; t = team_take(w)) {
        const uint32_t pos = f->token_pos[t];
        const uint32_t id = f->seqs[f->token_seq[t]].tokens[pos];
        float *h = f->h + (size_t)t * hidden;
        if (f->compute.bf16) {
            const uint16_t *row = (const uint16_t *)m->embed + (size_t)id * hidden;
            for (uint32_t i = 0; i < hidden; i++) {
                uint32_t bits = (uint32_t)row[i] << 16;
                memcpy(&h[i], &bits, sizeof bits);
            }
        } else {
            memcpy(h, (const float *)m->embed + (size_t)id * hidden, hidden * sizeof *h);
        }
        /* the angle in float32, as Transformers has it */
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)pos * m->inv_freq[i];
            f->cos[(size_t)t * half + i] = cosf(angle);
            f->sin[(size_t)t * half + i] = sinf(angle);
        }
    }
}

/* x[i] = norm(h[rows[i]]) as input of a product; rows NULL: row i itself. exact: NULL, or float32
 * [n, hidden] for the values before rounding. */
static void phase_norm(forward_t *f, worker_t *w, const float *weight, const uint32_t *rows,
                       uint32_t n, float *exact)
{
    const model_config_t *m = &f->model->config;
    const uint32_t hidden = m->hidden_size;
    for (uint32_t i = team_take(w); i < n; i = team_take(w)) {
        float *tmp = exact != NULL ? exact + (size_t)i * hidden : f->scratch[w->id].row;
        const float *h = f->h + (size_t)(rows != NULL ? rows[i] : i) * hidden;
        f->compute.kernels->rms_norm(h, weight, m->rms_norm_eps, hidden, tmp);
        compute_input(&f->compute, tmp, hidden,
                      (uint8_t *)f->x + (size_t)i * hidden * compute_bytes(&f->compute));
    }
}

static void phase_output(forward_t *f, worker_t *w, const cpu_layer_t *l)
{
    const model_config_t *m = &f->model->config;
    const uint32_t q = m->num_heads * m->head_dim;
    const gemm_t g = {
        .x = f->x,
        .ldx = q,
        .w = l->o,
        .bias = l->o_bias,
        .y = f->h,
        .ldy = m->hidden_size,
        .m = f->n_tokens,
        .n = m->hidden_size,
        .k = q,
        .add = true,
    };
    product_run(&f->compute, w, &g, 1);
}

static void phase_mlp(forward_t *f, worker_t *w, const cpu_layer_t *l)
{
    const model_config_t *m = &f->model->config;
    const mlp_segment_t all = {.weights = &l->mlp, .row = 0, .rows = f->n_tokens};
    const mlp_t mlp = {
        .segments = &all,
        .n_segments = 1,
        .hidden = m->hidden_size,
        .inter = m->intermediate_size,
        .x = f->x,
        .ldx = m->hidden_size,
        .gate = f->gate,
        .up = f->up,
        .act = f->act,
        .y = f->h,
        .add = true,
    };
    mlp_run(&f->compute, w, &mlp);
}

static void phase_router(forward_t *f, worker_t *w, const cpu_layer_t *l)
{
    const model_config_t *m = &f->model->config;
    const compute_t exact = {.kernels = f->compute.kernels, .bf16 = false};
    const gemm_t g = {
        .x = f->router_in,
        .ldx = m->hidden_size,
        .w = l->router,
        .y = f->router,
        .ldy = m->num_experts,
        .m = f->n_tokens,
        .n = m->num_experts,
        .k = m->hidden_size,
    };
    product_run(&exact, w, &g, 1);
}

static void layer_worker(worker_t *w, void *arg)
{
    forward_t *f = arg;
    const cpu_layer_t *l = &f->model->layers[f->layer];
    if (f->layer == 0) {
        phase_embed(f, w);
        team_barrier(w);
    }
    phase_norm(f, w, l->attn_norm, NULL, f->n_tokens, NULL);
    team_barrier(w);
    attention_project(f, w, l);
    team_barrier(w);
    attention_store(f, w, l);
    team_barrier(w);
    attention_run(f, w);
    team_barrier(w);
    phase_output(f, w, l);
    team_barrier(w);
    phase_norm(f, w, l->mlp_norm, NULL, f->n_tokens, l->router != NULL ? f->router_in : NULL);
    team_barrier(w);
    if (l->router == NULL) {
        phase_mlp(f, w, l);
    } else {
        phase_router(f, w, l);
    }
}

void forward_layer(forward_t *f, uint32_t l)
{
    f->layer = l;
    if (f->n_tokens > 0) {
        team_run(f->team, layer_worker, f);
    }
}

static void head_norm_worker(worker_t *w, void *arg)
{
    forward_t *f = arg;
    phase_norm(f, w, f->model->final_norm, f->row_token, f->n_rows, NULL);
}

static void head_worker(worker_t *w, void *arg)
{
    forward_t *f = arg;
    const model_config_t *m = &f->model->config;
    const gemm_t g = {
        .x = f->x,
        .ldx = m->hidden_size,
        .w = (const uint8_t *)f->model->head +
             (size_t)f->head_done * m->hidden_size * compute_bytes(&f->compute),
        .y = f->logits + f->head_done,
        .ldy = m->vocab_size,
        .m = f->n_rows,
        .n = f->head_end - f->head_done,
        .k = m->hidden_size,
    };
    product_run(&f->compute, w, &g, 1);
}

bool forward_head(forward_t *f)
{
    const model_config_t *m = &f->model->config;
    if (f->n_rows == 0) {
        return true;
    }
    if (f->head_done == 0) {
        team_run(f->team, head_norm_worker, f);
    }
    uint64_t cols = HEAD_OPERATIONS / ((uint64_t)f->n_rows * m->hidden_size);
    cols = LK_MAX(cols / HEAD_COLUMNS * HEAD_COLUMNS, HEAD_COLUMNS);
    f->head_end = (uint32_t)LK_MIN(f->head_done + cols, m->vocab_size);
    team_run(f->team, head_worker, f);
    f->head_done = f->head_end;
    return f->head_done == m->vocab_size;
}
