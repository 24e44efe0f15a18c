#include "transfer/backends/shm/shm_stream.h"
#include "base/check.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_NS (20 * LK_MS_NS)

typedef struct {
    byte_stream_t base;
    const lk_env_t *env; /* NULL: accepted */
    struct sockaddr_un addr;
    socklen_t addr_len;
    uint64_t retry_at_ns;
    int fd;
    bool connected;
    int ring_fd; /* dialled: what came; accepted: what goes, borrowed; -1: none */
    bool admitted;
} shm_stream_t;

static socklen_t make_address(const char *name, struct sockaddr_un *out)
{
    size_t len = strlen(name);
    CHECK(len > 0 && len <= SHM_NAME_MAX && len < sizeof out->sun_path);
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    memcpy(out->sun_path + 1, name, len); /* the leading NUL makes it abstract */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len);
}

/* Weights go between processes of one user. */
static lk_status_t check_peer(int fd, pid_t *pid, lk_error_t *err)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0) {
        return lk_error_set(err, LK_ERR_PEER, "cannot tell whose process is there: %s",
                            strerror(errno));
    }
    *pid = peer.pid;
    uid_t me = geteuid();
    return peer.uid == me || peer.uid == 0 || me == 0
               ? LK_OK
               : lk_error_set(err, LK_ERR_UNAUTHORIZED,
                              "process %ld belongs to user %lu, this one to user %lu",
                              (long)peer.pid, (unsigned long)peer.uid, (unsigned long)me);
}

static lk_status_t shm_connect(byte_stream_t *base, lk_error_t *err)
{
    shm_stream_t *self = (shm_stream_t *)base;
    if (self->connected) {
        return LK_OK;
    }
    if (lk_env_now_ns(self->env) < self->retry_at_ns) {
        return LK_INPROGRESS;
    }
    if (self->fd < 0) {
        self->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    }
    if (self->fd < 0 ||
        connect(self->fd, (const struct sockaddr *)&self->addr, self->addr_len) != 0) {
        /* nobody there yet, or too many waiting to be accepted */
        snprintf(base->note, sizeof base->note, "%s", strerror(errno));
        self->retry_at_ns = lk_env_now_ns(self->env) + RETRY_NS;
        return LK_INPROGRESS;
    }
    pid_t pid;
    LK_RETURN_IF_ERROR(check_peer(self->fd, &pid, err));
    self->connected = true;
    return LK_OK;
}

static lk_status_t moved_or_error(const shm_stream_t *self, ssize_t n, const char *what,
                                  size_t *moved, lk_error_t *err)
{
    if (n > 0) {
        *moved = (size_t)n;
        return LK_OK;
    }
    if (n == 0) {
        return lk_error_set(err, LK_ERR_PEER, "%s closed the connection", self->base.peer);
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        return LK_INPROGRESS;
    }
    return lk_error_set(err, LK_ERR_PEER, "cannot %s %s: %s", what, self->base.peer,
                        strerror(errno));
}

/* Keeps the first descriptor that ever comes, closes all others. */
static void take_descriptors(shm_stream_t *self, struct msghdr *msg)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (self->env != NULL && self->ring_fd < 0) {
                self->ring_fd = fd;
            } else {
                close(fd);
            }
        }
    }
}

static lk_status_t shm_readv(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                             lk_error_t *err)
{
    shm_stream_t *self = (shm_stream_t *)base;
    CHECK(self->connected && n <= BYTE_STREAM_IOV_MAX);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = (struct iovec *)iov,
                         .msg_iovlen = (size_t)n,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(self->fd, &msg, MSG_CMSG_CLOEXEC);
    if (got >= 0) {
        take_descriptors(self, &msg);
    }
    return moved_or_error(self, got, "read from", moved, err);
}

static lk_status_t shm_writev(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                              lk_error_t *err)
{
    shm_stream_t *self = (shm_stream_t *)base;
    CHECK(self->connected && n <= BYTE_STREAM_IOV_MAX);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr msg = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n};
    bool passing = self->env == NULL && self->admitted && self->ring_fd >= 0;
    if (passing) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &self->ring_fd, sizeof(int));
    }
    ssize_t sent = sendmsg(self->fd, &msg, MSG_NOSIGNAL);
    if (sent > 0 && passing) {
        self->ring_fd = -1;
    }
    return moved_or_error(self, sent, "write to", moved, err);
}

static void shm_admit(byte_stream_t *base)
{
    ((shm_stream_t *)base)->admitted = true;
}

static bool shm_hung_up(byte_stream_t *base)
{
    shm_stream_t *self = (shm_stream_t *)base;
    if (!self->connected) {
        return false;
    }
    struct pollfd p = {.fd = self->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

static int shm_fd(const byte_stream_t *base)
{
    const shm_stream_t *self = (const shm_stream_t *)base;
    return self->connected ? self->fd : -1; /* nothing tells when somebody starts to listen */
}

static void shm_destroy(byte_stream_t *base)
{
    shm_stream_t *self = (shm_stream_t *)base;
    if (self->fd >= 0) {
        close(self->fd);
    }
    if (self->env != NULL && self->ring_fd >= 0) {
        close(self->ring_fd);
    }
    free(self);
}

static const byte_stream_ops_t shm_stream_ops = {
    .connect = shm_connect,
    .readv = shm_readv,
    .writev = shm_writev,
    .admit = shm_admit,
    .hung_up = shm_hung_up,
    .fd = shm_fd,
    .destroy = shm_destroy,
};

byte_stream_t *shm_stream_dial(const char *name, const lk_env_t *env)
{
    shm_stream_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->base.ops = &shm_stream_ops;
    self->env = env;
    self->fd = self->ring_fd = -1;
    self->addr_len = make_address(name, &self->addr);
    snprintf(self->base.peer, sizeof self->base.peer, "@%s", name);
    return &self->base;
}

int shm_stream_take_fd(byte_stream_t *base)
{
    shm_stream_t *self = (shm_stream_t *)base;
    CHECK(base->ops == &shm_stream_ops && self->env != NULL);
    int fd = self->ring_fd;
    self->ring_fd = -1;
    return fd;
}

lk_status_t shm_listen(const char *name, int backlog, int *fd_out, lk_error_t *err)
{
    struct sockaddr_un addr;
    socklen_t len = make_address(name, &addr);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&addr, len) != 0 || listen(fd, backlog) != 0) {
        lk_error_set(err, LK_ERR_IO, "cannot listen on the abstract socket @%s: %s", name,
                     strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return LK_ERR_IO;
    }
    *fd_out = fd;
    return LK_OK;
}

byte_stream_t *shm_accept(int listener, int ring_fd)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    pid_t pid = 0;
    lk_error_t ignored; /* a stranger is told nothing */
    shm_stream_t *self = calloc(1, sizeof *self);
    if (self == NULL || check_peer(fd, &pid, &ignored) < 0) {
        free(self);
        close(fd);
        return NULL;
    }
    self->base.ops = &shm_stream_ops;
    self->fd = fd;
    self->ring_fd = ring_fd;
    self->connected = true;
    snprintf(self->base.peer, sizeof self->base.peer, "process %ld", (long)pid);
    return &self->base;
}
