/*
 * A cluster that goes on with its survivors (--data-parallel-min-size, docs/MEMBERSHIP.md): a rank
 * dies for good in the middle of a transfer; trainer and clients have a named error, the next init
 * counts the ranks that are left, its session works on them, and so on down to the least number.
 */
#include "base/check.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/nccl_sock.h"
#include "transfer/device/device.h"
#include "transfer/trainer/lst.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RANKS    3
#define ANSWER_S 20

/* ---- a rank is killed while the trainer sends ---- */

static pid_t victim; /* 0: nobody */
static size_t send_limit;

/* Stands before the C library's: the tcp streams of a transfer are the only users of sendmsg. */
ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    ssize_t sent = syscall(SYS_sendmsg, fd, msg, flags);
    size_t n = sent > 0 ? (size_t)sent : 0;
    if (victim != 0 && send_limit <= n) {
        kill(victim, SIGKILL);
        victim = 0;
    }
    send_limit -= LK_MIN(send_limit, n);
    return sent;
}

static void *trap; /* one page that can't be read until somebody is dead */

static void on_trap(int signal, siginfo_t *info, void *ctx)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)info->si_addr;
    if (trap == NULL || at / page != (uintptr_t)trap / page || victim == 0) {
        _exit(42);
    }
    kill(victim, SIGKILL);
    victim = 0;
    mprotect(trap, page, PROT_READ | PROT_WRITE);
}

/* A copy of the tensor whose first page is such one. */
static void *trapped(const lst_tensor_t *t, size_t bytes)
{
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    ck_assert_int_eq(sigaction(SIGSEGV, &action, NULL), 0);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    trap = mmap(NULL, (bytes + page) / page * page, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(trap, MAP_FAILED);
    memcpy(trap, t->data, bytes);
    ck_assert_int_eq(mprotect(trap, page, PROT_NONE), 0);
    return trap;
}

typedef struct {
    const char *backend;
    bool moe;
    bool shadow;
} kind_t;

typedef struct {
    kind_t kind;
    cluster_t c;
    lst_t *lst;
    rl_weights_t weights[3];
    unsigned sent; /* weight sets so far */
    const char *model;
    device_t *device; /* of the trainer; nccl */
} world_t;

static void start(world_t *w, const kind_t *kind, const char *restarts, const char *min)
{
    char backend[64], modules[600];
    bool nccl = strcmp(kind->backend, "nccl") == 0;
    snprintf(backend, sizeof backend, "{\"backend\":\"%s\"}", kind->backend);
    const char *build = getenv("LK_BUILD_DIR");
    ck_assert_msg(build != NULL, "LK_BUILD_DIR is not set");
    snprintf(modules, sizeof modules, "%s/tests/cluster", build);
    const char *args[] = {"--device",
                          nccl ? "host-store" : "null",
                          "--data-parallel-size",
                          "3",
                          "--weight-transfer-config",
                          backend,
                          "--weight-swap",
                          kind->shadow ? "shadow" : "inplace",
                          "--engine-restarts",
                          restarts,
                          "--data-parallel-min-size",
                          min,
                          "--transfer-timeout",
                          "10",
                          nccl ? "--transfer-module-dir" : "--log-level",
                          nccl ? modules : "info",
                          kind->moe ? "--enable-expert-parallel" : NULL,
                          NULL};
    *w = (world_t){.kind = *kind};
    const char *model = rl_make_model(kind->moe ? ARCH_QWEN3_MOE : ARCH_QWEN3, 3, 8000000);
    w->model = model;
    for (unsigned i = 0; i < LK_ARRAY_LEN(w->weights); i++) {
        w->weights[i] = rl_weights(model, 4 + i, LK_DTYPE_BF16);
    }
    cluster_start(&w->c, model, args);
    w->lst = rl_open(&w->c);
    if (nccl) { /* communicators of the same kind, over plain memory */
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_msg(device_open("host", 0, &w->device, &err) == LK_OK, "%s", err.text);
        ck_assert_int_eq(lst_nccl_use(w->lst, &nccl_sock_ops, w->device), LK_OK);
    }
}

static bool generates(const world_t *w)
{
    return w->device == NULL; /* a store doesn't */
}

static void fini(world_t *w)
{
    lst_close(&w->lst);
    device_close(&w->device);
    for (unsigned i = 0; i < LK_ARRAY_LEN(w->weights); i++) {
        rl_weights_fini(&w->weights[i]);
    }
}

static lst_status_t init(world_t *w)
{
    return w->device != NULL                     ? lst_init_nccl(w->lst, NULL)
           : strcmp(w->kind.backend, "shm") == 0 ? lst_init_shm(w->lst, NULL)
                                                 : lst_init_tcp(w->lst, NULL);
}

/* ---- what the cluster says ---- */

/* "0 2 ": the DP ranks of the answer, whose places are 0, 1... */
static void expect_map(const json_t *reply, const char *ranks)
{
    char text[64] = "";
    const json_t *rows = json_object_get(reply, "ranks");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        ck_assert_int_eq(json_int_at(row, "rank"), (json_int_t)i);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%d ",
                 (int)json_int_at(row, "data_parallel_rank"));
    }
    ck_assert_str_eq(text, ranks);
    ck_assert_int_eq(json_int_at(reply, "world_size"), (json_int_t)json_array_size(rows));
}

typedef struct {
    const cluster_t *c;
    json_int_t n;
} question_t;

static bool counts(void *ctx)
{
    question_t *q = ctx;
    int status;
    json_t *reply = cluster_call(q->c, "GET", "/get_world_size", NULL, 0, &status);
    bool yes = status == 200 && json_int_at(reply, "world_size") == q->n;
    json_decref(reply);
    return yes;
}

/* The group of so many ranks has formed. */
static void wait_members(const cluster_t *c, json_int_t n, const char *ranks)
{
    wait_for(counts, &(question_t){c, n}, ANSWER_S, "the survivors' group is formed");
    json_t *reply = cluster_call(c, "GET", "/get_world_size", NULL, 200, NULL);
    expect_map(reply, ranks);
    json_decref(reply);
}

static int ask(const cluster_t *c, unsigned rank, char *message, size_t room)
{
    char headers[64];
    const char *body = "{\"prompt\":[5,6,7],\"max_tokens\":4,\"seed\":1}";
    json_t *reply;
    snprintf(headers, sizeof headers, "X-data-parallel-rank: %u\r\n", rank);
    int status =
        cluster_call_with(c, "POST", "/v1/completions", headers, body, strlen(body), &reply);
    snprintf(message, room, "%s", status == 200 ? "" : json_text_at(reply, "error.message"));
    json_decref(reply);
    return status;
}

/* Which ranks generate, as bits; the others were removed, and a request for one is told so. */
static void expect_serves(const world_t *w, unsigned members)
{
    const cluster_t *c = &w->c;
    if (!generates(w)) {
        return;
    }
    for (unsigned r = 0; r < RANKS; r++) {
        char message[1024], want[64];
        int status = ask(c, r, message, sizeof message);
        snprintf(want, sizeof want, "engine %u was removed: killed by signal 9", r);
        bool named = strstr(message, want) != NULL;
        ck_assert_msg(members >> r & 1 ? status == 200 : status == 503 && named, "rank %u: %d %s",
                      r, status, message);
    }
    for (int i = 0; i < 6; i++) { /* who does not care gets one that is there */
        json_decref(
            cluster_call(c, "POST", "/v1/completions", rl_body(3 + (unsigned)i, 4, 2), 200, NULL));
    }
}

static void expect_views(const cluster_t *c, unsigned removed)
{
    json_t *health = cluster_call(c, "GET", "/health", NULL, 200, NULL);
    ck_assert_int_eq(json_int_at(health, "removed.0.rank"), removed);
    ck_assert_ptr_nonnull(strstr(json_text_at(health, "removed.0.why"), "killed by signal 9"));
    json_decref(health);
    json_t *info = cluster_call(c, "GET", "/server_info", NULL, 200, NULL);
    ck_assert_int_eq(json_int_at(info, "group.removed.0.rank"), removed);
    ck_assert_uint_eq(json_array_size(json_object_get(info, "engines")), RANKS - 1);
    ck_assert_int_eq(json_int_at(info, "engines.1.members"), RANKS - 1);
    ck_assert_int_eq(json_int_at(info, "engines.1.place"), 1);
    json_decref(info);
}

/* ---- sessions ---- */

/* The next weight set, on every rank that is left. */
static void push(world_t *w)
{
    char version[32];
    const rl_weights_t *weights = &w->weights[w->sent++ % LK_ARRAY_LEN(w->weights)];
    snprintf(version, sizeof version, "step-%u", w->sent);
    rl_must(w->lst, init(w), "init");
    rl_push(w->lst, weights, true, version);
    rl_assert_holds(w->lst, weights, version);
}

/* An update in whose middle `rank` dies. */
static void lose_in_transfer(world_t *w, unsigned rank)
{
    const rl_weights_t *weights = &w->weights[w->sent % LK_ARRAY_LEN(w->weights)];
    rl_must(w->lst, init(w), "init");
    rl_must(w->lst, lst_start(w->lst), "start");
    size_t last = weights->n - 1, bytes = 2;
    for (unsigned d = 0; d < weights->t[last].ndim; d++) {
        bytes *= weights->t[last].shape[d];
    }
    lst_tensor_t *t = (lst_tensor_t *)&weights->t[last];
    const void *data = t->data;
    victim = rl_pid_of(&w->c, rank);
    if (strcmp(w->kind.backend, "tcp") != 0) {
        t->data = trapped(t, bytes);
    } else {
        send_limit = 100000;
    }
    lst_update_options_t how = {.packed = w->device != NULL, .packed_buffer_size_bytes = 100000};
    lst_status_t st = lst_update(w->lst, weights->t, weights->n, &how);
    t->data = data;
    trap = NULL;
    ck_assert_int_eq(victim, 0);
    ck_assert_msg(st < 0, "the update did not fail");
    char name[2][32];
    snprintf(name[0], sizeof name[0], "rank %u", rank);
    snprintf(name[1], sizeof name[1], "engine %u", rank);
    const char *said = lst_last_error(w->lst);
    ck_assert_msg(strstr(said, name[0]) != NULL || strstr(said, name[1]) != NULL, "%s", said);
}

/* 503, with the name of who is lost. */
static bool is_named(int status, const char *text, unsigned lost)
{
    char name[2][32];
    snprintf(name[0], sizeof name[0], "rank %u", lost);
    snprintf(name[1], sizeof name[1], "engine %u", lost);
    return status == 503 && (strstr(text, name[0]) != NULL || strstr(text, name[1]) != NULL);
}

/* The request of the lost rank has an answer that says so. Those of the others, too, if their
 * weights are half updated; else (in mid-transfer nothing may have come yet) they go on, until
 * they are aborted here. */
static void expect_answers(const cluster_t *c, cluster_async_t *requests, unsigned lost, bool go_on)
{
    for (unsigned i = 0; i < RANKS; i++) {
        unsigned r = (lost + i) % RANKS; /* the lost one's first */
        if (i == 1) {
            wait_members(c, RANKS - 1, "0 2 ");
            for (unsigned k = 0; k < RANKS; k++) {
                ck_assert(!go_on || k == lost || cluster_async_pending(&requests[k]));
            }
            json_decref(cluster_call(c, "POST", "/abort_requests", "{}", 200, NULL));
        }
        int status;
        json_t *reply = cluster_join(&requests[r], ANSWER_S, &status);
        char *text = json_dumps(reply, 0);
        bool aborted = status == 200 && strstr(text, "\"abort\"") != NULL;
        ck_assert_msg(is_named(status, text, lost) ? r == lost || !go_on : r != lost && aborted,
                      "rank %u: %d %s", r, status, text);
        free(text);
        json_decref(reply);
    }
}

/* The answer to init says who is there, over HTTP and on the trainer's socket. */
static void expect_init_map(world_t *w, const char *ranks)
{
    const char *text = NULL;
    json_t *reply = cluster_call(&w->c, "POST", "/init_weight_transfer_engine",
                                 "{\"init_info\": {\"backend\": \"disk\"}}", 200, NULL);
    expect_map(reply, ranks);
    json_decref(reply);
    rl_must(w->lst,
            lst_call(w->lst, "init_weight_transfer_engine",
                     "{\"init_info\": {\"backend\": \"disk\"}}", &text),
            "init on the trainer's socket");
    reply = json_loads(text, 0, NULL);
    expect_map(reply, ranks);
    json_decref(reply);
}

static const kind_t kinds[] = {{"tcp", false, false},  {"shm", false, false},
                               {"tcp", true, false},   {"tcp", false, true},
                               {"nccl", false, false}, {"nccl", true, false}};

START_TEST(a_rank_is_lost_in_mid_transfer)
{
    world_t w;
    start(&w, &kinds[_i], "0", "1");
    const cluster_t *c = &w.c;
    push(&w);
    wait_members(c, 3, "0 1 2 ");
    cluster_async_t requests[RANKS];
    for (unsigned r = 0; generates(&w) && r < RANKS; r++) {
        requests[r] = rl_complete(c, r, 5 + r, 8, RL_ENDLESS);
    }
    if (generates(&w)) {
        rl_wait_busy(c, RANKS);
    }
    lose_in_transfer(&w, 1);
    if (generates(&w)) {
        expect_answers(c, requests, 1, w.kind.shadow);
    }
    wait_members(c, 2, "0 2 ");
    expect_views(c, 1);
    expect_init_map(&w, "0 2 ");
    if (w.kind.shadow) {
        expect_serves(&w, 5u); /* the old weights stay */
    }
    push(&w);
    expect_serves(&w, 5u);
    lose_in_transfer(&w, 0);
    wait_members(c, 1, "2 ");
    push(&w);
    expect_serves(&w, 4u);
    kill(rl_pid_of(c, 2), SIGKILL);
    ck_assert_int_eq(cluster_wait_gone(&w.c, ANSWER_S), 1);
    ck_assert(rl_log_says(c, "engine 2 ended: killed by signal 9 (Killed)"));
    ck_assert(rl_log_says(c, "0 ranks would be left, fewer than --data-parallel-min-size 1"));
    fini(&w);
}
END_TEST

/* ---- every process knows who is removed, in each of its lives ---- */

typedef struct {
    const cluster_t *c;
    char text[64];
} line_t;

static bool says(void *ctx)
{
    const line_t *line = ctx;
    return rl_log_says(line->c, line->text);
}

static void wait_line(const cluster_t *c, const char *text)
{
    line_t line = {.c = c};
    snprintf(line.text, sizeof line.text, "%s", text);
    wait_for(says, &line, ANSWER_S, text);
}

/* Until its restarts are used up. */
static void kill_for_good(const cluster_t *c, unsigned rank)
{
    char back[64];
    kill(rl_pid_of(c, rank), SIGKILL);
    snprintf(back, sizeof back, "engine %u is back", rank);
    wait_line(c, back);
    kill(rl_pid_of(c, rank), SIGKILL);
}

START_TEST(who_is_started_again_knows_it)
{
    world_t w;
    start(&w, &kinds[_i == 0 ? 0 : 2], "1", "2");
    const cluster_t *c = &w.c;
    pid_t pid;
    kill_for_good(c, 2);
    wait_members(c, 2, "0 1 ");
    expect_serves(&w, 3u);
    push(&w);
    ck_assert_uint_eq(cluster_pids(c, "lockstep-coordinator", &pid, 1), 1);
    kill(pid, SIGKILL);
    wait_line(c, "whole"); /* "found group epoch 3 whole" */
    expect_serves(&w, 3u);
    wait_members(c, 2, "0 1 ");
    ck_assert_uint_eq(cluster_pids(c, "lockstep-api", &pid, 1), 1);
    kill(pid, SIGKILL);
    wait_line(c, "front end 0 is back");
    wait_members(c, 2, "0 1 ");
    expect_serves(&w, 3u);
    push(&w);
    /* a member that is started again joins the smaller group */
    kill(rl_pid_of(c, 1), SIGKILL);
    wait_line(c, "engine 1 is back");
    wait_members(c, 2, "0 1 ");
    push(&w);
    expect_serves(&w, 3u);
    kill(rl_pid_of(c, 1), SIGKILL); /* and there are not enough for another loss */
    ck_assert_int_eq(cluster_wait_gone(&w.c, ANSWER_S), 1);
    ck_assert(rl_log_says(c, "1 ranks would be left, fewer than --data-parallel-min-size 2"));
    fini(&w);
}
END_TEST

/* Its next life can't load what is not there any more; the others need not. */
START_TEST(who_can_not_start_again_is_removed)
{
    world_t w;
    start(&w, &kinds[0], "5", "1");
    char from[600], to[600];
    snprintf(from, sizeof from, "%s/model.safetensors", w.model);
    snprintf(to, sizeof to, "%s/gone", w.model);
    ck_assert_int_eq(rename(from, to), 0);
    kill(rl_pid_of(&w.c, 2), SIGKILL);
    wait_members(&w.c, 2, "0 1 ");
    push(&w);
    json_t *health = cluster_call(&w.c, "GET", "/health", NULL, 200, NULL);
    ck_assert_msg(strstr(json_text_at(health, "removed.0.why"), "model.safetensors") != NULL, "%s",
                  json_text_at(health, "removed.0.why"));
    json_decref(health);
    lst_close(&w.lst);
    ck_assert_int_eq(cluster_stop(&w.c), 0);
    fini(&w);
}
END_TEST

START_TEST(more_than_all_is_refused)
{
    static const char *const args[] = {"--data-parallel-size", "2", "--data-parallel-min-size", "3",
                                       NULL};
    cluster_t c;
    cluster_spawn(&c, rl_fixture("qwen3"), args);
    ck_assert(!cluster_wait_ready(&c, ANSWER_S));
    ck_assert_int_eq(cluster_wait_gone(&c, ANSWER_S), 2);
    ck_assert(rl_log_says(&c, "--data-parallel-min-size 3: --data-parallel-size is 2"));
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("survivors");
    TCase *tc = tcase_create("survivors");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, a_rank_is_lost_in_mid_transfer, 0, LK_ARRAY_LEN(kinds));
    tcase_add_loop_test(tc, who_is_started_again_knows_it, 0, 2);
    tcase_add_test(tc, who_can_not_start_again_is_removed);
    tcase_add_test(tc, more_than_all_is_refused);
    suite_add_tcase(s, tc);
    return s;
}
