#include "engine_core/exec/executor.h"

#include "base/check.h"

#include <string.h>

const executor_ops_t *executor_find(const char *name)
{
    static const executor_ops_t *const all[] = {&executor_cpu_ops, &executor_null_ops};
    for (size_t i = 0; i < LK_ARRAY_LEN(all); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}
