/*
 * bench_tcp: weights over the tcp engine beside a plain socket copy of the same bytes in the same
 * run, with and without the ranks' tensor digests, for 1 and 2 ranks. Processes, not threads: each
 * rank is a child, as in a cluster. GB/s are of one rank's payload.
 *
 *     bench_tcp [MEGABYTES]
 */
#include "base/check.h"
#include "bench/plain_sink.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/backends/transfer_sender.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define TENSOR_BYTES (16u << 20)
#define MAX_TENSORS  4096
#define TOKEN        "bench"

static tensor_desc_t descs[MAX_TENSORS];
static const void *data[MAX_TENSORS];
static char names[MAX_TENSORS][24];
static size_t n_tensors;

static double seconds(void)
{
    return (double)lk_env_now_ns(lk_env_real()) / 1e9;
}

static void run_rank(uint32_t rank, uint32_t n_ranks, uint16_t port, bool packed, bool digest)
{
    lk_error_t err = LK_ERROR_INIT;
    plain_sink_t storage;
    plain_sink_init(&storage, n_tensors, TENSOR_BYTES, digest);
    weight_sink_t sink = plain_sink(&storage);
    void *state = calloc(1, wte_tcp.state_size);
    CHECK(state != NULL);
    wte_context_t ctx = {rank, n_ranks, 1, lk_env_real(), 30 * LK_SECOND_NS, NULL};
    json_t *init = json_pack("{s:s, s:i, s:s}", "master_address", "127.0.0.1", "master_port",
                             (int)port, "session_token", TOKEN);
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    wte_update_t update = {descs, n_tensors, packed, 256u << 20, 2, info, NULL};
    lk_status_t st = wte_tcp.init_post(state, init, &ctx, &err);
    for (int updating = 0; st >= 0 && updating < 2; updating++) {
        while ((st = updating ? wte_tcp.update_test(state, &err)
                              : wte_tcp.init_test(state, &err)) == LK_INPROGRESS) {
            struct pollfd fds[4];
            (void)poll(fds, wte_tcp.pollfds(state, fds, 4), 1);
        }
        if (st == LK_OK && !updating) {
            st = wte_tcp.update_post(state, &update, &sink, &err);
        }
    }
    if (st < 0) {
        fprintf(stderr, "rank %u: %s\n", rank, err.text);
    }
    _exit(st < 0);
}

static void run_trainer(int listener, uint32_t n_ranks, bool packed, double *took)
{
    lk_error_t err = LK_ERROR_INIT;
    transfer_sender_t *sender = sender_new(lk_env_real(), 30 * LK_SECOND_NS, TOKEN, n_ranks, 1);
    CHECK(sender != NULL);
    while (sender_greet(sender) != LK_OK) {
        byte_stream_t *stream = tcp_accept(listener);
        if (stream != NULL) {
            sender_add(sender, stream);
        }
    }
    lk_status_t st = sender_begin(sender, descs, data, n_tensors, packed, 256u << 20, &err);
    double start = seconds();
    while (st >= 0 && (st = sender_step(sender, &err)) == LK_INPROGRESS) {
        struct pollfd fds[8];
        (void)poll(fds, sender_pollfds(sender, fds, 8), 1);
    }
    *took = seconds() - start;
    CHECKF(st == LK_OK, "%s", err.text);
    sender_destroy(&sender);
}

static double engine(uint32_t n_ranks, bool packed, bool digest)
{
    lk_error_t err = LK_ERROR_INIT;
    int listener, bad = 0;
    uint16_t port;
    double took = 0;
    lk_status_t st = tcp_listen("127.0.0.1", 0, 16, &listener, &port, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (fork() == 0) {
            close(listener);
            run_rank(r, n_ranks, port, packed, digest);
        }
    }
    run_trainer(listener, n_ranks, packed, &took);
    close(listener);
    for (int status; wait(&status) > 0;) {
        bad |= status;
    }
    CHECKF(bad == 0, "a rank failed");
    return took;
}

/* ---- the same bytes through bare sockets ---- */

static void copy_in(int fd)
{
    uint8_t *place = malloc(n_tensors * (size_t)TENSOR_BYTES);
    CHECK(place != NULL);
    memset(place, 1, n_tensors * (size_t)TENSOR_BYTES);
    char ready = 'r';
    CHECK(write(fd, &ready, 1) == 1);
    for (size_t done = 0; done < n_tensors * (size_t)TENSOR_BYTES;) {
        ssize_t n =
            read(fd, place + done, LK_MIN(n_tensors * (size_t)TENSOR_BYTES - done, 1u << 20));
        CHECK(n > 0);
        done += (size_t)n;
    }
    CHECK(write(fd, &ready, 1) == 1);
    _exit(0);
}

static double plain(uint32_t n_ranks)
{
    lk_error_t err = LK_ERROR_INIT;
    int listener, fds[8];
    uint16_t port;
    lk_status_t st = tcp_listen("127.0.0.1", 0, 16, &listener, &port, &err);
    CHECKF(st == LK_OK, "%s", err.text);
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (fork() == 0) {
            byte_stream_t *stream = tcp_stream_dial("127.0.0.1", port, lk_env_real());
            while ((st = stream->ops->connect(stream, &err)) == LK_INPROGRESS) {
                continue;
            }
            CHECKF(st == LK_OK, "%s", err.text);
            int fd = stream->ops->fd(stream);
            struct pollfd wait_for = {.fd = fd, .events = POLLOUT};
            CHECK(poll(&wait_for, 1, -1) == 1);
            int blocking = dup(fd);
            CHECK(fcntl(blocking, F_SETFL, 0) == 0);
            copy_in(blocking);
        }
    }
    char ready;
    for (uint32_t r = 0; r < n_ranks; r++) {
        byte_stream_t *stream = NULL;
        while (stream == NULL) {
            stream = tcp_accept(listener);
        }
        fds[r] = stream->ops->fd(stream);
        CHECK(fcntl(fds[r], F_SETFL, 0) == 0);
        CHECK(read(fds[r], &ready, 1) == 1);
    }
    double start = seconds();
    for (size_t i = 0; i < n_tensors; i++) {
        for (size_t done = 0; done < TENSOR_BYTES; done += 1u << 20) {
            for (uint32_t r = 0; r < n_ranks; r++) {
                CHECK(send(fds[r], (const uint8_t *)data[i] + done, 1u << 20, 0) == 1 << 20);
            }
        }
    }
    for (uint32_t r = 0; r < n_ranks; r++) {
        CHECK(read(fds[r], &ready, 1) == 1);
    }
    double took = seconds() - start;
    for (int status; wait(&status) > 0;) {
        CHECK(status == 0);
    }
    close(listener);
    return took;
}

static void line(const char *what, uint32_t n_ranks, double took, double base)
{
    double gb = (double)n_tensors * TENSOR_BYTES / 1e9;
    printf("%-28s %u rank%s  %6.3f s  %6.2f GB/s each  %5.0f %% of plain\n", what, n_ranks,
           n_ranks > 1 ? "s" : " ", took, gb / took, 100 * base / took);
}

int main(int argc, char **argv)
{
    size_t megabytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 512;
    n_tensors = LK_MIN(LK_MAX((megabytes << 20) / TENSOR_BYTES, 1u), (size_t)MAX_TENSORS);
    uint8_t *bytes = malloc(TENSOR_BYTES);
    CHECK(bytes != NULL);
    for (size_t i = 0; i < TENSOR_BYTES; i++) {
        bytes[i] = (uint8_t)(i * 31 % 113);
    }
    for (size_t i = 0; i < n_tensors; i++) {
        snprintf(names[i], sizeof names[i], "t%zu", i);
        descs[i] = (tensor_desc_t){
            .name = names[i], .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {TENSOR_BYTES / 2}};
        data[i] = bytes;
    }
    printf("%zu tensors of %u MiB\n", n_tensors, TENSOR_BYTES >> 20);
    for (uint32_t n_ranks = 1; n_ranks <= 2; n_ranks++) {
        double base = plain(n_ranks);
        line("plain sockets", n_ranks, base, base);
        line("tcp, in place", n_ranks, engine(n_ranks, false, false), base);
        line("tcp, in place, digests", n_ranks, engine(n_ranks, false, true), base);
        line("tcp, packed", n_ranks, engine(n_ranks, true, false), base);
        line("tcp, packed, digests", n_ranks, engine(n_ranks, true, true), base);
    }
    free(bytes);
    return 0;
}
