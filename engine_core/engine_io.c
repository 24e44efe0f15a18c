#include "engine_core/engine_io.h"
#include "base/check.h"
#include "base/log.h"
#include "base/spawn.h"
#include "engine_core/engine_app.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_MESSAGES  256             /* taken from one socket between two steps */
#define SLICE_NS      200000ull       /* longest time between two looks at the sockets in a step */
#define LOOK_NS       (20 * LK_MS_NS) /* between two looks at the launcher, however busy */
#define SPIN_NS       50000ull        /* for a peer that is nearly there, before sleeping */
#define START_POLL_NS (20 * LK_MS_NS) /* longest wait between two looks while starting */
#define MAX_FDS       2048

static uint64_t seconds_ns(double seconds)
{
    return (uint64_t)(seconds * 1e9);
}

/* ---- the core's outside ---- */

static void to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    engine_app_t *app = ctx;
    engine_link_send(&app->outputs[frontend], &app->scratch, msg);
}

static void to_coordinator(void *ctx, const msg_t *msg)
{
    engine_app_t *app = ctx;
    engine_link_send(&app->events, &app->scratch, msg);
}

static void step_waits_for(void *ctx, char *out, size_t room)
{
    engine_app_t *app = ctx;
    mesh_exchange_missing(app->mesh, out, room);
}

static void patience(void *ctx, bool begins)
{
    spawn_child_beat(*((engine_app_t *)ctx)->status_fd, begins);
}

static int64_t lost_rank(void *ctx)
{
    return mesh_lost(((engine_app_t *)ctx)->mesh);
}

lk_status_t engine_app_make_core(engine_app_t *app, bool rejoin, lk_error_t *err)
{
    const lk_config_t *c = app->config;
    const engine_setup_t *s = &app->setup;
    engine_core_config_t core = {
        .rank = app->rank,
        .dp_size = (uint32_t)c->data_parallel_size,
        .roster = app->roster,
        .n_frontends = app->n_frontends,
        .group_epoch = app->init.init.group_epoch,
        .shadow = s->shadow,
        .rejoin = rejoin,
        .weight_floor = app->init.init.weight_floor,
        .lockstep = s->lockstep,
        .sync_interval = (uint32_t)c->dp_sync_interval,
        .reject_while_paused = strcmp(c->paused_admission, "reject") == 0,
        .heartbeat_ns = seconds_ns(c->heartbeat_s),
        .dead_after_ns = seconds_ns(c->dead_after_s),
        .control_timeout_ns = seconds_ns(c->control_timeout_s),
        .transfer_timeout_ns = seconds_ns(c->transfer_timeout_s),
        .scheduler = {.max_num_seqs = (uint32_t)c->max_num_seqs,
                      .max_num_batched_tokens = (uint32_t)c->max_num_batched_tokens,
                      .max_model_len = s->max_model_len,
                      .vocab_size = s->model.vocab_size,
                      .n_eos = s->model.n_eos,
                      .max_waiting = (uint32_t)c->max_waiting,
                      .max_prompt_rows = s->prompt_rows,
                      .processed_logprobs = strcmp(c->logprobs_mode, "processed_logprobs") == 0},
        .num_blocks = s->num_blocks,
        .block_size = s->block_size,
        .enable_prefix_caching = c->enable_prefix_caching,
        .model = &s->model,
        .executor = s->executor,
        .allreduce = mesh_allreduce(app->mesh),
        .allowed_weight_dirs = s->allowed_weight_dirs,
        .nccl_library = c->nccl_library,
        .wte = s->wte,
        .env = app->env,
        .host = {app, to_frontend, to_coordinator, step_waits_for, lost_rank, patience}};
    memcpy(core.scheduler.eos_token_ids, s->model.eos_token_ids,
           sizeof core.scheduler.eos_token_ids);
    return engine_core_new(&core, &app->core, err);
}

lk_status_t engine_app_open_executor(engine_app_t *app, lk_error_t *err)
{
    ep_t ep = ep_local();
    if (app->setup.lockstep) {
        ep = mesh_ep(app->mesh);
        ep.rank = app->roster.place; /* it is connected later */
        ep.size = app->roster.n;
    }
    app->opened = app->roster;
    return engine_setup_open(&app->setup, app->config, ep, err);
}

static lk_status_t start(engine_app_t *app, lk_error_t *err)
{
    const lk_config_t *c = app->config;
    app->start_deadline_ns = lk_env_now_ns(app->env) + seconds_ns(c->handshake_timeout_s);
    LK_RETURN_IF_ERROR(engine_setup_check(c, &app->setup, err));
    LK_RETURN_IF_ERROR(mesh_new(app->rank, &app->mesh, err));
    app->roster = roster_of_all((uint32_t)c->data_parallel_size, app->rank);
    LK_RETURN_IF_ERROR(engine_app_open_executor(app, err));
    return engine_enrol_start(app, err);
}

/* The coordinator and the launcher learn why; each by its own way. */
static void report_failure(engine_app_t *app, const lk_error_t *err)
{
    LK_ERROR("engine %u ends: %s", app->rank, err->text);
    if (app->handshake.port != NULL && app->core == NULL) {
        msg_t msg = {.type = MSG_READY};
        msg.ready =
            (msg_ready_t){.role = MSG_ROLE_ENGINE, .rank = app->rank, .error = msg_str(err->text)};
        engine_link_send(&app->handshake, &app->scratch, &msg);
    }
    spawn_child_report(app->status_fd, false, err->text);
}

/* ---- serving ---- */

/* True if there may be more. */
static bool take_messages(engine_app_t *app, engine_link_t *link, uint32_t from)
{
    msg_t msg;
    for (int i = 0; i < MAX_MESSAGES; i++) {
        if (engine_link_recv(link, &msg) != LK_OK) {
            return i > 0;
        }
        if (msg.type == MSG_ROLLCALL && from == ENGINE_FROM_COORDINATOR) {
            engine_enrol_on_rollcall(app);
        } else {
            engine_core_on_message(app->core, from, &msg);
        }
        msg_fini(&msg);
    }
    return true;
}

static bool take_all_messages(engine_app_t *app)
{
    bool any = take_messages(app, &app->wave, ENGINE_FROM_COORDINATOR);
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        any |= take_messages(app, &app->inputs[f], f);
    }
    return any;
}

static void wait_for_anything(engine_app_t *app)
{
    static struct pollfd fds[MAX_FDS];
    size_t n = 0;
    uint64_t until = lk_env_now_ns(app->env) + START_POLL_NS;
    fds[n++] = (struct pollfd){port_fd(app->handshake.port), POLLIN, 0};
    if (app->core != NULL) {
        fds[n++] = (struct pollfd){port_fd(app->wave.port), POLLIN, 0};
        for (uint32_t f = 0; f < app->n_frontends; f++) {
            fds[n++] = (struct pollfd){port_fd(app->inputs[f].port), POLLIN, 0};
        }
        n += engine_core_pollfds(app->core, fds + n, MAX_FDS - n);
        bool settled = app->enrol.state == ENROL_MEMBER;
        until = settled ? engine_core_deadline(app->core)
                        : LK_MIN(until, engine_core_deadline(app->core));
    }
    if (app->config->data_parallel_size > 1) {
        n += mesh_pollfds(app->mesh, fds + n, MAX_FDS - n);
    }
    loop_wait(app->loop, fds, n, until);
}

/* One turn; false when there was nothing to do. The sockets are looked at before every step, and
 * within a step as often as SLICE_NS says: a small model's layer takes less time than a look. */
static bool turn(engine_app_t *app)
{
    bool any = engine_enrol_turn(app);
    if (app->core == NULL || app->ended.status != LK_OK) {
        return any;
    }
    any |= take_all_messages(app);
    uint64_t steps = engine_core_steps(app->core), start_ns = lk_env_now_ns(app->env);
    bool moved;
    do {
        moved = engine_core_step(app->core);
        any |= moved;
    } while (moved && engine_core_steps(app->core) == steps &&
             lk_env_now_ns(app->env) - start_ns < SLICE_NS);
    return any;
}

/* A peer is usually late by less than it takes to sleep and wake up. True: it came meanwhile. The
 * processor is offered to others all the while: it may be the peer that needs it. */
static bool spin(engine_app_t *app)
{
    uint64_t end = lk_env_now_ns(app->env) + SPIN_NS;
    while (app->core != NULL && engine_core_waits_for_peers(app->core) &&
           lk_env_now_ns(app->env) < end) {
        sched_yield();
        if (engine_core_step(app->core)) {
            return true;
        }
    }
    return false;
}

/* Decision 18. */
static void drain(engine_app_t *app)
{
    uint64_t end = lk_env_now_ns(app->env) + seconds_ns(app->config->shutdown_timeout_s);
    engine_core_begin_drain(app->core);
    while (!engine_core_drained(app->core) && lk_env_now_ns(app->env) < end) {
        if (!turn(app)) {
            poll(NULL, 0, 1); /* the loop's stop flag is set: it would not wait */
        }
    }
    engine_core_abort_all(app->core);
}

/* An engine that always has work never waits; the launcher's end shows all the same. */
static void look_at_launcher(engine_app_t *app, uint64_t *looked_ns)
{
    uint64_t now = lk_env_now_ns(app->env);
    if (now - *looked_ns >= LOOK_NS) {
        *looked_ns = now;
        loop_wait(app->loop, NULL, 0, now);
    }
}

/* The launcher learns that the loop turns. */
static void beat(engine_app_t *app)
{
    uint64_t now = lk_env_now_ns(app->env);
    if (app->core != NULL && now - app->beat_ns >= seconds_ns(app->config->heartbeat_s)) {
        app->beat_ns = now;
        spawn_child_beat(*app->status_fd, false);
    }
}

static bool has_failed(const engine_app_t *app)
{
    return app->ended.status != LK_OK ||
           (app->core != NULL && engine_core_failed(app->core) != NULL);
}

static int serve(engine_app_t *app)
{
    uint64_t looked_ns = lk_env_now_ns(app->env);
    while (loop_stop_reason(app->loop) == NULL && !has_failed(app)) {
        beat(app);
        if (turn(app) || spin(app)) {
            look_at_launcher(app, &looked_ns);
        } else {
            wait_for_anything(app);
        }
    }
    if (loop_stop_reason(app->loop) == NULL) {
        report_failure(app,
                       app->ended.status != LK_OK ? &app->ended : engine_core_failed(app->core));
        return 1;
    }
    LK_INFO("stops: %s", loop_stop_reason(app->loop));
    if (app->core != NULL && !has_failed(app)) {
        drain(app);
    }
    return 0;
}

int engine_io_run(const lk_config_t *config, lk_loop_t *loop, int *status_fd)
{
    engine_app_t *app = calloc(1, sizeof *app);
    CHECKF(app != NULL, "out of memory");
    app->config = config;
    app->loop = loop;
    app->env = lk_env_real();
    app->rank = (uint32_t)config->data_parallel_rank;
    lk_buf_init(&app->scratch.envelope, 0);
    lk_buf_init(&app->scratch.body, 0);
    /* {role, rank, generation}: unique in the cluster, and newer lives differ */
    uint8_t identity[13] = {MSG_ROLE_ENGINE};
    memcpy(identity + 1, &app->rank, sizeof app->rank);
    memcpy(identity + 5, &config->generation, sizeof config->generation);
    memcpy(app->identity.id, identity, sizeof identity);
    app->identity.len = sizeof identity;

    lk_error_t err = LK_ERROR_INIT;
    int rc = 1;
    app->status_fd = status_fd;
    if (start(app, &err) == LK_OK) {
        rc = serve(app);
    } else {
        report_failure(app, &err);
    }

    engine_core_destroy(&app->core);
    engine_setup_fini(&app->setup);
    mesh_destroy(&app->mesh);
    engine_enrol_fini(app);
    lk_buf_fini(&app->scratch.envelope);
    lk_buf_fini(&app->scratch.body);
    free(app);
    return rc;
}
