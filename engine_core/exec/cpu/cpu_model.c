#include "engine_core/exec/cpu/cpu_model.h"

#include "base/check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cpu_copy {
    const weight_slot_t *slot;
    float *to;
};

/* Walks the model's names. The first walk counts the copies, the second makes room in `copied`. */
typedef struct {
    cpu_model_t *model;
    const weight_table_t *weights; /* NULL: only counts the copies */
    bool incoming;
    size_t floats; /* taken so far */
    lk_error_t *err;
    bool failed;
} walk_t;

static const weight_slot_t *find(walk_t *w, const char *name, uint64_t rows, uint64_t cols)
{
    if (w->weights == NULL) {
        return NULL;
    }
    const weight_slot_t *slot = weight_table_find(w->weights, name);
    if (slot != NULL && w->incoming) {
        slot = weight_table_incoming(w->weights, slot);
    }
    if (slot == NULL || slot->shape[0] != rows || (cols != 0) != (slot->ndim == 2) ||
        (cols != 0 && slot->shape[1] != cols)) {
        if (!w->failed) {
            lk_error_set(w->err, LK_ERR_INTERNAL,
                         "%s: the weight table has no such tensor of %llu x %llu", name,
                         (unsigned long long)rows, (unsigned long long)cols);
        }
        w->failed = true;
        return NULL;
    }
    return slot;
}

static const void *matrix(walk_t *w, uint64_t rows, uint64_t cols, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static const void *matrix(walk_t *w, uint64_t rows, uint64_t cols, const char *fmt, ...)
{
    char name[TENSOR_NAME_MAX + 1];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    const weight_slot_t *slot = find(w, name, rows, cols);
    return slot != NULL ? slot->data : NULL;
}

/* A float32 copy; cols 0 for a vector. */
static const float *copied(walk_t *w, uint64_t rows, uint64_t cols, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static const float *copied(walk_t *w, uint64_t rows, uint64_t cols, const char *fmt, ...)
{
    char name[TENSOR_NAME_MAX + 1];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    const weight_slot_t *slot = find(w, name, rows, cols);
    cpu_model_t *m = w->model;
    float *to = NULL;
    if (m->copied != NULL) {
        to = m->copied + w->floats;
        m->copies[m->n_copies] = (struct cpu_copy){slot, to};
    }
    m->n_copies++;
    w->floats += (rows * LK_MAX(cols, 1) + 15) / 16 * 16;
    return to;
}

static void walk_mlp(walk_t *w, mlp_weights_t *out, const char *prefix, uint64_t inter)
{
    uint64_t hidden = w->model->config.hidden_size;
    out->gate = matrix(w, inter, hidden, "%s.gate_proj.weight", prefix);
    out->up = matrix(w, inter, hidden, "%s.up_proj.weight", prefix);
    out->down = matrix(w, hidden, inter, "%s.down_proj.weight", prefix);
}

static void walk_layer(walk_t *w, uint32_t l)
{
    cpu_model_t *m = w->model;
    const model_config_t *c = &m->config;
    cpu_layer_t *out = &m->layers[l];
    const uint64_t q = (uint64_t)c->num_heads * c->head_dim, hidden = c->hidden_size;
    const uint64_t kv = (uint64_t)c->num_kv_heads * c->head_dim;
    char layer[64], prefix[128];
    snprintf(layer, sizeof layer, "model.layers.%u", l);
    out->attn_norm = copied(w, hidden, 0, "%s.input_layernorm.weight", layer);
    out->mlp_norm = copied(w, hidden, 0, "%s.post_attention_layernorm.weight", layer);
    out->q = matrix(w, q, hidden, "%s.self_attn.q_proj.weight", layer);
    out->k = matrix(w, kv, hidden, "%s.self_attn.k_proj.weight", layer);
    out->v = matrix(w, kv, hidden, "%s.self_attn.v_proj.weight", layer);
    out->o = matrix(w, hidden, q, "%s.self_attn.o_proj.weight", layer);
    if (c->qkv_bias) {
        out->q_bias = copied(w, q, 0, "%s.self_attn.q_proj.bias", layer);
        out->k_bias = copied(w, kv, 0, "%s.self_attn.k_proj.bias", layer);
        out->v_bias = copied(w, kv, 0, "%s.self_attn.v_proj.bias", layer);
    }
    if (c->o_bias) {
        out->o_bias = copied(w, hidden, 0, "%s.self_attn.o_proj.bias", layer);
    }
    if (c->qk_norm) {
        out->q_norm = copied(w, c->head_dim, 0, "%s.self_attn.q_norm.weight", layer);
        out->k_norm = copied(w, c->head_dim, 0, "%s.self_attn.k_norm.weight", layer);
    }
    if (c->num_experts == 0 || !c->moe_layer[l]) {
        snprintf(prefix, sizeof prefix, "%s.mlp", layer);
        walk_mlp(w, &out->mlp, prefix, c->intermediate_size);
        return;
    }
    out->router = copied(w, c->num_experts, hidden, "%s.mlp.gate.weight", layer);
    mlp_weights_t *experts = &m->experts[(size_t)l * m->n_local];
    out->experts = experts;
    for (uint32_t e = 0; e < m->n_local; e++) {
        snprintf(prefix, sizeof prefix, "%s.mlp.experts.%u", layer, m->first_expert + e);
        walk_mlp(w, &experts[e], prefix, c->moe_intermediate_size);
    }
}

static void walk(walk_t *w)
{
    cpu_model_t *m = w->model;
    const model_config_t *c = &m->config;
    m->n_copies = 0;
    w->floats = 0;
    m->embed = matrix(w, c->vocab_size, c->hidden_size, "model.embed_tokens.weight");
    m->head = c->tie_word_embeddings ? m->embed
                                     : matrix(w, c->vocab_size, c->hidden_size, "lm_head.weight");
    m->final_norm = copied(w, c->hidden_size, 0, "model.norm.weight");
    for (uint32_t l = 0; l < c->num_layers; l++) {
        walk_layer(w, l);
    }
}

uint64_t cpu_model_copied_bytes(const model_config_t *config)
{
    cpu_model_t model = {.config = *config};
    model.layers = calloc(config->num_layers, sizeof *model.layers);
    CHECK(model.layers != NULL);
    walk_t w = {.model = &model};
    walk(&w);
    free(model.layers);
    return w.floats * sizeof(float);
}

void cpu_model_inv_freq(const model_config_t *c, float *out)
{
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        float power = (float)pow(c->rope_theta, (float)(2 * i) / (float)c->head_dim);
        float freq = 1.0f / power;
        if (c->rope_type == ROPE_LLAMA3) {
            const double original = c->rope_original_max_position;
            const double low = c->rope_low_freq_factor, high = c->rope_high_freq_factor;
            double wavelength = 2 * M_PI / freq;
            if (wavelength > original / low) {
                freq = (float)(freq / (double)c->rope_factor);
            } else if (wavelength >= original / high) {
                double smooth = (original / wavelength - low) / (high - low);
                freq = (float)((1 - smooth) * freq / (double)c->rope_factor + smooth * freq);
            }
        }
        out[i] = freq;
    }
}

lk_status_t cpu_model_init(cpu_model_t *self, const model_config_t *config,
                           const weight_table_t *weights, bool incoming, uint32_t ep_rank,
                           uint32_t ep_size, lk_error_t *err)
{
    *self = (cpu_model_t){.config = *config, .dtype = weight_table_dtype(weights)};
    if (config->num_experts > 0) {
        self->first_expert = ep_first_expert(config->num_experts, ep_rank, ep_size);
        self->n_local =
            ep_first_expert(config->num_experts, ep_rank + 1, ep_size) - self->first_expert;
    }
    self->layers = calloc(config->num_layers, sizeof *self->layers);
    self->experts = calloc((size_t)config->num_layers * self->n_local + 1, sizeof *self->experts);
    self->inv_freq = calloc(config->head_dim / 2 + 1, sizeof *self->inv_freq);
    if (self->layers == NULL || self->experts == NULL || self->inv_freq == NULL) {
        goto err_memory;
    }
    walk_t w = {.model = self, .weights = weights, .incoming = incoming, .err = err};
    walk(&w);
    if (w.failed) {
        goto err_fini;
    }
    self->copies = calloc(self->n_copies, sizeof *self->copies);
    self->copied = aligned_alloc(64, w.floats * sizeof(float));
    if (self->copies == NULL || self->copied == NULL) {
        goto err_memory;
    }
    walk(&w);
    cpu_model_inv_freq(config, self->inv_freq);
    if (cpu_model_refresh(self, err) < 0) {
        goto err_fini;
    }
    return LK_OK;

err_memory:
    lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the model's tables");
err_fini:
    cpu_model_fini(self);
    return err != NULL ? err->status : LK_ERR_INTERNAL;
}

void cpu_model_fini(cpu_model_t *self)
{
    free(self->layers);
    free(self->experts);
    free(self->inv_freq);
    free(self->copies);
    free(self->copied);
    *self = (cpu_model_t){0};
}

lk_status_t cpu_model_refresh_some(cpu_model_t *self, size_t *at, lk_error_t *err)
{
    if (*at == self->n_copies) {
        return LK_OK;
    }
    const struct cpu_copy *c = &self->copies[(*at)++];
    lk_status_t rc =
        dtype_convert(c->to, LK_DTYPE_F32, c->slot->data, self->dtype, (size_t)c->slot->numel);
    if (rc < 0) {
        return lk_error_set(err, rc, "%s: can't be converted to float32", c->slot->name);
    }
    return LK_INPROGRESS;
}

lk_status_t cpu_model_refresh(cpu_model_t *self, lk_error_t *err)
{
    size_t at = 0;
    lk_status_t status;
    do {
        status = cpu_model_refresh_some(self, &at, err);
    } while (status == LK_INPROGRESS);
    return status;
}
