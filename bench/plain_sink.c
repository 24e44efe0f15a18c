#include "bench/plain_sink.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

static lk_status_t accept_list(void *ctx, const tensor_desc_t *list, size_t n, lk_error_t *err)
{
    return LK_OK;
}

static void *place_of(void *ctx, size_t index)
{
    const plain_sink_t *self = ctx;
    return self->place + index * self->tensor_bytes;
}

static lk_status_t take(void *ctx, size_t index, const void *bytes, size_t len, lk_error_t *err)
{
    const plain_sink_t *self = ctx;
    digest_t digest = {{0}};
    if (bytes != place_of(ctx, index)) {
        memcpy(place_of(ctx, index), bytes, len);
    }
    return self->digest ? digest_add(&digest, bytes, LK_DTYPE_BF16, LK_DTYPE_BF16, len / 2, 0)
                        : LK_OK;
}

static const weight_sink_ops_t ops = {
    .check = accept_list, .plan = accept_list, .direct = place_of, .tensor = take};

void plain_sink_init(plain_sink_t *self, size_t n_tensors, size_t tensor_bytes, bool digest)
{
    *self = (plain_sink_t){malloc(n_tensors * tensor_bytes), tensor_bytes, digest};
    CHECK(self->place != NULL);
    memset(self->place, 1, n_tensors * tensor_bytes);
}

void plain_sink_fini(plain_sink_t *self)
{
    free(self->place);
    self->place = NULL;
}

weight_sink_t plain_sink(plain_sink_t *self)
{
    return (weight_sink_t){&ops, self};
}
