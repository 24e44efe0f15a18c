/* rank.c: an engine's process: the handshake, and the real engine core between simulated sockets.
 */
#include "base/check.h"
#include "engine_core/dp/group_internal.h"
#include "tests/sim/checkers.h"
#include "tests/sim/exec.h"
#include "tests/sim/mesh.h"
#include "tests/sim/net.h"
#include "tests/sim/transfer.h"

#include <stdio.h>
#include <string.h>

#define LOOP_NS     2000ull /* one turn of its loop */
#define LOOK_NS     50000ull
#define MAX_LOOK_NS (20 * LK_MS_NS)

static void send_msg(sim_rank_t *self, sim_link_t link, uint32_t to, const msg_t *msg)
{
    msg_t m = *msg;
    m.sender_role = MSG_ROLE_ENGINE;
    m.sender_rank = self->rank;
    m.generation = self->generation;
    m.sequence = ++self->sequence;
    sim_net_send(self->sim, link, sim_node_rank(self->sim, self->rank), to, &m);
}

static void to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    sim_rank_t *self = ctx;
    send_msg(self, SIM_LINK_OUTPUT, sim_node_front(self->sim, frontend), msg);
}

static void to_coordinator(void *ctx, const msg_t *msg)
{
    send_msg(ctx, SIM_LINK_EVENTS, sim_node_coord(), msg);
}

static void step_waits_for(void *ctx, char *out, size_t room)
{
    sim_rank_t *self = ctx;
    sim_mesh_step_missing(self->sim->mesh, self->rank, out, room);
}

/* ---- time ---- */

void sim_rank_wake(sim_rank_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    at_ns = LK_MAX(at_ns, sim->now_ns);
    if (at_ns < self->wake_ns) {
        self->wake_ns = at_ns;
        sim_post(sim, at_ns - sim->now_ns, SIM_EV_RANK, self->rank, 0, 0, NULL);
    }
}

static uint64_t next_look(const sim_rank_t *self)
{
    sim_t *sim = self->sim;
    uint64_t next = LK_MAX(engine_core_deadline(self->core), sim->now_ns + LOOP_NS);
    if (group_updating(engine_core_group(self->core))) { /* the trainer wakes it when it sends */
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
    if (self->sim->o.ranks > 1 && !group->posted && sim_plants(self->sim, SIM_CANARY_OTHER_STATE)) {
        group->wave++;
    }
    if (self->sim->o.moe && self->sim->o.ranks > 1 && !group->run && !group->posted &&
        group->weights.gates == 0 && group->update.phase == UPDATE_NONE &&
        !pause_is_paused(&group->pause) && engine_core_steps(self->core) > 0 &&
        sim_plants(self->sim, SIM_CANARY_LONE_STEP)) {
        group->run = true;
    }
}

void sim_rank_on_event(sim_rank_t *self, uint64_t at_ns)
{
    sim_t *sim = self->sim;
    if (at_ns != self->wake_ns) {
        return; /* an earlier one came between */
    }
    self->wake_ns = UINT64_MAX;
    if (self->core == NULL ||
        (sim->stopped != NULL && sim->stopped[sim_node_rank(sim, self->rank)])) {
        return;
    }
    run_alone(self);
    bool moved = engine_core_step(self->core);
    self->idle_looks = moved ? 0 : self->idle_looks + 1;
    const lk_error_t *failure = engine_core_failed(self->core);
    if (failure != NULL) {
        sim_fail(sim, "engine", "engine %u ended: %s", self->rank, failure->text);
        return;
    }
    sim_rank_wake(self, moved ? sim->now_ns + sim_around(sim, LOOP_NS) : next_look(self));
}

/* ---- start and stop ---- */

void sim_rank_start(sim_rank_t *self)
{
    self->generation = self->sim->now_ns;
    self->wake_ns = UINT64_MAX;
    self->env = self->sim->env;
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                              .rank = self->rank,
                              .config_hash = msg_str("sim"),
                              .mesh_address = msg_str("mesh")};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), &msg);
}

void sim_rank_stop(sim_rank_t *self)
{
    engine_core_destroy(&self->core);
    if (self->executor != NULL) {
        self->executor->ops->close(self->executor);
        self->executor = NULL;
    }
}

static lk_status_t open_executor(sim_rank_t *self, lk_error_t *err)
{
    const sim_options_t *o = &self->sim->o;
    bool ep = o->moe && o->ranks > 1;
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
                                .ep = ep ? sim_mesh_ep(self->sim->mesh, self->rank) : ep_local()};
    return sim_exec_open(self, &config, &self->executor, err);
}

static lk_status_t open_core(sim_rank_t *self, uint64_t group_epoch, lk_error_t *err)
{
    sim_t *sim = self->sim;
    const sim_options_t *o = &sim->o;
    engine_core_config_t config = {
        .rank = self->rank,
        .dp_size = (uint32_t)o->ranks,
        .n_frontends = (uint32_t)o->frontends,
        .group_epoch = group_epoch,
        .shadow = o->swap == 1,
        .lockstep = o->moe && o->ranks > 1,
        .sync_interval = (uint32_t)o->sync_interval,
        .reject_while_paused = o->reject_while_paused,
        .heartbeat_ns = LK_SECOND_NS,
        .dead_after_ns = 5 * LK_SECOND_NS,
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
        .allreduce = sim_mesh_allreduce(sim->mesh, self->rank),
        .wte = sim_transfer_ops(sim),
        .env = &self->env,
        .host = {self, to_frontend, to_coordinator, step_waits_for}};
    return engine_core_new(&config, &self->core, err);
}

static void on_init(sim_rank_t *self, const msg_init_t *init)
{
    sim_t *sim = self->sim;
    lk_error_t err = LK_ERROR_INIT;
    if (init->error.len > 0) {
        sim_fail(sim, "start", "engine %u is refused: %s", self->rank, msg_cstr(init->error));
        return;
    }
    self->group_epoch = init->group_epoch;
    if (open_executor(self, &err) != LK_OK || open_core(self, init->group_epoch, &err) != LK_OK) {
        sim_fail(sim, "start", "engine %u can not start: %s", self->rank, err.text);
        return;
    }
    for (uint32_t f = 0; f < sim->o.frontends; f++) {
        msg_t here = {.type = MSG_ENGINE_HERE};
        here.engine_here =
            (msg_engine_here_t){self->rank, self->generation, engine_core_group_epoch(self->core)};
        send_msg(self, SIM_LINK_HERE, sim_node_front(sim, f), &here);
    }
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
                              .group_epoch = engine_core_group_epoch(self->core),
                              .lockstep = sim->o.moe && sim->o.ranks > 1};
    send_msg(self, SIM_LINK_HANDSHAKE, sim_node_coord(), &msg);
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_RANK_UP, .rank = self->rank});
    sim_rank_wake(self, sim->now_ns);
}

/* The canary: "paused" for an answer, because the rank has heard of it. */
static bool answers_early(sim_rank_t *self)
{
    return group_run(engine_core_group(self->core)) && engine_core_steps(self->core) > 0 &&
           sim_plants(self->sim, SIM_CANARY_EARLY_PAUSE);
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
    if (msg->type == MSG_INIT) {
        on_init(self, &msg->init);
        return;
    }
    if (self->core == NULL) {
        return;
    }
    uint32_t from = from_node == sim_node_coord() ? ENGINE_FROM_COORDINATOR
                                                  : from_node - sim_node_front(sim, 0);
    if (msg->type == MSG_CMD && msg->cmd.kind == CMD_PAUSE && answers_early(self)) {
        answer_early(self, from, &msg->cmd);
    }
    engine_core_on_message(self->core, from, msg);
    sim_rank_wake(self, sim->now_ns);
}

/* ---- reports ---- */

void sim_rank_describe(const sim_rank_t *self, char *out, size_t room)
{
    if (self->core == NULL) {
        snprintf(out, room, "is not started");
        return;
    }
    const group_t *group = engine_core_group(self->core);
    const scheduler_t *scheduler = engine_core_scheduler(self->core);
    char vote[128], step[128], transfer[192];
    sim_mesh_vote_missing(self->sim->mesh, self->rank, vote, sizeof vote);
    sim_mesh_step_missing(self->sim->mesh, self->rank, step, sizeof step);
    sim_transfer_describe(self->sim, self->rank, transfer, sizeof transfer);
    snprintf(out, room,
             "%s%s%s%s%s%s (round %llu, wave %llu, step %llu, run %d, %s, gates %u, %zu waiting, "
             "%zu running)",
             step[0] != '\0' ? "is in a forward pass and waits for rank " : "", step,
             vote[0] != '\0' ? "has voted and waits for the vote of rank " : "", vote, transfer,
             step[0] == '\0' && vote[0] == '\0' && transfer[0] == '\0' ? "waits for nobody" : "",
             (unsigned long long)group_round(group), (unsigned long long)group_wave(group),
             (unsigned long long)engine_core_steps(self->core), group_run(group),
             pause_state_name(group_pause(group)->state), group_weights(group)->gates,
             scheduler_num_waiting(scheduler), scheduler_num_running(scheduler));
}
