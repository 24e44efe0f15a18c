/*
 * byte_alphabet.h: the printable stand-ins that byte-level BPE files use for bytes. Bytes that are
 * printable Latin-1 (0x21-0x7E, 0xA1-0xAC, 0xAE-0xFF) stand for themselves, the other 68 are
 * U+0100 and up in byte order: so a space is U+0120.
 */
#ifndef LK_TOKENIZER_BYTE_ALPHABET_H
#define LK_TOKENIZER_BYTE_ALPHABET_H

#include "base/buf.h"

/* The code point that stands for the byte (below 0x144, so at most 2 bytes of UTF-8). */
uint32_t byte_alphabet_char(uint8_t byte);

/* Writes that code point as UTF-8; returns 1 or 2. */
size_t byte_alphabet_encode(uint8_t byte, char out[2]);

/* Appends the bytes that a token's text stands for. A text with any character outside the alphabet
 * (some added tokens) stands for itself. text is valid UTF-8. */
void byte_alphabet_decode(lk_buf_t *out, const char *text, size_t len);

#endif
