#include "base/prng.h"
#include "engine_core/kv/kv_cache.h"
#include "tests/lib/test_main.h"

#include <stdlib.h>
#include <string.h>

static request_t *make(uint32_t n_prompt, uint32_t first_token)
{
    uint32_t tokens[256];
    for (uint32_t i = 0; i < n_prompt; i++) {
        tokens[i] = first_token + i;
    }
    sampling_params_t p = {.top_p = 1.0f, .repetition_penalty = 1.0f, .max_tokens = 64};
    request_t *r = request_new(tokens, n_prompt, &p);
    ck_assert_ptr_nonnull(r);
    return r;
}

static void drop(kv_cache_t *kv, request_t *r)
{
    kv_cache_release(kv, r);
    request_destroy(&r);
}

/* Matches and computes the rest of r at epoch. */
static void fill(kv_cache_t *kv, request_t *r, uint64_t epoch)
{
    ck_assert(kv_cache_match(kv, r, epoch));
    ck_assert(kv_cache_grow(kv, r, r->n_tokens));
    ck_assert(kv_cache_computed(kv, r, r->n_computed, r->n_tokens, epoch));
}

START_TEST(only_whole_blocks_of_the_same_epoch_and_salt_match)
{
    kv_cache_t *kv = kv_cache_new(16, 4, true);
    request_t *a = make(11, 0);
    fill(kv, a, 1);
    ck_assert_uint_eq(kv_cache_used(kv), 3);
    request_t *b = make(11, 0);
    ck_assert_uint_eq(kv_cache_peek(kv, b, 1), 8); /* 8..10 are in a partly filled block */
    ck_assert_uint_eq(kv_cache_peek(kv, b, 2), 0);
    b->salt.hi = 1;
    ck_assert_uint_eq(kv_cache_peek(kv, b, 1), 0);
    b->salt.hi = 0;
    b->tokens[5] = 99;
    ck_assert_uint_eq(kv_cache_peek(kv, b, 1), 4);
    b->tokens[0] = 99;
    ck_assert_uint_eq(kv_cache_peek(kv, b, 1), 0);
    request_t *c = make(8, 0); /* a token must be left */
    ck_assert_uint_eq(kv_cache_peek(kv, c, 1), 4);
    kv_cache_verify(kv, &a, 1);
    drop(kv, a);
    ck_assert_uint_eq(kv_cache_used(kv), 0);
    ck_assert_uint_eq(kv_cache_peek(kv, c, 1), 4); /* the contents stay */
    drop(kv, b);
    drop(kv, c);
    kv_cache_destroy(&kv);
}
END_TEST

/* The same block behind another prefix is another block. */
START_TEST(a_block_is_known_by_all_before_it)
{
    kv_cache_t *kv = kv_cache_new(16, 2, true);
    uint32_t x[] = {1, 1, 5, 5, 7}, y[] = {2, 2, 5, 5, 7}, z[] = {5, 5, 7};
    sampling_params_t p = {.top_p = 1.0f, .max_tokens = 1};
    request_t *a = request_new(x, 5, &p), *b = request_new(y, 5, &p), *c = request_new(z, 3, &p);
    fill(kv, a, 0);
    ck_assert_uint_eq(kv_cache_peek(kv, b, 0), 0);
    ck_assert_uint_eq(kv_cache_peek(kv, c, 0), 0);
    fill(kv, b, 0);
    ck_assert_uint_eq(kv_cache_used(kv), 6);
    request_t *all[] = {a, b};
    kv_cache_verify(kv, all, 2);
    drop(kv, a);
    drop(kv, b);
    drop(kv, c);
    kv_cache_destroy(&kv);
}
END_TEST

START_TEST(mixed_blocks_are_not_entered)
{
    kv_cache_t *kv = kv_cache_new(16, 4, true);
    request_t *a = make(20, 0);
    ck_assert(kv_cache_match(kv, a, 1));
    ck_assert(kv_cache_grow(kv, a, 20));
    ck_assert(kv_cache_computed(kv, a, 0, 6, 1));
    ck_assert(kv_cache_computed(kv, a, 6, 20, 2));
    ck_assert_uint_eq(a->n_kv_spans, 2);
    ck_assert_uint_eq(kv_cache_peek(kv, a, 1), 4);
    ck_assert_uint_eq(kv_cache_peek(kv, a, 2), 0);
    kv_cache_verify(kv, &a, 1);
    kv_cache_release(kv, a);
    ck_assert_uint_eq(a->n_kv_spans, 0);
    fill(kv, a, 2); /* recomputed: one epoch */
    ck_assert_uint_eq(kv_cache_peek(kv, a, 2), 16);
    ck_assert_uint_eq(kv_cache_peek(kv, a, 1), 4); /* old weights' block is still there, apart */
    drop(kv, a);
    kv_cache_destroy(&kv);
}
END_TEST

START_TEST(a_short_pool_changes_nothing)
{
    kv_cache_t *kv = kv_cache_new(4, 4, true);
    request_t *a = make(9, 0), *b = make(9, 100);
    fill(kv, a, 0);
    ck_assert(!kv_cache_fits(kv, b, 0, 9));
    ck_assert(kv_cache_fits(kv, b, 0, 4));
    ck_assert(kv_cache_match(kv, b, 0));
    ck_assert(!kv_cache_grow(kv, b, 5));
    ck_assert_uint_eq(b->n_blocks, 0);
    ck_assert(kv_cache_grow(kv, b, 4));
    ck_assert(kv_cache_grow(kv, b, 4));
    ck_assert_uint_eq(kv_cache_used(kv), kv_cache_num_blocks(kv));
    drop(kv, b);
    request_t *c = make(9, 0); /* shares two of a's blocks */
    ck_assert(kv_cache_fits(kv, c, 0, 9));
    drop(kv, a);
    /* now they are free themselves: matching takes them from what is available */
    ck_assert(kv_cache_fits(kv, c, 0, 16));
    ck_assert(!kv_cache_fits(kv, c, 0, 17));
    drop(kv, c);
    kv_cache_destroy(&kv);
}
END_TEST

START_TEST(the_least_recently_used_block_is_evicted_ends_first)
{
    kv_cache_t *kv = kv_cache_new(6, 2, true);
    request_t *a = make(6, 0), *b = make(6, 50), *c = make(2, 200);
    fill(kv, a, 0);
    fill(kv, b, 0);
    drop(kv, a);
    kv_cache_release(kv, b);
    a = make(7, 0);
    fill(kv, c, 0); /* takes the last block of a's, the oldest */
    ck_assert_uint_eq(kv_cache_peek(kv, a, 0), 4);
    request_t *b_long = make(7, 50);
    ck_assert_uint_eq(kv_cache_peek(kv, b_long, 0), 6);
    kv_cache_stats_t stats;
    kv_cache_stats(kv, &stats);
    ck_assert_uint_eq(stats.evictions, 1);
    ck_assert_uint_eq(stats.hits, 0);
    ck_assert_uint_eq(stats.queries, 14);
    drop(kv, c);
    drop(kv, b);
    drop(kv, b_long);
    drop(kv, a);
    kv_cache_destroy(&kv);
}
END_TEST

START_TEST(reset_forgets_also_what_is_held)
{
    kv_cache_t *kv = kv_cache_new(8, 2, true);
    request_t *a = make(6, 0), *probe = make(9, 0);
    ck_assert(kv_cache_match(kv, a, 0));
    ck_assert(kv_cache_grow(kv, a, 6));
    ck_assert(kv_cache_computed(kv, a, 0, 4, 0));
    ck_assert(!kv_cache_reset_prefixes(kv));
    ck_assert_uint_eq(kv_cache_peek(kv, probe, 0), 0);
    ck_assert(kv_cache_computed(kv, a, 4, 6, 0));
    ck_assert_uint_eq(kv_cache_peek(kv, probe, 0), 0);
    kv_cache_verify(kv, &a, 1);
    drop(kv, a);
    ck_assert(kv_cache_reset_prefixes(kv));
    kv_cache_verify(kv, NULL, 0);
    drop(kv, probe);
    kv_cache_destroy(&kv);
}
END_TEST

START_TEST(without_caching_nothing_matches)
{
    kv_cache_t *kv = kv_cache_new(8, 2, false);
    request_t *a = make(6, 0);
    fill(kv, a, 0);
    ck_assert_uint_eq(kv_cache_peek(kv, a, 0), 0);
    kv_cache_verify(kv, &a, 1);
    drop(kv, a);
    kv_cache_destroy(&kv);
    kv_cache_destroy(&kv);
}
END_TEST

/* Random life against a model: a plain list of every prefix ever computed says what may match (only
 * what was computed under that epoch and salt), and verify says the rest. */
#define PREFIXES 4096
typedef struct {
    uint32_t tokens[64], n;
    uint64_t epoch, salt;
} prefix_t;
static prefix_t computed[PREFIXES];
static uint32_t n_computed;

static void note_computed(const request_t *r)
{
    ck_assert_uint_lt(n_computed, PREFIXES);
    prefix_t *p = &computed[n_computed++];
    p->n = r->kv_spans[0].end; /* of one epoch */
    memcpy(p->tokens, r->tokens, p->n * sizeof *p->tokens);
    p->epoch = r->kv_spans[0].epoch;
    p->salt = r->salt.lo;
}

static bool was_computed(const request_t *r, uint32_t n, uint64_t epoch)
{
    for (uint32_t i = 0; i < n_computed; i++) {
        const prefix_t *p = &computed[i];
        if (p->n >= n && p->epoch == epoch && p->salt == r->salt.lo &&
            memcmp(p->tokens, r->tokens, n * sizeof *r->tokens) == 0) {
            return true;
        }
    }
    return false;
}

static request_t *random_request(lk_prng_t *prng)
{
    request_t *r = make(1 + (uint32_t)lk_prng_below(prng, 30), 0);
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        r->tokens[i] = lk_prng_below(prng, 12) == 0; /* mostly 0: many shared prefixes */
    }
    r->salt.lo = lk_prng_below(prng, 5) == 0;
    return r;
}

START_TEST(random_life_keeps_every_invariant)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("kv random"));
    uint64_t hits = 0;
    for (int round = 0; round < 40; round++) {
        uint32_t block_size = 1 + (uint32_t)lk_prng_below(&prng, 4);
        kv_cache_t *kv = kv_cache_new(8 + (uint32_t)lk_prng_below(&prng, 40), block_size, true);
        request_t *live[6] = {NULL};
        uint64_t epoch = 0;
        n_computed = 0;
        for (int i = 0; i < 400; i++) {
            epoch += lk_prng_below(&prng, 40) == 0;
            request_t **slot = &live[lk_prng_below(&prng, 6)];
            request_t *r = *slot;
            if (r == NULL) {
                r = *slot = random_request(&prng);
                uint32_t peeked = kv_cache_peek(kv, r, epoch);
                bool fits = kv_cache_fits(kv, r, epoch, r->n_tokens);
                ck_assert(kv_cache_match(kv, r, epoch));
                ck_assert_uint_eq(r->n_computed, peeked);
                ck_assert_uint_lt(peeked, r->n_tokens);
                ck_assert(peeked == 0 || was_computed(r, peeked, epoch));
                ck_assert(kv_cache_grow(kv, r, r->n_tokens) == fits);
                hits += peeked;
            } else if (lk_prng_below(&prng, 4) == 0) {
                drop(kv, r);
                *slot = NULL;
            } else if (r->n_computed < LK_MIN(r->n_tokens, r->n_blocks * block_size)) {
                uint32_t left = LK_MIN(r->n_tokens, r->n_blocks * block_size) - r->n_computed;
                uint32_t n = 1 + (uint32_t)lk_prng_below(&prng, left);
                ck_assert(kv_cache_computed(kv, r, r->n_computed, r->n_computed + n, epoch));
                note_computed(r);
            }
            request_t *all[6];
            size_t n_all = 0;
            for (int k = 0; k < 6; k++) {
                if (live[k] != NULL) {
                    all[n_all++] = live[k];
                }
            }
            kv_cache_verify(kv, all, n_all);
        }
        for (int k = 0; k < 6; k++) {
            if (live[k] != NULL) {
                drop(kv, live[k]);
            }
        }
        ck_assert_uint_eq(kv_cache_used(kv), 0);
        kv_cache_verify(kv, NULL, 0);
        kv_cache_destroy(&kv);
    }
    ck_assert_uint_gt(hits, 100);
}
END_TEST

START_TEST(spans_merge_and_are_limited)
{
    request_t *r = make(1, 0);
    ck_assert(request_append_kv_span(r, 0, 3, 7));
    ck_assert(request_append_kv_span(r, 3, 4, 7));
    ck_assert_uint_eq(r->n_kv_spans, 1);
    for (uint32_t i = 1; i < REQUEST_MAX_SPANS; i++) {
        ck_assert(request_append_kv_span(r, 3 + i, 4 + i, 7 + i));
    }
    uint32_t end = r->kv_spans[r->n_kv_spans - 1].end;
    ck_assert(!request_append_kv_span(r, end, end + 1, 0));
    ck_assert(request_append_kv_span(r, end, end + 1, 7 + REQUEST_MAX_SPANS - 1));
    request_destroy(&r);
    request_destroy(&r);
    sampling_params_t p = {.max_tokens = REQUEST_MAX_TOKENS};
    uint32_t token = 0;
    ck_assert_ptr_null(request_new(&token, 1, &p));
    p.max_tokens = UINT32_MAX;
    ck_assert_ptr_null(request_new(&token, 1, &p));
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("kv");
    TCase *tc = tcase_create("kv");
    tcase_add_test(tc, only_whole_blocks_of_the_same_epoch_and_salt_match);
    tcase_add_test(tc, a_block_is_known_by_all_before_it);
    tcase_add_test(tc, mixed_blocks_are_not_entered);
    tcase_add_test(tc, a_short_pool_changes_nothing);
    tcase_add_test(tc, the_least_recently_used_block_is_evicted_ends_first);
    tcase_add_test(tc, reset_forgets_also_what_is_held);
    tcase_add_test(tc, without_caching_nothing_matches);
    tcase_add_test(tc, random_life_keeps_every_invariant);
    tcase_add_test(tc, spans_merge_and_are_limited);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(s, tc);
    return s;
}
