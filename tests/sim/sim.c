#include "tests/sim/sim.h"
#include "base/check.h"
#include "base/log.h"
#include "tests/sim/checkers.h"
#include "tests/sim/mesh.h"
#include "tests/sim/net.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "tests/sim/scene.h"
#include "tests/sim/sender.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define START_NS  (10 * LK_SECOND_NS) /* for a cluster to serve */
#define NOTICE_NS (3 * LK_SECOND_NS)
#define CARE_NS   (200 * LK_MS_NS)
#define LIMIT     10 /* times max_events: more means that the run goes in circles */

static const char dense_model[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 8, "
    "\"intermediate_size\": 16, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, "
    "\"num_key_value_heads\": 1, \"head_dim\": 4, \"vocab_size\": 97, "
    "\"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"float32\", \"eos_token_id\": 1, "
    "\"hidden_act\": \"silu\"}";
static const char moe_model[] =
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": \"qwen3_moe\", "
    "\"hidden_size\": 8, \"intermediate_size\": 16, \"num_hidden_layers\": 1, "
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 4, \"vocab_size\": 97, "
    "\"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"float32\", \"eos_token_id\": 1, "
    "\"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 2, "
    "\"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], "
    "\"hidden_act\": \"silu\"}";

const char *sim_phase_name(sim_phase_t phase)
{
    static const char *const names[] = {"start", "safety", "heal", "probe", "done"};
    return names[phase];
}

/* ---- failure, log, trace ---- */

void sim_fail(sim_t *self, const char *check, const char *fmt, ...)
{
    if (self->result.failed) {
        return;
    }
    self->result.failed = true;
    snprintf(self->result.check, sizeof self->result.check, "%s", check);
    va_list args;
    va_start(args, fmt);
    vsnprintf(self->result.text, sizeof self->result.text, fmt, args);
    va_end(args);
    sim_log(self, "FAILED %s: %s", self->result.check, self->result.text);
}

void sim_log(const sim_t *self, const char *fmt, ...)
{
    if (!self->config.log) {
        return;
    }
    printf("%12.6f %7llu %-6s ", (double)self->now_ns / LK_SECOND_NS,
           (unsigned long long)self->events, sim_phase_name(self->phase));
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    putchar('\n');
}

void sim_trace(sim_t *self, uint64_t value)
{
    self->trace = lk_mix64(self->trace ^ value);
}

uint32_t sim_first_member(const sim_t *self)
{
    uint32_t r = 0;
    while (self->removed[r]) {
        r++;
    }
    return r;
}

uint64_t sim_fresh_life(sim_t *self)
{
    self->lives = LK_MAX(self->lives + 1, self->now_ns);
    return self->lives;
}

bool sim_plants(sim_t *self, sim_canary_t canary)
{
    if (self->config.canary != canary || self->planted || self->phase != SIM_SAFETY ||
        !sim_chance(self, 20)) {
        return false;
    }
    sim_log(self, "canary %s is out", sim_canary_name(canary));
    self->planted = true;
    return true;
}

/* ---- events: a heap ordered by (time, sequence) ---- */

static bool before(const sim_event_t *a, const sim_event_t *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->seq < b->seq;
}

static void push(sim_t *self, const sim_event_t *event)
{
    if (self->heap_n == self->heap_cap) {
        self->heap_cap = 2 * self->heap_cap + 256;
        self->heap = realloc(self->heap, self->heap_cap * sizeof *self->heap);
        CHECK(self->heap != NULL);
    }
    size_t i = self->heap_n++;
    for (; i > 0 && before(event, &self->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        self->heap[i] = self->heap[(i - 1) / 2];
    }
    self->heap[i] = *event;
}

void sim_post(sim_t *self, uint64_t delay_ns, sim_event_kind_t kind, uint32_t a, uint32_t b,
              uint64_t n, void *data)
{
    push(self, &(sim_event_t){self->now_ns + delay_ns, self->seq++, kind, a, b, n, data});
}

void sim_post_again(sim_t *self, const sim_event_t *event)
{
    sim_event_t again = *event;
    again.at_ns = self->now_ns;
    push(self, &again);
}

static sim_event_t pop(sim_t *self)
{
    sim_event_t first = self->heap[0], last = self->heap[--self->heap_n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= self->heap_n) {
            break;
        }
        if (child + 1 < self->heap_n && before(&self->heap[child + 1], &self->heap[child])) {
            child++;
        }
        if (!before(&self->heap[child], &last)) {
            break;
        }
        self->heap[i] = self->heap[child];
        i = child;
    }
    self->heap[i] = last;
    return first;
}

uint64_t sim_latency_ns(sim_t *self)
{
    uint64_t ns = sim_around(self, self->o.latency_us * 1000);
    return self->o.spikes > 0 && sim_chance(self, self->o.spikes) ? 20 * ns : ns;
}

/* ---- phases ---- */

/* Adds what there is by now, or takes it away: figures of a phase are end less beginning. */
static void add_figures(const sim_t *self, sim_figures_t *sum, bool minus)
{
    const sim_mesh_stats_t *mesh = &self->mesh_stats;
    sim_figures_t f = {.ns = self->now_ns,
                       .steps = self->result.steps,
                       .rounds = self->result.rounds,
                       .votes = mesh->votes,
                       .vote_bytes = mesh->vote_bytes,
                       .exchanges = mesh->exchanges,
                       .exchange_bytes = mesh->exchange_bytes};
    for (int link = 0; link < SIM_LINK_COUNT; link++) {
        f.messages[link] = sim_net_traffic(self, (sim_link_t)link)->messages;
        f.bytes[link] = sim_net_traffic(self, (sim_link_t)link)->bytes;
    }
    uint64_t *to = (uint64_t *)sum, *from = (uint64_t *)&f;
    for (size_t i = 0; i < sizeof f / sizeof *to; i++) {
        to[i] += minus ? -from[i] : from[i];
    }
}

static void enter_phase(sim_t *self, sim_phase_t phase)
{
    if (phase == SIM_SAFETY || phase == SIM_HEAL) {
        add_figures(self, &self->result.safety, phase == SIM_SAFETY);
    }
    self->phase = phase;
    self->phase_ns = self->now_ns;
    sim_log(self, "---- %s ----", sim_phase_name(phase));
    sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_PHASE});
}

bool sim_everybody_serves(const sim_t *self)
{
    uint64_t epoch = self->ranks[sim_first_member(self)].enrol.epoch;
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        const sim_rank_t *rank = &self->ranks[r];
        if (self->removed[r]) {
            continue;
        }
        if (rank->enrol.state != ENROL_MEMBER || rank->enrol.epoch != epoch ||
            rank->roster.n != self->n_members || !group_is_member(engine_core_group(rank->core)) ||
            group_updating(engine_core_group(rank->core))) {
            return false;
        }
    }
    for (uint32_t f = 0; f < self->o.frontends; f++) {
        if (!sim_front_serves(&self->fronts[f], epoch)) {
            return false;
        }
    }
    return true;
}

static bool is_enough(const sim_t *self, uint64_t safety_events)
{
    return self->scene != NULL ? sim_scene_over(self) : safety_events >= self->config.max_events;
}

/* Who has missed something knows it by now: everybody says something each second. */
static bool losses_are_noticed(const sim_t *self)
{
    return self->o.break_every_ms == 0 || self->now_ns - self->phase_ns >= NOTICE_NS;
}

static void advance_phase(sim_t *self, uint64_t safety_events)
{
    if (self->phase == SIM_START) {
        if (sim_everybody_serves(self)) {
            enter_phase(self, SIM_SAFETY);
            sim_trainer_start(self);
            sim_client_start(self);
            sim_caller_start(self);
            sim_fault_start(self);
        } else if (self->now_ns - self->phase_ns > START_NS && self->scene == NULL) {
            sim_fail(self, "start", "no front end serves after %llu s", START_NS / LK_SECOND_NS);
        }
    } else if (self->phase == SIM_SAFETY && is_enough(self, safety_events)) {
        enter_phase(self, SIM_HEAL);
        sim_fault_heal(self);
        sim_post(self, 0, SIM_EV_CARE, 0, 0, 0, NULL);
    } else if (self->phase == SIM_HEAL && sim_everybody_serves(self) &&
               sim_open_requests(self) == 0 && sim_open_calls(self) == 0 &&
               sim_trainers_idle(self) && losses_are_noticed(self)) {
        enter_phase(self, SIM_PROBE);
        sim_post(self, 0, SIM_EV_PROBE, 0, 0, 0, NULL);
    }
}

/* Nobody asks for anything any more, but somebody may have left the group paused. */
static void take_care(sim_t *self)
{
    if (self->phase == SIM_HEAL) {
        if (sim_open_calls(self) == 0 && sim_front_runs(self, 0)) {
            sim_call(self, 0, SIM_CALL_RESUME, 0, false, NULL, 0, NULL, NULL);
        }
        sim_post(self, CARE_NS, SIM_EV_CARE, 0, 0, 0, NULL);
    }
}

static void handle(sim_t *self, sim_event_t *event)
{
    switch (event->kind) {
    case SIM_EV_MESSAGE:
        sim_net_deliver(self, event);
        break;
    case SIM_EV_MESH:
        sim_mesh_on_frame(self, event);
        break;
    case SIM_EV_RANK:
        sim_rank_on_event(&self->ranks[event->a], event->at_ns);
        break;
    case SIM_EV_FRONT:
        sim_front_on_tick(&self->fronts[event->a], event->n);
        break;
    case SIM_EV_COORD:
        sim_coord_on_event(&self->coord, event->at_ns);
        break;
    case SIM_EV_CLIENT:
        if (event->b == 1) {
            sim_client_leave(self, event->a, event->n);
        } else {
            sim_client_act(self, event->a);
        }
        break;
    case SIM_EV_CALLER:
        sim_caller_act(self, event->a);
        break;
    case SIM_EV_TRAINER:
        if (event->b == 1) {
            sim_trainer_look(self, event->a);
        } else {
            sim_trainer_act(self, event->a);
        }
        break;
    case SIM_EV_PROBE:
        sim_probe_act(self);
        break;
    case SIM_EV_REFUSED:
        sim_call_refused(self, event->n);
        break;
    case SIM_EV_CARE:
        take_care(self);
        break;
    case SIM_EV_FAULT:
        sim_fault_act(self, event->a);
        break;
    case SIM_EV_CONT:
        sim_fault_continue(self, event->a, event->n);
        break;
    case SIM_EV_DIE:
        sim_fault_die(self, event->a, event->b, event->n);
        break;
    case SIM_EV_BORN:
        sim_fault_born(self, event->a);
        break;
    case SIM_EV_TOLD:
        sim_fault_told(self, event->a, event->n);
        break;
    case SIM_EV_SCENE:
        sim_scene_tick(self);
        break;
    case SIM_EV_COUNT:
        break;
    }
}

/* ---- life ---- */

static uint64_t env_now(void *ctx)
{
    return ((const sim_t *)ctx)->now_ns;
}

static void env_random(void *ctx, void *buf, size_t len)
{
    sim_t *self = ctx;
    for (size_t i = 0; i < len; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)lk_prng_u64(&self->prng);
    }
}

/* What the old design needs, and what nobody promised of it: only groups in lockstep could lock up;
 * a lost START was the end of it by itself; a broadcast had ten minutes. */
static void old_world(sim_options_t *o)
{
    o->moe = 1;
    o->ranks = LK_MAX(o->ranks, 2);
    o->lost_starts = 0;
    o->torn_streams = 0;
    o->stop_every_ms = o->kill_every_ms = 0;
    o->backend = o->backend == 0 ? 0 : 2;
    o->nccl = 0;
    o->control_timeout_ms = LK_MIN(o->control_timeout_ms, 1000);
    o->transfer_timeout_ms = 600000;
    o->swap = 0;
    o->trainers = LK_MIN(o->trainers, 1);
    o->trainer_deaths = 0;
    o->break_every_ms = 0;
    o->removals = 0;
}

static void open_world(sim_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    const char *model = self->o.moe ? moe_model : dense_model;
    CHECKF(model_config_parse(model, strlen(model), NULL, 0, &self->model, &err) == LK_OK, "%s",
           err.text);
    uint64_t positions = self->o.positions / self->o.block_size * self->o.block_size;
    self->max_model_len = (uint32_t)LK_MIN(positions, 200);
    self->checks = sim_checks_new(self);
    self->net = sim_net_new(self);
    self->mesh_last_ns = calloc(self->o.ranks * self->o.ranks, sizeof *self->mesh_last_ns);
    CHECK(self->mesh_last_ns != NULL);
    self->ranks = calloc(self->o.ranks, sizeof *self->ranks);
    self->fronts = calloc(self->o.frontends, sizeof *self->fronts);
    self->removed = calloc(self->o.ranks, sizeof *self->removed);
    self->n_members = (uint32_t)self->o.ranks;
    CHECK(self->ranks != NULL && self->fronts != NULL && self->removed != NULL);
    sim_scene_start(self);
    atomic_store(&nccl_fake_knobs.lag, (unsigned)self->o.nccl_lag);
    atomic_store(&nccl_fake_knobs.lost, (unsigned)self->o.nccl_tells);
    self->coord.sim = self;
    sim_coord_start(&self->coord);
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        self->ranks[r].sim = self;
        self->ranks[r].rank = r;
        sim_rank_start(&self->ranks[r]);
    }
    for (uint32_t f = 0; f < self->o.frontends; f++) {
        self->fronts[f].sim = self;
        self->fronts[f].index = f;
        sim_front_start(&self->fronts[f]);
    }
}

static void close_world(sim_t *self)
{
    sim_saw(self, &(sim_saw_t){.kind = SIM_SAW_END});
    self->phase = SIM_DONE; /* nobody reacts any more */
    sim_trainer_stop(self);
    for (uint32_t f = 0; f < self->o.frontends; f++) {
        sim_front_kill(&self->fronts[f]);
    }
    for (uint32_t r = 0; r < self->o.ranks; r++) {
        sim_rank_kill(&self->ranks[r]);
    }
    sim_coord_kill(&self->coord);
    sim_client_stop(self);
    sim_caller_stop(self);
    sim_fault_stop(self);
    sim_scene_stop(self);
    for (size_t i = 0; i < self->heap_n; i++) {
        free(self->heap[i].data);
    }
    unsigned left = sim_senders_reset();
    if (left > 0) {
        sim_fail(self, "resources", "%u communicators have not ended", left);
    }
    free(self->heap);
    free(self->mesh_last_ns);
    sim_net_destroy(&self->net);
    sim_checks_destroy(self, &self->checks);
    free(self->ranks);
    free(self->removed);
    free(self->fronts);
}

void sim_run(const sim_config_t *config, sim_result_t *out)
{
    sim_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->config = *config;
    self->o = config->options;
    if (config->frontend_pause) {
        old_world(&self->o);
    }
    self->env = (lk_env_t){self, env_now, env_random};
    self->now_ns = 1000 * LK_SECOND_NS;
    self->phase_ns = self->now_ns;
    lk_prng_seed(&self->prng, config->seed);
    open_world(self);
    uint64_t safety_events = 0, most = LIMIT * config->max_events + 1000000;
    while (self->phase != SIM_DONE && !self->result.failed) {
        CHECK(self->heap_n > 0);
        sim_event_t event = pop(self);
        self->now_ns = event.at_ns;
        self->events++;
        safety_events += self->phase == SIM_SAFETY;
        sim_trace(self, event.at_ns ^ ((uint64_t)event.kind << 56) ^ ((uint64_t)event.a << 40) ^
                            ((uint64_t)event.b << 24) ^ event.n);
        if (self->config.canary == SIM_CANARY_REAL_TIME) {
            sim_trace(self, lk_env_now_ns(lk_env_real()));
        }
        handle(self, &event);
        free(event.data);
        sim_checks_after(self);
        advance_phase(self, safety_events);
        if (self->events > most) {
            sim_fail(self, "liveness", "%llu events, and no end in sight",
                     (unsigned long long)self->events);
        }
    }
    self->result.events = self->events;
    self->result.trace = self->trace;
    self->result.virtual_ns = self->now_ns - 1000 * LK_SECOND_NS;
    close_world(self);
    *out = self->result; /* after the end: it may find what was left behind */
    free(self);
}
