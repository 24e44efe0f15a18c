#include "tests/unit/api_frontend/fake_cluster.h"
#include "base/check.h"
#include "proto/codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

lk_port_t *fcl_open(fcl_t *c, port_kind_t kind, bool bind, const char *address)
{
    lk_port_t *port = NULL;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = c->hub != NULL
                             ? port_mem_open(c->hub, kind, bind, address, NULL, &port, &err)
                             : port_zmq_open(kind, bind, address, NULL, &port, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    return port;
}

static void put(lk_port_t *port, const port_peer_t *peer, const msg_t *msg)
{
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = msg_encode(msg, &envelope, &body, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    port_frame_t frames[2] = {{envelope.data, envelope.len}, {body.data, body.len}};
    status = port_send(port, peer, frames, 2, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
}

/* The next message of a port; false when there is none. */
static bool take(lk_port_t *port, msg_t *msg, port_peer_t *peer)
{
    port_msg_t in;
    lk_error_t err = LK_ERROR_INIT;
    if (port == NULL || port_recv(port, &in, &err) != LK_OK) {
        return false;
    }
    CHECK(in.n_frames == 2);
    lk_status_t status = msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data,
                                    in.frames[1].len, msg, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    *peer = in.peer;
    port_msg_fini(port, &in);
    return true;
}

/* ---- the front end's surroundings ---- */

static lk_status_t open_port(void *ctx, port_kind_t kind, bool bind, const char *address,
                             const char *what, lk_port_t **out, lk_error_t *err)
{
    fcl_t *c = ctx;
    char fresh[128];
    if (address == NULL) {
        port_ipc_address(what, fresh, sizeof fresh);
        address = fresh;
    }
    return c->hub != NULL ? port_mem_open(c->hub, kind, bind, address, NULL, out, err)
                          : port_zmq_open(kind, bind, address, NULL, out, err);
}

static void on_ready(void *ctx, const char *text)
{
    fcl_t *c = ctx;
    c->ready = true;
    snprintf(c->ready_text, sizeof c->ready_text, "%s", text);
    int port = 0;
    CHECK(sscanf(text, "http://127.0.0.1:%d trainer %255s", &port, c->trainer) == 2);
    c->port = (uint16_t)port;
}

static void on_beat(void *ctx, bool patience)
{
    fcl_t *c = ctx;
    c->patience_begins += patience;
    c->patience = patience;
}

static void on_end(void *ctx, const lk_error_t *err)
{
    fcl_t *c = ctx;
    c->ended = true;
    c->end = *err;
}

/* ---- coordinator ---- */

static void on_hello(fcl_t *c, const msg_t *hello, const port_peer_t *peer)
{
    CHECK(hello->hello.role == MSG_ROLE_FRONTEND);
    char input[256], output[256];
    snprintf(input, sizeof input, "%s", msg_cstr(hello->hello.input_address));
    snprintf(output, sizeof output, "%s", msg_cstr(hello->hello.output_address));
    c->frontend_peer = *peer;
    c->init_due = true;
    for (uint32_t r = 0; r < FCL_RANKS; r++) {
        c->input[r] = fcl_open(c, PORT_DEALER, false, input);
        c->output[r] = fcl_open(c, PORT_PUSH, false, output);
        msg_t here = {.type = MSG_ENGINE_HERE};
        here.engine_here = (msg_engine_here_t){r, 1, 1};
        put(c->input[r], NULL, &here);
    }
}

static void send_init(fcl_t *c)
{
    msg_t msg = {.type = MSG_INIT};
    msg.init = (msg_init_t){.group_epoch = 1,
                            .dp_size = FCL_RANKS,
                            .n_frontends = 1,
                            .events_address = msg_str(port_address(c->events)),
                            .stats_address = msg_str(port_address(c->stats))};
    put(c->handshake, &c->frontend_peer, &msg);
    c->init_due = false;
}

static void turn_coordinator(fcl_t *c)
{
    msg_t msg;
    port_peer_t peer;
    if (c->init_due) {
        send_init(c);
    }
    while (take(c->handshake, &msg, &peer)) {
        if (msg.type == MSG_HELLO) {
            on_hello(c, &msg, &peer);
        } else if (msg.type == MSG_READY) {
            c->connected = true;
        }
        msg_fini(&msg);
    }
    while (take(c->events, &msg, &peer)) {
        msg_fini(&msg);
    }
    if (c->connected) {
        msg_name_t name = {msg_str(c->dead)};
        msg_t stats = {.type = MSG_STATS};
        stats.stats = (msg_stats_t){.serving = c->dead == NULL,
                                    .group_epoch = 1,
                                    .run = true,
                                    .paused = c->paused,
                                    .max_model_len = 4096,
                                    .num_blocks = 100,
                                    .vocab_size = 300};
        stats.stats.dead.items = &name;
        stats.stats.dead.count = c->dead != NULL;
        put(c->stats, NULL, &stats);
    }
}

/* ---- engines ---- */

void fcl_output(fcl_t *c, uint32_t rank, const msg_t *msg)
{
    put(c->output[rank], NULL, msg);
}

static void on_add(fcl_t *c, uint32_t rank, const msg_add_t *add)
{
    c->n_added++;
    c->last_rank = rank;
    for (size_t i = 0; i < FCL_MAX_REQUESTS; i++) {
        if (!c->requests[i].used) {
            c->requests[i] = (fcl_request_t){.used = true,
                                             .rank = rank,
                                             .handle = add->handle,
                                             .max_tokens = add->sampling.max_tokens,
                                             .logprobs = add->sampling.logprobs,
                                             .n_prompt = (uint32_t)(add->prompt.len / 4)};
            return;
        }
    }
    CHECKF(false, "too many requests");
}

static void on_abort(fcl_t *c, const msg_abort_t *abort_)
{
    for (size_t k = 0; k < abort_->handles.count; k++) {
        for (size_t i = 0; i < FCL_MAX_REQUESTS; i++) {
            fcl_request_t *r = &c->requests[i];
            if (r->used && r->handle == abort_->handles.items[k].handle) {
                r->used = false;
                c->n_aborted++;
            }
        }
    }
}

static void on_cmd(fcl_t *c, uint32_t rank, const msg_cmd_t *cmd)
{
    msg_t seen = {.type = MSG_SEEN};
    seen.seen = (msg_seen_t){rank, cmd->generation, cmd->number};
    fcl_output(c, rank, &seen);
    if (c->silent) {
        return;
    }
    msg_t done = {.type = MSG_DONE};
    done.done = (msg_done_t){.rank = rank, .generation = cmd->generation, .number = cmd->number};
    if (cmd->kind == CMD_UPDATE) {
        done.done.status = c->update_status;
        done.done.text = msg_str(c->update_text);
        c->last_verb = cmd->verb;
        snprintf(c->last_spec, sizeof c->last_spec, "%s", msg_cstr(cmd->spec));
    } else {
        c->paused = cmd->kind == CMD_PAUSE;
    }
    fcl_output(c, rank, &done);
}

static void on_utility(fcl_t *c, uint32_t rank, const msg_utility_t *u)
{
    char body[256];
    const char *method = msg_cstr(u->method);
    if (strcmp(method, "is_paused") == 0) {
        snprintf(body, sizeof body, "{\"is_paused\":%s}", c->paused ? "true" : "false");
    } else if (strcmp(method, "reset_prefix_cache") == 0) {
        snprintf(body, sizeof body, "{\"success\":true}");
    } else if (strcmp(method, "status") == 0) {
        snprintf(body, sizeof body, "{\"steps\":%u}", 100 + rank);
    } else {
        snprintf(body, sizeof body,
                 "{\"rank\":%u,\"state\":\"READY\",\"version\":\"v1\",\"epoch\":3,"
                 "\"digest\":\"%s\",\"dirty\":false}",
                 rank,
                 c->update_status == LK_OK ? "abc"
                 : rank == 0               ? "abc"
                                           : "def");
    }
    msg_t reply = {.type = MSG_UTILITY_REPLY};
    reply.utility_reply =
        (msg_utility_reply_t){rank, u->call_id, LK_OK, msg_str(""), msg_str(body)};
    fcl_output(c, rank, &reply);
}

static void make_tokens(fcl_t *c, fcl_request_t *r)
{
    uint32_t ids[256];
    float logprobs[256];
    size_t n = LK_MIN(LK_MIN(c->tokens_per_turn, 256), r->max_tokens - r->made);
    for (size_t i = 0; i < n; i++) {
        ids[i] = 'a' + (uint32_t)((r->made + i) % 26);
        logprobs[i] = -0.25f;
    }
    r->made += n;
    msg_span_t kv = {msg_str("v1"), 3, 0, r->n_prompt};
    msg_output_t out = {.handle = r->handle,
                        .token_ids = {ids, n * 4},
                        .epoch = 3,
                        .version = msg_str("v1"),
                        .stop_token = -1,
                        .kv_snapshot = r->made == n,
                        .finish_reason = r->made == r->max_tokens ? FINISH_LENGTH : FINISH_NONE};
    out.kv_spans.items = &kv;
    out.kv_spans.count = out.kv_snapshot;
    if (r->logprobs >= 0) {
        out.logprobs = (msg_bin_t){logprobs, n * 4};
    }
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.rank = r->rank;
    msg.outputs.outputs.items = &out;
    msg.outputs.outputs.count = 1;
    r->used = out.finish_reason == FINISH_NONE;
    fcl_output(c, r->rank, &msg);
}

static void turn_engine(fcl_t *c, uint32_t rank)
{
    msg_t msg;
    port_peer_t peer;
    while (take(c->input[rank], &msg, &peer)) {
        switch (msg.type) {
        case MSG_ADD:
            on_add(c, rank, &msg.add);
            break;
        case MSG_ABORT:
            on_abort(c, &msg.abort);
            break;
        case MSG_CMD:
            on_cmd(c, rank, &msg.cmd);
            break;
        case MSG_UTILITY:
            on_utility(c, rank, &msg.utility);
            break;
        default:
            break;
        }
        msg_fini(&msg);
    }
    for (size_t i = 0; i < FCL_MAX_REQUESTS && !c->hold && !c->paused; i++) {
        if (c->requests[i].used && c->requests[i].rank == rank) {
            make_tokens(c, &c->requests[i]);
        }
    }
}

void fcl_turn(fcl_t *c)
{
    if (c->hub != NULL && c->frontend != NULL && !c->ended) {
        frontend_wake(c->frontend);
    }
    event_base_loop(c->base, EVLOOP_NONBLOCK);
    turn_coordinator(c);
    for (uint32_t r = 0; r < FCL_RANKS; r++) {
        turn_engine(c, r);
    }
}

void fcl_init(fcl_t *c, bool zmq, const http_limits_t *limits, const tokenizer_t *tokenizer,
              char *const *flags)
{
    memset(c, 0, sizeof *c);
    c->tokens_per_turn = 1;
    c->base = event_base_new();
    c->hub = zmq ? NULL : port_mem_hub_new();
    lk_port_t **ports[] = {&c->handshake, &c->events, &c->stats};
    static const port_kind_t kinds[] = {PORT_ROUTER, PORT_PULL, PORT_PUB};
    for (size_t i = 0; i < 3; i++) {
        char address[128];
        port_ipc_address("test", address, sizeof address);
        *ports[i] = fcl_open(c, kinds[i], true, address);
    }
    char *argv[32] = {(char *)"test",
                      (char *)"model-dir",
                      (char *)"--port",
                      (char *)"0",
                      (char *)"--coordinator-address",
                      (char *)port_address(c->handshake)};
    int argc = 6;
    for (; flags != NULL && *flags != NULL && argc < 32; flags++) {
        argv[argc++] = *flags;
    }
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = config_parse(argc, argv, &c->config, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    static frontend_deps_t deps; /* borrowed by the front end */
    deps = (frontend_deps_t){
        .base = c->base,
        .env = lk_env_real(),
        .tokenizer = tokenizer,
        .http_limits = *limits,
        .ctx = c,
        .open_port = open_port,
        .on_ready = on_ready,
        .on_beat = on_beat,
        .on_end = on_end,
    };
    status = frontend_new(&c->config, &deps, &c->frontend, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    while (!c->ready) {
        CHECKF(!c->ended, "%s", c->end.text);
        fcl_turn(c);
    }
}

void fcl_fini(fcl_t *c)
{
    frontend_destroy(&c->frontend);
    port_destroy(&c->handshake);
    port_destroy(&c->events);
    port_destroy(&c->stats);
    for (uint32_t r = 0; r < FCL_RANKS; r++) {
        port_destroy(&c->input[r]);
        port_destroy(&c->output[r]);
    }
    port_mem_hub_destroy(&c->hub);
    event_base_free(c->base);
}
