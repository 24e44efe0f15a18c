/*
 * tensor_desc.h: a tensor as a checkpoint or a trainer names it: name, dtype, shape. Row-major and
 * contiguous always.
 */
#ifndef LK_TRANSFER_TENSOR_DESC_H
#define LK_TRANSFER_TENSOR_DESC_H

#include "base/status.h"

/* name, bytes per element, safetensors' spelling, torch's spelling ("dtype_names") */
#define LK_DTYPE_TABLE(X)                                                                          \
    X(F32, 4, "F32", "float32")                                                                    \
    X(BF16, 2, "BF16", "bfloat16")                                                                 \
    X(F16, 2, "F16", "float16")                                                                    \
    X(F64, 8, "F64", "float64")                                                                    \
    X(I64, 8, "I64", "int64")                                                                      \
    X(I32, 4, "I32", "int32")                                                                      \
    X(I8, 1, "I8", "int8")                                                                         \
    X(U8, 1, "U8", "uint8")

typedef enum {
#define X(name, bytes, st, torch) LK_DTYPE_##name,
    LK_DTYPE_TABLE(X)
#undef X
        LK_DTYPE_COUNT
} lk_dtype_t;

#define TENSOR_MAX_DIMS 8
#define TENSOR_NAME_MAX 255

typedef struct {
    const char *name; /* borrowed; at most TENSOR_NAME_MAX bytes */
    lk_dtype_t dtype;
    uint32_t ndim;
    uint64_t shape[TENSOR_MAX_DIMS];
} tensor_desc_t;

size_t dtype_bytes(lk_dtype_t dtype);
const char *dtype_torch_name(lk_dtype_t dtype);
const char *dtype_safetensors_name(lk_dtype_t dtype);
/* Accepts either spelling. False if unknown. */
bool dtype_parse(const char *text, lk_dtype_t *out);

/* Elements; false on overflow of 2^63. A 0-dimensional tensor has one element. */
bool tensor_desc_numel(const tensor_desc_t *t, uint64_t *numel);
/* Bytes; false on overflow. */
bool tensor_desc_bytes(const tensor_desc_t *t, uint64_t *bytes);
/* "[2, 3]" into out. */
void tensor_desc_shape_text(const tensor_desc_t *t, char *out, size_t room);

/* value conversions, round to nearest even */
float lk_bf16_to_f32(uint16_t x);
uint16_t lk_f32_to_bf16(float x);
float lk_f16_to_f32(uint16_t x);
uint16_t lk_f32_to_f16(float x);
/* Converts n elements. Supports F32, BF16, F16, F64 in any pair; LK_ERR_UNSUPPORTED otherwise.
 * Same dtype is a copy for every dtype. dst and src do not overlap. */
LK_MUST_USE lk_status_t dtype_convert(void *dst, lk_dtype_t dst_dtype, const void *src,
                                      lk_dtype_t src_dtype, size_t n);

#endif
