/*
 * ep_mem.h: the in-memory twin of an expert exchange: all ranks of a group in one process and one
 * thread. post copies; test is INPROGRESS until every peer has posted; ranks may be one exchange
 * apart, as over sockets. A rank can be killed. Hostile peers are tests that post as a rank
 * themselves.
 */
#ifndef LK_TESTS_LIB_EP_MEM_H
#define LK_TESTS_LIB_EP_MEM_H

#include "engine_core/ep/ep.h"

typedef struct ep_mem ep_mem_t;

ep_mem_t *ep_mem_new(uint32_t ranks);
void ep_mem_destroy(ep_mem_t **self_p);
/* The exchange as rank `rank` sees it; valid as long as the group. */
ep_t ep_mem_rank(ep_mem_t *self, uint32_t rank);
/* Every exchange of its peers fails from now on, naming it. */
void ep_mem_kill(ep_mem_t *self, uint32_t rank);
/* A new group epoch: nothing is posted or delivered, nobody is dead. */
void ep_mem_reset(ep_mem_t *self);
/* Messages that are delivered and not yet taken, over all ranks. */
size_t ep_mem_in_flight(const ep_mem_t *self);
/* Exchanges that `rank` has completed. */
uint64_t ep_mem_completed(const ep_mem_t *self, uint32_t rank);

#endif
