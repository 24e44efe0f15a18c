/*
 * The hunt for mixed weights: sampled streams run while a trainer replaces the weights in every way
 * there is: with pauses of any mode, cleared caches or not, without a pause, in pieces, with
 * sessions that are aborted empty or half done, and resumes that come too early; in place and with
 * shadow swap. Then every stream is recomputed from its spans, in one process, without a scheduler,
 * cache or cluster.
 */
#include "base/check.h"
#include "base/env.h"
#include "base/prng.h"
#include "examples/demo/streams.h"
#include "tests/cluster/rl_weights.h"
#include "tests/lib/test_main.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_SETS     14
#define N_STREAMS  12
#define BLOCK_SIZE 16

static rl_weights_t weight_set(const demo_weights_t *weights, uint64_t k)
{
    rl_weights_t w = {.n = demo_weights_count(weights)};
    const tensor_desc_t *descs = demo_weights_descs(weights);
    w.t = calloc(w.n, sizeof *w.t);
    ck_assert_ptr_nonnull(w.t);
    for (size_t i = 0; i < w.n; i++) {
        uint64_t bytes;
        lk_error_t err = LK_ERROR_INIT;
        ck_assert(tensor_desc_bytes(&descs[i], &bytes));
        void *data = malloc(bytes);
        ck_assert_ptr_nonnull(data);
        ck_assert_msg(demo_weights_tensor(weights, i, k, data, &err) == LK_OK, "%s", err.text);
        w.t[i] = (lst_tensor_t){.name = strdup(descs[i].name),
                                .dtype = "bfloat16",
                                .ndim = descs[i].ndim,
                                .data = data};
        memcpy(w.t[i].shape, descs[i].shape, sizeof w.t[i].shape);
    }
    return w;
}

/* A session that does not come to its end; with tensors the ranks are dirty afterwards, in place.
 */
static void fail_once(lst_t *lst, const rl_weights_t *w, size_t n)
{
    rl_must(lst, lst_start(lst), "start of a session to abort");
    if (n > 0) {
        rl_must(lst, lst_update(lst, w->t, n, NULL), "update of a session to abort");
    }
    rl_must(lst, lst_abort(lst), "abort");
}

static void push_in_pieces(lst_t *lst, const rl_weights_t *w, lk_prng_t *prng, bool resume_early)
{
    rl_must(lst, lst_start(lst), "start");
    for (size_t done = 0; done < w->n;) {
        size_t n = 1 + lk_prng_below(prng, w->n - done);
        lst_update_options_t options = {.packed = lk_prng_below(prng, 2),
                                        .packed_buffer_size_bytes = 20000};
        rl_must(lst, lst_update(lst, w->t + done, n, &options), "update");
        done += n;
        if (resume_early) {
            rl_must(lst, lst_resume(lst), "resume in mid session");
        }
    }
}

/* The trainer's process. */
static void train(const cluster_t *c, const demo_weights_t *weights, uint64_t seed)
{
    static const char *const modes[] = {"abort", "wait", "keep", "keep", NULL, NULL};
    lk_prng_t prng;
    lk_prng_seed(&prng, seed);
    lst_t *lst = rl_open(c);
    rl_must(lst, lst_init_tcp(lst, NULL), "init");
    for (uint64_t k = 1; k <= N_SETS; k++) {
        rl_wait_tokens(c);
        rl_weights_t w = weight_set(weights, k);
        const char *mode = modes[lk_prng_below(&prng, LK_ARRAY_LEN(modes))];
        bool clear = lk_prng_below(&prng, 2);
        uint64_t trouble = lk_prng_below(&prng, 6);
        printf("# set-%llu: %s, clear_cache %d, %s\n", (unsigned long long)k,
               mode != NULL ? mode : "no pause", clear,
               trouble == 0   ? "a half session before"
               : trouble == 1 ? "an empty session before"
               : trouble == 2 ? "resumed early"
                              : "plain");
        fflush(stdout);
        if (mode != NULL) {
            rl_must(lst, lst_pause(lst, mode, clear), "pause");
        }
        if (trouble < 2) {
            fail_once(lst, &w, trouble == 0 ? w.n / 2 : 0);
        }
        push_in_pieces(lst, &w, &prng, trouble == 2);
        char version[32];
        snprintf(version, sizeof version, "set-%llu", (unsigned long long)k);
        rl_must(lst, lst_finish(lst, version), "finish");
        rl_assert_holds(lst, &w, version);
        if (mode != NULL) {
            rl_must(lst, lst_resume(lst), "resume");
        }
        rl_weights_fini(&w);
    }
    rl_wait_tokens(c);
    lst_close(&lst);
    _exit(0);
}

/* True when the trainer is through. */
static bool trainer_ended(pid_t pid)
{
    int status;
    if (waitpid(pid, &status, WNOHANG) != pid) {
        return false;
    }
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the trainer failed");
    return true;
}

static void check(const char *dir, const demo_weights_t *weights, const streams_t *streams)
{
    size_t n;
    const stream_record_t *records = streams_records(streams, &n);
    verify_result_t result;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(verify_streams(dir, weights, N_SETS, LK_DTYPE_F32, BLOCK_SIZE, records, n, 1e-3,
                                 NULL, NULL, &result, &err) == LK_OK,
                  "%s", err.text);
    printf("# %llu tokens of %zu streams, %llu of them over mixed KV, worst logprob %g\n",
           (unsigned long long)result.tokens, n, (unsigned long long)result.mixed_streams,
           result.worst_logprob);
    ck_assert_msg(result.wrong_tokens + result.wrong_logprobs == 0, "%s", result.first);
    ck_assert_uint_gt(result.tokens, 1000);
}

static const struct {
    model_arch_t arch;
    const char *swap, *flag;
} layouts[] = {{ARCH_QWEN3_MOE, "inplace", "--enable-expert-parallel"},
               {ARCH_QWEN3, "inplace", NULL},
               {ARCH_QWEN3_MOE, "shadow", "--enable-expert-parallel"},
               {ARCH_QWEN3, "shadow", NULL}};
#define N_LAYOUTS (int)LK_ARRAY_LEN(layouts)

START_TEST(no_token_of_mixed_weights)
{
    uint64_t seed = test_seed("hunt") + (uint64_t)_i;
    const char *args[] = {"--data-parallel-size",
                          "2",
                          "--dtype",
                          "float32",
                          "--max-model-len",
                          "400",
                          "--weight-transfer-config",
                          "{\"backend\":\"tcp\"}",
                          "--weight-swap",
                          layouts[_i % N_LAYOUTS].swap,
                          layouts[_i % N_LAYOUTS].flag,
                          NULL};
    cluster_t c;
    demo_weights_t *weights;
    lk_error_t err = LK_ERROR_INIT;
    char dir[512];
    snprintf(dir, sizeof dir, "%s", rl_make_model(layouts[_i % N_LAYOUTS].arch, 7, 0));
    ck_assert_msg(demo_weights_open(dir, false, &weights, &err) == LK_OK, "%s", err.text);
    cluster_start(&c, dir, args);
    fflush(stdout);
    pid_t trainer = fork();
    ck_assert_int_ge(trainer, 0);
    if (trainer == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        train(&c, weights, seed);
    }
    streams_t *streams = streams_new(&(streams_config_t){.url = c.url,
                                                         .n_streams = N_STREAMS,
                                                         .vocab_size = 256,
                                                         .prompt_tokens = 24,
                                                         .max_tokens = 160,
                                                         .seed = seed,
                                                         .may_end_early = true});
    bool ended = false;
    while (streams_poll(streams, 10, ended) > 0 || !ended) {
        ck_assert_msg(streams_failure(streams) == NULL, "%s", streams_failure(streams));
        ended = ended || trainer_ended(trainer);
    }
    ck_assert_int_eq(cluster_stop(&c), 0);
    check(dir, weights, streams);
    streams_destroy(&streams);
    demo_weights_close(&weights);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("mixed weights");
    TCase *tc = tcase_create("hunt");
    tcase_set_timeout(tc, 280);
    tcase_add_loop_test(tc, no_token_of_mixed_weights, 0, N_LAYOUTS + 2);
    suite_add_tcase(s, tc);
    return s;
}
