/*
 * torn_stream.h: a byte stream around another one that breaks at some byte, in both directions, as
 * a connection does whose other end is gone.
 */
#ifndef LK_TESTS_SIM_TORN_STREAM_H
#define LK_TESTS_SIM_TORN_STREAM_H

#include "transfer/backends/byte_stream.h"

/* Takes inner over. It breaks after `bytes` written. */
byte_stream_t *torn_stream_new(byte_stream_t *inner, size_t bytes);

#endif
