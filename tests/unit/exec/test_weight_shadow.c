/* Two sets of weights: sessions that go beside the live one, flips, partial updates, failures. */
#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"
#include "engine_core/exec/weight_table_internal.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"

#include <stdlib.h>
#include <string.h>

/* Of everything that a step could read. */
static uint64_t live_hash(const weight_table_t *table)
{
    digest_t set = weight_table_digest(table);
    uint64_t hash = lk_hash64(&set, sizeof set, 1);
    for (size_t i = 0; i < weight_table_count(table); i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        hash = lk_hash64(&slot->digest, sizeof slot->digest, hash);
        if (slot->data != NULL) {
            hash =
                lk_hash64(slot->data, slot->numel * dtype_bytes(weight_table_dtype(table)), hash);
        }
    }
    return hash;
}

static weight_table_t *shadowed(weight_table_t *table)
{
    lk_error_t err = LK_ERROR_INIT;
    uint64_t before = live_hash(table);
    ck_assert(!weight_table_has_shadow(table));
    ck_ok(weight_table_add_shadow(table, &err));
    ck_assert(weight_table_has_shadow(table));
    ck_assert_uint_eq(live_hash(table), before);
    weight_sink_t sink = weight_table_sink(table);
    digest_t incoming = sink.ops->incoming(sink.ctx), live = sink.ops->digest(sink.ctx);
    ck_assert(digest_equal(incoming, live));
    return table;
}

/* Draws which tensors a session brings, and new values for them. */
static size_t draw_session(lk_prng_t *prng, trainer_list_t *list, lk_dtype_t dtype)
{
    trainer_list_shuffle(list, lk_prng_u64(prng));
    size_t n = 1 + lk_prng_below(prng, list->n);
    for (size_t i = 0; i < n; i++) {
        uint64_t numel;
        ck_assert(tensor_desc_numel(&list->descs[i], &numel));
        float *values = malloc(numel * sizeof *values);
        for (uint64_t k = 0; k < numel; k++) {
            values[k] = (float)lk_prng_normal(prng);
        }
        ck_ok(dtype_convert(list->data[i], dtype, values, LK_DTYPE_F32, numel));
        free(values);
    }
    return n;
}

/* Hands over the first n tensors, in place now and then; the table's live set is watched. */
static void send_some(const trainer_list_t *list, size_t n, weight_table_t *table, lk_prng_t *prng)
{
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    uint64_t before = live_hash(table);
    bool two = weight_table_has_shadow(table);
    ck_ok(sink.ops->plan(sink.ctx, list->descs, list->n, &err));
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list->descs[i], &bytes));
        void *place = lk_prng_below(prng, 2) == 0 ? sink.ops->direct(sink.ctx, i) : NULL;
        if (place != NULL) {
            memcpy(place, list->data[i], bytes);
        }
        const void *from = place != NULL ? place : list->data[i];
        lk_status_t status;
        do {
            status = sink.ops->tensor(sink.ctx, i, from, bytes, &err);
            ck_assert(!two || live_hash(table) == before);
        } while (status == LK_INPROGRESS);
        ck_assert_msg(status == LK_OK, "%s", err.text);
    }
}

static void commit(weight_table_t *table)
{
    weight_sink_t sink = weight_table_sink(table);
    lk_error_t err = LK_ERROR_INIT;
    uint64_t before = live_hash(table);
    lk_status_t status = LK_OK;
    while (sink.ops->prepare != NULL && (status = sink.ops->prepare(sink.ctx, &err)) != LK_OK) {
        ck_assert_int_eq(status, LK_INPROGRESS);
        ck_assert_uint_eq(live_hash(table), before);
    }
    digest_t incoming = {{0, 0}};
    if (sink.ops->incoming != NULL) {
        ck_assert_uint_eq(live_hash(table), before);
        incoming = sink.ops->incoming(sink.ctx);
    }
    ck_ok(sink.ops->commit(sink.ctx, &err));
    digest_t live = sink.ops->digest(sink.ctx);
    ck_assert(sink.ops->incoming == NULL || digest_equal(incoming, live));
}

/* Random sessions, whole and partial, some of which end without a commit: a table with a shadow
 * holds after every commit what one without holds that never saw the failed ones, on every rank of
 * a group. */
START_TEST(sessions_give_what_they_give_in_place)
{
    const char *name = model_fixtures[_i];
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed(name));
    weight_table_t *whole = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    uint32_t size = 1 + (uint32_t)lk_prng_below(&prng, 3);
    uint32_t rank = (uint32_t)lk_prng_below(&prng, size);
    lk_dtype_t stored = lk_prng_below(&prng, 2) == 0 ? LK_DTYPE_F32 : LK_DTYPE_BF16;
    weight_table_t *plain = model_fixture_load(name, stored, rank, size);
    weight_table_t *two = shadowed(model_fixture_load(name, stored, rank, size));
    weight_sink_t sinks[] = {weight_table_sink(plain), weight_table_sink(two)};
    trainer_list_t list;
    trainer_list_init_split(&list, whole);
    trainer_list_convert(&list, LK_DTYPE_F32);
    for (int session = 0; session < 24; session++) {
        size_t n = draw_session(&prng, &list, LK_DTYPE_F32);
        bool fails = lk_prng_below(&prng, 3) == 0;
        uint64_t before = live_hash(two);
        sinks[1].ops->begin(sinks[1].ctx);
        send_some(&list, n, two, &prng);
        if (fails) { /* halfway through another tensor, or through the preparation */
            lk_error_t err = LK_ERROR_INIT;
            if (lk_prng_below(&prng, 2) == 0) {
                (void)!sinks[1].ops->prepare(sinks[1].ctx, &err);
            } else if (n < list.n) {
                void *place = sinks[1].ops->direct(sinks[1].ctx, n);
                memset(place != NULL ? place : &err, 0xAA, 4);
            }
            ck_assert_uint_eq(live_hash(two), before);
            continue;
        }
        sinks[0].ops->begin(sinks[0].ctx);
        send_some(&list, n, plain, &prng);
        commit(plain);
        commit(two);
        ck_assert_uint_eq(live_hash(two), live_hash(plain));
    }
    trainer_list_fini(&list);
    weight_table_destroy(&whole);
    weight_table_destroy(&plain);
    weight_table_destroy(&two);
}
END_TEST

static size_t n_behind(const weight_table_t *table)
{
    size_t n = 0;
    for (size_t i = 0; i < table->n_slots; i++) {
        n += table->states[i].differs && !table->states[i].arrived;
    }
    return n;
}

/* Nothing is copied for whoever sends everything, or the same part every time. */
START_TEST(only_what_is_behind_is_copied)
{
    weight_table_t *table = shadowed(model_fixture_load("qwen3_moe", LK_DTYPE_BF16, 0, 1));
    weight_sink_t sink = weight_table_sink(table);
    const void *first = weight_table_at(table, 0)->data;
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("behind"));
    trainer_list_t list;
    trainer_list_init_split(&list, table);
    /* tensors that come, tensors that the incoming set lacks when they have */
    const size_t all = list.n, part = list.n / 3;
    const size_t sessions[][2] = {{all, 0},  {all, 0}, {part, all - part}, {part, 0},
                                  {part, 0}, {all, 0}, {part, all - part}, {1, part - 1},
                                  {part, 0}, {all, 0}};
    for (size_t s = 0; s < LK_ARRAY_LEN(sessions); s++) {
        sink.ops->begin(sink.ctx);
        send_some(&list, sessions[s][0], table, &prng);
        ck_assert_msg(n_behind(table) == sessions[s][1], "session %zu: %zu", s, n_behind(table));
        commit(table);
        ck_assert((weight_table_at(table, 0)->data == first) == (s % 2 == 1));
    }
    trainer_list_fini(&list);
    weight_table_destroy(&table);
}
END_TEST

/* A tensor of several slices: each call does one, and the digest is that of the whole. */
START_TEST(large_tensors_are_taken_in_slices)
{
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    model_fixture_config("qwen3_moe", &config);
    config.vocab_size = 60000;
    config.hidden_size = 32;
    weight_table_t *table = weight_table_new(&config, LK_DTYPE_BF16, 0, 1, &err);
    ck_assert_msg(table != NULL, "%s", err.text);
    ck_ok(weight_table_fill(table, 3, &err));
    if (_i > 0) {
        ck_ok(weight_table_add_shadow(table, &err));
    }
    weight_sink_t sink = weight_table_sink(table);
    const weight_slot_t *slot = weight_table_find(table, "model.embed_tokens.weight");
    tensor_desc_t desc = {.name = slot->name, .dtype = LK_DTYPE_F32, .ndim = 2};
    memcpy(desc.shape, slot->shape, sizeof slot->shape);
    float *values = malloc(slot->numel * sizeof *values);
    for (uint64_t k = 0; k < slot->numel; k++) {
        values[k] = (float)(k % 1000) / 1000;
    }
    digest_t want = {{0, 0}};
    ck_ok(digest_add(&want, values, LK_DTYPE_F32, LK_DTYPE_BF16, slot->numel, 0));
    for (int attempt = 0; attempt < 2; attempt++) { /* the first one is given up halfway */
        int slices = 0;
        sink.ops->begin(sink.ctx);
        ck_ok(sink.ops->plan(sink.ctx, &desc, 1, &err));
        lk_status_t status;
        do {
            status = sink.ops->tensor(sink.ctx, 0, values, slot->numel * sizeof *values, &err);
            slices++;
        } while (status == LK_INPROGRESS && (attempt > 0 || slices < 3));
        ck_assert_int_eq(status, attempt > 0 ? LK_OK : LK_INPROGRESS);
        ck_assert_int_eq(sink.ops->complete(sink.ctx), false);
        ck_assert(attempt == 0 || slices >= 10);
    }
    ck_ok(weight_sink_commit(&sink, &err));
    slot = weight_table_find(table, "model.embed_tokens.weight");
    ck_assert(digest_equal(slot->digest, want));
    digest_t stored = {{0, 0}};
    ck_ok(digest_add(&stored, slot->data, LK_DTYPE_BF16, LK_DTYPE_BF16, slot->numel, 0));
    ck_assert(digest_equal(stored, want));
    free(values);
    weight_table_destroy(&table);
}
END_TEST

typedef struct {
    int firsts, calls, flips, fails;
} follower_t;

static lk_status_t follow_prepare(void *ctx, bool first, lk_error_t *err)
{
    follower_t *f = ctx;
    f->firsts += first;
    f->calls++;
    if (f->fails > 0) {
        f->fails--;
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no room to re-pack");
    }
    return f->calls % 4 == 0 ? LK_OK : LK_INPROGRESS;
}

static void follow_flip(void *ctx)
{
    ((follower_t *)ctx)->flips++;
}

START_TEST(what_is_kept_beside_a_set_follows_it)
{
    weight_table_t *table = shadowed(model_fixture_load("qwen3", LK_DTYPE_BF16, 0, 1));
    weight_sink_t sink = weight_table_sink(table);
    follower_t follower = {0};
    weight_table_follow(table, &(weight_follower_t){follow_prepare, follow_flip, &follower});
    lk_error_t err = LK_ERROR_INIT;
    for (int i = 1; i <= 3; i++) {
        sink.ops->begin(sink.ctx);
        commit(table);
        ck_assert_int_eq(follower.firsts, i);
        ck_assert_int_eq(follower.calls, 4 * i);
        ck_assert_int_eq(follower.flips, i);
    }
    follower.fails = 1; /* its failure is the session's; the next one begins anew */
    sink.ops->begin(sink.ctx);
    ck_assert_int_eq(sink.ops->prepare(sink.ctx, &err), LK_ERR_NO_MEMORY);
    follower.calls = 0;
    sink.ops->begin(sink.ctx);
    commit(table);
    ck_assert_int_eq(follower.firsts, 5);
    ck_assert_int_eq(follower.flips, 4);
    weight_table_destroy(&table);
}
END_TEST

/* What a start promises is what a table takes. */
START_TEST(sizes_are_told_before_they_are_taken)
{
    for (uint32_t size = 1; size <= 3; size++) {
        for (uint32_t rank = 0; rank < size; rank++) {
            model_config_t config;
            model_fixture_config(model_fixtures[_i], &config);
            for (int wide = 0; wide < 2; wide++) {
                lk_dtype_t stored = wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
                weight_table_t *table = model_fixture_table(model_fixtures[_i], stored, rank, size);
                ck_assert_uint_eq(weight_table_size(&config, stored, rank, size),
                                  weight_table_bytes(table));
                weight_table_destroy(&table);
            }
        }
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("weight_shadow");
    TCase *tc = tcase_create("shadow");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, sessions_give_what_they_give_in_place, 0, N_MODEL_FIXTURES);
    tcase_add_test(tc, only_what_is_behind_is_copied);
    tcase_add_loop_test(tc, large_tensors_are_taken_in_slices, 0, 2);
    tcase_add_test(tc, what_is_kept_beside_a_set_follows_it);
    tcase_add_loop_test(tc, sizes_are_told_before_they_are_taken, 0, N_MODEL_FIXTURES);
    suite_add_tcase(s, tc);
    return s;
}
