/*
 * test_main.h: what every Check test program shares. A test file defines
 * `Suite *test_suite(void)`; main() lives here, prints the seed first, speaks TAP, honours
 * CK_FORK and CK_RUN_CASE, and multiplies timeouts by LK_TEST_TIMEOUT_MULTIPLIER.
 */
#ifndef LK_TESTS_TEST_MAIN_H
#define LK_TESTS_TEST_MAIN_H

#include <check.h>
#include <stdint.h>

Suite *test_suite(void);

/* Seed of this test, derived from the run's seed (LK_TEST_SEED, else random; printed) and a name.
 */
uint64_t test_seed(const char *name);

/* Directory of the committed fixtures (tests/fixtures). */
const char *test_fixtures(void);

/* A fresh empty directory below $TMPDIR, removed at exit of the process that made it. */
const char *test_tmpdir(void);

/* Bounds this process's address space to `bytes`, for inputs that claim more. Sanitizers reserve
 * terabytes and report such an allocation themselves, so there it does nothing. */
void test_memory_cap(uint64_t bytes);

#define ck_ok(expr) ck_assert_msg((expr) == LK_OK, "%s failed", #expr)

#endif
