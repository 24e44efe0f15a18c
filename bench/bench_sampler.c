/* CPU microseconds per sampled token at a vocabulary of 151936 (Qwen3), by kind of request. */
#include "base/check.h"
#include "base/prng.h"
#include "engine_core/exec/sampler.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define VOCAB  151936
#define ROUNDS 200

static const struct {
    const char *name;
    sampling_params_t p;
} cases[] = {
    {"greedy", {.top_p = 1, .repetition_penalty = 1, .logprobs = -1}},
    {"greedy, logprobs 0", {.top_p = 1, .repetition_penalty = 1, .logprobs = 0}},
    {"greedy, logprobs 20", {.top_p = 1, .repetition_penalty = 1, .logprobs = 20}},
    {"temperature 1", {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .logprobs = -1}},
    {"temperature 1, logprobs 0",
     {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .logprobs = 0}},
    {"top-k 20, top-p 0.95",
     {.temperature = 1, .top_k = 20, .top_p = 0.95f, .repetition_penalty = 1, .logprobs = -1}},
    {"top-k 1000",
     {.temperature = 1, .top_k = 1000, .top_p = 1, .repetition_penalty = 1, .logprobs = -1}},
    {"top-p 0.95", {.temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .logprobs = -1}},
    {"top-p 0.95, penalties",
     {.temperature = 1, .top_p = 0.95f, .repetition_penalty = 1.1f, .logprobs = -1}},
};

int main(void)
{
    float *logits = malloc(VOCAB * sizeof *logits);
    uint32_t prompt[512];
    lk_prng_t prng;
    lk_prng_seed(&prng, 1);
    sampler_t *sampler = sampler_new(VOCAB, false);
    CHECK(logits != NULL && sampler != NULL);
    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = 3.0f * (float)lk_prng_normal(&prng);
    }
    for (uint32_t i = 0; i < 512; i++) {
        prompt[i] = (uint32_t)lk_prng_below(&prng, VOCAB);
    }
    for (size_t c = 0; c < LK_ARRAY_LEN(cases); c++) {
        sampling_params_t p = cases[c].p;
        p.max_tokens = 1;
        request_t *r = request_new(prompt, 512, &p);
        CHECK(r != NULL);
        clock_t start = clock();
        for (uint64_t i = 0; i < ROUNDS; i++) {
            sample_t sample;
            lk_error_t err;
            r->sampling.seed = i;
            CHECK(sampler_sample(sampler, r, logits, NULL, 0, &sample, &err) == LK_OK);
        }
        printf("%-28s %8.1f us\n", cases[c].name,
               (double)(clock() - start) * 1e6 / CLOCKS_PER_SEC / ROUNDS);
        request_destroy(&r);
    }
    sampler_destroy(&sampler);
    free(logits);
    return 0;
}
