/*
 * What updates allocate, counted by interposition: this program has its own malloc, calloc,
 * realloc and memalign family, which every library of the process uses (glibc's go on behind it).
 * Whole updates over NCCL, an engine's session with weights on a host device and a trainer's sender
 * on another, over communicators that block. From the second update on:
 * - device memory (on a host device: aligned allocations): none, by anybody.
 * - host memory: as many allocations of as many bytes in each update as in the one before, and few:
 *   what a call's parsing and the stand-in's work on its streams take, and all of it freed.
 */
#include "base/base64.h"
#include "base/check.h"
#include "engine_core/exec/store/device_table.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "tests/unit/exec/model_fixture.h"
#include "transfer/backends/nccl/nccl_sender.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/device/device.h"
#include "transfer/device/device_host.h"
#include "transfer/trainer/lst_plan.h"
#include "transfer/update_session.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODEL   "qwen3"
#define UPDATES 8
#define MOST    4000u /* host allocations of an update */

/* ---- the interposed allocator ---- */

#define SEEN __attribute__((visibility("default"))) /* by libraries */

typedef struct {
    uint64_t n, bytes, freed; /* malloc, calloc, realloc; free */
    uint64_t aligned;         /* the others: device memory */
} counts_t;

static counts_t counts;
static bool counting;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *p);

static void count(size_t size)
{
    counts.n += counting;
    counts.bytes += counting ? size : 0;
}

SEEN void *malloc(size_t size)
{
    count(size);
    return __libc_malloc(size);
}

SEEN void *calloc(size_t n, size_t size)
{
    count(n * size);
    return __libc_calloc(n, size);
}

SEEN void *realloc(void *p, size_t size)
{
    count(size);
    counts.freed += counting && p != NULL;
    return __libc_realloc(p, size);
}

SEEN void free(void *p)
{
    counts.freed += counting && p != NULL;
    __libc_free(p);
}

SEEN void *memalign(size_t alignment, size_t size)
{
    counts.aligned += counting;
    return __libc_memalign(alignment, size);
}

SEEN void *aligned_alloc(size_t alignment, size_t size)
{
    return memalign(alignment, size);
}

SEEN int posix_memalign(void **out, size_t alignment, size_t size)
{
    *out = memalign(alignment, size);
    return *out != NULL ? 0 : ENOMEM;
}

/* ---- an engine and a trainer ---- */

static device_t *devices[2]; /* the engine's, the trainer's */
static weight_table_t *want;
static trainer_list_t list;
static device_table_t *table;
static update_session_t *session;
static nccl_sender_t sender;
static lst_plan_t plan;
static wte_context_t ctx;
static lk_error_t err;

static void set_up(void)
{
    model_config_t config;
    err = LK_ERROR_INIT;
    wte_nccl_use(&nccl_fake_ops);
    ck_ok(device_host_open(&devices[0], &err));
    ck_ok(device_host_open(&devices[1], &err));
    want = model_fixture_load(MODEL, LK_DTYPE_BF16, 0, 1);
    trainer_list_init(&list, MODEL, want);
    model_fixture_config(MODEL, &config);
    table = device_table_new(devices[0], &config, LK_DTYPE_BF16, 0, 1, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    ctx = (wte_context_t){.dp_size = 1,
                          .ranks_per_replica = 1,
                          .env = lk_env_real(),
                          .no_progress_ns = 30 * LK_SECOND_NS};
    weight_sink_t sink = device_table_sink(table);
    session = update_session_new(&wte_nccl, &ctx, &sink);
    ck_assert_ptr_nonnull(session);
    ck_ok(nccl_link_open(&sender.link, &nccl_fake_ops, NULL, devices[1], lk_env_real(),
                         30 * LK_SECOND_NS, &err));
}

static void tear_down(void)
{
    lst_plan_fini(&plan);
    nccl_sender_fini(&sender);
    update_session_destroy(&session);
    device_table_destroy(&table);
    ck_assert_uint_eq(nccl_fake_reset(), 0);
    for (int i = 0; i < 2; i++) {
        ck_assert_uint_eq(devices[i]->allocated, 0);
        device_close(&devices[i]);
    }
    trainer_list_fini(&list);
    weight_table_destroy(&want);
    wte_nccl_use(NULL);
}

/* A call of the session; `sends`: the trainer works meanwhile. */
static void call(update_verb_t verb, const char *spec, bool sends)
{
    size_t len = spec != NULL ? strlen(spec) : 0;
    lk_status_t st = update_session_check(session, verb, spec, len, &err);
    st = st == LK_OK ? update_session_post(session, verb, spec, len, &err) : st;
    bool sent = !sends;
    do {
        st = st < 0 ? st : update_session_test(session, &err);
        if (!sent && verb == UPDATE_VERB_INIT) {
            sent = nccl_link_step(&sender.link, &err) == LK_OK;
        } else if (!sent) {
            sent = nccl_sender_step(&sender, &err) == LK_OK;
        }
    } while (st == LK_INPROGRESS || (st == LK_OK && !sent));
    ck_assert_msg(st == LK_OK, "%s: %s", update_verb_name(verb), err.text);
    ck_ok(update_session_outcome(session, verb, true, &err));
}

static void init(void)
{
    uint8_t id[NCCL_ID_BYTES];
    char text[BASE64_SIZE(NCCL_ID_BYTES)], spec[512];
    ck_ok(nccl_fake_ops.unique_id(sender.link.library, id, &err));
    base64_encode(id, sizeof id, text);
    snprintf(spec, sizeof spec,
             "{\"init_info\": {\"nccl_unique_id_b64\": \"%s\", \"rank_offset\": 1, \"world_size\": "
             "2, \"packed\": true, \"packed_buffer_size_bytes\": 20000}}",
             text);
    nccl_link_start(&sender.link, id, 2, 0);
    call(UPDATE_VERB_INIT, spec, true);
}

static counts_t update(bool packed)
{
    const void *const *data = (const void *const *)list.data;
    call(UPDATE_VERB_START, NULL, false);
    counts = (counts_t){0};
    counting = true;
    ck_ok(lst_plan_make(&plan, list.descs, data, list.n, packed, packed ? 20000 : 0, true, &err));
    ck_ok(nccl_sender_begin(&sender, plan.sent, plan.data, list.n, packed, plan.buffer_size, 2,
                            &err));
    call(UPDATE_VERB_UPDATE, plan.args, true);
    counting = false;
    call(UPDATE_VERB_FINISH, "{}", false);
    weight_sink_t sink = device_table_sink(table);
    ck_assert(digest_equal(sink.ops->digest(sink.ctx), weight_table_digest(want)));
    return counts;
}

START_TEST(updates_allocate_no_device_memory_and_no_more_than_the_last)
{
    bool packed = _i == 1;
    set_up();
    init();
    uint64_t made[2] = {0};
    counts_t before = {0};
    for (int i = 0; i < UPDATES; i++) {
        counts_t now = update(packed);
        printf("# %s, update %d: %llu host allocations, %llu bytes, %llu freed; %llu of device "
               "memory\n",
               packed ? "packed" : "unpacked", i + 1, (unsigned long long)now.n,
               (unsigned long long)now.bytes, (unsigned long long)now.freed,
               (unsigned long long)now.aligned);
        if (i > 0) {
            ck_assert_uint_eq(now.aligned, 0);
            ck_assert_uint_eq(devices[0]->allocations, made[0]);
            ck_assert_uint_eq(devices[1]->allocations, made[1]);
            ck_assert_uint_lt(now.n, MOST);
        }
        if (i > 2) { /* the second still frees what only the first needed */
            ck_assert_uint_eq(now.n, before.n);
            ck_assert_uint_eq(now.bytes, before.bytes);
            ck_assert_uint_eq(now.freed, before.freed);
        }
        made[0] = devices[0]->allocations;
        made[1] = devices[1]->allocations;
        before = now;
    }
    tear_down();
}
END_TEST

/* The allocator above is the process's: else nothing was counted. */
START_TEST(what_libraries_allocate_is_counted)
{
    counts = (counts_t){0};
    counting = true;
    json_t *json = json_loads("[1, 2]", 0, NULL);
    uint64_t by_jansson = counts.n;
    void *p = aligned_alloc(64, 64);
    free(p);
    json_decref(json);
    counting = false;
    ck_assert_uint_gt(by_jansson, 3);
    ck_assert_uint_eq(counts.aligned, 1);
    ck_assert_uint_gt(counts.freed, 3);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("update_allocations");
    TCase *tcase = tcase_create("update_allocations");
    tcase_add_test(tcase, what_libraries_allocate_is_counted);
    tcase_add_loop_test(tcase, updates_allocate_no_device_memory_and_no_more_than_the_last, 0, 2);
    suite_add_tcase(suite, tcase);
    return suite;
}
