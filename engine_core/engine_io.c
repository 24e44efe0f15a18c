#include "engine_core/engine_io.h"
#include "base/check.h"
#include "base/log.h"
#include "base/spawn.h"
#include "engine_core/dp/mesh.h"
#include "engine_core/engine_core.h"
#include "engine_core/engine_link.h"
#include "engine_core/engine_setup.h"

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

typedef struct {
    const lk_config_t *config;
    lk_loop_t *loop;
    const lk_env_t *env;
    uint32_t rank, n_frontends;
    uint64_t group_epoch;
    port_peer_t identity;
    engine_setup_t setup;
    mesh_t *mesh;
    engine_link_t handshake, events, wave;
    engine_link_t *inputs, *outputs; /* [n_frontends] */
    engine_link_scratch_t scratch;
    engine_core_t *core;
    uint64_t start_deadline_ns;
    msg_t init; /* its strings are used while connecting */
} app_t;

static uint64_t seconds_ns(double seconds)
{
    return (uint64_t)(seconds * 1e9);
}

/* ---- starting ---- */

/* Waits until step says something else than INPROGRESS. what: "INIT of the coordinator". */
static lk_status_t wait_for(app_t *app, lk_status_t (*step)(app_t *app, lk_error_t *err),
                            const char *what, lk_error_t *err)
{
    for (;;) {
        lk_status_t status = step(app, err);
        if (status != LK_INPROGRESS) {
            return status;
        }
        if (loop_stop_reason(app->loop) != NULL) {
            return lk_error_set(err, LK_ERR_CANCELED, "%s while starting",
                                loop_stop_reason(app->loop));
        }
        uint64_t now = lk_env_now_ns(app->env);
        if (now >= app->start_deadline_ns) {
            char missing[256] = "";
            mesh_missing(app->mesh, missing, sizeof missing);
            return lk_error_set(err, LK_ERR_TIMEOUT, "no %s within %.0f s%s%s", what,
                                app->config->handshake_timeout_s,
                                missing[0] != '\0' ? "; not connected to rank " : "", missing);
        }
        struct pollfd fd = {port_fd(app->handshake.port), POLLIN, 0};
        loop_wait(app->loop, &fd, 1, LK_MIN(now + START_POLL_NS, app->start_deadline_ns));
    }
}

static lk_status_t say_hello(app_t *app, lk_error_t *err)
{
    char hash[33];
    config_group_hash(app->config, hash);
    if (app->config->coordinator_address[0] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--coordinator-address is missing: engines are started by lockstep "
                            "serve");
    }
    LK_RETURN_IF_ERROR(engine_link_open(&app->handshake, PORT_DEALER,
                                        app->config->coordinator_address, &app->identity, app->rank,
                                        app->config->generation, "the coordinator", err));
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                              .rank = app->rank,
                              .pid = (uint64_t)getpid(),
                              .config_hash = msg_str(hash),
                              .mesh_address = msg_str(mesh_address(app->mesh))};
    engine_link_send(&app->handshake, &app->scratch, &msg);
    return LK_OK;
}

static lk_status_t check_init(const app_t *app, const msg_init_t *init, lk_error_t *err)
{
    if (init->error.len > 0) {
        return lk_error_set(err, LK_ERR_STATE, "the coordinator refuses: %s",
                            msg_cstr(init->error));
    }
    if (init->dp_size != app->config->data_parallel_size || init->mesh.count != init->dp_size ||
        init->n_frontends < 1 || init->n_frontends > GROUP_MAX_FRONTENDS ||
        init->inputs.count != init->n_frontends || init->outputs.count != init->n_frontends) {
        return lk_error_set(err, LK_ERR_PEER,
                            "INIT of the coordinator: %llu ranks with %zu addresses, %llu front "
                            "ends with %zu and %zu do not fit --data-parallel-size %llu",
                            (unsigned long long)init->dp_size, init->mesh.count,
                            (unsigned long long)init->n_frontends, init->inputs.count,
                            init->outputs.count,
                            (unsigned long long)app->config->data_parallel_size);
    }
    return LK_OK;
}

static lk_status_t take_init(app_t *app, lk_error_t *err)
{
    msg_t msg;
    lk_status_t status;
    while ((status = engine_link_recv(&app->handshake, &msg)) == LK_OK) {
        if (msg.type != MSG_INIT) {
            LK_WARN("%s is no answer to HELLO; dropped", msg_type_name(msg.type));
            msg_fini(&msg);
            continue;
        }
        status = check_init(app, &msg.init, err);
        if (status < 0) {
            msg_fini(&msg);
            return status;
        }
        app->init = msg;
        return LK_OK;
    }
    return status;
}

static lk_status_t test_mesh(app_t *app, lk_error_t *err)
{
    return mesh_connect_test(app->mesh, err);
}

static lk_status_t connect_mesh(app_t *app, lk_error_t *err)
{
    const msg_init_t *init = &app->init.init;
    const char **addresses = calloc(init->dp_size, sizeof *addresses);
    if (addresses == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    for (size_t r = 0; r < init->dp_size; r++) {
        addresses[r] = msg_cstr(init->mesh.items[r].text);
    }
    lk_status_t status =
        mesh_connect_post(app->mesh, init->group_epoch, (uint32_t)init->dp_size, addresses, err);
    free(addresses);
    if (status < 0) {
        return status;
    }
    return wait_for(app, test_mesh, "mesh of all ranks", err);
}

static lk_status_t connect_frontends(app_t *app, lk_error_t *err)
{
    const msg_init_t *init = &app->init.init;
    app->n_frontends = (uint32_t)init->n_frontends;
    app->inputs = calloc(app->n_frontends, sizeof *app->inputs);
    app->outputs = calloc(app->n_frontends, sizeof *app->outputs);
    if (app->inputs == NULL || app->outputs == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    uint64_t generation = app->config->generation;
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        char name[48];
        snprintf(name, sizeof name, "front end %u's input", f);
        LK_RETURN_IF_ERROR(engine_link_open(&app->inputs[f], PORT_DEALER,
                                            msg_cstr(init->inputs.items[f].text), &app->identity,
                                            app->rank, generation, name, err));
        snprintf(name, sizeof name, "front end %u's output", f);
        LK_RETURN_IF_ERROR(engine_link_open(&app->outputs[f], PORT_PUSH,
                                            msg_cstr(init->outputs.items[f].text), NULL, app->rank,
                                            generation, name, err));
    }
    LK_RETURN_IF_ERROR(engine_link_open(&app->wave, PORT_SUB, msg_cstr(init->wave_address), NULL,
                                        app->rank, generation, "the coordinator's waves", err));
    return engine_link_open(&app->events, PORT_PUSH, msg_cstr(init->events_address), NULL,
                            app->rank, generation, "the coordinator's events", err);
}

/* ---- the core's outside ---- */

static void to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    app_t *app = ctx;
    engine_link_send(&app->outputs[frontend], &app->scratch, msg);
}

static void to_coordinator(void *ctx, const msg_t *msg)
{
    app_t *app = ctx;
    engine_link_send(&app->events, &app->scratch, msg);
}

static void step_waits_for(void *ctx, char *out, size_t room)
{
    app_t *app = ctx;
    mesh_exchange_missing(app->mesh, out, room);
}

static lk_status_t make_core(app_t *app, lk_error_t *err)
{
    const lk_config_t *c = app->config;
    const engine_setup_t *s = &app->setup;
    engine_core_config_t core = {
        .rank = app->rank,
        .dp_size = (uint32_t)c->data_parallel_size,
        .n_frontends = app->n_frontends,
        .group_epoch = app->init.init.group_epoch,
        .shadow = s->shadow,
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
        .host = {app, to_frontend, to_coordinator, step_waits_for}};
    memcpy(core.scheduler.eos_token_ids, s->model.eos_token_ids,
           sizeof core.scheduler.eos_token_ids);
    return engine_core_new(&core, &app->core, err);
}

static void say_ready(app_t *app)
{
    char digest[DIGEST_HEX_SIZE];
    const weight_table_t *weights = app->setup.ops->weights(app->setup.executor);
    digest_hex(weight_table_digest(weights), digest);
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        msg_t here = {.type = MSG_ENGINE_HERE};
        here.engine_here = (msg_engine_here_t){app->rank, app->config->generation};
        engine_link_send(&app->inputs[f], &app->scratch, &here);
    }
    msg_t msg = {.type = MSG_READY};
    msg.ready = (msg_ready_t){.role = MSG_ROLE_ENGINE,
                              .rank = app->rank,
                              .num_blocks = app->setup.num_blocks,
                              .block_size = app->setup.block_size,
                              .max_model_len = app->setup.max_model_len,
                              .vocab_size = app->setup.model.vocab_size,
                              .dtype = msg_str(dtype_torch_name(app->setup.dtype)),
                              .digest = msg_str(digest)};
    engine_link_send(&app->handshake, &app->scratch, &msg);
    LK_INFO("ready: %u KV blocks of %u, %u positions, %s, %u threads, weights %s",
            app->setup.num_blocks, app->setup.block_size, app->setup.max_model_len,
            dtype_torch_name(app->setup.dtype), app->setup.threads, digest);
}

static lk_status_t start(app_t *app, lk_error_t *err)
{
    app->start_deadline_ns = lk_env_now_ns(app->env) + seconds_ns(app->config->handshake_timeout_s);
    LK_RETURN_IF_ERROR(engine_setup_check(app->config, &app->setup, err));
    LK_RETURN_IF_ERROR(mesh_new(app->rank, &app->mesh, err));
    LK_RETURN_IF_ERROR(say_hello(app, err));
    LK_RETURN_IF_ERROR(wait_for(app, take_init, "INIT of the coordinator", err));
    LK_RETURN_IF_ERROR(connect_mesh(app, err));
    LK_RETURN_IF_ERROR(connect_frontends(app, err));
    ep_t ep = app->setup.lockstep ? mesh_ep(app->mesh) : ep_local();
    LK_RETURN_IF_ERROR(engine_setup_open(&app->setup, app->config, ep, err));
    LK_RETURN_IF_ERROR(make_core(app, err));
    say_ready(app);
    return LK_OK;
}

/* The coordinator and the launcher learn why; each by its own way. */
static void report_failure(app_t *app, int *status_fd, const lk_error_t *err)
{
    LK_ERROR("%s", err->text);
    if (app->handshake.port != NULL) {
        msg_t msg = {.type = MSG_READY};
        msg.ready =
            (msg_ready_t){.role = MSG_ROLE_ENGINE, .rank = app->rank, .error = msg_str(err->text)};
        engine_link_send(&app->handshake, &app->scratch, &msg);
    }
    spawn_child_report(status_fd, false, err->text);
}

/* ---- serving ---- */

/* True if there may be more. */
static bool take_messages(app_t *app, engine_link_t *link, uint32_t from)
{
    msg_t msg;
    for (int i = 0; i < MAX_MESSAGES; i++) {
        if (engine_link_recv(link, &msg) != LK_OK) {
            return i > 0;
        }
        engine_core_on_message(app->core, from, &msg);
        msg_fini(&msg);
    }
    return true;
}

static bool take_all_messages(app_t *app)
{
    bool any = take_messages(app, &app->wave, ENGINE_FROM_COORDINATOR);
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        any |= take_messages(app, &app->inputs[f], f);
    }
    return any;
}

static void poll_mesh(app_t *app)
{
    lk_error_t err = LK_ERROR_INIT;
    if (app->config->data_parallel_size > 1 && mesh_poll(app->mesh, &err) < 0) {
        engine_core_peer_lost(app->core, &err);
    }
}

static void wait_for_anything(app_t *app)
{
    static struct pollfd fds[MAX_FDS];
    size_t n = 0;
    fds[n++] = (struct pollfd){port_fd(app->wave.port), POLLIN, 0};
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        fds[n++] = (struct pollfd){port_fd(app->inputs[f].port), POLLIN, 0};
    }
    if (app->config->data_parallel_size > 1) {
        n += mesh_pollfds(app->mesh, fds + n, MAX_FDS - n);
    }
    n += engine_core_pollfds(app->core, fds + n, MAX_FDS - n);
    loop_wait(app->loop, fds, n, engine_core_deadline(app->core));
}

/* One turn; false when there was nothing to do. The sockets are looked at before every step, and
 * within a step as often as SLICE_NS says: a small model's layer takes less time than a look. */
static bool turn(app_t *app)
{
    bool any = take_all_messages(app);
    poll_mesh(app);
    uint64_t steps = engine_core_steps(app->core), start = lk_env_now_ns(app->env);
    bool moved;
    do {
        moved = engine_core_step(app->core);
        any |= moved;
    } while (moved && engine_core_steps(app->core) == steps &&
             lk_env_now_ns(app->env) - start < SLICE_NS);
    return any;
}

/* A peer is usually late by less than it takes to sleep and wake up. True: it came meanwhile. The
 * processor is offered to others all the while: it may be the peer that needs it. */
static bool spin(app_t *app)
{
    uint64_t end = lk_env_now_ns(app->env) + SPIN_NS;
    while (engine_core_waits_for_peers(app->core) && lk_env_now_ns(app->env) < end) {
        sched_yield();
        if (engine_core_step(app->core)) {
            return true;
        }
    }
    return false;
}

/* Decision 18. */
static void drain(app_t *app)
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
static void look_at_launcher(app_t *app, uint64_t *looked_ns)
{
    uint64_t now = lk_env_now_ns(app->env);
    if (now - *looked_ns >= LOOK_NS) {
        *looked_ns = now;
        loop_wait(app->loop, NULL, 0, now);
    }
}

static int serve(app_t *app)
{
    uint64_t looked_ns = lk_env_now_ns(app->env);
    while (loop_stop_reason(app->loop) == NULL && engine_core_failed(app->core) == NULL) {
        if (turn(app) || spin(app)) {
            look_at_launcher(app, &looked_ns);
        } else {
            wait_for_anything(app);
        }
    }
    if (engine_core_failed(app->core) != NULL) { /* peers of a cluster that stops go, too */
        return loop_stop_reason(app->loop) != NULL ? 0 : 1;
    }
    LK_INFO("stops: %s", loop_stop_reason(app->loop));
    drain(app);
    return 0;
}

int engine_io_run(const lk_config_t *config, lk_loop_t *loop, int *status_fd)
{
    app_t *app = calloc(1, sizeof *app);
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
    lk_status_t status = start(app, &err);
    if (status == LK_OK) {
        char text[32];
        snprintf(text, sizeof text, "engine %u", app->rank);
        spawn_child_report(status_fd, true, text);
        rc = serve(app);
    } else if (status == LK_ERR_CANCELED) {
        LK_INFO("%s", err.text);
        rc = 0;
    } else {
        report_failure(app, status_fd, &err);
    }

    engine_core_destroy(&app->core);
    engine_setup_fini(&app->setup);
    mesh_destroy(&app->mesh);
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        if (app->inputs != NULL && app->outputs != NULL) {
            engine_link_close(&app->inputs[f]);
            engine_link_close(&app->outputs[f]);
        }
    }
    engine_link_close(&app->wave);
    engine_link_close(&app->events);
    engine_link_close(&app->handshake);
    msg_fini(&app->init);
    lk_buf_fini(&app->scratch.envelope);
    lk_buf_fini(&app->scratch.body);
    free(app->inputs);
    free(app->outputs);
    free(app);
    return rc;
}
