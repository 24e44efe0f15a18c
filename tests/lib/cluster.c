#include "tests/lib/cluster.h"
#include "base/check.h"
#include "base/env.h"
#include "tests/lib/test_main.h"

#include <dirent.h>
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_ARGS 64

static double now_s(void)
{
    return (double)lk_env_now_ns(lk_env_real()) / 1e9;
}

static void tick(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

void wait_for(bool (*cond)(void *ctx), void *ctx, double seconds, const char *what)
{
    double end = now_s() + seconds;
    while (!cond(ctx)) {
        ck_assert_msg(now_s() < end, "after %.0f s still not: %s", seconds, what);
        tick();
    }
}

void cluster_print_log(const cluster_t *c)
{
    FILE *f = fopen(c->log, "r");
    if (f == NULL) {
        return;
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fseek(f, size > 6000 ? size - 6000 : 0, SEEK_SET);
    char line[2048];
    while (fgets(line, sizeof line, f) != NULL) {
        printf("# %s", line);
    }
    fflush(stdout);
    fclose(f);
}

static uint64_t memory_limit, files_limit;

void cluster_limit_files(uint64_t n)
{
    files_limit = n;
}

void cluster_limit_memory(uint64_t bytes)
{
    memory_limit = bytes;
}

void cluster_spawn(cluster_t *c, const char *model, const char *const *args)
{
    memset(c, 0, sizeof *c);
    uint64_t id = lk_env_random_u64(lk_env_real());
    snprintf(c->mark, sizeof c->mark, "%016llx", (unsigned long long)id);
    snprintf(c->log, sizeof c->log, "%s/cluster-%s.log", test_tmpdir(), c->mark);
    const char *lockstep = getenv("LK_TEST_LOCKSTEP");
    const char *argv[MAX_ARGS] = {lockstep != NULL ? lockstep : "deploy/lockstep", "serve", model,
                                  "--port", "0"};
    size_t n = 5;
    for (; args != NULL && *args != NULL; args++) {
        CHECK(n + 1 < MAX_ARGS);
        if (strcmp(*args, "--admin-key") == 0 && args[1] != NULL) {
            snprintf(c->key, sizeof c->key, "%s", args[1]);
        }
        if (strcmp(*args, "--api-key") == 0 && args[1] != NULL) {
            snprintf(c->api_key, sizeof c->api_key, "%s", args[1]);
        }
        argv[n++] = *args;
    }
    int out[2];
    ck_assert_int_eq(pipe2(out, O_CLOEXEC), 0);
    c->launcher = fork();
    ck_assert_int_ge(c->launcher, 0);
    if (c->launcher == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* a test that fails or hangs leaves no cluster */
        setenv("LK_TEST_CLUSTER", c->mark, 1);
        struct rlimit files = {files_limit, files_limit};
        if (files_limit != 0 && setrlimit(RLIMIT_NOFILE, &files) != 0) {
            _exit(127);
        }
        if (memory_limit != 0) {
            test_memory_cap(memory_limit);
        }
        int err = open(c->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(out[1], STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        execvp(argv[0], (char *const *)argv);
        perror(argv[0]);
        _exit(127);
    }
    close(out[1]);
    c->out_fd = out[0];
}

bool cluster_wait_ready(cluster_t *c, double seconds)
{
    char text[1024];
    size_t n = 0;
    double end = now_s() + seconds;
    while (now_s() < end && n + 1 < sizeof text) {
        struct pollfd p = {.fd = c->out_fd, .events = POLLIN};
        if (poll(&p, 1, 50) <= 0) {
            continue;
        }
        ssize_t got = read(c->out_fd, text + n, 1);
        if (got <= 0) {
            return false; /* the launcher closed it: it has ended */
        }
        n += (size_t)got;
        text[n] = '\0';
        if (text[n - 1] == '\n') {
            ck_assert_msg(sscanf(text, "lockstep: ready on %127s", c->url) == 1,
                          "first line of standard output is '%s'", text);
            int status;
            json_t *info = cluster_call(c, "GET", "/server_info", NULL, 200, &status);
            const char *trainer = json_string_value(json_object_get(info, "trainer_endpoint"));
            ck_assert_ptr_nonnull(trainer);
            snprintf(c->trainer, sizeof c->trainer, "%s", trainer);
            json_decref(info);
            return true;
        }
    }
    return false;
}

void cluster_start(cluster_t *c, const char *model, const char *const *args)
{
    cluster_spawn(c, model, args);
    if (!cluster_wait_ready(c, 60)) {
        cluster_print_log(c);
        kill(c->launcher, SIGKILL);
        ck_abort_msg("the cluster did not get ready");
    }
}

/* Does /proc/PID/environ hold the mark, and /proc/PID/cmdline `what`? Zombies have neither. */
static bool is_ours(const char *pid, const char *mark, const char *what)
{
    char path[300], text[65536];
    char want[64];
    snprintf(want, sizeof want, "LK_TEST_CLUSTER=%s", mark);
    snprintf(path, sizeof path, "/proc/%.20s/environ", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    if (n <= 0 || memmem(text, (size_t)n, want, strlen(want)) == NULL) {
        return false;
    }
    if (what == NULL) {
        return true;
    }
    snprintf(path, sizeof path, "/proc/%.20s/cmdline", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    n = read(fd, text, sizeof text);
    close(fd);
    return n > 0 && memmem(text, (size_t)n, what, strlen(what)) != NULL;
}

size_t cluster_pids(const cluster_t *c, const char *what, pid_t *pids, size_t room)
{
    size_t n = 0;
    DIR *dir = opendir("/proc");
    ck_assert_ptr_nonnull(dir);
    struct dirent *e;
    while ((e = readdir(dir)) != NULL) {
        if (e->d_name[0] >= '0' && e->d_name[0] <= '9' && is_ours(e->d_name, c->mark, what)) {
            if (n < room) {
                pids[n] = (pid_t)atoi(e->d_name);
            }
            n++;
        }
    }
    closedir(dir);
    return n;
}

int cluster_wait_gone(cluster_t *c, double seconds)
{
    double end = now_s() + seconds;
    int status = -1;
    bool reaped = false;
    for (;;) {
        if (!reaped && waitpid(c->launcher, &status, WNOHANG) == c->launcher) {
            reaped = true;
        }
        pid_t left[8];
        size_t n = cluster_pids(c, NULL, left, LK_ARRAY_LEN(left));
        if (reaped && n == 0) {
            break;
        }
        if (now_s() > end) {
            cluster_print_log(c);
            for (size_t i = 0; i < n && i < LK_ARRAY_LEN(left); i++) {
                kill(left[i], SIGKILL);
            }
            ck_abort_msg("%zu processes of the cluster are left after %.0f s (launcher %s)", n,
                         seconds, reaped ? "ended" : "still runs");
        }
        tick();
    }
    close(c->out_fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int cluster_stop(cluster_t *c)
{
    kill(c->launcher, SIGTERM);
    return cluster_wait_gone(c, 20);
}

json_t *cluster_call(const cluster_t *c, const char *method, const char *path, const char *body,
                     int want, int *status)
{
    char url[512];
    snprintf(url, sizeof url, "%s%s", c->url, path);
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t rc =
        http_call(method, url, body, c->key[0] != '\0' ? c->key : NULL, 60, &reply, &err);
    if (rc != LK_OK) {
        cluster_print_log(c);
        ck_abort_msg("%s", err.text);
    }
    if (status != NULL) {
        *status = reply.status;
    }
    if (want != 0 && reply.status != want) {
        cluster_print_log(c);
        ck_abort_msg("%s %s: %d, not %d: %s", method, path, reply.status, want,
                     lk_buf_cstr(&reply.body));
    }
    json_error_t je;
    json_t *json = json_loadb((const char *)reply.body.data, reply.body.len, JSON_ALLOW_NUL, &je);
    ck_assert_msg(json != NULL, "%s %s: the reply is no JSON: %s", method, path,
                  lk_buf_cstr(&reply.body));
    http_reply_fini(&reply);
    return json;
}

/* ---- bytes as they are ---- */

int cluster_connect(const cluster_t *c)
{
    char host[64];
    unsigned port;
    ck_assert_int_eq(sscanf(c->url, "http://%63[^:]:%u", host, &port), 2);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    ck_assert_int_eq(inet_pton(AF_INET, host, &address.sin_addr), 1);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Does `text` hold a reply with all of the body that its Content-Length promises? */
static bool is_whole(lk_buf_t *text)
{
    const char *start = lk_buf_cstr(text), *end = strstr(start, "\r\n\r\n");
    const char *length = strcasestr(start, "\r\nContent-Length:");
    return end != NULL && length != NULL && length < end &&
           text->len >= (size_t)(end + 4 - start) + strtoul(length + 17, NULL, 10);
}

void cluster_raw(const cluster_t *c, const void *bytes, size_t len, bool shut, double seconds,
                 lk_buf_t *out)
{
    int fd = cluster_connect(c);
    double end = now_s() + seconds;
    size_t sent = 0;
    char chunk[65536];
    while (!is_whole(out)) {
        ck_assert_msg(now_s() < end, "after %.0f s neither a reply nor a close (%zu of %zu sent)",
                      seconds, sent, len);
        struct pollfd p = {.fd = fd, .events = (short)(POLLIN | (sent < len ? POLLOUT : 0))};
        if (poll(&p, 1, 50) <= 0) {
            continue;
        }
        if (p.revents & POLLOUT) {
            ssize_t n = send(fd, (const char *)bytes + sent, len - sent, MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN) {
                sent = len; /* refused before all was read: what it says may still come */
            } else if (n > 0) {
                sent += (size_t)n;
            }
            if (sent == len && shut) {
                shutdown(fd, SHUT_WR);
            }
        }
        if (p.revents & (POLLIN | POLLHUP | POLLERR)) {
            ssize_t n = recv(fd, chunk, sizeof chunk, 0);
            if (n == 0 || (n < 0 && errno != EAGAIN)) {
                break;
            }
            lk_buf_append(out, chunk, n > 0 ? (size_t)n : 0);
        }
    }
    close(fd);
}

int cluster_call_with(const cluster_t *c, const char *method, const char *path, const char *headers,
                      const void *body, size_t len, json_t **json)
{
    lk_buf_t in, out;
    lk_buf_init(&in, 0);
    lk_buf_init(&out, 0);
    lk_buf_printf(&in, "%s %s HTTP/1.1\r\nHost: test\r\nContent-Length: %zu\r\n%s\r\n", method,
                  path, len, headers);
    lk_buf_append(&in, body, len);
    ck_assert(!in.failed);
    cluster_raw(c, in.data, in.len, false, 60, &out);
    int status = 0;
    const char *text = strstr(lk_buf_cstr(&out), "\r\n\r\n");
    *json = NULL;
    if (text != NULL && sscanf(lk_buf_cstr(&out), "HTTP/1.%*d %d", &status) == 1) {
        json_error_t err;
        *json = json_loads(text + 4, JSON_ALLOW_NUL, &err);
        if (*json == NULL) {
            printf("# %s %s: %s at %d of %zu\n", method, path, err.text, err.position, out.len);
            fflush(stdout);
        }
    }
    lk_buf_fini(&in);
    lk_buf_fini(&out);
    return status;
}

void cluster_make_model(const char *arch, unsigned seed, char *dir, size_t room)
{
    char text[16];
    snprintf(text, sizeof text, "%u", seed);
    snprintf(dir, room, "%s/%s-%u", test_tmpdir(), arch, seed);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        const char *lockstep = getenv("LK_TEST_LOCKSTEP");
        lockstep = lockstep != NULL ? lockstep : "deploy/lockstep";
        dup2(STDERR_FILENO, STDOUT_FILENO); /* standard output is the test protocol's */
        execlp(lockstep, lockstep, "make-model", "--arch", arch, "--seed", text, "--out", dir,
               (char *)NULL);
        _exit(127);
    }
    int status = 0;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "make-model --arch %s failed",
                  arch);
}

static const json_t *json_at(const json_t *root, const char *path)
{
    const json_t *node = root;
    char part[128];
    for (const char *p = path; *p != '\0' && node != NULL;) {
        size_t n = strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, p);
        node = json_is_array(node) ? json_array_get(node, (size_t)atoi(part))
                                   : json_object_get(node, part);
        p += n + (p[n] == '.');
    }
    if (node == NULL) {
        char *text = json_dumps(root, JSON_COMPACT);
        ck_abort_msg("no '%s' in %s", path, text);
    }
    return node;
}

json_int_t json_int_at(const json_t *root, const char *path)
{
    return json_integer_value(json_at(root, path));
}

const char *json_text_at(const json_t *root, const char *path)
{
    const char *text = json_string_value(json_at(root, path));
    ck_assert_msg(text != NULL, "'%s' is no string", path);
    return text;
}

cluster_async_t cluster_call_async(const cluster_t *c, const char *method, const char *path,
                                   const char *body)
{
    return cluster_call_async_with(c, method, path, body, NULL);
}

cluster_async_t cluster_call_async_with(const cluster_t *c, const char *method, const char *path,
                                        const char *body, const char *const *headers)
{
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    cluster_async_t a = {.pid = fork(), .fd = fds[0]};
    ck_assert_int_ge(a.pid, 0);
    if (a.pid == 0) {
        char url[512];
        snprintf(url, sizeof url, "%s%s", c->url, path);
        http_reply_t reply;
        lk_error_t err = LK_ERROR_INIT;
        char status[32];
        if (http_call_with(method, url, body, NULL, headers, 120, &reply, &err) != LK_OK) {
            snprintf(status, sizeof status, "0\n");
            lk_buf_printf(&reply.body, "{\"transport\":\"%s\"}", lk_status_name(err.status));
        } else {
            snprintf(status, sizeof status, "%d\n", reply.status);
        }
        if (write(fds[1], status, strlen(status)) < 0 ||
            write(fds[1], reply.body.data, reply.body.len) < 0) {
            _exit(1);
        }
        _exit(0);
    }
    close(fds[1]);
    return a;
}

bool cluster_async_pending(const cluster_async_t *a)
{
    struct pollfd p = {.fd = a->fd, .events = POLLIN};
    return poll(&p, 1, 0) == 0;
}

json_t *cluster_join(cluster_async_t *a, double seconds, int *status)
{
    lk_buf_t buf;
    lk_buf_init(&buf, 0);
    double end = now_s() + seconds;
    for (;;) {
        struct pollfd p = {.fd = a->fd, .events = POLLIN};
        ck_assert_msg(now_s() < end, "a call was not answered within %.0f s", seconds);
        if (poll(&p, 1, 50) <= 0) {
            continue;
        }
        char chunk[65536];
        ssize_t n = read(a->fd, chunk, sizeof chunk);
        if (n <= 0) {
            break;
        }
        lk_buf_append(&buf, chunk, (size_t)n);
    }
    close(a->fd);
    waitpid(a->pid, NULL, 0);
    char *body = strchr(lk_buf_cstr(&buf), '\n');
    ck_assert_ptr_nonnull(body);
    *status = atoi(lk_buf_cstr(&buf));
    json_t *json = json_loads(body + 1, JSON_ALLOW_NUL, NULL);
    ck_assert_msg(json != NULL, "the reply is no JSON: %.2000s", body);
    lk_buf_fini(&buf);
    return json;
}
