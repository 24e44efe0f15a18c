/*
 * mesh.h: a rank's mesh, with the contract of engine_core/dp/mesh.h: votes and expert exchange over
 * one connection per pair, in order, for one group epoch at a time. A rank that waits here waits
 * until every peer's share has arrived, or a peer is gone: nothing else lets it go on, so a
 * deadlock is a deadlock.
 */
#ifndef LK_TESTS_SIM_MESH_H
#define LK_TESTS_SIM_MESH_H

#include "tests/sim/sim.h"

/* The mesh of a process: it dies with it. */
sim_mesh_t *sim_mesh_new(sim_t *sim, uint32_t rank);
/* Its peers see the end of file, after what it sent before `cut_ns`. */
void sim_mesh_destroy(sim_mesh_t **self_p);

/* A fresh one for each attempt. */
const char *sim_mesh_address(const sim_mesh_t *self);
/* Addresses in the order of the members. */
void sim_mesh_connect(sim_mesh_t *self, uint64_t epoch, const roster_t *roster,
                      const msg_name_t *addresses);
LK_MUST_USE lk_status_t sim_mesh_connect_test(const sim_mesh_t *self, lk_error_t *err);
/* LK_ERR_PEER once a peer is gone. */
LK_MUST_USE lk_status_t sim_mesh_poll(const sim_mesh_t *self, lk_error_t *err);
void sim_mesh_leave(sim_mesh_t *self, int64_t lost, const char *why);
/* The connection of two living ranks breaks. */
void sim_mesh_break(sim_mesh_t *self, sim_mesh_t *peer);
int64_t sim_mesh_lost(const sim_mesh_t *self);

allreduce_t sim_mesh_allreduce(sim_mesh_t *self);
ep_t sim_mesh_ep(sim_mesh_t *self);
/* A MESH event: a frame arrives. */
void sim_mesh_on_frame(sim_t *sim, const sim_event_t *event);

/* Ranks that the rank's vote, or its step, waits for: "1, 3", or "". */
void sim_mesh_vote_missing(const sim_mesh_t *self, char *out, size_t room);
void sim_mesh_step_missing(const sim_mesh_t *self, char *out, size_t room);

#endif
