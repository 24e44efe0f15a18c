#include "engine_core/dp/command_stream.h"
#include "base/check.h"
#include "transfer/update_session.h"

#include <stdlib.h>
#include <string.h>

static command_t *list_at(const command_list_t *list, size_t i)
{
    return &list->items[(list->head + i) % list->cap];
}

static void list_drop_first(command_list_t *list)
{
    free(list_at(list, 0)->spec);
    list->head = (list->head + 1) % list->cap;
    list->first++;
    list->n--;
}

static void list_fini(command_list_t *list)
{
    while (list->n > 0) {
        list_drop_first(list);
    }
    free(list->items);
    memset(list, 0, sizeof *list);
}

static bool list_grow(command_list_t *list)
{
    if (list->n < list->cap) {
        return true;
    }
    size_t cap = list->cap == 0 ? 8 : 2 * list->cap;
    command_t *items = calloc(cap, sizeof *items);
    if (items == NULL) {
        return false;
    }
    for (size_t i = 0; i < list->n; i++) {
        items[i] = *list_at(list, i);
    }
    free(list->items);
    list->items = items;
    list->cap = cap;
    list->head = 0;
    return true;
}

static bool list_push(command_list_t *list, const msg_cmd_t *cmd)
{
    char *spec = malloc(cmd->spec.len + 1);
    if (spec == NULL || !list_grow(list)) {
        free(spec);
        return false;
    }
    if (cmd->spec.len > 0) {
        memcpy(spec, cmd->spec.ptr, cmd->spec.len);
    }
    spec[cmd->spec.len] = '\0';
    if (list->n == 0) {
        list->first = cmd->number;
    }
    *list_at(list, list->n++) =
        (command_t){.number = cmd->number,
                    .kind = cmd->kind,
                    .mode = cmd->mode,
                    .target = cmd->target,
                    .verb = cmd->verb,
                    .deadline_ns = cmd->deadline_ns != 0 ? cmd->deadline_ns : UINT64_MAX,
                    .clear_cache = cmd->clear_cache,
                    .spec = spec,
                    .spec_len = cmd->spec.len};
    return true;
}

void stream_init(command_stream_t *self, bool shadow)
{
    memset(self, 0, sizeof *self);
    self->shadow = shadow;
}

void stream_fini(command_stream_t *self)
{
    list_fini(&self->pending);
    list_fini(&self->old);
}

void stream_reset(command_stream_t *self)
{
    uint64_t generation = self->generation;
    stream_fini(self);
    *self = (command_stream_t){.generation = generation, .voted_generation = generation};
}

bool stream_follow(command_stream_t *self, uint64_t generation)
{
    if (generation <= self->generation) {
        return false;
    }
    if (self->frozen && self->voted_generation == self->generation) {
        list_fini(&self->old);
        self->old = self->pending;
        memset(&self->pending, 0, sizeof self->pending);
    } else {
        list_fini(&self->pending);
    }
    self->generation = generation;
    self->seen = 0;
    self->update_outstanding = false;
    self->verdict = LK_ERROR_INIT;
    return true;
}

stream_receipt_t stream_receive(command_stream_t *self, const msg_cmd_t *cmd)
{
    if (cmd->generation < self->generation || cmd->generation == 0) {
        return STREAM_OLD_LIFE;
    }
    stream_follow(self, cmd->generation);
    if (cmd->number <= self->seen) {
        return STREAM_REPEATED;
    }
    if (cmd->number > self->seen + 1) {
        return STREAM_GAP;
    }
    bool excluded =
        self->update_outstanding &&
        (cmd->kind == CMD_UPDATE || !update_verb_beside(self->update_verb, self->shadow));
    if (excluded || self->pending.n >= STREAM_MAX_PENDING || !list_push(&self->pending, cmd)) {
        return STREAM_BUSY;
    }
    self->seen = cmd->number;
    if (cmd->kind == CMD_UPDATE) {
        self->update_outstanding = true;
        self->update_number = cmd->number;
        self->update_verb = cmd->verb;
        self->verdict = LK_ERROR_INIT;
    }
    return STREAM_NEW;
}

bool stream_has_news(const command_stream_t *self)
{
    return self->generation != self->voted_generation || self->seen > self->voted_seen;
}

void stream_freeze(command_stream_t *self)
{
    CHECK(!self->frozen);
    self->frozen = true;
    self->voted_generation = self->generation;
    self->voted_seen = self->seen;
}

command_t *stream_voted_command(const command_stream_t *self, uint64_t number)
{
    const command_list_t *list =
        self->generation == self->voted_generation ? &self->pending : &self->old;
    CHECKF(list->n > 0 && number >= list->first && number - list->first < list->n &&
               number <= self->voted_seen,
           "command %llu was not seen by the vote", (unsigned long long)number);
    return list_at(list, number - list->first);
}

bool stream_has_cancel(const command_stream_t *self, uint64_t number)
{
    const command_list_t *list =
        self->generation == self->voted_generation ? &self->pending : &self->old;
    for (size_t i = 0; i < list->n; i++) {
        const command_t *command = list_at(list, i);
        if (command->kind == CMD_CANCEL && command->target == number) {
            return true;
        }
    }
    return false;
}

uint64_t stream_cancelled_pause(const command_stream_t *self, uint64_t now_ns)
{
    uint64_t lowest = UINT64_MAX;
    for (size_t i = 0; i < self->pending.n; i++) {
        const command_t *command = list_at(&self->pending, i);
        if (command->kind == CMD_PAUSE && now_ns >= command->deadline_ns) {
            lowest = LK_MIN(lowest, command->number);
        }
        uint64_t target = command->target;
        if (command->kind != CMD_CANCEL || target < self->pending.first || target >= lowest ||
            target - self->pending.first >= self->pending.n) {
            continue;
        }
        if (list_at(&self->pending, target - self->pending.first)->kind == CMD_PAUSE) {
            lowest = target;
        }
    }
    return lowest;
}

void stream_applied(command_stream_t *self, uint64_t number)
{
    command_list_t *list = self->generation == self->voted_generation ? &self->pending : &self->old;
    while (list->n > 0 && list->first <= number) {
        list_drop_first(list);
    }
}

void stream_settle(command_stream_t *self)
{
    self->frozen = false;
    list_fini(&self->old);
}

bool stream_has_pause(const command_stream_t *self)
{
    for (size_t i = 0; i < self->pending.n; i++) {
        if (list_at(&self->pending, i)->kind == CMD_PAUSE) {
            return true;
        }
    }
    return false;
}

void stream_update_answered(command_stream_t *self, uint64_t generation, uint64_t number)
{
    if (self->update_outstanding && self->generation == generation &&
        self->update_number == number) {
        self->update_outstanding = false;
        self->verdict = LK_ERROR_INIT;
    }
}
