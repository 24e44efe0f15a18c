#include "tests/sim/torn_stream.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    byte_stream_t base;
    byte_stream_t *inner; /* NULL once it is broken */
    size_t left;
} torn_t;

static lk_status_t broken(torn_t *self, lk_error_t *err)
{
    byte_stream_destroy(&self->inner); /* the other end sees it, too */
    return lk_error_set(err, LK_ERR_PEER, "%s: connection reset", self->base.peer);
}

static lk_status_t torn_connect(byte_stream_t *base, lk_error_t *err)
{
    torn_t *self = (torn_t *)base;
    return self->inner == NULL ? broken(self, err) : self->inner->ops->connect(self->inner, err);
}

static lk_status_t torn_readv(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                              lk_error_t *err)
{
    torn_t *self = (torn_t *)base;
    return self->inner == NULL ? broken(self, err)
                               : self->inner->ops->readv(self->inner, iov, n, moved, err);
}

/* The pieces, cut off where the stream breaks. */
static lk_status_t torn_writev(byte_stream_t *base, const struct iovec *iov, int n, size_t *moved,
                               lk_error_t *err)
{
    torn_t *self = (torn_t *)base;
    if (self->inner == NULL || self->left == 0) {
        return broken(self, err);
    }
    struct iovec cut[BYTE_STREAM_IOV_MAX];
    size_t room = self->left;
    int m = 0;
    for (; m < n && room > 0; m++) {
        cut[m] = (struct iovec){iov[m].iov_base, LK_MIN(iov[m].iov_len, room)};
        room -= cut[m].iov_len;
    }
    lk_status_t status = self->inner->ops->writev(self->inner, cut, m, moved, err);
    if (status == LK_OK) {
        self->left -= *moved;
    }
    return status;
}

static bool torn_hung_up(byte_stream_t *base)
{
    torn_t *self = (torn_t *)base;
    return self->inner == NULL || self->inner->ops->hung_up(self->inner);
}

static int torn_fd(const byte_stream_t *base)
{
    return -1;
}

static void torn_destroy(byte_stream_t *base)
{
    torn_t *self = (torn_t *)base;
    byte_stream_destroy(&self->inner);
    free(self);
}

byte_stream_t *torn_stream_new(byte_stream_t *inner, size_t bytes)
{
    static const byte_stream_ops_t ops = {
        .connect = torn_connect,
        .readv = torn_readv,
        .writev = torn_writev,
        .hung_up = torn_hung_up,
        .fd = torn_fd,
        .destroy = torn_destroy,
    };
    torn_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->base.ops = &ops;
    snprintf(self->base.peer, sizeof self->base.peer, "%s", inner->peer);
    self->inner = inner;
    self->left = bytes;
    return &self->base;
}
