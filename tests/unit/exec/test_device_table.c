/*
 * Weights in a device's memory against the same weights in a weight table: over plain memory as a
 * device, and over the first GPU where there is one.
 */
#include "base/check.h"
#include "base/prng.h"
#include "engine_core/exec/store/device_table.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"
#include "transfer/device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const kinds[] = {"host", "cuda"};
#define N_KINDS 2

static device_t *device;
static device_stream_t *stream;
static lk_error_t err;

static bool open_device(int kind)
{
    err = LK_ERROR_INIT;
    if (device_count(kinds[kind]) == 0) {
        return false;
    }
    ck_ok(device_open(kinds[kind], 0, &device, &err));
    ck_ok(device->ops->stream_new(device, &stream, &err));
    return true;
}

static void close_device(void)
{
    device->ops->stream_destroy(device, stream);
    ck_assert_uint_eq(device->allocated, 0);
    device_close(&device);
}

static device_table_t *make(const char *name, lk_dtype_t stored, uint32_t rank, uint32_t size)
{
    model_config_t config;
    model_fixture_config(name, &config);
    device_table_t *table = device_table_new(device, &config, stored, rank, size, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    return table;
}

static digest_t digest_of(device_table_t *table)
{
    weight_sink_t sink = device_table_sink(table);
    return sink.ops->digest(sink.ctx);
}

static void assert_same_bytes(device_table_t *table, const weight_table_t *want)
{
    for (size_t i = 0; i < weight_table_count(want); i++) {
        const weight_slot_t *slot = weight_table_at(want, i);
        size_t bytes = slot->numel * dtype_bytes(weight_table_dtype(want));
        void *got = malloc(bytes);
        if (device_table_data(table, i) != NULL) {
            ck_ok(device_table_read(table, i, got, &err));
            ck_assert_msg(memcmp(got, slot->data, bytes) == 0, "%s", slot->name);
        } else {
            ck_assert_int_eq(device_table_read(table, i, got, &err), LK_ERR_NOT_FOUND);
        }
        free(got);
    }
}

/* Digest and bytes are those of `want`, which has all experts and the same dtype. */
static void assert_same(device_table_t *table, const weight_table_t *want)
{
    ck_assert(digest_equal(digest_of(table), weight_table_digest(want)));
    assert_same_bytes(table, want);
}

/* ---- sending ---- */

typedef enum { FROM_HOST, FROM_DEVICE, IN_PLACE, TOGETHER, N_WAYS } way_t;

/* The list in device memory, tensors back to back and so of any alignment. */
static char *list_on_device(const trainer_list_t *list, uint64_t *at)
{
    uint64_t total = 1;
    char *memory = NULL;
    for (size_t i = 0; i < list->n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list->descs[i], &bytes));
        at[i] = total;
        total += bytes;
    }
    at[list->n] = total;
    ck_ok(device->ops->alloc(device, total, (void **)&memory, &err));
    for (size_t i = 0; i < list->n; i++) {
        ck_ok(device->ops->copy(device, memory + at[i], list->data[i], at[i + 1] - at[i], stream,
                                &err));
    }
    ck_ok(device_wait(device, stream, &err));
    return memory;
}

static lk_status_t send_one(const weight_sink_t *sink, way_t way, const trainer_list_t *list,
                            size_t i, const char *there, size_t len)
{
    if (way == FROM_HOST) {
        return sink->ops->tensor(sink->ctx, i, list->data[i], len, &err);
    }
    void *place = way == IN_PLACE ? sink->ops->device_direct(sink->ctx, i) : NULL;
    if (place != NULL) {
        ck_ok(device->ops->copy(device, place, there, len, stream, &err));
    }
    return sink->ops->device_tensor(sink->ctx, i, place != NULL ? place : there, len, stream, &err);
}

/* begin, plan, tensors, settle. */
static lk_status_t send_list(device_table_t *table, const trainer_list_t *list, way_t way)
{
    weight_sink_t sink = device_table_sink(table);
    uint64_t *at = calloc(list->n + 1, sizeof *at);
    char *memory = list_on_device(list, at);
    weight_arrival_t *arrivals = calloc(list->n, sizeof *arrivals);
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->check(sink.ctx, list->descs, list->n, &err));
    ck_ok(sink.ops->plan(sink.ctx, list->descs, list->n, &err));
    uint64_t before = device->allocations;
    lk_status_t status = LK_OK;
    for (size_t i = 0; i < list->n && status == LK_OK; i++) {
        arrivals[i] = (weight_arrival_t){i, memory + at[i], at[i + 1] - at[i]};
        if (way != TOGETHER) {
            status = send_one(&sink, way, list, i, memory + at[i], at[i + 1] - at[i]);
        }
    }
    if (way == TOGETHER) {
        status = weight_sink_device_tensors(&sink, arrivals, list->n, stream, &err);
    }
    ck_ok(device_wait(device, stream, &err));
    if (status == LK_OK) {
        status = sink.ops->device_settle(sink.ctx, &err);
    }
    ck_assert_uint_eq(device->allocations, before); /* an update allocates nothing */
    device->ops->free(device, memory);
    free(arrivals);
    free(at);
    return status;
}

static void must_send(device_table_t *table, const trainer_list_t *list, way_t way)
{
    lk_status_t status = send_list(table, list, way);
    ck_assert_msg(status == LK_OK, "%s", err.text);
    weight_sink_t sink = device_table_sink(table);
    ck_assert(sink.ops->complete(sink.ctx));
    ck_ok(sink.ops->commit(sink.ctx, &err));
}

/* ---- tests ---- */

START_TEST(loads_and_fills_as_the_cpu_does)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    const char *name = model_fixtures[_i / N_KINDS];
    for (int wide = 0; wide < 2; wide++) {
        lk_dtype_t stored = wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
        weight_table_t *want = model_fixture_load(name, stored, 0, 1);
        device_table_t *table = make(name, stored, 0, 1);
        ck_assert_msg(device_table_load(table, model_fixture_dir(name), &err) == LK_OK, "%s",
                      err.text);
        assert_same(table, want);
        ck_ok(weight_table_fill(want, 5, &err));
        ck_ok(device_table_fill(table, 5, 1 + (uint32_t)wide * 6, &err));
        assert_same(table, want);
        device_table_destroy(&table);
        weight_table_destroy(&want);
    }
    close_device();
}
END_TEST

START_TEST(any_spelling_order_and_way_is_the_file)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    const char *name = model_fixtures[_i / N_KINDS];
    weight_table_t *want[2] = {model_fixture_load(name, LK_DTYPE_BF16, 0, 1),
                               model_fixture_load(name, LK_DTYPE_F32, 0, 1)};
    for (int split = 0; split < 2; split++) {
        trainer_list_t list;
        if (split) {
            trainer_list_init_split(&list, want[0]);
        } else {
            trainer_list_init(&list, name, want[0]);
        }
        static const lk_dtype_t sent[] = {LK_DTYPE_BF16, LK_DTYPE_F32, LK_DTYPE_F64};
        for (int i = 0; i < 3; i++) {
            trainer_list_shuffle(&list, test_seed(name) + (uint64_t)i);
            trainer_list_convert(&list, sent[i]);
            /* over the fixtures every way meets every dtype and spelling */
            int way = (_i / N_KINDS + 2 * split + i) % N_WAYS, wide = (way + i) % 2;
            device_table_t *table = make(name, wide ? LK_DTYPE_F32 : LK_DTYPE_BF16, 0, 1);
            must_send(table, &list, (way_t)way);
            assert_same(table, want[wide]);
            device_table_destroy(&table);
        }
        trainer_list_fini(&list);
    }
    weight_table_destroy(&want[0]);
    weight_table_destroy(&want[1]);
    close_device();
}
END_TEST

START_TEST(ranks_share_the_experts)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    const char *name = _i / N_KINDS ? "qwen3_moe_mixed" : "qwen3_moe";
    weight_table_t *want = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    trainer_list_t list;
    trainer_list_init(&list, name, want);
    for (uint32_t rank = 0; rank < 4; rank++) {
        device_table_t *table = make(name, LK_DTYPE_BF16, rank, 4);
        must_send(table, &list, (way_t)(rank % N_WAYS));
        assert_same(table, want);
        device_table_destroy(&table);
    }
    trainer_list_fini(&list);
    weight_table_destroy(&want);
    close_device();
}
END_TEST

static size_t find_name(const trainer_list_t *list, const char *name)
{
    size_t i = 0;
    while (strcmp(list->descs[i].name, name) != 0) {
        i++;
        ck_assert_uint_lt(i, list->n);
    }
    return i;
}

static const char *tied_fixture(void)
{
    for (int i = 0; i < N_MODEL_FIXTURES; i++) {
        model_config_t config;
        model_fixture_config(model_fixtures[i], &config);
        if (config.tie_word_embeddings) {
            return model_fixtures[i];
        }
    }
    ck_abort_msg("no fixture with tied embeddings");
    return NULL;
}

/* Both spellings of a tied embedding in one list: equal is well, different is refused. */
START_TEST(tied_spellings_must_agree)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    const char *name = tied_fixture();
    weight_table_t *want = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    trainer_list_t list, both;
    trainer_list_init_split(&list, want);
    size_t embed = find_name(&list, "model.embed_tokens.weight");
    both = (trainer_list_t){.descs = calloc(list.n + 1, sizeof *both.descs),
                            .data = calloc(list.n + 1, sizeof *both.data),
                            .n = list.n + 1};
    memcpy(both.descs, list.descs, list.n * sizeof *both.descs);
    memcpy(both.data, list.data, list.n * sizeof *both.data);
    both.descs[list.n] = list.descs[embed];
    both.descs[list.n].name = "lm_head.weight";
    uint64_t bytes;
    ck_assert(tensor_desc_bytes(&list.descs[embed], &bytes));
    char *second = malloc(bytes);
    memcpy(second, list.data[embed], bytes);
    both.data[list.n] = second;
    for (int way = 0; way < N_WAYS; way++) {
        device_table_t *table = make(name, LK_DTYPE_BF16, 0, 1);
        second[bytes - 1] ^= 1;
        ck_assert_int_eq(send_list(table, &both, (way_t)way), LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, "lm_head.weight: differs from model.embed_tokens.weight"),
                      "%s", err.text);
        second[bytes - 1] ^= 1;
        must_send(table, &both, (way_t)way);
        assert_same(table, want);
        device_table_destroy(&table);
    }
    free(second);
    free(both.descs);
    free(both.data);
    trainer_list_fini(&list);
    weight_table_destroy(&want);
    close_device();
}
END_TEST

/* --no-weight-digests: the bytes are the same, the digest is zero. */
START_TEST(digests_can_be_left_out)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    weight_table_t *want = model_fixture_load("qwen3_moe", LK_DTYPE_BF16, 0, 1);
    trainer_list_t list;
    trainer_list_init(&list, "qwen3_moe", want);
    for (int way = 0; way < N_WAYS; way++) {
        device_table_t *table = make("qwen3_moe", LK_DTYPE_BF16, 1, 2);
        device_table_set_digests(table, false);
        must_send(table, &list, (way_t)way);
        ck_assert(digest_equal(digest_of(table), (digest_t){{0}}));
        assert_same_bytes(table, want);
        device_table_destroy(&table);
    }
    trainer_list_fini(&list);
    weight_table_destroy(&want);
    close_device();
}
END_TEST

/* An update that breaks off leaves tensors that nobody can name; a complete one cures it. */
START_TEST(broken_off_updates_are_known_to_be)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    weight_table_t *want = model_fixture_load("qwen3", LK_DTYPE_BF16, 0, 1);
    device_table_t *table = make("qwen3", LK_DTYPE_BF16, 0, 1);
    weight_sink_t sink = device_table_sink(table);
    trainer_list_t list;
    trainer_list_init_split(&list, want);
    must_send(table, &list, TOGETHER);
    digest_t full = digest_of(table);
    uint64_t *at = calloc(list.n + 1, sizeof *at);
    char *memory = list_on_device(&list, at);
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->plan(sink.ctx, list.descs, list.n, &err));
    ck_assert_int_eq(sink.ops->device_tensor(sink.ctx, 0, memory + at[0], 3, stream, &err),
                     LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, "3 bytes came, expected") != NULL, "%s", err.text);
    ck_ok(sink.ops->device_tensor(sink.ctx, 0, memory + at[0], at[1] - at[0], stream, &err));
    ck_ok(device_wait(device, stream, &err));
    ck_assert(!sink.ops->complete(sink.ctx));
    char missing[200];
    sink.ops->missing(sink.ctx, missing, sizeof missing);
    ck_assert_msg(strstr(missing, " more") != NULL, "%s", missing);
    sink.ops->begin(sink.ctx);
    ck_assert(!digest_equal(digest_of(table), full));
    must_send(table, &list, IN_PLACE);
    ck_assert(digest_equal(digest_of(table), full));
    device->ops->free(device, memory);
    free(at);
    trainer_list_fini(&list);
    device_table_destroy(&table);
    weight_table_destroy(&want);
    close_device();
}
END_TEST

START_TEST(says_how_large_a_tensor_can_be)
{
    if (!open_device(_i % N_KINDS)) {
        return;
    }
    for (int f = 0; f < N_MODEL_FIXTURES; f++) {
        weight_table_t *source = model_fixture_load(model_fixtures[f], LK_DTYPE_BF16, 0, 1);
        device_table_t *table = make(model_fixtures[f], LK_DTYPE_BF16, 0, 1);
        weight_sink_t sink = device_table_sink(table);
        trainer_list_t list;
        trainer_list_init(&list, model_fixtures[f], source);
        for (size_t i = 0; i < list.n; i++) {
            uint64_t bytes;
            ck_assert(tensor_desc_bytes(&list.descs[i], &bytes));
            ck_assert_msg(bytes <= sink.ops->largest(sink.ctx), "%s", list.descs[i].name);
        }
        trainer_list_fini(&list);
        device_table_destroy(&table);
        weight_table_destroy(&source);
    }
    close_device();
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("device_table");
    TCase *tc = tcase_create("device_table");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, loads_and_fills_as_the_cpu_does, 0, N_KINDS * N_MODEL_FIXTURES);
    tcase_add_loop_test(tc, any_spelling_order_and_way_is_the_file, 0, N_KINDS * N_MODEL_FIXTURES);
    tcase_add_loop_test(tc, ranks_share_the_experts, 0, N_KINDS * 2);
    tcase_add_loop_test(tc, digests_can_be_left_out, 0, N_KINDS);
    tcase_add_loop_test(tc, tied_spellings_must_agree, 0, N_KINDS);
    tcase_add_loop_test(tc, broken_off_updates_are_known_to_be, 0, N_KINDS);
    tcase_add_loop_test(tc, says_how_large_a_tensor_can_be, 0, N_KINDS);
    suite_add_tcase(suite, tc);
    return suite;
}
