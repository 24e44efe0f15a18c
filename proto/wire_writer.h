/*
 * wire_writer.h: appends msgpack to a buffer. The only user of msgpack-c's packer. Errors are the
 * buffer's sticky `failed`. An array or map header is followed by exactly as many values.
 */
#ifndef LK_PROTO_WIRE_WRITER_H
#define LK_PROTO_WIRE_WRITER_H

#include "base/buf.h"

typedef struct {
    lk_buf_t *buf;
    size_t objects; /* values written so far */
} wire_writer_t;

static inline wire_writer_t wire_writer(lk_buf_t *buf)
{
    return (wire_writer_t){buf, 0};
}

void wire_put_nil(wire_writer_t *self);
void wire_put_u64(wire_writer_t *self, uint64_t value);
void wire_put_i64(wire_writer_t *self, int64_t value);
void wire_put_f64(wire_writer_t *self, double value);
void wire_put_bool(wire_writer_t *self, bool value);
void wire_put_str(wire_writer_t *self, const char *text, size_t len); /* len below 2^32 */
void wire_put_bin(wire_writer_t *self, const void *data, size_t len); /* len below 2^32 */
void wire_put_array(wire_writer_t *self, size_t count);
void wire_put_map(wire_writer_t *self, size_t count);

#endif
