/* Server-sent events against whole replies, many at once, and clients that go away. */
#include "base/check.h"
#include "tests/lib/completions.h"
#include "tests/lib/test_main.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

static cluster_t shared;
static char shared_model[300];

static void setup(void)
{
    const char *args[] = {"--dtype",
                          "float32",
                          "--data-parallel-size",
                          "2",
                          "--enable-expert-parallel",
                          "--max-model-len",
                          "1024",
                          NULL};
    cluster_make_model("qwen3_moe", 7, shared_model, sizeof shared_model);
    cluster_start(&shared, shared_model, args);
}

static void teardown(void)
{
    ck_assert_int_eq(cluster_stop(&shared), 0);
}

#define MAX_CHOICES 8

/* What came over one stream. */
typedef struct {
    lk_buf_t text[MAX_CHOICES];
    json_t *ids[MAX_CHOICES];
    char finish[MAX_CHOICES][16];
    json_t *usage;
    size_t n_data;
    bool done, ended;
    int status;
} stream_t;

static void stream_data(void *ctx, const char *text, size_t len)
{
    stream_t *s = ctx;
    ck_assert_msg(!s->done, "data behind [DONE]: %s", text);
    if (strcmp(text, "[DONE]") == 0) {
        s->done = true;
        return;
    }
    s->n_data++;
    json_error_t err;
    json_t *event = json_loadb(text, len, JSON_ALLOW_NUL, &err);
    ck_assert_msg(event != NULL, "no JSON (%s): %s", err.text, text);
    if (json_is_object(json_object_get(event, "usage"))) {
        ck_assert_ptr_null(s->usage);
        ck_assert_uint_eq(json_array_size(json_object_get(event, "choices")), 0);
        s->usage = json_incref(json_object_get(event, "usage"));
    }
    size_t i;
    json_t *one;
    json_array_foreach(json_object_get(event, "choices"), i, one)
    {
        size_t k = (size_t)json_int_at(one, "index");
        ck_assert_uint_lt(k, MAX_CHOICES);
        ck_assert_msg(s->finish[k][0] == '\0', "choice %zu goes on behind its end", k);
        const json_t *delta = json_object_get(one, "text");
        lk_buf_append(&s->text[k], json_string_value(delta), json_string_length(delta));
        json_array_extend(s->ids[k], json_object_get(one, "token_ids"));
        if (json_is_string(json_object_get(one, "finish_reason"))) {
            snprintf(s->finish[k], sizeof s->finish[k], "%s", json_text_at(one, "finish_reason"));
        }
    }
    json_decref(event);
}

static void stream_end(void *ctx, int status, const char *error, const char *body)
{
    stream_t *s = ctx;
    s->ended = true;
    s->status = status;
    ck_assert_msg(status == 200, "the stream ended with %d %s %s", status, error, body);
}

static const http_stream_events_t stream_events = {stream_data, stream_end};

static void stream_init(stream_t *s)
{
    *s = (stream_t){0};
    for (size_t k = 0; k < MAX_CHOICES; k++) {
        lk_buf_init(&s->text[k], 0);
        s->ids[k] = json_array();
    }
}

static void stream_fini(stream_t *s)
{
    for (size_t k = 0; k < MAX_CHOICES; k++) {
        lk_buf_fini(&s->text[k]);
        json_decref(s->ids[k]);
    }
    json_decref(s->usage);
}

typedef struct {
    http_streams_t *streams;
    stream_t *s;
    size_t n;
} stream_wait_t;

static bool all_ended(void *ctx)
{
    stream_wait_t *w = ctx;
    http_streams_poll(w->streams, 20);
    size_t ended = 0;
    for (size_t i = 0; i < w->n; i++) {
        ended += w->s[i].ended;
    }
    return ended == w->n;
}

static void run_streams(http_streams_t *streams, stream_t *s, size_t n)
{
    wait_for(all_ended, &(stream_wait_t){streams, s, n}, 60, "every stream has ended");
    for (size_t i = 0; i < n; i++) {
        ck_assert_msg(s[i].done, "stream %zu ended without [DONE]", i);
    }
}

static void post_stream(http_streams_t *streams, const cluster_t *c, const char *body, stream_t *s)
{
    char url[256];
    snprintf(url, sizeof url, "%s/v1/completions", c->url);
    ck_assert_ptr_nonnull(http_streams_post(streams, url, body, NULL, &stream_events, s));
}

START_TEST(a_stream_says_what_a_reply_says)
{
    static const char ask[] =
        "{\"prompt\":[\"stream\",\"\xc3\xa4\xe2\x82\xac\"],\"n\":2,\"seed\":6,\"max_tokens\":100,"
        "\"return_token_ids\":true%s}";
    static const char *const more[] = {"", ",\"stop\":[\"a\",\"S\"]",
                                       ",\"stop\":\"e\",\"include_stop_str_in_output\":true",
                                       ",\"temperature\":0,\"logprobs\":2"};
    http_streams_t *streams = http_streams_new();
    for (size_t j = 0; j < LK_ARRAY_LEN(more); j++) {
        char rest[256], body[512];
        json_t *reply = complete(&shared, ask, more[j]);
        snprintf(rest, sizeof rest,
                 "%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}", more[j]);
        snprintf(body, sizeof body, ask, rest);
        stream_t s;
        stream_init(&s);
        post_stream(streams, &shared, body, &s);
        run_streams(streams, &s, 1);
        ck_assert(json_equal(json_object_get(json_object_get(reply, "usage"), "completion_tokens"),
                             json_object_get(s.usage, "completion_tokens")));
        ck_assert_int_eq(json_int_at(s.usage, "prompt_tokens"),
                         json_int_at(reply, "usage.prompt_tokens"));
        for (size_t k = 0; k < 4; k++) {
            const json_t *one = choice(reply, k);
            check_text(one, lk_buf_cstr(&s.text[k]), s.text[k].len);
            ck_assert(json_equal(s.ids[k], json_object_get(one, "token_ids")));
            ck_assert_str_eq(s.finish[k], json_text_at(one, "finish_reason"));
        }
        ck_assert_uint_gt(s.n_data, 4);
        json_decref(reply);
        stream_fini(&s);
    }
    http_streams_destroy(&streams);
}
END_TEST

#define N_STREAMS 64

START_TEST(many_streams_at_once)
{
    static stream_t s[2][N_STREAMS];
    http_streams_t *streams = http_streams_new();
    for (int round = 0; round < 2; round++) { /* the second one from the last to the first */
        for (size_t j = 0; j < N_STREAMS; j++) {
            size_t i = round == 0 ? j : N_STREAMS - 1 - j;
            char body[256];
            snprintf(body, sizeof body,
                     "{\"prompt\":\"stream number %zu\",\"max_tokens\":%zu,\"seed\":%zu,"
                     "\"stream\":true,\"return_token_ids\":true,\"ignore_eos\":true}",
                     i, 16 + i % 17, i);
            stream_init(&s[round][i]);
            post_stream(streams, &shared, body, &s[round][i]);
        }
        run_streams(streams, s[round], N_STREAMS);
    }
    for (size_t i = 0; i < N_STREAMS; i++) {
        ck_assert_uint_eq(json_array_size(s[0][i].ids[0]), 16 + i % 17);
        ck_assert_msg(json_equal(s[0][i].ids[0], s[1][i].ids[0]), "stream %zu differs", i);
        ck_assert_uint_eq(s[0][i].text[0].len, s[1][i].text[0].len);
        stream_fini(&s[0][i]);
        stream_fini(&s[1][i]);
    }
    http_streams_destroy(&streams);
}
END_TEST

/* ---- clients that go away ---- */

typedef struct {
    const cluster_t *c;
    json_int_t at_least;
    http_streams_t *streams;
} load_wait_t;

static bool has_running(void *ctx)
{
    load_wait_t *w = ctx;
    load_t l;
    if (w->streams != NULL) {
        http_streams_poll(w->streams, 1);
    }
    read_load(w->c, &l);
    return l.running >= w->at_least;
}

START_TEST(a_client_that_goes_away_frees_its_blocks)
{
    static const char ask[] = "{\"prompt\":\"going away\",\"max_tokens\":1000,\"n\":8,"
                              "\"ignore_eos\":true,\"temperature\":1.5%s}";
    wait_quiet(&shared, "the cluster is idle with no block in use");
    for (int streamed = 0; streamed <= 1; streamed++) {
        load_wait_t running = {.c = &shared, .at_least = 8};
        char body[256];
        snprintf(body, sizeof body, ask, streamed ? ",\"stream\":true" : "");
        cluster_async_t whole;
        stream_t s;
        if (streamed) {
            running.streams = http_streams_new();
            stream_init(&s);
            post_stream(running.streams, &shared, body, &s);
        } else {
            whole = cluster_call_async(&shared, "POST", "/v1/completions", body);
        }
        wait_for(has_running, &running, 20, "all 8 choices run");
        if (streamed) {
            ck_assert(!s.ended);
            http_streams_destroy(&running.streams);
            stream_fini(&s);
        } else {
            kill(whole.pid, SIGKILL);
            waitpid(whole.pid, NULL, 0);
        }
        wait_quiet(&shared, "the blocks of the client that went away are free");
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("streams");
    TCase *tc = tcase_create("streams");
    tcase_set_timeout(tc, 120);
    tcase_add_unchecked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_stream_says_what_a_reply_says);
    tcase_add_test(tc, many_streams_at_once);
    tcase_add_test(tc, a_client_that_goes_away_frees_its_blocks);
    suite_add_tcase(s, tc);
    return s;
}
