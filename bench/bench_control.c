/*
 * bench_control.c: what an update costs beside its bytes, on clusters of real processes.
 *
 * 1. Whole sessions of 1 MB, pause to resume.
 * 2. With the null executor, the control path of one update_weights call with a large body: the
 * tensors of a model of 36 layers (399) and BODY characters of base64, as CUDA IPC handles come, in
 * a field that the engine at hand does not read. Over HTTP (one connection kept) and over the
 * trainer's socket. The last name is unknown, so that every rank reads all of it and refuses: front
 * end, commands, both ranks, one round, the answers. Processor time beside it, per call. Floor in
 * the same run: these bytes read once, and handed over twice over ZeroMQ, there and back. Beside
 * it, what jansson alone takes for them.
 *
 *   bench_control [RANKS [UPDATES [BODY [null|cpu]]]]      default: 2 ranks, 200, 300000, null
 */
#include "base/base64.h"
#include "base/buf.h"
#include "base/check.h"
#include "base/env.h"
#include "bench/cluster_kit.h"
#include "proto/json_text.h"

#include <arpa/inet.h>
#include <jansson.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LAYERS 36
#define WARM   20

/* ---- the body ---- */

static char *make_body(const tensors_t *t, size_t filler)
{
    json_t *names = json_array(), *dtypes = json_array(), *shapes = json_array();
    for (size_t i = 0; i < t->n; i++) {
        json_t *shape = json_array();
        for (unsigned d = 0; d < t->list[i].ndim; d++) {
            json_array_append_new(shape, json_integer((json_int_t)t->list[i].shape[d]));
        }
        json_array_append_new(names, json_string(i + 1 < t->n ? t->list[i].name : "nobody.knows"));
        json_array_append_new(dtypes, json_string("bfloat16"));
        json_array_append_new(shapes, shape);
    }
    size_t bytes = filler / 4 * 3;
    uint8_t *noise = malloc(bytes + 1);
    char *text = malloc(BASE64_SIZE(bytes));
    CHECK(noise != NULL && text != NULL);
    lk_env_real()->random(lk_env_real()->ctx, noise, bytes);
    base64_encode(noise, bytes, text);
    json_t *body = json_pack("{s:{s:o, s:o, s:o, s:s}}", "update_info", "names", names,
                             "dtype_names", dtypes, "shapes", shapes, "is_checkpoint_format", text);
    char *dumped = json_dumps(body, 0); /* as Python writes it, with blanks */
    CHECK(dumped != NULL);
    json_decref(body);
    free(noise);
    free(text);
    return dumped;
}

/* ---- HTTP, one connection ---- */

static int connect_http(void)
{
    int on = 1;
    const char *colon = strrchr(bench.url, ':');
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) {
        kit_die("connecting", bench.url);
    }
    return fd;
}

static void send_all(int fd, const char *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t k = send(fd, bytes + done, n - done, MSG_NOSIGNAL);
        CHECK(k > 0);
        done += (size_t)k;
    }
}

/* The status code of the reply, whose text must hold `want`. */
static int call_http(int fd, const char *path, const char *body, const char *want)
{
    static char reply[1 << 16];
    char head[256];
    size_t n = strlen(body), got = 0, whole = SIZE_MAX;
    int len = snprintf(head, sizeof head,
                       "POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                       "Content-Length: %zu\r\n\r\n",
                       path, n);
    send_all(fd, head, (size_t)len);
    send_all(fd, body, n);
    while (got < whole) {
        ssize_t k = recv(fd, reply + got, sizeof reply - 1 - got, 0);
        CHECK(k > 0);
        got += (size_t)k;
        reply[got] = '\0';
        char *end = strstr(reply, "\r\n\r\n"), *length = strcasestr(reply, "content-length:");
        if (end != NULL && length != NULL) {
            whole = (size_t)(end + 4 - reply) + strtoul(length + 15, NULL, 10);
        }
    }
    if (strstr(reply, want) == NULL) {
        kit_die(path, reply);
    }
    return (int)strtoul(reply + 9, NULL, 10);
}

/* ---- measuring ---- */

typedef struct {
    uint64_t frontend, rank;
} cpu_t;

static cpu_t cpu_now(void)
{
    return (cpu_t){kit_cpu_ns("lockstep-api", ""),
                   kit_cpu_ns("lockstep-engine", "--data-parallel-rank 0")};
}

static void report(const char *what, double *us, size_t n, cpu_t before, double floor_us)
{
    cpu_t after = cpu_now();
    kit_print_times(what, us, n);
    printf("    processor time per call: front end %.0f us, rank 0 %.0f us; %.2f times the floor\n",
           (double)(after.frontend - before.frontend) / 1e3 / (double)n,
           (double)(after.rank - before.rank) / 1e3 / (double)n,
           kit_percentile(us, n, 0.5) / floor_us);
}

static void measure_http(const char *body, size_t n, double floor_us)
{
    static double us[KIT_MAX_UPDATES];
    int fd = connect_http();
    cpu_t before = {0};
    for (size_t i = 0; i < n + WARM; i++) {
        before = i == WARM ? cpu_now() : before;
        uint64_t start = kit_now();
        int status = call_http(fd, "/update_weights", body, "nobody.knows");
        us[i < WARM ? 0 : i - WARM] = (double)(kit_now() - start) / 1e3;
        CHECKF(status == 400, "status %d", status);
    }
    report("update_weights over HTTP", us, n, before, floor_us);
    close(fd);
}

static void measure_socket(const char *body, size_t n, double floor_us)
{
    static double us[KIT_MAX_UPDATES];
    cpu_t before = {0};
    for (size_t i = 0; i < n + WARM; i++) {
        before = i == WARM ? cpu_now() : before;
        uint64_t start = kit_now();
        lst_status_t status = lst_call(bench.lst, "update_weights", body, NULL);
        us[i < WARM ? 0 : i - WARM] = (double)(kit_now() - start) / 1e3;
        CHECK(status == LST_ERR_INVALID);
        if (strstr(lst_last_error(bench.lst), "nobody.knows") == NULL) {
            kit_die("update_weights", lst_last_error(bench.lst));
        }
    }
    report("update_weights over the socket", us, n, before, floor_us);
}

static double time_reading(const char *what, const char *body, size_t n, bool jansson)
{
    static double us[KIT_MAX_UPDATES];
    size_t len = strlen(body);
    for (size_t i = 0; i < n; i++) {
        uint64_t start = kit_now();
        json_t *parsed = jansson ? json_loadb(body, len, JSON_REJECT_DUPLICATES, NULL)
                                 : json_text_read(body, len, 0, NULL);
        CHECK(parsed != NULL);
        json_decref(parsed);
        us[i] = (double)(kit_now() - start) / 1e3;
    }
    kit_print_times(what, us, n);
    return kit_percentile(us, n, 0.5);
}

static void run(const model_maker_t *maker, uint32_t ranks, size_t n, size_t filler,
                const char *device)
{
    tensors_t small = {0}, tensors = {0};
    model_maker_t tiny;
    model_maker_init(&tiny, ARCH_QWEN3_MOE);
    tiny.hidden_size = 128;
    kit_make_model(&tiny, &small);
    kit_start_cluster(device, ranks, NULL);
    printf("whole sessions, %s, %u ranks, %.2f MB\n", device, ranks, (double)small.bytes / 1e6);
    kit_measure_updates("idle", &small, n);
    kit_stop_cluster();

    kit_make_model(maker, &tensors);
    char *body = make_body(&tensors, filler);
    kit_start_cluster("null", ranks, NULL);
    kit_must(lst_start(bench.lst), "start_weight_update");
    printf("one call, %u ranks, %zu tensors, %zu bytes of JSON\n", ranks, tensors.n, strlen(body));
    double hand_over = kit_floor_zmq("handed over, ZeroMQ ipc", body, strlen(body));
    (void)time_reading("read once by jansson", body, n, true);
    double floor_us = time_reading("floor: read once", body, n, false) + 2 * hand_over;
    printf("  floor: read once and handed over twice %.0f us\n", floor_us);
    measure_http(body, n, floor_us);
    measure_socket(body, n, floor_us);
    kit_stop_cluster();
    free(body);
}

int main(int argc, char **argv)
{
    uint32_t ranks = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 2;
    size_t n = argc > 2 ? strtoul(argv[2], NULL, 10) : 200;
    size_t filler = argc > 3 ? strtoul(argv[3], NULL, 10) : 300000;
    const char *device = argc > 4 ? argv[4] : "null";
    CHECKF(ranks >= 1 && n >= 1 && n <= KIT_MAX_UPDATES, "RANKS from 1, UPDATES from 1 to %d",
           KIT_MAX_UPDATES);
    model_maker_t maker;
    model_maker_init(&maker, ARCH_QWEN3);
    maker.num_layers = LAYERS;
    maker.hidden_size = 16;
    maker.intermediate_size = 16;
    maker.tie_word_embeddings = false;
    kit_init("bench_control");
    run(&maker, ranks, n, filler, device);
    kit_clean_up();
    return 0;
}
