/* The contract of engine_core/dp/allreduce.h, over the mesh and the memory twin, groups of 1 to 8.
 */
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "engine_core/dp/mesh.h"
#include "tests/lib/allreduce_mem.h"
#include "tests/lib/test_main.h"
#include "tests/lib/test_mesh.h"

#include <stdio.h>
#include <string.h>

enum { MEM, MESH, N_IMPLS };
static const uint32_t sizes[] = {1, 2, 3, 4, 8};
#define N_CASES (N_IMPLS * (int)LK_ARRAY_LEN(sizes))

static uint32_t size;
static bool over_mesh;
static allreduce_mem_t *hub;
static mesh_t *meshes[TEST_MESH_MAX];
static allreduce_t ranks[TEST_MESH_MAX];

static void open_group(int which)
{
    size = sizes[which / N_IMPLS];
    over_mesh = which % N_IMPLS == MESH;
    if (over_mesh) {
        test_mesh_open(meshes, size, 1);
    } else {
        hub = allreduce_mem_new(size, true, true);
    }
    for (uint32_t r = 0; r < size; r++) {
        ranks[r] = over_mesh ? mesh_allreduce(meshes[r]) : allreduce_mem_rank(hub, r);
        ck_assert_uint_eq(ranks[r].rank, r);
        ck_assert_uint_eq(ranks[r].size, size);
    }
}

static void kill_rank(uint32_t rank)
{
    if (over_mesh) {
        mesh_destroy(&meshes[rank]);
    } else {
        allreduce_mem_kill(hub, rank);
    }
}

static void close_group(void)
{
    for (uint32_t r = 0; r < TEST_MESH_MAX; r++) {
        mesh_destroy(&meshes[r]);
    }
    if (hub != NULL) {
        allreduce_mem_destroy(&hub);
    }
}

static lk_status_t post(uint32_t r, uint64_t round, const uint64_t *vec, size_t n, lk_error_t *err)
{
    return ranks[r].ops->post(ranks[r].ctx, round, vec, n, err);
}

static lk_status_t test_once(uint32_t r, uint64_t *out, lk_error_t *err)
{
    return ranks[r].ops->test(ranks[r].ctx, out, err);
}

/* Until it is something else than INPROGRESS; the others' bytes move too. */
static lk_status_t wait_result(uint32_t r, uint64_t *out, lk_error_t *err)
{
    test_deadline_t deadline = test_deadline();
    for (;;) {
        lk_status_t status = test_once(r, out, err);
        if (status != LK_INPROGRESS) {
            return status;
        }
        test_not_over(deadline);
        test_mesh_poll(meshes, size);
    }
}

START_TEST(test_minimum_of_all)
{
    open_group(_i);
    lk_prng_t prng;
    lk_error_t err = LK_ERROR_INIT;
    lk_prng_seed(&prng, test_seed("minimum"));
    for (uint64_t round = 0; round < 50; round++) {
        static uint64_t vec[TEST_MESH_MAX][ALLREDUCE_MAX_LEN], expected[ALLREDUCE_MAX_LEN];
        static uint64_t out[ALLREDUCE_MAX_LEN];
        size_t n = round == 7 ? ALLREDUCE_MAX_LEN : 1 + lk_prng_below(&prng, 40);
        memset(expected, 0xFF, sizeof expected);
        for (uint32_t r = 0; r < size; r++) {
            for (size_t i = 0; i < n; i++) {
                vec[r][i] = lk_prng_u64(&prng) >> lk_prng_below(&prng, 64);
                expected[i] = LK_MIN(expected[i], vec[r][i]);
            }
        }
        uint32_t first = (uint32_t)lk_prng_below(&prng, size);
        for (uint32_t k = 0; k < size; k++) {
            uint32_t r = (first + k) % size;
            ck_ok(post(r, round, vec[r], n, &err));
            memset(vec[r], 0, sizeof vec[r]); /* it was copied */
            if (k + 1 < size) {
                ck_assert_int_eq(test_once(r, out, &err), LK_INPROGRESS);
            }
        }
        for (uint32_t r = 0; r < size; r++) {
            memset(out, 0, sizeof out);
            ck_assert_msg(wait_result(r, out, &err) == LK_OK, "%s", err.text);
            ck_assert(memcmp(out, expected, n * sizeof out[0]) == 0);
        }
    }
}
END_TEST

/* Rank 0 decides round 0 and votes in round 1 before the others have looked at round 0. */
START_TEST(test_one_round_ahead)
{
    open_group(_i);
    lk_error_t err = LK_ERROR_INIT;
    uint64_t out[1] = {0};
    for (uint32_t r = 0; r < size; r++) {
        uint64_t value = 100 + r;
        ck_ok(post(r, 0, &value, 1, &err));
    }
    ck_assert_msg(wait_result(0, out, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(out[0], 100);
    uint64_t value = 7;
    ck_ok(post(0, 1, &value, 1, &err));
    test_mesh_poll(meshes, size);
    for (uint32_t r = 1; r < size; r++) { /* still the values of round 0 */
        out[0] = 0;
        ck_assert_msg(wait_result(r, out, &err) == LK_OK, "%s", err.text);
        ck_assert_uint_eq(out[0], 100);
        value = 9 + r;
        ck_ok(post(r, 1, &value, 1, &err));
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(wait_result(r, out, &err) == LK_OK, "%s", err.text);
        ck_assert_uint_eq(out[0], 7);
    }
}
END_TEST

START_TEST(test_doorbell_and_missing)
{
    open_group(_i);
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value = 1, out;
    char text[64];
    for (uint32_t r = 0; r < size; r++) {
        ck_assert(!ranks[r].ops->peer_waiting(ranks[r].ctx, 0));
    }
    ck_ok(post(0, 0, &value, 1, &err));
    ck_assert(!ranks[0].ops->peer_waiting(ranks[0].ctx, 0));
    for (uint32_t r = 1; r < size; r++) {
        test_deadline_t deadline = test_deadline();
        while (!ranks[r].ops->peer_waiting(ranks[r].ctx, 0)) {
            test_not_over(deadline);
            test_mesh_poll(meshes, size);
        }
        ck_assert(!ranks[r].ops->peer_waiting(ranks[r].ctx, 1));
        ck_assert(!ranks[r].ops->peer_waiting(ranks[r].ctx, 2));
    }
    ranks[0].ops->missing(ranks[0].ctx, text, sizeof text);
    ck_assert_str_eq(text, size == 1   ? ""
                           : size == 2 ? "1"
                           : size == 3 ? "1, 2"
                           : size == 4 ? "1, 2, 3"
                                       : "1, 2, 3, 4, 5, 6, 7");
    for (uint32_t r = 1; r < size; r++) {
        ck_ok(post(r, 0, &value, 1, &err));
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_ok(wait_result(r, &out, &err));
        ranks[r].ops->missing(ranks[r].ctx, text, sizeof text);
        ck_assert_str_eq(text, "");
    }
}
END_TEST

START_TEST(test_dead_rank_is_named)
{
    open_group(_i);
    if (size == 1) {
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value = 1, out = 99;
    char name[16];
    uint32_t dead = size - 1;
    snprintf(name, sizeof name, "rank %u", dead);
    for (uint32_t r = 0; r < dead; r++) {
        ck_ok(post(r, 0, &value, 1, &err));
    }
    kill_rank(dead);
    for (uint32_t r = 0; r < dead; r++) {
        err = LK_ERROR_INIT;
        ck_assert_int_eq(wait_result(r, &out, &err), LK_ERR_PEER);
        ck_assert_msg(strstr(err.text, name) != NULL, "%s", err.text);
        ck_assert_uint_eq(out, 99);
        ranks[r].ops->abort(ranks[r].ctx);
        ranks[r].ops->abort(ranks[r].ctx);
        lk_status_t status = post(r, 1, &value, 1, &err); /* refused, or it fails */
        if (status == LK_OK) {
            status = wait_result(r, &out, &err);
        }
        ck_assert_int_eq(status, LK_ERR_PEER);
        ck_assert_msg(strstr(err.text, name) != NULL, "%s", err.text);
    }
}
END_TEST

START_TEST(test_other_length_is_named)
{
    open_group(_i);
    if (size == 1) {
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value[2] = {1, 2}, out[2];
    for (uint32_t r = 0; r < size; r++) {
        ck_ok(post(r, 0, value, r == 1 ? 2 : 1, &err));
    }
    ck_assert_int_eq(wait_result(0, out, &err), LK_ERR_PEER);
    ck_assert_msg(strncmp(err.text, "rank 1 ", 7) == 0, "%s", err.text);
}
END_TEST

/* A vote that was taken back can be given again; the others notice nothing. Over sockets only: the
 * memory twin holds its ranks to rounds without a gap. */
START_TEST(test_abort_and_post_again)
{
    open_group(_i);
    if (!over_mesh) {
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    uint64_t value = 3, out;
    ck_ok(post(0, 8, &value, 1, &err));
    ranks[0].ops->abort(ranks[0].ctx);
    ck_ok(post(0, 8, &value, 1, &err));
    for (uint32_t r = 1; r < size; r++) {
        ck_ok(post(r, 8, &value, 1, &err));
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(wait_result(r, &out, &err) == LK_OK, "%s", err.text);
        ck_assert_uint_eq(out, 3);
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_ok(post(r, 9, &value, 1, &err));
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(wait_result(r, &out, &err) == LK_OK, "%s", err.text);
    }
}
END_TEST

Suite *test_suite(void)
{
    const struct {
        const char *name;
        const TTest *test;
    } tests[] = {
        {"minimum_of_all", test_minimum_of_all},
        {"one_round_ahead", test_one_round_ahead},
        {"doorbell_and_missing", test_doorbell_and_missing},
        {"dead_rank_is_named", test_dead_rank_is_named},
        {"other_length_is_named", test_other_length_is_named},
        {"abort_and_post_again", test_abort_and_post_again},
    };
    Suite *suite = suite_create("allreduce");
    for (size_t i = 0; i < LK_ARRAY_LEN(tests); i++) {
        TCase *tc = tcase_create(tests[i].name);
        tcase_set_timeout(tc, 60);
        tcase_add_checked_fixture(tc, NULL, close_group);
        tcase_add_loop_test(tc, tests[i].test, 0, N_CASES);
        suite_add_tcase(suite, tc);
    }
    return suite;
}
