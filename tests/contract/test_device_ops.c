/*
 * The contract of transfer/device_ops.h, over plain memory, over plain memory with the threads of
 * the GPU's kernel run one by one, and over the first GPU where there is one.
 */
#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/device/device.h"
#include "transfer/device/device_host.h"
#include "transfer/device/copies_thread.h"
#include "transfer/device/unpack_plan.h"
#include "transfer/device/unpack_thread.h"
#include "transfer/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HOST, THREADS, CUDA, N_KINDS };

static device_t *device;
static device_stream_t *stream;
static lk_error_t err;
static lk_prng_t prng;

/* ---- the kernel's blocks and threads, one after the other ---- */

static const device_ops_t *host_ops;

static void run_unit(const unpack_launch_t *launch, const unpack_group_t *group, uint64_t unit)
{
    static uint64_t mixed[2][UNPACK_PER_THREAD];
    for (uint32_t c = 0; c < launch->chunks; c++) {
        uint64_t chunk = (unit * launch->chunks + c) * UNPACK_CHUNK;
        for (uint32_t thread = 0; thread < UNPACK_THREADS; thread++) {
            unpack_mix_indices(group->index + chunk, thread, mixed);
            for (uint32_t i = 0; i < group->count; i++) {
                const unpack_item_t *item = &launch->items[group->first + i];
                uint64_t sum[2] = {0, 0}, *lanes = (uint64_t *)(uintptr_t)item->lanes;
                if (chunk < item->numel) {
                    unpack_thread(item, group->index, chunk, thread,
                                  (const uint64_t(*)[UNPACK_PER_THREAD])mixed, sum);
                }
                if (lanes != NULL) {
                    lanes[0] += sum[0];
                    lanes[1] += sum[1];
                }
            }
        }
    }
}

static void run_copies(copies_launch_t *launch)
{
    for (uint32_t chunk = 0; chunk < launch->n_chunks; chunk++) {
        const copies_item_t *item = &launch->items[copies_item_of(launch, chunk)];
        for (uint32_t thread = 0; thread < COPIES_THREADS; thread++) {
            copies_thread(item, chunk, thread);
        }
    }
    launch->n_items = launch->n_chunks = 0;
}

/* The copies among the pieces, by the other kernel; *rest: those that are left. */
static size_t threads_copies(const device_piece_t *pieces, size_t n, device_piece_t *rest)
{
    static copies_launch_t launch;
    size_t n_rest = 0;
    for (size_t i = 0; i < n; i++) {
        const device_piece_t *p = &pieces[i];
        uint64_t bytes = p->rows * p->cols * dtype_bytes(p->src_dtype);
        if (!unpack_is_copy(p)) {
            rest[n_rest++] = *p;
        } else if (!copies_add(&launch, (uintptr_t)p->src, (uintptr_t)p->dst, bytes)) {
            run_copies(&launch);
            ck_assert(copies_add(&launch, (uintptr_t)p->src, (uintptr_t)p->dst, bytes));
        }
    }
    run_copies(&launch);
    return n_rest;
}

static lk_status_t threads_unpack(device_t *self, const device_piece_t *pieces, size_t n,
                                  device_stream_t *on, lk_error_t *e)
{
    unpack_launch_t launch;
    LK_RETURN_IF_ERROR(unpack_check(pieces, n, e));
    LK_RETURN_IF_ERROR(device_wait(self, on, e));
    device_piece_t *rest = malloc((n + 1) * sizeof *rest);
    n = threads_copies(pieces, n, rest);
    for (size_t done = 0; done < n;) {
        done += unpack_plan(rest + done, n - done, &launch);
        uint32_t g = 0;
        for (uint32_t unit = 0; unit < launch.n_units; unit++) {
            while (g + 1 < launch.n_groups && launch.groups[g + 1].first_unit <= unit) {
                g++;
            }
            run_unit(&launch, &launch.groups[g], unit - launch.groups[g].first_unit);
        }
    }
    free(rest);
    return LK_OK;
}

/* ---- the device of a test ---- */

static bool open_device(int kind)
{
    static device_ops_t threads_ops;
    err = LK_ERROR_INIT;
    lk_prng_seed(&prng, test_seed("device_ops") + (uint64_t)kind);
    if (kind == CUDA && device_count("cuda") == 0) {
        return false; /* said by test_absent */
    }
    ck_ok(device_open(kind == CUDA ? "cuda" : "host", 0, &device, &err));
    if (kind == THREADS) {
        host_ops = device->ops;
        threads_ops = *host_ops;
        threads_ops.unpack = threads_unpack;
        device->ops = &threads_ops;
    }
    ck_assert_uint_eq(device->ops->abi_version, DEVICE_OPS_ABI_VERSION);
    ck_assert_uint_eq(strlen(device->uuid), DEVICE_UUID_SIZE - 1);
    ck_ok(device->ops->stream_new(device, &stream, &err));
    return true;
}

static void close_device(void)
{
    device->ops->stream_destroy(device, stream);
    ck_assert_uint_eq(device->allocated, 0);
    device_close(&device);
}

static void *alloc(uint64_t bytes)
{
    void *out = NULL;
    ck_assert_msg(device->ops->alloc(device, bytes, &out, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq((uintptr_t)out % 256, 0);
    return out;
}

static void finish(void)
{
    ck_assert_msg(device_wait(device, stream, &err) == LK_OK, "%s", err.text);
}

static void copy(void *to, const void *from, uint64_t bytes)
{
    ck_ok(device->ops->copy(device, to, from, bytes, stream, &err));
}

/* ---- memory, streams, events ---- */

START_TEST(test_copies_in_order)
{
    if (!open_device(_i)) {
        return;
    }
    uint8_t *memory = alloc(4096), *other = alloc(4096);
    void *host = NULL;
    uint64_t before = device->allocations;
    ck_ok(device->ops->alloc_host(device, 4096, &host, &err));
    ck_assert_uint_eq(device->allocations, before + 1);
    memset(host, 7, 4096);
    copy(memory, host, 4096);
    ck_ok(device->ops->zero(device, memory + 1, 3, stream, &err));
    copy(other, memory, 4096);
    uint8_t back[4096];
    copy(back, other, sizeof back);
    finish();
    for (int i = 0; i < 4096; i++) {
        ck_assert_uint_eq(back[i], i >= 1 && i <= 3 ? 0 : 7);
    }
    device->ops->free_host(device, host);
    device->ops->free(device, memory);
    device->ops->free(device, other);
    device->ops->free(device, NULL);
    close_device();
}
END_TEST

START_TEST(test_events_order_streams)
{
    if (!open_device(_i)) {
        return;
    }
    enum { N = 1 << 20 };
    device_stream_t *second = NULL;
    device_event_t *event = NULL;
    char *memory = alloc(N), *host = malloc(N), *back = malloc(N);
    ck_ok(device->ops->stream_new(device, &second, &err));
    ck_ok(device->ops->event_new(device, &event, &err));
    ck_ok(device->ops->stream_wait(device, second, event, &err)); /* never recorded: no wait */
    ck_ok(device->ops->event_test(device, event, &err));
    for (int turn = 0; turn < 10; turn++) {
        memset(host, turn, N);
        ck_ok(device->ops->copy(device, memory, host, N, stream, &err));
        ck_ok(device->ops->event_record(device, event, stream, &err));
        ck_ok(device->ops->stream_wait(device, second, event, &err));
        ck_ok(device->ops->copy(device, back, memory, N, second, &err));
        ck_ok(device_wait(device, second, &err));
        ck_ok(device->ops->event_test(device, event, &err));
        ck_assert_int_eq(back[0], turn);
        ck_assert_int_eq(back[N - 1], turn);
    }
    device->ops->event_destroy(device, event);
    device->ops->event_destroy(device, NULL);
    device->ops->stream_destroy(device, second);
    device->ops->stream_destroy(device, NULL);
    device->ops->free(device, memory);
    free(host);
    free(back);
    close_device();
}
END_TEST

START_TEST(test_too_much_memory)
{
    if (!open_device(_i)) {
        return;
    }
    void *out = NULL;
    ck_assert_int_eq(device->ops->alloc(device, 1ull << 46, &out, &err), LK_ERR_NO_MEMORY);
    ck_assert(out == NULL && strstr(err.text, "no memory") != NULL);
    device->ops->free(device, alloc(64)); /* it goes on */
    close_device();
}
END_TEST

/* ---- unpack against dtype_convert and digest_add ---- */

#define ROOM (96u << 10) /* bytes of source and of destination, of a piece */

typedef struct {
    device_piece_t piece; /* with addresses in host memory */
    uint8_t *src, *dst;
    uint64_t src_at, dst_at; /* offsets in the device's */
    uint64_t lanes[2];
} case_t;

static const lk_dtype_t floats[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16, LK_DTYPE_F64};

static void random_values(uint8_t *out, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)lk_prng_u64(&prng);
    }
}

static void make_case(case_t *c, size_t i)
{
    bool same = lk_prng_below(&prng, 2) == 0;
    device_piece_t *p = &c->piece;
    p->src_dtype = same ? (lk_dtype_t)lk_prng_below(&prng, LK_DTYPE_COUNT)
                        : floats[lk_prng_below(&prng, LK_ARRAY_LEN(floats))];
    p->dst_dtype = same ? p->src_dtype : floats[lk_prng_below(&prng, LK_ARRAY_LEN(floats))];
    uint64_t most = (ROOM - 64) / 8;
    uint64_t numel =
        lk_prng_below(&prng, 4) == 0 ? lk_prng_below(&prng, 20) : lk_prng_below(&prng, most);
    p->rows = lk_prng_below(&prng, 3) == 0 ? 1 + lk_prng_below(&prng, 9) : 1;
    p->cols = numel / p->rows;
    uint64_t slack = p->rows > 1 ? (most - p->rows * p->cols) / p->rows : 0;
    p->dst_pitch = p->cols + LK_MIN(slack, lk_prng_below(&prng, 17));
    p->first = lk_prng_below(&prng, 3) == 0 ? lk_prng_below(&prng, 3) * 4096 : 0;
    c->src_at = i * ROOM + lk_prng_below(&prng, 33);
    c->dst_at = i * ROOM + lk_prng_below(&prng, 5) * dtype_bytes(p->dst_dtype);
}

static void expect(case_t *c)
{
    device_piece_t *p = &c->piece;
    digest_t digest = {{0}};
    for (uint64_t row = 0; row < p->rows; row++) {
        const uint8_t *from = c->src + c->src_at + row * p->cols * dtype_bytes(p->src_dtype);
        uint8_t *to = c->dst + c->dst_at + row * p->dst_pitch * dtype_bytes(p->dst_dtype);
        ck_ok(dtype_convert(to, p->dst_dtype, from, p->src_dtype, p->cols));
        ck_ok(digest_add(&digest, from, p->src_dtype, p->dst_dtype, p->cols,
                         p->first + row * p->cols));
    }
    c->lanes[0] = digest.lane[0];
    c->lanes[1] = digest.lane[1];
}

#define CASES 150u /* more than a launch holds */

START_TEST(test_unpack)
{
    if (!open_device(_i)) {
        return;
    }
    static case_t cases[CASES];
    static device_piece_t pieces[CASES];
    uint8_t *src = malloc(CASES * ROOM), *dst = calloc(CASES, ROOM), *back = malloc(CASES * ROOM);
    uint8_t *on_src = alloc(CASES * ROOM), *on_dst = alloc(CASES * ROOM);
    uint64_t *on_lanes = alloc(sizeof(uint64_t[CASES][2])), lanes[CASES][2];
    for (int turn = 0; turn < 3; turn++) {
        random_values(src, CASES * ROOM);
        memset(dst, 0, CASES * ROOM);
        for (size_t i = 0; i < CASES; i++) {
            cases[i] = (case_t){.src = src, .dst = dst};
            make_case(&cases[i], i);
            bool only_digest = turn == 2 && i % 5 == 0, no_digest = turn == 1 && i % 4 == 0;
            uint8_t *keep = cases[i].dst;
            cases[i].dst =
                only_digest ? malloc(CASES * ROOM) : keep; /* written, and not looked at */
            expect(&cases[i]);
            if (only_digest) {
                free(cases[i].dst);
            }
            pieces[i] = cases[i].piece;
            pieces[i].src = on_src + cases[i].src_at;
            pieces[i].dst = only_digest ? NULL : on_dst + cases[i].dst_at;
            pieces[i].lanes = no_digest ? NULL : on_lanes + 2 * i;
            cases[i].lanes[0] *= !no_digest;
            cases[i].lanes[1] *= !no_digest;
        }
        copy(on_src, src, CASES * ROOM);
        ck_ok(device->ops->zero(device, on_dst, CASES * ROOM, stream, &err));
        ck_ok(device->ops->zero(device, on_lanes, sizeof lanes, stream, &err));
        uint64_t before = device->allocations;
        device->beside = turn == 1; /* fewer blocks, the same result */
        ck_ok(device->ops->unpack(device, pieces, CASES, stream, &err));
        device->beside = false;
        ck_assert_uint_eq(device->allocations, before);
        memset(pieces, 0xAB, sizeof pieces); /* they were copied */
        copy(back, on_dst, CASES * ROOM);
        copy(lanes, on_lanes, sizeof lanes);
        finish();
        for (size_t i = 0; i < CASES; i++) {
            const device_piece_t *p = &cases[i].piece;
            ck_assert_msg(memcmp(back + i * ROOM, dst + i * ROOM, ROOM) == 0 &&
                              lanes[i][0] == cases[i].lanes[0] && lanes[i][1] == cases[i].lanes[1],
                          "turn %d, case %zu: %s to %s, %llu x %llu, pitch %llu, first %llu, at "
                          "%llu",
                          turn, i, dtype_torch_name(p->src_dtype), dtype_torch_name(p->dst_dtype),
                          (unsigned long long)p->rows, (unsigned long long)p->cols,
                          (unsigned long long)p->dst_pitch, (unsigned long long)p->first,
                          (unsigned long long)cases[i].src_at % ROOM);
        }
    }
    device->ops->free(device, on_src);
    device->ops->free(device, on_dst);
    device->ops->free(device, on_lanes);
    free(src);
    free(dst);
    free(back);
    close_device();
}
END_TEST

/* Tensors of many units, in place, several to a group. */
START_TEST(test_digest_of_large_tensors)
{
    if (!open_device(_i)) {
        return;
    }
    static const uint64_t sizes[] = {1, 4095, 4096, 4097, 70001, 262144, 262147, 500009, 500009};
    enum { N = sizeof sizes / sizeof sizes[0] };
    uint64_t lanes[N][2], most = 500009;
    for (int wide = 0; wide < 2; wide++) {
        lk_dtype_t dtype = wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
        uint64_t bytes = most * dtype_bytes(dtype) + 64;
        uint8_t *host = malloc(bytes), *memory = alloc(bytes);
        uint64_t *on_lanes = alloc(sizeof lanes);
        device_piece_t pieces[N];
        random_values(host, bytes);
        copy(memory, host, bytes);
        ck_ok(device->ops->zero(device, on_lanes, sizeof lanes, stream, &err));
        for (size_t i = 0; i < N; i++) {
            pieces[i] = (device_piece_t){.src = memory + i,
                                         .src_dtype = dtype,
                                         .dst_dtype = dtype,
                                         .rows = 1,
                                         .cols = sizes[i],
                                         .lanes = on_lanes + 2 * i};
        }
        ck_ok(device->ops->unpack(device, pieces, N, stream, &err));
        copy(lanes, on_lanes, sizeof lanes);
        finish();
        for (size_t i = 0; i < N; i++) {
            digest_t want = {{0}};
            ck_ok(digest_add(&want, host + i, dtype, dtype, sizes[i], 0));
            ck_assert_msg(want.lane[0] == lanes[i][0] && want.lane[1] == lanes[i][1],
                          "%s, %llu elements", dtype_torch_name(dtype),
                          (unsigned long long)sizes[i]);
        }
        device->ops->free(device, memory);
        device->ops->free(device, on_lanes);
        free(host);
    }
    close_device();
}
END_TEST

/* Sizes around vectors and chunks, more runs than a launch takes, aligned and not. */
START_TEST(test_copies)
{
    if (!open_device(_i)) {
        return;
    }
    static const uint64_t sizes[] = {0, 1, 15, 16, 17, 4096, 32767, 32768, 32769, 65552, 100003};
    enum { N = 2 * 11 * 6, PLACE = 100096, SIZES = sizeof sizes / sizeof sizes[0] };
    uint8_t *host = malloc(N * PLACE), *back = malloc(N * PLACE), *want = calloc(N, PLACE);
    uint8_t *from = alloc(N * PLACE), *to = alloc(N * PLACE);
    device_piece_t pieces[N];
    random_values(host, N * PLACE);
    copy(from, host, N * PLACE);
    ck_ok(device->ops->zero(device, to, N * PLACE, stream, &err));
    for (size_t i = 0; i < N; i++) {
        uint64_t bytes = sizes[i % SIZES], src = i * PLACE + (i % 3 == 1 ? 3 : 0);
        uint64_t dst = i * PLACE + (i % 5 == 1 ? 16 : i % 5 == 2 ? 5 : 0);
        pieces[i] = (device_piece_t){.src = from + src,
                                     .src_dtype = LK_DTYPE_U8,
                                     .dst_dtype = LK_DTYPE_U8,
                                     .dst = to + dst,
                                     .rows = 1,
                                     .cols = bytes,
                                     .dst_pitch = bytes};
        memcpy(want + dst, host + src, bytes);
    }
    for (int beside = 0; beside < 2; beside++) {
        device->beside = beside == 1;
        ck_ok(device->ops->unpack(device, pieces, N, stream, &err));
    }
    device->beside = false;
    copy(back, to, N * PLACE);
    finish();
    ck_assert(memcmp(back, want, N * PLACE) == 0);
    device->ops->free(device, from);
    device->ops->free(device, to);
    free(host);
    free(back);
    free(want);
    close_device();
}
END_TEST

START_TEST(test_unpack_refuses)
{
    if (!open_device(_i)) {
        return;
    }
    device_piece_t piece = {.src_dtype = LK_DTYPE_I32, .dst_dtype = LK_DTYPE_F32, .rows = 1};
    ck_assert_int_eq(device->ops->unpack(device, &piece, 1, stream, &err), LK_ERR_UNSUPPORTED);
    ck_assert_str_eq(err.text, "cannot convert int32 to float32");
    close_device();
}
END_TEST

/* ---- what only some have ---- */

START_TEST(test_host_exports)
{
    ck_assert(open_device(HOST));
    uint8_t handle[DEVICE_IPC_HANDLE_SIZE], event_handle[DEVICE_IPC_HANDLE_SIZE];
    char *memory = alloc(64);
    device_event_t *event = NULL, *theirs = NULL;
    void *mapped = NULL;
    uint64_t bytes = 0;
    ck_ok(device->ops->event_new(device, &event, &err));
    device_host_export(memory, 64, handle);
    device_host_export_event(event, event_handle);
    ck_ok(device->ops->ipc_open(device, handle, &mapped, &bytes, &err));
    ck_assert_ptr_eq(mapped, memory);
    ck_assert_uint_eq(bytes, 64);
    ck_ok(device->ops->ipc_event(device, event_handle, &theirs, &err));
    ck_assert_int_eq(device->ops->ipc_open(device, event_handle, &mapped, &bytes, &err), LK_ERR_IO);
    device->ops->ipc_close(device, memory);
    ck_assert_uint_eq(device_host_unexport(), 0);
    ck_assert_int_eq(device->ops->ipc_open(device, handle, &mapped, &bytes, &err), LK_ERR_IO);
    device->ops->event_destroy(device, event);
    device->ops->event_destroy(device, theirs);
    device->ops->free(device, memory);
    close_device();
}
END_TEST

/* The stand-in is lazy: that is what it is for. */
START_TEST(test_host_runs_nothing_early)
{
    ck_assert(open_device(HOST));
    char *memory = alloc(64), host[64], back[64] = {0};
    memset(host, 5, sizeof host);
    copy(memory, host, sizeof host);
    copy(back, memory, sizeof back);
    ck_assert_int_eq(back[0], 0);
    finish();
    ck_assert_int_eq(back[0], 5);
    device_host_break(device);
    ck_assert_int_eq(device->ops->copy(device, back, memory, 1, stream, &err), LK_ERR_INTERNAL);
    ck_assert_int_eq(device->ops->stream_test(device, stream, &err), LK_ERR_INTERNAL);
    device->ops->free(device, memory);
    close_device();
}
END_TEST

START_TEST(test_absent)
{
    device_t *out = NULL;
    lk_error_t e = LK_ERROR_INIT;
    ck_assert_int_eq(device_open("abacus", 0, &out, &e), LK_ERR_UNSUPPORTED);
    int beyond = (int)device_count("cuda");
    ck_assert_int_eq(device_open("cuda", beyond, &out, &e), LK_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(e.text, "GPU ") == e.text, "%s", e.text);
    ck_assert(out == NULL);
    printf("# GPUs: %d; one more is refused: %s\n", beyond, e.text);
    device_close(&out);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("device_ops");
    TCase *tc = tcase_create("contract");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_copies_in_order, 0, N_KINDS);
    tcase_add_loop_test(tc, test_events_order_streams, 0, N_KINDS);
    tcase_add_loop_test(tc, test_too_much_memory, 0, N_KINDS);
    tcase_add_loop_test(tc, test_unpack, 0, N_KINDS);
    tcase_add_loop_test(tc, test_digest_of_large_tensors, 0, N_KINDS);
    tcase_add_loop_test(tc, test_copies, 0, N_KINDS);
    tcase_add_loop_test(tc, test_unpack_refuses, 0, N_KINDS);
    tcase_add_test(tc, test_host_exports);
    tcase_add_test(tc, test_host_runs_nothing_early);
    tcase_add_test(tc, test_absent);
    suite_add_tcase(suite, tc);
    return suite;
}
