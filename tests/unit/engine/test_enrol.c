/* The table of enrol.h: every pair of state and event, and the ways through it. */
#include "base/check.h"
#include "engine_core/dp/enrol.h"
#include "engine_core/dp/roster.h"
#include "tests/lib/test_main.h"

#include <string.h>

START_TEST(test_every_row)
{
    for (int s = 0; s < ENROL_N_STATES; s++) {
        for (int e = 0; e < ENROL_N_EVENTS; e++) {
            enrol_transition_t t = enrol_transition((enrol_state_t)s, (enrol_event_t)e);
            ck_assert_int_lt(t.next, ENROL_N_STATES);
            if (t.actions & ENROL_IMPOSSIBLE) { /* then nothing else */
                ck_assert_uint_eq(t.actions, ENROL_IMPOSSIBLE);
                ck_assert_int_eq(t.next, s);
            }
            /* who leaves, and only who leaves or begins, has a new address to say */
            bool leaves = t.actions & ENROL_LEAVE;
            ck_assert(!leaves || ((t.actions & ENROL_HELLO) && t.next == ENROL_CALLING));
            ck_assert(!(t.actions & ENROL_CONNECT) || t.next == ENROL_CONNECTING);
            ck_assert(!(t.actions & ENROL_FORM) || t.next == ENROL_MEMBER);
            bool inside = s == ENROL_MEMBER || s == ENROL_CONNECTING;
            bool out = t.next == ENROL_CALLING || t.next == ENROL_OUTSIDE;
            ck_assert_msg(!inside || !out || leaves, "%s on %s: goes without leaving",
                          enrol_state_name((enrol_state_t)s), enrol_event_name((enrol_event_t)e));
        }
        /* a refusal ends it wherever it is, and nothing brings it back */
        ck_assert_int_eq(enrol_transition((enrol_state_t)s, ENROL_ON_REFUSED).next, ENROL_ENDED);
    }
    for (int e = 0; e < ENROL_N_EVENTS; e++) {
        enrol_transition_t t = enrol_transition(ENROL_ENDED, (enrol_event_t)e);
        ck_assert(t.next == ENROL_ENDED && t.actions == 0);
    }
    ck_assert_str_eq(enrol_state_name(ENROL_N_STATES), "?");
    ck_assert_str_eq(enrol_event_name(ENROL_N_EVENTS), "?");
}
END_TEST

START_TEST(test_a_life)
{
    enrol_t e = {0};
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_LOADED, 1), ENROL_HELLO);
    ck_assert_uint_eq(enrol_on_time(&e, 1 + ENROL_REPEAT_NS - 1), 0);
    ck_assert_uint_eq(enrol_on_time(&e, 1 + ENROL_REPEAT_NS), ENROL_HELLO);
    ck_assert_uint_eq(enrol_on_init(&e, 7, 7, true, 5), ENROL_CONNECT);
    ck_assert_uint_eq(enrol_member_of(&e), 0);
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_CONNECTED, 6), ENROL_FORM | ENROL_READY | ENROL_HERE);
    ck_assert_uint_eq(enrol_member_of(&e), 7);
    ck_assert_uint_eq(enrol_on_time(&e, e.said_ns + ENROL_REPEAT_NS - 1), 0);
    ck_assert_uint_eq(enrol_on_time(&e, e.said_ns + ENROL_REPEAT_NS), ENROL_HELLO | ENROL_HERE);
    ck_assert_uint_eq(enrol_on_time(&e, e.said_ns + 1), 0);
    ck_assert_uint_eq(enrol_on_init(&e, 7, 7, true, 8), ENROL_READY); /* it has not come */
    ck_assert_uint_eq(enrol_on_init(&e, 7, 70, true, 8), ENROL_RELINK);
    ck_assert_uint_eq(e.revision, 70);
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_ROLLCALL, 8), ENROL_HELLO | ENROL_READY);
    ck_assert_uint_eq(enrol_on_dissolve(&e, 6, 9), 0); /* an older one */
    ck_assert_uint_eq(enrol_on_dissolve(&e, 7, 9), ENROL_LEAVE | ENROL_HELLO);
    ck_assert_uint_eq(e.left, 7);
    ck_assert_uint_eq(enrol_on_dissolve(&e, 7, 9), 0);        /* once more: it is outside */
    ck_assert_uint_eq(enrol_on_init(&e, 7, 7, true, 10), 0);  /* late */
    ck_assert_uint_eq(enrol_on_init(&e, 8, 8, false, 10), 0); /* made for an earlier attempt */
    ck_assert_uint_eq(e.epoch, 7);
    ck_assert_uint_eq(enrol_on_init(&e, 8, 8, true, 10), ENROL_CONNECT);
    ck_assert_uint_eq(enrol_on_init(&e, 8, 8, false, 10), 0); /* in it: the same again */
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_LOST, 11), ENROL_LEAVE | ENROL_HELLO);
    ck_assert_uint_eq(e.left, 8);
    ck_assert_uint_eq(enrol_on_init(&e, 8, 8, true, 12), 0); /* what it failed to enter stays so */
    ck_assert_uint_eq(enrol_on_init(&e, 9, 9, true, 12), ENROL_CONNECT);
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_ROLLCALL, 13), ENROL_LEAVE | ENROL_HELLO);
    ck_assert_uint_eq(enrol_on(&e, ENROL_ON_REFUSED, 14), ENROL_END);
    ck_assert_uint_eq(enrol_on_init(&e, 10, 10, true, 15), 0);
    ck_assert_int_eq(e.state, ENROL_ENDED);
}
END_TEST

/* ---- who is in it: roster.h ---- */

static lk_status_t read_roster(uint64_t dp_size, const uint64_t *ranks, size_t n, size_t addresses,
                               roster_t *out, lk_error_t *err)
{
    msg_member_t members[8];
    msg_name_t mesh[8] = {{{0}}};
    for (size_t i = 0; i < n; i++) {
        members[i].rank = ranks[i];
    }
    msg_init_t init = {.dp_size = dp_size, .mesh = {mesh, addresses}, .members = {members, n}};
    return roster_of_init(&init, 4, 2, out, err);
}

START_TEST(test_rosters)
{
    static const struct {
        uint64_t dp_size, ranks[8];
        size_t n, addresses;
        const char *text;
    } bad[] = {
        {4, {0}, 0, 0, "0 members with 0 mesh addresses"},
        {4, {0, 1, 2, 3, 4}, 5, 5, "5 members"},
        {4, {0, 2}, 2, 4, "2 members with 4 mesh addresses"},
        {3, {0, 1, 2}, 3, 3, "of 3 ranks, do not fit --data-parallel-size 4"},
        {4, {2, 0}, 2, 2, "member 1 is rank 0 of 4"},
        {4, {2, 2}, 2, 2, "member 1 is rank 2 of 4"},
        {4, {2, 4}, 2, 2, "member 1 is rank 4 of 4"},
        {4, {2, UINT64_MAX}, 2, 2, "member 1 is rank 18446744073709551615"},
        {4, {0, 1, 3}, 3, 3, "rank 2 is not among its 3 members"},
    };
    roster_t roster = {.n = 99}, all = roster_of_all(4, 2);
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_int_eq(
            read_roster(bad[i].dp_size, bad[i].ranks, bad[i].n, bad[i].addresses, &roster, &err),
            LK_ERR_PEER);
        ck_assert_msg(strstr(err.text, bad[i].text) != NULL, "%s", err.text);
        ck_assert_uint_eq(roster.n, 99);
    }
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(read_roster(4, (uint64_t[]){0, 1, 2, 3}, 4, 4, &roster, &err));
    ck_assert(roster_equal(&roster, &all) && roster.place == 2);
    ck_ok(read_roster(4, (uint64_t[]){2, 3}, 2, 2, &roster, &err));
    ck_assert(!roster_equal(&roster, &all) && roster.n == 2 && roster.place == 0);
    ck_ok(read_roster(4, (uint64_t[]){0, 2}, 2, 2, &all, &err));
    ck_assert(!roster_equal(&roster, &all) && all.place == 1);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("enrol");
    TCase *tc = tcase_create("enrol");
    tcase_add_test(tc, test_every_row);
    tcase_add_test(tc, test_a_life);
    tcase_add_test(tc, test_rosters);
    suite_add_tcase(s, tc);
    return s;
}
