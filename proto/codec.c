#include "proto/codec.h"
#include "base/check.h"
#include "proto/field_table.h"
#include "proto/limits.h"
#include "proto/msg_arena.h"
#include "proto/wire_reader.h"
#include "proto/wire_writer.h"

#include <string.h>

/* Envelope: an array, in this order. A longer one comes from a newer peer. */
enum {
    ENV_MAGIC,
    ENV_VERSION,
    ENV_TYPE,
    ENV_ROLE,
    ENV_RANK,
    ENV_GENERATION,
    ENV_SEQUENCE,
    ENV_LEN
};
#define MAGIC "LK"

static const wire_limits_t envelope_limits = {WIRE_MAX_ENVELOPE, 32, 2};
static const wire_limits_t body_limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, MSG_MAX_DEPTH};

static bool valid_str(const char *text, size_t len)
{
    return len == 0 || (memchr(text, '\0', len) == NULL && lk_utf8_valid(text, len));
}

/* ---- encode ---- */

static lk_status_t encode_record(wire_writer_t *w, const record_t *record, const uint8_t *base,
                                 lk_error_t *err);

static lk_status_t over_limit(const field_t *field, size_t len, size_t limit, const char *unit,
                              lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_TOO_LARGE, "%s: %zu %s, at most %zu are allowed", field->name,
                        len, unit, limit);
}

static lk_status_t encode_list(wire_writer_t *w, const field_t *field, const void *at,
                               lk_error_t *err)
{
    field_list_t list;
    memcpy(&list, at, sizeof list);
    if (list.count > MSG_MAX_LIST) {
        return over_limit(field, list.count, MSG_MAX_LIST, "entries", err);
    }
    const record_t *sub = field->sub();
    wire_put_array(w, list.count);
    for (size_t i = 0; i < list.count; i++) {
        if (encode_record(w, sub, (const uint8_t *)list.items + i * sub->size, err) != LK_OK) {
            return lk_error_prefix(err, "%s[%zu]", field->name, i);
        }
    }
    return LK_OK;
}

static lk_status_t encode_field(wire_writer_t *w, const field_t *field, const void *at,
                                lk_error_t *err)
{
    switch (field->kind) {
    case FIELD_U64:
        wire_put_u64(w, *(const uint64_t *)at);
        return LK_OK;
    case FIELD_I64:
        wire_put_i64(w, *(const int64_t *)at);
        return LK_OK;
    case FIELD_F64:
        wire_put_f64(w, *(const double *)at);
        return LK_OK;
    case FIELD_BOOL:
        wire_put_bool(w, *(const bool *)at);
        return LK_OK;
    case FIELD_STR:
    case FIELD_TEXT: {
        const msg_str_t *s = at;
        if (s->len > MSG_MAX_STR) {
            return over_limit(field, s->len, MSG_MAX_STR, "bytes", err);
        }
        bool valid = valid_str(s->ptr, s->len);
        if (!valid && field->kind == FIELD_STR) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: not valid UTF-8, or a NUL inside",
                                field->name);
        }
        wire_put_str(w, s->ptr, s->len);
        if (!valid && !w->buf->failed) {
            lk_utf8_clean((char *)w->buf->data + w->buf->len - s->len, s->len);
        }
        return LK_OK;
    }
    case FIELD_BIN: {
        const msg_bin_t *b = at;
        if (b->len > MSG_MAX_BIN) {
            return over_limit(field, b->len, MSG_MAX_BIN, "bytes", err);
        }
        wire_put_bin(w, b->data, b->len);
        return LK_OK;
    }
    case FIELD_REC:
        if (encode_record(w, field->sub(), at, err) != LK_OK) {
            return lk_error_prefix(err, "%s", field->name);
        }
        return LK_OK;
    case FIELD_LIST:
        return encode_list(w, field, at, err);
    }
    CHECK(false);
}

static lk_status_t encode_record(wire_writer_t *w, const record_t *record, const uint8_t *base,
                                 lk_error_t *err)
{
    wire_put_array(w, record->n_fields);
    for (size_t i = 0; i < record->n_fields; i++) {
        const field_t *field = &record->fields[i];
        LK_RETURN_IF_ERROR(encode_field(w, field, base + field->offset, err));
    }
    return LK_OK;
}

static lk_status_t encode_body(const message_entry_t *entry, const msg_t *msg, lk_buf_t *body,
                               lk_error_t *err)
{
    size_t start = body->len;
    wire_writer_t w = wire_writer(body);
    LK_RETURN_IF_ERROR(encode_record(&w, entry->record(), message_fields(msg), err));
    if (body->failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no room for the body after %zu bytes",
                            body->len - start);
    }
    if (body->len - start > WIRE_MAX_BODY || w.objects > WIRE_MAX_OBJECTS) {
        return lk_error_set(err, LK_ERR_TOO_LARGE,
                            "body of %zu bytes and %zu values, at most %u and %u are allowed",
                            body->len - start, w.objects, WIRE_MAX_BODY, WIRE_MAX_OBJECTS);
    }
    return LK_OK;
}

lk_status_t msg_encode(const msg_t *msg, lk_buf_t *envelope, lk_buf_t *body, lk_error_t *err)
{
    const message_entry_t *entry = message_entry(msg->type);
    CHECKF(entry != NULL, "message type %d", (int)msg->type);
    lk_error_t local;
    err = err != NULL ? err : &local;
    size_t body_start = body->len;
    lk_status_t status = encode_body(entry, msg, body, err);
    if (status != LK_OK) {
        lk_error_prefix(err, "%s", entry->name);
    } else {
        status = msg_encode_envelope(msg, envelope, err);
    }
    body->len = status == LK_OK ? body->len : body_start;
    return status;
}

lk_status_t msg_encode_envelope(const msg_t *msg, lk_buf_t *envelope, lk_error_t *err)
{
    size_t start = envelope->len;
    wire_writer_t w = wire_writer(envelope);
    wire_put_array(&w, ENV_LEN);
    wire_put_str(&w, MAGIC, sizeof MAGIC - 1);
    wire_put_u64(&w, PROTO_VERSION);
    wire_put_u64(&w, msg->type);
    wire_put_u64(&w, msg->sender_role);
    wire_put_u64(&w, msg->sender_rank);
    wire_put_u64(&w, msg->generation);
    wire_put_u64(&w, msg->sequence);
    if (envelope->failed) {
        envelope->len = start;
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no room for the envelope",
                            msg_type_name(msg->type));
    }
    return LK_OK;
}

/* ---- decode ---- */

static lk_status_t decode_record(const record_t *record, const wire_value_t *value, uint8_t *base,
                                 msg_arena_t **arena, lk_error_t *err);

static lk_status_t wrong_kind(const field_t *field, const char *expected, const wire_value_t *value,
                              lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_INVALID, "%s: expected %s, got %s", field->name, expected,
                        wire_kind_name(wire_kind(value)));
}

static lk_status_t no_memory(const field_t *field, size_t size, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for %zu bytes", field->name, size);
}

static lk_status_t decode_str(const field_t *field, const wire_value_t *value, msg_str_t *out,
                              msg_arena_t **arena, lk_error_t *err)
{
    const char *text;
    size_t len;
    if (!wire_str(value, &text, &len)) {
        return wrong_kind(field, "a str", value, err);
    }
    if (len > MSG_MAX_STR) {
        return over_limit(field, len, MSG_MAX_STR, "bytes", err);
    }
    if (!valid_str(text, len)) {
        return lk_error_set(err, LK_ERR_INVALID, "%s: not valid UTF-8, or a NUL inside",
                            field->name);
    }
    if (len == 0) {
        *out = (msg_str_t){"", 0};
        return LK_OK;
    }
    char *copy = msg_arena_alloc(arena, len + 1);
    if (copy == NULL) {
        return no_memory(field, len, err);
    }
    memcpy(copy, text, len);
    copy[len] = '\0';
    *out = (msg_str_t){copy, len};
    return LK_OK;
}

static lk_status_t decode_bin(const field_t *field, const wire_value_t *value, msg_bin_t *out,
                              msg_arena_t **arena, lk_error_t *err)
{
    const void *data;
    size_t len;
    if (!wire_bin(value, &data, &len)) {
        return wrong_kind(field, "a bin", value, err);
    }
    if (len > MSG_MAX_BIN) {
        return over_limit(field, len, MSG_MAX_BIN, "bytes", err);
    }
    if (len == 0) {
        *out = (msg_bin_t){NULL, 0};
        return LK_OK;
    }
    void *copy = msg_arena_alloc(arena, len);
    if (copy == NULL) {
        return no_memory(field, len, err);
    }
    memcpy(copy, data, len);
    *out = (msg_bin_t){copy, len};
    return LK_OK;
}

static lk_status_t decode_list(const field_t *field, const wire_value_t *value, void *at,
                               msg_arena_t **arena, lk_error_t *err)
{
    const wire_value_t *first;
    field_list_t list = {NULL, 0};
    if (!wire_array(value, &first, &list.count)) {
        return wrong_kind(field, "an array", value, err);
    }
    if (list.count > MSG_MAX_LIST) {
        return over_limit(field, list.count, MSG_MAX_LIST, "entries", err);
    }
    const record_t *sub = field->sub();
    if (list.count > 0) {
        list.items = msg_arena_alloc(arena, list.count * sub->size);
        if (list.items == NULL) {
            return no_memory(field, list.count * sub->size, err);
        }
        memset(list.items, 0, list.count * sub->size);
    }
    for (size_t i = 0; i < list.count; i++) {
        if (decode_record(sub, wire_item(first, i), (uint8_t *)list.items + i * sub->size, arena,
                          err) != LK_OK) {
            return lk_error_prefix(err, "%s[%zu]", field->name, i);
        }
    }
    memcpy(at, &list, sizeof list);
    return LK_OK;
}

static lk_status_t decode_field(const field_t *field, const wire_value_t *value, void *at,
                                msg_arena_t **arena, lk_error_t *err)
{
    switch (field->kind) {
    case FIELD_U64:
        return wire_u64(value, at) ? LK_OK
                                   : wrong_kind(field, "an integer from 0 to 2^64-1", value, err);
    case FIELD_I64:
        return wire_i64(value, at) ? LK_OK : wrong_kind(field, "an int64", value, err);
    case FIELD_F64:
        return wire_f64(value, at) ? LK_OK : wrong_kind(field, "a number", value, err);
    case FIELD_BOOL:
        return wire_bool(value, at) ? LK_OK : wrong_kind(field, "a bool", value, err);
    case FIELD_STR:
    case FIELD_TEXT:
        return decode_str(field, value, at, arena, err);
    case FIELD_BIN:
        return decode_bin(field, value, at, arena, err);
    case FIELD_REC:
        if (decode_record(field->sub(), value, at, arena, err) != LK_OK) {
            return lk_error_prefix(err, "%s", field->name);
        }
        return LK_OK;
    case FIELD_LIST:
        return decode_list(field, value, at, arena, err);
    }
    CHECK(false);
}

/* `base` is zeroed. Recursion is as deep as messages.def nests records. */
static lk_status_t decode_record(const record_t *record, const wire_value_t *value, uint8_t *base,
                                 msg_arena_t **arena, lk_error_t *err)
{
    const wire_value_t *first;
    size_t count;
    if (!wire_array(value, &first, &count)) {
        return lk_error_set(err, LK_ERR_INVALID, "expected an array of %s's fields, got %s",
                            record->name, wire_kind_name(wire_kind(value)));
    }
    size_t known = LK_MIN(count, record->n_fields);
    for (size_t i = 0; i < known; i++) {
        const field_t *field = &record->fields[i];
        LK_RETURN_IF_ERROR(
            decode_field(field, wire_item(first, i), base + field->offset, arena, err));
    }
    return LK_OK;
}

static lk_status_t envelope_fields(const wire_value_t *root, uint64_t out[ENV_LEN], lk_error_t *err)
{
    static const char *const names[ENV_LEN] = {"magic", "version",    "type",    "role",
                                               "rank",  "generation", "sequence"};
    const wire_value_t *first;
    const char *magic;
    size_t count, len;
    if (!wire_array(root, &first, &count) || count < ENV_LEN) {
        return lk_error_set(err, LK_ERR_INVALID, "expected an array of %d values", ENV_LEN);
    }
    if (!wire_str(first, &magic, &len) || len != sizeof MAGIC - 1 || memcmp(magic, MAGIC, len)) {
        return lk_error_set(err, LK_ERR_INVALID, "magic: not a Lockstep message");
    }
    for (size_t i = ENV_VERSION; i < ENV_LEN; i++) {
        if (!wire_u64(wire_item(first, i), &out[i])) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: expected an integer from 0 to 2^64-1",
                                names[i]);
        }
    }
    if (out[ENV_VERSION] != PROTO_VERSION) {
        return lk_error_set(err, LK_ERR_INVALID, "version: %llu, this program speaks %u",
                            (unsigned long long)out[ENV_VERSION], PROTO_VERSION);
    }
    if (out[ENV_ROLE] > UINT32_MAX || out[ENV_RANK] > UINT32_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "%s: over 2^32-1",
                            out[ENV_ROLE] > UINT32_MAX ? "role" : "rank");
    }
    return LK_OK;
}

static lk_status_t decode_envelope(const void *data, size_t len, msg_t *out, lk_error_t *err)
{
    wire_doc_t doc = {0};
    uint64_t fields[ENV_LEN];
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, data, len, &envelope_limits, err));
    lk_status_t status = envelope_fields(doc.root, fields, err);
    wire_doc_fini(&doc);
    LK_RETURN_IF_ERROR(status);
    const message_entry_t *entry = message_entry(fields[ENV_TYPE]);
    if (entry == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "type: %llu is not a known message",
                            (unsigned long long)fields[ENV_TYPE]);
    }
    out->type = entry->type;
    out->sender_role = (uint32_t)fields[ENV_ROLE];
    out->sender_rank = (uint32_t)fields[ENV_RANK];
    out->generation = fields[ENV_GENERATION];
    out->sequence = fields[ENV_SEQUENCE];
    return LK_OK;
}

static lk_status_t decode_body(const void *data, size_t len, msg_t *msg, msg_arena_t **arena,
                               lk_error_t *err)
{
    wire_doc_t doc = {0};
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, data, len, &body_limits, err));
    /* A guess that makes one block do for the messages that matter: bytes with their rounding, and
     * list entries, whose structs are at most some 24 bytes per value. */
    size_t guess = doc.shape.bytes + 16 * doc.shape.blobs + 24 * doc.shape.objects;
    lk_status_t status = LK_OK;
    if (!msg_arena_reserve(arena, guess)) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu bytes", guess);
    } else {
        status = decode_record(message_entry(msg->type)->record(), doc.root, message_fields(msg),
                               arena, err);
    }
    wire_doc_fini(&doc);
    return status;
}

lk_status_t msg_decode(const void *envelope, size_t envelope_len, const void *body, size_t body_len,
                       msg_t *out, lk_error_t *err)
{
    lk_error_t local;
    err = err != NULL ? err : &local;
    msg_t msg;
    msg_arena_t *arena = NULL;
    memset(&msg, 0, sizeof msg);
    if (decode_envelope(envelope, envelope_len, &msg, err) != LK_OK) {
        return lk_error_prefix(err, "envelope");
    }
    if (decode_body(body, body_len, &msg, &arena, err) != LK_OK) {
        msg_arena_free(arena);
        return lk_error_prefix(err, "%s", msg_type_name(msg.type));
    }
    msg.arena = arena;
    *out = msg;
    return LK_OK;
}
