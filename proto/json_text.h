/*
 * json_text.h: JSON text to values and back, as jansson does it, but many times faster for what
 * jansson reads and writes byte by byte: long strings. What the reader refuses jansson has refused:
 * its verdict, its text and its position are what the caller gets.
 */
#ifndef LK_PROTO_JSON_TEXT_H
#define LK_PROTO_JSON_TEXT_H

#include "base/buf.h"

#include <jansson.h>

/* json_loadb with JSON_REJECT_DUPLICATES and the flags given (JSON_DECODE_ANY or 0). Linear in the
 * text; what it allocates is what jansson would. error may be NULL. */
json_t *json_text_read(const char *text, size_t len, size_t flags, json_error_t *error);

/* Appends a value of any kind, JSON_COMPACT and JSON_ENCODE_ANY. */
void json_text_write(lk_buf_t *out, const json_t *value);

/* Of the value, whatever the order of its objects' members: equal values (json_equal) have equal
 * hashes. */
uint64_t json_text_hash(const json_t *value);

#endif
