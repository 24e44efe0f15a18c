#include "tests/lib/completions.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- requests ---- */

static json_t *complete_at(const cluster_t *c, int rank, int want, const char *fmt, va_list ap)
{
    char body[16384], header[256] = "";
    int n = vsnprintf(body, sizeof body, fmt, ap);
    ck_assert_int_lt(n, (int)sizeof body);
    int used = 0;
    if (c->api_key[0] != '\0') {
        used = snprintf(header, sizeof header, "Authorization: Bearer %s\r\n", c->api_key);
    }
    if (rank >= 0) {
        snprintf(header + used, sizeof header - (size_t)used, "X-data-parallel-rank: %d\r\n", rank);
    }
    json_t *reply;
    int status = cluster_call_with(c, "POST", "/v1/completions", header, body, (size_t)n, &reply);
    char *text = json_dumps(reply, JSON_COMPACT | JSON_ENCODE_ANY);
    ck_assert_msg(status == want && reply != NULL, "%s: %d %.2000s", body, status, text);
    free(text);
    return reply;
}

json_t *complete(const cluster_t *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    json_t *reply = complete_at(c, -1, 200, fmt, ap);
    va_end(ap);
    return reply;
}

json_t *complete_on(const cluster_t *c, int rank, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    json_t *reply = complete_at(c, rank, 200, fmt, ap);
    va_end(ap);
    return reply;
}

json_t *refused(const cluster_t *c, int want, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    json_t *reply = complete_at(c, -1, want, fmt, ap);
    va_end(ap);
    return reply;
}

const json_t *choice(const json_t *reply, size_t i)
{
    const json_t *one = json_array_get(json_object_get(reply, "choices"), i);
    ck_assert_msg(one != NULL, "there is no choice %zu", i);
    ck_assert_int_eq(json_int_at(one, "index"), (json_int_t)i);
    return one;
}

void check_text(const json_t *one, const char *text, size_t len)
{
    const json_t *got = json_object_get(one, "text");
    ck_assert_msg(json_string_length(got) == len && memcmp(json_string_value(got), text, len) == 0,
                  "the text is '%s', not '%s'", json_string_value(got), text);
}

void take_tokens(const json_t *one, tokens_t *out)
{
    const json_t *ids = json_object_get(one, "token_ids");
    const json_t *logprobs = json_object_get(json_object_get(one, "logprobs"), "token_logprobs");
    out->n = json_array_size(ids);
    ck_assert_uint_le(out->n, MAX_TOKENS);
    for (size_t i = 0; i < out->n; i++) {
        out->ids[i] = json_integer_value(json_array_get(ids, i));
        const json_t *x = json_array_get(logprobs, i);
        out->logprobs[i] = json_real_value(x);
        /* what is printed is a float32, whole: nine digits give it back */
        char text[32];
        snprintf(text, sizeof text, "%.9g", (double)(float)out->logprobs[i]);
        ck_assert_double_eq(strtod(text, NULL), out->logprobs[i]);
    }
}

void check_same_tokens(const tokens_t *a, const tokens_t *b, const char *what)
{
    ck_assert_msg(a->n == b->n, "%s: %zu tokens, not %zu", what, b->n, a->n);
    for (size_t i = 0; i < a->n; i++) {
        ck_assert_msg(a->ids[i] == b->ids[i], "%s: token %zu is %lld, not %lld", what, i,
                      (long long)b->ids[i], (long long)a->ids[i]);
        ck_assert_msg(a->logprobs[i] == b->logprobs[i], "%s: logprob %zu is %.9g, not %.9g", what,
                      i, b->logprobs[i], a->logprobs[i]);
    }
}

/* ---- load ---- */

void read_load(const cluster_t *c, load_t *out)
{
    json_t *info = cluster_call(c, "GET", "/server_info", NULL, 200, NULL);
    *out = (load_t){.completions = json_int_at(info, "open_completions")};
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(info, "engines"), i, row)
    {
        out->kv_used += json_int_at(row, "kv_blocks_used");
        out->running += json_int_at(row, "running");
        out->waiting += json_int_at(row, "waiting");
        out->preemptions += json_int_at(row, "preemptions");
    }
    json_decref(info);
}

static bool is_quiet(void *ctx)
{
    load_t l;
    read_load(ctx, &l);
    return l.kv_used == 0 && l.running == 0 && l.waiting == 0 && l.completions == 0;
}

void wait_quiet(const cluster_t *c, const char *what)
{
    wait_for(is_quiet, (void *)c, 20, what);
}
