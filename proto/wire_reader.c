#include "proto/wire_reader.h"
#include "base/check.h"
#include "proto/limits.h"

#include <msgpack.h>
#include <string.h>

static const char *const kind_names[] = {
    "nil", "bool", "integer", "negative integer", "float", "str", "bin", "array", "map", "ext"};

const char *wire_kind_name(wire_kind_t kind)
{
    return (size_t)kind < LK_ARRAY_LEN(kind_names) ? kind_names[kind] : "?";
}

/* One header: how long it is, and what follows it. */
typedef struct {
    size_t header;  /* bytes of the type byte and the length field */
    size_t payload; /* bytes after it */
    size_t items;   /* values after it (of an array; twice the entries of a map) */
    bool nested;    /* array or map */
    bool blob;      /* str or bin */
} head_t;

static size_t big_endian(const uint8_t *p, size_t n)
{
    size_t value = 0;
    for (size_t i = 0; i < n; i++) {
        value = value << 8 | p[i];
    }
    return value;
}

/* The type bytes 0xC0 to 0xDF of the msgpack specification: kind of what follows, bytes of its
 * length field, bytes of fixed payload. */
typedef enum { TAG_BAD, TAG_FIXED, TAG_BLOB, TAG_EXT, TAG_ARRAY, TAG_MAP } tag_kind_t;
static const struct {
    uint8_t kind, length, fixed;
} tags[32] = {
    {TAG_FIXED, 0, 0},  {TAG_BAD, 0, 0},   {TAG_FIXED, 0, 0}, {TAG_FIXED, 0, 0}, /* nil - f t */
    {TAG_BLOB, 1, 0},   {TAG_BLOB, 2, 0},  {TAG_BLOB, 4, 0},                     /* bin */
    {TAG_EXT, 1, 1},    {TAG_EXT, 2, 1},   {TAG_EXT, 4, 1},                      /* ext */
    {TAG_FIXED, 0, 4},  {TAG_FIXED, 0, 8},                                       /* float */
    {TAG_FIXED, 0, 1},  {TAG_FIXED, 0, 2}, {TAG_FIXED, 0, 4}, {TAG_FIXED, 0, 8}, /* uint */
    {TAG_FIXED, 0, 1},  {TAG_FIXED, 0, 2}, {TAG_FIXED, 0, 4}, {TAG_FIXED, 0, 8}, /* int */
    {TAG_FIXED, 0, 2},  {TAG_FIXED, 0, 3}, {TAG_FIXED, 0, 5}, {TAG_FIXED, 0, 9},
    {TAG_FIXED, 0, 17},                                      /* fixext */
    {TAG_BLOB, 1, 0},   {TAG_BLOB, 2, 0},  {TAG_BLOB, 4, 0}, /* str */
    {TAG_ARRAY, 2, 0},  {TAG_ARRAY, 4, 0}, {TAG_MAP, 2, 0},   {TAG_MAP, 4, 0},
};

/* left > 0. False: cut off inside the header, or a type byte that msgpack never uses. */
static bool read_head(const uint8_t *p, size_t left, head_t *out)
{
    uint8_t byte = p[0];
    *out = (head_t){.header = 1};
    if (byte <= 0x7F || byte >= 0xE0) {
        return true;
    }
    if (byte <= 0x8F) {
        out->nested = true;
        out->items = 2 * (size_t)(byte & 0x0F);
        return true;
    }
    if (byte <= 0x9F) {
        out->nested = true;
        out->items = byte & 0x0F;
        return true;
    }
    if (byte <= 0xBF) {
        out->blob = true;
        out->payload = byte & 0x1F;
        return true;
    }
    uint8_t kind = tags[byte - 0xC0].kind;
    size_t length = tags[byte - 0xC0].length;
    if (kind == TAG_BAD || left - 1 < length) {
        return false;
    }
    size_t claimed = big_endian(p + 1, length);
    out->header += length;
    out->payload = tags[byte - 0xC0].fixed;
    if (kind == TAG_ARRAY || kind == TAG_MAP) {
        out->nested = true;
        out->items = kind == TAG_MAP ? 2 * claimed : claimed;
    } else if (kind == TAG_BLOB || kind == TAG_EXT) {
        out->blob = kind == TAG_BLOB;
        out->payload += claimed;
    }
    return true;
}

lk_status_t wire_walk(const void *data, size_t len, const wire_limits_t *limits, wire_shape_t *out,
                      lk_error_t *err)
{
    const uint8_t *p = data;
    size_t at = 0;
    size_t open[WIRE_MAX_DEPTH + 1]; /* values still to come, per open array or map */
    unsigned depth = 0;
    wire_shape_t shape = {0};
    CHECK(limits->max_depth <= WIRE_MAX_DEPTH);
    if (len > limits->max_bytes) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "%zu bytes, at most %zu are allowed", len,
                            limits->max_bytes);
    }
    open[0] = 1;
    for (;;) {
        while (open[depth] == 0) {
            if (depth == 0) {
                if (at != len) {
                    return lk_error_set(err, LK_ERR_INVALID, "%zu bytes after the end at byte %zu",
                                        len - at, at);
                }
                *out = shape;
                return LK_OK;
            }
            depth--;
        }
        open[depth]--;
        head_t head;
        if (at == len || !read_head(p + at, len - at, &head)) {
            return lk_error_set(err, LK_ERR_INVALID, "cut off or not msgpack at byte %zu", at);
        }
        if (++shape.objects > limits->max_objects) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "more than %zu values", limits->max_objects);
        }
        size_t left = len - at - head.header;
        /* each value that is claimed takes a byte at least */
        if (head.payload > left || head.items > left) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "claims %zu at byte %zu, where only %zu bytes are left",
                                head.payload + head.items, at, left);
        }
        if (head.blob) {
            shape.blobs++;
            shape.bytes += head.payload;
        }
        at += head.header + head.payload;
        if (head.nested) {
            if (depth == limits->max_depth) {
                return lk_error_set(err, LK_ERR_TOO_LARGE, "nested deeper than %u at byte %zu",
                                    limits->max_depth, at);
            }
            open[++depth] = head.items;
        }
    }
}

lk_status_t wire_doc_init(wire_doc_t *self, const void *data, size_t len,
                          const wire_limits_t *limits, lk_error_t *err)
{
    wire_shape_t shape;
    LK_RETURN_IF_ERROR(wire_walk(data, len, limits, &shape, err));
    /* One block: the outermost value, and every other one in its array or map. */
    msgpack_zone *zone = msgpack_zone_new((shape.objects + 1) * sizeof(msgpack_object) + 64);
    msgpack_object *root = zone != NULL ? msgpack_zone_malloc(zone, sizeof(msgpack_object)) : NULL;
    if (root == NULL) {
        if (zone != NULL) {
            msgpack_zone_free(zone);
        }
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu values", shape.objects);
    }
    size_t off = 0;
    msgpack_unpack_return rc = msgpack_unpack(data, len, &off, zone, root);
    if (rc != MSGPACK_UNPACK_SUCCESS || off != len) {
        msgpack_zone_free(zone);
        return lk_error_set(err,
                            rc == MSGPACK_UNPACK_NOMEM_ERROR ? LK_ERR_NO_MEMORY : LK_ERR_INVALID,
                            "msgpack refuses the document at byte %zu (%d)", off, (int)rc);
    }
    self->zone = zone;
    self->shape = shape;
    self->root = root;
    return LK_OK;
}

void wire_doc_fini(wire_doc_t *self)
{
    if (self != NULL && self->zone != NULL) {
        msgpack_zone_free(self->zone);
        memset(self, 0, sizeof *self);
    }
}

wire_kind_t wire_kind(const wire_value_t *value)
{
    switch (value->type) {
    case MSGPACK_OBJECT_NIL:
        return WIRE_NIL;
    case MSGPACK_OBJECT_BOOLEAN:
        return WIRE_BOOL;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return WIRE_UINT;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return WIRE_INT;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return WIRE_FLOAT;
    case MSGPACK_OBJECT_STR:
        return WIRE_STR;
    case MSGPACK_OBJECT_BIN:
        return WIRE_BIN;
    case MSGPACK_OBJECT_ARRAY:
        return WIRE_ARRAY;
    case MSGPACK_OBJECT_MAP:
        return WIRE_MAP;
    default:
        return WIRE_EXT;
    }
}

bool wire_u64(const wire_value_t *value, uint64_t *out)
{
    if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER) {
        return false;
    }
    *out = value->via.u64;
    return true;
}

bool wire_i64(const wire_value_t *value, int64_t *out)
{
    if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER) {
        *out = value->via.i64;
        return true;
    }
    if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= INT64_MAX) {
        *out = (int64_t)value->via.u64;
        return true;
    }
    return false;
}

bool wire_f64(const wire_value_t *value, double *out)
{
    switch (value->type) {
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        *out = value->via.f64;
        return true;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        *out = (double)value->via.u64;
        return true;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        *out = (double)value->via.i64;
        return true;
    default:
        return false;
    }
}

bool wire_bool(const wire_value_t *value, bool *out)
{
    if (value->type != MSGPACK_OBJECT_BOOLEAN) {
        return false;
    }
    *out = value->via.boolean;
    return true;
}

bool wire_str(const wire_value_t *value, const char **out, size_t *len)
{
    if (value->type != MSGPACK_OBJECT_STR) {
        return false;
    }
    *out = value->via.str.ptr;
    *len = value->via.str.size;
    return true;
}

bool wire_bin(const wire_value_t *value, const void **out, size_t *len)
{
    if (value->type != MSGPACK_OBJECT_BIN) {
        return false;
    }
    *out = value->via.bin.ptr;
    *len = value->via.bin.size;
    return true;
}

bool wire_array(const wire_value_t *value, const wire_value_t **first, size_t *count)
{
    if (value->type != MSGPACK_OBJECT_ARRAY) {
        return false;
    }
    *first = value->via.array.ptr;
    *count = value->via.array.size;
    return true;
}

bool wire_map(const wire_value_t *value, size_t *count)
{
    if (value->type != MSGPACK_OBJECT_MAP) {
        return false;
    }
    *count = value->via.map.size;
    return true;
}

const wire_value_t *wire_item(const wire_value_t *first, size_t i)
{
    return first + i;
}

const wire_value_t *wire_map_key(const wire_value_t *map, size_t i)
{
    return &map->via.map.ptr[i].key;
}

const wire_value_t *wire_map_value(const wire_value_t *map, size_t i)
{
    return &map->via.map.ptr[i].val;
}
