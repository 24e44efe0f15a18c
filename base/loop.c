#include "base/loop.h"
#include "base/check.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { FD_WAKE, FD_PARENT, N_OWN };

struct lk_loop {
    const lk_env_t *env;
    int wake_fd;   /* eventfd that the signal handler writes */
    int parent_fd; /* -1: not watched, or its end was seen */
    loop_line_fn on_line;
    void *on_line_ctx;
    char line[LOOP_LINE_MAX];
    size_t line_len;
    bool signals;
    const char *stop;
    struct pollfd *fds; /* N_OWN of ours, then the caller's */
};

/* What a handler may touch. */
static volatile sig_atomic_t caught;
static volatile sig_atomic_t handler_fd = -1;

static void on_signal(int signal)
{
    int saved = errno;
    uint64_t one = 1;
    if (caught == 0) {
        caught = signal;
    }
    if (write(handler_fd, &one, sizeof one) < 0) {
        /* full is as good as written; anything else cannot be told from here */
    }
    errno = saved;
}

lk_loop_t *loop_new(const lk_env_t *env)
{
    lk_loop_t *self = calloc(1, sizeof *self);
    CHECKF(self != NULL, "out of memory");
    self->env = env;
    self->parent_fd = -1;
    self->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECKF(self->wake_fd >= 0, "eventfd: %s", strerror(errno));
    self->fds = calloc(LOOP_MAX_FDS + N_OWN, sizeof *self->fds);
    CHECKF(self->fds != NULL, "out of memory");
    return self;
}

void loop_destroy(lk_loop_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    lk_loop_t *self = *self_p;
    if (self->signals) { /* the handler must not write into somebody else's descriptor */
        signal(SIGTERM, SIG_DFL);
        signal(SIGINT, SIG_DFL);
        handler_fd = -1;
        caught = 0;
    }
    close(self->wake_fd);
    free(self->fds);
    free(self);
    *self_p = NULL;
}

void loop_catch_signals(lk_loop_t *self)
{
    CHECKF(handler_fd < 0, "signals are caught already");
    handler_fd = self->wake_fd;
    self->signals = true;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    CHECK(sigaction(SIGTERM, &action, NULL) == 0);
    CHECK(sigaction(SIGINT, &action, NULL) == 0);
    signal(SIGPIPE, SIG_IGN);
}

void loop_watch_parent(lk_loop_t *self, int fd)
{
    self->parent_fd = fd;
}

void loop_hear_parent(lk_loop_t *self, loop_line_fn fn, void *ctx)
{
    self->on_line = fn;
    self->on_line_ctx = ctx;
}

const char *loop_stop_reason(const lk_loop_t *self)
{
    if (self->stop != NULL) {
        return self->stop;
    }
    if (self->signals && caught != 0) {
        return caught == SIGINT ? "SIGINT" : "SIGTERM";
    }
    return NULL;
}

static void take_bytes(lk_loop_t *self, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == '\n') {
            self->line[self->line_len] = '\0';
            self->line_len = 0;
            if (self->on_line != NULL) {
                self->on_line(self->on_line_ctx, self->line);
            }
        } else if (self->line_len + 1 < sizeof self->line) {
            self->line[self->line_len++] = bytes[i];
        }
    }
}

/* It is readable: a line, a part of one, or its end. */
static void look_at_parent(lk_loop_t *self)
{
    char bytes[LOOP_LINE_MAX];
    ssize_t n = read(self->parent_fd, bytes, sizeof bytes);
    if (n > 0) {
        take_bytes(self, bytes, (size_t)n);
    } else if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        self->parent_fd = -1; /* readable for ever: looked at once */
        if (loop_stop_reason(self) == NULL) {
            self->stop = "launcher is gone";
        }
    }
}

void loop_wait(lk_loop_t *self, struct pollfd *fds, size_t n, uint64_t deadline_ns)
{
    CHECKF(n <= LOOP_MAX_FDS, "%zu descriptors", n);
    self->fds[FD_WAKE] = (struct pollfd){.fd = self->wake_fd, .events = POLLIN};
    self->fds[FD_PARENT] = (struct pollfd){.fd = self->parent_fd, .events = POLLIN};
    for (size_t i = 0; i < n; i++) {
        self->fds[N_OWN + i] = (struct pollfd){.fd = fds[i].fd, .events = fds[i].events};
    }
    struct timespec timeout = {0};
    if (deadline_ns != UINT64_MAX) {
        uint64_t now = lk_env_now_ns(self->env);
        uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
        timeout.tv_sec = (time_t)(left / LK_SECOND_NS);
        timeout.tv_nsec = (long)(left % LK_SECOND_NS);
    }
    int ready = ppoll(self->fds, N_OWN + n, deadline_ns == UINT64_MAX ? NULL : &timeout, NULL);
    CHECKF(ready >= 0 || errno == EINTR, "poll: %s", strerror(errno));
    for (size_t i = 0; i < n; i++) {
        fds[i].revents = ready > 0 ? self->fds[N_OWN + i].revents : 0;
    }
    if (ready <= 0) {
        return;
    }
    if (self->fds[FD_WAKE].revents != 0) {
        uint64_t count;
        if (read(self->wake_fd, &count, sizeof count) < 0) {
            CHECKF(errno == EAGAIN || errno == EINTR, "eventfd: %s", strerror(errno));
        }
    }
    if (self->fds[FD_PARENT].revents != 0) {
        look_at_parent(self);
    }
}
