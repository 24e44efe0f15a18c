#include "tests/unit/api_frontend/completion_rig.h"
#include "base/check.h"

#include <math.h>
#include <string.h>

fake_group_t g;
lk_config_t config;
api_t api;
tokenizer_t *tokenizer;

static void setup_with(tokenizer_t *t)
{
    fg_init(&g, 2, false);
    config_defaults(&config);
    config.model = "m";
    lk_error_t err;
    ck_ok(api_init(&api, &config, &g.env, g.client, t, &err));
}

void setup(void)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tokenizer_write_bytes(test_tmpdir(), 300, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(tokenizer_load(test_tmpdir(), &tokenizer, &err) == LK_OK, "%s", err.text);
    setup_with(tokenizer);
}

void setup_ids_only(void)
{
    setup_with(NULL);
}

void teardown(void)
{
    api_fini(&api);
    fg_fini(&g);
    tokenizer_destroy(&tokenizer);
}

sent_t take_add(void)
{
    for (uint32_t r = 0; r < 2; r++) {
        const msg_t *msg = fg_take(&g, r, MSG_ADD);
        if (msg != NULL) {
            return (sent_t){r,
                            msg->add.handle,
                            msg->add.sampling.seed,
                            msg->add.sampling.max_tokens,
                            msg->add.choice,
                            msg->add.sampling.prompt_logprobs};
        }
    }
    ck_abort_msg("no ADD was sent");
    return (sent_t){0};
}

static void send_output(sent_t s, msg_output_t *out)
{
    msg_t msg = {.type = MSG_OUTPUTS};
    msg.outputs.rank = s.rank;
    msg.outputs.outputs.items = out;
    msg.outputs.outputs.count = 1;
    engine_client_on_msg(g.client, &msg);
}

void answer(sent_t s, const out_t *o)
{
    uint32_t ids[64], ranks[64], top_ids[64 * 4];
    float logprobs[64], top_logprobs[64 * 4];
    size_t n = strlen(o->text);
    for (size_t i = 0; i < n; i++) {
        ids[i] = (uint8_t)o->text[i];
        logprobs[i] = -0.5f * (float)(i + 1);
        ranks[i] = 1;
        for (size_t k = 0; k < o->n_top; k++) {
            top_ids[i * o->n_top + k] = k == 0 ? ids[i] : 'A' + (uint32_t)k;
            top_logprobs[i * o->n_top + k] = k == 0 ? logprobs[i] : -INFINITY;
        }
    }
    msg_output_t out = {
        .handle = s.handle,
        .token_ids = {ids, n * 4},
        .epoch = o->epoch != 0 ? o->epoch : 1,
        .version = msg_str(o->version != NULL ? o->version : "default"),
        .finish_reason = o->finish,
        .stop_token = o->finish == FINISH_STOP ? o->stop_token : -1,
        .cached_tokens = 2,
        .kv_snapshot = o->kv != NULL,
        .queue_ns = o->queue_ns,
        .prefill_ns = o->prefill_ns,
    };
    out.kv_spans.items = (msg_span_t *)o->kv;
    out.kv_spans.count = o->n_kv;
    if (o->logprobs) {
        out.logprobs = (msg_bin_t){logprobs, n * 4};
        out.ranks = (msg_bin_t){ranks, n * 4};
        out.n_top = o->n_top;
        out.top_ids = (msg_bin_t){top_ids, n * o->n_top * 4};
        out.top_logprobs = (msg_bin_t){top_logprobs, n * o->n_top * 4};
    }
    send_output(s, &out);
}

void answer_scores(sent_t s, uint32_t first, uint32_t n, size_t n_top)
{
    float logprobs[64], top_logprobs[64 * 4];
    uint32_t ranks[64], top_ids[64 * 4];
    for (uint32_t i = 0; i < n; i++) {
        logprobs[i] = -(float)(first + i);
        ranks[i] = first + i;
        for (size_t k = 0; k < n_top; k++) {
            bool last = k + 1 == n_top;
            top_ids[i * n_top + k] = last ? UINT32_MAX : 'P' + (uint32_t)k;
            top_logprobs[i * n_top + k] = last ? -INFINITY : -0.25f * (float)(k + 1);
        }
    }
    msg_output_t out = {.handle = s.handle,
                        .stop_token = -1,
                        .prompt_first = first,
                        .prompt_logprobs = {logprobs, n * 4},
                        .prompt_ranks = {ranks, n * 4},
                        .n_prompt_top = n_top,
                        .prompt_top_ids = {top_ids, n * n_top * 4},
                        .prompt_top_logprobs = {top_logprobs, n * n_top * 4}};
    send_output(s, &out);
}

void expect_error(const fake_client_t *c, int status, const char *param, const char *text)
{
    ck_assert_int_eq(c->status, status);
    ck_assert_int_eq(fc_int(c, "error.code"), status);
    if (param != NULL) {
        ck_assert_str_eq(fc_str(c, "error.param"), param);
    } else {
        ck_assert(json_is_null(fc_get(c, "error.param")));
    }
    ck_assert_msg(strstr(fc_str(c, "error.message"), text) != NULL, "%s", c->text);
}
