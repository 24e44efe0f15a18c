#include "base/check.h"
#include "base/log.h"
#include "engine_core/exec/executor.h"
#include "engine_core/exec/store/device_table.h"
#include "transfer/device/device.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    executor_t base;
    device_t *device;
    device_table_t *table;
    bool posted;
    char refusal[256];
} store_t;

static store_t *of(executor_t *base)
{
    return (store_t *)base;
}

static void store_close(executor_t *base)
{
    store_t *self = of(base);
    if (self == NULL) {
        return;
    }
    device_table_destroy(&self->table);
    device_close(&self->device);
    free(self);
}

static lk_status_t load(store_t *self, const executor_config_t *config, lk_error_t *err)
{
    bool grouped = config->ep.size > 1 && config->model->num_experts > 0;
    self->table =
        device_table_new(self->device, config->model, config->dtype, grouped ? config->ep.rank : 0,
                         grouped ? config->ep.size : 1, err);
    if (self->table == NULL) {
        return err->status;
    }
    device_table_set_digests(self->table, !config->no_digests);
    return config->load_dummy
               ? device_table_fill(self->table, config->dummy_seed, config->threads, err)
               : device_table_load(self->table, config->model_dir, err);
}

static lk_status_t open_on(const char *name, const executor_ops_t *ops,
                           const executor_config_t *config, executor_t **out, lk_error_t *err)
{
    lk_error_t none = LK_ERROR_INIT;
    err = err != NULL ? err : &none;
    store_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the executor");
    }
    self->base.ops = ops;
    unsigned count = device_count(name);
    int index = (int)(count > 0 ? config->device_index % count : config->device_index);
    lk_status_t status = device_open(name, index, &self->device, err);
    if (status < 0) {
        lk_error_prefix(err, "--device %s", ops->name);
        goto err_close;
    }
    snprintf(self->refusal, sizeof self->refusal,
             "--device %s keeps weights on %s and generates nothing", ops->name,
             self->device->text);
    status = load(self, config, err);
    if (status < 0) {
        goto err_close;
    }
    LK_INFO("weights are on %s: %llu bytes there", self->device->text,
            (unsigned long long)self->device->allocated);
    *out = &self->base;
    return LK_OK;

err_close:
    store_close(&self->base);
    return status;
}

static lk_status_t cuda_open(const executor_config_t *config, executor_t **out, lk_error_t *err)
{
    return open_on("cuda", &executor_cuda_store_ops, config, out, err);
}

static lk_status_t host_open(const executor_config_t *config, executor_t **out, lk_error_t *err)
{
    return open_on("host", &executor_host_store_ops, config, out, err);
}

static weight_table_t *store_weights(executor_t *base)
{
    return device_table_names(of(base)->table);
}

static weight_sink_t store_sink(executor_t *base)
{
    return device_table_sink(of(base)->table);
}

static const char *store_refusal(const executor_t *base)
{
    return ((const store_t *)base)->refusal;
}

/* There is no KV; blocks are numbers only. */
static uint64_t store_kv_block_bytes(const executor_config_t *config)
{
    return config->block_size;
}

/* In the process's own memory. */
static uint64_t cuda_weight_bytes(const executor_config_t *config)
{
    return 0;
}

static uint64_t host_weight_bytes(const executor_config_t *config)
{
    bool grouped = config->ep.size > 1 && config->model->num_experts > 0;
    return weight_table_size(config->model, config->dtype, grouped ? config->ep.rank : 0,
                             grouped ? config->ep.size : 1);
}

/* Nothing is ever admitted, so only dummy steps could come, and all ranks are alike. */
static lk_status_t store_step_post(executor_t *base, const exec_batch_t *batch, lk_error_t *err)
{
    store_t *self = of(base);
    CHECK(!self->posted && batch->n_seqs == 0);
    self->posted = true;
    return LK_OK;
}

static lk_status_t store_step_test(executor_t *base, exec_result_t *out, lk_error_t *err)
{
    CHECK(of(base)->posted);
    of(base)->posted = false;
    *out = (exec_result_t){.rows = 0};
    return LK_OK;
}

static bool store_step_waits(const executor_t *base)
{
    return false;
}

static void store_step_abort(executor_t *base)
{
    of(base)->posted = false;
}

#define STORE_OPS                                                                                  \
    .close = store_close, .weights = store_weights, .sink = store_sink, .refusal = store_refusal,  \
    .kv_block_bytes = store_kv_block_bytes, .step_post = store_step_post,                          \
    .step_test = store_step_test, .step_waits = store_step_waits, .step_abort = store_step_abort

const executor_ops_t executor_cuda_store_ops = {
    .name = "cuda-store", .open = cuda_open, .weight_bytes = cuda_weight_bytes, STORE_OPS};
const executor_ops_t executor_host_store_ops = {
    .name = "host-store", .open = host_open, .weight_bytes = host_weight_bytes, STORE_OPS};
