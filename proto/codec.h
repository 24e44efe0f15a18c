/*
 * codec.h: messages to frames and back. Frame 0 is the envelope, frame 1 the body (msgpack). The
 * only users of msgpack-c are wire_reader.c and wire_writer.c below it.
 */
#ifndef LK_PROTO_CODEC_H
#define LK_PROTO_CODEC_H

#include "base/buf.h"
#include "proto/messages.h"

#define PROTO_VERSION 1u

/* Appends the envelope to *envelope and the body to *body. LK_ERR_NO_MEMORY or LK_ERR_TOO_LARGE. */
LK_MUST_USE lk_status_t msg_encode(const msg_t *msg, lk_buf_t *envelope, lk_buf_t *body,
                                   lk_error_t *err);

/* The envelope alone, for a body that goes to several receivers. */
LK_MUST_USE lk_status_t msg_encode_envelope(const msg_t *msg, lk_buf_t *envelope, lk_error_t *err);

/* Decodes two frames from outside. Every claimed length is checked against what is left, depth and
 * counts against proto/limits.h, before anything is allocated. On success the caller owns *out
 * (msg_fini). LK_ERR_INVALID names the message type and the field. */
LK_MUST_USE lk_status_t msg_decode(const void *envelope, size_t envelope_len, const void *body,
                                   size_t body_len, msg_t *out, lk_error_t *err);

/* Equality of all fields, for tests. */
bool msg_equal(const msg_t *a, const msg_t *b);

#endif
