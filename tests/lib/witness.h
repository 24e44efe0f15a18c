/*
 * witness.h: what must be as before after bad input: a seeded completion, the weights' digests, the
 * cluster's processes, and about their memory.
 */
#ifndef LK_TESTS_WITNESS_H
#define LK_TESTS_WITNESS_H

#include "tests/lib/completions.h"

#define WITNESS_MAX_PIDS 16

typedef struct {
    tokens_t seeded;
    json_t *digests;
    size_t n_pids;
    pid_t pids[WITNESS_MAX_PIDS];
    uint64_t peak[WITNESS_MAX_PIDS]; /* bytes resident, at most so far */
    uint64_t max_growth;
} witness_t;

/* max_growth: bytes by which the largest resident size of a process may grow until a check. */
void witness_take(witness_t *self, const cluster_t *c, uint64_t max_growth);
/* Fails the test if something is not as it was. */
void witness_check(const witness_t *self, const cluster_t *c);
void witness_fini(witness_t *self);

#endif
