#include "engine_core/exec/model_maker.h"

#include "base/check.h"
#include "base/file.h"
#include "transfer/safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *name, *class_name;
} archs[] = {
    [ARCH_LLAMA] = {"llama", "LlamaForCausalLM"},
    [ARCH_QWEN2] = {"qwen2", "Qwen2ForCausalLM"},
    [ARCH_QWEN3] = {"qwen3", "Qwen3ForCausalLM"},
    [ARCH_QWEN3_MOE] = {"qwen3_moe", "Qwen3MoeForCausalLM"},
};

void model_maker_init(model_maker_t *self, model_arch_t arch)
{
    *self = (model_maker_t){
        .arch = arch,
        .dtype = LK_DTYPE_BF16,
        .tie_word_embeddings = arch != ARCH_QWEN3_MOE,
        .norm_topk_prob = true,
        .rope_theta = arch == ARCH_LLAMA ? 500000.0f : 1000000.0f,
        .num_layers = 2,
        .hidden_size = 64,
        .intermediate_size = 160,
        .num_heads = 4,
        .num_kv_heads = 2,
        .head_dim = 16,
        .vocab_size = 512,
        .max_position_embeddings = 2048,
        .num_experts = 8,
        .num_experts_per_tok = 2,
        .moe_intermediate_size = 48,
        .decoder_sparse_step = 1,
        .bos_token_id = 256,
        .eos_token_id = 257,
        .shards = 1,
    };
}

bool model_maker_arch(const char *text, model_arch_t *out)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(archs); i++) {
        if (strcmp(text, archs[i].name) == 0) {
            *out = (model_arch_t)i;
            return true;
        }
    }
    return false;
}

lk_status_t model_maker_set(model_maker_t *self, const char *flag, uint64_t value, lk_error_t *err)
{
    static const struct {
        const char *flag;
        uint32_t least, most;
        size_t at;
    } sizes[] = {
#define X(field, flag, least, most) {flag, least, most, offsetof(model_maker_t, field)},
        MODEL_MAKER_SIZES(X)
#undef X
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(sizes); i++) {
        if (strcmp(flag, sizes[i].flag) != 0) {
            continue;
        }
        if (value < sizes[i].least || value > sizes[i].most) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: expected %u to %u, got %llu", flag,
                                sizes[i].least, sizes[i].most, (unsigned long long)value);
        }
        uint32_t narrow = (uint32_t)value;
        memcpy((char *)self + sizes[i].at, &narrow, sizeof narrow);
        return LK_OK;
    }
    return lk_error_set(err, LK_ERR_NOT_FOUND, "no size is called %s", flag);
}

/* ---- the two JSON files ---- */

static const char *truth(bool x)
{
    return x ? "true" : "false";
}

static void add_rope(const model_maker_t *self, lk_buf_t *out)
{
    lk_buf_printf(out, "  \"rope_parameters\": {\n");
    if (self->llama3_rope) {
        lk_buf_printf(out,
                      "    \"factor\": 8.0,\n    \"high_freq_factor\": 4.0,\n"
                      "    \"low_freq_factor\": 1.0,\n"
                      "    \"original_max_position_embeddings\": %u,\n",
                      LK_MAX(self->max_position_embeddings / 8, 1u));
    }
    lk_buf_printf(out, "    \"rope_theta\": %.1f,\n    \"rope_type\": \"%s\"\n  },\n",
                  (double)self->rope_theta, self->llama3_rope ? "llama3" : "default");
}

static void add_moe(const model_maker_t *self, lk_buf_t *out)
{
    lk_buf_printf(out,
                  "  \"decoder_sparse_step\": %u,\n  \"mlp_only_layers\": [],\n"
                  "  \"moe_intermediate_size\": %u,\n  \"norm_topk_prob\": %s,\n"
                  "  \"num_experts_per_tok\": %u,\n  \"num_local_experts\": %u,\n"
                  "  \"output_router_logits\": false,\n  \"router_aux_loss_coef\": 0.001,\n",
                  self->decoder_sparse_step, self->moe_intermediate_size,
                  truth(self->norm_topk_prob), self->num_experts_per_tok, self->num_experts);
}

void model_maker_config(const model_maker_t *self, lk_buf_t *config, lk_buf_t *generation)
{
    lk_buf_printf(config,
                  "{\n  \"architectures\": [\n    \"%s\"\n  ],\n  \"attention_dropout\": 0.0,\n"
                  "  \"bos_token_id\": %u,\n  \"dtype\": \"%s\",\n  \"eos_token_id\": %u,\n"
                  "  \"head_dim\": %u,\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": %u,\n"
                  "  \"initializer_range\": 0.02,\n  \"intermediate_size\": %u,\n"
                  "  \"max_position_embeddings\": %u,\n  \"model_type\": \"%s\",\n"
                  "  \"num_attention_heads\": %u,\n  \"num_hidden_layers\": %u,\n"
                  "  \"num_key_value_heads\": %u,\n  \"pad_token_id\": null,\n"
                  "  \"rms_norm_eps\": 1e-06,\n",
                  archs[self->arch].class_name, self->bos_token_id, dtype_torch_name(self->dtype),
                  self->eos_token_id, self->head_dim, self->hidden_size, self->intermediate_size,
                  self->max_position_embeddings, archs[self->arch].name, self->num_heads,
                  self->num_layers, self->num_kv_heads);
    if (self->arch != ARCH_QWEN2) {
        lk_buf_printf(config, "  \"attention_bias\": %s,\n", truth(self->attention_bias));
    }
    if (self->arch == ARCH_LLAMA) {
        lk_buf_str(config, "  \"mlp_bias\": false,\n");
    } else {
        lk_buf_str(config, "  \"sliding_window\": null,\n  \"use_sliding_window\": false,\n");
    }
    add_rope(self, config);
    if (self->arch == ARCH_QWEN3_MOE) {
        add_moe(self, config);
    }
    lk_buf_printf(config,
                  "  \"tie_word_embeddings\": %s,\n  \"transformers_version\": \"5.0.0\",\n"
                  "  \"use_cache\": true,\n  \"vocab_size\": %u\n}\n",
                  truth(self->tie_word_embeddings), self->vocab_size);
    lk_buf_printf(generation,
                  "{\n  \"_from_model_config\": true,\n  \"bos_token_id\": %u,\n"
                  "  \"eos_token_id\": %u,\n  \"transformers_version\": \"5.0.0\"\n}\n",
                  self->bos_token_id, self->eos_token_id);
}

/* ---- the weights ---- */

/* The tensors of one file while they are collected. */
typedef struct {
    const model_maker_t *maker;
    const char *dir;
    uint64_t total_bytes, done_bytes; /* of the whole model */
    uint32_t file;                    /* number of the one being filled, from 0 */
    tensor_desc_t *descs;
    void **data;
    size_t n, cap;
    lk_buf_t index; /* the entries of weight_map */
} writer_t;

static void file_name(const writer_t *w, uint32_t file, char out[64])
{
    if (w->maker->shards == 1) {
        snprintf(out, 64, "model.safetensors");
    } else {
        snprintf(out, 64, "model-%05u-of-%05u.safetensors", file + 1, w->maker->shards);
    }
}

static void drop_tensors(writer_t *w)
{
    for (size_t i = 0; i < w->n; i++) {
        free((char *)w->descs[i].name);
        free(w->data[i]);
    }
    w->n = 0;
}

static lk_status_t flush_file(writer_t *w, lk_error_t *err)
{
    char name[64], path[FILE_PATH_MAX];
    file_name(w, w->file++, name);
    LK_RETURN_IF_ERROR(file_path(path, w->dir, name, err));
    LK_RETURN_IF_ERROR(safetensors_write(path, w->descs, (const void *const *)w->data, w->n, err));
    for (size_t i = 0; i < w->n; i++) {
        lk_buf_printf(&w->index, "%s\n    \"%s\": \"%s\"", w->index.len > 0 ? "," : "",
                      w->descs[i].name, name);
    }
    drop_tensors(w);
    return LK_OK;
}

static lk_status_t count_tensor(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    writer_t *w = ctx;
    w->total_bytes += tensor->numel * dtype_bytes(w->maker->dtype);
    w->cap++;
    return LK_OK;
}

static lk_status_t make_tensor(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    writer_t *w = ctx;
    const model_maker_t *maker = w->maker;
    uint64_t bytes = tensor->numel * dtype_bytes(maker->dtype);
    void *data = malloc(bytes);
    char *name = strdup(tensor->name);
    if (data == NULL || name == NULL) {
        free(data);
        free(name);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for tensor %s", tensor->name);
    }
    w->descs[w->n] = (tensor_desc_t){.name = name,
                                     .dtype = maker->dtype,
                                     .ndim = tensor->ndim,
                                     .shape = {tensor->shape[0], tensor->shape[1]}};
    w->data[w->n++] = data;
    LK_RETURN_IF_ERROR(
        model_tensor_random(tensor, maker->seed, maker->dtype, 0, tensor->numel, data));
    w->done_bytes += bytes;
    /* File f ends with the tensor that reaches (f + 1) / shards of the bytes. */
    double share = (double)w->total_bytes / maker->shards;
    bool last = w->file + 1 == maker->shards;
    return !last && (double)w->done_bytes >= share * (w->file + 1) ? flush_file(w, err) : LK_OK;
}

static lk_status_t write_index(writer_t *w, lk_error_t *err)
{
    char path[FILE_PATH_MAX], head[128];
    static const char tail[] = "\n  }\n}\n";
    LK_RETURN_IF_ERROR(file_path(path, w->dir, "model.safetensors.index.json", err));
    snprintf(head, sizeof head, "{\n  \"metadata\": {\"total_size\": %llu},\n  \"weight_map\": {",
             (unsigned long long)w->total_bytes);
    if (w->index.failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory", path);
    }
    file_part_t parts[] = {
        {head, strlen(head)}, {w->index.data, w->index.len}, {tail, strlen(tail)}};
    return file_write(path, parts, LK_ARRAY_LEN(parts), err);
}

static lk_status_t write_weights(const model_maker_t *self, const model_config_t *config,
                                 const char *dir, lk_error_t *err)
{
    writer_t w = {.maker = self, .dir = dir};
    lk_buf_init(&w.index, 0);
    lk_status_t status = model_tensors_each(config, count_tensor, &w, err);
    w.descs = calloc(w.cap, sizeof *w.descs);
    w.data = calloc(w.cap, sizeof *w.data);
    if (status == LK_OK && self->shards > w.cap) {
        status = lk_error_set(err, LK_ERR_INVALID, "shards: %u files for %zu tensors", self->shards,
                              w.cap);
    } else if (status == LK_OK && (w.descs == NULL || w.data == NULL)) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu tensors", w.cap);
    }
    if (status == LK_OK) {
        status = model_tensors_each(config, make_tensor, &w, err);
    }
    /* One large tensor may have filled several shares: the files behind it are empty but there. */
    while (status == LK_OK && w.file < self->shards) {
        status = flush_file(&w, err);
    }
    if (status == LK_OK && self->shards > 1) {
        status = write_index(&w, err);
    }
    drop_tensors(&w);
    free(w.descs);
    free(w.data);
    lk_buf_fini(&w.index);
    return status;
}

/* ---- the directory ---- */

static lk_status_t claim_directory(const char *dir, lk_error_t *err)
{
    if (mkdir(dir, 0755) == 0) {
        return LK_OK;
    }
    if (errno != EEXIST) {
        return lk_error_set(err, LK_ERR_IO, "%s: %s", dir, strerror(errno));
    }
    DIR *stream = opendir(dir);
    if (stream == NULL) {
        bool plain = errno == ENOTDIR;
        return lk_error_set(err, plain ? LK_ERR_INVALID : LK_ERR_IO, "%s: %s", dir,
                            strerror(errno));
    }
    bool empty = true;
    for (struct dirent *entry = readdir(stream); entry != NULL; entry = readdir(stream)) {
        empty = empty && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0);
    }
    closedir(stream);
    return empty ? LK_OK : lk_error_set(err, LK_ERR_INVALID, "%s: the directory is not empty", dir);
}

/* Only names this file makes. */
static void remove_files(const model_maker_t *self, const char *dir)
{
    writer_t w = {.maker = self, .dir = dir};
    char names[64], path[FILE_PATH_MAX];
    static const char *const fixed[] = {"config.json", "generation_config.json",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < LK_ARRAY_LEN(fixed) + self->shards; i++) {
        const char *name = i < LK_ARRAY_LEN(fixed) ? fixed[i] : names;
        if (name == names) {
            file_name(&w, (uint32_t)(i - LK_ARRAY_LEN(fixed)), names);
        }
        if (file_path(path, dir, name, NULL) == LK_OK) {
            unlink(path);
        }
    }
}

static lk_status_t write_text(const char *dir, const char *name, const lk_buf_t *text,
                              lk_error_t *err)
{
    char path[FILE_PATH_MAX];
    file_part_t part = {text->data, text->len};
    LK_RETURN_IF_ERROR(file_path(path, dir, name, err));
    return file_write(path, &part, 1, err);
}

static lk_status_t write_files(const model_maker_t *self, const model_config_t *config,
                               const lk_buf_t *text, const lk_buf_t *generation, const char *dir,
                               lk_error_t *err)
{
    LK_RETURN_IF_ERROR(write_weights(self, config, dir, err));
    LK_RETURN_IF_ERROR(write_text(dir, "generation_config.json", generation, err));
    return write_text(dir, "config.json", text, err);
}

lk_status_t model_maker_write(const model_maker_t *self, const char *dir, lk_error_t *err)
{
    model_config_t config;
    lk_buf_t text, generation;
    CHECK(self->dtype == LK_DTYPE_F32 || self->dtype == LK_DTYPE_BF16 ||
          self->dtype == LK_DTYPE_F16);
    CHECK(self->shards > 0);
    lk_buf_init(&text, 0);
    lk_buf_init(&generation, 0);
    model_maker_config(self, &text, &generation);
    lk_status_t status =
        text.failed || generation.failed
            ? lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for config.json")
            : model_config_parse(lk_buf_cstr(&text), text.len, lk_buf_cstr(&generation),
                                 generation.len, &config, err);
    if (status == LK_OK) {
        status = claim_directory(dir, err);
    }
    if (status == LK_OK) {
        status = write_files(self, &config, &text, &generation, dir, err);
        if (status < 0) {
            remove_files(self, dir);
        }
    }
    lk_buf_fini(&text);
    lk_buf_fini(&generation);
    return status;
}

/* ---- one tensor ---- */

typedef struct {
    const char *name;
    uint64_t seed;
    lk_dtype_t dtype;
    void *out;
    size_t bytes;
    bool found;
} wanted_t;

static lk_status_t make_wanted(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    wanted_t *wanted = ctx;
    if (strcmp(tensor->name, wanted->name) != 0) {
        return LK_OK;
    }
    wanted->found = true;
    if (wanted->bytes != tensor->numel * dtype_bytes(wanted->dtype)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %s: it has %llu elements, room for %zu bytes", tensor->name,
                            (unsigned long long)tensor->numel, wanted->bytes);
    }
    return model_tensor_random(tensor, wanted->seed, wanted->dtype, 0, tensor->numel, wanted->out);
}

lk_status_t model_maker_tensor(const model_config_t *config, const char *name, uint64_t seed,
                               lk_dtype_t dtype, void *out, size_t bytes, lk_error_t *err)
{
    wanted_t wanted = {name, seed, dtype, out, bytes, false};
    LK_RETURN_IF_ERROR(model_tensors_each(config, make_wanted, &wanted, err));
    return wanted.found ? LK_OK
                        : lk_error_set(err, LK_ERR_NOT_FOUND,
                                       "tensor %.255s: the model has no such tensor", name);
}
