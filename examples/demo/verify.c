#include "examples/demo/verify.h"
#include "base/check.h"
#include "engine_core/exec/executor.h"
#include "engine_core/exec/sampler.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK 256 /* positions per forward pass when a prefix is rebuilt */

void stream_record_fini(stream_record_t *r)
{
    free(r->prompt);
    free(r->tokens);
    free(r->logprobs);
    free(r->spans);
    for (size_t i = 0; i < r->n_history; i++) {
        free(r->history[i].spans);
    }
    free(r->history);
    memset(r, 0, sizeof *r);
}

typedef struct {
    const stream_record_t *record;
    request_t *request; /* for the sampler: prompt and the tokens before the one that is checked */
    uint32_t next;      /* output index to check next */
    uint32_t *blocks, n_blocks;
    uint64_t kv_set; /* set of the newest KV position */
    bool mixed;      /* some token attended to KV of several sets */
} replay_t;

typedef struct {
    executor_t *executor;
    sampler_t *sampler;
    uint64_t step;
    double tolerance;
    verify_result_t *result;
} checker_t;

/* Computes positions [start, end) and, for the last of them, logits. */
static lk_status_t forward(checker_t *c, replay_t *r, uint32_t start, uint32_t end,
                           exec_result_t *out, lk_error_t *err)
{
    while (start < end) {
        uint32_t n = LK_MIN(end - start, CHUNK);
        exec_seq_t seq = {.tokens = r->request->tokens,
                          .start = start,
                          .n = n,
                          .blocks = r->blocks,
                          .n_logits = start + n == end ? 1 : 0};
        exec_batch_t batch = {.seqs = &seq, .n_seqs = 1, .step = c->step++};
        LK_RETURN_IF_ERROR(c->executor->ops->step_post(c->executor, &batch, err));
        lk_status_t status;
        while ((status = c->executor->ops->step_test(c->executor, out, err)) == LK_INPROGRESS) {
        }
        LK_RETURN_IF_ERROR(status);
        start += n;
    }
    return LK_OK;
}

/* The weights that made output token i, or UINT64_MAX if no span covers it. */
static uint64_t set_of(const stream_record_t *r, uint32_t i)
{
    for (size_t k = 0; k < r->n_spans; k++) {
        if (i >= r->spans[k].start && i < r->spans[k].end) {
            return r->spans[k].epoch;
        }
    }
    return UINT64_MAX;
}

static const kv_snapshot_t *snapshot_at(const stream_record_t *r, uint32_t i)
{
    for (size_t k = 0; k < r->n_history; k++) {
        if (r->history[k].at == i) {
            return &r->history[k];
        }
    }
    return NULL;
}

static void note(checker_t *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(checker_t *c, const char *fmt, ...)
{
    if (c->result->first[0] == '\0') {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(c->result->first, sizeof c->result->first, fmt, ap);
        va_end(ap);
    }
}

/* Rebuilds, under the loaded set, what the snapshot says this set computed; older spans stand. */
static lk_status_t apply_snapshot(checker_t *c, replay_t *r, const kv_snapshot_t *s, uint64_t set,
                                  uint32_t last, lk_error_t *err)
{
    exec_result_t ignored;
    for (size_t k = 0; k < s->n_spans; k++) {
        uint32_t end = LK_MIN(s->spans[k].end, last);
        r->mixed |= s->spans[k].epoch != set;
        if (s->spans[k].epoch == set && s->spans[k].start < end) {
            LK_RETURN_IF_ERROR(forward(c, r, s->spans[k].start, end, &ignored, err));
        }
    }
    return LK_OK;
}

/* Prompt positions that an earlier set computed (a chunked prefill that straddled an update). They
 * belong to this set's turn although no token of this set exists. */
static lk_status_t compute_prompt_share(checker_t *c, replay_t *r, uint64_t set, lk_error_t *err)
{
    const kv_snapshot_t *first = snapshot_at(r->record, 0);
    exec_result_t ignored;
    if (r->next > 0 || first == NULL || set_of(r->record, 0) == set) {
        return LK_OK;
    }
    for (size_t k = 0; k < first->n_spans; k++) {
        if (first->spans[k].epoch == set) {
            LK_RETURN_IF_ERROR(
                forward(c, r, first->spans[k].start, first->spans[k].end, &ignored, err));
        }
    }
    return LK_OK;
}

static lk_status_t check_token(checker_t *c, replay_t *r, size_t stream, uint64_t set,
                               lk_error_t *err)
{
    const stream_record_t *rec = r->record;
    uint32_t i = r->next;
    uint32_t last = rec->n_prompt + i - 1; /* the position whose logits make token i */
    const kv_snapshot_t *s = snapshot_at(rec, i);
    if (s != NULL) {
        LK_RETURN_IF_ERROR(apply_snapshot(c, r, s, set, last, err));
    } else if (i == 0) {
        exec_result_t ignored;
        LK_RETURN_IF_ERROR(forward(c, r, 0, last, &ignored, err));
    } else {
        r->mixed |= r->kv_set != set;
    }
    r->kv_set = set;
    exec_result_t result;
    LK_RETURN_IF_ERROR(forward(c, r, last, last + 1, &result, err));
    sample_t drawn;
    LK_RETURN_IF_ERROR(sampler_sample(c->sampler, r->request, result.logits, NULL, 0, &drawn, err));
    float logprob;
    uint32_t rank;
    sampler_logprob(c->sampler, result.logits, rec->tokens[i], &logprob, &rank);
    double difference = fabs((double)logprob - (double)rec->logprobs[i]);
    if (!(difference <= c->result->worst_logprob)) {
        c->result->worst_logprob = difference;
    }
    if (!(difference <= c->tolerance)) {
        c->result->wrong_logprobs++;
        note(c, "stream %zu, token %u (set %llu): logprob %.6f, recomputed %.6f", stream, i,
             (unsigned long long)set, (double)rec->logprobs[i], (double)logprob);
    }
    if (drawn.token != rec->tokens[i]) {
        c->result->wrong_tokens++;
        note(c, "stream %zu, token %u (set %llu): token %u, recomputed %u", stream, i,
             (unsigned long long)set, rec->tokens[i], drawn.token);
    }
    c->result->tokens++;
    r->request->tokens[rec->n_prompt + i] = rec->tokens[i];
    r->request->n_tokens++;
    r->next++;
    return LK_OK;
}

static lk_status_t load_set(executor_t *executor, const demo_weights_t *weights, uint64_t k,
                            lk_error_t *err)
{
    if (k == 0) {
        return LK_OK; /* opened with the checkpoint */
    }
    weight_sink_t sink = weight_table_sink(executor->ops->weights(executor));
    size_t n = demo_weights_count(weights);
    const tensor_desc_t *descs = demo_weights_descs(weights);
    sink.ops->begin(sink.ctx);
    LK_RETURN_IF_ERROR(sink.ops->plan(sink.ctx, descs, n, err));
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes;
        CHECK(tensor_desc_bytes(&descs[i], &bytes));
        void *data = malloc(bytes);
        CHECK(data != NULL);
        lk_status_t status = demo_weights_tensor(weights, i, k, data, err);
        if (status == LK_OK) {
            status = sink.ops->tensor(sink.ctx, i, data, bytes, err);
        }
        free(data);
        LK_RETURN_IF_ERROR(status);
    }
    return sink.ops->commit(sink.ctx, err);
}

static lk_status_t replay_init(replay_t *r, const stream_record_t *rec, uint32_t block_size,
                               uint32_t *next_block)
{
    r->record = rec;
    sampling_params_t sampling = rec->sampling;
    sampling.logprobs = 0;
    r->request = request_new(rec->prompt, rec->n_prompt, &sampling);
    r->n_blocks = (rec->n_prompt + rec->n_tokens + block_size - 1) / block_size;
    r->blocks = calloc(r->n_blocks, sizeof *r->blocks);
    CHECK(r->request != NULL && r->blocks != NULL);
    for (uint32_t b = 0; b < r->n_blocks; b++) {
        r->blocks[b] = (*next_block)++;
    }
    return LK_OK;
}

lk_status_t verify_streams(const char *model_dir, const demo_weights_t *weights, uint64_t n_sets,
                           lk_dtype_t dtype, uint32_t block_size, const stream_record_t *records,
                           size_t n_records, double tolerance,
                           void (*progress)(void *ctx, size_t done, size_t total), void *ctx,
                           verify_result_t *out, lk_error_t *err)
{
    memset(out, 0, sizeof *out);
    out->streams = n_records;
    const model_config_t *model = demo_weights_config(weights);
    replay_t *replays = calloc(n_records + 1, sizeof *replays);
    CHECK(replays != NULL);
    uint32_t n_blocks = 0;
    for (size_t i = 0; i < n_records; i++) {
        CHECK(replay_init(&replays[i], &records[i], block_size, &n_blocks) == LK_OK);
    }
    executor_config_t config = {.model_dir = model_dir,
                                .model = model,
                                .dtype = dtype,
                                .block_size = block_size,
                                .num_blocks = n_blocks + 1,
                                .max_seqs = 1,
                                .max_tokens = CHUNK,
                                .threads = (uint32_t)LK_MAX(1, sysconf(_SC_NPROCESSORS_ONLN)),
                                .ep = ep_local()};
    checker_t c = {.tolerance = tolerance, .result = out};
    lk_status_t status = executor_cpu_ops.open(&config, &c.executor, err);
    if (status != LK_OK) {
        goto err_replays;
    }
    c.sampler = sampler_new(model->vocab_size, false);
    CHECK(c.sampler != NULL);
    for (uint64_t set = 0; set <= n_sets && status == LK_OK; set++) {
        status = load_set(c.executor, weights, set, err);
        for (size_t i = 0; i < n_records && status == LK_OK; i++) {
            replay_t *r = &replays[i];
            status = compute_prompt_share(&c, r, set, err);
            while (status == LK_OK && r->next < r->record->n_tokens &&
                   set_of(r->record, r->next) == set) {
                status = check_token(&c, r, i, set, err);
            }
            if (progress != NULL) {
                progress(ctx, set * n_records + i + 1, (n_sets + 1) * n_records);
            }
        }
    }
    for (size_t i = 0; i < n_records && status == LK_OK; i++) {
        out->mixed_streams += replays[i].mixed;
        if (replays[i].next < records[i].n_tokens) {
            out->wrong_tokens += records[i].n_tokens - replays[i].next;
            note(&c,
                 "stream %zu, token %u: its weight_versions span names no set that was pushed, or "
                 "goes back",
                 i, replays[i].next);
        }
    }
    sampler_destroy(&c.sampler);
    c.executor->ops->close(c.executor);
err_replays:
    for (size_t i = 0; i < n_records; i++) {
        request_destroy(&replays[i].request);
        free(replays[i].blocks);
    }
    free(replays);
    return status;
}
