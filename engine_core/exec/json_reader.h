/*
 * json_reader.h: fields of a JSON object, checked and refused by name. For configuration files that
 * others wrote: wrong types, numbers out of range and duplicate keys are errors, never defaults.
 */
#ifndef LK_ENGINE_CORE_EXEC_JSON_READER_H
#define LK_ENGINE_CORE_EXEC_JSON_READER_H

#include "base/status.h"

#include <jansson.h>

#define JSON_READER_MAX_BYTES (4u << 20)

/* Which file is being read, for the texts; and where errors go. */
typedef struct {
    const char *file;
    lk_error_t *err;
} json_reader_t;

/* Parses an object of at most JSON_READER_MAX_BYTES. The caller owns *out (json_decref). */
LK_MUST_USE lk_status_t json_reader_parse(const json_reader_t *r, const char *text, size_t len,
                                          json_t **out);

/* NULL for an absent key and for null: Transformers writes both for "not set". object may be NULL.
 * Borrowed. */
const json_t *json_reader_get(const json_t *object, const char *key);

#define JSON_READER_REQUIRED UINT32_MAX /* as `absent`: the field has no default */
LK_MUST_USE lk_status_t json_reader_u32(const json_reader_t *r, const json_t *object,
                                        const char *key, uint32_t min, uint32_t max,
                                        uint32_t absent, uint32_t *out);
LK_MUST_USE lk_status_t json_reader_bool(const json_reader_t *r, const json_t *object,
                                         const char *key, bool absent, bool *out);
/* Within [min, max]. absent NAN: the field has no default. */
LK_MUST_USE lk_status_t json_reader_float(const json_reader_t *r, const json_t *object,
                                          const char *key, double min, double max, double absent,
                                          float *out);

/* "FILE: KEY: expected EXPECTED, got VALUE", LK_ERR_INVALID. value may be NULL. */
lk_status_t json_reader_refuse(const json_reader_t *r, const char *key, const json_t *value,
                               const char *expected);
/* "FILE: KEY: VALUE is not supported, only SUPPORTED", LK_ERR_UNSUPPORTED. */
lk_status_t json_reader_unsupported(const json_reader_t *r, const char *key, const json_t *value,
                                    const char *supported);

#endif
