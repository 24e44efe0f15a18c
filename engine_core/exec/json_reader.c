#include "engine_core/exec/json_reader.h"

#include <math.h>
#include <stdio.h>

/* A short rendering of a value for error texts. */
static void value_text(const json_t *value, char out[64])
{
    switch (json_typeof(value)) {
    case JSON_STRING:
        snprintf(out, 64, "\"%.40s\"", json_string_value(value));
        break;
    case JSON_INTEGER:
        snprintf(out, 64, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(out, 64, "%.17g", json_real_value(value));
        break;
    case JSON_OBJECT:
        snprintf(out, 64, "an object");
        break;
    case JSON_ARRAY:
        snprintf(out, 64, "an array");
        break;
    default:
        snprintf(out, 64, "%s",
                 json_is_true(value)    ? "true"
                 : json_is_false(value) ? "false"
                                        : "null");
    }
}

lk_status_t json_reader_refuse(const json_reader_t *r, const char *key, const json_t *value,
                               const char *expected)
{
    char got[64];
    value_text(value, got);
    return lk_error_set(r->err, LK_ERR_INVALID, "%s: %s: expected %s, got %s", r->file, key,
                        expected, got);
}

lk_status_t json_reader_unsupported(const json_reader_t *r, const char *key, const json_t *value,
                                    const char *supported)
{
    char got[64];
    value_text(value, got);
    return lk_error_set(r->err, LK_ERR_UNSUPPORTED, "%s: %s: %s is not supported%s%s", r->file, key,
                        got, supported[0] != '\0' ? ", only " : "", supported);
}

const json_t *json_reader_get(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

lk_status_t json_reader_u32(const json_reader_t *r, const json_t *object, const char *key,
                            uint32_t min, uint32_t max, uint32_t absent, uint32_t *out)
{
    const json_t *value = json_reader_get(object, key);
    if (value == NULL) {
        if (absent == JSON_READER_REQUIRED) {
            return lk_error_set(r->err, LK_ERR_INVALID, "%s: %s is missing", r->file, key);
        }
        *out = absent;
        return LK_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < (json_int_t)min ||
        json_integer_value(value) > (json_int_t)max) {
        char expected[64];
        snprintf(expected, sizeof expected, "an integer from %u to %u", min, max);
        return json_reader_refuse(r, key, value, expected);
    }
    *out = (uint32_t)json_integer_value(value);
    return LK_OK;
}

lk_status_t json_reader_bool(const json_reader_t *r, const json_t *object, const char *key,
                             bool absent, bool *out)
{
    const json_t *value = json_reader_get(object, key);
    if (value != NULL && !json_is_boolean(value)) {
        return json_reader_refuse(r, key, value, "true or false");
    }
    *out = value != NULL ? json_is_true(value) : absent;
    return LK_OK;
}

lk_status_t json_reader_float(const json_reader_t *r, const json_t *object, const char *key,
                              double min, double max, double absent, float *out)
{
    const json_t *value = json_reader_get(object, key);
    if (value == NULL) {
        if (isnan(absent)) {
            return lk_error_set(r->err, LK_ERR_INVALID, "%s: %s is missing", r->file, key);
        }
        *out = (float)absent;
        return LK_OK;
    }
    double x = json_number_value(value);
    if (!json_is_number(value) || !(x >= min && x <= max)) {
        char expected[64];
        snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
        return json_reader_refuse(r, key, value, expected);
    }
    *out = (float)x;
    return LK_OK;
}

lk_status_t json_reader_parse(const json_reader_t *r, const char *text, size_t len, json_t **out)
{
    json_error_t json_err;
    if (len > JSON_READER_MAX_BYTES) {
        return lk_error_set(r->err, LK_ERR_TOO_LARGE, "%s: %zu bytes, at most %u are read", r->file,
                            len, JSON_READER_MAX_BYTES);
    }
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &json_err);
    if (root == NULL) {
        return lk_error_set(r->err, LK_ERR_INVALID, "%s: line %d: %s", r->file, json_err.line,
                            json_err.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return lk_error_set(r->err, LK_ERR_INVALID, "%s: not a JSON object", r->file);
    }
    *out = root;
    return LK_OK;
}
