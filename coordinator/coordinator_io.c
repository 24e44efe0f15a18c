#include "base/check.h"
#include "base/config.h"
#include "base/cpu_watch.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/port.h"
#include "base/spawn.h"
#include "coordinator/coordinator.h"
#include "coordinator/coordinator_io.h"
#include "proto/codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_MEMBERS 512
#define BASE_ROOM   256 /* bytes of the handshake address */

typedef struct {
    lk_port_t *handshake, *events, *stats, *wave;
    lk_buf_t envelope, body;
    /* who said HELLO from where; the way back of the handshake ROUTER */
    struct {
        uint32_t role, rank;
        uint64_t generation;
        port_peer_t peer;
    } members[MAX_MEMBERS];
    size_t n_members;
    cpu_watch_t engines[256], frontends[256];
    coordinator_t *coordinator;
    lk_error_t refused; /* the first line of the launcher that made no sense */
} app_t;

static void send_message(app_t *app, lk_port_t *port, const port_peer_t *peer, const msg_t *msg)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_clear(&app->envelope);
    lk_buf_clear(&app->body);
    lk_status_t status = msg_encode(msg, &app->envelope, &app->body, &err);
    if (status == LK_OK) {
        port_frame_t frames[2] = {{app->envelope.data, app->envelope.len},
                                  {app->body.data, app->body.len}};
        status = port_send(port, peer, frames, 2, &err);
    }
    if (status != LK_OK) {
        LK_WARN("a %s message could not be sent: %s", msg_type_name(msg->type), err.text);
    }
}

static void reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    app_t *app = ctx;
    for (size_t i = app->n_members; i-- > 0;) { /* newest first */
        if (app->members[i].role == role && app->members[i].rank == rank &&
            app->members[i].generation == generation) {
            send_message(app, app->handshake, &app->members[i].peer, msg);
            return;
        }
    }
}

static bool computes(void *ctx, const member_t *m, uint64_t now_ns)
{
    app_t *app = ctx;
    cpu_watch_t *watches = m->role == MSG_ROLE_ENGINE ? app->engines : app->frontends;
    return m->rank < LK_ARRAY_LEN(app->engines) &&
           cpu_watch_look(&watches[m->rank], (pid_t)m->pid, now_ns);
}

static void on_launcher(void *ctx, const char *line)
{
    app_t *app = ctx;
    lk_error_t err = LK_ERROR_INIT;
    if (coordinator_on_launcher(app->coordinator, line, &err) < 0 && app->refused.status == LK_OK) {
        app->refused = err;
    }
}

static void publish_stats(void *ctx, const msg_t *msg)
{
    app_t *app = ctx;
    send_message(app, app->stats, NULL, msg);
}

static void publish_wave(void *ctx, const msg_t *msg)
{
    app_t *app = ctx;
    send_message(app, app->wave, NULL, msg);
}

/* Remembers the way back to whoever said HELLO; a full table forgets the oldest entry. */
static void remember(app_t *app, const msg_t *msg, const port_peer_t *peer)
{
    for (size_t i = 0; i < app->n_members; i++) {
        if (app->members[i].role == msg->hello.role && app->members[i].rank == msg->hello.rank &&
            app->members[i].generation == msg->generation &&
            app->members[i].peer.len == peer->len &&
            memcmp(app->members[i].peer.id, peer->id, peer->len) == 0) {
            return;
        }
    }
    if (app->n_members == MAX_MEMBERS) {
        memmove(app->members, app->members + 1, sizeof app->members - sizeof app->members[0]);
        app->n_members--;
    }
    app->members[app->n_members].role = (uint32_t)msg->hello.role;
    app->members[app->n_members].rank = (uint32_t)msg->hello.rank;
    app->members[app->n_members].generation = msg->generation;
    app->members[app->n_members].peer = *peer;
    app->n_members++;
}

/* True if anything came. */
static bool drain(app_t *app, lk_port_t *port, coordinator_t *coordinator)
{
    for (bool any = false;; any = true) {
        lk_error_t err = LK_ERROR_INIT;
        port_msg_t in = {0}; /* stays empty where receiving fails */
        lk_status_t status = port_recv(port, &in, &err);
        if (status == LK_INPROGRESS) {
            return any;
        }
        msg_t msg;
        if (status == LK_OK && in.n_frames == 2) {
            status = msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data,
                                in.frames[1].len, &msg, &err);
        } else if (status == LK_OK) {
            status = lk_error_set(&err, LK_ERR_INVALID, "%zu frames", in.n_frames);
        }
        if (status == LK_OK) {
            if (msg.type == MSG_HELLO && port == app->handshake) {
                remember(app, &msg, &in.peer);
            }
            coordinator_on_message(coordinator, &msg);
            msg_fini(&msg);
        } else {
            LK_WARN("a message was dropped: %s", err.text);
        }
        port_msg_fini(port, &in);
    }
}

/* A later life binds where the first one did, so that everybody's sockets find it: base is the
 * handshake address that the launcher knows; the others' have their name in its place. */
static void make_address(char *base, const char *what, char *out, size_t room)
{
    if (base[0] == '\0') {
        port_ipc_address(what, base, BASE_ROOM);
    }
    char *suffix = strstr(base, "-handshake");
    if (strcmp(what, "handshake") == 0 || suffix == NULL) {
        snprintf(out, room, "%s", base);
    } else {
        snprintf(out, room, "%.*s-%s", (int)(suffix - base), base, what);
    }
}

static lk_status_t open_ports(app_t *app, const char *given, lk_error_t *err)
{
    char base[BASE_ROOM];
    snprintf(base, sizeof base, "%s", given);
    static const struct {
        size_t offset;
        port_kind_t kind;
        const char *what;
    } sockets[] = {{offsetof(app_t, handshake), PORT_ROUTER, "handshake"},
                   {offsetof(app_t, events), PORT_PULL, "events"},
                   {offsetof(app_t, stats), PORT_PUB, "stats"},
                   {offsetof(app_t, wave), PORT_PUB, "wave"}};
    for (size_t i = 0; i < LK_ARRAY_LEN(sockets); i++) {
        char address[300];
        make_address(base, sockets[i].what, address, sizeof address);
        lk_port_t **port = (lk_port_t **)((char *)app + sockets[i].offset);
        LK_RETURN_IF_ERROR(port_zmq_open(sockets[i].kind, true, address, NULL, port, err));
    }
    return LK_OK;
}

static int serve(app_t *app, const lk_config_t *config, lk_loop_t *loop, int *status_fd)
{
    lk_error_t err = LK_ERROR_INIT;
    if (open_ports(app, config->coordinator_address, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        spawn_child_report(status_fd, false, err.text);
        return 1;
    }
    char hash[33];
    config_group_hash(config, hash);
    coordinator_config_t cc = {
        .dp_size = (uint32_t)config->data_parallel_size,
        .n_frontends = (uint32_t)config->api_server_count,
        .shrinks = config->data_parallel_min_size != 0 &&
                   config->data_parallel_min_size < config->data_parallel_size,
        .config_hash = hash,
        .events_address = port_address(app->events),
        .stats_address = port_address(app->stats),
        .wave_address = port_address(app->wave),
        .life = config->generation,
        .handshake_timeout_ns = (uint64_t)(config->handshake_timeout_s * 1e9),
        .dead_after_ns = (uint64_t)(config->dead_after_s * 1e9),
        .heartbeat_ns = (uint64_t)(config->heartbeat_s * 1e9),
        .env = lk_env_real(),
        .host = {app, reply, publish_stats, publish_wave, computes}};
    coordinator_t *coordinator = coordinator_new(&cc);
    CHECK(coordinator != NULL);
    if (coordinator_remove_all(coordinator, config->removed_ranks, &app->refused) == LK_OK) {
        app->coordinator = coordinator;
        loop_hear_parent(loop, on_launcher, app);
    }
    spawn_child_report(status_fd, true, port_address(app->handshake));
    int rc = 0;
    uint64_t beat_ns = 0;
    while (loop_stop_reason(loop) == NULL) {
        if (lk_env_now_ns(cc.env) - beat_ns >= cc.heartbeat_ns) {
            beat_ns = lk_env_now_ns(cc.env);
            spawn_child_beat(*status_fd, false);
        }
        bool any = drain(app, app->handshake, coordinator);
        any |= drain(app, app->events, coordinator);
        lk_status_t status;
        uint64_t next = coordinator_step(coordinator, &status, &err);
        if (status == LK_OK && app->refused.status != LK_OK) {
            err = app->refused;
            status = err.status;
        }
        if (status != LK_OK) {
            LK_ERROR("the cluster ends: %s", err.text);
            spawn_child_report(status_fd, false, err.text);
            rc = 1;
            break;
        }
        if (any) {
            loop_wait(loop, NULL, 0, 0); /* what the launcher says must not wait for a quiet time */
            continue; /* the descriptors are edge-triggered: wait only after an empty drain */
        }
        struct pollfd fds[2] = {{port_fd(app->handshake), POLLIN, 0},
                                {port_fd(app->events), POLLIN, 0}};
        loop_wait(loop, fds, 2, next);
    }
    loop_hear_parent(loop, NULL, NULL);
    coordinator_destroy(&coordinator);
    return rc;
}

int coordinator_io_run(const lk_config_t *config, lk_loop_t *loop, int *status_fd)
{
    app_t *app = calloc(1, sizeof *app);
    CHECK(app != NULL);
    lk_buf_init(&app->envelope, 0);
    lk_buf_init(&app->body, 0);
    int rc = serve(app, config, loop, status_fd);
    port_destroy(&app->handshake);
    port_destroy(&app->events);
    port_destroy(&app->stats);
    port_destroy(&app->wave);
    lk_buf_fini(&app->envelope);
    lk_buf_fini(&app->body);
    free(app);
    return rc;
}
