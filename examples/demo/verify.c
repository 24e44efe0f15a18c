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
#define BATCH 64  /* streams whose next token is computed in one forward pass */

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
    size_t index;
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
    uint32_t vocab_size;
} checker_t;

static lk_status_t run(checker_t *c, const exec_seq_t *seqs, size_t n, exec_result_t *out,
                       lk_error_t *err)
{
    exec_batch_t batch = {.seqs = seqs, .n_seqs = n, .step = c->step++};
    LK_RETURN_IF_ERROR(c->executor->ops->step_post(c->executor, &batch, err));
    lk_status_t status;
    while ((status = c->executor->ops->step_test(c->executor, out, err)) == LK_INPROGRESS) {
    }
    return status;
}

/* Computes the KV of positions [start, end). */
static lk_status_t rebuild(checker_t *c, replay_t *r, uint32_t start, uint32_t end, lk_error_t *err)
{
    exec_result_t ignored;
    for (; start < end; start += CHUNK) {
        exec_seq_t seq = {.tokens = r->request->tokens,
                          .start = start,
                          .n = LK_MIN(end - start, CHUNK),
                          .blocks = r->blocks};
        LK_RETURN_IF_ERROR(run(c, &seq, 1, &ignored, err));
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
    for (size_t k = 0; k < s->n_spans; k++) {
        uint32_t end = LK_MIN(s->spans[k].end, last);
        r->mixed |= s->spans[k].epoch != set;
        if (s->spans[k].epoch == set) {
            LK_RETURN_IF_ERROR(rebuild(c, r, s->spans[k].start, end, err));
        }
    }
    return LK_OK;
}

/* Prompt positions that an earlier set computed (a chunked prefill that straddled an update). They
 * belong to this set's turn although no token of this set exists. */
static lk_status_t compute_prompt_share(checker_t *c, replay_t *r, uint64_t set, lk_error_t *err)
{
    const kv_snapshot_t *first = snapshot_at(r->record, 0);
    if (r->next > 0 || first == NULL || set_of(r->record, 0) == set) {
        return LK_OK;
    }
    for (size_t k = 0; k < first->n_spans; k++) {
        if (first->spans[k].epoch == set) {
            LK_RETURN_IF_ERROR(rebuild(c, r, first->spans[k].start, first->spans[k].end, err));
        }
    }
    return LK_OK;
}

/* The position whose logits make the next token. */
static uint32_t last_position(const replay_t *r)
{
    return r->record->n_prompt + r->next - 1;
}

/* Sets the KV before the next token as the stream says it was; `seq`: what makes that token. */
static lk_status_t prepare_token(checker_t *c, replay_t *r, uint64_t set, exec_seq_t *seq,
                                 lk_error_t *err)
{
    uint32_t last = last_position(r);
    const kv_snapshot_t *s = snapshot_at(r->record, r->next);
    if (s != NULL) {
        LK_RETURN_IF_ERROR(apply_snapshot(c, r, s, set, last, err));
    } else if (r->next == 0) {
        LK_RETURN_IF_ERROR(rebuild(c, r, 0, last, err));
    } else {
        r->mixed |= r->kv_set != set;
    }
    r->kv_set = set;
    *seq = (exec_seq_t){r->request->tokens, last, 1, r->blocks, 1};
    return LK_OK;
}

static lk_status_t compare_token(checker_t *c, replay_t *r, const float *logits, uint64_t set,
                                 lk_error_t *err)
{
    const stream_record_t *rec = r->record;
    uint32_t i = r->next;
    sample_t drawn;
    LK_RETURN_IF_ERROR(sampler_sample(c->sampler, r->request, logits, NULL, 0, &drawn, err));
    float logprob;
    uint32_t rank;
    sampler_logprob(c->sampler, logits, rec->tokens[i], &logprob, &rank);
    double difference = fabs((double)logprob - (double)rec->logprobs[i]);
    if (!(difference <= c->result->worst_logprob)) {
        c->result->worst_logprob = difference;
    }
    if (!(difference <= c->tolerance)) {
        c->result->wrong_logprobs++;
        note(c, "stream %zu, token %u (set %llu): logprob %.6f, recomputed %.6f", r->index, i,
             (unsigned long long)set, (double)rec->logprobs[i], (double)logprob);
    }
    if (drawn.token != rec->tokens[i]) {
        c->result->wrong_tokens++;
        note(c, "stream %zu, token %u (set %llu): token %u, recomputed %u", r->index, i,
             (unsigned long long)set, rec->tokens[i], drawn.token);
    }
    c->result->tokens++;
    r->request->tokens[rec->n_prompt + i] = rec->tokens[i];
    r->request->n_tokens++;
    r->next++;
    return LK_OK;
}

static bool is_due(const replay_t *r, uint64_t set)
{
    return r->next < r->record->n_tokens && set_of(r->record, r->next) == set;
}

/* One token of each of up to BATCH streams; *moved: how many. */
static lk_status_t check_batch(checker_t *c, replay_t *replays, size_t n, uint64_t set,
                               size_t *moved, lk_error_t *err)
{
    exec_seq_t seqs[BATCH];
    replay_t *due[BATCH];
    exec_result_t result;
    *moved = 0;
    for (size_t i = 0; i < n && *moved < BATCH; i++) {
        if (is_due(&replays[i], set)) {
            due[*moved] = &replays[i];
            LK_RETURN_IF_ERROR(prepare_token(c, &replays[i], set, &seqs[*moved], err));
            (*moved)++;
        }
    }
    if (*moved == 0) {
        return LK_OK;
    }
    LK_RETURN_IF_ERROR(run(c, seqs, *moved, &result, err));
    CHECK(result.rows == *moved);
    for (size_t i = 0; i < *moved; i++) {
        const float *logits = result.logits + i * c->vocab_size;
        LK_RETURN_IF_ERROR(compare_token(c, due[i], logits, set, err));
    }
    return LK_OK;
}

/* Some stream has tokens or KV of this set. */
static bool is_used(const stream_record_t *records, size_t n, uint64_t set)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < records[i].n_spans; k++) {
            if (records[i].spans[k].epoch == set) {
                return true;
            }
        }
        for (size_t h = 0; h < records[i].n_history; h++) {
            const kv_snapshot_t *s = &records[i].history[h];
            for (size_t k = 0; k < s->n_spans; k++) {
                if (s->spans[k].epoch == set) {
                    return true;
                }
            }
        }
    }
    return false;
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
            status = weight_sink_store(&sink, i, data, bytes, err);
        }
        free(data);
        LK_RETURN_IF_ERROR(status);
    }
    return weight_sink_commit(&sink, err);
}

static void replay_init(replay_t *r, const stream_record_t *rec, size_t index, uint32_t block_size,
                        uint32_t *next_block)
{
    r->record = rec;
    r->index = index;
    sampling_params_t sampling = rec->sampling;
    sampling.logprobs = 0;
    r->request = request_new(rec->prompt, rec->n_prompt, &sampling);
    r->n_blocks = (rec->n_prompt + rec->n_tokens + block_size - 1) / block_size;
    r->blocks = calloc(r->n_blocks, sizeof *r->blocks);
    CHECK(r->request != NULL && r->blocks != NULL);
    for (uint32_t b = 0; b < r->n_blocks; b++) {
        r->blocks[b] = (*next_block)++;
    }
}

static lk_status_t check_set(checker_t *c, replay_t *replays, size_t n, uint64_t set,
                             size_t n_tokens,
                             void (*progress)(void *ctx, size_t done, size_t total), void *ctx,
                             lk_error_t *err)
{
    for (size_t i = 0; i < n; i++) {
        LK_RETURN_IF_ERROR(compute_prompt_share(c, &replays[i], set, err));
    }
    size_t moved;
    do {
        LK_RETURN_IF_ERROR(check_batch(c, replays, n, set, &moved, err));
        if (progress != NULL) {
            progress(ctx, c->result->tokens, n_tokens);
        }
    } while (moved > 0);
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
    size_t n_tokens = 0;
    for (size_t i = 0; i < n_records; i++) {
        replay_init(&replays[i], &records[i], i, block_size, &n_blocks);
        n_tokens += records[i].n_tokens;
    }
    executor_config_t config = {.model_dir = model_dir,
                                .model = model,
                                .dtype = dtype,
                                .block_size = block_size,
                                .num_blocks = n_blocks + 1,
                                .max_seqs = BATCH,
                                .max_tokens = CHUNK,
                                .threads = (uint32_t)LK_MAX(1, sysconf(_SC_NPROCESSORS_ONLN)),
                                .ep = ep_local()};
    checker_t c = {.tolerance = tolerance, .result = out, .vocab_size = model->vocab_size};
    lk_status_t status = executor_cpu_ops.open(&config, &c.executor, err);
    if (status != LK_OK) {
        goto err_replays;
    }
    c.sampler = sampler_new(model->vocab_size, false);
    CHECK(c.sampler != NULL);
    for (uint64_t set = 0; set <= n_sets && status == LK_OK; set++) {
        if (is_used(records, n_records, set)) {
            status = load_set(c.executor, weights, set, err);
            if (status == LK_OK) {
                status = check_set(&c, replays, n_records, set, n_tokens, progress, ctx, err);
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
