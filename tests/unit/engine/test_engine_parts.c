/* The engine's small parts: outbox, labels, reply log, command stream, set-up from flags. */
#include "engine_core/dp/command_stream.h"
#include "engine_core/engine_setup.h"
#include "engine_core/outbox.h"
#include "engine_core/reply_log.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- labels ---- */

START_TEST(test_labels)
{
    version_labels_t labels;
    ck_assert(version_labels_init(&labels));
    ck_assert_str_eq(version_labels_get(&labels, 0), "default");
    for (uint64_t e = 1; e <= 100; e++) {
        char text[16];
        snprintf(text, sizeof text, "v%d", (int)e);
        version_labels_set(&labels, e, text);
    }
    ck_assert_str_eq(version_labels_get(&labels, 57), "v57");
    version_labels_set(&labels, 100, "renamed");
    version_labels_forget_before(&labels, 0);
    ck_assert_uint_eq(labels.n, 101);
    version_labels_forget_before(&labels, 57);
    ck_assert_uint_eq(labels.n, 44);
    ck_assert_str_eq(version_labels_get(&labels, 57), "v57");
    version_labels_forget_before(&labels, 100);
    version_labels_forget_before(&labels, 1000); /* the newest stays */
    ck_assert_uint_eq(labels.n, 1);
    ck_assert_str_eq(version_labels_get(&labels, 100), "renamed");
    version_labels_set(&labels, 101, "next");
    ck_assert_str_eq(version_labels_get(&labels, 100), "renamed");
    ck_assert_str_eq(version_labels_get(&labels, 101), "next");
    version_labels_set(&labels, 7000, "joined"); /* a group that was ahead */
    ck_assert_str_eq(version_labels_get(&labels, 101), "next");
    ck_assert_str_eq(version_labels_get(&labels, 7000), "joined");
    version_labels_forget_before(&labels, 102);
    ck_assert_uint_eq(labels.n, 1);
    version_labels_fini(&labels);
}
END_TEST

/* ---- outbox ---- */

typedef struct {
    size_t messages, outputs;
    uint64_t handles, tokens;
    uint32_t last_frontend;
} sink_t;

static void count(void *ctx, uint32_t frontend, const msg_t *msg)
{
    sink_t *sink = ctx;
    sink->messages++;
    sink->last_frontend = frontend;
    for (size_t i = 0; i < msg->outputs.outputs.count; i++) {
        const msg_output_t *out = &msg->outputs.outputs.items[i];
        sink->outputs++;
        sink->handles += out->handle;
        for (size_t t = 0; t < out->token_ids.len / 4; t++) {
            uint32_t token;
            memcpy(&token, (const char *)out->token_ids.data + 4 * t, 4);
            sink->tokens += token;
        }
    }
}

static request_t *make_request(uint64_t client, uint64_t handle)
{
    static const uint32_t prompt[] = {1, 2, 3};
    sampling_params_t p = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 8, .logprobs = 1};
    request_t *r = request_new(prompt, 3, &p);
    ck_assert_ptr_nonnull(r);
    r->client = client;
    r->handle = handle;
    r->tokens[3] = 40;
    r->tokens[4] = 50;
    r->n_tokens = 5;
    return r;
}

START_TEST(test_outbox)
{
    version_labels_t labels;
    ck_assert(version_labels_init(&labels));
    outbox_t *box = outbox_new(3);
    request_t *r = make_request(1, 7);
    float logprobs[2] = {-1, -2}, top_logprobs[2] = {-1, -2};
    uint32_t ranks[2] = {1, 3}, top_ids[2] = {40, 9};
    sched_output_t out = {.request = r,
                          .n = 2,
                          .logprobs = logprobs,
                          .ranks = ranks,
                          .n_top = 1,
                          .top_ids = top_ids,
                          .top_logprobs = top_logprobs};
    sink_t sink = {0};
    ck_assert(outbox_is_empty(box));
    outbox_flush(box, 0, 0, count, &sink);
    ck_assert_uint_eq(sink.messages, 0);
    outbox_add(box, &out, &labels, LK_OK, 0);
    outbox_refuse(box, 1, 100, LK_ERR_INVALID, "no");
    outbox_refuse(box, 2, 1000, LK_ERR_INVALID, "no");
    outbox_drop(box, 2);
    outbox_flush(box, 0, 0, count, &sink);
    ck_assert_uint_eq(sink.messages, 1); /* one per front end */
    ck_assert_uint_eq(sink.last_frontend, 1);
    ck_assert_uint_eq(sink.handles, 107);
    ck_assert_uint_eq(sink.tokens, 90);
    ck_assert(outbox_is_empty(box));

    /* more than one message can hold: nothing is lost */
    sink = (sink_t){0};
    for (uint64_t i = 0; i < 10000; i++) {
        outbox_refuse(box, 0, i, LK_ERR_UNAVAILABLE, "a text that makes the buffer grow and move");
        outbox_add(box, &out, &labels, LK_OK, 0);
    }
    outbox_flush(box, 0, 0, count, &sink);
    ck_assert_uint_eq(sink.outputs, 20000);
    ck_assert_uint_eq(sink.tokens, 90 * 10000);
    ck_assert_uint_gt(sink.messages, 1);
    request_destroy(&r);
    outbox_destroy(&box);
    version_labels_fini(&labels);
}
END_TEST

/* ---- reply log ---- */

START_TEST(test_reply_log)
{
    reply_log_t *log = reply_log_new(2);
    for (uint64_t n = 1; n <= 3 * REPLY_LOG_DEPTH; n++) {
        char text[16];
        snprintf(text, sizeof text, "t%d", (int)n);
        msg_done_t done = {.generation = 1, .number = n, .text = msg_str(text)};
        reply_log_add(log, 1, &done);
    }
    const msg_done_t *found = reply_log_find(log, 1, 1, 3 * REPLY_LOG_DEPTH);
    ck_assert_ptr_nonnull(found);
    ck_assert_str_eq(msg_cstr(found->text), "t6144");
    ck_assert_ptr_nonnull(reply_log_find(log, 1, 1, 2 * REPLY_LOG_DEPTH + 1));
    ck_assert_ptr_null(reply_log_find(log, 1, 1, 2 * REPLY_LOG_DEPTH));
    ck_assert_ptr_null(reply_log_find(log, 1, 2, 3 * REPLY_LOG_DEPTH));
    ck_assert_ptr_null(reply_log_find(log, 0, 1, 3 * REPLY_LOG_DEPTH));
    reply_log_destroy(&log);
}
END_TEST

/* ---- command stream ---- */

static stream_receipt_t receive(command_stream_t *s, uint64_t generation, uint64_t number,
                                uint64_t kind)
{
    msg_cmd_t cmd = {.generation = generation, .number = number, .kind = kind};
    return stream_receive(s, &cmd);
}

START_TEST(test_stream)
{
    command_stream_t s;
    stream_init(&s, false);
    ck_assert_int_eq(receive(&s, 0, 1, CMD_RESUME), STREAM_OLD_LIFE);
    ck_assert_int_eq(receive(&s, 2, 2, CMD_RESUME), STREAM_GAP);
    ck_assert_int_eq(receive(&s, 2, 1, CMD_PAUSE), STREAM_NEW);
    ck_assert_int_eq(receive(&s, 2, 1, CMD_PAUSE), STREAM_REPEATED);
    ck_assert_int_eq(receive(&s, 1, 1, CMD_PAUSE), STREAM_OLD_LIFE);
    ck_assert(stream_has_news(&s) && stream_has_pause(&s));
    stream_freeze(&s);
    ck_assert(!stream_has_news(&s));

    /* a newer life while the vote is out: the old command stays until it is decided */
    ck_assert_int_eq(receive(&s, 3, 1, CMD_UPDATE), STREAM_NEW);
    ck_assert_int_eq(receive(&s, 3, 2, CMD_PAUSE), STREAM_BUSY); /* an UPDATE is exclusive */
    ck_assert(stream_has_news(&s));
    ck_assert_uint_eq(stream_voted_command(&s, 1)->kind, CMD_PAUSE);
    stream_applied(&s, 1);
    stream_settle(&s);
    stream_freeze(&s);
    ck_assert_uint_eq(stream_voted_command(&s, 1)->kind, CMD_UPDATE);
    stream_applied(&s, 1);
    stream_settle(&s);
    stream_update_answered(&s, 2, 1); /* another life's */
    ck_assert_int_eq(receive(&s, 3, 2, CMD_PAUSE), STREAM_BUSY);
    stream_update_answered(&s, 3, 1);
    ck_assert_int_eq(receive(&s, 3, 2, CMD_PAUSE), STREAM_NEW);

    /* a flood is bounded */
    uint64_t n = 3;
    while (receive(&s, 3, n, CMD_RESUME) == STREAM_NEW) {
        ck_assert_uint_lt(n++, 2 * STREAM_MAX_PENDING);
    }
    ck_assert_int_eq(receive(&s, 3, n, CMD_RESUME), STREAM_BUSY);
    stream_fini(&s);
}
END_TEST

/* ---- set-up ---- */

static const char dense[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 8, "
    "\"intermediate_size\": 16, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
    "\"num_key_value_heads\": 1, \"head_dim\": 4, \"vocab_size\": 97, "
    "\"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", \"eos_token_id\": 1, "
    "\"hidden_act\": \"silu\"}";

static const char *model_dir(void)
{
    static char dir[512];
    snprintf(dir, sizeof dir, "%s/model", test_tmpdir());
    mkdir(dir, 0700);
    char path[600];
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs(dense, f);
    fclose(f);
    return dir;
}

static lk_config_t flags(void)
{
    lk_config_t c;
    config_defaults(&c);
    c.model = model_dir();
    c.device = "null";
    c.load_format = "dummy";
    return c;
}

static void expect_refusal(const lk_config_t *c, const char *text)
{
    engine_setup_t setup = {0};
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = engine_setup_check(c, &setup, &err);
    if (status == LK_OK) {
        status = engine_setup_open(&setup, c, ep_local(), &err);
        engine_setup_fini(&setup);
    }
    ck_assert_int_lt(status, 0);
    ck_assert_msg(strstr(err.text, text) != NULL, "\"%s\" says nothing of \"%s\"", err.text, text);
}

START_TEST(test_setup_refuses)
{
    lk_config_t c = flags();
    c.device = "cuda";
    expect_refusal(&c, "--device cuda");
    c = flags();
    c.dtype = "half";
    expect_refusal(&c, "--dtype half");
    c = flags();
    c.data_parallel_rank = 1;
    expect_refusal(&c, "--data-parallel-rank 1");
    c = flags();
    c.max_model_len = 257;
    expect_refusal(&c, "--max-model-len 257");
    c = flags();
    c.max_model_len = 200;
    c.num_gpu_blocks_override = 12;
    expect_refusal(&c, "the KV memory holds 192 positions");
    c = flags();
    c.kv_cache_memory_bytes = 1;
    expect_refusal(&c, "--kv-cache-memory-bytes 1");
    c = flags();
    c.model = "/nowhere/at/all";
    expect_refusal(&c, "/nowhere/at/all");
    static const char *const bad[] = {"{", "[]", "{\"backend\": 1}", "{}",
                                      "{\"backend\": \"tcp\", \"x\": 1}"};
    for (size_t i = 0; i < 5; i++) {
        c = flags();
        c.weight_transfer_config = bad[i];
        expect_refusal(&c, "--weight-transfer-config");
    }
    c = flags();
    c.weight_transfer_config = "{\"backend\": \"pigeon\"}";
    expect_refusal(&c, "Invalid weight transfer backend: pigeon. Available engines: [");
}
END_TEST

/* Both sets, what waits on its way in, and the KV: named one by one when they do not fit. */
START_TEST(test_memory_sum)
{
    const uint64_t gib = 1ull << 30;
    memory_sum_t sum = {.weights = gib, .shadow = gib, .staging = gib / 2, .kv = gib / 4};
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_uint_eq(memory_sum_total(&sum), 2 * gib + gib / 2 + gib / 4);
    ck_assert_int_eq(memory_sum_check(&sum, memory_sum_total(&sum), 1, &err), LK_OK);
    ck_assert_int_eq(memory_sum_check(&sum, UINT64_MAX, 200, &err), LK_OK); /* not known */
    ck_assert_int_eq(memory_sum_check(&sum, memory_sum_total(&sum) - 1, 1, &err), LK_ERR_INVALID);
    ck_assert_str_eq(err.text,
                     "weights 1.00 GiB + second set 1.00 GiB + staging up to 512.00 MiB + "
                     "KV 256.00 MiB = 2.75 GiB; 2.75 GiB are available");
    ck_assert_int_eq(memory_sum_check(&sum, 5 * gib, 2, &err), LK_ERR_INVALID);
    ck_assert_str_eq(err.text,
                     "weights 1.00 GiB + second set 1.00 GiB + staging up to 512.00 MiB + "
                     "KV 256.00 MiB = 2.75 GiB per rank; 2.50 GiB are available for each "
                     "of 2 ranks");
    ck_assert_int_eq(memory_sum_check(&sum, 6 * gib, 2, &err), LK_OK);
    sum = (memory_sum_t){.weights = UINT64_MAX, .kv = 5};
    ck_assert_uint_eq(memory_sum_total(&sum), UINT64_MAX);
    ck_assert_int_lt(memory_sum_check(&sum, 1, 1, &err), 0);
    ck_assert_ptr_null(strstr(err.text, "second set"));
}
END_TEST

/* A second set is refused where it does not fit; in place the same start is only warned. */
START_TEST(test_setup_counts_memory)
{
    lk_error_t err = LK_ERROR_INIT;
    engine_setup_t setup;
    lk_config_t c = flags();
    c.weight_transfer_config = "{\"backend\": \"tcp\"}";
    c.max_num_seqs = 4;
    for (int two = 0; two < 2; two++) {
        c.weight_swap = two ? "shadow" : "inplace";
        ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
        ck_assert_int_eq(setup.shadow, two);
        ck_assert_msg(engine_setup_open(&setup, &c, ep_local(), &err) == LK_OK, "%s", err.text);
        const memory_sum_t sum = setup.memory;
        weight_table_t *weights = setup.ops->weights(setup.executor);
        ck_assert_int_eq(weight_table_has_shadow(weights), two);
        ck_assert_uint_eq(sum.weights, weight_table_bytes(weights));
        ck_assert_uint_eq(sum.shadow, two ? sum.weights : 0);
        ck_assert_uint_gt(sum.staging, sum.weights); /* float32 of a bfloat16 model */
        ck_assert_uint_gt(sum.kv, 0);
        engine_setup_fini(&setup);
        ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
        setup.available_bytes = memory_sum_total(&sum) - 1;
        lk_status_t status = engine_setup_open(&setup, &c, ep_local(), &err);
        ck_assert_int_eq(status, two ? LK_ERR_INVALID : LK_OK);
        ck_assert(!two || (strstr(err.text, "--weight-swap shadow: weights ") != NULL &&
                           strstr(err.text, " + second set ") != NULL));
        engine_setup_fini(&setup);
    }
    c.data_parallel_size = 2; /* ranks that start together share what there is */
    ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(setup.sharing_ranks, 2);
    c.generation = 2;
    ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(setup.sharing_ranks, 1);
}
END_TEST

START_TEST(test_setup_sizes)
{
    lk_error_t err = LK_ERROR_INIT;
    engine_setup_t setup;
    lk_config_t c = flags();
    c.weight_transfer_config = "{\"backend\": \"tcp\"}";
    c.max_num_seqs = 4;
    ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
    ck_assert_str_eq(setup.wte->name, "tcp");
    ck_assert_int_eq(setup.dtype, LK_DTYPE_BF16); /* the checkpoint's */
    ck_assert(!setup.lockstep);
    ck_assert_msg(engine_setup_open(&setup, &c, ep_local(), &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(setup.max_model_len, 256);
    ck_assert_uint_eq(setup.num_blocks, 2 * 16 * 4); /* no more than 4 requests can use */
    engine_setup_fini(&setup);

    /* without a flag the length follows the memory */
    c = flags();
    c.num_gpu_blocks_override = 3;
    c.dtype = "float";
    ck_assert_msg(engine_setup_check(&c, &setup, &err) == LK_OK, "%s", err.text);
    ck_assert_int_eq(setup.dtype, LK_DTYPE_F32);
    ck_assert_msg(engine_setup_open(&setup, &c, ep_local(), &err) == LK_OK, "%s", err.text);
    ck_assert_uint_eq(setup.max_model_len, 48);
    engine_setup_fini(&setup);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("engine_parts");
    TCase *tc = tcase_create("parts");
    tcase_add_test(tc, test_labels);
    tcase_add_test(tc, test_outbox);
    tcase_add_test(tc, test_reply_log);
    tcase_add_test(tc, test_stream);
    tcase_add_test(tc, test_setup_refuses);
    tcase_add_test(tc, test_setup_sizes);
    tcase_add_test(tc, test_memory_sum);
    tcase_add_test(tc, test_setup_counts_memory);
    suite_add_tcase(s, tc);
    return s;
}
