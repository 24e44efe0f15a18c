#include "base/check.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/packed_layout.h"

#include <stdlib.h>

#define MAX_TENSORS 8

/* bytes of each tensor (-1 ends the list), buffer size, bytes of each bucket (-1 ends the list).
 * The rule: a bucket is flushed once its total is strictly greater than the buffer size. */
static const struct {
    int64_t tensors[MAX_TENSORS];
    uint64_t buffer;
    int64_t buckets[MAX_TENSORS];
} rows[] = {
    {{-1}, 10, {-1}},
    {{5, -1}, 10, {5, -1}},
    {{10, -1}, 10, {10, -1}},
    {{10, 1, -1}, 10, {11, -1}},
    {{10, 1, 1, -1}, 10, {11, 1, -1}},
    {{11, 1, -1}, 10, {11, 1, -1}},
    {{100, 100, -1}, 10, {100, 100, -1}},
    {{3, 3, 3, 3, 3, -1}, 10, {12, 3, -1}},
    {{4, 6, 1, 9, 2, -1}, 10, {11, 11, -1}},
    {{0, 0, 0, -1}, 10, {0, -1}},
    {{10, 0, 0, 7, 0, -1}, 10, {17, 0, -1}},
    {{0, 11, 0, -1}, 10, {11, 0, -1}},
    {{1, 1, 1, -1}, 1, {2, 1, -1}},
    {{7, 1, 2, 3, 5, 7, 11, -1}, 16, {18, 18, -1}},
};

static tensor_desc_t bytes_tensor(uint64_t bytes)
{
    return (tensor_desc_t){.name = "t", .dtype = LK_DTYPE_U8, .ndim = 1, .shape = {bytes}};
}

START_TEST(table)
{
    tensor_desc_t tensors[MAX_TENSORS];
    size_t n = 0;
    while (rows[_i].tensors[n] >= 0) {
        tensors[n] = bytes_tensor((uint64_t)rows[_i].tensors[n]);
        n++;
    }
    packed_bucket_t *buckets = NULL;
    size_t n_buckets = 99;
    lk_error_t err = LK_ERROR_INIT;
    ck_ok(packed_layout(tensors, n, true, rows[_i].buffer, &buckets, &n_buckets, &err));
    size_t first = 0, b = 0;
    for (; rows[_i].buckets[b] >= 0; b++) {
        ck_assert_uint_lt(b, n_buckets);
        ck_assert_uint_eq(buckets[b].bytes, (uint64_t)rows[_i].buckets[b]);
        ck_assert_uint_eq(buckets[b].first, first);
        ck_assert_uint_gt(buckets[b].count, 0);
        first += buckets[b].count;
    }
    ck_assert_uint_eq(b, n_buckets);
    ck_assert_uint_eq(first, n);
    free(buckets);
}
END_TEST

START_TEST(unpacked_is_one_bucket_per_tensor)
{
    tensor_desc_t tensors[3] = {bytes_tensor(0), bytes_tensor(7), bytes_tensor(1)};
    packed_bucket_t *buckets = NULL;
    size_t n = 0;
    ck_ok(packed_layout(tensors, 3, false, 100, &buckets, &n, NULL));
    ck_assert_uint_eq(n, 3);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_uint_eq(buckets[i].first, i);
        ck_assert_uint_eq(buckets[i].count, 1);
        ck_assert_uint_eq(buckets[i].bytes, tensors[i].shape[0]);
    }
    free(buckets);
}
END_TEST

START_TEST(too_large_is_refused)
{
    tensor_desc_t tensors[3] = {bytes_tensor(1ull << 62), bytes_tensor(1ull << 62),
                                bytes_tensor(1)};
    packed_bucket_t *buckets = NULL;
    size_t n = 0;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(packed_layout(tensors, 3, true, 100, &buckets, &n, &err), LK_ERR_INVALID);
    ck_assert_ptr_null(buckets);
    ck_assert_ptr_nonnull(strstr(err.text, "too large"));
}
END_TEST

/* The sender's words for the same rule, over random sizes. */
START_TEST(random_sizes_agree_with_the_rule)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("packed_layout"));
    for (int round = 0; round < 200; round++) {
        tensor_desc_t tensors[64];
        size_t n = lk_prng_below(&prng, 64);
        uint64_t buffer = 1 + lk_prng_below(&prng, 300);
        for (size_t i = 0; i < n; i++) {
            tensors[i] = bytes_tensor(lk_prng_below(&prng, 120));
        }
        packed_bucket_t *buckets = NULL;
        size_t n_buckets = 0, i = 0;
        ck_ok(packed_layout(tensors, n, true, buffer, &buckets, &n_buckets, NULL));
        for (size_t b = 0; b < n_buckets; b++) {
            uint64_t total = 0;
            while (i < n && total <= buffer) {
                total += tensors[i++].shape[0];
            }
            ck_assert_uint_eq(buckets[b].bytes, total);
            ck_assert_uint_eq(buckets[b].first + buckets[b].count, i);
        }
        ck_assert_uint_eq(i, n);
        free(buckets);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("packed_layout");
    TCase *tc = tcase_create("layout");
    tcase_add_loop_test(tc, table, 0, LK_ARRAY_LEN(rows));
    tcase_add_test(tc, unpacked_is_one_bucket_per_tensor);
    tcase_add_test(tc, too_large_is_refused);
    tcase_add_test(tc, random_sizes_agree_with_the_rule);
    suite_add_tcase(suite, tc);
    return suite;
}
