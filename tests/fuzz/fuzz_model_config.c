/*
 * Fuzz target: config.json, then optionally a NUL byte and generation_config.json. Whatever is
 * accepted must keep the promises that executors build on.
 */
#include "base/check.h"
#include "engine_core/exec/model_tensors.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static lk_status_t check_tensor(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    size_t *n = ctx;
    CHECK(strlen(tensor->name) <= TENSOR_NAME_MAX && tensor->numel > 0);
    CHECK(tensor->layer < MODEL_MAX_LAYERS && tensor->expert < 1024);
    return ++*n < 10000 ? LK_OK : lk_error_set(err, LK_ERR_CANCELED, "enough");
}

static void check_promises(const model_config_t *c)
{
    CHECK(c->num_layers >= 1 && c->num_layers <= MODEL_MAX_LAYERS);
    CHECK(c->num_kv_heads >= 1 && c->num_heads % c->num_kv_heads == 0);
    CHECK(c->head_dim >= 2 && c->head_dim % 2 == 0 && c->head_dim <= 512);
    CHECK(c->hidden_size >= 1 && c->intermediate_size >= 1 && c->vocab_size >= 2);
    CHECK(c->rms_norm_eps > 0 && c->rope_theta >= 1 && !c->mlp_bias);
    CHECK(c->n_eos <= MODEL_MAX_EOS);
    CHECK(c->num_experts_per_tok <= c->num_experts);
    CHECK((c->arch == ARCH_QWEN3_MOE) == (c->num_experts > 0));
    for (uint32_t i = 0; i < c->n_eos; i++) {
        CHECK(c->eos_token_ids[i] < c->vocab_size);
    }
    for (uint32_t i = 0; i < MODEL_MAX_LAYERS; i++) {
        CHECK(!c->moe_layer[i] || (c->num_experts > 0 && i < c->num_layers));
    }
    size_t n = 0;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = model_tensors_each(c, check_tensor, &n, &err);
    CHECK(status == LK_OK || status == LK_ERR_CANCELED);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    const char *end = size > 0 ? memchr(text, '\0', size) : NULL;
    size_t len = end != NULL ? (size_t)(end - text) : size;
    const char *generation = end != NULL ? end + 1 : NULL;
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status =
        model_config_parse(text, len, generation, end != NULL ? size - len - 1 : 0, &config, &err);
    if (status == LK_OK) {
        check_promises(&config);
    } else {
        CHECK(err.status == status && err.text[0] != '\0');
    }
    return 0;
}
