#include "api_frontend/reply_cache.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    api_call_t base;
    int *status;
    char *text;
} call_t;

static void reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    call_t *c = (call_t *)call;
    *c->status = http_status;
    snprintf(c->text, 32, "%.*s", (int)len, body);
}

static void destroy(api_call_t *call)
{
    free(call);
}

static const api_call_ops_t ops = {.reply = reply, .destroy = destroy};

static int status[64];
static char text[64][32];

static api_call_t *make(int i, const char *key)
{
    call_t *c = calloc(1, sizeof *c);
    c->base.ops = &ops;
    c->status = &status[i];
    c->text = text[i];
    status[i] = 0;
    snprintf(c->base.idempotency_key, sizeof c->base.idempotency_key, "%s", key);
    return &c->base;
}

START_TEST(test_join_and_repeat)
{
    reply_cache_t *cache = reply_cache_new(4);
    api_call_t *first = make(0, "k");
    ck_assert_int_eq(reply_cache_enter(cache, first, "pause", 1), REPLY_CACHE_RUN);
    ck_assert_int_eq(reply_cache_enter(cache, make(1, "k"), "pause", 1), REPLY_CACHE_TAKEN);
    ck_assert_int_eq(status[1], 0);
    api_call_t *other = make(2, "k");
    ck_assert_int_eq(reply_cache_enter(cache, other, "pause", 2), REPLY_CACHE_OTHER);
    ck_assert_int_eq(reply_cache_enter(cache, other, "resume", 2), REPLY_CACHE_RUN);
    api_call_reply(first, 504, "{}", 2);
    ck_assert_int_eq(status[0], 504);
    ck_assert_int_eq(status[1], 504);
    ck_assert_int_eq(reply_cache_enter(cache, make(3, "k"), "pause", 1), REPLY_CACHE_TAKEN);
    ck_assert_int_eq(status[3], 504);
    ck_assert_str_eq(text[3], "{}");
    api_call_reply(other, 200, "{\"x\":1}", 7);
    reply_cache_destroy(&cache);
}
END_TEST

START_TEST(test_bounded)
{
    reply_cache_t *cache = reply_cache_new(2);
    api_call_t *calls[3];
    static const char *const keys[] = {"a", "b", "c"};
    for (int i = 0; i < 2; i++) {
        calls[i] = make(i, keys[i]);
        ck_assert_int_eq(reply_cache_enter(cache, calls[i], "x", 0), REPLY_CACHE_RUN);
    }
    calls[2] = make(2, keys[2]);
    ck_assert_int_eq(reply_cache_enter(cache, calls[2], "x", 0), REPLY_CACHE_FULL);
    api_call_reply(calls[1], 200, "{}", 2);
    ck_assert_int_eq(reply_cache_enter(cache, calls[2], "x", 0), REPLY_CACHE_RUN);
    /* b was forgotten for it: the key runs again once there is room */
    api_call_reply(calls[0], 200, "{}", 2);
    calls[1] = make(3, "b");
    ck_assert_int_eq(reply_cache_enter(cache, calls[1], "x", 0), REPLY_CACHE_RUN);
    api_call_reply(calls[1], 200, "{}", 2);
    api_call_reply(calls[2], 200, "{}", 2);
    reply_cache_destroy(&cache);
}
END_TEST

START_TEST(test_client_of_a_joined_call_leaves)
{
    reply_cache_t *cache = reply_cache_new(2);
    api_call_t *first = make(0, "k"), *joined = make(1, "k");
    ck_assert_int_eq(reply_cache_enter(cache, first, "x", 0), REPLY_CACHE_RUN);
    ck_assert_int_eq(reply_cache_enter(cache, joined, "x", 0), REPLY_CACHE_TAKEN);
    api_call_client_gone(joined);
    api_call_client_gone(first); /* the call itself goes on */
    api_call_reply(first, 200, "{}", 2);
    ck_assert_int_eq(status[0], 0);
    ck_assert_int_eq(status[1], 0);
    ck_assert_int_eq(reply_cache_enter(cache, make(2, "k"), "x", 0), REPLY_CACHE_TAKEN);
    ck_assert_int_eq(status[2], 200);
    reply_cache_destroy(&cache);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("reply_cache");
    TCase *tc = tcase_create("reply_cache");
    tcase_add_test(tc, test_join_and_repeat);
    tcase_add_test(tc, test_bounded);
    tcase_add_test(tc, test_client_of_a_joined_call_leaves);
    suite_add_tcase(suite, tc);
    return suite;
}
