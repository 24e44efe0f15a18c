/* engine_enrol.c: the handshake with the coordinator, the links to everybody, and the sockets' part
 * of entering and leaving group epochs. */
#include "base/check.h"
#include "base/log.h"
#include "base/spawn.h"
#include "engine_core/engine_app.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void carry_out(engine_app_t *app, unsigned actions, int64_t lost, const char *why);

static uint64_t now_ns(const engine_app_t *app)
{
    return lk_env_now_ns(app->env);
}

static void end(engine_app_t *app, const lk_error_t *err)
{
    if (app->ended.status == LK_OK) {
        app->ended = *err;
    }
}

/* ---- what is said ---- */

static uint64_t weight_epoch(const engine_app_t *app)
{
    uint64_t floor = app->init.type == MSG_INIT ? app->init.init.weight_floor : 0;
    return app->core != NULL ? LK_MAX(floor, group_weights(engine_core_group(app->core))->epoch)
                             : floor;
}

static void say_hello(engine_app_t *app, const char *why)
{
    char hash[33];
    config_group_hash(app->config, hash);
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                              .rank = app->rank,
                              .pid = (uint64_t)getpid(),
                              .config_hash = msg_str(hash),
                              .mesh_address = msg_str(mesh_address(app->mesh)),
                              .left_epoch = app->enrol.left,
                              .member_of = enrol_member_of(&app->enrol),
                              .why = msg_str(why),
                              .weight_epoch = weight_epoch(app),
                              .heard_epoch = app->enrol.epoch,
                              .revision = app->enrol.revision,
                              .members = app->roster.n};
    engine_link_send(&app->handshake, &app->scratch, &msg);
}

static void say_here(engine_app_t *app, uint32_t frontend)
{
    msg_t here = {.type = MSG_ENGINE_HERE};
    const char *why = app->core != NULL ? group_left_why(engine_core_group(app->core)) : NULL;
    here.engine_here =
        (msg_engine_here_t){app->rank, app->config->generation, app->enrol.epoch,
                            app->outputs[frontend].sequence, msg_str(why != NULL ? why : "")};
    engine_link_send(&app->inputs[frontend], &app->scratch, &here);
}

static void say_ready(engine_app_t *app)
{
    char digest[DIGEST_HEX_SIZE];
    weight_sink_t sink = executor_sink(app->setup.executor);
    digest_hex(sink.ops->digest(sink.ctx), digest);
    msg_t msg = {.type = MSG_READY};
    msg.ready = (msg_ready_t){.role = MSG_ROLE_ENGINE,
                              .rank = app->rank,
                              .num_blocks = app->setup.num_blocks,
                              .block_size = app->setup.block_size,
                              .max_model_len = app->setup.max_model_len,
                              .vocab_size = app->setup.model.vocab_size,
                              .dtype = msg_str(dtype_torch_name(app->setup.dtype)),
                              .digest = msg_str(digest),
                              .group_epoch = app->enrol.epoch,
                              .lockstep = app->setup.lockstep};
    engine_link_send(&app->handshake, &app->scratch, &msg);
    LK_INFO(
        "ready in group epoch %llu: %u KV blocks of %u, %u positions, %s, %u threads, weights %s",
        (unsigned long long)app->enrol.epoch, app->setup.num_blocks, app->setup.block_size,
        app->setup.max_model_len, dtype_torch_name(app->setup.dtype), app->setup.threads, digest);
}

/* ---- links ---- */

/* Opens the link, or opens it anew where the address is another one. *changed: it did either. */
static lk_status_t link_to(engine_app_t *app, engine_link_t *link, port_kind_t kind,
                           msg_str_t address, const char *name, bool *changed, lk_error_t *err)
{
    *changed = link->port == NULL || strcmp(link->address, msg_cstr(address)) != 0;
    if (!*changed) {
        return LK_OK;
    }
    engine_link_close(link);
    const port_peer_t *identity = kind == PORT_DEALER ? &app->identity : NULL;
    return engine_link_open(link, kind, msg_cstr(address), identity, app->rank,
                            app->config->generation, name, err);
}

static lk_status_t link_frontend(engine_app_t *app, const msg_init_t *init, uint32_t f,
                                 lk_error_t *err)
{
    char name[48];
    bool first = app->inputs[f].port == NULL, input, output;
    snprintf(name, sizeof name, "front end %u's input", f);
    LK_RETURN_IF_ERROR(
        link_to(app, &app->inputs[f], PORT_DEALER, init->inputs.items[f].text, name, &input, err));
    snprintf(name, sizeof name, "front end %u's output", f);
    LK_RETURN_IF_ERROR(
        link_to(app, &app->outputs[f], PORT_PUSH, init->outputs.items[f].text, name, &output, err));
    if ((input || output) && !first && app->core != NULL) {
        LK_INFO("front end %u has restarted", f);
        engine_core_drop_frontend(app->core, f);
        say_here(app, f);
    }
    return LK_OK;
}

static lk_status_t link_all(engine_app_t *app, lk_error_t *err)
{
    const msg_init_t *init = &app->init.init;
    bool ignored;
    if (app->inputs == NULL) {
        app->n_frontends = (uint32_t)init->n_frontends;
        app->inputs = calloc(app->n_frontends, sizeof *app->inputs);
        app->outputs = calloc(app->n_frontends, sizeof *app->outputs);
        if (app->inputs == NULL || app->outputs == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
        }
    }
    for (uint32_t f = 0; f < app->n_frontends; f++) {
        LK_RETURN_IF_ERROR(link_frontend(app, init, f, err));
    }
    LK_RETURN_IF_ERROR(link_to(app, &app->wave, PORT_SUB, init->wave_address,
                               "the coordinator's waves", &ignored, err));
    return link_to(app, &app->events, PORT_PUSH, init->events_address, "the coordinator's events",
                   &ignored, err);
}

/* ---- entering and leaving ---- */

static lk_status_t connect_mesh(engine_app_t *app, lk_error_t *err)
{
    const msg_init_t *init = &app->init.init;
    const roster_t *roster = &app->roster;
    const char *addresses[ROSTER_MAX];
    for (uint32_t i = 0; i < roster->n; i++) {
        addresses[i] = msg_cstr(init->mesh.items[i].text);
    }
    return mesh_connect_post(app->mesh, init->group_epoch, roster->n, roster->ranks, addresses,
                             err);
}

/* Who watches a process that is not a member yet is to be patient, too. */
static void announce_silence(engine_app_t *app, bool begins)
{
    msg_t msg = {.type = MSG_HEARTBEAT};
    double ms = begins ? app->config->transfer_timeout_s * 1e3 : 0;
    msg.heartbeat = (msg_heartbeat_t){MSG_ROLE_ENGINE, app->rank, (uint64_t)ms};
    engine_link_send(&app->events, &app->scratch, &msg);
}

/* The experts of a rank that is gone for good are the others' from now on: each opens its executor
 * anew for its share of them. */
static lk_status_t follow_members(engine_app_t *app, lk_error_t *err)
{
    const roster_t *now = &app->roster, *was = &app->opened;
    if (!app->setup.lockstep || (now->n == was->n && now->place == was->place)) {
        return LK_OK;
    }
    LK_INFO("the group has %u of %llu ranks: the weights are loaded anew", now->n,
            (unsigned long long)app->config->data_parallel_size);
    bool reloads = app->core != NULL;
    if (reloads) {
        engine_core_reload(app->core, now);
    } else {
        announce_silence(app, true);
    }
    uint32_t num_blocks = app->setup.num_blocks;
    engine_setup_fini(&app->setup);
    app->setup.sharing_ranks = 1; /* the others have their memory taken, or as good as */
    LK_RETURN_IF_ERROR(engine_app_open_executor(app, err));
    CHECKF(app->setup.num_blocks == num_blocks, "%u KV blocks, not %u", app->setup.num_blocks,
           num_blocks);
    if (reloads) {
        return engine_core_reloaded(app->core, app->setup.executor, err);
    }
    announce_silence(app, false);
    return LK_OK;
}

static lk_status_t form(engine_app_t *app, lk_error_t *err)
{
    if (app->core != NULL) {
        engine_core_form(app->core, app->enrol.epoch, app->init.init.weight_floor, &app->roster);
    } else {
        LK_RETURN_IF_ERROR(engine_app_make_core(app, app->enrol.epoch > 1, err));
        char text[32];
        snprintf(text, sizeof text, "engine %u", app->rank);
        spawn_child_report(app->status_fd, true, text);
    }
    return LK_OK;
}

static void leave(engine_app_t *app, int64_t lost, const char *why, lk_error_t *err)
{
    if (app->core != NULL) {
        engine_core_leave(app->core, lost, why);
    }
    lk_error_t mesh_err;
    if (mesh_leave(app->mesh, lost, why, &mesh_err) < 0) {
        *err = mesh_err;
    }
}

/* What enrol says, in this order. An error that is nobody's death ends the process. */
static void carry_out(engine_app_t *app, unsigned actions, int64_t lost, const char *why)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = LK_OK;
    if (actions & ENROL_LEAVE) {
        leave(app, lost, why, &err);
        status = err.status;
    }
    if (actions & ENROL_HELLO) {
        say_hello(app, why);
    }
    if (status == LK_OK && (actions & (ENROL_CONNECT | ENROL_RELINK))) {
        status = link_all(app, &err);
    }
    if (status == LK_OK && (actions & ENROL_CONNECT)) {
        status = follow_members(app, &err);
        status = status == LK_OK ? connect_mesh(app, &err) : status;
    }
    if (status == LK_OK && (actions & ENROL_FORM)) {
        status = form(app, &err);
    }
    if (status == LK_OK && (actions & ENROL_READY)) {
        say_ready(app);
    }
    for (uint32_t f = 0; status == LK_OK && (actions & ENROL_HERE) && f < app->n_frontends; f++) {
        say_here(app, f);
    }
    if (status < 0) {
        end(app, &err);
    }
    if (actions & ENROL_END) {
        lk_error_set(&err, LK_ERR_STATE, "%s", why);
        end(app, &err);
    }
}

/* ---- what the coordinator says ---- */

static lk_status_t check_init(const engine_app_t *app, const msg_init_t *init, roster_t *roster,
                              lk_error_t *err)
{
    bool changed = app->inputs != NULL && init->n_frontends != app->n_frontends;
    if (init->n_frontends < 1 || init->n_frontends > GROUP_MAX_FRONTENDS || changed ||
        init->inputs.count != init->n_frontends || init->outputs.count != init->n_frontends) {
        return lk_error_set(err, LK_ERR_PEER,
                            "INIT of the coordinator: %llu front ends with %zu and %zu addresses, "
                            "as many are possible as there were at first, and at most %d",
                            (unsigned long long)init->n_frontends, init->inputs.count,
                            init->outputs.count, (int)GROUP_MAX_FRONTENDS);
    }
    return roster_of_init(init, (uint32_t)app->config->data_parallel_size, app->rank, roster, err);
}

static void lose(engine_app_t *app, int64_t lost, const char *why);

static bool is_inside(const engine_app_t *app)
{
    return app->enrol.state == ENROL_CONNECTING || app->enrol.state == ENROL_MEMBER;
}

/* Owns *msg. */
static void on_init(engine_app_t *app, msg_t *msg)
{
    lk_error_t err = LK_ERROR_INIT;
    if (msg->init.error.len > 0) {
        char why[LK_ERROR_TEXT_MAX];
        lk_text(why, sizeof why, "the coordinator refuses: %s", msg_cstr(msg->init.error));
        msg_fini(msg);
        carry_out(app, enrol_on(&app->enrol, ENROL_ON_REFUSED, now_ns(app)), -1, why);
        return;
    }
    roster_t roster;
    if (check_init(app, &msg->init, &roster, &err) < 0) {
        msg_fini(msg);
        end(app, &err);
        return;
    }
    if (is_inside(app) && msg->init.group_epoch == app->enrol.epoch &&
        !roster_equal(&roster, &app->roster)) {
        msg_fini(msg);
        lose(app, -1, "the coordinator knows other members of this group epoch");
        return;
    }
    const char *named = msg_cstr(msg->init.mesh.items[roster.place].text);
    bool mine = strcmp(named, mesh_address(app->mesh)) == 0;
    unsigned actions =
        enrol_on_init(&app->enrol, msg->init.group_epoch, msg->init.revision, mine, now_ns(app));
    if (actions & (ENROL_CONNECT | ENROL_RELINK)) {
        msg_fini(&app->init);
        app->init = *msg;
        app->roster = roster;
    } else {
        msg_fini(msg);
    }
    carry_out(app, actions, -1, "a newer group epoch has begun");
}

static void on_dissolve(engine_app_t *app, const msg_dissolve_t *dissolve)
{
    unsigned actions = enrol_on_dissolve(&app->enrol, dissolve->group_epoch, now_ns(app));
    carry_out(app, actions, dissolve->lost, msg_cstr(dissolve->why));
}

void engine_enrol_on_rollcall(engine_app_t *app)
{
    carry_out(app, enrol_on(&app->enrol, ENROL_ON_ROLLCALL, now_ns(app)), -1,
              "the coordinator was started again");
}

static bool take_handshake(engine_app_t *app)
{
    msg_t msg;
    bool any = false;
    while (app->ended.status == LK_OK && engine_link_recv(&app->handshake, &msg) == LK_OK) {
        any = true;
        switch (msg.type) {
        case MSG_INIT:
            on_init(app, &msg);
            break;
        case MSG_DISSOLVE:
            on_dissolve(app, &msg.dissolve);
            msg_fini(&msg);
            break;
        default:
            LK_WARN("%s is no message of a handshake; dropped", msg_type_name(msg.type));
            msg_fini(&msg);
        }
    }
    return any;
}

/* ---- the mesh ---- */

static void lose(engine_app_t *app, int64_t lost, const char *why)
{
    char text[LK_ERROR_TEXT_MAX];
    lk_text(text, sizeof text, "%s", why); /* may be the core's, which is about to change it */
    carry_out(app, enrol_on(&app->enrol, ENROL_ON_LOST, now_ns(app)), lost, text);
}

static bool look_at_mesh(engine_app_t *app)
{
    lk_error_t err = LK_ERROR_INIT;
    if (app->enrol.state == ENROL_CONNECTING) {
        lk_status_t status = mesh_connect_test(app->mesh, &err);
        if (status == LK_OK) {
            carry_out(app, enrol_on(&app->enrol, ENROL_ON_CONNECTED, now_ns(app)), -1, "");
        } else if (status < 0) {
            lose(app, mesh_lost(app->mesh), err.text);
        }
        return status != LK_INPROGRESS;
    }
    if (app->enrol.state != ENROL_MEMBER) {
        return false;
    }
    if (app->config->data_parallel_size > 1 && mesh_poll(app->mesh, &err) < 0) {
        lose(app, mesh_lost(app->mesh), err.text);
        return true;
    }
    if (engine_core_left(app->core) != NULL) { /* a collective failed */
        lose(app, mesh_lost(app->mesh), engine_core_left(app->core));
        return true;
    }
    return false;
}

/* ---- life ---- */

lk_status_t engine_enrol_start(engine_app_t *app, lk_error_t *err)
{
    if (app->config->coordinator_address[0] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--coordinator-address is missing: engines are started by lockstep "
                            "serve");
    }
    LK_RETURN_IF_ERROR(engine_link_open(&app->handshake, PORT_DEALER,
                                        app->config->coordinator_address, &app->identity, app->rank,
                                        app->config->generation, "the coordinator", err));
    carry_out(app, enrol_on(&app->enrol, ENROL_ON_LOADED, now_ns(app)), -1, "");
    return LK_OK;
}

static void check_start_deadline(engine_app_t *app)
{
    if (app->core != NULL || now_ns(app) < app->start_deadline_ns) {
        return;
    }
    lk_error_t err;
    char missing[256] = "";
    bool connecting = app->enrol.state == ENROL_CONNECTING;
    if (connecting) {
        mesh_missing(app->mesh, missing, sizeof missing);
    }
    lk_error_set(&err, LK_ERR_TIMEOUT, "no %s within %.0f s%s%s",
                 connecting ? "mesh of all ranks" : "INIT of the coordinator",
                 app->config->handshake_timeout_s,
                 missing[0] != '\0' ? "; not connected to rank " : "", missing);
    end(app, &err);
}

bool engine_enrol_turn(engine_app_t *app)
{
    bool any = take_handshake(app);
    if (app->ended.status == LK_OK) {
        any |= look_at_mesh(app);
    }
    const char *why = app->core != NULL ? engine_core_left(app->core) : NULL;
    carry_out(app, enrol_on_time(&app->enrol, now_ns(app)), -1, why != NULL ? why : "");
    check_start_deadline(app);
    return any;
}

void engine_enrol_fini(engine_app_t *app)
{
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
    free(app->inputs);
    free(app->outputs);
}
