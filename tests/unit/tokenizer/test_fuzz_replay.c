/* Runs the fuzz target over its corpus, and over seeded mutations of it. */
#include "base/prng.h"
#include "tests/unit/tokenizer/fixture.h"

#include <dirent.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_FILE  (1u << 16)
#define MUTATIONS 60 /* of each file */

/* Calls one() for every file of the corpus; returns their number. */
static int for_each_file(void (*one)(const uint8_t *data, size_t len))
{
    static uint8_t data[MAX_FILE];
    const char *dir = fixture_path("../fuzz/corpus/tokenizer_json");
    DIR *d = opendir(dir);
    int n = 0;
    ck_assert_msg(d != NULL, "%s is missing", dir);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.') {
            continue;
        }
        char path[2048];
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        FILE *file = fopen(path, "rb");
        ck_assert_ptr_nonnull(file);
        size_t len = fread(data, 1, sizeof data, file);
        fclose(file);
        one(data, len);
        n++;
    }
    closedir(d);
    return n;
}

static void replay(const uint8_t *data, size_t len)
{
    LLVMFuzzerTestOneInput(data, len);
}

START_TEST(corpus_is_handled)
{
    ck_assert_int_ge(for_each_file(replay), 6);
}
END_TEST

static lk_prng_t prng;

/* A few bytes changed, a stretch removed or doubled, or the end cut off. */
static void mutate_and_replay(const uint8_t *data, size_t len)
{
    static const char tokens[] = "{}[]\":,0919-\\.e \xC3\xFFnt";
    for (int k = 0; k < MUTATIONS; k++) {
        uint8_t *copy = malloc(2 * len + 1);
        memcpy(copy, data, len);
        size_t n = len;
        size_t at = lk_prng_below(&prng, len + 1), more = lk_prng_below(&prng, 64);
        more = more < len - at ? more : len - at;
        switch (lk_prng_below(&prng, 4)) {
        case 0:
            n = at;
            break;
        case 1:
            memmove(copy + at, copy + at + more, len - at - more);
            n = len - more;
            break;
        case 2:
            memmove(copy + at + more, copy + at, len - at);
            n = len + more;
            break;
        default:
            for (int i = 0; i < 3 && len > 0; i++) {
                copy[lk_prng_below(&prng, len)] =
                    (uint8_t)tokens[lk_prng_below(&prng, sizeof tokens - 1)];
            }
        }
        LLVMFuzzerTestOneInput(copy, n);
        free(copy);
    }
}

START_TEST(mutations_are_handled)
{
    lk_prng_seed(&prng, test_seed("mutations"));
    for_each_file(mutate_and_replay);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("tokenizer_fuzz");
    TCase *tc = tcase_create("replay");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, corpus_is_handled);
    tcase_add_test(tc, mutations_are_handled);
    suite_add_tcase(s, tc);
    return s;
}
