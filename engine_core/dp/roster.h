/*
 * roster.h: who is in a group epoch (docs/MEMBERSHIP.md): the DP ranks of its members, ascending,
 * and this rank's place among them. Everything collective (votes, expert exchange, transfer groups)
 * counts in places; texts, routing and metrics name DP ranks.
 */
#ifndef LK_ENGINE_CORE_DP_ROSTER_H
#define LK_ENGINE_CORE_DP_ROSTER_H

#include "base/status.h"
#include "proto/messages.h"

#define ROSTER_MAX 256 /* as many as --data-parallel-size allows */

typedef struct {
    uint32_t n, place;
    uint32_t ranks[ROSTER_MAX]; /* [n] */
} roster_t;

/* Ranks 0 to size - 1, of which this is `rank`. */
roster_t roster_of_all(uint32_t size, uint32_t rank);
/* Of INIT's members. LK_ERR_PEER unless they are 1 to dp_size ascending ranks below dp_size, `rank`
 * among them, with as many mesh addresses. */
LK_MUST_USE lk_status_t roster_of_init(const msg_init_t *init, uint32_t dp_size, uint32_t rank,
                                       roster_t *out, lk_error_t *err);
bool roster_equal(const roster_t *a, const roster_t *b);

#endif
