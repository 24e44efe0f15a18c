/*
 * arena.h: all buffers of a step in one mapping, made at open. Buffers are listed once, by a
 * function that runs twice: first to count (base NULL), then to hand out.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_ARENA_H
#define LK_ENGINE_CORE_EXEC_CPU_ARENA_H

#include "base/status.h"

typedef struct {
    uint8_t *base; /* NULL while counting */
    size_t used, size;
} arena_t;

/* n elements of `bytes` each, 64-byte aligned, zero; NULL while counting. */
static inline void *arena_take(arena_t *a, size_t n, size_t bytes)
{
    void *at = a->base != NULL ? a->base + a->used : NULL;
    a->used += (n * bytes + 63) / 64 * 64;
    return at;
}

/* Calls list(arg, a) to count, maps, calls it again. Pages cost memory when first written. `what`
 * names the mapping in errors. */
LK_MUST_USE lk_status_t arena_init(arena_t *a, void (*list)(void *arg, arena_t *a), void *arg,
                                   const char *what, lk_error_t *err);
void arena_fini(arena_t *a);

#endif
