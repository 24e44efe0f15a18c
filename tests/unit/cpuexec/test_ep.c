/* test_ep.c: the executor's expert exchange: dummy steps, aborts, dead and hostile peers. */
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "tests/unit/cpuexec/exec_rig.h"

#include <stdlib.h>
#include <string.h>

#define LENGTH 20

static const rig_options_t two_ranks = {.model = "qwen3_moe", .dtype = LK_DTYPE_F32, .ranks = 2};
static const rig_options_t four_ranks = {
    .model = "qwen3_moe_mixed", .dtype = LK_DTYPE_BF16, .ranks = 4};

static void make_seq(const rig_t *rig, rig_seq_t *seq)
{
    *seq = (rig_seq_t){.len = LENGTH};
    for (uint32_t i = 0; i < LENGTH; i++) {
        seq->tokens[i] = (i * 37 + 11) % rig->model.vocab_size;
    }
    rig_seq_blocks(rig, seq, 5, 3);
}

static uint32_t sparse_layers(const model_config_t *c)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < c->num_layers; l++) {
        n += c->moe_layer[l];
    }
    return n;
}

START_TEST(dummy_ranks_take_part_in_every_exchange)
{
    rig_t rig;
    rig_open(&rig, &four_ranks);
    const exec_batch_t *none[RIG_MAX_RANKS] = {NULL};
    exec_result_t results[RIG_MAX_RANKS];
    for (int i = 0; i < 3; i++) {
        rig_step(&rig, none, results);
    }
    for (uint32_t r = 0; r < rig.ranks; r++) {
        ck_assert_uint_eq(ep_mem_completed(rig.mem, r), 3 * 2 * sparse_layers(&rig.model));
        ck_assert_uint_eq(results[r].rows, 0);
    }
    ck_assert_uint_eq(ep_mem_in_flight(rig.mem), 0);
    rig_close(&rig);
}
END_TEST

/* A rank's step does not end before its peers have posted theirs. */
START_TEST(a_step_waits_for_its_peers)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    lk_error_t err = LK_ERROR_INIT;
    const exec_batch_t dummy = {.step = 9};
    exec_result_t out;
    ck_ok(executor_cpu_ops.step_post(rig.exec[0], &dummy, &err));
    for (int i = 0; i < 100; i++) {
        ck_assert_int_eq(executor_cpu_ops.step_test(rig.exec[0], &out, &err), LK_INPROGRESS);
    }
    ck_ok(executor_cpu_ops.step_post(rig.exec[1], &dummy, &err));
    bool done[2] = {false, false};
    for (int i = 0; i < 1000 && !(done[0] && done[1]); i++) {
        uint32_t r = (uint32_t)i % 2;
        done[r] = done[r] || executor_cpu_ops.step_test(rig.exec[r], &out, &err) == LK_OK;
    }
    ck_assert(done[0] && done[1]);
    rig_close(&rig);
}
END_TEST

START_TEST(aborted_anywhere_and_continued)
{
    rig_t rig;
    rig_open(&rig, &four_ranks);
    lk_error_t err = LK_ERROR_INIT;
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("abort"));
    rig_seq_t seq;
    make_seq(&rig, &seq);
    const size_t n = (size_t)LENGTH * rig.model.vocab_size;
    float *want = malloc(n * sizeof *want), *got = malloc(n * sizeof *got);
    rig_run(&rig, &seq, 0, LENGTH, LENGTH, want);
    for (uint32_t calls = 0; calls < 60; calls++) {
        const exec_seq_t s = {seq.tokens, 0, LENGTH, seq.blocks, 1};
        const exec_batch_t batch = {.seqs = &s, .n_seqs = 1, .step = rig.step++};
        bool done[4] = {false};
        exec_result_t out;
        for (uint32_t r = 0; r < 4; r++) {
            ck_ok(executor_cpu_ops.step_post(rig.exec[r], &batch, &err));
        }
        for (uint32_t i = 0; i < calls; i++) {
            uint32_t r = (uint32_t)lk_prng_below(&prng, 4);
            if (!done[r]) {
                done[r] = executor_cpu_ops.step_test(rig.exec[r], &out, &err) == LK_OK;
            }
        }
        uint32_t first = (uint32_t)lk_prng_below(&prng, 4);
        for (uint32_t i = 0; i < 4; i++) {
            executor_cpu_ops.step_abort(rig.exec[(first + i) % 4]);
            executor_cpu_ops.step_abort(rig.exec[(first + i) % 4]);
        }
        ck_assert_uint_eq(ep_mem_in_flight(rig.mem), 0);
        rig_run(&rig, &seq, 0, LENGTH, LENGTH, got);
        ck_assert_mem_eq(got, want, n * sizeof *got);
    }
    free(want);
    free(got);
    rig_close(&rig);
}
END_TEST

/* Drives rank 0 alone until it fails; the text must name rank 1. */
static void fails_naming_rank_1(rig_t *rig, const char *text)
{
    lk_error_t err = LK_ERROR_INIT;
    exec_result_t out;
    lk_status_t rc = LK_INPROGRESS;
    for (int i = 0; i < 1000 && rc == LK_INPROGRESS; i++) {
        rc = executor_cpu_ops.step_test(rig->exec[0], &out, &err);
    }
    ck_assert_int_eq(rc, LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, "rank 1") != NULL && strstr(err.text, text) != NULL, "%s",
                  err.text);
    /* the step is over */
    ck_assert_int_eq(executor_cpu_ops.step_test(rig->exec[0], &out, &err), LK_ERR_STATE);
}

START_TEST(a_dead_peer_ends_the_step)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    lk_error_t err = LK_ERROR_INIT;
    const exec_batch_t dummy = {.step = 1};
    ck_ok(executor_cpu_ops.step_post(rig.exec[0], &dummy, &err));
    ep_mem_kill(rig.mem, 1);
    fails_naming_rank_1(&rig, "gone");
    rig_close(&rig);
}
END_TEST

START_TEST(a_peer_in_another_step_ends_the_step)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    lk_error_t err = LK_ERROR_INIT;
    const exec_batch_t here = {.step = 1}, there = {.step = 2};
    exec_result_t out;
    ck_ok(executor_cpu_ops.step_post(rig.exec[0], &here, &err));
    ck_ok(executor_cpu_ops.step_post(rig.exec[1], &there, &err));
    ck_assert_int_eq(executor_cpu_ops.step_test(rig.exec[1], &out, &err), LK_INPROGRESS);
    fails_naming_rank_1(&rig, "out of step");
    rig_close(&rig);
}
END_TEST

/* Delivers `len` bytes as rank 1's dispatch of layer 0 while rank 0 runs a batch. */
static void hostile_dispatch(rig_t *rig, const void *bytes, size_t len)
{
    lk_error_t err = LK_ERROR_INIT;
    rig_seq_t seq;
    make_seq(rig, &seq);
    const exec_seq_t s = {seq.tokens, 0, LENGTH, seq.blocks, 1};
    const exec_batch_t batch = {.seqs = &s, .n_seqs = 1, .step = rig->step++};
    ck_ok(executor_cpu_ops.step_post(rig->exec[0], &batch, &err));
    ep_t peer = ep_mem_rank(rig->mem, 1);
    const ep_buf_t send[2] = {{bytes, len}, {NULL, 0}};
    ck_ok(peer.ops->post(peer.ctx, batch.step << 16, send, &err));
    fails_naming_rank_1(rig, "expert exchange");
    peer.ops->abort(peer.ctx);
    ck_assert_uint_eq(ep_mem_in_flight(rig->mem), 0);
}

START_TEST(hostile_dispatches_are_refused)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    const uint32_t row = rig.model.hidden_size * 4; /* float32 */
    const struct {
        uint32_t tokens, pairs, row_bytes, zero;
        size_t len; /* 0: what the header says */
        uint32_t pair_row, expert;
    } cases[] = {
        {0, 0, 0, 0, 1, 0, 0},                      /* shorter than a header */
        {1, 1, row, 0, 16, 0, 0},                   /* a header alone */
        {0xffffffff, 0xffffffff, row, 0, 16, 0, 0}, /* counts whose bytes overflow u32 */
        {0x40000000, 0, row, 0, 16, 0, 0},          /* wraps to 0 in 32 bits */
        {1, 1, row + 4, 0, 16 + 8 + 260, 0, 0},     /* another width */
        {513, 513, row, 0, 0, 0, 0},                /* over max_tokens */
        {1, 3, row, 0, 0, 0, 0},                    /* more pairs than top-k allows */
        {1, 1, row, 0, 0, 1, 0},                    /* row out of range */
        {1, 1, row, 0, 0, 0, 4},                    /* an expert of rank 1 */
        {1, 1, row, 0, 0, 0, 0xffffffff},           /* no expert */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t len = cases[i].len != 0
                         ? cases[i].len
                         : 16 + 8 * (size_t)cases[i].pairs + cases[i].tokens * (size_t)row;
        uint8_t *bytes = calloc(1, len + 64);
        memcpy(bytes, &cases[i], 16);
        for (uint32_t p = 0; p < cases[i].pairs && 16 + 8 * (size_t)(p + 1) <= len; p++) {
            memcpy(bytes + 16 + 8 * p, &cases[i].pair_row, 4);
            memcpy(bytes + 20 + 8 * p, &cases[i].expert, 4);
        }
        hostile_dispatch(&rig, bytes, len);
        free(bytes);
    }
    rig_close(&rig);
}
END_TEST

START_TEST(random_dispatches_never_crash)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("random dispatch"));
    for (int i = 0; i < 100; i++) {
        uint8_t bytes[400];
        size_t len = 1 + lk_prng_below(&prng, sizeof bytes);
        for (size_t j = 0; j < len; j++) {
            bytes[j] = (uint8_t)lk_prng_u64(&prng);
        }
        hostile_dispatch(&rig, bytes, len);
    }
    rig_close(&rig);
}
END_TEST

/* A correct (empty) dispatch, then a combine of the wrong size. */
START_TEST(a_hostile_combine_is_refused)
{
    rig_t rig;
    rig_open(&rig, &two_ranks);
    lk_error_t err = LK_ERROR_INIT;
    rig_seq_t seq;
    make_seq(&rig, &seq);
    const size_t lens[] = {0, 1, 16, 4096};
    for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
        const exec_seq_t s = {seq.tokens, 0, LENGTH, seq.blocks, 1};
        const exec_batch_t batch = {.seqs = &s, .n_seqs = 1, .step = rig.step++};
        ck_ok(executor_cpu_ops.step_post(rig.exec[0], &batch, &err));
        ep_t peer = ep_mem_rank(rig.mem, 1);
        ep_buf_t send[2] = {{NULL, 0}, {NULL, 0}}, recv[2];
        ck_ok(peer.ops->post(peer.ctx, batch.step << 16, send, &err));
        exec_result_t out;
        while (peer.ops->test(peer.ctx, recv, &err) == LK_INPROGRESS) {
            ck_assert_int_eq(executor_cpu_ops.step_test(rig.exec[0], &out, &err), LK_INPROGRESS);
        }
        ck_assert_uint_gt(recv[0].len, 16); /* rank 0 wants something of rank 1's experts */
        static const uint8_t bytes[4096];
        send[0] = (ep_buf_t){bytes, lens[i]};
        ck_ok(peer.ops->post(peer.ctx, batch.step << 16 | 1, send, &err));
        fails_naming_rank_1(&rig, "expert exchange");
        peer.ops->abort(peer.ctx);
    }
    rig_close(&rig);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("cpuexec_ep");
    TCase *tc = tcase_create("ep");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, dummy_ranks_take_part_in_every_exchange);
    tcase_add_test(tc, a_step_waits_for_its_peers);
    tcase_add_test(tc, aborted_anywhere_and_continued);
    tcase_add_test(tc, a_dead_peer_ends_the_step);
    tcase_add_test(tc, a_peer_in_another_step_ends_the_step);
    tcase_add_test(tc, hostile_dispatches_are_refused);
    tcase_add_test(tc, random_dispatches_never_crash);
    tcase_add_test(tc, a_hostile_combine_is_refused);
    suite_add_tcase(s, tc);
    return s;
}
