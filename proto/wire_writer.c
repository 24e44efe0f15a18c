#include "proto/wire_writer.h"
#include "base/check.h"

#include <msgpack.h>

static int append(void *data, const char *bytes, size_t len)
{
    lk_buf_t *buf = data;
    lk_buf_append(buf, bytes, len);
    return buf->failed ? -1 : 0;
}

/* The packer's results are not looked at: the buffer remembers a failure. */
static msgpack_packer begin(wire_writer_t *self)
{
    self->objects++;
    return (msgpack_packer){.data = self->buf, .callback = append};
}

void wire_put_nil(wire_writer_t *self)
{
    msgpack_packer pk = begin(self);
    msgpack_pack_nil(&pk);
}

void wire_put_u64(wire_writer_t *self, uint64_t value)
{
    msgpack_packer pk = begin(self);
    msgpack_pack_uint64(&pk, value);
}

void wire_put_i64(wire_writer_t *self, int64_t value)
{
    msgpack_packer pk = begin(self);
    msgpack_pack_int64(&pk, value);
}

void wire_put_f64(wire_writer_t *self, double value)
{
    msgpack_packer pk = begin(self);
    msgpack_pack_double(&pk, value);
}

void wire_put_bool(wire_writer_t *self, bool value)
{
    msgpack_packer pk = begin(self);
    if (value) {
        msgpack_pack_true(&pk);
    } else {
        msgpack_pack_false(&pk);
    }
}

void wire_put_str(wire_writer_t *self, const char *text, size_t len)
{
    CHECK(len <= UINT32_MAX);
    msgpack_packer pk = begin(self);
    msgpack_pack_str(&pk, len);
    lk_buf_append(self->buf, text, len);
}

void wire_put_bin(wire_writer_t *self, const void *data, size_t len)
{
    CHECK(len <= UINT32_MAX);
    msgpack_packer pk = begin(self);
    msgpack_pack_bin(&pk, len);
    lk_buf_append(self->buf, data, len);
}

void wire_put_array(wire_writer_t *self, size_t count)
{
    CHECK(count <= UINT32_MAX);
    msgpack_packer pk = begin(self);
    msgpack_pack_array(&pk, count);
}

void wire_put_map(wire_writer_t *self, size_t count)
{
    CHECK(count <= UINT32_MAX / 2);
    msgpack_packer pk = begin(self);
    msgpack_pack_map(&pk, count);
}
