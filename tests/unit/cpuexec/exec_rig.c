#include "tests/unit/cpuexec/exec_rig.h"

#include "base/check.h"
#include "tests/lib/test_main.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void rig_open(rig_t *rig, const rig_options_t *o)
{
    lk_error_t err = LK_ERROR_INIT;
    *rig = (rig_t){.ranks = o->ranks > 0 ? o->ranks : 1};
    char dir[1024];
    snprintf(dir, sizeof dir, "%s/models/%s", test_fixtures(), o->model);
    ck_assert_msg(model_config_load(dir, &rig->model, &err) == LK_OK, "%s", err.text);
    rig->config = (executor_config_t){
        .model_dir = dir,
        .model = &rig->model,
        .dtype = o->dtype,
        .block_size = o->block_size > 0 ? o->block_size : 16,
        .num_blocks = 300,
        .max_seqs = 40,
        .max_tokens = 512,
        .threads = o->threads > 0 ? o->threads : 1,
    };
    rig->mem = ep_mem_new(rig->ranks);
    for (uint32_t r = 0; r < rig->ranks; r++) {
        rig->config.ep = rig->ranks > 1 ? ep_mem_rank(rig->mem, r) : ep_local();
        ck_assert_msg(executor_cpu_ops.open(&rig->config, &rig->exec[r], &err) == LK_OK, "%s",
                      err.text);
    }
    rig->config.model_dir = NULL; /* dir ends here */
}

void rig_close(rig_t *rig)
{
    for (uint32_t r = 0; r < rig->ranks; r++) {
        executor_cpu_ops.close(rig->exec[r]);
    }
    ep_mem_destroy(&rig->mem);
}

void rig_seq_blocks(const rig_t *rig, rig_seq_t *seq, uint32_t first, uint32_t stride)
{
    for (uint32_t i = 0; i < RIG_MAX_LEN; i++) {
        seq->blocks[i] = (first + i * stride) % rig->config.num_blocks;
    }
}

void rig_step(rig_t *rig, const exec_batch_t *const *batches, exec_result_t *results)
{
    lk_error_t err = LK_ERROR_INIT;
    const uint64_t step = rig->step++;
    bool done[RIG_MAX_RANKS] = {false};
    for (uint32_t r = 0; r < rig->ranks; r++) {
        exec_batch_t batch = batches[r] != NULL ? *batches[r] : (exec_batch_t){0};
        batch.step = step;
        ck_assert_msg(executor_cpu_ops.step_post(rig->exec[r], &batch, &err) == LK_OK, "%s",
                      err.text);
    }
    for (uint32_t left = rig->ranks, turns = 0; left > 0; turns++) {
        ck_assert_msg(turns < 100000, "the step does not end");
        for (uint32_t r = 0; r < rig->ranks; r++) {
            if (done[r]) {
                continue;
            }
            lk_status_t rc = executor_cpu_ops.step_test(rig->exec[r], &results[r], &err);
            ck_assert_msg(rc >= 0, "rank %u: %s", r, err.text);
            done[r] = rc == LK_OK;
            left -= done[r];
        }
    }
}

void rig_run(rig_t *rig, const rig_seq_t *seq, uint32_t start, uint32_t n, uint32_t n_logits,
             float *out)
{
    const exec_seq_t s = {seq->tokens, start, n, seq->blocks, n_logits};
    const exec_batch_t batch = {.seqs = &s, .n_seqs = 1};
    const exec_batch_t *batches[RIG_MAX_RANKS] = {&batch};
    exec_result_t results[RIG_MAX_RANKS];
    rig_step(rig, batches, results);
    ck_assert_uint_eq(results[0].rows, n_logits);
    if (n_logits > 0) {
        memcpy(out, results[0].logits, (size_t)n_logits * rig->model.vocab_size * sizeof *out);
    }
}

float rig_logprob(const float *logits, uint32_t vocab, uint32_t token)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        top = fmax(top, logits[i]);
    }
    for (uint32_t i = 0; i < vocab; i++) {
        sum += exp(logits[i] - top);
    }
    return (float)(logits[token] - top - log(sum));
}

uint32_t rig_argmax(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}
