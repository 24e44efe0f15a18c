/* Gaps in what a sender says. */
#include "proto/msg_track.h"
#include "tests/lib/test_main.h"

START_TEST(test_gaps)
{
    msg_track_t t = {0};
    ck_assert(!msg_track_gap(&t, 5, 1));
    ck_assert(!msg_track_gap(&t, 5, 2));
    ck_assert(msg_track_gap(&t, 5, 4));
    ck_assert(!msg_track_gap(&t, 5, 5));  /* said once */
    ck_assert(!msg_track_gap(&t, 5, 0));  /* not numbered */
    ck_assert(!msg_track_gap(&t, 4, 90)); /* an older life's is no news of this one */
    ck_assert(!msg_track_gap(&t, 5, 6));
    ck_assert(!msg_track_gap(&t, 6, 1)); /* a new life */
    ck_assert(msg_track_gap(&t, 7, 2));  /* whose first is missing */
}
END_TEST

START_TEST(test_begin)
{
    msg_track_t t = {0};
    msg_track_begin(&t, 5, 40);
    ck_assert(!msg_track_gap(&t, 5, 38)); /* was for an earlier receiver */
    ck_assert(!msg_track_gap(&t, 5, 41));
    msg_track_begin(&t, 5, 30); /* overtaken */
    ck_assert(!msg_track_gap(&t, 5, 42));
    msg_track_begin(&t, 4, 90);
    ck_assert(!msg_track_gap(&t, 5, 43));
    msg_track_begin(&t, 6, 7);
    ck_assert(msg_track_gap(&t, 6, 9));
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("msg_track");
    TCase *tc = tcase_create("msg_track");
    tcase_add_test(tc, test_gaps);
    tcase_add_test(tc, test_begin);
    suite_add_tcase(s, tc);
    return s;
}
