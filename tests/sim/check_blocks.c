/*
 * check_blocks.c: every KV block is referred to as often as the requests' block tables say, and by
 * nobody else: counted again, whenever a step begins or ends, from the tables alone.
 */
#include "base/check.h"
#include "engine_core/sched/scheduler_internal.h"
#include "tests/sim/checkers.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t *count; /* [blocks] */
} state_t;

static void count_table(sim_t *sim, state_t *self, uint32_t rank, const request_t *r)
{
    uint32_t n_blocks = (uint32_t)(sim->o.positions / sim->o.block_size);
    for (uint32_t b = 0; b < r->n_blocks; b++) {
        if (r->blocks[b] >= n_blocks) {
            sim_fail(sim, "kv", "rank %u: a table names block %u of %u", rank, r->blocks[b],
                     n_blocks);
            return;
        }
        self->count[r->blocks[b]]++;
    }
}

static void look(sim_t *sim, state_t *self, uint32_t rank)
{
    const scheduler_t *s = engine_core_scheduler(sim->ranks[rank].core);
    const kv_cache_t *kv = engine_core_kv(sim->ranks[rank].core);
    uint32_t n_blocks = (uint32_t)(sim->o.positions / sim->o.block_size), used = 0;
    memset(self->count, 0, n_blocks * sizeof *self->count);
    for (const request_t *r = s->running.head; r != NULL; r = r->next) {
        count_table(sim, self, rank, r);
    }
    for (const request_t *r = s->waiting.head; r != NULL; r = r->next) {
        count_table(sim, self, rank, r);
    }
    for (size_t i = 0; s->posted && i < s->batch.n_seqs; i++) {
        if (s->entries[i].ended) { /* in no list any more, but the step still writes there */
            count_table(sim, self, rank, s->entries[i].r);
        }
    }
    for (uint32_t b = 0; b < n_blocks && !sim->result.failed; b++) {
        used += self->count[b] > 0;
        if (kv_cache_references(kv, b) != self->count[b]) {
            sim_fail(sim, "kv", "rank %u: block %u has %u references, and %u tables name it", rank,
                     b, kv_cache_references(kv, b), self->count[b]);
        }
    }
    if (used != kv_cache_used(kv)) {
        sim_fail(sim, "kv", "rank %u: %u blocks are in tables, %u count as held", rank, used,
                 kv_cache_used(kv));
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (saw->kind == SIM_SAW_STEP_POST || saw->kind == SIM_SAW_STEP_DONE) {
        if (self->count == NULL) {
            self->count = calloc(sim->o.positions / sim->o.block_size, sizeof *self->count);
            CHECK(self->count != NULL);
        }
        look(sim, self, saw->rank);
    }
}

static void fini(sim_t *sim, void *state)
{
    free(((state_t *)state)->count);
}

const sim_checker_t check_blocks = {
    .name = "kv", .any_design = true, .state_size = sizeof(state_t), .saw = saw, .fini = fini};
