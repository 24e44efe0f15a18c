/*
 * test_fixtures.c: the CPU executor against Transformers' float32 results (expected.json,
 * expected_logits.safetensors).
 */
#include "engine_core/exec/cpu/forward.h"
#include "engine_core/exec/cpu/moe.h"
#include "transfer/safetensors.h"
#include "tests/lib/test_main.h"
#include "tests/unit/cpuexec/exec_rig.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_MODELS 7
#define N_GREEDY 24

static const char *const models[N_MODELS] = RIG_MODELS;

typedef struct {
    json_t *root, *cases;
    safetensors_t *logits;
} expected_t;

static void expected_open(expected_t *e, const char *model)
{
    char path[1024];
    json_error_t json_err;
    lk_error_t err = LK_ERROR_INIT;
    snprintf(path, sizeof path, "%s/models/%s/expected.json", test_fixtures(), model);
    e->root = json_load_file(path, 0, &json_err);
    ck_assert_msg(e->root != NULL, "%s: %s", path, json_err.text);
    e->cases = json_object_get(e->root, "cases");
    ck_assert_uint_ge(json_array_size(e->cases), 4);
    snprintf(path, sizeof path, "%s/models/%s/expected_logits.safetensors", test_fixtures(), model);
    ck_assert_msg(safetensors_open(path, &e->logits, &err) == LK_OK, "%s", err.text);
}

static void expected_close(expected_t *e)
{
    json_decref(e->root);
    safetensors_close(&e->logits);
}

static uint32_t read_prompt(const expected_t *e, size_t i, rig_seq_t *seq)
{
    json_t *prompt = json_object_get(json_array_get(e->cases, i), "prompt");
    seq->len = (uint32_t)json_array_size(prompt);
    for (uint32_t t = 0; t < seq->len; t++) {
        seq->tokens[t] = (uint32_t)json_integer_value(json_array_get(prompt, t));
    }
    return seq->len;
}

/* Expected logits of prompt i: copied, since the file promises no alignment. Caller frees. */
static float *read_logits(const expected_t *e, size_t i, uint32_t rows, uint32_t vocab)
{
    char name[32];
    snprintf(name, sizeof name, "logits.%zu", i);
    const safetensors_entry_t *entry = safetensors_find(e->logits, name);
    ck_assert_ptr_nonnull(entry);
    ck_assert_uint_eq(entry->bytes, (uint64_t)rows * vocab * sizeof(float));
    float *out = malloc(entry->bytes);
    memcpy(out, entry->data, entry->bytes);
    return out;
}

static float largest_difference(const float *a, const float *b, size_t n)
{
    float worst = 0;
    for (size_t i = 0; i < n; i++) {
        float d = fabsf(a[i] - b[i]);
        worst = d > worst || isnan(d) ? d : worst;
    }
    return worst;
}

/* Continues greedily from a prompt whose last row of logits is given. */
static void check_greedy(rig_t *rig, const expected_t *e, size_t i, rig_seq_t *seq,
                         const float *last)
{
    const uint32_t vocab = rig->model.vocab_size;
    json_t *item = json_array_get(e->cases, i);
    json_t *tokens = json_object_get(item, "greedy");
    json_t *logprobs = json_object_get(item, "greedy_logprobs");
    ck_assert_uint_eq(json_array_size(tokens), N_GREEDY);
    float *logits = malloc(vocab * sizeof *logits);
    memcpy(logits, last, vocab * sizeof *logits);
    for (uint32_t t = 0; t < N_GREEDY; t++) {
        uint32_t token = rig_argmax(logits, vocab);
        ck_assert_uint_eq(token, (uint32_t)json_integer_value(json_array_get(tokens, t)));
        ck_assert_float_eq_tol(rig_logprob(logits, vocab, token),
                               (float)json_real_value(json_array_get(logprobs, t)), 1e-3f);
        seq->tokens[seq->len++] = token;
        rig_run(rig, seq, seq->len - 1, 1, 1, logits);
    }
    free(logits);
}

START_TEST(float32_equals_transformers)
{
    rig_t rig;
    expected_t e;
    rig_open(&rig, &(rig_options_t){.model = models[_i], .dtype = LK_DTYPE_F32, .threads = 2});
    expected_open(&e, models[_i]);
    const uint32_t vocab = rig.model.vocab_size;
    float worst = 0;
    for (size_t i = 0; i < json_array_size(e.cases); i++) {
        rig_seq_t seq = {0};
        uint32_t n = read_prompt(&e, i, &seq);
        rig_seq_blocks(&rig, &seq, (uint32_t)i * 40, 1);
        float *got = malloc((size_t)n * vocab * sizeof *got);
        float *want = read_logits(&e, i, n, vocab);
        rig_run(&rig, &seq, 0, n, n, got);
        float d = largest_difference(got, want, (size_t)n * vocab);
        worst = fmaxf(worst, d);
        ck_assert_msg(d < 1e-3f, "%s, prompt %zu: logits differ by %g", models[_i], i, d);
        check_greedy(&rig, &e, i, &seq, got + (size_t)(n - 1) * vocab);
        free(got);
        free(want);
    }
    printf("# %s: float32 logits within %g\n", models[_i], worst);
    expected_close(&e);
    rig_close(&rig);
}
END_TEST

/* The experts each layer picks at each position, [layer][position][slot] (dense layers: zeros),
 * by the parts the executor is made of. Caller frees. */
static uint32_t *routing(const rig_t *rig, uint32_t r, const rig_seq_t *seq)
{
    const model_config_t *c = &rig->model;
    const uint32_t n = seq->len, k = c->num_experts_per_tok;
    lk_error_t err = LK_ERROR_INIT;
    cpu_model_t model;
    team_t *team = NULL;
    forward_t *f = NULL;
    moe_t *moe = NULL;
    const executor_config_t *config = &rig->config;
    ck_ok(cpu_model_init(&model, c, executor_cpu_ops.weights(rig->exec[r]), false, 0, 1, &err));
    ck_ok(team_new(1, &team, &err));
    const forward_options_t fo = {config, &model, kernels_best(), team};
    const moe_options_t mo = {config, &model, kernels_best(), team};
    ck_ok(forward_new(&fo, &f, &err));
    ck_ok(moe_new(&mo, &moe, &err));
    const exec_seq_t s = {seq->tokens, 0, n, seq->blocks, 1};
    const exec_batch_t batch = {.seqs = &s, .n_seqs = 1};
    ck_ok(forward_begin(f, &batch, &err));
    uint32_t *out = calloc((size_t)c->num_layers * n * k, sizeof *out);
    for (uint32_t l = 0; l < c->num_layers; l++) {
        forward_layer(f, l);
        if (c->moe_layer[l]) {
            moe_begin(moe, l, n, forward_router(f), forward_expert_input(f));
            memcpy(out + (size_t)l * n * k, moe_ids(moe), (size_t)n * k * sizeof *out);
            moe_own(moe);
            moe_combine(moe, forward_residual(f));
        }
    }
    moe_destroy(&moe);
    forward_destroy(&f);
    team_destroy(&team);
    cpu_model_fini(&model);
    return out;
}

static int by_value(const void *a, const void *b)
{
    return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : 1;
}

/* Marks the positions up to which both runs went to the same sets of experts: a position attends to
 * all before it, so the first difference ends the comparison. */
static uint32_t same_routing(const model_config_t *c, uint32_t *a, uint32_t *b, uint32_t n)
{
    const uint32_t k = c->num_experts_per_tok;
    uint32_t same = n;
    for (size_t row = 0; row < (size_t)c->num_layers * n; row++) {
        qsort(a + row * k, k, sizeof *a, by_value);
        qsort(b + row * k, k, sizeof *b, by_value);
        if (memcmp(a + row * k, b + row * k, k * sizeof *a) != 0 && row % n < same) {
            same = (uint32_t)(row % n);
        }
    }
    return same;
}

START_TEST(bfloat16_is_near)
{
    rig_t rig, exact;
    expected_t e;
    rig_open(&rig, &(rig_options_t){.model = models[_i], .dtype = LK_DTYPE_BF16, .threads = 2});
    rig_open(&exact, &(rig_options_t){.model = models[_i], .dtype = LK_DTYPE_F32});
    expected_open(&e, models[_i]);
    const uint32_t vocab = rig.model.vocab_size;
    float worst = 0;
    uint32_t compared = 0, total = 0;
    for (size_t i = 0; i < json_array_size(e.cases); i++) {
        rig_seq_t seq = {0};
        uint32_t n = read_prompt(&e, i, &seq), same = n;
        rig_seq_blocks(&rig, &seq, (uint32_t)i * 40, 1);
        if (rig.model.num_experts > 0) {
            uint32_t *a = routing(&rig, 0, &seq), *b = routing(&exact, 0, &seq);
            same = same_routing(&rig.model, a, b, n);
            free(a);
            free(b);
        }
        float *got = malloc((size_t)n * vocab * sizeof *got);
        float *want = read_logits(&e, i, n, vocab);
        rig_run(&rig, &seq, 0, n, n, got);
        float d = largest_difference(got, want, (size_t)same * vocab);
        worst = d > worst || isnan(d) ? d : worst;
        ck_assert_float_finite(largest_difference(got, want, (size_t)n * vocab));
        compared += same;
        total += n;
        free(got);
        free(want);
    }
    printf("# %s: bfloat16 logits within %g over %u of %u positions\n", models[_i], worst, compared,
           total);
    ck_assert_uint_ge(compared, rig.model.num_experts > 0 ? total / 4 : total);
    ck_assert_msg(worst < 0.5f, "%s: logits differ by %g", models[_i], worst);
    expected_close(&e);
    rig_close(&rig);
    rig_close(&exact);
}
END_TEST

/* Doubling the final norm's weight doubles every logit exactly. */
START_TEST(an_update_reaches_the_next_step)
{
    rig_t rig;
    rig_open(&rig, &(rig_options_t){.model = "qwen3", .dtype = LK_DTYPE_BF16});
    lk_error_t err = LK_ERROR_INIT;
    const uint32_t vocab = rig.model.vocab_size, hidden = rig.model.hidden_size;
    rig_seq_t seq = {.tokens = {5, 6, 7}, .len = 3};
    rig_seq_blocks(&rig, &seq, 0, 1);
    float *before = malloc(vocab * sizeof *before), *after = malloc(vocab * sizeof *after);
    rig_run(&rig, &seq, 0, 3, 1, before);
    weight_table_t *weights = executor_cpu_ops.weights(rig.exec[0]);
    const weight_slot_t *norm = weight_table_find(weights, "model.norm.weight");
    float *values = malloc(hidden * sizeof *values);
    ck_ok(dtype_convert(values, LK_DTYPE_F32, norm->data, LK_DTYPE_BF16, hidden));
    for (uint32_t i = 0; i < hidden; i++) {
        values[i] *= 2;
    }
    const tensor_desc_t desc = {
        .name = "model.norm.weight", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {hidden}};
    weight_sink_t sink = weight_table_sink(weights);
    sink.ops->begin(sink.ctx);
    ck_ok(sink.ops->plan(sink.ctx, &desc, 1, &err));
    ck_ok(weight_sink_store(&sink, 0, values, hidden * sizeof *values, &err));
    ck_ok(weight_sink_commit(&sink, &err));
    rig_run(&rig, &seq, 0, 3, 1, after);
    for (uint32_t i = 0; i < vocab; i++) {
        ck_assert_float_eq(after[i], 2 * before[i]);
    }
    free(before);
    free(after);
    free(values);
    rig_close(&rig);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("cpuexec_fixtures");
    TCase *tc = tcase_create("fixtures");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, float32_equals_transformers, 0, N_MODELS);
    tcase_add_loop_test(tc, bfloat16_is_near, 0, N_MODELS);
    tcase_add_test(tc, an_update_reaches_the_next_step);
    suite_add_tcase(s, tc);
    return s;
}
