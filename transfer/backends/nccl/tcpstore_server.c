#include "base/buf.h"
#include "base/check.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/tcp/tcp_stream.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PEERS   1024u
#define MAX_REQUEST (2 * TCPSTORE_MAX_VALUE)

typedef struct {
    char *key;
    size_t key_len;
    uint8_t *value;
    size_t len;
} entry_t;

typedef struct {
    byte_stream_t *stream;
    lk_buf_t in, out;
    size_t out_sent;
    bool validated;
} peer_t;

struct tcpstore_server {
    int listener;
    entry_t entries[TCPSTORE_MAX_KEYS];
    size_t n_entries;
    peer_t *peers[MAX_PEERS];
    size_t n_peers;
};

/* One request being read: left is what has come, `whole` says whether that was enough. */
typedef struct {
    const uint8_t *at;
    size_t left;
    bool whole, bad;
} cursor_t;

/* ---- reading a request ---- */

static const uint8_t *cut(cursor_t *c, uint64_t n)
{
    if (!c->whole || n > c->left) {
        c->whole = false;
        return NULL;
    }
    const uint8_t *p = c->at;
    c->at += n;
    c->left -= (size_t)n;
    return p;
}

static uint64_t cut_uint(cursor_t *c, size_t n)
{
    const uint8_t *p = cut(c, n);
    uint64_t x = 0;
    for (size_t i = 0; p != NULL && i < n; i++) {
        x |= (uint64_t)p[i] << (8 * i);
    }
    return x;
}

static const uint8_t *cut_text(cursor_t *c, size_t limit, size_t *len)
{
    uint64_t n = cut_uint(c, 8);
    if (n > limit) {
        c->bad = true;
        c->whole = false;
    }
    *len = (size_t)n;
    return cut(c, n);
}

/* ---- the map ---- */

static entry_t *find(const tcpstore_server_t *self, const void *key, size_t len)
{
    for (size_t i = 0; i < self->n_entries; i++) {
        const entry_t *e = &self->entries[i];
        if (e->key_len == len && memcmp(e->key, key, len) == 0) {
            return (entry_t *)e;
        }
    }
    return NULL;
}

static void entry_fini(entry_t *e)
{
    free(e->key);
    free(e->value);
}

static bool set(tcpstore_server_t *self, const void *key, size_t key_len, const void *value,
                size_t len)
{
    entry_t *e = find(self, key, key_len);
    uint8_t *copy = malloc(len + 1);
    if (copy == NULL) {
        return false;
    }
    if (len > 0) {
        memcpy(copy, value, len);
    }
    copy[len] = '\0';
    if (e == NULL) {
        char *name = self->n_entries < TCPSTORE_MAX_KEYS ? malloc(key_len + 1) : NULL;
        if (name == NULL) {
            free(copy);
            return false;
        }
        memcpy(name, key, key_len);
        e = &self->entries[self->n_entries++];
        *e = (entry_t){.key = name, .key_len = key_len};
    }
    free(e->value);
    e->value = copy;
    e->len = len;
    return true;
}

static bool add(tcpstore_server_t *self, const void *key, size_t key_len, int64_t delta,
                int64_t *out)
{
    const entry_t *e = find(self, key, key_len);
    int64_t before = e != NULL ? strtoll((const char *)e->value, NULL, 10) : 0;
    char text[24];
    if (__builtin_add_overflow(before, delta, out)) {
        return false;
    }
    snprintf(text, sizeof text, "%" PRId64, *out);
    return set(self, key, key_len, text, strlen(text));
}

static int64_t drop(tcpstore_server_t *self, const void *key, size_t key_len)
{
    entry_t *e = find(self, key, key_len);
    if (e == NULL) {
        return 0;
    }
    entry_fini(e);
    *e = self->entries[--self->n_entries];
    return 1;
}

/* ---- requests ---- */

static void answer(peer_t *peer, const void *bytes, size_t len)
{
    lk_buf_append(&peer->out, bytes, len);
}

static void answer_i64(peer_t *peer, int64_t x)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)((uint64_t)x >> (8 * i));
    }
    answer(peer, bytes, sizeof bytes);
}

/* Reads a list of keys; *all: every one is there. */
static void read_keys(const tcpstore_server_t *self, cursor_t *c, bool *all)
{
    uint64_t n = cut_uint(c, 8);
    c->bad = c->bad || n > TCPSTORE_MAX_KEYS;
    *all = true;
    for (uint64_t i = 0; i < n && !c->bad && c->whole; i++) {
        size_t len = 0;
        const uint8_t *key = cut_text(c, TCPSTORE_MAX_KEY, &len);
        *all = *all && key != NULL && find(self, key, len) != NULL;
    }
}

static bool serve_keys(tcpstore_server_t *self, peer_t *peer, tcpstore_op_t op, cursor_t *c)
{
    bool all;
    read_keys(self, c, &all);
    if (!c->whole || c->bad) {
        return false;
    }
    /* a WAIT for what isn't there stays in the buffer, unless it is taken back behind it */
    if (op == TCPSTORE_WAIT && !all) {
        if (c->left == 0 || c->at[0] != TCPSTORE_CANCEL_WAIT) {
            return false;
        }
        (void)cut(c, 1);
        answer(peer, "\1", 1);
        return true;
    }
    answer(peer, all ? "\0" : "\1", 1);
    return true;
}

static bool serve_key(tcpstore_server_t *self, peer_t *peer, tcpstore_op_t op, cursor_t *c)
{
    size_t len = 0, value_len = 0;
    const uint8_t *key = cut_text(c, TCPSTORE_MAX_KEY, &len), *value = NULL;
    int64_t x = 0;
    if (op == TCPSTORE_SET) {
        value = cut_text(c, TCPSTORE_MAX_VALUE, &value_len);
    } else if (op == TCPSTORE_ADD) {
        x = (int64_t)cut_uint(c, 8);
    }
    if (!c->whole || c->bad) {
        return false;
    }
    if (op == TCPSTORE_SET) {
        c->bad = !set(self, key, len, value, value_len);
    } else if (op == TCPSTORE_ADD) {
        c->bad = !add(self, key, len, x, &x);
        answer_i64(peer, x);
    } else if (op == TCPSTORE_DELETE_KEY) {
        answer_i64(peer, drop(self, key, len));
    } else {
        const entry_t *e = find(self, key, len);
        if (e == NULL) {
            return false; /* stays in the buffer until somebody sets it */
        }
        answer_i64(peer, (int64_t)e->len);
        answer(peer, e->value, e->len);
    }
    return !c->bad;
}

/* One request from the front of the buffer; false if it isn't whole yet, can't be served yet, or
 * is bad (c->bad). */
static bool serve_one(tcpstore_server_t *self, peer_t *peer, cursor_t *c)
{
    uint64_t op = cut_uint(c, 1);
    if (!c->whole) {
        return false;
    }
    if (peer->validated == (op == TCPSTORE_VALIDATE)) {
        c->bad = true;
        return false;
    }
    uint8_t nonce[4];
    const uint8_t *p;
    switch (op) {
    case TCPSTORE_VALIDATE:
        c->bad = cut_uint(c, 4) != TCPSTORE_MAGIC && c->whole;
        peer->validated = c->whole && !c->bad;
        return peer->validated;
    case TCPSTORE_PING:
        p = cut(c, 4);
        if (p == NULL) {
            return false;
        }
        memcpy(nonce, p, sizeof nonce);
        answer(peer, nonce, sizeof nonce);
        return true;
    case TCPSTORE_CANCEL_WAIT: /* of a wait that was answered meanwhile */
        answer(peer, "\1", 1);
        return true;
    case TCPSTORE_SET:
    case TCPSTORE_GET:
    case TCPSTORE_ADD:
    case TCPSTORE_DELETE_KEY:
        return serve_key(self, peer, (tcpstore_op_t)op, c);
    case TCPSTORE_CHECK:
    case TCPSTORE_WAIT:
        return serve_keys(self, peer, (tcpstore_op_t)op, c);
    default:
        c->bad = true;
        return false;
    }
}

/* ---- peers ---- */

static void peer_destroy(peer_t *peer)
{
    byte_stream_destroy(&peer->stream);
    lk_buf_fini(&peer->in);
    lk_buf_fini(&peer->out);
    free(peer);
}

/* Takes in what has come, as long as there is room. False: nothing more will come. */
static bool peer_read(peer_t *peer)
{
    enum { PIECE = 4096 };
    lk_error_t ignored;
    while (peer->in.len + PIECE <= MAX_REQUEST && lk_buf_reserve(&peer->in, PIECE)) {
        struct iovec iov = {peer->in.data + peer->in.len, PIECE};
        size_t moved = 0;
        lk_status_t st = peer->stream->ops->readv(peer->stream, &iov, 1, &moved, &ignored);
        if (st != LK_OK) {
            return st == LK_INPROGRESS;
        }
        peer->in.len += moved;
    }
    return !peer->in.failed;
}

static bool peer_write(peer_t *peer)
{
    lk_error_t ignored;
    if (peer->out.failed) {
        return false; /* asks without reading the answers: one of them is lost */
    }
    while (peer->out_sent < peer->out.len) {
        struct iovec iov = {peer->out.data + peer->out_sent, peer->out.len - peer->out_sent};
        size_t moved = 0;
        lk_status_t st = peer->stream->ops->writev(peer->stream, &iov, 1, &moved, &ignored);
        if (st != LK_OK) {
            return st == LK_INPROGRESS;
        }
        peer->out_sent += moved;
    }
    lk_buf_clear(&peer->out);
    peer->out_sent = 0;
    return true;
}

/* False: the connection is to be closed. *did: something was served. */
static bool peer_step(tcpstore_server_t *self, peer_t *peer, bool *did)
{
    bool open = peer_read(peer);
    size_t used = 0;
    for (;;) {
        cursor_t c = {peer->in.data + used, peer->in.len - used, true, false};
        bool served = serve_one(self, peer, &c);
        if (c.bad) {
            return false;
        }
        if (!served) {
            break;
        }
        *did = true;
        used = (size_t)(c.at - peer->in.data);
    }
    if (used > 0) {
        memmove(peer->in.data, peer->in.data + used, peer->in.len - used);
        peer->in.len -= used;
    }
    bool stuck = peer->in.len + 4096 > MAX_REQUEST; /* longer than any request can be */
    return peer_write(peer) && open && !stuck;
}

static bool accept_one(tcpstore_server_t *self)
{
    byte_stream_t *stream = self->n_peers < MAX_PEERS ? tcp_accept(self->listener) : NULL;
    if (stream == NULL) {
        return false;
    }
    peer_t *peer = calloc(1, sizeof *peer);
    if (peer == NULL) {
        byte_stream_destroy(&stream);
        return false;
    }
    peer->stream = stream;
    lk_buf_init(&peer->in, MAX_REQUEST);
    lk_buf_init(&peer->out, MAX_REQUEST);
    self->peers[self->n_peers++] = peer;
    return true;
}

tcpstore_server_t *tcpstore_server_new(int listener)
{
    tcpstore_server_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        close(listener);
        return NULL;
    }
    self->listener = listener;
    return self;
}

void tcpstore_server_destroy(tcpstore_server_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    tcpstore_server_t *self = *self_p;
    *self_p = NULL;
    for (size_t i = 0; i < self->n_peers; i++) {
        peer_destroy(self->peers[i]);
    }
    for (size_t i = 0; i < self->n_entries; i++) {
        entry_fini(&self->entries[i]);
    }
    close(self->listener);
    free(self);
}

void tcpstore_server_step(tcpstore_server_t *self)
{
    while (accept_one(self)) {
    }
    bool did = true;
    while (did) { /* what one peer sets, another may wait for */
        did = false;
        for (size_t i = 0; i < self->n_peers;) {
            if (peer_step(self, self->peers[i], &did)) {
                i++;
            } else {
                peer_destroy(self->peers[i]);
                self->peers[i] = self->peers[--self->n_peers];
            }
        }
    }
}

bool tcpstore_server_set(tcpstore_server_t *self, const char *key, const void *value, size_t len)
{
    return strlen(key) <= TCPSTORE_MAX_KEY && len <= TCPSTORE_MAX_VALUE &&
           set(self, key, strlen(key), value, len);
}

int64_t tcpstore_server_workers(const tcpstore_server_t *self)
{
    const entry_t *e = find(self, TCPSTORE_WORKERS_KEY, strlen(TCPSTORE_WORKERS_KEY));
    return e != NULL ? strtoll((const char *)e->value, NULL, 10) : 0;
}

size_t tcpstore_server_pollfds(const tcpstore_server_t *self, struct pollfd *fds, size_t room)
{
    for (size_t i = 0; i <= self->n_peers && i < room; i++) {
        if (i == self->n_peers) {
            fds[i] = (struct pollfd){.fd = self->listener, .events = POLLIN};
        } else {
            const peer_t *peer = self->peers[i];
            short events = peer->out.len > 0 ? POLLIN | POLLOUT : POLLIN;
            fds[i] = (struct pollfd){.fd = peer->stream->ops->fd(peer->stream), .events = events};
        }
    }
    return self->n_peers + 1;
}
