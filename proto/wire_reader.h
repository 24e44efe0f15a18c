/*
 * wire_reader.h: reads one msgpack document from outside. The only user of msgpack-c's unpacker.
 *
 * msgpack-c reserves what a header claims, so a walk that allocates nothing comes first: every
 * claimed length is compared with the bytes that are left, depth and number of values with limits.
 * What it lets through costs at most 24 bytes per value. Values borrow from the caller's bytes.
 */
#ifndef LK_PROTO_WIRE_READER_H
#define LK_PROTO_WIRE_READER_H

#include "base/status.h"

typedef enum {
    WIRE_NIL,
    WIRE_BOOL,
    WIRE_UINT,
    WIRE_INT, /* negative */
    WIRE_FLOAT,
    WIRE_STR,
    WIRE_BIN,
    WIRE_ARRAY,
    WIRE_MAP,
    WIRE_EXT,
} wire_kind_t;

typedef struct {
    size_t max_bytes;
    size_t max_objects;
    unsigned max_depth; /* nested arrays and maps, at most WIRE_MAX_DEPTH */
} wire_limits_t;

/* What the walk counted. */
typedef struct {
    size_t objects; /* values, the outermost included */
    size_t blobs;   /* strings and bins */
    size_t bytes;   /* of all strings and bins together */
} wire_shape_t;

/* LK_ERR_INVALID with the byte offset unless data is exactly one document; LK_ERR_TOO_LARGE when it
 * is over a limit. Allocates nothing. */
LK_MUST_USE lk_status_t wire_walk(const void *data, size_t len, const wire_limits_t *limits,
                                  wire_shape_t *out, lk_error_t *err);

typedef struct msgpack_object wire_value_t;

typedef struct {
    void *zone;
    wire_shape_t shape;
    const wire_value_t *root;
} wire_doc_t;

/* Walks, then parses. `data` must outlive the document. */
LK_MUST_USE lk_status_t wire_doc_init(wire_doc_t *self, const void *data, size_t len,
                                      const wire_limits_t *limits, lk_error_t *err);
/* Accepts NULL and a zeroed document. */
void wire_doc_fini(wire_doc_t *self);

wire_kind_t wire_kind(const wire_value_t *value);
const char *wire_kind_name(wire_kind_t kind); /* "array" */

/* Each returns false, and writes nothing, when the value is of another kind or does not fit. */
bool wire_u64(const wire_value_t *value, uint64_t *out);
bool wire_i64(const wire_value_t *value, int64_t *out);
bool wire_f64(const wire_value_t *value, double *out); /* integers too */
bool wire_bool(const wire_value_t *value, bool *out);
bool wire_str(const wire_value_t *value, const char **out, size_t *len); /* not NUL-terminated */
bool wire_bin(const wire_value_t *value, const void **out, size_t *len);
bool wire_array(const wire_value_t *value, const wire_value_t **first, size_t *count);
bool wire_map(const wire_value_t *value, size_t *count);
/* Entry i of an array's `first`, and of a map; i below count. */
const wire_value_t *wire_item(const wire_value_t *first, size_t i);
const wire_value_t *wire_map_key(const wire_value_t *map, size_t i);
const wire_value_t *wire_map_value(const wire_value_t *map, size_t i);

#endif
