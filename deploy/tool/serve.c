/*
 * serve.c: the supervisor of one node. It starts the coordinator, then engines and front ends,
 * prints the ready line when the first front end serves, looks after them (children.h), and stops
 * everything when told to or when a process can not be started again. Children hold the other end
 * of a pipe of ours (base/spawn.h), so they end with this process whatever kills it; sockets are
 * abstract, so nothing is left in the file system.
 */
#include "base/check.h"
#include "base/log.h"
#include "deploy/tool/children.h"
#include "deploy/tool/tool.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct {
    lk_config_t config;
    char bin[PATH_MAX];
    child_t items[CHILDREN_MAX];
    children_t children;
    bool announced;
} serve_t;

static lk_status_t start_coordinator(serve_t *s, const char **address, lk_error_t *err)
{
    child_t *child;
    LK_RETURN_IF_ERROR(
        children_start(&s->children, CHILD_COORDINATOR, 0, (const char *[]){NULL}, &child, err));
    LK_RETURN_IF_ERROR(children_wait_ready(&s->children, child, address, err));
    child_pin(child, "--coordinator-address", *address); /* a later life binds there, too */
    return LK_OK;
}

/* A later life serves at the same addresses: "http://HOST:PORT trainer ADDRESS". */
static void pin_frontend(child_t *child, const char *ready)
{
    char text[SPAWN_LINE_MAX];
    snprintf(text, sizeof text, "%s", ready);
    char *trainer = strstr(text, " trainer ");
    CHECKF(trainer != NULL, "a front end says '%s'", ready);
    *trainer = '\0';
    char *port = strrchr(text, ':');
    CHECKF(port != NULL, "a front end says '%s'", ready);
    child_pin(child, "--port", port + 1);
    child_pin(child, "--trainer-endpoint", trainer + strlen(" trainer "));
}

static lk_status_t start_all(serve_t *s, lk_error_t *err)
{
    const lk_config_t *c = &s->config;
    const char *address, *ready;
    char index[24];
    child_t *child = NULL, *fronts[CHILDREN_MAX];
    LK_RETURN_IF_ERROR(start_coordinator(s, &address, err));
    for (uint64_t r = 0; r < c->data_parallel_size; r++) {
        snprintf(index, sizeof index, "%llu", (unsigned long long)r);
        const char *own[] = {"--coordinator-address", address, "--data-parallel-rank", index, NULL};
        LK_RETURN_IF_ERROR(children_start(&s->children, CHILD_ENGINE, r, own, &child, err));
    }
    for (uint64_t f = 0; f < c->api_server_count; f++) {
        snprintf(index, sizeof index, "%llu", (unsigned long long)f);
        const char *own[] = {"--coordinator-address", address, "--frontend-index", index, NULL};
        LK_RETURN_IF_ERROR(children_start(&s->children, CHILD_FRONTEND, f, own, &fronts[f], err));
    }
    for (uint64_t f = c->api_server_count; f-- > 0;) {
        LK_RETURN_IF_ERROR(children_wait_ready(&s->children, fronts[f], &ready, err));
        pin_frontend(fronts[f], ready);
    }
    printf("lockstep: ready on %.*s\n", (int)strcspn(ready, " "), ready);
    fflush(stdout);
    LK_INFO("ready on %s", ready);
    s->announced = s->children.supervised = true;
    return LK_OK;
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
    if (c->data_parallel_min_size > c->data_parallel_size) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "--data-parallel-min-size %llu: --data-parallel-size is %llu",
                            (unsigned long long)c->data_parallel_min_size,
                            (unsigned long long)c->data_parallel_size);
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
    if (config_parse(argc, argv, &s.config, &err) != LK_OK || check_config(&s, &err) != LK_OK) {
        fprintf(stderr, "lockstep: %s\n", err.text);
        return 2;
    }
    config_init_log(&s.config, "launcher");
    CHECK(tool_directory(s.bin, sizeof s.bin));
    lk_loop_t *loop = loop_new(lk_env_real());
    CHECK(loop != NULL);
    loop_catch_signals(loop);
    s.children = (children_t){.config = &s.config,
                              .argv = argv,
                              .argc = argc,
                              .bin = s.bin,
                              .loop = loop,
                              .env = lk_env_real(),
                              .items = s.items};

    int rc = 0;
    lk_status_t status = start_all(&s, &err);
    while (status == LK_OK && loop_stop_reason(loop) == NULL) {
        children_wait(&s.children);
        status = children_check(&s.children, &err);
    }
    if (loop_stop_reason(loop) != NULL) {
        LK_INFO("stopping: %s", loop_stop_reason(loop));
        rc = s.announced ? 0 : 130;
    } else {
        LK_ERROR("%s; stopping everything", err.text);
        rc = 1;
    }
    children_stop(&s.children);
    loop_destroy(&loop);
    return rc;
}
