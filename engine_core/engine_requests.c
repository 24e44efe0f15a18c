/* engine_requests.c: ADD, ABORT and UTILITY. */
#include "base/check.h"
#include "base/log.h"
#include "engine_core/engine_internal.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

/* ---- ADD ---- */

static uint32_t clipped_u32(uint64_t value)
{
    return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static lk_status_t read_stop_tokens(msg_bin_t bin, sampling_params_t *p, lk_error_t *err)
{
    size_t n = bin.len / sizeof(uint32_t);
    if (bin.len % sizeof(uint32_t) != 0 || n > REQUEST_MAX_STOP_TOKENS) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "stop_token_ids: %zu bytes; at most %d ids of 4 bytes are possible",
                            bin.len, REQUEST_MAX_STOP_TOKENS);
    }
    if (n > 0) {
        memcpy(p->stop_tokens, bin.data, bin.len);
    }
    p->n_stop_tokens = (uint32_t)n;
    return LK_OK;
}

/* int64 to int32: a value outside becomes the nearest, which the range check then names. */
static int32_t clamped_i32(int64_t value)
{
    return (int32_t)(value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : value);
}

static lk_status_t read_sampling(const msg_sampling_t *m, sampling_params_t *p, lk_error_t *err)
{
    *p = (sampling_params_t){.temperature = (float)m->temperature,
                             .top_p = (float)m->top_p,
                             .min_p = (float)m->min_p,
                             .top_k = clamped_i32(m->top_k),
                             .repetition_penalty = (float)m->repetition_penalty,
                             .presence_penalty = (float)m->presence_penalty,
                             .frequency_penalty = (float)m->frequency_penalty,
                             .seed = m->seed,
                             .max_tokens = clipped_u32(m->max_tokens),
                             .min_tokens = clipped_u32(m->min_tokens),
                             .ignore_eos = m->ignore_eos,
                             .logprobs = clamped_i32(m->logprobs),
                             .prompt_logprobs = clipped_u32(m->prompt_logprobs)};
    return read_stop_tokens(m->stop_token_ids, p, err);
}

/* Why no request is taken right now, or LK_OK. */
static lk_status_t check_admission(const engine_core_t *self, lk_error_t *err)
{
    const char *closed = group_closed_why(self->group);
    if (self->draining) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "engine %u is shutting down",
                            self->config.rank);
    }
    if (self->left && engine_lockstep(self)) {
        char text[LK_ERROR_TEXT_MAX];
        engine_left_text(self, text, sizeof text);
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s", text);
    }
    const executor_t *executor = self->config.executor;
    if (executor->ops->refusal != NULL) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s", executor->ops->refusal(executor));
    }
    if (closed != NULL) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE,
                            "the weights are unusable until a complete update: %s", closed);
    }
    if (self->config.reject_while_paused && pause_is_paused(group_pause(self->group))) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "generation is paused");
    }
    return LK_OK;
}

static lk_status_t read_prompt(const engine_core_t *self, const msg_add_t *add, uint32_t *n_prompt,
                               lk_error_t *err)
{
    uint32_t limit = self->config.scheduler.max_model_len;
    size_t n = add->prompt.len / sizeof(uint32_t);
    if (add->prompt.len % sizeof(uint32_t) != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "prompt: %zu bytes are no list of 4-byte ids",
                            add->prompt.len);
    }
    if (n == 0 || n >= limit) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "prompt: %zu tokens; 1 to %u are possible (max_model_len %u, and one "
                            "to generate)",
                            n, limit - 1, limit);
    }
    *n_prompt = (uint32_t)n;
    return LK_OK;
}

static lk_status_t make_request(const engine_core_t *self, const msg_add_t *add, request_t **out,
                                lk_error_t *err)
{
    uint32_t n_prompt = 0;
    sampling_params_t sampling;
    LK_RETURN_IF_ERROR(read_prompt(self, add, &n_prompt, err));
    LK_RETURN_IF_ERROR(read_sampling(&add->sampling, &sampling, err));
    LK_RETURN_IF_ERROR(sampling_params_check(&sampling, err));
    sampling.max_tokens =
        LK_MIN(sampling.max_tokens, self->config.scheduler.max_model_len - n_prompt);
    uint32_t *prompt = malloc(add->prompt.len); /* the wire's bytes need not be aligned */
    if (prompt == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    memcpy(prompt, add->prompt.data, add->prompt.len);
    request_t *r = request_new(prompt, n_prompt, &sampling);
    free(prompt);
    if (r == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    lk_status_t status =
        logit_rules_read(&add->sampling, self->config.scheduler.vocab_size, &r->rules, err);
    if (status != LK_OK) {
        request_destroy(&r);
        return status;
    }
    r->client = add->client;
    r->handle = add->handle;
    r->choice = clipped_u32(add->choice);
    r->priority = add->priority;
    r->arrival_ns = engine_now(self);
    if (add->cache_salt.len > 0) {
        r->salt = lk_hash128(add->cache_salt.ptr, add->cache_salt.len, 0);
    }
    snprintf(r->id, sizeof r->id, "%s", msg_cstr(add->id));
    *out = r;
    return LK_OK;
}

void engine_on_add(engine_core_t *self, uint32_t frontend, const msg_add_t *add)
{
    lk_error_t err = LK_ERROR_INIT;
    request_t *r = NULL;
    lk_status_t status = check_admission(self, &err);
    if (status == LK_OK) {
        status = make_request(self, add, &r, &err);
    }
    if (status == LK_OK) {
        status = scheduler_add(self->scheduler, r, &err);
        if (status < 0) {
            request_destroy(&r);
        }
    }
    if (status < 0) {
        outbox_refuse(self->outbox, frontend, add->handle, status, err.text);
    }
}

void engine_on_abort(engine_core_t *self, uint32_t frontend, const msg_abort_t *abort)
{
    if (abort->handles.count == 0) { /* all of it: nobody waits for them any more */
        scheduler_drop_client(self->scheduler, frontend);
        outbox_drop(self->outbox, frontend);
        return;
    }
    for (size_t i = 0; i < abort->handles.count; i++) {
        scheduler_abort(self->scheduler, frontend, abort->handles.items[i].handle);
    }
}

/* ---- UTILITY ---- */

static msg_str_t is_paused(engine_core_t *self, const msg_utility_t *utility)
{
    return msg_str(pause_is_paused(group_pause(self->group)) ? "{\"is_paused\": true}"
                                                             : "{\"is_paused\": false}");
}

/* Fails while requests hold blocks, unless {"reset_running_requests": true} has them recompute
 * their KV: at once between steps, else when the step under way ends. */
static msg_str_t reset_prefix_cache(engine_core_t *self, const msg_utility_t *utility)
{
    json_t *args = json_loadb(msg_cstr(utility->args), utility->args.len, 0, NULL);
    bool running = json_is_true(json_object_get(args, "reset_running_requests"));
    json_decref(args);
    if (running && !self->step_posted) {
        scheduler_recompute_all(self->scheduler);
    }
    self->recompute_due |= running && self->step_posted;
    bool reset = kv_cache_reset_prefixes(self->kv);
    return msg_str(reset || running ? "{\"success\": true}" : "{\"success\": false}");
}

static msg_str_t weight_info(engine_core_t *self, const msg_utility_t *utility)
{
    return engine_weight_info(self);
}

static msg_str_t status_body(engine_core_t *self, const msg_utility_t *utility)
{
    return engine_status_body(self);
}

static const struct {
    const char *method;
    msg_str_t (*fn)(engine_core_t *self, const msg_utility_t *utility);
} utilities[] = {
    {"weight_info", weight_info},
    {"is_paused", is_paused},
    {"reset_prefix_cache", reset_prefix_cache},
    {"status", status_body},
};

void engine_on_utility(engine_core_t *self, uint32_t frontend, const msg_utility_t *utility)
{
    msg_t msg = {.type = MSG_UTILITY_REPLY};
    msg.utility_reply = (msg_utility_reply_t){
        .rank = self->config.rank, .call_id = utility->call_id, .status = LK_ERR_NOT_FOUND};
    lk_error_t err;
    for (size_t i = 0; i < LK_ARRAY_LEN(utilities); i++) {
        if (strcmp(utilities[i].method, msg_cstr(utility->method)) == 0) {
            msg.utility_reply.status = LK_OK;
            msg.utility_reply.body = utilities[i].fn(self, utility);
        }
    }
    if (msg.utility_reply.status != LK_OK) {
        lk_error_set(&err, LK_ERR_NOT_FOUND, "method: no utility is called \"%.64s\"",
                     msg_cstr(utility->method));
        msg.utility_reply.text = msg_str(err.text);
    }
    self->config.host.to_frontend(self->config.host.ctx, frontend, &msg);
}
