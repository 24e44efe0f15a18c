/*
 * field_table.h: messages.def as data. The encoder, the decoder, equality and random messages all
 * walk these tables, so a field added to messages.def is known everywhere.
 */
#ifndef LK_PROTO_FIELD_TABLE_H
#define LK_PROTO_FIELD_TABLE_H

#include "proto/messages.h"

typedef enum {
    FIELD_U64,
    FIELD_I64,
    FIELD_F64,
    FIELD_BOOL,
    FIELD_STR,
    FIELD_TEXT,
    FIELD_BIN,
    FIELD_REC,
    FIELD_LIST,
} field_kind_t;

typedef struct record record_t;

typedef struct {
    const char *name;
    field_kind_t kind;
    uint32_t offset;              /* bytes into the struct */
    const record_t *(*sub)(void); /* REC and LIST: the record inside; else NULL */
} field_t;

struct record {
    const char *name;
    size_t size; /* sizeof the struct */
    const field_t *fields;
    size_t n_fields;
};

/* How every LIST looks in memory, whatever its record. */
typedef struct {
    void *items;
    size_t count;
} field_list_t;

typedef struct {
    msg_type_t type;
    const char *name;
    const record_t *(*record)(void);
} message_entry_t;

/* Every message type, in the order of messages.def. */
extern const message_entry_t message_table[];
extern const size_t message_table_len;

/* NULL for a type that is not in messages.def. */
const message_entry_t *message_entry(uint64_t type);

/* Where a message keeps its fields. */
static inline void *message_fields(const msg_t *msg)
{
    return (void *)(uintptr_t)&msg->hello;
}

#endif
