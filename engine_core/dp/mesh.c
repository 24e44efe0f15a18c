#include "engine_core/dp/mesh.h"
#include "base/check.h"
#include "base/env.h"
#include "base/log.h"
#include "engine_core/dp/mesh_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SCHEME  "unix:@" /* an abstract name: leaves no file behind */
#define BACKLOG 1024

/* ---- addresses and sockets ---- */

/* LK_ERR_INVALID unless text is "unix:@NAME". */
static lk_status_t parse_address(const char *text, struct sockaddr_un *out, socklen_t *len,
                                 lk_error_t *err)
{
    size_t n = strlen(text);
    size_t scheme = sizeof SCHEME - 1;
    if (n <= scheme || n - scheme > sizeof out->sun_path - 1 ||
        strncmp(text, SCHEME, scheme) != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "mesh address '%.120s': expected %sNAME", text,
                            SCHEME);
    }
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, text + scheme, n - scheme);
    *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n - scheme);
    return LK_OK;
}

/* The kernel says whose process the other end is; abstract names have no permissions. */
static bool same_user(int fd, uid_t *uid)
{
    struct ucred cred;
    socklen_t len = sizeof cred;
    *uid = (uid_t)-1;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0) {
        return false;
    }
    *uid = cred.uid;
    return cred.uid == geteuid();
}

static void fresh_address(uint32_t rank, char *out, size_t room)
{
    uint64_t a = lk_env_random_u64(lk_env_real()), b = lk_env_random_u64(lk_env_real());
    int n = snprintf(out, room, SCHEME "lockstep-mesh-%016llx%016llx-%u", (unsigned long long)a,
                     (unsigned long long)b, rank);
    CHECK(n > 0 && (size_t)n < room);
}

static lk_status_t listen_anew(mesh_t *self, lk_error_t *err)
{
    struct sockaddr_un name;
    socklen_t len;
    if (self->listen_fd >= 0) {
        close(self->listen_fd);
    }
    fresh_address(self->rank, self->address, sizeof self->address);
    lk_status_t status = parse_address(self->address, &name, &len, err);
    CHECK(status == LK_OK);
    self->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (self->listen_fd < 0 || bind(self->listen_fd, (struct sockaddr *)&name, len) != 0 ||
        listen(self->listen_fd, BACKLOG) != 0) {
        return lk_error_set(err, LK_ERR_IO, "mesh listener: %s", strerror(errno));
    }
    return LK_OK;
}

lk_status_t mesh_new(uint32_t rank, mesh_t **out, lk_error_t *err)
{
    mesh_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for the mesh");
    }
    self->rank = rank;
    self->listen_fd = -1;
    lk_status_t status = listen_anew(self, err);
    if (status < 0) {
        mesh_destroy(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

static void drop_peers(mesh_t *self)
{
    for (uint32_t r = 0; self->peers != NULL && r < self->size; r++) {
        mesh_conn_destroy(&self->peers[r].conn);
        free(self->peers[r].exchanges[0].data);
        free(self->peers[r].exchanges[1].data);
    }
    free(self->peers);
    free(self->members);
    self->peers = NULL;
    self->members = NULL;
    self->size = self->n = self->place = 0;
}

static void drop_pending(mesh_t *self)
{
    for (size_t i = 0; i < self->n_pending; i++) {
        mesh_conn_destroy(&self->pending[i]);
    }
    self->n_pending = 0;
}

void mesh_destroy(mesh_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    mesh_t *self = *self_p;
    drop_peers(self);
    drop_pending(self);
    if (self->listen_fd >= 0) {
        close(self->listen_fd);
    }
    free(self);
    *self_p = NULL;
}

const char *mesh_address(const mesh_t *self)
{
    return self->address;
}

/* ---- death ---- */

static void mark_dead(mesh_t *self, uint32_t rank, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void mark_dead(mesh_t *self, uint32_t rank, const char *fmt, ...)
{
    mesh_peer_t *peer = &self->peers[rank];
    if (peer->dead) {
        return;
    }
    peer->dead = true;
    peer->lost = rank;
    if (peer->conn != NULL) {
        shutdown(peer->conn->fd, SHUT_RDWR); /* it learns that we are through with it */
    }
    if (peer->conn != NULL && peer->conn->got_bye) { /* its own words explain its end of file */
        peer->lost = peer->conn->bye.lost;
        snprintf(peer->why, sizeof peer->why, "rank %u left the group: %s", rank,
                 peer->conn->bye.why);
        return;
    }
    int n = snprintf(peer->why, sizeof peer->why, "rank %u ", rank);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(peer->why + n, sizeof peer->why - (size_t)n, fmt, ap);
    va_end(ap);
}

lk_status_t mesh_peer_status(const mesh_t *self, uint32_t rank, lk_error_t *err)
{
    const mesh_peer_t *peer = &self->peers[rank];
    return peer->dead ? lk_error_set(err, LK_ERR_PEER, "%s", peer->why) : LK_OK;
}

/* The dead rank that tells most: the first that said no good-bye, or else the first. NULL: none. */
static const mesh_peer_t *first_dead(const mesh_t *self)
{
    const mesh_peer_t *found = NULL;
    for (uint32_t r = self->size; r-- > 0;) {
        const mesh_peer_t *peer = &self->peers[r];
        bool plain = peer->dead && peer->lost == (int64_t)r;
        if (peer->dead && (found == NULL || plain || found->lost != found - self->peers)) {
            found = peer;
        }
    }
    return found;
}

lk_status_t mesh_any_dead(const mesh_t *self, lk_error_t *err)
{
    const mesh_peer_t *dead = first_dead(self);
    return dead != NULL ? lk_error_set(err, LK_ERR_PEER, "%s", dead->why) : LK_OK;
}

int64_t mesh_lost(const mesh_t *self)
{
    const mesh_peer_t *dead = first_dead(self);
    return dead != NULL ? dead->lost : -1;
}

lk_status_t mesh_leave(mesh_t *self, int64_t lost, const char *why, lk_error_t *err)
{
    mesh_bye_t bye = {.lost = lost};
    snprintf(bye.why, sizeof bye.why, "%s", why);
    mesh_header_t head = mesh_header(self, FRAME_BYE, 0, 0, sizeof bye);
    for (uint32_t r = 0; r < self->size; r++) {
        mesh_conn_t *conn = self->peers[r].conn;
        if (conn != NULL && !self->peers[r].dead) {
            lk_error_t ignored;
            mesh_conn_cancel_exchange(conn);
            mesh_conn_queue(conn, &head, &bye);
            (void)!mesh_conn_flush(conn, &ignored); /* full or gone: it sees the end of file */
        }
    }
    drop_peers(self);
    drop_pending(self);
    self->joined = self->whole = false;
    self->vote.posted = self->ex.posted = false;
    return listen_anew(self, err);
}

void mesh_pump(mesh_t *self, uint32_t rank)
{
    mesh_conn_t *conn = self->peers[rank].conn;
    lk_error_t err;
    if (conn == NULL || self->peers[rank].dead) {
        return;
    }
    lk_status_t status;
    bool hello;
    do {
        hello = conn->got_hello;
        status = mesh_conn_read(self, conn, &err);
    } while (status == LK_OK && !hello && conn->got_hello);
    /* what it sent before it went is read first; only then does writing matter */
    if (status == LK_INPROGRESS) {
        status = mesh_conn_flush(conn, &err);
    }
    if (status < 0) {
        mark_dead(self, rank, "%s", err.text);
    }
}

/* ---- connecting ---- */

static void send_hello(mesh_t *self, mesh_conn_t *conn)
{
    mesh_hello_t hello = {self->rank, self->n};
    mesh_header_t head = mesh_header(self, FRAME_HELLO, 0, 0, sizeof hello);
    mesh_conn_queue(conn, &head, &hello);
}

/* A connection to a lower rank. Its queue may be full (EAGAIN): the next test tries again. */
static void try_connect(mesh_t *self, uint32_t rank)
{
    mesh_peer_t *peer = &self->peers[rank];
    struct sockaddr_un name;
    socklen_t len;
    lk_error_t err;
    uid_t uid;
    if (parse_address(peer->address, &name, &len, &err) != LK_OK) {
        mark_dead(self, rank, "has a bad address: %.100s", err.text);
        return;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        mark_dead(self, rank, "cannot be connected to: %s", strerror(errno));
        return;
    }
    if (connect(fd, (struct sockaddr *)&name, len) != 0) {
        if (errno != EAGAIN && errno != EINTR) {
            mark_dead(self, rank, "does not listen on the mesh: %s", strerror(errno));
        }
        close(fd);
        return;
    }
    if (!same_user(fd, &uid)) {
        mark_dead(self, rank, "belongs to another user (uid %u)", (unsigned)uid);
        close(fd);
        return;
    }
    peer->conn = mesh_conn_new(fd);
    peer->conn->rank = (int)rank;
    send_hello(self, peer->conn);
    mesh_pump(self, rank);
}

/* Takes over who is in the group; nothing is connected yet. */
static lk_status_t set_members(mesh_t *self, uint32_t n, const uint32_t *ranks, lk_error_t *err)
{
    CHECK(n >= 1 && n <= EP_MAX_RANKS);
    uint32_t size = 1 + (ranks != NULL ? ranks[n - 1] : n - 1);
    CHECK(self->rank < size && size <= EP_MAX_RANKS);
    mesh_peer_t *peers = calloc(size, sizeof *peers);
    uint32_t *members = calloc(n, sizeof *members);
    if (peers == NULL || members == NULL) {
        free(peers);
        free(members);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %u ranks", n);
    }
    drop_peers(self);
    self->peers = peers;
    self->members = members;
    self->size = size;
    self->n = n;
    for (uint32_t i = 0; i < n; i++) {
        members[i] = ranks != NULL ? ranks[i] : i;
        CHECK(i == 0 || members[i] > members[i - 1]);
        peers[members[i]].member = true;
        self->place = members[i] == self->rank ? i : self->place;
    }
    CHECK(peers[self->rank].member);
    return LK_OK;
}

lk_status_t mesh_connect_post(mesh_t *self, uint64_t group_epoch, uint32_t n, const uint32_t *ranks,
                              const char *const *addresses, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(set_members(self, n, ranks, err));
    self->epoch = group_epoch;
    self->joined = true;
    self->whole = false;
    memset(&self->vote, 0, sizeof self->vote);
    memset(&self->ex, 0, sizeof self->ex);
    for (uint32_t i = 0; i < self->place; i++) {
        mesh_peer_t *peer = &self->peers[self->members[i]];
        snprintf(peer->address, sizeof peer->address, "%s", addresses[i]);
        try_connect(self, self->members[i]);
    }
    return LK_OK;
}

static void forget_pending(mesh_t *self, size_t i)
{
    self->pending[i] = self->pending[--self->n_pending];
}

/* Who said hello becomes a peer, waits for its group, or is sent away. True: it left the list. */
static bool place_pending(mesh_t *self, size_t i)
{
    mesh_conn_t *conn = self->pending[i];
    if (!conn->got_hello || !self->joined || conn->epoch > self->epoch) {
        return false;
    }
    uint32_t rank = conn->hello.rank;
    forget_pending(self, i);
    if (conn->epoch < self->epoch || rank >= self->size || rank <= self->rank ||
        !self->peers[rank].member) {
        mesh_conn_destroy(&conn); /* an old group's, or one that should have waited for us */
        return true;
    }
    mesh_peer_t *peer = &self->peers[rank];
    if (peer->conn != NULL) {
        /* Whoever this is, the rank is here already, and its connection says when it goes. */
        LK_WARN("rank %u: a second connection as rank %u was closed", self->rank, rank);
        mesh_conn_destroy(&conn);
    } else if (conn->hello.size != self->n) {
        mark_dead(self, rank, "knows a group of %u ranks, rank %u one of %u", conn->hello.size,
                  self->rank, self->n);
        mesh_conn_destroy(&conn);
    } else {
        conn->rank = (int)rank;
        peer->conn = conn;
        send_hello(self, conn);
        mesh_pump(self, rank);
    }
    return true;
}

static void read_pending(mesh_t *self)
{
    for (size_t i = 0; i < self->n_pending;) {
        lk_error_t err;
        mesh_conn_t *conn = self->pending[i];
        if (!conn->got_hello && mesh_conn_read(self, conn, &err) < 0) {
            forget_pending(self, i);
            mesh_conn_destroy(&conn);
        } else if (!place_pending(self, i)) {
            i++;
        }
    }
}

static lk_status_t accept_all(mesh_t *self, lk_error_t *err)
{
    while (self->n_pending < MESH_MAX_PENDING) {
        uid_t uid;
        int fd = accept4(self->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) {
            continue;
        }
        if (fd < 0) {
            return errno == EAGAIN
                       ? LK_OK
                       : lk_error_set(err, LK_ERR_IO, "mesh listener: %s", strerror(errno));
        }
        if (same_user(fd, &uid)) {
            self->pending[self->n_pending++] = mesh_conn_new(fd);
        } else {
            close(fd);
        }
    }
    return LK_OK;
}

static bool is_unconnected(const mesh_t *self, uint32_t rank)
{
    const mesh_conn_t *conn = self->peers[rank].conn;
    return conn == NULL || !conn->got_hello;
}

/* Once all are here only ranks that already form the next group come, and strangers: they can wait
 * for a few turns, and a step of a small model polls often. */
#define POLLS_BETWEEN_LOOKS 32

lk_status_t mesh_poll(mesh_t *self, lk_error_t *err)
{
    if (!self->whole || ++self->passed >= POLLS_BETWEEN_LOOKS) {
        self->passed = 0;
        LK_RETURN_IF_ERROR(accept_all(self, err));
    }
    read_pending(self);
    for (uint32_t r = 0; r < self->size; r++) {
        bool peer = mesh_is_peer(self, r);
        if (peer && r < self->rank && self->peers[r].conn == NULL && !self->peers[r].dead) {
            try_connect(self, r);
        } else if (peer) {
            mesh_pump(self, r);
        }
    }
    return mesh_any_dead(self, err);
}

lk_status_t mesh_connect_test(mesh_t *self, lk_error_t *err)
{
    CHECKF(self->joined, "mesh_connect_post comes first");
    LK_RETURN_IF_ERROR(mesh_poll(self, err));
    for (uint32_t r = 0; r < self->size; r++) {
        if (!mesh_is_peer(self, r)) {
            continue;
        }
        const mesh_conn_t *conn = self->peers[r].conn;
        if (is_unconnected(self, r) || mesh_conn_has_output(conn)) {
            return LK_INPROGRESS;
        }
        if (conn->hello.rank != r || conn->hello.size != self->n || conn->epoch != self->epoch) {
            return lk_error_set(
                err, LK_ERR_PEER,
                "rank %u answers as rank %u of %u in group epoch %llu, expected %u in %llu", r,
                conn->hello.rank, conn->hello.size, (unsigned long long)conn->epoch, self->n,
                (unsigned long long)self->epoch);
        }
    }
    self->whole = true;
    return LK_OK;
}

/* ---- views ---- */

void mesh_list(const mesh_t *self, bool (*missing)(const mesh_t *self, uint32_t rank), char *out,
               size_t room)
{
    size_t n = 0;
    CHECK(room > 0);
    out[0] = '\0';
    for (uint32_t r = 0; r < self->size && n < room; r++) {
        if (mesh_is_peer(self, r) && missing(self, r)) {
            n += (size_t)snprintf(out + n, room - n, "%s%u", n > 0 ? ", " : "", r);
        }
    }
}

void mesh_missing(const mesh_t *self, char *out, size_t room)
{
    mesh_list(self, is_unconnected, out, room);
}

static size_t put_pollfd(struct pollfd *fds, size_t n, size_t room, int fd, short events)
{
    CHECKF(n < room, "room for %zu descriptors only", room);
    fds[n] = (struct pollfd){.fd = fd, .events = events};
    return n + 1;
}

size_t mesh_pollfds(const mesh_t *self, struct pollfd *fds, size_t room)
{
    size_t n = 0;
    if (self->n_pending < MESH_MAX_PENDING) {
        n = put_pollfd(fds, n, room, self->listen_fd, POLLIN);
    }
    for (size_t i = 0; i < self->n_pending; i++) {
        if (!self->pending[i]->got_hello) {
            n = put_pollfd(fds, n, room, self->pending[i]->fd, POLLIN);
        }
    }
    for (uint32_t r = 0; r < self->size; r++) {
        const mesh_conn_t *conn = self->peers[r].conn;
        if (conn != NULL && !self->peers[r].dead) {
            short out = mesh_conn_has_output(conn) ? POLLOUT : 0;
            n = put_pollfd(fds, n, room, conn->fd, (short)(POLLIN | out));
        }
    }
    return n;
}

void mesh_stats(const mesh_t *self, mesh_stats_t *out)
{
    *out = self->stats;
}
