/*
 * test_kernels.c: every kernel table against the plain C one on random shapes with odd edges, and
 * against itself under every way of cutting the work. Also the thread team and the router's top-k.
 */
#include "base/prng.h"
#include "engine_core/exec/cpu/kernels.h"
#include "engine_core/exec/cpu/moe.h"
#include "engine_core/exec/cpu/team.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TABLES 4

static lk_prng_t prng;

static void setup(void)
{
    lk_prng_seed(&prng, test_seed("kernels"));
}

/* Sizes around the widths of vectors and tiles are as likely as all others. */
static uint32_t size_upto(uint32_t max)
{
    static const uint32_t edges[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65};
    uint32_t n = lk_prng_below(&prng, 2) == 0
                     ? edges[lk_prng_below(&prng, sizeof edges / sizeof *edges)]
                     : 1 + (uint32_t)lk_prng_below(&prng, max);
    return n < max ? n : max;
}

static float *random_floats(size_t n)
{
    float *x = malloc((n + 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)lk_prng_normal(&prng);
    }
    return x;
}

static uint16_t *random_bf16(size_t n)
{
    float *x = random_floats(n);
    uint16_t *y = malloc((n + 1) * sizeof *y);
    kernels_ref.to_bf16(x, (uint32_t)n, y);
    free(x);
    return y;
}

/* The same numbers by two orders of summation differ by rounding only. */
static void check_near(const float *a, const float *b, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) {
        ck_assert_msg(fabsf(a[i] - b[i]) <= scale * 2e-6f + 1e-6f, "element %zu: %g, expected %g",
                      i, a[i], b[i]);
    }
}

static void run_gemm(const kernels_t *t, bool bf16, gemm_t g, float *y, uint32_t m0, uint32_t m1,
                     uint32_t n0, uint32_t n1)
{
    g.y = y;
    (bf16 ? t->gemm_bf16 : t->gemm_f32)(&g, m0, m1, n0, n1);
}

/* Cuts [0, n) at random places into at most 8 pieces; cuts[0] = 0, returns the number of pieces. */
static uint32_t random_cuts(uint32_t n, uint32_t cuts[9])
{
    uint32_t pieces = 0;
    cuts[0] = 0;
    while (cuts[pieces] < n) {
        uint32_t left = n - cuts[pieces];
        uint32_t step = pieces == 7 ? left : 1 + (uint32_t)lk_prng_below(&prng, left);
        cuts[pieces + 1] = cuts[pieces] + step;
        pieces++;
    }
    return pieces;
}

static void gemm_case(const kernels_t *t, bool bf16)
{
    gemm_t g = {.m = size_upto(40), .n = size_upto(70), .k = size_upto(300)};
    g.ldx = g.k + lk_prng_below(&prng, 3);
    g.ldy = g.n + lk_prng_below(&prng, 3);
    g.add = lk_prng_below(&prng, 2) == 0;
    float *bias = random_floats(g.n), *start = random_floats(g.m * g.ldy);
    g.bias = lk_prng_below(&prng, 2) == 0 ? bias : NULL;
    void *x = bf16 ? (void *)random_bf16(g.m * g.ldx) : (void *)random_floats(g.m * g.ldx);
    void *w =
        bf16 ? (void *)random_bf16((size_t)g.n * g.k) : (void *)random_floats((size_t)g.n * g.k);
    g.x = x;
    g.w = w;
    const size_t bytes = g.m * g.ldy * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes), *cut = malloc(bytes);
    memcpy(want, start, bytes);
    memcpy(got, start, bytes);
    memcpy(cut, start, bytes);
    run_gemm(&kernels_ref, bf16, g, want, 0, g.m, 0, g.n);
    run_gemm(t, bf16, g, got, 0, g.m, 0, g.n);
    check_near(got, want, g.m * g.ldy, (float)g.k);
    uint32_t ms[9], ns[9], n_m = random_cuts(g.m, ms), n_n = random_cuts(g.n, ns);
    for (uint32_t i = 0; i < n_m; i++) {
        for (uint32_t j = 0; j < n_n; j++) {
            run_gemm(t, bf16, g, cut, ms[i], ms[i + 1], ns[j], ns[j + 1]);
        }
    }
    ck_assert_mem_eq(cut, got, bytes);
    /* a row alone, as if it were the whole batch */
    uint32_t row = (uint32_t)lk_prng_below(&prng, g.m);
    gemm_t one = g;
    one.m = 1;
    one.x = (const uint8_t *)x + row * g.ldx * (bf16 ? 2 : 4);
    memcpy(cut, start + row * g.ldy, g.n * sizeof *cut);
    run_gemm(t, bf16, one, cut, 0, 1, 0, g.n);
    ck_assert_mem_eq(cut, got + row * g.ldy, g.n * sizeof *cut);
    free(bias);
    free(start);
    free(x);
    free(w);
    free(want);
    free(got);
    free(cut);
}

START_TEST(products)
{
    const kernels_t *t = kernels_at((size_t)_i);
    for (int i = 0; t != NULL && i < 300; i++) {
        gemm_case(t, i % 2 == 0);
    }
}
END_TEST

START_TEST(rows)
{
    const kernels_t *t = kernels_at((size_t)_i);
    for (int i = 0; t != NULL && i < 300; i++) {
        uint32_t n = size_upto(300);
        float *x = random_floats(n), *y = random_floats(n);
        float *want = malloc(n * sizeof *want), *got = malloc(n * sizeof *got);
        kernels_ref.rms_norm(x, y, 1e-6f, n, want);
        t->rms_norm(x, y, 1e-6f, n, got);
        check_near(got, want, n, 10);
        for (uint32_t j = 0; j < n; j++) {
            x[j] *= (float)(1 + lk_prng_below(&prng, 60)); /* sigmoid's tails too */
        }
        kernels_ref.silu_mul(x, y, n, want);
        t->silu_mul(x, y, n, got);
        check_near(got, want, n, 300);
        uint32_t at = (uint32_t)lk_prng_below(&prng, n); /* the place in a row does not matter */
        t->silu_mul(x + at, y + at, n - at, want);
        ck_assert_mem_eq(want, got + at, (n - at) * sizeof *got);
        free(x);
        free(y);
        free(want);
        free(got);
    }
}
END_TEST

START_TEST(rounding_to_bf16)
{
    const kernels_t *t = kernels_at((size_t)_i);
    const uint32_t special[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                0x7f800001, 0xffffffff, 0x7f7fffff, 0x3f808000, 0x3f818000,
                                0x3f808001, 0x00000001, 0x80007fff, 0x00018000, 0x477fe000};
    for (int i = 0; t != NULL && i < 200; i++) {
        float x[40];
        uint16_t want[40], got[40];
        uint32_t n = 1 + (uint32_t)lk_prng_below(&prng, 40);
        for (uint32_t j = 0; j < n; j++) {
            uint32_t bits = (uint32_t)lk_prng_u64(&prng);
            if (lk_prng_below(&prng, 2) == 0) {
                bits = special[lk_prng_below(&prng, sizeof special / sizeof *special)];
            }
            memcpy(&x[j], &bits, sizeof bits);
        }
        kernels_ref.to_bf16(x, n, want);
        t->to_bf16(x, n, got);
        ck_assert_mem_eq(got, want, n * sizeof *got);
        for (uint32_t j = 0; j < n; j++) {
            ck_assert(isnan(x[j]) || want[j] == lk_f32_to_bf16(x[j]));
        }
    }
}
END_TEST

/* A random paged context; garbage, NaN included, wherever no position is. */
typedef struct {
    attn_t a;
    float *q, *out, *scores;
    uint8_t *kv;
    uint32_t *blocks;
} paged_t;

static void put_kv(paged_t *p, bool k, uint32_t pos, uint32_t d, float value, bool bf16)
{
    const attn_t *a = &p->a;
    uint32_t slot = pos % a->block_size;
    size_t i = k ? (size_t)d * a->slots + slot : (size_t)slot * a->head_dim + d;
    uint8_t *base =
        (uint8_t *)(uintptr_t)(k ? a->k : a->v) + a->blocks[pos / a->block_size] * a->block_stride;
    if (bf16) {
        kernels_ref.to_bf16(&value, 1, (uint16_t *)base + i);
    } else {
        ((float *)base)[i] = value;
    }
}

static void paged_init(paged_t *p, bool bf16)
{
    attn_t *a = &p->a;
    *p = (paged_t){0};
    a->rows = 1 + (uint32_t)lk_prng_below(&prng, ATTN_ROWS);
    a->head_dim = 2 * size_upto(70);
    a->block_size = size_upto(40);
    a->slots = (a->block_size + KV_SLOT_ALIGN - 1) / KV_SLOT_ALIGN * KV_SLOT_ALIGN;
    uint32_t longest = 0;
    for (uint32_t r = 0; r < a->rows; r++) {
        a->len[r] = size_upto(200);
        longest = a->len[r] > longest ? a->len[r] : longest;
    }
    uint32_t n_blocks = (longest + a->block_size - 1) / a->block_size;
    size_t half = (size_t)a->slots * a->head_dim * (bf16 ? 2 : 4);
    a->block_stride = 2 * half;
    p->kv = malloc(n_blocks * a->block_stride);
    memset(p->kv, 0xff, n_blocks * a->block_stride);
    a->k = p->kv;
    a->v = p->kv + half;
    p->blocks = malloc(n_blocks * sizeof *p->blocks);
    for (uint32_t b = 0; b < n_blocks; b++) {
        p->blocks[b] = n_blocks - 1 - b;
    }
    a->blocks = p->blocks;
    for (uint32_t pos = 0; pos < longest; pos++) {
        for (uint32_t d = 0; d < a->head_dim; d++) {
            put_kv(p, true, pos, d, (float)lk_prng_normal(&prng), bf16);
            put_kv(p, false, pos, d, (float)lk_prng_normal(&prng), bf16);
        }
    }
    a->ld_scores = (size_t)n_blocks * a->slots;
    p->scores = aligned_alloc(64, ATTN_ROWS * a->ld_scores * sizeof(float));
    p->q = random_floats((size_t)a->rows * a->head_dim);
    p->out = random_floats((size_t)a->rows * a->head_dim);
    for (uint32_t r = 0; r < a->rows; r++) {
        a->q[r] = p->q + (size_t)r * a->head_dim;
        a->out[r] = p->out + (size_t)r * a->head_dim;
    }
    a->scores = p->scores;
}

static void paged_fini(paged_t *p)
{
    free(p->kv);
    free(p->blocks);
    free(p->scores);
    free(p->q);
    free(p->out);
}

START_TEST(attention)
{
    const kernels_t *t = kernels_at((size_t)_i);
    for (int i = 0; t != NULL && i < 150; i++) {
        const bool bf16 = i % 2 == 0;
        paged_t p;
        paged_init(&p, bf16);
        const size_t n = (size_t)p.a.rows * p.a.head_dim;
        float *want = malloc(n * sizeof *want), *got = malloc(n * sizeof *got);
        (bf16 ? kernels_ref.attn_bf16 : kernels_ref.attn_f32)(&p.a);
        memcpy(want, p.out, n * sizeof *want);
        (bf16 ? t->attn_bf16 : t->attn_f32)(&p.a);
        memcpy(got, p.out, n * sizeof *got);
        check_near(got, want, n, 50);
        /* each row alone */
        for (uint32_t r = 0; r < p.a.rows; r++) {
            attn_t one = p.a;
            one.rows = 1;
            one.q[0] = p.a.q[r];
            one.out[0] = p.a.out[r];
            one.len[0] = p.a.len[r];
            (bf16 ? t->attn_bf16 : t->attn_f32)(&one);
        }
        ck_assert_mem_eq(p.out, got, n * sizeof *got);
        free(want);
        free(got);
        paged_fini(&p);
    }
}
END_TEST

START_TEST(a_nan_stays_a_nan)
{
    const kernels_t *t = kernels_at((size_t)_i);
    if (t == NULL) {
        return;
    }
    float x[20], y[20];
    for (int i = 0; i < 20; i++) {
        x[i] = y[i] = 1.0f;
    }
    x[17] = NAN;
    t->silu_mul(x, y, 20, y);
    ck_assert_float_nan(y[17]);
    ck_assert_float_finite(y[16]);
    paged_t p;
    paged_init(&p, false);
    p.q[0] = NAN;
    t->attn_f32(&p.a);
    ck_assert_float_nan(p.out[0]);
    paged_fini(&p);
}
END_TEST

/* ---- team ---- */

#define PHASES 20
#define UNITS  37

typedef struct {
    _Atomic uint32_t done[PHASES][UNITS];
    _Atomic uint32_t early; /* units begun before the phase before was complete */
} team_log_t;

static void team_phases(worker_t *w, void *arg)
{
    team_log_t *log = arg;
    for (uint32_t p = 0; p < PHASES; p++) {
        for (uint32_t u = team_take(w); u < UNITS; u = team_take(w)) {
            for (uint32_t v = 0; p > 0 && v < UNITS; v++) {
                log->early += log->done[p - 1][v] != 1;
            }
            log->done[p][u]++;
        }
        team_barrier(w);
    }
}

START_TEST(team_does_each_unit_once_in_order)
{
    const uint32_t threads[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        team_t *team = NULL;
        lk_error_t err = LK_ERROR_INIT;
        ck_ok(team_new(threads[i], &team, &err));
        for (int run = 0; run < 5; run++) {
            team_log_t *log = calloc(1, sizeof *log);
            team_run(team, team_phases, log);
            ck_assert_uint_eq(log->early, 0);
            for (uint32_t p = 0; p < PHASES; p++) {
                for (uint32_t u = 0; u < UNITS; u++) {
                    ck_assert_uint_eq(log->done[p][u], 1);
                }
            }
            free(log);
        }
        team_destroy(&team);
        ck_assert_ptr_null(team);
    }
    team_t *none = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(team_new(0, &none, &err), LK_ERR_INVALID);
    ck_assert_int_eq(team_new(TEAM_MAX_THREADS + 1, &none, &err), LK_ERR_INVALID);
    team_destroy(&none);
}
END_TEST

/* ---- router ---- */

START_TEST(router_picks_the_lowest_id_among_equals)
{
    const float logits[] = {1, 3, 3, 0, 3, 2};
    float scratch[6], weights[4];
    uint32_t ids[4];
    moe_route(logits, 6, 4, false, scratch, ids, weights);
    const uint32_t want[] = {1, 2, 4, 5};
    ck_assert_mem_eq(ids, want, sizeof ids);
    float sum = expf(-2) + 3 + expf(-3) + expf(-1);
    ck_assert_float_eq_tol(weights[0], 1 / sum, 1e-6);
    ck_assert_float_eq_tol(weights[3], expf(-1) / sum, 1e-6);
    moe_route(logits, 6, 4, true, scratch, ids, weights);
    ck_assert_float_eq_tol(weights[0] + weights[1] + weights[2] + weights[3], 1, 1e-6);
}
END_TEST

START_TEST(router_picks_each_expert_once_whatever_the_logits)
{
    const float odd[] = {NAN, INFINITY, -INFINITY, 0, -0.0f, 1e30f, -1e30f};
    for (int i = 0; i < 500; i++) {
        float logits[8], scratch[8], weights[8];
        uint32_t ids[8], seen = 0;
        for (int e = 0; e < 8; e++) {
            logits[e] = odd[lk_prng_below(&prng, sizeof odd / sizeof *odd)];
        }
        moe_route(logits, 8, 8, true, scratch, ids, weights);
        for (int e = 0; e < 8; e++) {
            ck_assert_uint_lt(ids[e], 8);
            seen |= 1u << ids[e];
        }
        ck_assert_uint_eq(seen, 0xff);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("cpuexec_kernels");
    TCase *tc = tcase_create("kernels");
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, products, 0, MAX_TABLES);
    tcase_add_loop_test(tc, rows, 0, MAX_TABLES);
    tcase_add_loop_test(tc, rounding_to_bf16, 0, MAX_TABLES);
    tcase_add_loop_test(tc, attention, 0, MAX_TABLES);
    tcase_add_loop_test(tc, a_nan_stays_a_nan, 0, MAX_TABLES);
    tcase_add_test(tc, team_does_each_unit_once_in_order);
    tcase_add_test(tc, router_picks_the_lowest_id_among_equals);
    tcase_add_test(tc, router_picks_each_expert_once_whatever_the_logits);
    suite_add_tcase(s, tc);
    return s;
}
