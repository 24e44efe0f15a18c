/* rank.c: an engine's process: the handshake and the group epochs as engine_core/engine_enrol.c has
 * them, around the real enrol machine and engine core, between simulated sockets. */
#include "base/check.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/checkers.h"
#include "tests/sim/exec.h"
#include "tests/sim/mesh.h"
#include "tests/sim/net.h"
#include "tests/sim/transfer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOP_NS     2000ull /* one turn of its loop */
#define LOOK_NS     50000ull
#define MAX_LOOK_NS (20 * LK_MS_NS)

static uint32_t node_of(const sim_rank_t *self)
{
    return sim_node_rank(self->sim, self->rank);
}

/* *sequence: of the newest one over that connection */
static void send_numbered(sim_rank_t *self, sim_link_t link, uint32_t to, uint64_t to_life,
                          const msg_t *msg, uint64_t *sequence)
{
    msg_t m = *msg;
    m.sender_role = MSG_ROLE_ENGINE;
    m.sender_rank = self->rank;
    m.generation = self->generation;
    m.sequence = ++*sequence;
    sim_net_send(self->sim, link, node_of(self), to, to_life, &m);
}

static void send_msg(sim_rank_t *self, sim_link_t link, uint32_t to, uint64_t to_life,
                     const msg_t *msg)
{
    send_numbered(self, link, to, to_life, msg, &self->sequence);
}

static void to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    sim_rank_t *self = ctx;
    send_numbered(self, SIM_LINK_OUTPUT, sim_node_front(self->sim, frontend),
                  self->front_lives[frontend], msg, &self->said[frontend]);
}

static void to_coordinator(void *ctx, const msg_t *msg)
{
    send_msg(ctx, SIM_LINK_EVENTS, sim_node_coord(), 0, msg);
}

static void step_waits_for(void *ctx, char *out, size_t room)
{
    sim_mesh_step_missing(((sim_rank_t *)ctx)->mesh, out, room);
}

static int64_t lost_rank(void *ctx)
{
    return sim_mesh_lost(((sim_rank_t *)ctx)->mesh);
}

/* What waits in its sockets: everything while it is stopped, and what is for a core until there is
 * one. */
void sim_rank_listen(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    bool stopped = sim->stopped != NULL && sim->stopped[node_of(self)];
    unsigned core = 1u << SIM_LINK_INPUT | 1u << SIM_LINK_WAVE;
    sim_net_hold(sim, node_of(self), stopped ? ~0u : self->core == NULL ? core : 0);
}

/* ---- what it says ---- */

uint64_t sim_rank_weights(const sim_rank_t *self)
{
    uint64_t held = self->core != NULL ? group_weights(engine_core_group(self->core))->epoch : 0;
    return LK_MAX(self->weight_floor, held);
}

static void say_hello(sim_rank_t *self, const char *why)
{
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                              .rank = self->rank,
                              .pid = self->generation,
                              .config_hash = msg_str("sim"),
                              .mesh_address = msg_str(sim_mesh_address(self->mesh)),
                              .left_epoch = self->enrol.left,
                              .member_of = enrol_member_of(&self->enrol),
                              .why = msg_str(why),
                              .weight_epoch = sim_rank_weights(self),
                              .heard_epoch = self->enrol.epoch,
                              .revision = self->enrol.revision,
                              .members = self->roster.n};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), 0, &msg);
}

static void say_here(sim_rank_t *self, uint32_t frontend)
{
    msg_t here = {.type = MSG_ENGINE_HERE};
    const char *why = self->core != NULL ? group_left_why(engine_core_group(self->core)) : NULL;
    here.engine_here = (msg_engine_here_t){self->rank, self->generation, self->enrol.epoch,
                                           self->said[frontend], msg_str(why != NULL ? why : "")};
    send_msg(self, SIM_LINK_HERE, sim_node_front(self->sim, frontend), self->front_lives[frontend],
             &here);
}

static void say_ready(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    char digest[DIGEST_HEX_SIZE];
    digest_hex(weight_table_digest(self->executor->ops->weights(self->executor)), digest);
    msg_t msg = {.type = MSG_READY};
    msg.ready = (msg_ready_t){.role = MSG_ROLE_ENGINE,
                              .rank = self->rank,
                              .num_blocks = sim->o.positions / sim->o.block_size,
                              .block_size = sim->o.block_size,
                              .max_model_len = sim->max_model_len,
                              .vocab_size = sim->model.vocab_size,
                              .dtype = msg_str("float32"),
                              .digest = msg_str(digest),
                              .group_epoch = self->enrol.epoch,
                              .lockstep = sim->o.moe && sim->o.ranks > 1};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), 0, &msg);
}

/* ---- entering and leaving ---- */

static lk_status_t open_executor(sim_rank_t *self, lk_error_t *err)
{
    const sim_options_t *o = &self->sim->o;
    bool ep = o->moe && o->ranks > 1;
    ep_t exchange = ep ? sim_mesh_ep(self->mesh) : ep_local();
    if (ep) { /* it is connected later */
        exchange.rank = self->roster.place;
        exchange.size = self->roster.n;
    }
    self->opened = self->roster;
    executor_config_t config = {.model = &self->sim->model,
                                .dtype = LK_DTYPE_F32,
                                .shadow = o->swap == 1,
                                .load_dummy = true,
                                .dummy_seed = 11,
                                .block_size = (uint32_t)o->block_size,
                                .num_blocks = (uint32_t)(o->positions / o->block_size),
                                .max_seqs = (uint32_t)o->max_num_seqs,
                                .max_tokens = (uint32_t)o->max_batched_tokens,
                                .threads = 1,
                                .ep = exchange};
    return sim_exec_open(self, &config, &self->executor, err);
}

static lk_status_t open_core(sim_rank_t *self, lk_error_t *err)
{
    sim_t *sim = self->sim;
    const sim_options_t *o = &sim->o;
    engine_core_config_t config = {
        .rank = self->rank,
        .dp_size = (uint32_t)o->ranks,
        .roster = self->roster,
        .n_frontends = (uint32_t)o->frontends,
        .group_epoch = self->enrol.epoch,
        .shadow = o->swap == 1,
        .rejoin = self->enrol.epoch > 1,
        .weight_floor = self->weight_floor,
        .lockstep = o->moe && o->ranks > 1,
        .sync_interval = (uint32_t)o->sync_interval,
        .reject_while_paused = o->reject_while_paused,
        .heartbeat_ns = LK_SECOND_NS,
        .dead_after_ns = SIM_DEAD_AFTER_NS,
        /* the old design had no deadline that ends an engine */
        .control_timeout_ns =
            sim->config.frontend_pause ? 600 * LK_SECOND_NS : o->control_timeout_ms * LK_MS_NS,
        .transfer_timeout_ns = o->transfer_timeout_ms * LK_MS_NS,
        .scheduler = {.max_num_seqs = (uint32_t)o->max_num_seqs,
                      .max_num_batched_tokens = (uint32_t)o->max_batched_tokens,
                      .max_model_len = sim->max_model_len,
                      .vocab_size = sim->model.vocab_size,
                      .eos_token_ids = {sim->model.eos_token_ids[0]},
                      .n_eos = 1,
                      .max_waiting = 1000},
        .num_blocks = (uint32_t)(o->positions / o->block_size),
        .block_size = (uint32_t)o->block_size,
        .enable_prefix_caching = o->prefix_cache,
        .model = &sim->model,
        .executor = self->executor,
        .allreduce = sim_mesh_allreduce(self->mesh),
        .wte = sim_transfer_ops(sim),
        .env = &self->env,
        .host = {self, to_frontend, to_coordinator, step_waits_for, lost_rank}};
    return engine_core_new(&config, &self->core, err);
}

static void form(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    lk_error_t err = LK_ERROR_INIT;
    if (self->core != NULL) {
        engine_core_form(self->core, self->enrol.epoch, self->weight_floor, &self->roster);
    } else if (open_core(self, &err) != LK_OK) {
        sim_fail(sim, "start", "engine %u can not start: %s", self->rank, err.text);
        return;
    }
    sim_rank_listen(self);
    sim_log(sim, "rank %u is in group epoch %llu", self->rank,
            (unsigned long long)self->enrol.epoch);
    sim_saw(sim,
            &(sim_saw_t){.kind = SIM_SAW_FORMED, .rank = self->rank, .epoch = self->enrol.epoch});
    self->sim->group_epoch = LK_MAX(self->sim->group_epoch, self->enrol.epoch);
}

/* The life behind "input 1 1000": the front end's address dies with it. */
static uint64_t life_of(msg_str_t address)
{
    unsigned front;
    unsigned long long life = 0;
    return sscanf(msg_cstr(address), "input %u %llu", &front, &life) == 2 ? life : 0;
}

static void link_all(sim_rank_t *self, const msg_init_t *init)
{
    for (uint32_t f = 0; f < self->sim->o.frontends; f++) {
        uint64_t life = life_of(init->inputs.items[f].text);
        bool first = self->front_lives[f] == 0, changed = self->front_lives[f] != life;
        self->front_lives[f] = life;
        self->said[f] = changed ? 0 : self->said[f]; /* another connection */
        if (changed && !first && self->core != NULL) {
            engine_core_drop_frontend(self->core, f);
            say_here(self, f);
        }
    }
}

static void leave(sim_rank_t *self, int64_t lost, const char *why)
{
    if (self->core != NULL) {
        engine_core_leave(self->core, lost, why);
    }
    sim_mesh_leave(self->mesh, lost, why);
    sim_log(self->sim, "rank %u leaves: %s", self->rank, why);
    sim_saw(self->sim, &(sim_saw_t){.kind = SIM_SAW_LEFT, .rank = self->rank});
}

/* The share of the experts is another one. */
static void follow_members(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    const roster_t *now = &self->roster, *was = &self->opened;
    lk_error_t err = LK_ERROR_INIT;
    if (!sim->o.moe || sim->o.ranks == 1 || (now->n == was->n && now->place == was->place)) {
        return;
    }
    sim_log(sim, "rank %u loads its weights anew, as %u of %u", self->rank, now->place, now->n);
    if (self->core != NULL) {
        engine_core_reload(self->core, now);
    }
    self->executor->ops->close(self->executor);
    lk_status_t status = open_executor(self, &err);
    if (status == LK_OK && self->core != NULL) {
        status = engine_core_reloaded(self->core, self->executor, &err);
    }
    if (status != LK_OK) {
        sim_fail(sim, "start", "engine %u can not load again: %s", self->rank, err.text);
        return;
    }
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_RANK_UP, .rank = self->rank});
}

/* What enrol says, in this order; init is NULL where it asks for nothing of it. */
static void carry_out(sim_rank_t *self, unsigned actions, const msg_init_t *init, int64_t lost,
                      const char *why)
{
    if (actions & ENROL_LEAVE) {
        leave(self, lost, why);
    }
    if (actions & ENROL_HELLO) {
        say_hello(self, why);
    }
    if (actions & (ENROL_CONNECT | ENROL_RELINK)) {
        if (self->front_lives[0] == 0) {
            sim_net_subscribe(self->sim, node_of(self));
        }
        link_all(self, init);
    }
    if (actions & ENROL_CONNECT) {
        self->weight_floor = init->weight_floor;
        follow_members(self);
        sim_mesh_connect(self->mesh, init->group_epoch, &self->roster, init->mesh.items);
    }
    if (actions & ENROL_FORM) {
        form(self);
    }
    if (actions & ENROL_READY) {
        say_ready(self);
    }
    for (uint32_t f = 0; (actions & ENROL_HERE) && f < self->sim->o.frontends; f++) {
        say_here(self, f);
    }
    if (actions & ENROL_END) {
        sim_fault_ended(self->sim, node_of(self), why);
    }
}

static void lose(sim_rank_t *self, int64_t lost, const char *why)
{
    char text[LK_ERROR_TEXT_MAX];
    snprintf(text, sizeof text, "%s", why); /* may be the core's, which is about to change it */
    carry_out(self, enrol_on(&self->enrol, ENROL_ON_LOST, self->sim->now_ns), NULL, lost, text);
}

static bool look_at_mesh(sim_rank_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = LK_INPROGRESS;
    if (self->enrol.state == ENROL_CONNECTING) {
        status = sim_mesh_connect_test(self->mesh, &err);
        if (status == LK_OK) {
            carry_out(self, enrol_on(&self->enrol, ENROL_ON_CONNECTED, self->sim->now_ns), NULL, -1,
                      "");
        } else if (status < 0) {
            lose(self, sim_mesh_lost(self->mesh), err.text);
        }
    } else if (self->enrol.state == ENROL_MEMBER) {
        if (sim_mesh_poll(self->mesh, &err) < 0) {
            status = LK_ERR_PEER;
            lose(self, sim_mesh_lost(self->mesh), err.text);
        } else if (engine_core_left(self->core) != NULL) { /* a collective failed */
            status = LK_ERR_PEER;
            lose(self, sim_mesh_lost(self->mesh), engine_core_left(self->core));
        }
    }
    return status != LK_INPROGRESS;
}

/* ---- time ---- */

void sim_rank_wake(sim_rank_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    at_ns = LK_MAX(at_ns, sim->now_ns);
    if (self->generation != 0 && at_ns < self->wake_ns) {
        self->wake_ns = at_ns;
        sim_post(sim, at_ns - sim->now_ns, SIM_EV_RANK, self->rank, 0, 0, NULL);
    }
}

static uint64_t next_look(const sim_rank_t *self)
{
    sim_t *sim = self->sim;
    uint64_t next = sim->now_ns + 20 * LK_MS_NS;
    if (self->core != NULL && self->enrol.state == ENROL_MEMBER) {
        next = LK_MAX(engine_core_deadline(self->core), sim->now_ns + LOOP_NS);
    }
    if (self->core != NULL && group_updating(engine_core_group(self->core))) {
        /* the trainer wakes it when it sends */
        uint64_t look = LOOK_NS << LK_MIN(self->idle_looks, 10);
        next = LK_MAX(next, sim->now_ns + LK_MIN(look, MAX_LOOK_NS));
    }
    if (self->busy_ns > sim->now_ns) {
        next = LK_MIN(next, self->busy_ns);
    }
    return next;
}

/* Canaries: the group is idle, and this rank thinks that it is not; it thinks that it was. */
static void run_alone(sim_rank_t *self)
{
    group_t *group = (group_t *)(uintptr_t)engine_core_group(self->core);
    if (self->sim->o.ranks > 1 && !group->posted && group_is_member(group) &&
        sim_plants(self->sim, SIM_CANARY_OTHER_STATE)) {
        group->wave++;
    }
    if (self->sim->o.moe && self->sim->o.ranks > 1 && !group->run && !group->posted &&
        group->weights.gates == 0 && group->update.phase == UPDATE_NONE && group_is_member(group) &&
        !pause_is_paused(&group->pause) && engine_core_steps(self->core) > 0 &&
        sim_plants(self->sim, SIM_CANARY_LONE_STEP)) {
        group->run = true;
    }
}

/* One turn of the loop. True if it moved something. */
static bool turn(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    bool any = false;
    if (self->enrol.state == ENROL_OUTSIDE) {
        if (sim->now_ns < self->loaded_ns) {
            return false;
        }
        carry_out(self, enrol_on(&self->enrol, ENROL_ON_LOADED, sim->now_ns), NULL, -1, "");
    }
    any |= look_at_mesh(self);
    const char *why = self->core != NULL ? engine_core_left(self->core) : NULL;
    carry_out(self, enrol_on_time(&self->enrol, sim->now_ns), NULL, -1, why != NULL ? why : "");
    if (self->core != NULL) {
        run_alone(self);
        any |= engine_core_step(self->core);
        sim->weight_epoch = LK_MAX(sim->weight_epoch, sim_rank_weights(self));
    }
    return any;
}

void sim_rank_on_event(sim_rank_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    if (at_ns != self->wake_ns || self->generation == 0) {
        return; /* an earlier one came between, or it was another process's */
    }
    self->wake_ns = UINT64_MAX;
    if (sim->stopped != NULL && sim->stopped[node_of(self)]) {
        return;
    }
    bool moved = turn(self);
    if (self->generation == 0) {
        return; /* it has ended */
    }
    self->idle_looks = moved ? 0 : self->idle_looks + 1;
    const lk_error_t *failure = self->core != NULL ? engine_core_failed(self->core) : NULL;
    if (failure != NULL) {
        sim_fail(sim, "engine", "engine %u ended: %s", self->rank, failure->text);
        return;
    }
    uint64_t next = moved ? sim->now_ns + sim_around(sim, LOOP_NS) : next_look(self);
    sim_rank_wake(self, self->enrol.state == ENROL_OUTSIDE ? self->loaded_ns : next);
}

/* ---- start and end ---- */

void sim_rank_start(sim_rank_t *self)
{
    sim_t *sim = self->sim;
    lk_error_t err = LK_ERROR_INIT;
    self->generation = sim_fresh_life(sim);
    self->sequence = 0;
    self->wake_ns = UINT64_MAX;
    self->busy_ns = self->idle_looks = 0;
    self->env = sim->env;
    self->enrol = (enrol_t){0};
    self->weight_floor = 0;
    self->front_lives = calloc(sim->o.frontends, sizeof *self->front_lives);
    self->said = calloc(sim->o.frontends, sizeof *self->said);
    CHECK(self->front_lives != NULL && self->said != NULL);
    self->mesh = sim_mesh_new(sim, self->rank);
    self->roster = roster_of_all((uint32_t)sim->o.ranks, self->rank);
    sim_net_up(sim, node_of(self), self->generation);
    sim_rank_listen(self);
    if (open_executor(self, &err) != LK_OK) {
        sim_fail(sim, "start", "engine %u can not start: %s", self->rank, err.text);
        return;
    }
    self->loaded_ns = sim->now_ns + sim_below(sim, 20 * LK_MS_NS);
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_RANK_UP, .rank = self->rank});
    sim_rank_wake(self, self->loaded_ns);
}

void sim_rank_kill(sim_rank_t *self)
{
    if (self->generation == 0) {
        return;
    }
    sim_saw(self->sim, &(sim_saw_t){.kind = SIM_SAW_RANK_DOWN, .rank = self->rank});
    engine_core_destroy(&self->core);
    self->executor->ops->close(self->executor);
    self->executor = NULL;
    sim_mesh_destroy(&self->mesh);
    sim_net_down(self->sim, node_of(self));
    free(self->front_lives);
    free(self->said);
    self->front_lives = self->said = NULL;
    self->enrol = (enrol_t){0};
    self->generation = 0;
    self->wake_ns = UINT64_MAX;
}

/* ---- messages ---- */

static void on_init(sim_rank_t *self, const msg_init_t *init)
{
    uint64_t now = self->sim->now_ns;
    if (init->error.len > 0) {
        char why[LK_ERROR_TEXT_MAX];
        snprintf(why, sizeof why, "the coordinator refuses: %s", msg_cstr(init->error));
        carry_out(self, enrol_on(&self->enrol, ENROL_ON_REFUSED, now), NULL, -1, why);
        return;
    }
    roster_t roster;
    lk_error_t err = LK_ERROR_INIT;
    if (roster_of_init(init, (uint32_t)self->sim->o.ranks, self->rank, &roster, &err) < 0) {
        sim_fail(self->sim, "engine", "%s", err.text);
        return;
    }
    bool inside = self->enrol.state == ENROL_CONNECTING || self->enrol.state == ENROL_MEMBER;
    if (inside && init->group_epoch == self->enrol.epoch && !roster_equal(&roster, &self->roster)) {
        lose(self, -1, "the coordinator knows other members of this group epoch");
        return;
    }
    const char *named = msg_cstr(init->mesh.items[roster.place].text);
    bool mine = strcmp(named, sim_mesh_address(self->mesh)) == 0;
    unsigned actions = enrol_on_init(&self->enrol, init->group_epoch, init->revision, mine, now);
    if (actions & (ENROL_CONNECT | ENROL_RELINK)) {
        self->roster = roster;
    }
    carry_out(self, actions, init, -1, "a newer group epoch has begun");
}

/* The canary: "paused" for an answer, because the rank has heard of it. */
/* One with clear_cache would be the KV checker's. */
static bool answers_early(sim_rank_t *self, const msg_cmd_t *cmd)
{
    return !cmd->clear_cache && group_run(engine_core_group(self->core)) &&
           engine_core_steps(self->core) > 0 && sim_plants(self->sim, SIM_CANARY_EARLY_PAUSE);
}

static void answer_early(sim_rank_t *self, uint32_t front, const msg_cmd_t *cmd)
{
    msg_t done = {.type = MSG_DONE};
    done.done =
        (msg_done_t){.rank = self->rank, .generation = cmd->generation, .number = cmd->number};
    to_frontend(self, front, &done);
}

void sim_rank_on_msg(sim_rank_t *self, uint32_t from_node, const msg_t *msg)
{
    sim_t *sim = self->sim;
    uint64_t now = sim->now_ns;
    uint32_t from = from_node == sim_node_coord() ? ENGINE_FROM_COORDINATOR
                                                  : from_node - sim_node_front(sim, 0);
    switch (msg->type) {
    case MSG_INIT:
        on_init(self, &msg->init);
        break;
    case MSG_DISSOLVE:
        carry_out(self, enrol_on_dissolve(&self->enrol, msg->dissolve.group_epoch, now), NULL,
                  msg->dissolve.lost, msg_cstr(msg->dissolve.why));
        break;
    case MSG_ROLLCALL:
        carry_out(self, enrol_on(&self->enrol, ENROL_ON_ROLLCALL, now), NULL, -1,
                  "the coordinator was started again");
        break;
    default:
        if (msg->type == MSG_CMD && msg->cmd.kind == CMD_PAUSE && answers_early(self, &msg->cmd)) {
            answer_early(self, from, &msg->cmd);
        }
        engine_core_on_message(self->core, from, msg);
    }
    sim_rank_wake(self, now);
}

/* ---- reports ---- */

void sim_rank_describe(const sim_rank_t *self, char *out, size_t room)
{
    if (self->core == NULL) {
        snprintf(out, room, "%s (%s)", self->generation == 0 ? "does not run" : "is in no group",
                 enrol_state_name(self->enrol.state));
        return;
    }
    const group_t *group = engine_core_group(self->core);
    const scheduler_t *scheduler = engine_core_scheduler(self->core);
    char vote[128], step[128], transfer[192];
    sim_mesh_vote_missing(self->mesh, vote, sizeof vote);
    sim_mesh_step_missing(self->mesh, step, sizeof step);
    sim_transfer_describe(self->sim, self->rank, transfer, sizeof transfer);
    snprintf(out, room,
             "%s%s%s%s%s%s (%s of epoch %llu, round %llu, wave %llu, step %llu, run %d, %s, gates "
             "%u, %zu waiting, %zu running)",
             step[0] != '\0' ? "is in a forward pass and waits for rank " : "", step,
             vote[0] != '\0' ? "has voted and waits for the vote of rank " : "", vote, transfer,
             step[0] == '\0' && vote[0] == '\0' && transfer[0] == '\0' ? "waits for nobody" : "",
             enrol_state_name(self->enrol.state), (unsigned long long)self->enrol.epoch,
             (unsigned long long)group_round(group), (unsigned long long)group_wave(group),
             (unsigned long long)engine_core_steps(self->core), group_run(group),
             pause_state_name(group_pause(group)->state), group_gates(group),
             scheduler_num_waiting(scheduler), scheduler_num_running(scheduler));
}

void sim_describe(const sim_t *self, char *out, size_t room)
{
    size_t n = 0;
    out[0] = '\0';
    for (uint32_t r = 0; r < self->o.ranks && n < room; r++) {
        char what[512];
        sim_rank_describe(&self->ranks[r], what, sizeof what);
        n += (size_t)snprintf(out + n, room - n, "\n  rank %u %s", r, what);
    }
}
