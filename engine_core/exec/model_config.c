#include "engine_core/exec/model_config.h"

#include "base/check.h"
#include "base/file.h"
#include "engine_core/exec/json_reader.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    const char *class_name, *model_type;
    model_arch_t arch;
} arch_row_t;

static const arch_row_t archs[] = {
    {"LlamaForCausalLM", "llama", ARCH_LLAMA},
    {"Qwen2ForCausalLM", "qwen2", ARCH_QWEN2},
    {"Qwen3ForCausalLM", "qwen3", ARCH_QWEN3},
    {"Qwen3MoeForCausalLM", "qwen3_moe", ARCH_QWEN3_MOE},
};

static const char arch_list[] = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and "
                                "Qwen3MoeForCausalLM are";

static lk_status_t read_arch(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const json_t *list = json_reader_get(root, "architectures");
    const json_t *type = json_reader_get(root, "model_type");
    const arch_row_t *row = NULL;
    if (list != NULL) {
        const json_t *name = json_array_get(list, 0);
        if (json_array_size(list) != 1 || !json_is_string(name)) {
            return json_reader_refuse(r, "architectures", list, "an array of one name");
        }
        for (size_t i = 0; i < LK_ARRAY_LEN(archs); i++) {
            if (strcmp(json_string_value(name), archs[i].class_name) == 0) {
                row = &archs[i];
            }
        }
        if (row == NULL) {
            return json_reader_unsupported(r, "architectures", name, arch_list);
        }
    }
    if (type != NULL) {
        if (!json_is_string(type)) {
            return json_reader_refuse(r, "model_type", type, "a string");
        }
        for (size_t i = 0; row == NULL && i < LK_ARRAY_LEN(archs); i++) {
            if (strcmp(json_string_value(type), archs[i].model_type) == 0) {
                row = &archs[i];
            }
        }
        if (row == NULL) {
            return json_reader_unsupported(r, "model_type", type,
                                           "llama, qwen2, qwen3 and qwen3_moe are");
        }
        if (strcmp(json_string_value(type), row->model_type) != 0) {
            return json_reader_refuse(r, "model_type", type, row->model_type);
        }
    }
    if (row == NULL) {
        return lk_error_set(r->err, LK_ERR_INVALID, "%s: architectures is missing", r->file);
    }
    c->arch = row->arch;
    return LK_OK;
}

static lk_status_t read_sizes(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    bool llama = c->arch == ARCH_LLAMA;
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "hidden_size", 1, 1u << 17, JSON_READER_REQUIRED,
                                       &c->hidden_size));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "intermediate_size", 1, 1u << 20,
                                       JSON_READER_REQUIRED, &c->intermediate_size));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "num_hidden_layers", 1, MODEL_MAX_LAYERS,
                                       JSON_READER_REQUIRED, &c->num_layers));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "num_attention_heads", 1, 1024,
                                       JSON_READER_REQUIRED, &c->num_heads));
    /* The Qwen classes have numbers of their own for an absent key; null means "as many as heads"
     * everywhere. */
    bool null = json_object_get(root, "num_key_value_heads") != NULL;
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "num_key_value_heads", 1, 1024,
                                       llama || null ? c->num_heads : JSON_READER_REQUIRED,
                                       &c->num_kv_heads));
    LK_RETURN_IF_ERROR(
        json_reader_u32(r, root, "vocab_size", 2, 1u << 24, JSON_READER_REQUIRED, &c->vocab_size));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "max_position_embeddings", 1, 1u << 28,
                                       JSON_READER_REQUIRED, &c->max_position_embeddings));
    LK_RETURN_IF_ERROR(
        json_reader_float(r, root, "rms_norm_eps", 1e-12, 1, 1e-6, &c->rms_norm_eps));
    if (c->num_heads % c->num_kv_heads != 0) {
        return lk_error_set(r->err, LK_ERR_INVALID,
                            "%s: num_attention_heads %u is no multiple of num_key_value_heads %u",
                            r->file, c->num_heads, c->num_kv_heads);
    }
    /* Qwen3Config's own default is 128, the other classes divide. */
    uint32_t head_dim = c->arch == ARCH_QWEN3 ? 128 : 0;
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "head_dim", 2, 512, head_dim, &c->head_dim));
    if (c->head_dim == 0) {
        if (c->hidden_size % c->num_heads != 0) {
            return lk_error_set(r->err, LK_ERR_INVALID,
                                "%s: hidden_size %u is no multiple of num_attention_heads %u, and "
                                "head_dim is missing",
                                r->file, c->hidden_size, c->num_heads);
        }
        c->head_dim = c->hidden_size / c->num_heads;
    }
    if (c->head_dim % 2 != 0 || c->head_dim > 512) {
        return lk_error_set(r->err, LK_ERR_INVALID, "%s: head_dim %u is not even and at most 512",
                            r->file, c->head_dim);
    }
    return LK_OK;
}

static lk_status_t read_switches(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const json_t *act = json_reader_get(root, "hidden_act");
    if (act != NULL && !json_is_string(act)) {
        return json_reader_refuse(r, "hidden_act", act, "a string");
    }
    if (act != NULL && strcmp(json_string_value(act), "silu") != 0) {
        return json_reader_unsupported(r, "hidden_act", act, "silu is");
    }
    LK_RETURN_IF_ERROR(
        json_reader_bool(r, root, "tie_word_embeddings", false, &c->tie_word_embeddings));
    bool attention_bias;
    LK_RETURN_IF_ERROR(json_reader_bool(r, root, "attention_bias", false, &attention_bias));
    /* Qwen2's class has q, k and v biases always and does not look at attention_bias. */
    c->qkv_bias = c->arch == ARCH_QWEN2 || attention_bias;
    c->o_bias = c->arch != ARCH_QWEN2 && attention_bias;
    c->qk_norm = c->arch == ARCH_QWEN3 || c->arch == ARCH_QWEN3_MOE;
    LK_RETURN_IF_ERROR(json_reader_bool(r, root, "mlp_bias", false, &c->mlp_bias));
    if (c->mlp_bias) {
        return json_reader_unsupported(r, "mlp_bias", json_object_get(root, "mlp_bias"),
                                       "false is");
    }
    static const char *const quantised[] = {"quantization_config", "compression_config"};
    for (size_t i = 0; i < LK_ARRAY_LEN(quantised); i++) {
        if (json_reader_get(root, quantised[i]) != NULL) {
            return lk_error_set(r->err, LK_ERR_UNSUPPORTED,
                                "%s: %s: quantised checkpoints are not supported", r->file,
                                quantised[i]);
        }
    }
    return LK_OK;
}

static lk_status_t read_dtype(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const char *key = json_reader_get(root, "dtype") != NULL ? "dtype" : "torch_dtype";
    const json_t *value = json_reader_get(root, key);
    c->checkpoint_dtype = LK_DTYPE_F32;
    if (value == NULL) {
        return LK_OK;
    }
    if (!json_is_string(value)) {
        return json_reader_refuse(r, key, value, "a string");
    }
    static const lk_dtype_t floats[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16};
    const char *text = json_string_value(value);
    text += strncmp(text, "torch.", 6) == 0 ? 6 : 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(floats); i++) {
        if (strcmp(text, dtype_torch_name(floats[i])) == 0) {
            c->checkpoint_dtype = floats[i];
            return LK_OK;
        }
    }
    return json_reader_unsupported(r, key, value, "float32, bfloat16 and float16 are");
}

/* layer_types (Transformers 5, and late 4) or the three older fields say whether any layer looks
 * at a window only. */
static lk_status_t read_windows(const json_reader_t *r, const json_t *root, const model_config_t *c)
{
    const json_t *types = json_reader_get(root, "layer_types");
    if (types != NULL) {
        if (json_array_size(types) != c->num_layers) {
            return json_reader_refuse(r, "layer_types", types, "an array of one string per layer");
        }
        for (size_t i = 0; i < c->num_layers; i++) {
            const json_t *type = json_array_get(types, i);
            if (!json_is_string(type)) {
                return json_reader_refuse(r, "layer_types", type, "strings");
            }
            if (strcmp(json_string_value(type), "full_attention") != 0) {
                return json_reader_unsupported(r, "layer_types", type, "full_attention is");
            }
        }
    }
    bool use;
    uint32_t window, full_layers;
    LK_RETURN_IF_ERROR(json_reader_bool(r, root, "use_sliding_window", false, &use));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "sliding_window", 0, INT32_MAX, 0, &window));
    LK_RETURN_IF_ERROR(
        json_reader_u32(r, root, "max_window_layers", 0, INT32_MAX, 28, &full_layers));
    /* Qwen2 and Qwen3 apply the window from layer max_window_layers on, Qwen3-MoE in all. */
    bool reached = c->arch == ARCH_QWEN3_MOE || full_layers < c->num_layers;
    if (use && window > 0 && reached && types == NULL && c->arch != ARCH_LLAMA) {
        return json_reader_unsupported(r, "use_sliding_window",
                                       json_object_get(root, "use_sliding_window"), "false is");
    }
    return LK_OK;
}

static lk_status_t read_rope_type(const json_reader_t *r, const char *dict, const json_t *rope,
                                  model_config_t *c)
{
    char key[64];
    const json_t *type = json_reader_get(rope, "rope_type");
    snprintf(key, sizeof key, "%s.%s", dict, type != NULL ? "rope_type" : "type");
    type = type != NULL ? type : json_reader_get(rope, "type");
    c->rope_type = ROPE_DEFAULT;
    if (type == NULL) {
        return LK_OK;
    }
    if (!json_is_string(type)) {
        return json_reader_refuse(r, key, type, "a string");
    }
    if (strcmp(json_string_value(type), "llama3") == 0) {
        c->rope_type = ROPE_LLAMA3;
    } else if (strcmp(json_string_value(type), "default") != 0) {
        return json_reader_unsupported(r, key, type, "default and llama3 are");
    }
    return LK_OK;
}

static lk_status_t read_rope_dict(const json_reader_t *r, const char *dict, const json_t *rope,
                                  model_config_t *c)
{
    static const char *const known[] = {"rope_theta",
                                        "rope_type",
                                        "type",
                                        "factor",
                                        "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings",
                                        "partial_rotary_factor"};
    const char *key;
    json_t *value;
    LK_RETURN_IF_ERROR(read_rope_type(r, dict, rope, c));
    json_object_foreach((json_t *)rope, key, value)
    {
        bool found = false;
        for (size_t i = 0; i < LK_ARRAY_LEN(known); i++) {
            found = found || strcmp(key, known[i]) == 0;
        }
        if (!found && !json_is_null(value)) {
            return lk_error_set(r->err, LK_ERR_UNSUPPORTED, "%s: %s.%.60s is not supported",
                                r->file, dict, key);
        }
    }
    if (c->rope_type != ROPE_LLAMA3) {
        return LK_OK;
    }
    LK_RETURN_IF_ERROR(json_reader_float(r, rope, "factor", 1, 1e6, NAN, &c->rope_factor));
    LK_RETURN_IF_ERROR(
        json_reader_float(r, rope, "low_freq_factor", 1e-6, 1e6, NAN, &c->rope_low_freq_factor));
    LK_RETURN_IF_ERROR(
        json_reader_float(r, rope, "high_freq_factor", 1e-6, 1e6, NAN, &c->rope_high_freq_factor));
    LK_RETURN_IF_ERROR(json_reader_u32(r, rope, "original_max_position_embeddings", 1, 1u << 28,
                                       JSON_READER_REQUIRED, &c->rope_original_max_position));
    if (!(c->rope_high_freq_factor > c->rope_low_freq_factor)) {
        return lk_error_set(
            r->err, LK_ERR_INVALID, "%s: %s: high_freq_factor %g is not above low_freq_factor %g",
            r->file, dict, (double)c->rope_high_freq_factor, (double)c->rope_low_freq_factor);
    }
    return LK_OK;
}

static lk_status_t read_rope(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const char *dict =
        json_reader_get(root, "rope_parameters") != NULL ? "rope_parameters" : "rope_scaling";
    const json_t *rope = json_reader_get(root, dict);
    if (rope != NULL && !json_is_object(rope)) {
        return json_reader_refuse(r, dict, rope, "an object");
    }
    if (rope != NULL) {
        LK_RETURN_IF_ERROR(read_rope_dict(r, dict, rope, c));
    }
    const json_t *const holders[] = {rope, root};
    float theta = 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(holders); i++) {
        const json_t *partial = json_reader_get(holders[i], "partial_rotary_factor");
        if (partial != NULL && !(json_is_number(partial) && json_number_value(partial) == 1)) {
            return json_reader_unsupported(r, "partial_rotary_factor", partial, "1 is");
        }
        if (json_reader_get(holders[i], "rope_theta") == NULL) {
            continue;
        }
        float found;
        LK_RETURN_IF_ERROR(json_reader_float(r, holders[i], "rope_theta", 1, 1e12, NAN, &found));
        if (theta != 0 && theta != found) {
            return lk_error_set(r->err, LK_ERR_INVALID, "%s: rope_theta is given twice: %g and %g",
                                r->file, (double)theta, (double)found);
        }
        theta = found;
    }
    c->rope_theta = theta != 0 ? theta : 10000.0f; /* every class's own default */
    return LK_OK;
}

static lk_status_t read_expert_count(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const json_t *old = json_reader_get(root, "num_experts");
    const char *key =
        json_reader_get(root, "num_local_experts") != NULL ? "num_local_experts" : "num_experts";
    LK_RETURN_IF_ERROR(
        json_reader_u32(r, root, key, 1, 1024, JSON_READER_REQUIRED, &c->num_experts));
    if (old != NULL &&
        !(json_is_integer(old) && json_integer_value(old) == (json_int_t)c->num_experts)) {
        return json_reader_refuse(r, "num_experts", old, "the value of num_local_experts");
    }
    return LK_OK;
}

/* Layer i is sparse if it is not listed and (i + 1) % decoder_sparse_step == 0. */
static lk_status_t read_moe(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    if (c->arch != ARCH_QWEN3_MOE) {
        return LK_OK;
    }
    uint32_t step;
    LK_RETURN_IF_ERROR(read_expert_count(r, root, c));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "num_experts_per_tok", 1, c->num_experts,
                                       JSON_READER_REQUIRED, &c->num_experts_per_tok));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "moe_intermediate_size", 1, 1u << 20,
                                       JSON_READER_REQUIRED, &c->moe_intermediate_size));
    LK_RETURN_IF_ERROR(json_reader_bool(r, root, "norm_topk_prob", false, &c->norm_topk_prob));
    LK_RETURN_IF_ERROR(json_reader_u32(r, root, "decoder_sparse_step", 1, INT32_MAX, 1, &step));
    for (uint32_t i = 0; i < c->num_layers; i++) {
        c->moe_layer[i] = (i + 1) % step == 0;
    }
    const json_t *dense = json_reader_get(root, "mlp_only_layers");
    if (dense != NULL && !json_is_array(dense)) {
        return json_reader_refuse(r, "mlp_only_layers", dense, "an array of layer numbers");
    }
    for (size_t i = 0; i < json_array_size(dense); i++) {
        const json_t *layer = json_array_get(dense, i);
        if (!json_is_integer(layer) || json_integer_value(layer) < 0 ||
            json_integer_value(layer) >= (json_int_t)c->num_layers) {
            char expected[64];
            snprintf(expected, sizeof expected, "layer numbers from 0 to %u", c->num_layers - 1);
            return json_reader_refuse(r, "mlp_only_layers", layer, expected);
        }
        c->moe_layer[json_integer_value(layer)] = false;
    }
    return LK_OK;
}

static lk_status_t add_eos(const json_reader_t *r, const json_t *id, model_config_t *c)
{
    if (!json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= (json_int_t)c->vocab_size) {
        char expected[64];
        snprintf(expected, sizeof expected, "token ids from 0 to %u", c->vocab_size - 1);
        return json_reader_refuse(r, "eos_token_id", id, expected);
    }
    uint32_t token = (uint32_t)json_integer_value(id);
    for (uint32_t i = 0; i < c->n_eos; i++) {
        if (c->eos_token_ids[i] == token) {
            return LK_OK;
        }
    }
    if (c->n_eos == MODEL_MAX_EOS) {
        return lk_error_set(r->err, LK_ERR_UNSUPPORTED, "%s: eos_token_id: more than %d ids",
                            r->file, MODEL_MAX_EOS);
    }
    c->eos_token_ids[c->n_eos++] = token;
    return LK_OK;
}

static lk_status_t read_eos(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    const json_t *eos = json_reader_get(root, "eos_token_id");
    if (eos == NULL) {
        return LK_OK;
    }
    if (!json_is_array(eos)) {
        return add_eos(r, eos, c);
    }
    for (size_t i = 0; i < json_array_size(eos); i++) {
        LK_RETURN_IF_ERROR(add_eos(r, json_array_get(eos, i), c));
    }
    return LK_OK;
}

static lk_status_t read_config(const json_reader_t *r, const json_t *root, model_config_t *c)
{
    LK_RETURN_IF_ERROR(read_arch(r, root, c));
    LK_RETURN_IF_ERROR(read_sizes(r, root, c));
    LK_RETURN_IF_ERROR(read_switches(r, root, c));
    LK_RETURN_IF_ERROR(read_dtype(r, root, c));
    LK_RETURN_IF_ERROR(read_windows(r, root, c));
    LK_RETURN_IF_ERROR(read_rope(r, root, c));
    LK_RETURN_IF_ERROR(read_moe(r, root, c));
    return read_eos(r, root, c);
}

lk_status_t model_config_parse(const char *json, size_t len, const char *generation,
                               size_t generation_len, model_config_t *out, lk_error_t *err)
{
    model_config_t config = {0};
    json_reader_t r = {"config.json", err};
    json_t *root;
    LK_RETURN_IF_ERROR(json_reader_parse(&r, json, len, &root));
    lk_status_t status = read_config(&r, root, &config);
    json_decref(root);
    LK_RETURN_IF_ERROR(status);
    if (generation != NULL) {
        r.file = "generation_config.json";
        LK_RETURN_IF_ERROR(json_reader_parse(&r, generation, generation_len, &root));
        status = read_eos(&r, root, &config);
        json_decref(root);
        LK_RETURN_IF_ERROR(status);
    }
    *out = config;
    return LK_OK;
}

lk_status_t model_config_load(const char *dir, model_config_t *out, lk_error_t *err)
{
    char path[FILE_PATH_MAX];
    lk_buf_t config, generation;
    lk_buf_init(&config, 0);
    lk_buf_init(&generation, 0);
    lk_status_t status = file_path(path, dir, "config.json", err);
    if (status == LK_OK) {
        status = file_read(path, JSON_READER_MAX_BYTES, &config, err);
    }
    if (status < 0) {
        goto done;
    }
    status = file_path(path, dir, "generation_config.json", err);
    if (status < 0) {
        goto done;
    }
    status = file_read(path, JSON_READER_MAX_BYTES, &generation, err);
    if (status < 0 && status != LK_ERR_NOT_FOUND) {
        goto done;
    }
    const char *text = status == LK_OK ? lk_buf_cstr(&generation) : NULL;
    status = model_config_parse(lk_buf_cstr(&config), config.len, text, generation.len, out, err);
    if (status < 0) {
        lk_error_prefix(err, "%s", dir);
    }
done:
    lk_buf_fini(&config);
    lk_buf_fini(&generation);
    return status;
}

void model_config_dims(const model_config_t *config, name_rules_dims_t *out)
{
    *out = (name_rules_dims_t){
        .num_layers = config->num_layers,
        .num_attention_heads = config->num_heads,
        .num_key_value_heads = config->num_kv_heads,
        .head_dim = config->head_dim,
        .num_experts = config->num_experts,
        .tied = config->tie_word_embeddings,
    };
}
