#include "tests/unit/api_frontend/fake_group.h"
#include "base/buf.h"
#include "base/check.h"
#include "proto/codec.h"

#include <string.h>

static uint64_t now_ns(void *ctx)
{
    return ((fake_group_t *)ctx)->now;
}

static void fill_random(void *ctx, void *buf, size_t len)
{
    memset(buf, 0x11, len);
}

/* Through the codec, so that the copy owns what the message borrowed. */
static void keep(fg_queue_t *q, const msg_t *msg)
{
    CHECK(q->n < FG_MAX_MSGS);
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    lk_error_t err;
    lk_status_t status = msg_encode(msg, &envelope, &body, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    status = msg_decode(envelope.data, envelope.len, body.data, body.len, &q->msgs[q->n], &err);
    CHECKF(status == LK_OK, "%s", err.text);
    q->n++;
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
}

static lk_status_t send_engine(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    fake_group_t *g = ctx;
    if (g->queues[rank].down) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %u is not connected", rank);
    }
    if (msg->type == MSG_CMD) {
        g->generation = msg->cmd.generation;
    }
    keep(&g->queues[rank], msg);
    return LK_OK;
}

static lk_status_t send_coordinator(void *ctx, const msg_t *msg, lk_error_t *err)
{
    keep(&((fake_group_t *)ctx)->queues[FG_COORDINATOR], msg);
    return LK_OK;
}

void fg_reopen_early(fake_group_t *g)
{
    engine_client_ops_t ops = {g, send_engine, send_coordinator, &g->env};
    engine_client_destroy(&g->client);
    g->client = engine_client_new(&g->config, &ops);
    CHECK(g->client != NULL);
}

void fg_reopen(fake_group_t *g)
{
    fg_reopen_early(g);
    fg_stats(g, true, false, 1, NULL);
}

void fg_init(fake_group_t *g, uint32_t n_ranks, bool expert_parallel)
{
    memset(g, 0, sizeof *g);
    g->now = 1000 * LK_SECOND_NS;
    g->env = (lk_env_t){g, now_ns, fill_random};
    g->config = (engine_client_config_t){
        .n_clients = 1,
        .n_ranks = n_ranks,
        .expert_parallel = expert_parallel,
        .generation = 77,
        .control_timeout_ns = 30 * LK_SECOND_NS,
        .transfer_timeout_ns = 300 * LK_SECOND_NS,
        .max_requests = 10000,
    };
    fg_reopen(g);
}

void fg_fini(fake_group_t *g)
{
    engine_client_destroy(&g->client);
    for (size_t r = 0; r <= FG_MAX_RANKS; r++) {
        for (size_t i = 0; i < g->queues[r].n; i++) {
            msg_fini(&g->queues[r].msgs[i]);
        }
    }
}

const msg_t *fg_take(fake_group_t *g, uint32_t rank, msg_type_t type)
{
    fg_queue_t *q = &g->queues[rank];
    while (q->first < q->n) {
        const msg_t *msg = &q->msgs[q->first++];
        if (msg->type == type) {
            return msg;
        }
    }
    return NULL;
}

size_t fg_count(const fake_group_t *g, uint32_t rank, msg_type_t type)
{
    size_t n = 0;
    for (size_t i = g->queues[rank].first; i < g->queues[rank].n; i++) {
        n += g->queues[rank].msgs[i].type == type;
    }
    return n;
}

void fg_drop_all(fake_group_t *g)
{
    for (size_t r = 0; r <= FG_MAX_RANKS; r++) {
        g->queues[r].first = g->queues[r].n;
    }
}

void fg_seen(fake_group_t *g, uint32_t rank, uint64_t number)
{
    msg_t msg = {.type = MSG_SEEN};
    msg.seen = (msg_seen_t){rank, g->generation, number};
    engine_client_on_msg(g->client, &msg);
}

void fg_done(fake_group_t *g, uint32_t rank, uint64_t number, lk_status_t status, const char *text,
             const char *body)
{
    msg_t msg = {.type = MSG_DONE};
    msg.done = (msg_done_t){.rank = rank,
                            .generation = g->generation,
                            .number = number,
                            .status = status,
                            .text = msg_str(text),
                            .body = msg_str(body)};
    engine_client_on_msg(g->client, &msg);
}

void fg_output(fake_group_t *g, uint32_t rank, uint64_t handle, uint32_t first, size_t n,
               finish_reason_t finish)
{
    uint32_t ids[64];
    CHECK(n <= 64);
    for (size_t i = 0; i < n; i++) {
        ids[i] = first + (uint32_t)i;
    }
    msg_output_t out = {.handle = handle,
                        .token_ids = {ids, n * sizeof ids[0]},
                        .epoch = 1,
                        .version = msg_str("default"),
                        .finish_reason = finish,
                        .stop_token = -1};
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.rank = rank;
    msg.outputs.outputs.items = &out;
    msg.outputs.outputs.count = 1;
    engine_client_on_msg(g->client, &msg);
}

void fg_stats(fake_group_t *g, bool serving, bool run, uint64_t group_epoch, const char *dead)
{
    msg_name_t name = {msg_str(dead)};
    msg_t msg = {.type = MSG_STATS};
    msg.stats.serving = serving;
    msg.stats.run = run;
    msg.stats.group_epoch = group_epoch;
    msg.stats.lockstep = g->config.expert_parallel;
    msg.stats.max_model_len = 64;
    msg.stats.vocab_size = 300;
    msg.stats.dead.items = &name;
    msg.stats.dead.count = dead != NULL;
    engine_client_on_msg(g->client, &msg);
}

void fg_removed(fake_group_t *g, bool serving, uint64_t group_epoch, uint32_t rank, const char *why)
{
    msg_removal_t removal = {rank, msg_str(why)};
    msg_t msg = {.type = MSG_STATS};
    msg.stats = (msg_stats_t){.serving = serving,
                              .group_epoch = group_epoch,
                              .lockstep = g->config.expert_parallel,
                              .max_model_len = 64,
                              .vocab_size = 300,
                              .why = msg_str(serving ? "" : "engine 1 was removed: x"),
                              .removed = {&removal, 1}};
    engine_client_on_msg(g->client, &msg);
}

void fg_here(fake_group_t *g, uint32_t rank, uint64_t generation, uint64_t group_epoch)
{
    msg_t msg = {.type = MSG_ENGINE_HERE};
    msg.engine_here = (msg_engine_here_t){rank, generation, group_epoch};
    engine_client_on_msg(g->client, &msg);
}

void fg_left(fake_group_t *g, uint32_t rank, uint64_t group_epoch, int64_t lost, const char *why)
{
    msg_t msg = {.type = MSG_LEFT};
    msg.left = (msg_left_t){.rank = rank,
                            .group_epoch = group_epoch,
                            .lockstep = g->config.expert_parallel,
                            .lost = lost,
                            .why = msg_str(why)};
    engine_client_on_msg(g->client, &msg);
}

void fg_advance(fake_group_t *g, uint64_t ns)
{
    g->now += ns;
    engine_client_poll(g->client);
}
