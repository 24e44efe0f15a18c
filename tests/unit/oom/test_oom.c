/*
 * Out of memory: every constructor and decoder of the table runs once for each of its allocations,
 * with that one failing. It says so (NULL or LK_ERR_NO_MEMORY), leaves nothing behind
 * (LeakSanitizer looks, under ASan), and works when tried again.
 */
#include "api_frontend/completion_params.h"
#include "api_frontend/engine_client.h"
#include "api_frontend/reply_cache.h"
#include "base/check.h"
#include "coordinator/coordinator.h"
#include "engine_core/engine_core.h"
#include "engine_core/exec/sampler.h"
#include "engine_core/outbox.h"
#include "engine_core/reply_log.h"
#include "proto/codec.h"
#include "proto/msg_rand.h"
#include "tests/lib/allreduce_mem.h"
#include "tests/lib/oom.h"
#include "tests/lib/test_main.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/mem/mem_stream.h"
#include "transfer/backends/transfer_sender.h"
#include "transfer/packed_layout.h"
#include "transfer/pickle.h"
#include "transfer/safetensors.h"
#include "transfer/safetensors_header.h"
#include "transfer/update_spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ALLOCATIONS 200000

static model_config_t model;
static char model_dir[1024], byte_tokenizer[1024];
static tokenizer_t *tokenizer;
static lk_env_t env;

static lk_status_t null_is_no_memory(const void *made)
{
    return made == NULL ? LK_ERR_NO_MEMORY : LK_OK;
}

/* ---- decoders ---- */

static lk_status_t make_model_config(lk_error_t *err)
{
    model_config_t out;
    return model_config_load(model_dir, &out, err);
}

static lk_status_t make_safetensors(lk_error_t *err)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/model.safetensors", model_dir);
    safetensors_t *out = NULL;
    lk_status_t status = safetensors_open(path, &out, err);
    safetensors_close(&out);
    return status;
}

static lk_status_t make_tokenizer(lk_error_t *err)
{
    tokenizer_t *out = NULL;
    lk_status_t status = tokenizer_load(byte_tokenizer, &out, err);
    tokenizer_destroy(&out);
    return status;
}

static lk_status_t make_completion(lk_error_t *err)
{
    static const char text[] =
        "{\"prompt\": [\"ab\", \"c\"], \"max_tokens\": 4, \"n\": 2, \"stop\": [\"x\", \"yz\"], "
        "\"stop_token_ids\": [5, 6], \"logit_bias\": {\"7\": 1.5, \"8\": -2}, "
        "\"allowed_token_ids\": [9, 10], \"bad_words\": [\"no\", \"never\"], \"logprobs\": 2}";
    json_t *body = json_loads(text, 0, NULL);
    CHECK(body != NULL);
    completion_limits_t limits = {.model = "m",
                                  .max_model_len = 64,
                                  .vocab_size = 300,
                                  .max_logprobs = 20,
                                  .tokenizer = tokenizer};
    completion_params_t out = {0};
    const char *param = NULL;
    lk_status_t status =
        completion_params_parse(COMPLETION_OPENAI, body, &limits, &out, &param, err);
    if (status == LK_OK) {
        completion_params_fini(&out);
    }
    json_decref(body);
    return status;
}

static lk_status_t make_update_spec(lk_error_t *err)
{
    static const char text[] =
        "{\"update_info\": {\"names\": [\"a\", \"b\"], \"dtype_names\": [\"float32\", "
        "\"bfloat16\"], \"shapes\": [[2, 3], [4]], \"packed\": true}}";
    update_spec_t out = {0};
    lk_status_t status =
        update_spec_update(&out, "tcp", text, strlen(text), 0, 1, PACKED_OPTIONS_DEFAULT, err);
    update_spec_fini(&out);
    return status;
}

static lk_status_t make_packed_layout(lk_error_t *err)
{
    tensor_desc_t tensors[3] = {{.name = "a", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {4}}};
    tensors[1] = tensors[2] = tensors[0];
    packed_bucket_t *buckets = NULL;
    size_t n = 0;
    lk_status_t status = packed_layout(tensors, 3, true, 20, &buckets, &n, err);
    free(buckets);
    return status;
}

static lk_status_t make_pickle(lk_error_t *err)
{
    /* {"a": [1, (b"xy", None)]} */
    static const uint8_t bytes[] = "\x80\x04}\x8c\x01"
                                   "a](K\x01"
                                   "C\x02xyN\x86"
                                   "es.";
    pickle_t *out = NULL;
    lk_status_t status = pickle_parse(bytes, sizeof bytes - 1, NULL, 0, &out, err);
    pickle_destroy(&out);
    return status;
}

static lk_status_t make_every_message(lk_error_t *err)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, 7);
    static lk_buf_t frames[40][2];
    static size_t n;
    for (; n < LK_ARRAY_LEN(frames); n++) { /* once, before anything is armed */
        msg_t msg;
        msg_rand(&prng, msg_rand_type(&prng), &msg);
        CHECK(msg_encode(&msg, &frames[n][0], &frames[n][1], err) == LK_OK);
        msg_fini(&msg);
    }
    for (size_t i = 0; i < n; i++) {
        msg_t msg;
        LK_RETURN_IF_ERROR(msg_decode(frames[i][0].data, frames[i][0].len, frames[i][1].data,
                                      frames[i][1].len, &msg, err));
        lk_buf_t envelope, body;
        lk_buf_init(&envelope, 0);
        lk_buf_init(&body, 0);
        lk_status_t status = msg_encode(&msg, &envelope, &body, err);
        lk_buf_fini(&envelope);
        lk_buf_fini(&body);
        msg_fini(&msg);
        LK_RETURN_IF_ERROR(status);
    }
    return LK_OK;
}

/* ---- constructors ---- */

static lk_status_t make_kv(lk_error_t *err)
{
    kv_cache_t *out = kv_cache_new(16, 4, true);
    lk_status_t status = null_is_no_memory(out);
    kv_cache_destroy(&out);
    return status;
}

static const scheduler_config_t scheduler_config = {.max_num_seqs = 4,
                                                    .max_num_batched_tokens = 16,
                                                    .max_model_len = 60,
                                                    .vocab_size = 300,
                                                    .max_waiting = 8};

static void ignore_output(void *ctx, const sched_output_t *output)
{
}

static lk_status_t make_scheduler(lk_error_t *err)
{
    kv_cache_t *kv = kv_cache_new(16, 4, true);
    scheduler_t *out =
        kv == NULL ? NULL : scheduler_new(&scheduler_config, kv, ignore_output, NULL);
    lk_status_t status = null_is_no_memory(out);
    scheduler_destroy(&out);
    kv_cache_destroy(&kv);
    return status;
}

static lk_status_t make_weight_table(lk_error_t *err)
{
    weight_table_t *out = weight_table_new(&model, LK_DTYPE_F32, 0, 1, err);
    lk_status_t status = null_is_no_memory(out);
    weight_table_destroy(&out);
    return status;
}

static executor_config_t executor_config(void)
{
    return (executor_config_t){.model = &model,
                               .dtype = LK_DTYPE_F32,
                               .load_dummy = true,
                               .block_size = 4,
                               .num_blocks = 16,
                               .max_seqs = 4,
                               .max_tokens = 16,
                               .threads = 1,
                               .ep = ep_local()};
}

static lk_status_t make_executor(const executor_ops_t *ops, lk_error_t *err)
{
    executor_config_t config = executor_config();
    executor_t *out = NULL;
    LK_RETURN_IF_ERROR(ops->open(&config, &out, err));
    ops->close(out);
    return LK_OK;
}

static lk_status_t make_executor_null(lk_error_t *err)
{
    return make_executor(&executor_null_ops, err);
}

static lk_status_t make_executor_cpu(lk_error_t *err)
{
    return make_executor(&executor_cpu_ops, err);
}

static void drop_message(void *ctx, const msg_t *msg)
{
}

static void drop_frontend_message(void *ctx, uint32_t frontend, const msg_t *msg)
{
}

/* Over an executor and an all-reduce that were made beforehand. */
static lk_status_t make_engine_core(lk_error_t *err)
{
    static executor_t *executor;
    static allreduce_mem_t *hub;
    if (executor == NULL) {
        executor_config_t config = executor_config();
        CHECK(executor_null_ops.open(&config, &executor, err) == LK_OK);
        hub = allreduce_mem_new(1, false, true);
    }
    engine_core_config_t config = {
        .dp_size = 1,
        .n_frontends = 2,
        .group_epoch = 1,
        .sync_interval = 32,
        .heartbeat_ns = LK_SECOND_NS,
        .dead_after_ns = 5 * LK_SECOND_NS,
        .control_timeout_ns = 30 * LK_SECOND_NS,
        .transfer_timeout_ns = 30 * LK_SECOND_NS,
        .scheduler = scheduler_config,
        .num_blocks = 16,
        .block_size = 4,
        .enable_prefix_caching = true,
        .model = &model,
        .executor = executor,
        .allreduce = allreduce_mem_rank(hub, 0),
        .wte = &wte_mem,
        .env = &env,
        .host = {.to_frontend = drop_frontend_message, .to_coordinator = drop_message}};
    config.scheduler.vocab_size = model.vocab_size;
    engine_core_t *out = NULL;
    lk_status_t status = engine_core_new(&config, &out, err);
    engine_core_destroy(&out);
    return status;
}

static void drop_reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation,
                       const msg_t *msg)
{
}

static lk_status_t make_coordinator(lk_error_t *err)
{
    coordinator_config_t config = {.dp_size = 4,
                                   .n_frontends = 2,
                                   .config_hash = "h",
                                   .events_address = "e",
                                   .stats_address = "s",
                                   .wave_address = "w",
                                   .handshake_timeout_ns = LK_SECOND_NS,
                                   .dead_after_ns = LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &env,
                                   .host = {NULL, drop_reply, drop_message, drop_message}};
    coordinator_t *out = coordinator_new(&config);
    lk_status_t status = null_is_no_memory(out);
    coordinator_destroy(&out);
    return status;
}

static lk_status_t refuse_send(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    return LK_OK;
}

static lk_status_t refuse_send_coordinator(void *ctx, const msg_t *msg, lk_error_t *err)
{
    return LK_OK;
}

static lk_status_t make_engine_client(lk_error_t *err)
{
    engine_client_config_t config = {.n_clients = 1,
                                     .n_ranks = 4,
                                     .generation = 1,
                                     .control_timeout_ns = LK_SECOND_NS,
                                     .transfer_timeout_ns = LK_SECOND_NS,
                                     .max_requests = 16};
    engine_client_ops_t ops = {NULL, refuse_send, refuse_send_coordinator, &env};
    engine_client_t *out = engine_client_new(&config, &ops);
    lk_status_t status = null_is_no_memory(out);
    engine_client_destroy(&out);
    return status;
}

static lk_status_t make_small_objects(lk_error_t *err)
{
    reply_cache_t *cache = reply_cache_new(8);
    outbox_t *outbox = cache == NULL ? NULL : outbox_new(3);
    reply_log_t *log = outbox == NULL ? NULL : reply_log_new(3);
    sampler_t *sampler = log == NULL ? NULL : sampler_new(300, false);
    mem_listener_t *listener = sampler == NULL ? NULL : mem_listener_new("oom", 64);
    transfer_sender_t *sender =
        listener == NULL ? NULL : sender_new(&env, LK_SECOND_NS, "token", 2, 1);
    lk_status_t status = null_is_no_memory(sender);
    sender_destroy(&sender);
    mem_listener_destroy(&listener);
    sampler_destroy(&sampler);
    reply_log_destroy(&log);
    outbox_destroy(&outbox);
    reply_cache_destroy(&cache);
    return status;
}

static const struct {
    const char *name;
    lk_status_t (*make)(lk_error_t *err);
} cases[] = {
#define CASE(name)                                                                                 \
    {                                                                                              \
#name, make_##name                                                                         \
    }
    CASE(model_config),  CASE(safetensors),   CASE(tokenizer),
    CASE(completion),    CASE(update_spec),   CASE(packed_layout),
    CASE(pickle),        CASE(every_message), CASE(kv),
    CASE(scheduler),     CASE(weight_table),  CASE(executor_null),
    CASE(executor_cpu),  CASE(engine_core),   CASE(coordinator),
    CASE(engine_client), CASE(small_objects),
#undef CASE
};

/* ---- the sweep ---- */

static uint64_t now(void *ctx)
{
    return LK_SECOND_NS;
}

static void random_bytes(void *ctx, void *buf, size_t len)
{
    memset(buf, 7, len);
}

static void setup(void)
{
    lk_error_t err = LK_ERROR_INIT;
    env = (lk_env_t){NULL, now, random_bytes};
    snprintf(model_dir, sizeof model_dir, "%s/models/qwen3_moe", test_fixtures());
    ck_assert_msg(model_config_load(model_dir, &model, &err) == LK_OK, "%s", err.text);
    snprintf(byte_tokenizer, sizeof byte_tokenizer, "%s", test_tmpdir());
    ck_assert_msg(tokenizer_write_bytes(byte_tokenizer, 300, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(tokenizer_load(byte_tokenizer, &tokenizer, &err) == LK_OK, "%s", err.text);
}

static void teardown(void)
{
    tokenizer_destroy(&tokenizer);
}

START_TEST(fails_cleanly_at_every_allocation)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status = cases[_i].make(&err);
    ck_assert_msg(status == LK_OK, "%s without a fault: %s", cases[_i].name, err.text);
    uint64_t n = 0;
    for (uint64_t stride = 1;; n += stride) {
        err = (lk_error_t)LK_ERROR_INIT;
        oom_arm(n);
        status = cases[_i].make(&err);
        if (!oom_disarm()) {
            break;
        }
        ck_assert_msg(status == LK_ERR_NO_MEMORY, "%s, allocation %llu failed: status %d, \"%s\"",
                      cases[_i].name, (unsigned long long)n, (int)status, err.text);
        ck_assert_uint_lt(n, MAX_ALLOCATIONS);
        stride = n < 500 ? 1 : 1 + n / 100; /* long ones repeat themselves */
    }
    ck_assert_msg(n > 0, "%s allocates nothing", cases[_i].name);
    ck_assert_int_eq(status, LK_OK);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("oom");
    TCase *tc = tcase_create("sweep");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, fails_cleanly_at_every_allocation, 0, LK_ARRAY_LEN(cases));
    suite_add_tcase(suite, tc);
    return suite;
}
