#include "transfer/backends/transfer_frame.h"
#include "base/check.h"

#include <endian.h>
#include <string.h>

#define HELLO_MAGIC 0x48574b4cu /* "LKWH" */
#define FRAME_MAGIC 0x46574b4cu /* "LKWF" */

static uint8_t *put16(uint8_t *p, uint16_t x)
{
    x = htole16(x);
    memcpy(p, &x, sizeof x);
    return p + sizeof x;
}

static uint8_t *put32(uint8_t *p, uint32_t x)
{
    x = htole32(x);
    memcpy(p, &x, sizeof x);
    return p + sizeof x;
}

static uint8_t *put64(uint8_t *p, uint64_t x)
{
    x = htole64(x);
    memcpy(p, &x, sizeof x);
    return p + sizeof x;
}

static uint16_t get16(const uint8_t **p)
{
    uint16_t x;
    memcpy(&x, *p, sizeof x);
    *p += sizeof x;
    return le16toh(x);
}

static uint32_t get32(const uint8_t **p)
{
    uint32_t x;
    memcpy(&x, *p, sizeof x);
    *p += sizeof x;
    return le32toh(x);
}

static uint64_t get64(const uint8_t **p)
{
    uint64_t x;
    memcpy(&x, *p, sizeof x);
    *p += sizeof x;
    return le64toh(x);
}

const char *transfer_kind_name(transfer_kind_t kind)
{
    switch (kind) {
#define X(name, value)                                                                             \
    case TRANSFER_##name:                                                                          \
        return #name;
        TRANSFER_KIND_TABLE(X)
#undef X
    }
    return "?";
}

void transfer_frame_encode(const transfer_frame_t *frame, uint8_t out[TRANSFER_FRAME_SIZE])
{
    uint8_t *p = put32(out, FRAME_MAGIC);
    p = put16(p, TRANSFER_VERSION);
    p = put16(p, (uint16_t)frame->kind);
    p = put64(p, frame->session);
    p = put64(p, frame->update);
    p = put64(p, frame->bucket);
    p = put64(p, frame->offset);
    p = put64(p, frame->length);
    CHECK(p == out + TRANSFER_FRAME_SIZE);
}

lk_status_t transfer_frame_decode(const uint8_t in[TRANSFER_FRAME_SIZE], transfer_frame_t *out,
                                  lk_error_t *err)
{
    const uint8_t *p = in;
    uint32_t magic = get32(&p);
    uint16_t version = get16(&p);
    uint16_t kind = get16(&p);
    if (magic != FRAME_MAGIC) {
        return lk_error_set(err, LK_ERR_PEER, "not a transfer frame (magic 0x%08x)", magic);
    }
    if (version != TRANSFER_VERSION) {
        return lk_error_set(err, LK_ERR_PEER, "frame of protocol version %u, expected %u", version,
                            TRANSFER_VERSION);
    }
    if (strcmp(transfer_kind_name((transfer_kind_t)kind), "?") == 0) {
        return lk_error_set(err, LK_ERR_PEER, "frame of unknown kind %u", kind);
    }
    out->kind = (transfer_kind_t)kind;
    out->session = get64(&p);
    out->update = get64(&p);
    out->bucket = get64(&p);
    out->offset = get64(&p);
    out->length = get64(&p);
    return LK_OK;
}

void transfer_hello_encode(const transfer_hello_t *hello, uint8_t out[TRANSFER_HELLO_SIZE])
{
    uint8_t *p = put32(out, HELLO_MAGIC);
    p = put16(p, TRANSFER_VERSION);
    p = put16(p, 0);
    p = put64(p, hello->pid);
    p = put32(p, hello->dp_rank);
    p = put32(p, hello->dp_size);
    p = put32(p, hello->lane);
    p = put32(p, hello->lanes);
    p = put32(p, hello->token_len);
    p = put32(p, 0);
    CHECK(p == out + TRANSFER_HELLO_SIZE);
}

lk_status_t transfer_hello_decode(const uint8_t in[TRANSFER_HELLO_SIZE], transfer_hello_t *out,
                                  lk_error_t *err)
{
    const uint8_t *p = in;
    uint32_t magic = get32(&p);
    uint16_t version = get16(&p);
    (void)get16(&p); /* reserved */
    if (magic != HELLO_MAGIC) {
        return lk_error_set(err, LK_ERR_PEER, "not a transfer hello (magic 0x%08x)", magic);
    }
    if (version != TRANSFER_VERSION) {
        return lk_error_set(err, LK_ERR_PEER, "hello of protocol version %u, expected %u", version,
                            TRANSFER_VERSION);
    }
    transfer_hello_t hello = {.pid = get64(&p)};
    hello.dp_rank = get32(&p);
    hello.dp_size = get32(&p);
    hello.lane = get32(&p);
    hello.lanes = get32(&p);
    hello.token_len = get32(&p);
    if (hello.token_len > TRANSFER_TOKEN_MAX) {
        return lk_error_set(err, LK_ERR_PEER, "hello with a token of %u bytes (limit %u)",
                            hello.token_len, TRANSFER_TOKEN_MAX);
    }
    *out = hello;
    return LK_OK;
}

void transfer_text_clean(const void *bytes, size_t len, char *out, size_t room)
{
    CHECK(room > 0);
    size_t n = len < room - 1 ? len : room - 1;
    for (size_t i = 0; i < n; i++) {
        uint8_t c = ((const uint8_t *)bytes)[i];
        out[i] = c >= 0x20 && c < 0x7f ? (char)c : '?';
    }
    out[n] = '\0';
}
