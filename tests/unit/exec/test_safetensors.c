#include "transfer/safetensors.h"
#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* A header's JSON and the number of data bytes behind it, as a file's bytes. */
typedef struct {
    char *bytes;
    size_t len;
} file_bytes_t;

static file_bytes_t make_file(const char *json, size_t data)
{
    size_t n = strlen(json);
    file_bytes_t file = {calloc(1, 8 + n + data + 1), 8 + n + data};
    for (int i = 0; i < 8; i++) {
        file.bytes[i] = (char)(n >> (8 * i));
    }
    memcpy(file.bytes + 8, json, n);
    return file;
}

static lk_status_t parse(const char *json, size_t data, safetensors_t **out, lk_error_t *err)
{
    file_bytes_t file = make_file(json, data);
    lk_status_t status = safetensors_parse_header(file.bytes, file.len, file.len, out, err);
    free(file.bytes);
    return status;
}

#define T(name, dtype, shape, begin, end)                                                          \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end   \
    "]}"
#define A "{" T("a", "F32", "[2]", "0", "8")

START_TEST(good_headers_are_indexed)
{
    safetensors_t *file = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(
        parse(
            "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "BF16", "[3,1]", "8", "14") "," T(
                "empty", "F32", "[0,7]", "8",
                "8") "," T("a", "F32", "[2]", "0", "8") "," T("s", "I64", "[]", "14", "22") "}   ",
            22, &file, &err) == LK_OK,
        "%s", err.text);
    static const char *const order[] = {"a", "empty", "b", "s"};
    ck_assert_uint_eq(safetensors_count(file), 4);
    for (size_t i = 0; i < 4; i++) {
        const safetensors_entry_t *entry = safetensors_at(file, i);
        ck_assert_str_eq(entry->desc.name, order[i]);
        ck_assert_ptr_eq(safetensors_find(file, order[i]), entry);
        ck_assert_ptr_null(entry->data);
    }
    ck_assert_uint_eq(safetensors_find(file, "b")->bytes, 6);
    ck_assert_uint_eq(safetensors_find(file, "s")->desc.ndim, 0);
    ck_assert_ptr_null(safetensors_find(file, "c"));
    ck_assert_ptr_null(safetensors_find(file, "__metadata__"));
    safetensors_close(&file);
    ck_ok(parse("{}", 0, &file, &err));
    ck_assert_uint_eq(safetensors_count(file), 0);
    ck_assert_ptr_null(safetensors_find(file, "a"));
    safetensors_close(&file);
    safetensors_close(&file);
    safetensors_close(NULL);
}
END_TEST

static const struct {
    const char *json;
    size_t data;
    const char *text;
} refusals[] = {
    {"", 0, "does not start with {"},
    {" {}", 0, "does not start with {"},
    {"[]", 0, "does not start with {"},
    {"{", 0, "header: byte"},
    {"{}x", 0, "header: byte"},
    {"{\"a\":1}", 0, "tensor a: expected exactly dtype, shape and data_offsets"},
    {"{\"a\":{}}", 0, "expected exactly"},
    {A ",\"x\":{\"dtype\":\"F32\"}}", 8, "tensor x: expected exactly"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, "exactly"},
    {A "," T("a", "F32", "[2]", "8", "16") "}", 16, "duplicate object key"},
    {"{" T("a", "F9", "[2]", "0", "8") "}", 8, "tensor a: dtype F9 is not supported"},
    {"{" T("a", "F8_E4M3", "[8]", "0", "8") "}", 8, "dtype F8_E4M3 is not supported"},
    {"{" T("a", "float32", "[2]", "0", "8") "}", 8, "dtype float32 is not supported"},
    {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype is not a string"},
    {"{" T("a", "F32", "2", "0", "8") "}", 8, "shape is not an array"},
    {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,2]", "0", "8") "}", 8,
     "shape is not an array of at most 8"},
    {"{" T("a", "F32", "[-2]", "0", "8") "}", 8, "shape[0] is not a number"},
    {"{" T("a", "F32", "[2.0]", "0", "8") "}", 8, "shape[0] is not a number"},
    {"{" T("a", "F32", "[1,\"2\"]", "0", "8") "}", 8, "shape[1] is not a number"},
    {"{" T("a", "F32", "[2]", "0", "9") "}", 8,
     "data_offsets do not lie within the file's 8 bytes"},
    {"{" T("a", "F32", "[2]", "8", "0") "}", 8, "data_offsets do not lie within"},
    {"{" T("a", "F32", "[2]", "-8", "0") "}", 8, "data_offsets do not lie within"},
    {"{" T("a", "F32", "[2]", "0", "8,8") "}", 8, "data_offsets do not lie within"},
    {"{" T("a", "F32", "[2]", "0", "\"8\"") "}", 8, "data_offsets do not lie within"},
    {"{" T("a", "F32", "[2]", "0", "9223372036854775807") "}", 8, "data_offsets do not lie"},
    {"{" T("a", "F32", "[2]", "0", "18446744073709551624") "}", 8, "too big integer"},
    {"{" T("a", "F32", "[3]", "0", "8") "}", 8, "tensor a: F32 [3] does not fill 8 bytes"},
    {"{" T("a", "F32", "[4294967296,4294967298]", "0", "8") "}", 8, "does not fill 8 bytes"},
    {"{" T("a", "F32", "[4611686018427387906]", "0", "8") "}", 8, "does not fill 8 bytes"},
    {A "," T("b", "F32", "[2]", "4", "12") "}", 12, "tensor b: overlaps another tensor at byte 4"},
    {A "," T("b", "F32", "[2]", "0", "8") "}", 8, "overlaps another tensor at byte 0"},
    {A "," T("b", "F32", "[2]", "12", "20") "}", 20, "tensor b: a hole before it at byte 12"},
    {"{" T("a", "F32", "[2]", "4", "12") "}", 12, "tensor a: a hole before it at byte 4"},
    {A "}", 9, "1 bytes of data belong to no tensor"},
    {"{}", 3, "3 bytes of data belong to no tensor"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object of strings"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ is not an object of strings"},
    {"{\"__metadata__\":{\"a\":{\"b\":{\"c\":1}}}}", 0, "nested too deeply"},
    {"{\"a\":[[[[]]]]}", 0, "nested too deeply"},
    {"{" T("", "F32", "[2]", "0", "8") "}", 8, "has not 1 to 255 bytes"},
    {"{" T("a\\u0000b", "F32", "[2]", "0", "8") "}", 8, "NUL byte in object key"},
    {"{" T("\xff", "F32", "[2]", "0", "8") "}", 8, "unable to decode byte"},
};

START_TEST(hostile_headers_are_refused)
{
    safetensors_t *file = (safetensors_t *)&refusals; /* must stay as it is */
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = parse(refusals[_i].json, refusals[_i].data, &file, &err);
    ck_assert_msg(status < 0, "accepted: %s", refusals[_i].json);
    ck_assert_int_eq(status, err.status);
    ck_assert_msg(strstr(err.text, refusals[_i].text) != NULL, "%s gave: %s", refusals[_i].json,
                  err.text);
    ck_assert_ptr_eq(file, (safetensors_t *)&refusals);
}
END_TEST

START_TEST(announced_lengths_are_checked_first)
{
    static const uint64_t lengths[] = {
        9,         8,          1ull << 20, 48ull << 20, (48ull << 20) + 1,
        100000000, 1ull << 40, INT64_MAX,  UINT64_MAX,  UINT64_MAX - 8};
    for (size_t i = 0; i < LK_ARRAY_LEN(lengths); i++) {
        char bytes[15] = "........{}     ";
        lk_error_t err = LK_ERROR_INIT;
        safetensors_t *file;
        for (int k = 0; k < 8; k++) {
            bytes[k] = (char)(lengths[i] >> (8 * k));
        }
        ck_assert_int_lt(safetensors_parse_header(bytes, sizeof bytes, sizeof bytes, &file, &err),
                         0);
        ck_assert_msg(strstr(err.text, "is announced") != NULL, "%s", err.text);
        for (size_t len = 0; len < 8; len++) {
            ck_assert_int_eq(safetensors_parse_header(bytes, len, len, &file, &err),
                             LK_ERR_INVALID);
        }
    }
}
END_TEST

/* Any truncation and any changed byte: an error or a well-formed result, never a crash. */
START_TEST(mutated_headers_never_crash)
{
    file_bytes_t good = make_file(
        A "," T("b", "BF16", "[3,1]", "8", "14") "," T("c", "I8", "[]", "14", "15") "}", 15);
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("mutations"));
    lk_error_t err = LK_ERROR_INIT;
    safetensors_t *file = NULL;
    ck_ok(safetensors_parse_header(good.bytes, good.len, good.len, &file, &err));
    safetensors_close(&file);
    for (size_t len = 0; len < good.len; len++) {
        char *part = malloc(len + 1);
        memcpy(part, good.bytes, len);
        ck_assert_int_lt(safetensors_parse_header(part, len, len, &file, &err), 0);
        free(part);
    }
    for (int i = 0; i < 20000; i++) {
        char *bytes = malloc(good.len);
        memcpy(bytes, good.bytes, good.len);
        for (uint64_t n = 1 + lk_prng_below(&prng, 3); n > 0; n--) {
            static const char likely[] = "0123456789,[]{}\":-";
            size_t at =
                i % 2 ? 8 + lk_prng_below(&prng, good.len - 8) : lk_prng_below(&prng, good.len);
            bytes[at] =
                i % 3 ? likely[lk_prng_below(&prng, sizeof likely - 1)] : (char)lk_prng_u64(&prng);
        }
        if (safetensors_parse_header(bytes, good.len, good.len, &file, &err) == LK_OK) {
            uint64_t total = 0;
            for (size_t k = 0; k < safetensors_count(file); k++) {
                total += safetensors_at(file, k)->bytes;
            }
            ck_assert_uint_le(total, good.len);
            safetensors_close(&file);
        }
        free(bytes);
    }
    free(good.bytes);
}
END_TEST

/* A header as large as allowed, made to cost the JSON library as much as possible, stays below
 * 1 GiB of address space, and ends in an error rather than a crash. */
START_TEST(memory_is_bounded)
{
    static const char *const units[] = {"{},", "\"\","};
    if (SANITIZED) {
        return;
    }
    size_t len = 48u << 20;
    char *bytes = malloc(8 + len);
    for (int k = 0; k < 8; k++) {
        bytes[k] = (char)(len >> (8 * k));
    }
    struct rlimit limit = {1ul << 30, 1ul << 30};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
    for (size_t u = 0; u < LK_ARRAY_LEN(units); u++) {
        char *text = bytes + 8;
        size_t unit = strlen(units[u]);
        memset(text, ' ', len);
        memcpy(text, "{\"a\":[", 6);
        size_t most =
            strpbrk(units[u], "[{") != NULL ? 3u << 17 : 7u << 18; /* the walk lets pass */
        size_t at = 6;
        for (size_t i = 0; i < most && at + unit + 4 < len; i++, at += unit) {
            memcpy(text + at, units[u], unit);
        }
        memcpy(text + at, "0]}", 3);
        lk_error_t err = LK_ERROR_INIT;
        safetensors_t *file;
        lk_status_t status = safetensors_parse_header(bytes, 8 + len, 8 + len, &file, &err);
        ck_assert_msg(status < 0, "%s", units[u]);
        ck_assert_msg(strstr(err.text, "tensor a: expected") != NULL, "%s", err.text);
    }
    /* the largest honest header: 2^18 tensors */
    size_t at = 8, n = 1u << 18;
    at += (size_t)sprintf(bytes + at, "{");
    for (size_t i = 0; i < n; i++) {
        at += (size_t)sprintf(bytes + at,
                              "%s\"model.layers.99.mlp.experts.%zu.up_proj.weight\":{\"dtype\":"
                              "\"BF16\",\"shape\":[2,3],\"data_offsets\":[%zu,%zu]}",
                              i > 0 ? "," : "", i, 12 * i, 12 * (i + 1));
    }
    at += (size_t)sprintf(bytes + at, "}");
    for (int k = 0; k < 8; k++) {
        bytes[k] = (char)((at - 8) >> (8 * k));
    }
    lk_error_t err = LK_ERROR_INIT;
    safetensors_t *file;
    lk_status_t status = safetensors_parse_header(bytes, at, at + 12 * n, &file, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
    ck_assert_uint_eq(safetensors_count(file), n);
    safetensors_close(&file);
    free(bytes);
}
END_TEST

/* ---- files ---- */

static const char *fresh_dir(void)
{
    static char path[512];
    static int n;
    snprintf(path, sizeof path, "%s/dir-%d", test_tmpdir(), n++);
    ck_assert_int_eq(mkdir(path, 0755), 0);
    return path;
}

static void put(const char *dir, const char *name, const void *data, size_t len)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, len, f), len);
    ck_assert_int_eq(fclose(f), 0);
}

static void put_text(const char *dir, const char *name, const char *text)
{
    put(dir, name, text, strlen(text));
}

static void write_floats(const char *dir, const char *name, const char *tensor, float value)
{
    char path[1024];
    lk_error_t err = LK_ERROR_INIT;
    float data[2] = {value, -value};
    const void *at = data;
    tensor_desc_t desc = {tensor, LK_DTYPE_F32, 1, {2}};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    ck_assert_msg(safetensors_write(path, &desc, &at, 1, &err) == LK_OK, "%s", err.text);
}

START_TEST(what_is_written_is_read)
{
    char path[1024];
    lk_error_t err = LK_ERROR_INIT;
    safetensors_t *file;
    const char *dir = fresh_dir();
    snprintf(path, sizeof path, "%s/x.safetensors", dir);
    float a[6] = {1, 2, 3, 4, 5, 6};
    uint16_t b[3] = {7, 8, 9};
    int64_t c = -1;
    const tensor_desc_t descs[] = {{"second\"\\\xc3\xa9", LK_DTYPE_F32, 2, {2, 3}},
                                   {"a", LK_DTYPE_BF16, 1, {3}},
                                   {"none", LK_DTYPE_F16, 2, {0, 4}},
                                   {"scalar", LK_DTYPE_I64, 0, {0}}};
    const void *const data[] = {a, b, NULL, &c};
    ck_assert_msg(safetensors_write(path, descs, data, 4, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(safetensors_open(path, &file, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(safetensors_count(file), 4);
    for (size_t i = 0; i < 4; i++) {
        const safetensors_entry_t *entry = safetensors_find(file, descs[i].name);
        ck_assert_ptr_nonnull(entry);
        ck_assert(entry->desc.dtype == descs[i].dtype && entry->desc.ndim == descs[i].ndim);
        if (entry->bytes > 0) {
            ck_assert_mem_eq(entry->data, data[i], entry->bytes);
        }
    }
    ck_assert_uint_eq((uintptr_t)safetensors_at(file, 0)->data % 8, 0);
    safetensors_close(&file);
    snprintf(path, sizeof path, "%s/missing/x.safetensors", dir);
    ck_assert_int_eq(safetensors_write(path, descs, data, 4, &err), LK_ERR_IO);
    tensor_desc_t huge = {"huge", LK_DTYPE_F32, 2, {1ull << 40, 1ull << 40}};
    ck_assert_int_eq(safetensors_write(path, &huge, data, 1, &err), LK_ERR_INVALID);
}
END_TEST

START_TEST(one_file_or_an_index_is_found)
{
    lk_error_t err = LK_ERROR_INIT;
    safetensors_t *file;
    const char *dir = fresh_dir();
    ck_assert_int_eq(safetensors_open(dir, &file, &err), LK_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.text, "neither model.safetensors nor"));
    write_floats(dir, "p1.safetensors", "a", 1);
    write_floats(dir, "p2.safetensors", "b", 2);
    put_text(dir, "model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":16,\"x\":[{\"y\":{}}]},\"weight_map\":{\"b\":"
             "\"p2.safetensors\",\"a\":\"p1.safetensors\"}}");
    ck_assert_msg(safetensors_open(dir, &file, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(safetensors_count(file), 2);
    float got[2];
    memcpy(got, safetensors_find(file, "a")->data, sizeof got);
    ck_assert(got[0] == 1 && got[1] == -1);
    memcpy(got, safetensors_find(file, "b")->data, sizeof got);
    ck_assert(got[0] == 2 && got[1] == -2);
    safetensors_close(&file);
    /* one file wins over an index, as in Transformers */
    write_floats(dir, "model.safetensors", "only", 3);
    ck_ok(safetensors_open(dir, &file, &err));
    ck_assert_uint_eq(safetensors_count(file), 1);
    safetensors_close(&file);
}
END_TEST

static const struct {
    const char *index, *text;
} indexes[] = {
    {"", "index: byte"},
    {"[]", "index: not a JSON object"},
    {"{}", "weight_map is not an object of file names"},
    {"{\"weight_map\":{}}", "weight_map is not an object of file names"},
    {"{\"weight_map\":[1]}", "weight_map is not an object of file names"},
    {"{\"weight_map\":{\"a\":1}}", "tensor a: \"\" is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"../p1.safetensors\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"..\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "\"/etc/passwd\" is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"sub/p1.safetensors\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\".hidden\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"p1\\n.safetensors\"}}", "is not a plain file name"},
    {"{\"weight_map\":{\"a\":\"p9.safetensors\"}}", "p9.safetensors: No such file"},
    {"{\"weight_map\":{\"a\":\"p1.safetensors\",\"a\":\"p2.safetensors\"}}",
     "duplicate object key"},
    {"{\"weight_map\":{\"a\":\"p1.safetensors\",\"c\":\"p2.safetensors\"}}",
     "weight_map: tensor c is not in p2.safetensors"},
    {"{\"weight_map\":{\"a\":\"p2.safetensors\",\"b\":\"p1.safetensors\"}}",
     "weight_map: tensor a is not in p2.safetensors"},
    {"{\"weight_map\":{\"a\":\"p1.safetensors\",\"d\":\"p3.safetensors\"}}",
     "weight_map lacks tensor e"},
    {"{\"weight_map\":{\"a\":\"p1.safetensors\",\"x\":\"p1copy.safetensors\"}}",
     "tensor a is in two files"},
    {"{\"weight_map\":{\"a\":\"fifo\"}}", "not a regular file"},
    {"{\"weight_map\":{\"a\":\"empty\"}}", "empty: 0 bytes are too few for a header"},
    {"{\"weight_map\":{\"a\":\"cut.safetensors\"}}", "cut.safetensors: "},
    {"{\"x\":[[[[[[[[[]]]]]]]]]}", "nested too deeply"},
};

START_TEST(hostile_indexes_are_refused)
{
    const char *dir = fresh_dir();
    char path[1024];
    lk_error_t err = LK_ERROR_INIT;
    safetensors_t *file;
    write_floats(dir, "p1.safetensors", "a", 1);
    write_floats(dir, "p1copy.safetensors", "a", 1);
    write_floats(dir, "p2.safetensors", "b", 2);
    const tensor_desc_t descs[] = {{"d", LK_DTYPE_I8, 1, {1}}, {"e", LK_DTYPE_I8, 1, {1}}};
    const void *const data[] = {"d", "e"};
    snprintf(path, sizeof path, "%s/p3.safetensors", dir);
    ck_ok(safetensors_write(path, descs, data, 2, &err));
    snprintf(path, sizeof path, "%s/fifo", dir);
    ck_assert_int_eq(mkfifo(path, 0644), 0);
    put(dir, "empty", "", 0);
    file_bytes_t cut = make_file(A "}", 7);
    put(dir, "cut.safetensors", cut.bytes, cut.len);
    free(cut.bytes);
    put_text(dir, "model.safetensors.index.json", indexes[_i].index);
    lk_status_t status = safetensors_open(dir, &file, &err);
    ck_assert_msg(status < 0, "accepted: %s", indexes[_i].index);
    ck_assert_int_eq(status, err.status);
    ck_assert_msg(strstr(err.text, indexes[_i].text) != NULL, "%s gave: %s", indexes[_i].index,
                  err.text);
}
END_TEST

/* ---- whole checkpoints ---- */

typedef struct {
    tensor_desc_t descs[128];
    const void *data[128];
    size_t n;
} checkpoint_t;

static void from_file(checkpoint_t *c, const safetensors_t *file)
{
    c->n = safetensors_count(file);
    ck_assert_uint_lt(c->n, 120);
    for (size_t i = 0; i < c->n; i++) {
        c->descs[i] = safetensors_at(file, i)->desc;
        c->data[i] = safetensors_at(file, i)->data;
    }
}

static lk_status_t load_as(const char *fixture, const checkpoint_t *c, digest_t *digest,
                           lk_error_t *err)
{
    char path[1024];
    const char *dir = fresh_dir();
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    ck_assert_msg(safetensors_write(path, c->descs, c->data, c->n, err) == LK_OK, "%s", err->text);
    weight_table_t *table = model_fixture_table(fixture, LK_DTYPE_BF16, 0, 1);
    lk_status_t status = weight_table_load(table, dir, err);
    *digest = weight_table_digest(table);
    weight_table_destroy(&table);
    return status;
}

START_TEST(every_misfit_of_a_checkpoint_is_listed)
{
    safetensors_t *file;
    checkpoint_t c;
    digest_t digest, zero = {{0, 0}};
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(safetensors_open(model_fixture_dir("llama_untied"), &file, &err));
    from_file(&c, file);
    for (size_t i = 0; i < c.n; i++) {
        if (strcmp(c.descs[i].name, "model.norm.weight") == 0) {
            c.descs[i].name = "model.norm.wait";
        } else if (strcmp(c.descs[i].name, "model.layers.1.mlp.up_proj.weight") == 0) {
            uint64_t rows = c.descs[i].shape[0];
            c.descs[i].shape[0] = c.descs[i].shape[1];
            c.descs[i].shape[1] = rows;
        }
    }
    ck_assert_int_eq(load_as("llama_untied", &c, &digest, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "tensor model.norm.wait: the model has no such tensor"));
    ck_assert_ptr_nonnull(strstr(err.text,
                                 "model.layers.1.mlp.up_proj.weight: shape [64, 172], the "
                                 "model has [172, 64]"));
    ck_assert_ptr_nonnull(strstr(err.text, "tensor model.norm.weight: missing"));
    ck_assert_ptr_nonnull(strstr(err.text, "4 tensors do not fit the model"));
    ck_assert(digest_equal(digest, zero)); /* nothing was stored */
    safetensors_close(&file);
}
END_TEST

START_TEST(old_buffers_and_second_heads_are_understood)
{
    safetensors_t *file;
    checkpoint_t c;
    digest_t plain, digest;
    lk_error_t err = LK_ERROR_INIT;
    static const float inv_freq[8] = {1};
    ck_ok(safetensors_open(model_fixture_dir("qwen3"), &file, &err));
    from_file(&c, file);
    ck_ok(load_as("qwen3", &c, &plain, &err));
    c.descs[c.n] =
        (tensor_desc_t){"model.layers.0.self_attn.rotary_emb.inv_freq", LK_DTYPE_F32, 1, {8}};
    c.data[c.n++] = inv_freq;
    const safetensors_entry_t *embed = safetensors_find(file, "model.embed_tokens.weight");
    c.descs[c.n] = embed->desc;
    c.descs[c.n].name = "lm_head.weight";
    c.data[c.n++] = embed->data;
    ck_assert_msg(load_as("qwen3", &c, &digest, &err) == LK_OK, "%s", err.text);
    ck_assert(digest_equal(digest, plain));
    char *other = malloc(embed->bytes);
    memcpy(other, embed->data, embed->bytes);
    other[0] ^= 1;
    c.data[c.n - 1] = other;
    ck_assert_int_eq(load_as("qwen3", &c, &digest, &err), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, "embeddings are tied") != NULL, "%s", err.text);
    free(other);
    safetensors_close(&file);
}
END_TEST

/* The fixtures again in several files and in other dtypes. */
START_TEST(shards_and_dtypes_load_alike)
{
    const char *name = model_fixtures[_i];
    lk_error_t err = LK_ERROR_INIT;
    weight_table_t *whole = model_fixture_load(name, LK_DTYPE_F32, 0, 1);
    for (int variant = 0; variant < 3; variant++) {
        static const lk_dtype_t dtypes[] = {LK_DTYPE_BF16, LK_DTYPE_F32, LK_DTYPE_F16};
        trainer_list_t list;
        trainer_list_init_split(&list, whole);
        trainer_list_convert(&list, dtypes[variant]);
        trainer_list_shuffle(&list, test_seed(name));
        char dir[512], path[600];
        snprintf(dir, sizeof dir, "%s", fresh_dir());
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
        FILE *index = fopen(path, "w");
        ck_assert_ptr_nonnull(index);
        fprintf(index, "{\"weight_map\":{");
        for (size_t s = 0; s < 3; s++) {
            size_t first = list.n * s / 3, end = list.n * (s + 1) / 3;
            snprintf(path, sizeof path, "%s/part-%zu.safetensors", dir, s);
            ck_ok(safetensors_write(path, list.descs + first,
                                    (const void *const *)list.data + first, end - first, &err));
            for (size_t i = first; i < end; i++) {
                fprintf(index, "%s\"%s\":\"part-%zu.safetensors\"", i > 0 ? "," : "",
                        list.descs[i].name, s);
            }
        }
        fprintf(index, "}}");
        fclose(index);
        weight_table_t *table = model_fixture_table(name, LK_DTYPE_F32, 0, 1);
        ck_assert_msg(weight_table_load(table, dir, &err) == LK_OK, "%s", err.text);
        if (variant < 2) {
            ck_assert(digest_equal(weight_table_digest(table), weight_table_digest(whole)));
        } else {
            weight_table_t *sent = model_fixture_table(name, LK_DTYPE_F32, 0, 1);
            ck_ok(trainer_list_send(&list, sent, false, &err));
            ck_assert(digest_equal(weight_table_digest(table), weight_table_digest(sent)));
            weight_table_destroy(&sent);
        }
        weight_table_destroy(&table);
        trainer_list_fini(&list);
    }
    weight_table_destroy(&whole);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("safetensors");
    TCase *headers = tcase_create("headers");
    tcase_set_timeout(headers, 30);
    tcase_add_test(headers, good_headers_are_indexed);
    tcase_add_loop_test(headers, hostile_headers_are_refused, 0, LK_ARRAY_LEN(refusals));
    tcase_add_test(headers, announced_lengths_are_checked_first);
    tcase_add_test(headers, mutated_headers_never_crash);
    tcase_add_test(headers, memory_is_bounded);
    suite_add_tcase(suite, headers);
    TCase *files = tcase_create("files");
    tcase_add_test(files, what_is_written_is_read);
    tcase_add_test(files, one_file_or_an_index_is_found);
    tcase_add_loop_test(files, hostile_indexes_are_refused, 0, LK_ARRAY_LEN(indexes));
    tcase_add_test(files, every_misfit_of_a_checkpoint_is_listed);
    tcase_add_test(files, old_buffers_and_second_heads_are_understood);
    tcase_add_loop_test(files, shards_and_dtypes_load_alike, 0, N_MODEL_FIXTURES);
    suite_add_tcase(suite, files);
    return suite;
}
