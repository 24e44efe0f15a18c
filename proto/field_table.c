#include "proto/field_table.h"
#include "base/check.h"

#include <stddef.h>

/* A record becomes a function with its table inside, so that `self_t` can name the struct. */
#define TABLE_BEGIN(r)                                                                             \
    static const record_t *record_##r(void)                                                        \
    {                                                                                              \
        typedef msg_##r##_t self_t;                                                                \
        static const char name[] = #r;                                                             \
        static const field_t fields[] = {
#define TABLE_END                                                                                  \
    }                                                                                              \
    ;                                                                                              \
    static const record_t record = {name, sizeof(self_t), fields, LK_ARRAY_LEN(fields)};           \
    return &record;                                                                                \
    }
#define FIELD(f, kind, sub) {#f, kind, offsetof(self_t, f), sub},

#define RECORD_BEGIN(r)           TABLE_BEGIN(r)
#define RECORD_END(r)             TABLE_END
#define MESSAGE_BEGIN(T, r, code) TABLE_BEGIN(r)
#define MESSAGE_END(T, r)         TABLE_END
#define U64(f)                    FIELD(f, FIELD_U64, NULL)
#define I64(f)                    FIELD(f, FIELD_I64, NULL)
#define F64(f)                    FIELD(f, FIELD_F64, NULL)
#define BOOL(f)                   FIELD(f, FIELD_BOOL, NULL)
#define STR(f)                    FIELD(f, FIELD_STR, NULL)
#define TEXT(f)                   FIELD(f, FIELD_TEXT, NULL)
#define BIN(f)                    FIELD(f, FIELD_BIN, NULL)
#define REC(f, r)                 FIELD(f, FIELD_REC, record_##r)
#define LIST(f, r)                FIELD(f, FIELD_LIST, record_##r)
#include "proto/messages.def"
#undef RECORD_BEGIN
#undef RECORD_END
#undef MESSAGE_BEGIN
#undef MESSAGE_END
#undef U64
#undef I64
#undef F64
#undef BOOL
#undef STR
#undef TEXT
#undef BIN
#undef REC
#undef LIST

#define IGNORED(...)
#define RECORD_BEGIN IGNORED
#define RECORD_END   IGNORED
#define MESSAGE_END  IGNORED
#define U64          IGNORED
#define I64          IGNORED
#define F64          IGNORED
#define BOOL         IGNORED
#define STR          IGNORED
#define TEXT         IGNORED
#define BIN          IGNORED
#define REC          IGNORED
#define LIST         IGNORED

const message_entry_t message_table[] = {
#define MESSAGE_BEGIN(T, r, code) {MSG_##T, #T, record_##r},
#include "proto/messages.def"
#undef MESSAGE_BEGIN
};
const size_t message_table_len = LK_ARRAY_LEN(message_table);

const message_entry_t *message_entry(uint64_t type)
{
    switch (type) {
#define MESSAGE_BEGIN(T, r, code)                                                                  \
    case code: {                                                                                   \
        static const message_entry_t entry = {MSG_##T, #T, record_##r};                            \
        return &entry;                                                                             \
    }
#include "proto/messages.def"
#undef MESSAGE_BEGIN
    default:
        return NULL;
    }
}
