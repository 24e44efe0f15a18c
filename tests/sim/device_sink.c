#include "tests/sim/device_sink.h"
#include "base/check.h"
#include "transfer/device/device.h"
#include "transfer/device/device_host.h"

#include <stdlib.h>

/* A tensor on its way through a stream. */
typedef struct arrival {
    struct arrival *next;
    sim_device_sink_t *sink;
    size_t index, len;
    const void *bytes;
} arrival_t;

struct sim_device_sink {
    weight_sink_ops_t ops;
    weight_sink_t inner;
    device_t *device;
    arrival_t *free;
    lk_error_t error; /* of a tensor of this plan */
};

/* ---- what the inner sink does as well ---- */

static const weight_sink_t *inner(void *ctx)
{
    return &((sim_device_sink_t *)ctx)->inner;
}

static lk_status_t sink_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    return inner(ctx)->ops->check(inner(ctx)->ctx, tensors, n, err);
}

static lk_status_t sink_check_whole(void *ctx, const tensor_desc_t *tensors, size_t n,
                                    lk_error_t *err)
{
    return inner(ctx)->ops->check_whole(inner(ctx)->ctx, tensors, n, err);
}

static lk_status_t sink_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    sim_device_sink_t *self = ctx;
    self->error = LK_ERROR_INIT;
    return inner(ctx)->ops->plan(inner(ctx)->ctx, tensors, n, err);
}

static lk_status_t sink_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                               lk_error_t *err)
{
    return inner(ctx)->ops->tensor(inner(ctx)->ctx, index, bytes, len, err);
}

static bool sink_complete(void *ctx)
{
    return inner(ctx)->ops->complete(inner(ctx)->ctx);
}

static void sink_missing(void *ctx, char *out, size_t room)
{
    inner(ctx)->ops->missing(inner(ctx)->ctx, out, room);
}

static void sink_begin(void *ctx)
{
    inner(ctx)->ops->begin(inner(ctx)->ctx);
}

static lk_status_t sink_prepare(void *ctx, lk_error_t *err)
{
    return inner(ctx)->ops->prepare(inner(ctx)->ctx, err);
}

static lk_status_t sink_commit(void *ctx, lk_error_t *err)
{
    return inner(ctx)->ops->commit(inner(ctx)->ctx, err);
}

static digest_t sink_digest(void *ctx)
{
    return inner(ctx)->ops->digest(inner(ctx)->ctx);
}

static digest_t sink_incoming(void *ctx)
{
    return inner(ctx)->ops->incoming(inner(ctx)->ctx);
}

/* ---- what makes it a device's ---- */

static device_t *sink_device(void *ctx)
{
    return ((sim_device_sink_t *)ctx)->device;
}

/* Everything comes through staging: where an inner sink has a place is the CPU's. */
static void *sink_device_direct(void *ctx, size_t index)
{
    return NULL;
}

static bool arrive(void *ctx)
{
    arrival_t *arrival = ctx;
    sim_device_sink_t *self = arrival->sink;
    lk_error_t err = LK_ERROR_INIT;
    if (self->error.status >= 0 &&
        weight_sink_store(&self->inner, arrival->index, arrival->bytes, arrival->len, &err) < 0) {
        self->error = err;
    }
    arrival->next = self->free;
    self->free = arrival;
    return true;
}

static lk_status_t sink_device_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                                      device_stream_t *stream, lk_error_t *err)
{
    sim_device_sink_t *self = ctx;
    arrival_t *arrival = self->free;
    if (arrival != NULL) {
        self->free = arrival->next;
    } else {
        arrival = calloc(1, sizeof *arrival);
        CHECK(arrival != NULL);
    }
    *arrival = (arrival_t){.sink = self, .index = index, .len = len, .bytes = bytes};
    return device_host_call(self->device, stream, arrive, arrival, err);
}

static lk_status_t sink_device_settle(void *ctx, lk_error_t *err)
{
    const sim_device_sink_t *self = ctx;
    return self->error.status < 0 ? lk_error_set(err, self->error.status, "%s", self->error.text)
                                  : LK_OK;
}

/* ---- life ---- */

sim_device_sink_t *sim_device_sink_new(weight_sink_t sink)
{
    sim_device_sink_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = device_host_open(&self->device, &err);
    CHECKF(status == LK_OK, "%s", err.text);
    self->inner = sink;
    self->error = LK_ERROR_INIT;
    self->ops = (weight_sink_ops_t){
        .check = sink_check,
        .check_whole = sink.ops->check_whole != NULL ? sink_check_whole : NULL,
        .plan = sink_plan,
        .tensor = sink_tensor,
        .device = sink_device,
        .device_direct = sink_device_direct,
        .device_tensor = sink_device_tensor,
        .device_settle = sink_device_settle,
        .complete = sink_complete,
        .missing = sink.ops->missing != NULL ? sink_missing : NULL,
        .begin = sink_begin,
        .prepare = sink.ops->prepare != NULL ? sink_prepare : NULL,
        .commit = sink_commit,
        .digest = sink_digest,
        .incoming = sink.ops->incoming != NULL ? sink_incoming : NULL,
    };
    return self;
}

void sim_device_sink_destroy(sim_device_sink_t **self_p)
{
    sim_device_sink_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    for (arrival_t *a = self->free, *next; a != NULL; a = next) {
        next = a->next;
        free(a);
    }
    device_close(&self->device);
    free(self);
}

weight_sink_t sim_device_sink(sim_device_sink_t *self)
{
    return (weight_sink_t){.ops = &self->ops, .ctx = self};
}
