/*
 * loop.h: waits until one of a few descriptors is readable/writable or a deadline passes. The
 * programs' main loops are: drain ports, step objects, wait. A self-pipe carries signals; a
 * parent-death pipe (inherited descriptor, see spawn.h) ends the process with its launcher.
 */
#ifndef LK_BASE_LOOP_H
#define LK_BASE_LOOP_H

#include "base/env.h"
#include "base/status.h"

#include <poll.h>

#define LOOP_MAX_FDS 4096

typedef struct lk_loop lk_loop_t;

/* Never NULL: a program that can't have its loop ends here. */
lk_loop_t *loop_new(const lk_env_t *env);
void loop_destroy(lk_loop_t **self_p);
/* SIGTERM and SIGINT set the stop flag and wake the loop; SIGPIPE is ignored. Once per process. */
void loop_catch_signals(lk_loop_t *self);
/* End of file on fd sets the stop flag with reason "launcher is gone". */
void loop_watch_parent(lk_loop_t *self, int fd);
/* Lines that the launcher sends through that pipe (spawn_tell), without their line feed and cut to
 * LOOP_LINE_MAX - 1 bytes; fn is called in loop_wait. Without this they are dropped. */
#define LOOP_LINE_MAX 512
typedef void (*loop_line_fn)(void *ctx, const char *line);
void loop_hear_parent(lk_loop_t *self, loop_line_fn fn, void *ctx);
/* NULL while running, else why to stop ("SIGTERM", "launcher is gone"). */
const char *loop_stop_reason(const lk_loop_t *self);
/* Waits for any of fds, a signal, or until deadline_ns (monotonic; UINT64_MAX: none). fds' revents
 * are filled. Never an error for EINTR. */
void loop_wait(lk_loop_t *self, struct pollfd *fds, size_t n, uint64_t deadline_ns);

#endif
