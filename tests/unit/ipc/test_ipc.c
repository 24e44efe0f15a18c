/* Whole update sessions of the ipc engine, against a trainer that shares a host device's memory. */
#include "base/check.h"
#include "engine_core/exec/store/device_table.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"
#include "tests/unit/ipc/ipc_trainer.h"
#include "transfer/backends/ipc/ipc_exports.h"
#include "transfer/backends/ipc/wte_ipc.h"
#include "transfer/device/device.h"
#include "transfer/update_session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODEL "qwen3"

static device_t *device;  /* the engine's */
static device_t *trainer; /* the trainer's: the same memory, another queue */
static device_stream_t *trainer_stream;
static device_event_t *event;
static weight_table_t *want;
static trainer_list_t list;
static device_table_t *table;
static update_session_t *session;
static wte_context_t ctx;
static lk_env_t env;
static uint64_t now_ns, tick_ns; /* the clock, and how far it goes on whenever it is read */
static char counts_name[64];
static int64_t *counts;
static uint32_t next_count;
static char *memory; /* of the trainer: all tensors, back to back */
static uint64_t *at; /* [n + 1] */
static uint8_t handle[DEVICE_IPC_HANDLE_SIZE], event_handle[DEVICE_IPC_HANDLE_SIZE];
static lk_error_t err;

static uint64_t test_now(void *self)
{
    now_ns += tick_ns;
    return now_ns;
}

static void fill_memory(void)
{
    at = calloc(list.n + 1, sizeof *at);
    for (size_t i = 0; i < list.n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list.descs[i], &bytes));
        at[i + 1] = at[i] + bytes;
    }
    ck_ok(trainer->ops->alloc(trainer, at[list.n], (void **)&memory, &err));
    for (size_t i = 0; i < list.n; i++) {
        memcpy(memory + at[i], list.data[i], at[i + 1] - at[i]);
    }
}

static void set_up(void)
{
    model_config_t config;
    err = LK_ERROR_INIT;
    now_ns = LK_SECOND_NS;
    tick_ns = 0;
    next_count = 0;
    env = (lk_env_t){.now_ns = test_now, .random = lk_env_real()->random};
    ck_ok(device_host_open(&device, &err));
    ck_ok(device_host_open(&trainer, &err));
    ck_ok(trainer->ops->stream_new(trainer, &trainer_stream, &err));
    ck_ok(trainer->ops->event_new(trainer, &event, &err));
    want = model_fixture_load(MODEL, LK_DTYPE_BF16, 0, 1);
    trainer_list_init(&list, MODEL, want);
    model_fixture_config(MODEL, &config);
    table = device_table_new(device, &config, LK_DTYPE_BF16, 0, 1, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    snprintf(counts_name, sizeof counts_name, "/torch_%ld_1_0", (long)getpid());
    ipc_counts_create(counts_name);
    counts = ipc_counts_map(counts_name);
    fill_memory();
    device_host_export(memory, at[list.n], handle);
    device_host_export_event(event, event_handle);
    ctx = (wte_context_t){
        .dp_size = 1, .ranks_per_replica = 1, .env = &env, .no_progress_ns = 30 * LK_SECOND_NS};
    weight_sink_t sink = device_table_sink(table);
    session = update_session_new(&wte_ipc, &ctx, &sink);
    ck_assert_ptr_nonnull(session);
}

static void tear_down(void)
{
    update_session_destroy(&session);
    ck_assert_uint_eq(device_host_unexport(), 0); /* it has closed all that it opened */
    device_table_destroy(&table);
    trainer->ops->free(trainer, memory);
    trainer->ops->event_destroy(trainer, event);
    trainer->ops->stream_destroy(trainer, trainer_stream);
    device_close(&device);
    device_close(&trainer);
    trainer_list_fini(&list);
    weight_table_destroy(&want);
    ipc_counts_unmap(counts);
    ipc_counts_unlink(counts_name);
    free(at);
}

/* ---- calls ---- */

static lk_status_t call(update_verb_t verb, const char *spec)
{
    err = LK_ERROR_INIT;
    size_t len = spec != NULL ? strlen(spec) : 0;
    LK_RETURN_IF_ERROR(update_session_check(session, verb, spec, len, &err));
    lk_status_t status = update_session_post(session, verb, spec, len, &err);
    while (status >= 0 && (status = update_session_test(session, &err)) == LK_INPROGRESS) {
        now_ns += LK_SECOND_NS;
    }
    lk_error_t ignored = LK_ERROR_INIT;
    lk_status_t outcome = update_session_outcome(session, verb, status == LK_OK, &ignored);
    return status < 0 ? status : outcome;
}

static void must(update_verb_t verb, const char *spec)
{
    ck_assert_msg(call(verb, spec) == LK_OK, "%s: %s", update_verb_name(verb), err.text);
}

/* What torch does when it shares a tensor: counts it, and records an event behind the work. */
static ipc_args_t export_tensor(const char *dtype, uint32_t ndim, const uint64_t *shape,
                                uint64_t offset)
{
    ipc_args_t args = ipc_args(dtype, ndim, shape, handle, offset, counts_name, next_count);
    counts[next_count++] = 1;
    args.wait = true;
    memcpy(args.event, event_handle, sizeof event_handle);
    return args;
}

/* update_info of tensors [first, end) with their handles. Caller frees. */
static char *update_info(size_t first, size_t end, const char *pickled, bool packed)
{
    json_t *names = json_array(), *dtypes = json_array(), *shapes = json_array(),
           *sizes = json_array();
    for (size_t i = first; i < end; i++) {
        const tensor_desc_t *d = &list.descs[i];
        json_t *shape = json_array();
        for (uint32_t k = 0; k < d->ndim; k++) {
            json_array_append_new(shape, json_integer((json_int_t)d->shape[k]));
        }
        json_array_append_new(names, json_string(d->name));
        json_array_append_new(dtypes, json_string(dtype_torch_name(d->dtype)));
        json_array_append_new(shapes, shape);
        json_array_append_new(sizes, json_integer((json_int_t)(at[i + 1] - at[i])));
    }
    json_t *root =
        json_pack("{s:{s:o, s:o, s:o, s:s}}", "update_info", "names", names, "dtype_names", dtypes,
                  "shapes", shapes, "ipc_handles_pickled", pickled);
    if (packed) {
        json_object_set_new(json_object_get(root, "update_info"), "tensor_sizes", sizes);
    } else {
        json_decref(sizes);
    }
    char *text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static char *plain_update(void)
{
    ipc_args_t *args = calloc(list.n, sizeof *args);
    for (size_t i = 0; i < list.n; i++) {
        const tensor_desc_t *d = &list.descs[i];
        args[i] = export_tensor(dtype_torch_name(d->dtype), d->ndim, d->shape, at[i]);
    }
    char *pickled = ipc_pickle_list(args, list.n, device->uuid);
    char *info = update_info(0, list.n, pickled, false);
    free(pickled);
    free(args);
    return info;
}

static void record_event(void)
{
    ck_ok(trainer->ops->event_record(trainer, event, trainer_stream, &err));
}

static void event_passes(void)
{
    ck_ok(device_wait(trainer, trainer_stream, &err));
}

static void assert_received(void)
{
    weight_sink_t sink = device_table_sink(table);
    ck_assert(digest_equal(sink.ops->digest(sink.ctx), weight_table_digest(want)));
}

static void assert_released(void)
{
    for (uint32_t i = 0; i < next_count; i++) {
        ck_assert_msg(counts[i] == 0, "count %u is %lld", i, (long long)counts[i]);
    }
}

/* ---- tests ---- */

START_TEST(per_tensor_many_times)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    uint64_t allocations = device->allocations, allocated = device->allocated;
    for (int turn = 0; turn < 40; turn++) {
        memory[0] = (char)turn; /* each update brings something new */
        ((char *)list.data[0])[0] = (char)turn;
        char *info = plain_update();
        must(UPDATE_VERB_START, NULL);
        record_event();
        event_passes();
        must(UPDATE_VERB_UPDATE, info);
        assert_released();
        counts[next_count - 1] = 1; /* an export that comes again is not taken off again */
        must(UPDATE_VERB_UPDATE, info);
        ck_assert_int_eq(counts[next_count - 1], 1);
        counts[next_count - 1] = 0;
        must(UPDATE_VERB_FINISH, NULL);
        free(info);
    }
    ck_assert_uint_eq(device->allocations, allocations);
    ck_assert_uint_eq(device->allocated, allocated);
    weight_sink_t sink = weight_table_sink(want);
    ck_ok(sink.ops->plan(sink.ctx, list.descs, list.n, &err));
    ck_ok(sink.ops->tensor(sink.ctx, 0, list.data[0], at[1], &err));
    assert_received();
}
END_TEST

/* What the engine says of its last update, in us. */
static json_int_t said(const char *key)
{
    json_t *object = json_object();
    update_session_describe(session, object);
    const json_t *value = json_object_get(object, key);
    ck_assert_msg(json_is_integer(value), "%s", key);
    json_int_t us = json_integer_value(value);
    json_decref(object);
    return us;
}

/* Handles that come again were read before; what they name is looked at anew. */
START_TEST(the_same_handles_are_read_once)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    char *info = plain_update(), *other = plain_update();
    tick_ns = LK_MS_NS;
    must(UPDATE_VERB_START, NULL);
    record_event();
    event_passes();
    for (int turn = 0; turn < 3; turn++) {
        memory[0] = (char)turn;
        must(UPDATE_VERB_UPDATE, info);
        ck_assert_int_eq(said("ipc_read_us") > 0, turn == 0);
        ck_assert_int_gt(said("ipc_copies_us"), 0);
        ck_assert_int_eq(*(char *)device_table_data(table, 0), turn);
    }
    must(UPDATE_VERB_UPDATE, other);
    ck_assert_int_gt(said("ipc_read_us"), 0);
    must(UPDATE_VERB_UPDATE, info); /* only the last is kept */
    ck_assert_int_gt(said("ipc_read_us"), 0);
    ipc_counts_unlink(counts_name);
    ck_assert_int_eq(call(UPDATE_VERB_UPDATE, info), LK_ERR_PEER); /* the trainer is gone */
    ipc_counts_create(counts_name);
    must(UPDATE_VERB_ABORT, NULL);
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    device_host_unexport();
    ck_assert_int_eq(call(UPDATE_VERB_UPDATE, info), LK_ERR_IO); /* its memory is gone */
    ck_assert_msg(strstr(err.text, "no memory is exported") != NULL, "%s", err.text);
    free(info);
    free(other);
}
END_TEST

/* Tensor i in memory i % n, by handles that repeat; the counts in many files. */
#define N_MEMORIES 24
static char *in_memories(uint8_t handles[N_MEMORIES][DEVICE_IPC_HANDLE_SIZE],
                         char names[N_MEMORIES][64], size_t n)
{
    ipc_args_t *args = calloc(list.n, sizeof *args);
    for (size_t i = 0; i < list.n; i++) {
        const tensor_desc_t *d = &list.descs[i];
        args[i] = ipc_args(dtype_torch_name(d->dtype), d->ndim, d->shape, handles[i * 7 % n], at[i],
                           names[i * 5 % N_MEMORIES], (uint32_t)i);
    }
    char *pickled = ipc_pickle_list(args, list.n, device->uuid);
    char *info = update_info(0, list.n, pickled, false);
    free(pickled);
    free(args);
    return info;
}

/* Each memory is opened once (the device insists on it) and closed when an update leaves it out;
 * each count is taken off once, in however many files they are. */
START_TEST(many_memories_and_files_of_counts)
{
    uint8_t handles[N_MEMORIES][DEVICE_IPC_HANDLE_SIZE];
    char names[N_MEMORIES][64];
    int64_t *all[N_MEMORIES];
    char *copies[N_MEMORIES];
    for (size_t k = 0; k < N_MEMORIES; k++) {
        ck_ok(trainer->ops->alloc(trainer, at[list.n], (void **)&copies[k], &err));
        memcpy(copies[k], memory, at[list.n]);
        device_host_export(copies[k], at[list.n], handles[k]);
        snprintf(names[k], sizeof names[k], "/torch_%ld_2_%zu", (long)getpid(), k);
        ipc_counts_create(names[k]);
        all[k] = ipc_counts_map(names[k]);
    }
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    static const size_t n_used[] = {N_MEMORIES, 1, N_MEMORIES, 5, 5};
    for (size_t turn = 0; turn < LK_ARRAY_LEN(n_used); turn++) {
        for (size_t i = 0; i < list.n; i++) {
            all[i * 5 % N_MEMORIES][i] = 2;
        }
        char *info = in_memories(handles, names, n_used[turn]);
        must(UPDATE_VERB_UPDATE, info);
        free(info);
        for (size_t i = 0; i < list.n; i++) { /* the same exports: taken off the first time */
            ck_assert_int_eq(all[i * 5 % N_MEMORIES][i], turn == 0 ? 1 : 2);
        }
        ck_assert_uint_eq(device_host_open_exports(), LK_MIN(n_used[turn], list.n));
    }
    must(UPDATE_VERB_FINISH, NULL);
    assert_received();
    for (size_t k = 0; k < N_MEMORIES; k++) {
        ipc_counts_unmap(all[k]);
        ipc_counts_unlink(names[k]);
        trainer->ops->free(trainer, copies[k]);
    }
}
END_TEST

/* What a new file needs room for is the oldest that the update leaves alone. */
START_TEST(files_of_counts_are_bounded)
{
    enum { N = IPC_FILES_MAX + 1 };
    ipc_exports_t exports = {0};
    ipc_export_t items[N] = {0};
    int64_t *counts_of[N];
    for (size_t k = 0; k < N; k++) {
        snprintf(items[k].counter_name, sizeof items[k].counter_name, "/torch_%ld_3_%zu",
                 (long)getpid(), k);
        items[k].counter = (uint32_t)(k * 100);
        ipc_counts_create(items[k].counter_name);
        counts_of[k] = ipc_counts_map(items[k].counter_name);
        counts_of[k][items[k].counter] = 3;
    }
    ipc_handles_t most = {items, N - 1}, last = {items + N - 1, 1}, all = {items, N};
    ipc_handles_t first = {items, 1};
    ck_ok(ipc_exports_begin(&exports, &most, &err));
    ipc_exports_end(&exports, &most, 1);
    ck_assert_int_eq(ipc_exports_begin(&exports, &all, &err), LK_ERR_TOO_LARGE);
    ck_assert_msg(strstr(err.text, "more than 64 files") != NULL, "%s", err.text);
    ck_ok(ipc_exports_begin(&exports, &first, &err));
    ck_assert(ipc_exports_passed(&exports, &first, 0));
    ipc_exports_end(&exports, &first, 1);
    ck_assert_int_eq(counts_of[0][0], 2); /* known */
    ck_ok(ipc_exports_begin(&exports, &last, &err));
    ck_assert(!ipc_exports_passed(&exports, &last, 0));
    ipc_exports_end(&exports, &last, 0);
    ck_ok(ipc_exports_begin(&exports, &first, &err)); /* was the oldest: forgotten */
    ck_assert(!ipc_exports_passed(&exports, &first, 0));
    ipc_exports_end(&exports, &first, 0);
    for (size_t k = 0; k < N; k++) {
        ck_assert_int_eq(counts_of[k][items[k].counter], k == 0 ? 1 : 2);
        ipc_counts_unmap(counts_of[k]);
        ipc_counts_unlink(items[k].counter_name);
    }
    ipc_exports_fini(&exports);
}
END_TEST

/* One buffer, exported once, filled again and again: its count goes down by one. */
START_TEST(packed_in_chunks)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {\"packed\": true}}");
    for (int turn = 0; turn < 3; turn++) {
        char *buffer = NULL;
        uint64_t room = 200000;
        ck_ok(trainer->ops->alloc(trainer, room, (void **)&buffer, &err));
        uint8_t buffer_handle[DEVICE_IPC_HANDLE_SIZE];
        device_host_export(buffer, room, buffer_handle);
        ipc_args_t args = export_tensor("uint8", 1, &room, 0);
        memcpy(args.handle + 2, buffer_handle, sizeof buffer_handle);
        args.with_function = turn == 1;
        char *pickled = ipc_pickle_dict(&args, device->uuid);
        must(UPDATE_VERB_START, NULL);
        for (size_t first = 0, end; first < list.n; first = end) {
            memset(buffer, 0xEE, room); /* what the last answer allows */
            for (end = first; end < list.n && at[end + 1] - at[first] <= room; end++) {
            }
            ck_assert_uint_gt(end, first);
            memcpy(buffer, memory + at[first], at[end] - at[first]);
            char *info = update_info(first, end, pickled, true);
            must(UPDATE_VERB_UPDATE, info);
            assert_released();
            free(info);
        }
        must(UPDATE_VERB_FINISH, NULL);
        assert_received();
        free(pickled);
        memset(buffer, 0, room);
        trainer->ops->free(trainer, buffer);
    }
}
END_TEST

static update_verb_t posted;

static void post(update_verb_t verb, const char *spec)
{
    err = LK_ERROR_INIT;
    ck_assert_msg(update_session_check(session, verb, spec, strlen(spec), &err) == LK_OK, "%s",
                  err.text);
    ck_assert_msg(update_session_post(session, verb, spec, strlen(spec), &err) == LK_OK, "%s",
                  err.text);
    posted = verb;
}

/* Nothing is read before the trainer's event, and what is read then is what stands there then. */
START_TEST(waits_for_the_trainers_event)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    memset(memory, 0x55, at[list.n]);
    for (size_t i = 0; i < list.n; i++) { /* the trainer's own work, still to run */
        ck_ok(trainer->ops->copy(trainer, memory + at[i], list.data[i], at[i + 1] - at[i],
                                 trainer_stream, &err));
    }
    record_event();
    char *info = plain_update();
    post(UPDATE_VERB_UPDATE, info);
    for (int i = 0; i < 20; i++) {
        ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
    }
    wte_progress_t progress;
    update_session_progress(session, &progress);
    ck_assert_msg(strstr(progress.waiting_for, "events") != NULL, "%s", progress.waiting_for);
    ck_assert_int_eq(counts[0], 1);
    event_passes();
    lk_status_t status;
    while ((status = update_session_test(session, &err)) == LK_INPROGRESS) {
    }
    ck_assert_msg(status == LK_OK, "%s", err.text);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, true, &err));
    assert_released();
    must(UPDATE_VERB_FINISH, NULL);
    assert_received();
    free(info);
}
END_TEST

/* A trainer that hangs costs a deadline, or an abort; a new session works. */
START_TEST(an_event_that_never_comes)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    record_event();
    char *info = plain_update();
    if (_i == 0) {
        ck_assert_int_eq(call(UPDATE_VERB_UPDATE, info), LK_ERR_TIMEOUT);
        ck_assert_msg(
            strstr(err.text, "nothing moved for 30.0 s; waiting for the trainer's events") != NULL,
            "%s", err.text);
    } else {
        post(UPDATE_VERB_UPDATE, info);
        ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
        update_session_cancel(session, "the caller changed its mind");
        ck_assert_int_eq(update_session_test(session, &err), LK_ERR_CANCELED);
        ck_assert_str_eq(err.text, "the caller changed its mind");
        ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    }
    assert_released();
    event_passes();
    must(UPDATE_VERB_ABORT, NULL);
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    must(UPDATE_VERB_UPDATE, info); /* the same exports: not counted down again */
    assert_released();
    must(UPDATE_VERB_FINISH, NULL);
    assert_received();
    free(info);
}
END_TEST

/* Refusals come before anything is opened, counted or read. */
START_TEST(refusals_change_nothing)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    char *info = plain_update();
    ipc_counts_unlink(counts_name);
    ck_assert_int_eq(call(UPDATE_VERB_UPDATE, info), LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, "cannot open the trainer's reference counts") != NULL, "%s",
                  err.text);
    ck_assert_int_eq(counts[0], 1);
    free(info);
    must(UPDATE_VERB_ABORT, NULL);
    ck_assert_int_eq(call(UPDATE_VERB_INIT, "{\"init_info\": {\"buckets\": 3}}"), LK_ERR_INVALID);
    ipc_counts_create(counts_name);
}
END_TEST

/* A handle whose memory is smaller than the tensor that it is said to hold. */
START_TEST(memory_is_never_read_beyond_its_end)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    device_host_unexport();
    device_host_export(memory, at[list.n] - 1, handle);
    device_host_export_event(event, event_handle);
    char *info = plain_update();
    ck_assert_int_eq(call(UPDATE_VERB_UPDATE, info), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, "of a memory of") != NULL, "%s", err.text);
    assert_released();
    free(info);
}
END_TEST

START_TEST(needs_a_device)
{
    wte_context_t without = ctx;
    without.device = NULL;
    json_t *info = json_object();
    ck_assert_int_eq(wte_ipc.init_check(info, &without, &err), LK_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, "--device cuda-store") != NULL, "%s", err.text);
    json_decref(info);
}
END_TEST

START_TEST(a_broken_device_is_said)
{
    must(UPDATE_VERB_INIT, "{\"init_info\": {}}");
    must(UPDATE_VERB_START, NULL);
    record_event();
    char *info = plain_update();
    post(UPDATE_VERB_UPDATE, info);
    device_host_break(device);
    lk_status_t status;
    while ((status = update_session_test(session, &err)) == LK_INPROGRESS) {
    }
    ck_assert_int_eq(status, LK_ERR_INTERNAL);
    ck_assert_msg(strstr(err.text, "the device failed") != NULL, "%s", err.text);
    assert_released();
    free(info);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("ipc");
    TCase *tc = tcase_create("ipc");
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_test(tc, per_tensor_many_times);
    tcase_add_test(tc, the_same_handles_are_read_once);
    tcase_add_test(tc, many_memories_and_files_of_counts);
    tcase_add_test(tc, files_of_counts_are_bounded);
    tcase_add_test(tc, packed_in_chunks);
    tcase_add_test(tc, waits_for_the_trainers_event);
    tcase_add_loop_test(tc, an_event_that_never_comes, 0, 2);
    tcase_add_test(tc, refusals_change_nothing);
    tcase_add_test(tc, memory_is_never_read_beyond_its_end);
    tcase_add_test(tc, needs_a_device);
    tcase_add_test(tc, a_broken_device_is_said);
    suite_add_tcase(suite, tc);
    return suite;
}
