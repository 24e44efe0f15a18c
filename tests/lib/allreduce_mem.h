/*
 * allreduce_mem.h: the all-reduce of rounds among ranks of one process, for tests. Votes travel
 * over one FIFO per ordered pair of ranks; with manual delivery a test decides when each arrives.
 */
#ifndef LK_TESTS_ALLREDUCE_MEM_H
#define LK_TESTS_ALLREDUCE_MEM_H

#include "engine_core/dp/allreduce.h"

typedef struct allreduce_mem allreduce_mem_t;

/* auto_deliver: a vote arrives everywhere at once. doorbell false: peer_waiting is NULL. */
allreduce_mem_t *allreduce_mem_new(uint32_t size, bool auto_deliver, bool doorbell);
void allreduce_mem_destroy(allreduce_mem_t **self_p);
/* Rank's view; valid as long as the hub. */
allreduce_t allreduce_mem_rank(allreduce_mem_t *self, uint32_t rank);
/* A vote of `from` that has not arrived at `to`. */
bool allreduce_mem_in_flight(const allreduce_mem_t *self, uint32_t from, uint32_t to);
/* Every vote of the round that rank has out has arrived: its test will succeed. */
bool allreduce_mem_ready(const allreduce_mem_t *self, uint32_t rank);
void allreduce_mem_deliver(allreduce_mem_t *self, uint32_t from, uint32_t to);
/* Everything that needs `rank` fails with LK_ERR_PEER from now on. */
/* A new group epoch: nothing is out or in flight, nobody is dead, the next round is 0. */
void allreduce_mem_reset(allreduce_mem_t *self);
void allreduce_mem_kill(allreduce_mem_t *self, uint32_t rank);

#endif
