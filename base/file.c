#include "base/file.h"

#include "base/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

lk_status_t file_path(char *out, const char *dir, const char *name, lk_error_t *err)
{
    int len = snprintf(out, FILE_PATH_MAX, "%s/%s", dir, name);
    if (len < 0 || len >= FILE_PATH_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "path %.60s.../%.60s is too long", dir, name);
    }
    return LK_OK;
}

lk_status_t file_open(const char *path, int *fd, uint64_t *size, lk_error_t *err)
{
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (opened < 0) {
        bool missing = errno == ENOENT || errno == ENOTDIR;
        return lk_error_set(err, missing ? LK_ERR_NOT_FOUND : LK_ERR_IO, "%s: %s", path,
                            strerror(errno));
    }
    lk_status_t status;
    struct stat st;
    if (fstat(opened, &st) != 0) {
        status = lk_error_set(err, LK_ERR_IO, "%s: %s", path, strerror(errno));
        goto err_close;
    }
    if (!S_ISREG(st.st_mode)) {
        status = lk_error_set(err, LK_ERR_INVALID, "%s: not a regular file", path);
        goto err_close;
    }
    *fd = opened;
    *size = (uint64_t)st.st_size;
    return LK_OK;

err_close:
    close(opened);
    return status;
}

lk_status_t file_read(const char *path, size_t limit, lk_buf_t *out, lk_error_t *err)
{
    int fd;
    uint64_t size;
    LK_RETURN_IF_ERROR(file_open(path, &fd, &size, err));
    lk_status_t status = LK_OK;
    if (size > limit) {
        status = lk_error_set(err, LK_ERR_TOO_LARGE, "%s: %llu bytes, at most %zu are read", path,
                              (unsigned long long)size, limit);
    } else if (!lk_buf_reserve(out, size)) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for %llu bytes", path,
                              (unsigned long long)size);
    }
    uint64_t left = size;
    while (status == LK_OK && left > 0) {
        char chunk[16384];
        ssize_t got = read(fd, chunk, LK_MIN(left, (uint64_t)sizeof chunk));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            status = lk_error_set(err, LK_ERR_IO, "%s: %s", path,
                                  got < 0 ? strerror(errno) : "shrank while it was read");
            break;
        }
        lk_buf_append(out, chunk, (size_t)got);
        left -= (uint64_t)got;
    }
    close(fd);
    return status;
}

static bool write_all(int fd, const void *data, uint64_t len)
{
    const char *at = data;
    while (len > 0) {
        ssize_t put = write(fd, at, LK_MIN(len, (uint64_t)1 << 30));
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return false;
        }
        at += put;
        len -= (uint64_t)put;
    }
    return true;
}

lk_status_t file_write(const char *path, const file_part_t *parts, size_t n, lk_error_t *err)
{
    char temporary[FILE_PATH_MAX];
    int len = snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (len < 0 || (size_t)len >= sizeof temporary) {
        return lk_error_set(err, LK_ERR_INVALID, "path %.60s... is too long", path);
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0) {
        return lk_error_set(err, LK_ERR_IO, "%s: %s", temporary, strerror(errno));
    }
    bool good = true;
    for (size_t i = 0; i < n && good; i++) {
        good = write_all(fd, parts[i].data, parts[i].len);
    }
    good = good && fsync(fd) == 0;
    int saved = errno;
    if (close(fd) != 0 && good) {
        good = false;
        saved = errno;
    }
    if (good && rename(temporary, path) != 0) {
        good = false;
        saved = errno;
    }
    if (!good) {
        unlink(temporary);
        return lk_error_set(err, LK_ERR_IO, "%s: %s", path, strerror(saved));
    }
    return LK_OK;
}

bool file_name_is_plain(const char *name)
{
    size_t len = strlen(name);
    if (len == 0 || len > 255 || name[0] == '.') {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        if (name[i] <= ' ' || name[i] > '~' || name[i] == '/' || name[i] == '\\') {
            return false;
        }
    }
    return true;
}
