#include "engine_core/exec/cpu/arena.h"

#include "base/check.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

lk_status_t arena_init(arena_t *a, void (*list)(void *arg, arena_t *a), void *arg, const char *what,
                       lk_error_t *err)
{
    *a = (arena_t){0};
    list(arg, a);
    size_t size = a->used > 0 ? a->used : 64;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        *a = (arena_t){0};
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: can't map %zu bytes: %s", what, size,
                            strerror(errno));
    }
    /* a hint: fewer address translations; small pages do as well */
    (void)madvise(base, size, MADV_HUGEPAGE);
    *a = (arena_t){.base = base, .size = size};
    list(arg, a);
    CHECK(a->used <= size);
    return LK_OK;
}

void arena_fini(arena_t *a)
{
    if (a->base != NULL) {
        munmap(a->base, a->size);
    }
    *a = (arena_t){0};
}
