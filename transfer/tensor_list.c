#include "transfer/tensor_list.h"

#include <stdlib.h>
#include <string.h>

lk_status_t tensor_list_copy(const tensor_desc_t *descs, size_t n, tensor_list_t *out,
                             lk_error_t *err)
{
    size_t names = 0;
    for (size_t i = 0; i < n; i++) {
        names += strlen(descs[i].name) + 1;
    }
    tensor_desc_t *copy = calloc(1, (n + 1) * sizeof *copy + names);
    if (copy == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", n);
    }
    char *name = (char *)(copy + n + 1);
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(descs[i].name) + 1;
        copy[i] = descs[i];
        copy[i].name = memcpy(name, descs[i].name, len);
        name += len;
    }
    *out = (tensor_list_t){copy, n};
    return LK_OK;
}

bool tensor_list_equal(const tensor_list_t *self, const tensor_desc_t *descs, size_t n)
{
    if (self->descs == NULL || self->n != n) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        const tensor_desc_t *a = &self->descs[i], *b = &descs[i];
        if (a->dtype != b->dtype || a->ndim != b->ndim ||
            memcmp(a->shape, b->shape, a->ndim * sizeof a->shape[0]) != 0 ||
            strcmp(a->name, b->name) != 0) {
            return false;
        }
    }
    return true;
}

void tensor_list_fini(tensor_list_t *self)
{
    free(self->descs);
    *self = (tensor_list_t){0};
}
