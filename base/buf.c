#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void lk_buf_init(lk_buf_t *buf, size_t limit)
{
    memset(buf, 0, sizeof *buf);
    buf->limit = limit;
}

void lk_buf_fini(lk_buf_t *buf)
{
    if (buf != NULL) {
        free(buf->data);
        lk_buf_init(buf, buf->limit);
    }
}

void lk_buf_clear(lk_buf_t *buf)
{
    buf->len = 0;
    buf->failed = false;
}

bool lk_buf_reserve(lk_buf_t *buf, size_t more)
{
    if (buf->failed || more > SIZE_MAX / 4 - buf->len ||
        (buf->limit != 0 && buf->len + more > buf->limit)) {
        buf->failed = true;
        return false;
    }
    size_t need = buf->len + more + 1; /* room for the NUL of lk_buf_cstr */
    if (need > buf->cap) {
        size_t cap = buf->cap < 128 ? 256 : buf->cap * 2;
        cap = cap < need ? need : cap;
        uint8_t *data = realloc(buf->data, cap);
        if (data == NULL) {
            buf->failed = true;
            return false;
        }
        buf->data = data;
        buf->cap = cap;
    }
    return true;
}

void lk_buf_append(lk_buf_t *buf, const void *data, size_t len)
{
    if (len != 0 && lk_buf_reserve(buf, len)) {
        memcpy(buf->data + buf->len, data, len);
        buf->len += len;
    }
}

void lk_buf_str(lk_buf_t *buf, const char *text)
{
    lk_buf_append(buf, text, strlen(text));
}

void lk_buf_printf(lk_buf_t *buf, const char *fmt, ...)
{
    char text[256]; /* enough for most, which then are formatted once */
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n > 0 && (size_t)n < sizeof text) {
        lk_buf_append(buf, text, (size_t)n);
    } else if (n > 0 && lk_buf_reserve(buf, (size_t)n)) {
        va_start(ap, fmt);
        vsnprintf((char *)buf->data + buf->len, (size_t)n + 1, fmt, ap);
        va_end(ap);
        buf->len += (size_t)n;
    }
}

/* Length of the valid UTF-8 sequence at p (1 to 4), or 0. Refuses overlong forms and surrogates. */
static size_t utf8_len(const unsigned char *p, size_t left)
{
    if (p[0] < 0x80) {
        return 1;
    }
    size_t n = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F)) {
        return 0;
    }
    return n;
}

#define LANES 32 /* bytes looked at together */

/* No exit from the inner loops, so that they become vector instructions. */
static bool all_ascii(const unsigned char *p)
{
    unsigned char high = 0;
    for (size_t i = 0; i < LANES; i++) {
        high |= p[i];
    }
    return high < 0x80;
}

static bool is_plain(unsigned char c)
{
    return c >= 0x20 && c < 0x80 && c != '"' && c != '\\';
}

static bool all_plain(const unsigned char *p)
{
    unsigned char odd = 0;
    for (size_t i = 0; i < LANES; i++) {
        odd |= (unsigned char)((p[i] < 0x20) | (p[i] >= 0x80) | (p[i] == '"') | (p[i] == '\\'));
    }
    return odd == 0;
}

size_t lk_json_plain(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t n = 0;
    while (len - n >= LANES && all_plain(p + n)) {
        n += LANES;
    }
    while (n < len && is_plain(p[n])) {
        n++;
    }
    return n;
}

bool lk_utf8_valid(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    for (size_t i = 0; i < len;) {
        if (len - i >= LANES && all_ascii(p + i)) {
            i += LANES;
            continue;
        }
        size_t n = utf8_len(p + i, len - i);
        if (n == 0) {
            return false;
        }
        i += n;
    }
    return true;
}

void lk_utf8_clean(char *text, size_t len)
{
    unsigned char *p = (unsigned char *)text;
    for (size_t i = 0; i < len;) {
        size_t n = p[i] != '\0' ? utf8_len(p + i, len - i) : 0;
        p[i] = n > 0 ? p[i] : '?';
        i += n > 0 ? n : 1;
    }
}

void lk_buf_json_str(lk_buf_t *buf, const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    lk_buf_append(buf, "\"", 1);
    for (size_t i = 0; i < len;) {
        size_t plain = lk_json_plain(text + i, len - i);
        lk_buf_append(buf, p + i, plain);
        i += plain;
        if (i == len) {
            break;
        }
        unsigned char c = p[i];
        if (c == '"' || c == '\\') {
            char esc[2] = {'\\', (char)c};
            lk_buf_append(buf, esc, 2);
            i++;
        } else if (c < 0x20) {
            char esc[8];
            int n = snprintf(esc, sizeof esc, "\\u%04x", c);
            lk_buf_append(buf, esc, (size_t)n);
            i++;
        } else {
            size_t n = utf8_len(p + i, len - i);
            if (n == 0) {
                lk_buf_str(buf, "\xEF\xBF\xBD");
                i++;
            } else {
                lk_buf_append(buf, p + i, n);
                i += n;
            }
        }
    }
    lk_buf_append(buf, "\"", 1);
}

const char *lk_buf_cstr(lk_buf_t *buf)
{
    if (buf->data == NULL) {
        return "";
    }
    buf->data[buf->len] = '\0';
    return (const char *)buf->data;
}
