/*
 * Bytes become a sequence of events at two engines of one group: requests with any field, commands
 * in and out of order, raw decoded messages from front ends and the coordinator, votes delivered
 * late, time. Properties: nothing crashes or trips a CHECK; an engine that gives up says why; a
 * request ends at most once, says nothing afterwards, and was asked for.
 *
 * Input: byte 0 chooses the group (experts spread or not, doorbell, admission, pool size), byte 1
 * the front ends; then an operation per byte, which takes its operands from the bytes after it.
 */
#include "base/check.h"
#include "base/log.h"
#include "engine_core/engine_core.h"
#include "proto/codec.h"
#include "tests/lib/allreduce_mem.h"
#include "tests/lib/ep_mem.h"
#include "transfer/backends/backends.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RANKS       2
#define FRONTENDS   2
#define HANDLES     64
#define BLOCK       4
#define MAX_EVENTS  400
#define GROUP_EPOCH 3

#define CONFIG_COMMON                                                                              \
    "\"hidden_size\": 8, \"intermediate_size\": 16, \"num_hidden_layers\": 1, "                    \
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 4, "                    \
    "\"vocab_size\": 33, \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-6, "                \
    "\"rope_theta\": 10000.0, \"tie_word_embeddings\": false, \"torch_dtype\": \"float32\", "      \
    "\"eos_token_id\": 1, \"hidden_act\": \"silu\""
static const char dense_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", " CONFIG_COMMON "}";
static const char moe_config[] =
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": \"qwen3_moe\", "
    "\"num_experts\": 2, \"num_experts_per_tok\": 1, \"moe_intermediate_size\": 4, "
    "\"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], " CONFIG_COMMON
    "}";

static const char *const specs[] = {
    "",
    "{}",
    "{\"init_info\": {\"trainer\": \"nobody\", \"session_token\": \"t\", \"packed\": true}}",
    "{\"init_info\": {\"backend\": \"disk\"}}",
    "{\"update_info\": {\"names\": [\"lm_head.weight\"], \"dtype_names\": [\"float32\"], "
    "\"shapes\": [[33, 8]]}}",
    "{\"update_info\": {\"path\": \"/nonexistent\"}}",
    "{\"weight_version\": \"v2\"}",
    "{\"weight_version\": \"v3\", \"keep_kv\": true}",
};
static const char *const methods[] = {"weight_info", "reset_prefix_cache", "is_paused", "status",
                                      "no such thing"};

/* What is left of the input; zeros when it is used up. */
typedef struct {
    const uint8_t *at, *end;
} input_t;

static uint8_t next_u8(input_t *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

/* Small, huge or anything, so that limits are met as often as the middle. */
static uint64_t next_u64(input_t *in)
{
    uint8_t shape = next_u8(in);
    if (shape < 192) {
        return shape % 32;
    }
    if (shape < 208) {
        return UINT64_MAX - shape % 16;
    }
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) {
        v = v << 8 | next_u8(in);
    }
    return v;
}

static double next_f64(input_t *in)
{
    uint64_t bits = next_u64(in);
    double v = (double)bits / 8;
    if (bits >= 32) {
        memcpy(&v, &bits, sizeof v); /* NaN, infinities and denormals too */
    }
    return v;
}

static msg_bin_t next_bin(input_t *in, size_t limit)
{
    size_t n = next_u8(in);
    n = LK_MIN(n, limit);
    n = LK_MIN(n, (size_t)(in->end - in->at));
    msg_bin_t bin = {in->at, n};
    in->at += n;
    return bin;
}

/* A text of a table, or the input's own bytes up to a NUL. */
static msg_str_t next_text(input_t *in, const char *const *table, size_t n_table)
{
    uint8_t pick = next_u8(in);
    if (pick < 224) {
        return msg_str(table[pick % n_table]);
    }
    msg_bin_t raw = next_bin(in, 64);
    static char text[65];
    memcpy(text, raw.data, raw.len);
    text[raw.len] = '\0';
    return msg_str(text);
}

typedef enum { HANDLE_UNUSED, HANDLE_OPEN, HANDLE_ENDED } handle_state_t;

typedef struct rig {
    uint64_t now_ns, random;
    lk_env_t env;
    model_config_t model;
    allreduce_mem_t *hub;
    ep_mem_t *ep;
    executor_t *executors[RANKS];
    engine_core_t *engines[RANKS];
    struct rig_host {
        struct rig *rig;
        uint32_t rank;
    } hosts[RANKS];
    uint32_t frontends;
    uint64_t number[FRONTENDS], generation[FRONTENDS];
    /* of requests, by rank, front end and handle */
    uint8_t handles[RANKS][FRONTENDS][HANDLES];
} rig_t;

static uint64_t rig_now(void *ctx)
{
    return ((const rig_t *)ctx)->now_ns;
}

static void rig_random(void *ctx, void *buf, size_t len)
{
    rig_t *self = ctx;
    for (size_t i = 0; i < len; i++) {
        self->random = self->random * 6364136223846793005u + 1442695040888963407u;
        ((uint8_t *)buf)[i] = (uint8_t)(self->random >> 56);
    }
}

static void on_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    const struct rig_host *host = ctx;
    rig_t *self = host->rig;
    CHECK(frontend < self->frontends);
    if (msg->type != MSG_OUTPUTS) {
        return;
    }
    for (size_t i = 0; i < msg->outputs.outputs.count; i++) {
        const msg_output_t *out = &msg->outputs.outputs.items[i];
        if (out->handle >= HANDLES) {
            continue; /* of a raw message */
        }
        uint8_t *state = &self->handles[host->rank][frontend][out->handle];
        CHECK(*state == HANDLE_OPEN);
        CHECK(out->token_ids.len % 4 == 0);
        if (out->finish_reason != FINISH_NONE) {
            *state = HANDLE_ENDED;
        }
    }
}

static void on_coordinator(void *ctx, const msg_t *msg)
{
}

static void rig_open(rig_t *self, uint8_t flags, uint8_t frontends)
{
    bool moe = flags & 1, doorbell = flags & 2;
    lk_error_t err = LK_ERROR_INIT;
    const char *json = moe ? moe_config : dense_config;
    self->now_ns = 1000 * LK_SECOND_NS;
    self->env = (lk_env_t){self, rig_now, rig_random};
    self->frontends = 1 + frontends % FRONTENDS;
    CHECK(model_config_parse(json, strlen(json), NULL, 0, &self->model, &err) == LK_OK);
    self->hub = allreduce_mem_new(RANKS, false, doorbell);
    self->ep = ep_mem_new(RANKS);
    uint32_t num_blocks = flags & 8 ? 6 : 40;
    for (uint32_t r = 0; r < RANKS; r++) {
        executor_config_t exec = {.model = &self->model,
                                  .dtype = LK_DTYPE_F32,
                                  .load_dummy = true,
                                  .dummy_seed = 1,
                                  .block_size = BLOCK,
                                  .num_blocks = num_blocks,
                                  .max_seqs = 4,
                                  .max_tokens = 8,
                                  .threads = 1,
                                  .ep = moe ? ep_mem_rank(self->ep, r) : ep_local()};
        CHECK(executor_null_ops.open(&exec, &self->executors[r], &err) == LK_OK);
        self->hosts[r] = (struct rig_host){self, r};
        engine_core_config_t core = {.rank = r,
                                     .dp_size = RANKS,
                                     .n_frontends = self->frontends,
                                     .group_epoch = GROUP_EPOCH,
                                     .lockstep = moe,
                                     .sync_interval = 1 + (flags >> 4) % 4,
                                     .reject_while_paused = flags & 4,
                                     .heartbeat_ns = LK_SECOND_NS,
                                     .dead_after_ns = 5 * LK_SECOND_NS,
                                     .control_timeout_ns = 30 * LK_SECOND_NS,
                                     .transfer_timeout_ns = 30 * LK_SECOND_NS,
                                     .scheduler = {.max_num_seqs = 4,
                                                   .max_num_batched_tokens = 8,
                                                   .max_model_len = 20,
                                                   .vocab_size = self->model.vocab_size,
                                                   .eos_token_ids = {1},
                                                   .n_eos = 1,
                                                   .max_waiting = 16},
                                     .num_blocks = num_blocks,
                                     .block_size = BLOCK,
                                     .enable_prefix_caching = true,
                                     .model = &self->model,
                                     .executor = self->executors[r],
                                     .allreduce = allreduce_mem_rank(self->hub, r),
                                     .wte = &wte_mem,
                                     .env = &self->env,
                                     .host = {.ctx = &self->hosts[r],
                                              .to_frontend = on_frontend,
                                              .to_coordinator = on_coordinator}};
        CHECK(engine_core_new(&core, &self->engines[r], &err) == LK_OK);
    }
}

static void rig_close(rig_t *self)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        engine_core_destroy(&self->engines[r]);
        self->executors[r]->ops->close(self->executors[r]);
    }
    allreduce_mem_destroy(&self->hub);
    ep_mem_destroy(&self->ep);
}

static void step(rig_t *self, uint32_t r)
{
    if (engine_core_failed(self->engines[r]) == NULL) {
        (void)engine_core_step(self->engines[r]);
    }
    if (engine_core_failed(self->engines[r]) != NULL) {
        CHECK(engine_core_failed(self->engines[r])->text[0] != '\0');
        return;
    }
    scheduler_verify(engine_core_scheduler(self->engines[r]));
}

static void deliver(rig_t *self, uint32_t from, uint32_t to)
{
    if (allreduce_mem_in_flight(self->hub, from, to)) {
        allreduce_mem_deliver(self->hub, from, to);
    }
}

static void sweep(rig_t *self, unsigned times)
{
    for (unsigned i = 0; i < times; i++) {
        for (uint32_t r = 0; r < RANKS; r++) {
            deliver(self, r, 1 - r);
            step(self, r);
        }
    }
}

static void send(rig_t *self, uint32_t frontend, uint32_t rank, const msg_t *msg)
{
    if (engine_core_failed(self->engines[rank]) == NULL) {
        engine_core_on_message(self->engines[rank], frontend, msg);
    }
}

static void send_add(rig_t *self, input_t *in)
{
    uint32_t f = next_u8(in) % self->frontends, r = next_u8(in) % RANKS;
    uint64_t handle = next_u8(in) % HANDLES;
    uint8_t *state = &self->handles[r][f][handle];
    if (*state != HANDLE_UNUSED) {
        return; /* front ends count their handles */
    }
    *state = HANDLE_OPEN;
    uint8_t shape = next_u8(in);
    uint32_t prompt[24];
    size_t n = shape % 24;
    for (size_t i = 0; i < n; i++) {
        prompt[i] = shape < 240 ? (uint32_t)(2 + i % 5) : next_u8(in);
    }
    msg_t msg = {.type = MSG_ADD, .generation = self->generation[f]};
    msg.add = (msg_add_t){.client = f,
                          .handle = handle,
                          .id = msg_str("r"),
                          .prompt = {prompt, n * sizeof(uint32_t) + (shape == 255)},
                          .sampling = {.top_p = 1,
                                       .repetition_penalty = 1,
                                       .max_tokens = 1 + next_u8(in) % 16,
                                       .logprobs = -1}};
    if (next_u8(in) & 1) {
        msg_sampling_t *s = &msg.add.sampling;
        s->temperature = next_f64(in);
        s->top_p = next_f64(in);
        s->min_p = next_f64(in);
        s->top_k = (int64_t)next_u64(in);
        s->repetition_penalty = next_f64(in);
        s->presence_penalty = next_f64(in);
        s->frequency_penalty = next_f64(in);
        s->seed = next_u64(in);
        s->max_tokens = next_u64(in);
        s->min_tokens = next_u64(in);
        s->logprobs = (int64_t)next_u64(in);
        s->stop_token_ids = next_bin(in, 64);
        s->bias_ids = next_bin(in, 32);
        s->bias_values = next_bin(in, 32);
        s->allowed_token_ids = next_bin(in, 32);
        s->bad_words = next_bin(in, 64);
        msg.add.priority = (int64_t)next_u64(in);
        msg.add.choice = next_u64(in);
        msg.add.cache_salt = next_text(in, specs, 2);
    }
    send(self, f, r, &msg);
}

/* The next command of a stream: to both ranks, or (a partial call) to one. */
static void send_cmd(rig_t *self, input_t *in)
{
    uint32_t f = next_u8(in) % self->frontends;
    uint8_t ranks = next_u8(in);
    msg_t msg = {.type = MSG_CMD, .generation = self->generation[f]};
    msg.cmd = (msg_cmd_t){.client = f,
                          .generation = self->generation[f],
                          .number = ++self->number[f],
                          .kind = next_u8(in) % 6,
                          .mode = next_u8(in) % 5,
                          .clear_cache = next_u8(in) & 1,
                          .target = self->number[f] - next_u8(in) % 4,
                          .verb = next_u8(in) % 8,
                          .spec = next_text(in, specs, LK_ARRAY_LEN(specs)),
                          .group_epoch = GROUP_EPOCH};
    for (uint32_t r = 0; r < RANKS; r++) {
        if (ranks < 224 || ranks % RANKS == r) {
            send(self, f, r, &msg);
        }
    }
}

static void send_any_cmd(rig_t *self, input_t *in)
{
    uint32_t f = next_u8(in) % self->frontends;
    msg_t msg = {.type = MSG_CMD, .generation = next_u64(in)};
    msg.cmd = (msg_cmd_t){.client = next_u64(in),
                          .generation = next_u64(in),
                          .number = next_u64(in),
                          .kind = next_u64(in),
                          .mode = next_u64(in),
                          .target = next_u64(in),
                          .verb = next_u64(in),
                          .spec = next_text(in, specs, LK_ARRAY_LEN(specs)),
                          .group_epoch = next_u64(in)};
    send(self, f, next_u8(in) % RANKS, &msg);
}

static void send_abort(rig_t *self, input_t *in)
{
    msg_handle_t handle = {next_u8(in) % HANDLES};
    uint32_t f = next_u8(in) % self->frontends;
    msg_t msg = {.type = MSG_ABORT, .generation = self->generation[f]};
    msg.abort.client = f;
    msg.abort.handles.items = &handle;
    msg.abort.handles.count = next_u8(in) % 2;
    send(self, f, next_u8(in) % RANKS, &msg);
}

static void send_side_call(rig_t *self, input_t *in)
{
    uint32_t f = next_u8(in) % self->frontends, r = next_u8(in) % RANKS;
    msg_t msg = {.type = MSG_UTILITY, .generation = self->generation[f]};
    if (next_u8(in) & 1) {
        msg.utility = (msg_utility_t){.client = f,
                                      .call_id = next_u8(in),
                                      .method = next_text(in, methods, LK_ARRAY_LEN(methods)),
                                      .args = next_text(in, specs, LK_ARRAY_LEN(specs))};
    } else {
        msg.type = MSG_CANCEL_UPDATE;
        msg.cancel_update = (msg_cancel_update_t){.client = f,
                                                  .generation = self->generation[f],
                                                  .number = next_u8(in) % 8,
                                                  .why = msg_str("the caller gave up")};
    }
    send(self, f, r, &msg);
}

/* Whatever decodes, from a front end or from the coordinator. Requests are left to send_add, which
 * knows what was asked for. */
static void send_raw(rig_t *self, input_t *in)
{
    uint8_t from = next_u8(in), rank = next_u8(in) % RANKS;
    msg_bin_t envelope = next_bin(in, 64), body = next_bin(in, 255);
    msg_t msg;
    lk_error_t err = LK_ERROR_INIT;
    if (msg_decode(envelope.data, envelope.len, body.data, body.len, &msg, &err) != LK_OK) {
        return;
    }
    if (msg.type != MSG_ADD) {
        send(self, from % 3 == 2 ? ENGINE_FROM_COORDINATOR : from % self->frontends, rank, &msg);
    }
    msg_fini(&msg);
}

static void send_start(rig_t *self, input_t *in)
{
    msg_t msg = {.type = MSG_START_DP_WAVE};
    msg.start_dp_wave = (msg_start_dp_wave_t){
        .has_round = next_u8(in) & 1, .round = next_u64(in), .wave = next_u8(in)};
    send(self, ENGINE_FROM_COORDINATOR, next_u8(in) % RANKS, &msg);
}

/* A front end starts again: commands count from 1, its requests are nobody's. */
static void restart_frontend(rig_t *self, input_t *in)
{
    uint32_t f = next_u8(in) % self->frontends;
    self->generation[f]++;
    self->number[f] = 0;
}

static void advance(rig_t *self, input_t *in)
{
    self->now_ns += (uint64_t)next_u8(in) * 200 * LK_MS_NS;
    sweep(self, 2);
}

static void one_step(rig_t *self, input_t *in)
{
    step(self, next_u8(in) % RANKS);
}

static void one_delivery(rig_t *self, input_t *in)
{
    uint32_t from = next_u8(in) % RANKS;
    deliver(self, from, 1 - from);
}

static void settle(rig_t *self, input_t *in)
{
    sweep(self, next_u8(in) % 32);
}

static void lose_peer(rig_t *self, input_t *in)
{
    uint32_t r = next_u8(in) % RANKS;
    char why[32];
    if (next_u8(in) != 77 || engine_core_failed(self->engines[r]) != NULL) {
        return; /* rare: it mostly ends the run */
    }
    snprintf(why, sizeof why, "engine %u is gone", 1 - r);
    engine_core_leave(self->engines[r], 1 - r, why);
}

typedef void (*event_fn)(rig_t *self, input_t *in);
static const event_fn events[] = {
    send_add,       send_cmd, send_any_cmd, send_abort, one_step,         one_delivery, settle,
    send_side_call, send_raw, send_start,   advance,    restart_frontend, lose_peer};

int LLVMFuzzerInitialize(int *argc, char ***argv);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    lk_log_init("fuzz", LK_LOG_ERROR, LK_LOG_TEXT);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input_t in = {data, data + size};
    rig_t *rig = calloc(1, sizeof *rig);
    CHECK(rig != NULL);
    uint8_t flags = next_u8(&in), frontends = next_u8(&in);
    rig_open(rig, flags, frontends);
    for (int i = 0; i < MAX_EVENTS && in.at < in.end; i++) {
        events[next_u8(&in) % LK_ARRAY_LEN(events)](rig, &in);
    }
    sweep(rig, 40);
    rig_close(rig);
    free(rig);
    return 0;
}
