/* What the server is and how it is. */
#include "api_frontend/api.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

void api_handle_models(api_t *api, api_call_t *call)
{
    engine_client_info_t info;
    engine_client_info(api->client, &info);
    api_call_ok(call,
                json_pack("{s:s,s:[{s:s,s:s,s:I,s:s,s:s,s:n,s:I}]}", "object", "list", "data", "id",
                          api->model, "object", "model", "created", (json_int_t)call->unix_time,
                          "owned_by", "lockstep", "root", api->model, "parent", "max_model_len",
                          (json_int_t)info.max_model_len));
}

static const char *state_name(const engine_client_info_t *info)
{
    if (info->n_dead > 0) {
        return "dead";
    }
    if (info->closed) {
        return "forming";
    }
    if (!info->serving) {
        return "starting";
    }
    if (info->gates & GATE_DIRTY) {
        return "dirty";
    }
    if (info->gates & GATE_SESSION) {
        return "updating";
    }
    if (info->gates & GATE_ASLEEP) {
        return "asleep";
    }
    return info->paused ? "paused" : info->run ? "running" : "idle";
}

static json_t *dead_list(const api_t *api, uint32_t n_ranks)
{
    json_t *dead = json_array();
    for (uint32_t r = 0; r < n_ranks; r++) {
        const char *why = engine_client_dead_reason(api->client, r);
        if (why != NULL) {
            json_array_append_new(dead, json_string(why));
        }
    }
    return dead;
}

/* Those that the cluster goes on without. */
static json_t *removed_list(const api_t *api, uint32_t n_ranks)
{
    json_t *removed = json_array();
    for (uint32_t r = 0; r < n_ranks; r++) {
        const char *why = engine_client_removed_reason(api->client, r);
        if (why != NULL) {
            json_array_append_new(removed,
                                  json_pack("{s:I,s:s}", "rank", (json_int_t)r, "why", why));
        }
    }
    return removed;
}

static json_t *member_list(const api_t *api, uint32_t n_ranks)
{
    json_t *members = json_array();
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (engine_client_removed_reason(api->client, r) == NULL) {
            json_array_append_new(members, json_integer((json_int_t)r));
        }
    }
    return members;
}

/* 200 whatever the pause and weight state is: only a dead engine needs a restart. */
void api_handle_health(api_t *api, api_call_t *call)
{
    engine_client_info_t info;
    engine_client_info(api->client, &info);
    const char *state = api->draining ? "draining" : state_name(&info);
    if (info.n_dead == 0 && !(info.closed && info.lockstep)) {
        json_t *reply = json_pack("{s:s,s:s}", "status", "ok", "state", state);
        if (info.n_members < info.n_ranks) {
            json_object_set_new(reply, "removed", removed_list(api, info.n_ranks));
        }
        api_call_ok(call, reply);
        return;
    }
    json_t *dead = dead_list(api, info.n_ranks);
    const char *why = json_string_value(json_array_get(dead, 0));
    why = why != NULL ? why : engine_client_closed_reason(api->client);
    json_t *reply = json_pack("{s:s,s:s,s:o,s:{s:s,s:s,s:n,s:i}}", "status", "unhealthy", "state",
                              state, "dead", dead, "error", "message", why, "type",
                              "Service Unavailable", "param", "code", 503);
    char *text = reply != NULL ? json_dumps(reply, JSON_COMPACT) : NULL;
    json_decref(reply);
    if (text == NULL) {
        api_call_error(call, 503, NULL, "an engine is dead");
        return;
    }
    api_call_reply(call, 503, text, strlen(text));
    free(text);
}

void api_handle_version(api_t *api, api_call_t *call)
{
    api_call_ok(call, json_pack("{s:s}", "version", LOCKSTEP_VERSION));
}

/* From what is known here: it answers whatever the engines are doing. */
void api_handle_metrics(api_t *api, api_call_t *call)
{
    const lk_config_t *c = api->config;
    metrics_source_t source = {.model = api->model,
                               .frontend = (uint32_t)c->frontend_index,
                               .open_completions = api->n_completions,
                               .client = api->client,
                               .prefix_caching = c->enable_prefix_caching};
    lk_buf_t out;
    lk_buf_init(&out, 0);
    metrics_write(&api->metrics, &source, &out);
    if (out.failed) {
        api_call_error(call, 500, NULL, "out of memory");
    } else {
        call->content_type = "text/plain; version=0.0.4; charset=utf-8";
        api_call_reply(call, 200, lk_buf_cstr(&out), out.len);
    }
    lk_buf_fini(&out);
}

#define STATUS_TIMEOUT_NS (2 * LK_SECOND_NS) /* engines in a transfer may be slow to answer */

/* What each engine says of itself; one that doesn't answer says why. */
static json_t *engine_list(const engine_result_t *result)
{
    json_t *engines = json_array();
    for (size_t i = 0; i < result->n_answers; i++) {
        const engine_answer_t *a = &result->answers[i];
        json_t *row = a->status == LK_OK ? json_loads(a->body, 0, NULL) : NULL;
        if (!json_is_object(row)) {
            json_decref(row);
            row = json_pack("{s:s}", "error", a->text[0] != '\0' ? a->text : "no answer");
        }
        json_object_set_new(row, "rank", json_integer(a->rank));
        json_array_append_new(engines, row);
    }
    return engines;
}

static void on_status(void *ctx, const engine_result_t *result)
{
    api_call_t *call = ctx;
    api_t *api = call->state;
    const lk_config_t *c = api->config;
    engine_client_info_t info;
    engine_client_info(api->client, &info);
    json_t *reply = json_pack("{s:s,s:s,s:s,s:b,s:s}", "version", LOCKSTEP_VERSION, "model",
                              api->model, "trainer_endpoint", api->trainer_address, "tokenizer",
                              (int)(api->tokenizer != NULL), "state", state_name(&info));
    json_object_set_new(reply, "parallel_config",
                        json_pack("{s:I,s:i,s:i,s:i,s:b}", "data_parallel_size",
                                  (json_int_t)info.n_ranks, "tensor_parallel_size", 1,
                                  "pipeline_parallel_size", 1, "nnodes", 1,
                                  "enable_expert_parallel", (int)c->enable_expert_parallel));
    json_object_set_new(
        reply, "config",
        json_pack("{s:s,s:s,s:s,s:s,s:s,s:I,s:I,s:I,s:I,s:s}", "model", c->model, "dtype", c->dtype,
                  "device", c->device, "weight_swap", c->weight_swap, "weight_transfer_config",
                  c->weight_transfer_config, "max_model_len", (json_int_t)info.max_model_len,
                  "block_size", (json_int_t)c->block_size, "dp_sync_interval",
                  (json_int_t)c->dp_sync_interval, "vocab_size", (json_int_t)info.vocab_size,
                  "paused_admission", c->paused_admission));
    json_object_set_new(
        reply, "group",
        json_pack("{s:I,s:I,s:I,s:I,s:o,s:o,s:o}", "group_epoch", (json_int_t)info.group_epoch,
                  "wave", (json_int_t)info.wave, "round", (json_int_t)info.round, "num_blocks",
                  (json_int_t)info.num_blocks, "dead", dead_list(api, info.n_ranks), "members",
                  member_list(api, info.n_ranks), "removed", removed_list(api, info.n_ranks)));
    json_object_set_new(reply, "engines", engine_list(result));
    json_object_set_new(reply, "open_completions", json_integer((json_int_t)api->n_completions));
    api_call_ok(call, reply);
}

void api_handle_server_info(api_t *api, api_call_t *call)
{
    call->state = api;
    engine_client_utility(api->client, "status", "", STATUS_TIMEOUT_NS, on_status, call);
}
