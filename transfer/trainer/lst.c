#include "transfer/trainer/lst.h"
#include "base/check.h"
#include "proto/json_text.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS_MAX   1e6
#define KEPT_TEXT_MAX (4u << 20)

#define X(name, value, http, text) enum { SAME_##name = value };
LK_STATUS_TABLE(X)
#undef X
STATIC_ASSERT(LST_ERR_INVALID == (int)SAME_ERR_INVALID && LST_ERR_STATE == (int)SAME_ERR_STATE &&
                  LST_ERR_TIMEOUT == (int)SAME_ERR_TIMEOUT && LST_ERR_PEER == (int)SAME_ERR_PEER &&
                  LST_ERR_INTERNAL == (int)SAME_ERR_INTERNAL,
              "lst_status_t has the numbers of lk_status_t");

static bool seconds_ok(double s)
{
    return s >= 0 && s <= SECONDS_MAX;
}

static uint64_t seconds_or(double s, double otherwise)
{
    return (uint64_t)((s > 0 ? s : otherwise) * (double)LK_SECOND_NS);
}

lst_status_t lst_open(const lst_options_t *options, lst_t **out, char *err_text, size_t err_size)
{
    lk_error_t err = LK_ERROR_INIT;
    lk_port_t *port = NULL;
    lst_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        lk_error_set(&err, LK_ERR_NO_MEMORY, "out of memory");
        goto err_text;
    }
    if (options->endpoint == NULL || !seconds_ok(options->timeout_s) ||
        !seconds_ok(options->no_progress_s)) {
        lk_error_set(&err, LK_ERR_INVALID, "options need an endpoint, and times of at least 0");
        goto err_self;
    }
    self->env = lk_env_real();
    self->listener = -1;
    lk_buf_init(&self->object_text, KEPT_TEXT_MAX);
    self->timeout_ns = seconds_or(options->timeout_s, 60);
    self->no_progress_ns = seconds_or(options->no_progress_s, 30);
    if (port_zmq_open(PORT_DEALER, false, options->endpoint, NULL, &port, &err) < 0) {
        goto err_self;
    }
    self->rpc = rpc_new(port, self->env, options->admin_key, options->endpoint);
    if (self->rpc == NULL) {
        lk_error_set(&err, LK_ERR_NO_MEMORY, "out of memory");
        goto err_self;
    }
    *out = self;
    return LST_OK;

err_self:
    free(self);
err_text:
    if (err_text != NULL && err_size > 0) {
        snprintf(err_text, err_size, "%s", err.text);
    }
    return (lst_status_t)err.status;
}

void lst_close(lst_t **lst_p)
{
    if (lst_p == NULL || *lst_p == NULL) {
        return;
    }
    lst_t *self = *lst_p;
    *lst_p = NULL;
    lst_drop_ranks(self);
    lst_nccl_fini(self);
    lst_ipc_fini(self);
    rpc_destroy(&self->rpc);
    free(self->reply_text);
    json_decref(self->update_reply);
    lk_buf_fini(&self->object_text);
    free(self);
}

const char *lst_last_error(const lst_t *self)
{
    return self->err.text;
}

void lst_stats(const lst_t *self, lst_stats_t *out)
{
    *out = self->stats;
}

/* ---- calls without a transfer ---- */

static void wait_for_reply(lst_t *self)
{
    struct pollfd fd = {.fd = rpc_fd(self->rpc), .events = POLLIN};
    uint64_t now = lk_env_now_ns(self->env), wake = rpc_wake_ns(self->rpc);
    uint64_t ms = wake > now ? (wake - now) / LK_MS_NS + 1 : 0;
    (void)poll(&fd, 1, (int)LK_MIN(ms, 1000u)); /* rpc_test looks for itself */
}

/* For a call that was posted with status st. */
static lk_status_t wait_for_answer(lst_t *self, lk_status_t st, json_t **reply)
{
    json_t *map = NULL;
    while (st >= 0 && (st = rpc_test(self->rpc, &map, &self->err)) == LK_INPROGRESS) {
        wait_for_reply(self);
    }
    if (st == LK_OK && reply != NULL) {
        *reply = map;
    } else {
        json_decref(map);
    }
    return st;
}

static lk_status_t ask_within(lst_t *self, const char *call, json_t *args, uint64_t timeout_ns,
                              json_t **reply)
{
    self->err = LK_ERROR_INIT;
    lk_status_t st = rpc_post(self->rpc, call, args, timeout_ns, &self->err);
    json_decref(args);
    return wait_for_answer(self, st, reply);
}

lk_status_t lst_ask(lst_t *self, const char *call, json_t *args, json_t **reply)
{
    return ask_within(self, call, args, self->timeout_ns, reply);
}

static lst_status_t simple(lst_t *self, const char *call, json_t *args)
{
    return (lst_status_t)lst_ask(self, call, args, NULL);
}

lst_status_t lst_pause(lst_t *self, const char *mode, bool clear_cache)
{
    uint64_t start = lk_env_now_ns(self->env);
    lst_status_t st = simple(self, "pause",
                             json_pack("{s:s, s:b}", "mode", mode != NULL ? mode : "abort",
                                       "clear_cache", (int)clear_cache));
    self->pause_ns = st == LST_OK ? start : self->pause_ns;
    return st;
}

lst_status_t lst_resume(lst_t *self)
{
    lst_status_t st = simple(self, "resume", NULL);
    if (st == LST_OK && self->pause_ns != 0) {
        self->stats.last_pause_window_s =
            (double)(lk_env_now_ns(self->env) - self->pause_ns) / (double)LK_SECOND_NS;
        self->pause_ns = 0;
    }
    return st;
}

static lst_status_t ask_flag(lst_t *self, const char *call, json_t *args, const char *field,
                             bool *out)
{
    json_t *reply = NULL;
    lk_status_t st = lst_ask(self, call, args, &reply);
    if (st < 0) {
        return (lst_status_t)st;
    }
    const json_t *value = json_object_get(reply, field);
    if (!json_is_boolean(value)) {
        st = lk_error_set(&self->err, LK_ERR_PEER, "%s: the answer has no '%s'", call, field);
    } else {
        *out = json_is_true(value);
    }
    json_decref(reply);
    return (lst_status_t)st;
}

lst_status_t lst_is_paused(lst_t *self, bool *paused)
{
    return ask_flag(self, "is_paused", NULL, "is_paused", paused);
}

lst_status_t lst_reset_prefix_cache(lst_t *self, bool reset_running_requests, bool *success)
{
    bool ok = false;
    lst_status_t st = ask_flag(
        self, "reset_prefix_cache",
        json_pack("{s:b}", "reset_running_requests", (int)reset_running_requests), "success", &ok);
    if (st == LST_OK && success != NULL) {
        *success = ok;
    }
    return st;
}

lst_status_t lst_start(lst_t *self)
{
    return simple(self, "start_weight_update", NULL);
}

lst_status_t lst_update_disk(lst_t *self, const char *directory, const char *version,
                             double timeout_s)
{
    if (directory == NULL || !seconds_ok(timeout_s)) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_INVALID,
                                          "update_weights: needs a directory, and a time of at "
                                          "least 0");
    }
    json_t *args = json_pack("{s:s, s:s?}", "weight_dir", directory, "weight_version", version);
    return args != NULL ? (lst_status_t)ask_within(self, "update_weights", args,
                                                   seconds_or(timeout_s, 600), NULL)
                        : (lst_status_t)lk_error_set(&self->err, LK_ERR_INVALID,
                                                     "update_weights: a text is not UTF-8");
}

static json_t *text_arg(const char *name, const char *value)
{
    return value != NULL ? json_pack("{s:s}", name, value) : NULL;
}

lst_status_t lst_finish(lst_t *self, const char *version)
{
    return simple(self, "finish_weight_update", text_arg("weight_version", version));
}

lst_status_t lst_abort(lst_t *self)
{
    return simple(self, "abort_weight_update", NULL);
}

lst_status_t lst_set_version(lst_t *self, const char *version)
{
    return simple(self, "update_weight_version", text_arg("new_version", version));
}

lst_status_t lst_world_size(lst_t *self, unsigned *ranks)
{
    json_t *reply = NULL;
    lk_status_t st = lst_ask(self, "get_world_size", NULL, &reply);
    if (st < 0) {
        return (lst_status_t)st;
    }
    json_int_t n = json_integer_value(json_object_get(reply, "world_size"));
    json_decref(reply);
    if (n < 1 || n > 1 << 16) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_PEER,
                                          "get_world_size: the answer has no usable 'world_size'");
    }
    *ranks = (unsigned)n;
    return LST_OK;
}

#define FORMING_LOOK_MS 100

lst_status_t lst_count_ranks(lst_t *self)
{
    uint64_t start = lk_env_now_ns(self->env);
    lst_status_t st;
    while ((st = lst_world_size(self, &self->n_ranks)) == LST_ERR_UNAVAILABLE &&
           lk_env_now_ns(self->env) - start < self->no_progress_ns) {
        (void)poll(NULL, 0, FORMING_LOOK_MS); /* nobody says when: it is asked again */
    }
    return st;
}

static void copy_text(char *out, size_t room, const json_t *object, const char *field)
{
    const char *text = json_string_value(json_object_get(object, field));
    snprintf(out, room, "%s", text != NULL ? text : "");
}

lst_status_t lst_weight_info(lst_t *self, lst_rank_info_t *out, size_t room, size_t *n)
{
    json_t *reply = NULL;
    lk_status_t st = lst_ask(self, "weight_info", NULL, &reply);
    if (st < 0) {
        return (lst_status_t)st;
    }
    const json_t *ranks = json_object_get(reply, "ranks");
    if (!json_is_array(ranks)) {
        json_decref(reply);
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_PEER,
                                          "weight_info: the answer has no list 'ranks'");
    }
    *n = json_array_size(ranks);
    for (size_t i = 0; i < *n && i < room; i++) {
        const json_t *rank = json_array_get(ranks, i);
        const json_t *number = json_object_get(rank, "rank");
        out[i] = (lst_rank_info_t){
            .rank = json_is_integer(number) ? (unsigned)json_integer_value(number) : (unsigned)i,
            .dirty = json_is_true(json_object_get(rank, "dirty")),
            .epoch = (uint64_t)json_integer_value(json_object_get(rank, "epoch"))};
        copy_text(out[i].version, sizeof out[i].version, rank, "version");
        copy_text(out[i].digest, sizeof out[i].digest, rank, "digest");
        copy_text(out[i].state, sizeof out[i].state, rank, "state");
    }
    json_decref(reply);
    return LST_OK;
}

/* The last text that was one is known: handles of memory that stays come again and again. */
static bool is_object(lst_t *self, const char *text, size_t len)
{
    lk_buf_t *known = &self->object_text;
    if (known->len == len && len > 0 && memcmp(known->data, text, len) == 0) {
        return true;
    }
    json_t *map = json_text_read(text, len, 0, NULL);
    bool object = json_is_object(map);
    json_decref(map);
    if (object && len <= KEPT_TEXT_MAX) {
        lk_buf_clear(known);
        lk_buf_append(known, text, len);
    }
    return object;
}

/* The arguments as they are, once they are known to be an object. */
static lk_status_t ask_with_text(lst_t *self, const char *call, const char *args, json_t **answer)
{
    size_t len = strlen(args);
    self->err = LK_ERROR_INIT;
    if (!is_object(self, args, len)) {
        return lk_error_set(&self->err, LK_ERR_INVALID, "%s: the arguments are no JSON object",
                            call);
    }
    lk_status_t st = rpc_post_text(self->rpc, call, args, len, self->timeout_ns, &self->err);
    return wait_for_answer(self, st, answer);
}

lst_status_t lst_call(lst_t *self, const char *call, const char *args, const char **reply)
{
    json_t *answer = NULL;
    lk_status_t st = args != NULL ? ask_with_text(self, call, args, &answer)
                                  : lst_ask(self, call, NULL, &answer);
    if (st < 0) {
        return (lst_status_t)st;
    }
    free(self->reply_text);
    self->reply_text = json_dumps(answer, JSON_COMPACT);
    json_decref(answer);
    if (self->reply_text == NULL) {
        return (lst_status_t)lk_error_set(&self->err, LK_ERR_NO_MEMORY,
                                          "out of memory for an answer");
    }
    if (reply != NULL) {
        *reply = self->reply_text;
    }
    return LST_OK;
}

const char *lst_update_reply(lst_t *self)
{
    free(self->reply_text);
    self->reply_text =
        self->update_reply != NULL ? json_dumps(self->update_reply, JSON_COMPACT) : NULL;
    return self->reply_text != NULL ? self->reply_text : "{}";
}

void lst_keep_reply(lst_t *self, json_t *reply)
{
    json_decref(self->update_reply);
    self->update_reply = reply;
}
