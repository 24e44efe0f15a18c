/*
 * router.h: which DP rank gets the next request. Pure.
 *
 * Score of a rank, lowest wins, ties to the first from a start that moves on by one per decision:
 *     max(n_clients * in_flight, waiting + running)
 *     + waiting * 6 * max(0, kv_usage - 0.5)
 * in_flight are this front end's own open requests; waiting, running and kv_usage are the newest
 * report's, and waiting grows by n_clients with every decision until the next report.
 *
 * A session prefers one rank, for its prefix cache: ranks are ordered by hash(session, rank)
 * (rendezvous hashing: the death of a rank moves its own sessions only), and the first living one
 * that is not overloaded is taken. Overloaded: above ROUTER_SESSION_FACTOR times the mean load of
 * the living ranks plus ROUTER_SESSION_SLACK. (Consistent hashing with bounded loads, Mirrokni,
 * Thorup, Zadimoghaddam 2018; here over rendezvous order.)
 */
#ifndef LK_API_FRONTEND_ROUTER_H
#define LK_API_FRONTEND_ROUTER_H

#include "base/status.h"

#define ROUTER_MAX_RANKS      256
#define ROUTER_SESSION_FACTOR 1.5
#define ROUTER_SESSION_SLACK  8 /* requests: short queues are not worth a cold cache */

typedef struct {
    uint64_t in_flight;
    uint64_t waiting, running;
    double kv_usage; /* 0 to 1 */
    bool dead;       /* for now, or for good */
    bool avoided;    /* it refuses requests for now */
} router_rank_t;

typedef struct {
    uint32_t n_ranks, n_clients, start;
    router_rank_t ranks[ROUTER_MAX_RANKS];
} router_t;

/* n_ranks is 1 to ROUTER_MAX_RANKS, client below n_clients. */
void router_init(router_t *self, uint32_t n_ranks, uint32_t client, uint32_t n_clients);
/* A load report of one rank; an unknown rank is ignored. */
void router_report(router_t *self, uint64_t rank, uint64_t waiting, uint64_t running,
                   double kv_usage);
void router_set_dead(router_t *self, uint32_t rank, bool dead);
/* An avoided rank gets requests only if they name it, or if there is no other. */
void router_set_avoided(router_t *self, uint32_t rank, bool avoided);
/* The hash of a session's name; never 0. */
uint64_t router_session(const char *name, size_t len);
/* pin >= 0: that rank. Else by session, or by score when session is 0. LK_ERR_INVALID for a pin
 * that is no rank, LK_ERR_UNAVAILABLE when the rank (or every rank) is dead. On success the rank's
 * in_flight has grown by one. */
LK_MUST_USE lk_status_t router_pick(router_t *self, int64_t pin, uint64_t session, uint32_t *rank,
                                    lk_error_t *err);
/* A request of `rank` has ended. */
void router_done(router_t *self, uint32_t rank);

#endif
