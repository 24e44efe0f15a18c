#include "base/memory.h"
#include "tests/lib/test_main.h"

START_TEST(test_meminfo)
{
    ck_assert_uint_eq(
        memory_of_meminfo("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   77 kB\n"), 77 * 1024);
    ck_assert_uint_eq(memory_of_meminfo("MemAvailable: 3 kB"), 3 * 1024);
    static const char *const silent[] = {"",
                                         "MemTotal: 100 kB\n",
                                         "MemAvailable:\n",
                                         "MemAvailable: 99999999999999999999999 kB\n",
                                         "XMemAvailable: 4 kB\n",
                                         "MemAvailableX: 4 kB\n"};
    for (size_t i = 0; i < sizeof silent / sizeof silent[0]; i++) {
        ck_assert_uint_eq(memory_of_meminfo(silent[i]), UINT64_MAX);
    }
}
END_TEST

START_TEST(test_group)
{
    ck_assert_uint_eq(memory_of_group("1000\n", "300\n", ""), 700);
    ck_assert_uint_eq(memory_of_group("1000\n", "300\n", "anon 5\ninactive_file 100\n"), 800);
    /* version 1 counts children under total_ */
    ck_assert_uint_eq(memory_of_group("1000", "300", "inactive_file 1\ntotal_inactive_file 200\n"),
                      900);
    ck_assert_uint_eq(memory_of_group("1000", "300", "inactive_file 5000\n"), 1000);
    ck_assert_uint_eq(memory_of_group("1000", "5000", ""), 0);
    ck_assert_uint_eq(memory_of_group("max\n", "300\n", ""), UINT64_MAX);
    ck_assert_uint_eq(memory_of_group("", "", ""), UINT64_MAX);
    ck_assert_uint_eq(memory_of_group("1000", "", ""), UINT64_MAX);
}
END_TEST

START_TEST(test_here)
{
    uint64_t bytes = memory_available();
    ck_assert_uint_gt(bytes, 1u << 20);
    ck_assert_uint_lt(bytes, UINT64_MAX); /* Linux says */
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("memory");
    TCase *tc = tcase_create("memory");
    tcase_add_test(tc, test_meminfo);
    tcase_add_test(tc, test_group);
    tcase_add_test(tc, test_here);
    suite_add_tcase(s, tc);
    return s;
}
