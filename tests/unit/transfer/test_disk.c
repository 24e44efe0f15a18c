/* The disk engine: which paths it takes, that it reads every byte, and that bad files are errors.
 */
#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/mem_sink.h"
#include "transfer/backends/backends.h"
#include "transfer/safetensors.h"
#include "transfer/update_session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define N         4
#define BIG_BYTES (20u << 20)

static tensor_desc_t descs[N] = {
    {.name = "a", .dtype = LK_DTYPE_U8, .ndim = 1, .shape = {BIG_BYTES}},
    {.name = "b", .dtype = LK_DTYPE_BF16, .ndim = 2, .shape = {3, 7}},
    {.name = "c", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {0}},
    {.name = "d", .dtype = LK_DTYPE_F32, .ndim = 0},
};
static void *data[N];
static char root[400], allowed[900], dir[600], file[700];
static lk_error_t err;
static mem_sink_t *sink;
static update_session_t *session;

static void write_file(size_t n)
{
    ck_assert_msg(safetensors_write(file, descs, (const void *const *)data, n, &err) == LK_OK, "%s",
                  err.text);
}

static void setup(void)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("disk"));
    err = LK_ERROR_INIT;
    snprintf(root, sizeof root, "%s/disk-%ld", test_tmpdir(), (long)getpid());
    snprintf(allowed, sizeof allowed, "%s/none,%s/ok", root, root);
    snprintf(dir, sizeof dir, "%s/ok/step-1", root);
    snprintf(file, sizeof file, "%s/model.safetensors", dir);
    char path[700];
    static const char *const dirs[] = {"", "/ok", "/ok/step-1", "/okay", "/ok/empty"};
    for (size_t i = 0; i < LK_ARRAY_LEN(dirs); i++) {
        snprintf(path, sizeof path, "%s%s", root, dirs[i]);
        ck_assert_int_eq(mkdir(path, 0700), 0);
    }
    for (size_t i = 0; i < N; i++) {
        uint64_t bytes = 0;
        ck_assert(tensor_desc_bytes(&descs[i], &bytes));
        data[i] = malloc(bytes + 8);
        for (uint64_t k = 0; k < bytes; k += 8) {
            uint64_t x = lk_prng_u64(&prng);
            memcpy((char *)data[i] + k, &x, sizeof x);
        }
    }
    write_file(N);
    sink = mem_sink_new(descs, N);
    wte_context_t ctx = {.dp_size = 1,
                         .ranks_per_replica = 1,
                         .env = lk_env_real(),
                         .no_progress_ns = LK_SECOND_NS,
                         .allowed_weight_dirs = allowed};
    weight_sink_t s = mem_sink(sink);
    session = update_session_new(&wte_mem, &ctx, &s);
    ck_assert_ptr_nonnull(session);
}

static void teardown(void)
{
    update_session_destroy(&session);
    mem_sink_destroy(&sink);
    for (size_t i = 0; i < N; i++) {
        free(data[i]);
    }
    char path[800];
    static const char *const left[] = {
        "/ok/step-1/model.safetensors", "/ok/link", "/ok/step-1", "/ok/empty", "/ok", "/okay", ""};
    for (size_t i = 0; i < LK_ARRAY_LEN(left); i++) {
        snprintf(path, sizeof path, "%s%s", root, left[i]);
        (void)remove(path); /* not every test makes all of them */
    }
}

static lk_status_t post(update_verb_t verb, const char *spec)
{
    return update_session_post(session, verb, spec, strlen(spec), &err);
}

static const char *update_of(const char *path)
{
    static char spec[1200];
    snprintf(spec, sizeof spec, "{\"update_info\": {\"path\": \"%s\"}}", path);
    return spec;
}

static lk_status_t run(void)
{
    lk_status_t st;
    while ((st = update_session_test(session, &err)) == LK_INPROGRESS) {
        continue;
    }
    return st;
}

static void open_session(void)
{
    ck_ok(post(UPDATE_VERB_INIT, "{\"init_info\": {\"backend\": \"disk\"}}"));
    ck_ok(run());
    ck_ok(update_session_outcome(session, UPDATE_VERB_INIT, true, &err));
    ck_ok(post(UPDATE_VERB_START, "{}"));
    ck_ok(update_session_outcome(session, UPDATE_VERB_START, true, &err));
}

static void expect_read(void)
{
    for (size_t i = 0; i < N; i++) {
        ck_assert(sink->arrived[i]);
        ck_assert_int_eq(memcmp(sink->data[i], data[i], sink->bytes[i]), 0);
    }
}

START_TEST(reads_every_byte)
{
    sink->direct = _i & 1;
    open_session();
    ck_assert_msg(post(UPDATE_VERB_UPDATE, update_of(dir)) == LK_OK, "%s", err.text);
    uint64_t done = 0;
    lk_status_t st;
    size_t calls = 0;
    do {
        st = update_session_test(session, &err);
        ck_assert_msg(st >= 0, "%s", err.text);
        wte_progress_t p;
        update_session_progress(session, &p);
        ck_assert_uint_le(p.bytes_done - done, 9u << 20); /* a bounded piece per call */
        done = p.bytes_done;
        calls++;
    } while (st == LK_INPROGRESS);
    ck_assert_uint_ge(calls, 3);
    expect_read();
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, true, &err));
    ck_ok(post(UPDATE_VERB_FINISH, "{}"));
    ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, true, &err));
    ck_assert_uint_eq(sink->commits, 1);
    /* the configured engine is back, in the state that it was in */
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    ck_assert_int_eq(post(UPDATE_VERB_START, "{}"), LK_ERR_STATE);
}
END_TEST

START_TEST(paths)
{
    char path[800];
    open_session();
    const struct {
        const char *path, *text;
    } rows[] = {
        {"/", "not below a directory of --allowed-weight-dirs"},
        {"/etc", "not below a directory of --allowed-weight-dirs"},
        {"%s/okay", "not below"},
        {"%s", "not below"},
        {"%s/ok/../okay", "not below"},
        {"%s/ok/link", "not below"},
        {"%s/ok/step-1/model.safetensors", "is not a directory"},
        {"%s/ok/absent", "No such file"},
        {"%s/ok/empty", "neither model.safetensors nor"},
        {"ok/step-1", "must be absolute"},
        {"", "'path' must be a string of 1 to"},
    };
    snprintf(path, sizeof path, "%s/ok/link", root);
    ck_assert_int_eq(symlink("/etc", path), 0);
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        const char *in = rows[i].path;
        snprintf(path, sizeof path, "%s%s", strncmp(in, "%s", 2) == 0 ? root : "",
                 strncmp(in, "%s", 2) == 0 ? in + 2 : in);
        lk_status_t st = post(UPDATE_VERB_UPDATE, update_of(path));
        ck_assert_int_eq(st, LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, rows[i].text) != NULL, "%s: %s", path, err.text);
    }
    ck_assert_int_eq(post(UPDATE_VERB_UPDATE, "{\"update_info\": {\"path\": \"/x\", \"y\": 1}}"),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "unknown field 'y'"));
    ck_assert_uint_eq(sink->tensors, 0);
    ck_assert(!update_session_touched(session));
}
END_TEST

START_TEST(part_of_a_model_is_refused)
{
    write_file(N - 1);
    open_session();
    ck_assert_int_eq(post(UPDATE_VERB_UPDATE, update_of(dir)), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "missing: d"));
    ck_assert(!update_session_touched(session));
}
END_TEST

START_TEST(file_cut_short_is_an_error)
{
    open_session();
    ck_assert_msg(post(UPDATE_VERB_UPDATE, update_of(dir)) == LK_OK, "%s", err.text);
    ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
    ck_assert_int_eq(truncate(file, BIG_BYTES / 2), 0);
    ck_assert_int_eq(run(), LK_ERR_IO);
    ck_assert_msg(strstr(err.text, "tensor 1 of 4, 'a': the file has become shorter") != NULL, "%s",
                  err.text);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    write_file(N); /* and the next session is as good as new */
    open_session();
    ck_assert_msg(post(UPDATE_VERB_UPDATE, update_of(dir)) == LK_OK, "%s", err.text);
    ck_ok(run());
    expect_read();
}
END_TEST

START_TEST(abort_in_the_middle)
{
    open_session();
    ck_assert_msg(post(UPDATE_VERB_UPDATE, update_of(dir)) == LK_OK, "%s", err.text);
    ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
    update_session_cancel(session, "enough");
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_CANCELED);
    ck_assert_str_eq(err.text, "enough");
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
}
END_TEST

START_TEST(which_engine_an_init_names)
{
    ck_assert_int_eq(post(UPDATE_VERB_INIT, "{\"init_info\": {\"backend\": \"tcp\"}}"),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "'backend' must be absent"));
    ck_assert_int_eq(post(UPDATE_VERB_INIT, "{\"init_info\": {\"backend\": 7}}"), LK_ERR_INVALID);
    ck_assert_int_eq(post(UPDATE_VERB_INIT, "{\"init_info\": {\"backend\": \"mem\"}}"),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "Invalid init_info for mem: missing field"));
    ck_assert_int_eq(post(UPDATE_VERB_INIT, "{\"init_info\": {\"backend\": \"disk\", \"x\": 1}}"),
                     LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "Invalid init_info for disk: unknown field 'x'"));
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("disk");
    TCase *tc = tcase_create("disk");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, reads_every_byte, 0, 2);
    tcase_add_test(tc, paths);
    tcase_add_test(tc, part_of_a_model_is_refused);
    tcase_add_test(tc, file_cut_short_is_an_error);
    tcase_add_test(tc, abort_in_the_middle);
    tcase_add_test(tc, which_engine_an_init_names);
    suite_add_tcase(suite, tc);
    return suite;
}
