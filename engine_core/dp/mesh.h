/*
 * mesh.h: the ranks' own sockets, peer to peer: votes (allreduce_ops) and expert exchange (ep_ops)
 * over one connection per pair. AF_UNIX (abstract, same user only, checked by SO_PEERCRED) on one
 * host. Every message carries the group epoch; another epoch's is dropped.
 *
 * All non-blocking, one thread. Reading is done by mesh_poll and by the test operations; a peer's
 * end of file or a broken frame marks it dead, by name, and fails everything that needs it. A rank
 * that leaves its group epoch says because of whom (mesh_leave), so that its own end of file is not
 * taken for a death.
 * A contiguous exchange writes straight from the caller's buffers (writev), no copy in between.
 */
#ifndef LK_ENGINE_CORE_DP_MESH_H
#define LK_ENGINE_CORE_DP_MESH_H

#include "engine_core/dp/allreduce.h"
#include "engine_core/ep/ep.h"

#include <poll.h>

typedef struct mesh mesh_t;

/* Binds and listens at a fresh abstract address; peers learn it through the handshake. */
LK_MUST_USE lk_status_t mesh_new(uint32_t rank, mesh_t **out, lk_error_t *err);
void mesh_destroy(mesh_t **self_p);
const char *mesh_address(const mesh_t *self);

/* Connects to every peer: higher ranks connect to lower ones. The group's n members are ranks[n],
 * ascending, this one among them (NULL: 0 to n - 1); addresses[n] in that order, own entry ignored.
 */
LK_MUST_USE lk_status_t mesh_connect_post(mesh_t *self, uint64_t group_epoch, uint32_t n,
                                          const uint32_t *ranks, const char *const *addresses,
                                          lk_error_t *err);
/* INPROGRESS until every pair is connected and has exchanged hellos; errors name the rank. */
LK_MUST_USE lk_status_t mesh_connect_test(mesh_t *self, lk_error_t *err);
/* Ranks not connected yet, as "1, 3". */
void mesh_missing(const mesh_t *self, char *out, size_t room);

/* Moves bytes both ways; never blocks. Returns LK_ERR_PEER once a peer is dead. */
LK_MUST_USE lk_status_t mesh_poll(mesh_t *self, lk_error_t *err);
size_t mesh_pollfds(const mesh_t *self, struct pollfd *fds, size_t room);

/* Ends the group epoch here: tells the peers why and because of which rank (-1: unknown), closes
 * every connection, and listens at a fresh address. Views stay valid; mesh_connect_post is next. */
LK_MUST_USE lk_status_t mesh_leave(mesh_t *self, int64_t lost, const char *why, lk_error_t *err);
/* The rank that is behind an LK_ERR_PEER: the first that is dead, unless it left because of another
 * one. -1: none. */
int64_t mesh_lost(const mesh_t *self);

/* Ranks whose share of the posted exchange is missing, as "1, 3"; "" when none is posted. */
void mesh_exchange_missing(const mesh_t *self, char *out, size_t room);

/* Views on the mesh; valid as long as it lives and connected. The exchange's buffers are in the
 * order of the members: its rank and size are this rank's place, and their number. */
allreduce_t mesh_allreduce(mesh_t *self);
ep_t mesh_ep(mesh_t *self);

typedef struct {
    uint64_t votes_sent, vote_bytes, exchanges, exchange_bytes;
} mesh_stats_t;
void mesh_stats(const mesh_t *self, mesh_stats_t *out);

#endif
