#include "base/check.h"
#include "base/hash.h"
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/digest.h"

#include <string.h>

#define N 1037

/* The formula of digest.h, written out. */
static digest_t reference(const float *values, uint64_t n, uint64_t first)
{
    static const uint64_t c[2] = {0x6c6f636b73746570ull, 0x7765696768747321ull};
    digest_t d = {{0, 0}};
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        for (int l = 0; l < 2; l++) {
            d.lane[l] += lk_mix64(lk_mix64(first + i + c[l]) ^ bits);
        }
    }
    return d;
}

static void random_values(float *values, const char *name)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed(name));
    for (int i = 0; i < N; i++) {
        values[i] = (float)lk_prng_normal(&prng);
    }
    values[3] = -0.0f;
}

START_TEST(formula_holds_for_every_dtype)
{
    static const lk_dtype_t floats[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16, LK_DTYPE_F64};
    float values[N], expected[N];
    char data[N * 8 + 1], rounded[N * 8];
    random_values(values, "formula");
    for (int s = 0; s < 4; s++) {
        for (int d = 0; d < 4; d++) {
            ck_ok(dtype_convert(data + 1, floats[s], values, LK_DTYPE_F32, N));
            ck_ok(dtype_convert(rounded, floats[d], data + 1, floats[s], N));
            ck_ok(dtype_convert(expected, LK_DTYPE_F32, rounded, floats[d], N));
            for (uint64_t n = 0; n < N; n = n * 2 + 1) {
                digest_t acc = {{1, 2}}, want = reference(expected, n, 1ull << 40);
                ck_ok(digest_add(&acc, data + 1, floats[s], floats[d], n, 1ull << 40));
                ck_assert_uint_eq(acc.lane[0], want.lane[0] + 1);
                ck_assert_uint_eq(acc.lane[1], want.lane[1] + 2);
            }
        }
    }
}
END_TEST

/* The values that rounding and widening treat on their own, and every pair of dtypes: the digest of
 * digest_add, the bytes of dtype_convert. */
START_TEST(storing_converts_and_digests)
{
    static const lk_dtype_t floats[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16, LK_DTYPE_F64};
    static const uint32_t special[] = {0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC00000,
                                       0x7F7FFFFF, 0x00000001, 0x80000000, 0x3F808000, 0x3F818000};
    float values[N];
    char data[N * 8 + 1], stored[N * 8 + 1], expected[N * 8];
    random_values(values, "storing");
    for (int i = 0; i < 700; i++) {
        memcpy(&values[i + 64], &special[i % LK_ARRAY_LEN(special)], sizeof values[0]);
    }
    for (int s = 0; s < 4; s++) {
        for (int d = 0; d < 4; d++) {
            for (uint64_t n = 0; n < N; n = n * 2 + 1) {
                digest_t acc = {{0, 0}}, want = {{0, 0}};
                ck_ok(dtype_convert(data + 1, floats[s], values, LK_DTYPE_F32, N));
                ck_ok(dtype_convert(expected, floats[d], data + 1, floats[s], N));
                memset(stored, 7, sizeof stored);
                ck_ok(digest_store(&acc, stored + 1, data + 1, floats[s], floats[d], n, 190));
                ck_ok(digest_add(&want, expected, floats[d], floats[d], n, 190));
                ck_assert(digest_equal(acc, want));
                size_t len = n * dtype_bytes(floats[d]);
                ck_assert_mem_eq(stored + 1, expected, len);
                ck_assert(stored[0] == 7 && stored[len + 1] == 7);
            }
        }
    }
}
END_TEST

/* The kernels' shortcut for the index holds within 2^30 indices: across a border too. */
START_TEST(formula_holds_where_the_index_carries)
{
    static const uint64_t c[2] = {0x6c6f636b73746570ull, 0x7765696768747321ull};
    float values[N];
    random_values(values, "carries");
    for (int l = 0; l < 2; l++) {
        uint64_t border = (~(c[l] + 0x9E3779B97F4A7C15ull) & ((1ull << 30) - 1)) + 1;
        for (uint64_t before = 400; before < 470; before++) {
            digest_t acc = {{0, 0}}, want = reference(values, N, border - before);
            ck_ok(digest_add(&acc, values, LK_DTYPE_F32, LK_DTYPE_F32, N, border - before));
            ck_assert(digest_equal(acc, want));
        }
        digest_t acc = {{0, 0}}, want = reference(values, N, UINT64_MAX - 500);
        ck_ok(digest_add(&acc, values, LK_DTYPE_F32, LK_DTYPE_F32, N, UINT64_MAX - 500));
        ck_assert(digest_equal(acc, want));
    }
}
END_TEST

START_TEST(parts_in_any_order_sum_to_the_whole)
{
    float values[N];
    random_values(values, "parts");
    digest_t whole = {{0, 0}}, parts = {{0, 0}};
    ck_ok(digest_add(&whole, values, LK_DTYPE_F32, LK_DTYPE_BF16, N, 0));
    ck_ok(digest_add(&parts, values + 700, LK_DTYPE_F32, LK_DTYPE_BF16, N - 700, 700));
    ck_ok(digest_add(&parts, values, LK_DTYPE_F32, LK_DTYPE_BF16, 13, 0));
    ck_ok(digest_add(&parts, values + 13, LK_DTYPE_F32, LK_DTYPE_BF16, 687, 13));
    ck_assert(digest_equal(whole, parts));
}
END_TEST

/* Two equal values exchanged leave the multiset of values as it is, but not the digest. */
START_TEST(position_and_value_matter)
{
    float values[N];
    random_values(values, "position");
    digest_t before = {{0, 0}}, after = {{0, 0}}, one_bit = {{0, 0}};
    ck_ok(digest_add(&before, values, LK_DTYPE_F32, LK_DTYPE_F32, N, 0));
    float kept = values[10];
    values[10] = values[11];
    values[11] = kept;
    ck_ok(digest_add(&after, values, LK_DTYPE_F32, LK_DTYPE_F32, N, 0));
    ck_assert(!digest_equal(before, after));
    values[11] = values[10];
    values[10] = kept;
    values[3] = 0.0f; /* was -0 */
    ck_ok(digest_add(&one_bit, values, LK_DTYPE_F32, LK_DTYPE_F32, N, 0));
    ck_assert(!digest_equal(before, one_bit));
}
END_TEST

START_TEST(integers_are_sign_extended)
{
    static const int8_t i8[] = {-3, 0, 127};
    static const int32_t i32[] = {-3, 0, 127};
    static const int64_t i64[] = {-3, 0, 127};
    digest_t a = {{0, 0}}, b = {{0, 0}}, c = {{0, 0}};
    ck_ok(digest_add(&a, i8, LK_DTYPE_I8, LK_DTYPE_I8, 3, 5));
    ck_ok(digest_add(&b, i32, LK_DTYPE_I32, LK_DTYPE_I32, 3, 5));
    ck_ok(digest_add(&c, i64, LK_DTYPE_I64, LK_DTYPE_I64, 3, 5));
    ck_assert(digest_equal(a, b) && digest_equal(b, c));
    digest_t untouched = {{7, 7}};
    ck_assert_int_eq(digest_add(&untouched, i32, LK_DTYPE_I32, LK_DTYPE_F32, 3, 0),
                     LK_ERR_UNSUPPORTED);
    ck_assert_uint_eq(untouched.lane[0], 7);
    int32_t copied[3];
    ck_ok(digest_store(&a, copied, i32, LK_DTYPE_I32, LK_DTYPE_I32, 3, 5));
    ck_assert_mem_eq(copied, i32, sizeof i32);
}
END_TEST

START_TEST(sets_are_a_group)
{
    digest_t set = {{0, 0}}, other = {{0, 0}}, a = {{1, 2}}, b = {{3, 4}};
    digest_set_add(&set, "a", a);
    digest_set_add(&set, "b", b);
    digest_set_add(&other, "b", b);
    digest_set_add(&other, "a", a);
    ck_assert(digest_equal(set, other));
    digest_set_remove(&set, "a", a);
    digest_set_remove(&set, "b", b);
    ck_assert_uint_eq(set.lane[0] | set.lane[1], 0);
    /* names bind values: exchanging them is seen */
    digest_set_add(&set, "a", b);
    digest_set_add(&set, "b", a);
    ck_assert(!digest_equal(set, other));
    digest_t formula = {{0, 0}};
    digest_set_add(&formula, "name", a);
    for (uint64_t l = 0; l < 2; l++) {
        ck_assert_uint_eq(formula.lane[l], lk_mix64(lk_mix64(lk_hash64("name", 4, l)) ^ a.lane[l]));
    }
}
END_TEST

START_TEST(hex_has_all_digits)
{
    digest_t d = {{0x0123456789abcdefull, 0xfedcba9876543210ull}};
    char hex[DIGEST_HEX_SIZE];
    digest_hex(d, hex);
    ck_assert_str_eq(hex, "0123456789abcdeffedcba9876543210");
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("digest");
    TCase *tc = tcase_create("all");
    tcase_add_test(tc, formula_holds_for_every_dtype);
    tcase_add_test(tc, storing_converts_and_digests);
    tcase_add_test(tc, formula_holds_where_the_index_carries);
    tcase_add_test(tc, parts_in_any_order_sum_to_the_whole);
    tcase_add_test(tc, position_and_value_matter);
    tcase_add_test(tc, integers_are_sign_extended);
    tcase_add_test(tc, sets_are_a_group);
    tcase_add_test(tc, hex_has_all_digits);
    suite_add_tcase(suite, tc);
    return suite;
}
