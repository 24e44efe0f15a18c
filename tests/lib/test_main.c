#include "tests/lib/test_main.h"
#include "base/env.h"
#include "base/hash.h"
#include "base/prng.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static uint64_t run_seed;

uint64_t test_seed(const char *name)
{
    return lk_hash64(name, strlen(name), run_seed);
}

const char *test_fixtures(void)
{
    const char *dir = getenv("LK_TEST_FIXTURES");
    return dir != NULL ? dir : "tests/fixtures";
}

static char tmpdir[256];
static pid_t tmpdir_owner;

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    return remove(path);
}

static void remove_tmpdir(void)
{
    if (tmpdir_owner == getpid()) {
        nftw(tmpdir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    }
}

const char *test_tmpdir(void)
{
    if (tmpdir_owner != getpid()) {
        const char *base = getenv("TMPDIR");
        snprintf(tmpdir, sizeof tmpdir, "%s/lk-test-XXXXXX", base != NULL ? base : "/tmp");
        if (mkdtemp(tmpdir) == NULL) {
            perror("mkdtemp");
            exit(2);
        }
        tmpdir_owner = getpid();
        atexit(remove_tmpdir);
    }
    return tmpdir;
}

void test_memory_cap(uint64_t bytes)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)bytes;
#else
    struct rlimit cap = {bytes, bytes};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &cap), 0);
#endif
}

int main(void)
{
    const char *text = getenv("LK_TEST_SEED");
    run_seed = text != NULL ? strtoull(text, NULL, 0) : lk_env_random_u64(lk_env_real());
    printf("# seed=0x%016llx (replay: LK_TEST_SEED=0x%016llx)\n", (unsigned long long)run_seed,
           (unsigned long long)run_seed);
    fflush(stdout);
    const char *multiplier = getenv("LK_TEST_TIMEOUT_MULTIPLIER");
    if (multiplier != NULL) {
        setenv("CK_TIMEOUT_MULTIPLIER", multiplier, 1);
    }
    /* Check's own default of 4 s fails good tests on a machine that is busy */
    setenv("CK_DEFAULT_TIMEOUT", "60", 0);
    SRunner *runner = srunner_create(test_suite());
    srunner_set_tap(runner, "-");
    srunner_run_all(runner, CK_SILENT);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}
