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
#include "base/prng.h"
#include "bench/cluster_kit.h"
#include "deploy/client/http_client.h"

#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define STREAMS       16
#define PAUSES        100
#define UPDATES       30
#define RATE_NS       (2 * LK_SECOND_NS)
#define MAX_GAP       (20 * LK_MS_NS) /* between a resume and the next pause, at random below this */
#define HIDDEN        128             /* a model of about 1 MB */
#define MAX_POSITIONS 8192

static char **more_flags; /* of the command line; NULL: none */

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
    kit_must(lst_call(bench.lst, "server_info", NULL, &text), "server_info");
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
    uint64_t start = kit_now();
    while (kit_now() - start < RATE_NS) {
        poll(NULL, 0, 50);
    }
    figures_t b = figures();
    double seconds = (double)(kit_now() - start) / 1e9;
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
        uint64_t before = figures().steps, start = kit_now();
        kit_must(lst_pause(bench.lst, "keep", false), "pause");
        uint64_t paused = kit_now();
        steps[i] = (double)(figures().steps - before);
        uint64_t resuming = kit_now();
        kit_must(lst_resume(bench.lst), "resume");
        pause_us[i] = (double)(paused - start) / 1e3;
        resume_us[i] = (double)(kit_now() - resuming) / 1e3;
    }
    snprintf(label, sizeof label, "pause, %s", what);
    kit_print_times(label, pause_us, PAUSES);
    if (busy) {
        double p50 = kit_percentile(steps, PAUSES, 0.5), p95 = kit_percentile(steps, PAUSES, 0.95);
        printf("  %-34s p50 %8.0f      p95 %8.0f\n", "  steps from asking to standing", p50, p95);
    }
    snprintf(label, sizeof label, "resume, %s", what);
    kit_print_times(label, resume_us, PAUSES);
}

/* ---- */

static void run(const char *device, uint32_t ranks, const tensors_t *tensors)
{
    printf("%s executor, %u DP rank%s, model of %.2f MB in bfloat16\n", device, ranks,
           ranks > 1 ? "s, experts split" : "", (double)tensors->bytes / 1e6);
    kit_start_cluster(device, ranks, more_flags);
    measure_pauses("idle", false);
    kit_measure_updates("idle", tensors, UPDATES);
    start_load();
    measure_rate();
    measure_pauses("generating", true);
    kit_measure_updates("generating", tensors, UPDATES);
    kit_end_child(&bench.load, SIGKILL);
    kit_stop_cluster();
}

int main(int argc, char **argv)
{
    static const char *const devices[] = {"null", "cpu"};
    const char *device = argc > 1 ? argv[1] : NULL;
    uint32_t only = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    more_flags = argc > 3 ? argv + 3 : NULL;
    model_maker_t maker;
    tensors_t tensors = {0};
    kit_init("bench_cluster");
    model_maker_init(&maker, ARCH_QWEN3_MOE);
    maker.hidden_size = HIDDEN;
    maker.max_position_embeddings = MAX_POSITIONS;
    kit_make_model(&maker, &tensors);
    kit_floor_unix();
    const char ping[64] = {0};
    (void)kit_floor_zmq("there and back, ZeroMQ ipc", ping, sizeof ping);
    for (size_t d = 0; d < LK_ARRAY_LEN(devices); d++) {
        for (uint32_t ranks = 1; ranks <= 2; ranks++) {
            if ((device == NULL || strcmp(device, devices[d]) == 0) &&
                (only == 0 || only == ranks)) {
                run(devices[d], ranks, &tensors);
            }
        }
    }
    kit_clean_up();
    return 0;
}
