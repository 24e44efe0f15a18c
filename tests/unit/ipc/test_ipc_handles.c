/* The handles of an update: recorded ones of torch's, and everything that can be wrong with them.
 */
#include "base/base64.h"
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/ipc/ipc_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UUID "84135ed2-9dce-b2e5-bcd1-eebe17e77a17"

static json_t *load_fixture(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/wire/%s", test_fixtures(), name);
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    ck_assert_msg(root != NULL, "%s: %s", path, error.text);
    return root;
}

static lk_status_t parse(const tensor_desc_t *tensors, size_t n, bool packed, const char *pickled,
                         const char *uuid, ipc_handles_t *out, lk_error_t *err)
{
    json_t *info = json_pack("{s:s}", "ipc_handles_pickled", pickled);
    json_t *sizes = json_array();
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&tensors[i], &bytes));
        json_array_append_new(sizes, json_integer((json_int_t)bytes));
    }
    json_object_set_new(info, "tensor_sizes", sizes);
    wte_update_t update = {
        .tensors = tensors, .n_tensors = n, .packed = packed, .update_info = info};
    lk_status_t status = ipc_handles_parse(&update, uuid, out, err);
    json_decref(info);
    return status;
}

/* ---- torch's own ---- */

static const struct {
    const char *key;
    tensor_desc_t desc;
    uint64_t offset, bytes;
    uint32_t counter;
} recorded[] = {
    {"f32", {"f32", LK_DTYPE_F32, 2, {2, 3}}, 0, 24, 0},
    {"param_bf16", {"param_bf16", LK_DTYPE_BF16, 2, {4, 5}}, 512, 40, 1},
    {"packed_u8", {"packed_u8", LK_DTYPE_U8, 1, {1048576}}, 1024, 1048576, 2},
    {"view_f16", {"view_f16", LK_DTYPE_F16, 2, {3, 10}}, 1049600 + 40, 60, 3},
};

static void assert_recorded(const json_t *one, size_t i, const ipc_handles_t *handles)
{
    const ipc_export_t *export = &handles->exports[0];
    const char *text = json_string_value(json_array_get(json_object_get(one, "args"), 7));
    uint8_t handle[128], event[128];
    size_t n;
    ck_assert(base64_decode(text, strlen(text), handle, sizeof handle, &n));
    ck_assert_uint_eq(n, 66);
    text = json_string_value(json_array_get(json_object_get(one, "args"), 13));
    ck_assert(base64_decode(text, strlen(text), event, sizeof event, &n));
    ck_assert_uint_eq(handles->n, 1);
    ck_assert_mem_eq(export->memory, handle + 2, 64);
    ck_assert_mem_eq(export->event, event, 64);
    ck_assert(export->wait);
    ck_assert_uint_eq(export->offset, recorded[i].offset);
    ck_assert_uint_eq(export->bytes, recorded[i].bytes);
    ck_assert_uint_eq(export->counter, recorded[i].counter);
    ck_assert_str_eq(export->counter_name, json_string_value(json_object_get(
                                               json_object_get(one, "ref_counter"), "name")));
}

START_TEST(torchs_handles_are_read)
{
    json_t *root = load_fixture("ipc_plain.json");
    const json_t *one = json_object_get(root, recorded[_i].key);
    static const char *const keys[] = {"pickled_list_b64", "pickled_with_func_b64"};
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    for (size_t k = 0; k < LK_ARRAY_LEN(keys); k++) {
        const char *text = json_string_value(json_object_get(one, keys[k]));
        lk_status_t st = parse(&recorded[_i].desc, 1, false, text, UUID, &handles, &err);
        ck_assert_msg(st == LK_OK, "%s", err.text);
        assert_recorded(one, (size_t)_i, &handles);
        ipc_handles_fini(&handles);
    }
    const char *text = json_string_value(json_object_get(one, "pickled_dict_b64"));
    tensor_desc_t inside = {"a", LK_DTYPE_U8, 1, {recorded[_i].bytes - 1}};
    lk_status_t st = parse(&inside, 1, true, text, UUID, &handles, &err);
    ck_assert_msg(st == LK_OK, "%s", err.text);
    assert_recorded(one, (size_t)_i, &handles);
    ipc_handles_fini(&handles);
    inside.shape[0] += 2;
    ck_assert_int_eq(parse(&inside, 1, true, text, UUID, &handles, &err), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, "bytes, the packed buffer") != NULL, "%s", err.text);
    json_decref(root);
}
END_TEST

START_TEST(expandable_segments_are_refused)
{
    json_t *root = load_fixture("ipc_expandable.json");
    const json_t *one = json_object_get(root, recorded[_i].key);
    const char *text = json_string_value(json_object_get(one, "pickled_list_b64"));
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    lk_status_t st = parse(&recorded[_i].desc, 1, false, text, UUID, &handles, &err);
    ck_assert_int_eq(st, LK_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, "expandable_segments:True") != NULL, "%s", err.text);
    json_decref(root);
}
END_TEST

START_TEST(another_gpu_is_named)
{
    json_t *root = load_fixture("ipc_plain.json");
    const json_t *one = json_object_get(root, "f32");
    const char *text = json_string_value(json_object_get(one, "pickled_list_b64"));
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    lk_status_t st = parse(&recorded[0].desc, 1, false, text,
                           "00000000-0000-0000-0000-000000000001", &handles, &err);
    ck_assert_int_eq(st, LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "f32: IPC handle not found for GPU UUID "
                               "00000000-0000-0000-0000-000000000001. Available UUIDs: [" UUID "]");
    json_decref(root);
}
END_TEST

/* ---- what can be wrong ---- */

typedef void (*spoil_fn)(ipc_args_t *args);

static void spoil_stride(ipc_args_t *a)
{
    a->stride[0] = 5;
}
static void spoil_shape(ipc_args_t *a)
{
    a->shape[1] = 4;
    a->stride[0] = 4;
    a->storage_bytes = 1000;
}
static void spoil_negative_shape(ipc_args_t *a)
{
    a->shape[0] = -2;
}
static void spoil_huge_shape(ipc_args_t *a)
{
    a->shape[0] = INT64_MAX;
}
static void spoil_dtype(ipc_args_t *a)
{
    a->dtype = "bfloat16";
}
static void spoil_unknown_dtype(ipc_args_t *a)
{
    a->dtype = "complex64";
}
static void spoil_storage(ipc_args_t *a)
{
    a->storage_bytes = 23;
}
static void spoil_offset(ipc_args_t *a)
{
    a->offset = INT64_MAX;
}
static void spoil_negative_offset(ipc_args_t *a)
{
    a->storage_offset = -1;
}
static void spoil_far_offset(ipc_args_t *a)
{
    a->storage_offset = INT64_MAX;
}
static void spoil_handle(ipc_args_t *a)
{
    a->handle_len = 65;
}
static void spoil_handle_type(ipc_args_t *a)
{
    a->handle[1] = 'x';
}
static void spoil_no_handle(ipc_args_t *a)
{
    a->handle_len = 0;
}
static void spoil_counter_name(ipc_args_t *a)
{
    strcpy(a->counter_name, "/sem.database");
}
static void spoil_counter_path(ipc_args_t *a)
{
    strcpy(a->counter_name, "/torch_../../etc/passwd");
}
static void spoil_counter_length(ipc_args_t *a)
{
    strcpy(a->counter_name, "/torch_");
    memset(a->counter_name + 7, 'a', 100);
}
static void spoil_counter(ipc_args_t *a)
{
    a->counter = 10000;
}
static void spoil_event(ipc_args_t *a)
{
    a->wait = true;
    a->event_len = 63;
}

static const struct {
    spoil_fn spoil;
    const char *text;
} spoiled[] = {
    {spoil_stride, "t: it is not contiguous"},
    {spoil_shape, "t: its handle is of float32 [2, 4], but it is announced as float32 [2, 3]"},
    {spoil_negative_shape, "t: it is not contiguous, or has no proper shape"},
    {spoil_huge_shape, "no proper shape"},
    {spoil_dtype, "t: its handle is of bfloat16 [2, 3], but it is announced as float32 [2, 3]"},
    {spoil_unknown_dtype, "t: argument 5 is no known dtype"},
    {spoil_storage, "t: the tensor does not fit into its storage"},
    {spoil_offset, "does not fit into its storage"},
    {spoil_negative_offset, "arguments 3, 8 and 9"},
    {spoil_far_offset, "does not fit into its storage"},
    {spoil_handle, "a storage handle of 65 bytes, version 2 and type 99"},
    {spoil_handle_type, "a storage handle of 66 bytes, version 2 and type 120"},
    {spoil_no_handle, "a storage handle of 0 bytes"},
    {spoil_counter_name, "argument 11"},
    {spoil_counter_path, "argument 11"},
    {spoil_counter_length, "argument 11"},
    {spoil_counter, "argument 12"},
    {spoil_event, "argument 13"},
};

START_TEST(misfits_are_named)
{
    static const uint8_t handle[64] = {1};
    const uint64_t shape[] = {2, 3};
    tensor_desc_t desc = {"t", LK_DTYPE_F32, 2, {2, 3}};
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    ipc_args_t args = ipc_args("float32", 2, shape, handle, 16, "/torch_1_2_3", 4);
    args.plain_shape = _i % 2 == 0;
    char *text = ipc_pickle_list(&args, 1, UUID);
    lk_status_t st = parse(&desc, 1, false, text, UUID, &handles, &err);
    ck_assert_msg(st == LK_OK, "%s", err.text);
    ck_assert_uint_eq(handles.exports[0].offset, 16);
    ck_assert(!handles.exports[0].wait);
    ipc_handles_fini(&handles);
    free(text);
    spoiled[_i].spoil(&args);
    text = ipc_pickle_list(&args, 1, UUID);
    ck_assert_int_eq(parse(&desc, 1, false, text, UUID, &handles, &err), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, spoiled[_i].text) != NULL, "%s", err.text);
    ck_assert_ptr_null(handles.exports);
    free(text);
}
END_TEST

/* The legacy handle is the 64 bytes alone. */
START_TEST(a_bare_handle_is_one)
{
    static const uint8_t handle[64] = {9, 8, 7};
    const uint64_t shape[] = {4};
    tensor_desc_t desc = {"t", LK_DTYPE_BF16, 1, {4}};
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    ipc_args_t args = ipc_args("bfloat16", 1, shape, handle, 0, "/torch_1", 0);
    memmove(args.handle, args.handle + 2, 64);
    args.handle_len = 64;
    char *text = ipc_pickle_list(&args, 1, UUID);
    ck_assert_int_eq(parse(&desc, 1, false, text, UUID, &handles, &err), LK_OK);
    ck_assert_mem_eq(handles.exports[0].memory, handle, 64);
    ipc_handles_fini(&handles);
    free(text);
}
END_TEST

START_TEST(fields_are_checked)
{
    static const struct {
        const char *info, *text;
        bool packed;
    } rows[] = {
        {"{}", "Either `ipc_handles` or `ipc_handles_pickled` must be provided", false},
        {"{\"ipc_handles\": [], \"ipc_handles_pickled\": \"\"}", "Cannot specify both", false},
        {"{\"ipc_handles\": []}", "send `ipc_handles_pickled`", false},
        {"{\"ipc_handles_pickled\": 7}", "must be standard base64", false},
        {"{\"ipc_handles_pickled\": \"a-_b\"}", "must be standard base64", false},
        {"{\"ipc_handles_pickled\": \"\"}", "ipc_handles_pickled: ", false},
        {"{\"ipc_handles_pickled\": \"gARdlC4=\"}", "same size as `names`: got 0 and 1", false},
        {"{\"ipc_handles_pickled\": \"gAROLg==\"}", "same size as `names`: got 0 and 1", false},
        {"{\"ipc_handles_pickled\": \"gAROLg==\"}", "are no dict by GPU UUID", true},
        {"{\"ipc_handles_pickled\": \"gAR9lC4=\"}", "Available UUIDs: []", true},
    };
    tensor_desc_t desc = {"t", LK_DTYPE_F32, 2, {2, 3}};
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        json_t *info = json_loads(rows[i].info, 0, NULL);
        wte_update_t update = {
            .tensors = &desc, .n_tensors = 1, .packed = rows[i].packed, .update_info = info};
        lk_error_t err = LK_ERROR_INIT;
        ipc_handles_t handles = {0};
        lk_status_t st = ipc_handles_parse(&update, UUID, &handles, &err);
        ck_assert_msg(st == LK_ERR_INVALID || st == LK_ERR_UNSUPPORTED, "row %zu", i);
        ck_assert_msg(strstr(err.text, rows[i].text) != NULL, "row %zu: %s", i, err.text);
        json_decref(info);
    }
}
END_TEST

START_TEST(packed_sizes_are_checked)
{
    static const struct {
        const char *sizes, *text;
    } rows[] = {
        {"null", "`tensor_sizes` is required when packed=True"},
        {"[]", "`tensor_sizes` should be of the same size as `names`: got 0 and 2"},
        {"[24, 3]", "tensor_sizes[1] is not the 4 bytes of u"},
        {"[24, -4]", "tensor_sizes[1]"},
        {"[24.0, 4]", "tensor_sizes[0]"},
    };
    static const uint8_t handle[64] = {1};
    const uint64_t shape[] = {28};
    ipc_args_t args = ipc_args("uint8", 1, shape, handle, 0, "/torch_1", 0);
    char *text = ipc_pickle_dict(&args, UUID);
    const tensor_desc_t descs[] = {{"t", LK_DTYPE_F32, 2, {2, 3}}, {"u", LK_DTYPE_BF16, 1, {2}}};
    ipc_handles_t handles = {0};
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(parse(descs, 2, true, text, UUID, &handles, &err), LK_OK);
    ipc_handles_fini(&handles);
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        json_t *info = json_pack("{s:s, s:o}", "ipc_handles_pickled", text, "tensor_sizes",
                                 json_loads(rows[i].sizes, JSON_DECODE_ANY, NULL));
        wte_update_t update = {
            .tensors = descs, .n_tensors = 2, .packed = true, .update_info = info};
        ck_assert_int_eq(ipc_handles_parse(&update, UUID, &handles, &err), LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, rows[i].text) != NULL, "row %zu: %s", i, err.text);
        json_decref(info);
    }
    free(text);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("ipc_handles");
    TCase *tc = tcase_create("ipc_handles");
    tcase_add_loop_test(tc, torchs_handles_are_read, 0, LK_ARRAY_LEN(recorded));
    tcase_add_loop_test(tc, expandable_segments_are_refused, 0, LK_ARRAY_LEN(recorded));
    tcase_add_test(tc, another_gpu_is_named);
    tcase_add_loop_test(tc, misfits_are_named, 0, LK_ARRAY_LEN(spoiled));
    tcase_add_test(tc, a_bare_handle_is_one);
    tcase_add_test(tc, fields_are_checked);
    tcase_add_test(tc, packed_sizes_are_checked);
    suite_add_tcase(suite, tc);
    return suite;
}
