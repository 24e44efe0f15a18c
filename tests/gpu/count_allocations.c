/*
 * count_allocations.c: to be loaded before all else (LD_PRELOAD): whatever allocates memory of a
 * GPU or page-locked memory through the CUDA driver, by the driver's table of ours, by NCCL or by
 * the CUDA runtime inside it, writes its name into the file that LK_COUNT_ALLOCATIONS names, one
 * byte per allocation at least: the file's length is the count that a test compares.
 *
 * Everybody gets the driver's functions from dlsym, or from cuGetProcAddress, which they get from
 * there. Those two are ours; the allocating functions are called through a stand-in that forwards
 * its first eight arguments (integers and pointers all, on x86-64 and aarch64).
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* as cuGetProcAddress knows it, as dlsym does */
#define ALLOCATION_TABLE(X)                                                                        \
    X(cuMemAlloc, "cuMemAlloc_v2")                                                                 \
    X(cuMemAllocPitch, "cuMemAllocPitch_v2")                                                       \
    X(cuMemAllocManaged, "cuMemAllocManaged")                                                      \
    X(cuMemAllocAsync, "cuMemAllocAsync")                                                          \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync")                                          \
    X(cuMemCreate, "cuMemCreate")                                                                  \
    X(cuMemHostAlloc, "cuMemHostAlloc")                                                            \
    X(cuMemAllocHost, "cuMemAllocHost_v2")                                                         \
    X(cuMemHostRegister, "cuMemHostRegister_v2")                                                   \
    X(cuArrayCreate, "cuArrayCreate_v2")                                                           \
    X(cuArray3DCreate, "cuArray3DCreate_v2")

#define SEEN __attribute__((visibility("default")))

typedef long (*call_t)(long, long, long, long, long, long, long, long);
typedef void *(*dlsym_t)(void *, const char *);
typedef int (*proc_address_t)(const char *, void **, int, unsigned long, void *);

static void note(const char *name)
{
    const char *path = getenv("LK_COUNT_ALLOCATIONS");
    char line[64];
    int fd = path != NULL ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    int n = snprintf(line, sizeof line, "%ld %s\n", (long)getpid(), name);
    if (fd >= 0 && write(fd, line, (size_t)n) != n) {
        abort(); /* an allocation that isn't counted would pass for none */
    }
    if (fd >= 0) {
        close(fd);
    }
}

#define X(name, symbol)                                                                            \
    static call_t real_##name;                                                                     \
    static long counted_##name(long a, long b, long c, long d, long e, long f, long g, long h)     \
    {                                                                                              \
        note(#name);                                                                               \
        return real_##name(a, b, c, d, e, f, g, h);                                                \
    }
ALLOCATION_TABLE(X)
#undef X

static proc_address_t real_proc_address;

static void *stand_in(const char *name, void *found, int by_symbol);

/* Both versions of it: the older has no fifth argument. */
static int counted_proc_address(const char *name, void **out, int version, unsigned long flags,
                                void *status)
{
    int rc = real_proc_address(name, out, version, flags, status);
    if (rc == 0 && out != NULL && *out != NULL) {
        *out = stand_in(name, *out, 0);
    }
    return rc;
}

static void *stand_in(const char *name, void *found, int by_symbol)
{
#define X(call, symbol)                                                                            \
    if (strcmp(name, by_symbol ? symbol : #call) == 0) {                                           \
        real_##call = (call_t)found;                                                               \
        return (void *)counted_##call;                                                             \
    }
    ALLOCATION_TABLE(X)
#undef X
    if (strcmp(name, "cuGetProcAddress") == 0 || strcmp(name, "cuGetProcAddress_v2") == 0) {
        real_proc_address = (proc_address_t)found;
        return (void *)counted_proc_address;
    }
    return found;
}

SEEN void *dlsym(void *handle, const char *name);
SEEN void *dlsym(void *handle, const char *name)
{
    static dlsym_t real;
    if (real == NULL) {
#if defined(__x86_64__)
        real = (dlsym_t)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
#else
        real = (dlsym_t)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
#endif
    }
    void *found = real != NULL ? real(handle, name) : NULL;
    return found != NULL && strncmp(name, "cu", 2) == 0 ? stand_in(name, found, 1) : found;
}
