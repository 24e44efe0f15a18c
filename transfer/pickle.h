/*
 * pickle.h: reads the few pickles that trainers send (a pickled ncclUniqueId, the IPC handles of
 * CUDA tensors) without being a pickle machine: nothing is imported, called or built. A global is a
 * pair of names out of a list of allowed ones; a call is a node that says what would have been
 * called with what. Any other opcode or global is refused by name.
 *
 * Opcodes: PROTO (2 to 5) FRAME STOP, NONE NEWTRUE NEWFALSE, BININT BININT1 BININT2 LONG1 (up to 8
 * bytes), SHORT_BINUNICODE BINUNICODE, SHORT_BINBYTES BINBYTES, EMPTY_LIST APPEND APPENDS,
 * EMPTY_DICT SETITEM SETITEMS, EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 MARK, MEMOIZE BINPUT
 * LONG_BINPUT BINGET LONG_BINGET, GLOBAL STACK_GLOBAL REDUCE.
 *
 * The result is a tree whose branches may be shared, never a cycle: what lies in a container can't
 * be added to any more. Reading it is by index and key; a walk over all of it could take
 * exponential time (a list of twice the same list, and so on), so nobody should.
 */
#ifndef LK_TRANSFER_PICKLE_H
#define LK_TRANSFER_PICKLE_H

#include "base/status.h"

#define PICKLE_MAX_BYTES  (64u << 20)
#define PICKLE_MAX_VALUES (1u << 22)
#define PICKLE_MAX_STACK  (1u << 16)
#define PICKLE_MAX_DEPTH  16u /* containers in containers; marks */
#define PICKLE_MAX_NAME   255u

typedef struct {
    const char *module, *name;
} pickle_global_t;

typedef enum {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,
    PICKLE_STR,
    PICKLE_BYTES,
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,
    PICKLE_GLOBAL,
    PICKLE_CALL
} pickle_type_t;

typedef struct pickle_value pickle_value_t;
struct pickle_value {
    pickle_type_t type;
    uint8_t depth;
    bool sealed;
    uint32_t n; /* of items; DICT: twice its pairs; CALL: 2 */
    uint32_t room;
    union {
        int64_t integer; /* BOOL, INT */
        struct {
            const uint8_t *bytes; /* STR (UTF-8, not terminated), BYTES: within the input */
            size_t len;
        };
        const pickle_global_t *global; /* one of the allowed list */
        const pickle_value_t **items;  /* DICT: key, value, key, value; CALL: callee, args */
    };
};

typedef struct pickle pickle_t;

/* The input is borrowed until pickle_destroy, `allowed` too. LK_ERR_INVALID with the offset and
 * what is wrong; LK_ERR_TOO_LARGE over a limit. On failure *out is untouched. */
LK_MUST_USE lk_status_t pickle_parse(const void *bytes, size_t len, const pickle_global_t *allowed,
                                     size_t n_allowed, pickle_t **out, lk_error_t *err);
void pickle_destroy(pickle_t **self_p);
const pickle_value_t *pickle_root(const pickle_t *self);

const char *pickle_type_name(pickle_type_t type);
/* The item of a TUPLE or LIST if it has so many and the item has that type, else NULL. `value` may
 * be NULL. */
const pickle_value_t *pickle_item(const pickle_value_t *value, size_t i, pickle_type_t type);
/* The value of a DICT's key; the last one, if the key comes twice. NULL if there is none. */
const pickle_value_t *pickle_get(const pickle_value_t *dict, const char *key);
/* True for a GLOBAL of these names. */
bool pickle_is_global(const pickle_value_t *value, const char *module, const char *name);
/* The arguments (a TUPLE) of a CALL of that global, else NULL. */
const pickle_value_t *pickle_call_args(const pickle_value_t *value, const char *module,
                                       const char *name);

/* ---- what trainers send ---- */

#define NCCL_ID_BYTES 128

/* The id in vLLM's pickled ncclUniqueId. */
LK_MUST_USE lk_status_t pickle_unique_id(const void *bytes, size_t len, uint8_t id[NCCL_ID_BYTES],
                                         lk_error_t *err);
/* The same pickle, as Python's own writes it (protocol 4), for trainers that serve vLLM workers. */
#define PICKLE_UNIQUE_ID_BYTES 247
void pickle_unique_id_write(const uint8_t id[NCCL_ID_BYTES], uint8_t out[PICKLE_UNIQUE_ID_BYTES]);

/* The globals of torch's IPC handles (reductions of CUDA tensors). */
extern const pickle_global_t pickle_globals_ipc[];
extern const size_t pickle_n_globals_ipc;

#endif
