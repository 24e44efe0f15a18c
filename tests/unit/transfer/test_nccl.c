#include "base/base64.h"
#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/mem_sink.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "transfer/backends/nccl/nccl_receiver.h"
#include "transfer/backends/nccl/nccl_sender.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A trainer (rank 0) and two ranks, each with a device of its own, in one thread, on a clock that
 * moves only when told. */

#define RANKS    2u
#define LIMIT_NS (30 * LK_SECOND_NS)
#define TENSORS  24u

static uint64_t now_ns;

static uint64_t told_now(void *ctx)
{
    return now_ns;
}

static void told_random(void *ctx, void *buf, size_t len)
{
    memset(buf, 7, len);
}

static const lk_env_t env = {.now_ns = told_now, .random = told_random};

static tensor_desc_t model[TENSORS];
static char names[TENSORS][32];
static void *data[TENSORS]; /* the trainer's */
static size_t n_model;

static device_t *devices[RANKS + 1]; /* the last one is the trainer's */
static mem_sink_t *sinks[RANKS];
static void *states[RANKS];
static wte_context_t ctxs[RANKS];
static nccl_sender_t trainer;
static lk_error_t err;

#define ok(expr) ck_assert_msg((expr) == LK_OK, "%s", err.text)

/* Odd sizes, every dtype, empty tensors, one that is larger than any bucket; two that lie back to
 * back in the trainer's memory. */
static void make_model(void)
{
    static const uint64_t sizes[] = {1, 3, 0, 7, 129, 64, 5000, 2, 0, 33};
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("nccl"));
    n_model = TENSORS;
    for (size_t i = 0; i < n_model; i++) {
        uint64_t bytes;
        snprintf(names[i], sizeof names[i], "tensor%zu", i);
        model[i] = (tensor_desc_t){.name = names[i],
                                   .dtype = (lk_dtype_t)(i % LK_DTYPE_COUNT),
                                   .ndim = 1,
                                   .shape = {sizes[(i * 7) % LK_ARRAY_LEN(sizes)]}};
        ck_assert(tensor_desc_bytes(&model[i], &bytes));
        data[i] = malloc(bytes + 1);
        for (uint64_t k = 0; k < bytes; k++) {
            ((uint8_t *)data[i])[k] = (uint8_t)lk_prng_u64(&prng);
        }
    }
}

static void setup(void)
{
    now_ns = 1;
    err = LK_ERROR_INIT;
    make_model();
    wte_nccl_use(&nccl_fake_ops);
    for (uint32_t r = 0; r <= RANKS; r++) {
        ok(device_open("host", 0, &devices[r], &err));
    }
    for (uint32_t r = 0; r < RANKS; r++) {
        sinks[r] = mem_sink_new(model, n_model);
        sinks[r]->device = devices[r];
        states[r] = calloc(1, wte_nccl.state_size);
        ctxs[r] = (wte_context_t){.dp_rank = r,
                                  .dp_size = RANKS,
                                  .ranks_per_replica = 1,
                                  .env = &env,
                                  .no_progress_ns = LIMIT_NS,
                                  .device = devices[r],
                                  .largest_tensor_bytes = 40000};
    }
    ok(nccl_link_open(&trainer.link, &nccl_fake_ops, NULL, devices[RANKS], &env, LIMIT_NS, &err));
}

static void teardown(void)
{
    atomic_store(&nccl_fake_knobs.ending, 0);
    nccl_sender_fini(&trainer);
    for (uint32_t r = 0; r < RANKS; r++) {
        wte_nccl.fini(states[r]);
        free(states[r]);
        mem_sink_destroy(&sinks[r]);
    }
    ck_assert_uint_eq(nccl_fake_reset(), 0);
    for (uint32_t r = 0; r <= RANKS; r++) {
        ck_assert_uint_eq(devices[r]->allocated, 0);
        device_close(&devices[r]);
    }
    for (size_t i = 0; i < n_model; i++) {
        free(data[i]);
    }
    wte_nccl_use(NULL);
}

/* ---- init ---- */

static json_t *info_of(const uint8_t *id, uint32_t world_size)
{
    char text[BASE64_SIZE(NCCL_ID_BYTES)];
    base64_encode(id, NCCL_ID_BYTES, text);
    return json_pack("{s:s, s:i, s:i, s:n}", "nccl_unique_id_b64", text, "rank_offset", 1,
                     "world_size", (int)world_size, "master_address");
}

/* Takes info. */
static void post_init(json_t *info)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        ok(wte_nccl.init_check(info, &ctxs[r], &err));
        ok(wte_nccl.init_post(states[r], info, &ctxs[r], &err));
    }
    json_decref(info);
}

static const uint8_t *new_id(void)
{
    static uint8_t id[NCCL_ID_BYTES];
    ok(nccl_fake_ops.unique_id(NULL, id, &err));
    return id;
}

/* Steps everybody until all are done; nobody may fail. */
static void run_init(bool with_trainer)
{
    lk_status_t st[RANKS + 1];
    for (uint32_t r = 0; r <= RANKS; r++) {
        st[r] = LK_INPROGRESS;
    }
    st[RANKS] = with_trainer ? LK_INPROGRESS : LK_OK;
    for (int turn = 0; turn < 1000; turn++) {
        bool busy = false;
        for (uint32_t r = 0; r <= RANKS; r++) {
            if (st[r] == LK_INPROGRESS) {
                st[r] = r < RANKS ? wte_nccl.init_test(states[r], &err)
                                  : nccl_link_step(&trainer.link, &err);
                ck_assert_msg(st[r] >= 0, "rank %u: %s", r, err.text);
                busy = true;
            }
        }
        if (!busy) {
            return;
        }
    }
    ck_abort_msg("init does not end");
}

static void init_with(json_t *extra)
{
    const uint8_t *id = new_id();
    json_t *info = info_of(id, RANKS + 1);
    if (extra != NULL) {
        json_object_update(info, extra);
        json_decref(extra);
    }
    post_init(info);
    nccl_link_abort(&trainer.link);
    nccl_link_start(&trainer.link, id, RANKS + 1, 0);
    run_init(true);
}

/* ---- updates ---- */

static json_t *update_info(void)
{
    return json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
}

typedef struct {
    bool packed;
    uint64_t buffer;
    uint32_t num_buffers;
} packing_t;

static void post_update(const packing_t *p)
{
    json_t *info = update_info();
    wte_update_t update = {.tensors = model,
                           .n_tensors = n_model,
                           .packed = p->packed,
                           .packed_buffer_size_bytes = p->buffer,
                           .packed_num_buffers = p->num_buffers,
                           .update_info = info};
    for (uint32_t r = 0; r < RANKS; r++) {
        weight_sink_t sink = mem_sink(sinks[r]);
        sink.ops->begin(sink.ctx);
        ok(sink.ops->plan(sink.ctx, model, n_model, &err));
        ok(wte_nccl.update_check(states[r], &update, &err));
        ok(wte_nccl.update_post(states[r], &update, &sink, &err));
    }
    json_decref(info);
}

static void send(const packing_t *p)
{
    ok(nccl_sender_begin(&trainer, model, (const void *const *)data, n_model, p->packed, p->buffer,
                         p->num_buffers, &err));
}

static void run_update(void)
{
    lk_status_t st[RANKS + 1];
    for (uint32_t r = 0; r <= RANKS; r++) {
        st[r] = LK_INPROGRESS;
    }
    for (int turn = 0; turn < 10000; turn++) {
        bool busy = false;
        for (uint32_t r = 0; r <= RANKS; r++) {
            if (st[r] == LK_INPROGRESS) {
                st[r] = r < RANKS ? wte_nccl.update_test(states[r], &err)
                                  : nccl_sender_step(&trainer, &err);
                ck_assert_msg(st[r] >= 0, "rank %u: %s", r, err.text);
                busy = true;
            }
        }
        if (!busy) {
            return;
        }
    }
    ck_abort_msg("the update does not end");
}

static void expect_arrived(void)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        weight_sink_t sink = mem_sink(sinks[r]);
        ck_assert(sink.ops->complete(sink.ctx));
        for (size_t i = 0; i < n_model; i++) {
            ck_assert_mem_eq(sinks[r]->data[i], data[i], sinks[r]->bytes[i]);
        }
    }
}

static void whole_update(const packing_t *p)
{
    for (size_t i = 0; i < n_model; i++) {
        if (sinks[0]->bytes[i] > 0) {
            ((uint8_t *)data[i])[0]++;
        }
    }
    post_update(p);
    send(p);
    run_update();
    expect_arrived();
}

static const packing_t packings[] = {
    {false, 1, 2},   {true, 1, 1},    {true, 64, 2},         {true, 1000, 1},
    {true, 1000, 2}, {true, 1000, 8}, {true, 1ull << 30, 2}, {true, 20000, 3},
};

START_TEST(updates_arrive_whole)
{
    const packing_t *p = &packings[_i / 4];
    atomic_store(&nccl_fake_knobs.lag, _i % 2 ? 3 : 0);
    for (uint32_t r = 0; r < RANKS; r++) {
        sinks[r]->direct = _i % 4 > 1;
    }
    init_with(json_pack("{s:b, s:I, s:i}", "packed", 1, "packed_buffer_size_bytes",
                        (json_int_t)LK_MIN(p->buffer, 100000u), "packed_num_buffers",
                        (int)p->num_buffers));
    uint64_t before[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        before[r] = devices[r]->allocations;
    }
    whole_update(p);
    uint64_t sending = devices[RANKS]->allocations;
    whole_update(p);
    whole_update(p);
    for (uint32_t r = 0; r < RANKS; r++) {
        ck_assert_uint_eq(devices[r]->allocations, before[r]);
    }
    ck_assert_uint_eq(devices[RANKS]->allocations, sending);
}
END_TEST

START_TEST(in_place_needs_no_staging)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        sinks[r]->direct = true;
    }
    init_with(NULL);
    uint64_t before = devices[0]->allocated;
    whole_update(&(packing_t){false, 0, 2});
    ck_assert_uint_eq(devices[0]->allocated, before);
    /* nothing came in between: the sinks' memory is the only one that was written */
    ck_assert_uint_eq(before, 8);
}
END_TEST

START_TEST(tensors_back_to_back_are_sent_from_where_they_lie)
{
    static uint8_t flat[1 << 18];
    uint8_t *at = flat;
    for (size_t i = 0; i < n_model; i++) {
        free(data[i]);
        data[i] = at;
        memset(at, (int)i, sinks[0]->bytes[i]);
        at += sinks[0]->bytes[i];
    }
    init_with(NULL);
    whole_update(&(packing_t){true, 1000, 2});
    ck_assert_uint_eq(devices[RANKS]->allocated, 8);
    for (size_t i = 0; i < n_model; i++) {
        data[i] = NULL;
    }
}
END_TEST

/* While the ranks get ready. What is given up before the first broadcast costs no communicator, and
 * the tensors are no longer read then. */
START_TEST(the_first_bucket_is_packed_ahead)
{
    init_with(NULL);
    send(&(packing_t){true, 20000, 2});
    ck_assert_uint_eq(trainer.next, 0);
    nccl_sender_cancel(&trainer);
    ck_assert_int_eq(trainer.link.phase, NCCL_LINK_UP);
    const uint8_t *at = trainer.link.slots[0];
    for (uint64_t i = 0, sent = 0; sent <= 20000; sent += sinks[0]->bytes[i++]) {
        ck_assert_mem_eq(at + sent, data[i], sinks[0]->bytes[i]);
    }
    for (size_t i = 0; i < n_model; i++) {
        uint8_t *moved = malloc(sinks[0]->bytes[i] + 1);
        memcpy(moved, data[i], sinks[0]->bytes[i]);
        free(data[i]);
        data[i] = moved;
    }
    whole_update(&(packing_t){true, 20000, 2});
}
END_TEST

START_TEST(staging_grows_once_when_an_update_needs_more)
{
    init_with(NULL); /* says nothing of packing: older trainers don't */
    whole_update(&(packing_t){true, 1000, 2});
    uint64_t once = devices[0]->allocations;
    whole_update(&(packing_t){true, 1000, 2});
    ck_assert_uint_eq(devices[0]->allocations, once);
    whole_update(&(packing_t){true, 1 << 20, 2});
    ck_assert_uint_gt(devices[0]->allocations, once);
}
END_TEST

START_TEST(ranks_and_versions_are_told)
{
    init_with(json_pack("{s:i, s:i}", "rank_offset", 1, "world_size", (int)RANKS + 1));
    for (uint32_t r = 0; r < RANKS; r++) {
        json_t *said = json_object();
        wte_nccl.describe(states[r], said);
        ck_assert_int_eq(json_integer_value(json_object_get(said, "nccl_rank")), r + 1);
        ck_assert_int_eq(json_integer_value(json_object_get(said, "nccl_world_size")), RANKS + 1);
        ck_assert_str_eq(json_string_value(json_object_get(said, "nccl_version")), "2.99.1");
        ck_assert_str_eq(json_string_value(json_object_get(said, "nccl_library")),
                         "/lib/fake/libnccl.so.2");
        json_decref(said);
    }
}
END_TEST

/* ---- the store ---- */

START_TEST(ranks_meet_at_the_trainers_store)
{
    int fd = -1;
    uint16_t port = 0;
    uint8_t pickled[PICKLE_UNIQUE_ID_BYTES];
    const uint8_t *id = new_id();
    ok(tcp_listen("127.0.0.1", 0, 8, &fd, &port, &err));
    tcpstore_server_t *store = tcpstore_server_new(fd);
    ck_assert(tcpstore_server_set(store, TCPSTORE_WORKERS_KEY, "1", 1));
    post_init(json_pack("{s:s, s:i, s:i, s:i}", "master_address", "127.0.0.1", "master_port",
                        (int)port, "rank_offset", 1, "world_size", (int)RANKS + 1));
    wte_progress_t progress;
    wte_nccl.progress(states[0], &progress);
    ck_assert_ptr_nonnull(strstr(progress.waiting_for, "the store"));
    for (int turn = 0; tcpstore_server_workers(store) < RANKS + 1; turn++) {
        ck_assert_int_lt(turn, 1000);
        tcpstore_server_step(store);
        for (uint32_t r = 0; r < RANKS; r++) {
            lk_status_t st = wte_nccl.init_test(states[r], &err);
            ck_assert_msg(st == LK_INPROGRESS, "%s", err.text);
            struct pollfd fds[1];
            (void)poll(fds, wte_nccl.pollfds(states[r], fds, 1), 1);
        }
    }
    pickle_unique_id_write(id, pickled);
    ck_assert(tcpstore_server_set(store, TCPSTORE_ID_KEY, pickled, sizeof pickled));
    nccl_link_start(&trainer.link, id, RANKS + 1, 0);
    lk_status_t st[RANKS] = {LK_INPROGRESS, LK_INPROGRESS}, mine = LK_INPROGRESS;
    for (int turn = 0; mine == LK_INPROGRESS || st[0] == LK_INPROGRESS || st[1] == LK_INPROGRESS;
         turn++) {
        ck_assert_int_lt(turn, 1000);
        tcpstore_server_step(store);
        mine = mine == LK_INPROGRESS ? nccl_link_step(&trainer.link, &err) : mine;
        for (uint32_t r = 0; r < RANKS; r++) {
            st[r] = st[r] == LK_INPROGRESS ? wte_nccl.init_test(states[r], &err) : st[r];
            ck_assert_msg(st[r] >= 0, "%s", err.text);
        }
        (void)poll(NULL, 0, st[0] == LK_INPROGRESS ? 1 : 0);
    }
    tcpstore_server_destroy(&store);
    whole_update(&packings[4]);
}
END_TEST

/* ---- failures ---- */

/* Steps a rank's call until it fails; the clock runs. */
static void expect_failure(lk_status_t (*test)(void *state, lk_error_t *err), uint32_t r,
                           lk_status_t status, const char *text)
{
    lk_status_t st;
    uint64_t start = now_ns;
    while ((st = test(states[r], &err)) == LK_INPROGRESS) {
        now_ns += LK_SECOND_NS;
        ck_assert_uint_lt(now_ns - start, 2 * LIMIT_NS);
    }
    ck_assert_msg(st == status, "%d %s", st, err.text);
    ck_assert_msg(strstr(err.text, text) != NULL, "%s", err.text);
}

/* A new life of the trainer; then a whole update. */
static void expect_recovery(void)
{
    nccl_sender_fini(&trainer);
    ok(nccl_link_open(&trainer.link, &nccl_fake_ops, NULL, devices[RANKS], &env, LIMIT_NS, &err));
    init_with(NULL);
    whole_update(&packings[4]);
}

START_TEST(a_trainer_that_never_comes)
{
    post_init(info_of(new_id(), RANKS + 1));
    for (uint32_t r = 0; r < RANKS; r++) {
        expect_failure(wte_nccl.init_test, r, LK_ERR_TIMEOUT,
                       "not all ranks of the communicator came");
        now_ns = 1;
    }
    expect_recovery();
}
END_TEST

START_TEST(a_wrong_world_size)
{
    const uint8_t *id = new_id();
    post_init(info_of(id, RANKS + 2));
    nccl_link_start(&trainer.link, id, RANKS + 1, 0);
    lk_status_t st = nccl_link_step(&trainer.link, &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    for (uint32_t r = 0; r < RANKS; r++) {
        expect_failure(wte_nccl.init_test, r, LK_ERR_TIMEOUT, "is world_size right");
        now_ns = 1;
    }
    expect_recovery();
}
END_TEST

START_TEST(another_nccl_version)
{
    const uint8_t *id = new_id();
    atomic_store(&nccl_fake_knobs.old_version, 1);
    post_init(info_of(id, RANKS + 1));
    nccl_link_start(&trainer.link, id, RANKS + 1, 0);
    lk_status_t st = nccl_link_step(&trainer.link, &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    expect_failure(wte_nccl.init_test, 0, LK_ERR_PEER, "Mismatched NCCL version");
    expect_failure(wte_nccl.init_test, 1, LK_ERR_PEER, "uses another version of NCCL");
    atomic_store(&nccl_fake_knobs.old_version, 0);
    expect_recovery();
}
END_TEST

START_TEST(a_trainer_that_dies_idle)
{
    init_with(NULL);
    whole_update(&packings[2]);
    post_update(&packings[2]); /* and never sends */
    for (uint32_t r = 0; r < RANKS; r++) {
        expect_failure(wte_nccl.update_test, r, LK_ERR_TIMEOUT,
                       "trainer (rank 0 of 3) sent nothing for");
        now_ns = 1;
    }
    expect_recovery();
}
END_TEST

START_TEST(a_trainer_that_dies_in_a_broadcast)
{
    init_with(NULL);
    post_update(&packings[4]);
    send(&packings[4]);
    /* some of it is sent; then it moves no more */
    for (int i = 0; i < _i; i++) {
        lk_status_t st = nccl_sender_step(&trainer, &err);
        ck_assert_int_ge(st, 0);
        for (uint32_t r = 0; r < RANKS && st == LK_INPROGRESS; r++) {
            st = wte_nccl.update_test(states[r], &err);
            ck_assert_int_eq(st, LK_INPROGRESS);
        }
    }
    for (uint32_t r = 0; r < RANKS; r++) {
        wte_progress_t progress;
        wte_nccl.progress(states[r], &progress);
        ck_assert_ptr_nonnull(strstr(progress.waiting_for, "trainer (rank 0 of 3), bucket"));
        expect_failure(wte_nccl.update_test, r, LK_ERR_TIMEOUT, "has not arrived");
        now_ns = 1;
        json_t *info = update_info();
        wte_update_t update = {.tensors = model, .n_tensors = n_model, .update_info = info};
        ck_assert_int_eq(wte_nccl.update_check(states[r], &update, &err), LK_ERR_STATE);
        json_decref(info);
    }
    expect_recovery();
}
END_TEST

START_TEST(other_sizes_than_announced)
{
    init_with(NULL);
    post_update(&packings[4]);
    send(&(packing_t){true, 64, 2});
    lk_status_t st = nccl_sender_step(&trainer, &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    for (uint32_t r = 0; r < RANKS; r++) {
        expect_failure(wte_nccl.update_test, r, LK_ERR_TIMEOUT, "sends other sizes");
        now_ns = 1;
    }
    /* the trainer notices, too */
    while ((st = nccl_sender_step(&trainer, &err)) == LK_INPROGRESS) {
        now_ns += LK_SECOND_NS;
    }
    ck_assert_int_eq(st, LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "was not taken by all of 2 ranks"));
    expect_recovery();
}
END_TEST

START_TEST(a_communicator_that_reports_its_end)
{
    init_with(NULL);
    whole_update(&packings[2]);
    post_update(&packings[2]);
    atomic_store(&nccl_fake_knobs.lost, 1);
    nccl_link_abort(&trainer.link);
    for (uint32_t r = 0; r < RANKS; r++) {
        /* at once: the clock stands still */
        uint64_t before = now_ns;
        expect_failure(wte_nccl.update_test, r, LK_ERR_PEER, "remote process exited");
        ck_assert_uint_eq(before, now_ns);
    }
    atomic_store(&nccl_fake_knobs.lost, 0);
    expect_recovery();
}
END_TEST

START_TEST(a_second_init_replaces_the_first)
{
    init_with(NULL);
    whole_update(&packings[2]);
    init_with(NULL);
    whole_update(&packings[2]);
    /* also one that is still on its way */
    post_init(info_of(new_id(), RANKS + 1));
    lk_status_t st = wte_nccl.init_test(states[0], &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    init_with(NULL);
    whole_update(&packings[2]);
}
END_TEST

START_TEST(init_waits_for_older_communicators_to_end)
{
    init_with(NULL);
    atomic_store(&nccl_fake_knobs.ending, 1);
    ((nccl_receiver_t *)states[0])->link.abort_wait_ms = 5;
    const uint8_t *id = new_id();
    /* aborting waits a while for them, in vain */
    json_t *info = info_of(id, RANKS + 1);
    ok(wte_nccl.init_post(states[0], info, &ctxs[0], &err));
    json_decref(info);
    expect_failure(wte_nccl.init_test, 0, LK_ERR_TIMEOUT,
                   "older, aborted communicator did not end");
    atomic_store(&nccl_fake_knobs.ending, 0);
    expect_recovery();
}
END_TEST

START_TEST(abort_ends_what_is_under_way)
{
    post_init(info_of(new_id(), RANKS + 1));
    wte_nccl.abort(states[0]);
    wte_nccl.abort(states[0]);
    ck_assert_int_eq(wte_nccl.init_test(states[0], &err), LK_ERR_CANCELED);
    ck_assert_int_eq(wte_nccl.init_test(states[0], &err), LK_ERR_STATE);
    init_with(NULL);
    post_update(&packings[2]);
    lk_status_t st = wte_nccl.update_test(states[0], &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    wte_nccl.abort(states[0]);
    ck_assert_int_eq(wte_nccl.update_test(states[0], &err), LK_ERR_CANCELED);
    expect_recovery();
}
END_TEST

START_TEST(a_sink_that_refuses)
{
    init_with(NULL);
    sinks[1]->fail_at = "tensor7";
    post_update(&packings[4]);
    send(&packings[4]);
    lk_status_t st = nccl_sender_step(&trainer, &err);
    ck_assert_int_eq(st, LK_INPROGRESS);
    expect_failure(wte_nccl.update_test, 1, LK_ERR_INTERNAL, "refuses 'tensor7'");
    sinks[1]->fail_at = NULL;
    expect_recovery();
}
END_TEST

START_TEST(no_library)
{
    atomic_store(&nccl_fake_knobs.no_library, true);
    json_t *info = info_of(new_id(), RANKS + 1);
    ck_assert_int_eq(wte_nccl.init_post(states[0], info, &ctxs[0], &err), LK_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "cannot load NCCL"));
    json_decref(info);
    atomic_store(&nccl_fake_knobs.no_library, false);
    expect_recovery();
}
END_TEST

START_TEST(a_library_that_is_not_there_is_named)
{
    const nccl_library_t *library = NULL;
    ck_assert_int_eq(nccl_lib_ops.load("/no/such/libnccl.so.2", &library, &err),
                     LK_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "/no/such/libnccl.so.2"));
    /* one that is there, but isn't NCCL */
    ck_assert_int_eq(nccl_lib_ops.load("libm.so.6", &library, &err), LK_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "is no libnccl"));
    ck_assert_ptr_null(library);
}
END_TEST

/* ---- init_info ---- */

#define GOOD_ID                                                                                    \
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"     \
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="

static const struct {
    const char *json, *text; /* text NULL: accepted */
} infos[] = {
    {"{'rank_offset':1,'world_size':3,'nccl_unique_id_b64':'" GOOD_ID "'}", NULL},
    {"{'rank_offset':1,'world_size':3,'master_address':'h','master_port':1}", NULL},
    {"{'rank_offset':2,'world_size':9,'master_address':'h','master_port':1,"
     "'nccl_unique_id_b64':null,'packed':true,'packed_num_buffers':3}",
     NULL},
    {"{'rank_offset':1,'world_size':3}", "need nccl_unique_id_b64, or both master_address and "
                                         "master_port (got neither)"},
    {"{'rank_offset':1,'world_size':3,'master_address':'h'}", "got only master_address"},
    {"{'rank_offset':1,'world_size':3,'master_port':5}", "got only master_port"},
    {"{'rank_offset':1,'world_size':3,'master_address':'h','nccl_unique_id_b64':'" GOOD_ID "'}",
     "pass nccl_unique_id_b64 OR master_address/master_port, not both"},
    {"{'rank_offset':1,'world_size':3,'nccl_unique_id_b64':'a_-b'}", "not valid standard base64"},
    {"{'rank_offset':1,'world_size':3,'nccl_unique_id_b64':'abc'}", "not valid standard base64"},
    {"{'rank_offset':1,'world_size':3,'nccl_unique_id_b64':'abcd'}",
     "must decode to 128 bytes, got 3"},
    {"{'rank_offset':1,'world_size':3,'nccl_unique_id_b64':''}", "must decode to 128 bytes, got 0"},
    {"{'rank_offset':1,'world_size':2,'master_address':'h','master_port':1}",
     "world_size is 2, but rank_offset 1 and 2 ranks here need at least 3"},
    {"{'rank_offset':0,'world_size':3,'master_address':'h','master_port':1}", "'rank_offset'"},
    {"{'world_size':3,'master_address':'h','master_port':1}", "missing field 'rank_offset'"},
    {"{'rank_offset':1,'master_address':'h','master_port':1}", "missing field 'world_size'"},
    {"{'rank_offset':1,'world_size':3,'master_address':'h','master_port':65536}", "'master_port'"},
    {"{'rank_offset':1,'world_size':3,'master_address':'h','master_port':1,'x':1}",
     "unknown field 'x'"},
};

START_TEST(init_infos)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", infos[_i].json);
    for (char *c = text; *c != '\0'; c++) {
        *c = *c == '\'' ? '"' : *c;
    }
    json_t *info = json_loads(text, 0, NULL);
    ck_assert_ptr_nonnull(info);
    lk_status_t st = wte_nccl.init_check(info, &ctxs[0], &err);
    if (infos[_i].text == NULL) {
        ok(st);
        wte_context_t host = ctxs[0];
        host.device = NULL;
        ck_assert_int_eq(wte_nccl.init_check(info, &host, &err), LK_ERR_UNSUPPORTED);
    } else {
        ck_assert_int_eq(st, LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, infos[_i].text) != NULL, "%s", err.text);
        ck_assert_ptr_eq(strstr(err.text, "Invalid init_info for nccl: "), err.text);
    }
    json_decref(info);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("nccl");
    TCase *tc = tcase_create("engine");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 30);
    tcase_add_loop_test(tc, updates_arrive_whole, 0, 4 * (int)LK_ARRAY_LEN(packings));
    tcase_add_test(tc, in_place_needs_no_staging);
    tcase_add_test(tc, tensors_back_to_back_are_sent_from_where_they_lie);
    tcase_add_test(tc, the_first_bucket_is_packed_ahead);
    tcase_add_test(tc, staging_grows_once_when_an_update_needs_more);
    tcase_add_test(tc, ranks_and_versions_are_told);
    tcase_add_test(tc, ranks_meet_at_the_trainers_store);
    tcase_add_test(tc, a_trainer_that_never_comes);
    tcase_add_test(tc, a_wrong_world_size);
    tcase_add_test(tc, another_nccl_version);
    tcase_add_test(tc, a_trainer_that_dies_idle);
    tcase_add_loop_test(tc, a_trainer_that_dies_in_a_broadcast, 0, 2);
    tcase_add_test(tc, other_sizes_than_announced);
    tcase_add_test(tc, a_communicator_that_reports_its_end);
    tcase_add_test(tc, a_second_init_replaces_the_first);
    tcase_add_test(tc, init_waits_for_older_communicators_to_end);
    tcase_add_test(tc, abort_ends_what_is_under_way);
    tcase_add_test(tc, a_sink_that_refuses);
    tcase_add_test(tc, no_library);
    tcase_add_test(tc, a_library_that_is_not_there_is_named);
    tcase_add_loop_test(tc, init_infos, 0, (int)LK_ARRAY_LEN(infos));
    suite_add_tcase(suite, tc);
    return suite;
}
