#include "base/check.h"
#include "base/prng.h"
#include "engine_core/exec/executor.h"

#include <stdlib.h>
#include <string.h>

/*
 * The oracle. A slot of its KV memory holds the token of its position and the hash chain over all
 * tokens up to it. A position's chain is computed from the chain read in the slot before it, found
 * through the block table, so a step costs O(new tokens). What the chain alone would miss (a wrong
 * block further back, a slot overwritten by another request) is looked for in every step: all block
 * boundaries, the block that is being filled, and one earlier block that changes from step to step.
 * A break poisons the chain: every later token of the sequence is wrong.
 */
typedef struct {
    uint64_t chain;
    uint32_t token;
} slot_t;

#define CHAIN_START 0x6e756c6c6f726163ull
#define POISON      0xdeadc0de5eed5eedull

typedef struct {
    executor_t base;
    model_config_t model;
    weight_table_t *weights;
    ep_t ep;
    uint32_t block_size, num_blocks, max_seqs, max_tokens;
    slot_t *slots;    /* [num_blocks, block_size] */
    uint32_t *tokens; /* [max_tokens] */
    float *logprobs;  /* [max_tokens] */
    ep_buf_t *send;   /* [ep.size] */
    ep_buf_t *recv;
    uint64_t step; /* sent to the peers */
    size_t rows;
    bool posted;
} null_t;

static uint64_t chain_next(uint64_t chain, uint32_t token)
{
    return lk_mix64(chain ^ ((uint64_t)token << 20 | 0x5a5a5));
}

static uint64_t chain_end(uint64_t chain, digest_t weights)
{
    return lk_mix64(lk_mix64(chain ^ weights.lane[0]) ^ weights.lane[1]);
}

static bool is_eos(const model_config_t *model, uint32_t token)
{
    for (uint32_t i = 0; i < model->n_eos; i++) {
        if (model->eos_token_ids[i] == token) {
            return true;
        }
    }
    return false;
}

static uint32_t token_of(const model_config_t *model, uint64_t hash)
{
    uint32_t token = (uint32_t)(hash % model->vocab_size);
    for (uint32_t i = 0; is_eos(model, token); i++) {
        CHECK(i <= model->n_eos); /* open: there are more tokens than eos ids */
        token = (token + 1) % model->vocab_size;
    }
    return token;
}

/* In (-8, 0]. */
static float logprob_of(uint64_t hash)
{
    return -(float)(hash >> 40) * 0x1p-21f;
}

uint32_t executor_null_token(const model_config_t *model, digest_t weights, const uint32_t *tokens,
                             uint32_t n_tokens)
{
    uint64_t chain = CHAIN_START;
    for (uint32_t i = 0; i < n_tokens; i++) {
        chain = chain_next(chain, tokens[i]);
    }
    return token_of(model, chain_end(chain, weights));
}

static void null_close(executor_t *base)
{
    null_t *self = (null_t *)base;
    if (self == NULL) {
        return;
    }
    weight_table_destroy(&self->weights);
    free(self->slots);
    free(self->tokens);
    free(self->logprobs);
    free(self->send);
    free(self->recv);
    free(self);
}

static lk_status_t load_weights(null_t *self, const executor_config_t *config, lk_error_t *err)
{
    self->weights =
        weight_table_new(config->model, config->dtype, config->ep.rank, config->ep.size, err);
    if (self->weights == NULL) {
        return err->status;
    }
    LK_RETURN_IF_ERROR(config->load_dummy
                           ? weight_table_fill(self->weights, config->dummy_seed, err)
                           : weight_table_load(self->weights, config->model_dir, err));
    return config->shadow ? weight_table_add_shadow(self->weights, err) : LK_OK;
}

static lk_status_t null_open(const executor_config_t *config, executor_t **out, lk_error_t *err)
{
    if (config->model->vocab_size <= config->model->n_eos) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "vocab_size %u leaves no token beside %u eos ids for the null executor",
                            config->model->vocab_size, config->model->n_eos);
    }
    null_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "null executor: out of memory");
    }
    self->base.ops = &executor_null_ops;
    self->model = *config->model;
    self->ep = config->ep;
    self->block_size = config->block_size;
    self->num_blocks = config->num_blocks;
    self->max_seqs = config->max_seqs;
    self->max_tokens = config->max_tokens;
    self->slots = calloc(config->num_blocks, (size_t)config->block_size * sizeof *self->slots);
    self->tokens = calloc(config->max_tokens, sizeof *self->tokens);
    self->logprobs = calloc(config->max_tokens, sizeof *self->logprobs);
    self->send = calloc(config->ep.size, sizeof *self->send);
    self->recv = calloc(config->ep.size, sizeof *self->recv);
    lk_status_t status;
    if (self->slots == NULL || self->tokens == NULL || self->logprobs == NULL ||
        self->send == NULL || self->recv == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "null executor: out of memory for %u blocks",
                              config->num_blocks);
        goto err_close;
    }
    status = load_weights(self, config, err);
    if (status != LK_OK) {
        goto err_close;
    }
    *out = &self->base;
    return LK_OK;
err_close:
    null_close(&self->base);
    return status;
}

static weight_table_t *null_weights(executor_t *base)
{
    return ((null_t *)base)->weights;
}

static uint64_t null_kv_block_bytes(const executor_config_t *config)
{
    return config->block_size * sizeof(slot_t);
}

static uint64_t null_weight_bytes(const executor_config_t *config)
{
    return weight_table_size(config->model, config->dtype, config->ep.rank, config->ep.size);
}

static slot_t *slot_at(const null_t *self, const exec_seq_t *seq, uint32_t position)
{
    uint32_t block = seq->blocks[position / self->block_size];
    CHECK(block < self->num_blocks);
    return &self->slots[(size_t)block * self->block_size + position % self->block_size];
}

/* Positions [from, to) follow from what precedes them, as read through the block table. */
static bool chain_holds(const null_t *self, const exec_seq_t *seq, uint32_t from, uint32_t to)
{
    uint64_t chain = from == 0 ? CHAIN_START : slot_at(self, seq, from - 1)->chain;
    for (uint32_t p = from; p < to; p++) {
        const slot_t *slot = slot_at(self, seq, p);
        chain = chain_next(chain, slot->token);
        if (chain != slot->chain) {
            return false;
        }
    }
    return true;
}

static bool context_holds(const null_t *self, const exec_seq_t *seq, uint64_t step)
{
    uint32_t size = self->block_size, end = seq->start, last = end / size * size;
    for (uint32_t p = 0; p < last; p += size) {
        if (!chain_holds(self, seq, p, p + 1)) {
            return false;
        }
    }
    if (last > 0) {
        uint32_t p = (uint32_t)(step % (last / size)) * size;
        if (!chain_holds(self, seq, p, p + size)) {
            return false;
        }
    }
    return chain_holds(self, seq, last, end);
}

static void run_seq(null_t *self, const exec_seq_t *seq, digest_t weights, uint64_t step)
{
    uint64_t chain = CHAIN_START;
    if (seq->start > 0) {
        chain = slot_at(self, seq, seq->start - 1)->chain;
        if (!context_holds(self, seq, step)) {
            chain ^= POISON;
        }
    }
    uint32_t end = seq->start + seq->n;
    for (uint32_t p = seq->start; p < end; p++) {
        slot_t *slot = slot_at(self, seq, p);
        chain = chain_next(chain, seq->tokens[p]);
        *slot = (slot_t){.chain = chain, .token = seq->tokens[p]};
        if (end - p <= seq->n_logits) {
            uint64_t hash = chain_end(chain, weights);
            self->tokens[self->rows] = token_of(&self->model, hash);
            self->logprobs[self->rows] = logprob_of(hash);
            self->rows++;
        }
    }
}

/* Every rank's step number, so that ranks out of step are found at once. */
static lk_status_t post_exchange(null_t *self, uint64_t step, lk_error_t *err)
{
    self->step = step;
    for (uint32_t i = 0; i < self->ep.size; i++) {
        self->send[i] = i == self->ep.rank
                            ? (ep_buf_t){0}
                            : (ep_buf_t){.data = &self->step, .len = sizeof self->step};
    }
    return self->ep.ops->post(self->ep.ctx, step << 16, self->send, err);
}

static lk_status_t null_step_post(executor_t *base, const exec_batch_t *batch, lk_error_t *err)
{
    null_t *self = (null_t *)base;
    CHECK(!self->posted && batch->n_seqs <= self->max_seqs);
    if (self->ep.size > 1) {
        LK_RETURN_IF_ERROR(post_exchange(self, batch->step, err));
    }
    self->posted = true;
    self->rows = 0;
    digest_t weights = weight_table_digest(self->weights);
    uint64_t positions = 0;
    for (size_t i = 0; i < batch->n_seqs; i++) {
        const exec_seq_t *seq = &batch->seqs[i];
        positions += seq->n;
        CHECK(seq->n > 0 && seq->n_logits <= seq->n && positions <= self->max_tokens);
        run_seq(self, seq, weights, batch->step);
    }
    return LK_OK;
}

static lk_status_t test_exchange(null_t *self, lk_error_t *err)
{
    lk_status_t status = self->ep.ops->test(self->ep.ctx, self->recv, err);
    if (status != LK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < self->ep.size; i++) {
        if (i == self->ep.rank) {
            continue;
        }
        uint64_t step = 0;
        if (self->recv[i].len == sizeof step) {
            memcpy(&step, self->recv[i].data, sizeof step);
        }
        if (self->recv[i].len != sizeof step || step != self->step) {
            return lk_error_set(err, LK_ERR_PEER,
                                "rank %u is out of step: it sent step %llu (%zu bytes), this is "
                                "step %llu",
                                i, (unsigned long long)step, self->recv[i].len,
                                (unsigned long long)self->step);
        }
    }
    return LK_OK;
}

static lk_status_t null_step_test(executor_t *base, exec_result_t *out, lk_error_t *err)
{
    null_t *self = (null_t *)base;
    CHECK(self->posted);
    if (self->ep.size > 1) {
        lk_status_t status = test_exchange(self, err);
        if (status != LK_OK) {
            self->posted = status == LK_INPROGRESS;
            return status;
        }
    }
    self->posted = false;
    *out = (exec_result_t){.rows = self->rows, .tokens = self->tokens, .logprobs = self->logprobs};
    return LK_OK;
}

/* Its step is over but for the peers. */
static bool null_step_waits(const executor_t *base)
{
    return ((const null_t *)base)->posted;
}

static void null_step_abort(executor_t *base)
{
    null_t *self = (null_t *)base;
    if (self->posted && self->ep.size > 1) {
        self->ep.ops->abort(self->ep.ctx);
    }
    self->posted = false;
}

const executor_ops_t executor_null_ops = {
    .name = "null",
    .open = null_open,
    .close = null_close,
    .weights = null_weights,
    .kv_block_bytes = null_kv_block_bytes,
    .weight_bytes = null_weight_bytes,
    .step_post = null_step_post,
    .step_test = null_step_test,
    .step_waits = null_step_waits,
    .step_abort = null_step_abort,
};
