/* completion_rig.h: the API over scripted engines, for tests of completions: what was sent to them,
 * and what they answer. */
#ifndef LK_TESTS_COMPLETION_RIG_H
#define LK_TESTS_COMPLETION_RIG_H

#include "tests/lib/test_main.h"
#include "tests/unit/api_frontend/fake_client.h"
#include "tests/unit/api_frontend/fake_group.h"

extern fake_group_t g;
extern lk_config_t config;
extern api_t api;
extern tokenizer_t *tokenizer;

/* Two ranks; with a byte-level tokenizer, or without one. */
void setup(void);
void setup_ids_only(void);
void teardown(void);

/* The request that went to a rank, with the fields a test needs. */
typedef struct {
    uint32_t rank;
    uint64_t handle, seed, max_tokens, choice, prompt_logprobs;
} sent_t;

/* The oldest ADD that nobody took; of rank 0 first. */
sent_t take_add(void);

/* One output with everything. Spans are "version epoch start end" as given. */
typedef struct {
    const char *text; /* its bytes are the token ids */
    uint64_t epoch;
    const char *version;
    finish_reason_t finish;
    int64_t stop_token;
    bool logprobs;
    size_t n_top;
    const msg_span_t *kv;
    size_t n_kv;
    uint64_t queue_ns, prefill_ns;
} out_t;

void answer(sent_t s, const out_t *o);
/* Scores of prompt tokens [first, first + n): token i has logprob -i and rank i; the most likely
 * ones are 'P', 'Q'... with -0.25, -0.5..., but for the last one, which is no token. */
void answer_scores(sent_t s, uint32_t first, uint32_t n, size_t n_top);
void expect_error(const fake_client_t *c, int status, const char *param, const char *text);

#endif
