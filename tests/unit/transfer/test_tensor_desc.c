#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "transfer/tensor_desc.h"

#include <math.h>
#include <string.h>

START_TEST(both_spellings_parse)
{
    for (int i = 0; i < LK_DTYPE_COUNT; i++) {
        lk_dtype_t got;
        ck_assert(dtype_parse(dtype_torch_name((lk_dtype_t)i), &got) && got == (lk_dtype_t)i);
        ck_assert(dtype_parse(dtype_safetensors_name((lk_dtype_t)i), &got) && got == (lk_dtype_t)i);
    }
    lk_dtype_t untouched = LK_DTYPE_U8;
    ck_assert(!dtype_parse("float8_e4m3fn", &untouched) && untouched == LK_DTYPE_U8);
    ck_assert(!dtype_parse("", &untouched));
}
END_TEST

START_TEST(sizes_refuse_overflow)
{
    tensor_desc_t t = {.name = "t", .dtype = LK_DTYPE_F32};
    uint64_t n = 0;
    ck_assert(tensor_desc_numel(&t, &n) && n == 1);
    t.ndim = 2;
    t.shape[0] = 1ull << 32;
    t.shape[1] = 1ull << 31;
    ck_assert(!tensor_desc_numel(&t, &n));
    t.shape[1] = (1ull << 31) - 1;
    ck_assert(tensor_desc_numel(&t, &n));
    ck_assert(!tensor_desc_bytes(&t, &n));
    t.shape[1] = 1ull << 20;
    ck_assert(tensor_desc_bytes(&t, &n) && n == 1ull << 54);
    t.shape[0] = 0;
    ck_assert(tensor_desc_bytes(&t, &n) && n == 0);
    t.ndim = TENSOR_MAX_DIMS + 1;
    ck_assert(!tensor_desc_numel(&t, &n));
}
END_TEST

START_TEST(shape_text_fits_its_room)
{
    tensor_desc_t t = {.ndim = 2, .shape = {2, 3}};
    char out[16];
    tensor_desc_shape_text(&t, out, sizeof out);
    ck_assert_str_eq(out, "[2, 3]");
    t.ndim = 0;
    tensor_desc_shape_text(&t, out, sizeof out);
    ck_assert_str_eq(out, "[]");
    t = (tensor_desc_t){.ndim = 3, .shape = {UINT64_MAX, UINT64_MAX, 1}};
    tensor_desc_shape_text(&t, out, sizeof out);
    ck_assert_uint_lt(strlen(out), sizeof out);
}
END_TEST

/* Reference: the neighbour closest to x, the even one on a tie, by exact double arithmetic. */
static uint16_t nearest(double x, float (*widen)(uint16_t))
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double magnitude = fabs(x);
    uint16_t low = 0, high = 0x7FFF; /* widths are monotonic; infinity is widened as a number */
    while (high - low > 1) {
        uint16_t mid = (uint16_t)((low + high) / 2);
        double value = widen(mid);
        if (!isnan(value) && value <= magnitude) {
            low = mid;
        } else {
            high = mid;
        }
    }
    double below = widen(low), above = widen((uint16_t)(low + 1));
    if (isinf(below)) {
        return (uint16_t)(sign | low);
    }
    if (isinf(above)) { /* the value that would come next if the exponent went on */
        above = 2 * below - (double)widen((uint16_t)(low - 1));
    }
    double down = magnitude - below, up = above - magnitude;
    bool take_up = up < down || (up == down && (low & 1));
    return (uint16_t)(sign | (take_up ? low + 1 : low));
}

START_TEST(rounding_is_to_nearest_even)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("rounding"));
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)lk_prng_u64(&prng);
        if (i % 3 == 0) {
            bits &= 0xFFFF8000u; /* ties of bf16 */
        } else if (i % 3 == 1) { /* the range of f16, often ties */
            bits = (bits & 0x80FFF000u) + ((uint32_t)(100 + lk_prng_below(&prng, 45)) << 23);
        }
        float x;
        memcpy(&x, &bits, sizeof x);
        if (isnan(x)) {
            ck_assert(isnan(lk_bf16_to_f32(lk_f32_to_bf16(x))));
            ck_assert(isnan(lk_f16_to_f32(lk_f32_to_f16(x))));
            continue;
        }
        ck_assert_uint_eq(lk_f32_to_bf16(x), nearest(x, lk_bf16_to_f32));
        ck_assert_uint_eq(lk_f32_to_f16(x), nearest(x, lk_f16_to_f32));
    }
}
END_TEST

START_TEST(halves_survive_a_round_trip)
{
    for (uint32_t i = 0; i <= 0xFFFF; i++) {
        float f = lk_f16_to_f32((uint16_t)i), b = lk_bf16_to_f32((uint16_t)i);
        if (!isnan(f)) {
            ck_assert_uint_eq(lk_f32_to_f16(f), i);
        }
        if (!isnan(b)) {
            ck_assert_uint_eq(lk_f32_to_bf16(b), i);
        }
    }
    ck_assert(lk_f16_to_f32(0x0001) == 0x1p-24f && lk_f16_to_f32(0x7BFF) == 65504.0f);
    ck_assert(isinf(lk_f16_to_f32(0xFC00)) && lk_f16_to_f32(0x3C00) == 1.0f);
}
END_TEST

/* From float64 there is one rounding, not two: a value just above a tie of the narrow type, which
 * float32 would round onto the tie. */
START_TEST(doubles_round_once)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("doubles"));
    for (int i = 0; i < 50000; i++) {
        double x = ldexp(lk_prng_unit(&prng) * 2 - 1, (int)lk_prng_below(&prng, 40) - 26);
        if (i % 2 == 0) {
            float tie = lk_bf16_to_f32((uint16_t)(0x3000 + lk_prng_below(&prng, 0x1000)));
            x = tie * (1 + 0x1p-8) + ldexp(tie, -45);
        }
        uint16_t bf16, f16;
        ck_ok(dtype_convert(&bf16, LK_DTYPE_BF16, &x, LK_DTYPE_F64, 1));
        ck_ok(dtype_convert(&f16, LK_DTYPE_F16, &x, LK_DTYPE_F64, 1));
        ck_assert_uint_eq(bf16, nearest(x, lk_bf16_to_f32));
        ck_assert_uint_eq(f16, nearest(x, lk_f16_to_f32));
    }
    double huge = 1e300;
    uint16_t out;
    ck_ok(dtype_convert(&out, LK_DTYPE_BF16, &huge, LK_DTYPE_F64, 1));
    ck_assert_uint_eq(out, 0x7F80);
}
END_TEST

/* Every pair of floating dtypes, through odd addresses, equals the scalar functions. */
START_TEST(converts_in_any_pair)
{
    static const lk_dtype_t floats[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16, LK_DTYPE_F64};
    enum { N = 37 };
    uint16_t halves[N]; /* exact in every dtype */
    char a[N * 8 + 1], b[N * 8 + 1], back[N * 8 + 1];
    for (int i = 0; i < N; i++) {
        halves[i] = lk_f32_to_f16((float)(i - 18) * 0.125f);
    }
    for (int s = 0; s < 4; s++) {
        ck_ok(dtype_convert(a + 1, floats[s], halves, LK_DTYPE_F16, N));
        for (int d = 0; d < 4; d++) {
            ck_ok(dtype_convert(b + 1, floats[d], a + 1, floats[s], N));
            ck_ok(dtype_convert(back + 1, LK_DTYPE_F16, b + 1, floats[d], N));
            ck_assert_mem_eq(back + 1, halves, sizeof halves);
        }
    }
    int32_t integer = 5;
    ck_assert_int_eq(dtype_convert(a, LK_DTYPE_F32, &integer, LK_DTYPE_I32, 1), LK_ERR_UNSUPPORTED);
    ck_ok(dtype_convert(a, LK_DTYPE_I32, &integer, LK_DTYPE_I32, 1));
    ck_assert_mem_eq(a, &integer, sizeof integer);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("tensor_desc");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, both_spellings_parse);
    tcase_add_test(tc, sizes_refuse_overflow);
    tcase_add_test(tc, shape_text_fits_its_room);
    tcase_add_test(tc, rounding_is_to_nearest_even);
    tcase_add_test(tc, halves_survive_a_round_trip);
    tcase_add_test(tc, doubles_round_once);
    tcase_add_test(tc, converts_in_any_pair);
    suite_add_tcase(suite, tc);
    return suite;
}
