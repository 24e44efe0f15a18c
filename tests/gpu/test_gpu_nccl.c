/*
 * test_gpu_nccl.c: both halves of the NCCL transfer over the real libnccl, on two GPUs of this
 * process: arbitrary tensors (odd sizes, every dtype, empty ones, one larger than any bucket), and
 * what goes wrong. Run with CK_FORK=no. LK_TEST_NCCL_LIBRARY names another libnccl.
 */
#include "base/base64.h"
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/backends/nccl/nccl_receiver.h"
#include "transfer/backends/nccl/nccl_sender.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT_NS (5 * LK_SECOND_NS)
#define TENSORS  40u

static tensor_desc_t model[TENSORS];
static char names[TENSORS][32];
static uint64_t bytes_of[TENSORS];
static uint8_t *want[TENSORS];                /* host */
static void *theirs[TENSORS], *mine[TENSORS]; /* on the trainer's GPU, on the rank's */
static bool in_place;
static size_t arrived;

static device_t *rank_gpu, *trainer_gpu;
static device_stream_t *stream; /* of the trainer's GPU */
static device_stream_t *rank_stream;
static wte_context_t ctx;
static void *state;
static nccl_sender_t trainer;
static lk_error_t err;

#define ok(expr) ck_assert_msg((expr) == LK_OK, "%s", err.text)

/* ---- a sink of plain device memory ---- */

static lk_status_t sink_check(void *c, const tensor_desc_t *tensors, size_t n, lk_error_t *e)
{
    return LK_OK;
}

static device_t *sink_device(void *c)
{
    return rank_gpu;
}

static void *sink_direct(void *c, size_t index)
{
    return in_place ? mine[index] : NULL;
}

static lk_status_t sink_tensor(void *c, size_t index, const void *bytes, size_t len,
                               device_stream_t *on, lk_error_t *e)
{
    ck_assert_uint_eq(len, bytes_of[index]);
    arrived++;
    return bytes == mine[index] ? LK_OK
                                : rank_gpu->ops->copy(rank_gpu, mine[index], bytes, len, on, e);
}

static const weight_sink_ops_t sink_ops = {.check = sink_check,
                                           .plan = sink_check,
                                           .device = sink_device,
                                           .device_direct = sink_direct,
                                           .device_tensor = sink_tensor};
static const weight_sink_t sink = {&sink_ops, NULL};

/* ---- tensors ---- */

static void make_model(void)
{
    static const uint64_t sizes[] = {1, 3, 0, 7, 129, 64, 5000011, 2, 0, 33, 262144, 99991};
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("gpu_nccl"));
    for (size_t i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "tensor%zu", i);
        model[i] = (tensor_desc_t){.name = names[i],
                                   .dtype = (lk_dtype_t)(i % LK_DTYPE_COUNT),
                                   .ndim = 1,
                                   .shape = {sizes[(i * 7) % LK_ARRAY_LEN(sizes)]}};
        ck_assert(tensor_desc_bytes(&model[i], &bytes_of[i]));
        want[i] = malloc(bytes_of[i] + 8);
        for (uint64_t k = 0; k < bytes_of[i]; k += 8) {
            uint64_t x = lk_prng_u64(&prng);
            memcpy(want[i] + k, &x, 8);
        }
        ok(trainer_gpu->ops->alloc(trainer_gpu, bytes_of[i], &theirs[i], &err));
        ok(rank_gpu->ops->alloc(rank_gpu, bytes_of[i], &mine[i], &err));
    }
}

/* Other values than the last time. */
static void change_tensors(void)
{
    for (size_t i = 0; i < TENSORS; i++) {
        for (uint64_t k = 0; k < bytes_of[i]; k += 4097) {
            want[i][k]++;
        }
        ok(trainer_gpu->ops->copy(trainer_gpu, theirs[i], want[i], bytes_of[i], stream, &err));
    }
    ok(device_wait(trainer_gpu, stream, &err));
    arrived = 0;
}

static void expect_arrived(void)
{
    ck_assert_uint_eq(arrived, TENSORS);
    for (size_t i = 0; i < TENSORS; i++) {
        uint8_t *got = malloc(bytes_of[i] + 1);
        ok(rank_gpu->ops->copy(rank_gpu, got, mine[i], bytes_of[i], rank_stream, &err));
        ok(device_wait(rank_gpu, rank_stream, &err));
        ck_assert_msg(memcmp(got, want[i], bytes_of[i]) == 0, "tensor %zu differs", i);
        free(got);
    }
}

static void setup(void)
{
    err = LK_ERROR_INIT;
    if (device_count("cuda") < 2) {
        fprintf(stderr, "these tests need two GPUs\n");
        exit(77);
    }
    ok(device_open("cuda", 0, &rank_gpu, &err));
    ok(device_open("cuda", 1, &trainer_gpu, &err));
    ok(trainer_gpu->ops->stream_new(trainer_gpu, &stream, &err));
    ok(rank_gpu->ops->stream_new(rank_gpu, &rank_stream, &err));
    make_model();
    state = calloc(1, wte_nccl.state_size);
    ctx = (wte_context_t){.dp_size = 1,
                          .ranks_per_replica = 1,
                          .env = lk_env_real(),
                          .no_progress_ns = LIMIT_NS,
                          .device = rank_gpu,
                          .largest_tensor_bytes = 8 * 5000011,
                          .nccl_library = getenv("LK_TEST_NCCL_LIBRARY")};
    ok(nccl_link_open(&trainer.link, &nccl_lib_ops, ctx.nccl_library, trainer_gpu, ctx.env,
                      LIMIT_NS, &err));
    printf("# NCCL %s, %s\n", trainer.link.library->version, trainer.link.library->path);
}

static void teardown(void)
{
    nccl_sender_fini(&trainer);
    wte_nccl.fini(state);
    free(state);
    for (size_t i = 0; i < TENSORS; i++) {
        free(want[i]);
        trainer_gpu->ops->free(trainer_gpu, theirs[i]);
        rank_gpu->ops->free(rank_gpu, mine[i]);
    }
    trainer_gpu->ops->stream_destroy(trainer_gpu, stream);
    rank_gpu->ops->stream_destroy(rank_gpu, rank_stream);
    ck_assert_uint_eq(rank_gpu->allocated, 0);
    ck_assert_uint_eq(trainer_gpu->allocated, 0);
    device_close(&rank_gpu);
    device_close(&trainer_gpu);
}

/* ---- sessions ---- */

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static const uint8_t *new_id(void)
{
    static uint8_t id[NCCL_ID_BYTES];
    ok(nccl_lib_ops.unique_id(trainer.link.library, id, &err));
    return id;
}

static void post_init(const uint8_t *id, int world_size)
{
    char text[BASE64_SIZE(NCCL_ID_BYTES)];
    base64_encode(id, NCCL_ID_BYTES, text);
    json_t *info =
        json_pack("{s:s, s:i, s:i, s:b, s:i}", "nccl_unique_id_b64", text, "rank_offset", 1,
                  "world_size", world_size, "packed", 1, "packed_buffer_size_bytes", 1 << 20);
    ok(wte_nccl.init_check(info, &ctx, &err));
    ok(wte_nccl.init_post(state, info, &ctx, &err));
    json_decref(info);
}

static void run_init(void)
{
    lk_status_t a = LK_INPROGRESS, b = LK_INPROGRESS;
    while (a == LK_INPROGRESS || b == LK_INPROGRESS) {
        a = a == LK_INPROGRESS ? wte_nccl.init_test(state, &err) : a;
        ck_assert_msg(a >= 0, "rank: %s", err.text);
        b = b == LK_INPROGRESS ? nccl_link_step(&trainer.link, &err) : b;
        ck_assert_msg(b >= 0, "trainer: %s", err.text);
    }
}

static void init(void)
{
    const uint8_t *id = new_id();
    post_init(id, 2);
    nccl_link_abort(&trainer.link);
    nccl_link_start(&trainer.link, id, 2, 0);
    run_init();
}

typedef struct {
    bool packed;
    uint64_t buffer;
    uint32_t num_buffers;
} packing_t;

static void post_update(const packing_t *p)
{
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    wte_update_t update = {.tensors = model,
                           .n_tensors = TENSORS,
                           .packed = p->packed,
                           .packed_buffer_size_bytes = p->buffer,
                           .packed_num_buffers = p->num_buffers,
                           .update_info = info};
    ok(wte_nccl.update_check(state, &update, &err));
    ok(wte_nccl.update_post(state, &update, &sink, &err));
    json_decref(info);
}

static void send(const packing_t *p)
{
    ok(nccl_sender_begin(&trainer, model, (const void *const *)theirs, TENSORS, p->packed,
                         p->buffer, p->num_buffers, &err));
}

static void run_update(void)
{
    lk_status_t a = LK_INPROGRESS, b = LK_INPROGRESS;
    while (a == LK_INPROGRESS || b == LK_INPROGRESS) {
        a = a == LK_INPROGRESS ? wte_nccl.update_test(state, &err) : a;
        ck_assert_msg(a >= 0, "rank: %s", err.text);
        b = b == LK_INPROGRESS ? nccl_sender_step(&trainer, &err) : b;
        ck_assert_msg(b >= 0, "trainer: %s", err.text);
    }
}

static void whole_update(const packing_t *p)
{
    change_tensors();
    post_update(p);
    send(p);
    run_update();
    expect_arrived();
}

static const packing_t packings[] = {
    {false, 1, 2}, {true, 1, 2}, {true, 1 << 20, 1}, {true, 1 << 20, 2}, {true, 1 << 30, 2},
};

START_TEST(updates_arrive_whole)
{
    init();
    for (size_t i = 0; i < 2 * LK_ARRAY_LEN(packings); i++) {
        in_place = i % 2 == 1;
        whole_update(&packings[i / 2]);
    }
    /* and what was allocated once serves all that follow */
    uint64_t before = rank_gpu->allocations, sending = trainer_gpu->allocations;
    for (size_t i = 0; i < 40; i++) {
        in_place = i % 3 == 0;
        whole_update(&packings[i % LK_ARRAY_LEN(packings)]);
    }
    ck_assert_uint_eq(rank_gpu->allocations, before);
    ck_assert_uint_eq(trainer_gpu->allocations, sending);
}
END_TEST

static void expect_failure(lk_status_t (*test)(void *state, lk_error_t *err), lk_status_t status,
                           const char *text)
{
    lk_status_t st;
    uint64_t start = now();
    while ((st = test(state, &err)) == LK_INPROGRESS) {
        ck_assert_uint_lt(now() - start, 4 * LIMIT_NS);
    }
    printf("# after %.1f s: %s\n", (double)(now() - start) / 1e9, err.text);
    ck_assert_msg(st == status && strstr(err.text, text) != NULL, "%d %s", st, err.text);
}

static void expect_recovery(void)
{
    uint64_t start = now();
    nccl_link_abort(&trainer.link);
    init();
    whole_update(&packings[3]);
    printf("# recovered in %.1f s\n", (double)(now() - start) / 1e9);
}

START_TEST(a_trainer_that_never_comes)
{
    post_init(new_id(), 2);
    expect_failure(wte_nccl.init_test, LK_ERR_TIMEOUT, "not all ranks of the communicator came");
    expect_recovery();
}
END_TEST

START_TEST(a_wrong_world_size)
{
    const uint8_t *id = new_id();
    post_init(id, 3);
    nccl_link_abort(&trainer.link);
    nccl_link_start(&trainer.link, id, 2, 0);
    lk_status_t a = LK_INPROGRESS, b = LK_INPROGRESS;
    lk_error_t theirs_err = LK_ERROR_INIT;
    uint64_t start = now();
    while (a == LK_INPROGRESS || b == LK_INPROGRESS) {
        a = a == LK_INPROGRESS ? wte_nccl.init_test(state, &err) : a;
        b = b == LK_INPROGRESS ? nccl_link_step(&trainer.link, &theirs_err) : b;
        ck_assert_uint_lt(now() - start, 4 * LIMIT_NS);
    }
    printf("# rank: %s\n# trainer: %s\n", err.text, theirs_err.text);
    ck_assert_int_lt(a, 0);
    ck_assert_int_lt(b, 0);
    expect_recovery();
}
END_TEST

START_TEST(a_trainer_that_sends_nothing)
{
    init();
    whole_update(&packings[3]);
    post_update(&packings[3]);
    expect_failure(wte_nccl.update_test, LK_ERR_TIMEOUT, "sent nothing for");
    expect_recovery();
}
END_TEST

START_TEST(other_sizes_than_announced)
{
    init();
    change_tensors();
    post_update(&packings[3]);
    /* half of the tensors: the broadcasts that come are fewer, and the last one is smaller */
    ok(nccl_sender_begin(&trainer, model, (const void *const *)theirs, TENSORS / 2, true, 1 << 20,
                         2, &err));
    lk_status_t a = LK_INPROGRESS, b = LK_INPROGRESS;
    lk_error_t theirs_err = LK_ERROR_INIT;
    uint64_t start = now();
    while (a == LK_INPROGRESS) {
        a = wte_nccl.update_test(state, &err);
        b = b == LK_INPROGRESS ? nccl_sender_step(&trainer, &theirs_err) : b;
        ck_assert_uint_lt(now() - start, 4 * LIMIT_NS);
    }
    printf("# rank: %s\n# trainer: %d %s\n", err.text, b, theirs_err.text);
    ck_assert_int_eq(a, LK_ERR_TIMEOUT);
    expect_recovery();
}
END_TEST

START_TEST(a_second_init)
{
    init();
    whole_update(&packings[3]);
    init();
    whole_update(&packings[0]);
    post_init(new_id(), 2); /* one that is given up on its way */
    lk_status_t st = wte_nccl.init_test(state, &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    init();
    whole_update(&packings[1]);
}
END_TEST

START_TEST(abort_in_a_broadcast)
{
    init();
    post_update(&packings[4]);
    uint64_t start = now();
    while (now() - start < LK_SECOND_NS / 2) {
        lk_status_t st = wte_nccl.update_test(state, &err);
        ck_assert_int_eq(st, LK_INPROGRESS);
    }
    start = now();
    wte_nccl.abort(state);
    printf("# aborted in %.3f s\n", (double)(now() - start) / 1e9);
    ck_assert_int_eq(wte_nccl.update_test(state, &err), LK_ERR_CANCELED);
    expect_recovery();
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("gpu_nccl");
    TCase *tc = tcase_create("two GPUs");
    tcase_add_unchecked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, updates_arrive_whole);
    tcase_add_test(tc, a_second_init);
    tcase_add_test(tc, a_trainer_that_never_comes);
    tcase_add_test(tc, a_wrong_world_size);
    tcase_add_test(tc, a_trainer_that_sends_nothing);
    tcase_add_test(tc, other_sizes_than_announced);
    tcase_add_test(tc, abort_in_a_broadcast);
    suite_add_tcase(suite, tc);
    return suite;
}
