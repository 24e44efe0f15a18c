#include "api_frontend/tokenizer/utf8.h"

#include <string.h>

utf8_kind_t utf8_look(const uint8_t *p, size_t left, size_t *n)
{
    uint8_t lead = p[0];
    *n = 1;
    if (lead < 0x80) {
        return UTF8_VALID;
    }
    if (lead < 0xC2 || lead > 0xF4) {
        return UTF8_INVALID;
    }
    size_t need = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    /* only the second byte's range depends on the lead */
    uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (; *n < need; (*n)++) {
        if (*n == left) {
            return UTF8_INCOMPLETE;
        }
        if (p[*n] < low || p[*n] > high) {
            return UTF8_INVALID;
        }
        low = 0x80;
        high = 0xBF;
    }
    return UTF8_VALID;
}

uint32_t utf8_decode(const uint8_t *p, size_t n)
{
    switch (n) {
    case 1:
        return p[0];
    case 2:
        return (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3F);
    case 3:
        return (uint32_t)(p[0] & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    default:
        return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 |
               (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
    }
}

bool utf8_check(const char *text, size_t len, size_t *bad)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t i = 0; i < len;) {
        uint64_t eight;
        if (len - i >= 8 && (memcpy(&eight, p + i, 8), (eight & 0x8080808080808080ull) == 0)) {
            i += 8;
            continue;
        }
        size_t n;
        if (utf8_look(p + i, len - i, &n) != UTF8_VALID) {
            if (bad != NULL) {
                *bad = i;
            }
            return false;
        }
        i += n;
    }
    return true;
}

void utf8_append_lossy(lk_buf_t *out, const uint8_t *text, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n;
        if (utf8_look(text + i, len - i, &n) == UTF8_VALID) {
            lk_buf_append(out, text + i, n);
        } else {
            lk_buf_str(out, UTF8_REPLACEMENT);
        }
        i += n;
    }
}
