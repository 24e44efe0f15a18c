/*
 * safetensors_header.h: the JSON header of one safetensors file, checked completely against the
 * file's size. Nothing in it is trusted: nesting and the number of tensors are bounded before the
 * JSON library sees the text.
 */
#ifndef LK_TRANSFER_SAFETENSORS_HEADER_H
#define LK_TRANSFER_SAFETENSORS_HEADER_H

#include "transfer/safetensors.h"

#include <jansson.h>

/* The format allows headers of 100 MB; a checkpoint of 2^18 tensors needs a third of this. */
#define SAFETENSORS_HEADER_MAX_BYTES (48u << 20)
#define SAFETENSORS_MAX_TENSORS      (1u << 18)

/* A tensor and where it lies in its file's data section. */
typedef struct {
    uint64_t begin, end;
    safetensors_entry_t entry; /* data is NULL */
} safetensors_span_t;

typedef struct {
    json_t *json;              /* owns the names */
    safetensors_span_t *spans; /* by offset; they cover the data section exactly */
    size_t n_spans;
    uint64_t data_start; /* byte of the file at which the data section starts */
} safetensors_header_t;

/* `bytes` is the start of a file of file_size bytes, len of which can be read. The caller ends *out
 * with safetensors_header_fini. */
LK_MUST_USE lk_status_t safetensors_header_read(const char *bytes, size_t len, uint64_t file_size,
                                                safetensors_header_t *out, lk_error_t *err);
void safetensors_header_fini(safetensors_header_t *header);

/* An object of at most max_depth levels. The caller owns *out (json_decref). `what` names the text
 * in errors. */
LK_MUST_USE lk_status_t safetensors_json(const char *text, size_t len, unsigned max_depth,
                                         const char *what, json_t **out, lk_error_t *err);

#endif
