#include "base/spawn.h"
#include "base/check.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* The child's numbers of its two descriptors; the first after standard error. */
enum { CHILD_PARENT_FD = 3, CHILD_STATUS_FD = 4, CHILD_FIRST_FREE = 5 };

#define PARENT_VAR "LK_PARENT_FD"
#define STATUS_VAR "LK_STATUS_FD"

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* ---- between fork and exec: async-signal-safe calls only ---- */

static void child_fail(const char *what)
{
    char line[256];
    size_t n = 0;
    const char *parts[] = {"error ", what, ": ", strerrordesc_np(errno), "\n"};
    for (size_t i = 0; i < LK_ARRAY_LEN(parts); i++) {
        size_t len = strlen(parts[i]);
        len = LK_MIN(len, sizeof line - n);
        memcpy(line + n, parts[i], len);
        n += len;
    }
    if (send(CHILD_STATUS_FD, line, n, MSG_NOSIGNAL) < 0) {
        _exit(126);
    }
    _exit(127);
}

static void close_from(unsigned first)
{
    if (syscall(SYS_close_range, first, ~0u, 0) != 0) { /* a kernel before 5.9 */
        for (unsigned fd = first; fd < 65536; fd++) {
            close((int)fd);
        }
    }
}

static void child_exec(const spawn_spec_t *spec, char *const *env, pid_t launcher, int parent_fd,
                       int status_fd)
{
    /* out of the way of the numbers that are given out below */
    int high_parent = fcntl(parent_fd, F_DUPFD, 64), high_status = fcntl(status_fd, F_DUPFD, 64);
    int high_out = spec->stdout_fd < 0 ? -1 : fcntl(spec->stdout_fd, F_DUPFD, 64);
    int high_err = spec->stderr_fd < 0 ? -1 : fcntl(spec->stderr_fd, F_DUPFD, 64);
    if (dup2(high_status, CHILD_STATUS_FD) < 0 || dup2(high_parent, CHILD_PARENT_FD) < 0) {
        _exit(126);
    }
    if ((spec->stdout_fd >= 0 && dup2(high_out, STDOUT_FILENO) < 0) ||
        (spec->stderr_fd >= 0 && dup2(high_err, STDERR_FILENO) < 0)) {
        child_fail("standard output");
    }
    close_from(CHILD_FIRST_FREE);
    if (spec->new_group && setpgid(0, 0) != 0) {
        child_fail("process group");
    }
    /* The launcher's handlers first: one of them would swallow a signal meant for the child. */
    signal(SIGPIPE, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
        child_fail("parent death signal");
    }
    if (getppid() != launcher) { /* it died before the line above */
        _exit(126);
    }
    execve(spec->path, spec->argv, env);
    child_fail(spec->path);
}

/* ---- the launcher's side ---- */

/* `env` without our two variables, and with them. One block; free it. NULL: no memory. */
static char **child_env(char *const *env)
{
    static char parent_var[] = PARENT_VAR "=3", status_var[] = STATUS_VAR "=4";
    STATIC_ASSERT(CHILD_PARENT_FD == 3 && CHILD_STATUS_FD == 4, "the variables' values");
    size_t n = 0, kept = 0;
    while (env[n] != NULL) {
        n++;
    }
    char **out = calloc(n + 3, sizeof *out);
    for (size_t i = 0; out != NULL && i < n; i++) {
        if (strncmp(env[i], PARENT_VAR "=", sizeof PARENT_VAR) != 0 &&
            strncmp(env[i], STATUS_VAR "=", sizeof STATUS_VAR) != 0) {
            out[kept++] = env[i];
        }
    }
    if (out != NULL) {
        out[kept++] = parent_var;
        out[kept++] = status_var;
    }
    return out;
}

lk_status_t spawn_start(const spawn_spec_t *spec, spawn_t *out, lk_error_t *err)
{
    spawn_t self = SPAWN_INIT;
    int life[2] = {-1, -1}, status[2] = {-1, -1};
    lk_status_t failed = LK_ERR_IO;
    snprintf(self.name, sizeof self.name, "%s", spec->name);
    char **env = child_env(spec->env != NULL ? spec->env : environ);
    if (env == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory to start it", spec->name);
    }
    if (pipe2(life, O_CLOEXEC) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, status) != 0) {
        lk_error_set(err, LK_ERR_IO, "%s: pipe: %s", spec->name, strerror(errno));
        goto err_close;
    }
    fflush(NULL); /* or the child could write the buffers again */
    pid_t launcher = getpid();
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* until the child has handlers of its own */
    self.pid = fork();
    if (self.pid == 0) {
        child_exec(spec, env, launcher, life[0], status[1]);
    }
    int why = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (self.pid < 0) {
        lk_error_set(err, LK_ERR_IO, "%s: fork: %s", spec->name, strerror(why));
        goto err_close;
    }
    free(env);
    close(life[0]);
    close(status[1]);
    self.parent_fd = life[1];
    self.status_fd = status[0];
    CHECK(fcntl(self.status_fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(fcntl(self.parent_fd, F_SETFL, O_NONBLOCK) == 0);
    self.pid_fd = (int)syscall(SYS_pidfd_open, self.pid, 0); /* -1 before Linux 5.3 */
    *out = self;
    return LK_OK;

err_close:
    free(env);
    close_fd(&life[0]);
    close_fd(&life[1]);
    close_fd(&status[0]);
    close_fd(&status[1]);
    return failed;
}

/* Its status line ended before a line break. */
static lk_status_t no_line(spawn_t *self, lk_error_t *err)
{
    char how[64];
    lk_error_t ignored;
    if (spawn_reap(self, &ignored) == LK_INPROGRESS) {
        /* the descriptor closes a moment before the process ends: describe it as it is */
        return lk_error_set(err, LK_ERR_PEER, "%s ended without saying that it is ready",
                            self->name);
    }
    spawn_describe(self, how, sizeof how);
    return lk_error_set(err, LK_ERR_PEER, "%s ended without saying that it is ready: %s",
                        self->name, how);
}

lk_status_t spawn_ready(spawn_t *self, const char **text, lk_error_t *err)
{
    while (!self->ready) {
        if (self->status_fd < 0) {
            return no_line(self, err);
        }
        char c;
        ssize_t n = read(self->status_fd, &c, 1); /* one line in a child's life */
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return LK_INPROGRESS;
        }
        if (n <= 0) {
            close_fd(&self->status_fd);
            continue;
        }
        if (c == '\n') {
            self->line[self->line_len] = '\0';
            self->ready = true;
        } else if (self->line_len + 1 < sizeof self->line) {
            self->line[self->line_len++] = c;
        }
    }
    if (strncmp(self->line, "ready ", 6) != 0) {
        close_fd(&self->status_fd);
        bool error = strncmp(self->line, "error ", 6) == 0;
        return lk_error_set(err, LK_ERR_PEER, "%s: %s", self->name, self->line + (error ? 6 : 0));
    }
    *text = self->line + 6;
    return LK_OK;
}

/* A line after the first: empty for a beat. */
static void take_line(spawn_t *self, bool *patience)
{
    char *line = self->last;
    line[self->last_len] = '\0';
    if (line[0] == '\0' || strcmp(line, "patience") == 0) {
        *patience = line[0] != '\0';
    }
    bool error = strncmp(line, "error ", 6) == 0;
    memmove(line, line + (error ? 6 : self->last_len),
            self->last_len + 1 - (error ? 6 : self->last_len));
    self->last_len = error ? sizeof self->last : 0; /* the last word: nothing more is taken */
}

size_t spawn_beats(spawn_t *self, bool *patience)
{
    char bytes[256];
    size_t beats = 0;
    *patience = false;
    while (self->ready && self->status_fd >= 0) {
        ssize_t n = read(self->status_fd, bytes, sizeof bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            close_fd(&self->status_fd);
        }
        if (n <= 0) {
            break;
        }
        for (ssize_t i = 0; i < n; i++) {
            beats += bytes[i] == '\n';
            if (self->last_len == sizeof self->last) {
                continue;
            }
            if (bytes[i] == '\n') {
                take_line(self, patience);
            } else if (self->last_len + 1 < sizeof self->last) {
                self->last[self->last_len++] = bytes[i];
            }
        }
    }
    return beats;
}

lk_status_t spawn_reap(spawn_t *self, lk_error_t *err)
{
    if (self->reaped) {
        return LK_OK;
    }
    pid_t got;
    do {
        got = waitpid(self->pid, &self->wait_status, WNOHANG);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return lk_error_set(err, LK_ERR_IO, "%s: waitpid: %s", self->name, strerror(errno));
    }
    self->reaped = got == self->pid;
    return self->reaped ? LK_OK : LK_INPROGRESS;
}

void spawn_describe(const spawn_t *self, char *out, size_t room)
{
    if (!self->reaped) {
        snprintf(out, room, "runs");
    } else if (WIFEXITED(self->wait_status)) {
        snprintf(out, room, "exit code %d", WEXITSTATUS(self->wait_status));
    } else {
        int signal = WTERMSIG(self->wait_status);
        snprintf(out, room, "killed by signal %d (%s)", signal, sigdescr_np(signal));
    }
}

void spawn_kill(spawn_t *self, int signal)
{
    if (self->pid > 0 && !self->reaped) { /* not reaped: the number is still its own */
        kill(self->pid, signal);
    }
}

bool spawn_tell(const spawn_t *self, const char *line)
{
    STATIC_ASSERT(SPAWN_LINE_MAX <= PIPE_BUF, "a line is written whole or not at all");
    char text[SPAWN_LINE_MAX];
    int len = snprintf(text, sizeof text, "%s\n", line);
    size_t n = LK_MIN((size_t)len, sizeof text - 1);
    text[n - 1] = '\n';
    for (size_t i = 0; i + 1 < n; i++) {
        text[i] = text[i] == '\n' || text[i] == '\r' ? ' ' : text[i];
    }
    return self->parent_fd >= 0 && write(self->parent_fd, text, n) == (ssize_t)n;
}

void spawn_fini(spawn_t *self)
{
    if (self != NULL) {
        close_fd(&self->parent_fd);
        close_fd(&self->status_fd);
        close_fd(&self->pid_fd);
    }
}

/* ---- in the child ---- */

static lk_status_t take_fd(const char *variable, int *out, lk_error_t *err)
{
    const char *text = getenv(variable);
    if (text == NULL) {
        *out = -1;
        return LK_OK;
    }
    char *end;
    errno = 0;
    long fd = strtol(text, &end, 10);
    if (errno != 0 || *text == '\0' || *end != '\0' || fd < 0 || fd > 1 << 20 ||
        fcntl((int)fd, F_SETFD, FD_CLOEXEC) != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "%s=%.32s: not an open descriptor", variable,
                            text);
    }
    *out = (int)fd;
    return LK_OK;
}

lk_status_t spawn_child_fds(int *parent_fd, int *status_fd, lk_error_t *err)
{
    int parent, status;
    LK_RETURN_IF_ERROR(take_fd(PARENT_VAR, &parent, err));
    LK_RETURN_IF_ERROR(take_fd(STATUS_VAR, &status, err));
    unsetenv(PARENT_VAR);
    unsetenv(STATUS_VAR);
    *parent_fd = parent;
    *status_fd = status;
    return LK_OK;
}

void spawn_child_report(int *status_fd, bool ready, const char *text)
{
    if (*status_fd < 0) {
        return;
    }
    char line[SPAWN_LINE_MAX];
    int len = snprintf(line, sizeof line - 1, "%s %s", ready ? "ready" : "error", text);
    size_t n = LK_MIN((size_t)len, sizeof line - 2);
    for (size_t i = 0; i < n; i++) {
        line[i] = line[i] == '\n' || line[i] == '\r' ? ' ' : line[i];
    }
    line[n++] = '\n';
    /* a launcher that is gone does not read it; the loop learns of that by the parent's pipe */
    ssize_t sent = send(*status_fd, line, n, MSG_NOSIGNAL);
    CHECKF(sent == (ssize_t)n || (sent < 0 && (errno == EPIPE || errno == ECONNRESET)),
           "status line: %s", strerror(errno));
    if (!ready) {
        close_fd(status_fd);
    }
}

void spawn_child_beat(int status_fd, bool patience)
{
    const char *line = patience ? "patience\n" : "\n";
    if (status_fd >= 0) {
        /* full: the launcher sleeps, and finds enough when it wakes; gone: the loop says so */
        ssize_t sent = send(status_fd, line, strlen(line), MSG_NOSIGNAL | MSG_DONTWAIT);
        CHECKF(sent > 0 || errno == EAGAIN || errno == EPIPE || errno == ECONNRESET, "beat: %s",
               strerror(errno));
    }
}
