#include "proto/msg_rand.h"
#include "base/check.h"
#include "proto/field_table.h"
#include "proto/msg_arena.h"

#include <string.h>

msg_type_t msg_rand_type(lk_prng_t *prng)
{
    return message_table[lk_prng_below(prng, message_table_len)].type;
}

/* Any width from 0 to 64 bits, so that every integer format is met. */
static uint64_t rand_u64(lk_prng_t *prng)
{
    uint64_t width = lk_prng_below(prng, 65);
    return width == 0 ? 0 : lk_prng_u64(prng) >> (64 - width);
}

/* Mostly short, sometimes over each boundary of the length formats. */
static size_t rand_len(lk_prng_t *prng)
{
    static const uint32_t spans[] = {1, 8, 8, 8, 40, 40, 40, 300};
    if (lk_prng_below(prng, 200) == 0) {
        return 65530 + lk_prng_below(prng, 16);
    }
    return lk_prng_below(prng, spans[lk_prng_below(prng, LK_ARRAY_LEN(spans))]);
}

static void *alloc(msg_arena_t **arena, size_t size)
{
    void *p = msg_arena_alloc(arena, size);
    CHECKF(p != NULL, "out of memory for a random message");
    return p;
}

static msg_str_t rand_str(lk_prng_t *prng, msg_arena_t **arena)
{
    static const char *const pieces[] = {"a",
                                         "Z",
                                         "0",
                                         " ",
                                         "\"",
                                         "\\",
                                         "\n",
                                         "\x7f",
                                         "\xC3\xA9",
                                         "\xE2\x82\xAC",
                                         "\xF0\x9F\xA6\x86"};
    size_t room = rand_len(prng), len = 0;
    char *text = alloc(arena, room + 1);
    for (;;) {
        const char *piece = pieces[lk_prng_below(prng, LK_ARRAY_LEN(pieces))];
        if (len + strlen(piece) > room) {
            break;
        }
        memcpy(text + len, piece, strlen(piece));
        len += strlen(piece);
    }
    text[len] = '\0';
    return (msg_str_t){text, len};
}

static msg_bin_t rand_bin(lk_prng_t *prng, msg_arena_t **arena)
{
    size_t len = rand_len(prng);
    uint8_t *data = alloc(arena, len);
    for (size_t i = 0; i < len; i++) {
        data[i] = (uint8_t)lk_prng_u64(prng);
    }
    return (msg_bin_t){data, len};
}

static double rand_f64(lk_prng_t *prng)
{
    switch (lk_prng_below(prng, 4)) {
    case 0:
        return 0.0;
    case 1:
        return (double)(int64_t)lk_prng_below(prng, 2001) - 1000.0;
    case 2:
        return lk_prng_unit(prng);
    default: {
        uint64_t bits = lk_prng_u64(prng); /* infinities and NaNs too */
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    }
}

static void rand_record(lk_prng_t *prng, const record_t *record, uint8_t *base, msg_arena_t **arena)
{
    for (size_t i = 0; i < record->n_fields; i++) {
        const field_t *field = &record->fields[i];
        void *at = base + field->offset;
        switch (field->kind) {
        case FIELD_U64:
            *(uint64_t *)at = rand_u64(prng);
            break;
        case FIELD_I64:
            *(int64_t *)at = lk_prng_below(prng, 2) == 0 ? (int64_t)(rand_u64(prng) >> 1)
                                                         : -1 - (int64_t)(rand_u64(prng) >> 1);
            break;
        case FIELD_F64:
            *(double *)at = rand_f64(prng);
            break;
        case FIELD_BOOL:
            *(bool *)at = lk_prng_below(prng, 2) == 1;
            break;
        case FIELD_STR:
        case FIELD_TEXT:
            *(msg_str_t *)at = rand_str(prng, arena);
            break;
        case FIELD_BIN:
            *(msg_bin_t *)at = rand_bin(prng, arena);
            break;
        case FIELD_REC:
            rand_record(prng, field->sub(), at, arena);
            break;
        case FIELD_LIST: {
            const record_t *sub = field->sub();
            field_list_t list;
            list.count = lk_prng_below(prng, lk_prng_below(prng, 8) == 0 ? 24 : 4);
            list.items = alloc(arena, list.count * sub->size);
            memset(list.items, 0, list.count * sub->size);
            for (size_t k = 0; k < list.count; k++) {
                rand_record(prng, sub, (uint8_t *)list.items + k * sub->size, arena);
            }
            memcpy(at, &list, sizeof list);
            break;
        }
        }
    }
}

void msg_rand(lk_prng_t *prng, msg_type_t type, msg_t *out)
{
    const message_entry_t *entry = message_entry(type);
    CHECKF(entry != NULL, "message type %d", (int)type);
    msg_arena_t *arena = NULL;
    memset(out, 0, sizeof *out);
    out->type = type;
    out->sender_role = (uint32_t)lk_prng_below(prng, 4);
    out->sender_rank = (uint32_t)rand_u64(prng);
    out->generation = rand_u64(prng);
    out->sequence = rand_u64(prng);
    rand_record(prng, entry->record(), message_fields(out), &arena);
    out->arena = arena;
}
