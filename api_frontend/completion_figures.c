/* completion_figures.c: what /metrics says of completions, and the logprobs that they hold. */
#include "api_frontend/completion_internal.h"
#include "base/check.h"
#include "base/log.h"

#include <inttypes.h>

/* Queue and prefill are the engine's times; what follows is as the tokens come in here. */
void completion_count_tokens(completion_t *self, slot_t *slot, const msg_output_t *out, size_t n)
{
    metrics_t *metrics = &self->api->metrics;
    uint64_t now = lk_env_now_ns(self->api->env);
    if (n == 0) {
        return;
    }
    if (slot->last_token_ns == 0) {
        metrics_observe_ns(metrics, METRICS_time_to_first_token_seconds, now - self->started_ns, 1);
        metrics_observe_ns(metrics, METRICS_request_queue_time_seconds, out->queue_ns, 1);
        metrics_observe_ns(metrics, METRICS_request_prefill_time_seconds, out->prefill_ns, 1);
        slot->first_token_ns = now;
        slot->prefill_ns = out->prefill_ns;
    } else {
        metrics_observe_ns(metrics, METRICS_inter_token_latency_seconds,
                           (now - slot->last_token_ns) / n, n);
    }
    slot->last_token_ns = now;
}

static void count_times(metrics_t *metrics, const slot_t *slot)
{
    uint64_t decode = slot->last_token_ns - slot->first_token_ns, n = slot->choice.n_output;
    if (slot->first_token_ns == 0) {
        return; /* it never ran */
    }
    metrics_observe_ns(metrics, METRICS_request_decode_time_seconds, decode, 1);
    metrics_observe_ns(metrics, METRICS_request_inference_time_seconds, slot->prefill_ns + decode,
                       1);
    if (n > 1) {
        metrics_observe_ns(metrics, METRICS_request_time_per_output_token_seconds, decode / (n - 1),
                           1);
    }
    metrics_observe(metrics, METRICS_request_prefill_kv_computed_tokens,
                    (double)(slot->choice.prompt->n - slot->choice.cached_tokens), 1);
}

/* Once all choices of a slot's prompt have ended. */
static void count_prompt(completion_t *self, const slot_t *slot)
{
    size_t n = self->params.n, first = (size_t)(slot - self->slots) / n * n;
    uint64_t most = 0;
    for (size_t i = first; i < first + n; i++) {
        if (!self->slots[i].counted) {
            return;
        }
        most = LK_MAX(most, self->slots[i].choice.n_output);
    }
    metrics_observe(&self->api->metrics, METRICS_request_params_n, (double)n, 1);
    metrics_observe(&self->api->metrics, METRICS_request_max_num_generation_tokens, (double)most,
                    1);
}

void completion_count_end(completion_t *self, slot_t *slot, finish_reason_t finish)
{
    slot->counted = true;
    metrics_t *metrics = &self->api->metrics;
    const choice_t *c = &slot->choice;
    uint64_t took = lk_env_now_ns(self->api->env) - self->started_ns;
    metrics->finished[finish]++;
    metrics_observe_ns(metrics, METRICS_e2e_request_latency_seconds, took, 1);
    metrics_observe(metrics, METRICS_request_prompt_tokens, (double)c->prompt->n, 1);
    metrics_observe(metrics, METRICS_request_generation_tokens, (double)c->n_output, 1);
    metrics_observe(metrics, METRICS_request_params_max_tokens, (double)slot->max_tokens, 1);
    count_times(metrics, slot);
    count_prompt(self, slot);
    LK_DEBUG("%s: choice %" PRIu32 " ended (%s) with %" PRIu64 " tokens after %.3f s", self->id,
             c->index, choice_finish_name(finish), c->n_output, (double)took * 1e-9);
}

/* How many logprobs the replies hold, after a slot's number of them may have changed. */
void completion_count_held(completion_t *self, slot_t *slot, size_t held)
{
    if (self->params.reserved_logprobs > 0) {
        return; /* counted as a whole */
    }
    self->api->held_logprobs += held - slot->held;
    slot->held = held;
}

/* The call ends with an error, or without an answer. */
void completion_count_rest(completion_t *self, finish_reason_t finish)
{
    if (!self->added) {
        self->api->metrics.refused++;
        return;
    }
    for (size_t i = 0; i < self->n_slots; i++) {
        if (!self->slots[i].counted) {
            completion_count_end(self, &self->slots[i], finish);
        }
    }
}
