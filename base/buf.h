/*
 * buf.h: a growable byte buffer with a stated limit. Out of memory and over the limit set a sticky
 * `failed` flag, checked once at the end instead of after each append.
 */
#ifndef LK_BASE_BUF_H
#define LK_BASE_BUF_H

#include "base/status.h"

typedef struct {
    uint8_t *data;
    size_t len;
    size_t cap;
    size_t limit; /* bytes; 0 = no limit */
    bool failed;  /* an append did not fit; data holds what fitted before */
} lk_buf_t;

void lk_buf_init(lk_buf_t *buf, size_t limit);
/* Accepts NULL and a zeroed buffer; leaves it empty and usable with the same limit. */
void lk_buf_fini(lk_buf_t *buf);
/* Keeps the memory. */
void lk_buf_clear(lk_buf_t *buf);
/* Makes room for `more` further bytes; false (and `failed`) when it can't. */
bool lk_buf_reserve(lk_buf_t *buf, size_t more);
void lk_buf_append(lk_buf_t *buf, const void *data, size_t len);
void lk_buf_str(lk_buf_t *buf, const char *text);
void lk_buf_printf(lk_buf_t *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Appends a JSON string with quotes. Invalid UTF-8 becomes U+FFFD. */
void lk_buf_json_str(lk_buf_t *buf, const char *text, size_t len);
/* True if all of text is UTF-8 (no overlong forms, no surrogates). A NUL inside is valid. */
bool lk_utf8_valid(const char *text, size_t len);
/* Replaces each byte that is of no UTF-8 sequence, and each NUL, by '?'. */
void lk_utf8_clean(char *text, size_t len);
/* How many of the first bytes stand for themselves in a JSON string: printable ASCII but quote and
 * backslash. */
size_t lk_json_plain(const char *text, size_t len);
/* Ends the data with a NUL that `len` does not count. Returns "" when empty. */
const char *lk_buf_cstr(lk_buf_t *buf);

#endif
