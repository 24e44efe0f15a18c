#include "examples/demo/demo_weights.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"
#include "engine_core/exec/model_tensors.h"
#include "transfer/safetensors.h"

#include <stdlib.h>
#include <string.h>

#define SEED_BASE 1000u /* so that no pushed set equals the checkpoint made with a small seed */

#define CHUNK 4096 /* values converted together */

struct demo_weights {
    model_config_t config;
    bool perturb;
    safetensors_t *base; /* with perturb */
    tensor_desc_t *descs;
    model_tensor_t *tensors;
    size_t count, cap;
    uint64_t bytes;
};

static lk_status_t collect(void *ctx, const model_tensor_t *t, lk_error_t *err)
{
    demo_weights_t *self = ctx;
    if (self->count == self->cap) {
        size_t cap = self->cap == 0 ? 256 : self->cap * 2;
        model_tensor_t *tensors = realloc(self->tensors, cap * sizeof *tensors);
        if (tensors == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the tensor list");
        }
        self->tensors = tensors;
        self->cap = cap;
    }
    self->tensors[self->count] = *t;
    self->tensors[self->count].name = strdup(t->name);
    CHECK(self->tensors[self->count].name != NULL);
    self->bytes += t->numel * dtype_bytes(LK_DTYPE_BF16);
    self->count++;
    return LK_OK;
}

lk_status_t demo_weights_open(const char *model_dir, bool perturb, demo_weights_t **out,
                              lk_error_t *err)
{
    demo_weights_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->perturb = perturb;
    lk_status_t status = model_config_load(model_dir, &self->config, err);
    if (status == LK_OK) {
        status = model_tensors_each(&self->config, collect, self, err);
    }
    if (status == LK_OK && perturb) {
        status = safetensors_open(model_dir, &self->base, err);
    }
    if (status != LK_OK) {
        demo_weights_close(&self);
        return status;
    }
    self->descs = calloc(self->count, sizeof *self->descs);
    CHECK(self->descs != NULL);
    for (size_t i = 0; i < self->count; i++) {
        const model_tensor_t *t = &self->tensors[i];
        self->descs[i] = (tensor_desc_t){.name = t->name, .dtype = LK_DTYPE_BF16, .ndim = t->ndim};
        memcpy(self->descs[i].shape, t->shape, sizeof t->shape);
    }
    *out = self;
    return LK_OK;
}

void demo_weights_close(demo_weights_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    demo_weights_t *self = *self_p;
    for (size_t i = 0; i < self->count; i++) {
        free((char *)self->tensors[i].name);
    }
    free(self->tensors);
    free(self->descs);
    safetensors_close(&self->base);
    free(self);
    *self_p = NULL;
}

const model_config_t *demo_weights_config(const demo_weights_t *self)
{
    return &self->config;
}

size_t demo_weights_count(const demo_weights_t *self)
{
    return self->count;
}

const tensor_desc_t *demo_weights_descs(const demo_weights_t *self)
{
    return self->descs;
}

uint64_t demo_weights_bytes(const demo_weights_t *self)
{
    return self->bytes;
}

/* The checkpoint's value times 1 + d, d uniform in [-0.02, 0.02), rounded to bfloat16. */
static lk_status_t perturbed(const demo_weights_t *self, const model_tensor_t *t, uint64_t k,
                             uint16_t *out, lk_error_t *err)
{
    const safetensors_entry_t *e = safetensors_find(self->base, t->name);
    if (e == NULL) {
        return lk_error_set(err, LK_ERR_NOT_FOUND, "the checkpoint has no %s", t->name);
    }
    uint64_t key = lk_mix64(lk_hash64(t->name, strlen(t->name), k));
    size_t size = dtype_bytes(e->desc.dtype);
    for (uint64_t first = 0; first < t->numel; first += CHUNK) {
        float base[CHUNK];
        size_t n = (size_t)LK_MIN(t->numel - first, CHUNK);
        LK_RETURN_IF_ERROR(dtype_convert(base, LK_DTYPE_F32, (const char *)e->data + first * size,
                                         e->desc.dtype, n));
        for (size_t i = 0; i < n; i++) {
            float d = (float)(lk_mix64(key + first + i) >> 40) * 0x1p-24f * 0.04f - 0.02f;
            out[first + i] = lk_f32_to_bf16(base[i] * (1.0f + d));
        }
    }
    return LK_OK;
}

lk_status_t demo_weights_tensor(const demo_weights_t *self, size_t i, uint64_t k, void *out,
                                lk_error_t *err)
{
    CHECK(i < self->count && k > 0);
    const model_tensor_t *t = &self->tensors[i];
    if (self->perturb) {
        return perturbed(self, t, k, out, err);
    }
    lk_status_t status = model_tensor_random(t, SEED_BASE + k, LK_DTYPE_BF16, 0, t->numel, out);
    return status == LK_OK ? LK_OK
                           : lk_error_set(err, status, "%s could not be generated", t->name);
}
