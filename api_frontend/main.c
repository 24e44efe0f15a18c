/* lockstep-api: the HTTP front end. Start reading at frontend.h. */
#include "api_frontend/frontend.h"
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/spawn.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef struct {
    struct event_base *base;
    frontend_t *frontend;
    int status_fd;
    lk_error_t end;
} app_t;

static lk_status_t open_port(void *ctx, port_kind_t kind, bool bind, const char *address,
                             const char *what, lk_port_t **out, lk_error_t *err)
{
    char fresh[128];
    if (address == NULL) {
        port_ipc_address(what, fresh, sizeof fresh);
        address = fresh;
    }
    return port_zmq_open(kind, bind, address, NULL, out, err);
}

static void on_ready(void *ctx, const char *text)
{
    spawn_child_report(&((app_t *)ctx)->status_fd, true, text);
}

static void on_beat(void *ctx, bool patience)
{
    spawn_child_beat(((app_t *)ctx)->status_fd, patience);
}

static void on_end(void *ctx, const lk_error_t *err)
{
    app_t *app = ctx;
    app->end = *err;
    event_base_loopbreak(app->base);
}

static void on_signal(evutil_socket_t signum, short what, void *ctx)
{
    frontend_stop(((app_t *)ctx)->frontend, signum == SIGTERM ? "SIGTERM" : "SIGINT");
}

static void on_parent(evutil_socket_t fd, short what, void *ctx)
{
    char byte;
    if (read(fd, &byte, 1) == 0) { /* nobody is left to wait for a drain */
        lk_error_t err;
        lk_error_set(&err, LK_ERR_PEER, "the launcher is gone");
        on_end(ctx, &err);
    }
}

/* Thousands of streams need thousands of descriptors. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static lk_status_t run(app_t *app, const lk_config_t *config, int parent_fd, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(frontend_check_config(config, err));
    tokenizer_t *tokenizer = NULL;
    lk_status_t status = tokenizer_load(config->model, &tokenizer, err);
    if (status == LK_ERR_NOT_FOUND) { /* decision 21: ids work without one */
        LK_WARN("%s; text prompts will be refused", err->text);
    } else if (status != LK_OK) {
        return status;
    }
    frontend_deps_t deps = {
        .base = app->base,
        .env = lk_env_real(),
        .tokenizer = tokenizer,
        .http_limits = HTTP_LIMITS_DEFAULT,
        .ctx = app,
        .open_port = open_port,
        .on_ready = on_ready,
        .on_beat = on_beat,
        .on_end = on_end,
    };
    status = frontend_new(config, &deps, &app->frontend, err);
    if (status == LK_OK) {
        struct event *events[] = {
            evsignal_new(app->base, SIGTERM, on_signal, app),
            evsignal_new(app->base, SIGINT, on_signal, app),
            parent_fd >= 0 ? event_new(app->base, parent_fd, EV_READ | EV_PERSIST, on_parent, app)
                           : NULL,
        };
        for (size_t i = 0; i < LK_ARRAY_LEN(events); i++) {
            CHECK(events[i] == NULL || event_add(events[i], NULL) == 0);
        }
        event_base_dispatch(app->base);
        for (size_t i = 0; i < LK_ARRAY_LEN(events); i++) {
            if (events[i] != NULL) {
                event_free(events[i]);
            }
        }
        status = app->end.status;
        *err = app->end;
    }
    frontend_destroy(&app->frontend);
    tokenizer_destroy(&tokenizer);
    return status;
}

int main(int argc, char **argv)
{
    lk_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    app_t app = {.status_fd = -1};
    int parent_fd = -1;
    memory_keep();
    if (config_parse(argc, argv, &config, &err) != LK_OK ||
        spawn_child_fds(&parent_fd, &app.status_fd, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        return 2;
    }
    char who[32];
    snprintf(who, sizeof who, "api %u", (unsigned)config.frontend_index);
    config_init_log(&config, who);
    signal(SIGPIPE, SIG_IGN);
    raise_descriptor_limit();
    app.base = event_base_new();
    CHECK(app.base != NULL);
    lk_status_t status = run(&app, &config, parent_fd, &err);
    if (status != LK_OK) {
        LK_ERROR("%s", err.text);
        spawn_child_report(&app.status_fd, false, err.text);
    }
    event_base_free(app.base);
    return status == LK_OK ? 0 : 1;
}
