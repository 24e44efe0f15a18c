/*
 * shm_stream.h: byte streams over abstract Unix sockets of this host, for the frames beside a
 * shm_ring, which the trainer's end passes to a rank that it has welcomed. Both ends refuse a peer
 * of another user (SO_PEERCRED; root may).
 */
#ifndef LK_TRANSFER_SHM_STREAM_H
#define LK_TRANSFER_SHM_STREAM_H

#include "base/env.h"
#include "transfer/backends/byte_stream.h"

#define SHM_NAME_MAX 100 /* bytes of a socket's name, without the leading NUL */

/* Connects as soon as somebody listens under `name`. NULL: no memory. */
byte_stream_t *shm_stream_dial(const char *name, const lk_env_t *env);
/* The descriptor that came with the welcome, now the caller's; -1 if none came. Of dialled ones. */
int shm_stream_take_fd(byte_stream_t *self);

/* Listens under `name`; caller closes *fd_out. */
LK_MUST_USE lk_status_t shm_listen(const char *name, int backlog, int *fd_out, lk_error_t *err);
/* One waiting connection, or NULL. ring_fd is borrowed for the stream's life, and passed once with
 * the first bytes written after `admit`. */
byte_stream_t *shm_accept(int listener, int ring_fd);

#endif
