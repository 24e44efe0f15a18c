/*
 * msgpack_json.h: a MessagePack map from outside as a JSON object, and back. Numbers, strings,
 * booleans, nil, arrays and maps with text keys; what JSON has no form for is refused by name.
 */
#ifndef LK_API_FRONTEND_MSGPACK_JSON_H
#define LK_API_FRONTEND_MSGPACK_JSON_H

#include "base/buf.h"

#include <jansson.h>

/* Limits of proto/limits.h. LK_ERR_INVALID or LK_ERR_TOO_LARGE; *out is the caller's. */
LK_MUST_USE lk_status_t msgpack_to_json(const void *data, size_t len, json_t **out,
                                        lk_error_t *err);
/* Appends the value. */
void msgpack_from_json(const json_t *value, lk_buf_t *out);

#endif
