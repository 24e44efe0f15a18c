#include "tests/sim/scale.h"
#include "base/check.h"
#include "proto/codec.h"
#include "tests/sim/net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FRONTENDS 2
#define INTERVAL  8
#define STEP_US   10000

/* ---- the group, in virtual time ---- */

static const struct {
    uint64_t ranks, events;
} sizes[] = {{2, 20000}, {8, 60000}, {64, 2000000}, {256, 10000000}};

static sim_config_t config_of(uint64_t ranks, uint64_t events)
{
    sim_config_t config = {.seed = 1, .max_events = events};
    sim_options_t *o = &config.options;
    sim_options_draw(o, 1);
    o->ranks = ranks;
    o->frontends = FRONTENDS;
    o->moe = o->doorbell = o->prefix_cache = 1;
    o->sync_interval = INTERVAL;
    o->block_size = 16;
    o->positions = 1024;
    o->max_num_seqs = 8;
    o->max_batched_tokens = 64;
    o->reject_while_paused = 0;
    o->backend = o->swap = o->trainers = 0;
    o->clients = LK_MIN(ranks, 64);
    o->max_prompt = o->max_output = 32;
    o->client_think_us = 1000;
    o->client_aborts = 0;
    o->callers = 1;
    o->caller_think_us = 20000;
    o->caller_short_timeouts = 0;
    o->modes = 2; /* keep */
    o->latency_us = 100;
    o->step_us = STEP_US;
    o->spikes = o->slow_rank = o->lost_starts = o->lost_stats = o->torn_streams = 0;
    o->stop_every_ms = o->kill_every_ms = o->break_every_ms = 0;
    o->control_timeout_ms = o->transfer_timeout_ms = 30000;
    return config;
}

static bool run_size(uint64_t ranks, uint64_t events)
{
    sim_config_t config = config_of(ranks, events);
    sim_result_t r;
    const lk_env_t *clock = lk_env_real();
    uint64_t since = lk_env_now_ns(clock);
    sim_run(&config, &r);
    double seconds = (double)(lk_env_now_ns(clock) - since) / 1e9;
    if (r.failed) {
        printf("%llu ranks: %s: %s\n", (unsigned long long)ranks, r.check, r.text);
        return false;
    }
    const sim_figures_t *f = &r.safety;
    double steps = (double)f->steps / (double)ranks, rounds = (double)f->rounds;
    double n = (double)ranks, time = (double)f->ns / 1e9;
    printf("| %llu | %.0f | %.0f | %.0f | %.0f | %.1f | %.2f (%llu) | %.0f | %.0f | %.1f |\n",
           (unsigned long long)ranks, steps, rounds, (double)f->votes / rounds / n,
           (double)f->vote_bytes / rounds / n, (double)f->exchanges / steps / n,
           (double)r.pause_steps / (double)r.pauses, (unsigned long long)r.pause_steps_most,
           (double)f->messages[SIM_LINK_EVENTS] / time, (double)f->bytes[SIM_LINK_STATS] / time,
           seconds);
    fflush(stdout);
    return true;
}

/* ---- the coordinator, in real time ---- */

typedef struct {
    uint64_t now_ns, stats, bytes, group_epoch;
    lk_buf_t envelope, body;
} sink_t;

static uint64_t now(void *ctx)
{
    return ((sink_t *)ctx)->now_ns;
}

static void reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    if (msg->type == MSG_INIT) {
        ((sink_t *)ctx)->group_epoch = msg->init.group_epoch;
    }
}

static void publish(void *ctx, const msg_t *msg)
{
    sink_t *sink = ctx;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_clear(&sink->envelope);
    lk_buf_clear(&sink->body);
    CHECKF(msg_encode(msg, &sink->envelope, &sink->body, &err) == LK_OK, "%s", err.text);
    sink->stats++;
    sink->bytes = sink->envelope.len + sink->body.len;
}

static void say(coordinator_t *coordinator, msg_t msg)
{
    msg.generation = 1;
    coordinator_on_message(coordinator, &msg);
}

static coordinator_t *serving_coordinator(sink_t *sink, const lk_env_t *env, uint32_t ranks)
{
    coordinator_config_t config = {.dp_size = ranks,
                                   .n_frontends = FRONTENDS,
                                   .config_hash = "h",
                                   .handshake_timeout_ns = 1000 * LK_SECOND_NS,
                                   .dead_after_ns = 1000 * LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = env,
                                   .host = {sink, reply, publish, publish}};
    coordinator_t *self = coordinator_new(&config);
    CHECK(self != NULL);
    for (uint32_t i = 0; i < ranks + FRONTENDS; i++) {
        uint32_t role = i < ranks ? MSG_ROLE_ENGINE : MSG_ROLE_FRONTEND;
        uint32_t rank = i < ranks ? i : i - ranks;
        msg_t msg = {.type = MSG_HELLO, .sender_role = role, .sender_rank = rank};
        msg.hello = (msg_hello_t){.role = role, .rank = rank, .config_hash = msg_str("h")};
        say(self, msg);
    }
    for (uint32_t i = 0; i < ranks + FRONTENDS; i++) {
        uint32_t role = i < ranks ? MSG_ROLE_ENGINE : MSG_ROLE_FRONTEND;
        uint32_t rank = i < ranks ? i : i - ranks;
        msg_t msg = {.type = MSG_READY, .sender_role = role, .sender_rank = rank};
        msg.ready = (msg_ready_t){
            .role = role, .rank = rank, .digest = msg_str("d"), .group_epoch = sink->group_epoch};
        say(self, msg);
    }
    CHECK(coordinator_serving(self));
    return self;
}

/* What one report costs, decoding included; what one publication costs, encoding included. */
static void time_coordinator(uint32_t ranks)
{
    sink_t sink = {.now_ns = LK_SECOND_NS};
    lk_env_t env = {&sink, now, NULL};
    lk_buf_init(&sink.envelope, 0);
    lk_buf_init(&sink.body, 0);
    coordinator_t *coordinator = serving_coordinator(&sink, &env, ranks);
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    const lk_env_t *clock = lk_env_real();
    uint64_t in_ns = 0, out_ns = 0, n_in = 0, n_out = 0;
    for (uint32_t i = 0; i < 200000; i++) {
        msg_t msg = {.type = MSG_LOAD,
                     .sender_role = MSG_ROLE_ENGINE,
                     .sender_rank = i % ranks,
                     .generation = 1,
                     .sequence = i};
        msg.load_report.load = (msg_load_t){.rank = i % ranks,
                                            .running = 8,
                                            .step = i,
                                            .kv_usage = 0.5,
                                            .round = i / 32,
                                            .weight_version = msg_str("step-1234"),
                                            .generation_tokens = 1000000 + i};
        lk_error_t err = LK_ERROR_INIT;
        lk_buf_clear(&envelope);
        lk_buf_clear(&body);
        CHECK(msg_encode(&msg, &envelope, &body, &err) == LK_OK);
        uint64_t since = lk_env_now_ns(clock);
        msg_t got;
        CHECK(msg_decode(envelope.data, envelope.len, body.data, body.len, &got, &err) == LK_OK);
        coordinator_on_message(coordinator, &got);
        msg_fini(&got);
        in_ns += lk_env_now_ns(clock) - since;
        n_in++;
        if (i % 1000 == 999) {
            sink.now_ns += 200 * LK_MS_NS;
            uint64_t before = sink.stats;
            lk_status_t status;
            since = lk_env_now_ns(clock);
            coordinator_step(coordinator, &status, &err);
            out_ns += lk_env_now_ns(clock) - since;
            n_out += sink.stats - before;
        }
    }
    double each_in = (double)in_ns / (double)n_in, each_out = (double)out_ns / (double)n_out;
    double busy = (10.0 * ranks * each_in + 10.0 * each_out) / 1e9;
    printf("| %u | %.2f | %.3f | %.0f | %.2f |\n", ranks, each_in / 1e3, each_out / 1e6,
           (double)sink.bytes / 1024, 100 * busy);
    coordinator_destroy(&coordinator);
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
    lk_buf_fini(&sink.envelope);
    lk_buf_fini(&sink.body);
}

int sim_scale_run(void)
{
    int failed = 0;
    printf("Group: %d front ends, sync interval %d, steps of %d ms, messages of 0.1 ms; figures "
           "per process.\n\n"
           "| ranks | steps | rounds | votes sent per round | bytes of them | exchanges sent per "
           "step | steps to a pause, mean (most) | events/s at the coordinator | STATS bytes/s, "
           "all front ends | s to simulate |\n|---|---|---|---|---|---|---|---|---|---|\n",
           FRONTENDS, INTERVAL, STEP_US / 1000);
    for (size_t i = 0; i < LK_ARRAY_LEN(sizes); i++) {
        failed += !run_size(sizes[i].ranks, sizes[i].events);
    }
    printf("\nCoordinator: real time on this machine.\n\n"
           "| ranks | us per report | ms per publication | KiB of STATS | %% of a core at 10 "
           "reports/s per rank |\n|---|---|---|---|---|\n");
    static const uint32_t ranks[] = {8, 64, 256, 1024};
    for (size_t i = 0; i < LK_ARRAY_LEN(ranks); i++) {
        time_coordinator(ranks[i]);
    }
    return failed;
}
