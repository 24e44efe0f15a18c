/* trainer.c: trainers: the product's senders (sender.h), and the calls that go with them, in the
 * order a trainer makes them; now and then one gives up or dies halfway. */
#include "base/buf.h"
#include "base/check.h"
#include "tests/sim/checkers.h"
#include "tests/sim/sender.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_NS     20000ull
#define MAX_LOOK_NS (20 * LK_MS_NS)

typedef enum {
    IDLE,
    PAUSING,
    INITIALISING,
    STARTING,
    UPDATING,
    FINISHING,
    ABORTING,
    RESUMING
} stage_t;

struct sim_trainer {
    sim_t *sim;
    uint32_t index, front;
    stage_t stage;
    char name[48], token[32];
    sim_sender_t *sender;
    bool initialised, sending, paused;
    bool whole; /* the next session has to bring everything */
    bool alive; /* looks at its streams from time to time */
    uint64_t looks, sessions;
    size_t first, n, end; /* tensors of the update under way; of the session */
    tensor_desc_t *descs;
    void **data;
    size_t n_tensors;
    lk_buf_t spec;
    sim_call_fn repaired; /* the last phase waits for this session */
};

/* ---- connections ---- */

static void hang_up(sim_trainer_t *self)
{
    sim_sender_destroy(&self->sender);
    self->sending = self->initialised = false;
}

static void look_soon(sim_trainer_t *self)
{
    if (!self->alive) {
        self->alive = true;
        sim_post(self->sim, LOOK_NS, SIM_EV_TRAINER, self->index, 1, 0, NULL);
    }
}

/* As its front end answers get_world_size; a dead one's ranks are all there were. */
static uint32_t count_ranks(const sim_trainer_t *self)
{
    const sim_t *sim = self->sim;
    engine_client_info_t info = {.n_members = (uint32_t)sim->o.ranks};
    if (sim->fronts[self->front].client != NULL) {
        engine_client_info(sim->fronts[self->front].client, &info);
    }
    return info.n_members;
}

static void listen_anew(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    hang_up(self);
    snprintf(self->name, sizeof self->name, "trainer-%u-%llu", self->index,
             (unsigned long long)++self->sessions);
    snprintf(self->token, sizeof self->token, "token %u %llu", self->index,
             (unsigned long long)self->sessions);
    self->sender = sim_sender_new(sim, self->name, self->token, count_ranks(self));
    look_soon(self);
}

/* Dies without a word: its streams close, its session stays open. */
static bool dies(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    if (sim->phase != SIM_SAFETY || !sim_chance(sim, sim->o.trainer_deaths)) {
        return false;
    }
    sim_log(sim, "trainer %u dies", self->index);
    hang_up(self);
    self->paused = false;
    self->whole = true;
    return true;
}

/* Greets and sends; whatever moved, the ranks should look. */
static void look(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    self->alive = false;
    if (self->sender == NULL) {
        return;
    }
    bool moved = sim_sender_look(self->sender, &self->sending);
    if (sim->o.nccl && self->sending && moved && dies(self)) {
        sim_log(sim, "trainer %u was in a broadcast", self->index);
        return;
    }
    self->looks = moved ? 0 : self->looks + 1;
    for (uint32_t r = 0; moved && r < sim->o.ranks; r++) {
        sim_rank_wake(&sim->ranks[r], sim->now_ns + LOOK_NS);
    }
    if (self->stage == INITIALISING || self->stage == UPDATING || self->sending) {
        self->alive = true;
        uint64_t wait = LOOK_NS << LK_MIN(self->looks, 10);
        sim_post(sim, LK_MIN(wait, MAX_LOOK_NS), SIM_EV_TRAINER, self->index, 1, 0, NULL);
    }
}

/* ---- what it says ---- */

static const char *init_spec(sim_trainer_t *self)
{
    lk_buf_clear(&self->spec);
    lk_buf_printf(&self->spec, "{\"init_info\": {%s}}", sim_sender_init_info(self->sender));
    return lk_buf_cstr(&self->spec);
}

static const char *update_spec(sim_trainer_t *self)
{
    lk_buf_t *b = &self->spec;
    lk_buf_clear(b);
    lk_buf_str(b, "{\"update_info\": {\"names\": [");
    for (size_t i = self->first; i < self->first + self->n; i++) {
        lk_buf_printf(b, "%s\"%s\"", i > self->first ? ", " : "", self->descs[i].name);
    }
    lk_buf_str(b, "], \"dtype_names\": [");
    for (size_t i = 0; i < self->n; i++) {
        lk_buf_printf(b, "%s\"float32\"", i > 0 ? ", " : "");
    }
    lk_buf_str(b, "], \"shapes\": [");
    for (size_t i = self->first; i < self->first + self->n; i++) {
        char shape[64];
        tensor_desc_shape_text(&self->descs[i], shape, sizeof shape);
        lk_buf_printf(b, "%s%s", i > self->first ? ", " : "", shape);
    }
    lk_buf_printf(b, "], \"packed\": true, \"packed_buffer_size_bytes\": %u}}", SIM_BUCKET_BYTES);
    return lk_buf_cstr(b);
}

static void new_values(sim_trainer_t *self)
{
    uint64_t x = lk_prng_u64(&self->sim->prng);
    for (size_t i = self->first; i < self->first + self->n; i++) {
        uint64_t numel = 0;
        CHECK(tensor_desc_numel(&self->descs[i], &numel));
        for (uint64_t k = 0; k < numel; k++) {
            x = lk_mix64(x);
            ((float *)self->data[i])[k] = (float)(x >> 40) * 0x1p-20f - 8;
        }
    }
}

/* ---- the session, step by step ---- */

static void on_answer(sim_t *sim, void *ctx, const sim_call_t *call);

static void call(sim_trainer_t *self, stage_t stage, update_verb_t verb, const char *spec)
{
    self->stage = stage;
    sim_call(self->sim, self->front, SIM_CALL_UPDATE, verb, false, spec, 0, on_answer, self);
}

static void rest(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    self->stage = IDLE;
    if (sim->phase == SIM_SAFETY) {
        sim_post(sim, sim_around(sim, sim->o.trainer_think_us * 1000), SIM_EV_TRAINER, self->index,
                 0, 0, NULL);
    }
}

static void end_session(sim_trainer_t *self, const sim_call_t *last)
{
    if (self->repaired != NULL) {
        sim_call_fn fn = self->repaired;
        self->repaired = NULL;
        self->stage = IDLE;
        fn(self->sim, NULL, last);
    } else if (self->paused) {
        self->paused = false;
        self->stage = RESUMING;
        sim_call(self->sim, self->front, SIM_CALL_RESUME, 0, false, NULL, 0, on_answer, self);
    } else {
        rest(self);
    }
}

static void next_update(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    if (self->first >= self->end) {
        char spec[64];
        snprintf(spec, sizeof spec, "{\"weight_version\": \"v%u.%llu\"}", self->index,
                 (unsigned long long)self->sessions);
        lk_buf_clear(&self->spec);
        lk_buf_str(&self->spec, spec);
        call(self, FINISHING, UPDATE_VERB_FINISH, lk_buf_cstr(&self->spec));
        return;
    }
    if (self->repaired == NULL && sim_chance(sim, sim->o.trainer_aborts)) {
        self->whole = true;
        call(self, ABORTING, UPDATE_VERB_ABORT, NULL);
        return;
    }
    size_t left = self->end - self->first;
    self->n = self->repaired != NULL || sim_chance(sim, 50) ? left : 1 + sim_below(sim, left);
    new_values(self);
    lk_error_t err = LK_ERROR_INIT;
    self->sending = sim_sender_begin(self->sender, self->descs + self->first,
                                     self->data + self->first, self->n, &err) == LK_OK;
    look_soon(self);
    call(self, UPDATING, UPDATE_VERB_UPDATE, update_spec(self));
    if (self->sending && sim_plants(sim, SIM_CANARY_WRONG_VALUES)) {
        *(float *)self->data[self->first] += 1;
    }
    if (self->sending && self->sender != NULL && dies(self)) {
        sim_log(sim, "trainer %u was sending", self->index);
    }
}

/* The session did not come to its end: what it left open is closed, the next one brings all. */
static void give_up(sim_trainer_t *self)
{
    if (self->sending && self->sender != NULL) {
        sim_sender_cancel(self->sender);
    }
    self->sending = false;
    self->initialised = false;
    self->whole = true;
    call(self, ABORTING, UPDATE_VERB_ABORT, NULL);
}

static void begin_session(sim_trainer_t *self)
{
    sim_t *sim = self->sim;
    bool whole = self->whole || !sim_chance(sim, sim->o.partial_updates);
    self->first = whole ? 0 : sim_below(sim, self->n_tensors);
    self->end =
        whole ? self->n_tensors : self->first + 1 + sim_below(sim, self->n_tensors - self->first);
    if (self->initialised && self->sender != NULL && sim_sender_usable(self->sender)) {
        call(self, STARTING, UPDATE_VERB_START, NULL);
        return;
    }
    listen_anew(self);
    call(self, INITIALISING, UPDATE_VERB_INIT, init_spec(self));
}

static void on_answer(sim_t *sim, void *ctx, const sim_call_t *answer)
{
    sim_trainer_t *self = ctx;
    bool ok = answer->status == LK_OK;
    if (self->sender == NULL && self->stage != RESUMING && self->stage != PAUSING) {
        end_session(self, answer); /* it died meanwhile: a new one starts later */
        return;
    }
    switch (self->stage) {
    case IDLE:
        break;
    case PAUSING:
        self->paused = ok;
        begin_session(self);
        break;
    case INITIALISING:
        self->initialised = ok;
        if (!ok) {
            give_up(self);
        } else if (dies(self)) {
            end_session(self, answer);
        } else {
            call(self, STARTING, UPDATE_VERB_START, NULL);
        }
        break;
    case STARTING:
        if (!ok) {
            give_up(self);
        } else if (dies(self)) {
            end_session(self, answer);
        } else {
            next_update(self);
        }
        break;
    case UPDATING:
        self->sending = false;
        self->first += self->n;
        if (!ok) {
            give_up(self);
        } else if (dies(self)) {
            end_session(self, answer);
        } else {
            next_update(self);
        }
        break;
    case FINISHING:
        self->whole = !ok;
        sim->result.updates += ok;
        if (ok) {
            end_session(self, answer);
        } else {
            give_up(self);
        }
        break;
    case ABORTING:
        end_session(self, answer);
        break;
    case RESUMING:
        rest(self);
        break;
    }
}

void sim_trainer_act(sim_t *sim, uint32_t trainer)
{
    sim_trainer_t *self = &sim->trainers[trainer];
    if (self->stage != IDLE || sim->phase != SIM_SAFETY) {
        return;
    }
    self->front = (uint32_t)sim_below(sim, sim->o.frontends);
    if (!sim_front_runs(sim, self->front)) {
        rest(self);
        return;
    }
    if (sim_chance(sim, sim->o.trainer_pauses)) {
        self->stage = PAUSING;
        pause_mode_t mode = sim_chance(sim, 50) ? PAUSE_KEEP : PAUSE_ABORT;
        sim_call(sim, self->front, SIM_CALL_PAUSE, mode, sim_chance(sim, 50), NULL, 0, on_answer,
                 self);
    } else {
        begin_session(self);
    }
}

void sim_trainer_look(sim_t *sim, uint32_t trainer)
{
    look(&sim->trainers[trainer]);
}

void sim_trainer_repair(sim_t *sim, sim_call_fn fn)
{
    sim_trainer_t *self = &sim->trainers[0];
    CHECK(self->stage == IDLE);
    self->front = 0;
    self->whole = true;
    self->initialised = false;
    self->repaired = fn;
    begin_session(self);
}

sim_sent_t sim_trainer_sent(const sim_call_t *asked)
{
    const sim_trainer_t *self = asked->ctx;
    return (sim_sent_t){self->descs, self->data, self->first, self->n, self->n_tensors};
}

bool sim_trainers_idle(const sim_t *sim)
{
    for (uint32_t t = 0; t < LK_MAX(sim->o.trainers, 1); t++) {
        if (sim->trainers[t].stage != IDLE) {
            return false;
        }
    }
    return true;
}

/* ---- start and stop ---- */

static void describe_tensors(sim_trainer_t *self)
{
    executor_t *executor = self->sim->ranks[0].executor;
    const weight_table_t *table = executor->ops->weights(executor);
    self->n_tensors = weight_table_count(table);
    self->descs = calloc(self->n_tensors, sizeof *self->descs);
    self->data = calloc(self->n_tensors, sizeof *self->data);
    CHECK(self->descs != NULL && self->data != NULL);
    for (size_t i = 0; i < self->n_tensors; i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        char *name = strdup(slot->name); /* the rank may be gone sooner */
        CHECK(name != NULL);
        self->descs[i] = (tensor_desc_t){.name = name, .dtype = LK_DTYPE_F32, .ndim = slot->ndim};
        memcpy(self->descs[i].shape, slot->shape, sizeof slot->shape);
        self->data[i] = calloc(slot->numel, sizeof(float));
        CHECK(self->data[i] != NULL);
    }
}

void sim_trainer_start(sim_t *sim)
{
    uint64_t n = LK_MAX(sim->o.trainers, 1); /* one for the last phase */
    sim->trainers = calloc(n, sizeof *sim->trainers);
    CHECK(sim->trainers != NULL);
    for (uint32_t t = 0; t < n; t++) {
        sim_trainer_t *self = &sim->trainers[t];
        self->sim = sim;
        self->index = t;
        lk_buf_init(&self->spec, 0);
        describe_tensors(self);
        if (t < sim->o.trainers) {
            rest(self);
        }
    }
}

void sim_trainer_stop(sim_t *sim)
{
    for (uint32_t t = 0; sim->trainers != NULL && t < LK_MAX(sim->o.trainers, 1); t++) {
        sim_trainer_t *self = &sim->trainers[t];
        hang_up(self);
        for (size_t i = 0; i < self->n_tensors; i++) {
            free((char *)(uintptr_t)self->descs[i].name);
            free(self->data[i]);
        }
        free(self->data);
        free(self->descs);
        lk_buf_fini(&self->spec);
    }
    free(sim->trainers);
    sim->trainers = NULL;
}
