/*
 * Trainers that die or stop, at every stage of an update, and callers that go away: the call fails
 * within its deadline, the ranks say what they hold, generation refuses what is half updated, and a
 * new session repairs it. The trainer is a process of its own that ends in the middle of a send.
 */
#include "base/check.h"
#include "base/env.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/test_main.h"

#include <netinet/in.h>
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

/* ---- a trainer that ends where it is told to ---- */

typedef enum { AT_OPEN, AT_INIT, AT_START, IN_UPDATE, AT_FINISH } stage_t;

static size_t send_limit; /* bytes until end_signal; 0: no limit */
static int end_signal;
static bool packed; /* into buckets, which a rank copies to its weights when they are whole */

/* Stands before the C library's: what a rank gets ends in the middle of a bucket. The tcp streams
 * are the only users of sendmsg here. */
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
        raise(end_signal);
    }
    return sent;
}

typedef struct {
    pid_t pid;
    int fd; /* its last words */
} trainer_t;

static void run_trainer(const cluster_t *c, const rl_weights_t *w, stage_t stage, int sig, int fd)
{
    char err[512] = "";
    lst_t *lst = NULL;
    lst_options_t options = {.endpoint = c->trainer, .no_progress_s = 20, .timeout_s = 20};
    lst_status_t st = lst_open(&options, &lst, err, sizeof err);
    for (int at = AT_OPEN; st == LST_OK && at <= AT_FINISH; at++) {
        if (at == (int)stage && stage != IN_UPDATE) {
            raise(sig);
        }
        switch (at) {
        case AT_OPEN:
            st = lst_init_tcp(lst, NULL);
            break;
        case AT_INIT:
            st = lst_start(lst);
            break;
        case IN_UPDATE:
            send_limit = stage == IN_UPDATE ? 300000 : 0; /* of twice the model's 500 kB or more */
            end_signal = sig;
            st = lst_update(lst, w->t, w->n, &(lst_update_options_t){.packed = packed});
            break;
        default:
            break;
        }
    }
    const char *text = st == LST_OK ? "fine" : lst_last_error(lst);
    if (write(fd, text, strlen(text)) < 0) {
        _exit(1);
    }
    _exit(0);
}

/* Returns when it has stopped or died. */
static trainer_t start_trainer(const cluster_t *c, const rl_weights_t *w, stage_t stage, int sig)
{
    int fds[2], status;
    ck_assert_int_eq(pipe(fds), 0);
    fflush(stdout);
    trainer_t t = {.pid = fork(), .fd = fds[0]};
    ck_assert_int_ge(t.pid, 0);
    if (t.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        run_trainer(c, w, stage, sig, fds[1]);
    }
    close(fds[1]);
    ck_assert_int_eq(waitpid(t.pid, &status, WUNTRACED), t.pid);
    ck_assert_msg(sig == SIGSTOP ? WIFSTOPPED(status) : WIFSIGNALED(status),
                  "the trainer did not get that far");
    return t;
}

/* Lets it go on; what it says at last. */
static const char *last_words(trainer_t *t)
{
    static char text[2048];
    ck_assert_int_eq(kill(t->pid, SIGCONT), 0);
    size_t n = 0;
    ssize_t got;
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    while (n < sizeof text - 1) {
        ck_assert_msg(poll(&p, 1, 40000) == 1, "the trainer does not end");
        got = read(t->fd, text + n, sizeof text - 1 - n);
        if (got <= 0) {
            break;
        }
        n += (size_t)got;
    }
    text[n] = '\0';
    close(t->fd);
    ck_assert_int_eq(waitpid(t->pid, NULL, 0), t->pid);
    return text;
}

/* ---- what the cluster says ---- */

typedef struct {
    const cluster_t *c;
    const char *state;
} question_t;

/* Of every rank, in /weight_info. */
static bool in_state(void *ctx)
{
    question_t *q = ctx;
    json_t *info = cluster_call(q->c, "GET", "/weight_info", NULL, 200, NULL);
    const json_t *ranks = json_object_get(info, "ranks");
    bool all = json_array_size(ranks) > 0;
    for (size_t r = 0; r < json_array_size(ranks); r++) {
        all = all && strcmp(json_text_at(json_array_get(ranks, r), "state"), q->state) == 0;
    }
    json_decref(info);
    return all;
}

static void wait_state(const cluster_t *c, const char *state)
{
    wait_for(in_state, &(question_t){c, state}, 15, state);
}

static bool healthy_as(void *ctx)
{
    question_t *q = ctx;
    json_t *reply = cluster_call(q->c, "GET", "/health", NULL, 200, NULL);
    bool yes = strcmp(json_text_at(reply, "state"), q->state) == 0;
    json_decref(reply);
    return yes;
}

static void assert_generates(const cluster_t *c)
{
    json_decref(cluster_call(c, "POST", "/v1/completions", rl_body(1, 8, 4), 200, NULL));
}

/* Bytes arrived: no rank generates, all say why, a part does not repair it, the whole does. */
static void assert_dirty_then_repair(const cluster_t *c, const rl_weights_t *w, const char *why,
                                     const char *version)
{
    wait_state(c, "dirty");
    wait_for(healthy_as, &(question_t){c, "dirty"}, 15, "/health says dirty");
    json_t *info = cluster_call(c, "GET", "/weight_info", NULL, 200, NULL);
    ck_assert(json_is_false(json_object_get(info, "consistent")));
    bool named = false;
    for (int r = 0; r < 2; r++) {
        char path[64];
        snprintf(path, sizeof path, "ranks.%d.dirty_reason", r);
        named |= strstr(json_text_at(info, path), why) != NULL;
    }
    char *text = json_dumps(info, 0);
    ck_assert_msg(named, "no rank says '%s': %s", why, text);
    free(text);
    json_decref(info);
    for (int i = 0; i < 2; i++) {
        json_t *reply = cluster_call(c, "POST", "/v1/completions", rl_body(1, 8, 4), 503, NULL);
        const char *message = json_text_at(reply, "error.message");
        ck_assert_msg(strstr(message, "unusable until a complete update") != NULL, "%s", message);
        json_decref(reply);
    }
    lst_t *lst = rl_open(c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init of the repair");
    rl_must(lst, lst_start(lst), "start of the repair");
    rl_must(lst, lst_update(lst, w->t, w->n - 1, NULL), "most of it");
    rl_must_fail(lst, lst_finish(lst, version), LST_ERR_STATE, w->t[w->n - 1].name);
    rl_must(lst, lst_update(lst, w->t + w->n - 1, 1, NULL), "the rest");
    rl_must(lst, lst_finish(lst, version), "finish of the repair");
    rl_assert_holds(lst, w, version);
    lst_close(&lst);
    wait_for(healthy_as, &(question_t){c, "idle"}, 15, "/health says idle");
    assert_generates(c);
}

/* Nothing arrived: the old weights are still good. */
static void assert_unharmed(const cluster_t *c, rl_snapshot_t *before)
{
    wait_state(c, "ready");
    rl_assert_unchanged(c, before);
}

static const char *const flags[] = {"--data-parallel-size",
                                    "2",
                                    "--enable-expert-parallel",
                                    "--dtype",
                                    "float32",
                                    "--weight-transfer-config",
                                    "{\"backend\":\"tcp\"}",
                                    "--transfer-timeout",
                                    "2",
                                    NULL};

typedef struct {
    cluster_t c;
    char dir[512];
    rl_weights_t old, new;
    rl_snapshot_t before;
} rig_t;

static void rig_init(rig_t *rig)
{
    snprintf(rig->dir, sizeof rig->dir, "%s", rl_make_model(ARCH_QWEN3_MOE, 1, 0));
    cluster_start(&rig->c, rig->dir, flags);
    rig->old = rl_weights(rig->dir, 1, LK_DTYPE_BF16);
    rig->new = rl_weights(rig->dir, 2, LK_DTYPE_BF16);
    rig->before = rl_snapshot(&rig->c);
}

static void rig_fini(rig_t *rig)
{
    rl_weights_fini(&rig->old);
    rl_weights_fini(&rig->new);
    rl_snapshot_fini(&rig->before);
    ck_assert_int_eq(cluster_stop(&rig->c), 0);
}

/* ---- killed at every stage ---- */

START_TEST(killed_trainers)
{
    rig_t rig;
    rig_init(&rig);
    const cluster_t *c = &rig.c;
    const char *text;

    start_trainer(c, &rig.new, AT_OPEN, SIGKILL);
    assert_unharmed(c, &rig.before);

    start_trainer(c, &rig.new, AT_INIT, SIGKILL);
    assert_unharmed(c, &rig.before);
    /* somebody else goes on with the dead one's connection: that is a state, not a breakdown */
    ck_assert_int_eq(rl_call(c, NULL, RL_HTTP, "start_weight_update", "{}", &text), 200);
    int status = rl_call(c, NULL, RL_HTTP, "update_weights", rl_update_info(rig.new.t, 2), &text);
    ck_assert_msg(status == 409 && strstr(text, "has closed its connection") != NULL, "%d %s",
                  status, text);
    ck_assert_int_eq(rl_call(c, NULL, RL_HTTP, "abort_weight_update", "{}", &text), 200);
    assert_unharmed(c, &rig.before);

    /* an open session without calls closes by itself, and what it held up goes on */
    start_trainer(c, &rig.new, AT_START, SIGKILL);
    wait_state(c, "session open");
    cluster_async_t held = rl_complete(c, 0, 1, 8, 4);
    json_t *reply;
    rl_join(&held, "length", &reply);
    json_decref(reply);
    assert_unharmed(c, &rig.before);

    packed = true;
    start_trainer(c, &rig.new, IN_UPDATE, SIGKILL);
    assert_unharmed(c, &rig.before);
    packed = false;
    start_trainer(c, &rig.new, IN_UPDATE, SIGKILL);
    assert_dirty_then_repair(c, &rig.old, "trainer 127.0.0.1", "after-update");

    start_trainer(c, &rig.new, AT_FINISH, SIGKILL);
    assert_dirty_then_repair(c, &rig.new, "saw no call for the transfer timeout", "after-finish");
    rig_fini(&rig);
}
END_TEST

/* ---- stopped in the middle ---- */

START_TEST(stopped_trainers)
{
    rig_t rig;
    rig_init(&rig);
    const cluster_t *c = &rig.c;
    int status;

    /* requests that the session froze end with an error when it fails; others are refused */
    cluster_async_t frozen = rl_complete(c, 1, 1, 8, 480);
    rl_wait_tokens(c);
    trainer_t t = start_trainer(c, &rig.new, IN_UPDATE, SIGSTOP);
    bool had_ended = !cluster_async_pending(&frozen);
    assert_dirty_then_repair(c, &rig.old, "no progress for 2.0 s from trainer", "repaired");
    const char *text = last_words(&t);
    ck_assert_msg(strcmp(text, "fine") != 0, "%s", text);
    json_t *reply = cluster_join(&frozen, 10, &status);
    ck_assert_msg(had_ended || status == 503, "%d", status);
    json_decref(reply);

    /* a caller who does not want to wait for the deadline */
    t = start_trainer(c, &rig.new, IN_UPDATE, SIGSTOP);
    wait_state(c, "updating");
    reply = cluster_call(c, "POST", "/abort_weight_update", "{}", 200, NULL);
    ck_assert(
        json_is_true(json_object_get(json_array_get(json_object_get(reply, "ranks"), 0), "dirty")));
    json_decref(reply);
    reply = cluster_call(c, "POST", "/abort_weight_update", "{}", 200, NULL);
    json_decref(reply);
    text = last_words(&t);
    ck_assert_msg(strstr(text, "abort") != NULL, "%s", text);
    assert_dirty_then_repair(c, &rig.new, "a caller aborted the weight update", "aborted");
    rig_fini(&rig);
}
END_TEST

/* ---- callers that go away, addresses where nobody is ---- */

/* ---- --weight-swap shadow: whatever the trainer does, the old weights stay and tokens flow ----
 */

static const struct {
    model_arch_t arch;
    const char *flag;
} shadow_layouts[] = {{ARCH_QWEN3_MOE, "--enable-expert-parallel"}, {ARCH_QWEN3, NULL}};

static void shadow_init(rig_t *rig, int layout, const char *timeout)
{
    const char *const args[] = {"--data-parallel-size",
                                "2",
                                "--dtype",
                                "float32",
                                "--weight-transfer-config",
                                "{\"backend\":\"tcp\"}",
                                "--weight-swap",
                                "shadow",
                                "--transfer-timeout",
                                timeout,
                                shadow_layouts[layout].flag,
                                NULL};
    snprintf(rig->dir, sizeof rig->dir, "%s", rl_make_model(shadow_layouts[layout].arch, 1, 0));
    cluster_start(&rig->c, rig->dir, args);
    rig->old = rl_weights(rig->dir, 1, LK_DTYPE_BF16);
    rig->new = rl_weights(rig->dir, 2, LK_DTYPE_BF16);
    rig->before = rl_snapshot(&rig->c);
}

static bool session_closed(void *ctx)
{
    json_t *info = cluster_call(ctx, "GET", "/weight_info", NULL, 200, NULL);
    bool open = false;
    for (size_t r = 0; r < 2; r++) {
        const json_t *rank = json_array_get(json_object_get(info, "ranks"), r);
        ck_assert_str_eq(json_text_at(rank, "weight_swap"), "shadow");
        ck_assert(json_is_false(json_object_get(rank, "dirty")));
        open |= json_is_true(json_object_get(rank, "session_open"));
    }
    json_decref(info);
    return !open;
}

/* A whole request on each rank. */
static void assert_tokens_flow(const cluster_t *c)
{
    for (unsigned r = 0; r < 2; r++) {
        cluster_async_t request = rl_complete(c, r, 1, 8, 40);
        json_t *reply;
        rl_join(&request, "length", &reply);
        json_decref(reply);
    }
}

START_TEST(shadow_survives_killed_trainers)
{
    static const stage_t stages[] = {AT_OPEN, AT_INIT, AT_START, IN_UPDATE, IN_UPDATE, AT_FINISH};
    rig_t rig;
    shadow_init(&rig, _i, "2");
    const cluster_t *c = &rig.c;
    for (size_t i = 0; i < LK_ARRAY_LEN(stages); i++) {
        packed = i == 3;
        cluster_async_t running = rl_complete(c, i % 2, 1, 8, 480);
        start_trainer(c, &rig.new, stages[i], SIGKILL);
        assert_tokens_flow(c);
        wait_for(session_closed, (void *)c, 15, "the dead trainer's session closes");
        json_t *reply;
        rl_join(&running, "length", &reply);
        json_decref(reply);
        assert_unharmed(c, &rig.before);
    }
    packed = false;
    lst_t *lst = rl_open(c); /* the next one brings a part of the model, and that is enough */
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    rl_must(lst, lst_start(lst), "start");
    rl_must(lst, lst_update(lst, rig.new.t, 1, NULL), "update of one tensor");
    rl_must(lst, lst_finish(lst, "part"), "finish");
    rl_push(lst, &rig.new, true, "whole");
    rl_assert_holds(lst, &rig.new, "whole");
    lst_close(&lst);
    rig_fini(&rig);
}
END_TEST

/* A transfer that stands still, and then comes to its end, or does not. */
START_TEST(shadow_tokens_flow_during_a_transfer)
{
    rig_t rig;
    shadow_init(&rig, _i, "60");
    const cluster_t *c = &rig.c;
    trainer_t t = start_trainer(c, &rig.new, IN_UPDATE, SIGSTOP);
    wait_state(c, "receiving");
    assert_tokens_flow(c);
    json_decref(cluster_call(c, "POST", "/pause?mode=keep", "{}", 200, NULL));
    rl_assert_frozen(c, 3);
    json_decref(cluster_call(c, "POST", "/resume", "{}", 200, NULL));
    assert_tokens_flow(c);
    wait_state(c, "receiving");
    json_t *reply = cluster_call(c, "POST", "/abort_weight_update", "{}", 200, NULL);
    ck_assert(json_is_false(
        json_object_get(json_array_get(json_object_get(reply, "ranks"), 0), "dirty")));
    json_decref(reply);
    const char *text = last_words(&t);
    ck_assert_msg(strstr(text, "abort") != NULL, "%s", text);
    assert_unharmed(c, &rig.before);

    t = start_trainer(c, &rig.new, IN_UPDATE, SIGSTOP);
    wait_state(c, "receiving");
    assert_tokens_flow(c);
    text = last_words(&t);
    ck_assert_str_eq(text, "fine");
    assert_unharmed(c, &rig.before); /* all of it is here, and not in force */
    ck_assert_int_eq(
        rl_call(c, NULL, RL_HTTP, "finish_weight_update", "{\"weight_version\":\"new\"}", &text),
        200);
    lst_t *lst = rl_open(c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init"); /* says how digests are made */
    rl_assert_holds(lst, &rig.new, "new");
    lst_close(&lst);
    rig_fini(&rig);
}
END_TEST

START_TEST(callers_that_go_away)
{
    rig_t rig;
    rig_init(&rig);
    const cluster_t *c = &rig.c;
    /* connected, and then silent: no byte comes, so nothing is harmed */
    trainer_t t = start_trainer(c, &rig.new, AT_START, SIGSTOP);
    cluster_async_t caller =
        cluster_call_async(c, "POST", "/update_weights", rl_update_info(rig.new.t, rig.new.n));
    wait_state(c, "updating");
    ck_assert_int_eq(kill(caller.pid, SIGKILL), 0);
    ck_assert_int_eq(waitpid(caller.pid, NULL, 0), caller.pid);
    close(caller.fd);
    json_decref(cluster_call(c, "GET", "/health", NULL, 200, NULL));
    assert_unharmed(c, &rig.before);
    ck_assert_str_ne(last_words(&t), "fine");
    rig_fini(&rig);
}
END_TEST

/* A port that accepts and says nothing. */
static int silent_port(int *port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof addr;
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    ck_assert_int_eq(listen(fd, 8), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
    *port = ntohs(addr.sin_port);
    return fd;
}

START_TEST(trainers_that_are_not_there)
{
    static const char *const slow[] = {"--data-parallel-size",
                                       "2",
                                       "--enable-expert-parallel",
                                       "--dtype",
                                       "float32",
                                       "--weight-transfer-config",
                                       "{\"backend\":\"tcp\"}",
                                       "--transfer-timeout",
                                       "60",
                                       NULL};
    cluster_t c;
    char body[256];
    int port, status;
    cluster_start(&c, rl_make_model(ARCH_QWEN3_MOE, 1, 0), slow);
    rl_snapshot_t before = rl_snapshot(&c);
    int fd = silent_port(&port);
    snprintf(body, sizeof body,
             "{\"init_info\":{\"master_address\":\"127.0.0.1\",\"master_port\":%d,"
             "\"session_token\":\"0123456789abcdef\"}}",
             port);
    cluster_async_t init = cluster_call_async(&c, "POST", "/init_weight_transfer_engine", body);
    wait_state(&c, "initialising");
    /* nobody else is held up by it, and an abort ends it, long before 60 s */
    json_decref(cluster_call(&c, "GET", "/health", NULL, 200, NULL));
    assert_generates(&c);
    cluster_async_t busy = rl_complete(&c, 1, 1, 8, 400);
    json_decref(cluster_call(&c, "POST", "/pause?mode=keep", "{}", 200, NULL));
    rl_assert_frozen(&c, 5);
    json_decref(cluster_call(&c, "POST", "/resume", "{}", 200, NULL));
    json_t *reply;
    rl_join(&busy, "length", &reply);
    json_decref(reply);
    wait_state(&c, "initialising");
    ck_assert(cluster_async_pending(&init));
    json_decref(cluster_call(&c, "POST", "/abort_weight_update", "{}", 200, NULL));
    reply = cluster_join(&init, 10, &status);
    ck_assert_int_eq(status, 409);
    ck_assert_ptr_nonnull(
        strstr(json_text_at(reply, "error.message"), "a caller aborted the weight update"));
    json_decref(reply);
    rl_assert_unchanged(&c, &before);
    /* its own deadline does the same, and says where nobody was */
    char path[64];
    snprintf(path, sizeof path, "/init_weight_transfer_engine?timeout_s=0.5");
    reply = cluster_call(&c, "POST", path, body, 504, NULL);
    ck_assert_ptr_nonnull(strstr(json_text_at(reply, "error.message"), "0.5 s"));
    json_decref(reply);
    close(fd);
    rl_assert_unchanged(&c, &before);
    rl_snapshot_fini(&before);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("trainer death");
    TCase *tc = tcase_create("trainer death");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, killed_trainers);
    tcase_add_test(tc, stopped_trainers);
    tcase_add_loop_test(tc, shadow_survives_killed_trainers, 0, LK_ARRAY_LEN(shadow_layouts));
    tcase_add_loop_test(tc, shadow_tokens_flow_during_a_transfer, 0, LK_ARRAY_LEN(shadow_layouts));
    tcase_add_test(tc, callers_that_go_away);
    tcase_add_test(tc, trainers_that_are_not_there);
    suite_add_tcase(s, tc);
    return s;
}
