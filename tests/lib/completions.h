/*
 * completions.h: requests to POST /v1/completions of a running cluster and what their replies hold,
 * for the cluster tests.
 */
#ifndef LK_TESTS_COMPLETIONS_H
#define LK_TESTS_COMPLETIONS_H

#include "tests/lib/cluster.h"

#define MAX_TOKENS 4096

/* The tokens of one choice and their logprobs, as the JSON numbers say. */
typedef struct {
    size_t n;
    json_int_t ids[MAX_TOKENS];
    double logprobs[MAX_TOKENS];
} tokens_t;

/* A completion of the JSON body that fmt makes. Fails the test unless it is a 200. The caller
 * decrefs. */
json_t *complete(const cluster_t *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* On one DP rank. */
json_t *complete_on(const cluster_t *c, int rank, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The same for one that must be refused with the HTTP status `want`. */
json_t *refused(const cluster_t *c, int want, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Choice i, which must say so itself. */
const json_t *choice(const json_t *reply, size_t i);
/* Its token_ids and token_logprobs; each printed logprob must be a whole float32. */
void take_tokens(const json_t *one, tokens_t *out);
/* Equal ids and bit-equal logprobs. */
void check_same_tokens(const tokens_t *a, const tokens_t *b, const char *what);
/* A model of random bytes writes NULs too, so a text has a length. */
void check_text(const json_t *one, const char *text, size_t len);

/* Sums of /server_info over the ranks. */
typedef struct {
    json_int_t kv_used, running, waiting, preemptions, completions;
} load_t;

void read_load(const cluster_t *c, load_t *out);
/* Waits until nothing runs or waits and no KV block is in use. */
void wait_quiet(const cluster_t *c, const char *what);

#endif
