/*
 * bench_frontend.c: many streams through the real front end, from engines that make one token per
 * stream and step, over ZeroMQ and HTTP; beside it a process whose bare epoll loop write()s as many
 * bytes to as many sockets, one write per token. The engines and the clients are this process: the
 * front end has the other core. Paced first, then flat out; on a busy machine the figures per CPU
 * second are the ones to look at.
 *
 *   bench_frontend [STREAMS] [TOKENS] [STEP_MS]      (500 200 10, then flat out; STEP_MS 0: flat
 *                                                     out alone)
 */
#include "api_frontend/frontend.h"
#include "base/check.h"
#include "proto/codec.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_STREAMS 4096
#define MAX_CHUNK   4096
#define FLAT_TOKENS 600 /* of a stream, flat out */

static size_t n_streams = 500, n_tokens = 200, step_ms = 10;
static size_t chunk_bytes; /* per token, as the front end has sent them; what the floor sends */

typedef struct {
    int fd;
    uint64_t start_ns, end_ns;
    char tail[16]; /* last bytes, to find "[DONE]" */
} client_t;
static client_t clients[MAX_STREAMS];

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* ---- the front end, in a child ---- */

typedef struct {
    struct event_base *base;
    int out;
} child_t;

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
    int port = 0;
    CHECK(sscanf(text, "http://127.0.0.1:%d", &port) == 1);
    CHECK(write(((child_t *)ctx)->out, &port, sizeof port) == sizeof port);
}

static void on_end(void *ctx, const lk_error_t *err)
{
    event_base_loopbreak(((child_t *)ctx)->base);
}

static void on_parent(evutil_socket_t fd, short what, void *ctx)
{
    event_base_loopbreak(((child_t *)ctx)->base);
}

static void run_child(const char *coordinator, int in, int out)
{
    lk_config_t config;
    config_defaults(&config);
    config.model = "bench-model";
    config.port = 0;
    config.coordinator_address = coordinator;
    child_t child = {event_base_new(), out};
    frontend_deps_t deps = {.base = child.base,
                            .env = lk_env_real(),
                            .http_limits = HTTP_LIMITS_DEFAULT,
                            .ctx = &child,
                            .open_port = open_port,
                            .on_ready = on_ready,
                            .on_end = on_end};
    frontend_t *frontend;
    lk_error_t err = LK_ERROR_INIT;
    CHECKF(frontend_new(&config, &deps, &frontend, &err) == LK_OK, "%s", err.text);
    struct event *parent = event_new(child.base, in, EV_READ, on_parent, &child);
    event_add(parent, NULL);
    event_base_dispatch(child.base);
    event_free(parent);
    frontend_destroy(&frontend);
    event_base_free(child.base);
}

/* ---- the floor, in a child: the same bytes by write() and epoll ---- */

static struct {
    int fd;
    size_t sent;
    bool waits; /* for room, with epoll */
} sinks[MAX_STREAMS];

/* Writes what is due to one socket. Only its last write may be shorter than a chunk. */
static void sink_write(size_t i, int epoll, size_t due)
{
    char chunk[MAX_CHUNK];
    memset(chunk, 'x', chunk_bytes);
    while (sinks[i].sent < due) {
        size_t n = LK_MIN(chunk_bytes - sinks[i].sent % chunk_bytes, due - sinks[i].sent);
        if (sinks[i].sent + n == n_tokens * chunk_bytes) {
            memcpy(chunk + n - 6, "[DONE]", 6);
        }
        ssize_t put = write(sinks[i].fd, chunk, n);
        CHECKF(put > 0 || errno == EAGAIN, "write: %s", strerror(errno));
        bool waits = put < 0;
        if (waits != sinks[i].waits) {
            struct epoll_event event = {.events = waits ? EPOLLOUT : 0, .data.u32 = (uint32_t)i};
            CHECK(epoll_ctl(epoll, EPOLL_CTL_MOD, sinks[i].fd, &event) == 0);
            sinks[i].waits = waits;
        }
        if (waits) {
            return;
        }
        sinks[i].sent += (size_t)put;
    }
}

static void run_floor(int in, int out)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1, epoll = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof address;
    CHECK(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 4096) == 0 &&
          getsockname(listener, (struct sockaddr *)&address, &len) == 0);
    int port = ntohs(address.sin_port);
    CHECK(write(out, &port, sizeof port) == sizeof port);
    for (size_t i = 0; i < n_streams; i++) {
        struct epoll_event event = {.data.u32 = (uint32_t)i};
        int fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
        sinks[i].fd = fd;
    }
    for (size_t t = 1, behind = 1; t <= n_tokens || behind > 0; t++) {
        char byte;
        if (step_ms > 0 && t <= n_tokens) {
            CHECK(read(in, &byte, 1) == 1); /* the parent's clock */
        }
        struct epoll_event ready[256];
        int n = epoll_wait(epoll, ready, 256, t <= n_tokens ? 0 : 10);
        size_t due = LK_MIN(t, n_tokens) * chunk_bytes;
        for (int i = 0; i < n; i++) {
            sink_write(ready[i].data.u32, epoll, due);
        }
        behind = 0;
        for (size_t i = 0; i < n_streams; i++) {
            if (!sinks[i].waits) {
                sink_write(i, epoll, due);
            }
            behind += sinks[i].sent < n_tokens * chunk_bytes;
        }
    }
}

/* ---- engines and coordinator ---- */

static lk_port_t *handshake, *events, *stats, *input, *output;
static struct {
    uint64_t handle;
    size_t made;
} running[MAX_STREAMS];
static size_t n_running;

static void put(lk_port_t *port, const port_peer_t *peer, const msg_t *msg)
{
    static lk_buf_t envelope, body;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_clear(&envelope);
    lk_buf_clear(&body);
    CHECKF(msg_encode(msg, &envelope, &body, &err) == LK_OK, "%s", err.text);
    port_frame_t frames[2] = {{envelope.data, envelope.len}, {body.data, body.len}};
    CHECKF(port_send(port, peer, frames, 2, &err) == LK_OK, "%s", err.text);
}

static bool take(lk_port_t *port, msg_t *msg, port_peer_t *peer)
{
    port_msg_t in;
    lk_error_t err = LK_ERROR_INIT;
    if (port == NULL || port_recv(port, &in, &err) != LK_OK) {
        return false;
    }
    CHECK(msg_decode(in.frames[0].data, in.frames[0].len, in.frames[1].data, in.frames[1].len, msg,
                     &err) == LK_OK);
    *peer = in.peer;
    port_msg_fini(port, &in);
    return true;
}

static lk_port_t *open_or_die(port_kind_t kind, bool bind, const char *address)
{
    lk_port_t *port;
    lk_error_t err = LK_ERROR_INIT;
    CHECKF(open_port(NULL, kind, bind, address, "bench", &port, &err) == LK_OK, "%s", err.text);
    return port;
}

static void turn_cluster(void)
{
    msg_t msg;
    port_peer_t peer;
    static bool connected;
    while (take(handshake, &msg, &peer)) {
        if (msg.type == MSG_HELLO) {
            input = open_or_die(PORT_DEALER, false, msg_cstr(msg.hello.input_address));
            output = open_or_die(PORT_PUSH, false, msg_cstr(msg.hello.output_address));
            msg_t init = {.type = MSG_INIT};
            init.init = (msg_init_t){.group_epoch = 1,
                                     .dp_size = 1,
                                     .n_frontends = 1,
                                     .events_address = msg_str(port_address(events)),
                                     .stats_address = msg_str(port_address(stats))};
            put(handshake, &peer, &init);
            msg_t here = {.type = MSG_ENGINE_HERE};
            here.engine_here.generation = 1;
            here.engine_here.group_epoch = 1;
            put(input, NULL, &here);
        }
        connected |= msg.type == MSG_READY;
        msg_fini(&msg);
    }
    while (take(events, &msg, &peer)) {
        msg_fini(&msg);
    }
    if (connected && n_running == 0) {
        msg_t s = {.type = MSG_STATS};
        s.stats = (msg_stats_t){.serving = true,
                                .group_epoch = 1,
                                .run = true,
                                .max_model_len = 1 << 20,
                                .vocab_size = 300};
        put(stats, NULL, &s);
    }
    while (take(input, &msg, &peer)) {
        if (msg.type == MSG_ADD) {
            CHECK(n_running < MAX_STREAMS);
            running[n_running].handle = msg.add.handle;
            running[n_running++].made = 0;
        }
        msg_fini(&msg);
    }
}

/* One token for every stream, in one message. */
static void step(void)
{
    static msg_output_t outputs[MAX_STREAMS];
    static const uint32_t token = 42;
    for (size_t i = 0; i < n_running; i++) {
        bool last = ++running[i].made == n_tokens;
        outputs[i] = (msg_output_t){.handle = running[i].handle,
                                    .token_ids = {&token, 4},
                                    .epoch = 1,
                                    .version = msg_str("default"),
                                    .stop_token = -1,
                                    .finish_reason = last ? FINISH_LENGTH : FINISH_NONE};
    }
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.outputs.items = outputs;
    msg.outputs.outputs.count = n_running;
    put(output, NULL, &msg);
}

/* ---- clients ---- */

static int connect_to(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECKF(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "%s", strerror(errno));
    return fd;
}

/* Reads what is there; returns how many streams ended. */
static size_t read_clients(int epoll, int timeout_ms, size_t *bytes)
{
    struct epoll_event ready[256];
    size_t ended = 0;
    int n = epoll_wait(epoll, ready, 256, timeout_ms);
    for (int i = 0; i < n; i++) {
        client_t *c = &clients[ready[i].data.u32];
        char buf[65536];
        size_t kept = strlen(c->tail);
        memcpy(buf, c->tail, kept);
        ssize_t got = read(c->fd, buf + kept, sizeof buf - kept - 1);
        CHECKF(got > 0 || errno == EAGAIN, "a stream was cut");
        if (got <= 0) {
            continue;
        }
        *bytes += (size_t)got;
        size_t len = kept + (size_t)got;
        if (c->end_ns == 0 && memmem(buf, len, "[DONE]", 6) != NULL) {
            c->end_ns = now();
            ended++;
        }
        size_t keep = LK_MIN(len, (size_t)8);
        memcpy(c->tail, buf + len - keep, keep);
        c->tail[keep] = '\0';
    }
    return ended;
}

static void open_clients(int port, int epoll, bool http)
{
    static const char body[] = "{\"prompt\":[1,2,3,4],\"max_tokens\":%zu,\"stream\":true}";
    for (size_t i = 0; i < n_streams; i++) {
        client_t *c = &clients[i];
        *c = (client_t){.fd = connect_to(port), .start_ns = now()};
        if (http) {
            char text[256], request[512];
            int len = snprintf(text, sizeof text, body, n_tokens);
            int n = snprintf(request, sizeof request,
                             "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                             "%d\r\n\r\n%s",
                             len, text);
            CHECK(write(c->fd, request, (size_t)n) == n);
        }
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event) == 0);
    }
}

static double cpu_seconds(const struct rusage *u)
{
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           1e-6 * (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec);
}

typedef struct {
    double rate;    /* tokens per second of all streams together */
    double per_cpu; /* tokens per second of processor time: what one busy core would do */
} figures_t;

static figures_t report(const char *name, uint64_t elapsed, size_t bytes, double cpu, long rss_kb)
{
    static double spans[MAX_STREAMS];
    for (size_t i = 0; i < n_streams; i++) {
        spans[i] = 1e-9 * (double)(clients[i].end_ns - clients[i].start_ns);
        close(clients[i].fd);
    }
    qsort(spans, n_streams, sizeof spans[0], compare);
    double s = 1e-9 * (double)elapsed, tokens = (double)(n_streams * n_tokens);
    printf("  %-10s %8.0f tokens/s  %8.0f per CPU second  %6.1f MB/s  CPU %5.1f %%  stream p50 "
           "%.3f s p99 %.3f s  %ld MB\n",
           name, tokens / s, tokens / cpu, (double)bytes / s / 1e6, 100 * cpu / s,
           spans[n_streams / 2], spans[n_streams * 99 / 100], rss_kb / 1024);
    fflush(stdout);
    return (figures_t){tokens / s, tokens / cpu};
}

static figures_t measure(bool http)
{
    int to_child[2], from_child[2], port = 0;
    CHECK(pipe(to_child) == 0 && pipe(from_child) == 0);
    char address[128];
    port_ipc_address("bench", address, sizeof address);
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(to_child[1]);
        if (http) {
            run_child(address, to_child[0], from_child[1]);
        } else {
            run_floor(to_child[0], from_child[1]);
        }
        _exit(0);
    }
    close(to_child[0]);
    if (http) {
        handshake = open_or_die(PORT_ROUTER, true, address);
        events = open_or_die(PORT_PULL, true, NULL);
        stats = open_or_die(PORT_PUB, true, NULL);
    }
    fcntl(from_child[0], F_SETFL, O_NONBLOCK);
    while (read(from_child[0], &port, sizeof port) != sizeof port) {
        if (http) {
            turn_cluster();
        }
    }
    int epoll = epoll_create1(0);
    open_clients(port, epoll, http);
    while (http && n_running < n_streams) {
        turn_cluster();
    }
    uint64_t start = now();
    size_t ended = 0, bytes = 0, steps = 0;
    while (ended < n_streams) {
        uint64_t due = start + steps * step_ms * LK_MS_NS;
        if (steps < n_tokens && now() >= due) {
            if (http) {
                step();
            } else if (step_ms > 0) {
                CHECK(write(to_child[1], "x", 1) == 1);
            }
            steps++;
        }
        ended += read_clients(epoll, steps < n_tokens && step_ms == 0 ? 0 : 1, &bytes);
    }
    uint64_t elapsed = now() - start;
    close(to_child[1]);
    int status;
    struct rusage usage;
    CHECK(wait4(pid, &status, 0, &usage) == pid && status == 0);
    if (http) {
        chunk_bytes = LK_MIN(bytes / (n_streams * n_tokens), (size_t)MAX_CHUNK);
    }
    figures_t figures = report(http ? "front end" : "bare epoll", elapsed, bytes,
                               cpu_seconds(&usage), usage.ru_maxrss);
    close(epoll);
    close(from_child[0]);
    close(from_child[1]);
    if (http) {
        lk_port_t **ports[] = {&handshake, &events, &stats, &input, &output};
        for (size_t i = 0; i < LK_ARRAY_LEN(ports); i++) {
            port_destroy(ports[i]);
        }
    }
    n_running = 0;
    return figures;
}

static void compare_both(void)
{
    if (step_ms > 0) {
        printf("%zu streams of %zu tokens, a step every %zu ms\n", n_streams, n_tokens, step_ms);
    } else {
        printf("%zu streams of %zu tokens, flat out\n", n_streams, n_tokens);
    }
    figures_t front = measure(true), bare = measure(false);
    printf("  front end / bare epoll: %.2f by the clock, %.2f by processor time\n",
           front.rate / bare.rate, front.per_cpu / bare.per_cpu);
}

int main(int argc, char **argv)
{
    size_t *const args[] = {&n_streams, &n_tokens, &step_ms};
    for (int i = 1; i < argc && i <= 3; i++) {
        *args[i - 1] = strtoul(argv[i], NULL, 10);
    }
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    CHECK(n_streams > 0 && n_streams <= MAX_STREAMS && n_tokens > 0);
    compare_both();
    if (argc < 4 && step_ms > 0) {
        step_ms = 0;
        n_tokens = FLAT_TOKENS;
        compare_both();
    }
    return 0;
}
