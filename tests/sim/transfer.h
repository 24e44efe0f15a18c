/*
 * transfer.h: the ranks' half of weight transfers: the mem engine; one whose updates are a
 * collective of all ranks, as NCCL's broadcast is: a rank stays in it until every rank has come; or
 * the product's NCCL engine, over communicators that block as NCCL's do.
 */
#ifndef LK_TESTS_SIM_TRANSFER_H
#define LK_TESTS_SIM_TRANSFER_H

#include "tests/sim/sim.h"

/* NULL for backend 0. */
const wte_ops_t *sim_transfer_ops(const sim_t *sim);
/* "sits in the weight broadcast and waits for rank 0", or "". */
void sim_transfer_describe(const sim_t *sim, uint32_t rank, char *out, size_t room);

#endif
