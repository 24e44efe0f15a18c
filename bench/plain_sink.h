/*
 * plain_sink.h: a receiving rank's storage for benchmarks of the transfer engines: equal tensors in
 * one piece of memory, received in place, digested as bfloat16 if asked for.
 */
#ifndef LK_BENCH_PLAIN_SINK_H
#define LK_BENCH_PLAIN_SINK_H

#include "transfer/weight_sink.h"

typedef struct {
    uint8_t *place; /* n_tensors * tensor_bytes */
    size_t tensor_bytes;
    bool digest;
} plain_sink_t;

/* Memory whose pages are there, as a model's are. Ends the program when there is none. */
void plain_sink_init(plain_sink_t *self, size_t n_tensors, size_t tensor_bytes, bool digest);
void plain_sink_fini(plain_sink_t *self);
/* self outlives it. */
weight_sink_t plain_sink(plain_sink_t *self);

#endif
