#include "base/check.h"
#include "transfer/safetensors.h"
#include "transfer/trainer/lst.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lst_checkpoint {
    safetensors_t *files;
    lst_tensor_t *tensors;
    size_t n;
};

STATIC_ASSERT(LST_MAX_DIMS == TENSOR_MAX_DIMS, "shapes of the library and of the runtime");

lst_status_t lst_checkpoint_open(const char *path, lst_checkpoint_t **out, char *err_text,
                                 size_t err_size)
{
    lk_error_t err = LK_ERROR_INIT;
    lst_checkpoint_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        lk_error_set(&err, LK_ERR_NO_MEMORY, "out of memory");
    } else if (safetensors_open(path, &self->files, &err) == LK_OK) {
        self->n = safetensors_count(self->files);
        self->tensors = calloc(self->n + 1, sizeof *self->tensors);
        if (self->tensors == NULL) {
            lk_error_set(&err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors", self->n);
        }
    }
    if (err.status < 0) {
        lst_checkpoint_close(&self);
        if (err_text != NULL && err_size > 0) {
            snprintf(err_text, err_size, "%s", err.text);
        }
        return (lst_status_t)err.status;
    }
    for (size_t i = 0; i < self->n; i++) {
        const safetensors_entry_t *entry = safetensors_at(self->files, i);
        lst_tensor_t *t = &self->tensors[i];
        t->name = entry->desc.name;
        t->dtype = dtype_torch_name(entry->desc.dtype);
        t->ndim = entry->desc.ndim;
        memcpy(t->shape, entry->desc.shape, sizeof t->shape);
        t->data = entry->data;
    }
    *out = self;
    return LST_OK;
}

const lst_tensor_t *lst_checkpoint_tensors(const lst_checkpoint_t *self, size_t *n)
{
    *n = self->n;
    return self->tensors;
}

void lst_checkpoint_close(lst_checkpoint_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        safetensors_close(&(*self_p)->files);
        free((*self_p)->tensors);
        free(*self_p);
        *self_p = NULL;
    }
}
