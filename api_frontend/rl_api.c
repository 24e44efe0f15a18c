/* The calls of reinforcement learning: pause, weights, caches. Each one is a command or a utility
 * of the engine client; texts and fields are those that vLLM's clients know. */
#include "api_frontend/api.h"
#include "base/check.h"
#include "proto/json_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_VERSION 256 /* bytes of a weight version */

static uint64_t to_ns(double seconds)
{
    return (uint64_t)(seconds * LK_SECOND_NS);
}

static bool answer_failure(api_call_t *call, const engine_result_t *result)
{
    if (result->status < 0) {
        api_call_fail(call, result->status, NULL, result->text);
    }
    return result->status < 0;
}

/* The rank's own words as an object; NULL when it has none (or they are no object). */
static json_t *body_of(const engine_answer_t *answer)
{
    const char *text = answer->body;
    json_t *object = text[0] != '\0' ? json_loads(text, 0, NULL) : NULL;
    if (object != NULL && !json_is_object(object)) {
        json_decref(object);
        object = NULL;
    }
    if (object != NULL) {
        json_object_set_new(object, "rank", json_integer(answer->rank));
    }
    return object;
}

/* Puts what the ranks have to say under "ranks", if they do. */
static json_t *with_ranks(json_t *reply, const engine_result_t *result)
{
    json_t *ranks = json_array();
    for (size_t i = 0; i < result->n_answers; i++) {
        json_t *body = body_of(&result->answers[i]);
        if (body != NULL) {
            json_array_append_new(ranks, body);
        }
    }
    if (json_array_size(ranks) > 0) {
        json_object_set(reply, "ranks", ranks);
    }
    json_decref(ranks);
    return reply;
}

/* ---- pause, resume ---- */

static void on_paused(void *ctx, const engine_result_t *result)
{
    if (!answer_failure(ctx, result)) {
        api_call_ok(ctx, json_pack("{s:s}", "status", "paused"));
    }
}

void api_handle_pause(api_t *api, api_call_t *call)
{
    static const char *const names[] = {"abort", "wait", "keep", NULL};
    static const pause_mode_t modes[] = {PAUSE_ABORT, PAUSE_WAIT, PAUSE_KEEP};
    int mode = 0;
    bool clear_cache = true, wait = false;
    double timeout_s = 0;
    if (!api_arg_choice(call, "mode", names, &mode) ||
        !api_arg_bool(call, "clear_cache", &clear_cache) ||
        !api_arg_bool(call, "wait_for_inflight_requests", &wait) ||
        !api_arg_seconds(call, "timeout_s", &timeout_s)) {
        return;
    }
    engine_client_pause(api->client, wait ? PAUSE_WAIT : modes[mode], clear_cache, to_ns(timeout_s),
                        on_paused, call);
}

static void on_resumed(void *ctx, const engine_result_t *result)
{
    if (!answer_failure(ctx, result)) {
        api_call_ok(ctx, json_pack("{s:s}", "status", "resumed"));
    }
}

void api_handle_resume(api_t *api, api_call_t *call)
{
    double timeout_s = 0;
    if (api_arg_seconds(call, "timeout_s", &timeout_s)) {
        engine_client_resume(api->client, to_ns(timeout_s), on_resumed, call);
    }
}

/* True when every rank's body says so; *found false when one has no such field. */
static bool every_rank(const engine_result_t *result, const char *field, bool *found)
{
    bool all = true;
    *found = true;
    for (size_t i = 0; i < result->n_answers; i++) {
        json_t *body = body_of(&result->answers[i]);
        const json_t *value = json_object_get(body, field);
        *found = *found && json_is_boolean(value);
        all = all && json_is_true(value);
        json_decref(body);
    }
    return all;
}

static void answer_flag(api_call_t *call, const engine_result_t *result, const char *field)
{
    if (answer_failure(call, result)) {
        return;
    }
    bool found, all = every_rank(result, field, &found);
    if (!found) {
        api_call_error(call, 500, NULL, "an engine's answer has no field \"%s\"", field);
        return;
    }
    api_call_ok(call, json_pack("{s:b}", field, (int)all));
}

static void on_is_paused(void *ctx, const engine_result_t *result)
{
    answer_flag(ctx, result, "is_paused");
}

void api_handle_is_paused(api_t *api, api_call_t *call)
{
    engine_client_utility(api->client, "is_paused", "", 0, on_is_paused, call);
}

/* False: the call was answered. *ids NULL: none were given. */
static bool read_request_ids(api_call_t *call, const json_t **ids)
{
    *ids = json_object_get(call->body, "request_ids");
    *ids = json_is_null(*ids) ? NULL : *ids;
    bool ok = *ids == NULL || json_is_array(*ids);
    for (size_t i = 0; ok && i < json_array_size(*ids); i++) {
        ok = json_is_string(json_array_get(*ids, i));
    }
    if (!ok) {
        api_call_error(call, 400, "request_ids", "request_ids must be an array of strings");
    }
    return ok;
}

/* No ids: all. */
void api_handle_abort_requests(api_t *api, api_call_t *call)
{
    const json_t *ids;
    if (read_request_ids(call, &ids)) {
        size_t n = api_abort_completions(api, ids);
        api_call_ok(call, json_pack("{s:s,s:I}", "status", "aborted", "aborted", (json_int_t)n));
    }
}

/* Needs no admin key, so it must name what it aborts. */
void api_handle_abort_generate(api_t *api, api_call_t *call)
{
    const json_t *ids;
    if (!read_request_ids(call, &ids)) {
        return;
    }
    if (ids == NULL) {
        api_call_error(call, 400, "request_ids", "Missing 'request_ids' in request body");
        return;
    }
    size_t n = json_array_size(ids) > 0 ? api_abort_completions(api, ids) : 0;
    api_call_ok(call, json_pack("{s:s,s:I}", "status", "aborted", "aborted", (json_int_t)n));
}

static void on_cache_reset(void *ctx, const engine_result_t *result)
{
    answer_flag(ctx, result, "success");
}

void api_handle_reset_prefix_cache(api_t *api, api_call_t *call)
{
    bool running = false, external = false;
    if (api_arg_bool(call, "reset_running_requests", &running) &&
        api_arg_bool(call, "reset_external", &external)) {
        engine_client_utility(api->client, "reset_prefix_cache",
                              running ? "{\"reset_running_requests\":true}" : "{}", 0,
                              on_cache_reset, call);
    }
}

/* ---- weight updates ---- */

static void answer_message(api_call_t *call, const engine_result_t *result, const char *message)
{
    if (!answer_failure(call, result)) {
        api_call_ok(call, with_ranks(json_pack("{s:s}", "message", message), result));
    }
}

/* Sends the verb with {name: value} as its spec (value NULL: "{}"): the client's own text where the
 * value is of its body; that has been read whole, and the ranks look for `name` in it. */
static void update(api_t *api, api_call_t *call, update_verb_t verb, const char *name,
                   const json_t *value, engine_result_fn fn)
{
    double timeout_s = 0;
    if (!api_arg_seconds(call, "timeout_s", &timeout_s)) {
        return;
    }
    if (call->raw_body != NULL && value != NULL && json_object_get(call->body, name) == value &&
        call->raw_len <= ENGINE_CLIENT_MAX_SPEC) {
        engine_client_update(api->client, verb, call->raw_body, call->raw_len, to_ns(timeout_s), fn,
                             call);
        return;
    }
    lk_buf_t spec;
    lk_buf_init(&spec, ENGINE_CLIENT_MAX_SPEC);
    lk_buf_str(&spec, "{");
    if (value != NULL) {
        lk_buf_json_str(&spec, name, strlen(name));
        lk_buf_str(&spec, ":");
        json_text_write(&spec, value);
    }
    lk_buf_str(&spec, "}");
    if (spec.failed) {
        api_call_error(call, 413, name, "%s is too long", name);
    } else {
        engine_client_update(api->client, verb, (const char *)spec.data, spec.len, to_ns(timeout_s),
                             fn, call);
    }
    lk_buf_fini(&spec);
}

/* Rank `rank_offset` + "rank" of the transfer group is DP rank "data_parallel_rank". */
static void add_place(json_t *object, size_t place, uint32_t rank)
{
    json_object_set_new(object, "rank", json_integer((json_int_t)place));
    json_object_set_new(object, "data_parallel_rank", json_integer(rank));
}

static void on_init(void *ctx, const engine_result_t *result)
{
    if (answer_failure(ctx, result)) {
        return;
    }
    json_t *ranks = json_array();
    for (size_t i = 0; i < result->n_answers; i++) {
        json_t *body = body_of(&result->answers[i]);
        body = body != NULL ? body : json_object();
        add_place(body, i, result->answers[i].rank);
        json_array_append_new(ranks, body);
    }
    api_call_ok(ctx, json_pack("{s:s,s:I,s:o}", "message", "Weight transfer initialized",
                               "world_size", (json_int_t)result->n_answers, "ranks", ranks));
}

void api_handle_init_weight_transfer_engine(api_t *api, api_call_t *call)
{
    const json_t *info = json_object_get(call->body, "init_info");
    if (info == NULL || json_is_null(info)) {
        api_call_error(call, 400, "init_info", "Missing 'init_info' in request body");
    } else if (!json_is_object(info)) {
        api_call_error(call, 400, "init_info", "init_info must be an object");
    } else {
        update(api, call, UPDATE_VERB_INIT, "init_info", info, on_init);
    }
}

static void on_start(void *ctx, const engine_result_t *result)
{
    answer_message(ctx, result, "Weight update started");
}

void api_handle_start_weight_update(api_t *api, api_call_t *call)
{
    bool checkpoint_format = true;
    if (!api_arg_bool(call, "is_checkpoint_format", &checkpoint_format)) {
        return;
    }
    if (!checkpoint_format) {
        api_call_error(call, 400, "is_checkpoint_format",
                       "is_checkpoint_format must be true: weights arrive under checkpoint names");
        return;
    }
    update(api, call, UPDATE_VERB_START, NULL, NULL, on_start);
}

static void on_update(void *ctx, const engine_result_t *result)
{
    answer_message(ctx, result, "Weights updated");
}

/* False: the call was answered. */
static bool check_version(api_call_t *call, const char *name, const char *version)
{
    if (version != NULL && strlen(version) > MAX_VERSION) {
        api_call_error(call, 400, name, "%s has more than %d bytes", name, MAX_VERSION);
        return false;
    }
    return true;
}

/* ---- a checkpoint directory in one call: init, start, update, finish ---- */

typedef struct {
    api_t *api;
    api_call_t *call;
    json_t *label; /* of the weights: as given, or the directory's name */
    uint64_t timeout_ns;
    lk_status_t status; /* of what failed, with text, while the session is being closed */
    char text[LK_ERROR_TEXT_MAX];
} dir_load_t;

static void dir_load_answer(dir_load_t *self, const engine_result_t *result)
{
    if (self->status < 0) {
        api_call_fail(self->call, self->status, NULL, self->text);
    } else {
        answer_message(self->call, result, "Weights updated");
    }
    json_decref(self->label);
    free(self);
}

static void dir_load_send(dir_load_t *self, update_verb_t verb, json_t *spec, engine_result_fn fn)
{
    char *text = json_dumps(spec, JSON_COMPACT);
    json_decref(spec);
    if (text == NULL) {
        self->status = LK_ERR_NO_MEMORY;
        dir_load_answer(self, NULL);
        return;
    }
    engine_client_update(self->api->client, verb, text, strlen(text), self->timeout_ns, fn, self);
    free(text);
}

static void on_dir_aborted(void *ctx, const engine_result_t *result)
{
    dir_load_answer(ctx, result); /* with why the update failed; the abort had its chance */
}

/* True: something failed, and the session is being closed. */
static bool dir_load_failed(dir_load_t *self, const engine_result_t *result)
{
    if (result->status < 0) {
        self->status = result->status;
        lk_text(self->text, sizeof self->text, "%s", result->text);
        dir_load_send(self, UPDATE_VERB_ABORT, json_object(), on_dir_aborted);
    }
    return result->status < 0;
}

static void on_dir_finished(void *ctx, const engine_result_t *result)
{
    if (!dir_load_failed(ctx, result)) {
        dir_load_answer(ctx, result);
    }
}

static void on_dir_updated(void *ctx, const engine_result_t *result)
{
    dir_load_t *self = ctx;
    if (!dir_load_failed(self, result)) {
        dir_load_send(self, UPDATE_VERB_FINISH, json_pack("{s:O}", "weight_version", self->label),
                      on_dir_finished);
    }
}

static void on_dir_started(void *ctx, const engine_result_t *result)
{
    dir_load_t *self = ctx;
    if (result->status < 0) { /* somebody else's session is open: it is not ours to close */
        self->status = result->status;
        lk_text(self->text, sizeof self->text, "%s", result->text);
        dir_load_answer(self, result);
        return;
    }
    json_t *dir = json_object_get(self->call->body, "weight_dir");
    dir_load_send(self, UPDATE_VERB_UPDATE, json_pack("{s:{s:O}}", "update_info", "path", dir),
                  on_dir_updated);
}

static void on_dir_ready(void *ctx, const engine_result_t *result)
{
    dir_load_t *self = ctx;
    if (result->status < 0) {
        self->status = result->status;
        lk_text(self->text, sizeof self->text, "%s", result->text);
        dir_load_answer(self, result);
        return;
    }
    dir_load_send(self, UPDATE_VERB_START, json_object(), on_dir_started);
}

/* The last name of a path. */
static json_t *dir_label(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') {
        end--;
    }
    size_t start = end;
    while (start > 0 && path[start - 1] != '/') {
        start--;
    }
    return json_stringn(path + start, LK_MIN(end - start, (size_t)MAX_VERSION));
}

static void load_weight_dir(api_t *api, api_call_t *call)
{
    const char *dir = NULL, *version = NULL;
    double timeout_s = 0;
    if (!api_arg_str(call, "weight_dir", &dir) || !api_arg_str(call, "weight_version", &version) ||
        !check_version(call, "weight_version", version) ||
        !api_arg_seconds(call, "timeout_s", &timeout_s)) {
        return;
    }
    if (dir == NULL || json_object_get(call->body, "update_info") != NULL) {
        api_call_error(call, 400, "weight_dir",
                       dir == NULL ? "weight_dir must be the path of a directory"
                                   : "weight_dir and update_info exclude each other");
        return;
    }
    dir_load_t *self = calloc(1, sizeof *self);
    json_t *label = version != NULL ? json_string(version) : dir_label(dir);
    if (self == NULL || label == NULL) {
        free(self);
        json_decref(label);
        api_call_error(call, 500, NULL, "out of memory");
        return;
    }
    *self = (dir_load_t){.api = api, .call = call, .label = label, .timeout_ns = to_ns(timeout_s)};
    dir_load_send(self, UPDATE_VERB_INIT, json_pack("{s:{s:s}}", "init_info", "backend", "disk"),
                  on_dir_ready);
}

void api_handle_update_weights(api_t *api, api_call_t *call)
{
    const json_t *info = json_object_get(call->body, "update_info");
    if (json_object_get(call->body, "weight_dir") != NULL) {
        load_weight_dir(api, call);
    } else if (info == NULL || json_is_null(info)) {
        api_call_error(call, 400, "update_info", "Missing 'update_info' in request body");
    } else if (!json_is_object(info) && !json_is_array(info)) {
        api_call_error(call, 400, "update_info", "update_info must be an object or an array");
    } else {
        update(api, call, UPDATE_VERB_UPDATE, "update_info", info, on_update);
    }
}

static void on_finish(void *ctx, const engine_result_t *result)
{
    answer_message(ctx, result, "Weight update finished");
}

void api_handle_finish_weight_update(api_t *api, api_call_t *call)
{
    const char *version = NULL;
    if (!api_arg_str(call, "weight_version", &version) ||
        !check_version(call, "weight_version", version)) {
        return;
    }
    json_t *value = version != NULL ? json_string(version) : NULL;
    update(api, call, UPDATE_VERB_FINISH, "weight_version", value, on_finish);
    json_decref(value);
}

static void on_abort(void *ctx, const engine_result_t *result)
{
    answer_message(ctx, result, "Weight update aborted");
}

void api_handle_abort_weight_update(api_t *api, api_call_t *call)
{
    update(api, call, UPDATE_VERB_ABORT, NULL, NULL, on_abort);
}

static void on_version(void *ctx, const engine_result_t *result)
{
    api_call_t *call = ctx;
    if (!answer_failure(call, result)) {
        json_t *version = json_object_get(call->body, "new_version");
        api_call_ok(call, json_pack("{s:b,s:O}", "success", 1, "new_version", version));
    }
}

void api_handle_update_weight_version(api_t *api, api_call_t *call)
{
    const char *version = NULL;
    if (!api_arg_str(call, "new_version", &version) ||
        !check_version(call, "new_version", version)) {
        return;
    }
    if (version == NULL) {
        api_call_error(call, 400, "new_version", "Missing 'new_version' in request body");
        return;
    }
    update(api, call, UPDATE_VERB_SET_VERSION, "new_version",
           json_object_get(call->body, "new_version"), on_version);
}

/* ---- what the ranks hold ---- */

/* The same version, epoch and digest as rank 0, and not dirty. */
static bool same_weights(const json_t *a, const json_t *b)
{
    static const char *const fields[] = {"version", "epoch", "digest"};
    bool same = !json_is_true(json_object_get(b, "dirty"));
    for (size_t i = 0; i < LK_ARRAY_LEN(fields); i++) {
        const json_t *x = json_object_get(a, fields[i]), *y = json_object_get(b, fields[i]);
        same = same && (x == y || json_equal(x, y));
    }
    return same;
}

static void on_weight_info(void *ctx, const engine_result_t *result)
{
    json_t *ranks = json_array(), *version = NULL;
    bool consistent = result->status == LK_OK;
    size_t answered = 0;
    for (size_t i = 0; i < result->n_answers; i++) {
        const engine_answer_t *answer = &result->answers[i];
        json_t *body = body_of(answer);
        if (body == NULL || answer->status < 0) {
            json_decref(body);
            const char *text = answer->text;
            body = json_pack("{s:I,s:s,s:s}", "rank", (json_int_t)answer->rank, "state",
                             "unreachable", "error", text[0] != '\0' ? text : "no answer");
            consistent = false;
        } else {
            answered++;
            if (version == NULL) {
                version = json_object_get(body, "version");
            }
            const json_t *first = i > 0 ? json_array_get(ranks, 0) : body;
            consistent = consistent && same_weights(first, body);
        }
        json_array_append_new(ranks, body);
    }
    if (answered == 0) {
        json_decref(ranks);
        api_call_fail(ctx, result->status < 0 ? result->status : LK_ERR_INTERNAL, NULL,
                      result->status < 0 ? result->text : "no engine said what it holds");
        return;
    }
    json_t *reply = json_object();
    if (version != NULL) {
        json_object_set(reply, "weight_version", version);
    }
    json_object_set_new(reply, "consistent", json_boolean(consistent));
    json_object_set_new(reply, "ranks", ranks);
    api_call_ok(ctx, reply);
}

void api_handle_weight_info(api_t *api, api_call_t *call)
{
    engine_client_utility(api->client, "weight_info", "", 0, on_weight_info, call);
}

void api_handle_get_world_size(api_t *api, api_call_t *call)
{
    bool include_dp = true;
    if (!api_arg_bool(call, "include_dp", &include_dp)) {
        return;
    }
    engine_client_info_t info;
    engine_client_info(api->client, &info);
    const lk_config_t *c = api->config;
    const char *closed = engine_client_closed_reason(api->client);
    if (closed != NULL && c->data_parallel_min_size != 0 &&
        c->data_parallel_min_size < info.n_ranks) {
        api_call_fail(call, LK_ERR_UNAVAILABLE, NULL,
                      closed); /* how many will form the next group? */
        return;
    }
    /* a worker's rank in a transfer group is rank_offset plus this */
    json_t *ranks = json_array();
    for (uint32_t r = 0; r < info.n_ranks; r++) {
        size_t place = json_array_size(ranks);
        if (engine_client_removed_reason(api->client, r) == NULL && (include_dp || place == 0)) {
            json_t *row = json_object();
            add_place(row, place, r);
            json_array_append_new(ranks, row);
        }
    }
    api_call_ok(call, json_pack("{s:I,s:o}", "world_size", (json_int_t)json_array_size(ranks),
                                "ranks", ranks));
}
