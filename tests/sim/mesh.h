/*
 * mesh.h: the ranks' mesh: votes and expert exchange, over one connection per pair, in order. A
 * rank that waits here waits until every peer's share has arrived: nothing else lets it go on, so a
 * deadlock is a deadlock.
 */
#ifndef LK_TESTS_SIM_MESH_H
#define LK_TESTS_SIM_MESH_H

#include "tests/sim/sim.h"

sim_mesh_t *sim_mesh_new(sim_t *sim);
void sim_mesh_destroy(sim_mesh_t **self_p);

allreduce_t sim_mesh_allreduce(sim_mesh_t *self, uint32_t rank);
ep_t sim_mesh_ep(sim_mesh_t *self, uint32_t rank);
void sim_mesh_on_vote(sim_mesh_t *self, const sim_event_t *event);
void sim_mesh_on_exchange(sim_mesh_t *self, const sim_event_t *event);

/* Ranks that the rank's vote, or its step, waits for: "1, 3", or "". */
void sim_mesh_vote_missing(const sim_mesh_t *self, uint32_t rank, char *out, size_t room);
void sim_mesh_step_missing(const sim_mesh_t *self, uint32_t rank, char *out, size_t room);

typedef struct {
    uint64_t votes, vote_bytes, exchanges, exchange_bytes;
} sim_mesh_stats_t;
const sim_mesh_stats_t *sim_mesh_stats(const sim_mesh_t *self);

#endif
