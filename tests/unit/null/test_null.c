#include "engine_core/exec/executor.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <string.h>

static const model_config_t model = {.arch = ARCH_LLAMA,
                                     .hidden_size = 8,
                                     .intermediate_size = 8,
                                     .num_layers = 1,
                                     .num_heads = 1,
                                     .num_kv_heads = 1,
                                     .head_dim = 8,
                                     .vocab_size = 100000,
                                     .max_position_embeddings = 4096,
                                     .rms_norm_eps = 1e-6f,
                                     .rope_theta = 10000.0f,
                                     .eos_token_ids = {3},
                                     .n_eos = 1};
static const executor_ops_t *const ops = &executor_null_ops;

#define BLOCK  4
#define LENGTH 23

static executor_t *open_with(ep_t ep)
{
    const executor_config_t config = {.model = &model,
                                      .dtype = LK_DTYPE_F32,
                                      .load_dummy = true,
                                      .dummy_seed = 4,
                                      .block_size = BLOCK,
                                      .num_blocks = 32,
                                      .max_seqs = 4,
                                      .max_tokens = 64,
                                      .threads = 1,
                                      .ep = ep};
    executor_t *self;
    lk_error_t err;
    ck_assert_msg(ops->open(&config, &self, &err) == LK_OK, "%s", err.text);
    return self;
}

static uint32_t run(executor_t *self, const uint32_t *tokens, uint32_t start, uint32_t n,
                    const uint32_t *blocks, uint64_t step)
{
    const exec_seq_t seq = {
        .tokens = tokens, .start = start, .n = n, .blocks = blocks, .n_logits = 1};
    const exec_batch_t batch = {.seqs = &seq, .n_seqs = 1, .step = step};
    exec_result_t result;
    lk_error_t err;
    ck_ok(ops->step_post(self, &batch, &err));
    ck_ok(ops->step_test(self, &result, &err));
    ck_assert_uint_eq(result.rows, 1);
    ck_assert_ptr_null(result.logits);
    ck_assert(result.logprobs[0] <= 0.0f);
    return result.tokens[0];
}

static uint32_t right(executor_t *self, const uint32_t *tokens, uint32_t n)
{
    return executor_null_token(&model, weight_table_digest(ops->weights(self)), tokens, n);
}

static const uint32_t table[6] = {9, 2, 30, 5, 11, 7};

static void make_tokens(uint32_t *tokens)
{
    for (uint32_t i = 0; i < LENGTH + 1; i++) {
        tokens[i] = i * 31 + 5;
    }
}

START_TEST(tokens_are_the_oracles_in_any_chunks)
{
    executor_t *self = open_with((ep_t){.size = 1});
    uint32_t tokens[LENGTH + 1];
    make_tokens(tokens);
    for (uint32_t chunk = 1; chunk <= LENGTH; chunk++) {
        for (uint32_t at = 0; at < LENGTH; at += chunk) {
            uint32_t n = LK_MIN(chunk, LENGTH - at);
            ck_assert_uint_eq(run(self, tokens, at, n, table, chunk), right(self, tokens, at + n));
        }
    }
    ops->close(self);
    ops->close(NULL);
}
END_TEST

/* Whatever one wrong slot or table entry is: the token is wrong at once, or, inside a full block
 * that is not the one looked at, within as many steps as there are full blocks. */
START_TEST(every_mix_up_makes_a_wrong_token)
{
    executor_t *self = open_with((ep_t){.size = 1});
    uint32_t tokens[LENGTH + 1], other[BLOCK] = {1, 2, 3, 4};
    make_tokens(tokens);
    uint32_t full = LENGTH / BLOCK;
    for (uint32_t slot = 0; slot < LENGTH; slot++) { /* another sequence overwrites one slot */
        run(self, tokens, 0, LENGTH, table, 0);
        uint32_t at = slot % BLOCK;
        run(self, other, at, 1, &table[slot / BLOCK], 0);
        bool seen = false;
        for (uint64_t step = 0; step < full && !seen; step++) {
            seen = run(self, tokens, LENGTH, 1, table, step) != right(self, tokens, LENGTH + 1);
        }
        ck_assert_msg(seen, "slot %u", slot);
    }
    for (uint32_t i = 0; i < 6; i++) { /* a wrong block in the table */
        for (uint32_t k = 0; k < 32; k++) {
            uint32_t wrong[6];
            memcpy(wrong, table, sizeof wrong);
            wrong[i] = k;
            run(self, tokens, 0, LENGTH, table, 0);
            uint32_t token = run(self, tokens, LENGTH, 1, wrong, 1);
            ck_assert((token == right(self, tokens, LENGTH + 1)) == (k == table[i]));
        }
    }
    ops->close(self);
}
END_TEST

/* ---- the exchange of step numbers ---- */

typedef struct {
    int posts, aborts, not_yet;
    uint64_t tag, sent, reply;
    size_t reply_len;
} peer_t;

static lk_status_t peer_post(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    peer_t *peer = ctx;
    peer->posts++;
    peer->tag = tag;
    ck_assert_uint_eq(send[0].len, sizeof peer->sent);
    memcpy(&peer->sent, send[0].data, sizeof peer->sent);
    ck_assert_uint_eq(send[1].len, 0);
    return LK_OK;
}

static lk_status_t peer_test(void *ctx, ep_buf_t *recv, lk_error_t *err)
{
    peer_t *peer = ctx;
    if (peer->not_yet-- > 0) {
        return LK_INPROGRESS;
    }
    recv[0] = (ep_buf_t){.data = &peer->reply, .len = peer->reply_len};
    recv[1] = (ep_buf_t){0};
    return LK_OK;
}

static void peer_abort(void *ctx)
{
    ((peer_t *)ctx)->aborts++;
}

static const ep_ops_t peer_ops = {.post = peer_post, .test = peer_test, .abort = peer_abort};

START_TEST(ranks_out_of_step_are_found)
{
    peer_t peer = {.reply_len = sizeof peer.reply};
    executor_t *self = open_with((ep_t){.ops = &peer_ops, .ctx = &peer, .rank = 1, .size = 2});
    exec_batch_t dummy = {.step = 41};
    exec_result_t result;
    lk_error_t err;
    peer.not_yet = 2;
    peer.reply = 41;
    ck_ok(ops->step_post(self, &dummy, &err));
    ck_assert_uint_eq(peer.tag, 41ull << 16);
    ck_assert_uint_eq(peer.sent, 41);
    ck_assert_int_eq(ops->step_test(self, &result, &err), LK_INPROGRESS);
    ck_assert_int_eq(ops->step_test(self, &result, &err), LK_INPROGRESS);
    ck_ok(ops->step_test(self, &result, &err));
    ck_assert_uint_eq(result.rows, 0);

    dummy.step = 42; /* the peer still says 41 */
    ck_ok(ops->step_post(self, &dummy, &err));
    ck_assert_int_eq(ops->step_test(self, &result, &err), LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(err.text, "rank 0 is out of step"));

    peer.reply_len = 3;
    ck_ok(ops->step_post(self, &dummy, &err));
    ck_assert_int_eq(ops->step_test(self, &result, &err), LK_ERR_PEER);

    peer.not_yet = 1;
    ck_ok(ops->step_post(self, &dummy, &err));
    ops->step_abort(self);
    ops->step_abort(self);
    ck_assert_int_eq(peer.aborts, 1);
    ck_assert_int_eq(peer.posts, 4);
    ops->close(self);
}
END_TEST

START_TEST(never_an_eos_id)
{
    model_config_t small = model;
    small.vocab_size = 3;
    small.n_eos = 2;
    small.eos_token_ids[0] = 0;
    small.eos_token_ids[1] = 2;
    for (uint32_t t = 0; t < 50; t++) {
        ck_assert_uint_eq(executor_null_token(&small, (digest_t){{t, 1}}, &t, 1), 1);
    }
    executor_config_t config = {.model = &small, .ep = {.size = 1}};
    small.n_eos = 3;
    executor_t *self = NULL;
    lk_error_t err;
    ck_assert_int_eq(ops->open(&config, &self, &err), LK_ERR_INVALID);
    ck_assert_ptr_null(self);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("null");
    TCase *tc = tcase_create("null");
    tcase_add_test(tc, tokens_are_the_oracles_in_any_chunks);
    tcase_add_test(tc, every_mix_up_makes_a_wrong_token);
    tcase_add_test(tc, ranks_out_of_step_are_found);
    tcase_add_test(tc, never_an_eos_id);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(s, tc);
    return s;
}
