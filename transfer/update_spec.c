#include "transfer/update_spec.h"
#include "base/buf.h"
#include "base/hash.h"
#include "proto/json_text.h"
#include "transfer/wte_fields.h"

#include <stdlib.h>
#include <string.h>

void update_spec_fini(update_spec_t *self)
{
    json_decref(self->root);
    if (self->source_ops != NULL) {
        self->source_ops->update_close(self->source);
    } else {
        free(self->tensors);
    }
    *self = (update_spec_t){0};
}

/* The body as an object. Caller owns *out. */
static lk_status_t parse(const char *text, size_t len, json_t **out, lk_error_t *err)
{
    if (len > UPDATE_SPEC_MAX_BYTES) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "the body has %zu bytes, the limit is %u", len,
                            UPDATE_SPEC_MAX_BYTES);
    }
    json_error_t where;
    json_t *root = json_text_read(text != NULL ? text : "", len, 0, &where);
    if (root == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid JSON format: %s at byte %d", where.text,
                            where.position);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return lk_error_set(err, LK_ERR_INVALID, "Invalid JSON format: the body must be an object");
    }
    *out = root;
    return LK_OK;
}

static lk_status_t parse_with(const char *text, size_t len, const char *field, json_t **root,
                              const json_t **value, lk_error_t *err)
{
    json_t *parsed = NULL;
    LK_RETURN_IF_ERROR(parse(text, len, &parsed, err));
    const json_t *found = json_object_get(parsed, field);
    if (found == NULL || json_is_null(found)) {
        json_decref(parsed);
        return lk_error_set(err, LK_ERR_INVALID, "Missing '%s' in request body", field);
    }
    *root = parsed;
    *value = found;
    return LK_OK;
}

lk_status_t update_spec_init(update_spec_t *out, const char *text, size_t len, lk_error_t *err)
{
    update_spec_t spec = {0};
    LK_RETURN_IF_ERROR(parse_with(text, len, "init_info", &spec.root, &spec.info, err));
    if (!json_is_object(spec.info)) {
        update_spec_fini(&spec);
        return lk_error_set(err, LK_ERR_INVALID, "'init_info' must be an object");
    }
    *out = spec;
    return LK_OK;
}

packed_options_t update_spec_packing(const json_t *info, packed_options_t absent)
{
    return (packed_options_t){
        .packed = wte_fields_bool(info, "packed", absent.packed),
        .buffer_size_bytes = (uint64_t)wte_fields_int(info, "packed_buffer_size_bytes",
                                                      (int64_t)absent.buffer_size_bytes),
        .num_buffers = (uint32_t)wte_fields_int(info, "packed_num_buffers", absent.num_buffers),
    };
}

/* Offenders of a list: the first ones by name, then how many more. */
typedef struct {
    lk_buf_t text;
    size_t count, left_out;
} offenders_t;

static void offender(offenders_t *self, const char *fmt, const char *name, const char *why)
{
    self->count++;
    if (self->text.len > LK_ERROR_TEXT_MAX * 3 / 4) {
        self->left_out++;
        return;
    }
    lk_buf_str(&self->text, self->count > 1 ? "; " : "");
    lk_buf_printf(&self->text, fmt, name, why);
}

static lk_status_t offenders_end(offenders_t *self, const char *backend, lk_error_t *err)
{
    lk_status_t st = LK_OK;
    if (self->count > 0) {
        if (self->left_out > 0) {
            lk_buf_printf(&self->text, "; and %zu more", self->left_out);
        }
        st = lk_error_set(err, LK_ERR_INVALID, "Invalid update_info for %s: %s", backend,
                          lk_buf_cstr(&self->text));
    }
    lk_buf_fini(&self->text);
    return st;
}

/* NULL, or what is wrong with the shape. */
static const char *read_shape(const json_t *shape, tensor_desc_t *out)
{
    if (!json_is_array(shape)) {
        return "is not a list";
    }
    if (json_array_size(shape) > TENSOR_MAX_DIMS) {
        return "has too many dimensions";
    }
    out->ndim = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < out->ndim; i++) {
        const json_t *dim = json_array_get(shape, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0) {
            return "has a dimension that is not an integer of at least 0";
        }
        out->shape[i] = (uint64_t)json_integer_value(dim);
    }
    uint64_t bytes;
    return tensor_desc_bytes(out, &bytes) ? NULL : "is too large";
}

static const char *read_name(const json_t *name, tensor_desc_t *out)
{
    if (!json_is_string(name)) {
        return "is not a string";
    }
    size_t len = json_string_length(name);
    out->name = json_string_value(name);
    return len == 0 ? "is empty" : len > TENSOR_NAME_MAX ? "is too long" : NULL;
}

/* The lists of an update_info. */
typedef struct {
    const json_t *names, *dtypes, *shapes;
} lists_t;

static void read_tensor(const lists_t *lists, size_t i, tensor_desc_t *out, offenders_t *bad)
{
    const char *why = read_name(json_array_get(lists->names, i), out);
    if (why != NULL) {
        char label[64];
        snprintf(label, sizeof label, "names[%zu]", i);
        offender(bad, "%s %s", label, why);
        out->name = "";
        return;
    }
    const json_t *dtype = json_array_get(lists->dtypes, i);
    if (!json_is_string(dtype) || !dtype_parse(json_string_value(dtype), &out->dtype)) {
        offender(bad, "'%s' has the unknown dtype %.64s", out->name,
                 json_is_string(dtype) ? json_string_value(dtype) : "(not a string)");
        return;
    }
    why = read_shape(json_array_get(lists->shapes, i), out);
    if (why != NULL) {
        offender(bad, "'%s': its shape %s", out->name, why);
    }
}

/* Open addressing over twice as many slots as names. */
static lk_status_t find_duplicates(const tensor_desc_t *tensors, size_t n, offenders_t *bad,
                                   lk_error_t *err)
{
    size_t slots = 16;
    while (slots < 2 * n) {
        slots *= 2;
    }
    uint32_t *table = calloc(slots, sizeof *table); /* index + 1 */
    if (table == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu names", n);
    }
    for (size_t i = 0; i < n; i++) {
        const char *name = tensors[i].name;
        size_t at = (size_t)lk_hash64(name, strlen(name), 0) & (slots - 1);
        while (table[at] != 0 && strcmp(tensors[table[at] - 1].name, name) != 0) {
            at = (at + 1) & (slots - 1);
        }
        if (table[at] == 0) {
            table[at] = (uint32_t)i + 1;
        } else if (name[0] != '\0') { /* the nameless were reported */
            offender(bad, "'%s' %s", name, "is listed twice");
        }
    }
    free(table);
    return LK_OK;
}

static lk_status_t list_length(const json_t *info, const char *backend, const char *field,
                               size_t *out, lk_error_t *err)
{
    const json_t *list = json_object_get(info, field);
    if (list == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid update_info for %s: missing field '%s'",
                            backend, field);
    }
    if (!json_is_array(list)) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid update_info for %s: '%s' must be a list",
                            backend, field);
    }
    *out = json_array_size(list);
    return LK_OK;
}

static lk_status_t check_packing_types(const json_t *info, const char *backend, lk_error_t *err)
{
    static const wte_field_t packing[] = {WTE_PACKED_FIELDS};
    for (size_t i = 0; i < sizeof packing / sizeof packing[0]; i++) {
        json_t *value = json_object_get(info, packing[i].name);
        json_t *one = value != NULL ? json_pack("{s:O}", packing[i].name, value) : NULL;
        lk_status_t st = one != NULL ? wte_fields_check("update_info", backend, one, packing,
                                                        sizeof packing / sizeof packing[0], err)
                                     : LK_OK;
        json_decref(one);
        LK_RETURN_IF_ERROR(st);
    }
    return LK_OK;
}

static lk_status_t read_update_info(update_spec_t *spec, const char *backend,
                                    packed_options_t packing, lk_error_t *err)
{
    const json_t *info = spec->info;
    size_t n = 0, n_dtypes = 0, n_shapes = 0;
    LK_RETURN_IF_ERROR(list_length(info, backend, "names", &n, err));
    LK_RETURN_IF_ERROR(list_length(info, backend, "dtype_names", &n_dtypes, err));
    LK_RETURN_IF_ERROR(list_length(info, backend, "shapes", &n_shapes, err));
    if (n_dtypes != n || n_shapes != n) {
        bool dtypes = n_dtypes != n;
        return lk_error_set(err, LK_ERR_INVALID,
                            "`%s` should be of the same size as `names`: got %zu and %zu",
                            dtypes ? "dtype_names" : "shapes", dtypes ? n_dtypes : n_shapes, n);
    }
    if (n > UPDATE_SPEC_MAX_TENSORS) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "update_info lists %zu tensors, the limit is %u",
                            n, UPDATE_SPEC_MAX_TENSORS);
    }
    LK_RETURN_IF_ERROR(check_packing_types(info, backend, err));
    spec->packing = update_spec_packing(info, packing);
    spec->n_tensors = n;
    spec->tensors = calloc(n + 1, sizeof *spec->tensors);
    if (spec->tensors == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", n);
    }
    offenders_t bad = {0};
    lk_buf_init(&bad.text, 0);
    uint64_t total = 0;
    const lists_t lists = {json_object_get(info, "names"), json_object_get(info, "dtype_names"),
                           json_object_get(info, "shapes")};
    for (size_t i = 0; i < n; i++) {
        size_t before = bad.count;
        read_tensor(&lists, i, &spec->tensors[i], &bad);
        uint64_t bytes = 0;
        if (bad.count == before &&
            (!tensor_desc_bytes(&spec->tensors[i], &bytes) || bytes > INT64_MAX - total)) {
            offender(&bad, "'%s' %s", spec->tensors[i].name, "makes the update too large");
        }
        total += bad.count == before ? bytes : 0;
    }
    lk_status_t st = find_duplicates(spec->tensors, n, &bad, err);
    lk_status_t listed = offenders_end(&bad, backend, err);
    return st < 0 ? st : listed;
}

/* This rank's update_info. */
static lk_status_t pick_info(update_spec_t *spec, const char *text, size_t len, uint32_t rank,
                             uint32_t n_ranks, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(parse_with(text, len, "update_info", &spec->root, &spec->info, err));
    if (json_is_array(spec->info)) {
        size_t n = json_array_size(spec->info);
        if (n != n_ranks) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "'update_info' is a list of %zu, but there are %u ranks", n,
                                n_ranks);
        }
        spec->info = json_array_get(spec->info, rank);
    }
    return json_is_object(spec->info)
               ? LK_OK
               : lk_error_set(err, LK_ERR_INVALID,
                              "'update_info' must be an object or a list of objects, one per rank");
}

lk_status_t update_spec_update(update_spec_t *out, const char *backend, const char *text,
                               size_t len, uint32_t rank, uint32_t n_ranks,
                               packed_options_t packing, lk_error_t *err)
{
    update_spec_t spec = {0};
    lk_status_t st = pick_info(&spec, text, len, rank, n_ranks, err);
    st = st == LK_OK ? read_update_info(&spec, backend, packing, err) : st;
    if (st < 0) {
        update_spec_fini(&spec);
        return st;
    }
    *out = spec;
    return LK_OK;
}

lk_status_t update_spec_open(update_spec_t *out, const wte_ops_t *ops, const wte_context_t *ctx,
                             const char *text, size_t len, lk_error_t *err)
{
    update_spec_t spec = {0};
    wte_source_t source;
    lk_status_t st = pick_info(&spec, text, len, ctx->dp_rank, ctx->dp_size, err);
    st = st == LK_OK ? ops->update_open(spec.info, ctx, &source, err) : st;
    if (st < 0) {
        update_spec_fini(&spec);
        return st;
    }
    spec.tensors = source.tensors;
    spec.n_tensors = source.n_tensors;
    spec.source = source.handle;
    spec.source_ops = ops;
    *out = spec;
    return LK_OK;
}

static lk_status_t check_version(const json_t *value, const char *field, lk_error_t *err)
{
    if (!json_is_string(value) || json_string_length(value) > WEIGHT_VERSION_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "'%s' must be a string of at most %d bytes", field,
                            WEIGHT_VERSION_MAX);
    }
    return LK_OK;
}

lk_status_t update_spec_finish(const char *text, size_t len, lk_error_t *err)
{
    if (len == 0) {
        return LK_OK;
    }
    json_t *root = NULL;
    LK_RETURN_IF_ERROR(parse(text, len, &root, err));
    const json_t *version = json_object_get(root, "weight_version");
    lk_status_t st = version == NULL || json_is_null(version)
                         ? LK_OK
                         : check_version(version, "weight_version", err);
    json_decref(root);
    return st;
}

lk_status_t update_spec_version(const char *text, size_t len, lk_error_t *err)
{
    json_t *root = NULL;
    LK_RETURN_IF_ERROR(parse(text, len, &root, err));
    const json_t *ours = json_object_get(root, "weight_version");
    const json_t *version = ours != NULL ? ours : json_object_get(root, "new_version");
    lk_status_t st =
        version == NULL || json_is_null(version)
            ? lk_error_set(err, LK_ERR_INVALID, "Missing 'new_version' in request body")
            : check_version(version, "new_version", err);
    json_decref(root);
    return st;
}
