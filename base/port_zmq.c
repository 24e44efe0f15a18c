/* The ZeroMQ ports; the only file that includes it. libzmq itself rather than CZMQ's zsock: CZMQ's
 * context is one per process image and does not survive fork, and its atexit handler may wait. */
#include "base/check.h"
#include "base/env.h"
#include "base/port.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#define LINGER_MS        500 /* for what is still queued at the end: a death notice, a last reply */
#define PUB_HIGH_WATER   1000 /* messages per slow subscriber; more are dropped */
#define RECONNECT_MS     20
#define RECONNECT_MAX_MS 1000

typedef struct {
    lk_port_t base;
    port_kind_t kind;
    void *socket;
    pid_t pid;     /* of the process that opened it */
    int poll_fd;   /* epoll over ZMQ_FD and ready_fd; -1: this kind receives nothing */
    int ready_fd;  /* eventfd, readable unless the last recv found nothing */
    bool ready;    /* ready_fd is readable */
    void *monitor; /* PAIR that tells of lost connections; NULL: nobody has asked */
    uint64_t losses;
    char address[256];
} port_zmq_t;

typedef struct {
    size_t n;
    zmq_msg_t parts[PORT_MAX_FRAMES];
} parts_t;

/* ---- the context: one per process, from the first port to the last ---- */

static struct {
    pthread_mutex_t lock;
    void *ctx;
    pid_t pid; /* a forked child must not use its parent's */
    unsigned users;
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *context_acquire(void)
{
    pthread_mutex_lock(&shared.lock);
    if (shared.pid != getpid()) {
        shared.ctx = NULL; /* the parent's, whose threads do not exist here: forgotten */
        shared.users = 0;
        shared.pid = getpid();
    }
    if (shared.ctx == NULL) {
        shared.ctx = zmq_ctx_new();
    }
    if (shared.ctx != NULL) {
        shared.users++;
    }
    void *ctx = shared.ctx;
    pthread_mutex_unlock(&shared.lock);
    return ctx;
}

/* The last one out waits until what is queued is sent, LINGER_MS at most: exit would drop it. */
static void context_release(void)
{
    void *ctx = NULL;
    pthread_mutex_lock(&shared.lock);
    CHECK(shared.users > 0);
    if (--shared.users == 0) {
        ctx = shared.ctx;
        shared.ctx = NULL;
    }
    pthread_mutex_unlock(&shared.lock);
    while (ctx != NULL && zmq_ctx_term(ctx) != 0 && errno == EINTR) {
    }
}

/* ---- operations ---- */

static port_zmq_t *self_of(lk_port_t *port)
{
    return (port_zmq_t *)port;
}

/* ZMQ_FD tells of an edge once, and any call on the socket may swallow it. ready_fd makes a level
 * of it: readable from the first message on until a recv found nothing. */
static void set_ready(port_zmq_t *self, bool ready)
{
    uint64_t value = 1;
    if (self->poll_fd >= 0 && self->ready != ready) {
        ssize_t n = ready ? write(self->ready_fd, &value, sizeof value)
                          : read(self->ready_fd, &value, sizeof value);
        CHECK(n == (ssize_t)sizeof value);
        self->ready = ready;
    }
}

static void note_input(port_zmq_t *self)
{
    int events = 0;
    size_t len = sizeof events;
    if (self->poll_fd >= 0 && !self->ready &&
        zmq_getsockopt(self->socket, ZMQ_EVENTS, &events, &len) == 0 && (events & ZMQ_POLLIN)) {
        set_ready(self, true);
    }
}

static lk_status_t send_part(port_zmq_t *self, const void *data, size_t len, int flags,
                             lk_error_t *err)
{
    int rc;
    do {
        rc = zmq_send(self->socket, data, len, flags | ZMQ_DONTWAIT);
    } while (rc < 0 && errno == EINTR);
    if (rc >= 0) {
        return LK_OK;
    }
    if (errno == EAGAIN || errno == EHOSTUNREACH) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s: %s", self->address,
                            errno == EAGAIN ? "no peer takes the message now"
                                            : "no such peer is connected");
    }
    return lk_error_set(err, LK_ERR_IO, "%s: send: %s", self->address, zmq_strerror(errno));
}

static lk_status_t zmq_port_send(lk_port_t *port, const port_peer_t *peer,
                                 const port_frame_t *frames, size_t n, lk_error_t *err)
{
    port_zmq_t *self = self_of(port);
    lk_status_t status = LK_OK;
    CHECK(n > 0 && n <= PORT_MAX_FRAMES);
    CHECK(self->kind != PORT_PULL && self->kind != PORT_SUB);
    CHECK(self->kind != PORT_ROUTER || peer != NULL);
    for (size_t i = 0; i < n; i++) {
        if (frames[i].len > PORT_MAX_MESSAGE) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "%s: frame %zu of %zu bytes", self->address,
                                i, frames[i].len);
        }
    }
    if (self->kind == PORT_ROUTER) {
        status = send_part(self, peer->id, peer->len, ZMQ_SNDMORE, err);
    }
    /* only a message's first part can be refused, so a message goes whole or not at all */
    for (size_t i = 0; status == LK_OK && i < n; i++) {
        status = send_part(self, frames[i].data, frames[i].len, i + 1 < n ? ZMQ_SNDMORE : 0, err);
    }
    note_input(self);
    return status;
}

static int recv_part(port_zmq_t *self, zmq_msg_t *part)
{
    int rc;
    do {
        rc = zmq_msg_recv(part, self->socket, ZMQ_DONTWAIT);
    } while (rc < 0 && errno == EINTR);
    return rc;
}

static void parts_free(parts_t *parts)
{
    for (size_t i = 0; i < parts->n; i++) {
        zmq_msg_close(&parts->parts[i]);
    }
    free(parts);
}

static lk_status_t recv_error(port_zmq_t *self, lk_error_t *err)
{
    if (errno == EAGAIN) {
        set_ready(self, false);
        return LK_INPROGRESS;
    }
    return lk_error_set(err, LK_ERR_IO, "%s: recv: %s", self->address, zmq_strerror(errno));
}

/* The rest of a message whose part `part` was received last. Returns how many parts that were. */
static size_t skip_rest(port_zmq_t *self, zmq_msg_t *part)
{
    size_t skipped = 0;
    while (zmq_msg_more(part) && recv_part(self, part) >= 0) {
        skipped++;
    }
    return skipped;
}

/* The identity part that a ROUTER puts first. */
static lk_status_t recv_peer(port_zmq_t *self, port_peer_t *out, lk_error_t *err)
{
    zmq_msg_t part;
    lk_status_t status = LK_OK;
    zmq_msg_init(&part);
    if (recv_part(self, &part) < 0) {
        status = recv_error(self, err);
    } else if (zmq_msg_size(&part) > PORT_MAX_PEER || !zmq_msg_more(&part)) {
        status = lk_error_set(err, LK_ERR_INVALID, "%s: peer identity of %zu bytes", self->address,
                              zmq_msg_size(&part));
        skip_rest(self, &part);
    } else {
        out->len = zmq_msg_size(&part);
        memcpy(out->id, zmq_msg_data(&part), out->len);
    }
    zmq_msg_close(&part);
    return status;
}

static lk_status_t recv_frames(port_zmq_t *self, parts_t *parts, lk_error_t *err)
{
    for (;;) {
        zmq_msg_t *part = &parts->parts[parts->n];
        zmq_msg_init(part);
        if (recv_part(self, part) < 0) {
            int saved = errno;
            zmq_msg_close(part);
            errno = saved;
            return recv_error(self, err);
        }
        parts->n++;
        if (!zmq_msg_more(part)) {
            return LK_OK;
        }
        if (parts->n == PORT_MAX_FRAMES) {
            size_t more = skip_rest(self, part);
            return lk_error_set(err, LK_ERR_INVALID, "%s: message of %zu frames, at most %d",
                                self->address, PORT_MAX_FRAMES + more, PORT_MAX_FRAMES);
        }
    }
}

static lk_status_t zmq_port_recv(lk_port_t *port, port_msg_t *out, lk_error_t *err)
{
    port_zmq_t *self = self_of(port);
    port_msg_t msg = {0};
    CHECK(self->poll_fd >= 0);
    if (self->kind == PORT_ROUTER) {
        lk_status_t status = recv_peer(self, &msg.peer, err);
        if (status != LK_OK) {
            return status;
        }
    }
    parts_t *parts = malloc(sizeof *parts);
    CHECKF(parts != NULL, "out of memory");
    parts->n = 0;
    lk_status_t status = recv_frames(self, parts, err);
    if (status != LK_OK) {
        parts_free(parts);
        return status;
    }
    msg.n_frames = parts->n;
    msg.owned = parts;
    for (size_t i = 0; i < parts->n; i++) {
        msg.frames[i].data = zmq_msg_data(&parts->parts[i]);
        msg.frames[i].len = zmq_msg_size(&parts->parts[i]);
    }
    set_ready(self, true);
    *out = msg;
    return LK_OK;
}

static void zmq_port_msg_fini(port_msg_t *msg)
{
    if (msg != NULL && msg->owned != NULL) {
        parts_free(msg->owned);
        memset(msg, 0, sizeof *msg);
    }
}

static int zmq_port_fd(lk_port_t *port)
{
    return self_of(port)->poll_fd;
}

static const char *zmq_port_address(lk_port_t *port)
{
    return self_of(port)->address;
}

static void zmq_port_destroy(lk_port_t *port)
{
    port_zmq_t *self = self_of(port);
    if (self->poll_fd >= 0) {
        close(self->poll_fd);
        close(self->ready_fd);
    }
    if (self->pid == getpid()) { /* a forked child has no I/O thread to close it with */
        if (self->monitor != NULL) {
            zmq_close(self->monitor);
        }
        if (self->socket != NULL) {
            zmq_close(self->socket);
        }
        context_release();
    }
    free(self);
}

static bool open_monitor(port_zmq_t *self)
{
    char name[64];
    snprintf(name, sizeof name, "inproc://losses-of-%p", (void *)self);
    if (zmq_socket_monitor(self->socket, name, ZMQ_EVENT_DISCONNECTED) != 0) {
        return false;
    }
    self->monitor = zmq_socket(shared.ctx, ZMQ_PAIR);
    if (self->monitor != NULL && zmq_connect(self->monitor, name) != 0) {
        zmq_close(self->monitor);
        self->monitor = NULL;
    }
    return self->monitor != NULL;
}

/* An event is two frames: what, and at which address. */
static uint64_t zmq_port_losses(lk_port_t *port)
{
    port_zmq_t *self = self_of(port);
    char frame[512];
    if (self->pid != getpid() || (self->monitor == NULL && !open_monitor(self))) {
        return 0;
    }
    while (zmq_recv(self->monitor, frame, sizeof frame, ZMQ_DONTWAIT) >= 0) {
        self->losses++;
        if (zmq_recv(self->monitor, frame, sizeof frame, ZMQ_DONTWAIT) < 0) {
            break;
        }
    }
    return self->losses;
}

static const port_ops_t zmq_ops = {zmq_port_send,  zmq_port_recv,    zmq_port_msg_fini,
                                   zmq_port_fd,    zmq_port_address, zmq_port_destroy,
                                   zmq_port_losses};

/* ---- opening ---- */

static bool set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

static bool set_options(port_zmq_t *self, bool bind, const char *address,
                        const port_peer_t *identity)
{
    void *s = self->socket;
    int high_water = self->kind == PORT_PUB ? PUB_HIGH_WATER : 0;
    int64_t max_size = (int64_t)PORT_MAX_MESSAGE;
    bool ok = set_int(s, ZMQ_LINGER, LINGER_MS) && set_int(s, ZMQ_SNDHWM, high_water) &&
              set_int(s, ZMQ_RCVHWM, high_water) && set_int(s, ZMQ_RECONNECT_IVL, RECONNECT_MS) &&
              set_int(s, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS) &&
              zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &max_size, sizeof max_size) == 0;
    if (self->kind == PORT_ROUTER) {
        /* a peer that reconnects under its name takes over from its dead connection */
        ok = ok && set_int(s, ZMQ_ROUTER_MANDATORY, 1) && set_int(s, ZMQ_ROUTER_HANDOVER, 1);
    }
    if (self->kind == PORT_SUB) {
        ok = ok && zmq_setsockopt(s, ZMQ_SUBSCRIBE, "", 0) == 0;
    }
    if (identity != NULL) {
        ok = ok && zmq_setsockopt(s, ZMQ_ROUTING_ID, identity->id, identity->len) == 0;
    }
    if (bind && strncmp(address, "ipc://", 6) == 0) {
        /* abstract names have no file permissions: the kernel tells who connects */
        uid_t uid = geteuid();
        ok = ok && zmq_setsockopt(s, ZMQ_IPC_FILTER_UID, &uid, sizeof uid) == 0;
    }
    return ok;
}

static lk_status_t attach(port_zmq_t *self, bool bind, const char *address, lk_error_t *err)
{
    int rc = bind ? zmq_bind(self->socket, address) : zmq_connect(self->socket, address);
    if (rc != 0) {
        bool bad = errno == EINVAL || errno == EPROTONOSUPPORT || errno == ENOCOMPATPROTO;
        return lk_error_set(err, bad ? LK_ERR_INVALID : LK_ERR_IO, "cannot %s %s: %s",
                            bind ? "bind" : "connect to", address, zmq_strerror(errno));
    }
    size_t len = sizeof self->address;
    if (bind && zmq_getsockopt(self->socket, ZMQ_LAST_ENDPOINT, self->address, &len) != 0) {
        return lk_error_set(err, LK_ERR_IO, "%s: no bound address: %s", address,
                            zmq_strerror(errno));
    }
    return LK_OK;
}

static bool open_poll_fd(port_zmq_t *self)
{
    int zmq_fd = -1;
    size_t len = sizeof zmq_fd;
    struct epoll_event event = {.events = EPOLLIN};
    int poll_fd = epoll_create1(EPOLL_CLOEXEC);
    int ready_fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (poll_fd < 0 || ready_fd < 0 || zmq_getsockopt(self->socket, ZMQ_FD, &zmq_fd, &len) != 0 ||
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, zmq_fd, &event) != 0 ||
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, ready_fd, &event) != 0) {
        close(poll_fd);
        close(ready_fd);
        return false;
    }
    self->poll_fd = poll_fd;
    self->ready_fd = ready_fd;
    self->ready = true;
    return true;
}

static const int zmq_kinds[] = {
    [PORT_ROUTER] = ZMQ_ROUTER, [PORT_DEALER] = ZMQ_DEALER, [PORT_PUSH] = ZMQ_PUSH,
    [PORT_PULL] = ZMQ_PULL,     [PORT_PUB] = ZMQ_PUB,       [PORT_SUB] = ZMQ_SUB,
};

lk_status_t port_zmq_open(port_kind_t kind, bool bind, const char *address,
                          const port_peer_t *identity, lk_port_t **out, lk_error_t *err)
{
    CHECK((size_t)kind < LK_ARRAY_LEN(zmq_kinds));
    port_zmq_t *self = NULL;
    lk_status_t status;
    LK_RETURN_IF_ERROR(port_check_open(address, identity, err));
    self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for a port", address);
    }
    self->base.ops = &zmq_ops;
    self->kind = kind;
    self->pid = getpid();
    self->poll_fd = -1;
    snprintf(self->address, sizeof self->address, "%s", address);
    void *ctx = context_acquire();
    if (ctx == NULL) {
        free(self);
        return lk_error_set(err, LK_ERR_IO, "no ZeroMQ context: %s", zmq_strerror(errno));
    }
    self->socket = zmq_socket(ctx, zmq_kinds[kind]);
    if (self->socket == NULL || !set_options(self, bind, address, identity) ||
        (kind != PORT_PUSH && kind != PORT_PUB && !open_poll_fd(self))) {
        status = lk_error_set(err, LK_ERR_IO, "%s: cannot make a socket: %s", address,
                              zmq_strerror(errno));
        goto err_destroy;
    }
    status = attach(self, bind, address, err);
    if (status != LK_OK) {
        goto err_destroy;
    }
    *out = &self->base;
    return LK_OK;

err_destroy:
    zmq_port_destroy(&self->base);
    return status;
}

void port_ipc_address(const char *what, char *out, size_t room)
{
    uint8_t secret[16];
    char hex[33];
    const lk_env_t *env = lk_env_real();
    env->random(env->ctx, secret, sizeof secret);
    for (size_t i = 0; i < sizeof secret; i++) {
        snprintf(hex + 2 * i, 3, "%02x", secret[i]);
    }
    int n = snprintf(out, room, "ipc://@lockstep-%s-%s", hex, what);
    CHECKF(n > 0 && (size_t)n < room && n < PORT_MAX_IPC, "address for %s", what);
}
