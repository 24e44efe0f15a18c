/*
 * check_modes.c: what a pause promises beyond that nobody steps (check_pause.c): the rank that
 * answers has no step under way; requests end with "abort" only by a pause in mode abort, and
 * before it is answered; the KV of before a pause with clear_cache is never read again.
 */
#include "base/check.h"
#include "tests/sim/checkers.h"
#include "tests/sim/net.h"

#include <stdlib.h>

typedef struct {
    uint32_t front;
    uint64_t generation, number;
    pause_mode_t mode;
    bool *done; /* [ranks] */
} asked_t;

typedef struct {
    asked_t *calls;
    size_t n, cap;
    bool *in_step;      /* [ranks] */
    uint64_t *abort_ns; /* [ranks]: when it last answered a pause in mode abort */
    uint32_t *pending;  /* [ranks]: pauses in mode abort that it has not answered */
} state_t;

static asked_t *find(state_t *self, uint32_t front, uint64_t generation, uint64_t number)
{
    for (size_t i = self->n; i-- > 0;) {
        asked_t *c = &self->calls[i];
        if (c->front == front && c->generation == generation && c->number == number) {
            return c;
        }
    }
    return NULL;
}

static void on_cmd(sim_t *sim, state_t *self, const msg_cmd_t *cmd)
{
    if (cmd->kind != CMD_PAUSE ||
        find(self, (uint32_t)cmd->client, cmd->generation, cmd->number) != NULL) {
        return;
    }
    if (self->n == self->cap) {
        self->cap = 2 * self->cap + 32;
        self->calls = realloc(self->calls, self->cap * sizeof *self->calls);
        CHECK(self->calls != NULL);
    }
    asked_t *c = &self->calls[self->n++];
    *c = (asked_t){(uint32_t)cmd->client, cmd->generation, cmd->number, (pause_mode_t)cmd->mode,
                   calloc(sim->o.ranks, sizeof *c->done)};
    CHECK(c->done != NULL);
    for (uint32_t r = 0; c->mode == PAUSE_ABORT && r < sim->o.ranks; r++) {
        self->pending[r]++;
    }
}

static void on_done(sim_t *sim, state_t *self, uint32_t front, const msg_done_t *done)
{
    asked_t *c = find(self, front, done->generation, done->number);
    if (c == NULL || done->rank >= sim->o.ranks || c->done[done->rank]) {
        return;
    }
    c->done[done->rank] = true;
    if (c->mode == PAUSE_ABORT) {
        self->pending[done->rank]--;
        self->abort_ns[done->rank] = sim->now_ns;
    }
    if (done->status == LK_OK && self->in_step[done->rank]) {
        sim_fail(sim, "pause", "rank %llu answers a pause with a step under way",
                 (unsigned long long)done->rank);
    }
}

/* Or ended by its front end, when the group broke. Several lives of that may have used a handle. */
static bool left_by_client(const sim_t *sim, uint32_t front, uint64_t handle)
{
    for (size_t i = sim->n_requests; i-- > 0;) {
        const sim_request_t *r = sim->requests[i];
        if (r->front == front && r->handle == handle && (r->aborted || !r->open)) {
            return true;
        }
    }
    return false;
}

/* What a rank sends in the moment of its answer may leave after it. */
static void on_outputs(sim_t *sim, const state_t *self, uint32_t front,
                       const msg_outputs_t *outputs)
{
    uint64_t rank = outputs->rank;
    if (self->pending[rank] > 0 || self->abort_ns[rank] == sim->now_ns) {
        return;
    }
    for (size_t i = 0; i < outputs->outputs.count; i++) {
        const msg_output_t *out = &outputs->outputs.items[i];
        if (out->finish_reason == FINISH_ABORT && !left_by_client(sim, front, out->handle)) {
            sim_fail(sim, "pause",
                     "rank %llu ends a request with \"abort\", and no pause in mode abort is open",
                     (unsigned long long)rank);
        }
    }
}

static void on_sent(sim_t *sim, state_t *self, const sim_saw_t *saw)
{
    if (saw->msg->type == MSG_CMD) {
        on_cmd(sim, self, &saw->msg->cmd);
    } else if (saw->msg->type == MSG_DONE) {
        on_done(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->done);
    } else if (saw->msg->type == MSG_OUTPUTS) {
        on_outputs(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->outputs);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->in_step == NULL) {
        self->in_step = calloc(sim->o.ranks, sizeof *self->in_step);
        self->abort_ns = calloc(sim->o.ranks, sizeof *self->abort_ns);
        self->pending = calloc(sim->o.ranks, sizeof *self->pending);
        CHECK(self->in_step != NULL && self->abort_ns != NULL && self->pending != NULL);
    }
    switch (saw->kind) {
    case SIM_SAW_STEP_POST:
        self->in_step[saw->rank] = true;
        break;
    case SIM_SAW_STEP_DONE:
    case SIM_SAW_STEP_ABORT:
    case SIM_SAW_RANK_UP:
        self->in_step[saw->rank] = false;
        break;
    case SIM_SAW_SENT:
        on_sent(sim, self, saw);
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    for (size_t i = 0; i < self->n; i++) {
        free(self->calls[i].done);
    }
    free(self->calls);
    free(self->in_step);
    free(self->abort_ns);
    free(self->pending);
}

const sim_checker_t check_modes = {
    .name = "pause", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
