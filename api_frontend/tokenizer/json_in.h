/*
 * json_in.h: untrusted JSON. Texts are scanned for their number and depth of values before jansson
 * builds anything (an empty object costs a hundred times its two bytes), and members are fetched
 * with their type checked and their place named.
 */
#ifndef LK_TOKENIZER_JSON_IN_H
#define LK_TOKENIZER_JSON_IN_H

#include "base/status.h"

#include <jansson.h>

/* Limits on one text: with them, a parsed tree stays under about 600 MB whatever the text. */
#define JSON_IN_MAX_VALUES  (4u << 20)
#define JSON_IN_MAX_ARRAYS  (1u << 20)
#define JSON_IN_MAX_OBJECTS (1u << 16)
#define JSON_IN_MAX_DEPTH   64

/* Parses an object. The caller owns *out (json_decref). Duplicate keys are an error. */
lk_status_t json_in_parse(const char *text, size_t len, json_t **out, lk_error_t *err);

/* The getters write "WHERE.KEY ..." into err. A null member counts as missing. */

/* *out is NULL when missing. Borrowed. */
lk_status_t json_in_member(json_t *object, const char *where, const char *key, json_type type,
                           json_t **out, lk_error_t *err);
lk_status_t json_in_string(json_t *object, const char *where, const char *key, const char **out,
                           lk_error_t *err);
/* *out keeps its value when missing. */
lk_status_t json_in_bool(json_t *object, const char *where, const char *key, bool *out,
                         lk_error_t *err);
/* Missing is an error for this one. */
lk_status_t json_in_need_bool(json_t *object, const char *where, const char *key, bool *out,
                              lk_error_t *err);
/* The "type" of a component; missing is an error. */
lk_status_t json_in_type(json_t *object, const char *where, const char **out, lk_error_t *err);

#endif
