/* client.c: clients of /v1/completions: each asks, waits or goes away, thinks, and asks again. */
#include "base/check.h"
#include "tests/sim/checkers.h"

#include <stdlib.h>
#include <string.h>

static void think(sim_t *self, uint32_t client)
{
    if (self->phase == SIM_SAFETY) {
        sim_post(self, sim_around(self, self->o.client_think_us * 1000), SIM_EV_CLIENT, client, 0,
                 0, NULL);
    }
}

static void ended(sim_request_t *r)
{
    sim_t *sim = r->sim;
    r->open = false;
    if (r->client != SIM_NO_CLIENT) {
        sim->client_request[r->client] = 0;
        think(sim, r->client);
    }
}

static void on_output(void *ctx, uint64_t handle, const msg_output_t *out)
{
    sim_request_t *r = ctx;
    bool last = out->finish_reason != FINISH_NONE;
    if (last && r->client != SIM_NO_CLIENT && sim_plants(r->sim, SIM_CANARY_LOST_END)) {
        return;
    }
    sim_saw(r->sim, &(sim_saw_t){.kind = SIM_SAW_OUTPUT, .request = r, .output = out});
    uint32_t n = (uint32_t)(out->token_ids.len / sizeof(uint32_t));
    for (uint32_t i = 0; i < n && r->n_tokens < r->n_prompt + r->max_tokens; i++) {
        r->epochs[r->n_tokens - r->n_prompt] = out->epoch;
        memcpy(&r->tokens[r->n_tokens++], (const uint8_t *)out->token_ids.data + 4 * i, 4);
    }
    r->sim->result.tokens += n;
    r->finish = (finish_reason_t)out->finish_reason;
    r->status = (lk_status_t)out->error_status;
    if (r->finish != FINISH_NONE) {
        sim_log(r->sim, "request %zu ends: %llu %s", r->index,
                (unsigned long long)out->finish_reason, msg_cstr(out->error));
        ended(r);
    }
    if (last && sim_plants(r->sim, SIM_CANARY_DOUBLE_FINISH)) {
        on_output(ctx, handle, out);
    }
}

static sim_request_t *new_request(sim_t *self, uint32_t n_prompt, uint32_t max_tokens)
{
    if (self->n_requests == self->cap_requests) {
        self->cap_requests = 2 * self->cap_requests + 64;
        self->requests = realloc(self->requests, self->cap_requests * sizeof *self->requests);
        CHECK(self->requests != NULL);
    }
    sim_request_t *r = calloc(1, sizeof *r);
    CHECK(r != NULL);
    r->tokens = calloc(n_prompt + max_tokens + 1, sizeof *r->tokens);
    r->epochs = calloc(max_tokens + 1, sizeof *r->epochs);
    CHECK(r->tokens != NULL && r->epochs != NULL);
    r->sim = self;
    r->index = self->n_requests;
    self->requests[self->n_requests++] = r;
    return r;
}

sim_request_t *sim_request_add(sim_t *self, uint32_t client, uint32_t front, int64_t pin,
                               uint32_t n_prompt, uint32_t max_tokens)
{
    sim_request_t *r = new_request(self, n_prompt, max_tokens);
    r->client = client;
    r->front = front;
    r->pin = pin;
    r->n_prompt = r->n_tokens = n_prompt;
    r->max_tokens = max_tokens;
    r->open = true;
    /* few beginnings, so that prefixes are shared; the rest differs */
    uint32_t family = (uint32_t)sim_below(self, 3),
             shared = (uint32_t)sim_below(self, n_prompt + 1);
    for (uint32_t i = 0; i < n_prompt; i++) {
        r->tokens[i] =
            2 + (i < shared ? (7 * i + 31 * family) % 90 : (uint32_t)sim_below(self, 90));
    }
    engine_request_t request = {.id = "r",
                                .prompt = r->tokens,
                                .n_prompt = n_prompt,
                                .sampling = {.top_p = 1,
                                             .repetition_penalty = 1,
                                             .max_tokens = max_tokens,
                                             .ignore_eos = true,
                                             .logprobs = -1},
                                .rank = pin};
    lk_error_t err = LK_ERROR_INIT;
    sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_ADDED, .request = r});
    lk_status_t status =
        engine_client_add(self->fronts[front].client, &request, on_output, r, &r->handle, &err);
    self->result.requests++;
    if (status != LK_OK) {
        sim_log(self, "request %zu is refused: %s", r->index, err.text);
        r->finish = FINISH_ERROR;
        r->status = status;
        r->open = false;
        return NULL;
    }
    sim_log(self, "request %zu: %u + %u tokens", r->index, n_prompt, max_tokens);
    return r;
}

static void go_away(sim_t *self, sim_request_t *r)
{
    sim_log(self, "request %zu: its client goes away", r->index);
    engine_client_abort(self->fronts[r->front].client, r->handle);
    r->aborted = true;
    sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_ABORTED, .request = r});
    ended(r);
}

void sim_client_act(sim_t *self, uint32_t client)
{
    size_t open = self->client_request[client];
    if (open != 0) { /* the event of its going away, if it is still the same request */
        return;
    }
    if (self->phase != SIM_SAFETY) {
        return;
    }
    const sim_options_t *o = &self->o;
    uint32_t front = (uint32_t)sim_below(self, o->frontends);
    /* the old design keeps requests back; a process that is stopped does not read any */
    if (self->fronts[front].paused || !sim_front_runs(self, front)) {
        sim_post(self, LK_MS_NS, SIM_EV_CLIENT, client, 0, 0, NULL);
        return;
    }
    int64_t pin = sim_chance(self, 30) ? (int64_t)sim_below(self, o->ranks) : -1;
    uint32_t n_prompt =
        1 + (uint32_t)sim_below(self, LK_MIN(o->max_prompt, self->max_model_len - 2));
    uint32_t room = self->max_model_len - n_prompt;
    uint32_t max_tokens = 1 + (uint32_t)sim_below(self, LK_MIN(o->max_output, room));
    sim_request_t *r = sim_request_add(self, client, front, pin, n_prompt, max_tokens);
    if (r == NULL) {
        sim_post(self, 1000000 + sim_around(self, o->client_think_us * 1000), SIM_EV_CLIENT, client,
                 0, 0, NULL);
        return;
    }
    if (!r->open) {
        return; /* it has ended already */
    }
    self->client_request[client] = 1 + r->index;
    if (sim_chance(self, o->client_aborts)) {
        sim_post(self, sim_below(self, 20 * o->step_us * 1000), SIM_EV_CLIENT, client, 1, r->index,
                 NULL);
    }
}

void sim_client_leave(sim_t *self, uint32_t client, size_t request)
{
    if (self->client_request[client] != 1 + request) {
        return;
    }
    if (sim_front_runs(self, self->requests[request]->front)) {
        go_away(self, self->requests[request]);
    } else { /* nobody notices before it goes on */
        sim_post(self, LK_MS_NS, SIM_EV_CLIENT, client, 1, request, NULL);
    }
}

void sim_requests_lost(sim_t *self, uint32_t front)
{
    for (size_t i = 0; i < self->n_requests && self->phase != SIM_DONE; i++) {
        sim_request_t *r = self->requests[i];
        if (r->open && r->front == front) {
            r->aborted = true;
            sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_ABORTED, .request = r});
            ended(r);
        }
    }
}

size_t sim_open_requests(const sim_t *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_requests; i++) {
        n += self->requests[i]->open;
    }
    return n;
}

void sim_client_start(sim_t *self)
{
    self->client_request = calloc(self->o.clients + 1, sizeof *self->client_request);
    CHECK(self->client_request != NULL);
    for (uint32_t c = 0; c < self->o.clients; c++) {
        think(self, c);
    }
}

void sim_client_stop(sim_t *self)
{
    for (size_t i = 0; i < self->n_requests; i++) {
        free(self->requests[i]->tokens);
        free(self->requests[i]->epochs);
        free(self->requests[i]);
    }
    free(self->requests);
    free(self->client_request);
}
