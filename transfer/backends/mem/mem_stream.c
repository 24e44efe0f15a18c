#include "transfer/backends/mem/mem_stream.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEM_NAME_MAX 63

typedef struct {
    uint8_t *data;
    size_t head, used; /* next byte to read; bytes waiting */
} mem_ring_t;

/* Both ends of one connection; freed with the second of them. */
typedef struct mem_pair {
    struct mem_pair *next; /* waiting to be accepted */
    size_t capacity;
    mem_ring_t ring[2]; /* ring[i]: written by side i */
    bool closed[2];
} mem_pair_t;

typedef struct {
    byte_stream_t base;
    char name[MEM_NAME_MAX + 1];
    mem_pair_t *pair; /* NULL until connected */
    int side;         /* 0 dialled, 1 accepted */
} mem_stream_t;

struct mem_listener {
    mem_listener_t *next;
    char name[MEM_NAME_MAX + 1];
    size_t capacity;
    mem_pair_t *waiting;
};

static mem_listener_t *listeners;

static mem_listener_t *find(const char *name)
{
    mem_listener_t *one = listeners;
    while (one != NULL && strcmp(one->name, name) != 0) {
        one = one->next;
    }
    return one;
}

mem_listener_t *mem_listener_new(const char *name, size_t capacity)
{
    CHECK(capacity > 0 && strlen(name) <= MEM_NAME_MAX);
    if (find(name) != NULL) {
        return NULL;
    }
    mem_listener_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    snprintf(self->name, sizeof self->name, "%s", name);
    self->capacity = capacity;
    self->next = listeners;
    listeners = self;
    return self;
}

static void pair_close(mem_pair_t *pair, int side)
{
    pair->closed[side] = true;
    if (pair->closed[0] && pair->closed[1]) {
        free(pair->ring[0].data);
        free(pair->ring[1].data);
        free(pair);
    }
}

void mem_listener_destroy(mem_listener_t **self_p)
{
    mem_listener_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    mem_listener_t **p = &listeners;
    while (*p != self) {
        p = &(*p)->next;
    }
    *p = self->next;
    while (self->waiting != NULL) {
        mem_pair_t *pair = self->waiting;
        self->waiting = pair->next;
        pair_close(pair, 1);
    }
    free(self);
}

static mem_pair_t *pair_new(size_t capacity)
{
    mem_pair_t *pair = calloc(1, sizeof *pair);
    if (pair == NULL) {
        return NULL;
    }
    pair->capacity = capacity;
    pair->ring[0].data = malloc(capacity);
    pair->ring[1].data = malloc(capacity);
    if (pair->ring[0].data == NULL || pair->ring[1].data == NULL) {
        free(pair->ring[0].data);
        free(pair->ring[1].data);
        free(pair);
        return NULL;
    }
    return pair;
}

static lk_status_t mem_connect(byte_stream_t *base, lk_error_t *err)
{
    mem_stream_t *self = (mem_stream_t *)base;
    if (self->pair != NULL) {
        return LK_OK;
    }
    mem_listener_t *listener = find(self->name);
    if (listener == NULL) {
        snprintf(base->note, sizeof base->note, "no trainer of that name");
        return LK_INPROGRESS;
    }
    self->pair = pair_new(listener->capacity);
    if (self->pair == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a stream");
    }
    mem_pair_t **tail = &listener->waiting;
    while (*tail != NULL) {
        tail = &(*tail)->next;
    }
    *tail = self->pair;
    return LK_OK;
}

static lk_status_t mem_readv(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                             lk_error_t *err)
{
    mem_stream_t *self = (mem_stream_t *)base;
    mem_pair_t *pair = self->pair;
    CHECK(pair != NULL && n <= BYTE_STREAM_IOV_MAX);
    mem_ring_t *ring = &pair->ring[1 - self->side];
    size_t total = 0;
    for (int i = 0; i < n; i++) {
        for (size_t done = 0; done < iov[i].iov_len && ring->used > 0;) {
            size_t run =
                LK_MIN(LK_MIN(iov[i].iov_len - done, ring->used), pair->capacity - ring->head);
            memcpy((uint8_t *)iov[i].iov_base + done, ring->data + ring->head, run);
            ring->head = (ring->head + run) % pair->capacity;
            ring->used -= run;
            done += run;
            total += run;
        }
    }
    if (total > 0) {
        *moved = total;
        return LK_OK;
    }
    if (pair->closed[1 - self->side]) {
        return lk_error_set(err, LK_ERR_PEER, "%s closed the connection", base->peer);
    }
    return LK_INPROGRESS;
}

static lk_status_t mem_writev(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                              lk_error_t *err)
{
    mem_stream_t *self = (mem_stream_t *)base;
    mem_pair_t *pair = self->pair;
    CHECK(pair != NULL && n <= BYTE_STREAM_IOV_MAX);
    if (pair->closed[1 - self->side]) {
        return lk_error_set(err, LK_ERR_PEER, "cannot write to %s: it closed the connection",
                            base->peer);
    }
    mem_ring_t *ring = &pair->ring[self->side];
    size_t total = 0;
    for (int i = 0; i < n; i++) {
        for (size_t done = 0; done < iov[i].iov_len && ring->used < pair->capacity;) {
            size_t tail = (ring->head + ring->used) % pair->capacity;
            size_t run = LK_MIN(LK_MIN(iov[i].iov_len - done, pair->capacity - ring->used),
                                pair->capacity - tail);
            memcpy(ring->data + tail, (const uint8_t *)iov[i].iov_base + done, run);
            ring->used += run;
            done += run;
            total += run;
        }
    }
    *moved = total;
    return total > 0 ? LK_OK : LK_INPROGRESS;
}

static bool mem_hung_up(byte_stream_t *base)
{
    mem_stream_t *self = (mem_stream_t *)base;
    return self->pair != NULL && self->pair->closed[1 - self->side];
}

static int mem_fd(const byte_stream_t *base)
{
    return -1;
}

static void mem_destroy(byte_stream_t *base)
{
    mem_stream_t *self = (mem_stream_t *)base;
    if (self->pair != NULL) {
        pair_close(self->pair, self->side);
    }
    free(self);
}

static const byte_stream_ops_t mem_stream_ops = {
    .connect = mem_connect,
    .readv = mem_readv,
    .writev = mem_writev,
    .hung_up = mem_hung_up,
    .fd = mem_fd,
    .destroy = mem_destroy,
};

static mem_stream_t *stream_new(const char *name, mem_pair_t *pair, int side)
{
    mem_stream_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->base.ops = &mem_stream_ops;
    snprintf(self->base.peer, sizeof self->base.peer, "'%s'", name);
    snprintf(self->name, sizeof self->name, "%s", name);
    self->pair = pair;
    self->side = side;
    return self;
}

byte_stream_t *mem_accept(mem_listener_t *self)
{
    mem_pair_t *pair = self->waiting;
    if (pair == NULL) {
        return NULL;
    }
    mem_stream_t *stream = stream_new(self->name, pair, 1);
    if (stream == NULL) {
        return NULL;
    }
    self->waiting = pair->next;
    return &stream->base;
}

byte_stream_t *mem_stream_dial(const char *name)
{
    CHECK(strlen(name) <= MEM_NAME_MAX);
    mem_stream_t *stream = stream_new(name, NULL, 0);
    return stream != NULL ? &stream->base : NULL;
}
