/*
 * test_invariance.c: a sequence's logits have the same bits alone, among others, cut into any
 * chunks, over any blocks, from cached KV, on any number of threads and of expert-parallel ranks.
 */
#include "base/prng.h"
#include "tests/lib/test_main.h"
#include "tests/unit/cpuexec/exec_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_MODELS 7
#define LENGTH   75 /* not a multiple of a block */
#define N_SEQS   32

static const char *const models[N_MODELS] = RIG_MODELS;
static const lk_dtype_t dtypes[2] = {LK_DTYPE_F32, LK_DTYPE_BF16};

static lk_prng_t prng;

static void random_seq(const rig_t *rig, rig_seq_t *seq, uint32_t len)
{
    *seq = (rig_seq_t){.len = len};
    for (uint32_t i = 0; i < len; i++) {
        seq->tokens[i] = (uint32_t)lk_prng_below(&prng, rig->model.vocab_size);
    }
}

/* The truth: alone, in one piece, one thread, one rank. [LENGTH, vocab]; caller frees. */
static float *truth(const char *model, lk_dtype_t dtype, rig_seq_t *seq)
{
    rig_t rig;
    rig_open(&rig, &(rig_options_t){.model = model, .dtype = dtype});
    random_seq(&rig, seq, LENGTH);
    rig_seq_blocks(&rig, seq, 0, 1);
    float *out = malloc((size_t)LENGTH * rig.model.vocab_size * sizeof *out);
    rig_run(&rig, seq, 0, LENGTH, LENGTH, out);
    rig_close(&rig);
    return out;
}

static void check_rows(const rig_t *rig, const float *want, uint32_t first, uint32_t n,
                       const float *got)
{
    const size_t vocab = rig->model.vocab_size;
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_msg(memcmp(got + i * vocab, want + (first + i) * vocab, vocab * sizeof *got) == 0,
                      "logits of position %u have other bits", first + i);
    }
}

static void check_alone(rig_t *rig, rig_seq_t *seq, const float *want)
{
    float *got = malloc((size_t)LENGTH * rig->model.vocab_size * sizeof *got);
    rig_seq_blocks(rig, seq, 7, 13);
    rig_run(rig, seq, 0, LENGTH, LENGTH, got);
    check_rows(rig, want, 0, LENGTH, got);
    /* one token at a time over other blocks */
    rig_seq_blocks(rig, seq, 299, 299);
    for (uint32_t p = 0; p < LENGTH; p++) {
        rig_run(rig, seq, p, 1, 1, got);
        check_rows(rig, want, p, 1, got);
    }
    /* a second sequence that shares the first three blocks and recomputes the rest elsewhere */
    rig_seq_t other = *seq;
    rig_seq_blocks(rig, &other, 100, 1);
    memcpy(other.blocks, seq->blocks, 3 * sizeof *other.blocks);
    rig_run(rig, &other, 48, LENGTH - 48, LENGTH - 48, got);
    check_rows(rig, want, 48, LENGTH - 48, got);
    free(got);
}

/* What one rank is working on: sequences with private blocks, each some way into its tokens. */
typedef struct {
    rig_seq_t seqs[N_SEQS];
    uint32_t done[N_SEQS];
    uint32_t n;
    exec_seq_t parts[N_SEQS];
    uint32_t who[N_SEQS];
    exec_batch_t batch;
} load_t;

static void load_init(const rig_t *rig, load_t *l, uint32_t n)
{
    *l = (load_t){.n = n};
    uint32_t perm = (uint32_t)lk_prng_below(&prng, rig->config.num_blocks);
    for (uint32_t i = 0; i < n; i++) {
        random_seq(rig, &l->seqs[i], 1 + (uint32_t)lk_prng_below(&prng, LENGTH));
        /* disjoint: 32 x 9 blocks of 300, in steps of 7 (coprime) from a random start */
        rig_seq_blocks(rig, &l->seqs[i], perm + i * 9 * 7, 7);
    }
}

/* The next step's batch: some sequences in random order, a random chunk of each. */
static const exec_batch_t *load_batch(load_t *l, uint32_t budget, bool greedy)
{
    uint32_t n = 0, first = (uint32_t)lk_prng_below(&prng, l->n);
    for (uint32_t j = 0; j < l->n; j++) {
        uint32_t i = (first + j) % l->n, left = l->seqs[i].len - l->done[i];
        if (left == 0 || budget == 0 || (!greedy && lk_prng_below(&prng, 4) == 0)) {
            continue;
        }
        uint32_t most = left < budget ? left : budget;
        uint32_t chunk = 1 + (uint32_t)lk_prng_below(&prng, most);
        budget -= chunk;
        l->parts[n] = (exec_seq_t){l->seqs[i].tokens, l->done[i], chunk, l->seqs[i].blocks, chunk};
        l->who[n++] = i;
        l->done[i] += chunk;
    }
    l->batch = (exec_batch_t){.seqs = l->parts, .n_seqs = n};
    return n > 0 ? &l->batch : NULL;
}

/* The sequence among 31 others on one rank, other ranks busy or idle, all cut at random. */
static void check_among_others(rig_t *rig, const rig_seq_t *seq, const float *want)
{
    load_t *loads = calloc(rig->ranks, sizeof *loads);
    const uint32_t home = (uint32_t)lk_prng_below(&prng, rig->ranks);
    const uint32_t mine = (uint32_t)lk_prng_below(&prng, N_SEQS);
    for (uint32_t r = 0; r < rig->ranks; r++) {
        load_init(rig, &loads[r], r == home ? N_SEQS : 5);
    }
    memcpy(loads[home].seqs[mine].tokens, seq->tokens, sizeof seq->tokens);
    loads[home].seqs[mine].len = LENGTH;
    while (loads[home].done[mine] < LENGTH) {
        const exec_batch_t *batches[RIG_MAX_RANKS];
        exec_result_t results[RIG_MAX_RANKS];
        for (uint32_t r = 0; r < rig->ranks; r++) {
            batches[r] = load_batch(&loads[r], 200, false);
        }
        rig_step(rig, batches, results);
        const load_t *l = &loads[home];
        uint32_t row = 0;
        for (uint32_t i = 0; batches[home] != NULL && i < l->batch.n_seqs; i++) {
            if (l->who[i] == mine) {
                check_rows(rig, want, l->parts[i].start, l->parts[i].n,
                           results[home].logits + (size_t)row * rig->model.vocab_size);
            }
            row += l->parts[i].n_logits;
        }
        ck_assert_uint_eq(results[home].rows, row);
    }
    free(loads);
}

START_TEST(bits_do_not_depend_on_company)
{
    const char *model = models[_i / 2];
    const lk_dtype_t dtype = dtypes[_i % 2];
    lk_prng_seed(&prng, test_seed("invariance") + (uint64_t)_i);
    rig_seq_t seq;
    float *want = truth(model, dtype, &seq);
    const struct {
        uint32_t threads, ranks;
    } variants[] = {{1, 1}, {3, 1}, {1, 2}, {2, 4}, {1, 8}};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        rig_t rig;
        rig_open(&rig, &(rig_options_t){.model = model,
                                        .dtype = dtype,
                                        .threads = variants[i].threads,
                                        .ranks = variants[i].ranks});
        check_alone(&rig, &seq, want);
        check_among_others(&rig, &seq, want);
        bool dense = rig.model.num_experts == 0;
        rig_close(&rig);
        if (dense && variants[i].ranks > 1) {
            break; /* nothing is exchanged: further rank counts say nothing new */
        }
    }
    free(want);
}
END_TEST

/* Block sizes that do not fill a vector give the same numbers up to rounding. */
START_TEST(any_block_size)
{
    lk_prng_seed(&prng, test_seed("block size"));
    rig_seq_t seq;
    float *want = truth("qwen3", dtypes[_i], &seq);
    const uint32_t sizes[] = {1, 5, 16, 32, 33};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        rig_t rig;
        rig_open(&rig,
                 &(rig_options_t){.model = "qwen3", .dtype = dtypes[_i], .block_size = sizes[i]});
        const size_t n = (size_t)LENGTH * rig.model.vocab_size;
        float *got = malloc(n * sizeof *got);
        rig_seq_blocks(&rig, &seq, 3, 1);
        rig_run(&rig, &seq, 0, LENGTH, LENGTH, got);
        for (size_t j = 0; j < n; j++) {
            ck_assert_float_eq_tol(got[j], want[j], dtypes[_i] == LK_DTYPE_F32 ? 1e-4 : 0.1);
        }
        free(got);
        rig_close(&rig);
    }
    free(want);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("cpuexec_invariance");
    TCase *tc = tcase_create("invariance");
    tcase_set_timeout(tc, 110);
    tcase_add_loop_test(tc, bits_do_not_depend_on_company, 0, N_MODELS * 2);
    tcase_add_loop_test(tc, any_block_size, 0, 2);
    suite_add_tcase(s, tc);
    return s;
}
