#include "tests/sim/exec.h"
#include "base/check.h"
#include "engine_core/sched/scheduler_internal.h"
#include "tests/sim/checkers.h"
#include "tests/sim/device_sink.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    executor_t base;
    executor_t *inner;
    sim_rank_t *rank;
    const exec_batch_t *batch; /* of the posted step */
    sim_device_sink_t *device; /* its weights as a device's, for NCCL; NULL: a CPU's */
    /* canaries */
    exec_batch_t other;
    exec_seq_t seqs[2];
    uint32_t blocks[256];
    uint64_t seen_epoch;
} exec_t;

static void exec_close(executor_t *base)
{
    exec_t *self = (exec_t *)base;
    sim_device_sink_destroy(&self->device);
    self->inner->ops->close(self->inner);
    free(self);
}

static weight_table_t *exec_weights(executor_t *base)
{
    executor_t *inner = ((exec_t *)base)->inner;
    return inner->ops->weights(inner);
}

/* Now and then a step takes much longer (a long prefill, a page fault). */
static uint64_t step_ns(const sim_rank_t *rank)
{
    sim_t *sim = rank->sim;
    uint64_t ns = sim_around(sim, sim->o.step_us * 1000);
    if (sim->o.slow_rank > 0 && rank->rank == sim->o.ranks - 1) {
        ns *= sim->o.slow_rank;
    }
    return sim_chance(sim, 2) ? 10 * ns : ns;
}

/* The second sequence reads its first block from the first sequence's. */
static const exec_batch_t *alias(exec_t *self, const exec_batch_t *batch)
{
    sim_t *sim = self->rank->sim;
    size_t size = sim->o.block_size;
    if (batch->n_seqs != 2 || batch->seqs[1].start < size ||
        batch->seqs[0].blocks[0] == batch->seqs[1].blocks[0] ||
        !sim_plants(sim, SIM_CANARY_KV_ALIAS)) {
        return batch;
    }
    memcpy(self->seqs, batch->seqs, sizeof self->seqs);
    size_t n = (self->seqs[1].start + self->seqs[1].n + size - 1) / size;
    memcpy(self->blocks, self->seqs[1].blocks, n * sizeof self->blocks[0]);
    self->blocks[0] = self->seqs[0].blocks[0];
    self->seqs[1].blocks = self->blocks;
    self->other = *batch;
    self->other.seqs = self->seqs;
    return &self->other;
}

static void flip_weight(exec_t *self)
{
    sim_t *sim = self->rank->sim;
    uint64_t epoch = group_weights(engine_core_group(self->rank->core))->epoch;
    if (epoch == 0 || self->rank->rank != sim->o.ranks - 1 || epoch == self->seen_epoch ||
        !sim_plants(sim, SIM_CANARY_WEIGHT_FLIP)) {
        self->seen_epoch = epoch;
        return;
    }
    const weight_slot_t *slot = weight_table_at(exec_weights(&self->base), 0);
    ((float *)slot->data)[3] += 1;
}

static void leak_block(const exec_t *self)
{
    const engine_core_t *core = self->rank->core;
    request_t *r = engine_core_scheduler(core)->running.head;
    kv_cache_t *kv = (kv_cache_t *)(uintptr_t)engine_core_kv(core);
    if (r != NULL && r->n_blocks < r->cap_blocks && kv_cache_used(kv) < kv_cache_num_blocks(kv) &&
        sim_plants(self->rank->sim, SIM_CANARY_BLOCK_LEAK)) {
        CHECK(kv_cache_grow(kv, r, (r->n_blocks + 1) * kv_cache_block_size(kv)));
        r->n_blocks--;
    }
}

/* Of a rank that has nothing to compute, or its KV would show it first. */
static void change_weights(const exec_t *self, const exec_batch_t *batch)
{
    sim_t *sim = self->rank->sim;
    bool lockstep = sim->o.moe && sim->o.ranks > 1;
    weight_state_t *weights =
        (weight_state_t *)(uintptr_t)group_weights(engine_core_group(self->rank->core));
    if (lockstep && batch->n_seqs == 0 && sim_plants(sim, SIM_CANARY_MIXED_STEP)) {
        weights->epoch++;
    } else if (sim_plants(sim, SIM_CANARY_GATED_STEP)) {
        weights->gates |= GATE_SESSION;
    }
}

static lk_status_t exec_step_post(executor_t *base, const exec_batch_t *batch, lk_error_t *err)
{
    exec_t *self = (exec_t *)base;
    sim_t *sim = self->rank->sim;
    batch = alias(self, batch);
    flip_weight(self);
    leak_block(self);
    change_weights(self, batch);
    self->batch = batch;
    self->rank->busy_ns = sim->now_ns + step_ns(self->rank);
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_STEP_POST, .rank = self->rank->rank, .batch = batch});
    sim_log(sim, "rank %u steps %llu: %zu sequences", self->rank->rank,
            (unsigned long long)batch->step, batch->n_seqs);
    sim->result.steps++;
    return self->inner->ops->step_post(self->inner, batch, err);
}

static lk_status_t exec_step_test(executor_t *base, exec_result_t *out, lk_error_t *err)
{
    exec_t *self = (exec_t *)base;
    sim_t *sim = self->rank->sim;
    if (sim->now_ns < self->rank->busy_ns) {
        return LK_INPROGRESS;
    }
    lk_status_t status = self->inner->ops->step_test(self->inner, out, err);
    if (status == LK_OK) {
        sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_STEP_DONE,
                                  .rank = self->rank->rank,
                                  .batch = self->batch});
    }
    return status;
}

/* The rank is woken when its time is over and when a peer's share arrives. */
static bool exec_step_waits(const executor_t *base)
{
    return true;
}

static void exec_step_abort(executor_t *base)
{
    exec_t *self = (exec_t *)base;
    sim_saw(self->rank->sim, &(sim_saw_t){.kind = SIM_SAW_STEP_ABORT, .rank = self->rank->rank});
    self->inner->ops->step_abort(self->inner);
}

static weight_sink_t exec_sink(executor_t *base)
{
    exec_t *self = (exec_t *)base;
    return self->device != NULL ? sim_device_sink(self->device) : executor_sink(self->inner);
}

static const executor_ops_t ops = {
    .name = "sim",
    .close = exec_close,
    .weights = exec_weights,
    .sink = exec_sink,
    .step_post = exec_step_post,
    .step_test = exec_step_test,
    .step_waits = exec_step_waits,
    .step_abort = exec_step_abort,
};

lk_status_t sim_exec_open(sim_rank_t *rank, const executor_config_t *config, executor_t **out,
                          lk_error_t *err)
{
    exec_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->base.ops = &ops;
    self->rank = rank;
    lk_status_t status = executor_null_ops.open(config, &self->inner, err);
    if (status != LK_OK) {
        free(self);
        return status;
    }
    if (rank->sim->o.nccl) {
        self->device = sim_device_sink_new(executor_sink(self->inner));
    }
    *out = &self->base;
    return LK_OK;
}
