#include "tests/unit/exec/model_fixture.h"

#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const model_fixtures[N_MODEL_FIXTURES] = {
    "llama3_rope_scaled", "llama_smol_tied", "llama_untied", "qwen2_bias", "qwen3",
    "qwen3_moe",          "qwen3_moe_mixed",
};

const char *model_fixture_dir(const char *name)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s/models/%s", test_fixtures(), name);
    return path;
}

void model_fixture_config(const char *name, model_config_t *out)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(model_config_load(model_fixture_dir(name), out, &err) == LK_OK, "%s", err.text);
}

weight_table_t *model_fixture_table(const char *name, lk_dtype_t stored, uint32_t rank,
                                    uint32_t size)
{
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    model_fixture_config(name, &config);
    weight_table_t *table = weight_table_new(&config, stored, rank, size, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    return table;
}

weight_table_t *model_fixture_load(const char *name, lk_dtype_t stored, uint32_t rank,
                                   uint32_t size)
{
    lk_error_t err = LK_ERROR_INIT;
    weight_table_t *table = model_fixture_table(name, stored, rank, size);
    lk_status_t status = weight_table_load(table, model_fixture_dir(name), &err);
    ck_assert_msg(status == LK_OK, "%s: %s", name, err.text);
    return table;
}

/* ---- lists ---- */

static void *must_alloc(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);
    ck_assert_ptr_nonnull(p);
    return p;
}

static void alloc_list(trainer_list_t *list, size_t n)
{
    list->n = n;
    list->descs = must_alloc(n, sizeof *list->descs);
    list->data = must_alloc(n, sizeof *list->data);
    list->sha256 = must_alloc(n, sizeof *list->sha256);
}

typedef struct {
    const weight_table_t *source;
    char *out;
} gather_t;

static lk_status_t gather_piece(void *ctx, const name_piece_t *piece, lk_error_t *err)
{
    gather_t *g = ctx;
    const weight_slot_t *slot = weight_table_find(g->source, piece->name);
    ck_assert_msg(slot != NULL && slot->numel == piece->numel, "%s", piece->name);
    memcpy(g->out + piece->offset * 2, slot->data, piece->numel * 2);
    return LK_OK;
}

void trainer_list_init(trainer_list_t *list, const char *name, const weight_table_t *source)
{
    char path[1100];
    name_rules_dims_t dims;
    lk_error_t err = LK_ERROR_INIT;
    snprintf(path, sizeof path, "%s/models/trainer_parameters.json", test_fixtures());
    json_t *root = json_load_file(path, 0, NULL);
    json_t *all = json_object_get(json_object_get(root, name), "named_parameters");
    ck_assert_uint_gt(json_array_size(all), 0);
    alloc_list(list, json_array_size(all));
    model_config_dims(weight_table_config(source), &dims);
    for (size_t i = 0; i < list->n; i++) {
        const json_t *one = json_array_get(all, i);
        const json_t *shape = json_object_get(one, "shape");
        tensor_desc_t *desc = &list->descs[i];
        uint64_t bytes;
        desc->name = strdup(json_string_value(json_object_get(one, "name")));
        ck_assert(dtype_parse(json_string_value(json_object_get(one, "dtype")), &desc->dtype));
        ck_assert(desc->dtype == LK_DTYPE_BF16);
        desc->ndim = (uint32_t)json_array_size(shape);
        for (uint32_t d = 0; d < desc->ndim; d++) {
            desc->shape[d] = (uint64_t)json_integer_value(json_array_get(shape, d));
        }
        ck_assert(tensor_desc_bytes(desc, &bytes));
        list->sha256[i] = strdup(json_string_value(json_object_get(one, "sha256")));
        list->data[i] = must_alloc(bytes, 1);
        gather_t gather = {source, list->data[i]};
        ck_assert_msg(name_rules_expand(&dims, desc, gather_piece, &gather, &err) == LK_OK, "%s",
                      err.text);
    }
    json_decref(root);
}

void trainer_list_init_split(trainer_list_t *list, const weight_table_t *source)
{
    lk_dtype_t dtype = weight_table_dtype(source);
    alloc_list(list, weight_table_count(source));
    for (size_t i = 0; i < list->n; i++) {
        const weight_slot_t *slot = weight_table_at(source, i);
        size_t bytes = slot->numel * dtype_bytes(dtype);
        list->descs[i] = (tensor_desc_t){.name = strdup(slot->name),
                                         .dtype = dtype,
                                         .ndim = slot->ndim,
                                         .shape = {slot->shape[0], slot->shape[1]}};
        list->data[i] = must_alloc(bytes, 1);
        memcpy(list->data[i], slot->data, bytes);
    }
}

void trainer_list_convert(trainer_list_t *list, lk_dtype_t dtype)
{
    for (size_t i = 0; i < list->n; i++) {
        uint64_t numel;
        ck_assert(tensor_desc_numel(&list->descs[i], &numel));
        void *data = must_alloc(numel, dtype_bytes(dtype));
        ck_ok(dtype_convert(data, dtype, list->data[i], list->descs[i].dtype, numel));
        free(list->data[i]);
        list->data[i] = data;
        list->descs[i].dtype = dtype;
    }
}

void trainer_list_shuffle(trainer_list_t *list, uint64_t seed)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, seed);
    for (size_t i = list->n; i > 1; i--) {
        size_t j = (size_t)lk_prng_below(&prng, i);
        tensor_desc_t desc = list->descs[i - 1];
        void *data = list->data[i - 1];
        char *sha256 = list->sha256[i - 1];
        list->descs[i - 1] = list->descs[j];
        list->data[i - 1] = list->data[j];
        list->sha256[i - 1] = list->sha256[j];
        list->descs[j] = desc;
        list->data[j] = data;
        list->sha256[j] = sha256;
    }
}

void trainer_list_fini(trainer_list_t *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free((char *)list->descs[i].name);
        free(list->data[i]);
        free(list->sha256[i]);
    }
    free(list->descs);
    free(list->data);
    free(list->sha256);
}

lk_status_t trainer_list_send(const trainer_list_t *list, weight_table_t *table, bool direct,
                              lk_error_t *err)
{
    weight_sink_t sink = weight_table_sink(table);
    sink.ops->begin(sink.ctx);
    LK_RETURN_IF_ERROR(sink.ops->plan(sink.ctx, list->descs, list->n, err));
    for (size_t i = 0; i < list->n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list->descs[i], &bytes));
        const void *from = list->data[i];
        void *place = direct ? sink.ops->direct(sink.ctx, i) : NULL;
        if (place != NULL) {
            memcpy(place, from, bytes);
            from = place;
        }
        LK_RETURN_IF_ERROR(weight_sink_store(&sink, i, from, bytes, err));
    }
    return LK_OK;
}
