/*
 * streams.h: N sampled completion streams kept running against a server, and what they returned.
 * One thread; streams_poll does everything.
 */
#ifndef LK_EXAMPLES_DEMO_STREAMS_H
#define LK_EXAMPLES_DEMO_STREAMS_H

#include "examples/demo/verify.h"

typedef struct streams streams_t;

typedef struct {
    const char *url; /* http://host:port */
    uint32_t n_streams;
    uint32_t vocab_size;
    uint32_t prompt_tokens, max_tokens; /* lengths vary around these */
    uint64_t seed;                      /* of prompts and sampling seeds */
    /* A text prompt for every stream instead of random ids; NULL: random ids. */
    const char *const *texts;
    size_t n_texts;
    /* Streams may be aborted (what they said until then is kept) and fail (dropped). */
    bool may_end_early;
} streams_config_t;

#define STREAMS_MAX_SETS 4096

streams_t *streams_new(const streams_config_t *config);
void streams_destroy(streams_t **self_p);
/* Moves bytes; starts a new stream for each that has ended unless `closing`. Returns the number of
 * open streams. */
size_t streams_poll(streams_t *self, int timeout_ms, bool closing);
/* NULL, or the first thing that went wrong (a stream that ended with an error). */
const char *streams_failure(const streams_t *self);
uint64_t streams_tokens(const streams_t *self); /* received so far */
/* Tokens of weight set k among the ended streams. */
uint64_t streams_tokens_of(const streams_t *self, uint64_t set);
/* Longest time between two tokens of a stream since the last call, seconds. */
double streams_longest_gap(streams_t *self);
/* Records of ended streams. */
const stream_record_t *streams_records(const streams_t *self, size_t *n);

#endif
