#include "base/buf.h"
#include "base/check.h"
#include "transfer/backends/nccl/tcpstore.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RETRY_NS (200 * LK_MS_NS)

/* phase, how it reads after "waiting for the store at HOST:PORT to" */
#define PHASE_TABLE(X)                                                                             \
    X(CONNECT, "accept a connection")                                                              \
    X(PING, "answer the ping")                                                                     \
    X(ADD, "count this worker")                                                                    \
    X(WAIT, "have the id (the trainer sets it once all workers have joined)")                      \
    X(GET, "send the id")                                                                          \
    X(DONE, "do nothing more")

typedef enum {
#define X(name, text) PHASE_##name,
    PHASE_TABLE(X)
#undef X
} phase_t;

static const char *const phase_texts[] = {
#define X(name, text) text,
    PHASE_TABLE(X)
#undef X
};

struct tcpstore_client {
    tcpstore_dialer_t dialer;
    const lk_env_t *env;
    uint64_t timeout_ns, deadline_ns, retry_at_ns;
    uint32_t nonce;
    byte_stream_t *stream; /* NULL: dial at retry_at_ns */
    phase_t phase;
    lk_buf_t out;
    size_t out_sent;
    uint8_t in[8 + TCPSTORE_MAX_VALUE];
    size_t in_len;
    int64_t workers;
    char peer[128], note[256];
    bool failed;
    bool alien; /* somebody answers who is no store */
};

static void put_u32(lk_buf_t *buf, uint32_t x)
{
    uint8_t bytes[4];
    for (int i = 0; i < 4; i++) {
        bytes[i] = (uint8_t)(x >> (8 * i));
    }
    lk_buf_append(buf, bytes, sizeof bytes);
}

static void put_u64(lk_buf_t *buf, uint64_t x)
{
    put_u32(buf, (uint32_t)x);
    put_u32(buf, (uint32_t)(x >> 32));
}

static void put_op(lk_buf_t *buf, tcpstore_op_t op)
{
    uint8_t byte = (uint8_t)op;
    lk_buf_append(buf, &byte, 1);
}

static void put_key(lk_buf_t *buf, const char *key)
{
    put_u64(buf, strlen(key));
    lk_buf_str(buf, key);
}

static uint64_t get_uint(const uint8_t *bytes, size_t n)
{
    uint64_t x = 0;
    for (size_t i = 0; i < n; i++) {
        x |= (uint64_t)bytes[i] << (8 * i);
    }
    return x;
}

tcpstore_client_t *tcpstore_client_new(tcpstore_dialer_t dialer, const lk_env_t *env,
                                       uint64_t timeout_ns, uint32_t nonce)
{
    tcpstore_client_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->dialer = dialer;
    self->env = env;
    self->timeout_ns = timeout_ns;
    self->deadline_ns = lk_env_now_ns(env) + timeout_ns;
    self->nonce = nonce;
    snprintf(self->peer, sizeof self->peer, "the store");
    lk_buf_init(&self->out, 4096);
    return self;
}

void tcpstore_client_destroy(tcpstore_client_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    tcpstore_client_t *self = *self_p;
    *self_p = NULL;
    byte_stream_destroy(&self->stream);
    lk_buf_fini(&self->out);
    free(self);
}

/* ---- the sequence ---- */

static void enter(tcpstore_client_t *self, phase_t phase)
{
    self->phase = phase;
    self->in_len = 0;
    switch (phase) {
    case PHASE_PING:
        put_op(&self->out, TCPSTORE_VALIDATE);
        put_u32(&self->out, TCPSTORE_MAGIC);
        put_op(&self->out, TCPSTORE_PING);
        put_u32(&self->out, self->nonce);
        break;
    case PHASE_ADD:
        put_op(&self->out, TCPSTORE_ADD);
        put_key(&self->out, TCPSTORE_WORKERS_KEY);
        put_u64(&self->out, 1);
        break;
    case PHASE_WAIT:
        put_op(&self->out, TCPSTORE_WAIT);
        put_u64(&self->out, 1);
        put_key(&self->out, TCPSTORE_ID_KEY);
        break;
    case PHASE_GET:
        put_op(&self->out, TCPSTORE_GET);
        put_key(&self->out, TCPSTORE_ID_KEY);
        break;
    case PHASE_CONNECT:
    case PHASE_DONE:
        break;
    }
}

/* How many bytes of answer the phase waits for, as far as is known. */
static lk_status_t wanted(const tcpstore_client_t *self, size_t *out, lk_error_t *err)
{
    static const size_t fixed[] = {
        [PHASE_PING] = 4, [PHASE_ADD] = 8, [PHASE_WAIT] = 1, [PHASE_GET] = 8, [PHASE_DONE] = 0};
    *out = fixed[self->phase];
    if (self->phase == PHASE_GET && self->in_len >= 8) {
        uint64_t len = get_uint(self->in, 8);
        if (len > TCPSTORE_MAX_VALUE) {
            return lk_error_set(err, LK_ERR_PEER, "a value of %" PRIu64 " bytes is no id", len);
        }
        *out = 8 + (size_t)len;
    }
    return LK_OK;
}

/* A whole answer is there. */
static lk_status_t take_answer(tcpstore_client_t *self, uint8_t id[NCCL_ID_BYTES], lk_error_t *err)
{
    switch (self->phase) {
    case PHASE_PING:
        if (get_uint(self->in, 4) != self->nonce) {
            self->alien = true;
            return lk_error_set(err, LK_ERR_PEER,
                                "the answer to the ping is not what was sent; is this a TCPStore?");
        }
        enter(self, PHASE_ADD);
        return LK_OK;
    case PHASE_ADD:
        self->workers = (int64_t)get_uint(self->in, 8);
        if (self->workers < 1) {
            return lk_error_set(err, LK_ERR_PEER, "the store counts %" PRId64 " workers",
                                self->workers);
        }
        enter(self, PHASE_WAIT);
        return LK_OK;
    case PHASE_WAIT:
        if (self->in[0] != 0) {
            return lk_error_set(err, LK_ERR_PEER, "the store canceled the wait (answer %u)",
                                self->in[0]);
        }
        enter(self, PHASE_GET);
        return LK_OK;
    case PHASE_GET:
        LK_RETURN_IF_ERROR(pickle_unique_id(self->in + 8, self->in_len - 8, id, err));
        enter(self, PHASE_DONE);
        return LK_OK;
    case PHASE_CONNECT:
    case PHASE_DONE:
        break;
    }
    CHECKF(false, "no answer is due in phase %d", (int)self->phase);
}

static lk_status_t flush(tcpstore_client_t *self, lk_error_t *err)
{
    if (self->out.failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a request");
    }
    while (self->out_sent < self->out.len) {
        struct iovec iov = {self->out.data + self->out_sent, self->out.len - self->out_sent};
        size_t moved = 0;
        lk_status_t st = self->stream->ops->writev(self->stream, &iov, 1, &moved, err);
        if (st != LK_OK) {
            return st;
        }
        self->out_sent += moved;
    }
    lk_buf_clear(&self->out);
    self->out_sent = 0;
    return LK_OK;
}

/* Goes on until it has to wait. */
static lk_status_t converse(tcpstore_client_t *self, uint8_t id[NCCL_ID_BYTES], lk_error_t *err)
{
    if (self->phase == PHASE_CONNECT) {
        lk_status_t st = self->stream->ops->connect(self->stream, err);
        if (st != LK_OK) {
            return st;
        }
        enter(self, PHASE_PING);
    }
    while (self->phase != PHASE_DONE) {
        lk_status_t st = flush(self, err);
        size_t want = 0;
        while (st == LK_OK) {
            LK_RETURN_IF_ERROR(wanted(self, &want, err));
            if (self->in_len == want) {
                break;
            }
            /* no further than this answer: the next one is asked for later */
            struct iovec iov = {self->in + self->in_len, want - self->in_len};
            size_t moved = 0;
            st = self->stream->ops->readv(self->stream, &iov, 1, &moved, err);
            self->in_len += st == LK_OK ? moved : 0;
        }
        if (st != LK_OK) {
            return st;
        }
        LK_RETURN_IF_ERROR(take_answer(self, id, err));
    }
    return LK_OK;
}

static void hang_up(tcpstore_client_t *self)
{
    byte_stream_destroy(&self->stream);
    lk_buf_clear(&self->out);
    self->out_sent = 0;
    enter(self, PHASE_CONNECT);
    self->retry_at_ns = lk_env_now_ns(self->env) + RETRY_NS;
}

static lk_status_t fail(tcpstore_client_t *self, lk_error_t *err)
{
    self->failed = true;
    byte_stream_destroy(&self->stream);
    return lk_error_prefix(err, "rendezvous over the store at %s", self->peer);
}

lk_status_t tcpstore_client_step(tcpstore_client_t *self, uint8_t id[NCCL_ID_BYTES],
                                 lk_error_t *err)
{
    CHECK(!self->failed && self->phase != PHASE_DONE);
    uint64_t now = lk_env_now_ns(self->env);
    lk_status_t st = LK_INPROGRESS;
    if (self->stream == NULL && now >= self->retry_at_ns) {
        self->stream = self->dialer.dial(self->dialer.ctx);
        if (self->stream == NULL) {
            lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a connection");
            return fail(self, err);
        }
        snprintf(self->peer, sizeof self->peer, "%s", self->stream->peer);
    }
    if (self->stream != NULL) {
        st = converse(self, id, err);
    }
    if (st == LK_OK) {
        byte_stream_destroy(&self->stream);
        return LK_OK;
    }
    /* Until the store has counted this worker, a broken connection may be one to a store that is
     * just going or coming. Later, another attempt would be counted twice. */
    if (st == LK_ERR_PEER && self->phase <= PHASE_PING && !self->alien) {
        snprintf(self->note, sizeof self->note, "%.200s", err->text);
        hang_up(self);
        st = LK_INPROGRESS;
    }
    if (st == LK_INPROGRESS && now >= self->deadline_ns) {
        char what[512];
        tcpstore_client_waits_for(self, what, sizeof what);
        st = lk_error_set(err, LK_ERR_TIMEOUT, "waited %.1f s for %s",
                          (double)self->timeout_ns / 1e9, what);
    }
    return st == LK_INPROGRESS ? st : fail(self, err);
}

void tcpstore_client_waits_for(const tcpstore_client_t *self, char *out, size_t room)
{
    const char *note =
        self->stream != NULL && self->stream->note[0] != '\0' && self->phase == PHASE_CONNECT
            ? self->stream->note
            : self->note;
    bool early = self->phase <= PHASE_PING && note[0] != '\0';
    char counted[64] = "";
    if (self->workers > 0) {
        snprintf(counted, sizeof counted, "; it had counted %" PRId64 " with this one",
                 self->workers);
    }
    snprintf(out, room, "%s to %s%s%s%s%s", self->peer, phase_texts[self->phase], counted,
             early ? " (last: " : "", early ? note : "", early ? ")" : "");
}

int64_t tcpstore_client_workers(const tcpstore_client_t *self)
{
    return self->workers;
}

size_t tcpstore_client_pollfds(const tcpstore_client_t *self, struct pollfd *fds, size_t room)
{
    int fd = self->stream != NULL ? self->stream->ops->fd(self->stream) : -1;
    if (fd < 0 || room == 0) {
        return 0;
    }
    bool out = self->phase == PHASE_CONNECT || self->out_sent < self->out.len;
    fds[0] = (struct pollfd){.fd = fd, .events = out ? POLLIN | POLLOUT : POLLIN};
    return 1;
}
