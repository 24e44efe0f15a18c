/*
 * lockstep-demo: a data-parallel, expert-parallel cluster generates while a trainer replaces its
 * weights in the middle of requests, in place and then, on a second cluster, beside the live ones
 * (--weight-swap shadow); then every stream is recomputed from its spans.
 */
#include "base/check.h"
#include "base/env.h"
#include "deploy/client/http_client.h"
#include "examples/demo/demo_trainer.h"
#include "examples/demo/summary.h"

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
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK_SIZE 16
#define TOLERANCE  1e-3
#define N_RUNS     2

typedef struct {
    bool quick;
    const char *model; /* NULL: make one */
    uint64_t n_sets;
    uint32_t n_streams;
    char dir[64]; /* temporary */
    char model_dir[PATH_MAX];
    char tool[PATH_MAX];
    pid_t cluster, trainer, janitor;
    int alive_fd; /* its end of file tells the janitor that we are gone */
    char url[128], endpoint[256];
    int go_fd, report_fd;
    summary_run_t runs[N_RUNS], *now; /* now: the one under way */
    double drawn;                     /* when the check's progress was shown last */
    bool tty;
} demo_t;

static double now_s(void)
{
    return (double)lk_env_now_ns(lk_env_real()) / 1e9;
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    return remove(path);
}

/* Prints the end of the cluster's log: a failure of a child is explained there. */
static void print_log(const demo_t *d)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/cluster.log", d->dir);
    FILE *f = fopen(path, "r");
    if (f == NULL) {
        return;
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fseek(f, size > 3000 ? size - 3000 : 0, SEEK_SET);
    char line[1024];
    while (fgets(line, sizeof line, f) != NULL) {
        fprintf(stderr, "  | %s", line);
    }
    fclose(f);
}

static void stop_cluster(demo_t *d)
{
    if (d->trainer > 0) {
        kill(d->trainer, SIGKILL);
        waitpid(d->trainer, NULL, 0);
        d->trainer = 0;
    }
    if (d->cluster > 0) {
        kill(d->cluster, SIGTERM);
        waitpid(d->cluster, NULL, 0);
        d->cluster = 0;
    }
}

/* A process that removes our directory once we are gone, whatever ended us: a signal handler cannot
 * do it, and after SIGKILL nobody else is left. A Ctrl-C does not reach its process group. */
static void start_janitor(demo_t *d)
{
    int fds[2];
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    d->janitor = fork();
    CHECK(d->janitor >= 0);
    if (d->janitor > 0) {
        close(fds[0]);
        d->alive_fd = fds[1];
        return;
    }
    char byte;
    close(fds[1]);
    setpgid(0, 0);
    while (read(fds[0], &byte, 1) < 0 && errno == EINTR) {
    }
    nftw(d->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    _exit(0);
}

/* Only what a signal handler may call. */
static void clean_up(demo_t *d)
{
    stop_cluster(d);
    close(d->alive_fd);
    waitpid(d->janitor, NULL, 0);
}

static int give_up(demo_t *d, const char *what)
{
    fprintf(stderr, "\ndemo: FAILED: %s\n", what);
    print_log(d);
    return 1;
}

static demo_t *the_demo; /* for the signal handler */

static void on_signal(int sig)
{
    clean_up(the_demo);
    _exit(128 + sig);
}

/* Runs lockstep-tool with arguments; `out` (may be NULL) gets the read end of its standard output.
 */
static pid_t start_tool(demo_t *d, const char *const *argv, int *out)
{
    int fds[2];
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    char log[PATH_MAX];
    snprintf(log, sizeof log, "%s/cluster.log", d->dir);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        int err = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(fds[1], STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* it ends with us, however we end */
        setpgid(0, 0);                    /* a Ctrl-C ends the cluster through us, once */
        execv(d->tool, (char *const *)argv);
        _exit(127);
    }
    close(fds[1]);
    if (out != NULL) {
        *out = fds[0];
    } else {
        close(fds[0]);
    }
    return pid;
}

static bool make_model(demo_t *d)
{
    if (d->model != NULL) {
        return realpath(d->model, d->model_dir) != NULL;
    }
    snprintf(d->model_dir, sizeof d->model_dir, "%s/model", d->dir);
    const char *argv[] = {"lockstep-tool", "make-model", "--arch", "qwen3_moe", "--out",
                          d->model_dir,    "--seed",     "7",      NULL};
    pid_t pid = start_tool(d, argv, NULL);
    int status;
    return waitpid(pid, &status, 0) == pid && status == 0;
}

/* Starts the cluster and reads the ready line; false when it ends without one. */
static bool start_cluster(demo_t *d)
{
    const char *argv[] = {"lockstep-tool",
                          "serve",
                          d->model_dir,
                          "--port",
                          "0",
                          "--data-parallel-size",
                          "2",
                          "--enable-expert-parallel",
                          "--dtype",
                          "float32",
                          "--max-model-len",
                          "1024",
                          "--weight-swap",
                          d->now->swap,
                          "--weight-transfer-config",
                          "{\"backend\":\"tcp\"}",
                          NULL};
    int out;
    d->cluster = start_tool(d, argv, &out);
    FILE *f = fdopen(out, "r");
    char line[512];
    bool ready = fgets(line, sizeof line, f) != NULL &&
                 sscanf(line, "lockstep: ready on %127s", d->url) == 1;
    fclose(f);
    if (!ready) {
        return false;
    }
    char url[300];
    snprintf(url, sizeof url, "%s/server_info", d->url);
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    bool ok = http_call("GET", url, NULL, NULL, 10, &reply, &err) == LK_OK;
    json_t *info = ok ? json_loads(lk_buf_cstr(&reply.body), 0, NULL) : NULL;
    const char *endpoint = json_string_value(json_object_get(info, "trainer_endpoint"));
    snprintf(d->endpoint, sizeof d->endpoint, "%s", endpoint != NULL ? endpoint : "");
    json_decref(info);
    http_reply_fini(&reply);
    return d->endpoint[0] != '\0';
}

static void start_trainer(demo_t *d, const demo_weights_t *weights)
{
    int go[2], report[2];
    CHECK(pipe2(go, O_CLOEXEC) == 0 && pipe2(report, O_CLOEXEC) == 0);
    d->trainer = fork();
    CHECK(d->trainer >= 0);
    if (d->trainer == 0) {
        close(go[1]); /* its end of file tells the trainer that we are gone */
        close(report[0]);
        close(d->alive_fd);
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        bool pauses = strcmp(d->now->swap, "shadow") != 0;
        _exit(demo_trainer_run(d->endpoint, weights, d->n_sets, pauses, go[0], report[1]));
    }
    close(go[0]);
    close(report[1]);
    d->go_fd = go[1];
    d->report_fd = report[0];
    fcntl(d->report_fd, F_SETFL, O_NONBLOCK);
}

static void draw_progress(const demo_t *d, double tokens_per_s, bool waiting)
{
    uint64_t done = d->now->n_reports;
    int width = 30, filled = (int)((uint64_t)width * done / d->n_sets);
    char bar[64];
    memset(bar, ' ', (size_t)width);
    memset(bar, '#', (size_t)filled);
    bar[width] = '\0';
    printf("%s[%s] %s %llu/%llu  %8.0f tokens/s  version %s%llu%s%s", d->tty ? "\r" : "", bar,
           d->now->title, (unsigned long long)done, (unsigned long long)d->n_sets, tokens_per_s,
           done == 0 ? "default, set-" : "set-", (unsigned long long)done,
           waiting ? "" : "  (updating)", d->tty ? "   " : "\n");
    fflush(stdout);
}

/* The update that has ended, or that is about to begin, closes the one before it. */
static void note_gap(summary_run_t *run)
{
    double gap = streams_longest_gap(run->streams);
    if (run->n_reports > 0) {
        run->gaps[run->n_reports - 1] = LK_MAX(run->gaps[run->n_reports - 1], gap);
    }
}

/* Takes the trainer's next report, if there is one. NULL, or what failed. */
static const char *take_report(demo_t *d, bool *any)
{
    static char why[LK_ERROR_TEXT_MAX + 100];
    summary_run_t *run = d->now;
    update_report_t *report = &run->reports[run->n_reports];
    ssize_t n = read(d->report_fd, report, sizeof *report);
    *any = n == (ssize_t)sizeof *report;
    if (*any && report->error[0] != '\0') {
        snprintf(why, sizeof why, "update %llu: %s", (unsigned long long)report->set,
                 report->error);
        return why;
    }
    if (*any) {
        run->gaps[run->n_reports++] = streams_longest_gap(run->streams);
    }
    return n == 0 && run->n_reports < d->n_sets ? "the trainer ended early" : NULL;
}

/* Streams and updates until every set was pushed and every stream has ended. NULL, or what failed.
 */
static const char *run_updates(demo_t *d, uint64_t tokens_between)
{
    summary_run_t *run = d->now;
    double drawn = now_s();
    uint64_t drawn_tokens = 0, last_tokens = 0, drawn_reports = 0;
    bool updating = false, closing = false;
    size_t open = 1;
    while (!closing || open > 0) { /* all may end at once while new ones are still to start */
        uint64_t tokens = streams_tokens(run->streams);
        closing = run->n_reports == d->n_sets && tokens - last_tokens >= tokens_between;
        open = streams_poll(run->streams, 10, closing);
        if (streams_failure(run->streams) != NULL) {
            return streams_failure(run->streams);
        }
        if (!updating && run->n_reports < d->n_sets && tokens - last_tokens >= tokens_between) {
            note_gap(run);
            updating = true;
            if (write(d->go_fd, "g", 1) != 1) {
                return "the trainer is gone";
            }
        }
        bool reported;
        const char *failure = take_report(d, &reported);
        if (failure != NULL) {
            return failure;
        }
        if (reported) {
            updating = false;
            last_tokens = streams_tokens(run->streams);
        }
        double t = now_s();
        bool news = run->n_reports != drawn_reports;
        if ((d->tty && t - drawn > 0.2) || (!d->tty && news)) {
            draw_progress(d, (double)(streams_tokens(run->streams) - drawn_tokens) / (t - drawn),
                          !updating);
            drawn = t;
            drawn_tokens = streams_tokens(run->streams);
            drawn_reports = run->n_reports;
        }
    }
    note_gap(run);
    printf("\n");
    return NULL;
}

static void verify_progress(void *ctx, size_t done, size_t total)
{
    demo_t *d = ctx;
    double t = now_s();
    if (d->tty && (t - d->drawn > 0.2 || done == total)) {
        d->drawn = t;
        printf("\r  recomputing in one process: %zu%%  ", 100 * done / total);
        fflush(stdout);
    }
}

/* Finds a boundary between two sets inside a stream and moves it by one token. NULL: there is none.
 */
static stream_record_t *shift_one_span(stream_record_t *records, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k + 1 < records[i].n_spans; k++) {
            epoch_span_t *a = &records[i].spans[k], *b = a + 1;
            if (a->end > a->start + 1 && a->epoch != b->epoch) {
                a->end--;
                b->start--;
                return &records[i];
            }
        }
    }
    return NULL;
}

static const char *check_streams(demo_t *d, const demo_weights_t *weights, const summary_run_t *run)
{
    static char why[LK_ERROR_TEXT_MAX + 100];
    size_t n;
    stream_record_t *records = (stream_record_t *)streams_records(run->streams, &n);
    verify_result_t result;
    lk_error_t err = LK_ERROR_INIT;
    if (verify_streams(d->model_dir, weights, d->n_sets, LK_DTYPE_F32, BLOCK_SIZE, records, n,
                       TOLERANCE, verify_progress, d, &result, &err) != LK_OK) {
        snprintf(why, sizeof why, "the check could not run: %s", err.text);
        return why;
    }
    printf("%s  independent check     %s: %llu tokens of %llu streams recomputed; %llu streams "
           "attended to KV of several "
           "versions\n",
           d->tty ? "\r" : "", run->title, (unsigned long long)result.tokens,
           (unsigned long long)result.streams, (unsigned long long)result.mixed_streams);
    printf("                        wrong tokens %llu, logprobs off by more than %g: %llu (worst "
           "%.2g)\n",
           (unsigned long long)result.wrong_tokens, TOLERANCE,
           (unsigned long long)result.wrong_logprobs, result.worst_logprob);
    if (result.wrong_tokens + result.wrong_logprobs > 0) {
        snprintf(why, sizeof why, "the check found tokens of other weights than reported: %s",
                 result.first);
        return why;
    }
    stream_record_t *moved = shift_one_span(records, n);
    if (moved == NULL) {
        return "no stream spans two versions: nothing was shown";
    }
    if (verify_streams(d->model_dir, weights, d->n_sets, LK_DTYPE_F32, BLOCK_SIZE, moved, 1,
                       TOLERANCE, NULL, NULL, &result, &err) != LK_OK) {
        snprintf(why, sizeof why, "the check could not run: %s", err.text);
        return why;
    }
    if (result.wrong_tokens + result.wrong_logprobs == 0) {
        return "the check did not notice a span that was moved by one token";
    }
    printf("%s  the same check with one span moved by one token fails, as it must:\n               "
           "         %s\n",
           d->tty ? "\r" : "", result.first);
    return NULL;
}

static int usage(FILE *to)
{
    fprintf(to, "usage: ./run demo [--quick] [--model DIR] [--updates N] [--streams N]\n");
    return to == stdout ? 0 : 2;
}

static bool parse(int argc, char **argv, demo_t *d)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            d->quick = true;
            d->n_sets = 4;
        } else if (strcmp(argv[i], "--model") == 0 && i + 1 < argc) {
            d->model = argv[++i];
        } else if (strcmp(argv[i], "--updates") == 0 && i + 1 < argc) {
            d->n_sets = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--streams") == 0 && i + 1 < argc) {
            d->n_streams = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else {
            return false;
        }
    }
    return d->n_sets >= 1 && d->n_sets <= SUMMARY_MAX_SETS && d->n_streams >= 1 &&
           d->n_streams <= 1024;
}

static const char *const texts[] = {
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils when",
    "The three most important things about learning to cook are",
};

/* What the real weights say, greedily, before anything is changed. */
static bool print_texts(const demo_t *d)
{
    bool ok = true;
    printf("before the updates it says:\n");
    for (size_t i = 0; ok && i < LK_ARRAY_LEN(texts); i++) {
        char url[200], body[400];
        http_reply_t reply;
        lk_error_t err = LK_ERROR_INIT;
        snprintf(url, sizeof url, "%s/v1/completions", d->url);
        snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":20,\"temperature\":0}",
                 texts[i]);
        ok = http_call("POST", url, body, NULL, 120, &reply, &err) == LK_OK && reply.status == 200;
        json_t *json = ok ? json_loads(lk_buf_cstr(&reply.body), 0, NULL) : NULL;
        const json_t *choice = json_array_get(json_object_get(json, "choices"), 0);
        const char *text = json_string_value(json_object_get(choice, "text"));
        ok = text != NULL;
        if (ok) {
            printf("  %s|", texts[i]);
            for (; *text != '\0'; text++) {
                putchar(*text == '\n' ? ' ' : *text);
            }
            putchar('\n');
        }
        fflush(stdout);
        json_decref(json);
        http_reply_fini(&reply);
    }
    return ok;
}

/* A cluster in this mode, all updates, and its end. NULL, or what failed. */
static const char *run_mode(demo_t *d, const demo_weights_t *weights)
{
    const model_config_t *model = demo_weights_config(weights);
    bool made_up = d->model == NULL;
    if (!start_cluster(d)) {
        return "the cluster did not start";
    }
    printf("cluster: 2 DP ranks%s, --weight-swap %s, ready on %s\n",
           model->num_experts > 0 ? ", experts split between them" : "", d->now->swap, d->url);
    start_trainer(d, weights);
    streams_config_t sc = {.url = d->url,
                           .n_streams = d->n_streams,
                           .vocab_size = model->vocab_size < 256 ? model->vocab_size : 256,
                           .prompt_tokens = 24,
                           .max_tokens = made_up ? 160 : 64,
                           .seed = 1,
                           .texts = made_up ? NULL : texts,
                           .n_texts = LK_ARRAY_LEN(texts)};
    if (!made_up && d->now == d->runs && !print_texts(d)) {
        return "the checkpoint's text could not be had";
    }
    d->now->streams = streams_new(&sc);
    double start = now_s();
    const char *failure = run_updates(d, made_up ? 40ull * d->n_streams : 6ull * d->n_streams);
    d->now->seconds = now_s() - start;
    if (failure == NULL) {
        stop_cluster(d);
        close(d->go_fd);
        close(d->report_fd);
    }
    return failure;
}

static int run(demo_t *d)
{
    if (!make_model(d)) {
        return give_up(d,
                       d->model != NULL ? "the model directory is not there" : "make-model failed");
    }
    demo_weights_t *weights;
    lk_error_t err = LK_ERROR_INIT;
    if (demo_weights_open(d->model_dir, d->model != NULL, &weights, &err) != LK_OK) {
        return give_up(d, err.text);
    }
    const model_config_t *model = demo_weights_config(weights);
    printf("model: %s, %u layers, hidden %u, %u experts, %.2f MB\n",
           d->model != NULL ? d->model : "a random Qwen3-MoE", model->num_layers,
           model->hidden_size, model->num_experts, (double)demo_weights_bytes(weights) / 1e6);
    const char *failure = NULL;
    for (size_t i = 0; i < N_RUNS && failure == NULL; i++) {
        d->now = &d->runs[i];
        failure = run_mode(d, weights);
    }
    if (failure != NULL) {
        return give_up(d, failure);
    }
    summary_print(d->runs, N_RUNS);
    for (size_t i = 0; i < N_RUNS && failure == NULL; i++) {
        for (uint64_t k = 0; k < d->runs[i].n_reports && failure == NULL; k++) {
            failure =
                d->runs[i].reports[k].digests_equal ? NULL : "a rank's digest is not the trainer's";
        }
        failure = failure != NULL ? failure : check_streams(d, weights, &d->runs[i]);
    }
    for (size_t i = 0; i < N_RUNS; i++) {
        streams_destroy(&d->runs[i].streams);
    }
    demo_weights_close(&weights);
    if (failure != NULL) {
        return give_up(d, failure);
    }
    printf("\nverdict: no token came from mixed or stale weights\n");
    return 0;
}

int main(int argc, char **argv)
{
    static demo_t d = {
        .n_sets = 12,
        .n_streams = 16,
        .dir = "/tmp/lockstep-demo-XXXXXX",
        .runs = {{.swap = "inplace", .title = "in place"}, {.swap = "shadow", .title = "shadow"}}};
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        return usage(stdout);
    }
    if (!parse(argc, argv, &d)) {
        return usage(stderr);
    }
    char self[PATH_MAX] = "";
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) {
        perror("demo");
        return 1;
    }
    snprintf(d.tool, sizeof d.tool, "%s/../../deploy/tool/lockstep-tool", dirname(self));
    d.tty = isatty(STDOUT_FILENO);
    struct sigaction action = {.sa_handler = on_signal};
    sigaddset(&action.sa_mask, SIGINT); /* one end is enough */
    sigaddset(&action.sa_mask, SIGTERM);
    sigprocmask(SIG_BLOCK, &action.sa_mask,
                NULL); /* no end between the directory and its janitor */
    if (mkdtemp(d.dir) == NULL) {
        perror(d.dir);
        return 1;
    }
    start_janitor(&d);
    the_demo = &d;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigprocmask(SIG_UNBLOCK, &action.sa_mask, NULL);
    signal(SIGPIPE, SIG_IGN);
    int rc = run(&d);
    clean_up(&d);
    return rc;
}
