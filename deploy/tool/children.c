#include "deploy/tool/children.h"
#include "base/check.h"
#include "base/log.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How long a child may take to end after SIGTERM, beyond the time requests are given. */
#define STOP_GRACE_NS (5 * LK_SECOND_NS)

static const struct {
    const char *name, *folder, *program;
} kinds[] = {
    [CHILD_COORDINATOR] = {"coordinator", "coordinator", "lockstep-coordinator"},
    [CHILD_ENGINE] = {"engine", "engine_core", "lockstep-engine"},
    [CHILD_FRONTEND] = {"front end", "api_frontend", "lockstep-api"},
};

static uint64_t now_ns(const children_t *self)
{
    return lk_env_now_ns(self->env);
}

static uint64_t seconds_ns(double seconds)
{
    return (uint64_t)(seconds * 1e9);
}

/* ---- starting ---- */

/* DIR/SUB/NAME in a build tree, DIR/NAME where it is installed. */
static bool find_program(const children_t *self, child_kind_t kind, char *out, size_t room)
{
    snprintf(out, room, "%s/../../%s/%s", self->bin, kinds[kind].folder, kinds[kind].program);
    if (access(out, X_OK) == 0) {
        return true;
    }
    snprintf(out, room, "%s/%s", self->bin, kinds[kind].program);
    return access(out, X_OK) == 0;
}

static void child_name(const child_t *child, char *out, size_t room)
{
    if (child->kind == CHILD_COORDINATOR) {
        snprintf(out, room, "%s", kinds[child->kind].name);
    } else {
        snprintf(out, room, "%s %llu", kinds[child->kind].name, (unsigned long long)child->index);
    }
}

/* One process: the user's flags, then the child's own, which win. */
static lk_status_t launch(children_t *self, child_t *child, lk_error_t *err)
{
    char path[PATH_MAX + 128], name[64], generation[24];
    if (!find_program(self, child->kind, path, sizeof path)) {
        return lk_error_set(err, LK_ERR_NOT_FOUND, "%s is not beside %s; run ./run build",
                            kinds[child->kind].program, self->bin);
    }
    const char *argv[CHILDREN_MAX_ARGV];
    size_t n = 0;
    argv[n++] = kinds[child->kind].program;
    if ((size_t)self->argc + CHILDREN_MAX_OWN + 4 > CHILDREN_MAX_ARGV) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "more than %d arguments",
                            CHILDREN_MAX_ARGV - CHILDREN_MAX_OWN - 4);
    }
    for (int i = 1; i < self->argc; i++) {
        argv[n++] = self->argv[i];
    }
    for (size_t i = 0; i < CHILDREN_MAX_OWN && child->own[i][0] != '\0'; i++) {
        argv[n++] = child->own[i];
    }
    snprintf(generation, sizeof generation, "%llu", (unsigned long long)child->generation);
    argv[n++] = "--generation";
    argv[n++] = generation;
    argv[n] = NULL;
    child_name(child, name, sizeof name);
    spawn_spec_t spec = {.name = name,
                         .path = path,
                         .argv = (char *const *)argv,
                         .stdout_fd = STDERR_FILENO, /* standard output has one line: ready */
                         .stderr_fd = -1,
                         .new_group = true};
    LK_RETURN_IF_ERROR(spawn_start(&spec, &child->spawn, err));
    child->started_ns = child->heard_ns = now_ns(self);
    child->quiet_until_ns = 0;
    child->killed = child->greeted = false;
    child->cpu = (cpu_watch_t){0};
    return LK_OK;
}

lk_status_t children_start(children_t *self, child_kind_t kind, uint64_t index,
                           const char *const *own, child_t **out, lk_error_t *err)
{
    CHECK(self->n < CHILDREN_MAX);
    child_t *child = &self->items[self->n];
    *child = (child_t){.spawn = SPAWN_INIT, .kind = kind, .index = index, .generation = 1};
    for (; own[0] != NULL; own += 2) {
        child_pin(child, own[0], own[1]);
    }
    LK_RETURN_IF_ERROR(launch(self, child, err));
    self->n++;
    *out = child;
    return LK_OK;
}

void child_pin(child_t *child, const char *flag, const char *value)
{
    size_t i = 0;
    while (i < CHILDREN_MAX_OWN && child->own[i][0] != '\0' && strcmp(child->own[i], flag) != 0) {
        i += 2;
    }
    CHECKF(i + 1 < CHILDREN_MAX_OWN, "no room for %s", flag);
    CHECKF(strlen(value) < sizeof child->own[0], "%s: %zu bytes", flag, strlen(value));
    snprintf(child->own[i], sizeof child->own[i], "%s", flag);
    snprintf(child->own[i + 1], sizeof child->own[i + 1], "%s", value);
}

/* "killed by signal 9 (Killed)", or its own words. */
static void describe_end(const children_t *self, const child_t *child, char *out, size_t room)
{
    char how[128];
    spawn_describe(&child->spawn, how, sizeof how);
    if (child->killed) {
        snprintf(out, room, "silent for %.1f s, and killed for it", self->config->dead_after_s);
    } else if (child->spawn.last[0] != '\0') {
        lk_text(out, room, "%s (%s)", how, child->spawn.last);
    } else {
        snprintf(out, room, "%s", how);
    }
}

/* ---- removal (docs/MEMBERSHIP.md) ---- */

static uint64_t engines_left(const children_t *self)
{
    uint64_t n = 0;
    for (size_t i = 0; i < self->n; i++) {
        n += self->items[i].kind == CHILD_ENGINE && !self->items[i].removed;
    }
    return n;
}

/* True if the cluster goes on without this engine. Else *left says why not; "" if it never does. */
static bool may_remove(const children_t *self, const child_t *child, char *left, size_t room)
{
    const lk_config_t *c = self->config;
    uint64_t min = c->data_parallel_min_size, after = engines_left(self) - 1;
    bool shrinks = min != 0 && min < c->data_parallel_size;
    left[0] = '\0';
    if (!self->supervised || child->kind != CHILD_ENGINE || !shrinks) {
        return false;
    }
    if (after < min) {
        snprintf(left, room, "; %llu ranks would be left, fewer than --data-parallel-min-size %llu",
                 (unsigned long long)after, (unsigned long long)min);
    }
    return after >= min;
}

static void tell_removed(const child_t *coordinator, const child_t *engine)
{
    char line[SPAWN_LINE_MAX];
    snprintf(line, sizeof line, "removed %llu %s", (unsigned long long)engine->index,
             engine->removed_why);
    if (!spawn_tell(&coordinator->spawn, line)) {
        /* it has ended, or is stopped and will be killed: its next life is started with the list */
        LK_WARN("%s does not hear that %s is removed", coordinator->spawn.name, engine->spawn.name);
    }
}

/* So that a life that begins knows of all; the lines that follow say why. */
static void pin_removed(children_t *self, child_t *coordinator)
{
    STATIC_ASSERT(CHILDREN_MAX <= 1000, "a rank and its comma take four bytes at most");
    char list[CHILDREN_OWN_LEN] = "";
    size_t n = 0;
    for (size_t i = 0; i < self->n; i++) {
        if (self->items[i].removed) {
            CHECK(n < sizeof list);
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%llu", n > 0 ? "," : "",
                                  (unsigned long long)self->items[i].index);
        }
    }
    CHECK(n < sizeof list);
    if (n > 0) {
        child_pin(coordinator, "--removed-ranks", list);
    }
}

static void remove_engine(children_t *self, child_t *child, const char *why)
{
    child->removed = true;
    lk_text(child->removed_why, sizeof child->removed_why, "%s", why);
    LK_ERROR("%s is removed: %s; %llu ranks go on", child->spawn.name, why,
             (unsigned long long)engines_left(self));
    for (size_t i = 0; i < self->n; i++) {
        if (self->items[i].kind == CHILD_COORDINATOR) {
            pin_removed(self, &self->items[i]);
            tell_removed(&self->items[i], child);
        }
    }
}

/* ---- supervising ---- */

/* It has ended. */
static lk_status_t replace(children_t *self, child_t *child, lk_error_t *err)
{
    char how[SPAWN_LINE_MAX + 160];
    const char *name = child->spawn.name;
    describe_end(self, child, how, sizeof how);
    if (!self->supervised) {
        return lk_error_set(err, LK_ERR_PEER, "%s ended: %s", name, how);
    }
    if (child->restarts >= self->config->engine_restarts) {
        char left[128];
        if (may_remove(self, child, left, sizeof left)) {
            remove_engine(self, child, how);
            return LK_OK;
        }
        return lk_error_set(err, LK_ERR_PEER,
                            "%s ended: %s; it was started again %llu times, as often as "
                            "--engine-restarts allows%s",
                            name, how, (unsigned long long)child->restarts, left);
    }
    child->restarts++;
    child->generation++;
    LK_ERROR("%s ended: %s; it is started again (%llu of %llu)", name, how,
             (unsigned long long)child->restarts,
             (unsigned long long)self->config->engine_restarts);
    spawn_fini(&child->spawn);
    child->spawn = SPAWN_INIT;
    LK_RETURN_IF_ERROR(launch(self, child, err));
    for (size_t i = 0; child->kind == CHILD_COORDINATOR && i < self->n; i++) {
        if (self->items[i].removed) {
            tell_removed(child, &self->items[i]);
        }
    }
    return LK_OK;
}

/* A later life of it can not start: its next one couldn't, either. */
static lk_status_t give_up(children_t *self, child_t *child, lk_error_t *err)
{
    char left[128];
    if (!may_remove(self, child, left, sizeof left)) {
        lk_error_t why = *err;
        return lk_error_set(err, why.status, "%.800s%s", why.text, left);
    }
    child->restarts = self->config->engine_restarts;
    spawn_kill(&child->spawn, SIGKILL);
    spawn_kill(&child->spawn, SIGCONT);
    remove_engine(self, child, err->text);
    return LK_OK;
}

/* What it says. An error: it can not start. */
static lk_status_t listen_to(children_t *self, child_t *child, lk_error_t *err)
{
    const char *text;
    bool patience;
    if (!child->greeted) {
        lk_status_t status = spawn_ready(&child->spawn, &text, err);
        if (status == LK_INPROGRESS) {
            uint64_t limit = seconds_ns(self->config->handshake_timeout_s) + STOP_GRACE_NS;
            return now_ns(self) - child->started_ns < limit
                       ? LK_OK
                       : lk_error_set(err, LK_ERR_TIMEOUT, "%s is not ready after %.0f s",
                                      child->spawn.name, self->config->handshake_timeout_s);
        }
        LK_RETURN_IF_ERROR(status);
        child->greeted = true;
        child->heard_ns = now_ns(self);
        if (child->generation > 1) {
            LK_INFO("%s is back", child->spawn.name);
        }
    }
    if (spawn_beats(&child->spawn, &patience) > 0) {
        child->heard_ns = now_ns(self);
        child->quiet_until_ns =
            patience ? child->heard_ns + seconds_ns(self->config->transfer_timeout_s) : 0;
    }
    return LK_OK;
}

static uint64_t silence_ns(const children_t *self, const child_t *child)
{
    return LK_MAX(child->heard_ns + seconds_ns(self->config->dead_after_s), child->quiet_until_ns);
}

static void kill_if_silent(children_t *self, child_t *child)
{
    if (!self->supervised || !child->greeted || child->killed || child->spawn.reaped) {
        return;
    }
    uint64_t now = now_ns(self), limit = seconds_ns(self->config->dead_after_s);
    bool nearly = now > silence_ns(self, child) - limit / 2;
    bool computes = nearly && cpu_watch_look(&child->cpu, child->spawn.pid, now);
    bool patient = computes && now - child->heard_ns < CPU_WATCH_PATIENCE * limit;
    if (now > silence_ns(self, child) && !patient) {
        LK_ERROR("%s is silent for %.1f s; it is killed", child->spawn.name,
                 (double)(now_ns(self) - child->heard_ns) / 1e9);
        child->killed = true;
        spawn_kill(&child->spawn, SIGKILL);
    }
}

lk_status_t children_check(children_t *self, lk_error_t *err)
{
    for (size_t i = 0; i < self->n; i++) {
        child_t *child = &self->items[i];
        lk_status_t said = child->removed ? LK_OK : listen_to(self, child, err);
        lk_error_t reap_err;
        lk_status_t ended = spawn_reap(&child->spawn, &reap_err);
        if (ended < 0) {
            *err = reap_err;
            return ended;
        }
        if (child->removed) {
            continue;
        }
        if (said < 0) { /* before it was ready: a defect that its next life would have, too */
            LK_RETURN_IF_ERROR(give_up(self, child, err));
            continue;
        }
        if (ended == LK_OK) {
            LK_RETURN_IF_ERROR(replace(self, child, err));
        } else {
            kill_if_silent(self, child);
        }
    }
    return LK_OK;
}

void children_wait(children_t *self)
{
    struct pollfd fds[2 * CHILDREN_MAX];
    size_t n = 0;
    uint64_t now = now_ns(self), until = now + LK_SECOND_NS;
    uint64_t half = seconds_ns(self->config->dead_after_s) / 2;
    for (size_t i = 0; i < self->n; i++) {
        const child_t *child = &self->items[i];
        if (child->spawn.status_fd >= 0 && !child->removed) {
            fds[n++] = (struct pollfd){.fd = child->spawn.status_fd, .events = POLLIN};
        }
        if (!child->spawn.reaped && child->spawn.pid_fd >= 0) {
            fds[n++] = (struct pollfd){.fd = child->spawn.pid_fd, .events = POLLIN};
        }
        if (self->supervised && child->greeted && !child->killed && !child->removed) {
            uint64_t end = silence_ns(self, child);
            uint64_t look = now > end - half ? now + CPU_WATCH_NS / 2 : end - half;
            until = LK_MIN(until, look);
        }
    }
    loop_wait(self->loop, fds, n, until);
}

lk_status_t children_wait_ready(children_t *self, child_t *child, const char **text,
                                lk_error_t *err)
{
    for (;;) {
        LK_RETURN_IF_ERROR(children_check(self, err));
        if (child->greeted) {
            return spawn_ready(&child->spawn, text, err);
        }
        if (loop_stop_reason(self->loop) != NULL) {
            return lk_error_set(err, LK_ERR_CANCELED, "%s while starting",
                                loop_stop_reason(self->loop));
        }
        children_wait(self);
    }
}

/* ---- stopping ---- */

static bool all_reaped(children_t *self, bool frontends)
{
    bool all = true;
    for (size_t i = 0; i < self->n; i++) {
        child_t *child = &self->items[i];
        lk_error_t err = LK_ERROR_INIT;
        if ((child->kind == CHILD_FRONTEND) != frontends) {
            continue;
        }
        lk_status_t status = child->spawn.reaped ? LK_OK : spawn_reap(&child->spawn, &err);
        if (status < 0) {
            LK_ERROR("%s", err.text);
        }
        all &= status != LK_INPROGRESS;
    }
    return all;
}

static void signal_all(children_t *self, bool frontends, int signum)
{
    for (size_t i = 0; i < self->n; i++) {
        child_t *child = &self->items[i];
        if ((child->kind == CHILD_FRONTEND) != frontends || child->spawn.reaped) {
            continue;
        }
        if (signum == SIGKILL) {
            LK_WARN("%s did not end; it is killed", child->spawn.name);
        }
        spawn_kill(&child->spawn, signum);
        spawn_kill(&child->spawn, SIGCONT); /* a stopped child could not end */
    }
}

/* SIGTERM, and SIGKILL for those that need longer than ns. */
static void stop_some(children_t *self, bool frontends, uint64_t ns)
{
    signal_all(self, frontends, SIGTERM);
    uint64_t end = now_ns(self) + ns;
    while (!all_reaped(self, frontends)) {
        if (now_ns(self) > end) {
            signal_all(self, frontends, SIGKILL);
            end = UINT64_MAX;
        }
        /* The loop's stop flag may be set, and then loop_wait returns at once: wait on the pids. */
        struct pollfd fds[CHILDREN_MAX];
        nfds_t n = 0;
        for (size_t i = 0; i < self->n; i++) {
            const child_t *child = &self->items[i];
            if ((child->kind == CHILD_FRONTEND) == frontends && !child->spawn.reaped) {
                fds[n++] = (struct pollfd){.fd = child->spawn.pid_fd, .events = POLLIN};
            }
        }
        poll(fds, n, 200);
    }
}

void children_stop(children_t *self)
{
    stop_some(self, true, seconds_ns(self->config->shutdown_timeout_s) + STOP_GRACE_NS);
    stop_some(self, false, STOP_GRACE_NS);
    for (size_t i = 0; i < self->n; i++) {
        spawn_fini(&self->items[i].spawn);
    }
}
