/*
 * weight_table_internal.h: the inside of weight_table.h, for weight_table.c (building, questions,
 * filling), weight_table_sink.c (what arrives) and weight_table_shadow.c (the second set).
 */
#ifndef LK_ENGINE_CORE_EXEC_WEIGHT_TABLE_INTERNAL_H
#define LK_ENGINE_CORE_EXEC_WEIGHT_TABLE_INTERNAL_H

#include "engine_core/exec/weight_plan.h"

/* What the table knows of a slot beside what executors see. */
typedef struct {
    bool owned;
    bool arrived;   /* since `begin` */
    bool differs;   /* shadow: the incoming set may hold another value than the live one */
    bool agrees[2]; /* by spelling (canonical, tied alias): arrived with the value that is stored */
    size_t name;    /* offset in names */
    uint64_t place; /* byte offset in the storage; only if owned */
} slot_state_t;

/* One set of weights. */
typedef struct {
    weight_slot_t *slots; /* [n_slots] */
    char *storage;
    digest_t digest; /* of the loaded slots */
} weight_set_t;

/* How far the sink is with the tensor it was handed last. */
typedef struct {
    bool under_way;
    size_t index;    /* of the plan */
    size_t piece;    /* of the tensor */
    uint64_t at;     /* elements of the piece that are done */
    digest_t digest; /* of them */
} store_t;

struct weight_table {
    model_config_t config;
    name_rules_dims_t dims;
    lk_dtype_t stored;
    uint32_t first_expert, end_expert; /* of this rank */
    bool names_only;
    weight_set_t sets[2];
    weight_set_t *live, *incoming; /* the same one without a shadow */
    slot_state_t *states;
    size_t n_slots, cap_slots;
    char *names; /* all names, NUL-terminated; slots point into it */
    size_t names_len, names_cap;
    uint32_t *buckets; /* open addressing: slot numbers */
    size_t n_buckets;  /* a power of two */
    uint64_t storage_bytes;
    size_t n_arrived;
    weight_plans_t plans;
    store_t store;
    size_t prepared;      /* slots that prepare has been through */
    uint64_t prepared_at; /* bytes of the next one */
    bool followed;        /* the follower's prepare has begun */
    weight_follower_t follower;
};

/* The digest of slot i of a set is known anew. */
void weight_set_digest(weight_set_t *set, uint32_t i, digest_t digest);
LK_MUST_USE lk_status_t weight_table_allocate(const weight_table_t *self, char **storage,
                                              lk_error_t *err);

/* The sink of two sets, where it differs. */
lk_status_t weight_table_prepare(void *ctx, lk_error_t *err);
lk_status_t weight_table_flip(void *ctx, lk_error_t *err);
digest_t weight_table_incoming_digest(void *ctx);

#endif
