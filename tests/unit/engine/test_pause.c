/* The pause table, exhaustively: every state with every event, against a plain reading of the
 * rules, and every sequence of a few commands against a second model. */
#include "engine_core/pause/pause.h"
#include "tests/lib/test_main.h"

#include <string.h>

/* protocol.md section 6, written down a second time with the two booleans of the text. */
typedef struct {
    bool paused, draining;
} booleans_t;

static booleans_t to_booleans(pause_state_t state)
{
    return (booleans_t){state != PAUSE_STATE_RUNNING, state == PAUSE_STATE_DRAINING};
}

static booleans_t after(booleans_t b, pause_event_t event)
{
    switch (event) {
    case PAUSE_EVENT_ABORT:
    case PAUSE_EVENT_KEEP:
        return (booleans_t){true, false};
    case PAUSE_EVENT_WAIT:
        return b.paused ? b : (booleans_t){true, true};
    case PAUSE_EVENT_RESUME:
    case PAUSE_EVENT_CANCEL_SOLE:
        return (booleans_t){false, false};
    case PAUSE_EVENT_QUIET:
        return (booleans_t){b.paused, false};
    default:
        return b;
    }
}

START_TEST(test_table)
{
    for (int s = 0; s < PAUSE_STATE_COUNT; s++) {
        for (int e = 0; e < PAUSE_EVENT_COUNT; e++) {
            pause_transition_t t = pause_transition((pause_state_t)s, (pause_event_t)e);
            bool paused = s != PAUSE_STATE_RUNNING;
            if (e == PAUSE_EVENT_CANCEL_SOLE && !paused) {
                ck_assert_uint_eq(t.effects, PAUSE_IMPOSSIBLE);
                continue;
            }
            booleans_t got = to_booleans(t.next);
            booleans_t want = after(to_booleans((pause_state_t)s), (pause_event_t)e);
            ck_assert_msg(got.paused == want.paused && got.draining == want.draining, "%s in %s",
                          pause_event_name((pause_event_t)e), pause_state_name((pause_state_t)s));
            bool lifts = e == PAUSE_EVENT_RESUME || e == PAUSE_EVENT_CANCEL_SOLE;
            bool counts = e != PAUSE_EVENT_CANCEL_OTHER && e != PAUSE_EVENT_QUIET;
            unsigned effects = (e == PAUSE_EVENT_ABORT ? PAUSE_FINISH_ALL : 0u) |
                               (lifts && paused ? PAUSE_LIFT : 0u) |
                               (counts ? PAUSE_NEW_EPOCH : 0u);
            ck_assert_uint_eq(t.effects, effects);
        }
    }
}
END_TEST

/* All 7^5 sequences of five operations on the object. */
typedef struct {
    bool paused, draining, sole_valid, cleared;
    uint64_t sole, epoch, calls[8];
    size_t n_calls;
} model_t;

static void model_unpause(model_t *m)
{
    m->paused = m->draining = m->sole_valid = m->cleared = false;
    m->n_calls = 0;
}

static void apply_op(pause_t *p, model_t *m, int op, uint64_t number)
{
    pause_call_t call = {.frontend = 1, .generation = 3, .number = number};
    if (op < 4) { /* abort, keep, wait, keep with clear_cache */
        pause_mode_t mode = op == 0 ? PAUSE_ABORT : op == 2 ? PAUSE_WAIT : PAUSE_KEEP;
        unsigned effects = pause_apply(p, call, mode, op == 3);
        ck_assert_uint_eq((effects & PAUSE_FINISH_ALL) != 0, op == 0);
        m->sole_valid = !m->paused;
        m->sole = number;
        m->draining = (m->draining || !m->paused) && op == 2;
        m->paused = true;
        m->cleared |= op == 3;
        m->epoch++;
        m->calls[m->n_calls++] = number;
    } else if (op == 4) {
        unsigned effects = pause_resume(p);
        ck_assert_uint_eq((effects & PAUSE_LIFT) != 0, m->paused);
        m->epoch++;
        model_unpause(m);
        pause_clear_calls(p);
    } else if (op == 5) { /* cancel the previous number */
        bool effective = m->paused && m->sole_valid && m->sole == number - 1;
        call.number = number - 1;
        unsigned effects = pause_cancel(p, call);
        ck_assert_uint_eq((effects & PAUSE_LIFT) != 0, effective);
        if (effective) {
            m->epoch++;
            model_unpause(m);
            pause_clear_calls(p);
        }
    } else {
        pause_quiet(p);
        m->draining = false;
    }
}

START_TEST(test_sequences)
{
    for (int code = 0; code < 7 * 7 * 7 * 7 * 7; code++) {
        pause_t p;
        model_t m;
        pause_init(&p);
        memset(&m, 0, sizeof m);
        for (int i = 0, rest = code; i < 5; i++, rest /= 7) {
            apply_op(&p, &m, rest % 7, (uint64_t)i + 1);
            ck_assert_int_eq(pause_is_paused(&p), m.paused);
            ck_assert_int_eq(pause_is_draining(&p), m.draining);
            ck_assert_uint_eq(p.epoch, m.epoch);
            ck_assert_int_eq(p.cleared, m.cleared);
            ck_assert_int_eq(pause_keeps_kv(&p), m.paused && !m.draining && !m.cleared);
            ck_assert_uint_eq(p.n_calls, m.n_calls);
            for (size_t c = 0; c < m.n_calls; c++) {
                ck_assert_uint_eq(p.calls[c].number, m.calls[c]);
            }
        }
        pause_fini(&p);
    }
}
END_TEST

/* Another front end, or another life of the same, never matches the sole pause. */
START_TEST(test_sole_is_exact)
{
    pause_call_t sole = {1, 3, 9};
    pause_call_t others[] = {{0, 3, 9}, {1, 2, 9}, {1, 3, 8}};
    pause_t p;
    pause_init(&p);
    pause_apply(&p, sole, PAUSE_KEEP, false);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_uint_eq(pause_cancel(&p, others[i]), 0);
        ck_assert(pause_is_paused(&p));
    }
    uint64_t before = pause_hash(&p, 0);
    ck_assert_uint_ne(pause_cancel(&p, sole) & PAUSE_LIFT, 0);
    ck_assert_uint_ne(pause_hash(&p, 0), before);
    pause_fini(&p);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("pause");
    TCase *tc = tcase_create("pause");
    tcase_add_test(tc, test_table);
    tcase_add_test(tc, test_sequences);
    tcase_add_test(tc, test_sole_is_exact);
    suite_add_tcase(s, tc);
    return s;
}
