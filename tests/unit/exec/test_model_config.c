#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A fixture's config.json with `patch` laid over it; the value "<absent>" removes a key. */
static char *patched(const char *fixture, const char *patch)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/config.json", model_fixture_dir(fixture));
    json_t *config = json_load_file(path, 0, NULL);
    json_error_t json_err;
    json_t *changes = json_loads(patch, 0, &json_err);
    ck_assert_msg(changes != NULL, "%s: %s", patch, json_err.text);
    const char *key;
    json_t *value;
    json_object_foreach(changes, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "<absent>") == 0) {
            json_object_del(config, key);
        } else {
            json_object_set(config, key, value);
        }
    }
    char *text = json_dumps(config, 0);
    json_decref(changes);
    json_decref(config);
    ck_assert_ptr_nonnull(text);
    return text;
}

static lk_status_t parse(const char *fixture, const char *patch, const char *generation,
                         model_config_t *out, lk_error_t *err)
{
    char *text = patched(fixture, patch);
    size_t generation_len = generation != NULL ? strlen(generation) : 0;
    lk_status_t status =
        model_config_parse(text, strlen(text), generation, generation_len, out, err);
    free(text);
    return status;
}

static model_config_t must_parse(const char *fixture, const char *patch)
{
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(parse(fixture, patch, NULL, &config, &err) == LK_OK, "%s: %s", patch, err.text);
    return config;
}

START_TEST(fixtures_say_what_they_are)
{
    model_config_t c;
    model_fixture_config("llama3_rope_scaled", &c);
    ck_assert(c.arch == ARCH_LLAMA && c.rope_type == ROPE_LLAMA3 && c.rope_theta == 500000.0f);
    ck_assert(c.rope_factor == 8 && c.rope_low_freq_factor == 1 && c.rope_high_freq_factor == 4);
    ck_assert_uint_eq(c.rope_original_max_position, 64);
    ck_assert(c.tie_word_embeddings && !c.qkv_bias && !c.o_bias && !c.qk_norm);
    model_fixture_config("llama_untied", &c);
    ck_assert(!c.tie_word_embeddings && c.rope_type == ROPE_DEFAULT);
    model_fixture_config("qwen2_bias", &c);
    ck_assert(c.arch == ARCH_QWEN2 && c.qkv_bias && !c.o_bias && !c.qk_norm);
    ck_assert_uint_eq(c.head_dim, 16);
    model_fixture_config("qwen3", &c);
    ck_assert(c.arch == ARCH_QWEN3 && c.qk_norm && !c.qkv_bias && c.num_experts == 0);
    ck_assert_uint_eq(c.head_dim, 32);
    model_fixture_config("qwen3_moe", &c);
    ck_assert(c.arch == ARCH_QWEN3_MOE && c.num_experts == 8 && c.num_experts_per_tok == 2);
    ck_assert(c.norm_topk_prob && c.moe_layer[0] && c.moe_layer[1] && c.moe_layer[2]);
    model_fixture_config("qwen3_moe_mixed", &c);
    ck_assert(!c.norm_topk_prob && c.num_experts == 6 && c.moe_intermediate_size == 40);
    ck_assert(!c.moe_layer[0] && c.moe_layer[1] && !c.moe_layer[2] && c.moe_layer[3]);
    ck_assert(c.n_eos == 1 && c.eos_token_ids[0] == 2 && c.checkpoint_dtype == LK_DTYPE_BF16);
    ck_assert(c.rms_norm_eps == 1e-6f && c.vocab_size == 512 && c.max_position_embeddings == 512);
    name_rules_dims_t dims;
    model_config_dims(&c, &dims);
    ck_assert(dims.num_experts == 6 && dims.num_layers == 4 && dims.tied && dims.head_dim == 32);
}
END_TEST

/* The same facts in the spelling of Transformers 4 give the same struct. */
START_TEST(both_dialects_agree)
{
    static const struct {
        const char *fixture, *patch;
    } rows[] = {
        {"llama3_rope_scaled",
         "{\"rope_parameters\": \"<absent>\", \"dtype\": \"<absent>\", \"torch_dtype\": "
         "\"bfloat16\", \"rope_theta\": 500000.0, \"rope_scaling\": {\"factor\": 8.0, "
         "\"high_freq_factor\": 4.0, \"low_freq_factor\": 1.0, "
         "\"original_max_position_embeddings\": 64, \"rope_type\": \"llama3\"}}"},
        {"llama_smol_tied", "{\"rope_parameters\": \"<absent>\", \"dtype\": null, \"torch_dtype\": "
                            "\"torch.bfloat16\", \"rope_theta\": 100000, \"rope_scaling\": null}"},
        {"llama_untied", "{\"rope_parameters\": \"<absent>\", \"head_dim\": null}"},
        {"qwen2_bias", "{\"rope_parameters\": \"<absent>\", \"layer_types\": \"<absent>\", "
                       "\"rope_theta\": 1000000.0, \"sliding_window\": 4096}"},
        {"qwen3", "{\"rope_parameters\": \"<absent>\", \"rope_theta\": 1e6, \"rope_scaling\": "
                  "{\"type\": \"default\"}}"},
        {"qwen3_moe", "{\"num_local_experts\": \"<absent>\", \"num_experts\": 8, "
                      "\"decoder_sparse_step\": \"<absent>\", \"mlp_only_layers\": null}"},
        {"qwen3_moe_mixed", "{\"num_experts\": 6, \"decoder_sparse_step\": 1, "
                            "\"mlp_only_layers\": [2, 0], \"architectures\": null}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        model_config_t v5 = must_parse(rows[i].fixture, "{}");
        model_config_t v4 = must_parse(rows[i].fixture, rows[i].patch);
        ck_assert_msg(memcmp(&v5, &v4, sizeof v5) == 0, "%s", rows[i].fixture);
    }
}
END_TEST

START_TEST(optional_fields_have_their_class_defaults)
{
    model_config_t c = must_parse("llama_untied", "{\"num_key_value_heads\": \"<absent>\"}");
    ck_assert_uint_eq(c.num_kv_heads, 4);
    c = must_parse("qwen3", "{\"num_key_value_heads\": null}");
    ck_assert_uint_eq(c.num_kv_heads, 4);
    c = must_parse("qwen3", "{\"head_dim\": \"<absent>\"}");
    ck_assert_uint_eq(c.head_dim, 128);
    c = must_parse("llama_untied", "{\"rope_parameters\": null, \"dtype\": \"<absent>\"}");
    ck_assert(c.rope_theta == 10000.0f && c.checkpoint_dtype == LK_DTYPE_F32);
    c = must_parse("llama_untied", "{\"attention_bias\": true}");
    ck_assert(c.qkv_bias && c.o_bias);
    c = must_parse("qwen3_moe", "{\"attention_bias\": true}");
    ck_assert(c.qkv_bias && c.o_bias);
    c = must_parse("qwen3_moe", "{\"decoder_sparse_step\": 3, \"mlp_only_layers\": [2]}");
    ck_assert(!c.moe_layer[0] && !c.moe_layer[1] && !c.moe_layer[2] && c.num_experts == 8);
    c = must_parse("qwen2_bias", "{\"layer_types\": null, \"use_sliding_window\": true, "
                                 "\"sliding_window\": 64, \"max_window_layers\": 3}");
    ck_assert_uint_eq(c.num_layers, 3);
    c = must_parse("qwen3", "{\"dtype\": \"float16\"}");
    ck_assert(c.checkpoint_dtype == LK_DTYPE_F16);
}
END_TEST

START_TEST(eos_ids_of_both_files_are_joined)
{
    model_config_t c;
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(parse("qwen3", "{\"eos_token_id\": [2, 7]}", "{\"eos_token_id\": [7, 9, 2]}", &c, &err));
    ck_assert_uint_eq(c.n_eos, 3);
    ck_assert(c.eos_token_ids[0] == 2 && c.eos_token_ids[1] == 7 && c.eos_token_ids[2] == 9);
    ck_ok(parse("qwen3", "{\"eos_token_id\": null}", "{\"eos_token_id\": null}", &c, &err));
    ck_assert_uint_eq(c.n_eos, 0);
    c.n_eos = 77;
    ck_assert_int_lt(parse("qwen3", "{}", "{\"eos_token_id\": 512}", &c, &err), 0);
    ck_assert_msg(strstr(err.text, "generation_config.json: eos_token_id: expected token ids from "
                                   "0 to 511, got 512") != NULL,
                  "%s", err.text);
    ck_assert_uint_eq(c.n_eos, 77);
    ck_assert_int_lt(parse("qwen3", "{}", "[]", &c, &err), 0);
    ck_assert_int_lt(parse("qwen3", "{}", "", &c, &err), 0);
}
END_TEST

static const struct {
    const char *fixture, *patch, *text;
} refusals[] = {
    /* other models */
    {"llama_untied", "{\"architectures\": [\"MistralForCausalLM\"]}",
     "architectures: \"MistralForCausalLM\" is not supported, only LlamaForCausalLM"},
    {"llama_untied", "{\"architectures\": [\"Qwen2MoeForCausalLM\"]}", "Qwen2MoeForCausalLM"},
    {"llama_untied", "{\"architectures\": []}", "architectures: expected"},
    {"llama_untied", "{\"architectures\": \"LlamaForCausalLM\"}", "architectures: expected"},
    {"llama_untied", "{\"architectures\": [7]}", "architectures: expected"},
    {"llama_untied", "{\"architectures\": [\"LlamaForCausalLM\", \"X\"]}", "architectures"},
    {"llama_untied", "{\"architectures\": null, \"model_type\": null}", "architectures is missing"},
    {"llama_untied", "{\"architectures\": null, \"model_type\": \"gemma3\"}",
     "model_type: \"gemma3\" is not supported"},
    {"llama_untied", "{\"model_type\": \"qwen2\"}", "model_type: expected llama, got \"qwen2\""},
    {"llama_untied", "{\"model_type\": 1}", "model_type: expected a string, got 1"},
    /* what the classes can do and this program can't */
    {"llama_untied", "{\"mlp_bias\": true}", "mlp_bias: true is not supported"},
    {"llama_untied", "{\"hidden_act\": \"gelu\"}", "hidden_act: \"gelu\" is not supported"},
    {"llama_untied", "{\"hidden_act\": 3}", "hidden_act: expected a string"},
    {"llama_untied", "{\"quantization_config\": {\"quant_method\": \"gptq\"}}",
     "quantization_config: quantised"},
    {"llama_untied", "{\"compression_config\": {}}", "compression_config: quantised"},
    {"llama_untied", "{\"partial_rotary_factor\": 0.5}",
     "partial_rotary_factor: 0.5 is not supported"},
    {"llama_untied", "{\"dtype\": \"float8_e4m3fn\"}", "dtype: \"float8_e4m3fn\" is not supported"},
    {"llama_untied", "{\"dtype\": 16}", "dtype: expected a string"},
    {"qwen3", "{\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]}",
     "layer_types: \"sliding_attention\" is not supported"},
    {"qwen3", "{\"layer_types\": [\"full_attention\"]}", "layer_types: expected an array of one"},
    {"qwen3", "{\"layer_types\": [1, 2, 3]}", "layer_types: expected strings, got 1"},
    {"qwen2_bias",
     "{\"layer_types\": null, \"use_sliding_window\": true, \"sliding_window\": 64, "
     "\"max_window_layers\": 1}",
     "use_sliding_window: true is not supported"},
    {"qwen3_moe", "{\"use_sliding_window\": true, \"sliding_window\": 64}",
     "use_sliding_window: true is not supported"},
    {"qwen3", "{\"use_sliding_window\": \"no\"}", "use_sliding_window: expected true or false"},
    /* rope */
    {"qwen3", "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0}}",
     "rope_parameters.rope_type: \"yarn\" is not supported, only default and llama3"},
    {"qwen3", "{\"rope_parameters\": null, \"rope_scaling\": {\"type\": \"linear\"}}",
     "rope_scaling.type: \"linear\" is not supported"},
    {"qwen3", "{\"rope_parameters\": {\"rope_type\": \"dynamic\"}}", "\"dynamic\" is not"},
    {"qwen3", "{\"rope_parameters\": {\"rope_type\": \"longrope\"}}", "\"longrope\" is not"},
    {"qwen3", "{\"rope_parameters\": {\"rope_type\": 3}}", "rope_type: expected a string"},
    {"qwen3", "{\"rope_parameters\": [1]}", "rope_parameters: expected an object"},
    {"qwen3", "{\"rope_parameters\": {\"mrope_section\": [1, 2]}}",
     "rope_parameters.mrope_section is not supported"},
    {"qwen3", "{\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}}",
     "rope_parameters.full_attention is not supported"},
    {"qwen3", "{\"rope_parameters\": {\"partial_rotary_factor\": 0.25}}", "partial_rotary_factor"},
    {"qwen3", "{\"rope_theta\": 5.0}", "rope_theta is given twice: 1e+06 and 5"},
    {"qwen3", "{\"rope_parameters\": {\"rope_theta\": -1}}", "rope_theta: expected a number"},
    {"llama_untied", "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"rope_theta\": 1e4}}",
     "factor is missing"},
    {"llama_untied",
     "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64}}",
     "high_freq_factor 4 is not above low_freq_factor 4"},
    {"llama_untied",
     "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4}}",
     "original_max_position_embeddings is missing"},
    /* numbers */
    {"llama_untied", "{\"hidden_size\": \"<absent>\"}", "hidden_size is missing"},
    {"llama_untied", "{\"hidden_size\": \"64\"}", "hidden_size: expected an integer"},
    {"llama_untied", "{\"hidden_size\": 64.0}", "hidden_size: expected an integer from 1 to"},
    {"llama_untied", "{\"hidden_size\": 0}", "hidden_size: expected"},
    {"llama_untied", "{\"hidden_size\": -64}", "hidden_size: expected"},
    {"llama_untied", "{\"hidden_size\": 9223372036854775807}", "hidden_size: expected"},
    {"llama_untied", "{\"hidden_size\": 4294967360}", "hidden_size: expected"},
    {"llama_untied", "{\"intermediate_size\": true}", "intermediate_size: expected"},
    {"llama_untied", "{\"num_hidden_layers\": 257}",
     "num_hidden_layers: expected an integer from 1 "
     "to 256, got 257"},
    {"llama_untied", "{\"num_hidden_layers\": []}",
     "num_hidden_layers: expected an integer from 1 "
     "to 256, got an array"},
    {"llama_untied", "{\"vocab_size\": 0}", "vocab_size: expected"},
    {"llama_untied", "{\"vocab_size\": {}}", "vocab_size: expected"},
    {"llama_untied", "{\"max_position_embeddings\": \"<absent>\"}", "max_position_embeddings is"},
    {"llama_untied", "{\"rms_norm_eps\": 0}", "rms_norm_eps: expected a number"},
    {"llama_untied", "{\"rms_norm_eps\": \"1e-6\"}", "rms_norm_eps: expected a number"},
    {"llama_untied", "{\"tie_word_embeddings\": 1}", "tie_word_embeddings: expected true or false"},
    {"llama_untied", "{\"attention_bias\": \"false\"}", "attention_bias: expected true or false"},
    /* heads */
    {"llama_untied", "{\"num_key_value_heads\": 3}",
     "num_attention_heads 4 is no multiple of num_key_value_heads 3"},
    {"llama_untied", "{\"num_attention_heads\": 6, \"head_dim\": null}",
     "hidden_size 64 is no multiple of num_attention_heads 6"},
    {"llama_untied", "{\"head_dim\": 15}", "head_dim 15 is not even"},
    {"llama_untied", "{\"head_dim\": 1024}", "head_dim: expected"},
    {"qwen3", "{\"num_key_value_heads\": \"<absent>\"}", "num_key_value_heads is missing"},
    /* experts */
    {"qwen3_moe", "{\"num_local_experts\": \"<absent>\"}", "num_experts is missing"},
    {"qwen3_moe", "{\"num_experts\": 9}", "num_experts: expected the value of num_local_experts"},
    {"qwen3_moe", "{\"num_local_experts\": 0}", "num_local_experts: expected"},
    {"qwen3_moe", "{\"num_experts_per_tok\": 9}",
     "num_experts_per_tok: expected an integer from 1 "
     "to 8"},
    {"qwen3_moe", "{\"decoder_sparse_step\": 0}", "decoder_sparse_step: expected"},
    {"qwen3_moe", "{\"mlp_only_layers\": [3]}",
     "mlp_only_layers: expected layer numbers from 0 to "
     "2, got 3"},
    {"qwen3_moe", "{\"mlp_only_layers\": [-1]}", "mlp_only_layers"},
    {"qwen3_moe", "{\"mlp_only_layers\": 1}", "mlp_only_layers: expected an array"},
    {"qwen3_moe", "{\"norm_topk_prob\": null, \"moe_intermediate_size\": null}",
     "moe_intermediate_size is missing"},
    /* eos */
    {"qwen3", "{\"eos_token_id\": -1}", "eos_token_id: expected token ids"},
    {"qwen3", "{\"eos_token_id\": [2, \"x\"]}", "eos_token_id: expected token ids"},
    {"qwen3", "{\"eos_token_id\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}", "eos_token_id: more than 8"},
};

START_TEST(unsupported_is_refused_by_name)
{
    model_config_t config, before;
    lk_error_t err = LK_ERROR_INIT;
    memset(&config, 0x5A, sizeof config);
    before = config;
    lk_status_t status = parse(refusals[_i].fixture, refusals[_i].patch, NULL, &config, &err);
    ck_assert_msg(status < 0, "accepted: %s", refusals[_i].patch);
    ck_assert_int_eq(status, err.status);
    ck_assert_msg(strstr(err.text, refusals[_i].text) != NULL, "%s gave: %s", refusals[_i].patch,
                  err.text);
    ck_assert_msg(strstr(err.text, "config.json: ") != NULL, "%s", err.text);
    ck_assert_mem_eq(&config, &before, sizeof config);
}
END_TEST

START_TEST(broken_json_is_refused)
{
    static const char *const texts[] = {"",
                                        "{",
                                        "[]",
                                        "null",
                                        "\"x\"",
                                        "{\"hidden_size\": 1, \"hidden_size\": 2}",
                                        "{\"hidden_size\": 1e999}",
                                        "{\"hidden_size\": 99999999999999999999}",
                                        "{} x",
                                        "{\"a\": \"\xff\"}"};
    model_config_t config;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_lt(model_config_parse(texts[i], strlen(texts[i]), NULL, 0, &config, &err), 0);
        ck_assert_msg(strncmp(err.text, "config.json: ", 13) == 0, "%s: %s", texts[i], err.text);
    }
    size_t deep = 100000;
    char *nested = malloc(deep);
    memset(nested, '[', deep);
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_lt(model_config_parse(nested, deep, NULL, 0, &config, &err), 0);
    free(nested);
}
END_TEST

START_TEST(files_are_named)
{
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    char dir[512], path[600];
    snprintf(dir, sizeof dir, "%s/model", test_tmpdir());
    ck_assert_int_eq(mkdir(dir, 0755), 0);
    ck_assert_int_eq(model_config_load(dir, &config, &err), LK_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.text, "/model/config.json"));
    snprintf(path, sizeof path, "%s/config.json", dir);
    ck_assert_int_eq(mkfifo(path, 0644), 0);
    ck_assert_int_eq(model_config_load(dir, &config, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "not a regular file"));
    ck_assert_int_eq(remove(path), 0);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(ftruncate(fileno(f), (5 << 20)), 0);
    fclose(f);
    ck_assert_int_eq(model_config_load(dir, &config, &err), LK_ERR_TOO_LARGE);
    char *text = patched("qwen3", "{\"mlp_bias\": true}");
    f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
    free(text);
    ck_assert_int_eq(model_config_load(dir, &config, &err), LK_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "/model: config.json: mlp_bias"));
    text = patched("qwen3", "{}");
    f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
    free(text);
    ck_ok(model_config_load(dir, &config, &err));
    ck_assert_uint_eq(config.n_eos, 1);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("model_config");
    TCase *tc = tcase_create("accepts");
    tcase_add_test(tc, fixtures_say_what_they_are);
    tcase_add_test(tc, both_dialects_agree);
    tcase_add_test(tc, optional_fields_have_their_class_defaults);
    tcase_add_test(tc, eos_ids_of_both_files_are_joined);
    tcase_add_test(tc, broken_json_is_refused);
    tcase_add_test(tc, files_are_named);
    suite_add_tcase(suite, tc);
    TCase *refuse = tcase_create("refuses");
    tcase_add_loop_test(refuse, unsupported_is_refused_by_name, 0,
                        (int)(sizeof refusals / sizeof refusals[0]));
    suite_add_tcase(suite, refuse);
    return suite;
}
