#include "transfer/safetensors_header.h"

#include <stdlib.h>
#include <string.h>

/* Bounds what the JSON library will allocate, before it sees the text: nesting, and the number of
 * containers and of values. */
static lk_status_t walk_json(const char *text, size_t len, unsigned max_depth, const char *what,
                             lk_error_t *err)
{
    unsigned depth = 0;
    size_t containers = 0, values = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            depth++;
            containers++;
        } else if (c == '}' || c == ']') {
            depth -= depth > 0;
        } else if (c == ',') {
            values++;
        }
        if (depth > max_depth) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: nested too deeply", what);
        }
        if (containers > 3ul * SAFETENSORS_MAX_TENSORS + 2 ||
            values > 8ul * SAFETENSORS_MAX_TENSORS) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "%s: more than %u tensors", what,
                                SAFETENSORS_MAX_TENSORS);
        }
    }
    return LK_OK;
}

lk_status_t safetensors_json(const char *text, size_t len, unsigned max_depth, const char *what,
                             json_t **out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(walk_json(text, len, max_depth, what, err));
    json_error_t json_err;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &json_err);
    if (root == NULL) {
        bool memory = json_error_code(&json_err) == json_error_out_of_memory;
        return lk_error_set(err, memory ? LK_ERR_NO_MEMORY : LK_ERR_INVALID, "%s: byte %d: %s",
                            what, json_err.position, json_err.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return lk_error_set(err, LK_ERR_INVALID, "%s: not a JSON object", what);
    }
    *out = root;
    return LK_OK;
}

static bool read_u64(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static lk_status_t read_dtype(const char *name, const json_t *value, lk_dtype_t *out,
                              lk_error_t *err)
{
    const char *text = json_string_value(value);
    if (text == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "tensor %s: dtype is not a string", name);
    }
    if (!dtype_parse(text, out) || strcmp(text, dtype_safetensors_name(*out)) != 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "tensor %s: dtype %.20s is not supported",
                            name, text);
    }
    return LK_OK;
}

static lk_status_t read_shape(const char *name, const json_t *shape, tensor_desc_t *desc,
                              lk_error_t *err)
{
    if (!json_is_array(shape) || json_array_size(shape) > TENSOR_MAX_DIMS) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %s: shape is not an array of at most %d numbers", name,
                            TENSOR_MAX_DIMS);
    }
    desc->ndim = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < desc->ndim; i++) {
        if (!read_u64(json_array_get(shape, i), &desc->shape[i])) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "tensor %s: shape[%u] is not a number of elements", name, i);
        }
    }
    return LK_OK;
}

static lk_status_t read_span(const char *name, const json_t *info, uint64_t data_size,
                             safetensors_span_t *span, lk_error_t *err)
{
    tensor_desc_t *desc = &span->entry.desc;
    if (strlen(name) > TENSOR_NAME_MAX || name[0] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID, "tensor name \"%.40s...\" has not 1 to %d bytes",
                            name, TENSOR_NAME_MAX);
    }
    desc->name = name;
    if (!json_is_object(info) || json_object_size(info) != 3) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "tensor %s: expected exactly dtype, shape and data_offsets", name);
    }
    LK_RETURN_IF_ERROR(read_dtype(name, json_object_get(info, "dtype"), &desc->dtype, err));
    LK_RETURN_IF_ERROR(read_shape(name, json_object_get(info, "shape"), desc, err));
    const json_t *offsets = json_object_get(info, "data_offsets");
    if (json_array_size(offsets) != 2 || !read_u64(json_array_get(offsets, 0), &span->begin) ||
        !read_u64(json_array_get(offsets, 1), &span->end) || span->begin > span->end ||
        span->end > data_size) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "tensor %s: data_offsets do not lie within the file's %llu bytes of data", name,
            (unsigned long long)data_size);
    }
    if (!tensor_desc_bytes(desc, &span->entry.bytes) ||
        span->entry.bytes != span->end - span->begin) {
        char shape[160];
        tensor_desc_shape_text(desc, shape, sizeof shape);
        return lk_error_set(err, LK_ERR_INVALID, "tensor %s: %s %s does not fill %llu bytes", name,
                            dtype_safetensors_name(desc->dtype), shape,
                            (unsigned long long)(span->end - span->begin));
    }
    return LK_OK;
}

static int span_order(const void *pa, const void *pb)
{
    const safetensors_span_t *a = pa, *b = pb;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return a->end < b->end ? -1 : a->end > b->end;
}

/* The format wants the data section covered exactly: no overlap, no hole, nothing behind. */
static lk_status_t check_layout(const safetensors_span_t *spans, size_t n, uint64_t data_size,
                                lk_error_t *err)
{
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (spans[i].begin != at) {
            return lk_error_set(err, LK_ERR_INVALID, "tensor %s: %s at byte %llu of the data",
                                spans[i].entry.desc.name,
                                spans[i].begin < at ? "overlaps another tensor"
                                                    : "a hole before it",
                                (unsigned long long)spans[i].begin);
        }
        at = spans[i].end;
    }
    if (at != data_size) {
        return lk_error_set(err, LK_ERR_INVALID, "%llu bytes of data belong to no tensor",
                            (unsigned long long)(data_size - at));
    }
    return LK_OK;
}

static lk_status_t check_metadata(const json_t *metadata, lk_error_t *err)
{
    const char *key;
    json_t *value;
    bool strings = metadata == NULL || json_is_object(metadata);
    json_object_foreach((json_t *)metadata, key, value)
    {
        strings = strings && json_is_string(value);
    }
    return strings ? LK_OK
                   : lk_error_set(err, LK_ERR_INVALID, "__metadata__ is not an object of strings");
}

/* The spans of the header's tensors, sorted and checked. */
static lk_status_t read_spans(const json_t *json, uint64_t data_size, safetensors_span_t **out,
                              size_t *n_out, lk_error_t *err)
{
    size_t n = 0;
    const char *name;
    json_t *info;
    LK_RETURN_IF_ERROR(check_metadata(json_object_get(json, "__metadata__"), err));
    safetensors_span_t *spans = calloc(json_object_size(json) + 1, sizeof *spans);
    if (spans == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu tensors",
                            json_object_size(json));
    }
    lk_status_t status = LK_OK;
    json_object_foreach((json_t *)json, name, info)
    {
        if (strcmp(name, "__metadata__") != 0) {
            status = read_span(name, info, data_size, &spans[n++], err);
            if (status < 0) {
                goto err_free;
            }
        }
    }
    qsort(spans, n, sizeof *spans, span_order);
    status = check_layout(spans, n, data_size, err);
    if (status < 0) {
        goto err_free;
    }
    *out = spans;
    *n_out = n;
    return LK_OK;

err_free:
    free(spans);
    return status;
}

lk_status_t safetensors_header_read(const char *bytes, size_t len, uint64_t file_size,
                                    safetensors_header_t *out, lk_error_t *err)
{
    if (len < 8 || file_size < len) {
        return lk_error_set(err, LK_ERR_INVALID, "%zu bytes are too few for a header", len);
    }
    uint64_t header_len = 0;
    for (int i = 7; i >= 0; i--) {
        header_len = header_len << 8 | (uint8_t)bytes[i];
    }
    if (header_len > SAFETENSORS_HEADER_MAX_BYTES) {
        return lk_error_set(err, LK_ERR_TOO_LARGE,
                            "a header of %llu bytes is announced, at most %u are read",
                            (unsigned long long)header_len, SAFETENSORS_HEADER_MAX_BYTES);
    }
    if (header_len > len - 8) {
        return lk_error_set(err, LK_ERR_INVALID, "truncated: a header of %llu bytes is announced",
                            (unsigned long long)header_len);
    }
    if (header_len == 0 || bytes[8] != '{') {
        return lk_error_set(err, LK_ERR_INVALID, "the header does not start with {");
    }
    safetensors_header_t header = {.data_start = 8 + header_len};
    LK_RETURN_IF_ERROR(safetensors_json(bytes + 8, header_len, 3, "header", &header.json, err));
    lk_status_t status =
        read_spans(header.json, file_size - header.data_start, &header.spans, &header.n_spans, err);
    if (status < 0) {
        json_decref(header.json);
        return status;
    }
    *out = header;
    return LK_OK;
}

void safetensors_header_fini(safetensors_header_t *header)
{
    if (header != NULL) {
        json_decref(header->json);
        free(header->spans);
        *header = (safetensors_header_t){0};
    }
}
