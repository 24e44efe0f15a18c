/*
 * constants.c: prints constants.pml, what the models take from the code's headers and tables:
 * command kinds, modes, verbs, gates, phases of an UPDATE, votes, the layout of the vector and the
 * tables of the pause state, of the order of weight calls and of enrolment. The test
 * `model_constants` compares it with the file in the tree, so that no model is checked with
 * constants that the code has not.
 */
#include "coordinator/membership.h"
#include "engine_core/dp/enrol.h"
#include "engine_core/dp/group_internal.h"

#include <stdio.h>
#include <string.h>

static void define(const char *name, long long value)
{
    printf("#define %-24s %lld\n", name, value);
}

static void print_enums(void)
{
    define("CMD_PAUSE", CMD_PAUSE);
    define("CMD_RESUME", CMD_RESUME);
    define("CMD_CANCEL", CMD_CANCEL);
    define("CMD_UPDATE", CMD_UPDATE);
    define("PAUSE_ABORT", PAUSE_ABORT);
    define("PAUSE_KEEP", PAUSE_KEEP);
    define("PAUSE_WAIT", PAUSE_WAIT);
    define("GATE_SESSION", GATE_SESSION);
    define("GATE_DIRTY", GATE_DIRTY);
    define("GATE_ASLEEP", GATE_ASLEEP);
    define("UPDATE_NONE", UPDATE_NONE);
    define("UPDATE_CARRYING", UPDATE_CARRYING);
    define("UPDATE_BESIDE", UPDATE_BESIDE);
    define("UPDATE_OWED", UPDATE_OWED);
    define("VOTE_OK", VOTE_OK);
    define("VOTE_PENDING", VOTE_PENDING);
    define("VOTE_FAILED", (long long)VOTE_OK + LK_ERR_IO);
#define X(name, value, text) define("VERB_" #name, UPDATE_VERB_##name);
    UPDATE_VERB_TABLE(X)
#undef X
#define X(name) define("ACT_" #name, GROUP_ACT_##name);
    GROUP_ACT_TABLE(X)
#undef X
}

/* Index of an entry, as multiple of the number of front ends and an offset. */
static void define_index(const char *name, size_t with_one, size_t with_two)
{
    printf("#define %s(a) (%zu * (a) + %zu)\n", name, with_two - with_one, 2 * with_one - with_two);
}

static void print_layout(void)
{
    group_t one = {.config.n_frontends = 1}, two = {.config.n_frontends = 2};
    printf("\n/* where the entries begin, of a front ends */\n");
    define("VEC_IDLE", VEC_IDLE);
    define("VEC_QUIET", VEC_QUIET);
    define("VEC_TAG", VEC_TAG);
    define("VEC_NTAG", VEC_NTAG);
    define_index("VEC_GEN", VEC_GEN(&one, 0u), VEC_GEN(&two, 0u));
    define_index("VEC_NGEN", VEC_NGEN(&one, 0u), VEC_NGEN(&two, 0u));
    define_index("VEC_SEEN", VEC_SEEN(&one, 0u), VEC_SEEN(&two, 0u));
    define_index("VEC_OK", VEC_OK(&one, 0u), VEC_OK(&two, 0u));
    define_index("VEC_EXPIRED", VEC_EXPIRED(&one), VEC_EXPIRED(&two));
    define_index("VEC_CLEAN", VEC_CLEAN(&one), VEC_CLEAN(&two));
    define_index("VEC_CONTENT", VEC_CONTENT(&one), VEC_CONTENT(&two));
    define_index("VEC_NCONTENT", VEC_NCONTENT(&one), VEC_NCONTENT(&two));
    define_index("VEC_CANCEL", VEC_CANCEL(&one, 0u), VEC_CANCEL(&two, 0u));
    define_index("VEC_LEN", VEC_LEN(&one), VEC_LEN(&two));
}

/* The pause table, one row per state: next state and effects of each event, packed. */
static void print_pause_table(void)
{
    printf("\n/* pause: per state, 2 bits of next state and 4 bits of effects per event */\n");
#define X(name) define("PS_" #name, PAUSE_STATE_##name);
    PAUSE_STATE_TABLE(X)
#undef X
#define X(name) define("EV_" #name, PAUSE_EVENT_##name);
    PAUSE_EVENT_TABLE(X)
#undef X
    define("PAUSE_FINISH_ALL", PAUSE_FINISH_ALL);
    define("PAUSE_LIFT", PAUSE_LIFT);
    define("PAUSE_NEW_EPOCH", PAUSE_NEW_EPOCH);
    define("PAUSE_IMPOSSIBLE", PAUSE_IMPOSSIBLE);
    for (int s = 0; s < PAUSE_STATE_COUNT; s++) {
        unsigned next = 0, effects = 0;
        for (int e = 0; e < PAUSE_EVENT_COUNT; e++) {
            pause_transition_t t = pause_transition((pause_state_t)s, (pause_event_t)e);
            next |= (unsigned)t.next << 2 * e;
            effects |= t.effects << 4 * e;
        }
        char name[64];
        snprintf(name, sizeof name, "PAUSE_NEXT_%d", s);
        define(name, next);
        snprintf(name, sizeof name, "PAUSE_EFFECTS_%d", s);
        define(name, effects);
    }
}

/* The order of weight calls: whether each verb is admitted, in place and with shadow swap alike. */
static void print_admit_table(void)
{
    printf("\n/* admitted verbs: bit 4 * dirty + 2 * session + configured; awake */\n");
    for (int verb = UPDATE_VERB_INIT; verb <= UPDATE_VERB_SET_VERSION; verb++) {
        unsigned admitted = 0;
        for (unsigned bits = 0; bits < 8; bits++) {
            weight_state_t w = {.gates = bits & 4 ? GATE_DIRTY : 0,
                                .session = bits >> 1 & 1,
                                .configured = bits & 1};
            lk_error_t err;
            admitted |= (unsigned)(weight_state_admit(&w, (update_verb_t)verb, &err) == LK_OK)
                        << bits;
        }
        char name[64];
        snprintf(name, sizeof name, "ADMIT_%d", verb);
        define(name, admitted);
    }
}

/* The table of enrol.h, one row per event: 3 bits of next state per state, and 9 bits of actions
 * for each of CALLING, CONNECTING and MEMBER. */
static void print_enrol_table(void)
{
    printf("\n/* enrolment: per event, 3 bits of next state per state, and 9 bits of actions from\n"
           " * CALLING on */\n");
#define X(name) define("E_" #name, ENROL_##name);
    ENROL_STATE_TABLE(X)
#undef X
    define("E_LEAVE", ENROL_LEAVE);
    define("E_HELLO", ENROL_HELLO);
    define("E_CONNECT", ENROL_CONNECT);
    define("E_RELINK", ENROL_RELINK);
    define("E_FORM", ENROL_FORM);
    define("E_SAY_READY", ENROL_READY);
    define("E_HERE", ENROL_HERE);
    define("E_END", ENROL_END);
    define("E_IMPOSSIBLE", ENROL_IMPOSSIBLE);
    static const char *const events[] = {
#define X(name) #name,
        ENROL_EVENT_TABLE(X)
#undef X
    };
    for (int e = 0; e < ENROL_N_EVENTS; e++) {
        unsigned next = 0, does = 0;
        for (int s = 0; s < ENROL_N_STATES; s++) {
            enrol_transition_t t = enrol_transition((enrol_state_t)s, (enrol_event_t)e);
            next |= (unsigned)t.next << 3 * s;
            does |=
                s >= ENROL_CALLING && s <= ENROL_MEMBER ? t.actions << 9 * (s - ENROL_CALLING) : 0;
        }
        char name[64];
        snprintf(name, sizeof name, "E_NEXT_%s", events[e]);
        define(name, next);
        snprintf(name, sizeof name, "E_DOES_%s", events[e]);
        define(name, does);
    }
}

/* The states of the coordinator and of its members. */
static void print_membership(void)
{
    printf("\n/* the coordinator, and its record of a rank */\n");
#define X(name) define("M_" #name, MEMBERSHIP_##name);
    MEMBERSHIP_STATE_TABLE(X)
#undef X
    define("REC_NEW", MEMBER_NEW);
    define("REC_HELLO", MEMBER_HELLO);
    define("REC_INITED", MEMBER_INITED);
    define("REC_READY", MEMBER_READY);
}

int main(void)
{
    printf("/* constants.pml: printed by constants.c from the code's headers. Not written by hand. "
           "*/\n");
    print_enums();
    print_layout();
    print_pause_table();
    print_admit_table();
    print_enrol_table();
    print_membership();
    return 0;
}
