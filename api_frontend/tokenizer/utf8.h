/*
 * utf8.h: strict UTF-8 (Unicode 15, table 3-7: no overlong forms, no surrogates), one sequence at
 * a time, so that whole texts, lossy conversion and streams share one rule.
 */
#ifndef LK_TOKENIZER_UTF8_H
#define LK_TOKENIZER_UTF8_H

#include "base/buf.h"

typedef enum {
    UTF8_VALID,     /* *n bytes (1 to 4) are one character */
    UTF8_INVALID,   /* *n bytes (1 to 3) can't begin a character: one U+FFFD stands for them */
    UTF8_INCOMPLETE /* all `left` bytes (1 to 3) are a proper prefix of a character */
} utf8_kind_t;

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* Looks at the sequence at p; left >= 1. INVALID replaces "maximal subparts", as WHATWG decoders
 * and Rust's from_utf8_lossy do. */
utf8_kind_t utf8_look(const uint8_t *p, size_t left, size_t *n);

/* Decodes the character at p, which utf8_look called VALID with n bytes. */
uint32_t utf8_decode(const uint8_t *p, size_t n);

/* True if all of text is valid; else *bad (may be NULL) is the offset of the first bad byte. */
bool utf8_check(const char *text, size_t len, size_t *bad);

/* Appends text with U+FFFD for what is not UTF-8. */
void utf8_append_lossy(lk_buf_t *out, const uint8_t *text, size_t len);

#endif
