#include "base/check.h"
#include "tests/lib/test_main.h"
#include "transfer/pickle.h"

#include <jansson.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *load_fixture(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/wire/%s", test_fixtures(), name);
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    ck_assert_msg(root != NULL, "%s: %s", path, error.text);
    return root;
}

/* Caller frees. */
static uint8_t *decode(const json_t *text, size_t *len)
{
    ck_assert(json_is_string(text));
    size_t n = json_string_length(text);
    const char *chars = json_string_value(text);
    uint8_t *out = malloc(n + 1);
    int got = EVP_DecodeBlock(out, (const unsigned char *)chars, (int)n);
    ck_assert_int_ge(got, 0);
    *len = (size_t)got - (size_t)(n > 0 && chars[n - 1] == '=') -
           (size_t)(n > 1 && chars[n - 2] == '=');
    return out;
}

static pickle_t *parse(const void *bytes, size_t len)
{
    pickle_t *pickle = NULL;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t st =
        pickle_parse(bytes, len, pickle_globals_ipc, pickle_n_globals_ipc, &pickle, &err);
    ck_assert_msg(st == LK_OK, "%s", err.text);
    return pickle;
}

START_TEST(the_recorded_unique_id)
{
    json_t *root = load_fixture("tcpstore.json");
    size_t len;
    uint8_t *bytes = decode(json_object_get(root, "uid_pickle_b64"), &len);
    ck_assert_uint_eq(len, PICKLE_UNIQUE_ID_BYTES);
    uint8_t id[NCCL_ID_BYTES], again[PICKLE_UNIQUE_ID_BYTES];
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(pickle_unique_id(bytes, len, id, &err) == LK_OK, "%s", err.text);
    for (int i = 0; i < NCCL_ID_BYTES; i++) {
        ck_assert_uint_eq(id[i], (uint8_t)i);
    }
    pickle_unique_id_write(id, again);
    ck_assert_mem_eq(again, bytes, len);
    free(bytes);
    json_decref(root);
}
END_TEST

/* One dict of the four forms that a trainer may send: args of rebuild_cuda_tensor. */
static const pickle_value_t *args_of(const pickle_value_t *root, bool list, bool func,
                                     const char *uuid)
{
    const pickle_value_t *dict = list ? pickle_item(root, 0, PICKLE_DICT) : root;
    const pickle_value_t *args = pickle_get(dict, uuid);
    if (func) {
        ck_assert(pickle_is_global(pickle_item(args, 0, PICKLE_GLOBAL),
                                   "torch.multiprocessing.reductions", "rebuild_cuda_tensor"));
        args = pickle_item(args, 1, PICKLE_TUPLE);
    }
    ck_assert_ptr_nonnull(args);
    ck_assert_uint_eq(args->n, 15);
    return args;
}

static void expect_number(const json_t *text, const pickle_value_t *value)
{
    ck_assert_ptr_nonnull(value);
    ck_assert_int_eq(value->integer, strtoll(json_string_value(text), NULL, 10));
}

static void expect_bytes(const json_t *text, const pickle_value_t *value)
{
    size_t len;
    uint8_t *bytes = decode(text, &len);
    ck_assert_ptr_nonnull(value);
    ck_assert_uint_eq(value->len, len);
    ck_assert_mem_eq(value->bytes, bytes, len);
    free(bytes);
}

static void check_handle(const json_t *tensor, const char *key, const char *uuid)
{
    size_t len;
    uint8_t *bytes = decode(json_object_get(tensor, key), &len);
    pickle_t *pickle = parse(bytes, len);
    bool func = strstr(key, "func") != NULL, list = strstr(key, "dict") == NULL;
    const pickle_value_t *args = args_of(pickle_root(pickle), list, func, uuid);
    const json_t *said = json_object_get(tensor, "args");
    const pickle_value_t *size = pickle_call_args(args->items[1], "torch", "Size");
    ck_assert_ptr_nonnull(pickle_item(pickle_item(size, 0, PICKLE_TUPLE), 0, PICKLE_INT));
    ck_assert_ptr_nonnull(pickle_item(args, 2, PICKLE_TUPLE));
    ck_assert(pickle_is_global(args->items[4], "torch.storage", "TypedStorage"));
    ck_assert_ptr_nonnull(pickle_item(args, 5, PICKLE_GLOBAL));
    expect_number(json_array_get(said, 3), pickle_item(args, 3, PICKLE_INT));
    expect_number(json_array_get(said, 6), pickle_item(args, 6, PICKLE_INT));
    expect_bytes(json_array_get(said, 7), pickle_item(args, 7, PICKLE_BYTES));
    expect_number(json_array_get(said, 8), pickle_item(args, 8, PICKLE_INT));
    expect_number(json_array_get(said, 9), pickle_item(args, 9, PICKLE_INT));
    expect_bytes(json_array_get(said, 11), pickle_item(args, 11, PICKLE_BYTES));
    expect_number(json_array_get(said, 12), pickle_item(args, 12, PICKLE_INT));
    expect_bytes(json_array_get(said, 13), pickle_item(args, 13, PICKLE_BYTES));
    ck_assert_ptr_nonnull(pickle_item(args, 14, PICKLE_BOOL));
    /* what isn't there is NULL, not a crash */
    ck_assert_ptr_null(pickle_item(args, 15, PICKLE_BOOL));
    ck_assert_ptr_null(pickle_item(args, 14, PICKLE_INT));
    ck_assert_ptr_null(pickle_get(args, "x"));
    ck_assert_ptr_null(pickle_call_args(args, "torch", "Size"));
    pickle_destroy(&pickle);
    free(bytes);
}

START_TEST(the_recorded_ipc_handles)
{
    static const char *const files[] = {"ipc_plain.json", "ipc_expandable.json"};
    static const char *const tensors[] = {"f32", "param_bf16", "packed_u8", "view_f16"};
    static const char *const keys[] = {"pickled_list_b64", "pickled_dict_b64",
                                       "pickled_with_func_b64"};
    json_t *root = load_fixture(files[_i]);
    const char *uuid = json_string_value(json_object_get(root, "uuid"));
    for (size_t t = 0; t < LK_ARRAY_LEN(tensors); t++) {
        for (size_t k = 0; k < LK_ARRAY_LEN(keys); k++) {
            check_handle(json_object_get(root, tensors[t]), keys[k], uuid);
        }
    }
    json_decref(root);
}
END_TEST

#define P(text) text, sizeof(text) - 1

static const struct {
    const char *bytes;
    size_t len;
    int64_t value;
} numbers[] = {
    {P("\x80\x04J\xff\xff\xff\xff."), -1},
    {P("\x80\x04J\x00\x00\x00\x80."), INT32_MIN},
    {P("\x80\x04K\xff."), 255},
    {P("\x80\x04M\xff\xff."), 65535},
    {P("\x80\x04\x8a\x00."), 0},
    {P("\x80\x04\x8a\x01\xff."), -1},
    {P("\x80\x04\x8a\x05\x00\x00\x00\x00\x01."), 1ll << 32},
    {P("\x80\x04\x8a\x05\x00\x00\x00\x00\x80."), -(1ll << 39)},
    {P("\x80\x04\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."), INT64_MIN},
    {P("\x80\x02\x88."), 1},
    {P("\x80\x05\x89."), 0},
};

START_TEST(integers)
{
    pickle_t *pickle = parse(numbers[_i].bytes, numbers[_i].len);
    ck_assert_int_eq(pickle_root(pickle)->integer, numbers[_i].value);
    pickle_destroy(&pickle);
}
END_TEST

START_TEST(older_protocols_name_globals_by_lines)
{
    static const char text[] = "\x80\x02(ctorch\nSize\nq\x00(K\x03t\x85Rq\x01h\x00h\x01t.";
    pickle_t *pickle = parse(text, sizeof text - 1);
    const pickle_value_t *root = pickle_root(pickle);
    ck_assert_uint_eq(root->n, 3);
    ck_assert_ptr_nonnull(pickle_call_args(root->items[0], "torch", "Size"));
    ck_assert(pickle_is_global(root->items[1], "torch", "Size"));
    ck_assert_ptr_eq(root->items[0], root->items[2]);
    pickle_destroy(&pickle);
}
END_TEST

START_TEST(of_a_key_that_comes_twice_the_last_counts)
{
    static const char text[] = "\x80\x04}(\x8c\x01"
                               "aK\x01\x8c\x01"
                               "aK\x02u.";
    pickle_t *pickle = parse(text, sizeof text - 1);
    ck_assert_int_eq(pickle_get(pickle_root(pickle), "a")->integer, 2);
    ck_assert_ptr_null(pickle_get(pickle_root(pickle), "b"));
    pickle_destroy(&pickle);
}
END_TEST

static const struct {
    const char *bytes;
    size_t len;
    const char *says;
} hostile[] = {
    {P(""), "no PROTO"},
    {P("N."), "no PROTO"},
    {P("\x80\x01N."), "protocol other than 2 to 5"},
    {P("\x80\x06N."), "protocol other than 2 to 5"},
    {P("\x80\x04"), "an end without STOP"},
    {P("\x80\x04N"), "an end without STOP"},
    {P("\x80\x04."), "other than one value"},
    {P("\x80\x04NN."), "other than one value"},
    {P("\x80\x04N(."), "other than one value"},
    {P("\x80\x04N.x"), "an end before the end"},
    /* code that a pickle machine would run */
    {P("\x80\x04"
       "cos\nsystem\n\x8c\x02id\x85R."),
     "'os.system' is not allowed"},
    {P("\x80\x04\x8c\x02os\x8c\x06system\x93)R."), "'os.system' is not allowed"},
    {P("\x80\x04\x8c\x05torch\x8c\x04load\x93)R."), "'torch.load' is not allowed"},
    {P("\x80\x04\x8c\x0a"
       "torch.Size\x8c\x00\x93."),
     "'torch.Size.' is not allowed"},
    {P("\x80\x04ios\nsystem\n"), "opcode 0x69"},
    {P("\x80\x04(\x8c\x02ido."), "opcode 0x6f"},
    {P("\x80\x04)b."), "opcode 0x62"},
    {P("\x80\x04\x81."), "opcode 0x81"},
    {P("\x80\x04P0\n."), "opcode 0x50"},
    {P("\x80\x05\x97."), "opcode 0x97"},
    {P("\x80\x04\x8b\xff\xff\xff\x7f"), "opcode 0x8b"},
    {P("\x80\x04\x82\x01."), "opcode 0x82"},
    /* lengths that aren't there */
    {P("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN."), "frame that goes beyond"},
    {P("\x80\x04\x95\x01"), "frame that goes beyond"},
    {P("\x80\x04"
       "B\xff\xff\xff\xff"
       "a."),
     "text that goes beyond"},
    {P("\x80\x04"
       "C\x80"
       "a."),
     "text that goes beyond"},
    {P("\x80\x04X\x05\x00\x00\x00"
       "ab."),
     "text that goes beyond"},
    {P("\x80\x04\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x00."), "more than 64 bits"},
    {P("\x80\x04\x8a\x08\x00"), "more than 64 bits"},
    {P("\x80\x04J\x00\x00"), "integer that goes beyond"},
    {P("\x80\x04"
       "ctorch\nSize"),
     "global that goes beyond"},
    {P("\x80\x04"
       "c"),
     "global that goes beyond"},
    {P("\x80\x04\x8c\x02\xc3\x28."), "not UTF-8"},
    /* a stack that isn't there, or is somebody else's */
    {P("\x80\x04t."), "a mark is missing"},
    {P("\x80\x04"
       "e."),
     "a mark is missing"},
    {P("\x80\x04u."), "a mark is missing"},
    {P("\x80\x04\x85."), "more values than there are"},
    {P("\x80\x04N(\x85t."), "more values than there are"},
    {P("\x80\x04N\x86."), "more values than there are"},
    {P("\x80\x04"
       "a."),
     "too few values"},
    {P("\x80\x04](N"
       "a."),
     "too few values"},
    {P("\x80\x04Na."), "too few values"},
    {P("\x80\x04NNa."), "no open list or dict"},
    {P("\x80\x04}Na."), "no open list or dict"},
    {P("\x80\x04]NNs."), "no open list or dict"},
    {P("\x80\x04}NNs."), "a dict key that is no text"},
    {P("\x80\x04}(\x8c\x01"
       "au."),
     "a dict key without a value"},
    {P("\x80\x04\x93."), "a global without names"},
    {P("\x80\x04NN\x93."), "names are no texts"},
    {P("\x80\x04R."), "a call without arguments"},
    {P("\x80\x04NNR."), "a call of something that is no global"},
    {P("\x80\x04)\x8c\x05torch\x8c\x04Size\x93R."), "a call of something that is no global"},
    /* memo */
    {P("\x80\x04\x94."), "memo place out of order"},
    {P("\x80\x04Nq\x01."), "memo place out of order"},
    {P("\x80\x04Nr\xff\xff\xff\xff."), "memo place out of order"},
    {P("\x80\x04h\x00."), "memo place that holds nothing"},
    {P("\x80\x04j\xff\xff\xff\xff."), "memo place that holds nothing"},
    {P("\x80\x04Nq"), "memo place that goes beyond"},
    /* cycles */
    {P("\x80\x04]\x94h\x00"
       "a."),
     "nested too deeply"},
    {P("\x80\x04]\x94(h\x00"
       "e."),
     "nested too deeply"},
    {P("\x80\x04]\x94]\x94h\x00"
       "ah\x00h\x01"
       "a."),
     "no open list or dict"},
    {P("\x80\x04}\x94\x8c\x01"
       "ah\x00s."),
     "nested too deeply"},
    {P("\x80\x04]\x94\x85h\x00N"
       "a."),
     "no open list or dict"},
};

START_TEST(hostile_inputs_are_refused_with_a_reason)
{
    pickle_t *pickle = NULL;
    lk_error_t err = LK_ERROR_INIT;
    /* exactly as long as it is, so that a sanitizer sees a read beyond it */
    uint8_t *bytes = malloc(hostile[_i].len + 1);
    memcpy(bytes, hostile[_i].bytes, hostile[_i].len);
    bytes = realloc(bytes, hostile[_i].len > 0 ? hostile[_i].len : 1);
    lk_status_t st = pickle_parse(bytes, hostile[_i].len, pickle_globals_ipc, pickle_n_globals_ipc,
                                  &pickle, &err);
    ck_assert_int_lt(st, 0);
    ck_assert_int_eq(err.status, st);
    ck_assert_ptr_null(pickle);
    ck_assert_msg(strstr(err.text, hostile[_i].says) != NULL, "%s", err.text);
    free(bytes);
}
END_TEST

static lk_status_t parse_repeated(const char *unit, size_t unit_len, size_t times, lk_error_t *err)
{
    size_t len = 2 + unit_len * times;
    uint8_t *bytes = malloc(len);
    memcpy(bytes, "\x80\x04", 2);
    for (size_t i = 0; i < times; i++) {
        memcpy(bytes + 2 + i * unit_len, unit, unit_len);
    }
    pickle_t *pickle = NULL;
    lk_status_t st = pickle_parse(bytes, len, NULL, 0, &pickle, err);
    ck_assert_ptr_null(pickle);
    free(bytes);
    return st;
}

START_TEST(depth_stack_and_size_have_limits)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(parse_repeated(P("\x85"), 1, &err), LK_ERR_INVALID);
    ck_assert_int_eq(parse_repeated(P(")\x85\x85\x85\x85\x85\x85\x85\x85"), 3, &err),
                     LK_ERR_INVALID); /* eight deep is well, but there is no STOP */
    ck_assert_ptr_nonnull(strstr(err.text, "without STOP"));
    ck_assert_int_eq(parse_repeated(P("("), 17, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "nested too deeply"));
    ck_assert_int_eq(parse_repeated(P("N"), PICKLE_MAX_STACK + 1, &err), LK_ERR_TOO_LARGE);
    ck_assert_ptr_nonnull(strstr(err.text, "values on the stack"));
    /* each adds a value and takes it off the stack again */
    static const char deep[] =
        "N\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85";
    ck_assert_int_eq(parse_repeated(P(deep), 1, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "nested too deeply"));
    ck_assert_int_eq(pickle_parse("", (size_t)PICKLE_MAX_BYTES + 1, NULL, 0, NULL, &err),
                     LK_ERR_TOO_LARGE);
}
END_TEST

START_TEST(a_list_of_twice_the_same_list_costs_what_it_is_long)
{
    /* 2^12 leaves for a walker, 13 values for us */
    uint8_t bytes[256] = "\x80\x04()\x94"; /* every step's tuple, in a tuple of all */
    size_t len = 5;
    for (uint8_t i = 0; i < 12; i++) {
        const uint8_t pair[] = {'h', i, 'h', i, 0x86, 0x94};
        memcpy(bytes + len, pair, sizeof pair);
        len += sizeof pair;
    }
    bytes[len++] = 't';
    bytes[len++] = '.';
    pickle_t *pickle = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(pickle_parse(bytes, len, NULL, 0, &pickle, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(pickle_root(pickle)->depth, 14);
    ck_assert_uint_eq(pickle_root(pickle)->n, 13);
    pickle_destroy(&pickle);
}
END_TEST

static void refuse_id(const char *says, const char *bytes, size_t len)
{
    uint8_t id[NCCL_ID_BYTES];
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(pickle_unique_id(bytes, len, id, &err), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, says) != NULL, "%s", err.text);
}

START_TEST(an_id_is_an_id_of_128_bytes)
{
    uint8_t id[NCCL_ID_BYTES] = {0}, good[PICKLE_UNIQUE_ID_BYTES];
    lk_error_t err = LK_ERROR_INIT;
    pickle_unique_id_write(id, good);
    for (size_t cut = 0; cut < sizeof good; cut++) {
        ck_assert_int_lt(pickle_unique_id(good, cut, id, &err), 0);
    }
    refuse_id("no pickled ncclUniqueId", P("\x80\x04N."));
    refuse_id("no pickled ncclUniqueId", P("\x80\x04"
                                           "C\x01x."));
    refuse_id("'torch.Size' is not allowed", P("\x80\x04\x8c\x05torch\x8c\x04Size\x93)R."));
    refuse_id("no pickled ncclUniqueId", P("\x80\x04"
                                           "c_ctypes\n_unpickle\n)R."));
    refuse_id("of 1 bytes, not 128",
              P("\x80\x04"
                "c_ctypes\n_unpickle\n"
                "cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
                "}C\x01x\x86\x86R."));
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("pickle");
    TCase *tc = tcase_create("pickle");
    tcase_add_test(tc, the_recorded_unique_id);
    tcase_add_loop_test(tc, the_recorded_ipc_handles, 0, 2);
    tcase_add_loop_test(tc, integers, 0, (int)LK_ARRAY_LEN(numbers));
    tcase_add_test(tc, older_protocols_name_globals_by_lines);
    tcase_add_test(tc, of_a_key_that_comes_twice_the_last_counts);
    tcase_add_loop_test(tc, hostile_inputs_are_refused_with_a_reason, 0,
                        (int)LK_ARRAY_LEN(hostile));
    tcase_add_test(tc, depth_stack_and_size_have_limits);
    tcase_add_test(tc, a_list_of_twice_the_same_list_costs_what_it_is_long);
    tcase_add_test(tc, an_id_is_an_id_of_128_bytes);
    suite_add_tcase(suite, tc);
    return suite;
}
