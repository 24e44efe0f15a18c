#include "tests/cluster/rl_kit.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATIENCE_S 30

const char *rl_fixture(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/models/%s", test_fixtures(), name);
    return path;
}

const char *rl_make(const model_maker_t *maker)
{
    static char paths[8][512];
    static unsigned n;
    char *path = paths[n % LK_ARRAY_LEN(paths)];
    lk_error_t err = LK_ERROR_INIT;
    snprintf(path, sizeof paths[0], "%s/model-%u", test_tmpdir(), n++);
    ck_assert_msg(model_maker_write(maker, path, &err) == LK_OK, "%s", err.text);
    return path;
}

const char *rl_make_model(model_arch_t arch, uint64_t seed, uint32_t max_positions)
{
    model_maker_t maker;
    model_maker_init(&maker, arch);
    maker.seed = seed;
    maker.max_position_embeddings =
        max_positions != 0 ? max_positions : maker.max_position_embeddings;
    return rl_make(&maker);
}

/* ---- counters ---- */

counters_t rl_counters(const cluster_t *c)
{
    json_t *info = cluster_call(c, "GET", "/server_info", NULL, 200, NULL);
    const json_t *engines = json_object_get(info, "engines");
    counters_t out = {.n_ranks = json_array_size(engines)};
    ck_assert_uint_ge(out.n_ranks, 1);
    ck_assert_uint_le(out.n_ranks, RL_MAX_RANKS);
    for (size_t r = 0; r < out.n_ranks; r++) {
        const json_t *e = json_array_get(engines, r);
        out.rank[r].steps = json_int_at(e, "steps");
        out.rank[r].dummy_steps = json_int_at(e, "dummy_steps");
        out.rank[r].rounds = json_int_at(e, "round");
        out.rank[r].wave = json_int_at(e, "wave");
        out.rank[r].tokens = json_int_at(e, "generation_tokens");
        out.rank[r].waiting = json_int_at(e, "waiting");
        out.rank[r].running = json_int_at(e, "running");
        out.rank[r].paused = json_is_true(json_object_get(e, "paused"));
        snprintf(out.rank[r].pause_state, sizeof out.rank[r].pause_state, "%s",
                 json_text_at(e, "pause_state"));
    }
    json_decref(info);
    return out;
}

#define SUM(field)                                                                                 \
    json_int_t sum = 0;                                                                            \
    for (size_t r = 0; r < counters->n_ranks; r++) {                                               \
        sum += counters->rank[r].field;                                                            \
    }                                                                                              \
    return sum

json_int_t rl_tokens(const counters_t *counters)
{
    SUM(tokens);
}

json_int_t rl_waiting(const counters_t *counters)
{
    SUM(waiting);
}

json_int_t rl_running(const counters_t *counters)
{
    SUM(running);
}

void rl_assert_frozen(const cluster_t *c, int polls)
{
    counters_t before = rl_counters(c);
    for (int i = 0; i < polls; i++) {
        counters_t now = rl_counters(c);
        for (size_t r = 0; r < now.n_ranks; r++) {
            ck_assert_msg(now.rank[r].steps == before.rank[r].steps &&
                              now.rank[r].tokens == before.rank[r].tokens,
                          "rank %zu went from step %lld to %lld, token %lld to %lld", r,
                          (long long)before.rank[r].steps, (long long)now.rank[r].steps,
                          (long long)before.rank[r].tokens, (long long)now.rank[r].tokens);
        }
    }
}

typedef struct {
    const cluster_t *c;
    json_int_t n;
    const char *state;
} question_t;

static bool busy(void *ctx)
{
    question_t *q = ctx;
    counters_t now = rl_counters(q->c);
    for (size_t r = 0; r < now.n_ranks; r++) {
        if (now.rank[r].running == 0 || now.rank[r].tokens == 0) {
            return false;
        }
    }
    return rl_running(&now) == q->n;
}

void rl_wait_busy(const cluster_t *c, json_int_t n)
{
    wait_for(busy, &(question_t){.c = c, .n = n}, PATIENCE_S, "every rank has requests running");
}

static bool more_tokens(void *ctx)
{
    question_t *q = ctx;
    counters_t now = rl_counters(q->c);
    return rl_tokens(&now) > q->n;
}

void rl_wait_tokens(const cluster_t *c)
{
    counters_t now = rl_counters(c);
    wait_for(more_tokens, &(question_t){.c = c, .n = rl_tokens(&now)}, PATIENCE_S,
             "tokens are generated");
}

static bool waiting(void *ctx)
{
    question_t *q = ctx;
    counters_t now = rl_counters(q->c);
    return rl_waiting(&now) == q->n;
}

void rl_wait_waiting(const cluster_t *c, json_int_t n)
{
    wait_for(waiting, &(question_t){.c = c, .n = n}, PATIENCE_S, "that many requests wait");
}

static bool idle(void *ctx)
{
    question_t *q = ctx;
    json_t *info = cluster_call(q->c, "GET", "/server_info", NULL, 200, NULL);
    bool all = json_int_at(info, "open_completions") == 0;
    const json_t *engines = json_object_get(info, "engines");
    for (size_t r = 0; r < json_array_size(engines); r++) {
        const json_t *e = json_array_get(engines, r);
        bool lockstep = json_is_true(json_object_get(e, "lockstep"));
        all = all && json_int_at(e, "waiting") + json_int_at(e, "running") == 0 &&
              !(lockstep && json_is_true(json_object_get(e, "run")));
    }
    json_decref(info);
    return all;
}

void rl_wait_idle(const cluster_t *c)
{
    wait_for(idle, &(question_t){.c = c}, PATIENCE_S, "every rank is idle");
}

static bool in_pause_state(void *ctx)
{
    question_t *q = ctx;
    counters_t now = rl_counters(q->c);
    for (size_t r = 0; r < now.n_ranks; r++) {
        if (strcmp(now.rank[r].pause_state, q->state) != 0) {
            return false;
        }
    }
    return true;
}

void rl_wait_pause_state(const cluster_t *c, const char *state)
{
    wait_for(in_pause_state, &(question_t){.c = c, .state = state}, PATIENCE_S, state);
}

/* ---- processes ---- */

pid_t rl_pid_of(const cluster_t *c, unsigned rank)
{
    pid_t pids[8];
    size_t n = cluster_pids(c, "lockstep-engine", pids, LK_ARRAY_LEN(pids));
    for (size_t i = 0; i < n; i++) {
        char path[64], line[4096], want[40];
        snprintf(path, sizeof path, "/proc/%d/cmdline", (int)pids[i]);
        FILE *f = fopen(path, "r");
        size_t len = f != NULL ? fread(line, 1, sizeof line, f) : 0;
        if (f != NULL) {
            fclose(f);
        }
        size_t want_len =
            (size_t)snprintf(want, sizeof want, "--data-parallel-rank%c%u", 0, rank) + 1;
        if (memmem(line, len, want, want_len) != NULL) {
            return pids[i];
        }
    }
    ck_abort_msg("no engine %u", rank);
    return 0;
}

bool rl_log_says(const cluster_t *c, const char *text)
{
    char line[4096];
    bool found = false;
    FILE *f = fopen(c->log, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        found |= strstr(line, text) != NULL;
    }
    if (f != NULL) {
        fclose(f);
    }
    return found;
}

/* ---- requests ---- */

const char *rl_body(uint32_t first, uint32_t n_prompt, uint32_t max_tokens)
{
    static char body[8192];
    size_t n = (size_t)snprintf(body, sizeof body, "{\"prompt\":[");
    for (uint32_t i = 0; i < n_prompt; i++) {
        n += (size_t)snprintf(body + n, sizeof body - n, "%s%u", i > 0 ? "," : "",
                              8 + (first + i) % 240);
    }
    snprintf(body + n, sizeof body - n,
             "],\"max_tokens\":%u,\"temperature\":0,\"ignore_eos\":true,\"return_token_ids\":true,"
             "\"seed\":1}",
             max_tokens);
    return body;
}

cluster_async_t rl_complete(const cluster_t *c, unsigned rank, uint32_t first, uint32_t n_prompt,
                            uint32_t max_tokens)
{
    char pin[64];
    snprintf(pin, sizeof pin, "X-data-parallel-rank: %u", rank);
    return cluster_call_async_with(c, "POST", "/v1/completions",
                                   rl_body(first, n_prompt, max_tokens),
                                   (const char *const[]){pin, NULL});
}

const json_t *rl_join(cluster_async_t *a, const char *finish_reason, json_t **reply)
{
    int status = 0;
    *reply = cluster_join(a, PATIENCE_S, &status);
    char *text = json_dumps(*reply, JSON_COMPACT);
    ck_assert_msg(status == 200, "%d: %.500s", status, text);
    const json_t *choice = json_array_get(json_object_get(*reply, "choices"), 0);
    ck_assert_str_eq(json_text_at(choice, "finish_reason"), finish_reason);
    ck_assert_uint_eq(json_array_size(json_object_get(choice, "token_ids")),
                      (size_t)json_int_at(*reply, "usage.completion_tokens"));
    free(text);
    return choice;
}

void rl_abort_requests(const cluster_t *c)
{
    json_decref(cluster_call(c, "POST", "/abort_requests", "{}", 200, NULL));
    rl_wait_idle(c);
}

/* ---- the same calls two ways ---- */

lst_t *rl_open(const cluster_t *c)
{
    char err[512] = "";
    lst_t *lst = NULL;
    lst_options_t options = {.endpoint = c->trainer};
    ck_assert_msg(lst_open(&options, &lst, err, sizeof err) == LST_OK, "%s", err);
    return lst;
}

static int http_of(lst_status_t status)
{
    return lk_status_http((lk_status_t)status);
}

int rl_call(const cluster_t *c, lst_t *lst, rl_way_t way, const char *call, const char *args,
            const char **text)
{
    static char copy[16384];
    const char *reply = "";
    int status = 0;
    if (way == RL_TRAINER) {
        lst_status_t st = lst_call(lst, call, args, &reply);
        status = st == LST_OK ? 200 : http_of(st);
        snprintf(copy, sizeof copy, "%s", st == LST_OK ? reply : lst_last_error(lst));
    } else {
        char path[128];
        snprintf(path, sizeof path, "/%s", call);
        bool get = strncmp(call, "is_", 3) == 0 || strcmp(call, "weight_info") == 0;
        json_t *json =
            cluster_call(c, get ? "GET" : "POST", path, args != NULL ? args : "{}", 0, &status);
        char *dump = json_dumps(json, JSON_COMPACT);
        snprintf(copy, sizeof copy, "%s", dump);
        free(dump);
        json_decref(json);
    }
    if (text != NULL) {
        *text = copy;
    }
    return status;
}
