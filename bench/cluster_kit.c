#include "bench/cluster_kit.h"
#include "base/check.h"
#include "base/env.h"
#include "deploy/client/http_client.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PINGS    2000
#define MAX_ARGV 64

bench_t bench;
static const char *name_of_bench = "bench";
static char dir[] = "/tmp/lockstep-bench-XXXXXX";
static char model_dir[64], tool[PATH_MAX];
static model_config_t model;

uint64_t kit_now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    return remove(path);
}

void kit_end_child(pid_t *pid, int sig)
{
    if (*pid > 0) {
        kill(*pid, sig);
        waitpid(*pid, NULL, 0);
        *pid = 0;
    }
}

void kit_clean_up(void)
{
    kit_end_child(&bench.load, SIGKILL);
    kit_end_child(&bench.cluster, SIGTERM);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

_Noreturn void kit_die(const char *what, const char *text)
{
    fprintf(stderr, "%s: %s: %s\n", name_of_bench, what, text);
    kit_clean_up();
    exit(1);
}

void kit_must(lst_status_t status, const char *what)
{
    if (status != LST_OK) {
        kit_die(what, lst_last_error(bench.lst));
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nearest-rank percentile; sorts. */
double kit_percentile(double *values, size_t n, double p)
{
    qsort(values, n, sizeof *values, by_value);
    size_t k = (size_t)(p * (double)n);
    return values[LK_MIN(k, n - 1)];
}

void kit_print_times(const char *what, double *us, size_t n)
{
    double p50 = kit_percentile(us, n, 0.5), p95 = kit_percentile(us, n, 0.95);
    printf("  %-34s p50 %8.0f us   p95 %8.0f us   (%zu)\n", what, p50, p95, n);
    fflush(stdout);
}

/* ---- the floor: ping-pong between two processes ---- */

void kit_floor_unix(void)
{
    int fds[2];
    char bytes[64] = {0};
    static double us[PINGS];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        while (read(fds[1], bytes, sizeof bytes) > 0 && write(fds[1], bytes, sizeof bytes) > 0) {
        }
        _exit(0);
    }
    close(fds[1]);
    for (size_t i = 0; i < PINGS; i++) {
        uint64_t start = kit_now();
        CHECK(write(fds[0], bytes, sizeof bytes) == sizeof bytes);
        CHECK(read(fds[0], bytes, sizeof bytes) == sizeof bytes);
        us[i] = (double)(kit_now() - start) / 1e3;
    }
    close(fds[0]);
    waitpid(pid, NULL, 0);
    kit_print_times("floor: there and back, unix socket", us, PINGS);
}

static lk_port_t *open_port(port_kind_t kind, bool bind, const char *address)
{
    lk_port_t *port;
    lk_error_t err = LK_ERROR_INIT;
    CHECKF(port_zmq_open(kind, bind, address, NULL, &port, &err) == LK_OK, "%s", err.text);
    return port;
}

/* Waits for one message and answers whoever sent it with its first bytes, or just takes it. */
static void take(lk_port_t *port, bool echo)
{
    port_msg_t in;
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t status;
    while ((status = port_recv(port, &in, &err)) == LK_INPROGRESS) {
        struct pollfd fd = {port_fd(port), POLLIN, 0};
        CHECK(poll(&fd, 1, -1) >= 0 || errno == EINTR);
    }
    CHECKF(status == LK_OK, "%s", err.text);
    if (echo) {
        port_frame_t frame = {in.frames[0].data, LK_MIN(in.frames[0].len, (size_t)64)};
        CHECKF(port_send(port, &in.peer, &frame, 1, &err) == LK_OK, "%s", err.text);
    }
    port_msg_fini(port, &in);
}

double kit_floor_zmq(const char *what, const void *bytes, size_t n)
{
    char address[128], label[64];
    static double us[PINGS];
    size_t pings = n > 4096 ? PINGS / 10 : PINGS;
    port_ipc_address("bench", address, sizeof address);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        lk_port_t *router = open_port(PORT_ROUTER, true, address);
        for (size_t i = 0; i <= pings; i++) {
            take(router, true);
        }
        port_destroy(&router);
        _exit(0);
    }
    lk_port_t *dealer = open_port(PORT_DEALER, false, address);
    for (size_t i = 0; i <= pings; i++) { /* the first one connects */
        lk_error_t err = LK_ERROR_INIT;
        uint64_t start = kit_now();
        port_frame_t frame = {bytes, n};
        CHECKF(port_send(dealer, NULL, &frame, 1, &err) == LK_OK, "%s", err.text);
        take(dealer, false);
        us[i > 0 ? i - 1 : 0] = (double)(kit_now() - start) / 1e3;
    }
    port_destroy(&dealer);
    waitpid(pid, NULL, 0);
    snprintf(label, sizeof label, "floor: %s", what);
    kit_print_times(label, us, pings);
    return kit_percentile(us, pings, 0.5);
}

/* ---- the cluster ---- */

static pid_t start_tool(const char *const *argv, int *out)
{
    int fds[2];
    char log[128];
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    snprintf(log, sizeof log, "%s/cluster.log", dir);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        FILE *err = freopen(log, "a", stderr);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        setpgid(0, 0);
        if (err != NULL) {
            execv(tool, (char *const *)argv);
        }
        _exit(127);
    }
    close(fds[1]);
    *out = fds[0];
    return pid;
}

void kit_start_cluster(const char *device, uint32_t ranks, char **more)
{
    char n[16], line[512] = "", positions[16];
    snprintf(n, sizeof n, "%u", ranks);
    snprintf(positions, sizeof positions, "%u", model.max_position_embeddings);
    const char *argv[MAX_ARGV] = {"lockstep-tool",
                                  "serve",
                                  model_dir,
                                  "--port",
                                  "0",
                                  "--device",
                                  device,
                                  "--data-parallel-size",
                                  n,
                                  "--enable-expert-parallel",
                                  "--dtype",
                                  "float32",
                                  "--max-model-len",
                                  positions,
                                  "--weight-transfer-config",
                                  "{\"backend\":\"tcp\"}"};
    size_t n_args = 16;
    for (char **extra = more; extra != NULL && *extra != NULL; extra++) {
        CHECKF(n_args + 1 < MAX_ARGV, "more than %d arguments", MAX_ARGV);
        argv[n_args++] = *extra;
    }
    int out;
    bench.ranks = ranks;
    bench.cluster = start_tool(argv, &out);
    FILE *f = fdopen(out, "r");
    if (fgets(line, sizeof line, f) == NULL ||
        sscanf(line, "lockstep: ready on %127s", bench.url) != 1) {
        kit_die("the cluster did not start; see the log", dir);
    }
    fclose(f);
    char url[200], text[512];
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    snprintf(url, sizeof url, "%s/server_info", bench.url);
    if (http_call("GET", url, NULL, NULL, 10, &reply, &err) != LK_OK) {
        kit_die("server_info", err.text);
    }
    json_t *info = json_loads(lk_buf_cstr(&reply.body), 0, NULL);
    const char *endpoint = json_string_value(json_object_get(info, "trainer_endpoint"));
    snprintf(bench.endpoint, sizeof bench.endpoint, "%s", endpoint != NULL ? endpoint : "");
    json_decref(info);
    http_reply_fini(&reply);
    lst_options_t options = {.endpoint = bench.endpoint};
    if (lst_open(&options, &bench.lst, text, sizeof text) != LST_OK) {
        kit_die("connecting", text);
    }
    kit_must(lst_init_tcp(bench.lst, NULL), "init_weight_transfer_engine");
}

void kit_stop_cluster(void)
{
    lst_close(&bench.lst);
    kit_end_child(&bench.cluster, SIGTERM);
}

/* ---- the model ---- */

static lk_status_t add_tensor(void *ctx, const model_tensor_t *t, lk_error_t *err)
{
    tensors_t *all = ctx;
    all->list = realloc(all->list, (all->n + 1) * sizeof *all->list);
    void *data = malloc(t->numel * 2);
    CHECK(all->list != NULL && data != NULL);
    LK_RETURN_IF_ERROR(model_tensor_random(t, 99, LK_DTYPE_BF16, 0, t->numel, data));
    lst_tensor_t *out = &all->list[all->n++];
    *out =
        (lst_tensor_t){.name = strdup(t->name), .dtype = "bfloat16", .ndim = t->ndim, .data = data};
    memcpy(out->shape, t->shape, sizeof t->shape);
    all->bytes += t->numel * 2;
    return LK_OK;
}

void kit_make_model(const model_maker_t *maker, tensors_t *tensors)
{
    static unsigned made;
    lk_error_t err = LK_ERROR_INIT;
    snprintf(model_dir, sizeof model_dir, "%s/model%u", dir, made++);
    if (model_maker_write(maker, model_dir, &err) != LK_OK ||
        model_config_load(model_dir, &model, &err) != LK_OK ||
        model_tensors_each(&model, add_tensor, tensors, &err) != LK_OK) {
        kit_die("making the model", err.text);
    }
}

/* ---- updates ---- */

void kit_measure_updates(const char *what, const tensors_t *t, size_t n)
{
    enum { PAUSE, START, UPDATE, FINISH, RESUME, WHOLE, N };
    static const char *const names[N] = {"  pause",  "  start",  "  update_weights",
                                         "  finish", "  resume", "whole update"};
    static double us[N][KIT_MAX_UPDATES];
    char label[64], version[32];
    CHECK(n <= KIT_MAX_UPDATES);
    for (size_t i = 0; i < n; i++) {
        const lst_update_options_t packed = {.packed = true};
        uint64_t at[N + 1];
        snprintf(version, sizeof version, "v%zu", i);
        at[PAUSE] = kit_now();
        kit_must(lst_pause(bench.lst, "keep", false), "pause");
        at[START] = kit_now();
        kit_must(lst_start(bench.lst), "start_weight_update");
        at[UPDATE] = kit_now();
        kit_must(lst_update(bench.lst, t->list, t->n, &packed), "update_weights");
        at[FINISH] = kit_now();
        kit_must(lst_finish(bench.lst, version), "finish_weight_update");
        at[RESUME] = kit_now();
        kit_must(lst_resume(bench.lst), "resume");
        at[WHOLE] = kit_now();
        for (size_t k = 0; k < WHOLE; k++) {
            us[k][i] = (double)(at[k + 1] - at[k]) / 1e3;
        }
        us[WHOLE][i] = (double)(at[WHOLE] - at[PAUSE]) / 1e3;
        poll(NULL, 0, 10);
    }
    snprintf(label, sizeof label, "%s, %s", names[WHOLE], what);
    kit_print_times(label, us[WHOLE], n);
    for (size_t k = 0; k < WHOLE; k++) {
        kit_print_times(names[k], us[k], n);
    }
}

/* ---- processor time ---- */

static bool reads(const char *path, char *out, size_t room)
{
    FILE *f = fopen(path, "r");
    size_t n = f != NULL ? fread(out, 1, room - 1, f) : 0;
    if (f != NULL) {
        fclose(f);
    }
    out[n] = '\0';
    for (size_t i = 0; i < n; i++) { /* a command line has NULs between its words */
        out[i] = out[i] != '\0' ? out[i] : ' ';
    }
    return n > 0;
}

static uint64_t thread_ns(pid_t pid)
{
    char path[64], text[128];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    const struct dirent *task;
    while (tasks != NULL && (task = readdir(tasks)) != NULL) {
        char stat[512];
        snprintf(stat, sizeof stat, "%s/%s/schedstat", path, task->d_name);
        if (task->d_name[0] != '.' && reads(stat, text, sizeof text)) {
            sum += strtoull(text, NULL, 10);
        }
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
    return sum;
}

uint64_t kit_cpu_ns(const char *program, const char *argument)
{
    char path[64], list[4096], line[8192];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)bench.cluster,
             (int)bench.cluster);
    if (!reads(path, list, sizeof list)) {
        return 0;
    }
    char *at = list, *end;
    for (long pid; (pid = strtol(at, &end, 10)) > 0; at = end) {
        snprintf(path, sizeof path, "/proc/%ld/cmdline", pid);
        if (reads(path, line, sizeof line) && strstr(line, program) != NULL &&
            strstr(line, argument) != NULL) {
            return thread_ns((pid_t)pid);
        }
    }
    return 0;
}

/* ---- life ---- */

static void on_signal(int sig)
{
    kill(bench.cluster > 0 ? bench.cluster : getpid(), SIGTERM);
    _exit(128 + sig);
}

void kit_init(const char *name)
{
    char self[PATH_MAX] = "";
    name_of_bench = name;
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0 || mkdtemp(dir) == NULL) {
        perror(name);
        exit(1);
    }
    snprintf(tool, sizeof tool, "%s/../deploy/tool/lockstep-tool", dirname(self));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
}
