/*
 * world.h: a scheduler and a KV cache over an executor whose KV memory remembers, per slot, the
 * token and the weight epoch written there. Clients check every output as it comes: they rebuild
 * the KV by request.h's rule (snapshot, append), compare it with the memory as read through the
 * block table, and compute the token that must follow from it.
 *
 * Two executors: `hash`, whose logits are a hash of the tokens and KV epochs as read back and of
 * the step's epoch; and the null executor (weights change with the epoch).
 */
#ifndef LK_TESTS_SCHED_WORLD_H
#define LK_TESTS_SCHED_WORLD_H

#include "base/prng.h"
#include "engine_core/exec/sampler.h"
#include "engine_core/sched/scheduler.h"

#define WORLD_MAX_LEN    128
#define WORLD_MAX_EPOCHS 64

typedef struct {
    uint32_t num_blocks, block_size;
    bool caching, null_executor;
    scheduler_config_t sched;
} world_config_t;

/* What a client knows of its request. */
typedef struct {
    sampling_params_t sampling;
    uint32_t n_prompt, n_output, n_outputs_seen, n_snapshots, n_mixed;
    uint32_t tokens[WORLD_MAX_LEN];
    float logprobs[WORLD_MAX_LEN];
    uint32_t n_scored, n_restarts; /* prompt tokens with a logprob, the first one included */
    float scores[WORLD_MAX_LEN];   /* of prompt tokens, and the epoch that gave them */
    uint64_t score_epoch[WORLD_MAX_LEN];
    uint64_t kv_epoch[WORLD_MAX_LEN]; /* rebuilt */
    bool added, silent, ended;        /* silent: dropped, hears nothing any more */
    finish_reason_t finish;
    int64_t stop_token;
    char error[256];
} client_t;

typedef struct {
    world_config_t config;
    kv_cache_t *kv;
    scheduler_t *sched;
    sampler_t *oracle;
    executor_t *executor; /* null executor, or NULL */
    model_config_t model;
    digest_t digests[WORLD_MAX_EPOCHS]; /* by epoch */
    uint64_t epoch, step;
    uint64_t *slot_epoch; /* [num_blocks, block_size] */
    uint32_t *slot_token;
    float *logits;
    const exec_batch_t *posted;
    client_t *clients;
    size_t n_clients, cap_clients;
    size_t n_tokens; /* made in all */
} world_t;

world_t *world_new(const world_config_t *config);
/* Checks that nothing holds a block any more. */
void world_destroy(world_t **self_p);

/* front end = handle % 3 */
lk_status_t world_add(world_t *self, const uint32_t *prompt, uint32_t n_prompt,
                      const sampling_params_t *sampling, int64_t priority, uint64_t salt,
                      uint32_t choice, lk_error_t *err);
bool world_abort(world_t *self, size_t handle);
/* Schedules and runs the forward pass. False if there was nothing to run. */
bool world_post(world_t *self, bool admit);
void world_finish_step(world_t *self);
void world_cancel_step(world_t *self);
/* post and finish_step until all is over; fails after max_steps. */
void world_drain(world_t *self, size_t max_steps);
/* New weights from here on. */
void world_new_weights(world_t *self);
void world_verify(const world_t *self);
size_t world_unfinished(const world_t *self);

sampling_params_t world_greedy(uint32_t max_tokens);

#endif
