/* Transfer engines from shared objects: our own, a user's, and ones that are none. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "transfer/wte_module.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The directory that this program was built in has ours; odd ones are beside it. */
static const char *modules_dir(void)
{
    const char *dir = getenv("LK_TEST_MODULES");
    ck_assert_msg(dir != NULL, "LK_TEST_MODULES is not set");
    return dir;
}

START_TEST(ours_is_loaded)
{
    lk_error_t err = LK_ERROR_INIT;
    const wte_ops_t *ops = NULL, *again = NULL;
    ck_assert_msg(wte_open("ipc", modules_dir(), &ops, &err) == LK_OK, "%s", err.text);
    ck_assert_str_eq(ops->name, "ipc");
    ck_assert_int_eq(wte_open("ipc", modules_dir(), &again, &err), LK_OK);
    ck_assert_ptr_eq(ops, again);
    json_t *info = json_object();
    wte_context_t ctx = {.dp_size = 1, .ranks_per_replica = 1, .env = lk_env_real()};
    ck_assert_int_eq(ops->init_check(info, &ctx, &err), LK_ERR_UNSUPPORTED); /* it runs */
    json_decref(info);
}
END_TEST

START_TEST(built_in_ones_come_first)
{
    lk_error_t err = LK_ERROR_INIT;
    const wte_ops_t *ops = NULL;
    ck_assert_int_eq(wte_open("tcp", "/nonexistent", &ops, &err), LK_OK);
    ck_assert_ptr_eq(ops, wte_find("tcp"));
}
END_TEST

START_TEST(names_are_no_paths)
{
    static const char *const names[] = {
        "", "../ipc", "ipc/../ipc", "IPC", "i.pc", "a_name_that_is_longer_than_32_characters"};
    for (size_t i = 0; i < LK_ARRAY_LEN(names); i++) {
        lk_error_t err = LK_ERROR_INIT;
        const wte_ops_t *ops = NULL;
        ck_assert_int_eq(wte_open(names[i], modules_dir(), &ops, &err), LK_ERR_INVALID);
        ck_assert_ptr_null(ops);
        ck_assert_msg(strstr(err.text, "Invalid weight transfer backend: ") == err.text &&
                          strstr(err.text, "tcp") != NULL,
                      "%s", err.text);
    }
}
END_TEST

static void link_as(const char *file, const char *name, const char *dir)
{
    char from[4096], to[4096];
    snprintf(from, sizeof from, "%s/%s", getenv("LK_TEST_ODD_MODULES"), file);
    snprintf(to, sizeof to, "%s/transfer_%s.so", dir, name);
    ck_assert_int_eq(symlink(from, to), 0);
}

START_TEST(odd_ones_are_refused)
{
    static const struct {
        const char *file, *name, *text;
    } rows[] = {
        {"odd_1.so", "odd1", "has no function lockstep_weight_transfer_engine"},
        {"odd_2.so", "odd", "lacks a mandatory operation"},
        {"odd_3.so", "odd3", "was built for another version of the engine interface"},
        {"../../../transfer/transfer_ipc.so", "mine", "is the engine 'ipc', not 'mine'"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        const char *dir = test_tmpdir();
        link_as(rows[i].file, rows[i].name, dir);
        lk_error_t err = LK_ERROR_INIT;
        const wte_ops_t *ops = NULL;
        ck_assert_int_eq(wte_open(rows[i].name, dir, &ops, &err), LK_ERR_UNSUPPORTED);
        ck_assert_msg(strstr(err.text, rows[i].text) != NULL, "%s", err.text);
        ck_assert_ptr_null(ops);
    }
    const char *dir = test_tmpdir();
    char path[4096];
    snprintf(path, sizeof path, "%s/transfer_text.so", dir);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs("not a library", f);
    fclose(f);
    lk_error_t err = LK_ERROR_INIT;
    const wte_ops_t *ops = NULL;
    ck_assert_int_eq(wte_open("text", dir, &ops, &err), LK_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, "cannot load the transfer engine text: ") == err.text, "%s",
                  err.text);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("wte_module");
    TCase *tc = tcase_create("wte_module");
    tcase_add_test(tc, ours_is_loaded);
    tcase_add_test(tc, built_in_ones_come_first);
    tcase_add_test(tc, names_are_no_paths);
    tcase_add_test(tc, odd_ones_are_refused);
    suite_add_tcase(suite, tc);
    return suite;
}
