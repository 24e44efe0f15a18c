/* The contract of engine_core/ep/ep.h, over the mesh, the memory twin and (one rank) ep_local. */
#include "base/check.h"
#include "base/prng.h"
#include "engine_core/dp/mesh.h"
#include "tests/lib/ep_mem.h"
#include "tests/lib/test_main.h"
#include "tests/lib/test_mesh.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEM, MESH, LOCAL };
static const struct {
    int impl;
    uint32_t size;
} cases[] = {{LOCAL, 1}, {MEM, 1},  {MEM, 2},  {MEM, 3},  {MEM, 4}, {MEM, 8},
             {MESH, 1},  {MESH, 2}, {MESH, 3}, {MESH, 4}, {MESH, 8}};
#define N_CASES ((int)LK_ARRAY_LEN(cases))

static int impl;
static uint32_t size;
static ep_mem_t *hub;
static mesh_t *meshes[TEST_MESH_MAX];
static ep_t ranks[TEST_MESH_MAX];

static void open_group(int which)
{
    impl = cases[which].impl;
    size = cases[which].size;
    if (impl == MESH) {
        test_mesh_open(meshes, size, 1);
    } else if (impl == MEM) {
        hub = ep_mem_new(size);
    }
    for (uint32_t r = 0; r < size; r++) {
        ranks[r] = impl == MESH  ? mesh_ep(meshes[r])
                   : impl == MEM ? ep_mem_rank(hub, r)
                                 : ep_local();
        ck_assert_uint_eq(ranks[r].rank, r);
        ck_assert_uint_eq(ranks[r].size, size);
    }
}

static void kill_rank(uint32_t rank)
{
    if (impl == MESH) {
        mesh_destroy(&meshes[rank]);
    } else {
        ep_mem_kill(hub, rank);
    }
}

static void close_group(void)
{
    for (uint32_t r = 0; r < TEST_MESH_MAX; r++) {
        mesh_destroy(&meshes[r]);
    }
    if (hub != NULL) {
        ep_mem_destroy(&hub);
    }
}

static lk_status_t post(uint32_t r, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    return ranks[r].ops->post(ranks[r].ctx, tag, send, err);
}

static lk_status_t test_once(uint32_t r, ep_buf_t *recv, lk_error_t *err)
{
    return ranks[r].ops->test(ranks[r].ctx, recv, err);
}

static lk_status_t wait_result(uint32_t r, ep_buf_t *recv, lk_error_t *err)
{
    test_deadline_t deadline = test_deadline();
    for (;;) {
        lk_status_t status = test_once(r, recv, err);
        if (status != LK_INPROGRESS) {
            return status;
        }
        test_not_over(deadline);
        test_mesh_poll(meshes, size);
    }
}

/* What rank `from` sends to rank `to` under `tag`: bytes that no other triple has. */
static ep_buf_t make_share(uint64_t tag, uint32_t from, uint32_t to, size_t len)
{
    lk_prng_t prng;
    uint8_t *data = malloc(len + 8);
    lk_prng_seed(&prng, tag * 1000003 + from * 1009 + to);
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = lk_prng_u64(&prng);
        memcpy(data + i, &word, 8);
    }
    return (ep_buf_t){data, len};
}

typedef struct {
    ep_buf_t buf[TEST_MESH_MAX];
} shares_t;

/* lens[from][to] */
static void make_all(uint64_t tag, size_t lens[TEST_MESH_MAX][TEST_MESH_MAX], shares_t *out)
{
    for (uint32_t from = 0; from < size; from++) {
        for (uint32_t to = 0; to < size; to++) {
            out[from].buf[to] = make_share(tag, from, to, lens[from][to]);
        }
    }
}

static void free_all(shares_t *shares)
{
    for (uint32_t from = 0; from < size; from++) {
        for (uint32_t to = 0; to < size; to++) {
            free((void *)(uintptr_t)shares[from].buf[to].data);
        }
    }
}

static void check_received(uint32_t r, const ep_buf_t *recv, const shares_t *sent)
{
    for (uint32_t from = 0; from < size; from++) {
        size_t len = from == r ? 0 : sent[from].buf[r].len;
        ck_assert_uint_eq(recv[from].len, len);
        ck_assert(len == 0 || memcmp(recv[from].data, sent[from].buf[r].data, len) == 0);
    }
}

static void one_exchange(uint64_t tag, size_t lens[TEST_MESH_MAX][TEST_MESH_MAX], uint32_t first)
{
    shares_t sent[TEST_MESH_MAX];
    ep_buf_t recv[TEST_MESH_MAX];
    lk_error_t err = LK_ERROR_INIT;
    make_all(tag, lens, sent);
    for (uint32_t k = 0; k < size; k++) {
        uint32_t r = (first + k) % size;
        ck_ok(post(r, tag, sent[r].buf, &err));
        if (k + 1 < size) {
            ck_assert_int_eq(test_once(r, recv, &err), LK_INPROGRESS);
        }
    }
    bool done[TEST_MESH_MAX] = {false};
    test_deadline_t deadline = test_deadline();
    for (uint32_t left = size; left > 0;) {
        for (uint32_t r = 0; r < size; r++) {
            if (!done[r]) {
                lk_status_t status = test_once(r, recv, &err);
                ck_assert_msg(status >= 0, "%s", err.text);
                if (status == LK_OK) {
                    check_received(r, recv, sent);
                    done[r] = true;
                    left--;
                }
            }
        }
        test_not_over(deadline);
    }
    free_all(sent);
}

START_TEST(test_random_sizes)
{
    open_group(_i);
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("sizes"));
    for (uint64_t tag = 0; tag < 40; tag++) {
        size_t lens[TEST_MESH_MAX][TEST_MESH_MAX];
        for (uint32_t from = 0; from < size; from++) {
            for (uint32_t to = 0; to < size; to++) {
                static const uint32_t spans[] = {1, 2, 100, 20000, 200000};
                lens[from][to] = lk_prng_below(&prng, spans[lk_prng_below(&prng, 5)]);
            }
        }
        one_exchange(tag, lens, (uint32_t)lk_prng_below(&prng, size));
    }
}
END_TEST

START_TEST(test_nothing_to_send)
{
    open_group(_i);
    size_t lens[TEST_MESH_MAX][TEST_MESH_MAX] = {{0}};
    for (uint64_t tag = 10; tag < 20; tag++) {
        one_exchange(tag, lens, 0);
    }
}
END_TEST

/* More than any socket takes at once, in both directions, and beside an empty share. */
START_TEST(test_large_buffers)
{
    open_group(_i);
    size_t lens[TEST_MESH_MAX][TEST_MESH_MAX] = {{0}};
    for (uint32_t r = 0; r < size; r++) {
        lens[r][(r + 1) % size] = (8u << 20) + r;
        lens[(r + 1) % size][r] = size > 2 ? 1 : (8u << 20) + r;
    }
    one_exchange(1, lens, 0);
    one_exchange(2, lens, size - 1);
}
END_TEST

/* Rank 0 is through with exchange 1 and posts exchange 2 before the others have looked. */
START_TEST(test_one_exchange_ahead)
{
    open_group(_i);
    lk_error_t err = LK_ERROR_INIT;
    size_t lens[TEST_MESH_MAX][TEST_MESH_MAX];
    for (uint32_t from = 0; from < size; from++) {
        for (uint32_t to = 0; to < size; to++) {
            lens[from][to] = 1000 + from + to;
        }
    }
    shares_t one[TEST_MESH_MAX], two[TEST_MESH_MAX];
    ep_buf_t recv[TEST_MESH_MAX];
    make_all(1, lens, one);
    make_all(2, lens, two);
    for (uint32_t r = 0; r < size; r++) {
        ck_ok(post(r, 1, one[r].buf, &err));
    }
    ck_ok(wait_result(0, recv, &err));
    check_received(0, recv, one);
    ck_ok(post(0, 2, two[0].buf, &err));
    test_mesh_poll(meshes, size);
    for (uint32_t r = 1; r < size; r++) {
        ck_assert_msg(wait_result(r, recv, &err) == LK_OK, "%s", err.text);
        test_mesh_poll(meshes, size); /* what comes meanwhile does not touch what was received */
        check_received(r, recv, one);
        ck_ok(post(r, 2, two[r].buf, &err));
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(wait_result(r, recv, &err) == LK_OK, "%s", err.text);
        check_received(r, recv, two);
    }
    free_all(one);
    free_all(two);
}
END_TEST

START_TEST(test_out_of_step)
{
    open_group(_i);
    if (size == 1) {
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    ep_buf_t nothing[TEST_MESH_MAX] = {{0}}, recv[TEST_MESH_MAX];
    for (uint32_t r = 0; r < size; r++) {
        ck_ok(post(r, r == 1 ? 0x30002 : 0x30001, nothing, &err));
    }
    ck_assert_int_eq(wait_result(0, recv, &err), LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, "rank 1 is out of step") != NULL, "%s", err.text);
    ck_assert_msg(strstr(err.text, "30002") != NULL, "%s", err.text);
    ranks[0].ops->abort(ranks[0].ctx);
    ranks[0].ops->abort(ranks[0].ctx);
}
END_TEST

/* A rank dies before it has posted (_i < N_CASES), or while its bytes are under way. */
START_TEST(test_dead_rank_is_named)
{
    bool halfway = _i >= N_CASES;
    open_group(_i % N_CASES);
    if (size == 1 || (halfway && impl != MESH)) {
        return; /* in memory nothing is ever under way */
    }
    lk_error_t err = LK_ERROR_INIT;
    uint32_t dead = size - 1;
    char expected[64];
    snprintf(expected, sizeof expected, "rank %u", dead);
    size_t lens[TEST_MESH_MAX][TEST_MESH_MAX];
    for (uint32_t from = 0; from < size; from++) {
        for (uint32_t to = 0; to < size; to++) {
            lens[from][to] = 1u << 20; /* more than the sockets hold */
        }
    }
    shares_t sent[TEST_MESH_MAX];
    ep_buf_t recv[TEST_MESH_MAX];
    make_all(1, lens, sent);
    for (uint32_t r = 0; r < (halfway ? size : dead); r++) {
        ck_ok(post(r, 1, sent[r].buf, &err));
    }
    test_mesh_poll(meshes, size);
    kill_rank(dead);
    for (uint32_t r = 0; r < dead; r++) {
        err = LK_ERROR_INIT;
        ck_assert_int_eq(wait_result(r, recv, &err), LK_ERR_PEER);
        ck_assert_msg(strncmp(err.text, expected, strlen(expected)) == 0, "%s", err.text);
    }
    for (uint32_t r = 0; r < dead; r++) {
        ranks[r].ops->abort(ranks[r].ctx);
        ranks[r].ops->abort(ranks[r].ctx);
    }
    for (uint32_t r = 0; r < dead; r++) {
        lk_status_t status = post(r, 2, sent[r].buf, &err); /* refused, or it fails */
        if (status == LK_OK) {
            status = wait_result(r, recv, &err);
        }
        ck_assert_int_eq(status, LK_ERR_PEER);
        ck_assert_msg(strncmp(err.text, expected, strlen(expected)) == 0, "%s", err.text);
    }
    free_all(sent);
}
END_TEST

Suite *test_suite(void)
{
    const struct {
        const char *name;
        const TTest *test;
    } tests[] = {
        {"random_sizes", test_random_sizes},   {"nothing_to_send", test_nothing_to_send},
        {"large_buffers", test_large_buffers}, {"one_exchange_ahead", test_one_exchange_ahead},
        {"out_of_step", test_out_of_step},     {"dead_rank_is_named", test_dead_rank_is_named},
    };
    Suite *suite = suite_create("ep");
    for (size_t i = 0; i < LK_ARRAY_LEN(tests); i++) {
        TCase *tc = tcase_create(tests[i].name);
        tcase_set_timeout(tc, 60);
        tcase_add_checked_fixture(tc, NULL, close_group);
        bool twice = tests[i].test == test_dead_rank_is_named;
        tcase_add_loop_test(tc, tests[i].test, 0, twice ? 2 * N_CASES : N_CASES);
        suite_add_tcase(suite, tc);
    }
    return suite;
}
