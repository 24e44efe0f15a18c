#include "tests/unit/engine/core_cluster.h"
#include "base/buf.h"
#include "tests/lib/test_main.h"
#include "transfer/backends/backends.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CC_BLOCK       4
#define CC_FIRST_EPOCH 3

static const char dense_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 8, "
    "\"intermediate_size\": 16, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
    "\"num_key_value_heads\": 1, \"head_dim\": 4, \"vocab_size\": 97, "
    "\"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"float32\", \"eos_token_id\": 1, "
    "\"hidden_act\": \"silu\"}";
static const char moe_config[] =
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": \"qwen3_moe\", "
    "\"hidden_size\": 8, \"intermediate_size\": 16, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 4, \"vocab_size\": 97, "
    "\"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"float32\", \"eos_token_id\": 1, "
    "\"num_experts\": 6, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 4, "
    "\"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], "
    "\"hidden_act\": \"silu\"}";

/* ---- environment ---- */

static uint64_t cc_now(void *ctx)
{
    return ((const cc_t *)ctx)->now_ns;
}

static void cc_random(void *ctx, void *buf, size_t len)
{
    cc_t *self = ctx;
    for (size_t i = 0; i < len; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)lk_prng_u64(&self->prng);
    }
}

/* ---- what front ends receive ---- */

static void check_tokens(const cc_t *self, const cc_request_t *r, uint32_t first)
{
    for (uint32_t i = first; i < r->n_tokens - r->n_prompt; i++) {
        uint32_t want = executor_null_token(
            &self->model, self->digests[r->epochs[i] % CC_MAX_EPOCHS], r->tokens, r->n_prompt + i);
        ck_assert_msg(r->tokens[r->n_prompt + i] == want,
                      "seed %llx: token %u of epoch %llu comes from other weights or other KV",
                      (unsigned long long)self->config.seed, i, (unsigned long long)r->epochs[i]);
    }
}

static uint32_t copy_spans(const msg_span_t *items, size_t n, epoch_span_t *out)
{
    ck_assert_uint_le(n, 16);
    for (size_t i = 0; i < n; i++) {
        out[i] = (epoch_span_t){items[i].epoch, (uint32_t)items[i].start, (uint32_t)items[i].end};
    }
    return (uint32_t)n;
}

/* The spans sent with the last output say what the outputs said one by one. */
static void check_weight_spans(const cc_request_t *r)
{
    uint32_t at = 0;
    for (uint32_t s = 0; s < r->n_weight_spans; s++) {
        ck_assert_uint_eq(r->weight_spans[s].start, at);
        for (; at < r->weight_spans[s].end; at++) {
            ck_assert_uint_eq(r->epochs[at], r->weight_spans[s].epoch);
        }
    }
    ck_assert_uint_eq(at, r->n_tokens - r->n_prompt);
}

static void on_output(cc_t *self, uint32_t frontend, uint32_t rank, const msg_output_t *out)
{
    ck_assert_uint_ge(out->handle, 1);
    ck_assert_uint_le(out->handle, self->n_requests);
    cc_request_t *r = &self->requests[out->handle - 1];
    ck_assert_uint_eq(r->frontend, frontend);
    ck_assert_uint_eq(r->rank, rank);
    ck_assert_int_eq(r->finish, FINISH_NONE);
    uint32_t n = (uint32_t)(out->token_ids.len / 4), first = r->n_tokens - r->n_prompt;
    ck_assert_uint_le(r->n_tokens + n, CC_MAX_TOKENS);
    if (n > 0) {
        memcpy(r->tokens + r->n_tokens, out->token_ids.data, out->token_ids.len);
        snprintf(r->version, sizeof r->version, "%s", msg_cstr(out->version));
    }
    for (uint32_t i = 0; i < n; i++) {
        r->epochs[first + i] = out->epoch;
    }
    r->n_tokens += n;
    check_tokens(self, r, first);
    if (out->kv_snapshot) {
        r->n_snapshots++;
        r->n_kv_spans = copy_spans(out->kv_spans.items, out->kv_spans.count, r->kv_spans);
    }
    r->finish = (finish_reason_t)out->finish_reason;
    if (r->finish != FINISH_NONE) {
        r->n_weight_spans =
            copy_spans(out->weight_spans.items, out->weight_spans.count, r->weight_spans);
        if (r->n_weight_spans > 0) {
            snprintf(r->span_version, sizeof r->span_version, "%s",
                     msg_cstr(out->weight_spans.items[0].version));
        }
        r->error_status = out->error_status;
        snprintf(r->error, sizeof r->error, "%s", msg_cstr(out->error));
        if (r->finish != FINISH_ERROR || r->n_weight_spans > 0) {
            check_weight_spans(r);
        }
    }
}

static void on_done(cc_t *self, uint32_t frontend, const msg_done_t *done)
{
    if (done->generation != self->generation[frontend]) {
        return;
    }
    for (size_t i = 0; i < self->n_calls; i++) {
        cc_call_t *call = &self->calls[i];
        if (call->frontend != frontend || call->generation != done->generation ||
            call->number != done->number) {
            continue;
        }
        unsigned bit = 1u << done->rank;
        if (call->done & bit) { /* said again: word for word */
            ck_assert_int_eq(call->status[done->rank], done->status);
            ck_assert_str_eq(call->body[done->rank], msg_cstr(done->body));
            call->repeats++;
            return;
        }
        call->done |= bit;
        call->status[done->rank] = (lk_status_t)done->status;
        snprintf(call->text[done->rank], sizeof call->text[0], "%s", msg_cstr(done->text));
        snprintf(call->body[done->rank], sizeof call->body[0], "%s", msg_cstr(done->body));
        return;
    }
    ck_abort_msg("an answer to a call that nobody made");
}

static void on_seen(cc_t *self, uint32_t frontend, const msg_seen_t *seen)
{
    for (size_t i = 0; i < self->n_calls; i++) {
        cc_call_t *call = &self->calls[i];
        if (seen->generation == self->generation[frontend] && call->frontend == frontend &&
            call->generation == seen->generation && call->number <= seen->number) {
            call->seen |= 1u << seen->rank;
        }
    }
}

static void to_frontend(void *ctx, uint32_t frontend, const msg_t *msg)
{
    struct cc_host *host = ctx;
    cc_t *self = host->cc;
    switch (msg->type) {
    case MSG_OUTPUTS:
        self->outputs_messages++;
        ck_assert_uint_gt(msg->outputs.outputs.count, 0);
        for (size_t i = 0; i < msg->outputs.outputs.count; i++) {
            on_output(self, frontend, host->rank, &msg->outputs.outputs.items[i]);
        }
        break;
    case MSG_SEEN:
        on_seen(self, frontend, &msg->seen);
        break;
    case MSG_DONE:
        on_done(self, frontend, &msg->done);
        break;
    case MSG_UTILITY_REPLY:
        self->utility_status[host->rank] = (lk_status_t)msg->utility_reply.status;
        snprintf(self->utility[host->rank], sizeof self->utility[0], "%s",
                 msg_cstr(msg->utility_reply.body));
        break;
    case MSG_ENGINE_DEAD:
        snprintf(self->dead[host->rank], sizeof self->dead[0], "%s",
                 msg_cstr(msg->engine_dead.why));
        break;
    case MSG_LEFT:
        ck_assert_uint_eq(msg->left.group_epoch, self->group_epoch);
        ck_assert_uint_eq(msg->left.rank, host->rank);
        snprintf(self->left[host->rank], sizeof self->left[0], "%s", msg_cstr(msg->left.why));
        break;
    case MSG_HEARTBEAT:
        self->beats[frontend]++;
        break;
    case MSG_MISSED:
        ck_assert_uint_eq(msg->missed.rank, host->rank);
        ck_assert_uint_eq(msg->missed.generation, self->generation[frontend]);
        self->missed[frontend]++;
        break;
    default:
        ck_abort_msg("%s to a front end", msg_type_name(msg->type));
    }
}

static void push_start(cc_t *self, uint64_t round)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        if (self->n_starts[r] < 64) {
            self->starts[r][self->n_starts[r]++] = round;
        }
    }
}

static void to_coordinator(void *ctx, const msg_t *msg)
{
    struct cc_host *host = ctx;
    cc_t *self = host->cc;
    switch (msg->type) {
    case MSG_GROUP:
        ck_assert_uint_eq(host->rank, 0);
        self->group = msg->group;
        break;
    case MSG_ANNOUNCE:
        push_start(self, msg->announce.round);
        break;
    case MSG_LOAD:
        self->loads++;
        self->load[host->rank] = msg->load_report.load;
        self->load[host->rank].weight_version = msg_str("");
        break;
    case MSG_HEARTBEAT:
        self->heartbeats++;
        self->silences += msg->heartbeat.silence_ms != 0;
        self->silence_ms[host->rank] = msg->heartbeat.silence_ms;
        break;
    default:
        ck_abort_msg("%s to the coordinator", msg_type_name(msg->type));
    }
}

/* ---- set-up ---- */

static void open_engine(cc_t *self, uint32_t r, uint64_t weight_floor)
{
    const cc_config_t *config = &self->config;
    lk_error_t err = LK_ERROR_INIT;
    bool ep = config->moe && config->n_ranks > 1;
    executor_config_t exec = {.model = &self->model,
                              .dtype = LK_DTYPE_F32,
                              .shadow = config->shadow,
                              .load_dummy = true,
                              .dummy_seed = 11,
                              .block_size = CC_BLOCK,
                              .num_blocks = config->num_blocks,
                              .max_seqs = 8,
                              .max_tokens = 16,
                              .threads = 1,
                              .ep = ep ? ep_mem_rank(self->ep, r) : ep_local()};
    ck_assert_msg(executor_null_ops.open(&exec, &self->executors[r], &err) == LK_OK, "%s",
                  err.text);
    self->hosts[r] = (struct cc_host){self, r};
    engine_core_config_t core = {.rank = r,
                                 .dp_size = config->n_ranks,
                                 .n_frontends = config->n_frontends,
                                 .group_epoch = self->group_epoch,
                                 .rejoin = self->group_epoch > CC_FIRST_EPOCH,
                                 .weight_floor = weight_floor,
                                 .shadow = config->shadow,
                                 .lockstep = ep,
                                 .sync_interval = config->sync_interval,
                                 .reject_while_paused = config->reject_while_paused,
                                 .heartbeat_ns = LK_SECOND_NS,
                                 .dead_after_ns = 5 * LK_SECOND_NS,
                                 .control_timeout_ns = 30 * LK_SECOND_NS,
                                 .transfer_timeout_ns = 30 * LK_SECOND_NS,
                                 .scheduler = {.max_num_seqs = 8,
                                               .max_num_batched_tokens = 16,
                                               .max_model_len = 200,
                                               .vocab_size = self->model.vocab_size,
                                               .eos_token_ids = {1},
                                               .n_eos = 1,
                                               .max_waiting = 64},
                                 .num_blocks = config->num_blocks,
                                 .block_size = CC_BLOCK,
                                 .enable_prefix_caching = true,
                                 .model = &self->model,
                                 .executor = self->executors[r],
                                 .allreduce = allreduce_mem_rank(self->hub, r),
                                 .wte = config->no_transfer ? NULL : &wte_mem,
                                 .env = &self->env,
                                 .host = {.ctx = &self->hosts[r],
                                          .to_frontend = to_frontend,
                                          .to_coordinator = to_coordinator}};
    ck_assert_msg(engine_core_new(&core, &self->engines[r], &err) == LK_OK, "%s", err.text);
}

static void describe_tensors(cc_t *self)
{
    const weight_table_t *table = self->executors[0]->ops->weights(self->executors[0]);
    self->n_tensors = weight_table_count(table);
    self->descs = calloc(self->n_tensors, sizeof *self->descs);
    self->data = calloc(self->n_tensors, sizeof *self->data);
    for (size_t i = 0; i < self->n_tensors; i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        self->descs[i] =
            (tensor_desc_t){.name = strdup(slot->name), .dtype = LK_DTYPE_F32, .ndim = slot->ndim};
        memcpy(self->descs[i].shape, slot->shape, sizeof slot->shape);
        self->data[i] = calloc(slot->numel, sizeof(float));
    }
}

cc_t *cc_new(const cc_config_t *config)
{
    cc_t *self = calloc(1, sizeof *self);
    ck_assert_ptr_nonnull(self);
    self->config = *config;
    self->now_ns = 1000 * LK_SECOND_NS;
    self->group_epoch = CC_FIRST_EPOCH;
    self->env = (lk_env_t){self, cc_now, cc_random};
    lk_prng_seed(&self->prng, config->seed);
    lk_error_t err = LK_ERROR_INIT;
    const char *json = config->moe ? moe_config : dense_config;
    ck_assert_msg(model_config_parse(json, strlen(json), NULL, 0, &self->model, &err) == LK_OK,
                  "%s", err.text);
    self->hub = allreduce_mem_new(config->n_ranks, false, config->doorbell);
    self->ep = ep_mem_new(config->n_ranks);
    for (uint32_t r = 0; r < config->n_ranks; r++) {
        open_engine(self, r, 0);
    }
    for (uint32_t f = 0; f < config->n_frontends; f++) {
        self->generation[f] = 1;
        self->next_number[f] = 1;
    }
    describe_tensors(self);
    cc_note_epoch(self);
    return self;
}

static void drop_link(cc_link_t *link)
{
    for (; link->n > 0; link->n--, link->head++) {
        free(link->items[link->head % 512].spec);
        free(link->items[link->head % 512].prompt);
    }
}

void cc_destroy(cc_t **self_p)
{
    cc_t *self = *self_p;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        engine_core_destroy(&self->engines[r]);
        self->executors[r]->ops->close(self->executors[r]);
    }
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        for (uint32_t r = 0; r < self->config.n_ranks; r++) {
            drop_link(&self->links[f][r]);
        }
    }
    cc_kill_trainer(self);
    for (size_t i = 0; i < self->n_tensors; i++) {
        free((char *)(uintptr_t)self->descs[i].name);
        free(self->data[i]);
    }
    free(self->data);
    free(self->descs);
    allreduce_mem_destroy(&self->hub);
    ep_mem_destroy(&self->ep);
    free(self);
    *self_p = NULL;
}

/* ---- what front ends send ---- */

static cc_queued_t *push(cc_t *self, uint32_t frontend, uint32_t rank, const msg_t *msg)
{
    cc_link_t *link = &self->links[frontend][rank];
    ck_assert_uint_lt(link->n, 512);
    cc_queued_t *q = &link->items[(link->head + link->n++) % 512];
    *q = (cc_queued_t){.frontend = frontend, .msg = *msg};
    q->msg.generation = self->generation[frontend];
    return q;
}

void cc_send(cc_t *self, uint32_t frontend, uint32_t rank, const msg_t *msg)
{
    push(self, frontend, rank, msg);
}

size_t cc_add(cc_t *self, uint32_t frontend, uint32_t rank, uint32_t n_prompt, uint32_t max_tokens)
{
    ck_assert_uint_lt(self->n_requests, CC_MAX_REQUESTS);
    size_t i = self->n_requests++;
    cc_request_t *r = &self->requests[i];
    *r = (cc_request_t){
        .frontend = frontend, .rank = rank, .n_prompt = n_prompt, .n_tokens = n_prompt};
    for (uint32_t p = 0; p < n_prompt; p++) { /* shared beginnings, for the prefix cache */
        r->tokens[p] = 2 + (p * 7 + (p < 8 ? (uint32_t)i % 3 : (uint32_t)i)) % 90;
    }
    msg_t msg = {.type = MSG_ADD};
    msg.add = (msg_add_t){.client = frontend,
                          .handle = i + 1,
                          .id = msg_str("r"),
                          .sampling = {.temperature = 0,
                                       .top_p = 1,
                                       .repetition_penalty = 1,
                                       .max_tokens = max_tokens,
                                       .ignore_eos = true,
                                       .logprobs = -1}};
    cc_queued_t *q = push(self, frontend, rank, &msg);
    q->prompt = malloc(n_prompt * sizeof(uint32_t) + 1);
    memcpy(q->prompt, r->tokens, n_prompt * sizeof(uint32_t));
    q->msg.add.prompt = (msg_bin_t){q->prompt, n_prompt * sizeof(uint32_t)};
    if (!self->group.run && !self->group.paused) { /* FIRST_REQ */
        push_start(self, self->group.round);
    }
    return i;
}

void cc_abort(cc_t *self, size_t request)
{
    static msg_handle_t handles[CC_MAX_REQUESTS];
    const cc_request_t *r = &self->requests[request];
    handles[request].handle = request + 1;
    msg_t msg = {.type = MSG_ABORT};
    msg.abort.client = r->frontend;
    msg.abort.handles.items = &handles[request];
    msg.abort.handles.count = 1;
    push(self, r->frontend, r->rank, &msg);
}

static void send_cmd(cc_t *self, const cc_call_t *call, uint64_t kind, uint64_t value,
                     bool clear_cache, const char *spec, unsigned mask)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        if (!(mask >> r & 1)) {
            continue;
        }
        msg_t msg = {.type = MSG_CMD};
        msg.cmd = (msg_cmd_t){.client = call->frontend,
                              .generation = self->generation[call->frontend],
                              .number = call->number,
                              .kind = kind,
                              .mode = kind == CMD_PAUSE ? value : 0,
                              .clear_cache = clear_cache,
                              .target = kind == CMD_CANCEL ? value : 0,
                              .verb = kind == CMD_UPDATE ? value : 0,
                              .group_epoch = self->group_epoch};
        cc_queued_t *q = push(self, call->frontend, r, &msg);
        if (spec != NULL) {
            q->spec = strdup(spec);
            q->msg.cmd.spec = msg_str(q->spec);
        }
    }
}

size_t cc_call(cc_t *self, uint32_t frontend, uint64_t kind, uint64_t value, bool clear_cache,
               const char *spec, unsigned mask)
{
    ck_assert_uint_lt(self->n_calls, CC_MAX_CALLS);
    size_t i = self->n_calls++;
    self->calls[i] = (cc_call_t){.frontend = frontend,
                                 .generation = self->generation[frontend],
                                 .number = self->next_number[frontend]++};
    send_cmd(self, &self->calls[i], kind, value, clear_cache, spec, mask);
    return i;
}

void cc_resend(cc_t *self, size_t call, uint64_t kind, uint64_t value, bool clear_cache,
               unsigned mask)
{
    send_cmd(self, &self->calls[call], kind, value, clear_cache, NULL, mask);
}

lk_status_t cc_status(const cc_t *self, size_t call)
{
    const cc_call_t *c = &self->calls[call];
    ck_assert_msg(c->done == (1u << self->config.n_ranks) - 1, "call %zu: answered by %x only",
                  call, c->done);
    for (uint32_t r = 1; r < self->config.n_ranks; r++) {
        ck_assert_int_eq(c->status[r], c->status[0]);
    }
    return c->status[0];
}

lk_status_t cc_do(cc_t *self, uint64_t kind, uint64_t value, bool clear_cache, const char *spec)
{
    size_t call = cc_call(self, 0, kind, value, clear_cache, spec, ~0u);
    cc_settle(self);
    return cc_status(self, call);
}

void cc_utility(cc_t *self, const char *method, const char *args)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        msg_t msg = {.type = MSG_UTILITY};
        msg.utility = (msg_utility_t){
            .client = 0, .call_id = 5, .method = msg_str(method), .args = msg_str(args)};
        push(self, 0, r, &msg);
    }
    cc_settle(self);
}

/* ---- time and events ---- */

static void deliver(cc_t *self, uint32_t f, uint32_t r)
{
    cc_link_t *link = &self->links[f][r];
    cc_queued_t *q = &link->items[link->head % 512];
    engine_core_on_message(self->engines[r], f, &q->msg);
    free(q->spec);
    free(q->prompt);
    link->head++;
    link->n--;
}

static void deliver_start(cc_t *self, uint32_t r)
{
    msg_t msg = {.type = MSG_START_DP_WAVE};
    msg.start_dp_wave =
        (msg_start_dp_wave_t){.has_round = true, .round = self->starts[r][--self->n_starts[r]]};
    engine_core_on_message(self->engines[r], ENGINE_FROM_COORDINATOR, &msg);
}

/* The sender's own greeting and sending. */
static void step_trainer(cc_t *self)
{
    if (self->sender == NULL) {
        return;
    }
    byte_stream_t *stream;
    while ((stream = mem_accept(self->listener)) != NULL) {
        sender_add(self->sender, stream);
    }
    lk_error_t err = LK_ERROR_INIT;
    if (self->sending) {
        self->sending = sender_step(self->sender, &err) == LK_INPROGRESS;
    } else {
        (void)!sender_greet(self->sender);
    }
}

/* One thing at random; false if that did nothing. */
static bool one_event(cc_t *self)
{
    uint32_t n = self->config.n_ranks;
    uint32_t r = (uint32_t)lk_prng_below(&self->prng, n);
    uint32_t f = (uint32_t)lk_prng_below(&self->prng, self->config.n_frontends);
    uint32_t to = (uint32_t)lk_prng_below(&self->prng, n);
    switch (lk_prng_below(&self->prng, 5)) {
    case 0:
        if (self->links[f][r].n > 0 && !self->links[f][r].blocked) {
            deliver(self, f, r);
            return true;
        }
        return false;
    case 1:
        if (allreduce_mem_in_flight(self->hub, r, to)) {
            allreduce_mem_deliver(self->hub, r, to);
            return true;
        }
        return false;
    case 2:
        if (self->n_starts[r] > 0) {
            deliver_start(self, r);
            return true;
        }
        return false;
    case 3:
        step_trainer(self);
        return false;
    default:
        return engine_core_step(self->engines[r]);
    }
}

bool cc_sweep(cc_t *self)
{
    bool moved = false;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        for (uint32_t f = 0; f < self->config.n_frontends; f++) {
            while (self->links[f][r].n > 0 && !self->links[f][r].blocked) {
                deliver(self, f, r);
                moved = true;
            }
        }
        for (uint32_t to = 0; to < self->config.n_ranks; to++) {
            while (allreduce_mem_in_flight(self->hub, r, to)) {
                allreduce_mem_deliver(self->hub, r, to);
                moved = true;
            }
        }
        while (self->n_starts[r] > 0) {
            deliver_start(self, r);
            moved = true;
        }
        step_trainer(self);
        moved |= engine_core_step(self->engines[r]);
    }
    return moved;
}

bool cc_event(cc_t *self)
{
    for (int i = 0; i < 20; i++) {
        if (one_event(self)) {
            return true;
        }
    }
    bool transfers = self->sending;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        transfers |= group_updating(engine_core_group(self->engines[r]));
    }
    for (int i = 0; i < (transfers ? 400 : 4); i++) { /* a transfer's progress is not seen here */
        if (cc_sweep(self)) {
            return true;
        }
    }
    if (!self->config.doorbell) { /* a lost or stale START is repeated after 100 ms */
        for (uint32_t r = 0; r < self->config.n_ranks; r++) {
            if (group_posted(engine_core_group(self->engines[r]))) {
                self->now_ns += GROUP_ANNOUNCE_NS;
                return true;
            }
        }
    }
    return false;
}

void cc_run(cc_t *self, size_t events)
{
    for (size_t i = 0; i < events; i++) {
        cc_event(self);
    }
}

void cc_settle(cc_t *self)
{
    for (size_t i = 0; cc_event(self); i++) {
        ck_assert_msg(i < 400000, "seed %llx: no rest", (unsigned long long)self->config.seed);
    }
    cc_verify(self);
}

void cc_advance(cc_t *self, uint64_t ns)
{
    for (uint64_t end = self->now_ns + ns; self->now_ns < end;) {
        self->now_ns = LK_MIN(end, self->now_ns + 500 * LK_MS_NS);
        cc_settle(self);
    }
}

/* ---- the trainer ---- */

void cc_kill_trainer(cc_t *self)
{
    sender_destroy(&self->sender);
    mem_listener_destroy(&self->listener);
    self->sending = false;
}

lk_status_t cc_init_transfer(cc_t *self)
{
    cc_kill_trainer(self);
    self->listener = mem_listener_new(CC_TRAINER, 300);
    self->sender = sender_new(&self->env, 30 * LK_SECOND_NS, CC_TOKEN, self->config.n_ranks, 1);
    ck_assert(self->listener != NULL && self->sender != NULL);
    return cc_do(self, CMD_UPDATE, UPDATE_VERB_INIT, false,
                 "{\"init_info\": {\"trainer\": \"" CC_TRAINER "\", \"session_token\": \"" CC_TOKEN
                 "\", \"packed\": true}}");
}

const char *cc_update_spec(cc_t *self, size_t first, size_t n)
{
    static lk_buf_t buf;
    lk_buf_clear(&buf);
    lk_buf_str(&buf, "{\"update_info\": {\"names\": [");
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(&buf, "%s\"%s\"", i > 0 ? ", " : "", self->descs[first + i].name);
    }
    lk_buf_str(&buf, "], \"dtype_names\": [");
    for (size_t i = 0; i < n; i++) {
        lk_buf_printf(&buf, "%s\"float32\"", i > 0 ? ", " : "");
    }
    lk_buf_str(&buf, "], \"shapes\": [");
    for (size_t i = 0; i < n; i++) {
        char shape[128];
        tensor_desc_shape_text(&self->descs[first + i], shape, sizeof shape);
        lk_buf_printf(&buf, "%s%s", i > 0 ? ", " : "", shape);
    }
    lk_buf_str(&buf, "], \"packed\": true, \"packed_buffer_size_bytes\": 700}}");
    return lk_buf_cstr(&buf);
}

void cc_new_values(cc_t *self, size_t first, size_t n)
{
    for (size_t i = first; i < first + n; i++) {
        uint64_t numel = 0;
        ck_assert(tensor_desc_numel(&self->descs[i], &numel));
        for (uint64_t k = 0; k < numel; k++) {
            ((float *)self->data[i])[k] = (float)lk_prng_normal(&self->prng);
        }
    }
}

void cc_start_sending(cc_t *self, size_t first, size_t n)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(sender_begin(self->sender, self->descs + first,
                               (const void *const *)self->data + first, n, true, 700,
                               &err) == LK_OK,
                  "%s", err.text);
    self->sending = true;
}

lk_status_t cc_update(cc_t *self, size_t first, size_t n)
{
    cc_new_values(self, first, n);
    cc_start_sending(self, first, n);
    lk_status_t status =
        cc_do(self, CMD_UPDATE, UPDATE_VERB_UPDATE, false, cc_update_spec(self, first, n));
    if (self->sending) {
        sender_cancel(self->sender, "not taken");
        self->sending = false;
    }
    return status;
}

lk_status_t cc_finish(cc_t *self, const char *version)
{
    char spec[128];
    snprintf(spec, sizeof spec, "{\"weight_version\": \"%s\"}", version);
    size_t call = cc_call(self, 0, CMD_UPDATE, UPDATE_VERB_FINISH, false, spec, ~0u);
    /* the digest must be known before the first token of the new weights is checked */
    while (self->calls[call].done == 0) {
        ck_assert(cc_event(self));
        cc_note_epoch(self);
    }
    cc_settle(self);
    return cc_status(self, call);
}

lk_status_t cc_session(cc_t *self, const char *version)
{
    lk_status_t status = cc_do(self, CMD_UPDATE, UPDATE_VERB_START, false, NULL);
    if (status == LK_OK) {
        status = cc_update(self, 0, self->n_tensors);
    }
    return status == LK_OK ? cc_finish(self, version) : status;
}

void cc_note_epoch(cc_t *self)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        group_t *group = (group_t *)(uintptr_t)engine_core_group(self->engines[r]);
        uint64_t epoch = group_held(group)->epoch;
        digest_t digest = weight_table_digest(self->executors[r]->ops->weights(self->executors[r]));
        if (self->config.shadow) {
            bool known = self->digests[epoch % CC_MAX_EPOCHS].lane[0] != 0 ||
                         self->digests[epoch % CC_MAX_EPOCHS].lane[1] != 0;
            ck_assert_msg(!known || digest_equal(self->digests[epoch % CC_MAX_EPOCHS], digest),
                          "seed %llx: rank %u: the weights of epoch %llu are not what they were",
                          (unsigned long long)self->config.seed, r, (unsigned long long)epoch);
            self->digests[epoch % CC_MAX_EPOCHS] = digest;
            continue;
        }
        bool committing = group_updating(engine_core_group(self->engines[r])) ||
                          (group_weights(engine_core_group(self->engines[r]))->gates != 0);
        if (!committing) {
            self->digests[epoch % CC_MAX_EPOCHS] = digest;
        }
    }
}

/* ---- group epochs ---- */

void cc_kill(cc_t *self, unsigned mask, const char *why)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        if (!(mask >> r & 1)) {
            engine_core_leave(self->engines[r], (int64_t)__builtin_ctz(mask), why);
            continue;
        }
        engine_core_destroy(&self->engines[r]);
        self->executors[r]->ops->close(self->executors[r]);
        self->executors[r] = NULL;
        self->n_starts[r] = 0;
        for (size_t i = 0; i < self->n_requests; i++) {
            cc_request_t *request = &self->requests[i];
            if (request->rank == r && request->finish == FINISH_NONE) {
                request->finish = FINISH_ERROR; /* by its front end */
                request->error_status = LK_ERR_UNAVAILABLE;
            }
        }
    }
}

void cc_form(cc_t *self, uint64_t weight_floor)
{
    self->group_epoch++;
    allreduce_mem_reset(self->hub);
    ep_mem_reset(self->ep);
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        for (uint32_t f = 0; f < self->config.n_frontends; f++) {
            drop_link(&self->links[f][r]);
        }
        self->n_starts[r] = 0;
        if (self->executors[r] == NULL) {
            open_engine(self, r, weight_floor);
        } else {
            engine_core_form(self->engines[r], self->group_epoch, weight_floor, NULL);
        }
    }
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        self->generation[f]++;
        self->next_number[f] = 1;
    }
    self->group = (msg_group_t){0};
}

/* ---- state ---- */

uint64_t cc_steps(const cc_t *self)
{
    uint64_t steps = 0;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        steps += engine_core_steps(self->engines[r]);
    }
    return steps;
}

size_t cc_unfinished(const cc_t *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_requests; i++) {
        n += self->requests[i].finish == FINISH_NONE;
    }
    return n;
}

void cc_verify(const cc_t *self)
{
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        scheduler_verify(engine_core_scheduler(self->engines[r]));
    }
}
