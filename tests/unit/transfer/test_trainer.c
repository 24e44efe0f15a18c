#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/transfer/fake_cluster.h"
#include "transfer/safetensors.h"
#include "transfer/trainer/lockstep_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define N_TENSORS 4
#define BIG       (3u << 20)

static float embed[12], norm[5];
static uint16_t half[21];
static uint8_t *big;
static lst_tensor_t tensors[N_TENSORS];
static const tensor_desc_t model[N_TENSORS] = {
    {.name = "model.embed_tokens.weight", .dtype = LK_DTYPE_F32, .ndim = 2, .shape = {3, 4}},
    {.name = "model.norm.weight", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {5}},
    {.name = "half", .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {21}},
    {.name = "big", .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {BIG / 2}},
};

static fake_cluster_t *cluster;
static lst_t *lst;
static char err[1024];

static void open_with(fake_script_t script, double no_progress_s)
{
    big = malloc(BIG);
    ck_assert_ptr_nonnull(big);
    for (size_t i = 0; i < BIG; i++) {
        big[i] = (uint8_t)(i * 7 % 61); /* finite bfloat16 values */
    }
    for (int i = 0; i < 12; i++) {
        embed[i] = (float)i / 3;
    }
    for (int i = 0; i < 21; i++) {
        half[i] = (uint16_t)(0x3f80 + i);
    }
    const void *data[N_TENSORS] = {embed, norm, half, big};
    for (int i = 0; i < N_TENSORS; i++) {
        tensors[i] = (lst_tensor_t){.name = model[i].name,
                                    .dtype = dtype_torch_name(model[i].dtype),
                                    .ndim = model[i].ndim,
                                    .data = data[i]};
        memcpy(tensors[i].shape, model[i].shape, sizeof tensors[i].shape);
    }
    cluster = fake_cluster_new(model, N_TENSORS, script);
    lst_options_t options = {.endpoint = fake_cluster_endpoint(cluster),
                             .admin_key = "secret",
                             .timeout_s = 60,
                             .no_progress_s = no_progress_s};
    ck_assert_msg(lst_open(&options, &lst, err, sizeof err) == LST_OK, "%s", err);
}

static void teardown(void)
{
    lst_close(&lst);
    fake_cluster_destroy(&cluster);
    free(big);
}

#define ok(expr) ck_assert_msg((expr) == LST_OK, "%s", lst_last_error(lst))
#define fails(expr, status, part)                                                                  \
    do {                                                                                           \
        ck_assert_int_eq(expr, status);                                                            \
        ck_assert_msg(strstr(lst_last_error(lst), part) != NULL, "%s", lst_last_error(lst));       \
    } while (0)

START_TEST(simple_calls)
{
    bool flag = false;
    unsigned n = 0;
    lst_stats_t stats;
    open_with((fake_script_t){0}, 0);
    ok(lst_pause(lst, "keep", false));
    const char *last = fake_cluster_last(cluster);
    ck_assert_ptr_nonnull(strstr(last, "\"call\":\"pause\""));
    ck_assert_ptr_nonnull(strstr(last, "\"mode\":\"keep\""));
    ck_assert_ptr_nonnull(strstr(last, "\"clear_cache\":false"));
    ck_assert_ptr_nonnull(strstr(last, "\"admin_key\":\"secret\""));
    ck_assert_ptr_nonnull(strstr(last, "\"idempotency_key\":\""));
    ok(lst_is_paused(lst, &flag));
    ck_assert(flag);
    ok(lst_resume(lst));
    ok(lst_is_paused(lst, &flag));
    ck_assert(!flag);
    ok(lst_reset_prefix_cache(lst, true, &flag));
    ck_assert(flag);
    ok(lst_world_size(lst, &n));
    ck_assert_uint_eq(n, FAKE_RANKS);
    ok(lst_set_version(lst, "v9"));
    lst_stats(lst, &stats);
    ck_assert(stats.last_pause_window_s > 0);
    const char *reply = NULL;
    ok(lst_call(lst, "get_world_size", "{\"include_dp\": true}", &reply));
    ck_assert_ptr_nonnull(strstr(reply, "\"world_size\":2"));
    fails(lst_call(lst, "get_world_size", "[]", NULL), LST_ERR_INVALID, "no JSON object");
    fails(lst_call(lst, "fly", NULL, NULL), LST_ERR_NOT_FOUND, "fly: no such call");
}
END_TEST

static const struct {
    int code;
    lst_status_t status;
} codes[] = {
    {400, LST_ERR_INVALID},  {401, LST_ERR_UNAUTHORIZED}, {404, LST_ERR_NOT_FOUND},
    {409, LST_ERR_STATE},    {413, LST_ERR_TOO_LARGE},    {418, LST_ERR_INVALID},
    {500, LST_ERR_INTERNAL}, {502, LST_ERR_PEER},         {503, LST_ERR_UNAVAILABLE},
    {504, LST_ERR_TIMEOUT},
};

START_TEST(errors_keep_their_text)
{
    open_with(
        (fake_script_t){
            .refuse = "pause", .code = codes[_i].code, .text = "not today", .plain_error = _i % 2},
        0);
    fails(lst_pause(lst, NULL, true), codes[_i].status, "pause: not today");
    ok(lst_resume(lst));
}
END_TEST

START_TEST(answers_without_their_field)
{
    static const char *const fields[] = {"status", "is_paused", "success", "world_size", "ranks"};
    bool flag;
    unsigned n;
    size_t count;
    open_with((fake_script_t){.lacks = fields[_i]}, 0);
    switch (_i) {
    case 0:
        fails(lst_resume(lst), LST_ERR_PEER, "no status in it");
        break;
    case 1:
        fails(lst_is_paused(lst, &flag), LST_ERR_PEER, "has no 'is_paused'");
        break;
    case 2:
        fails(lst_reset_prefix_cache(lst, false, &flag), LST_ERR_PEER, "has no 'success'");
        break;
    case 3:
        fails(lst_world_size(lst, &n), LST_ERR_PEER, "no usable 'world_size'");
        break;
    case 4:
        fails(lst_weight_info(lst, NULL, 0, &count), LST_ERR_PEER, "no list 'ranks'");
        break;
    }
}
END_TEST

static void expect_everywhere(const char *version)
{
    char mine[33];
    lst_rank_info_t ranks[FAKE_RANKS];
    size_t n = 0;
    ok(lst_digest(lst, tensors, N_TENSORS, mine));
    ok(lst_weight_info(lst, ranks, FAKE_RANKS, &n));
    ck_assert_uint_eq(n, FAKE_RANKS);
    for (unsigned r = 0; r < FAKE_RANKS; r++) {
        ck_assert_uint_eq(ranks[r].rank, r);
        ck_assert_str_eq(ranks[r].version, version);
        ck_assert_str_eq(ranks[r].digest, mine);
        ck_assert(!ranks[r].dirty);
        mem_sink_t *sink = fake_cluster_sink(cluster, r);
        for (int i = 0; i < N_TENSORS; i++) {
            ck_assert_int_eq(memcmp(sink->data[i], tensors[i].data, sink->bytes[i]), 0);
        }
    }
}

/* loop index: bit 0 packed, bit 1 three connections per rank */
START_TEST(whole_updates)
{
    lst_update_options_t packed = {.packed = _i & 1, .packed_buffer_size_bytes = 100};
    lst_tcp_options_t tcp = {.connections = _i & 2 ? 3 : 1};
    lst_stats_t stats;
    open_with((fake_script_t){0}, 0);
    ok(lst_init_tcp(lst, &tcp));
    for (int round = 0; round < 3; round++) {
        char version[16];
        snprintf(version, sizeof version, "v%d", round);
        embed[round] += 1;
        big[round] ^= 1;
        ok(lst_pause(lst, "keep", true));
        ok(lst_start(lst));
        ok(lst_update(lst, tensors, 2, &packed));
        ok(lst_update(lst, tensors + 2, 2, &packed));
        ok(lst_finish(lst, version));
        ok(lst_resume(lst));
        expect_everywhere(version);
        if (round == 1) {
            ok(lst_init_tcp(lst, &tcp));
        }
    }
    lst_stats(lst, &stats);
    ck_assert_uint_eq(stats.updates, 6);
    ck_assert_uint_eq(stats.bytes, 3ull * FAKE_RANKS * (48 + 20 + 42 + BIG));
    ck_assert(stats.transfer_s > 0);
}
END_TEST

START_TEST(order_and_refusals_come_early)
{
    char digest[33];
    open_with((fake_script_t){0}, 0);
    fails(lst_update(lst, tensors, 1, NULL), LST_ERR_STATE,
          "lst_init_tcp, lst_init_shm or lst_init_nccl first");
    fails(lst_digest(lst, tensors, 1, digest), LST_ERR_STATE,
          "lst_init_shm, lst_init_nccl or lst_init_ipc first");
    fails(lst_start(lst), LST_ERR_STATE, "Weight transfer not initialized");
    ok(lst_abort(lst));
    ok(lst_init_tcp(lst, NULL));
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE,
          "start_weight_update must be called before update_weights.");
    fails(lst_finish(lst, NULL), LST_ERR_STATE,
          "finish_weight_update called without a matching start_weight_update.");
    ok(lst_start(lst));
    fails(lst_start(lst), LST_ERR_STATE,
          "start_weight_update called while a weight update is already");
    lst_tensor_t unknown = tensors[0];
    unknown.name = "model.embed_tokens.bias";
    fails(lst_update(lst, &unknown, 1, NULL), LST_ERR_INVALID,
          "not in the model: 'model.embed_tokens.bias'");
    /* the connections survived all this */
    ok(lst_update(lst, tensors, N_TENSORS, NULL));
    ok(lst_finish(lst, "after all"));
    expect_everywhere("after all");
}
END_TEST

START_TEST(callers_tensors_are_checked)
{
    open_with((fake_script_t){0}, 0);
    ok(lst_init_tcp(lst, NULL));
    lst_tensor_t t = tensors[0];
    t.name = NULL;
    fails(lst_update(lst, &t, 1, NULL), LST_ERR_INVALID, "tensors[0] needs a name");
    t = tensors[0];
    t.dtype = "float7";
    fails(lst_update(lst, &t, 1, NULL), LST_ERR_INVALID, "unknown dtype float7");
    t = tensors[0];
    t.ndim = 9;
    fails(lst_update(lst, &t, 1, NULL), LST_ERR_INVALID, "more than 8 dimensions");
    t = tensors[0];
    t.data = NULL;
    fails(lst_update(lst, &t, 1, NULL), LST_ERR_INVALID, "has no data");
    t = tensors[0];
    t.name = "\xff\xfe";
    fails(lst_update(lst, &t, 1, NULL), LST_ERR_INVALID, "UTF-8");
    ok(lst_start(lst));
    ok(lst_update(lst, tensors, 0, NULL));
    ok(lst_update(lst, tensors, N_TENSORS, NULL));
    fails(lst_init_tcp(lst, &(lst_tcp_options_t){.connections = 9}), LST_ERR_INVALID, "at most 8");
}
END_TEST

START_TEST(missing_rank_is_named)
{
    open_with((fake_script_t){.rank_1_stays_away = true}, 0.2);
    fails(lst_init_tcp(lst, NULL), LST_ERR_TIMEOUT, "rank 1");
    ck_assert_ptr_null(strstr(lst_last_error(lst), "rank 0"));
}
END_TEST

START_TEST(refused_init)
{
    open_with(
        (fake_script_t){.refuse = "init_weight_transfer_engine", .code = 409, .text = "asleep"}, 0);
    fails(lst_init_tcp(lst, NULL), LST_ERR_STATE, "asleep");
    fails(lst_init_tcp(lst, &(lst_tcp_options_t){.bind_host = "not an address"}), LST_ERR_INVALID,
          "cannot listen on");
}
END_TEST

START_TEST(rank_fails_in_the_middle)
{
    lst_rank_info_t ranks[FAKE_RANKS];
    size_t n;
    open_with((fake_script_t){.sink_fails_at = "half"}, 0);
    ok(lst_init_tcp(lst, NULL));
    ok(lst_start(lst));
    lst_status_t st = lst_update(lst, tensors, N_TENSORS, NULL);
    /* by whichever way the news comes first */
    ck_assert(st == LST_ERR_PEER || st == LST_ERR_INTERNAL);
    ck_assert_msg(strstr(lst_last_error(lst), "the sink refuses 'half'") != NULL, "%s",
                  lst_last_error(lst));
    ok(lst_weight_info(lst, ranks, FAKE_RANKS, &n));
    ck_assert(ranks[0].dirty && ranks[1].dirty);
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE,
          "lst_init_tcp, lst_init_shm or lst_init_nccl first");

    fake_cluster_script(cluster, (fake_script_t){0});
    ok(lst_init_tcp(lst, NULL));
    ok(lst_start(lst));
    ok(lst_update(lst, tensors, N_TENSORS, NULL));
    ok(lst_finish(lst, "repaired"));
    expect_everywhere("repaired");
}
END_TEST

START_TEST(old_front_end_does_not_describe_the_model)
{
    char digest[33];
    open_with((fake_script_t){.no_model = true}, 0);
    ok(lst_init_tcp(lst, NULL));
    fails(lst_digest(lst, tensors, N_TENSORS, digest), LST_ERR_STATE, "did not say how");
}
END_TEST

START_TEST(options_are_checked)
{
    lst_t *none = NULL;
    ck_assert_int_eq(lst_open(&(lst_options_t){0}, &none, err, sizeof err), LST_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err, "endpoint"));
    lst_options_t bad = {.endpoint = "ipc://@x", .timeout_s = -1};
    ck_assert_int_eq(lst_open(&bad, &none, err, sizeof err), LST_ERR_INVALID);
    bad = (lst_options_t){.endpoint = "carrier://pigeon"};
    ck_assert_int_lt(lst_open(&bad, &none, err, sizeof err), 0);
    ck_assert_ptr_null(none);
    lst_close(&none);
    lst_close(NULL);
}
END_TEST

START_TEST(nobody_answers)
{
    lst_t *alone = NULL;
    lst_options_t options = {.endpoint = "ipc://@lockstep-nobody-is-here", .timeout_s = 0.1};
    ck_assert_int_eq(lst_open(&options, &alone, err, sizeof err), LST_OK);
    ck_assert_int_eq(lst_resume(alone), LST_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(
        strstr(lst_last_error(alone), "resume: no answer from ipc://@lockstep-nobody"));
    lst_close(&alone);
}
END_TEST

START_TEST(checkpoints)
{
    lst_checkpoint_t *checkpoint = NULL;
    open_with((fake_script_t){0}, 0);
    char dir[512], path[600];
    snprintf(dir, sizeof dir, "%s/checkpoint", test_tmpdir());
    ck_assert_int_eq(mkdir(dir, 0700), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    ck_assert_int_eq(lst_checkpoint_open(dir, &checkpoint, err, sizeof err), LST_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err, dir));
    const void *data[N_TENSORS] = {embed, norm, half, big};
    lk_error_t why = LK_ERROR_INIT;
    ck_assert_msg(safetensors_write(path, model, data, N_TENSORS, &why) == LK_OK, "%s", why.text);
    ck_assert_msg(lst_checkpoint_open(dir, &checkpoint, err, sizeof err) == LST_OK, "%s", err);
    size_t n = 0;
    const lst_tensor_t *read = lst_checkpoint_tensors(checkpoint, &n);
    ck_assert_uint_eq(n, N_TENSORS);
    ok(lst_init_tcp(lst, NULL));
    ok(lst_start(lst));
    ok(lst_update(lst, read, n, NULL));
    ok(lst_finish(lst, "from a file"));
    expect_everywhere("from a file");
    lst_checkpoint_close(&checkpoint);
    lst_checkpoint_close(&checkpoint);
    lst_checkpoint_close(NULL);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("trainer");
    TCase *tc = tcase_create("library");
    tcase_add_checked_fixture(tc, NULL, teardown);
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, simple_calls);
    tcase_add_loop_test(tc, errors_keep_their_text, 0, LK_ARRAY_LEN(codes));
    tcase_add_loop_test(tc, answers_without_their_field, 0, 5);
    tcase_add_loop_test(tc, whole_updates, 0, 4);
    tcase_add_test(tc, order_and_refusals_come_early);
    tcase_add_test(tc, callers_tensors_are_checked);
    tcase_add_test(tc, missing_rank_is_named);
    tcase_add_test(tc, refused_init);
    tcase_add_test(tc, rank_fails_in_the_middle);
    tcase_add_test(tc, old_front_end_does_not_describe_the_model);
    tcase_add_test(tc, options_are_checked);
    tcase_add_test(tc, nobody_answers);
    tcase_add_test(tc, checkpoints);
    suite_add_tcase(suite, tc);
    return suite;
}
