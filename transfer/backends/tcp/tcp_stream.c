#include "transfer/backends/tcp/tcp_stream.h"
#include "base/check.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RETRY_NS (100 * LK_MS_NS)

/* A name look-up of the C library's own thread. It can outlive the stream that asked, and is then
 * kept on `orphans` until a later look-up finds it finished. */
typedef struct lookup {
    struct lookup *next;
    struct gaicb request;
    struct addrinfo hints;
    char host[256];
    char service[8];
} lookup_t;

typedef struct {
    byte_stream_t base;
    const lk_env_t *env; /* NULL: accepted */
    lookup_t *lookup;
    struct addrinfo *turn; /* address tried now, of lookup's list */
    uint64_t retry_at_ns;
    int fd;
    bool connected;
} tcp_stream_t;

/* Of all streams, which may be those of several threads: each has trainers of its own. */
static lookup_t *orphans;
static pthread_mutex_t orphans_mutex = PTHREAD_MUTEX_INITIALIZER;

static void lookup_free(lookup_t *self)
{
    if (self->request.ar_result != NULL) {
        freeaddrinfo(self->request.ar_result);
    }
    free(self);
}

static void lookup_drop(lookup_t *self)
{
    pthread_mutex_lock(&orphans_mutex);
    if (self != NULL) {
        gai_cancel(&self->request);
        self->next = orphans;
        orphans = self;
    }
    for (lookup_t **p = &orphans; *p != NULL;) {
        lookup_t *one = *p;
        if (gai_error(&one->request) == EAI_INPROGRESS) {
            p = &one->next;
        } else {
            *p = one->next;
            lookup_free(one);
        }
    }
    pthread_mutex_unlock(&orphans_mutex);
}

static lookup_t *lookup_new(const char *host, uint16_t port)
{
    lookup_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    snprintf(self->host, sizeof self->host, "%s", host);
    snprintf(self->service, sizeof self->service, "%u", port);
    self->hints.ai_socktype = SOCK_STREAM;
    /* an address needs no name server, and no thread */
    self->hints.ai_flags = AI_NUMERICSERV | AI_NUMERICHOST;
    if (getaddrinfo(self->host, self->service, &self->hints, &self->request.ar_result) == 0) {
        return self;
    }
    self->hints.ai_flags = AI_NUMERICSERV;
    self->request.ar_name = self->host;
    self->request.ar_service = self->service;
    self->request.ar_request = &self->hints;
    struct gaicb *list[1] = {&self->request};
    if (getaddrinfo_a(GAI_NOWAIT, list, 1, NULL) != 0) {
        free(self);
        return NULL;
    }
    return self;
}

static void tune(int fd)
{
    /* best effort: neither changes what is right, only what is quick */
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
}

/* The attempt failed: the next address, or all of them again a little later. */
static void try_later(tcp_stream_t *self, int why)
{
    snprintf(self->base.note, sizeof self->base.note, "%s", strerror(why));
    if (self->fd >= 0) {
        close(self->fd);
        self->fd = -1;
    }
    self->turn = self->turn->ai_next;
    if (self->turn == NULL) {
        self->turn = self->lookup->request.ar_result;
        self->retry_at_ns = lk_env_now_ns(self->env) + RETRY_NS;
    }
}

static lk_status_t resolve(tcp_stream_t *self, lk_error_t *err)
{
    int rc = gai_error(&self->lookup->request);
    if (rc == EAI_INPROGRESS) {
        snprintf(self->base.note, sizeof self->base.note, "resolving the name");
        return LK_INPROGRESS;
    }
    if (rc != 0 || self->lookup->request.ar_result == NULL) {
        return lk_error_set(err, LK_ERR_PEER, "cannot resolve '%s': %s", self->lookup->host,
                            gai_strerror(rc));
    }
    self->turn = self->lookup->request.ar_result;
    return LK_OK;
}

static void start_attempt(tcp_stream_t *self)
{
    const struct addrinfo *a = self->turn;
    self->fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (self->fd < 0) {
        try_later(self, errno);
        return;
    }
    tune(self->fd);
    if (connect(self->fd, a->ai_addr, a->ai_addrlen) == 0) {
        self->connected = true;
    } else if (errno != EINPROGRESS) {
        try_later(self, errno);
    }
}

static void finish_attempt(tcp_stream_t *self)
{
    struct pollfd p = {.fd = self->fd, .events = POLLOUT};
    if (poll(&p, 1, 0) <= 0) {
        return;
    }
    int why = 0;
    socklen_t len = sizeof why;
    if (getsockopt(self->fd, SOL_SOCKET, SO_ERROR, &why, &len) != 0) {
        why = errno;
    }
    if (why != 0) {
        try_later(self, why);
    } else {
        self->connected = true;
    }
}

static lk_status_t tcp_connect(byte_stream_t *base, lk_error_t *err)
{
    tcp_stream_t *self = (tcp_stream_t *)base;
    if (self->connected) {
        return LK_OK;
    }
    if (self->turn == NULL) {
        lk_status_t st = resolve(self, err);
        if (st != LK_OK) {
            return st;
        }
    }
    if (self->fd < 0 && lk_env_now_ns(self->env) >= self->retry_at_ns) {
        start_attempt(self);
    } else if (self->fd >= 0) {
        finish_attempt(self);
    }
    return self->connected ? LK_OK : LK_INPROGRESS;
}

static lk_status_t moved_or_error(const tcp_stream_t *self, ssize_t n, const char *what,
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

static lk_status_t tcp_readv(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                             lk_error_t *err)
{
    tcp_stream_t *self = (tcp_stream_t *)base;
    CHECK(self->connected && n <= BYTE_STREAM_IOV_MAX);
    return moved_or_error(self, readv(self->fd, iov, n), "read from", moved, err);
}

static lk_status_t tcp_writev(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                              lk_error_t *err)
{
    tcp_stream_t *self = (tcp_stream_t *)base;
    CHECK(self->connected && n <= BYTE_STREAM_IOV_MAX);
    struct msghdr msg = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n};
    return moved_or_error(self, sendmsg(self->fd, &msg, MSG_NOSIGNAL), "write to", moved, err);
}

static bool tcp_hung_up(byte_stream_t *base)
{
    tcp_stream_t *self = (tcp_stream_t *)base;
    if (!self->connected) {
        return false;
    }
    struct pollfd p = {.fd = self->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

static int tcp_fd(const byte_stream_t *base)
{
    return ((const tcp_stream_t *)base)->fd;
}

static void tcp_destroy(byte_stream_t *base)
{
    tcp_stream_t *self = (tcp_stream_t *)base;
    if (self->fd >= 0) {
        close(self->fd);
    }
    lookup_drop(self->lookup);
    free(self);
}

static const byte_stream_ops_t tcp_stream_ops = {
    .connect = tcp_connect,
    .readv = tcp_readv,
    .writev = tcp_writev,
    .hung_up = tcp_hung_up,
    .fd = tcp_fd,
    .destroy = tcp_destroy,
};

byte_stream_t *tcp_stream_dial(const char *host, uint16_t port, const lk_env_t *env)
{
    tcp_stream_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->base.ops = &tcp_stream_ops;
    self->env = env;
    self->fd = -1;
    snprintf(self->base.peer, sizeof self->base.peer, "%.100s:%u", host, port);
    self->lookup = lookup_new(host, port);
    if (self->lookup == NULL) {
        free(self);
        return NULL;
    }
    return &self->base;
}

byte_stream_t *tcp_stream_adopt(int fd)
{
    tcp_stream_t *self = calloc(1, sizeof *self);
    if (self == NULL || fcntl(fd, F_SETFL, O_NONBLOCK) != 0) {
        free(self);
        close(fd);
        return NULL;
    }
    self->base.ops = &tcp_stream_ops;
    self->fd = fd;
    self->connected = true;
    tune(fd);
    struct sockaddr_storage addr;
    socklen_t len = sizeof addr;
    char host[64] = "?", port[8] = "?";
    if (getpeername(fd, (struct sockaddr *)&addr, &len) == 0) {
        (void)getnameinfo((struct sockaddr *)&addr, len, host, sizeof host, port, sizeof port,
                          NI_NUMERICHOST | NI_NUMERICSERV); /* for texts only */
    }
    snprintf(self->base.peer, sizeof self->base.peer, "%s:%s", host, port);
    return &self->base;
}

lk_status_t tcp_listen(const char *host, uint16_t port, int backlog, int *fd_out,
                       uint16_t *port_out, lk_error_t *err)
{
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST | AI_PASSIVE};
    struct addrinfo *list = NULL;
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "cannot listen on '%s': %s", host,
                            gai_strerror(rc));
    }
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        goto err_list;
    }
    int one = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); /* bind tells if it matters */
    struct sockaddr_storage bound;
    socklen_t len = sizeof bound;
    if (bind(fd, list->ai_addr, list->ai_addrlen) != 0 || listen(fd, backlog) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &len) != 0) {
        goto err_socket;
    }
    *port_out = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
    *fd_out = fd;
    freeaddrinfo(list);
    return LK_OK;

err_socket:
    lk_error_set(err, LK_ERR_IO, "cannot listen on %s:%u: %s", host, port, strerror(errno));
    close(fd);
    freeaddrinfo(list);
    return LK_ERR_IO;
err_list:
    lk_error_set(err, LK_ERR_IO, "cannot open a socket for %s: %s", host, strerror(errno));
    freeaddrinfo(list);
    return LK_ERR_IO;
}

byte_stream_t *tcp_accept(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    return fd >= 0 ? tcp_stream_adopt(fd) : NULL;
}
