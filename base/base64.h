/* base64.h: standard base64 (RFC 4648 section 4), strict: padded, no blanks, no stray bits. */
#ifndef LK_BASE_BASE64_H
#define LK_BASE_BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Characters for n bytes, with a NUL. */
#define BASE64_SIZE(n) (((n) + 2) / 3 * 4 + 1)

/* Writes BASE64_SIZE(n) characters. */
void base64_encode(const void *bytes, size_t n, char *out);
/* False if text is not base64, or does not fit; then out may hold anything. */
bool base64_decode(const char *text, size_t len, void *out, size_t room, size_t *n);

#endif
