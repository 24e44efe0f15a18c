/*
 * bench_mesh.c: latency of the ranks' vote and bandwidth of their exchange, each beside what the
 * plain socket under it does in the same run. Ranks are processes, as in a real group.
 *
 *   bench_mesh [ROUNDS] [MEGABYTES]
 */
#include "base/check.h"
#include "base/env.h"
#include "engine_core/dp/mesh.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_RANKS  8
#define VOTE_LEN   36 /* 4 + 4A entries with 8 front ends: 288 bytes */
#define VOTE_BYTES (VOTE_LEN * sizeof(uint64_t))

/* What rank 0 measured, shared with the parent. */
typedef struct {
    double p50_us, p99_us, gb_per_s;
} result_t;
static result_t *result;
static size_t n_rounds = 20000, exchange_mb = 8;

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void note_latency(uint64_t *ns, size_t n)
{
    qsort(ns, n, sizeof *ns, compare);
    result->p50_us = (double)ns[n / 2] / 1e3;
    result->p99_us = (double)ns[n - n / 100 - 1] / 1e3;
}

/* Sleeps until something moves, as an engine that waits for its peers does. */
static void wait_for(mesh_t *mesh)
{
    struct pollfd fds[MAX_RANKS + 8];
    size_t n = mesh_pollfds(mesh, fds, LK_ARRAY_LEN(fds));
    int rc = poll(fds, n, -1);
    CHECK(rc > 0 || errno == EINTR);
}

static void bench_votes(mesh_t *mesh)
{
    allreduce_t votes = mesh_allreduce(mesh);
    uint64_t vec[VOTE_LEN] = {0}, out[VOTE_LEN];
    uint64_t *ns = calloc(n_rounds, sizeof *ns);
    lk_error_t err;
    for (size_t round = 0; round < n_rounds; round++) {
        uint64_t start = now();
        lk_status_t status;
        vec[0] = round + votes.rank;
        CHECK(votes.ops->post(votes.ctx, round, vec, VOTE_LEN, &err) == LK_OK);
        while ((status = votes.ops->test(votes.ctx, out, &err)) == LK_INPROGRESS) {
            wait_for(mesh);
        }
        CHECKF(status == LK_OK && out[0] == round, "%s", err.text);
        ns[round] = now() - start;
    }
    if (votes.rank == 0) {
        note_latency(ns, n_rounds);
    }
    free(ns);
}

/* Every rank sends exchange_mb to every other one, several times. */
static void bench_exchange(mesh_t *mesh)
{
    enum { TIMES = 40 };
    ep_t ep = mesh_ep(mesh);
    size_t len = exchange_mb << 20;
    uint8_t *data = malloc(len);
    ep_buf_t send[MAX_RANKS], recv[MAX_RANKS];
    lk_error_t err;
    memset(data, (int)ep.rank, len);
    uint64_t start = 0;
    for (uint32_t r = 0; r < ep.size; r++) {
        send[r] = (ep_buf_t){data, len};
    }
    for (uint64_t tag = 0; tag < TIMES + 2; tag++) {
        lk_status_t status;
        if (tag == 2) { /* buffers have grown and are touched */
            start = now();
        }
        CHECK(ep.ops->post(ep.ctx, tag, send, &err) == LK_OK);
        while ((status = ep.ops->test(ep.ctx, recv, &err)) == LK_INPROGRESS) {
            wait_for(mesh);
        }
        CHECKF(status == LK_OK, "%s", err.text);
    }
    for (uint32_t r = 0; r < ep.size; r++) {
        CHECK(r == ep.rank || ((const uint8_t *)recv[r].data)[len - 1] == r);
    }
    if (ep.rank == 0) { /* bytes received by one rank */
        result->gb_per_s = (double)len * (ep.size - 1) * TIMES / (double)(now() - start);
    }
    free(data);
}

static void connect_all(mesh_t **meshes, uint32_t rank, uint32_t size)
{
    const char *addresses[MAX_RANKS];
    lk_error_t err;
    lk_status_t status;
    for (uint32_t r = 0; r < size; r++) {
        addresses[r] = mesh_address(meshes[r]);
    }
    CHECK(mesh_connect_post(meshes[rank], 1, size, NULL, addresses, &err) == LK_OK);
    while ((status = mesh_connect_test(meshes[rank], &err)) == LK_INPROGRESS) {
        wait_for(meshes[rank]);
    }
    CHECKF(status == LK_OK, "%s", err.text);
}

static void wait_children(size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int status;
        CHECK(wait(&status) > 0);
        CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a rank failed");
    }
}

static void run_mesh(uint32_t size, void (*bench)(mesh_t *))
{
    mesh_t *meshes[MAX_RANKS];
    lk_error_t err;
    for (uint32_t r = 0; r < size; r++) {
        CHECK(mesh_new(r, &meshes[r], &err) == LK_OK);
    }
    for (uint32_t r = 0; r < size; r++) {
        if (fork() == 0) {
            connect_all(meshes, r, size);
            bench(meshes[r]);
            _exit(0); /* the others' listeners are the parent's too */
        }
    }
    wait_children(size);
    for (uint32_t r = 0; r < size; r++) {
        mesh_destroy(&meshes[r]);
    }
}

static void move(int fd, uint8_t *data, size_t len, bool out)
{
    for (size_t at = 0; at < len;) {
        ssize_t n = out ? write(fd, data + at, len - at) : read(fd, data + at, len - at);
        CHECK(n > 0);
        at += (size_t)n;
    }
}

/* Both ends send a vote's bytes and wait for the other's: the least that a round can be. */
static void raw_votes(int fd, bool first)
{
    uint8_t data[VOTE_BYTES + 40] = {0};
    uint64_t *ns = calloc(n_rounds, sizeof *ns);
    for (size_t i = 0; i < n_rounds; i++) {
        uint64_t start = now();
        move(fd, data, sizeof data, true);
        move(fd, data, sizeof data, false);
        ns[i] = now() - start;
    }
    if (first) {
        note_latency(ns, n_rounds);
    }
    free(ns);
}

/* One direction after the other, so as many bytes as an exchange moves between two ranks. */
static void raw_copy(int fd, bool first)
{
    enum { TIMES = 40 };
    size_t len = exchange_mb << 20;
    uint8_t *data = malloc(len);
    uint64_t start = 0;
    memset(data, 1, len);
    for (int i = 0; i < TIMES + 2; i++) {
        if (i == 2) {
            start = now();
        }
        move(fd, data, len, first);
        move(fd, data, len, !first);
    }
    if (first) {
        result->gb_per_s = (double)len * TIMES / (double)(now() - start);
    }
    free(data);
}

static void run_raw(void (*bench)(int, bool))
{
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    for (int i = 0; i < 2; i++) {
        if (fork() == 0) {
            close(fds[1 - i]);
            bench(fds[i], i == 0);
            _exit(0);
        }
    }
    close(fds[0]);
    close(fds[1]);
    wait_children(2);
}

int main(int argc, char **argv)
{
    n_rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : n_rounds;
    exchange_mb = argc > 2 ? strtoul(argv[2], NULL, 10) : exchange_mb;
    CHECKF(n_rounds > 0 && exchange_mb > 0 && exchange_mb <= 1024,
           "usage: bench_mesh [ROUNDS] [MB]");
    result = mmap(NULL, sizeof *result, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(result != MAP_FAILED);
    printf("vote of %zu bytes, %zu rounds                 p50 us   p99 us\n", VOTE_BYTES, n_rounds);
    run_raw(raw_votes);
    printf("  plain sockets, 2 processes                %8.1f %8.1f\n", result->p50_us,
           result->p99_us);
    for (uint32_t size = 2; size <= 4; size += 2) {
        run_mesh(size, bench_votes);
        printf("  mesh all-reduce, %u ranks                  %8.1f %8.1f\n", size, result->p50_us,
               result->p99_us);
    }
    printf("exchange of %zu MB per pair              GB/s received per rank\n", exchange_mb);
    run_raw(raw_copy);
    printf("  plain sockets, 2 processes                %8.2f\n", result->gb_per_s);
    for (uint32_t size = 2; size <= 4; size += 2) {
        run_mesh(size, bench_exchange);
        printf("  mesh exchange, %u ranks                    %8.2f\n", size, result->gb_per_s);
    }
    return 0;
}
