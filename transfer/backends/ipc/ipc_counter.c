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

/* Maps the whole file, for a moment: there are few, and an update ends rarely. */
static lk_status_t map_file(const char *name, int64_t **out, lk_error_t *err)
{
    int fd = shm_open(name, O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);
    if (fd < 0) {
        return lk_error_set(err, LK_ERR_PEER,
                            "cannot open the trainer's reference counts %s: %s (trainer and engine "
                            "must share /dev/shm and run as the same user)",
                            name, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size < FILE_BYTES) {
        close(fd);
        return lk_error_set(err, LK_ERR_PEER,
                            "the trainer's reference counts %s have not the %zu bytes of torch's",
                            name, (size_t)FILE_BYTES);
    }
    void *map = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        return lk_error_set(err, LK_ERR_IO, "cannot map the trainer's reference counts %s: %s",
                            name, strerror(errno));
    }
    *out = map;
    return LK_OK;
}

lk_status_t ipc_counter_check(const char *name, lk_error_t *err)
{
    int64_t *map;
    LK_RETURN_IF_ERROR(map_file(name, &map, err));
    munmap(map, FILE_BYTES);
    return LK_OK;
}

lk_status_t ipc_counter_release(const char *name, const uint32_t *counters, size_t n,
                                lk_error_t *err)
{
    int64_t *map;
    LK_RETURN_IF_ERROR(map_file(name, &map, err));
    for (size_t i = 0; i < n; i++) {
        int64_t *count = map + HEADER_BYTES / sizeof *map + counters[i];
        int64_t seen = __atomic_load_n(count, __ATOMIC_ACQUIRE);
        while (seen > 0 && !__atomic_compare_exchange_n(count, &seen, seen - 1, false,
                                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        }
    }
    munmap(map, FILE_BYTES);
    return LK_OK;
}
