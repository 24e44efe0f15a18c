#include "api_frontend/tokenizer/json_in.h"

#include <ctype.h>
#include <string.h>

static lk_status_t too_many(lk_error_t *err, const char *what, unsigned limit)
{
    return lk_error_set(err, LK_ERR_TOO_LARGE, "has more than %u %s", limit, what);
}

/* Counts what jansson would allocate. Broken JSON may be miscounted; jansson refuses it later at
 * the place where it breaks. */
static lk_status_t prescan(const char *text, size_t len, lk_error_t *err)
{
    size_t values = 0, arrays = 0, objects = 0;
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (in_string) {
            i += c == '\\' ? 1 : 0;
            in_string = c != '"';
            continue;
        }
        in_string = c == '"';
        values += c == ',' || c == '[' || c == '{' || c == ':';
        arrays += c == '[';
        objects += c == '{';
        depth += c == '[' || c == '{' ? 1 : c == ']' || c == '}' ? -1 : 0;
        if (depth > JSON_IN_MAX_DEPTH) {
            return too_many(err, "levels of nesting", JSON_IN_MAX_DEPTH);
        }
        if (values > JSON_IN_MAX_VALUES) {
            return too_many(err, "values", JSON_IN_MAX_VALUES);
        }
        if (arrays > JSON_IN_MAX_ARRAYS) {
            return too_many(err, "arrays", JSON_IN_MAX_ARRAYS);
        }
        if (objects > JSON_IN_MAX_OBJECTS) {
            return too_many(err, "objects", JSON_IN_MAX_OBJECTS);
        }
    }
    return LK_OK;
}

lk_status_t json_in_parse(const char *text, size_t len, json_t **out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(prescan(text, len, err));
    json_error_t why;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        /* jansson quotes the input, possibly cut inside a character */
        for (char *p = why.text; *p != '\0'; p++) {
            *p = isprint((unsigned char)*p) ? *p : '?';
        }
        bool memory = json_error_code(&why) == json_error_out_of_memory;
        return lk_error_set(err, memory ? LK_ERR_NO_MEMORY : LK_ERR_INVALID,
                            "is not JSON: line %d column %d: %s", why.line, why.column, why.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return lk_error_set(err, LK_ERR_INVALID, "is not a JSON object");
    }
    *out = root;
    return LK_OK;
}

static const char *type_name(json_type type)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a number",  [JSON_TRUE] = "true or false",
        [JSON_FALSE] = "true or false"};
    return names[type];
}

lk_status_t json_in_member(json_t *object, const char *where, const char *key, json_type type,
                           json_t **out, lk_error_t *err)
{
    json_t *value = json_object_get(object, key);
    *out = NULL;
    if (value == NULL || json_is_null(value)) {
        return LK_OK;
    }
    bool boolean = type == JSON_TRUE;
    if (boolean ? !json_is_boolean(value) : json_typeof(value) != type) {
        return lk_error_set(err, LK_ERR_INVALID, "%s%s%s is not %s", where,
                            *where == '\0' ? "" : ".", key, type_name(type));
    }
    *out = value;
    return LK_OK;
}

lk_status_t json_in_string(json_t *object, const char *where, const char *key, const char **out,
                           lk_error_t *err)
{
    json_t *value;
    LK_RETURN_IF_ERROR(json_in_member(object, where, key, JSON_STRING, &value, err));
    *out = value == NULL ? NULL : json_string_value(value);
    return LK_OK;
}

lk_status_t json_in_bool(json_t *object, const char *where, const char *key, bool *out,
                         lk_error_t *err)
{
    json_t *value;
    LK_RETURN_IF_ERROR(json_in_member(object, where, key, JSON_TRUE, &value, err));
    *out = value == NULL ? *out : json_is_true(value);
    return LK_OK;
}

lk_status_t json_in_need_bool(json_t *object, const char *where, const char *key, bool *out,
                              lk_error_t *err)
{
    json_t *value = json_object_get(object, key);
    if (value == NULL || json_is_null(value)) {
        return lk_error_set(err, LK_ERR_INVALID, "%s.%s is missing", where, key);
    }
    return json_in_bool(object, where, key, out, err);
}

lk_status_t json_in_type(json_t *object, const char *where, const char **out, lk_error_t *err)
{
    if (!json_is_object(object)) {
        return lk_error_set(err, LK_ERR_INVALID, "%s is not an object", where);
    }
    LK_RETURN_IF_ERROR(json_in_string(object, where, "type", out, err));
    return *out != NULL ? LK_OK : lk_error_set(err, LK_ERR_INVALID, "%s.type is missing", where);
}
