#include "engine_core/engine_setup.h"
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "transfer/packed_layout.h"
#include "transfer/wte_module.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static lk_status_t check_transfer(const lk_config_t *config, engine_setup_t *out, lk_error_t *err)
{
    const char *text = config->weight_transfer_config;
    if (text[0] == '\0') {
        return LK_OK;
    }
    json_error_t json_err;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &json_err);
    const char *backend = json_string_value(json_object_get(root, "backend"));
    lk_status_t status = LK_OK;
    if (!json_is_object(root) || backend == NULL || json_object_size(root) != 1) {
        status = lk_error_set(err, LK_ERR_INVALID,
                              "--weight-transfer-config: must be {\"backend\": NAME}; available "
                              "engines: %s",
                              wte_names());
    } else {
        status = wte_open(backend, config->transfer_module_dir, &out->wte, err);
    }
    json_decref(root);
    return status;
}

/* By default the model's directory and the one beside it, but never all of a file system. */
static lk_status_t check_weight_dirs(const lk_config_t *config, engine_setup_t *out,
                                     lk_error_t *err)
{
    size_t room = sizeof out->allowed_weight_dirs;
    const char *given = config->allowed_weight_dirs;
    if (given[0] != '\0') {
        return strlen(given) < room
                   ? (snprintf(out->allowed_weight_dirs, room, "%s", given), LK_OK)
                   : lk_error_set(err, LK_ERR_TOO_LARGE, "--allowed-weight-dirs: at most %zu bytes",
                                  room - 1);
    }
    char model[PATH_MAX], parent[PATH_MAX];
    if (realpath(config->model, model) == NULL) {
        return LK_OK; /* whoever reads the model says so */
    }
    snprintf(parent, sizeof parent, "%s", model);
    char *slash = strrchr(parent, '/');
    *slash = '\0';
    snprintf(out->allowed_weight_dirs, room, "%s%s%s", model, parent[0] != '\0' ? "," : "", parent);
    return LK_OK;
}

static lk_status_t check_dtype(const lk_config_t *config, engine_setup_t *out, lk_error_t *err)
{
    const char *dtype = config->dtype;
    if (strcmp(dtype, "half") == 0 || strcmp(dtype, "float16") == 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "--dtype %s: float16 storage is not supported; use float32 or bfloat16",
                            dtype);
    }
    if (strcmp(dtype, "auto") == 0) {
        out->dtype = out->model.checkpoint_dtype == LK_DTYPE_BF16 ? LK_DTYPE_BF16 : LK_DTYPE_F32;
    } else {
        out->dtype = strcmp(dtype, "bfloat16") == 0 ? LK_DTYPE_BF16 : LK_DTYPE_F32;
    }
    return LK_OK;
}

static lk_status_t check_lengths(const lk_config_t *config, engine_setup_t *out, lk_error_t *err)
{
    uint32_t of_model = out->model.max_position_embeddings;
    if (config->max_model_len > of_model) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--max-model-len %llu: the model has %u positions "
                            "(max_position_embeddings)",
                            (unsigned long long)config->max_model_len, of_model);
    }
    out->max_model_len = config->max_model_len != 0 ? (uint32_t)config->max_model_len : of_model;
    if (out->max_model_len < 2) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--max-model-len %u: a prompt and a token need two positions",
                            out->max_model_len);
    }
    return LK_OK;
}

static uint32_t default_threads(const lk_config_t *config)
{
    if (config->threads != 0) {
        return (uint32_t)config->threads;
    }
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long share = cores / (long)config->data_parallel_size;
    return share > 1 ? (uint32_t)share : 1;
}

lk_status_t engine_setup_check(const lk_config_t *config, engine_setup_t *out, lk_error_t *err)
{
    engine_setup_t setup = {.block_size = (uint32_t)config->block_size};
    if (config->data_parallel_rank >= config->data_parallel_size) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--data-parallel-rank %llu: --data-parallel-size is %llu",
                            (unsigned long long)config->data_parallel_rank,
                            (unsigned long long)config->data_parallel_size);
    }
    setup.ops = executor_find(config->device);
    if (setup.ops == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "--device %s: this build has no such executor; use cpu",
                            config->device);
    }
    LK_RETURN_IF_ERROR(check_transfer(config, &setup, err));
    LK_RETURN_IF_ERROR(check_weight_dirs(config, &setup, err));
    LK_RETURN_IF_ERROR(model_config_load(config->model, &setup.model, err));
    LK_RETURN_IF_ERROR(check_dtype(config, &setup, err));
    LK_RETURN_IF_ERROR(check_lengths(config, &setup, err));
    setup.threads = default_threads(config);
    setup.shadow = strcmp(config->weight_swap, "shadow") == 0;
    if (setup.shadow && setup.ops->sink != NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "--weight-swap shadow: --device %s has one set of weights; use inplace",
                            config->device);
    }
    if (!config->weight_digests && setup.ops->sink == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "--no-weight-digests: --device %s always digests", config->device);
    }
    setup.available_bytes = memory_available();
    /* one that starts again finds the others with their memory taken */
    setup.sharing_ranks = config->generation > 1 ? 1 : (uint32_t)config->data_parallel_size;
    setup.lockstep = setup.model.num_experts > 0 && config->enable_expert_parallel &&
                     config->data_parallel_size > 1;
    *out = setup;
    return LK_OK;
}

/* ---- sizes ---- */

static uint64_t blocks_for(uint64_t positions, uint32_t block_size)
{
    return (positions + block_size - 1) / block_size;
}

/* More blocks than all requests at their longest could hold, and as many again for cached
 * prefixes, are of no use. */
static uint64_t useful_blocks(const engine_setup_t *self, const lk_config_t *config)
{
    uint64_t per_request = blocks_for(self->max_model_len, self->block_size);
    return 2 * per_request * config->max_num_seqs;
}

static lk_status_t size_kv(engine_setup_t *self, const lk_config_t *config,
                           const executor_config_t *exec, lk_error_t *err)
{
    uint64_t bytes = self->ops->kv_block_bytes(exec);
    uint64_t blocks = config->num_gpu_blocks_override;
    if (blocks == 0) {
        blocks = LK_MIN(config->kv_cache_memory_bytes / bytes, useful_blocks(self, config));
    }
    if (blocks == 0 || blocks > INT32_MAX) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--kv-cache-memory-bytes %llu: %llu blocks of %llu bytes; 1 to %d are "
                            "possible",
                            (unsigned long long)config->kv_cache_memory_bytes,
                            (unsigned long long)blocks, (unsigned long long)bytes, INT32_MAX);
    }
    uint64_t positions = blocks * self->block_size;
    if (positions < self->max_model_len && config->max_model_len != 0) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "--max-model-len %u: the KV memory holds %llu positions (%llu blocks); "
            "raise --kv-cache-memory-bytes to %llu or lower the length",
            self->max_model_len, (unsigned long long)positions, (unsigned long long)blocks,
            (unsigned long long)(blocks_for(self->max_model_len, self->block_size) * bytes));
    }
    if (positions < self->max_model_len) {
        LK_WARN("requests are limited to %llu of the model's %u positions: %llu KV blocks of %u "
                "hold no more",
                (unsigned long long)positions, self->max_model_len, (unsigned long long)blocks,
                self->block_size);
        self->max_model_len = (uint32_t)positions;
    }
    self->num_blocks = (uint32_t)blocks;
    return LK_OK;
}

/* The logits of prompts take at most this memory, whatever the vocabulary. */
#define PROMPT_LOGITS_BYTES (128ull << 20)

static uint32_t prompt_rows(const engine_setup_t *self, const lk_config_t *config)
{
    uint64_t rows = PROMPT_LOGITS_BYTES / (self->model.vocab_size * sizeof(float));
    return (uint32_t)LK_MIN(LK_MAX(rows, 1), config->max_num_batched_tokens);
}

/* A bucket waits in a staging buffer if any of its tensors has another dtype here, or is another
 * rank's. */
static uint64_t staging_bytes(const engine_setup_t *self)
{
    if (self->wte == NULL) {
        return 0;
    }
    uint64_t whole = weight_table_size(&self->model, LK_DTYPE_F32, 0, 1);
    return LK_MIN(whole, (uint64_t)PACKED_BUFFER_SIZE_DEFAULT);
}

/* In place what does not fit is a warning only: KV and staging cost nothing before they are used.
 * Who asks for a second set has a choice, and is told before hours of work are at stake. */
static lk_status_t check_memory(engine_setup_t *self, const executor_config_t *exec,
                                lk_error_t *err)
{
    uint64_t set = self->ops->weight_bytes(exec);
    self->memory = (memory_sum_t){
        .weights = set,
        .shadow = self->shadow ? set : 0,
        .staging = staging_bytes(self),
        .kv = self->ops->kv_block_bytes(exec) * self->num_blocks,
    };
    char text[MEMORY_SUM_TEXT];
    memory_sum_text(&self->memory, text);
    LK_INFO("memory: %s", text);
    lk_error_t why;
    lk_status_t status =
        memory_sum_check(&self->memory, self->available_bytes, self->sharing_ranks, &why);
    if (status < 0 && self->shadow) {
        return lk_error_set(err, status,
                            "--weight-swap shadow: %s. Use --weight-swap inplace or a smaller "
                            "--kv-cache-memory-bytes",
                            why.text);
    }
    if (status < 0) {
        LK_WARN("this may not fit into memory: %s", why.text);
    }
    return LK_OK;
}

lk_status_t engine_setup_open(engine_setup_t *self, const lk_config_t *config, ep_t ep,
                              lk_error_t *err)
{
    executor_config_t exec = {.model_dir = config->model,
                              .model = &self->model,
                              .dtype = self->dtype,
                              .shadow = self->shadow,
                              .load_dummy = strcmp(config->load_format, "dummy") == 0,
                              .dummy_seed = config->seed,
                              .block_size = self->block_size,
                              .max_seqs = (uint32_t)config->max_num_seqs,
                              .max_tokens = (uint32_t)config->max_num_batched_tokens,
                              .threads = self->threads,
                              .device_index =
                                  (uint32_t)(config->device_index + config->data_parallel_rank),
                              .no_digests = !config->weight_digests,
                              .ep = ep};
    self->prompt_rows = prompt_rows(self, config);
    exec.max_rows =
        (uint32_t)LK_MIN(config->max_num_seqs + self->prompt_rows, config->max_num_batched_tokens);
    LK_RETURN_IF_ERROR(size_kv(self, config, &exec, err));
    exec.num_blocks = self->num_blocks;
    LK_RETURN_IF_ERROR(check_memory(self, &exec, err));
    return self->ops->open(&exec, &self->executor, err);
}

void engine_setup_fini(engine_setup_t *self)
{
    if (self->executor != NULL) {
        self->ops->close(self->executor);
        self->executor = NULL;
    }
}
