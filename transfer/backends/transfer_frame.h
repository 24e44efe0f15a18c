/*
 * transfer_frame.h: the bytes that the stream backends (tcp, mem, shm) exchange. Integers are
 * little-endian. The trainer listens, every rank connects `lanes` times.
 *
 *   rank -> trainer   hello: magic "LKWH", version u16, 0 u16, pid u64, dp rank u32, dp size u32,
 *                     lane u32, lanes u32, token length u32, 0 u32, then the session token
 *   trainer -> rank   WELCOME {session}, or FAIL
 *   per update:
 *   rank -> trainer   GO {update, bucket: number of buckets, length: total bytes}: I have entered
 *                     the call. Nothing is sent before it, so a refused call leaves no stray bytes.
 *   trainer -> rank   per bucket DATA {bucket, offset, length} + bytes, in order and without gaps,
 *                     then DIGEST {bucket, offset: XXH3-64 of the bucket's bytes}
 *   rank -> trainer   ACK {bucket}
 *   either            FAIL {length} + text: I give up. The connection ends with it.
 *
 * Bucket b of an update travels on lane b mod lanes. `update` is the rank's own count, echoed.
 *
 * With a window (shm) the payload of DATA isn't in the stream: the n-th DATA frame of an update,
 * counted from 0 over all buckets, stands for the first `length` bytes of slot n mod slots of a
 * shared ring of TRANSFER_CHUNK_BYTES slots. Nothing else is in the ring; the frames say all that
 * there is to know. There is one lane.
 *   rank -> trainer   TAKEN {bucket, offset: bytes of the bucket taken so far}, after every DATA
 *                     but a bucket's last: those slots may be overwritten, as may an
 *                     acknowledged bucket's
 *
 * WELCOME's offset is a set of TRANSFER_WELCOME_* bits.
 */
#ifndef LK_TRANSFER_TRANSFER_FRAME_H
#define LK_TRANSFER_TRANSFER_FRAME_H

#include "base/status.h"

#define TRANSFER_VERSION            1u
#define TRANSFER_HELLO_SIZE         40u
#define TRANSFER_FRAME_SIZE         48u
#define TRANSFER_TOKEN_MAX          256u
#define TRANSFER_TEXT_MAX           512u       /* bytes of a FAIL */
#define TRANSFER_CHUNK_BYTES        (1u << 20) /* of a DATA frame, as senders cut them */
#define TRANSFER_LANES_MAX          8u
#define TRANSFER_WELCOME_NO_DIGESTS 1u /* of a WELCOME's offset: DIGEST frames carry none */

/* name, value */
#define TRANSFER_KIND_TABLE(X)                                                                     \
    X(WELCOME, 1)                                                                                  \
    X(GO, 2)                                                                                       \
    X(DATA, 3)                                                                                     \
    X(DIGEST, 4)                                                                                   \
    X(ACK, 5)                                                                                      \
    X(FAIL, 6)                                                                                     \
    X(TAKEN, 7)
typedef enum {
#define X(name, value) TRANSFER_##name = value,
    TRANSFER_KIND_TABLE(X)
#undef X
} transfer_kind_t;

typedef struct {
    transfer_kind_t kind;
    uint64_t session, update, bucket, offset, length;
} transfer_frame_t;

typedef struct {
    uint64_t pid;
    uint32_t dp_rank, dp_size, lane, lanes;
    uint32_t token_len; /* at most TRANSFER_TOKEN_MAX */
} transfer_hello_t;

const char *transfer_kind_name(transfer_kind_t kind);
void transfer_frame_encode(const transfer_frame_t *frame, uint8_t out[TRANSFER_FRAME_SIZE]);
/* Checks magic, version and kind; what the numbers may be is the reader's question. */
LK_MUST_USE lk_status_t transfer_frame_decode(const uint8_t in[TRANSFER_FRAME_SIZE],
                                              transfer_frame_t *out, lk_error_t *err);
void transfer_hello_encode(const transfer_hello_t *hello, uint8_t out[TRANSFER_HELLO_SIZE]);
LK_MUST_USE lk_status_t transfer_hello_decode(const uint8_t in[TRANSFER_HELLO_SIZE],
                                              transfer_hello_t *out, lk_error_t *err);
/* Replaces what isn't printable ASCII: a peer's text goes into errors and logs. */
void transfer_text_clean(const void *bytes, size_t len, char *out, size_t room);

#endif
