/*
 * bench_cluster.c: a whole cluster of real processes: steps and tokens per second, what a pause
 * costs while it is idle and while it generates, and what a weight update from pause to resume
 * costs, for the null executor (nothing but Lockstep's own work) and for a tiny mixture of experts
 * on the CPU, each with 1 and 2 DP ranks. In the same run: a bare ping-pong over the kinds of
 * socket that lie under it.
 *
 *   bench_cluster [null|cpu] [RANKS] [flags for serve]      default: all four
 */
#include "base/check.h"
#include "base/env.h"
#include "base/port.h"
#include "base/prng.h"
#include "deploy/client/http_client.h"
#include "engine_core/exec/model_maker.h"
#include "transfer/trainer/lockstep_trainer.h"

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

#define STREAMS       16
#define PAUSES        100
#define UPDATES       30
#define PINGS         2000
#define RATE_NS       (2 * LK_SECOND_NS)
#define MAX_GAP       (20 * LK_MS_NS) /* between a resume and the next pause, at random below this */
#define HIDDEN        128             /* a model of about 1 MB */
#define MAX_POSITIONS 8192
#define MAX_ARGV      64

typedef struct {
    pid_t cluster, load;
    char url[128], endpoint[256];
    lst_t *lst;
    uint32_t ranks;
} bench_t;

static char dir[] = "/tmp/lockstep-bench-XXXXXX";
static char model_dir[64], tool[PATH_MAX];
static char **more_flags; /* of the command line; NULL: none */
static bench_t bench;
static model_config_t model;

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    return remove(path);
}

static void end_child(pid_t *pid, int sig)
{
    if (*pid > 0) {
        kill(*pid, sig);
        waitpid(*pid, NULL, 0);
        *pid = 0;
    }
}

static void clean_up(void)
{
    end_child(&bench.load, SIGKILL);
    end_child(&bench.cluster, SIGTERM);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void die(const char *what, const char *text)
{
    fprintf(stderr, "bench_cluster: %s: %s\n", what, text);
    clean_up();
    exit(1);
}

static void must(lst_status_t status, const char *what)
{
    if (status != LST_OK) {
        die(what, lst_last_error(bench.lst));
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nearest-rank percentile; sorts. */
static double percentile(double *values, size_t n, double p)
{
    qsort(values, n, sizeof *values, by_value);
    size_t k = (size_t)(p * (double)n);
    return values[LK_MIN(k, n - 1)];
}

static void print_times(const char *what, double *us, size_t n)
{
    double p50 = percentile(us, n, 0.5), p95 = percentile(us, n, 0.95);
    printf("  %-34s p50 %8.0f us   p95 %8.0f us   (%zu)\n", what, p50, p95, n);
    fflush(stdout);
}

/* ---- the floor: ping-pong between two processes ---- */

static void floor_unix(void)
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
        uint64_t start = now();
        CHECK(write(fds[0], bytes, sizeof bytes) == sizeof bytes);
        CHECK(read(fds[0], bytes, sizeof bytes) == sizeof bytes);
        us[i] = (double)(now() - start) / 1e3;
    }
    close(fds[0]);
    waitpid(pid, NULL, 0);
    print_times("floor: there and back, unix socket", us, PINGS);
}

static lk_port_t *open_port(port_kind_t kind, bool bind, const char *address)
{
    lk_port_t *port;
    lk_error_t err = LK_ERROR_INIT;
    CHECKF(port_zmq_open(kind, bind, address, NULL, &port, &err) == LK_OK, "%s", err.text);
    return port;
}

/* Waits for one message and gives it back to whoever sent it, or just takes it. */
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
        port_frame_t frame = {in.frames[0].data, in.frames[0].len};
        CHECKF(port_send(port, &in.peer, &frame, 1, &err) == LK_OK, "%s", err.text);
    }
    port_msg_fini(port, &in);
}

static void floor_zmq(void)
{
    char address[128], bytes[64] = {0};
    static double us[PINGS];
    port_ipc_address("bench", address, sizeof address);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        lk_port_t *router = open_port(PORT_ROUTER, true, address);
        for (size_t i = 0; i <= PINGS; i++) {
            take(router, true);
        }
        port_destroy(&router);
        _exit(0);
    }
    lk_port_t *dealer = open_port(PORT_DEALER, false, address);
    for (size_t i = 0; i <= PINGS; i++) { /* the first one connects */
        lk_error_t err = LK_ERROR_INIT;
        uint64_t start = now();
        port_frame_t frame = {bytes, sizeof bytes};
        CHECKF(port_send(dealer, NULL, &frame, 1, &err) == LK_OK, "%s", err.text);
        take(dealer, false);
        us[i > 0 ? i - 1 : 0] = (double)(now() - start) / 1e3;
    }
    port_destroy(&dealer);
    waitpid(pid, NULL, 0);
    print_times("floor: there and back, ZeroMQ ipc", us, PINGS);
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

static void start_cluster(const char *device, uint32_t ranks)
{
    char n[16], line[512] = "", positions[16];
    snprintf(n, sizeof n, "%u", ranks);
    snprintf(positions, sizeof positions, "%d", MAX_POSITIONS);
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
    for (char **extra = more_flags; extra != NULL && *extra != NULL; extra++) {
        CHECKF(n_args + 1 < MAX_ARGV, "more than %d arguments", MAX_ARGV);
        argv[n_args++] = *extra;
    }
    int out;
    bench.ranks = ranks;
    bench.cluster = start_tool(argv, &out);
    FILE *f = fdopen(out, "r");
    if (fgets(line, sizeof line, f) == NULL ||
        sscanf(line, "lockstep: ready on %127s", bench.url) != 1) {
        die("the cluster did not start; see the log", dir);
    }
    fclose(f);
    char url[200], text[512];
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    snprintf(url, sizeof url, "%s/server_info", bench.url);
    if (http_call("GET", url, NULL, NULL, 10, &reply, &err) != LK_OK) {
        die("server_info", err.text);
    }
    json_t *info = json_loads(lk_buf_cstr(&reply.body), 0, NULL);
    const char *endpoint = json_string_value(json_object_get(info, "trainer_endpoint"));
    snprintf(bench.endpoint, sizeof bench.endpoint, "%s", endpoint != NULL ? endpoint : "");
    json_decref(info);
    http_reply_fini(&reply);
    lst_options_t options = {.endpoint = bench.endpoint};
    if (lst_open(&options, &bench.lst, text, sizeof text) != LST_OK) {
        die("connecting", text);
    }
    must(lst_init_tcp(bench.lst, NULL), "init_weight_transfer_engine");
}

static void stop_cluster(void)
{
    lst_close(&bench.lst);
    end_child(&bench.cluster, SIGTERM);
}

/* ---- load, in a process of its own ---- */

static void on_data(void *ctx, const char *text, size_t len)
{
}

static void on_end(void *ctx, int status, const char *error, const char *body)
{
    if (status != 200) {
        fprintf(stderr, "bench_cluster: a completion ended with %d %s %.200s\n", status, error,
                body);
        _exit(1);
    }
    *(bool *)ctx = false;
}

/* Keeps STREAMS completions under way, not streamed: what is measured are the engines. */
static void run_load(void)
{
    static const http_stream_events_t events = {on_data, on_end};
    static bool open[STREAMS];
    http_streams_t *http = http_streams_new();
    char url[200], body[200];
    CHECK(http != NULL);
    snprintf(url, sizeof url, "%s/v1/completions", bench.url);
    for (uint64_t seed = 1;;) {
        for (size_t i = 0; i < STREAMS; i++) {
            if (!open[i]) {
                snprintf(body, sizeof body,
                         "{\"prompt\":[%llu,9,10,11],\"max_tokens\":%d,\"temperature\":1,"
                         "\"seed\":%llu,\"ignore_eos\":true}",
                         (unsigned long long)(8 + seed % 200), 1000 + (int)(seed * 37 % 1000),
                         (unsigned long long)seed);
                seed++;
                open[i] = true;
                CHECK(http_streams_post(http, url, body, NULL, &events, &open[i]) != NULL);
            }
        }
        http_streams_poll(http, 100);
    }
}

static void start_load(void)
{
    fflush(stdout);
    bench.load = fork();
    CHECK(bench.load >= 0);
    if (bench.load == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_load();
    }
}

/* ---- what the ranks say of themselves ---- */

typedef struct {
    uint64_t steps, tokens, running;
} figures_t;

/* Steps of rank 0; tokens and running requests of all. */
static figures_t figures(void)
{
    const char *text;
    must(lst_call(bench.lst, "server_info", NULL, &text), "server_info");
    json_t *info = json_loads(text, 0, NULL), *row;
    figures_t f = {0};
    size_t i;
    json_array_foreach(json_object_get(info, "engines"), i, row)
    {
        uint64_t steps = (uint64_t)json_integer_value(json_object_get(row, "steps"));
        f.steps = i == 0 ? steps : f.steps;
        f.tokens += (uint64_t)json_integer_value(json_object_get(row, "generation_tokens"));
        f.running += (uint64_t)json_integer_value(json_object_get(row, "running"));
    }
    json_decref(info);
    return f;
}

static void measure_rate(void)
{
    while (figures().running < STREAMS) {
        poll(NULL, 0, 5);
    }
    figures_t a = figures();
    uint64_t start = now();
    while (now() - start < RATE_NS) {
        poll(NULL, 0, 50);
    }
    figures_t b = figures();
    double seconds = (double)(now() - start) / 1e9;
    double steps = (double)(b.steps - a.steps) / seconds;
    printf("  %-34s %.0f steps/s (%.0f us each), %.0f tokens/s of %d requests\n", "generating",
           steps, 1e6 / steps, (double)(b.tokens - a.tokens) / seconds, STREAMS);
}

/* Pauses at random moments. */
static void measure_pauses(const char *what, bool busy)
{
    static double pause_us[PAUSES], resume_us[PAUSES], steps[PAUSES];
    char label[64];
    lk_prng_t prng;
    lk_prng_seed(&prng, 7);
    for (size_t i = 0; i < PAUSES; i++) {
        poll(NULL, 0, (int)(lk_prng_below(&prng, MAX_GAP) / LK_MS_NS));
        uint64_t before = figures().steps, start = now();
        must(lst_pause(bench.lst, "keep", false), "pause");
        uint64_t paused = now();
        steps[i] = (double)(figures().steps - before);
        uint64_t resuming = now();
        must(lst_resume(bench.lst), "resume");
        pause_us[i] = (double)(paused - start) / 1e3;
        resume_us[i] = (double)(now() - resuming) / 1e3;
    }
    snprintf(label, sizeof label, "pause, %s", what);
    print_times(label, pause_us, PAUSES);
    if (busy) {
        double p50 = percentile(steps, PAUSES, 0.5), p95 = percentile(steps, PAUSES, 0.95);
        printf("  %-34s p50 %8.0f      p95 %8.0f\n", "  steps from asking to standing", p50, p95);
    }
    snprintf(label, sizeof label, "resume, %s", what);
    print_times(label, resume_us, PAUSES);
}

/* ---- updates ---- */

typedef struct {
    lst_tensor_t *list;
    size_t n;
    uint64_t bytes;
} tensors_t;

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

static void measure_updates(const char *what, const tensors_t *t)
{
    enum { PAUSE, START, UPDATE, FINISH, RESUME, WHOLE, N };
    static const char *const names[N] = {"  pause",  "  start",  "  update_weights",
                                         "  finish", "  resume", "whole update"};
    static double us[N][UPDATES];
    char label[64], version[32];
    for (size_t i = 0; i < UPDATES; i++) {
        const lst_update_options_t packed = {.packed = true};
        uint64_t at[N + 1];
        snprintf(version, sizeof version, "v%zu", i);
        at[PAUSE] = now();
        must(lst_pause(bench.lst, "keep", false), "pause");
        at[START] = now();
        must(lst_start(bench.lst), "start_weight_update");
        at[UPDATE] = now();
        must(lst_update(bench.lst, t->list, t->n, &packed), "update_weights");
        at[FINISH] = now();
        must(lst_finish(bench.lst, version), "finish_weight_update");
        at[RESUME] = now();
        must(lst_resume(bench.lst), "resume");
        at[WHOLE] = now();
        for (size_t k = 0; k < WHOLE; k++) {
            us[k][i] = (double)(at[k + 1] - at[k]) / 1e3;
        }
        us[WHOLE][i] = (double)(at[WHOLE] - at[PAUSE]) / 1e3;
        poll(NULL, 0, 10);
    }
    snprintf(label, sizeof label, "%s, %s", names[WHOLE], what);
    print_times(label, us[WHOLE], UPDATES);
    for (size_t k = 0; k < WHOLE; k++) {
        print_times(names[k], us[k], UPDATES);
    }
}

static void run(const char *device, uint32_t ranks, const tensors_t *tensors)
{
    printf("%s executor, %u DP rank%s, model of %.2f MB in bfloat16\n", device, ranks,
           ranks > 1 ? "s, experts split" : "", (double)tensors->bytes / 1e6);
    start_cluster(device, ranks);
    measure_pauses("idle", false);
    measure_updates("idle", tensors);
    start_load();
    measure_rate();
    measure_pauses("generating", true);
    measure_updates("generating", tensors);
    end_child(&bench.load, SIGKILL);
    stop_cluster();
}

static void on_signal(int sig)
{
    kill(bench.cluster > 0 ? bench.cluster : getpid(), SIGTERM);
    _exit(128 + sig);
}

static void make_model(tensors_t *tensors)
{
    model_maker_t maker;
    lk_error_t err = LK_ERROR_INIT;
    model_maker_init(&maker, ARCH_QWEN3_MOE);
    maker.hidden_size = HIDDEN;
    maker.max_position_embeddings = MAX_POSITIONS;
    snprintf(model_dir, sizeof model_dir, "%s/model", dir);
    if (model_maker_write(&maker, model_dir, &err) != LK_OK ||
        model_config_load(model_dir, &model, &err) != LK_OK ||
        model_tensors_each(&model, add_tensor, tensors, &err) != LK_OK) {
        die("making the model", err.text);
    }
}

int main(int argc, char **argv)
{
    static const char *const devices[] = {"null", "cpu"};
    const char *device = argc > 1 ? argv[1] : NULL;
    uint32_t only = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    more_flags = argc > 3 ? argv + 3 : NULL;
    char self[PATH_MAX] = "";
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0 || mkdtemp(dir) == NULL) {
        perror("bench_cluster");
        return 1;
    }
    snprintf(tool, sizeof tool, "%s/../deploy/tool/lockstep-tool", dirname(self));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    tensors_t tensors = {0};
    make_model(&tensors);
    floor_unix();
    floor_zmq();
    for (size_t d = 0; d < LK_ARRAY_LEN(devices); d++) {
        for (uint32_t ranks = 1; ranks <= 2; ranks++) {
            if ((device == NULL || strcmp(device, devices[d]) == 0) &&
                (only == 0 || only == ranks)) {
                run(devices[d], ranks, &tensors);
            }
        }
    }
    clean_up();
    return 0;
}
