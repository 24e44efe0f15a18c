/*
 * executor_cpu.c: the CPU executor's step as a state machine; forward.c and moe.c compute.
 *
 *   LAYER -> LAYER ... -> HEAD -> idle               dense layers, one per call
 *   LAYER -> OWN -> DISPATCH -> COMBINE -> LAYER     sparse layer of an expert-parallel group
 *
 * The dispatch is posted before own pairs are computed, so that the exchange runs beside them.
 */
#include "base/check.h"
#include "engine_core/exec/cpu/forward.h"
#include "engine_core/exec/cpu/moe.h"
#include "engine_core/exec/executor.h"

#include <stdlib.h>

typedef enum {
    STEP_IDLE,
    STEP_LAYER,
    STEP_OWN,
    STEP_DISPATCH,
    STEP_COMBINE,
    STEP_HEAD
} step_state_t;

typedef struct {
    executor_t base;
    model_config_t config;
    ep_t ep;
    bool grouped; /* takes part in expert exchanges */
    weight_table_t *weights;
    cpu_model_t model;    /* of the live weights */
    cpu_model_t incoming; /* shadow: of the other set */
    size_t refreshed;     /* of its copies */
    digest_t copied;      /* of the weights that the model's float32 copies were taken from */
    team_t *team;
    forward_t *forward;
    moe_t *moe;

    step_state_t state;
    uint64_t step;
    uint32_t layer;
    bool posted;    /* an exchange is out */
    bool waits;     /* and the last look found that a peer is late */
    ep_buf_t *recv; /* [ep.size] */
} executor_cpu_t;

static executor_cpu_t *of(executor_t *base)
{
    return (executor_cpu_t *)base;
}

/* ---- open, close ---- */

static lk_status_t check_config(const executor_config_t *c, lk_error_t *err)
{
    const model_config_t *m = c->model;
    if (c->dtype != LK_DTYPE_F32 && c->dtype != LK_DTYPE_BF16) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "dtype: the cpu executor has float32 and bfloat16");
    }
    if (c->block_size == 0 || c->num_blocks == 0 || c->max_seqs == 0 || c->max_tokens == 0) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "block_size %u, num_blocks %u, max_seqs %u, max_tokens %u: all must be "
                            "at least 1",
                            c->block_size, c->num_blocks, c->max_seqs, c->max_tokens);
    }
    if (m->num_kv_heads == 0 || m->num_heads % m->num_kv_heads != 0 || m->head_dim % 2 != 0) {
        return lk_error_set(
            err, LK_ERR_UNSUPPORTED,
            "num_attention_heads %u, num_key_value_heads %u, head_dim %u: heads must "
            "divide into groups and head_dim be even",
            m->num_heads, m->num_kv_heads, m->head_dim);
    }
    if (m->mlp_bias) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "mlp_bias: not supported by the cpu executor");
    }
    if (c->ep.size == 0 || c->ep.size > EP_MAX_RANKS || c->ep.rank >= c->ep.size) {
        return lk_error_set(err, LK_ERR_INVALID, "expert parallelism: rank %u of %u", c->ep.rank,
                            c->ep.size);
    }
    return LK_OK;
}

/* ---- the two sets' models ---- */

static lk_status_t prepare_incoming(void *ctx, bool first, lk_error_t *err)
{
    executor_cpu_t *self = ctx;
    self->refreshed = first ? 0 : self->refreshed;
    return cpu_model_refresh_some(&self->incoming, &self->refreshed, err);
}

/* By value: forward.c and moe.c know where the live one is. */
static void flip_models(void *ctx)
{
    executor_cpu_t *self = ctx;
    cpu_model_t model = self->incoming;
    self->incoming = self->model;
    self->model = model;
    self->copied = weight_table_digest(self->weights);
}

static lk_status_t open_weights(executor_cpu_t *self, const executor_config_t *c, lk_error_t *err)
{
    const uint32_t rank = self->grouped ? c->ep.rank : 0, size = self->grouped ? c->ep.size : 1;
    self->weights = weight_table_new(&self->config, c->dtype, rank, size, err);
    if (self->weights == NULL) {
        return err != NULL ? err->status : LK_ERR_NO_MEMORY;
    }
    LK_RETURN_IF_ERROR(c->load_dummy ? weight_table_fill(self->weights, c->dummy_seed, err)
                                     : weight_table_load(self->weights, c->model_dir, err));
    LK_RETURN_IF_ERROR(
        cpu_model_init(&self->model, &self->config, self->weights, false, rank, size, err));
    if (c->shadow) {
        LK_RETURN_IF_ERROR(weight_table_add_shadow(self->weights, err));
        LK_RETURN_IF_ERROR(
            cpu_model_init(&self->incoming, &self->config, self->weights, true, rank, size, err));
        weight_table_follow(self->weights,
                            &(weight_follower_t){prepare_incoming, flip_models, self});
    }
    self->copied = weight_table_digest(self->weights);
    return LK_OK;
}

static void cpu_close(executor_t *base);

static lk_status_t cpu_open(const executor_config_t *config, executor_t **out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(check_config(config, err));
    executor_cpu_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the executor");
    }
    self->base.ops = &executor_cpu_ops;
    self->config = *config->model;
    self->ep = config->ep;
    self->grouped = config->ep.size > 1 && config->model->num_experts > 0;
    executor_config_t c = *config;
    c.model = &self->config;
    if (!self->grouped) {
        c.ep = ep_local();
    }
    const kernels_t *kernels = kernels_best();
    lk_status_t rc = LK_ERR_NO_MEMORY;
    self->recv = calloc(config->ep.size, sizeof *self->recv);
    if (self->recv == NULL) {
        lk_error_set(err, rc, "out of memory for the executor");
        goto err_close;
    }
    if ((rc = open_weights(self, &c, err)) < 0 ||
        (rc = team_new(c.threads, &self->team, err)) < 0) {
        goto err_close;
    }
    const forward_options_t fo = {&c, &self->model, kernels, self->team};
    if ((rc = forward_new(&fo, &self->forward, err)) < 0) {
        goto err_close;
    }
    if (self->config.num_experts > 0) {
        const moe_options_t mo = {&c, &self->model, kernels, self->team};
        if ((rc = moe_new(&mo, &self->moe, err)) < 0) {
            goto err_close;
        }
    }
    *out = &self->base;
    return LK_OK;

err_close:
    cpu_close(&self->base);
    return rc;
}

static void cpu_step_abort(executor_t *base);

static void cpu_close(executor_t *base)
{
    if (base == NULL) {
        return;
    }
    executor_cpu_t *self = of(base);
    cpu_step_abort(base);
    moe_destroy(&self->moe);
    forward_destroy(&self->forward);
    team_destroy(&self->team);
    cpu_model_fini(&self->model);
    cpu_model_fini(&self->incoming);
    weight_table_destroy(&self->weights);
    free(self->recv);
    free(self);
}

static uint64_t cpu_weight_bytes(const executor_config_t *c)
{
    const bool grouped = c->ep.size > 1 && c->model->num_experts > 0;
    const uint32_t rank = grouped ? c->ep.rank : 0, size = grouped ? c->ep.size : 1;
    return weight_table_size(c->model, c->dtype, rank, size) + cpu_model_copied_bytes(c->model);
}

static weight_table_t *cpu_weights(executor_t *base)
{
    return of(base)->weights;
}

/* ---- the step ---- */

/* Takes the float32 copies again when the weights have changed, by an update or by a reload. */
static lk_status_t follow_weights(executor_cpu_t *self, lk_error_t *err)
{
    const digest_t now = weight_table_digest(self->weights);
    if (!digest_equal(now, self->copied)) {
        LK_RETURN_IF_ERROR(cpu_model_refresh(&self->model, err));
        self->copied = now;
    }
    return LK_OK;
}

static lk_status_t cpu_step_post(executor_t *base, const exec_batch_t *batch, lk_error_t *err)
{
    executor_cpu_t *self = of(base);
    if (self->state != STEP_IDLE) {
        return lk_error_set(err, LK_ERR_STATE, "a step is in progress");
    }
    LK_RETURN_IF_ERROR(follow_weights(self, err));
    LK_RETURN_IF_ERROR(forward_begin(self->forward, batch, err));
    self->step = batch->step;
    self->layer = 0;
    self->state = STEP_LAYER;
    return LK_OK;
}

static bool is_sparse(const executor_cpu_t *self)
{
    return self->model.layers[self->layer].router != NULL;
}

/* phase 0: dispatch; 1: combine (ep.h's tag). */
static lk_status_t post(executor_cpu_t *self, uint32_t phase, lk_error_t *err)
{
    uint64_t tag = self->step << 16 | self->layer << 1 | phase;
    LK_RETURN_IF_ERROR(self->ep.ops->post(self->ep.ctx, tag, moe_send(self->moe), err));
    self->posted = true;
    return LK_OK;
}

static lk_status_t test(executor_cpu_t *self, lk_error_t *err)
{
    lk_status_t rc = self->ep.ops->test(self->ep.ctx, self->recv, err);
    self->posted = rc != LK_OK; /* a failed exchange is aborted with its step */
    self->waits = rc == LK_INPROGRESS;
    return rc;
}

static void next_layer(executor_cpu_t *self)
{
    self->layer++;
    self->state = self->layer < self->config.num_layers ? STEP_LAYER : STEP_HEAD;
}

static void finish_sparse(executor_cpu_t *self)
{
    moe_combine(self->moe, forward_residual(self->forward));
    next_layer(self);
}

static lk_status_t step_layer(executor_cpu_t *self, lk_error_t *err)
{
    forward_t *f = self->forward;
    forward_layer(f, self->layer);
    if (!is_sparse(self)) {
        next_layer(self);
        return LK_INPROGRESS;
    }
    moe_begin(self->moe, self->layer, forward_tokens(f), forward_router(f),
              forward_expert_input(f));
    if (self->grouped) {
        LK_RETURN_IF_ERROR(post(self, 0, err));
    }
    self->state = STEP_OWN;
    return LK_INPROGRESS;
}

static lk_status_t step_own(executor_cpu_t *self)
{
    moe_own(self->moe);
    if (self->grouped) {
        self->state = STEP_DISPATCH;
    } else {
        finish_sparse(self);
    }
    return LK_INPROGRESS;
}

static lk_status_t step_dispatch(executor_cpu_t *self, lk_error_t *err)
{
    lk_status_t rc = test(self, err);
    if (rc != LK_OK) {
        return rc;
    }
    LK_RETURN_IF_ERROR(moe_remote(self->moe, self->recv, err));
    LK_RETURN_IF_ERROR(post(self, 1, err));
    self->state = STEP_COMBINE;
    return LK_INPROGRESS;
}

static lk_status_t step_combine(executor_cpu_t *self, lk_error_t *err)
{
    lk_status_t rc = test(self, err);
    if (rc != LK_OK) {
        return rc;
    }
    LK_RETURN_IF_ERROR(moe_home(self->moe, self->recv, err));
    finish_sparse(self);
    return LK_INPROGRESS;
}

static lk_status_t step_head(executor_cpu_t *self, exec_result_t *out)
{
    if (!forward_head(self->forward)) {
        return LK_INPROGRESS;
    }
    self->state = STEP_IDLE;
    *out = (exec_result_t){.rows = forward_rows(self->forward),
                           .logits = forward_logits(self->forward)};
    return LK_OK;
}

static lk_status_t cpu_step_test(executor_t *base, exec_result_t *out, lk_error_t *err)
{
    executor_cpu_t *self = of(base);
    lk_status_t rc = LK_ERR_STATE;
    /* without work and without peers that wait, nothing happens in a layer */
    if (self->state == STEP_LAYER && !self->grouped && forward_tokens(self->forward) == 0) {
        self->state = STEP_HEAD;
    }
    switch (self->state) {
    case STEP_IDLE:
        return lk_error_set(err, LK_ERR_STATE, "no step was posted");
    case STEP_LAYER:
        rc = step_layer(self, err);
        break;
    case STEP_OWN:
        rc = step_own(self);
        break;
    case STEP_DISPATCH:
        rc = step_dispatch(self, err);
        break;
    case STEP_COMBINE:
        rc = step_combine(self, err);
        break;
    case STEP_HEAD:
        rc = step_head(self, out);
        break;
    }
    if (rc < 0) {
        cpu_step_abort(base);
    }
    return rc;
}

static bool cpu_step_waits(const executor_t *base)
{
    return ((const executor_cpu_t *)base)->waits;
}

static void cpu_step_abort(executor_t *base)
{
    executor_cpu_t *self = of(base);
    self->waits = false;
    if (self->posted) {
        self->ep.ops->abort(self->ep.ctx);
        self->posted = false;
    }
    self->state = STEP_IDLE;
}

const executor_ops_t executor_cpu_ops = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .weights = cpu_weights,
    .kv_block_bytes = forward_kv_block_bytes,
    .weight_bytes = cpu_weight_bytes,
    .step_post = cpu_step_post,
    .step_test = cpu_step_test,
    .step_waits = cpu_step_waits,
    .step_abort = cpu_step_abort,
};
