/*
 * messages.h: the structs of messages.def. Strings and bytes of a decoded message point into the
 * message's arena and live until msg_fini.
 */
#ifndef LK_PROTO_MESSAGES_H
#define LK_PROTO_MESSAGES_H

#include "base/status.h"

/* `ptr` is NUL-terminated in decoded messages; `len` does not count the NUL. {0} is "". */
typedef struct {
    const char *ptr;
    size_t len;
} msg_str_t;

typedef struct {
    const void *data;
    size_t len;
} msg_bin_t;

msg_str_t msg_str(const char *text); /* borrows; NULL is "" */
/* Never NULL. */
static inline const char *msg_cstr(msg_str_t s)
{
    return s.ptr != NULL ? s.ptr : "";
}

typedef enum {
    MSG_ROLE_COORDINATOR,
    MSG_ROLE_ENGINE,
    MSG_ROLE_FRONTEND,
    MSG_ROLE_TRAINER
} msg_role_t;
typedef enum { CMD_PAUSE = 1, CMD_RESUME, CMD_CANCEL, CMD_UPDATE } cmd_kind_t;
/* The stricter of two pauses wins: abort, then keep, then wait. */
typedef enum { PAUSE_ABORT = 1, PAUSE_KEEP, PAUSE_WAIT } pause_mode_t;

/* name, wire value, "finish_reason" of the HTTP reply */
#define FINISH_REASON_TABLE(X)                                                                     \
    X(NONE, 0, "")                                                                                 \
    X(STOP, 1, "stop")                                                                             \
    X(LENGTH, 2, "length")                                                                         \
    X(ABORT, 3, "abort")                                                                           \
    X(ERROR, 4, "error")
typedef enum {
#define X(name, value, text) FINISH_##name = value,
    FINISH_REASON_TABLE(X)
#undef X
} finish_reason_t;

#define GATE_SESSION 1u
#define GATE_DIRTY   2u
#define GATE_ASLEEP  4u

#define U64(f)    uint64_t f;
#define I64(f)    int64_t f;
#define F64(f)    double f;
#define BOOL(f)   bool f;
#define STR(f)    msg_str_t f;
#define TEXT(f)   msg_str_t f;
#define BIN(f)    msg_bin_t f;
#define REC(f, r) msg_##r##_t f;
#define LIST(f, r)                                                                                 \
    struct {                                                                                       \
        msg_##r##_t *items;                                                                        \
        size_t count;                                                                              \
    } f;
#define RECORD_BEGIN(r) typedef struct msg_##r {
#define RECORD_END(r)                                                                              \
    }                                                                                              \
    msg_##r##_t;
#define MESSAGE_BEGIN(T, r, code) typedef struct msg_##r {
#define MESSAGE_END(T, r)                                                                          \
    }                                                                                              \
    msg_##r##_t;
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

#define FIELD_IGNORED(...)
#define U64  FIELD_IGNORED
#define I64  FIELD_IGNORED
#define F64  FIELD_IGNORED
#define BOOL FIELD_IGNORED
#define STR  FIELD_IGNORED
#define TEXT FIELD_IGNORED
#define BIN  FIELD_IGNORED
#define REC  FIELD_IGNORED
#define LIST FIELD_IGNORED
#define RECORD_BEGIN(r)
#define RECORD_END(r)
#define MESSAGE_END(T, r)
typedef enum {
#define MESSAGE_BEGIN(T, r, code) MSG_##T = code,
#include "proto/messages.def"
#undef MESSAGE_BEGIN
} msg_type_t;

/* One message of any type, with its envelope. */
typedef struct {
    msg_type_t type;
    /* envelope, frame 0: {magic "LK", protocol version, type, sender role, sender rank, generation,
     * sequence} */
    uint32_t sender_role, sender_rank;
    uint64_t generation; /* of the sender's life; newer wins */
    uint64_t
        sequence; /* per sender and receiver's socket, from 1; gaps show losses (msg_track.h) */
    union {
#define MESSAGE_BEGIN(T, r, code) msg_##r##_t r;
#include "proto/messages.def"
#undef MESSAGE_BEGIN
    };
    void *arena; /* owned storage of a decoded message; NULL for one that borrows */
} msg_t;
#undef U64
#undef I64
#undef F64
#undef BOOL
#undef STR
#undef TEXT
#undef BIN
#undef REC
#undef LIST
#undef RECORD_BEGIN
#undef RECORD_END
#undef MESSAGE_END
#undef FIELD_IGNORED

/* Frees a decoded message's arena. Accepts a zeroed message. */
void msg_fini(msg_t *msg);
const char *msg_type_name(uint64_t type); /* "ADD"; "?" */

#endif
