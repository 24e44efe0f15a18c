/*
 * fake_group.h: a scripted group of engines for the engine client: what was sent is kept as decoded
 * messages per rank, answers are given by the test, the clock stands still until it is moved.
 */
#ifndef LK_TESTS_FAKE_GROUP_H
#define LK_TESTS_FAKE_GROUP_H

#include "api_frontend/engine_client.h"

#define FG_MAX_RANKS   4
#define FG_COORDINATOR FG_MAX_RANKS
#define FG_MAX_MSGS    512

typedef struct {
    msg_t msgs[FG_MAX_MSGS];
    size_t first, n;
    bool down; /* sending fails */
} fg_queue_t;

typedef struct {
    uint64_t now;
    uint64_t generation; /* of the last CMD seen */
    lk_env_t env;
    engine_client_config_t config;
    engine_client_t *client;
    fg_queue_t queues[FG_MAX_RANKS + 1];
} fake_group_t;

/* n_ranks engines, all alive, serving; control timeout 30 s, transfer timeout 300 s. */
void fg_init(fake_group_t *g, uint32_t n_ranks, bool expert_parallel);
/* A new client of g->config as it stands now. */
void fg_reopen(fake_group_t *g);
/* The same, and it has not heard of the group yet. */
void fg_reopen_early(fake_group_t *g);
void fg_fini(fake_group_t *g);
/* The oldest message sent to rank (or FG_COORDINATOR) of that type; earlier ones of other types are
 * skipped. NULL: none. Valid until fg_fini. */
const msg_t *fg_take(fake_group_t *g, uint32_t rank, msg_type_t type);
/* Messages of that type waiting to be taken. */
size_t fg_count(const fake_group_t *g, uint32_t rank, msg_type_t type);
void fg_drop_all(fake_group_t *g);

void fg_seen(fake_group_t *g, uint32_t rank, uint64_t number);
void fg_done(fake_group_t *g, uint32_t rank, uint64_t number, lk_status_t status, const char *text,
             const char *body);
/* Tokens first, first + 1, ...; finish 0: goes on. */
void fg_output(fake_group_t *g, uint32_t rank, uint64_t handle, uint32_t first, size_t n,
               finish_reason_t finish);
/* dead may be NULL: "engine 1: silent for 5.0 s". */
void fg_stats(fake_group_t *g, bool serving, bool run, uint64_t group_epoch, const char *dead);
/* Serving, and it says which rank is removed. */
void fg_removed(fake_group_t *g, bool serving, uint64_t group_epoch, uint32_t rank,
                const char *why);
/* The rank enters a group epoch as this life. */
void fg_here(fake_group_t *g, uint32_t rank, uint64_t generation, uint64_t group_epoch);
/* It leaves it; lost: the rank to blame, or -1. */
void fg_left(fake_group_t *g, uint32_t rank, uint64_t group_epoch, int64_t lost, const char *why);
/* Moves the clock and polls. */
void fg_advance(fake_group_t *g, uint64_t ns);

#endif
