#include "transfer/backends/ipc/ipc_memory.h"

#include "base/check.h"
#include "base/hash.h"

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

/* The slot of a handle's mapping, or the free one where it belongs. */
static uint32_t *find_slot(const ipc_memory_t *self, const uint8_t *handle)
{
    size_t at = (size_t)lk_hash64(handle, DEVICE_IPC_HANDLE_SIZE, 0);
    for (;; at++) {
        uint32_t *slot = &self->slots[at & (self->n_slots - 1)];
        if (*slot == 0 ||
            memcmp(self->mappings[*slot - 1].handle, handle, DEVICE_IPC_HANDLE_SIZE) == 0) {
            return slot;
        }
    }
}

/* With room for `more` new ones. */
static bool make_slots(ipc_memory_t *self, size_t more)
{
    self->n_slots = 16;
    while (self->n_slots < 2 * (self->n + more)) {
        self->n_slots *= 2;
    }
    self->slots = calloc(self->n_slots, sizeof *self->slots);
    for (size_t i = 0; i < self->n && self->slots != NULL; i++) {
        *find_slot(self, self->mappings[i].handle) = (uint32_t)i + 1;
    }
    return self->slots != NULL;
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

static lk_status_t open_export(ipc_memory_t *self, size_t i, const ipc_export_t *export,
                               lk_error_t *err)
{
    uint32_t *slot = find_slot(self, export->memory);
    if (*slot == 0) {
        LK_RETURN_IF_ERROR(open_mapping(self, export->memory, err));
        *slot = (uint32_t)self->n;
    }
    ipc_mapping_t *mapping = &self->mappings[*slot - 1];
    self->mapping_of[i] = *slot - 1;
    mapping->used = true;
    if (export->offset > mapping->bytes || export->bytes > mapping->bytes - export->offset) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "Invalid update_info for ipc: bytes %llu to %llu of a memory of %llu bytes",
            (unsigned long long)export->offset,
            (unsigned long long)(export->offset + export->bytes),
            (unsigned long long)mapping->bytes);
    }
    return LK_OK;
}

lk_status_t ipc_memory_open(ipc_memory_t *self, device_t *device, const ipc_handles_t *handles,
                            lk_error_t *err)
{
    CHECK(self->device == NULL || self->device == device || self->n == 0);
    self->device = device;
    mark_unused(self);
    self->mapping_of = calloc(handles->n + 1, sizeof *self->mapping_of);
    if (self->mapping_of == NULL || !make_slots(self, handles->n)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
    }
    lk_status_t status = LK_OK;
    for (size_t i = 0; i < handles->n && status == LK_OK; i++) {
        status = open_export(self, i, &handles->exports[i], err);
    }
    free(self->slots);
    self->slots = NULL;
    return status;
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
