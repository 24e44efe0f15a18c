#include "base/base64.h"

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void base64_encode(const void *bytes, size_t n, char *out)
{
    const uint8_t *in = bytes;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t word = (uint32_t)in[i] << 16;
        word |= i + 1 < n ? (uint32_t)in[i + 1] << 8 : 0;
        word |= i + 2 < n ? in[i + 2] : 0;
        *out++ = alphabet[word >> 18];
        *out++ = alphabet[word >> 12 & 63];
        *out++ = i + 1 < n ? alphabet[word >> 6 & 63] : '=';
        *out++ = i + 2 < n ? alphabet[word & 63] : '=';
    }
    *out = '\0';
}

static int value_of(char c)
{
    if (c >= 'A' && c <= 'Z') {
        return c - 'A';
    }
    if (c >= 'a' && c <= 'z') {
        return c - 'a' + 26;
    }
    if (c >= '0' && c <= '9') {
        return c - '0' + 52;
    }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool base64_decode(const char *text, size_t len, void *out, size_t room, size_t *n)
{
    if (len % 4 != 0) {
        return false;
    }
    uint8_t *to = out;
    size_t used = 0;
    for (size_t i = 0; i < len; i += 4) {
        bool last = i + 4 == len;
        size_t pad = last && text[i + 3] == '=' ? (text[i + 2] == '=' ? 2 : 1) : 0;
        uint32_t word = 0;
        for (size_t k = 0; k < 4; k++) {
            int v = k < 4 - pad ? value_of(text[i + k]) : 0;
            if (v < 0) {
                return false;
            }
            word = word << 6 | (uint32_t)v;
        }
        if ((word & ((1u << 8 * pad) - 1)) != 0 || 3 - pad > room - used) {
            return false;
        }
        for (size_t k = 0; k < 3 - pad; k++) {
            to[used++] = (uint8_t)(word >> (16 - 8 * k));
        }
    }
    *n = used;
    return true;
}
