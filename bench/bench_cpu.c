/*
 * bench_cpu.c: decode and prefill rate of the CPU executor over synthetic weights in the shape of
 * SmolLM2-135M, beside what this machine allows: decode has to read every weight once per step, so
 * its floor is weight bytes / the rate at which memory is read, measured in the same run.
 *
 *   bench_cpu [threads ...]      default: 1 2
 *   bench_cpu --quick THREADS    bfloat16, prefill and decode alone (for bench_llamacpp.py)
 */
#include "base/env.h"
#include "engine_core/exec/cpu/kernels.h"
#include "engine_core/exec/cpu/team.h"
#include "engine_core/exec/executor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK      16
#define CONTEXT    1024
#define PREFILL    512
#define DECODE     24 /* steps measured */
#define BATCH      16
#define READ_BYTES ((size_t)256 << 20) /* well over any cache */

static double seconds(void)
{
    return (double)lk_env_now_ns(lk_env_real()) * 1e-9;
}

static void fail(const lk_error_t *err)
{
    fprintf(stderr, "bench_cpu: %s\n", err->text);
    exit(1);
}

static model_config_t smollm2_135m(void)
{
    return (model_config_t){
        .arch = ARCH_LLAMA,
        .hidden_size = 576,
        .intermediate_size = 1536,
        .num_layers = 30,
        .num_heads = 9,
        .num_kv_heads = 3,
        .head_dim = 64,
        .vocab_size = 49152,
        .max_position_embeddings = 8192,
        .rms_norm_eps = 1e-5f,
        .tie_word_embeddings = true,
        .rope_theta = 100000,
        .checkpoint_dtype = LK_DTYPE_BF16,
    };
}

/* ---- how fast memory can be read ---- */

typedef struct {
    const uint64_t *words;
    uint64_t sum[TEAM_MAX_THREADS];
} read_t;

static void read_worker(worker_t *w, void *arg)
{
    read_t *r = arg;
    const size_t n = READ_BYTES / sizeof(uint64_t) / w->n / 8 * 8;
    const uint64_t *p = r->words + w->id * n;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; j++) {
            sum[j] += p[i + j];
        }
    }
    for (int j = 0; j < 8; j++) {
        r->sum[w->id] += sum[j];
    }
}

/* Bytes per second, best of several passes. */
static double read_rate(uint32_t threads)
{
    lk_error_t err = LK_ERROR_INIT;
    team_t *team = NULL;
    if (team_new(threads, &team, &err) < 0) {
        fail(&err);
    }
    uint64_t *words = malloc(READ_BYTES);
    read_t *r = calloc(1, sizeof *r);
    if (words == NULL || r == NULL) {
        fprintf(stderr, "bench_cpu: out of memory\n");
        exit(1);
    }
    memset(words, 1, READ_BYTES);
    r->words = words;
    double best = 0;
    for (int i = 0; i < 10; i++) {
        double start = seconds();
        team_run(team, read_worker, r);
        double rate = READ_BYTES / (seconds() - start);
        best = rate > best ? rate : best;
    }
    free(words);
    free(r);
    team_destroy(&team);
    return best;
}

/* ---- steps ---- */

typedef struct {
    executor_t *exec;
    uint32_t tokens[CONTEXT];
    uint32_t blocks[BATCH][CONTEXT / BLOCK];
    uint64_t step;
} bench_t;

/* One step over n sequences that compute positions [start, start + len) each; returns seconds. */
static double step(bench_t *b, uint32_t n, uint32_t start, uint32_t len)
{
    exec_seq_t seqs[BATCH];
    for (uint32_t i = 0; i < n; i++) {
        seqs[i] = (exec_seq_t){b->tokens, start, len, b->blocks[i], 1};
    }
    const exec_batch_t batch = {.seqs = seqs, .n_seqs = n, .step = b->step++};
    exec_result_t out;
    lk_error_t err = LK_ERROR_INIT;
    double began = seconds();
    if (b->exec->ops->step_post(b->exec, &batch, &err) < 0) {
        fail(&err);
    }
    lk_status_t rc;
    while ((rc = b->exec->ops->step_test(b->exec, &out, &err)) == LK_INPROGRESS) {
    }
    if (rc < 0) {
        fail(&err);
    }
    return seconds() - began;
}

/* Tokens per second of steps that decode one token of each of n sequences after `context`. */
static double decode_rate(bench_t *b, uint32_t n, uint32_t context)
{
    double total = 0;
    for (uint32_t i = 0; i < DECODE + 4; i++) {
        double s = step(b, n, context + i, 1);
        total += i < 4 ? 0 : s;
    }
    return n * DECODE / total;
}

/* quick: prefill and decode alone. */
static void bench(uint32_t threads, lk_dtype_t dtype, bool quick)
{
    model_config_t model = smollm2_135m();
    const executor_config_t config = {
        .model = &model,
        .dtype = dtype,
        .load_dummy = true,
        .dummy_seed = 1,
        .block_size = BLOCK,
        .num_blocks = BATCH * CONTEXT / BLOCK,
        .max_seqs = BATCH,
        .max_tokens = PREFILL,
        .threads = threads,
        .ep = ep_local(),
    };
    lk_error_t err = LK_ERROR_INIT;
    bench_t b = {0};
    if (executor_cpu_ops.open(&config, &b.exec, &err) < 0) {
        fail(&err);
    }
    for (uint32_t i = 0; i < CONTEXT; i++) {
        b.tokens[i] = i * 7919 % model.vocab_size;
    }
    for (uint32_t i = 0; i < BATCH; i++) {
        for (uint32_t j = 0; j < CONTEXT / BLOCK; j++) {
            b.blocks[i][j] = i * (CONTEXT / BLOCK) + j;
        }
    }
    double prefill = 0;
    for (int i = 0; i < 2; i++) {
        double rate = PREFILL / step(&b, 1, 0, PREFILL);
        prefill = rate > prefill ? rate : prefill;
    }
    double one = decode_rate(&b, 1, 0);
    if (quick) {
        printf("%-9s %7u %9.1f %9.1f\n", dtype_torch_name(dtype), threads, prefill, one);
        executor_cpu_ops.close(b.exec);
        return;
    }
    double late = decode_rate(&b, 1, PREFILL - DECODE - 4);
    double many = decode_rate(&b, BATCH, 0);
    double bytes = (double)weight_table_bytes(executor_cpu_ops.weights(b.exec));
    double memory = read_rate(threads);
    printf("%-9s %7u %9.1f %9.1f %9.1f %9.1f %7.0f%% %9.1f %8.1f\n", dtype_torch_name(dtype),
           threads, prefill, one, late, memory / bytes, 100 * one / (memory / bytes), many,
           memory / 1e9);
    fflush(stdout);
    executor_cpu_ops.close(b.exec);
}

int main(int argc, char **argv)
{
    static const lk_dtype_t dtypes[] = {LK_DTYPE_BF16, LK_DTYPE_F32};
    printf("SmolLM2-135M's shape, synthetic weights, kernels: %s. Tokens per second:\n"
           "%-9s %7s %9s %9s %9s %9s %8s %9s %8s\n",
           kernels_best()->name, "dtype", "threads", "prefill", "decode", "at 448+", "floor",
           "of floor", "decode16", "GB/s");
    if (argc > 2 && strcmp(argv[1], "--quick") == 0) {
        bench((uint32_t)strtoul(argv[2], NULL, 10), LK_DTYPE_BF16, true);
        return 0;
    }
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        if (argc < 2) {
            bench(1, dtypes[d], false);
            bench(2, dtypes[d], false);
        }
        for (int i = 1; i < argc; i++) {
            bench((uint32_t)strtoul(argv[i], NULL, 10), dtypes[d], false);
        }
    }
    return 0;
}
