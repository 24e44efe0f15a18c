/*
 * coordinator.h: the coordinator's decisions, as one pure object. It runs the handshake, invites
 * ranks to rounds (START_DP_WAVE), and keeps a cache of the group's state and load for routing and
 * metrics. No decision of a group depends on it (protocol.md section 11): when it dies, what runs
 * goes on. Which group there is, is its business (membership.h, docs/MEMBERSHIP.md).
 */
#ifndef LK_COORDINATOR_COORDINATOR_H
#define LK_COORDINATOR_COORDINATOR_H

#include "base/env.h"
#include "coordinator/membership.h"

typedef struct coordinator coordinator_t;

/* Where messages go. Borrowed for the call; never blocks; a failed send is the host's to log. */
typedef struct {
    void *ctx;
    /* handshake ROUTER, to this life of a member */
    void (*reply)(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg);
    void (*stats)(void *ctx, const msg_t *msg); /* PUB to front ends */
    void (*wave)(void *ctx, const msg_t *msg);  /* PUB to engines */
    /* (optional) see membership.h */
    bool (*computes)(void *ctx, const member_t *m, uint64_t now_ns);
} coordinator_host_t;

typedef struct {
    uint32_t dp_size, n_frontends;
    bool shrinks; /* --data-parallel-min-size is below dp_size: an engine that can not start again
                     is the launcher's business, who may remove it */
    const char *config_hash;
    const char *events_address, *stats_address, *wave_address;
    uint64_t life; /* of this coordinator, from 1; a later one asks who is there (ROLLCALL) */
    uint64_t handshake_timeout_ns, dead_after_ns, heartbeat_ns;
    const lk_env_t *env;
    coordinator_host_t host;
} coordinator_config_t;

coordinator_t *coordinator_new(const coordinator_config_t *config);
void coordinator_destroy(coordinator_t **self_p);

/* A message from the handshake socket (HELLO, READY) or the events socket (all others). What makes
 * no sense is answered (HELLO) or counted and dropped, never trusted. */
void coordinator_on_message(coordinator_t *self, const msg_t *msg);

/* A line of the launcher: "removed RANK WHY" (docs/MEMBERSHIP.md). LK_ERR_INVALID: it is anything
 * else, or no rank would be left. */
LK_MUST_USE lk_status_t coordinator_on_launcher(coordinator_t *self, const char *line,
                                                lk_error_t *err);
/* Those of its earlier lives: "1,3", or "". LK_ERR_INVALID as above. */
LK_MUST_USE lk_status_t coordinator_remove_all(coordinator_t *self, const char *ranks,
                                               lk_error_t *err);

/* Timers: handshake deadline (of the first life), heartbeats, publication. Returns when to be
 * called next (monotonic). LK_ERR_* in *status once the cluster can not start any more; err says
 * who is late or refused. */
uint64_t coordinator_step(coordinator_t *self, lk_status_t *status, lk_error_t *err);

bool coordinator_serving(const coordinator_t *self);

#endif
