/*
 * api_harness.h: the API with engines that answer every request at once, for fuzz targets. A call
 * is answered exactly once, with a JSON object or a whole stream; errors name a status and a text.
 */
#ifndef LK_TESTS_FUZZ_API_HARNESS_H
#define LK_TESTS_FUZZ_API_HARNESS_H

#include "api_frontend/api.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define HARNESS_QUEUE 4096

typedef struct {
    lk_config_t config;
    lk_env_t env;
    uint64_t random;
    engine_client_t *client;
    api_t api;
    msg_t queue[HARNESS_QUEUE]; /* ADD, CMD and UTILITY to be answered; strings left out */
    uint32_t rank[HARNESS_QUEUE];
    size_t n;
} harness_t;

typedef struct {
    api_call_t base;
    int status;
    bool streaming, ended;
    bool *done;
} harness_call_t;

static uint64_t harness_now(void *ctx)
{
    return 1;
}

static void harness_random(void *ctx, void *buf, size_t len)
{
    harness_t *h = ctx;
    for (size_t i = 0; i < len; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)h->random++;
    }
}

static lk_status_t harness_send(void *ctx, uint32_t rank, const msg_t *msg, lk_error_t *err)
{
    harness_t *h = ctx;
    CHECK(msg->type != MSG_ADD || (msg->add.prompt.len > 0 && msg->add.sampling.max_tokens > 0));
    if (h->n == HARNESS_QUEUE) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "full");
    }
    h->queue[h->n] = *msg;
    h->rank[h->n++] = rank;
    return LK_OK;
}

static lk_status_t harness_hint(void *ctx, const msg_t *msg, lk_error_t *err)
{
    return LK_OK;
}

/* Says one token and the end, or that all went well. */
static void harness_answer(harness_t *h)
{
    for (size_t i = 0; i < h->n; i++) {
        const msg_t *m = &h->queue[i];
        static const uint32_t token = 'a';
        static const float logprob = -1;
        msg_t reply = {.type = MSG_DONE};
        msg_output_t out;
        if (m->type == MSG_ADD) {
            out = (msg_output_t){.handle = m->add.handle,
                                 .token_ids = {&token, 4},
                                 .finish_reason = FINISH_LENGTH,
                                 .stop_token = -1};
            if (m->add.sampling.logprobs >= 0) {
                out.logprobs = (msg_bin_t){&logprob, 4};
            }
            reply.type = MSG_OUTPUTS;
            reply.outputs.rank = h->rank[i];
            reply.outputs.outputs.items = &out;
            reply.outputs.outputs.count = 1;
        } else if (m->type == MSG_CMD) {
            reply.done = (msg_done_t){
                .rank = h->rank[i], .generation = m->cmd.generation, .number = m->cmd.number};
        } else if (m->type == MSG_UTILITY) {
            reply.type = MSG_UTILITY_REPLY;
            reply.utility_reply = (msg_utility_reply_t){h->rank[i], m->utility.call_id, LK_OK,
                                                        msg_str(""), msg_str("{}")};
        } else {
            continue;
        }
        engine_client_on_msg(h->client, &reply);
    }
    h->n = 0;
}

static void harness_reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    harness_call_t *c = (harness_call_t *)call;
    CHECK(c->status == 0 && http_status >= 200 && http_status < 600);
    c->status = http_status;
    json_t *json = json_loadb(body, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    CHECK(json_is_object(json));
    if (http_status != 200) {
        const json_t *error = json_object_get(json, "error");
        CHECK(json_string_length(json_object_get(error, "message")) > 0);
        CHECK(json_integer_value(json_object_get(error, "code")) == http_status);
    }
    json_decref(json);
}

static void harness_stream_begin(api_call_t *call)
{
    harness_call_t *c = (harness_call_t *)call;
    CHECK(c->status == 0);
    c->status = 200;
    c->streaming = true;
}

static bool harness_stream_data(api_call_t *call, const char *data, size_t len)
{
    CHECK(len > 2 && memcmp(data + len - 2, "\n\n", 2) == 0);
    CHECK(memcmp(data, "data: ", 6) == 0 || memcmp(data, ": ping", 6) == 0);
    return true;
}

static void harness_stream_end(api_call_t *call)
{
    ((harness_call_t *)call)->ended = true;
}

static void harness_destroy(api_call_t *call)
{
    harness_call_t *c = (harness_call_t *)call;
    CHECK(c->status != 0 && (!c->streaming || c->ended));
    *c->done = true;
    free(c);
}

static const api_call_ops_t harness_ops = {harness_reply, harness_stream_begin, harness_stream_data,
                                           harness_stream_end, harness_destroy};

static harness_t *harness_new(const tokenizer_t *tokenizer)
{
    harness_t *h = calloc(1, sizeof *h);
    CHECK(h != NULL);
    config_defaults(&h->config);
    h->config.model = "m";
    h->env = (lk_env_t){h, harness_now, harness_random};
    engine_client_config_t config = {.n_clients = 1,
                                     .n_ranks = 2,
                                     .generation = 1,
                                     .control_timeout_ns = LK_SECOND_NS,
                                     .transfer_timeout_ns = LK_SECOND_NS,
                                     .max_requests = HARNESS_QUEUE};
    engine_client_ops_t ops = {h, harness_send, harness_hint, &h->env};
    h->client = engine_client_new(&config, &ops);
    lk_error_t err;
    CHECK(h->client != NULL &&
          api_init(&h->api, &h->config, &h->env, h->client, tokenizer, &err) == LK_OK);
    msg_t stats = {.type = MSG_STATS};
    stats.stats =
        (msg_stats_t){.serving = true, .group_epoch = 1, .max_model_len = 256, .vocab_size = 300};
    engine_client_on_msg(h->client, &stats);
    return h;
}

static void harness_free(harness_t *h)
{
    CHECK(h->api.completions == NULL && engine_client_num_requests(h->client) == 0);
    api_fini(&h->api);
    engine_client_destroy(&h->client);
    free(h);
}

#endif
