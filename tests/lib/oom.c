#include "tests/lib/oom.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool armed, failed;
static uint64_t left;

void oom_arm(uint64_t n)
{
    left = n;
    failed = false;
    armed = true;
}

bool oom_disarm(void)
{
    armed = false;
    return failed;
}

static bool fails_now(void)
{
    if (!armed || failed || left-- > 0) {
        return false;
    }
    failed = true;
    errno = ENOMEM;
    return true;
}

/* The linker turns calls of NAME into __wrap_NAME, and __real_NAME into the original. */
void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *s);
char *__wrap_strdup(const char *s);
char *__real_strndup(const char *s, size_t n);
char *__wrap_strndup(const char *s, size_t n);

void *__wrap_malloc(size_t size)
{
    return fails_now() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails_now() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return fails_now() ? NULL : __real_realloc(p, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return fails_now() ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *s)
{
    return fails_now() ? NULL : __real_strdup(s);
}

char *__wrap_strndup(const char *s, size_t n)
{
    return fails_now() ? NULL : __real_strndup(s, n);
}
