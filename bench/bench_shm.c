/*
 * bench_shm: weights over the shm engine beside a memcpy of the same bytes in the same run. "whole"
 * is the wall time from the trainer's first byte to the last acknowledgement; "rank" is the
 * processor time of a receiving rank, whose work is one copy. Both with and without the bucket
 * digests on the way and the ranks' tensor digests. Processes, not threads, as in a cluster. GB/s
 * are of one rank's payload.
 *
 *     bench_shm [MEGABYTES [SLOTS]]
 */
#include "base/check.h"
#include "bench/plain_sink.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/shm/shm_ring.h"
#include "transfer/backends/shm/shm_stream.h"
#include "transfer/backends/transfer_sender.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TENSOR_BYTES (16u << 20)
#define MAX_TENSORS  4096
#define TOKEN        "bench"

static tensor_desc_t descs[MAX_TENSORS];
static const void *data[MAX_TENSORS];
static char names[MAX_TENSORS][16];
static size_t n_tensors;
static uint64_t slots = SHM_RING_SLOTS_DEFAULT;

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* *cpu: in memory that the parent sees. */
static void run_rank(uint32_t rank, uint32_t n_ranks, const char *segment, bool packed, bool digest,
                     double *cpu)
{
    lk_error_t err = LK_ERROR_INIT;
    plain_sink_t storage;
    plain_sink_init(&storage, n_tensors, TENSOR_BYTES, digest);
    weight_sink_t sink = plain_sink(&storage);
    void *state = calloc(1, wte_shm.state_size);
    CHECK(state != NULL);
    wte_context_t ctx = {rank, n_ranks, 1, lk_env_real(), 30 * LK_SECOND_NS, NULL};
    json_t *init = json_pack("{s:s, s:I, s:s}", "segment", segment, "bytes",
                             (json_int_t)(slots * TRANSFER_CHUNK_BYTES), "session_token", TOKEN);
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    wte_update_t update = {descs, n_tensors, packed, 256u << 20, 2, info, NULL};
    double start = 0;
    lk_status_t st = wte_shm.init_post(state, init, &ctx, &err);
    for (int updating = 0; st >= 0 && updating < 2; updating++) {
        start = seconds(CLOCK_PROCESS_CPUTIME_ID);
        while ((st = updating ? wte_shm.update_test(state, &err)
                              : wte_shm.init_test(state, &err)) == LK_INPROGRESS) {
            struct pollfd fds[4];
            (void)poll(fds, wte_shm.pollfds(state, fds, 4), 1);
        }
        if (st == LK_OK && !updating) {
            st = wte_shm.update_post(state, &update, &sink, &err);
        }
    }
    *cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - start;
    if (st < 0) {
        fprintf(stderr, "rank %u: %s\n", rank, err.text);
    }
    _exit(st < 0);
}

static double run_trainer(int listener, const shm_ring_t *ring, uint32_t n_ranks, bool packed,
                          bool checked)
{
    lk_error_t err = LK_ERROR_INIT;
    transfer_sender_t *sender = sender_new(lk_env_real(), 30 * LK_SECOND_NS, TOKEN, n_ranks, 1);
    CHECK(sender != NULL);
    sender_set_window(sender, ring->map, slots);
    sender_set_checked(sender, checked);
    while (sender_greet(sender) != LK_OK) {
        byte_stream_t *stream = shm_accept(listener, ring->fd);
        if (stream != NULL) {
            sender_add(sender, stream);
        }
    }
    lk_status_t st = sender_begin(sender, descs, data, n_tensors, packed, 256u << 20, &err);
    double start = seconds(CLOCK_MONOTONIC);
    while (st >= 0 && (st = sender_step(sender, &err)) == LK_INPROGRESS) {
        struct pollfd fds[8];
        (void)poll(fds, sender_pollfds(sender, fds, 8), 1);
    }
    double took = seconds(CLOCK_MONOTONIC) - start;
    CHECKF(st == LK_OK, "%s", err.text);
    sender_destroy(&sender);
    return took;
}

static void line(const char *what, uint32_t n_ranks, double took, double cpu, double base)
{
    double gb = (double)n_tensors * TENSOR_BYTES / 1e9;
    printf("%-34s %u rank%s whole %6.3f s %6.2f GB/s %5.2f of memcpy   rank %6.3f s %5.2f\n", what,
           n_ranks, n_ranks > 1 ? "s" : " ", took, gb / took, base / took, cpu, base / cpu);
}

static void engine(const char *what, uint32_t n_ranks, bool packed, bool checked, bool digest,
                   double base, double *cpu)
{
    lk_error_t err = LK_ERROR_INIT;
    char segment[64];
    shm_ring_t ring = {0};
    int listener, bad = 0;
    snprintf(segment, sizeof segment, "bench-shm-%ld", (long)getpid());
    lk_status_t st = shm_ring_create(&ring, slots, &err);
    st = st == LK_OK ? shm_listen(segment, 16, &listener, &err) : st;
    CHECKF(st == LK_OK, "%s", err.text);
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (fork() == 0) {
            run_rank(r, n_ranks, segment, packed, digest, &cpu[r]);
        }
    }
    double took = run_trainer(listener, &ring, n_ranks, packed, checked);
    close(listener);
    shm_ring_fini(&ring);
    for (int status; wait(&status) > 0;) {
        bad |= status;
    }
    CHECKF(bad == 0, "a rank failed");
    line(what, n_ranks, took, cpu[0], base);
}

/* The same bytes from the trainer's memory into a model's, best of three. */
static double plain(void)
{
    plain_sink_t storage;
    plain_sink_init(&storage, n_tensors, TENSOR_BYTES, false);
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        double start = seconds(CLOCK_MONOTONIC);
        for (size_t t = 0; t < n_tensors; t++) {
            memcpy(storage.place + t * TENSOR_BYTES, data[t], TENSOR_BYTES);
        }
        best = LK_MIN(best, seconds(CLOCK_MONOTONIC) - start);
    }
    plain_sink_fini(&storage);
    return best;
}

int main(int argc, char **argv)
{
    size_t megabytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 512;
    slots = argc > 2 ? strtoull(argv[2], NULL, 10) : slots;
    n_tensors = LK_MIN(LK_MAX((megabytes << 20) / TENSOR_BYTES, 1u), (size_t)MAX_TENSORS);
    uint8_t *bytes = malloc(n_tensors * (size_t)TENSOR_BYTES);
    double *cpu = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(bytes != NULL && cpu != MAP_FAILED);
    for (size_t i = 0; i < n_tensors * (size_t)TENSOR_BYTES; i++) {
        bytes[i] = (uint8_t)(i * 31 % 113);
    }
    for (size_t i = 0; i < n_tensors; i++) {
        snprintf(names[i], sizeof names[i], "t%zu", i);
        descs[i] = (tensor_desc_t){
            .name = names[i], .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {TENSOR_BYTES / 2}};
        data[i] = bytes + i * TENSOR_BYTES;
    }
    printf("%zu tensors of %u MiB, a ring of %llu MiB\n", n_tensors, TENSOR_BYTES >> 20,
           (unsigned long long)slots);
    for (uint32_t n_ranks = 1; n_ranks <= 2; n_ranks++) {
        double base = plain();
        line("memcpy", n_ranks, base, base, base);
        engine("shm, in place", n_ranks, false, false, false, base, cpu);
        engine("shm, in place, bucket digests", n_ranks, false, true, false, base, cpu);
        engine("shm, in place, both digests", n_ranks, false, true, true, base, cpu);
        engine("shm, packed", n_ranks, true, false, false, base, cpu);
        engine("shm, packed, both digests", n_ranks, true, true, true, base, cpu);
    }
    free(bytes);
    return 0;
}
