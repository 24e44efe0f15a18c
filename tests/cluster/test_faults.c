/*
 * test_faults.c: the fault matrix. Each of engine, coordinator, front end, trainer and launcher is
 * killed or stopped while a cluster is idle, generates, is about to pause, is paused, receives
 * weights, finishes an update, or resumes; expert parallel and dense, with updates in place and, in
 * the phases of one, with shadow swap: 180 cases. Within ten seconds every
 * client, streams included, has an answer, an error that names who is lost, or goes on; then the
 * cluster works again (generate, update, pause, resume), and at the end nothing is left behind.
 *
 * A few cases drawn from the seed, or with LK_TEST_FAULTS=all every one. One alone:
 * LK_TEST_FAULTS=42.
 */
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/test_main.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_S  10 /* the promise */
#define RANKS     2
#define N_SAMPLES 4

typedef enum { ENGINE, COORDINATOR, FRONTEND, TRAINER, LAUNCHER, N_VICTIMS } victim_t;
typedef enum { IDLE, GENERATING, PAUSING, PAUSED, TRANSFER, FINISHING, RESUMING, N_PHASES } phase_t;

static const char *const victim_names[] = {"engine", "coordinator", "front end", "trainer",
                                           "launcher"};
static const char *const programs[] = {"lockstep-engine", "lockstep-coordinator", "lockstep-api"};
static const char *const phase_names[] = {"idle",     "generating", "pausing", "paused",
                                          "transfer", "finishing",  "resuming"};

typedef struct {
    bool moe, stop, shadow;
    victim_t victim;
    phase_t phase;
    unsigned rank; /* of the engine */
} case_t;

/* First all with an update in place; then, with shadow swap, the phases of an update. */
#define N_INPLACE (2 * N_VICTIMS * 2 * N_PHASES)
#define N_CASES   (N_INPLACE + 2 * N_VICTIMS * 2 * 2)

static case_t case_of(unsigned number)
{
    if (number >= N_INPLACE) {
        unsigned n = number - N_INPLACE, moe = n / (4 * N_VICTIMS) % 2;
        return (case_t){.phase = TRANSFER + n % 2,
                        .stop = n / 2 % 2,
                        .victim = n / 4 % N_VICTIMS,
                        .moe = moe,
                        .shadow = true,
                        .rank = (n + moe) % RANKS};
    }
    return (case_t){.phase = number % N_PHASES,
                    .stop = number / N_PHASES % 2,
                    .victim = number / (2 * N_PHASES) % N_VICTIMS,
                    .moe = number / (2 * N_PHASES * N_VICTIMS) % 2,
                    .rank = number % RANKS};
}

static double now_s(void)
{
    return (double)lk_env_now_ns(lk_env_real()) / 1e9;
}

/* ---- the trainer: a process of its own that makes the calls of its phase ---- */

static size_t send_limit; /* bytes until it stops itself; 0: no limit */

/* Stands before the C library's: the tcp streams of a transfer are the only users of sendmsg. */
ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    if (send_limit == 0) {
        return syscall(SYS_sendmsg, fd, msg, flags);
    }
    size_t room = send_limit, n = 0;
    struct iovec iov[64];
    for (; n < msg->msg_iovlen && n < LK_ARRAY_LEN(iov) && room > 0; n++) {
        iov[n] = msg->msg_iov[n];
        iov[n].iov_len = LK_MIN(iov[n].iov_len, room);
        room -= iov[n].iov_len;
    }
    struct msghdr some = {.msg_iov = iov, .msg_iovlen = n};
    ssize_t sent = syscall(SYS_sendmsg, fd, &some, flags);
    send_limit -= sent > 0 ? (size_t)sent : 0;
    if (send_limit == 0) {
        raise(SIGSTOP);
    }
    return sent;
}

typedef struct {
    pid_t pid;
    int fd; /* what it says: "at" when its phase begins, then its last words */
    char text[4096];
    size_t n;
    bool ended;
} trainer_t;

static void say(int fd, const char *text)
{
    if (write(fd, text, strlen(text)) < 0) {
        _exit(1);
    }
}

static lst_status_t act(lst_t *lst, const rl_weights_t *w, phase_t phase, int fd)
{
    lst_status_t st = lst_init_tcp(lst, NULL);
    bool pauses = phase == PAUSED || phase == RESUMING,
         sends = phase == TRANSFER || phase == FINISHING;
    if (st == LST_OK && pauses) {
        st = lst_pause(lst, "keep", false);
    }
    if (st == LST_OK && sends) {
        st = lst_start(lst);
        send_limit = phase == TRANSFER ? 100000 : 0;
    }
    if (st == LST_OK && phase == FINISHING) {
        st = lst_update(lst, w->t, w->n, NULL);
    }
    if (st != LST_OK) {
        return st;
    }
    say(fd, "at ");
    switch (phase) {
    case PAUSING:
        return lst_pause(lst, "wait", false);
    case TRANSFER:
        return lst_update(lst, w->t, w->n, NULL);
    case FINISHING:
        return lst_finish(lst, "step-1");
    case RESUMING:
        return lst_resume(lst);
    default:
        for (;;) {
            pause();
        }
    }
}

static trainer_t start_trainer(const cluster_t *c, const rl_weights_t *w, phase_t phase)
{
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    fflush(stdout);
    trainer_t t = {.pid = fork(), .fd = fds[0]};
    ck_assert_int_ge(t.pid, 0);
    if (t.pid == 0) {
        char err[512] = "";
        lst_t *lst = NULL;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        lst_options_t options = {.endpoint = c->trainer, .no_progress_s = 6, .timeout_s = 8};
        lst_status_t st = lst_open(&options, &lst, err, sizeof err);
        st = st == LST_OK ? act(lst, w, phase, fds[1]) : st;
        say(fds[1], st == LST_OK ? "fine" : lst != NULL ? lst_last_error(lst) : err);
        _exit(0);
    }
    close(fds[1]);
    return t;
}

static void hear_trainer(trainer_t *t)
{
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    while (!t->ended && poll(&p, 1, 0) == 1) {
        ssize_t got = read(t->fd, t->text + t->n, sizeof t->text - 1 - t->n);
        t->ended = got <= 0;
        t->n += got > 0 ? (size_t)got : 0;
        t->text[t->n] = '\0';
    }
}

static bool trainer_is_there(void *ctx)
{
    trainer_t *t = ctx;
    hear_trainer(t);
    bool there = strncmp(t->text, "at ", 3) == 0;
    ck_assert_msg(there || !t->ended, "the trainer ended too early: %s", t->text);
    return there;
}

static bool is_stopped(void *ctx)
{
    char path[64], line[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)*(pid_t *)ctx);
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    bool got = fgets(line, sizeof line, f) != NULL;
    fclose(f);
    const char *state = strrchr(line, ')');
    return got && state != NULL && state[2] == 'T';
}

/* ---- streams and HTTP calls, as bytes on sockets ---- */

typedef struct {
    int fd;
    unsigned rank;
    bool ended;
    size_t total;
    char tail[8192]; /* the last bytes that came */
    size_t n;
} client_t;

static client_t open_client(const cluster_t *c, const char *path, const char *body, unsigned rank)
{
    client_t out = {.fd = cluster_connect(c), .rank = rank};
    char text[1024];
    int n =
        snprintf(text, sizeof text,
                 "POST %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: %zu\r\n"
                 "Content-Type: application/json\r\nX-data-parallel-rank: %u\r\n\r\n%s",
                 path, strlen(body), rank, body);
    ck_assert_int_eq(send(out.fd, text, (size_t)n, MSG_NOSIGNAL), n);
    return out;
}

static void hear_client(client_t *c)
{
    char bytes[65536];
    while (!c->ended) {
        ssize_t got = recv(c->fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) {
            return;
        }
        c->ended = got <= 0;
        size_t keep = got > 0 ? LK_MIN((size_t)got, sizeof c->tail / 2) : 0;
        if (c->n + keep >= sizeof c->tail) {
            memmove(c->tail, c->tail + sizeof c->tail / 2, c->n -= sizeof c->tail / 2);
        }
        memcpy(c->tail + c->n, bytes + (got > 0 ? (size_t)got : 0) - keep, keep);
        c->n += keep;
        c->tail[c->n] = '\0';
        c->total += got > 0 ? (size_t)got : 0;
    }
}

/* ---- a case ---- */

typedef struct {
    case_t k;
    unsigned number;
    cluster_t c;
    trainer_t trainer;
    client_t clients[RANKS + 1];
    size_t n_clients;
    rl_weights_t weights;
    pid_t victim;
    double fault_s;
} run_t;

static void hear_all(run_t *r)
{
    for (size_t i = 0; i < r->n_clients; i++) {
        hear_client(&r->clients[i]);
    }
    hear_trainer(&r->trainer);
}

static bool streams_flow(void *ctx)
{
    run_t *r = ctx;
    hear_all(r);
    bool flow = true;
    for (unsigned i = 0; i < RANKS; i++) {
        flow = flow && r->clients[i].total > 500;
    }
    return flow;
}

static const char *flags[] = {"--device",
                              "null",
                              "--data-parallel-size",
                              "2",
                              "--enable-expert-parallel",
                              "--weight-transfer-config",
                              "{\"backend\":\"tcp\"}",
                              "--transfer-timeout",
                              "4",
                              "--heartbeat-interval",
                              "0.5",
                              "--heartbeat-timeout",
                              "4",
                              "--weight-swap",
                              NULL, /* which */
                              NULL};

static void reach_phase(run_t *r)
{
    phase_t phase = r->k.phase;
    if (phase != IDLE) {
        for (unsigned i = 0; i < RANKS; i++) {
            r->clients[r->n_clients++] = open_client(
                &r->c, "/v1/completions",
                "{\"prompt\":[9,10,11],\"max_tokens\":4000000,\"ignore_eos\":true,\"stream\":true}",
                i);
        }
        wait_for(streams_flow, r, 20, "both streams flow");
    }
    r->trainer = start_trainer(&r->c, &r->weights, phase);
    wait_for(trainer_is_there, &r->trainer, 20, "the trainer is at its phase");
    if (phase == TRANSFER) {
        wait_for(is_stopped, &r->trainer.pid, 20, "the trainer is in the middle of its transfer");
    } else if (phase == PAUSING) {
        r->clients[r->n_clients++] = open_client(&r->c, "/pause?mode=wait", "", 0);
        rl_wait_pause_state(&r->c, "DRAINING");
    }
}

static void strike(run_t *r)
{
    const case_t *k = &r->k;
    pid_t pids[8];
    if (k->victim == TRAINER) {
        r->victim = r->trainer.pid;
    } else if (k->victim == LAUNCHER) {
        r->victim = r->c.launcher;
    } else {
        char what[64];
        snprintf(what, sizeof what, "%s", programs[k->victim]);
        size_t n = cluster_pids(&r->c, what, pids, LK_ARRAY_LEN(pids));
        ck_assert_uint_eq(n, k->victim == ENGINE ? RANKS : 1);
        r->victim = pids[0];
        for (size_t i = 0; k->victim == ENGINE && i < n; i++) {
            char path[64], line[4096];
            snprintf(path, sizeof path, "/proc/%d/cmdline", (int)pids[i]);
            FILE *f = fopen(path, "r");
            ck_assert_ptr_nonnull(f);
            size_t len = fread(line, 1, sizeof line - 1, f);
            fclose(f);
            char want[40];
            int want_len = snprintf(want, sizeof want, "--data-parallel-rank%c%u", 0, k->rank);
            r->victim = memmem(line, len, want, (size_t)want_len + 1) != NULL ? pids[i] : r->victim;
        }
    }
    ck_assert_int_eq(kill(r->victim, k->stop ? SIGSTOP : SIGKILL), 0);
    r->fault_s = now_s();
    if (k->phase == TRANSFER && k->victim != TRAINER) {
        kill(r->trainer.pid, SIGCONT); /* it is a client that waits for its answer */
    }
}

/* ---- what must have happened within ANSWER_S ---- */

/* All connections of the victim's are gone. */
static bool ends_everything(const run_t *r)
{
    return r->k.victim == FRONTEND || (r->k.victim == LAUNCHER && !r->k.stop);
}

static bool must_end(const run_t *r, const client_t *client)
{
    if (ends_everything(r)) {
        return true;
    }
    return r->k.victim == ENGINE &&
           (r->k.moe || client->rank == r->k.rank || client == &r->clients[RANKS]);
}

static bool trainer_must_end(const run_t *r)
{
    bool calls = r->k.phase == TRANSFER || r->k.phase == FINISHING || r->k.phase == RESUMING ||
                 (r->k.phase == PAUSING && (r->k.victim == ENGINE || ends_everything(r)));
    return calls && r->k.victim != TRAINER;
}

static bool all_have_answers(void *ctx)
{
    run_t *r = ctx;
    hear_all(r);
    for (size_t i = 0; i < r->n_clients; i++) {
        if (must_end(r, &r->clients[i]) && !r->clients[i].ended) {
            return false;
        }
    }
    return !trainer_must_end(r) || r->trainer.ended;
}

static void expect_named(const run_t *r, const char *what, const char *text)
{
    char engine[32], rank[32];
    snprintf(engine, sizeof engine, "engine %u", r->k.rank);
    snprintf(rank, sizeof rank, "rank %u", r->k.rank);
    ck_assert_msg(strstr(text, engine) != NULL || strstr(text, rank) != NULL,
                  "case %u: %s is not told who is lost: ...%s", r->number, what,
                  text + (strlen(text) > 600 ? strlen(text) - 600 : 0));
}

static void check_answers(run_t *r)
{
    double end = r->fault_s + ANSWER_S;
    while (!all_have_answers(r) && now_s() < end) {
        usleep(10000);
    }
    for (size_t i = 0; i < r->n_clients; i++) {
        const client_t *c = &r->clients[i];
        if (must_end(r, c) && !c->ended) {
            cluster_print_log(&r->c);
            ck_abort_msg("case %u: client %zu has no answer after %d s: ...%s", r->number, i,
                         ANSWER_S, c->tail + (c->n > 300 ? c->n - 300 : 0));
        }
        if (must_end(r, c) && r->k.victim == ENGINE) {
            expect_named(r, "a client", c->tail);
        }
    }
    if (trainer_must_end(r) && !r->trainer.ended) {
        cluster_print_log(&r->c);
        ck_abort_msg("case %u: the trainer has no answer after %d s", r->number, ANSWER_S);
    }
    if (trainer_must_end(r) && r->k.victim == ENGINE && strcmp(r->trainer.text, "at fine") != 0 &&
        r->k.phase != TRANSFER) { /* there a rank's connection tells the trainer, too */
        expect_named(r, "the trainer", r->trainer.text);
    }
}

/* Those whom the fault does not concern go on, if their phase lets them. */
static bool others_flow(void *ctx)
{
    run_t *r = ctx;
    hear_all(r);
    bool flow = true;
    for (unsigned i = 0; i < r->n_clients && i < RANKS; i++) {
        flow = flow && (must_end(r, &r->clients[i]) || r->clients[i].total > 2000);
    }
    return flow;
}

static void check_others(run_t *r)
{
    /* a rank that had committed when its peer died ends its requests: it does not know the outcome
     */
    bool beside = r->k.shadow && (r->k.phase == TRANSFER || r->k.victim != ENGINE);
    if ((r->k.phase != GENERATING && !beside) || ends_everything(r)) {
        return;
    }
    for (unsigned i = 0; i < RANKS; i++) {
        r->clients[i].total = 0;
        ck_assert_msg(must_end(r, &r->clients[i]) || !r->clients[i].ended,
                      "case %u: stream %u was harmed: ...%s", r->number, i, r->clients[i].tail);
    }
    wait_for(others_flow, r, 10, "the others go on");
}

/* ---- afterwards ---- */

static void end_clients(run_t *r)
{
    for (size_t i = 0; i < r->n_clients; i++) {
        close(r->clients[i].fd);
    }
    kill(r->trainer.pid, SIGKILL);
    ck_assert_int_eq(waitpid(r->trainer.pid, NULL, 0), r->trainer.pid);
    close(r->trainer.fd);
}

static bool answers_resume(void *ctx)
{
    run_t *r = ctx;
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    char url[256];
    snprintf(url, sizeof url, "%s/resume", r->c.url);
    bool yes = http_call("POST", url, "", NULL, 5, &reply, &err) == LK_OK && reply.status == 200;
    http_reply_fini(&reply);
    return yes;
}

static void expect_generates(run_t *r)
{
    for (unsigned i = 0; i < RANKS; i++) {
        cluster_async_t call = rl_complete(&r->c, i, 5, 8, 4);
        json_t *reply;
        rl_join(&call, "length", &reply);
        json_decref(reply);
    }
}

static void expect_works(run_t *r)
{
    wait_for(answers_resume, r, 30, "the group is whole again");
    lst_t *lst = rl_open(&r->c);
    (void)!lst_abort(lst); /* what a dead trainer left open */
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    rl_push(lst, &r->weights, true, "afterwards");
    rl_assert_holds(lst, &r->weights, "afterwards");
    expect_generates(r);
    rl_must(lst, lst_pause(lst, "keep", true), "pause");
    rl_must(lst, lst_resume(lst), "resume");
    lst_close(&lst);
    expect_generates(r);
}

static bool is_replaced(void *ctx)
{
    run_t *r = ctx;
    pid_t pids[2];
    size_t n = cluster_pids(&r->c, programs[r->k.victim], pids, LK_ARRAY_LEN(pids));
    return n == 1 && pids[0] != r->victim;
}

/* Files that a cluster might leave: shared memory, and sockets in the file system. (Other files and
 * directories there are those of demos and benchmarks, which may come and go meanwhile.) */
static size_t count_files(void)
{
    static const char *const dirs[] = {"/dev/shm", "/tmp", "/var/tmp"};
    size_t n = 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(dirs); i++) {
        DIR *dir = opendir(dirs[i]);
        for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
            n += strstr(e->d_name, "lockstep") != NULL && strstr(e->d_name, "test") == NULL &&
                 (i == 0 || e->d_type == DT_SOCK || e->d_type == DT_FIFO);
        }
        if (dir != NULL) {
            closedir(dir);
        }
    }
    return n;
}

/* Of the cluster whose trainer's socket this is: all its sockets have the same kind of names, so
 * the one is looked for by its name. */
static bool socket_is_left(const cluster_t *c)
{
    char line[512];
    bool left = false;
    const char *name = strchr(c->trainer, '@');
    FILE *f = fopen("/proc/net/unix", "r");
    while (f != NULL && name != NULL && fgets(line, sizeof line, f) != NULL) {
        left |= strstr(line, name) != NULL;
    }
    if (f != NULL) {
        fclose(f);
    }
    return left;
}

static void run_case(unsigned number)
{
    run_t r = {.number = number, .k = case_of(number)};
    printf("# case %u: %s, %s, %s is %s while %s; LK_TEST_FAULTS=%u\n", number,
           r.k.moe ? "expert parallel" : "dense", r.k.shadow ? "shadow swap" : "in place",
           victim_names[r.k.victim], r.k.stop ? "stopped" : "killed", phase_names[r.k.phase],
           number);
    fflush(stdout);
    size_t files = count_files();
    const char *model = rl_make_model(r.k.moe ? ARCH_QWEN3_MOE : ARCH_QWEN3, 3, 8000000);
    r.weights = rl_weights(model, 4, LK_DTYPE_BF16);
    flags[LK_ARRAY_LEN(flags) - 2] = r.k.shadow ? "shadow" : "inplace";
    cluster_start(&r.c, model, flags);
    reach_phase(&r);
    strike(&r);
    check_answers(&r);
    check_others(&r);
    end_clients(&r);
    if (r.k.victim == LAUNCHER && !r.k.stop) {
        ck_assert_int_eq(cluster_wait_gone(&r.c, 10), 128 + SIGKILL);
    } else {
        if (r.k.victim == LAUNCHER) {
            expect_works(&r);
            kill(r.victim, SIGCONT);
        }
        expect_works(&r);
        if (r.k.victim == COORDINATOR) { /* nobody missed it: the launcher does */
            wait_for(is_replaced, &r, 10, "the coordinator is another process");
            expect_works(&r);
        }
        ck_assert_int_eq(cluster_stop(&r.c), 0);
    }
    ck_assert_uint_le(count_files(), files);
    ck_assert(!socket_is_left(&r.c));
    rl_weights_fini(&r.weights);
}

/* ---- which cases ---- */

static const char *asked(void)
{
    const char *text = getenv("LK_TEST_FAULTS");
    return text != NULL ? text : "";
}

START_TEST(test_every_case)
{
    run_case((unsigned)_i);
}
END_TEST

START_TEST(test_samples)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("faults") + (uint64_t)_i);
    run_case((unsigned)lk_prng_below(&prng, N_CASES));
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("faults");
    TCase *tc = tcase_create("faults");
    tcase_set_timeout(tc, 120);
    if (strcmp(asked(), "all") == 0) {
        tcase_add_loop_test(tc, test_every_case, 0, N_CASES);
    } else if (asked()[0] != '\0') {
        int number = atoi(asked());
        tcase_add_loop_test(tc, test_every_case, number, number + 1);
    } else {
        tcase_add_loop_test(tc, test_samples, 0, N_SAMPLES);
    }
    suite_add_tcase(s, tc);
    return s;
}
