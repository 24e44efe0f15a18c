/*
 * spawn.h: child processes that never outlive their launcher and say when they are ready.
 *
 * The child inherits two descriptors and no other but 0 to 2: LK_PARENT_FD, the read end of a pipe
 * whose other end only the launcher holds (end of file: the launcher is gone; loop_watch_parent)
 * and may send lines through (spawn_tell, loop_hear_parent), and LK_STATUS_FD, on which it writes
 * one line, "ready TEXT" or "error TEXT". After "ready" it goes on with beats, which say that it is
 * alive, and at last perhaps "error TEXT", why it ends. PR_SET_PDEATHSIG is the second belt; it
 * follows the *thread* that spawned, so spawn from the main thread.
 */
#ifndef LK_BASE_SPAWN_H
#define LK_BASE_SPAWN_H

#include "base/status.h"

#include <sys/types.h>

#define SPAWN_LINE_MAX 1024

typedef struct {
    const char *name;         /* for texts: "engine 1" */
    const char *path;         /* of the program; not searched for */
    char *const *argv;        /* ends with NULL */
    char *const *env;         /* ends with NULL; NULL: this process's */
    int stdout_fd, stderr_fd; /* -1: this process's */
    bool new_group;           /* own process group: a terminal's Ctrl-C does not reach it */
} spawn_spec_t;

/* One child. Poll status_fd (POLLIN) until ready, pid_fd (POLLIN: it has ended) at any time. */
typedef struct {
    char name[64];
    pid_t pid; /* 0: none */
    int parent_fd, status_fd, pid_fd;
    bool ready;  /* its line came */
    bool reaped; /* wait_status is valid */
    int wait_status;
    size_t line_len;
    char line[SPAWN_LINE_MAX];
    size_t last_len;
    char last[SPAWN_LINE_MAX]; /* why it ends, if it said so after it was ready; else "" */
} spawn_t;

#define SPAWN_INIT ((spawn_t){.parent_fd = -1, .status_fd = -1, .pid_fd = -1})

/* Starts a child. A program that cannot be executed shows as an error line. */
LK_MUST_USE lk_status_t spawn_start(const spawn_spec_t *spec, spawn_t *out, lk_error_t *err);
/* INPROGRESS until the child's line is there. OK: *text (valid while self lives) is what followed
 * "ready". LK_ERR_PEER with its text when it reported an error or ended without a line. */
LK_MUST_USE lk_status_t spawn_ready(spawn_t *self, const char **text, lk_error_t *err);
/* How often a child that is ready was heard since the last call; never waits. *patience: its last
 * beat said that something long begins, so that nothing may be heard of it for a while. */
size_t spawn_beats(spawn_t *self, bool *patience);
/* INPROGRESS while it runs, OK once it has ended (wait_status). Never waits, needs no SIGCHLD. */
LK_MUST_USE lk_status_t spawn_reap(spawn_t *self, lk_error_t *err);
/* "runs", "exit code 3", "killed by signal 9 (Killed)" */
void spawn_describe(const spawn_t *self, char *out, size_t room);
/* No effect on a child that was reaped. */
void spawn_kill(spawn_t *self, int signal);
/* Sends a line (a line feed is added). Never waits: false if the child is gone or does not read (it
 * is stopped, say); then nothing was sent. At most SPAWN_LINE_MAX - 1 bytes are. SIGPIPE has to be
 * ignored. */
bool spawn_tell(const spawn_t *self, const char *line);
/* Lets go: closes the descriptors, which ends a child that watches its launcher. Neither kills nor
 * waits. Accepts NULL and SPAWN_INIT. */
void spawn_fini(spawn_t *self);

/* ---- in the child ---- */

/* Takes the two descriptors from the environment (and the variables out of it). -1 for one that is
 * not given: the program was started by hand. LK_ERR_INVALID names a variable that is no open
 * descriptor. */
LK_MUST_USE lk_status_t spawn_child_fds(int *parent_fd, int *status_fd, lk_error_t *err);
/* Writes the line; an error closes *status_fd (-1: nothing happens). Line breaks become blanks.
 * Catch signals first: whoever reads "ready" may send one. */
void spawn_child_report(int *status_fd, bool ready, const char *text);
/* Says that this process is alive; patience: but may be silent for long from now on. Never waits.
 */
void spawn_child_beat(int status_fd, bool patience);

#endif
