/*
 * Weight updates with real processes, through the trainer's library and through HTTP: spellings,
 * dtypes, packing, whole and partial models, versions, and everything that is refused. What is held
 * is compared by digests and by the tokens that come out.
 */
#include "base/check.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const tcp_ep[] = {"--data-parallel-size",
                                     "2",
                                     "--enable-expert-parallel",
                                     "--dtype",
                                     "float32",
                                     "--weight-transfer-config",
                                     "{\"backend\":\"tcp\"}",
                                     NULL};
static const char *const tcp_dense[] = {
    "--data-parallel-size",  "2", "--dtype", "float32", "--weight-transfer-config",
    "{\"backend\":\"tcp\"}", NULL};

/* ---- every spelling, dtype and packing; the tokens of a cluster that started with them ---- */

static void push_all_ways(lst_t *lst, const char *dir)
{
    rl_must(lst, lst_init_tcp(lst, &(lst_tcp_options_t){.connections = 2}), "init");
    for (uint64_t k = 0; k < 2 * 2 * RL_N_SPELLINGS; k++) {
        char version[32];
        snprintf(version, sizeof version, "set-%llu", (unsigned long long)k);
        lk_dtype_t dtype = k / RL_N_SPELLINGS % 2 ? LK_DTYPE_F32 : LK_DTYPE_BF16;
        rl_weights_t plain = rl_weights(dir, 100 + k, dtype);
        rl_weights_t spelled = rl_spell(&plain, (rl_spelling_t)(k % RL_N_SPELLINGS));
        ck_assert(k % RL_N_SPELLINGS == RL_CANONICAL || spelled.n < plain.n ||
                  strstr(dir, "moe") == NULL);
        rl_push(lst, &spelled, k / RL_N_SPELLINGS / 2, version);
        rl_assert_holds(lst, &plain, version);
        rl_weights_fini(&spelled);
        rl_weights_fini(&plain);
    }
}

static const struct {
    model_arch_t arch;
    bool tied;
    const char *const *args;
} models[] = {{ARCH_QWEN3_MOE, false, tcp_ep}, {ARCH_QWEN2, true, tcp_dense}};

static const char *make_seed(size_t m, uint64_t seed)
{
    model_maker_t maker;
    model_maker_init(&maker, models[m].arch);
    maker.seed = seed;
    maker.tie_word_embeddings = models[m].tied;
    return rl_make(&maker);
}

START_TEST(any_spelling_gives_the_weights_of_that_checkpoint)
{
    cluster_t a, b;
    char dir_a[512];
    snprintf(dir_a, sizeof dir_a, "%s", make_seed((size_t)_i, 1));
    cluster_start(&a, dir_a, models[_i].args);
    lst_t *lst = rl_open(&a);
    push_all_ways(lst, dir_a);
    rl_weights_t w = rl_weights(dir_a, 2, LK_DTYPE_BF16);
    if (models[_i].tied) { /* both names of the one tensor: they agree */
        const lst_tensor_t *embed = rl_find(&w, "model.embed_tokens.weight");
        rl_weights_t twice = rl_spell(&w, RL_CANONICAL);
        twice.t = realloc(twice.t, (twice.n + 1) * sizeof *twice.t);
        twice.t[twice.n] = *embed;
        twice.t[twice.n].name = "lm_head.weight";
        twice.n++;
        rl_push(lst, &twice, true, "twice");
        rl_assert_holds(lst, &w, "twice");
        twice.n--;
        rl_weights_fini(&twice);
    }
    rl_push(lst, &w, false, "b");
    rl_assert_holds(lst, &w, "b");
    json_t *tokens[4];
    for (uint32_t i = 0; i < 4; i++) {
        tokens[i] = rl_tokens_of(&a, 20 * i, 48);
    }
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&a), 0);

    cluster_start(&b, make_seed((size_t)_i, 2), models[_i].args);
    for (uint32_t i = 0; i < 4; i++) {
        json_t *want = rl_tokens_of(&b, 20 * i, 48);
        ck_assert(json_equal(tokens[i], want));
        json_decref(want);
        json_decref(tokens[i]);
    }
    ck_assert_int_eq(cluster_stop(&b), 0);
    rl_weights_fini(&w);
}
END_TEST

/* ---- parts of the model, several updates in a session ---- */

START_TEST(parts_of_a_model)
{
    cluster_t c;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", make_seed(0, 1));
    cluster_start(&c, dir, tcp_ep);
    lst_t *lst = rl_open(&c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    rl_weights_t old = rl_weights(dir, 1, LK_DTYPE_BF16), new = rl_weights(dir, 9, LK_DTYPE_BF16);
    rl_assert_holds(lst, &old, "default");
    /* every third tensor, three calls, one of them empty */
    lst_tensor_t part[1024];
    size_t n = 0;
    for (size_t i = 0; i < old.n; i += 3) {
        ck_assert_uint_lt(n, LK_ARRAY_LEN(part));
        part[n++] = new.t[i];
        const void *keep = old.t[i].data;
        old.t[i].data = new.t[i].data; /* what the ranks are to hold */
        new.t[i].data = keep;
    }
    lst_update_options_t packed = {.packed = true};
    rl_must(lst, lst_start(lst), "start");
    rl_must(lst, lst_update(lst, part, n / 2, NULL), "first half");
    rl_must(lst, lst_update(lst, part, 0, NULL), "nothing");
    rl_must(lst, lst_update(lst, part + n / 2, n - n / 2, &packed), "second half");
    rl_must(lst, lst_finish(lst, NULL), "finish");
    rl_assert_holds(lst, &old, "default"); /* without a version the label stays */
    rl_must(lst, lst_set_version(lst, "labelled"), "update_weight_version");
    rl_assert_holds(lst, &old, "labelled");
    /* a session that brings nothing changes nothing */
    rl_snapshot_t before = rl_snapshot(&c);
    rl_must(lst, lst_start(lst), "start");
    rl_must(lst, lst_abort(lst), "abort");
    rl_assert_unchanged(&c, &before);
    rl_snapshot_fini(&before);
    rl_weights_fini(&old);
    rl_weights_fini(&new);
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- calls out of order ---- */

#define T_NOT_INIT "Weight transfer not initialized. Call init_weight_transfer_engine first."
#define T_NO_START "start_weight_update must be called before update_weights."
#define T_NO_MATCH "finish_weight_update called without a matching start_weight_update."
#define T_ACTIVE                                                                                   \
    "start_weight_update called while a weight update is already active. Call "                    \
    "finish_weight_update first."

typedef struct {
    const cluster_t *c;
    lst_t *lst;
    const char *update_info;
} caller_t;

static void refuse(const caller_t *caller, const char *call, const char *args, int status,
                   const char *want)
{
    for (int way = RL_HTTP; way <= RL_TRAINER; way++) {
        const char *text;
        int got = rl_call(caller->c, caller->lst, (rl_way_t)way, call, args, &text);
        ck_assert_msg(got == status && strstr(text, want) != NULL, "%s %s: %d %s", call,
                      way == RL_HTTP ? "over HTTP" : "over the trainer's socket", got, text);
    }
}

static void accept(const caller_t *caller, const char *call, const char *args)
{
    const char *text;
    ck_assert_msg(rl_call(caller->c, caller->lst, RL_HTTP, call, args, &text) == 200, "%s: %s",
                  call, text);
}

START_TEST(calls_out_of_order_are_refused)
{
    cluster_t c;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", make_seed(0, 1));
    cluster_start(&c, dir, tcp_ep);
    lst_t *lst = rl_open(&c);
    rl_weights_t w = rl_weights(dir, 1, LK_DTYPE_BF16);
    char *info = strdup(rl_update_info(w.t, 3));
    caller_t caller = {&c, lst, info};
    rl_snapshot_t before = rl_snapshot(&c);
    refuse(&caller, "start_weight_update", "{}", 409, T_NOT_INIT);
    refuse(&caller, "update_weights", info, 409, T_NO_START);
    refuse(&caller, "finish_weight_update", "{\"weight_version\":\"x\"}", 409, T_NO_MATCH);
    accept(&caller, "abort_weight_update", "{}");
    accept(&caller, "abort_weight_update", "{}");
    rl_assert_unchanged(&c, &before);

    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    rl_must(lst, lst_init_tcp(lst, NULL), "init again");
    refuse(&caller, "update_weights", info, 409, T_NO_START);
    refuse(&caller, "finish_weight_update", "{}", 409, T_NO_MATCH);
    accept(&caller, "abort_weight_update", "{}");
    accept(&caller, "start_weight_update", "{}");
    refuse(&caller, "start_weight_update", "{}", 409, T_ACTIVE);
    refuse(&caller, "finish_weight_update", "{\"weight_version\":7}", 400, "weight_version");
    accept(&caller, "abort_weight_update", "{}");
    accept(&caller, "abort_weight_update", "{}");
    refuse(&caller, "finish_weight_update", "{}", 409, T_NO_MATCH);
    rl_assert_unchanged(&c, &before);
    rl_snapshot_fini(&before);
    /* and it still works */
    rl_weights_t next = rl_weights(dir, 5, LK_DTYPE_BF16);
    rl_push(lst, &next, true, "next");
    rl_assert_holds(lst, &next, "next");
    rl_weights_fini(&next);
    free(info);
    rl_weights_fini(&w);
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

START_TEST(without_a_backend_every_call_says_so)
{
    static const char *const none[] = {"--data-parallel-size", "2", "--device", "null", NULL};
    static const char *const text =
        "Weight transfer not configured. Please set weight_transfer_config to enable weight "
        "transfer.";
    cluster_t c;
    cluster_start(&c, rl_fixture("qwen3"), none);
    lst_t *lst = rl_open(&c);
    caller_t caller = {&c, lst, NULL};
    refuse(&caller, "init_weight_transfer_engine", "{\"init_info\":{}}", 409, text);
    refuse(&caller, "start_weight_update", "{}", 409, text);
    refuse(&caller, "update_weights", "{\"update_info\":{}}", 409, text);
    refuse(&caller, "finish_weight_update", "{}", 409, text);
    accept(&caller, "update_weight_version", "{\"new_version\":\"v1\"}");
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- bodies and tensors that are refused before anything is received ---- */

#define REFUSED 400
static const struct {
    const char *call, *args;
    const char *texts[4]; /* all of them in the answer */
} bad_calls[] = {
    {"init_weight_transfer_engine", "{}", {"Missing 'init_info' in request body"}},
    {"init_weight_transfer_engine", "{\"init_info\":3}", {"init_info"}},
    {"init_weight_transfer_engine", "{\"init_info\":{}}", {"Invalid init_info for tcp: missing"}},
    {"init_weight_transfer_engine",
     "{\"init_info\":{\"master_address\":\"127.0.0.1\",\"master_port\":0,\"session_token\":\"t\"}}",
     {"master_port"}},
    {"init_weight_transfer_engine",
     "{\"init_info\":{\"master_address\":\"127.0.0.1\",\"master_port\":9,\"session_token\":"
     "\"0123456789abcdef\",\"rank_offset\":1,\"world_size\":2}}",
     {"world_size is 2, but rank_offset 1 and 2 ranks here need at least 3"}},
    {"init_weight_transfer_engine",
     "{\"init_info\":{\"master_address\":\"127.0.0.1\",\"master_port\":9,\"session_token\":"
     "\"0123456789abcdef\",\"rank_offset\":4,\"world_size\":5}}",
     {"world_size is 5, but rank_offset 4"}},
    {"update_weights", "{}", {"Missing 'update_info' in request body"}},
    {"update_weights", "{\"update_info\":\"all\"}", {"update_info"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"lm_head.weight\"],\"dtype_names\":[],\"shapes\":[[2]]}}",
     {"`dtype_names` should be of the same size as `names`: got 0 and 1"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"lm_head.weight\"],\"dtype_names\":[\"bfloat16\"],"
     "\"shapes\":[]}}",
     {"`shapes` should be of the same size as `names`: got 0 and 1"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"lm_head.weight\"],\"dtype_names\":[\"complex64\"],"
     "\"shapes\":[[512,64]]}}",
     {"complex64"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"no.such.weight\",\"module.lm_head.weight\","
     "\"model.norm.weight\"],\"dtype_names\":[\"bfloat16\",\"bfloat16\",\"bfloat16\"],"
     "\"shapes\":[[1],[512,64],[65]]}}",
     {"3 tensors do not fit the model", "no.such.weight", "send it as lm_head.weight",
      "model.norm.weight"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"model.norm.weight\",\"model.norm.weight\"],\"dtype_names\":"
     "[\"bfloat16\",\"bfloat16\"],\"shapes\":[[64],[64]]}}",
     {"model.norm.weight", "twice"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"model.norm.weight\"],\"dtype_names\":[\"bfloat16\"],"
     "\"shapes\":[[-64]]}}",
     {"shape"}},
    {"update_weights",
     "{\"update_info\":{\"names\":[\"model.norm.weight\"],\"dtype_names\":[\"bfloat16\"],"
     "\"shapes\":[[4294967296,4294967296,4294967296]]}}",
     {"model.norm.weight"}},
    {"finish_weight_update", "{\"weight_version\":[1]}", {"weight_version"}},
    {"update_weight_version", "{}", {"Missing 'new_version' in request body"}},
    {"update_weight_version", "{\"new_version\":1}", {"new_version"}},
    {"start_weight_update", "{\"is_checkpoint_format\":false}", {"is_checkpoint_format"}},
};

START_TEST(ill_formed_calls_change_nothing)
{
    cluster_t c;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", make_seed(0, 1));
    cluster_start(&c, dir, tcp_ep);
    lst_t *lst = rl_open(&c);
    caller_t caller = {&c, lst, NULL};
    rl_snapshot_t before = rl_snapshot(&c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    for (int open = 0; open < 2; open++) { /* outside of a session, and in one */
        if (open) {
            rl_must(lst, lst_start(lst), "start");
        }
        for (size_t i = 0; i < LK_ARRAY_LEN(bad_calls); i++) {
            bool init = strncmp(bad_calls[i].call, "init", 4) == 0;
            bool order = !open && (strncmp(bad_calls[i].call, "upd", 3) == 0 ||
                                   strncmp(bad_calls[i].call, "fin", 3) == 0);
            for (size_t k = 0; k < 4 && bad_calls[i].texts[k] != NULL && !order && !init; k++) {
                refuse(&caller, bad_calls[i].call, bad_calls[i].args, REFUSED,
                       bad_calls[i].texts[k]);
            }
            if (init && !open) {
                refuse(&caller, bad_calls[i].call, bad_calls[i].args, REFUSED,
                       bad_calls[i].texts[0]);
            }
        }
    }
    rl_must(lst, lst_abort(lst), "abort");
    rl_assert_unchanged(&c, &before);
    /* the connection of before is still good */
    rl_weights_t next = rl_weights(dir, 5, LK_DTYPE_BF16);
    rl_push(lst, &next, true, "next");
    rl_assert_holds(lst, &next, "next");
    rl_weights_fini(&next);
    rl_snapshot_fini(&before);
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

/* ---- versions in replies; no pause asked for; keys that repeat a call ---- */

static const json_t *spans(const json_t *choice, const char *field)
{
    const json_t *array = json_object_get(choice, field);
    ck_assert_msg(json_is_array(array), "no %s", field);
    json_int_t end = 0;
    for (size_t i = 0; i < json_array_size(array); i++) {
        ck_assert_int_eq(json_int_at(json_array_get(array, i), "start"), end);
        end = json_int_at(json_array_get(array, i), "end");
    }
    return array;
}

/* Updates in the middle of a stream: how: 0 keep with the KV kept, 1 keep with it cleared, 2 no
 * pause at all. */
static void update_in_mid_stream(const cluster_t *c, lst_t *lst, const rl_weights_t *w, int how,
                                 const char *from, const char *to)
{
    json_t *reply;
    cluster_async_t run = rl_complete(c, 1, 5, 10, 400);
    rl_wait_tokens(c);
    if (how < 2) {
        rl_must(lst, lst_pause(lst, "keep", how == 1), "pause");
    }
    rl_must(lst, lst_start(lst), "start");
    rl_assert_frozen(c, 5); /* the session gates the steps by itself */
    rl_must(lst, lst_update(lst, w->t, w->n, NULL), "update");
    rl_assert_frozen(c, 5);
    rl_must(lst, lst_finish(lst, to), "finish");
    if (how < 2) {
        rl_assert_frozen(c, 5);
        rl_must(lst, lst_resume(lst), "resume");
    }
    const json_t *choice = rl_join(&run, "length", &reply);
    const json_t *versions = spans(choice, "weight_versions");
    ck_assert_uint_eq(json_array_size(versions), 2);
    ck_assert_str_eq(json_text_at(versions, "0.version"), from);
    ck_assert_str_eq(json_text_at(versions, "1.version"), to);
    ck_assert_int_eq(json_int_at(versions, "1.end"), 400);
    const json_t *kv = spans(choice, "kv_versions");
    json_int_t positions = json_int_at(kv, json_array_size(kv) == 1 ? "0.end" : "1.end");
    ck_assert_int_eq(positions, 10 + 400 - 1);
    ck_assert_uint_eq(json_array_size(kv), how == 0 ? 2 : 1); /* recomputed under the new ones */
    json_decref(reply);
}

START_TEST(replies_say_which_weights)
{
    cluster_t c;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", make_seed(0, 1));
    cluster_start(&c, dir, tcp_ep);
    lst_t *lst = rl_open(&c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    static const char *const names[] = {"default", "a", "b", "c"};
    for (int how = 0; how < 3; how++) {
        rl_weights_t w = rl_weights(dir, 50 + (uint64_t)how, LK_DTYPE_BF16);
        update_in_mid_stream(&c, lst, &w, how, names[how], names[how + 1]);
        rl_weights_fini(&w);
    }
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

static void call_with_key(const cluster_t *c, const char *call, const char *args, const char *key,
                          int want)
{
    char header[128];
    int status;
    snprintf(header, sizeof header, "Idempotency-Key: %s", key);
    cluster_async_t a =
        cluster_call_async_with(c, "POST", call, args, (const char *const[]){header, NULL});
    json_t *reply = cluster_join(&a, 30, &status);
    char *text = json_dumps(reply, 0);
    ck_assert_msg(status == want, "%s with key %s: %d %s", call, key, status, text);
    free(text);
    json_decref(reply);
}

START_TEST(a_key_repeats_the_answer_not_the_call)
{
    cluster_t c;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", make_seed(0, 1));
    cluster_start(&c, dir, tcp_ep);
    lst_t *lst = rl_open(&c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    for (int i = 0; i < 2; i++) {
        call_with_key(&c, "/start_weight_update", "{}", "one", 200);
        call_with_key(&c, "/start_weight_update", "{}", "two", 409);
    }
    for (int i = 0; i < 2; i++) {
        call_with_key(&c, "/finish_weight_update", "{\"weight_version\":\"k\"}", "three", 200);
        call_with_key(&c, "/finish_weight_update", "{\"weight_version\":\"k\"}", "four", 409);
    }
    json_t *info = cluster_call(&c, "GET", "/weight_info", NULL, 200, NULL);
    ck_assert_int_eq(json_int_at(info, "ranks.0.epoch"), json_int_at(info, "ranks.1.epoch"));
    ck_assert_str_eq(json_text_at(info, "weight_version"), "k");
    json_decref(info);
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("update");
    TCase *tc = tcase_create("update");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, any_spelling_gives_the_weights_of_that_checkpoint, 0,
                        LK_ARRAY_LEN(models));
    tcase_add_test(tc, parts_of_a_model);
    tcase_add_test(tc, calls_out_of_order_are_refused);
    tcase_add_test(tc, without_a_backend_every_call_says_so);
    tcase_add_test(tc, ill_formed_calls_change_nothing);
    tcase_add_test(tc, replies_say_which_weights);
    tcase_add_test(tc, a_key_repeats_the_answer_not_the_call);
    suite_add_tcase(s, tc);
    return s;
}
