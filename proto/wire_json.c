#include "proto/wire_json.h"

#include <string.h>

void wire_put_json(wire_writer_t *self, const json_t *value)
{
    const char *key;
    json_t *item;
    size_t i;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        wire_put_map(self, json_object_size(value));
        json_object_foreach((json_t *)value, key, item)
        {
            wire_put_str(self, key, strlen(key));
            wire_put_json(self, item);
        }
        break;
    case JSON_ARRAY:
        wire_put_array(self, json_array_size(value));
        json_array_foreach(value, i, item)
        {
            wire_put_json(self, item);
        }
        break;
    case JSON_STRING:
        wire_put_str(self, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        wire_put_i64(self, json_integer_value(value));
        break;
    case JSON_REAL:
        wire_put_f64(self, json_real_value(value));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        wire_put_bool(self, json_is_true(value));
        break;
    case JSON_NULL:
        wire_put_nil(self);
        break;
    }
}

static lk_status_t invalid(const wire_value_t *value, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_INVALID, "a value of kind %s is not valid here",
                        wire_kind_name(wire_kind(value)));
}

static lk_status_t to_text(const wire_value_t *value, json_t **out, lk_error_t *err)
{
    const char *text = NULL;
    size_t len = 0;
    bool is_text = wire_str(value, &text, &len);
    text = len > 0 ? text : ""; /* an empty one may have no place */
    bool valid = is_text && memchr(text, '\0', len) == NULL && lk_utf8_valid(text, len);
    json_t *string = valid ? json_stringn_nocheck(text, len) : NULL;
    if (string == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "a text is not UTF-8 without a NUL");
    }
    *out = string;
    return LK_OK;
}

static lk_status_t to_array(const wire_value_t *value, json_t **out, lk_error_t *err)
{
    const wire_value_t *first = NULL;
    size_t n = 0;
    json_t *array = json_array();
    bool is_array = wire_array(value, &first, &n);
    lk_status_t st = is_array && array != NULL ? LK_OK : invalid(value, err);
    for (size_t i = 0; i < n && st == LK_OK; i++) {
        json_t *item = NULL;
        st = wire_to_json(wire_item(first, i), &item, err);
        if (st == LK_OK && json_array_append_new(array, item) != 0) {
            st = lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for an array");
        }
    }
    if (st != LK_OK) {
        json_decref(array);
        return st;
    }
    *out = array;
    return LK_OK;
}

static lk_status_t to_object(const wire_value_t *value, json_t **out, lk_error_t *err)
{
    size_t n = 0;
    json_t *object = json_object();
    bool is_map = wire_map(value, &n);
    lk_status_t st = is_map && object != NULL ? LK_OK : invalid(value, err);
    for (size_t i = 0; i < n && st == LK_OK; i++) {
        json_t *key = NULL, *item = NULL;
        st = to_text(wire_map_key(value, i), &key, err);
        const char *name = st == LK_OK ? json_string_value(key) : "";
        if (st == LK_OK && json_object_get(object, name) != NULL) {
            st = lk_error_set(err, LK_ERR_INVALID, "the key \"%.60s\" comes twice", name);
        }
        st = st == LK_OK ? wire_to_json(wire_map_value(value, i), &item, err) : st;
        if (st == LK_OK && json_object_set_new(object, name, item) != 0) {
            st = lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for an object");
        }
        json_decref(key);
    }
    if (st != LK_OK) {
        json_decref(object);
        return st;
    }
    *out = object;
    return LK_OK;
}

lk_status_t wire_to_json(const wire_value_t *value, json_t **out, lk_error_t *err)
{
    bool flag;
    int64_t integer;
    double real;
    json_t *made = NULL;
    switch (wire_kind(value)) {
    case WIRE_NIL:
        made = json_null();
        break;
    case WIRE_BOOL:
        made = wire_bool(value, &flag) ? json_boolean(flag) : NULL;
        break;
    case WIRE_UINT:
    case WIRE_INT:
        made = wire_i64(value, &integer) ? json_integer(integer) : NULL;
        break;
    case WIRE_FLOAT: /* NaN and infinity have no JSON */
        made = wire_f64(value, &real) ? json_real(real) : NULL;
        break;
    case WIRE_STR:
        return to_text(value, out, err);
    case WIRE_ARRAY:
        return to_array(value, out, err);
    case WIRE_MAP:
        return to_object(value, out, err);
    case WIRE_BIN:
    case WIRE_EXT:
        break;
    }
    if (made == NULL && wire_kind(value) == WIRE_FLOAT) {
        return lk_error_set(err, LK_ERR_INVALID, "a number must be finite");
    }
    if (made == NULL) {
        return invalid(value, err);
    }
    *out = made;
    return LK_OK;
}
