#include "api_frontend/msgpack_json.h"
#include "proto/limits.h"
#include "proto/wire_reader.h"
#include "proto/wire_writer.h"

#include <string.h>

/* Depth is bounded by the walk that wire_doc_init does first. */
static json_t *convert(const wire_value_t *value, lk_error_t *err);

static json_t *convert_array(const wire_value_t *value, lk_error_t *err)
{
    const wire_value_t *first = NULL;
    size_t n = 0;
    (void)wire_array(value, &first, &n);
    json_t *array = json_array();
    for (size_t i = 0; i < n && array != NULL; i++) {
        json_t *item = convert(wire_item(first, i), err);
        if (item == NULL || json_array_append_new(array, item) != 0) {
            json_decref(array);
            return NULL;
        }
    }
    return array;
}

static json_t *convert_map(const wire_value_t *value, lk_error_t *err)
{
    size_t n = 0;
    (void)wire_map(value, &n);
    json_t *object = json_object();
    for (size_t i = 0; i < n && object != NULL; i++) {
        const char *key;
        size_t len;
        json_t *item = NULL;
        char name[256];
        if (!wire_str(wire_map_key(value, i), &key, &len) || len >= sizeof name ||
            memchr(key, '\0', len) != NULL) {
            lk_error_set(err, LK_ERR_INVALID, "a map's key must be a text of at most %zu bytes",
                         sizeof name - 1);
        } else {
            memcpy(name, key, len);
            name[len] = '\0';
            if (json_object_get(object, name) != NULL) {
                lk_error_set(err, LK_ERR_INVALID, "the key \"%s\" is there twice", name);
            } else {
                item = convert(wire_map_value(value, i), err);
            }
        }
        if (item == NULL) {
            json_decref(object);
            return NULL;
        }
        if (json_object_set_new(object, name, item) != 0) {
            lk_error_set(err, LK_ERR_INVALID, "a map's key is not UTF-8");
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

static json_t *convert(const wire_value_t *value, lk_error_t *err)
{
    wire_kind_t kind = wire_kind(value);
    json_t *out = NULL;
    uint64_t u;
    int64_t i;
    double f;
    bool b;
    const char *text;
    size_t len;
    switch (kind) {
    case WIRE_NIL:
        out = json_null();
        break;
    case WIRE_BOOL:
        out = wire_bool(value, &b) ? json_boolean(b) : NULL;
        break;
    case WIRE_UINT:
        out = wire_u64(value, &u) && u <= INT64_MAX ? json_integer((json_int_t)u) : NULL;
        break;
    case WIRE_INT:
        out = wire_i64(value, &i) ? json_integer(i) : NULL;
        break;
    case WIRE_FLOAT:
        out = wire_f64(value, &f) ? json_real(f) : NULL; /* NULL: not finite */
        break;
    case WIRE_STR:
        out = wire_str(value, &text, &len) ? json_stringn(text, len) : NULL; /* NULL: not UTF-8 */
        break;
    case WIRE_ARRAY:
        out = convert_array(value, err);
        break;
    case WIRE_MAP:
        out = convert_map(value, err);
        break;
    case WIRE_BIN:
    case WIRE_EXT:
        break;
    }
    if (out == NULL && err->status == LK_OK) {
        lk_error_set(err, LK_ERR_INVALID, "a value of kind %s can not be taken",
                     wire_kind_name(kind));
    }
    return out;
}

lk_status_t msgpack_to_json(const void *data, size_t len, json_t **out, lk_error_t *err)
{
    const wire_limits_t limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    wire_doc_t doc = {0};
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, data, len, &limits, err));
    lk_error_t local = LK_ERROR_INIT;
    json_t *value = convert(doc.root, &local);
    wire_doc_fini(&doc);
    if (value == NULL) {
        return lk_error_set(err, local.status != LK_OK ? local.status : LK_ERR_NO_MEMORY, "%s",
                            local.text);
    }
    *out = value;
    return LK_OK;
}

static void put(const json_t *value, wire_writer_t *w)
{
    const char *key;
    json_t *item;
    size_t i;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        wire_put_map(w, json_object_size(value));
        json_object_foreach((json_t *)value, key, item)
        {
            wire_put_str(w, key, strlen(key));
            put(item, w);
        }
        break;
    case JSON_ARRAY:
        wire_put_array(w, json_array_size(value));
        json_array_foreach(value, i, item)
        {
            put(item, w);
        }
        break;
    case JSON_STRING:
        wire_put_str(w, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        wire_put_i64(w, json_integer_value(value));
        break;
    case JSON_REAL:
        wire_put_f64(w, json_real_value(value));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        wire_put_bool(w, json_is_true(value));
        break;
    case JSON_NULL:
        wire_put_nil(w);
        break;
    }
}

void msgpack_from_json(const json_t *value, lk_buf_t *out)
{
    wire_writer_t w = wire_writer(out);
    put(value, &w);
}
