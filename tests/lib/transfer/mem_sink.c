#include "tests/lib/transfer/mem_sink.h"
#include "base/buf.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mem_sink_t *mem_sink_new(const tensor_desc_t *model, size_t n)
{
    mem_sink_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL && n <= MEM_SINK_MAX);
    self->n_model = n;
    self->commit_status = LK_OK;
    for (size_t i = 0; i < n; i++) {
        self->model[i] = model[i];
        bool fits = tensor_desc_bytes(&model[i], &self->bytes[i]);
        CHECK(fits);
        self->data[i] = malloc(self->bytes[i] > 0 ? self->bytes[i] : 1);
        CHECK(self->data[i] != NULL);
        memset(self->data[i], 0xee, self->bytes[i]);
    }
    return self;
}

void mem_sink_destroy(mem_sink_t **self_p)
{
    mem_sink_t *self = *self_p;
    if (self != NULL) {
        for (size_t i = 0; i < self->n_model; i++) {
            free(self->data[i]);
        }
        free(self);
        *self_p = NULL;
    }
}

static size_t find(const mem_sink_t *self, const tensor_desc_t *t)
{
    for (size_t i = 0; i < self->n_model; i++) {
        const tensor_desc_t *m = &self->model[i];
        if (strcmp(m->name, t->name) == 0 && m->ndim == t->ndim && m->dtype == t->dtype &&
            memcmp(m->shape, t->shape, t->ndim * sizeof t->shape[0]) == 0) {
            return i;
        }
    }
    return SIZE_MAX;
}

static lk_status_t sink_check(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    lk_buf_t bad;
    lk_buf_init(&bad, 0);
    for (size_t i = 0; i < n; i++) {
        if (find(ctx, &tensors[i]) == SIZE_MAX) {
            lk_buf_printf(&bad, "%s'%s'", bad.len > 0 ? ", " : "", tensors[i].name);
        }
    }
    lk_status_t st = LK_OK;
    if (bad.len > 0) {
        st = lk_error_set(err, LK_ERR_INVALID, "not in the model: %s", lk_buf_cstr(&bad));
    }
    lk_buf_fini(&bad);
    return st;
}

static lk_status_t sink_check_whole(void *ctx, const tensor_desc_t *tensors, size_t n,
                                    lk_error_t *err)
{
    mem_sink_t *self = ctx;
    LK_RETURN_IF_ERROR(sink_check(ctx, tensors, n, err));
    bool there[MEM_SINK_MAX] = {false};
    for (size_t i = 0; i < n; i++) {
        there[find(self, &tensors[i])] = true;
    }
    for (size_t i = 0; i < self->n_model; i++) {
        if (!there[i]) {
            return lk_error_set(err, LK_ERR_INVALID, "missing: %s", self->model[i].name);
        }
    }
    return LK_OK;
}

static lk_status_t sink_plan(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    mem_sink_t *self = ctx;
    LK_RETURN_IF_ERROR(sink_check(ctx, tensors, n, err));
    for (size_t i = 0; i < n; i++) {
        self->plan[i] = find(self, &tensors[i]);
    }
    self->n_plan = n;
    self->under_way = false;
    return LK_OK;
}

static void *sink_direct(void *ctx, size_t index)
{
    mem_sink_t *self = ctx;
    CHECK(index < self->n_plan);
    return self->direct ? self->data[self->plan[index]] : NULL;
}

static lk_status_t sink_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                               lk_error_t *err)
{
    mem_sink_t *self = ctx;
    CHECK(index < self->n_plan && (!self->under_way || self->at == index));
    size_t at = self->plan[index];
    CHECK(len == self->bytes[at]);
    if (self->fail_at != NULL && strcmp(self->fail_at, self->model[at].name) == 0) {
        return lk_error_set(err, LK_ERR_INTERNAL, "the sink refuses '%s'", self->fail_at);
    }
    self->slices = self->under_way ? self->slices + 1 : 1;
    self->under_way = self->slices < MEM_SINK_SLICES;
    self->at = index;
    if (self->under_way) {
        return LK_INPROGRESS;
    }
    if (bytes != self->data[at]) {
        memcpy(self->data[at], bytes, len);
    }
    self->arrived[at] = true;
    self->tensors++;
    return LK_OK;
}

static device_t *sink_device(void *ctx)
{
    return ((mem_sink_t *)ctx)->device;
}

static lk_status_t sink_device_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                                      device_stream_t *stream, lk_error_t *err)
{
    mem_sink_t *self = ctx;
    CHECK(index < self->n_plan);
    size_t at = self->plan[index];
    CHECK(len == self->bytes[at]);
    if (self->fail_at != NULL && strcmp(self->fail_at, self->model[at].name) == 0) {
        return lk_error_set(err, LK_ERR_INTERNAL, "the sink refuses '%s'", self->fail_at);
    }
    self->arrived[at] = true;
    self->tensors++;
    return bytes == self->data[at]
               ? LK_OK
               : self->device->ops->copy(self->device, self->data[at], bytes, len, stream, err);
}

static uint64_t sink_largest(void *ctx)
{
    mem_sink_t *self = ctx;
    uint64_t most = 0;
    for (size_t i = 0; i < self->n_model; i++) {
        most = LK_MAX(most, self->bytes[i]);
    }
    return most;
}

static bool sink_complete(void *ctx)
{
    mem_sink_t *self = ctx;
    for (size_t i = 0; i < self->n_model; i++) {
        if (!self->arrived[i]) {
            return false;
        }
    }
    return true;
}

static void sink_missing(void *ctx, char *out, size_t room)
{
    mem_sink_t *self = ctx;
    lk_buf_t text;
    lk_buf_init(&text, 0);
    for (size_t i = 0; i < self->n_model; i++) {
        if (!self->arrived[i]) {
            lk_buf_printf(&text, "%s%s", text.len > 0 ? ", " : "", self->model[i].name);
        }
    }
    snprintf(out, room, "%s", lk_buf_cstr(&text));
    lk_buf_fini(&text);
}

static void sink_begin(void *ctx)
{
    mem_sink_t *self = ctx;
    self->begins++;
    memset(self->arrived, 0, sizeof self->arrived);
}

static lk_status_t sink_commit(void *ctx, lk_error_t *err)
{
    mem_sink_t *self = ctx;
    if (self->commit_status != LK_OK) {
        return lk_error_set(err, self->commit_status, "the sink cannot commit");
    }
    self->commits++;
    return LK_OK;
}

static digest_t sink_digest(void *ctx)
{
    mem_sink_t *self = ctx;
    digest_t set = {{0}};
    for (size_t i = 0; i < self->n_model; i++) {
        digest_t one = {{0}};
        uint64_t numel = 0;
        bool fits = tensor_desc_numel(&self->model[i], &numel);
        CHECK(fits);
        lk_status_t st =
            digest_add(&one, self->data[i], self->model[i].dtype, self->model[i].dtype, numel, 0);
        CHECK(st == LK_OK);
        digest_set_add(&set, self->model[i].name, one);
    }
    return set;
}

static lk_status_t sink_prepare(void *ctx, lk_error_t *err)
{
    mem_sink_t *self = ctx;
    if (self->prepares == 0) {
        return LK_OK;
    }
    self->prepares--;
    return LK_INPROGRESS;
}

#define SINK_OPS                                                                                   \
    .check = sink_check, .check_whole = sink_check_whole, .plan = sink_plan,                       \
    .tensor = sink_tensor, .complete = sink_complete, .missing = sink_missing,                     \
    .begin = sink_begin, .commit = sink_commit, .digest = sink_digest, .largest = sink_largest

weight_sink_t mem_sink(mem_sink_t *self)
{
    static const weight_sink_ops_t one = {SINK_OPS, .direct = sink_direct};
    static const weight_sink_ops_t two = {SINK_OPS, .direct = sink_direct, .prepare = sink_prepare,
                                          .incoming = sink_digest};
    static const weight_sink_ops_t device = {SINK_OPS, .device = sink_device,
                                             .device_direct = sink_direct,
                                             .device_tensor = sink_device_tensor};
    return (weight_sink_t){self->device != NULL ? &device : self->two_sets ? &two : &one, self};
}
