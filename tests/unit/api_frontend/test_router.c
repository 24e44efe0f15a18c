#include "api_frontend/router.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <string.h>

static uint32_t pick(router_t *r, int64_t pin)
{
    uint32_t rank = UINT32_MAX;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(router_pick(r, pin, 0, &rank, &err) == LK_OK, "%s", err.text);
    return rank;
}

START_TEST(test_spreads)
{
    router_t r;
    router_init(&r, 4, 0, 1);
    int n[4] = {0};
    for (int i = 0; i < 400; i++) {
        n[pick(&r, -1)]++;
    }
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(n[i], 100);
    }
}
END_TEST

START_TEST(test_front_ends_start_apart)
{
    router_t r;
    router_init(&r, 4, 1, 2);
    ck_assert_uint_eq(pick(&r, -1), 2);
}
END_TEST

START_TEST(test_prefers_less_load)
{
    router_t r;
    router_init(&r, 2, 0, 1);
    router_report(&r, 0, 3, 4, 0.2);
    router_report(&r, 1, 0, 6, 0.2);
    ck_assert_uint_eq(pick(&r, -1), 1); /* 7 against 6; then it counts as 7 waiting-and-running */
    /* a full cache weighs on a queue: 2 + 2 * 6 * 0.4 = 6.8 against 5 */
    router_init(&r, 2, 0, 1);
    router_report(&r, 0, 2, 0, 0.9);
    router_report(&r, 1, 0, 5, 0.9);
    ck_assert_uint_eq(pick(&r, -1), 1);
    /* and does not without one */
    router_init(&r, 2, 0, 1);
    router_report(&r, 0, 0, 4, 1.0);
    router_report(&r, 1, 0, 5, 0.0);
    ck_assert_uint_eq(pick(&r, -1), 0);
}
END_TEST

START_TEST(test_own_requests_count_for_all_front_ends)
{
    router_t r;
    router_init(&r, 2, 0, 4);
    ck_assert_uint_eq(pick(&r, 0), 0);
    router_report(&r, 0, 0, 0, 0); /* the report hasn't got it yet */
    router_report(&r, 1, 0, 3, 0);
    ck_assert_uint_eq(pick(&r, -1), 1); /* max(4 * 1, 0) against 3 */
    router_done(&r, 0);
    router_report(&r, 1, 0, 3, 0);
    ck_assert_uint_eq(pick(&r, -1), 0);
}
END_TEST

START_TEST(test_pin_and_dead)
{
    router_t r;
    router_init(&r, 2, 0, 1);
    uint32_t rank = 9;
    lk_error_t err;
    router_set_dead(&r, 0, true);
    ck_assert_int_eq(router_pick(&r, 0, 0, &rank, &err), LK_ERR_UNAVAILABLE);
    ck_assert_int_eq(router_pick(&r, 2, 0, &rank, &err), LK_ERR_INVALID);
    ck_assert_uint_eq(rank, 9);
    for (int i = 0; i < 5; i++) {
        ck_assert_uint_eq(pick(&r, -1), 1);
    }
    router_set_dead(&r, 1, true);
    ck_assert_int_eq(router_pick(&r, -1, 0, &rank, &err), LK_ERR_UNAVAILABLE);
    router_report(&r, 7, 1, 1, 1); /* ignored */
}
END_TEST

static uint32_t pick_session(router_t *r, const char *name)
{
    uint32_t rank = UINT32_MAX;
    lk_error_t err = LK_ERROR_INIT;
    uint64_t session = router_session(name, strlen(name));
    ck_assert_msg(router_pick(r, -1, session, &rank, &err) == LK_OK, "%s", err.text);
    return rank;
}

/* Takes and gives back, so that load plays no part. */
static uint32_t home_of(router_t *r, int session)
{
    char name[32];
    snprintf(name, sizeof name, "session-%d", session);
    uint32_t rank = pick_session(r, name);
    router_done(r, rank);
    router_report(r, rank, 0, 0, 0);
    return rank;
}

START_TEST(test_sessions_stay_and_spread)
{
    router_t a, b; /* two front ends agree, whatever else they did */
    router_init(&a, 4, 0, 2);
    router_init(&b, 4, 1, 2);
    pick(&b, -1);
    int n[4] = {0};
    for (int i = 0; i < 400; i++) {
        uint32_t home = home_of(&a, i);
        ck_assert_uint_eq(home, home_of(&a, i));
        ck_assert_uint_eq(home, home_of(&b, i));
        n[home]++;
    }
    for (int i = 0; i < 4; i++) {
        ck_assert_int_gt(n[i], 60);
    }
}
END_TEST

START_TEST(test_avoided_ranks_are_the_last_resort)
{
    router_t r;
    uint32_t rank;
    lk_error_t err;
    router_init(&r, 3, 0, 1);
    router_set_avoided(&r, 0, true);
    router_set_avoided(&r, 2, true);
    for (int i = 0; i < 20; i++) {
        ck_ok(router_pick(&r, -1, i % 2 != 0 ? router_session("s", 1) : 0, &rank, &err));
        ck_assert_uint_eq(rank, 1);
    }
    ck_ok(router_pick(&r, 2, 0, &rank, &err)); /* who asks for it gets it */
    ck_assert_uint_eq(rank, 2);
    router_set_dead(&r, 1, true);
    ck_ok(router_pick(&r, -1, 0, &rank, &err));
    ck_assert_uint_ne(rank, 1);
}
END_TEST

START_TEST(test_sessions_of_a_dead_rank_move_alone)
{
    router_t r;
    router_init(&r, 4, 0, 1);
    uint32_t home[200];
    for (int i = 0; i < 200; i++) {
        home[i] = home_of(&r, i);
    }
    router_set_dead(&r, 2, true);
    for (int i = 0; i < 200; i++) {
        uint32_t now = home_of(&r, i);
        ck_assert_uint_ne(now, 2);
        ck_assert(home[i] == 2 || now == home[i]);
    }
    router_set_dead(&r, 2, false);
    for (int i = 0; i < 200; i++) {
        ck_assert_uint_eq(home_of(&r, i), home[i]);
    }
}
END_TEST

START_TEST(test_session_guard)
{
    router_t r;
    router_init(&r, 4, 0, 1);
    uint32_t home = pick_session(&r, "hot"), n[4] = {0};
    for (int i = 0; i < 400; i++) { /* one session floods the group */
        n[pick_session(&r, "hot")]++;
    }
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_uint_le(n[i], n[home]);
    }
    ck_assert_uint_le(n[home], 400 * ROUTER_SESSION_FACTOR / 4 + 2 * ROUTER_SESSION_SLACK);
    /* a pin beats the session */
    uint32_t rank, other = (home + 1) % 4;
    lk_error_t err;
    ck_assert_int_eq(router_pick(&r, other, router_session("hot", 3), &rank, &err), LK_OK);
    ck_assert_uint_eq(rank, other);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("router");
    TCase *tc = tcase_create("router");
    tcase_add_test(tc, test_spreads);
    tcase_add_test(tc, test_front_ends_start_apart);
    tcase_add_test(tc, test_prefers_less_load);
    tcase_add_test(tc, test_own_requests_count_for_all_front_ends);
    tcase_add_test(tc, test_pin_and_dead);
    tcase_add_test(tc, test_sessions_stay_and_spread);
    tcase_add_test(tc, test_sessions_of_a_dead_rank_move_alone);
    tcase_add_test(tc, test_avoided_ranks_are_the_last_resort);
    tcase_add_test(tc, test_session_guard);
    suite_add_tcase(suite, tc);
    return suite;
}
