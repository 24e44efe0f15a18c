#include "engine_core/dp/enrol.h"
#include "base/check.h"

const char *enrol_state_name(enrol_state_t state)
{
    static const char *const names[] = {
#define X(name) #name,
        ENROL_STATE_TABLE(X)
#undef X
    };
    return (unsigned)state < ENROL_N_STATES ? names[state] : "?";
}

const char *enrol_event_name(enrol_event_t event)
{
    static const char *const names[] = {
#define X(name) #name,
        ENROL_EVENT_TABLE(X)
#undef X
    };
    return (unsigned)event < ENROL_N_EVENTS ? names[event] : "?";
}

#define TO(state, actions)                                                                         \
    {                                                                                              \
        ENROL_##state, (actions)                                                                   \
    }

/* clang-format off */
static const enrol_transition_t table[ENROL_N_STATES][ENROL_N_EVENTS] = {
    [ENROL_OUTSIDE] = {
        [ENROL_ON_LOADED]     = TO(CALLING,    ENROL_HELLO),
        [ENROL_ON_INIT_NEW]   = TO(OUTSIDE,    0),
        [ENROL_ON_INIT_SAME]  = TO(OUTSIDE,    0),
        [ENROL_ON_INIT_AGAIN] = TO(OUTSIDE,    0),
        [ENROL_ON_CONNECTED]  = TO(OUTSIDE,    ENROL_IMPOSSIBLE),
        [ENROL_ON_LOST]       = TO(OUTSIDE,    0),
        [ENROL_ON_REFUSED]    = TO(ENDED,      ENROL_END),
        [ENROL_ON_ROLLCALL]   = TO(OUTSIDE,    0),
        [ENROL_ON_TICK]       = TO(OUTSIDE,    0),
    },
    [ENROL_CALLING] = {
        [ENROL_ON_LOADED]     = TO(CALLING,    ENROL_IMPOSSIBLE),
        [ENROL_ON_INIT_NEW]   = TO(CONNECTING, ENROL_CONNECT),
        [ENROL_ON_INIT_SAME]  = TO(CALLING,    0),
        [ENROL_ON_INIT_AGAIN] = TO(CALLING,    0),
        [ENROL_ON_CONNECTED]  = TO(CALLING,    ENROL_IMPOSSIBLE),
        [ENROL_ON_LOST]       = TO(CALLING,    0),
        [ENROL_ON_REFUSED]    = TO(ENDED,      ENROL_END),
        [ENROL_ON_ROLLCALL]   = TO(CALLING,    ENROL_HELLO),
        [ENROL_ON_TICK]       = TO(CALLING,    ENROL_HELLO),
    },
    [ENROL_CONNECTING] = {
        [ENROL_ON_LOADED]     = TO(CONNECTING, ENROL_IMPOSSIBLE),
        [ENROL_ON_INIT_NEW]   = TO(CALLING,    ENROL_LEAVE | ENROL_HELLO),
        [ENROL_ON_INIT_SAME]  = TO(CONNECTING, ENROL_RELINK),
        [ENROL_ON_INIT_AGAIN] = TO(CONNECTING, 0),
        [ENROL_ON_CONNECTED]  = TO(MEMBER,     ENROL_FORM | ENROL_READY | ENROL_HERE),
        [ENROL_ON_LOST]       = TO(CALLING,    ENROL_LEAVE | ENROL_HELLO),
        [ENROL_ON_REFUSED]    = TO(ENDED,      ENROL_END),
        [ENROL_ON_ROLLCALL]   = TO(CALLING,    ENROL_LEAVE | ENROL_HELLO),
        [ENROL_ON_TICK]       = TO(CONNECTING, ENROL_HELLO),
    },
    [ENROL_MEMBER] = {
        [ENROL_ON_LOADED]     = TO(MEMBER,     ENROL_IMPOSSIBLE),
        [ENROL_ON_INIT_NEW]   = TO(CALLING,    ENROL_LEAVE | ENROL_HELLO),
        [ENROL_ON_INIT_SAME]  = TO(MEMBER,     ENROL_RELINK),
        [ENROL_ON_INIT_AGAIN] = TO(MEMBER,     ENROL_READY),
        [ENROL_ON_CONNECTED]  = TO(MEMBER,     ENROL_IMPOSSIBLE),
        [ENROL_ON_LOST]       = TO(CALLING,    ENROL_LEAVE | ENROL_HELLO),
        [ENROL_ON_REFUSED]    = TO(ENDED,      ENROL_END),
        [ENROL_ON_ROLLCALL]   = TO(MEMBER,     ENROL_HELLO | ENROL_READY),
        [ENROL_ON_TICK]       = TO(MEMBER,     ENROL_HELLO | ENROL_HERE),
    },
    [ENROL_ENDED] = {
        [ENROL_ON_LOADED]     = TO(ENDED,      0),
        [ENROL_ON_INIT_NEW]   = TO(ENDED,      0),
        [ENROL_ON_INIT_SAME]  = TO(ENDED,      0),
        [ENROL_ON_INIT_AGAIN] = TO(ENDED,      0),
        [ENROL_ON_CONNECTED]  = TO(ENDED,      0),
        [ENROL_ON_LOST]       = TO(ENDED,      0),
        [ENROL_ON_REFUSED]    = TO(ENDED,      0),
        [ENROL_ON_ROLLCALL]   = TO(ENDED,      0),
        [ENROL_ON_TICK]       = TO(ENDED,      0),
    },
};
/* clang-format on */

enrol_transition_t enrol_transition(enrol_state_t state, enrol_event_t event)
{
    CHECK((unsigned)state < ENROL_N_STATES && (unsigned)event < ENROL_N_EVENTS);
    return table[state][event];
}

unsigned enrol_on(enrol_t *self, enrol_event_t event, uint64_t now_ns)
{
    enrol_transition_t t = enrol_transition(self->state, event);
    CHECKF(!(t.actions & ENROL_IMPOSSIBLE), "%s in %s", enrol_event_name(event),
           enrol_state_name(self->state));
    if (t.actions & ENROL_LEAVE) {
        self->left = self->epoch;
    }
    if (t.actions & ENROL_HELLO) {
        self->said_ns = now_ns;
    }
    self->state = t.next;
    return t.actions;
}

unsigned enrol_on_init(enrol_t *self, uint64_t epoch, uint64_t revision, bool mine, uint64_t now_ns)
{
    bool inside = self->state == ENROL_CONNECTING || self->state == ENROL_MEMBER;
    if (epoch < self->epoch || (!inside && (epoch <= self->left || !mine))) {
        return 0; /* late */
    }
    if (inside && epoch == self->epoch) {
        bool again = revision == self->revision;
        self->revision = revision;
        return enrol_on(self, again ? ENROL_ON_INIT_AGAIN : ENROL_ON_INIT_SAME, now_ns);
    }
    if (!inside) {
        self->epoch = epoch;
        self->revision = revision;
    }
    return enrol_on(self, ENROL_ON_INIT_NEW, now_ns);
}

unsigned enrol_on_dissolve(enrol_t *self, uint64_t epoch, uint64_t now_ns)
{
    return epoch >= self->epoch ? enrol_on(self, ENROL_ON_LOST, now_ns) : 0;
}

unsigned enrol_on_time(enrol_t *self, uint64_t now_ns)
{
    return now_ns - self->said_ns >= ENROL_REPEAT_NS ? enrol_on(self, ENROL_ON_TICK, now_ns) : 0;
}

uint64_t enrol_member_of(const enrol_t *self)
{
    return self->state == ENROL_MEMBER ? self->epoch : 0;
}
