#include "api_frontend/frontend.h"
#include "api_frontend/trainer_port.h"
#include "base/check.h"
#include "base/log.h"
#include "proto/codec.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HELLO_NS     (1 * LK_SECOND_NS) /* between two HELLOs that nobody answers */
#define TICK_MS      50
#define DRAIN_BUDGET 256                /* messages of one socket before others get a turn, */
#define DRAIN_NS     (20 * LK_MS_NS)    /* and for how long: some take long to write */
#define FLUSH_NS     (1 * LK_SECOND_NS) /* at the end: for last bytes to reach slow clients */
#define MAX_TRANSFER_S                                                                             \
    1800.0 /* backstop of a weight transfer; engines stop one without progress                     \
            */

/* WAIT_INIT: HELLO is sent. WAIT_SERVING: READY is sent. DRAINING: no new work, running requests
 * may finish. FLUSHING: everything is answered, bytes are on their way. */
typedef enum { WAIT_INIT, WAIT_SERVING, SERVING, DRAINING, FLUSHING, ENDED } state_t;

enum { PORT_HANDSHAKE, PORT_INPUT, PORT_OUTPUT, PORT_STATS, PORT_EVENTS, PORT_TRAINER, N_PORTS };

/* Which command a body is of: all ranks get the same, and it may be large. */
typedef struct {
    uint64_t generation, number, group_epoch; /* number 0: of none */
    size_t spec_len;
} command_id_t;

typedef struct {
    bool known;
    uint64_t generation, sequence; /* sequence: of the newest message to that life */
    port_peer_t peer;
} engine_peer_t;

struct frontend {
    const lk_config_t *config;
    frontend_deps_t deps;
    state_t state;
    uint64_t deadline_ns; /* of the state; UINT64_MAX: none */
    uint64_t heartbeat_ns, hello_ns, generation;
    uint64_t sequences[N_PORTS];
    lk_port_t *ports[N_PORTS];
    struct event *port_events[N_PORTS], *tick, *drain;
    lk_buf_t envelope, body; /* scratch of send */
    command_id_t body_of;
    engine_peer_t *engines;
    uint32_t n_engines;
    engine_client_t *client;
    api_t api;
    bool has_api;
    http_server_t *http;
    trainer_port_t trainer;
    uint64_t dropped;
};

/* ---- sending ---- */

/* Encodes into the scratch. */
static lk_status_t encode(frontend_t *self, const msg_t *msg, lk_error_t *err)
{
    command_id_t id = {0};
    if (msg->type == MSG_CMD) {
        const msg_cmd_t *cmd = &msg->cmd;
        id = (command_id_t){cmd->generation, cmd->number, cmd->group_epoch, cmd->spec.len};
    }
    const command_id_t *last = &self->body_of;
    lk_buf_clear(&self->envelope);
    if (id.number != 0 && id.number == last->number && id.generation == last->generation &&
        id.group_epoch == last->group_epoch && id.spec_len == last->spec_len) {
        return msg_encode_envelope(msg, &self->envelope, err);
    }
    self->body_of = (command_id_t){0};
    lk_buf_clear(&self->body);
    LK_RETURN_IF_ERROR(msg_encode(msg, &self->envelope, &self->body, err));
    self->body_of = id;
    return LK_OK;
}

/* *sequence: of the last message to that receiver; one that could not be queued has no number. */
static lk_status_t send_numbered(frontend_t *self, int which, const port_peer_t *peer,
                                 const msg_t *msg, uint64_t *sequence, lk_error_t *err)
{
    msg_t m = *msg;
    m.sender_role = MSG_ROLE_FRONTEND;
    m.sender_rank = (uint32_t)self->config->frontend_index;
    m.generation = self->generation;
    m.sequence = *sequence + 1;
    LK_RETURN_IF_ERROR(encode(self, &m, err));
    port_frame_t frames[2] = {{self->envelope.data, self->envelope.len},
                              {self->body.data, self->body.len}};
    /* Sending may swallow the edge that says that something can be received. */
    event_active(self->drain, EV_TIMEOUT, 0);
    LK_RETURN_IF_ERROR(port_send(self->ports[which], peer, frames, 2, err));
    ++*sequence;
    return LK_OK;
}

static lk_status_t send_to(frontend_t *self, int which, const msg_t *msg, lk_error_t *err)
{
    return send_numbered(self, which, NULL, msg, &self->sequences[which], err);
}

static lk_status_t send_engine(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    frontend_t *self = ctx;
    if (rank >= self->n_engines || !self->engines[rank].known) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %u is not connected", rank);
    }
    engine_peer_t *e = &self->engines[rank];
    lk_status_t status = send_numbered(self, PORT_INPUT, &e->peer, msg, &e->sequence, err);
    return status == LK_OK ? LK_OK : lk_error_prefix(err, "engine %u", rank);
}

static lk_status_t send_coordinator(void *ctx, const msg_t *msg, lk_error_t *err)
{
    return send_to(ctx, PORT_EVENTS, msg, err);
}

/* ---- end ---- */

static void end(frontend_t *self, const lk_error_t *err)
{
    if (self->state != ENDED) {
        self->state = ENDED;
        self->deps.on_end(self->deps.ctx, err);
    }
}

static void fail(frontend_t *self, lk_status_t status, const char *text)
{
    lk_error_t err;
    lk_error_set(&err, status, "%s", text);
    end(self, &err);
}

static void flush(frontend_t *self)
{
    size_t n = self->has_api ? api_abort_completions(&self->api, NULL) : 0;
    if (n > 0) {
        LK_INFO("%zu running requests ended with what they had", n);
    }
    if (self->client != NULL) {
        engine_client_end_calls(self->client, "the server is shutting down");
    }
    self->state = FLUSHING;
    self->deadline_ns = lk_env_now_ns(self->deps.env) + FLUSH_NS;
}

void frontend_stop(frontend_t *self, const char *why)
{
    if (self->state >= DRAINING) {
        return;
    }
    LK_INFO("stopping: %s", why);
    self->api.draining = true;
    if (self->http != NULL) {
        http_server_stop_accepting(self->http);
    }
    bool work = self->has_api && self->api.n_completions > 0;
    if (work && self->config->shutdown_timeout_s > 0) {
        self->state = DRAINING;
        self->deadline_ns = lk_env_now_ns(self->deps.env) +
                            (uint64_t)(self->config->shutdown_timeout_s * LK_SECOND_NS);
    } else {
        flush(self);
    }
}

/* ---- handshake ---- */

static lk_status_t open_port(frontend_t *self, int which, port_kind_t kind, bool bind,
                             const char *address, const char *what, lk_error_t *err);
static void watch_port(frontend_t *self, int which);

void frontend_wake(frontend_t *self)
{
    event_active(self->drain, EV_TIMEOUT, 0);
}

static void after_http_event(void *ctx)
{
    frontend_wake(ctx);
}

/* silence_ms: not 0 if something that may take so long begins. */
static void beat(frontend_t *self, uint64_t silence_ms)
{
    self->heartbeat_ns = lk_env_now_ns(self->deps.env);
    msg_t msg = {.type = MSG_HEARTBEAT};
    msg.heartbeat = (msg_heartbeat_t){MSG_ROLE_FRONTEND, self->config->frontend_index, silence_ms};
    (void)!send_coordinator(self, &msg, NULL); /* the next one is as good */
    if (self->deps.on_beat != NULL && self->http != NULL) {
        self->deps.on_beat(self->deps.ctx, silence_ms > 0);
    }
}

static void on_long_work(void *ctx, bool begins)
{
    beat(ctx, begins ? API_LONG_WORK_MS : 0);
}

static lk_status_t make_client(frontend_t *self, const msg_init_t *init, lk_error_t *err)
{
    const lk_config_t *c = self->config;
    self->engines = calloc(init->dp_size, sizeof self->engines[0]);
    if (self->engines == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->n_engines = (uint32_t)init->dp_size;
    engine_client_config_t config = {
        .client = (uint32_t)c->frontend_index,
        .n_clients = (uint32_t)init->n_frontends,
        .n_ranks = self->n_engines,
        .shadow = strcmp(c->weight_swap, "shadow") == 0,
        .expert_parallel = c->enable_expert_parallel,
        .generation = self->generation,
        .control_timeout_ns = (uint64_t)(c->control_timeout_s * LK_SECOND_NS),
        .transfer_timeout_ns =
            (uint64_t)(LK_MAX(MAX_TRANSFER_S, 2 * c->transfer_timeout_s) * (double)LK_SECOND_NS),
        .max_requests = UINT32_MAX,
    };
    engine_client_ops_t ops = {self, send_engine, send_coordinator, self->deps.env};
    self->client = engine_client_new(&config, &ops);
    if (self->client == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    LK_RETURN_IF_ERROR(
        api_init(&self->api, c, self->deps.env, self->client, self->deps.tokenizer, err));
    self->has_api = true;
    self->api.on_long_work = on_long_work;
    self->api.on_long_work_ctx = self;
    const char *trainer = c->trainer_endpoint[0] != '\0' ? c->trainer_endpoint : NULL;
    LK_RETURN_IF_ERROR(open_port(self, PORT_TRAINER, PORT_ROUTER, true, trainer, "trainer", err));
    snprintf(self->api.trainer_address, sizeof self->api.trainer_address, "%s",
             port_address(self->ports[PORT_TRAINER]));
    trainer_port_init(&self->trainer, &self->api, self->ports[PORT_TRAINER]);
    return LK_OK;
}

static lk_status_t say_hello(frontend_t *self, lk_error_t *err);

static lk_status_t say_ready(frontend_t *self, lk_error_t *err)
{
    msg_t ready = {.type = MSG_READY};
    ready.ready.role = MSG_ROLE_FRONTEND;
    ready.ready.rank = self->config->frontend_index;
    return send_to(self, PORT_HANDSHAKE, &ready, err);
}

static lk_status_t on_init(frontend_t *self, const msg_init_t *init, lk_error_t *err)
{
    if (init->error.len > 0) {
        return lk_error_set(err, LK_ERR_PEER, "the coordinator refused: %s", init->error.ptr);
    }
    if (init->dp_size == 0 || init->dp_size > 256 || init->n_frontends == 0 ||
        self->config->frontend_index >= init->n_frontends) {
        return lk_error_set(err, LK_ERR_PEER, "the coordinator's INIT makes no sense");
    }
    LK_RETURN_IF_ERROR(open_port(self, PORT_EVENTS, PORT_PUSH, false,
                                 msg_cstr(init->events_address), "events", err));
    LK_RETURN_IF_ERROR(make_client(self, init, err));
    watch_port(self, PORT_INPUT);
    watch_port(self, PORT_OUTPUT);
    LK_RETURN_IF_ERROR(
        open_port(self, PORT_STATS, PORT_SUB, false, msg_cstr(init->stats_address), "stats", err));
    LK_RETURN_IF_ERROR(say_ready(self, err));
    self->state = WAIT_SERVING;
    return LK_OK;
}

/* The coordinator may have died with the last one. */
static void repeat_hello(frontend_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    if (say_hello(self, &err) != LK_OK) {
        LK_WARN("no HELLO to the coordinator: %s", err.text); /* the next one is as good */
    }
}

/* A later life of the coordinator does not know us. */
static void answer_rollcall(frontend_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    if (say_hello(self, &err) != LK_OK || say_ready(self, &err) != LK_OK) {
        LK_WARN("no answer to the coordinator's roll call: %s", err.text); /* it calls again */
    }
}

static void open_http(frontend_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    const lk_config_t *c = self->config;
    if (http_server_new(self->deps.base, &self->api, c->host, (uint16_t)c->port,
                        &self->deps.http_limits, after_http_event, self, &self->http,
                        &err) != LK_OK) {
        end(self, &err);
        return;
    }
    self->state = SERVING;
    self->deadline_ns = UINT64_MAX;
    bool v6 = strchr(c->host, ':') != NULL;
    char text[1024];
    snprintf(text, sizeof text, "http://%s%s%s:%u trainer %s", v6 ? "[" : "", c->host,
             v6 ? "]" : "", http_server_port(self->http), self->api.trainer_address);
    LK_INFO("ready: %s", text);
    self->deps.on_ready(self->deps.ctx, text);
}

/* ---- receiving ---- */

static void on_here(frontend_t *self, const msg_engine_here_t *here, const port_peer_t *peer)
{
    if (here->rank >= self->n_engines) {
        self->dropped++;
        return;
    }
    engine_peer_t *e = &self->engines[here->rank];
    if (!e->known || here->generation > e->generation) { /* an old life does not come back */
        *e = (engine_peer_t){true, here->generation, 0, *peer};
    } else if (here->generation == e->generation) {
        e->peer = *peer;
    }
}

static void on_msg(frontend_t *self, int which, const msg_t *msg, const port_peer_t *peer)
{
    lk_error_t err = LK_ERROR_INIT;
    if (which == PORT_HANDSHAKE) {
        if (msg->type == MSG_INIT && self->state == WAIT_INIT &&
            on_init(self, &msg->init, &err) != LK_OK) {
            end(self, &err);
        }
        return;
    }
    if (msg->type == MSG_ROLLCALL && (which == PORT_STATS)) {
        answer_rollcall(self);
        return;
    }
    if (which == PORT_INPUT && msg->type == MSG_ENGINE_HERE) {
        on_here(self, &msg->engine_here, peer);
    }
    engine_client_on_msg(self->client, msg);
    engine_client_info_t info;
    engine_client_info(self->client, &info);
    if (self->state == WAIT_SERVING && info.whole) {
        open_http(self);
    }
}

/* An engine may be here before our INIT is: what it says waits in the socket. */
static bool is_read(const frontend_t *self, int which)
{
    return which == PORT_HANDSHAKE || self->client != NULL;
}

/* True when there may be more. */
static bool drain_port(frontend_t *self, int which)
{
    lk_port_t *port = self->ports[which];
    if (port == NULL || which == PORT_EVENTS) {
        return false;
    }
    if (!is_read(self, which)) {
        return false;
    }
    if (which == PORT_TRAINER) {
        return trainer_port_drain(&self->trainer, DRAIN_BUDGET);
    }
    uint64_t until = lk_env_now_ns(self->deps.env) + DRAIN_NS;
    for (int i = 0; i < DRAIN_BUDGET && self->state != ENDED; i++) {
        if (i > 0 && lk_env_now_ns(self->deps.env) >= until) {
            return true;
        }
        port_msg_t in;
        msg_t msg;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status = port_recv(port, &in, &err);
        if (status == LK_INPROGRESS) {
            return false;
        }
        if (status != LK_OK) {
            self->dropped++;
            continue;
        }
        if (in.n_frames == 2 && msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data,
                                           in.frames[1].len, &msg, &err) == LK_OK) {
            on_msg(self, which, &msg, &in.peer);
            msg_fini(&msg);
        } else {
            self->dropped++;
            LK_DEBUG("a message was dropped: %s", err.text);
        }
        port_msg_fini(port, &in);
    }
    return self->state != ENDED;
}

static void on_drain(evutil_socket_t fd, short what, void *ctx)
{
    frontend_t *self = ctx;
    bool more = false;
    for (int i = 0; i < N_PORTS && self->state != ENDED; i++) {
        more |= drain_port(self, i);
    }
    if (more) { /* in the loop's next turn: made active, it would go on before timers and sockets */
        struct timeval now = {0};
        CHECK(event_add(self->drain, &now) == 0);
    }
}

static void on_tick(evutil_socket_t fd, short what, void *ctx)
{
    frontend_t *self = ctx;
    uint64_t now = lk_env_now_ns(self->deps.env);
    if (self->state == WAIT_INIT && now >= self->deadline_ns) {
        fail(self, LK_ERR_TIMEOUT, "the coordinator sent no INIT before --handshake-timeout");
    } else if (self->state == WAIT_SERVING && now >= self->deadline_ns) {
        fail(self, LK_ERR_TIMEOUT, "the engines were not ready before --handshake-timeout");
    } else if (self->state == WAIT_INIT && now - self->hello_ns >= HELLO_NS) {
        repeat_hello(self);
    }
    if (self->client != NULL && self->state != ENDED) {
        engine_client_poll(self->client);
        api_tick(&self->api);
        if (now - self->heartbeat_ns >= (uint64_t)(self->config->heartbeat_s * LK_SECOND_NS)) {
            beat(self, 0);
        }
    }
    if (self->state == DRAINING && (self->api.n_completions == 0 || now >= self->deadline_ns)) {
        flush(self);
    }
    if (self->state == FLUSHING &&
        (now >= self->deadline_ns || self->http == NULL || http_server_num_open(self->http) == 0)) {
        lk_error_t ok = LK_ERROR_INIT;
        end(self, &ok);
    }
    event_active(self->drain, EV_TIMEOUT, 0);
}

/* ---- life ---- */

/* Has on_drain called when something arrives; in memory the owner wakes us. */
static void watch_port(frontend_t *self, int which)
{
    int fd = port_fd(self->ports[which]);
    if (fd >= 0) {
        self->port_events[which] =
            event_new(self->deps.base, fd, EV_READ | EV_PERSIST, on_drain, self);
        CHECK(self->port_events[which] != NULL && event_add(self->port_events[which], NULL) == 0);
    }
    event_active(self->drain, EV_TIMEOUT, 0);
}

static lk_status_t open_port(frontend_t *self, int which, port_kind_t kind, bool bind,
                             const char *address, const char *what, lk_error_t *err)
{
    CHECK(self->ports[which] == NULL);
    LK_RETURN_IF_ERROR(
        self->deps.open_port(self->deps.ctx, kind, bind, address, what, &self->ports[which], err));
    if (kind != PORT_PUSH && is_read(self, which)) {
        watch_port(self, which);
    }
    return LK_OK;
}

static lk_status_t say_hello(frontend_t *self, lk_error_t *err)
{
    char hash[33];
    config_group_hash(self->config, hash);
    engine_client_info_t info = {0};
    if (self->client != NULL) {
        engine_client_info(self->client, &info);
    }
    self->hello_ns = lk_env_now_ns(self->deps.env);
    msg_t msg = {.type = MSG_HELLO};
    msg.hello = (msg_hello_t){
        .role = MSG_ROLE_FRONTEND,
        .rank = self->config->frontend_index,
        .pid = (uint64_t)getpid(),
        .config_hash = msg_str(hash),
        .input_address = msg_str(port_address(self->ports[PORT_INPUT])),
        .output_address = msg_str(port_address(self->ports[PORT_OUTPUT])),
        .member_of = info.group_epoch,
        .weight_epoch = info.weight_epoch,
    };
    return send_to(self, PORT_HANDSHAKE, &msg, err);
}

lk_status_t frontend_new(const lk_config_t *config, const frontend_deps_t *deps, frontend_t **out,
                         lk_error_t *err)
{
    frontend_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->config = config;
    self->deps = *deps;
    uint64_t now = lk_env_now_ns(deps->env);
    /* Monotonic on this host: a later life has a higher generation. */
    self->generation = LK_MAX(now, config->generation);
    self->deadline_ns = now + (uint64_t)(config->handshake_timeout_s * LK_SECOND_NS);
    lk_buf_init(&self->envelope, 0);
    lk_buf_init(&self->body, 0);
    self->drain = event_new(deps->base, -1, 0, on_drain, self);
    self->tick = event_new(deps->base, -1, EV_PERSIST, on_tick, self);
    struct timeval period = {0, TICK_MS * 1000};
    CHECK(self->drain != NULL && self->tick != NULL && event_add(self->tick, &period) == 0);
    static const struct {
        int which;
        port_kind_t kind;
        const char *what;
    } bound[] = {{PORT_INPUT, PORT_ROUTER, "input"}, {PORT_OUTPUT, PORT_PULL, "output"}};
    lk_status_t status = LK_OK;
    for (size_t i = 0; i < LK_ARRAY_LEN(bound) && status == LK_OK; i++) {
        status = open_port(self, bound[i].which, bound[i].kind, true, NULL, bound[i].what, err);
    }
    if (status == LK_OK) {
        status = open_port(self, PORT_HANDSHAKE, PORT_DEALER, false, config->coordinator_address,
                           "handshake", err);
    }
    if (status == LK_OK) {
        status = say_hello(self, err);
    }
    if (status != LK_OK) {
        frontend_destroy(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

void frontend_destroy(frontend_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    frontend_t *self = *self_p;
    self->state = ENDED;
    if (self->client != NULL) {
        engine_client_end_calls(self->client, "the server is shutting down");
    }
    if (self->has_api) {
        api_fini(&self->api);
    }
    http_server_destroy(&self->http);
    engine_client_destroy(&self->client);
    for (int i = 0; i < N_PORTS; i++) {
        if (self->port_events[i] != NULL) {
            event_free(self->port_events[i]);
        }
        port_destroy(&self->ports[i]);
    }
    event_free(self->tick);
    event_free(self->drain);
    lk_buf_fini(&self->envelope);
    lk_buf_fini(&self->body);
    free(self->engines);
    free(self);
    *self_p = NULL;
}

/* A host that only this machine reaches. */
static bool is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    return strcmp(host, "localhost") == 0 ||
           (inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127) ||
           (inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

/* Of a ZeroMQ address; one of another kind than tcp does not leave the machine. */
static bool is_local_endpoint(const char *address)
{
    char host[256];
    const char *colon = strrchr(address, ':');
    if (strncmp(address, "tcp://", 6) != 0) {
        return address[0] == '\0' || strncmp(address, "ipc://", 6) == 0;
    }
    const char *from = address + 6;
    size_t n = colon > from ? (size_t)(colon - from) : 0;
    if (n >= 2 && from[0] == '[' && from[n - 1] == ']') {
        from++;
        n -= 2;
    }
    snprintf(host, sizeof host, "%.*s", (int)LK_MIN(n, sizeof host - 1), from);
    return is_loopback(host);
}

lk_status_t frontend_check_config(const lk_config_t *config, lk_error_t *err)
{
    bool keys = config->api_key[0] != '\0' && config->admin_key[0] != '\0';
    if (!is_loopback(config->host) && !keys && !config->insecure) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--host %s is reachable from other machines: give --api-key and "
                            "--admin-key, or say --insecure",
                            config->host);
    }
    if (!is_local_endpoint(config->trainer_endpoint) && config->admin_key[0] == '\0' &&
        !config->insecure) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--trainer-endpoint %s is reachable from other machines: give "
                            "--admin-key, or say --insecure",
                            config->trainer_endpoint);
    }
    if (strlen(config->api_key) > API_KEY_MAX || strlen(config->admin_key) > API_KEY_MAX) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--api-key and --admin-key have at most %d bytes: no call could bring "
                            "a longer one",
                            API_KEY_MAX);
    }
    if (config->coordinator_address[0] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID, "--coordinator-address is missing");
    }
    return LK_OK;
}
