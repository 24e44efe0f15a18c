/*
 * mem_stream.h: byte streams through memory, for tests and the simulator: a process-wide list of
 * named listeners, each accepted pair joined by two rings of `capacity` bytes, so that a side that
 * does not read stops the other one. One thread.
 */
#ifndef LK_TRANSFER_MEM_STREAM_H
#define LK_TRANSFER_MEM_STREAM_H

#include "transfer/backends/byte_stream.h"

typedef struct mem_listener mem_listener_t;

/* NULL if the name is taken or memory is short. */
mem_listener_t *mem_listener_new(const char *name, size_t capacity);
/* Streams that were not accepted are closed; accepted ones live on. */
void mem_listener_destroy(mem_listener_t **self_p);
/* One waiting connection, or NULL. */
byte_stream_t *mem_accept(mem_listener_t *self);

/* Connects as soon as a listener of that name exists. */
byte_stream_t *mem_stream_dial(const char *name);

#endif
