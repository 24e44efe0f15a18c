/*
 * rl_kit.h: what the pause and update tests share: models to serve, requests to keep ranks busy,
 * the ranks' counters, and the same calls through HTTP and through the trainer's socket.
 */
#ifndef LK_TESTS_CLUSTER_RL_KIT_H
#define LK_TESTS_CLUSTER_RL_KIT_H

#include "engine_core/exec/model_maker.h"
#include "tests/lib/cluster.h"
#include "transfer/trainer/lockstep_trainer.h"

#define RL_MAX_RANKS 8
#define RL_ENDLESS   4000000u /* max_tokens of a request that no test outlives */

/* A committed fixture's directory; static storage, valid until the next call. */
const char *rl_fixture(const char *name);
/* Makes a checkpoint in a fresh directory below the test's temporary one; its path (static storage
 * of that call, up to 8 calls). max_positions 0: the maker's default. */
const char *rl_make_model(model_arch_t arch, uint64_t seed, uint32_t max_positions);
const char *rl_make(const model_maker_t *maker);

/* ---- counters: what /server_info says of every rank ---- */

typedef struct {
    size_t n_ranks;
    struct {
        json_int_t steps, dummy_steps, rounds, wave, tokens, waiting, running;
        bool paused;
        char pause_state[32];
    } rank[RL_MAX_RANKS];
} counters_t;

counters_t rl_counters(const cluster_t *c);
json_int_t rl_tokens(const counters_t *counters);
json_int_t rl_waiting(const counters_t *counters);
json_int_t rl_running(const counters_t *counters);
/* Fails the test unless steps and tokens of every rank stand still over `polls` further questions,
 * each of which every rank answers between two turns of its loop. */
void rl_assert_frozen(const cluster_t *c, int polls);
/* Waits until n requests run, some on every rank. */
void rl_wait_busy(const cluster_t *c, json_int_t n);
/* Waits until tokens have been added since the call. */
void rl_wait_tokens(const cluster_t *c);
void rl_wait_waiting(const cluster_t *c, json_int_t n);
void rl_wait_idle(const cluster_t *c);
void rl_wait_pause_state(const cluster_t *c, const char *state);

/* ---- processes ---- */

/* The engine of a rank, by its command line; fails the test if there is none. */
pid_t rl_pid_of(const cluster_t *c, unsigned rank);
/* Some line of the cluster's log has this text. */
bool rl_log_says(const cluster_t *c, const char *text);

/* ---- requests ---- */

/* Body of a greedy completion over ids: prompt "first, first+1, ..." of n_prompt tokens. Static
 * storage, valid until the next call. */
const char *rl_body(uint32_t first, uint32_t n_prompt, uint32_t max_tokens);
/* It, sent to this rank. */
cluster_async_t rl_complete(const cluster_t *c, unsigned rank, uint32_t first, uint32_t n_prompt,
                            uint32_t max_tokens);
/* The reply's choice 0, checked to be 200 with this finish_reason; the caller decrefs *reply. */
const json_t *rl_join(cluster_async_t *a, const char *finish_reason, json_t **reply);
/* Ends all requests and waits until every rank is idle. */
void rl_abort_requests(const cluster_t *c);

/* ---- the same calls two ways ---- */

typedef enum { RL_HTTP, RL_TRAINER } rl_way_t;
/* Status of the call as HTTP numbers; *text (static storage) is the reply. */
int rl_call(const cluster_t *c, lst_t *lst, rl_way_t way, const char *call, const char *args,
            const char **text);
lst_t *rl_open(const cluster_t *c);

#endif
