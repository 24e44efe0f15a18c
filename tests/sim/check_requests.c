/*
 * check_requests.c: every request ends exactly once; its tokens come in order, none after the end,
 * each one the oracle's; how it ends fits what happened.
 */
#include "tests/sim/checkers.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

/* What is known of a weight epoch: the digest that the ranks held when they first stepped in it. */
typedef struct {
    uint64_t epoch;
    digest_t digest;
} version_t;

typedef struct {
    version_t *versions; /* newest last */
    size_t n, cap;
    bool paused_abort; /* somebody asked for a pause in mode abort */
} state_t;

/* The null executor's rule, written down again: a chain over the tokens, then the weights. */
static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static uint64_t oracle_chain(uint64_t chain, uint32_t token)
{
    return mix(chain ^ ((uint64_t)token << 20 | 0x5a5a5));
}

static uint32_t oracle_token(uint64_t chain, digest_t weights)
{
    uint32_t token = (uint32_t)(mix(mix(chain ^ weights.lane[0]) ^ weights.lane[1]) % 97);
    return token == 1 ? 2 : token; /* 1 ends a text and is never made */
}

static const version_t *find_version(const state_t *self, uint64_t epoch)
{
    for (size_t i = self->n; i-- > 0;) {
        if (self->versions[i].epoch == epoch) {
            return &self->versions[i];
        }
    }
    return NULL;
}

static void note_version(sim_t *sim, state_t *self, uint32_t rank)
{
    const sim_rank_t *r = &sim->ranks[rank];
    uint64_t epoch = group_weights(engine_core_group(r->core))->epoch;
    digest_t digest = weight_table_digest(r->executor->ops->weights(r->executor));
    if (find_version(self, epoch) != NULL) {
        return;
    }
    if (self->n == self->cap) {
        self->cap = 2 * self->cap + 16;
        self->versions = realloc(self->versions, self->cap * sizeof *self->versions);
        CHECK(self->versions != NULL);
    }
    self->versions[self->n++] = (version_t){epoch, digest};
}

static void check_tokens(sim_t *sim, state_t *self, const sim_request_t *r, const msg_output_t *out)
{
    uint64_t chain = 0x6e756c6c6f726163ull;
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        chain = oracle_chain(chain, r->tokens[i]);
    }
    size_t n = out->token_ids.len / sizeof(uint32_t);
    const version_t *version = find_version(self, out->epoch);
    if (n > 0 && version == NULL) {
        sim_fail(sim, "requests", "request %zu: tokens of epoch %llu, which no rank stepped in",
                 r->index, (unsigned long long)out->epoch);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t got;
        memcpy(&got, (const uint8_t *)out->token_ids.data + 4 * i, sizeof got);
        uint32_t want = oracle_token(chain, version->digest);
        if (got != want) {
            sim_fail(sim, "requests",
                     "request %zu, output token %zu of epoch %llu is %u, not %u: other weights or "
                     "other KV made it",
                     r->index, r->n_tokens - r->n_prompt + i, (unsigned long long)out->epoch, got,
                     want);
            return;
        }
        chain = oracle_chain(chain, got);
    }
}

static void check_end(sim_t *sim, const state_t *self, const sim_request_t *r,
                      const msg_output_t *out)
{
    size_t n = r->n_tokens - r->n_prompt + out->token_ids.len / sizeof(uint32_t);
    switch (out->finish_reason) {
    case FINISH_LENGTH:
        if (n != r->max_tokens) {
            sim_fail(sim, "requests", "request %zu ends with \"length\" after %zu of %u tokens",
                     r->index, n, r->max_tokens);
        }
        break;
    case FINISH_ABORT:
        if (!self->paused_abort) {
            sim_fail(sim, "requests", "request %zu ends with \"abort\", which nobody asked for",
                     r->index);
        }
        break;
    case FINISH_ERROR:
        if (out->error.len == 0 || out->error_status >= 0) {
            sim_fail(sim, "requests", "request %zu ends with an error without a text or a status",
                     r->index);
        }
        if (out->error_status != LK_ERR_UNAVAILABLE) {
            sim_fail(sim, "requests",
                     "request %zu ends with an error that is not to be retried: %s", r->index,
                     msg_cstr(out->error));
        }
        break;
    default:
        sim_fail(sim, "requests", "request %zu ends with %llu", r->index,
                 (unsigned long long)out->finish_reason);
    }
}

/* The spans of the last output say what the outputs said one by one. */
static void check_spans(sim_t *sim, const sim_request_t *r, const msg_output_t *out)
{
    size_t at = 0, before = r->n_tokens - r->n_prompt;
    size_t n = before + out->token_ids.len / sizeof(uint32_t);
    for (size_t s = 0; s < out->weight_spans.count; s++) {
        const msg_span_t *span = &out->weight_spans.items[s];
        bool fits = span->start == at && span->end > span->start && span->end <= n;
        for (; fits && at < span->end; at++) {
            fits = span->epoch == (at < before ? r->epochs[at] : out->epoch);
        }
        if (!fits) {
            sim_fail(sim, "requests", "request %zu: weight_versions do not fit its tokens",
                     r->index);
            return;
        }
    }
    if (at != n && out->finish_reason != FINISH_ERROR) {
        sim_fail(sim, "requests", "request %zu: weight_versions cover %zu of %zu tokens", r->index,
                 at, n);
    }
}

static void on_output(sim_t *sim, state_t *self, const sim_saw_t *saw)
{
    const sim_request_t *r = saw->request;
    const msg_output_t *out = saw->output;
    if (r->finish != FINISH_NONE) {
        sim_fail(sim, "requests", "request %zu has ended, and gets another output", r->index);
    } else if (r->aborted) {
        sim_fail(sim, "requests", "request %zu was aborted by its client, and gets an output",
                 r->index);
    } else if (out->token_ids.len % sizeof(uint32_t) != 0 ||
               r->n_tokens + out->token_ids.len / sizeof(uint32_t) > r->n_prompt + r->max_tokens) {
        sim_fail(sim, "requests", "request %zu gets more than its %u tokens", r->index,
                 r->max_tokens);
    } else {
        check_tokens(sim, self, r, out);
        if (out->finish_reason != FINISH_NONE) {
            check_end(sim, self, r, out);
            check_spans(sim, r, out);
        }
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    switch (saw->kind) {
    case SIM_SAW_STEP_POST:
        note_version(sim, self, saw->rank);
        break;
    case SIM_SAW_OUTPUT:
        on_output(sim, self, saw);
        break;
    case SIM_SAW_ASKED:
        self->paused_abort |= saw->call->kind == SIM_CALL_PAUSE && saw->call->mode == PAUSE_ABORT;
        break;
    case SIM_SAW_END:
        for (size_t i = 0; i < sim->n_requests && sim->phase == SIM_DONE && !sim->result.failed;
             i++) {
            const sim_request_t *r = sim->requests[i];
            if (r->finish == FINISH_NONE && !r->aborted) {
                sim_fail(sim, "requests", "request %zu never ended", r->index);
            }
        }
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    free(((state_t *)state)->versions);
}

const sim_checker_t check_requests = {
    .name = "requests", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
