/* wte_fields.h: checks a backend's JSON object against a table of its fields. */
#ifndef LK_TRANSFER_WTE_FIELDS_H
#define LK_TRANSFER_WTE_FIELDS_H

#include "base/status.h"

#include <jansson.h>

#define WTE_PACKED_BUFFER_MAX (1ll << 40)
#define WTE_PACKED_NUM_MAX    1024

typedef enum { WTE_FIELD_INT, WTE_FIELD_STRING, WTE_FIELD_BOOL, WTE_FIELD_ANY } wte_field_type_t;

typedef struct {
    const char *name;
    wte_field_type_t type;
    bool required;
    int64_t min, max; /* INT: value; STRING: bytes */
} wte_field_t;

/* The packing fields that both init_info and update_info may carry, and one that is ignored. */
#define WTE_PACKED_FIELDS                                                                          \
    {"packed", WTE_FIELD_BOOL, false, 0, 0},                                                       \
        {"packed_buffer_size_bytes", WTE_FIELD_INT, false, 1, WTE_PACKED_BUFFER_MAX},              \
        {"packed_num_buffers", WTE_FIELD_INT, false, 1, WTE_PACKED_NUM_MAX},                       \
    {                                                                                              \
        "is_checkpoint_format", WTE_FIELD_ANY, false, 0, 0                                         \
    }

/* The place in a group that NCCL-shaped callers send; see wte_fields_world. */
#define WTE_WORLD_FIELDS                                                                           \
    {"rank_offset", WTE_FIELD_INT, false, 1, 1 << 20},                                             \
    {                                                                                              \
        "world_size", WTE_FIELD_INT, false, 2, 1 << 20                                             \
    }

/* An update_info without fields of the backend's own. */
#define WTE_UPDATE_FIELDS                                                                          \
    {"names", WTE_FIELD_ANY, true, 0, 0}, {"dtype_names", WTE_FIELD_ANY, true, 0, 0},              \
        {"shapes", WTE_FIELD_ANY, true, 0, 0}, WTE_PACKED_FIELDS

/* `what` is "init_info" or "update_info". null counts as absent. LK_ERR_INVALID with
 * "Invalid WHAT for BACKEND: unknown field 'x'" and the like. */
LK_MUST_USE lk_status_t wte_fields_check(const char *what, const char *backend,
                                         const json_t *object, const wte_field_t *fields, size_t n,
                                         lk_error_t *err);
/* Of a checked init_info: that world_size holds `ranks` ranks from rank_offset on. */
LK_MUST_USE lk_status_t wte_fields_world(const char *backend, const json_t *init_info,
                                         int64_t ranks, lk_error_t *err);
/* Of a checked object: the value, or `absent`. */
int64_t wte_fields_int(const json_t *object, const char *name, int64_t absent);
bool wte_fields_bool(const json_t *object, const char *name, bool absent);

#endif
