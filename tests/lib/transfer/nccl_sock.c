#include "tests/lib/transfer/nccl_sock.h"
#include "base/check.h"
#include "base/env.h"
#include "transfer/device/device_host.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define WORLD_MAX 16u

/* What a rank says when its stream has come to a collective; the first one says who it is. */
typedef struct {
    uint32_t kind, rank;
    uint64_t n;
    float value;
} token_t;
enum { HELLO = 1, BROADCAST, SUM };

typedef struct {
    int fd;
    token_t token; /* as far as it was read */
    size_t got;    /* bytes of it */
    uint64_t sent; /* bytes of the collective under way */
} peer_t;

struct nccl_comm {
    device_t *device;
    uint32_t world, rank, refs;
    bool up, aborted, said;
    int listener; /* rank 0 */
    struct sockaddr_un name;
    socklen_t name_len;
    peer_t peers[WORLD_MAX]; /* rank 0: of each rank; else [0]: rank 0's */
    uint64_t read;           /* bytes of the collective under way; not rank 0 */
    bool token_sent;
};

typedef struct {
    nccl_comm_t *comm;
    token_t token;
    uint8_t *buffer; /* BROADCAST: in place; SUM: where the sum goes */
    const float *from;
} call_t;

static lk_status_t sock_load(const char *name, const nccl_library_t **out, lk_error_t *err)
{
    static const nccl_library_t library = {"/lib/fake/libnccl.so.2", "2.99.2"};
    *out = &library;
    return LK_OK;
}

static lk_status_t sock_unique_id(const nccl_library_t *library, uint8_t id[NCCL_ID_BYTES],
                                  lk_error_t *err)
{
    const lk_env_t *env = lk_env_real();
    env->random(env->ctx, id, NCCL_ID_BYTES);
    return LK_OK;
}

static void set_name(nccl_comm_t *self, const uint8_t *id)
{
    self->name.sun_family = AF_UNIX;
    int n = snprintf(self->name.sun_path + 1, sizeof self->name.sun_path - 1, "lockstep-nccl-");
    for (int i = 0; i < 16; i++) {
        n += snprintf(self->name.sun_path + 1 + n, sizeof self->name.sun_path - 1 - (size_t)n,
                      "%02x", id[i]);
    }
    self->name_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int new_socket(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECKF(fd >= 0, "socket: %s", strerror(errno));
    return fd;
}

static lk_status_t sock_init(const nccl_library_t *library, device_t *device,
                             const uint8_t id[NCCL_ID_BYTES], uint32_t world_size, uint32_t rank,
                             nccl_comm_t **out, lk_error_t *err)
{
    CHECK(world_size >= 2 && world_size <= WORLD_MAX && rank < world_size);
    nccl_comm_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    *self = (nccl_comm_t){
        .device = device, .world = world_size, .rank = rank, .refs = 1, .listener = -1};
    for (uint32_t r = 0; r < WORLD_MAX; r++) {
        self->peers[r].fd = -1;
    }
    set_name(self, id);
    if (rank == 0) {
        self->listener = new_socket();
        CHECK(bind(self->listener, (struct sockaddr *)&self->name, self->name_len) == 0);
        CHECK(listen(self->listener, WORLD_MAX) == 0);
    }
    *out = self;
    return LK_INPROGRESS;
}

/* ---- meeting ---- */

/* True when the peer's next token is whole. One that is gone never has one. */
static bool read_token(peer_t *peer)
{
    while (peer->fd >= 0 && peer->got < sizeof peer->token) {
        ssize_t n = recv(peer->fd, (uint8_t *)&peer->token + peer->got,
                         sizeof peer->token - peer->got, MSG_DONTWAIT);
        if (n <= 0) {
            return false;
        }
        peer->got += (size_t)n;
    }
    return peer->fd >= 0;
}

static bool send_all(int fd, const void *bytes, size_t n)
{
    return send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n; /* small: whole or not at all */
}

/* Rank 0: everybody has said hello, and is told so. */
static bool gather(nccl_comm_t *self)
{
    int fd;
    while ((fd = accept4(self->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        for (uint32_t r = 1; r < WORLD_MAX && fd >= 0; r++) {
            if (self->peers[r].fd < 0) {
                self->peers[r] = (peer_t){.fd = fd};
                fd = -1;
            }
        }
        CHECK(fd < 0);
    }
    for (uint32_t r = 1; r < self->world; r++) {
        peer_t *peer = &self->peers[r];
        if (!read_token(peer) || peer->token.kind != HELLO || peer->token.n != self->world) {
            return false; /* ranks that don't agree on the size never meet */
        }
    }
    peer_t sorted[WORLD_MAX];
    for (uint32_t r = 1; r < self->world; r++) {
        uint32_t rank = self->peers[r].token.rank;
        CHECK(rank >= 1 && rank < self->world);
        sorted[rank] = self->peers[r];
    }
    for (uint32_t r = 1; r < self->world; r++) {
        self->peers[r] = (peer_t){.fd = sorted[r].fd};
        (void)send_all(sorted[r].fd, "!", 1);
    }
    return true;
}

static bool join(nccl_comm_t *self)
{
    peer_t *root = &self->peers[0];
    char word;
    if (root->fd < 0) {
        root->fd = new_socket();
        if (connect(root->fd, (struct sockaddr *)&self->name, self->name_len) != 0) {
            close(root->fd); /* rank 0 is not there yet */
            root->fd = -1;
            return false;
        }
    }
    token_t hello = {.kind = HELLO, .rank = self->rank, .n = self->world};
    self->said = self->said || send_all(root->fd, &hello, sizeof hello);
    return self->said && recv(root->fd, &word, 1, MSG_DONTWAIT) == 1;
}

static lk_status_t sock_poll(nccl_comm_t *self, lk_error_t *err)
{
    self->up = self->up || (self->rank == 0 ? gather(self) : join(self));
    return self->up ? LK_OK : LK_INPROGRESS;
}

/* ---- collectives ---- */

static void unref(nccl_comm_t *self)
{
    if (--self->refs == 0) {
        free(self);
    }
}

/* Rank 0: everybody is here; then everybody gets the bytes. */
static bool lead(nccl_comm_t *self, call_t *call)
{
    float sum = call->token.value;
    for (uint32_t r = 1; r < self->world; r++) {
        peer_t *peer = &self->peers[r];
        if (!read_token(peer) || peer->token.kind != call->token.kind ||
            peer->token.n != call->token.n) {
            return false;
        }
        sum += peer->token.value;
    }
    if (call->token.kind == SUM) {
        memcpy(call->buffer, &sum, sizeof sum);
    }
    bool all = true;
    for (uint32_t r = 1; r < self->world; r++) {
        peer_t *peer = &self->peers[r];
        ssize_t n = 1;
        while (n > 0 && peer->sent < call->token.n) {
            n = send(peer->fd, call->buffer + peer->sent, call->token.n - peer->sent,
                     MSG_NOSIGNAL | MSG_DONTWAIT);
            peer->sent += n > 0 ? (uint64_t)n : 0;
        }
        all &= peer->sent == call->token.n;
    }
    for (uint32_t r = 1; all && r < self->world; r++) {
        self->peers[r].got = self->peers[r].sent = 0;
    }
    return all;
}

static bool follow(nccl_comm_t *self, call_t *call)
{
    int fd = self->peers[0].fd;
    self->token_sent = self->token_sent || send_all(fd, &call->token, sizeof call->token);
    ssize_t n = 1;
    while (self->token_sent && n > 0 && self->read < call->token.n) {
        n = recv(fd, call->buffer + self->read, call->token.n - self->read, MSG_DONTWAIT);
        self->read += n > 0 ? (uint64_t)n : 0;
    }
    if (self->read < call->token.n) {
        return false;
    }
    self->read = 0;
    self->token_sent = false;
    return true;
}

static bool advance(void *ctx)
{
    call_t *call = ctx;
    nccl_comm_t *self = call->comm;
    if (call->from != NULL) { /* what the stream has put there meanwhile */
        call->token.value = *call->from;
    }
    bool over = self->aborted || (self->rank == 0 ? lead(self, call) : follow(self, call));
    if (over) {
        unref(self);
        free(call);
    }
    return over;
}

static lk_status_t enqueue(nccl_comm_t *self, uint32_t kind, void *buffer, uint64_t n,
                           const float *from, device_stream_t *stream, lk_error_t *err)
{
    CHECKF(self->up, "a collective is called before the communicator is ready");
    call_t *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    *call = (call_t){self, {.kind = kind, .rank = self->rank, .n = n}, buffer, from};
    self->refs++;
    return device_host_call(self->device, stream, advance, call, err);
}

static lk_status_t sock_broadcast(nccl_comm_t *self, void *buffer, uint64_t count, lk_dtype_t dtype,
                                  device_stream_t *stream, lk_error_t *err)
{
    return enqueue(self, BROADCAST, buffer, count * dtype_bytes(dtype), NULL, stream, err);
}

static lk_status_t sock_all_reduce(nccl_comm_t *self, const float *from, float *to,
                                   device_stream_t *stream, lk_error_t *err)
{
    return enqueue(self, SUM, to, sizeof *to, from, stream, err);
}

static void sock_abort(nccl_comm_t **self_p)
{
    nccl_comm_t *self = self_p != NULL ? *self_p : NULL;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    self->aborted = true;
    for (uint32_t r = 0; r < WORLD_MAX; r++) {
        if (self->peers[r].fd >= 0) {
            close(self->peers[r].fd);
            self->peers[r].fd = -1;
        }
    }
    if (self->listener >= 0) {
        close(self->listener);
    }
    unref(self);
}

static size_t sock_ending(void)
{
    return 0;
}

const nccl_comm_ops_t nccl_sock_ops = {
    .name = "sock",
    .load = sock_load,
    .unique_id = sock_unique_id,
    .init = sock_init,
    .poll = sock_poll,
    .broadcast = sock_broadcast,
    .all_reduce = sock_all_reduce,
    .abort = sock_abort,
    .ending = sock_ending,
};
