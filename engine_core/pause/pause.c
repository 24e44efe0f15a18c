#include "engine_core/pause/pause.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

const char *pause_state_name(pause_state_t state)
{
    static const char *const names[] = {
#define X(name) #name,
        PAUSE_STATE_TABLE(X)
#undef X
    };
    return (unsigned)state < PAUSE_STATE_COUNT ? names[state] : "?";
}

const char *pause_event_name(pause_event_t event)
{
    static const char *const names[] = {
#define X(name) #name,
        PAUSE_EVENT_TABLE(X)
#undef X
    };
    return (unsigned)event < PAUSE_EVENT_COUNT ? names[event] : "?";
}

#define TO(state, effects)                                                                         \
    {                                                                                              \
        PAUSE_STATE_##state, (effects)                                                             \
    }
#define IMPOSSIBLE(state)                                                                          \
    {                                                                                              \
        PAUSE_STATE_##state, PAUSE_IMPOSSIBLE                                                      \
    }

/* clang-format off */
static const pause_transition_t table[PAUSE_STATE_COUNT][PAUSE_EVENT_COUNT] = {
    [PAUSE_STATE_RUNNING] = {
        [PAUSE_EVENT_ABORT]        = TO(STOPPED,  PAUSE_NEW_EPOCH | PAUSE_FINISH_ALL),
        [PAUSE_EVENT_KEEP]         = TO(STOPPED,  PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_WAIT]         = TO(DRAINING, PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_RESUME]       = TO(RUNNING,  PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_CANCEL_SOLE]  = IMPOSSIBLE(RUNNING),
        [PAUSE_EVENT_CANCEL_OTHER] = TO(RUNNING,  0),
        [PAUSE_EVENT_QUIET]        = TO(RUNNING,  0),
    },
    [PAUSE_STATE_DRAINING] = {
        [PAUSE_EVENT_ABORT]        = TO(STOPPED,  PAUSE_NEW_EPOCH | PAUSE_FINISH_ALL),
        [PAUSE_EVENT_KEEP]         = TO(STOPPED,  PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_WAIT]         = TO(DRAINING, PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_RESUME]       = TO(RUNNING,  PAUSE_NEW_EPOCH | PAUSE_LIFT),
        [PAUSE_EVENT_CANCEL_SOLE]  = TO(RUNNING,  PAUSE_NEW_EPOCH | PAUSE_LIFT),
        [PAUSE_EVENT_CANCEL_OTHER] = TO(DRAINING, 0),
        [PAUSE_EVENT_QUIET]        = TO(STOPPED,  0),
    },
    [PAUSE_STATE_STOPPED] = {
        [PAUSE_EVENT_ABORT]        = TO(STOPPED,  PAUSE_NEW_EPOCH | PAUSE_FINISH_ALL),
        [PAUSE_EVENT_KEEP]         = TO(STOPPED,  PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_WAIT]         = TO(STOPPED,  PAUSE_NEW_EPOCH),
        [PAUSE_EVENT_RESUME]       = TO(RUNNING,  PAUSE_NEW_EPOCH | PAUSE_LIFT),
        [PAUSE_EVENT_CANCEL_SOLE]  = TO(RUNNING,  PAUSE_NEW_EPOCH | PAUSE_LIFT),
        [PAUSE_EVENT_CANCEL_OTHER] = TO(STOPPED,  0),
        [PAUSE_EVENT_QUIET]        = TO(STOPPED,  0),
    },
};
/* clang-format on */

pause_transition_t pause_transition(pause_state_t state, pause_event_t event)
{
    CHECK((unsigned)state < PAUSE_STATE_COUNT && (unsigned)event < PAUSE_EVENT_COUNT);
    return table[state][event];
}

static unsigned take(pause_t *self, pause_event_t event)
{
    pause_transition_t t = pause_transition(self->state, event);
    CHECKF(!(t.effects & PAUSE_IMPOSSIBLE), "%s in %s", pause_event_name(event),
           pause_state_name(self->state));
    self->state = t.next;
    if (t.effects & PAUSE_NEW_EPOCH) {
        self->epoch++;
    }
    if (self->state == PAUSE_STATE_RUNNING) {
        self->has_sole = self->clear_due = self->cleared = false;
    }
    return t.effects;
}

void pause_init(pause_t *self)
{
    memset(self, 0, sizeof *self);
}

void pause_fini(pause_t *self)
{
    free(self->calls);
    memset(self, 0, sizeof *self);
}

static void push_call(pause_t *self, pause_call_t call)
{
    if (self->n_calls == self->cap_calls) {
        size_t cap = self->cap_calls == 0 ? 16 : 2 * self->cap_calls;
        pause_call_t *calls = realloc(self->calls, cap * sizeof *calls);
        CHECKF(calls != NULL, "out of memory for %zu pause calls", cap);
        self->calls = calls;
        self->cap_calls = cap;
    }
    self->calls[self->n_calls++] = call;
}

unsigned pause_apply(pause_t *self, pause_call_t call, pause_mode_t mode, bool clear_cache)
{
    bool first = !pause_is_paused(self);
    unsigned effects = take(self, mode == PAUSE_ABORT  ? PAUSE_EVENT_ABORT
                                  : mode == PAUSE_KEEP ? PAUSE_EVENT_KEEP
                                                       : PAUSE_EVENT_WAIT);
    self->has_sole = first;
    if (first) {
        self->sole = call;
    }
    self->clear_due |= clear_cache;
    self->cleared |= clear_cache;
    push_call(self, call);
    return effects;
}

unsigned pause_resume(pause_t *self)
{
    return take(self, PAUSE_EVENT_RESUME);
}

static bool same_call(pause_call_t a, pause_call_t b)
{
    return a.frontend == b.frontend && a.generation == b.generation && a.number == b.number;
}

unsigned pause_cancel(pause_t *self, pause_call_t target)
{
    bool sole = pause_is_paused(self) && self->has_sole && same_call(self->sole, target);
    return take(self, sole ? PAUSE_EVENT_CANCEL_SOLE : PAUSE_EVENT_CANCEL_OTHER);
}

void pause_quiet(pause_t *self)
{
    take(self, PAUSE_EVENT_QUIET);
}

void pause_leave(pause_t *self)
{
    pause_clear_calls(self);
    if (self->state == PAUSE_STATE_DRAINING) {
        (void)take(self, PAUSE_EVENT_RESUME);
    }
    self->has_sole = false;
}

void pause_form(pause_t *self, bool paused, bool cleared)
{
    pause_clear_calls(self);
    self->state = paused ? PAUSE_STATE_STOPPED : PAUSE_STATE_RUNNING;
    self->epoch = 0;
    self->has_sole = false;
    self->cleared = paused && cleared;
}

void pause_clear_calls(pause_t *self)
{
    self->n_calls = 0;
    self->clear_due = false;
}

uint64_t pause_hash(const pause_t *self, uint64_t seed)
{
    uint64_t words[] = {self->state,
                        self->epoch,
                        self->has_sole,
                        self->has_sole ? self->sole.frontend : 0,
                        self->has_sole ? self->sole.generation : 0,
                        self->has_sole ? self->sole.number : 0,
                        self->clear_due,
                        self->cleared,
                        self->n_calls};
    uint64_t hash = lk_hash64(words, sizeof words, seed);
    for (size_t i = 0; i < self->n_calls; i++) {
        uint64_t call[] = {self->calls[i].frontend, self->calls[i].generation,
                           self->calls[i].number};
        hash = lk_hash64(call, sizeof call, hash);
    }
    return hash;
}
