#include "engine_core/exec/executor.h"

#include "base/check.h"

#include <string.h>

const executor_ops_t *executor_find(const char *name)
{
    static const executor_ops_t *const all[] = {&executor_cpu_ops, &executor_null_ops,
                                                &executor_cuda_store_ops, &executor_host_store_ops};
    for (size_t i = 0; i < LK_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}

weight_sink_t executor_sink(executor_t *self)
{
    return self->ops->sink != NULL ? self->ops->sink(self)
                                   : weight_table_sink(self->ops->weights(self));
}
