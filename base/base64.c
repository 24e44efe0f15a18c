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

/* A letter's six bits and GOOD; 0 for any other byte. */
#define GOOD 0x40u
#define FOUR(c, v)                                                                                 \
    [c] = GOOD | (v), [(c) + 1] = GOOD | ((v) + 1), [(c) + 2] = GOOD | ((v) + 2),                  \
    [(c) + 3] = GOOD | ((v) + 3)
#define SIXTEEN(c, v)                                                                              \
    FOUR(c, v), FOUR((c) + 4, (v) + 4), FOUR((c) + 8, (v) + 8), FOUR((c) + 12, (v) + 12)
#define TWO(c, v) [c] = GOOD | (v), [(c) + 1] = GOOD | ((v) + 1)
static const uint8_t values[256] = {
    SIXTEEN('A', 0), FOUR('Q', 16),     FOUR('U', 20),     TWO('Y', 24),  SIXTEEN('a', 26),
    FOUR('q', 42),   FOUR('u', 46),     TWO('y', 50),      FOUR('0', 52), FOUR('4', 56),
    TWO('8', 60),    ['+'] = GOOD | 62, ['/'] = GOOD | 63,
};

/* Four letters as 24 bits; false if one isn't any. */
static bool take_four(const char *text, uint32_t *out)
{
    const uint8_t *in = (const uint8_t *)text;
    uint32_t a = values[in[0]], b = values[in[1]], c = values[in[2]], d = values[in[3]];
    *out = (a & 63) << 18 | (b & 63) << 12 | (c & 63) << 6 | (d & 63);
    return (a & b & c & d & GOOD) != 0;
}

bool base64_decode(const char *text, size_t len, void *out, size_t room, size_t *n)
{
    if (len % 4 != 0) {
        return false;
    }
    if (len == 0) {
        *n = 0;
        return true;
    }
    const char *tail = text + len - 4;
    size_t pad = tail[3] != '=' ? 0 : tail[2] != '=' ? 1 : 2;
    size_t bytes = len / 4 * 3 - pad;
    if (bytes > room) {
        return false;
    }
    uint8_t *to = out;
    uint32_t word;
    for (; text < tail; text += 4, to += 3) {
        if (!take_four(text, &word)) {
            return false;
        }
        to[0] = (uint8_t)(word >> 16);
        to[1] = (uint8_t)(word >> 8);
        to[2] = (uint8_t)word;
    }
    char last[4] = {tail[0], tail[1], pad == 2 ? 'A' : tail[2], pad > 0 ? 'A' : tail[3]};
    if (!take_four(last, &word) || (word & ((1u << 8 * pad) - 1)) != 0) {
        return false; /* bits that no byte takes */
    }
    for (size_t k = 0; k < 3 - pad; k++) {
        to[k] = (uint8_t)(word >> (16 - 8 * k));
    }
    *n = bytes;
    return true;
}
