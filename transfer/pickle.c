#include "transfer/pickle.h"
#include "base/buf.h"
#include "base/check.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_VALUES 256

typedef struct chunk {
    struct chunk *next;
    size_t used;
    pickle_value_t values[CHUNK_VALUES];
} chunk_t;

struct pickle {
    const uint8_t *in;
    size_t len, at, op_at; /* op_at: of the opcode at work, for texts */
    const pickle_global_t *allowed;
    size_t n_allowed;
    chunk_t *chunks;
    size_t n_values;
    const pickle_value_t **stack, **memo;
    size_t n_stack, stack_room, n_memo, memo_room;
    size_t marks[PICKLE_MAX_DEPTH];
    size_t n_marks;
    const pickle_value_t *root;
};

/* name, byte */
#define OPCODE_TABLE(X)                                                                            \
    X(PROTO, 0x80)                                                                                 \
    X(FRAME, 0x95)                                                                                 \
    X(STOP, '.')                                                                                   \
    X(NONE, 'N')                                                                                   \
    X(NEWTRUE, 0x88)                                                                               \
    X(NEWFALSE, 0x89)                                                                              \
    X(BININT, 'J')                                                                                 \
    X(BININT1, 'K')                                                                                \
    X(BININT2, 'M')                                                                                \
    X(LONG1, 0x8a)                                                                                 \
    X(SHORT_BINUNICODE, 0x8c)                                                                      \
    X(BINUNICODE, 'X')                                                                             \
    X(SHORT_BINBYTES, 'C')                                                                         \
    X(BINBYTES, 'B')                                                                               \
    X(EMPTY_LIST, ']')                                                                             \
    X(APPEND, 'a')                                                                                 \
    X(APPENDS, 'e')                                                                                \
    X(EMPTY_DICT, '}')                                                                             \
    X(SETITEM, 's')                                                                                \
    X(SETITEMS, 'u')                                                                               \
    X(EMPTY_TUPLE, ')')                                                                            \
    X(TUPLE, 't')                                                                                  \
    X(TUPLE1, 0x85)                                                                                \
    X(TUPLE2, 0x86)                                                                                \
    X(TUPLE3, 0x87)                                                                                \
    X(MARK, '(')                                                                                   \
    X(MEMOIZE, 0x94)                                                                               \
    X(BINPUT, 'q')                                                                                 \
    X(LONG_BINPUT, 'r')                                                                            \
    X(BINGET, 'h')                                                                                 \
    X(LONG_BINGET, 'j')                                                                            \
    X(GLOBAL, 'c')                                                                                 \
    X(STACK_GLOBAL, 0x93)                                                                          \
    X(REDUCE, 'R')

typedef enum {
#define X(name, byte) OP_##name = byte,
    OPCODE_TABLE(X)
#undef X
} opcode_t;

static lk_status_t bad(const pickle_t *self, lk_error_t *err, const char *what)
{
    return lk_error_set(err, LK_ERR_INVALID, "pickle: %s at byte %zu of %zu", what, self->op_at,
                        self->len);
}

static lk_status_t too_large(const pickle_t *self, lk_error_t *err, const char *what)
{
    return lk_error_set(err, LK_ERR_TOO_LARGE, "pickle: more than the limit of %s at byte %zu",
                        what, self->op_at);
}

static lk_status_t no_memory(lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_NO_MEMORY, "pickle: out of memory");
}

/* ---- input ---- */

static bool take(pickle_t *self, uint64_t n, const uint8_t **out)
{
    if (n > self->len - self->at) {
        return false;
    }
    *out = self->in + self->at;
    self->at += (size_t)n;
    return true;
}

/* A little-endian unsigned number of n (at most 8) bytes. */
static bool take_uint(pickle_t *self, unsigned n, uint64_t *out)
{
    const uint8_t *p;
    if (!take(self, n, &p)) {
        return false;
    }
    uint64_t x = 0;
    for (unsigned i = 0; i < n; i++) {
        x |= (uint64_t)p[i] << (8 * i);
    }
    *out = x;
    return true;
}

/* Up to a newline, which is taken too. */
static bool take_line(pickle_t *self, const uint8_t **out, size_t *len)
{
    const uint8_t *start = self->in + self->at;
    size_t left = self->len - self->at;
    const uint8_t *end = left > 0 ? memchr(start, '\n', left) : NULL;
    if (end == NULL) {
        return false;
    }
    *out = start;
    *len = (size_t)(end - start);
    self->at += *len + 1;
    return true;
}

/* ---- values, stack, memo ---- */

static pickle_value_t *new_value(pickle_t *self, pickle_type_t type)
{
    if (self->chunks == NULL || self->chunks->used == CHUNK_VALUES) {
        chunk_t *chunk = calloc(1, sizeof *chunk);
        if (chunk == NULL) {
            return NULL;
        }
        chunk->next = self->chunks;
        self->chunks = chunk;
    }
    pickle_value_t *value = &self->chunks->values[self->chunks->used++];
    value->type = type;
    self->n_values++;
    return value;
}

/* Makes room for one pointer more. */
static bool grow(const pickle_value_t ***list, size_t n, size_t *room)
{
    if (n < *room) {
        return true;
    }
    size_t more = *room > 0 ? 2 * *room : 64;
    const pickle_value_t **bigger = realloc(*list, more * sizeof *bigger);
    if (bigger == NULL) {
        return false;
    }
    *list = bigger;
    *room = more;
    return true;
}

static lk_status_t push(pickle_t *self, const pickle_value_t *value, lk_error_t *err)
{
    if (value == NULL) {
        return no_memory(err);
    }
    if (self->n_stack >= PICKLE_MAX_STACK) {
        return too_large(self, err, "values on the stack");
    }
    if (self->n_values > PICKLE_MAX_VALUES) {
        return too_large(self, err, "values");
    }
    if (!grow(&self->stack, self->n_stack, &self->stack_room)) {
        return no_memory(err);
    }
    self->stack[self->n_stack++] = value;
    return LK_OK;
}

/* How many values lie above the last mark. */
static size_t above_mark(const pickle_t *self)
{
    return self->n_stack - (self->n_marks > 0 ? self->marks[self->n_marks - 1] : 0);
}

static lk_status_t push_int(pickle_t *self, pickle_type_t type, int64_t x, lk_error_t *err)
{
    pickle_value_t *value = new_value(self, type);
    if (value != NULL) {
        value->integer = x;
    }
    return push(self, value, err);
}

static lk_status_t push_text(pickle_t *self, pickle_type_t type, unsigned len_bytes,
                             lk_error_t *err)
{
    uint64_t len;
    const uint8_t *bytes;
    if (!take_uint(self, len_bytes, &len) || !take(self, len, &bytes)) {
        return bad(self, err, "a text that goes beyond the end");
    }
    if (type == PICKLE_STR && !lk_utf8_valid((const char *)bytes, (size_t)len)) {
        return bad(self, err, "a text that is not UTF-8");
    }
    pickle_value_t *value = new_value(self, type);
    if (value != NULL) {
        value->bytes = bytes;
        value->len = (size_t)len;
    }
    return push(self, value, err);
}

static lk_status_t push_long1(pickle_t *self, lk_error_t *err)
{
    uint64_t n, x = 0;
    if (!take_uint(self, 1, &n) || n > 8 || !take_uint(self, (unsigned)n, &x)) {
        return bad(self, err, "an integer of more than 64 bits");
    }
    if (n > 0 && n < 8 && (x >> (8 * n - 1)) != 0) {
        x |= ~0ull << (8 * n); /* two's complement of n bytes */
    }
    return push_int(self, PICKLE_INT, (int64_t)x, err);
}

/* ---- containers ---- */

/* Makes room for n items more: a container that is filled at once takes what it needs. */
static bool reserve(pickle_value_t *to, size_t n)
{
    if (n <= to->room - to->n) {
        return true;
    }
    size_t room = to->n == 0 ? n : LK_MAX(2 * (size_t)to->room, to->n + n);
    const pickle_value_t **bigger = realloc(to->items, room * sizeof *bigger);
    if (bigger == NULL) {
        return false;
    }
    to->items = bigger;
    to->room = (uint32_t)room; /* the stack bounds n, PICKLE_MAX_VALUES the rest */
    return true;
}

/* n values of the stack as part of a container: bounded depth, and closed from now on. */
static lk_status_t add_items(pickle_t *self, pickle_value_t *to, size_t first, size_t n,
                             lk_error_t *err)
{
    if (!reserve(to, n)) {
        return no_memory(err);
    }
    for (size_t i = 0; i < n; i++) {
        const pickle_value_t *item = self->stack[first + i];
        if (item == to || item->depth + 1u > PICKLE_MAX_DEPTH) {
            return bad(self, err, "containers nested too deeply");
        }
        to->items[to->n++] = item;
        to->depth = LK_MAX(to->depth, (uint8_t)(item->depth + 1u));
        ((pickle_value_t *)item)->sealed = true; /* every value is one of ours, made writable */
    }
    return LK_OK;
}

static pickle_value_t *new_container(pickle_t *self, pickle_type_t type)
{
    pickle_value_t *value = new_value(self, type);
    if (value != NULL) {
        value->depth = 1;
    }
    return value;
}

/* The n uppermost values become one tuple. */
static lk_status_t make_tuple(pickle_t *self, size_t n, lk_error_t *err)
{
    if (above_mark(self) < n) {
        return bad(self, err, "a tuple of more values than there are");
    }
    pickle_value_t *tuple = new_container(self, PICKLE_TUPLE);
    if (tuple == NULL) {
        return no_memory(err);
    }
    LK_RETURN_IF_ERROR(add_items(self, tuple, self->n_stack - n, n, err));
    self->n_stack -= n;
    return push(self, tuple, err);
}

/* The n uppermost values go into the list or dict below them. */
static lk_status_t fill(pickle_t *self, pickle_type_t type, size_t n, lk_error_t *err)
{
    if (above_mark(self) < n + 1) {
        return bad(self, err, "too few values for a container");
    }
    size_t first = self->n_stack - n;
    pickle_value_t *to = (pickle_value_t *)self->stack[first - 1];
    if (to->type != type || to->sealed) {
        return bad(self, err, "something added to what is no open list or dict");
    }
    if (type == PICKLE_DICT && n % 2 != 0) {
        return bad(self, err, "a dict key without a value");
    }
    for (size_t i = 0; type == PICKLE_DICT && i < n; i += 2) {
        if (self->stack[first + i]->type != PICKLE_STR) {
            return bad(self, err, "a dict key that is no text");
        }
    }
    LK_RETURN_IF_ERROR(add_items(self, to, first, n, err));
    self->n_stack = first;
    return LK_OK;
}

static lk_status_t push_mark(pickle_t *self, lk_error_t *err)
{
    if (self->n_marks == PICKLE_MAX_DEPTH) {
        return bad(self, err, "containers nested too deeply");
    }
    self->marks[self->n_marks++] = self->n_stack;
    return LK_OK;
}

/* Takes the last mark away; *n is the number of values that lay above it. */
static lk_status_t pop_mark(pickle_t *self, size_t *n, lk_error_t *err)
{
    if (self->n_marks == 0) {
        return bad(self, err, "a mark is missing");
    }
    *n = above_mark(self);
    self->n_marks--;
    return LK_OK;
}

static lk_status_t to_mark(pickle_t *self, pickle_type_t type, lk_error_t *err)
{
    size_t n = 0;
    LK_RETURN_IF_ERROR(pop_mark(self, &n, err));
    return type == PICKLE_TUPLE ? make_tuple(self, n, err) : fill(self, type, n, err);
}

/* ---- globals and calls ---- */

static bool same(const uint8_t *bytes, size_t len, const char *text)
{
    return strlen(text) == len && memcmp(bytes, text, len) == 0;
}

static lk_status_t push_global(pickle_t *self, const uint8_t *module, size_t module_len,
                               const uint8_t *name, size_t name_len, lk_error_t *err)
{
    if (module_len > PICKLE_MAX_NAME || name_len > PICKLE_MAX_NAME ||
        !lk_utf8_valid((const char *)module, module_len) ||
        !lk_utf8_valid((const char *)name, name_len)) {
        return bad(self, err, "a global whose name is too long or not UTF-8");
    }
    for (size_t i = 0; i < self->n_allowed; i++) {
        if (same(module, module_len, self->allowed[i].module) &&
            same(name, name_len, self->allowed[i].name)) {
            pickle_value_t *value = new_value(self, PICKLE_GLOBAL);
            if (value != NULL) {
                value->global = &self->allowed[i];
            }
            return push(self, value, err);
        }
    }
    return lk_error_set(err, LK_ERR_INVALID, "pickle: the global '%.*s.%.*s' is not allowed here",
                        (int)module_len, (const char *)module, (int)name_len, (const char *)name);
}

static lk_status_t stack_global(pickle_t *self, lk_error_t *err)
{
    if (above_mark(self) < 2) {
        return bad(self, err, "a global without names");
    }
    const pickle_value_t *module = self->stack[self->n_stack - 2];
    const pickle_value_t *name = self->stack[self->n_stack - 1];
    if (module->type != PICKLE_STR || name->type != PICKLE_STR) {
        return bad(self, err, "a global whose names are no texts");
    }
    self->n_stack -= 2;
    return push_global(self, module->bytes, module->len, name->bytes, name->len, err);
}

static lk_status_t text_global(pickle_t *self, lk_error_t *err)
{
    const uint8_t *module, *name;
    size_t module_len, name_len;
    if (!take_line(self, &module, &module_len) || !take_line(self, &name, &name_len)) {
        return bad(self, err, "a global that goes beyond the end");
    }
    return push_global(self, module, module_len, name, name_len, err);
}

static lk_status_t make_call(pickle_t *self, lk_error_t *err)
{
    if (above_mark(self) < 2) {
        return bad(self, err, "a call without arguments");
    }
    const pickle_value_t *callee = self->stack[self->n_stack - 2];
    const pickle_value_t *args = self->stack[self->n_stack - 1];
    if (callee->type != PICKLE_GLOBAL || args->type != PICKLE_TUPLE) {
        return bad(self, err, "a call of something that is no global");
    }
    pickle_value_t *call = new_container(self, PICKLE_CALL);
    if (call == NULL) {
        return no_memory(err);
    }
    LK_RETURN_IF_ERROR(add_items(self, call, self->n_stack - 2, 2, err));
    self->n_stack -= 2;
    return push(self, call, err);
}

/* ---- memo ---- */

/* Places are taken in order, as Python's pickler does, or replaced. */
static lk_status_t memo_put(pickle_t *self, uint64_t place, lk_error_t *err)
{
    if (above_mark(self) == 0 || place > self->n_memo) {
        return bad(self, err, "a memo place out of order");
    }
    if (place == self->n_memo) {
        if (self->n_memo == PICKLE_MAX_VALUES) {
            return too_large(self, err, "memo places");
        }
        if (!grow(&self->memo, self->n_memo, &self->memo_room)) {
            return no_memory(err);
        }
        self->n_memo++;
    }
    self->memo[place] = self->stack[self->n_stack - 1];
    return LK_OK;
}

static lk_status_t memo_op(pickle_t *self, bool put, unsigned bytes, lk_error_t *err)
{
    uint64_t place;
    if (!take_uint(self, bytes, &place)) {
        return bad(self, err, "a memo place that goes beyond the end");
    }
    if (put) {
        return memo_put(self, place, err);
    }
    if (place >= self->n_memo) {
        return bad(self, err, "a memo place that holds nothing");
    }
    return push(self, self->memo[place], err);
}

/* ---- the machine ---- */

static lk_status_t do_proto(pickle_t *self, lk_error_t *err)
{
    uint64_t version;
    if (!take_uint(self, 1, &version) || version < 2 || version > 5) {
        return bad(self, err, "a protocol other than 2 to 5");
    }
    return LK_OK;
}

static lk_status_t do_frame(pickle_t *self, lk_error_t *err)
{
    uint64_t len;
    if (!take_uint(self, 8, &len) || len > self->len - self->at) {
        return bad(self, err, "a frame that goes beyond the end");
    }
    return LK_OK;
}

static lk_status_t push_uint(pickle_t *self, unsigned bytes, lk_error_t *err)
{
    uint64_t x;
    if (!take_uint(self, bytes, &x)) {
        return bad(self, err, "an integer that goes beyond the end");
    }
    return push_int(self, PICKLE_INT, bytes == 4 ? (int32_t)(uint32_t)x : (int64_t)x, err);
}

static lk_status_t do_stop(pickle_t *self, lk_error_t *err)
{
    if (self->n_stack != 1 || self->n_marks != 0) {
        return bad(self, err, "an end with other than one value");
    }
    if (self->at != self->len) {
        return bad(self, err, "an end before the end");
    }
    self->root = self->stack[0];
    return LK_OK;
}

static lk_status_t step(pickle_t *self, lk_error_t *err)
{
    self->op_at = self->at;
    if (self->at == self->len) {
        return bad(self, err, "an end without STOP");
    }
    switch (self->in[self->at++]) {
    case OP_PROTO:
        return do_proto(self, err);
    case OP_FRAME:
        return do_frame(self, err);
    case OP_STOP:
        return do_stop(self, err);
    case OP_NONE:
        return push_int(self, PICKLE_NONE, 0, err);
    case OP_NEWTRUE:
        return push_int(self, PICKLE_BOOL, 1, err);
    case OP_NEWFALSE:
        return push_int(self, PICKLE_BOOL, 0, err);
    case OP_BININT:
        return push_uint(self, 4, err);
    case OP_BININT1:
        return push_uint(self, 1, err);
    case OP_BININT2:
        return push_uint(self, 2, err);
    case OP_LONG1:
        return push_long1(self, err);
    case OP_SHORT_BINUNICODE:
        return push_text(self, PICKLE_STR, 1, err);
    case OP_BINUNICODE:
        return push_text(self, PICKLE_STR, 4, err);
    case OP_SHORT_BINBYTES:
        return push_text(self, PICKLE_BYTES, 1, err);
    case OP_BINBYTES:
        return push_text(self, PICKLE_BYTES, 4, err);
    case OP_EMPTY_LIST:
        return push(self, new_container(self, PICKLE_LIST), err);
    case OP_EMPTY_DICT:
        return push(self, new_container(self, PICKLE_DICT), err);
    case OP_EMPTY_TUPLE:
        return make_tuple(self, 0, err);
    case OP_TUPLE1:
        return make_tuple(self, 1, err);
    case OP_TUPLE2:
        return make_tuple(self, 2, err);
    case OP_TUPLE3:
        return make_tuple(self, 3, err);
    case OP_TUPLE:
        return to_mark(self, PICKLE_TUPLE, err);
    case OP_APPEND:
        return fill(self, PICKLE_LIST, 1, err);
    case OP_APPENDS:
        return to_mark(self, PICKLE_LIST, err);
    case OP_SETITEM:
        return fill(self, PICKLE_DICT, 2, err);
    case OP_SETITEMS:
        return to_mark(self, PICKLE_DICT, err);
    case OP_MARK:
        return push_mark(self, err);
    case OP_MEMOIZE:
        return memo_put(self, self->n_memo, err);
    case OP_BINPUT:
        return memo_op(self, true, 1, err);
    case OP_LONG_BINPUT:
        return memo_op(self, true, 4, err);
    case OP_BINGET:
        return memo_op(self, false, 1, err);
    case OP_LONG_BINGET:
        return memo_op(self, false, 4, err);
    case OP_GLOBAL:
        return text_global(self, err);
    case OP_STACK_GLOBAL:
        return stack_global(self, err);
    case OP_REDUCE:
        return make_call(self, err);
    default:
        return lk_error_set(err, LK_ERR_INVALID,
                            "pickle: the opcode 0x%02x at byte %zu is not allowed here",
                            self->in[self->op_at], self->op_at);
    }
}

lk_status_t pickle_parse(const void *bytes, size_t len, const pickle_global_t *allowed,
                         size_t n_allowed, pickle_t **out, lk_error_t *err)
{
    if (len > PICKLE_MAX_BYTES) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "pickle: %zu bytes, the limit is %u", len,
                            PICKLE_MAX_BYTES);
    }
    pickle_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return no_memory(err);
    }
    self->in = bytes;
    self->len = len;
    self->allowed = allowed;
    self->n_allowed = n_allowed;
    lk_status_t st = LK_OK;
    if (len < 2 || self->in[0] != OP_PROTO) {
        st = bad(self, err, "no PROTO");
    }
    while (st == LK_OK && self->root == NULL) {
        st = step(self, err);
    }
    if (st < 0) {
        pickle_destroy(&self);
        return st;
    }
    *out = self;
    return LK_OK;
}

void pickle_destroy(pickle_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    pickle_t *self = *self_p;
    *self_p = NULL;
    for (chunk_t *chunk = self->chunks, *next; chunk != NULL; chunk = next) {
        next = chunk->next;
        for (size_t i = 0; i < chunk->used; i++) {
            if (chunk->values[i].room > 0) {
                free(chunk->values[i].items);
            }
        }
        free(chunk);
    }
    free(self->stack);
    free(self->memo);
    free(self);
}

/* ---- reading ---- */

const pickle_value_t *pickle_root(const pickle_t *self)
{
    return self->root;
}

const char *pickle_type_name(pickle_type_t type)
{
    static const char *const names[] = {"None",  "bool", "int",  "str",    "bytes",
                                        "tuple", "list", "dict", "global", "call"};
    return (size_t)type < LK_ARRAY_LEN(names) ? names[type] : "?";
}

const pickle_value_t *pickle_item(const pickle_value_t *value, size_t i, pickle_type_t type)
{
    bool has = value != NULL && (value->type == PICKLE_TUPLE || value->type == PICKLE_LIST) &&
               i < value->n && value->items[i]->type == type;
    return has ? value->items[i] : NULL;
}

const pickle_value_t *pickle_get(const pickle_value_t *dict, const char *key)
{
    if (dict == NULL || dict->type != PICKLE_DICT) {
        return NULL;
    }
    for (size_t i = dict->n; i >= 2; i -= 2) {
        if (same(dict->items[i - 2]->bytes, dict->items[i - 2]->len, key)) {
            return dict->items[i - 1];
        }
    }
    return NULL;
}

bool pickle_is_global(const pickle_value_t *value, const char *module, const char *name)
{
    return value != NULL && value->type == PICKLE_GLOBAL &&
           strcmp(value->global->module, module) == 0 && strcmp(value->global->name, name) == 0;
}

const pickle_value_t *pickle_call_args(const pickle_value_t *value, const char *module,
                                       const char *name)
{
    bool is = value != NULL && value->type == PICKLE_CALL &&
              pickle_is_global(value->items[0], module, name);
    return is ? value->items[1] : NULL;
}

/* ---- what trainers send ---- */

#define ID_MODULE "vllm.distributed.device_communicators.pynccl_wrapper"
#define ID_CLASS  "ncclUniqueId"

lk_status_t pickle_unique_id(const void *bytes, size_t len, uint8_t id[NCCL_ID_BYTES],
                             lk_error_t *err)
{
    static const pickle_global_t allowed[] = {{"_ctypes", "_unpickle"}, {ID_MODULE, ID_CLASS}};
    pickle_t *pickle = NULL;
    LK_RETURN_IF_ERROR(pickle_parse(bytes, len, allowed, LK_ARRAY_LEN(allowed), &pickle, err));
    const pickle_value_t *args =
        pickle_call_args(pickle_root(pickle), allowed[0].module, allowed[0].name);
    const pickle_value_t *class = pickle_item(args, 0, PICKLE_GLOBAL);
    const pickle_value_t *state = pickle_item(pickle_item(args, 1, PICKLE_TUPLE), 1, PICKLE_BYTES);
    lk_status_t st = LK_OK;
    if (!pickle_is_global(class, ID_MODULE, ID_CLASS) || state == NULL) {
        st = lk_error_set(err, LK_ERR_INVALID, "pickle: this is no pickled ncclUniqueId");
    } else if (state->len != NCCL_ID_BYTES) {
        st = lk_error_set(err, LK_ERR_INVALID, "pickle: a ncclUniqueId of %zu bytes, not %d",
                          state->len, NCCL_ID_BYTES);
    } else {
        memcpy(id, state->bytes, NCCL_ID_BYTES);
    }
    pickle_destroy(&pickle);
    return st;
}

void pickle_unique_id_write(const uint8_t id[NCCL_ID_BYTES], uint8_t out[PICKLE_UNIQUE_ID_BYTES])
{
    static const uint8_t head[] = "\x80\x04\x95\xec\0\0\0\0\0\0\0\x8c\x07_ctypes\x94\x8c\x09_"
                                  "unpickle\x94\x93\x94\x8c\x34" ID_MODULE "\x94\x8c\x0c" ID_CLASS
                                  "\x94\x93\x94}\x94\x43\x80";
    static const uint8_t tail[] = "\x94\x86\x94\x86\x94R\x94.";
    size_t head_len = sizeof head - 1, tail_len = sizeof tail - 1;
    STATIC_ASSERT(sizeof head - 1 + NCCL_ID_BYTES + sizeof tail - 1 == PICKLE_UNIQUE_ID_BYTES,
                  "the length of Python's pickle");
    memcpy(out, head, head_len);
    memcpy(out + head_len, id, NCCL_ID_BYTES);
    memcpy(out + head_len + NCCL_ID_BYTES, tail, tail_len);
}

#define TORCH_NAMES(X)                                                                             \
    X(Tensor)                                                                                      \
    X(Size)                                                                                        \
    X(float32)                                                                                     \
    X(float64)                                                                                     \
    X(float16) X(bfloat16) X(int64) X(int32) X(int16) X(int8) X(uint8) X(uint16) X(uint32)         \
        X(uint64) X(bool) X(complex64) X(complex128) X(float8_e4m3fn) X(float8_e5m2)               \
            X(float8_e4m3fnuz) X(float8_e5m2fnuz) X(float8_e8m0fnu)

const pickle_global_t pickle_globals_ipc[] = {
    {"torch.nn.parameter", "Parameter"},
    {"torch.storage", "TypedStorage"},
    {"torch.storage", "UntypedStorage"},
    {"torch.multiprocessing.reductions", "rebuild_cuda_tensor"},
#define X(name) {"torch", #name},
    TORCH_NAMES(X)
#undef X
};
const size_t pickle_n_globals_ipc = LK_ARRAY_LEN(pickle_globals_ipc);
