#include "transfer/backends/ipc/ipc_memory.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

static void close_unused(ipc_memory_t *self)
{
    for (size_t i = self->n; i > 0; i--) {
        ipc_mapping_t *mapping = &self->mappings[i - 1];
        if (!mapping->used) {
            self->device->ops->ipc_close(self->device, mapping->at);
            *mapping = self->mappings[--self->n];
        }
    }
}

static void mark_unused(ipc_memory_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        self->mappings[i].used = false;
    }
}

/* Its number, or n. Looks from `hint` on: updates come in the same order. */
static size_t find_mapping(const ipc_memory_t *self, const uint8_t *handle, size_t hint)
{
    for (size_t i = 0; i < self->n; i++) {
        size_t at = (hint + i) % self->n;
        if (memcmp(self->mappings[at].handle, handle, DEVICE_IPC_HANDLE_SIZE) == 0) {
            return at;
        }
    }
    return self->n;
}

/* Its number is n before. */
static lk_status_t open_mapping(ipc_memory_t *self, const uint8_t *handle, lk_error_t *err)
{
    if (self->n == self->room) {
        size_t room = LK_MAX(2 * self->room, (size_t)16);
        ipc_mapping_t *grown = realloc(self->mappings, room * sizeof *grown);
        if (grown == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
        }
        self->mappings = grown;
        self->room = room;
    }
    ipc_mapping_t mapping = {.at = NULL};
    void *at;
    LK_RETURN_IF_ERROR(self->device->ops->ipc_open(self->device, handle, &at, &mapping.bytes, err));
    mapping.at = at;
    memcpy(mapping.handle, handle, DEVICE_IPC_HANDLE_SIZE);
    self->mappings[self->n++] = mapping;
    return LK_OK;
}

lk_status_t ipc_memory_open(ipc_memory_t *self, device_t *device, const ipc_handles_t *handles,
                            lk_error_t *err)
{
    CHECK(self->device == NULL || self->device == device || self->n == 0);
    self->device = device;
    mark_unused(self);
    self->mapping_of = calloc(handles->n + 1, sizeof *self->mapping_of);
    if (self->mapping_of == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
    }
    size_t found = 0;
    for (size_t i = 0; i < handles->n; i++) {
        const ipc_export_t *export = &handles->exports[i];
        bool same = i > 0 && memcmp(export->memory, export[-1].memory, DEVICE_IPC_HANDLE_SIZE) == 0;
        found = same ? found : find_mapping(self, export->memory, found + 1);
        if (found == self->n) {
            LK_RETURN_IF_ERROR(open_mapping(self, export->memory, err));
        }
        ipc_mapping_t *mapping = &self->mappings[found];
        self->mapping_of[i] = found;
        mapping->used = true;
        if (export->offset > mapping->bytes || export->bytes > mapping->bytes - export->offset) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "Invalid update_info for ipc: bytes %llu to %llu of a memory of "
                                "%llu bytes",
                                (unsigned long long)export->offset,
                                (unsigned long long)(export->offset + export->bytes),
                                (unsigned long long)mapping->bytes);
        }
    }
    return LK_OK;
}

const char *ipc_memory_at(const ipc_memory_t *self, const ipc_handles_t *handles, size_t i)
{
    return self->mappings[self->mapping_of[i]].at + handles->exports[i].offset;
}

void ipc_memory_close(ipc_memory_t *self)
{
    free(self->mapping_of);
    self->mapping_of = NULL;
    close_unused(self);
}

void ipc_memory_fini(ipc_memory_t *self)
{
    mark_unused(self);
    ipc_memory_close(self);
    free(self->mappings);
    *self = (ipc_memory_t){0};
}
