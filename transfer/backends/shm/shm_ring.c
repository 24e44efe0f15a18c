#include "transfer/backends/shm/shm_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static lk_status_t io_error(const char *what, uint64_t bytes, int why, lk_error_t *err)
{
    lk_status_t st = why == ENOMEM || why == ENOSPC ? LK_ERR_NO_MEMORY : LK_ERR_IO;
    return lk_error_set(err, st, "shared memory of %llu bytes: cannot %s: %s",
                        (unsigned long long)bytes, what, strerror(why));
}

lk_status_t shm_ring_create(shm_ring_t *out, uint64_t slots, lk_error_t *err)
{
    if (slots < SHM_RING_SLOTS_MIN || slots > SHM_RING_SLOTS_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "a ring has %u to %u slots, not %llu",
                            SHM_RING_SLOTS_MIN, SHM_RING_SLOTS_MAX, (unsigned long long)slots);
    }
    uint64_t bytes = slots * TRANSFER_CHUNK_BYTES;
    const char *what = "create it";
    int fd = memfd_create("lockstep-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING), why = errno;
    if (fd < 0) {
        return io_error(what, bytes, why, err);
    }
    what = "reserve it";
    why = posix_fallocate(fd, 0, (off_t)bytes); /* now an error, later a signal */
    if (why != 0) {
        goto err_fd;
    }
    what = "map it";
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (map == MAP_FAILED) {
        why = errno;
        goto err_fd;
    }
    /* that ranks can't write is a comfort where the kernel (5.1) has it */
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    what = "seal it";
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        why = errno;
        goto err_map;
    }
    *out = (shm_ring_t){map, bytes, fd};
    return LK_OK;

err_map:
    munmap(map, bytes);
err_fd:
    close(fd);
    return io_error(what, bytes, why, err);
}

lk_status_t shm_ring_map(shm_ring_t *out, int fd, uint64_t bytes, lk_error_t *err)
{
    struct stat st;
    lk_status_t status = LK_OK;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &st) != 0) {
        status = lk_error_set(err, LK_ERR_PEER,
                              "the trainer's shared memory is not sealed against shrinking");
    } else if (st.st_size < 0 || (uint64_t)st.st_size != bytes) {
        status = lk_error_set(err, LK_ERR_PEER,
                              "the trainer's shared memory has %lld bytes, but 'bytes' is %llu",
                              (long long)st.st_size, (unsigned long long)bytes);
    } else {
        void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (map == MAP_FAILED) {
            status = io_error("map it", bytes, errno, err);
        } else {
            *out = (shm_ring_t){map, bytes, -1};
        }
    }
    close(fd);
    return status;
}

void shm_ring_fini(shm_ring_t *self)
{
    if (self->map != NULL) {
        munmap(self->map, self->bytes);
        if (self->fd >= 0) {
            close(self->fd);
        }
    }
    *self = (shm_ring_t){0};
}
