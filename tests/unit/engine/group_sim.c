#include "tests/unit/engine/group_sim.h"
#include "base/check.h"
#include "base/hash.h"

#include "tests/lib/test_main.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_ROUND = 1, LOG_STEP, LOG_UPDATE };

/* ---- checkers ---- */

/* Every rank's sequence of collectives is a prefix of one sequence. */
static void check_collective(sim_t *self, uint32_t r, uint64_t type, uint64_t a, uint64_t b)
{
    sim_rank_t *rank = &self->ranks[r];
    uint64_t words[] = {type, a, b};
    uint64_t entry = lk_hash64(words, sizeof words, 0);
    ck_assert_uint_lt(rank->log_at, SIM_MAX_LOG);
    if (rank->log_at == self->log_n) {
        self->log[self->log_n++] = entry;
    }
    ck_assert_msg(self->log[rank->log_at] == entry,
                  "seed %llx: rank %u: collective %zu is type %llu (%llu, %llu), another's is not",
                  (unsigned long long)self->config.seed, r, rank->log_at, (unsigned long long)type,
                  (unsigned long long)a, (unsigned long long)b);
    rank->log_at++;
}

static uint64_t content_of(uint64_t epoch)
{
    return epoch > 0 ? 999 + epoch : 0;
}

/* No step between an answered pause and its end, and none behind a closed gate; every step on the
 * weights of its epoch, whole. */
static void check_step(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    ck_assert_uint_eq(group_weights(rank->group)->gates, 0);
    ck_assert_msg(rank->live == content_of(group_weights(rank->group)->epoch) &&
                      (self->config.shadow || !rank->touched),
                  "seed %llx: rank %u steps on weights that nobody committed",
                  (unsigned long long)self->config.seed, r);
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        for (size_t i = 0; i < self->frontends[f].n_calls; i++) {
            const sim_call_t *call = &self->frontends[f].calls[i];
            if (call->cmd.kind == CMD_PAUSE && (call->done & ~call->cancelled & 1u << r) &&
                call->status[r] == LK_OK) {
                ck_assert_msg(rank->lifts > call->lifts[r],
                              "seed %llx: rank %u steps though it answered pause %zu of %u",
                              (unsigned long long)self->config.seed, r, i, f);
            }
        }
    }
}

/* A pause that its caller is told of: nobody is in a step. Outcomes agree in kind. */
static void check_answered(const sim_t *self, const sim_call_t *call)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        ck_assert_msg(call->status[r] == call->status[0], "seed %llx: ranks answer %s and %s",
                      (unsigned long long)self->config.seed, lk_status_name(call->status[0]),
                      lk_status_name(call->status[r]));
        if (call->cmd.kind == CMD_PAUSE && call->status[0] == LK_OK) {
            ck_assert(!self->ranks[r].in_step || self->ranks[r].lifts > call->lifts[r] ||
                      (call->cancelled >> r & 1));
        }
    }
}

/* ---- set-up ---- */

static lk_status_t sim_check(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                             lk_error_t *err)
{
    const sim_rank_t *rank = ctx;
    if (rank->sim->refuse >> rank->rank & 1) {
        return lk_error_set(err, LK_ERR_INVALID, "rank %u refuses", rank->rank);
    }
    return LK_OK;
}

void sim_init(sim_t *self, const sim_config_t *config)
{
    memset(self, 0, sizeof *self);
    self->config = *config;
    self->complete = true;
    self->content_differs = -1;
    lk_prng_seed(&self->prng, config->seed);
    self->hub = allreduce_mem_new(config->n_ranks, false, config->doorbell);
    for (uint32_t r = 0; r < config->n_ranks; r++) {
        sim_rank_t *rank = &self->ranks[r];
        rank->sim = self;
        rank->rank = r;
        rank->allreduce = allreduce_mem_rank(self->hub, r);
        rank->group = group_new(&(group_config_t){.rank = r,
                                                  .size = config->n_ranks,
                                                  .n_frontends = config->n_frontends,
                                                  .group_epoch = 7,
                                                  .sync_interval = config->sync_interval,
                                                  .lockstep = config->lockstep,
                                                  .shadow = config->shadow,
                                                  .doorbell = config->doorbell,
                                                  .check = sim_check,
                                                  .check_ctx = rank});
        ck_assert_ptr_nonnull(rank->group);
    }
    for (uint32_t f = 0; f < config->n_frontends; f++) {
        self->frontends[f].generation = 1;
        self->frontends[f].next = 1;
    }
}

void sim_fini(sim_t *self)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        group_destroy(&self->ranks[r].group);
    }
    allreduce_mem_destroy(&self->hub);
}

/* ---- what a rank does with its actions ---- */

static sim_call_t *find_call(sim_t *self, const group_action_t *a)
{
    sim_frontend_t *frontend = &self->frontends[a->frontend];
    for (size_t i = 0; i < frontend->n_calls; i++) {
        sim_call_t *call = &frontend->calls[i];
        if (call->cmd.generation == a->generation && call->cmd.number == a->number) {
            return call;
        }
    }
    ck_abort_msg("an answer to a call that nobody made");
    return NULL;
}

/* From here on nothing is claimed about the pause that this CANCEL names. */
static void cancel_call(sim_t *self, uint32_t r, const msg_cmd_t *cancel)
{
    sim_frontend_t *frontend = &self->frontends[cancel->client];
    for (size_t i = 0; i < frontend->n_calls; i++) {
        sim_call_t *call = &frontend->calls[i];
        if (call->cmd.generation == cancel->generation && call->cmd.number == cancel->target) {
            call->cancelled |= 1u << r;
        }
    }
}

static void on_done(sim_t *self, uint32_t r, const group_action_t *a)
{
    sim_rank_t *rank = &self->ranks[r];
    rank->lifts += a->kind == CMD_RESUME;
    sim_call_t *call = find_call(self, a);
    ck_assert_msg(!(call->done & 1u << r), "answered twice");
    call->done |= 1u << r;
    call->status[r] = a->status;
    snprintf(call->text[r], sizeof call->text[r], "%s", a->text);
    call->lifts[r] = rank->lifts;
    if (a->kind == CMD_CANCEL) { /* whose caller was told that it failed */
        cancel_call(self, r, &call->cmd);
    }
    if (call->done == (1u << self->config.n_ranks) - 1) {
        check_answered(self, call);
        call->acknowledged = call->status[0] == LK_OK;
    }
}

static void push_start(sim_t *self, uint32_t r, uint64_t round)
{
    sim_rank_t *rank = &self->ranks[r];
    if (rank->n_starts < SIM_MAX_QUEUE) {
        rank->starts[rank->n_starts++] = round;
    }
}

static void enter_update(sim_t *self, uint32_t r, const group_action_t *a)
{
    sim_rank_t *rank = &self->ranks[r];
    ck_assert(!rank->in_step && !rank->carrying);
    rank->carrying = true;
    rank->committing = a->act == GROUP_ACT_UPDATE_COMMIT;
    rank->verb = rank->committing ? UPDATE_VERB_FINISH : (update_verb_t)a->verb;
    rank->carrying_round = group_round(rank->group);
    if (!self->config.cancels) { /* a rank that was cancelled in time does not enter */
        check_collective(self, r, LOG_UPDATE, rank->verb, rank->committing);
    }
}

static void take_actions(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    group_action_t a;
    while (group_next_action(rank->group, &a)) {
        switch (a.act) {
        case GROUP_ACT_SEEN:
            break;
        case GROUP_ACT_REPEAT:
            break;
        case GROUP_ACT_DONE:
            on_done(self, r, &a);
            break;
        case GROUP_ACT_FINISH_ALL:
            rank->aborted += rank->waiting + rank->n_running;
            rank->waiting = 0;
            rank->n_running = 0;
            break;
        case GROUP_ACT_CLEAR_CACHE:
            rank->cleared++;
            break;
        case GROUP_ACT_UPDATE_ENTER:
        case GROUP_ACT_UPDATE_COMMIT:
            enter_update(self, r, &a);
            break;
        case GROUP_ACT_UPDATE_OUTCOME:
            rank->expired = false;
            break;
        case GROUP_ACT_SESSION_CLOSE:
            rank->expired = false;
            break;
        case GROUP_ACT_PUBLISH:
            ck_assert(!rank->in_step);
            rank->published++;
            rank->touched = false;
            rank->live = rank->content;
            break;
        case GROUP_ACT_RELABEL:
            break;
        case GROUP_ACT_DIRTY:
            ck_assert(!self->config.shadow);
            rank->failed += rank->waiting + rank->n_running;
            rank->waiting = 0;
            rank->n_running = 0;
            break;
        case GROUP_ACT_REPORT:
            self->cached = (msg_group_t){.round = group_round(rank->group),
                                         .wave = group_wave(rank->group),
                                         .run = group_run(rank->group),
                                         .paused = pause_is_paused(group_pause(rank->group)),
                                         .epoch = group_pause(rank->group)->epoch};
            break;
        case GROUP_ACT_ANNOUNCE:
            for (uint32_t to = 0; to < self->config.n_ranks; to++) {
                push_start(self, to, group_round(rank->group));
            }
            break;
        }
    }
}

/* ---- the collective sequence of a rank ---- */

static group_view_t view_of(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    const allreduce_ops_t *ops = rank->allreduce.ops;
    return (group_view_t){.work = rank->waiting + rank->n_running > 0,
                          .quiet = rank->n_running == 0,
                          .clean = self->config.shadow || !rank->touched,
                          .expired = rank->expired,
                          .peer_waiting =
                              ops->peer_waiting != NULL &&
                              ops->peer_waiting(rank->allreduce.ctx, group_round(rank->group)),
                          .content = rank->content};
}

static bool can_step(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    return self->config.lockstep || rank->n_running > 0 ||
           (rank->waiting > 0 && !pause_is_paused(group_pause(rank->group)));
}

static void enter_step(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    check_step(self, r);
    if (self->config.lockstep) {
        check_collective(self, r, LOG_STEP, rank->steps, group_weights(rank->group)->epoch);
    }
    rank->steps++;
    rank->in_step = true;
    while (!pause_is_paused(group_pause(rank->group)) && rank->waiting > 0 &&
           rank->n_running < LK_ARRAY_LEN(rank->running)) {
        rank->waiting--;
        rank->running[rank->n_running++] = 1 + (uint32_t)lk_prng_below(&self->prng, 6);
    }
    rank->work_steps += rank->n_running > 0;
}

static void leave_step(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    rank->in_step = false;
    size_t n = 0;
    for (size_t i = 0; i < rank->n_running; i++) {
        if (--rank->running[i] > 0) {
            rank->running[n++] = rank->running[i];
        }
    }
    rank->n_running = n;
    group_step_done(rank->group);
}

static bool step_complete(const sim_t *self, uint32_t r)
{
    for (uint32_t q = 0; self->config.lockstep && q < self->config.n_ranks; q++) {
        if (self->ranks[q].steps < self->ranks[r].steps) {
            return false;
        }
    }
    return true;
}

static bool is_transfer(const sim_rank_t *rank)
{
    return rank->verb == UPDATE_VERB_INIT || rank->verb == UPDATE_VERB_UPDATE;
}

/* A transfer needs every rank in it; one that was cancelled elsewhere ends by its deadline. */
static bool transfer_complete(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    for (uint32_t q = 0; is_transfer(rank) && q < self->config.n_ranks; q++) {
        if (group_round(self->ranks[q].group) < rank->carrying_round) {
            return self->cancelled;
        }
    }
    return true;
}

static void leave_update(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    lk_error_t result = LK_ERROR_INIT;
    bool fails =
        self->config.random_failures && is_transfer(rank) && lk_prng_below(&self->prng, 100) < 15;
    if (fails || (self->cancelled && lk_prng_below(&self->prng, 2) == 0 && is_transfer(rank))) {
        lk_error_set(&result, LK_ERR_TIMEOUT, "transfer without progress on rank %u", r);
    }
    if (rank->verb == UPDATE_VERB_UPDATE) {
        rank->touched |= result.status == LK_OK || lk_prng_below(&self->prng, 2) == 0;
    }
    if (rank->verb == UPDATE_VERB_FINISH && !rank->committing &&
        (group_weights(rank->group)->gates & GATE_DIRTY) && !self->complete) {
        lk_error_set(&result, LK_ERR_STATE, "incomplete: lm_head.weight is missing");
    }
    if (rank->committing && self->config.random_failures && lk_prng_below(&self->prng, 100) < 15) {
        lk_error_set(&result, LK_ERR_NO_MEMORY, "rank %u has no memory to commit", r);
    } else if (rank->committing) {
        rank->touched = false;
        rank->content =
            content_of(rank->published + 1) + (self->content_differs == (int64_t)r ? 1u << 30 : 0);
    }
    rank->carrying = false;
    group_update_done(rank->group, &result);
}

/* Goes on beside whatever else the rank does. */
static bool is_beside(const sim_rank_t *rank)
{
    bool shadow = rank->sim->config.shadow;
    return rank->carrying && (rank->verb == UPDATE_VERB_INIT ||
                              (shadow && (rank->verb == UPDATE_VERB_UPDATE || rank->committing)));
}

static bool can_go_on(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    if (rank->in_step) {
        return step_complete(self, r);
    }
    if (rank->carrying && !is_beside(rank)) {
        return transfer_complete(self, r);
    }
    if (group_posted(rank->group)) {
        return allreduce_mem_ready(self->hub, r);
    }
    group_view_t view = view_of(self, r);
    group_next_t next = group_next(rank->group, &view);
    return next == GROUP_VOTE || (next == GROUP_STEP && can_step(self, r));
}

static bool rank_enabled(const sim_t *self, uint32_t r)
{
    const sim_rank_t *rank = &self->ranks[r];
    return can_go_on(self, r) ||
           (is_beside(rank) && !rank->never_ends && transfer_complete(self, r));
}

static void rank_act(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    uint64_t vec[ALLREDUCE_MAX_LEN];
    lk_error_t err = LK_ERROR_INIT;
    bool ends = is_beside(rank) && !rank->never_ends && transfer_complete(self, r);
    if (ends && (!can_go_on(self, r) || lk_prng_below(&self->prng, 4) == 0)) {
        leave_update(self, r);
    } else if (rank->in_step) {
        leave_step(self, r);
    } else if (rank->carrying && !is_beside(rank)) {
        leave_update(self, r);
    } else if (group_posted(rank->group)) {
        ck_ok(rank->allreduce.ops->test(rank->allreduce.ctx, vec, &err));
        lk_status_t status = group_decide(rank->group, vec, self->now_ns, &err);
        ck_assert_msg(status == LK_OK, "%s", err.text);
    } else {
        group_view_t view = view_of(self, r);
        if (group_next(rank->group, &view) == GROUP_STEP) {
            enter_step(self, r);
        } else {
            check_collective(self, r, LOG_ROUND, group_round(rank->group), 0);
            group_vote(rank->group, &view, self->now_ns, vec);
            ck_ok(rank->allreduce.ops->post(rank->allreduce.ctx, group_round(rank->group), vec,
                                            group_vector_len(rank->group), &err));
        }
    }
    take_actions(self, r);
}

/* ---- the scheduler ---- */

typedef struct {
    enum { EVENT_CMD, EVENT_VOTE, EVENT_START, EVENT_RANK, EVENT_TIME } kind;
    uint32_t a, b;
} sim_event_t;

static size_t enabled_events(const sim_t *self, sim_event_t *out)
{
    size_t n = 0;
    bool out_there = false;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        for (uint32_t f = 0; f < self->config.n_frontends; f++) {
            if (self->links[f][r].n > 0 && !self->links[f][r].blocked) {
                out[n++] = (sim_event_t){EVENT_CMD, f, r};
            }
        }
        for (uint32_t to = 0; to < self->config.n_ranks; to++) {
            if (allreduce_mem_in_flight(self->hub, r, to)) {
                out[n++] = (sim_event_t){EVENT_VOTE, r, to};
            }
        }
        if (self->ranks[r].n_starts > 0) {
            out[n++] = (sim_event_t){EVENT_START, r, 0};
        }
        if (rank_enabled(self, r)) {
            out[n++] = (sim_event_t){EVENT_RANK, r, 0};
        }
        out_there |= group_posted(self->ranks[r].group);
    }
    if (!self->config.doorbell && out_there) {
        out[n++] = (sim_event_t){EVENT_TIME, 0, 0};
    }
    return n;
}

void sim_deliver(sim_t *self, uint32_t f, uint32_t r)
{
    sim_link_t *link = &self->links[f][r];
    msg_cmd_t cmd = link->items[link->head % SIM_MAX_QUEUE];
    link->head++;
    link->n--;
    group_on_cmd(self->ranks[r].group, &cmd);
}

static void deliver_start(sim_t *self, uint32_t r)
{
    sim_rank_t *rank = &self->ranks[r];
    size_t i = lk_prng_below(&self->prng, rank->n_starts);
    uint64_t round = rank->starts[i];
    bool doubled = lk_prng_below(&self->prng, 8) == 0;
    if (!doubled) {
        rank->starts[i] = rank->starts[--rank->n_starts];
    }
    if (lk_prng_below(&self->prng, 100) >= self->config.loss) {
        group_on_start(rank->group, true, round);
    }
}

bool sim_event(sim_t *self)
{
    sim_event_t events[128];
    size_t n = enabled_events(self, events);
    if (n == 0) {
        return false;
    }
    self->events++;
    sim_event_t e = events[lk_prng_below(&self->prng, n)];
    switch (e.kind) {
    case EVENT_CMD:
        sim_deliver(self, e.a, e.b);
        take_actions(self, e.b);
        break;
    case EVENT_VOTE:
        allreduce_mem_deliver(self->hub, e.a, e.b);
        break;
    case EVENT_START:
        deliver_start(self, e.a);
        break;
    case EVENT_RANK:
        rank_act(self, e.a);
        break;
    case EVENT_TIME:
        self->now_ns += GROUP_ANNOUNCE_NS;
        for (uint32_t r = 0; r < self->config.n_ranks; r++) {
            group_on_time(self->ranks[r].group, self->now_ns);
            take_actions(self, r);
        }
        break;
    }
    return true;
}

void sim_settle(sim_t *self, uint64_t max_events)
{
    for (uint64_t i = 0; sim_event(self); i++) {
        ck_assert_msg(i < max_events, "seed %llx: no rest after %llu events",
                      (unsigned long long)self->config.seed, (unsigned long long)max_events);
    }
}

/* ---- callers ---- */

void sim_send(sim_t *self, uint32_t f, size_t call, unsigned mask)
{
    sim_call_t *c = &self->frontends[f].calls[call];
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        if ((mask >> r & 1) && !(c->sent >> r & 1)) {
            sim_link_t *link = &self->links[f][r];
            ck_assert_uint_lt(link->n, SIM_MAX_QUEUE);
            link->items[(link->head + link->n++) % SIM_MAX_QUEUE] = c->cmd;
            c->sent |= 1u << r;
        }
    }
}

size_t sim_call(sim_t *self, uint32_t f, uint64_t kind, uint64_t value, bool clear_cache,
                unsigned mask)
{
    sim_frontend_t *frontend = &self->frontends[f];
    ck_assert_uint_lt(frontend->n_calls, SIM_MAX_CALLS);
    static const char version[] = "{\"weight_version\": \"v\"}";
    bool labelled =
        kind == CMD_UPDATE && (value == UPDATE_VERB_SET_VERSION || value == UPDATE_VERB_FINISH);
    size_t i = frontend->n_calls++;
    frontend->calls[i] = (sim_call_t){
        .cmd = {.client = f,
                .generation = frontend->generation,
                .number = frontend->next++,
                .kind = kind,
                .mode = kind == CMD_PAUSE ? value : 0,
                .clear_cache = clear_cache,
                .target = kind == CMD_CANCEL ? value : 0,
                .verb = kind == CMD_UPDATE ? value : 0,
                .spec = labelled ? (msg_str_t){version, sizeof version - 1} : (msg_str_t){"", 0}}};
    sim_send(self, f, i, mask);
    return i;
}

void sim_restart_frontend(sim_t *self, uint32_t f)
{
    self->frontends[f].generation++;
    self->frontends[f].next = 1;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        sim_link_t *link = &self->links[f][r];
        link->n = lk_prng_below(&self->prng, link->n + 1); /* a suffix is lost */
        link->blocked = false;
    }
}

void sim_add(sim_t *self, uint32_t rank, uint32_t n)
{
    if (group_weights(self->ranks[rank].group)->gates & GATE_DIRTY) {
        self->ranks[rank].failed += n;
        return;
    }
    self->ranks[rank].waiting += n;
    if (self->config.lockstep && !self->cached.run && !self->cached.paused) {
        for (uint32_t r = 0; r < self->config.n_ranks; r++) { /* FIRST_REQ */
            push_start(self, r, self->cached.round);
        }
    }
}

void sim_cancel_update(sim_t *self, uint32_t rank, uint32_t f, uint64_t number)
{
    bool in_flight = group_on_cancel_update(self->ranks[rank].group, f,
                                            self->frontends[f].generation, number, "cancelled");
    ck_assert(self->config.cancels);
    self->cancelled = true;
    if (in_flight && self->ranks[rank].carrying) {
        lk_error_t result = LK_ERROR_INIT;
        lk_error_set(&result, LK_ERR_CANCELED, "cancelled");
        self->ranks[rank].carrying = false;
        group_update_done(self->ranks[rank].group, &result);
        take_actions(self, rank);
    }
}

bool sim_answered(const sim_t *self, uint32_t f, size_t call)
{
    return self->frontends[f].calls[call].done == (1u << self->config.n_ranks) - 1;
}

lk_status_t sim_status(const sim_t *self, uint32_t f, size_t call)
{
    const sim_call_t *c = &self->frontends[f].calls[call];
    ck_assert_msg(sim_answered(self, f, call), "call %zu of %u: answered by %x only", call, f,
                  c->done);
    return c->status[0];
}

uint64_t sim_steps(const sim_t *self)
{
    uint64_t steps = 0;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        steps += self->ranks[r].steps;
    }
    return steps;
}
