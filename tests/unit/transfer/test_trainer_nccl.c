/* The trainer's library over NCCL: communicators and devices are stand-ins, the rest is real. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "tests/unit/transfer/fake_cluster.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/device/device.h"
#include "transfer/trainer/lst.h"

#include <stdlib.h>
#include <string.h>

#define N_TENSORS 4
#define BIG       (1u << 20)

static float embed[12], norm[5];
static uint16_t half[21], big[BIG];
static lst_tensor_t tensors[N_TENSORS];
static const tensor_desc_t model[N_TENSORS] = {
    {.name = "model.embed_tokens.weight", .dtype = LK_DTYPE_F32, .ndim = 2, .shape = {3, 4}},
    {.name = "model.norm.weight", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {5}},
    {.name = "half", .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {21}},
    {.name = "big", .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {BIG}},
};

static fake_cluster_t *cluster;
static lst_t *lst;
static device_t *device;

#define ok(expr) ck_assert_msg((expr) == LST_OK, "%s", lst_last_error(lst))
#define fails(expr, status, part)                                                                  \
    do {                                                                                           \
        ck_assert_int_eq(expr, status);                                                            \
        ck_assert_msg(strstr(lst_last_error(lst), part) != NULL, "%s", lst_last_error(lst));       \
    } while (0)

static void open_cluster(fake_script_t script, double no_progress_s)
{
    char text[1024];
    lk_error_t err = LK_ERROR_INIT;
    for (size_t i = 0; i < BIG; i++) {
        big[i] = (uint16_t)(i * 7 % 16000);
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
    wte_nccl_use(&nccl_fake_ops);
    script.no_progress_s = no_progress_s;
    cluster = fake_cluster_new(model, N_TENSORS, script);
    lst_options_t options = {.endpoint = fake_cluster_endpoint(cluster),
                             .timeout_s = 60,
                             .no_progress_s = no_progress_s};
    ck_assert_msg(lst_open(&options, &lst, text, sizeof text) == LST_OK, "%s", text);
    ck_assert_msg(device_open("host", 0, &device, &err) == LK_OK, "%s", err.text);
}

static void open_with(fake_script_t script, double no_progress_s)
{
    script.nccl = true;
    open_cluster(script, no_progress_s);
    ck_assert_int_eq(lst_nccl_use(lst, &nccl_fake_ops, device), LK_OK);
}

static void teardown(void)
{
    lst_close(&lst);
    fake_cluster_destroy(&cluster);
    device_close(&device);
    ck_assert_uint_eq(nccl_fake_reset(), 0);
    wte_nccl_use(NULL);
}

static void whole_session(const lst_update_options_t *how)
{
    lst_rank_info_t ranks[FAKE_RANKS];
    char digest[33];
    size_t n = 0;
    embed[0]++;
    big[BIG - 1]++;
    ok(lst_start(lst));
    ok(lst_update(lst, tensors, N_TENSORS, how));
    ok(lst_finish(lst, "v1"));
    ok(lst_digest(lst, tensors, N_TENSORS, digest));
    ok(lst_weight_info(lst, ranks, FAKE_RANKS, &n));
    ck_assert_uint_eq(n, FAKE_RANKS);
    for (unsigned r = 0; r < FAKE_RANKS; r++) {
        mem_sink_t *sink = fake_cluster_sink(cluster, r);
        ck_assert_mem_eq(sink->data[0], embed, sizeof embed);
        ck_assert_mem_eq(sink->data[3], big, sizeof big);
        ck_assert_str_eq(ranks[r].version, "v1");
    }
}

START_TEST(whole_updates)
{
    static const lst_update_options_t ways[] = {{false, 0}, {true, 0}, {true, 50}};
    open_with((fake_script_t){0}, 0);
    ok(lst_init_nccl(lst, &(lst_nccl_options_t){.store = _i % 2 == 1,
                                                .packed = _i >= 2,
                                                .packed_buffer_size_bytes = 1 << 20}));
    for (size_t i = 0; i < LK_ARRAY_LEN(ways); i++) {
        whole_session(&ways[i]);
    }
    lst_stats_t stats;
    lst_stats(lst, &stats);
    ck_assert_uint_eq(stats.updates, 3);
    ck_assert_uint_eq(stats.last_bytes, sizeof embed + sizeof norm + sizeof half + sizeof big);
    /* again, also the other way to meet */
    ok(lst_init_nccl(lst, &(lst_nccl_options_t){.store = _i % 2 == 0}));
    whole_session(&ways[1]);
}
END_TEST

START_TEST(a_refusal_ends_the_communicator_and_init_makes_another)
{
    open_with((fake_script_t){0}, 0);
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE, "lst_init_nccl first");
    ok(lst_init_nccl(lst, NULL));
    /* out of order: the cluster says no while the trainer sends */
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE, "must be called before");
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE, "lst_init_nccl first");
    ok(lst_init_nccl(lst, NULL));
    whole_session(NULL);
}
END_TEST

START_TEST(a_rank_that_fails_in_the_middle)
{
    open_with((fake_script_t){.sink_fails_at = "half"}, 1);
    ok(lst_init_nccl(lst, NULL));
    ok(lst_start(lst));
    ck_assert_int_lt(lst_update(lst, tensors, N_TENSORS, NULL), 0);
    ck_assert_ptr_nonnull(strstr(lst_last_error(lst), "refuses 'half'"));
    fake_cluster_script(cluster, (fake_script_t){.nccl = true});
    ok(lst_init_nccl(lst, NULL));
    whole_session(NULL);
}
END_TEST

START_TEST(a_rank_that_stays_away)
{
    open_with((fake_script_t){.rank_1_stays_away = true}, 0.5);
    lst_status_t st = lst_init_nccl(lst, &(lst_nccl_options_t){.store = _i == 1});
    ck_assert_msg(st == LST_ERR_TIMEOUT, "%d %s", st, lst_last_error(lst));
    /* whoever notices first: the trainer, or the rank that came */
    const char *text = lst_last_error(lst);
    ck_assert_msg(_i == 1 ? strstr(text, "2 of 3") || strstr(text, "had counted 2")
                          : strstr(text, "not all ranks") != NULL,
                  "%s", text);
    fake_cluster_script(cluster, (fake_script_t){.nccl = true});
    ok(lst_init_nccl(lst, NULL));
    whole_session(NULL);
}
END_TEST

START_TEST(without_a_gpu_it_says_so)
{
    open_with((fake_script_t){0}, 0);
    lst_nccl_fini(lst);
    lst_status_t st = lst_init_nccl(lst, &(lst_nccl_options_t){.device = 1000000});
    ck_assert_int_eq(st, LST_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(lst_last_error(lst), "GPU 1000000"));
}
END_TEST

/* Over CUDA IPC the tensors' owner sends the handles; the rest is the library's. */
START_TEST(ipc_connects_and_digests)
{
    char over_ipc[33], here[33];
    const char *reply = NULL;
    open_cluster((fake_script_t){.ipc = true}, 20);
    lst_ipc_use(lst, device);
    fails(lst_digest(lst, tensors, 2, over_ipc), LST_ERR_STATE, "lst_init_ipc");
    ok(lst_init_ipc(lst, &(lst_ipc_options_t){.packed = true}));
    ok(lst_digest(lst, tensors, 2, over_ipc));
    ok(lst_start(lst));
    fails(lst_update(lst, tensors, N_TENSORS, NULL), LST_ERR_STATE, "over CUDA IPC");
    fails(lst_call(lst, "update_weights",
                   "{\"update_info\": {\"names\": [\"model.norm.weight\"], \"dtype_names\": "
                   "[\"float32\"], \"shapes\": [[5]]}}",
                   &reply),
          LST_ERR_INVALID, "ipc_handles_pickled");
    ok(lst_abort(lst));
    lst_close(&lst);
    fake_cluster_destroy(&cluster);
    device_close(&device);
    open_with((fake_script_t){0}, 20);
    ok(lst_init_nccl(lst, NULL));
    ok(lst_digest(lst, tensors, 2, here));
    ck_assert_str_eq(over_ipc, here);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("trainer_nccl");
    TCase *tc = tcase_create("trainer");
    tcase_add_checked_fixture(tc, NULL, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, whole_updates, 0, 4);
    tcase_add_test(tc, ipc_connects_and_digests);
    tcase_add_test(tc, a_refusal_ends_the_communicator_and_init_makes_another);
    tcase_add_test(tc, a_rank_that_fails_in_the_middle);
    tcase_add_loop_test(tc, a_rank_that_stays_away, 0, 2);
    tcase_add_test(tc, without_a_gpu_it_says_so);
    suite_add_tcase(suite, tc);
    return suite;
}
