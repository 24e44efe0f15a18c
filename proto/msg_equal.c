#include "proto/codec.h"
#include "proto/field_table.h"

#include <string.h>

static bool bytes_equal(const void *a, size_t a_len, const void *b, size_t b_len)
{
    return a_len == b_len && (a_len == 0 || memcmp(a, b, a_len) == 0);
}

/* Bounded recursion: records nest as deep as messages.def says. */
static bool record_equal(const record_t *record, const uint8_t *a, const uint8_t *b)
{
    for (size_t i = 0; i < record->n_fields; i++) {
        const field_t *field = &record->fields[i];
        const void *x = a + field->offset, *y = b + field->offset;
        bool equal = false;
        switch (field->kind) {
        case FIELD_U64:
        case FIELD_I64:
        case FIELD_F64: /* by bits: a NaN equals itself */
            equal = memcmp(x, y, 8) == 0;
            break;
        case FIELD_BOOL:
            equal = *(const bool *)x == *(const bool *)y;
            break;
        case FIELD_STR:
        case FIELD_TEXT: {
            const msg_str_t *s = x, *t = y;
            equal = bytes_equal(s->ptr, s->len, t->ptr, t->len);
            break;
        }
        case FIELD_BIN: {
            const msg_bin_t *s = x, *t = y;
            equal = bytes_equal(s->data, s->len, t->data, t->len);
            break;
        }
        case FIELD_REC:
            equal = record_equal(field->sub(), x, y);
            break;
        case FIELD_LIST: {
            const record_t *sub = field->sub();
            field_list_t s, t;
            memcpy(&s, x, sizeof s);
            memcpy(&t, y, sizeof t);
            equal = s.count == t.count;
            for (size_t k = 0; equal && k < s.count; k++) {
                equal = record_equal(sub, (uint8_t *)s.items + k * sub->size,
                                     (uint8_t *)t.items + k * sub->size);
            }
            break;
        }
        }
        if (!equal) {
            return false;
        }
    }
    return true;
}

bool msg_equal(const msg_t *a, const msg_t *b)
{
    const message_entry_t *entry = message_entry(a->type);
    return entry != NULL && a->type == b->type && a->sender_role == b->sender_role &&
           a->sender_rank == b->sender_rank && a->generation == b->generation &&
           a->sequence == b->sequence &&
           record_equal(entry->record(), message_fields(a), message_fields(b));
}
