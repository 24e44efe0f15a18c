#include "transfer/backends/ipc/ipc_counter.h"

#include "transfer/backends/ipc/ipc_handles.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_BYTES 64u
#define FILE_BYTES   (HEADER_BYTES + IPC_COUNTERS * sizeof(int64_t))

/* A descriptor of the file, or -1. */
static int open_file(const char *name, lk_error_t *err)
{
    int fd = shm_open(name, O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);
    if (fd < 0) {
        lk_error_set(err, LK_ERR_PEER,
                     "cannot open the trainer's reference counts %s: %s (trainer and engine must "
                     "share /dev/shm and run as the same user)",
                     name, strerror(errno));
        return -1;
    }
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size < FILE_BYTES) {
        close(fd);
        lk_error_set(err, LK_ERR_PEER,
                     "the trainer's reference counts %s have not the %zu bytes of torch's", name,
                     (size_t)FILE_BYTES);
        return -1;
    }
    return fd;
}

lk_status_t ipc_counter_check(const char *name, lk_error_t *err)
{
    int fd = open_file(name, err);
    if (fd < 0) {
        return LK_ERR_PEER;
    }
    close(fd);
    return LK_OK;
}

lk_status_t ipc_counter_open(const char *name, ipc_counts_t **out, lk_error_t *err)
{
    int fd = open_file(name, err);
    if (fd < 0) {
        return LK_ERR_PEER;
    }
    /* its pages are fetched now, rather than when an answer waits for them */
    void *map = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        return lk_error_set(err, LK_ERR_IO, "cannot map the trainer's reference counts %s: %s",
                            name, strerror(errno));
    }
    *out = map;
    return LK_OK;
}

void ipc_counter_close(ipc_counts_t *counts)
{
    if (counts != NULL) {
        munmap(counts, FILE_BYTES);
    }
}

void ipc_counter_release(ipc_counts_t *counts, uint32_t place)
{
    int64_t *count = counts + HEADER_BYTES / sizeof *counts + place;
    int64_t seen = __atomic_load_n(count, __ATOMIC_ACQUIRE);
    while (seen > 0 && !__atomic_compare_exchange_n(count, &seen, seen - 1, false, __ATOMIC_ACQ_REL,
                                                    __ATOMIC_ACQUIRE)) {
    }
}
