#include "engine_core/memory_sum.h"
#include "base/check.h"

#include <stdio.h>

#define SIZE_TEXT 32

/* The unit in which it has three digits or fewer before the point. */
static const char *size_text(uint64_t bytes, char out[SIZE_TEXT])
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes / 1024;
    size_t unit = 0;
    for (; value >= 1000 && unit + 1 < LK_ARRAY_LEN(units); unit++) {
        value /= 1024;
    }
    snprintf(out, SIZE_TEXT, "%.2f %s", value, units[unit]);
    return out;
}

static uint64_t add(uint64_t a, uint64_t b)
{
    return b > UINT64_MAX - a ? UINT64_MAX : a + b;
}

uint64_t memory_sum_total(const memory_sum_t *self)
{
    return add(add(self->weights, self->shadow), add(self->staging, self->kv));
}

void memory_sum_text(const memory_sum_t *self, char out[MEMORY_SUM_TEXT])
{
    char weights[SIZE_TEXT], shadow[SIZE_TEXT], staging[SIZE_TEXT], kv[SIZE_TEXT], total[SIZE_TEXT];
    bool two = self->shadow > 0;
    snprintf(out, MEMORY_SUM_TEXT, "weights %s%s%s + staging up to %s + KV %s = %s",
             size_text(self->weights, weights), two ? " + second set " : "",
             two ? size_text(self->shadow, shadow) : "", size_text(self->staging, staging),
             size_text(self->kv, kv), size_text(memory_sum_total(self), total));
}

lk_status_t memory_sum_check(const memory_sum_t *self, uint64_t available, uint32_t n_ranks,
                             lk_error_t *err)
{
    uint64_t share = available / n_ranks;
    if (available == UINT64_MAX || memory_sum_total(self) <= share) {
        return LK_OK;
    }
    char sum[MEMORY_SUM_TEXT], here[SIZE_TEXT], each[64] = "";
    memory_sum_text(self, sum);
    if (n_ranks > 1) {
        snprintf(each, sizeof each, " for each of %u ranks", n_ranks);
    }
    return lk_error_set(err, LK_ERR_INVALID, "%s%s; %s are available%s", sum,
                        n_ranks > 1 ? " per rank" : "", size_text(share, here), each);
}
