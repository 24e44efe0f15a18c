#include "transfer/wte_fields.h"

#include <string.h>

static const wte_field_t *field_find(const wte_field_t *fields, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(fields[i].name, name) == 0) {
            return &fields[i];
        }
    }
    return NULL;
}

static lk_status_t field_check(const char *what, const char *backend, const wte_field_t *field,
                               const json_t *value, lk_error_t *err)
{
    switch (field->type) {
    case WTE_FIELD_ANY:
        return LK_OK;
    case WTE_FIELD_BOOL:
        return json_is_boolean(value)
                   ? LK_OK
                   : lk_error_set(err, LK_ERR_INVALID,
                                  "Invalid %s for %s: '%s' must be true or false", what, backend,
                                  field->name);
    case WTE_FIELD_STRING: {
        int64_t len = json_is_string(value) ? (int64_t)json_string_length(value) : -1;
        return len >= field->min && len <= field->max
                   ? LK_OK
                   : lk_error_set(err, LK_ERR_INVALID,
                                  "Invalid %s for %s: '%s' must be a string of %lld to %lld bytes",
                                  what, backend, field->name, (long long)field->min,
                                  (long long)field->max);
    }
    case WTE_FIELD_INT: {
        int64_t x = json_integer_value(value);
        return json_is_integer(value) && x >= field->min && x <= field->max
                   ? LK_OK
                   : lk_error_set(err, LK_ERR_INVALID,
                                  "Invalid %s for %s: '%s' must be an integer from %lld to %lld",
                                  what, backend, field->name, (long long)field->min,
                                  (long long)field->max);
    }
    }
    return LK_OK;
}

lk_status_t wte_fields_check(const char *what, const char *backend, const json_t *object,
                             const wte_field_t *fields, size_t n, lk_error_t *err)
{
    if (!json_is_object(object)) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid %s for %s: must be an object", what,
                            backend);
    }
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value)
    {
        const wte_field_t *field = field_find(fields, n, name);
        if (field == NULL) {
            return lk_error_set(err, LK_ERR_INVALID, "Invalid %s for %s: unknown field '%.100s'",
                                what, backend, name);
        }
        if (!json_is_null(value)) {
            LK_RETURN_IF_ERROR(field_check(what, backend, field, value, err));
        }
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *field = json_object_get(object, fields[i].name);
        if (fields[i].required && (field == NULL || json_is_null(field))) {
            return lk_error_set(err, LK_ERR_INVALID, "Invalid %s for %s: missing field '%s'", what,
                                backend, fields[i].name);
        }
    }
    return LK_OK;
}

lk_status_t wte_fields_world(const char *backend, const json_t *init_info, int64_t ranks,
                             lk_error_t *err)
{
    int64_t offset = wte_fields_int(init_info, "rank_offset", 1);
    int64_t world = wte_fields_int(init_info, "world_size", offset + ranks);
    return offset + ranks <= world
               ? LK_OK
               : lk_error_set(err, LK_ERR_INVALID,
                              "Invalid init_info for %s: world_size is %lld, but rank_offset %lld "
                              "and %lld ranks here need at least %lld",
                              backend, (long long)world, (long long)offset, (long long)ranks,
                              (long long)(offset + ranks));
}

int64_t wte_fields_int(const json_t *object, const char *name, int64_t absent)
{
    const json_t *value = json_object_get(object, name);
    return json_is_integer(value) ? json_integer_value(value) : absent;
}

bool wte_fields_bool(const json_t *object, const char *name, bool absent)
{
    const json_t *value = json_object_get(object, name);
    return json_is_boolean(value) ? json_is_true(value) : absent;
}
