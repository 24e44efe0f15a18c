#include "tests/unit/sched/world.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- weights ---- */

static const model_config_t small_model = {.arch = ARCH_LLAMA,
                                           .hidden_size = 8,
                                           .intermediate_size = 8,
                                           .num_layers = 1,
                                           .num_heads = 1,
                                           .num_kv_heads = 1,
                                           .head_dim = 8,
                                           .vocab_size = 61,
                                           .max_position_embeddings = 4096,
                                           .rms_norm_eps = 1e-6f,
                                           .rope_theta = 10000.0f,
                                           .eos_token_ids = {3, 7},
                                           .n_eos = 2};

static void open_null(world_t *self)
{
    const executor_config_t config = {.model = &self->model,
                                      .dtype = LK_DTYPE_F32,
                                      .load_dummy = true,
                                      .dummy_seed = 1,
                                      .block_size = self->config.block_size,
                                      .num_blocks = self->config.num_blocks,
                                      .max_seqs = self->config.sched.max_num_seqs,
                                      .max_tokens = self->config.sched.max_num_batched_tokens,
                                      .threads = 1,
                                      .ep = {.size = 1}};
    lk_error_t err;
    ck_assert_msg(executor_null_ops.open(&config, &self->executor, &err) == LK_OK, "%s", err.text);
}

/* An update of one tensor through the table's sink, as a transfer does it. */
static void update_table(world_t *self)
{
    weight_table_t *table = self->executor->ops->weights(self->executor);
    weight_sink_t sink = weight_table_sink(table);
    const weight_slot_t *slot = weight_table_at(table, self->epoch % weight_table_count(table));
    tensor_desc_t desc = {.name = slot->name, .dtype = LK_DTYPE_F32, .ndim = slot->ndim};
    memcpy(desc.shape, slot->shape, sizeof slot->shape);
    float *values = calloc(slot->numel, sizeof *values);
    for (uint64_t i = 0; i < slot->numel; i++) {
        values[i] = (float)self->epoch + (float)i / 64.0f;
    }
    lk_error_t err;
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->check(sink.ctx, &desc, 1, &err));
    ck_ok(sink.ops->plan(sink.ctx, &desc, 1, &err));
    ck_ok(weight_sink_store(&sink, 0, values, slot->numel * sizeof *values, &err));
    ck_ok(weight_sink_commit(&sink, &err));
    free(values);
}

void world_new_weights(world_t *self)
{
    ck_assert_ptr_null(self->posted);
    self->epoch++;
    ck_assert_uint_lt(self->epoch, WORLD_MAX_EPOCHS);
    if (self->executor != NULL) {
        update_table(self);
        digest_t d = weight_table_digest(self->executor->ops->weights(self->executor));
        ck_assert(!digest_equal(d, self->digests[self->epoch - 1]));
        self->digests[self->epoch] = d;
    }
}

/* ---- the hash executor ---- */

static uint64_t chain_next(uint64_t chain, uint32_t token, uint64_t epoch)
{
    return lk_mix64(chain ^ lk_mix64(token * 1000003ull + epoch));
}

static void hash_logits(uint64_t chain, uint64_t epoch, uint32_t vocab, float *out)
{
    for (uint32_t v = 0; v < vocab; v++) {
        out[v] = (float)(lk_mix64(chain + epoch * 77 + v) >> 40) * 0x1p-22f; /* [0, 4) */
    }
}

static size_t slot_of(const world_t *self, const uint32_t *blocks, uint32_t position)
{
    uint32_t block = blocks[position / self->config.block_size];
    CHECK(block <
          self->config.num_blocks); /* Check's own asserts write a file each: too slow here */
    return (size_t)block * self->config.block_size + position % self->config.block_size;
}

/* Writes the new positions' slots, then the rows of logits from what the slots say. */
static void run_batch(world_t *self, const exec_batch_t *batch)
{
    size_t rows = 0;
    uint32_t vocab = self->config.sched.vocab_size;
    for (size_t i = 0; i < batch->n_seqs; i++) {
        const exec_seq_t *seq = &batch->seqs[i];
        for (uint32_t p = seq->start; p < seq->start + seq->n; p++) {
            size_t slot = slot_of(self, seq->blocks, p);
            self->slot_token[slot] = seq->tokens[p];
            self->slot_epoch[slot] = self->epoch;
        }
    }
    for (size_t i = 0; i < batch->n_seqs; i++) {
        const exec_seq_t *seq = &batch->seqs[i];
        uint64_t chain = 0;
        uint32_t end = seq->start + seq->n;
        for (uint32_t p = 0; p < end; p++) {
            size_t slot = slot_of(self, seq->blocks, p);
            chain = chain_next(chain, self->slot_token[slot], self->slot_epoch[slot]);
            if (p >= end - seq->n_logits) {
                hash_logits(chain, self->epoch, vocab, self->logits + rows * vocab);
                rows++;
            }
        }
    }
}

/* ---- clients ---- */

static void rebuild_kv(world_t *self, client_t *c, const sched_output_t *out)
{
    const request_t *r = out->request;
    uint32_t end = r->n_prompt + out->first;
    if (out->kv_snapshot) {
        uint32_t at = 0;
        for (uint32_t s = 0; s < r->n_kv_spans; s++) {
            ck_assert_uint_eq(r->kv_spans[s].start, at);
            for (; at < r->kv_spans[s].end; at++) {
                CHECK(at < WORLD_MAX_LEN);
                c->kv_epoch[at] = r->kv_spans[s].epoch;
            }
        }
        ck_assert_uint_eq(at, end);
        c->n_snapshots++;
        c->n_mixed += r->n_kv_spans > 1;
    } else {
        ck_assert_uint_gt(out->first, 0);
        c->kv_epoch[end - 1] = out->epoch;
    }
    ck_assert_uint_eq(c->kv_epoch[end - 1], out->epoch);
    for (uint32_t p = 0; p < end; p++) {
        size_t slot = slot_of(self, r->blocks, p);
        if (self->slot_token[slot] != r->tokens[p] || self->slot_epoch[slot] != c->kv_epoch[p]) {
            ck_abort_msg("position %u of %u: memory has token %u of epoch %llu, rebuilt %u of %llu",
                         p, end, self->slot_token[slot], (unsigned long long)self->slot_epoch[slot],
                         r->tokens[p], (unsigned long long)c->kv_epoch[p]);
        }
    }
}

static size_t banned_ids(const world_t *self, const client_t *c, uint32_t *out)
{
    size_t n = 0;
    if (c->n_output < c->sampling.min_tokens) {
        for (uint32_t i = 0; i < self->config.sched.n_eos; i++) {
            out[n++] = self->config.sched.eos_token_ids[i];
        }
        for (uint32_t i = 0; i < c->sampling.n_stop_tokens; i++) {
            out[n++] = c->sampling.stop_tokens[i];
        }
    }
    return n;
}

/* The token that must follow from the client's own view. */
static uint32_t right_token(world_t *self, const client_t *c, const sched_output_t *out)
{
    uint32_t end = c->n_prompt + out->first;
    if (self->executor != NULL) {
        return executor_null_token(&self->model, self->digests[out->epoch], c->tokens, end);
    }
    uint64_t chain = 0;
    for (uint32_t p = 0; p < end; p++) {
        chain = chain_next(chain, c->tokens[p], c->kv_epoch[p]);
    }
    static float logits[1024];
    ck_assert_uint_le(self->config.sched.vocab_size, LK_ARRAY_LEN(logits));
    hash_logits(chain, out->epoch, self->config.sched.vocab_size, logits);
    request_t view = *out->request;
    view.n_tokens = end;
    uint32_t banned[MODEL_MAX_EOS + REQUEST_MAX_STOP_TOKENS];
    size_t n_banned = banned_ids(self, c, banned);
    sample_t sample;
    lk_error_t err;
    ck_ok(sampler_sample(self->oracle, &view, logits, banned, n_banned, &sample, &err));
    if (c->sampling.logprobs >= 0) {
        ck_assert(sample.logprob == out->logprobs[0] && sample.rank == out->ranks[0]);
        ck_assert_uint_eq(sample.n_top, out->n_top);
    } else {
        ck_assert_ptr_null(out->logprobs);
    }
    return sample.token;
}

static finish_reason_t right_finish(const world_t *self, const client_t *c, uint32_t token,
                                    int64_t *stop_token)
{
    const scheduler_config_t *config = &self->config.sched;
    *stop_token = -1;
    if (c->n_output > c->sampling.min_tokens) {
        for (uint32_t i = 0; i < config->n_eos; i++) {
            if (token == config->eos_token_ids[i] && !c->sampling.ignore_eos) {
                return FINISH_STOP;
            }
        }
        for (uint32_t i = 0; i < c->sampling.n_stop_tokens; i++) {
            if (token == c->sampling.stop_tokens[i]) {
                *stop_token = token;
                return FINISH_STOP;
            }
        }
    }
    bool full =
        c->n_output == c->sampling.max_tokens || c->n_prompt + c->n_output == config->max_model_len;
    return full ? FINISH_LENGTH : FINISH_NONE;
}

/* Prompt logprobs, against the logits that the KV in memory gives. */
static void check_scores(world_t *self, client_t *c, const sched_output_t *out)
{
    const request_t *r = out->request;
    uint32_t vocab = self->config.sched.vocab_size, want_top = c->sampling.prompt_logprobs - 1;
    ck_assert_uint_gt(c->sampling.prompt_logprobs, 0);
    ck_assert_uint_eq(c->n_output, 0);
    ck_assert_uint_eq(r->n_cached, 0);
    ck_assert_uint_eq(out->n_prompt_top, self->executor != NULL ? want_top > 0 : want_top);
    ck_assert_uint_le(out->prompt_first + out->n_prompt, c->n_prompt);
    c->n_restarts += out->prompt_first == 1 && c->n_scored > 1;
    ck_assert(out->prompt_first == LK_MAX(c->n_scored, 1) || out->prompt_first == 1);
    for (uint32_t i = out->prompt_first, j = 0; j < out->n_prompt; i++, j++) {
        static float logits[1024];
        uint64_t chain = 0;
        for (uint32_t p = 0; p < i; p++) {
            size_t slot = slot_of(self, r->blocks, p);
            CHECK(self->slot_token[slot] == c->tokens[p]);
            chain = chain_next(chain, self->slot_token[slot], self->slot_epoch[slot]);
        }
        if (self->executor != NULL) {
            uint32_t picked =
                executor_null_token(&self->model, self->digests[out->epoch], c->tokens, i);
            CHECK(out->prompt_ranks[j] == (picked == c->tokens[i] ? 1 : 2));
            CHECK(want_top == 0 || out->prompt_top_ids[j] == picked);
        } else {
            float logprob;
            uint32_t rank;
            hash_logits(chain, out->epoch, vocab, logits);
            sampler_logprob(self->oracle, logits, c->tokens[i], &logprob, &rank);
            CHECK(logprob == out->prompt_logprobs[j] && rank == out->prompt_ranks[j]);
            for (uint32_t k = 0; k < out->n_prompt_top && i % 8 == 1; k++) {
                size_t at = j * out->n_prompt_top + k;
                sampler_logprob(self->oracle, logits, out->prompt_top_ids[at], &logprob, &rank);
                CHECK(logprob == out->prompt_top_logprobs[at] && rank <= k + 1);
            }
        }
        c->scores[i] = out->prompt_logprobs[j];
        c->score_epoch[i] = out->epoch;
    }
    c->n_scored = out->prompt_first + out->n_prompt;
}

/* The snapshot tells which weights scored the prompt: token i is scored by the step that computed
 * the KV of position i - 1. */
static void check_all_scored(const client_t *c)
{
    if (c->sampling.prompt_logprobs > 0 && c->n_prompt > 1 && c->n_output == 0) {
        ck_assert_uint_eq(c->n_scored, c->n_prompt);
        for (uint32_t i = 1; i < c->n_prompt; i++) {
            ck_assert_uint_eq(c->score_epoch[i], c->kv_epoch[i - 1]);
        }
    }
}

static void on_output(void *ctx, const sched_output_t *out)
{
    world_t *self = ctx;
    const request_t *r = out->request;
    ck_assert_uint_lt(r->handle, self->n_clients);
    client_t *c = &self->clients[r->handle];
    ck_assert(c->added && !c->ended && !c->silent);
    ck_assert_uint_eq(out->first, c->n_output);
    ck_assert_uint_le(out->n, 1);
    ck_assert_int_eq(out->finish, r->finish_reason);
    ck_assert_uint_eq(r->n_tokens, r->n_prompt + out->first + out->n);
    c->n_outputs_seen++;
    if (out->n_prompt > 0) {
        ck_assert_uint_eq(out->n, 0);
        ck_assert_int_eq(out->finish, FINISH_NONE);
        check_scores(self, c, out);
    } else if (out->n == 1) {
        uint32_t token = r->tokens[r->n_tokens - 1];
        rebuild_kv(self, c, out);
        check_all_scored(c);
        ck_assert_uint_eq(token, right_token(self, c, out));
        c->tokens[c->n_prompt + c->n_output] = token;
        c->logprobs[c->n_output] = out->logprobs != NULL ? out->logprobs[0] : 0.0f;
        c->n_output++;
        self->n_tokens++;
        ck_assert_uint_eq(out->epoch, self->epoch);
        ck_assert_uint_eq(r->weight_spans[r->n_weight_spans - 1].end, c->n_output);
        ck_assert_uint_eq(r->weight_spans[r->n_weight_spans - 1].epoch, out->epoch);
        int64_t stop_token;
        ck_assert_int_eq(out->finish, right_finish(self, c, token, &stop_token));
        ck_assert_int_eq(r->stop_token, stop_token);
    } else {
        ck_assert_int_ne(out->finish, FINISH_NONE);
        ck_assert(!out->kv_snapshot);
    }
    ck_assert((out->finish == FINISH_ERROR) == (out->error != NULL));
    if (out->finish != FINISH_NONE) {
        c->ended = true;
        c->finish = out->finish;
        c->stop_token = r->stop_token;
        snprintf(c->error, sizeof c->error, "%s", out->error != NULL ? out->error : "");
    }
}

/* ---- the world ---- */

static uint32_t max_rows(const scheduler_config_t *config)
{
    uint32_t rows = config->max_prompt_rows;
    return config->max_num_seqs + (rows > 0 ? rows : config->max_num_batched_tokens);
}

world_t *world_new(const world_config_t *config)
{
    world_t *self = calloc(1, sizeof *self);
    self->config = *config;
    self->model = small_model;
    if (config->null_executor) {
        self->config.sched.vocab_size = small_model.vocab_size;
    }
    self->config.sched.n_eos = small_model.n_eos;
    memcpy(self->config.sched.eos_token_ids, small_model.eos_token_ids,
           sizeof small_model.eos_token_ids);
    size_t slots = (size_t)config->num_blocks * config->block_size;
    self->slot_epoch = calloc(slots, sizeof *self->slot_epoch);
    self->slot_token = calloc(slots, sizeof *self->slot_token);
    self->logits =
        calloc((size_t)max_rows(&config->sched) * self->config.sched.vocab_size, sizeof(float));
    self->kv = kv_cache_new(config->num_blocks, config->block_size, config->caching);
    self->sched = scheduler_new(&self->config.sched, self->kv, on_output, self);
    self->oracle = sampler_new(self->config.sched.vocab_size, false);
    ck_assert(self->kv != NULL && self->sched != NULL && self->oracle != NULL);
    if (config->null_executor) {
        open_null(self);
        self->digests[0] = weight_table_digest(self->executor->ops->weights(self->executor));
    }
    return self;
}

void world_destroy(world_t **self_p)
{
    world_t *self = *self_p;
    world_verify(self);
    if (world_unfinished(self) == 0) {
        ck_assert_uint_eq(kv_cache_used(self->kv), 0);
    }
    scheduler_destroy(&self->sched);
    ck_assert_uint_eq(kv_cache_used(self->kv), 0);
    kv_cache_verify(self->kv, NULL, 0);
    kv_cache_destroy(&self->kv);
    sampler_destroy(&self->oracle);
    if (self->executor != NULL) {
        self->executor->ops->close(self->executor);
    }
    free(self->slot_epoch);
    free(self->slot_token);
    free(self->logits);
    free(self->clients);
    free(self);
    *self_p = NULL;
}

lk_status_t world_add(world_t *self, const uint32_t *prompt, uint32_t n_prompt,
                      const sampling_params_t *sampling, int64_t priority, uint64_t salt,
                      uint32_t choice, lk_error_t *err)
{
    if (self->n_clients == self->cap_clients) {
        self->cap_clients = self->cap_clients == 0 ? 16 : 2 * self->cap_clients;
        self->clients = realloc(self->clients, self->cap_clients * sizeof *self->clients);
        ck_assert_ptr_nonnull(self->clients);
    }
    client_t *c = &self->clients[self->n_clients];
    request_t *r = request_new(prompt, n_prompt, sampling);
    ck_assert_ptr_nonnull(r);
    r->handle = self->n_clients;
    r->client = r->handle % 3;
    r->priority = priority;
    r->salt.lo = salt;
    r->choice = choice;
    lk_status_t status = scheduler_add(self->sched, r, err);
    if (status != LK_OK) {
        request_destroy(&r);
        return status;
    }
    ck_assert_uint_le(n_prompt, WORLD_MAX_LEN);
    *c = (client_t){.sampling = *sampling, .n_prompt = n_prompt, .stop_token = -1};
    memcpy(c->tokens, prompt, n_prompt * sizeof *prompt);
    c->added = true;
    self->n_clients++;
    return LK_OK;
}

bool world_abort(world_t *self, size_t handle)
{
    return scheduler_abort(self->sched, handle % 3, handle);
}

bool world_post(world_t *self, bool admit)
{
    ck_assert_ptr_null(self->posted);
    const exec_batch_t *batch =
        scheduler_schedule(self->sched, admit, self->epoch, self->step++, 0);
    uint32_t positions = 0, rows = 0;
    for (size_t i = 0; i < batch->n_seqs; i++) {
        positions += batch->seqs[i].n;
        rows += batch->seqs[i].n_logits;
    }
    ck_assert_uint_le(positions, self->config.sched.max_num_batched_tokens);
    ck_assert_uint_le(rows, max_rows(&self->config.sched));
    if (batch->n_seqs == 0) {
        return false;
    }
    self->posted = batch;
    run_batch(self, batch);
    if (self->executor != NULL) {
        lk_error_t err;
        ck_ok(self->executor->ops->step_post(self->executor, batch, &err));
    }
    return true;
}

void world_finish_step(world_t *self)
{
    exec_result_t result = {.logits = self->logits};
    for (size_t i = 0; i < self->posted->n_seqs; i++) {
        result.rows += self->posted->seqs[i].n_logits;
    }
    if (self->executor != NULL) {
        lk_error_t err;
        ck_ok(self->executor->ops->step_test(self->executor, &result, &err));
    }
    self->posted = NULL;
    scheduler_update(self->sched, &result);
}

void world_cancel_step(world_t *self)
{
    if (self->executor != NULL) {
        self->executor->ops->step_abort(self->executor);
    }
    self->posted = NULL;
    scheduler_cancel_step(self->sched);
}

void world_verify(const world_t *self)
{
    scheduler_verify(self->sched);
}

size_t world_unfinished(const world_t *self)
{
    size_t n = scheduler_num_waiting(self->sched) + scheduler_num_running(self->sched);
    size_t known = 0;
    for (size_t i = 0; i < self->n_clients; i++) {
        known += !self->clients[i].ended && !self->clients[i].silent;
    }
    ck_assert_uint_eq(n, known);
    return n;
}

void world_drain(world_t *self, size_t max_steps)
{
    for (size_t i = 0; world_unfinished(self) > 0; i++) {
        ck_assert_msg(i < max_steps, "%zu requests unfinished after %zu steps",
                      world_unfinished(self), max_steps);
        if (world_post(self, true)) {
            world_finish_step(self);
        }
        world_verify(self);
    }
}

sampling_params_t world_greedy(uint32_t max_tokens)
{
    return (sampling_params_t){.top_p = 1.0f,
                               .repetition_penalty = 1.0f,
                               .max_tokens = max_tokens,
                               .ignore_eos = true,
                               .logprobs = -1};
}
