/*
 * update_spec.h: the JSON bodies of the weight calls, parsed and checked: what can be wrong with a
 * call whatever the session's state. Wrong is LK_ERR_INVALID with a text that names the field and,
 * for tensors, all offenders that fit.
 */
#ifndef LK_TRANSFER_UPDATE_SPEC_H
#define LK_TRANSFER_UPDATE_SPEC_H

#include "transfer/weight_transfer_engine.h"

#define UPDATE_SPEC_MAX_BYTES   (64u << 20)
#define UPDATE_SPEC_MAX_TENSORS (1u << 18)
#define WEIGHT_VERSION_MAX      256 /* bytes */

/* What packing a call asks for; from init_info, overridden by update_info. */
typedef struct {
    bool packed;
    uint64_t buffer_size_bytes;
    uint32_t num_buffers;
} packed_options_t;

#define PACKED_OPTIONS_DEFAULT                                                                     \
    ((packed_options_t){false, PACKED_OPTIONS_BUFFER_DEFAULT, PACKED_OPTIONS_NUM_DEFAULT})
#define PACKED_OPTIONS_BUFFER_DEFAULT (1ull << 30)
#define PACKED_OPTIONS_NUM_DEFAULT    2u

/* A parsed body. Zeroed is empty. */
typedef struct {
    json_t *root;
    const json_t *info; /* init_info, or this rank's update_info; borrowed from root */
    packed_options_t packing;
    tensor_desc_t *tensors; /* names borrowed from root */
    size_t n_tensors;
    const wte_ops_t *init_ops;   /* of an init: the engine it is for */
    const wte_ops_t *source_ops; /* set: tensors are source's, opened by these */
    void *source;
} update_spec_t;

void update_spec_fini(update_spec_t *self);

/* {"init_info": object} */
LK_MUST_USE lk_status_t update_spec_init(update_spec_t *out, const char *text, size_t len,
                                         lk_error_t *err);
/* Of an init_info that the backend has checked. */
packed_options_t update_spec_packing(const json_t *info, packed_options_t absent);
/* {"update_info": object, or a list with one object per rank, of which `rank` takes its own} */
LK_MUST_USE lk_status_t update_spec_update(update_spec_t *out, const char *backend,
                                           const char *text, size_t len, uint32_t rank,
                                           uint32_t n_ranks, packed_options_t packing,
                                           lk_error_t *err);
/* The same body for an engine with update_open, which lists the tensors. */
LK_MUST_USE lk_status_t update_spec_open(update_spec_t *out, const wte_ops_t *ops,
                                         const wte_context_t *ctx, const char *text, size_t len,
                                         lk_error_t *err);
/* {"weight_version": text or null}, {} or nothing at all */
LK_MUST_USE lk_status_t update_spec_finish(const char *text, size_t len, lk_error_t *err);
/* {"new_version": text}, or {"weight_version": text} as finish has it */
LK_MUST_USE lk_status_t update_spec_version(const char *text, size_t len, lk_error_t *err);

#endif
