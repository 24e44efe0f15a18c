/* probe.c: the last phase: after all that happened the cluster has to work as if nothing had. */
#include "base/check.h"
#include "tests/sim/checkers.h"

#include <stdio.h>

typedef enum {
    PROBE_RESUME,
    PROBE_ABORT,
    PROBE_REPAIR,
    PROBE_REQUESTS,
    PROBE_WAIT,
    PROBE_PAUSE,
    PROBE_LIFT,
    PROBE_END
} probe_stage_t;

static void next(sim_t *self, probe_stage_t stage)
{
    self->probe.stage = stage;
    self->probe.waiting = false;
    sim_post(self, LK_MS_NS, SIM_EV_PROBE, 0, 0, 0, NULL);
}

static void on_answer(sim_t *self, void *ctx, const sim_call_t *call)
{
    if (call->status == LK_ERR_TIMEOUT && self->probe.stage == PROBE_RESUME) {
        next(self, PROBE_RESUME); /* an update that its caller left may hold up the rounds */
        return;
    }
    if (call->status != LK_OK) {
        char ranks[3000];
        sim_describe(self, ranks, sizeof ranks);
        sim_fail(self, "liveness", "afterwards %s does not work: %s %s%s", sim_call_name(call),
                 lk_status_name(call->status), call->text, ranks);
        return;
    }
    next(self, self->probe.stage + 1);
}

static void ask(sim_t *self, sim_call_kind_t kind, uint64_t value)
{
    self->probe.waiting = true;
    sim_call(self, 0, kind, value, false, NULL, 0, on_answer, NULL);
}

/* No front end lets a request through to a rank that is not there. */
static void check_refused(sim_t *self, uint32_t rank)
{
    for (uint32_t f = 0; f < self->o.frontends; f++) {
        if (sim_request_add(self, SIM_NO_CLIENT, f, rank, 2, 2) != NULL) {
            sim_fail(self, "requests", "front end %u takes a request for rank %u, which is removed",
                     f, rank);
        }
    }
}

static void ask_requests(sim_t *self)
{
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        if (self->removed[r]) {
            check_refused(self, r);
        }
    }
    self->probe.first_request = self->n_requests;
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        if (self->removed[r]) {
            continue;
        }
        uint32_t n = LK_MIN(self->max_model_len / 2, 8);
        uint32_t front = r % (uint32_t)self->o.frontends;
        if (sim_request_add(self, SIM_NO_CLIENT, front, r, n, n) == NULL) {
            sim_fail(self, "liveness", "afterwards front end %u refuses a request for rank %u",
                     front, r);
        }
    }
    next(self, PROBE_WAIT);
}

static void wait_requests(sim_t *self)
{
    for (size_t i = self->probe.first_request; i < self->n_requests; i++) {
        const sim_request_t *r = self->requests[i];
        if (r->open) {
            next(self, PROBE_WAIT);
            return;
        }
        if (r->finish != FINISH_LENGTH) {
            sim_fail(self, "liveness", "afterwards a request on rank %lld ends with %d (%s)",
                     (long long)r->pin, (int)r->finish, lk_status_name(r->status));
        }
    }
    next(self, PROBE_PAUSE);
}

/* The canary: rank 0 gets a request that its front end knows nothing of. */
static void forget_a_request(sim_t *self)
{
    uint32_t prompt[2] = {3, 4};
    msg_t msg = {.type = MSG_ADD, .generation = self->fronts[0].generation};
    msg.add = (msg_add_t){
        .handle = UINT64_MAX,
        .prompt = {prompt, sizeof prompt},
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 4, .logprobs = -1}};
    engine_core_on_message(self->ranks[sim_first_member(self)].core, 0, &msg);
}

static bool is_paused(const sim_t *self)
{
    bool paused = false;
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        paused |= !self->removed[r] &&
                  pause_is_paused(group_pause(engine_core_group(self->ranks[r].core)));
    }
    return paused;
}

void sim_probe_act(sim_t *self)
{
    if (self->probe.waiting) {
        return;
    }
    bool dirty = false;
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        dirty |= !self->removed[r] &&
                 (group_gates(engine_core_group(self->ranks[r].core)) & GATE_DIRTY) != 0;
    }
    switch ((probe_stage_t)self->probe.stage) {
    case PROBE_RESUME:
        ask(self, SIM_CALL_RESUME, 0);
        break;
    case PROBE_ABORT:
        if (self->o.backend == 0) {
            next(self, PROBE_REPAIR);
        } else {
            ask(self, SIM_CALL_UPDATE, UPDATE_VERB_ABORT);
        }
        break;
    case PROBE_REPAIR:
        if (dirty || (self->o.backend != 0 && sim_chance(self, 30))) {
            self->probe.waiting = true;
            sim_trainer_repair(self, on_answer);
        } else {
            next(self, PROBE_REQUESTS);
        }
        break;
    case PROBE_REQUESTS:
        if (is_paused(self)) { /* by a command that a dead front end left behind */
            next(self, PROBE_RESUME);
        } else {
            ask_requests(self);
        }
        break;
    case PROBE_WAIT:
        wait_requests(self);
        break;
    case PROBE_PAUSE:
        ask(self, SIM_CALL_PAUSE, PAUSE_KEEP);
        break;
    case PROBE_LIFT:
        ask(self, SIM_CALL_RESUME, 0);
        break;
    case PROBE_END:
        if (self->config.canary == SIM_CANARY_FORGOTTEN) {
            forget_a_request(self);
        }
        self->phase = SIM_DONE;
        break;
    }
}
