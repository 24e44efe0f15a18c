/* caller.c: people and programs that pause, resume, relabel and ask, one call at a time each. */
#include "base/check.h"
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The canary: after a failed weight call one number is another one. */
static void spoil_weights(sim_t *sim, const sim_call_t *call)
{
    const sim_rank_t *rank = &sim->ranks[0];
    if (call->kind == SIM_CALL_UPDATE && rank->core != NULL &&
        group_weights(engine_core_group(rank->core))->gates == 0 &&
        (call->status != LK_OK || call->verb == UPDATE_VERB_ABORT) &&
        sim_plants(sim, SIM_CANARY_HALF_UPDATE)) {
        const weight_table_t *table = rank->executor->ops->weights(rank->executor);
        ((float *)weight_table_at(table, 0)->data)[1] += 1;
    }
}

static void on_result(void *ctx, const engine_result_t *result)
{
    sim_call_t *call = ctx;
    sim_t *sim = call->sim;
    call->open = false;
    call->status = result->status;
    call->answered_ns = sim->now_ns;
    snprintf(call->text, sizeof call->text, "%s", result->text);
    sim_log(sim, "call %zu (%s of front end %u) is answered: %s %s", call->index,
            sim_call_name(call), call->front, lk_status_name(call->status), call->text);
    spoil_weights(sim, call);
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_ANSWERED, .call = call, .engine_result = result});
    if (call->fn != NULL) {
        call->fn(sim, call->ctx, call);
    }
}

static sim_call_t *call_new(sim_t *self)
{
    if (self->n_calls == self->cap_calls) {
        self->cap_calls = 2 * self->cap_calls + 64;
        self->calls = realloc(self->calls, self->cap_calls * sizeof *self->calls);
        CHECK(self->calls != NULL);
    }
    sim_call_t *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    call->index = self->n_calls;
    call->sim = self;
    self->calls[self->n_calls++] = call;
    return call;
}

const char *sim_call_name(const sim_call_t *call)
{
    static const char *const modes[] = {"pause", "pause abort", "pause keep", "pause wait"};
    switch (call->kind) {
    case SIM_CALL_PAUSE:
        return modes[call->mode];
    case SIM_CALL_RESUME:
        return "resume";
    case SIM_CALL_UTILITY:
        return "utility";
    case SIM_CALL_UPDATE:
        break;
    }
    return update_verb_name(call->verb);
}

static void ignore(void *ctx, const engine_result_t *result)
{
}

/* The old design: the front end remembers that it is paused, tells the engines, and answers. */
static void pause_here(sim_t *self, sim_call_t *call, uint64_t timeout_ns)
{
    sim_front_t *front = &self->fronts[call->front];
    front->paused = true;
    engine_client_pause(front->client, call->mode, call->clear_cache, timeout_ns, ignore, NULL);
    on_result(call, &(engine_result_t){.status = LK_OK, .text = ""});
}

sim_call_t *sim_call(sim_t *self, uint32_t front, sim_call_kind_t kind, uint64_t value,
                     bool clear_cache, const char *spec, uint64_t timeout_ns, sim_call_fn fn,
                     void *ctx)
{
    sim_call_t *call = call_new(self);
    engine_client_t *client = self->fronts[front].client;
    call->front = front;
    call->kind = kind;
    call->mode = kind == SIM_CALL_PAUSE ? (pause_mode_t)value : 0;
    call->verb = kind == SIM_CALL_UPDATE ? (update_verb_t)value : 0;
    call->clear_cache = clear_cache;
    call->asked_ns = self->now_ns;
    call->open = true;
    call->fn = fn;
    call->ctx = ctx;
    self->result.calls++;
    if (client == NULL) {
        sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_ASKED, .call = call});
        sim_post(self, LK_MS_NS, SIM_EV_REFUSED, 0, 0, call->index, NULL);
        return call;
    }
    sim_log(self, "call %zu: %s at front end %u", call->index, sim_call_name(call), front);
    sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_ASKED, .call = call});
    switch (kind) {
    case SIM_CALL_PAUSE:
        if (self->config.frontend_pause) {
            pause_here(self, call, timeout_ns);
        } else {
            engine_client_pause(client, call->mode, clear_cache, timeout_ns, on_result, call);
        }
        break;
    case SIM_CALL_RESUME:
        self->fronts[front].paused = false;
        engine_client_resume(client, timeout_ns, on_result, call);
        break;
    case SIM_CALL_UPDATE:
        engine_client_update(client, call->verb, spec, spec != NULL ? strlen(spec) : 0, timeout_ns,
                             on_result, call);
        break;
    case SIM_CALL_UTILITY:
        engine_client_utility(client, spec, "", timeout_ns, on_result, call);
        break;
    }
    return call;
}

/* Whoever called sees the connection end. */
void sim_calls_lost(sim_t *self, uint32_t front)
{
    for (size_t i = 0; i < self->n_calls && self->phase != SIM_DONE; i++) {
        if (self->calls[i]->open && self->calls[i]->front == front) {
            on_result(self->calls[i],
                      &(engine_result_t){.status = LK_ERR_PEER, .text = "connection reset"});
        }
    }
}

size_t sim_open_calls(const sim_t *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_calls; i++) {
        n += self->calls[i]->open;
    }
    return n;
}

void sim_call_refused(sim_t *self, size_t call)
{
    on_result(self->calls[call],
              &(engine_result_t){.status = LK_ERR_PEER, .text = "connection refused"});
}

/* ---- the callers ---- */

static void think(sim_t *self, uint32_t caller)
{
    if (self->phase == SIM_SAFETY) {
        sim_post(self, sim_around(self, self->o.caller_think_us * 1000), SIM_EV_CALLER, caller, 0,
                 0, NULL);
    }
}

static void on_answer(sim_t *self, void *ctx, const sim_call_t *call)
{
    bool *busy = ctx;
    *busy = false;
    think(self, (uint32_t)(busy - self->caller_busy));
}

static pause_mode_t draw_mode(sim_t *self)
{
    for (;;) {
        pause_mode_t mode = PAUSE_ABORT + (pause_mode_t)sim_below(self, 3);
        if (self->o.modes >> (mode - PAUSE_ABORT) & 1) {
            return mode;
        }
    }
}

void sim_caller_act(sim_t *self, uint32_t caller)
{
    static const char *const utilities[] = {"weight_info", "is_paused", "reset_prefix_cache",
                                            "status", "no_such_method"};
    if (self->phase != SIM_SAFETY || self->caller_busy[caller]) {
        return;
    }
    bool *busy = &self->caller_busy[caller];
    uint32_t front = (uint32_t)sim_below(self, self->o.frontends);
    if (!sim_front_runs(self, front)) {
        sim_post(self, LK_MS_NS, SIM_EV_CALLER, caller, 0, 0, NULL);
        return;
    }
    *busy = true;
    uint64_t timeout = 0;
    if (sim_chance(self, self->o.caller_short_timeouts)) {
        timeout = 1 + sim_below(self, 20 * self->o.latency_us * 1000);
    }
    uint64_t what = sim_below(self, 100);
    if (what < 38) {
        sim_call(self, front, SIM_CALL_PAUSE, draw_mode(self), sim_chance(self, 60), NULL, timeout,
                 on_answer, busy);
    } else if (what < 80) {
        sim_call(self, front, SIM_CALL_RESUME, 0, false, NULL, timeout, on_answer, busy);
    } else if (what < 88) {
        sim_call(self, front, SIM_CALL_UPDATE, UPDATE_VERB_SET_VERSION, false,
                 "{\"new_version\": \"by hand\"}", timeout, on_answer, busy);
    } else {
        sim_call(self, front, SIM_CALL_UTILITY, 0, false,
                 utilities[sim_below(self, LK_ARRAY_LEN(utilities))], 0, on_answer, busy);
    }
}

void sim_caller_start(sim_t *self)
{
    self->caller_busy = calloc(self->o.callers + 1, sizeof *self->caller_busy);
    CHECK(self->caller_busy != NULL);
    for (uint32_t c = 0; c < self->o.callers; c++) {
        think(self, c);
    }
}

void sim_caller_stop(sim_t *self)
{
    for (size_t i = 0; i < self->n_calls; i++) {
        free(self->calls[i]);
    }
    free(self->calls);
    free(self->caller_busy);
}
