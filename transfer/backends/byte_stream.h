/*
 * byte_stream.h: an ordered, reliable stream of bytes between a rank and a trainer, so that one
 * receiver and one sender serve sockets (tcp, shm) and memory (mem). One thread; nothing blocks.
 */
#ifndef LK_TRANSFER_BYTE_STREAM_H
#define LK_TRANSFER_BYTE_STREAM_H

#include "base/status.h"

#include <sys/uio.h>

#define BYTE_STREAM_IOV_MAX 64

typedef struct byte_stream byte_stream_t;

typedef struct byte_stream_ops {
    /* Goes on connecting: OK once connected (accepted streams are at once), INPROGRESS (a refusal
     * is retried for as long as the caller asks; `note` says what happened last), or an error that
     * asking again won't cure. */
    lk_status_t (*connect)(byte_stream_t *self, lk_error_t *err);
    /* OK: *moved > 0 bytes were moved. INPROGRESS: none now. LK_ERR_PEER: closed or reset. At most
     * BYTE_STREAM_IOV_MAX pieces, together not empty. */
    lk_status_t (*readv)(byte_stream_t *self, const struct iovec *iov, int n, size_t *moved,
                         lk_error_t *err);
    lk_status_t (*writev)(byte_stream_t *self, const struct iovec *iov, int n, size_t *moved,
                          lk_error_t *err);
    /* (optional) The peer is one of ours: what is written next may carry what only such get. */
    void (*admit)(byte_stream_t *self);
    /* True if the peer is known to be gone. Consumes nothing. */
    bool (*hung_up)(byte_stream_t *self);
    /* To poll, or -1. */
    int (*fd)(const byte_stream_t *self);
    void (*destroy)(byte_stream_t *self);
} byte_stream_ops_t;

struct byte_stream {
    const byte_stream_ops_t *ops;
    char peer[128]; /* "127.0.0.1:4000" */
    char note[128]; /* last reason why it is not connected yet; may be empty */
};

/* Accepts NULL and a pointer to NULL. */
static inline void byte_stream_destroy(byte_stream_t **self_p)
{
    if (*self_p != NULL) {
        (*self_p)->ops->destroy(*self_p);
        *self_p = NULL;
    }
}

#endif
