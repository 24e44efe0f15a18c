#include "api_frontend/utility_calls.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    bool answered;
    lk_status_t status;
    char *text, *body;
} slot_t;

typedef struct call {
    struct call *next;
    uint64_t id, deadline_ns, timeout_ns;
    char method[48];
    engine_result_fn fn;
    void *ctx;
    uint32_t n_answered;
    slot_t slots[];
} call_t;

struct utility_calls {
    const engine_client_config_t *config;
    const engine_client_ops_t *ops;
    uint64_t last_id;
    bool *removed; /* [n_ranks] */
    call_t *calls;
};

utility_calls_t *utility_calls_new(const engine_client_config_t *config,
                                   const engine_client_ops_t *ops)
{
    utility_calls_t *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->removed = calloc(config->n_ranks, sizeof *self->removed);
        if (self->removed == NULL) {
            free(self);
            return NULL;
        }
        self->config = config;
        self->ops = ops;
        /* replies to an earlier life must not match */
        self->last_id = lk_env_random_u64(ops->env) >> 1;
    }
    return self;
}

static void call_free(const utility_calls_t *self, call_t *call)
{
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        free(call->slots[r].text);
        free(call->slots[r].body);
    }
    free(call);
}

void utility_calls_destroy(utility_calls_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    for (call_t *call = (*self_p)->calls; call != NULL;) {
        call_t *next = call->next;
        call_free(*self_p, call);
        call = next;
    }
    free((*self_p)->removed);
    free(*self_p);
    *self_p = NULL;
}

size_t utility_calls_num_open(const utility_calls_t *self)
{
    size_t n = 0;
    for (const call_t *c = self->calls; c != NULL; c = c->next) {
        n++;
    }
    return n;
}

static void answer(slot_t *slot, lk_status_t status, const char *text, size_t text_len,
                   const char *body, size_t body_len)
{
    slot->answered = true;
    slot->status = status;
    slot->text = text_len > 0 ? strndup(text, text_len) : NULL;
    slot->body = body_len > 0 ? strndup(body, body_len) : NULL;
}

/* Takes the call off the list, then answers it. */
static void finish(utility_calls_t *self, call_t *call)
{
    for (call_t **p = &self->calls; *p != NULL; p = &(*p)->next) {
        if (*p == call) {
            *p = call->next;
            break;
        }
    }
    uint32_t n = self->config->n_ranks;
    engine_answer_t *answers = calloc(n, sizeof *answers);
    CHECKF(answers != NULL, "out of memory");
    engine_result_t result = {LK_OK, "", 0, answers};
    char text[LK_ERROR_TEXT_MAX];
    for (uint32_t r = 0; r < n; r++) {
        const slot_t *s = &call->slots[r];
        if (self->removed[r]) {
            continue;
        }
        answers[result.n_answers++] =
            (engine_answer_t){r, s->answered, s->status, s->text != NULL ? s->text : "",
                              s->body != NULL ? s->body : ""};
        if (s->status < 0 && result.status == LK_OK) {
            result.status = s->status;
            lk_text(text, sizeof text, "rank %u: %s", r,
                    s->text != NULL ? s->text : lk_status_name(s->status));
            result.text = text;
        }
    }
    call->fn(call->ctx, &result);
    free(answers);
    call_free(self, call);
}

void utility_calls_call(utility_calls_t *self, const char *const *dead_reasons, const char *method,
                        const char *args, uint64_t timeout_ns, engine_result_fn fn, void *ctx)
{
    uint32_t n = self->config->n_ranks;
    call_t *call = calloc(1, sizeof *call + n * sizeof call->slots[0]);
    CHECKF(call != NULL, "out of memory");
    call->id = ++self->last_id;
    call->fn = fn;
    call->ctx = ctx;
    call->timeout_ns = timeout_ns;
    call->deadline_ns = lk_env_now_ns(self->ops->env) + timeout_ns;
    snprintf(call->method, sizeof call->method, "%s", method);
    call->next = self->calls;
    self->calls = call;

    msg_t msg = {.type = MSG_UTILITY};
    msg.utility = (msg_utility_t){
        .client = self->config->client,
        .call_id = call->id,
        .method = msg_str(method),
        .args = msg_str(args),
    };
    for (uint32_t r = 0; r < n; r++) {
        lk_error_t err = LK_ERROR_INIT;
        const char *why = self->removed[r] ? "removed" : dead_reasons[r];
        lk_status_t status = LK_ERR_UNAVAILABLE;
        if (why == NULL) {
            status = self->ops->send_engine(self->ops->ctx, r, &msg, &err);
            why = err.text;
        }
        if (status != LK_OK) {
            answer(&call->slots[r], status, why, strlen(why), NULL, 0);
            call->n_answered++;
        }
    }
    if (call->n_answered == n) {
        finish(self, call);
    }
}

bool utility_calls_on_reply(utility_calls_t *self, const msg_utility_reply_t *reply)
{
    for (call_t *call = self->calls; call != NULL; call = call->next) {
        if (call->id != reply->call_id) {
            continue;
        }
        if (!lk_status_is_valid(reply->status) || call->slots[reply->rank].answered) {
            return false;
        }
        answer(&call->slots[reply->rank], (lk_status_t)reply->status, reply->text.ptr,
               reply->text.len, reply->body.ptr, reply->body.len);
        if (++call->n_answered == self->config->n_ranks) {
            finish(self, call);
        }
        return true;
    }
    return false;
}

/* Fills the rank's open slots; the first call that is complete is returned. */
static call_t *fill(utility_calls_t *self, uint32_t rank, const char *reason)
{
    for (call_t *call = self->calls; call != NULL; call = call->next) {
        if (!call->slots[rank].answered) {
            answer(&call->slots[rank], LK_ERR_UNAVAILABLE, reason, strlen(reason), NULL, 0);
            if (++call->n_answered == self->config->n_ranks) {
                return call;
            }
        }
    }
    return NULL;
}

void utility_calls_on_dead(utility_calls_t *self, uint32_t rank, const char *reason)
{
    call_t *call;
    while ((call = fill(self, rank, reason)) != NULL) {
        finish(self, call);
    }
}

void utility_calls_remove(utility_calls_t *self, uint32_t rank, const char *reason)
{
    utility_calls_on_dead(self, rank, reason);
    self->removed[rank] = true;
}

static call_t *find_expired(utility_calls_t *self, uint64_t now)
{
    for (call_t *call = self->calls; call != NULL; call = call->next) {
        if (now >= call->deadline_ns) {
            return call;
        }
    }
    return NULL;
}

void utility_calls_poll(utility_calls_t *self)
{
    uint64_t now = lk_env_now_ns(self->ops->env);
    call_t *call;
    while ((call = find_expired(self, now)) != NULL) {
        for (uint32_t r = 0; r < self->config->n_ranks; r++) {
            if (!call->slots[r].answered) {
                char text[128];
                int n = snprintf(text, sizeof text, "%s got no answer within %g s", call->method,
                                 (double)call->timeout_ns / LK_SECOND_NS);
                answer(&call->slots[r], LK_ERR_TIMEOUT, text, (size_t)n, NULL, 0);
            }
        }
        finish(self, call);
    }
}
