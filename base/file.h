/*
 * file.h: reads and writes small files and checks names that come from inside other files.
 */
#ifndef LK_BASE_FILE_H
#define LK_BASE_FILE_H

#include "base/buf.h"

/* Longest path handled; longer ones are LK_ERR_INVALID. */
#define FILE_PATH_MAX 4096

/* "DIR/NAME" into out[FILE_PATH_MAX]. */
LK_MUST_USE lk_status_t file_path(char *out, const char *dir, const char *name, lk_error_t *err);

/* Appends a regular file's bytes to out, which keeps its own limit. LK_ERR_NOT_FOUND when there is
 * none, LK_ERR_TOO_LARGE over `limit` bytes (checked before anything is allocated). Errors name the
 * path. */
LK_MUST_USE lk_status_t file_read(const char *path, size_t limit, lk_buf_t *out, lk_error_t *err);

/* Opens a regular file for reading without ever blocking (a FIFO is refused); size in bytes. The
 * caller closes *fd. */
LK_MUST_USE lk_status_t file_open(const char *path, int *fd, uint64_t *size, lk_error_t *err);

/* Creates or replaces a file in one step: writes PATH.tmp, syncs, renames. The parts are written
 * one after the other. Nothing is left behind on failure. */
typedef struct {
    const void *data;
    uint64_t len;
} file_part_t;
LK_MUST_USE lk_status_t file_write(const char *path, const file_part_t *parts, size_t n,
                                   lk_error_t *err);

/* True for a name that can't leave its directory: not empty, no '/', no leading '.', printable
 * ASCII, at most 255 bytes. */
bool file_name_is_plain(const char *name);

#endif
