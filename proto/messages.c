#include "proto/messages.h"
#include "proto/field_table.h"
#include "proto/msg_arena.h"

#include <stdlib.h>
#include <string.h>

struct msg_arena {
    msg_arena_t *next; /* older blocks */
    size_t used, cap;
    _Alignas(16) unsigned char data[];
};

bool msg_arena_reserve(msg_arena_t **arena, size_t size)
{
    if (*arena != NULL && (*arena)->cap - (*arena)->used >= size) {
        return true;
    }
    size_t cap = *arena == NULL ? 256 : (*arena)->cap * 2;
    cap = cap < size ? size : cap;
    msg_arena_t *block = malloc(sizeof *block + cap);
    if (block == NULL) {
        return false;
    }
    block->next = *arena;
    block->used = 0;
    block->cap = cap;
    *arena = block;
    return true;
}

void *msg_arena_alloc(msg_arena_t **arena, size_t size)
{
    size_t rounded = (size + 7) & ~(size_t)7;
    if (rounded < size || !msg_arena_reserve(arena, rounded)) {
        return NULL;
    }
    void *p = (*arena)->data + (*arena)->used;
    (*arena)->used += rounded;
    return p;
}

void msg_arena_free(msg_arena_t *arena)
{
    while (arena != NULL) {
        msg_arena_t *next = arena->next;
        free(arena);
        arena = next;
    }
}

void msg_fini(msg_t *msg)
{
    if (msg != NULL) {
        msg_arena_free(msg->arena);
        memset(msg, 0, sizeof *msg);
    }
}

msg_str_t msg_str(const char *text)
{
    return (msg_str_t){text, text != NULL ? strlen(text) : 0};
}

const char *msg_type_name(uint64_t type)
{
    const message_entry_t *entry = message_entry(type);
    return entry != NULL ? entry->name : "?";
}
