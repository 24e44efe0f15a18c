/*
 * msg_arena.h: storage of one message: a few large blocks, freed together by msg_fini.
 */
#ifndef LK_PROTO_MSG_ARENA_H
#define LK_PROTO_MSG_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct msg_arena msg_arena_t;

/* Makes sure that the next `size` bytes come from one block. Returns false when out of memory. */
bool msg_arena_reserve(msg_arena_t **arena, size_t size);
/* `size` bytes aligned to 8, or NULL. *arena is NULL before the first call. */
void *msg_arena_alloc(msg_arena_t **arena, size_t size);
void msg_arena_free(msg_arena_t *arena);

#endif
