/*
 * wire_json.h: JSON values as msgpack and back, for the trainer's socket, whose messages are the
 * HTTP bodies in msgpack maps.
 */
#ifndef LK_PROTO_WIRE_JSON_H
#define LK_PROTO_WIRE_JSON_H

#include "proto/wire_reader.h"
#include "proto/wire_writer.h"

#include <jansson.h>

/* Errors are the buffer's sticky `failed`. */
void wire_put_json(wire_writer_t *self, const json_t *value);

/* The caller owns *out. LK_ERR_INVALID for what JSON has no word for: bin, ext, a key that is no
 * string or comes twice, text that is not UTF-8 or holds a NUL, an integer beyond 2^63 - 1. The
 * document's depth was bounded when it was walked. */
LK_MUST_USE lk_status_t wire_to_json(const wire_value_t *value, json_t **out, lk_error_t *err);

#endif
