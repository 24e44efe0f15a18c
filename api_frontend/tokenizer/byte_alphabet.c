#include "api_frontend/tokenizer/byte_alphabet.h"
#include "api_frontend/tokenizer/utf8.h"

static bool stands_for_itself(uint32_t c)
{
    return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

uint32_t byte_alphabet_char(uint8_t byte)
{
    if (stands_for_itself(byte)) {
        return byte;
    }
    if (byte <= 0x20) {
        return 0x100u + byte;
    }
    /* 33 control bytes and the space come before 0x7F; 0xAD is the last one */
    return byte == 0xAD ? 0x143u : 0x121u + (byte - 0x7Fu);
}

/* The byte a code point stands for, or -1. */
static int char_byte(uint32_t c)
{
    if (stands_for_itself(c)) {
        return (int)c;
    }
    if (c >= 0x100 && c <= 0x120) {
        return (int)(c - 0x100);
    }
    if (c >= 0x121 && c <= 0x142) {
        return (int)(c - 0x121 + 0x7F);
    }
    return c == 0x143 ? 0xAD : -1;
}

size_t byte_alphabet_encode(uint8_t byte, char out[2])
{
    uint32_t c = byte_alphabet_char(byte);
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

void byte_alphabet_decode(lk_buf_t *out, const char *text, size_t len)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t start = out->len;
    for (size_t i = 0; i < len;) {
        size_t n;
        int byte = -1;
        if (utf8_look(p + i, len - i, &n) == UTF8_VALID) {
            byte = char_byte(utf8_decode(p + i, n));
        }
        if (byte < 0) {
            out->len = start;
            lk_buf_append(out, text, len);
            return;
        }
        uint8_t b = (uint8_t)byte;
        lk_buf_append(out, &b, 1);
        i += n;
    }
}
