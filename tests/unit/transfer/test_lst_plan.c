#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/packed_layout.h"
#include "transfer/trainer/lst_plan.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 512
#define MIB  (1ull << 20)

static tensor_desc_t descs[MOST];
static char names[MOST][64];
static const void *data[MOST];
static size_t n_descs;
static lk_error_t err;

static void add(const char *name, uint64_t rows, uint64_t cols)
{
    snprintf(names[n_descs], sizeof names[0], "%s", name);
    descs[n_descs] = (tensor_desc_t){
        .name = names[n_descs], .dtype = LK_DTYPE_BF16, .ndim = 2, .shape = {rows, cols}};
    data[n_descs] = names[n_descs]; /* any address of its own */
    n_descs++;
}

/* Qwen3-8B, as its checkpoint lists it. */
static void qwen3_8b(void)
{
    char name[64];
    n_descs = 0;
    add("model.embed_tokens.weight", 151936, 4096);
    for (int layer = 0; layer < 36; layer++) {
        static const uint64_t rows[] = {1, 4096, 1024, 1024, 4096, 1, 12288, 12288, 12288};
        for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
            snprintf(name, sizeof name, "model.layers.%d.%zu", layer, i);
            add(name, rows[i], 4096);
        }
    }
    add("model.norm.weight", 1, 4096);
    add("lm_head.weight", 151936, 4096);
}

static lst_plan_t make(bool packed, uint64_t size)
{
    lst_plan_t plan = {0};
    err = LK_ERROR_INIT;
    ck_ok(lst_plan_make(&plan, descs, data, n_descs, packed, size, true, &err));
    return plan;
}

/* Every tensor once, with its own data, and the call's body names them in that order. */
static void check_whole(const lst_plan_t *plan)
{
    bool seen[MOST] = {false};
    json_t *root = json_loads(plan->args, JSON_REJECT_DUPLICATES, NULL);
    const json_t *info = json_object_get(root, "update_info");
    ck_assert_uint_eq(json_array_size(json_object_get(info, "names")), n_descs);
    ck_assert_uint_eq(
        (uint64_t)json_integer_value(json_object_get(info, "packed_buffer_size_bytes")),
        plan->buffer_size);
    for (size_t i = 0; i < n_descs; i++) {
        size_t from = plan->order[i];
        ck_assert_uint_lt(from, n_descs);
        ck_assert(!seen[from]);
        seen[from] = true;
        ck_assert_str_eq(plan->sent[i].name, names[from]);
        ck_assert_mem_eq(plan->sent[i].shape, descs[from].shape, sizeof(uint64_t[2]));
        ck_assert_ptr_eq(plan->data[i], data[from]);
        ck_assert_str_eq(json_string_value(json_array_get(json_object_get(info, "names"), i)),
                         names[from]);
    }
    json_decref(root);
}

static uint64_t last_bucket(const lst_plan_t *plan, size_t *n_buckets)
{
    packed_bucket_t *buckets = NULL;
    ck_ok(packed_layout(plan->sent, n_descs, true, plan->buffer_size, &buckets, n_buckets, &err));
    uint64_t bytes = buckets[*n_buckets - 1].bytes;
    free(buckets);
    return bytes;
}

START_TEST(little_is_left_after_the_last_broadcast)
{
    qwen3_8b();
    lst_plan_t plan = make(true, 0);
    size_t n = 0;
    check_whole(&plan);
    ck_assert_str_eq(plan.sent[0].name, "model.embed_tokens.weight");
    ck_assert_str_eq(plan.sent[1].name, "lm_head.weight");
    ck_assert_str_eq(plan.sent[n_descs - 1].name, "model.norm.weight");
    ck_assert_uint_le(plan.buffer_size, PACKED_BUFFER_SIZE_DEFAULT);
    ck_assert_uint_lt(last_bucket(&plan, &n), 400 * MIB); /* in the caller's order: 2.3 GB */
    ck_assert_uint_lt(n, 60);
    printf("# with digests: buckets of %llu MiB, %zu of them, the last %llu MiB\n",
           (unsigned long long)(plan.buffer_size >> 20), n,
           (unsigned long long)(last_bucket(&plan, &n) >> 20));
    ck_ok(lst_plan_make(&plan, descs, data, n_descs, true, 0, false, &err));
    check_whole(&plan);
    ck_assert_uint_eq(plan.buffer_size, PACKED_BUFFER_SIZE_DEFAULT);
    ck_assert_uint_eq(plan.order[n_descs - 1], n_descs - 1);
    lst_plan_fini(&plan);
}
END_TEST

START_TEST(what_the_caller_says_holds)
{
    qwen3_8b();
    for (int packed = 0; packed < 2; packed++) {
        lst_plan_t plan = make(packed == 1, packed == 1 ? 300 * MIB : 0);
        check_whole(&plan);
        for (size_t i = 0; i < n_descs; i++) {
            ck_assert_uint_eq(plan.order[i], i);
        }
        ck_assert(packed == 0 || plan.buffer_size == 300 * MIB);
        lst_plan_fini(&plan);
    }
}
END_TEST

START_TEST(the_same_list_is_planned_once)
{
    qwen3_8b();
    lst_plan_t plan = make(true, 0);
    const char *args = plan.args;
    char copy[64];
    data[7] = copy; /* tensors move */
    snprintf(copy, sizeof copy, "%s", names[3]);
    descs[3].name = copy;
    ck_ok(lst_plan_make(&plan, descs, data, n_descs, true, 0, true, &err));
    ck_assert_ptr_eq(plan.args, args);
    check_whole(&plan);
    lst_plan_t before = plan;
    ck_ok(lst_plan_make(&plan, descs, data, n_descs, true, 70 * MIB, true, &err));
    ck_assert_uint_eq(plan.buffer_size, 70 * MIB);
    copy[0] = 'x';
    snprintf(names[3], sizeof names[3], "%s", copy);
    ck_ok(lst_plan_make(&plan, descs, data, n_descs, true, 0, true, &err));
    ck_assert_uint_eq(plan.buffer_size, before.buffer_size);
    check_whole(&plan);
    lst_plan_fini(&plan);
}
END_TEST

START_TEST(random_lists)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("lst_plan") + (uint64_t)_i);
    char name[64];
    n_descs = 0;
    for (size_t n = lk_prng_u64(&prng) % 60; n > 0; n--) {
        snprintf(name, sizeof name, "t%zu", n_descs);
        uint64_t bits = lk_prng_u64(&prng) % 30;
        add(name, lk_prng_u64(&prng) % (1ull << bits), 1 + lk_prng_u64(&prng) % 3);
    }
    lst_plan_t plan = make(true, 0);
    check_whole(&plan);
    ck_assert_uint_ge(plan.buffer_size, 64 * MIB);
    ck_assert_uint_le(plan.buffer_size, PACKED_BUFFER_SIZE_DEFAULT);
    lst_plan_fini(&plan);
}
END_TEST

START_TEST(lists_that_differ)
{
    tensor_list_t list = {0};
    qwen3_8b();
    ck_assert(!tensor_list_equal(&list, descs, 0)); /* zeroed */
    ck_ok(tensor_list_copy(descs, 4, &list, &err));
    ck_assert(tensor_list_equal(&list, descs, 4));
    ck_assert(!tensor_list_equal(&list, descs, 3));
    for (int change = 0; change < 4; change++) {
        tensor_desc_t other[4];
        memcpy(other, descs, sizeof other);
        other[2].name = change == 0 ? "other" : other[2].name;
        other[2].dtype = change == 1 ? LK_DTYPE_F16 : other[2].dtype;
        other[2].ndim = change == 2 ? 1 : other[2].ndim;
        other[2].shape[1] += change == 3;
        ck_assert_msg(!tensor_list_equal(&list, other, 4), "change %d", change);
    }
    tensor_list_fini(&list);
    ck_ok(tensor_list_copy(descs, 0, &list, &err));
    ck_assert(tensor_list_equal(&list, descs, 0));
    tensor_list_fini(&list);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("lst_plan");
    TCase *tcase = tcase_create("lst_plan");
    tcase_add_test(tcase, little_is_left_after_the_last_broadcast);
    tcase_add_test(tcase, what_the_caller_says_holds);
    tcase_add_test(tcase, the_same_list_is_planned_once);
    tcase_add_loop_test(tcase, random_lists, 0, 50);
    tcase_add_test(tcase, lists_that_differ);
    suite_add_tcase(suite, tcase);
    return suite;
}
