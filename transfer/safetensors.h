/*
 * safetensors.h: reads one safetensors file, or a checkpoint directory of one or several files
 * with model.safetensors.index.json. Nothing in the header is trusted: every offset pair is checked
 * against the file size and dtype x shape; overlaps, holes and duplicates are refused.
 */
#ifndef LK_TRANSFER_SAFETENSORS_H
#define LK_TRANSFER_SAFETENSORS_H

#include "transfer/tensor_desc.h"

typedef struct safetensors safetensors_t;

typedef struct {
    tensor_desc_t desc; /* desc.name owned by the reader */
    const void *data;   /* mapped read-only; no alignment is promised */
    uint64_t bytes;
} safetensors_entry_t;

/* `path` is a .safetensors file or a directory. Caller owns the result. */
LK_MUST_USE lk_status_t safetensors_open(const char *path, safetensors_t **out, lk_error_t *err);
void safetensors_close(safetensors_t **self_p);
size_t safetensors_count(const safetensors_t *self);
const safetensors_entry_t *safetensors_at(const safetensors_t *self, size_t i);
const safetensors_entry_t *safetensors_find(const safetensors_t *self, const char *name);

/* Reads n bytes from `offset` of an entry with data, n > 0, not through the mapping: a file that
 * became shorter is LK_ERR_IO. */
LK_MUST_USE lk_status_t safetensors_read(const safetensors_t *self,
                                         const safetensors_entry_t *entry, uint64_t offset,
                                         void *out, uint64_t n, lk_error_t *err);
/* Buffers that Llama checkpoints of Transformers before 4.32 carry; they are computed. */
bool safetensors_is_rotary_buffer(const char *name);

/* Checks and indexes a header alone (fuzzer's entry): `file_size` is what offsets are checked
 * against; entries' data stay NULL. */
LK_MUST_USE lk_status_t safetensors_parse_header(const void *bytes, size_t len, uint64_t file_size,
                                                 safetensors_t **out, lk_error_t *err);

/* Writes one file with the tensors in the given order. */
LK_MUST_USE lk_status_t safetensors_write(const char *path, const tensor_desc_t *descs,
                                          const void *const *data, size_t n, lk_error_t *err);

#endif
