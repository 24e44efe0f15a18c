/*
 * serve.c: the supervisor of one node. It starts the coordinator, then engines and front ends,
 * prints the ready line when the first front end serves, and stops everything when told to or when
 * any child ends. Children hold the other end of a pipe of ours (base/spawn.h), so they end with
 * this process whatever kills it; sockets are abstract, so nothing is left in the file system.
 */
#include "base/check.h"
#include "base/config.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/spawn.h"
#include "deploy/tool/tool.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_CHILDREN 320
#define MAX_ARGV     512

/* How long a child may take to end after SIGTERM, beyond the time requests are given. */
#define STOP_GRACE_NS (5 * LK_SECOND_NS)

typedef struct {
    lk_config_t config;
    char *const *argv; /* the user's flags: argv[1..argc-1] */
    int argc;
    char bin[PATH_MAX]; /* top of the build tree, or the installation's directory */
    lk_loop_t *loop;
    const lk_env_t *env;
    spawn_t children[MAX_CHILDREN]; /* coordinator, engines, front ends */
    size_t n_children, n_ready;
    bool announced;
    uint64_t started_ns;
} serve_t;

/* DIR/SUB/NAME in a build tree, DIR/NAME where it is installed. */
static bool find_program(const serve_t *s, const char *sub, const char *name, char *out,
                         size_t room)
{
    snprintf(out, room, "%s/../../%s/%s", s->bin, sub, name);
    if (access(out, X_OK) == 0) {
        return true;
    }
    snprintf(out, room, "%s/%s", s->bin, name);
    return access(out, X_OK) == 0;
}

static lk_status_t start_child(serve_t *s, const char *sub, const char *program, const char *name,
                               const char *const *extra, lk_error_t *err)
{
    char path[PATH_MAX + 128];
    if (!find_program(s, sub, program, path, sizeof path)) {
        return lk_error_set(err, LK_ERR_NOT_FOUND, "%s is not beside %s; run ./run build", program,
                            s->bin);
    }
    const char *argv[MAX_ARGV];
    size_t n = 0;
    argv[n++] = program;
    for (int i = 1; i < s->argc; i++) {
        if (n + 16 > MAX_ARGV) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "more than %d arguments", MAX_ARGV - 16);
        }
        argv[n++] = s->argv[i];
    }
    for (; *extra != NULL; extra++) {
        argv[n++] = *extra;
    }
    argv[n] = NULL;
    CHECK(s->n_children < MAX_CHILDREN);
    spawn_t *child = &s->children[s->n_children];
    *child = SPAWN_INIT;
    spawn_spec_t spec = {.name = name,
                         .path = path,
                         .argv = (char *const *)argv,
                         .stdout_fd = STDERR_FILENO, /* standard output has one line: ready */
                         .stderr_fd = -1,
                         .new_group = true};
    LK_RETURN_IF_ERROR(spawn_start(&spec, child, err));
    s->n_children++;
    return LK_OK;
}

/* Looks at every child once. LK_ERR_PEER when one has ended or reported an error. */
static lk_status_t check_children(serve_t *s, lk_error_t *err)
{
    for (size_t i = 0; i < s->n_children; i++) {
        spawn_t *c = &s->children[i];
        const char *text;
        if (!c->ready) {
            lk_status_t status = spawn_ready(c, &text, err);
            if (status < 0) {
                return status;
            }
            if (status == LK_OK) {
                s->n_ready++;
            }
        }
        lk_status_t ended = spawn_reap(c, err);
        LK_RETURN_IF_ERROR(ended);
        if (ended == LK_OK) {
            char how[128];
            spawn_describe(c, how, sizeof how);
            return lk_error_set(err, LK_ERR_PEER, "%s ended: %s", c->name, how);
        }
    }
    return LK_OK;
}

/* Sleeps until a child says or ends something, a signal comes, or at most `ns`. */
static void wait_children(serve_t *s, uint64_t ns)
{
    struct pollfd fds[2 * MAX_CHILDREN];
    size_t n = 0;
    for (size_t i = 0; i < s->n_children; i++) {
        const spawn_t *c = &s->children[i];
        if (!c->ready && c->status_fd >= 0) {
            fds[n++] = (struct pollfd){.fd = c->status_fd, .events = POLLIN};
        }
        if (!c->reaped && c->pid_fd >= 0) {
            fds[n++] = (struct pollfd){.fd = c->pid_fd, .events = POLLIN};
        }
    }
    loop_wait(s->loop, fds, n, lk_env_now_ns(s->env) + ns);
}

/* Waits for one child's ready line; *text is valid while the child is kept. */
static lk_status_t wait_ready(serve_t *s, spawn_t *child, const char **text, lk_error_t *err)
{
    for (;;) {
        LK_RETURN_IF_ERROR(check_children(s, err));
        if (child->ready) {
            return spawn_ready(child, text, err);
        }
        if (loop_stop_reason(s->loop) != NULL) {
            return lk_error_set(err, LK_ERR_CANCELED, "%s while starting",
                                loop_stop_reason(s->loop));
        }
        if (lk_env_now_ns(s->env) - s->started_ns >
            (uint64_t)(s->config.handshake_timeout_s * 1e9) + STOP_GRACE_NS) {
            return lk_error_set(err, LK_ERR_TIMEOUT, "%s is not ready after %.0f s", child->name,
                                s->config.handshake_timeout_s);
        }
        wait_children(s, LK_SECOND_NS);
    }
}

static lk_status_t start_all(serve_t *s, lk_error_t *err)
{
    const lk_config_t *c = &s->config;
    const char *address;
    LK_RETURN_IF_ERROR(start_child(s, "coordinator", "lockstep-coordinator", "coordinator",
                                   (const char *[]){NULL}, err));
    LK_RETURN_IF_ERROR(wait_ready(s, &s->children[0], &address, err));
    char name[64], rank[24];
    for (uint64_t r = 0; r < c->data_parallel_size; r++) {
        snprintf(name, sizeof name, "engine %llu", (unsigned long long)r);
        snprintf(rank, sizeof rank, "%llu", (unsigned long long)r);
        LK_RETURN_IF_ERROR(start_child(
            s, "engine_core", "lockstep-engine", name,
            (const char *[]){"--coordinator-address", address, "--data-parallel-rank", rank, NULL},
            err));
    }
    spawn_t *front = NULL;
    for (uint64_t f = 0; f < c->api_server_count; f++) {
        snprintf(name, sizeof name, "front end %llu", (unsigned long long)f);
        snprintf(rank, sizeof rank, "%llu", (unsigned long long)f);
        LK_RETURN_IF_ERROR(start_child(
            s, "api_frontend", "lockstep-api", name,
            (const char *[]){"--coordinator-address", address, "--frontend-index", rank, NULL},
            err));
        front = front != NULL ? front : &s->children[s->n_children - 1];
    }
    const char *ready;
    LK_RETURN_IF_ERROR(wait_ready(s, front, &ready, err));
    /* "http://HOST:PORT trainer ADDRESS" */
    int n = (int)strcspn(ready, " ");
    printf("lockstep: ready on %.*s\n", n, ready);
    fflush(stdout);
    LK_INFO("ready on %s", ready);
    s->announced = true;
    return LK_OK;
}

static bool all_reaped(serve_t *s, size_t from)
{
    bool all = true;
    for (size_t i = from; i < s->n_children; i++) {
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t status = s->children[i].reaped ? LK_OK : spawn_reap(&s->children[i], &err);
        if (status < 0) {
            LK_ERROR("%s", err.text);
        }
        all &= status != LK_INPROGRESS;
    }
    return all;
}

/* Signals children [from, n) and waits for their end; SIGKILL for those that need longer than ns.
 */
static void stop_from(serve_t *s, size_t from, uint64_t ns)
{
    for (size_t i = from; i < s->n_children; i++) {
        spawn_kill(&s->children[i], SIGTERM);
        spawn_kill(&s->children[i], SIGCONT); /* a stopped child could not end */
    }
    uint64_t end = lk_env_now_ns(s->env) + ns;
    while (!all_reaped(s, from)) {
        if (lk_env_now_ns(s->env) > end) {
            for (size_t i = from; i < s->n_children; i++) {
                if (!s->children[i].reaped) {
                    LK_WARN("%s did not end; it is killed", s->children[i].name);
                    spawn_kill(&s->children[i], SIGKILL);
                }
            }
            end = UINT64_MAX;
        }
        /* The loop's stop flag may be set, and then loop_wait returns at once: wait on the pids. */
        struct pollfd fds[MAX_CHILDREN];
        nfds_t n = 0;
        for (size_t i = from; i < s->n_children; i++) {
            if (!s->children[i].reaped) {
                fds[n++] = (struct pollfd){.fd = s->children[i].pid_fd, .events = POLLIN};
            }
        }
        poll(fds, n, 200);
    }
}

static void stop_all(serve_t *s)
{
    const lk_config_t *c = &s->config;
    /* Front ends first: they let requests finish, and engines have to live for that. */
    size_t first_front = LK_MIN(s->n_children, 1 + (size_t)c->data_parallel_size);
    stop_from(s, first_front, (uint64_t)(c->shutdown_timeout_s * 1e9) + STOP_GRACE_NS);
    stop_from(s, 0, STOP_GRACE_NS);
    for (size_t i = 0; i < s->n_children; i++) {
        spawn_fini(&s->children[i]);
    }
}

static lk_status_t check_config(const serve_t *s, lk_error_t *err)
{
    const lk_config_t *c = &s->config;
    if (c->model[0] == '\0') {
        return lk_error_set(err, LK_ERR_INVALID,
                            "which model? usage: lockstep serve MODEL_DIR [flags]");
    }
    struct stat st;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/config.json", c->model);
    if (stat(path, &st) != 0) {
        return lk_error_set(err, LK_ERR_NOT_FOUND,
                            "%s is no checkpoint directory: there is no config.json", c->model);
    }
    if (strcmp(c->device, "cuda") == 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "--device cuda is not implemented; use cpu or null");
    }
    return LK_OK;
}

int tool_serve(int argc, char **argv)
{
    static serve_t s;
    lk_error_t err = LK_ERROR_INIT;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            config_help("usage: lockstep serve MODEL_DIR [flags]");
            return 0;
        }
    }
    s.argc = argc;
    s.argv = argv;
    s.env = lk_env_real();
    s.started_ns = lk_env_now_ns(s.env);
    if (config_parse(argc, argv, &s.config, &err) != LK_OK || check_config(&s, &err) != LK_OK) {
        fprintf(stderr, "lockstep: %s\n", err.text);
        return 2;
    }
    config_init_log(&s.config, "launcher");
    CHECK(tool_directory(s.bin, sizeof s.bin));
    s.loop = loop_new(s.env);
    CHECK(s.loop != NULL);
    loop_catch_signals(s.loop);

    int rc = 0;
    lk_status_t status = start_all(&s, &err);
    while (status == LK_OK && loop_stop_reason(s.loop) == NULL) {
        wait_children(&s, 10 * LK_SECOND_NS);
        status = check_children(&s, &err);
    }
    if (loop_stop_reason(s.loop) != NULL) {
        LK_INFO("stopping: %s", loop_stop_reason(s.loop));
        rc = s.announced ? 0 : 130;
    } else {
        LK_ERROR("%s; stopping everything", err.text);
        rc = 1;
    }
    stop_all(&s);
    loop_destroy(&s.loop);
    return rc;
}
