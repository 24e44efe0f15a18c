#include "api_frontend/metrics.h"
#include "base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* ---- histograms ---- */

#define X(name, help, ...) static const double bounds_##name[] = {__VA_ARGS__};
METRICS_HISTOGRAM_TABLE(X)
#undef X

static const struct {
    const char *name, *help;
    const double *bounds;
    size_t n;
} histograms[] = {
#define X(name, help, ...) {"vllm:" #name, help, bounds_##name, LK_ARRAY_LEN(bounds_##name)},
    METRICS_HISTOGRAM_TABLE(X)
#undef X
};

#define X(name, help, ...)                                                                         \
    _Static_assert(sizeof bounds_##name <= METRICS_MAX_BUCKETS * sizeof(double), "too many");
METRICS_HISTOGRAM_TABLE(X)
#undef X

void metrics_observe(metrics_t *self, metrics_histogram_t which, double value, uint64_t times)
{
    metrics_counts_t *h = &self->histograms[which];
    size_t i = 0;
    while (i < histograms[which].n && value > histograms[which].bounds[i]) {
        i++;
    }
    h->counts[i] += times;
    h->count += times;
    h->sum += value * (double)times;
}

/* ---- text ---- */

typedef struct {
    lk_buf_t *out;
    const char *model;
} writer_t;

static void put_head(writer_t *w, const char *name, const char *type, const char *help)
{
    lk_buf_printf(w->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void put_escaped(writer_t *w, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '\n') {
            lk_buf_str(w->out, "\\n");
            continue;
        }
        if (*text == '\\' || *text == '"') {
            lk_buf_str(w->out, "\\");
        }
        lk_buf_append(w->out, text, 1);
    }
}

static void put_number(writer_t *w, double value)
{
    if (isinf(value)) {
        lk_buf_str(w->out, value > 0 ? "+Inf" : "-Inf");
    } else if (value == floor(value) && fabs(value) < 1e18) {
        lk_buf_printf(w->out, "%.0f", value);
    } else {
        lk_buf_printf(w->out, "%.9g", value);
    }
}

/* name{model_name="m",who="0",label="text"} value; label NULL: none. */
static void put_sample(writer_t *w, const char *name, const char *who, uint32_t index,
                       const char *label, const char *text, double value)
{
    lk_buf_printf(w->out, "%s{model_name=\"", name);
    put_escaped(w, w->model);
    lk_buf_printf(w->out, "\",%s=\"%" PRIu32 "\"", who, index);
    if (label != NULL) {
        lk_buf_printf(w->out, ",%s=\"", label);
        put_escaped(w, text);
        lk_buf_str(w->out, "\"");
    }
    lk_buf_str(w->out, "} ");
    put_number(w, value);
    lk_buf_str(w->out, "\n");
}

static void put_histogram(writer_t *w, uint32_t frontend, size_t which, const metrics_counts_t *h)
{
    const char *name = histograms[which].name;
    char sample[128], bound[32];
    put_head(w, name, "histogram", histograms[which].help);
    snprintf(sample, sizeof sample, "%s_bucket", name);
    uint64_t below = 0;
    for (size_t i = 0; i <= histograms[which].n; i++) {
        below += h->counts[i];
        if (i < histograms[which].n) {
            snprintf(bound, sizeof bound, "%.9g", histograms[which].bounds[i]);
        } else {
            snprintf(bound, sizeof bound, "+Inf");
        }
        put_sample(w, sample, "frontend", frontend, "le", bound, (double)below);
    }
    snprintf(sample, sizeof sample, "%s_sum", name);
    put_sample(w, sample, "frontend", frontend, NULL, NULL, h->sum);
    snprintf(sample, sizeof sample, "%s_count", name);
    put_sample(w, sample, "frontend", frontend, NULL, NULL, (double)h->count);
}

/* ---- what engines count ---- */

#define SECONDS(ns) ((double)(ns)*1e-9)

/* type, name, help, value of load l */
#define ENGINE_TABLE(X)                                                                            \
    X(gauge, "vllm:num_requests_running", "Requests in the running batch.", l->running)            \
    X(gauge, "vllm:num_requests_waiting", "Requests that wait.", l->waiting)                       \
    X(gauge, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", l->kv_usage)        \
    X(counter, "vllm:num_preemptions_total", "Preemptions.", l->preemptions)                       \
    X(counter, "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",  \
      l->prefix_queries)                                                                           \
    X(counter, "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",         \
      l->prefix_hits)                                                                              \
    X(counter, "vllm:prompt_tokens_total", "Prompt tokens computed.", l->prompt_tokens)            \
    X(counter, "vllm:generation_tokens_total", "Tokens generated.", l->generation_tokens)          \
    X(counter, "lockstep:steps_total", "Forward passes, dummy ones included.", l->step)            \
    X(counter, "lockstep:dummy_steps_total", "Forward passes without a request.", l->dummy_steps)  \
    X(gauge, "lockstep:wave", "Number of the wave: idle, running, idle.", l->wave)                 \
    X(gauge, "lockstep:round", "Number of the next round of votes.", l->round)                     \
    X(counter, "lockstep:votes_total", "Rounds that the engine has voted in.", l->votes)           \
    X(gauge, "lockstep:group_runs", "1 while the group steps.", l->run)                            \
    X(gauge, "lockstep:paused", "1 while a pause is in force.", l->paused)                         \
    X(gauge, "lockstep:pause_pending", "1 while a pause was seen and is not in force yet.",        \
      l->paused_local)                                                                             \
    X(counter, "lockstep:pauses_total", "Pauses that took force.", l->pauses)                      \
    X(counter, "lockstep:paused_seconds_total", "Time in pauses, the present one included.",       \
      SECONDS(l->paused_ns))                                                                       \
    X(gauge, "lockstep:last_pause_seconds", "Length of the newest pause, so far if it lasts.",     \
      SECONDS(l->last_pause_ns))                                                                   \
    X(gauge, "lockstep:weight_epoch", "Epoch of the weights in force.", l->weight_epoch)           \
    X(gauge, "lockstep:weight_session_open", "1 while a weight update session is open.",           \
      l->session_open)                                                                             \
    X(gauge, "lockstep:weight_update_bytes_done", "Of the update_weights call under way.",         \
      l->receiving_done)                                                                           \
    X(gauge, "lockstep:weight_update_bytes_expected", "Of the update_weights call under way.",     \
      l->receiving_total)                                                                          \
    X(counter, "lockstep:weight_updates_total", "update_weights calls carried out.", l->updates)   \
    X(counter, "lockstep:weight_update_failures_total", "update_weights calls that failed.",       \
      l->updates_failed)                                                                           \
    X(counter, "lockstep:weight_update_tensors_total", "Tensors received by them.",                \
      l->update_tensors)                                                                           \
    X(counter, "lockstep:weight_update_bytes_total", "Bytes received by them.", l->update_bytes)   \
    X(counter, "lockstep:weight_update_seconds_total", "Time they took.", SECONDS(l->update_ns))

/* The value of row `row` of the table. */
static double value_of(size_t row, const msg_load_t *l)
{
    const double values[] = {
#define X(type, name, help, value) (double)(value),
        ENGINE_TABLE(X)
#undef X
    };
    return values[row];
}

static void put_engines(writer_t *w, const engine_client_t *client, uint32_t n_ranks)
{
    static const struct {
        const char *name, *type, *help;
    } rows[] = {
#define X(type, name, help, value) {name, #type, help},
        ENGINE_TABLE(X)
#undef X
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        put_head(w, rows[i].name, rows[i].type, rows[i].help);
        for (uint32_t r = 0; r < n_ranks; r++) {
            const msg_load_t *l = engine_client_load(client, r);
            if (l != NULL) {
                put_sample(w, rows[i].name, "engine", r, NULL, NULL, value_of(i, l));
            }
        }
    }
}

/* Gauges that are 1 for one of several words. */
static void put_states(writer_t *w, const engine_client_t *client, uint32_t n_ranks)
{
    static const char waiting[] = "vllm:num_requests_waiting_by_reason";
    static const char sleep[] = "vllm:engine_sleep_state", gate[] = "lockstep:gate";
    static const char version[] = "lockstep:weight_version_info", up[] = "lockstep:engine_up";
    static const char swap[] = "lockstep:weight_swap_info", gone[] = "lockstep:engine_removed";
    put_head(w, waiting, "gauge",
             "Requests that wait, by reason: capacity, or deferred by a pause or a gate.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(client, r);
        if (l != NULL) {
            bool deferred = l->paused || l->gates != 0;
            double n = (double)l->waiting;
            put_sample(w, waiting, "engine", r, "reason", "capacity", deferred ? 0 : n);
            put_sample(w, waiting, "engine", r, "reason", "deferred", deferred ? n : 0);
        }
    }
    put_head(w, sleep, "gauge", "1 for the state that the engine's memory is in.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(client, r);
        if (l != NULL) {
            bool asleep = l->gates & GATE_ASLEEP;
            put_sample(w, sleep, "engine", r, "sleep_state", "awake", !asleep);
            put_sample(w, sleep, "engine", r, "sleep_state", "weights_offloaded", asleep);
            put_sample(w, sleep, "engine", r, "sleep_state", "discard_all", 0);
        }
    }
    put_head(w, gate, "gauge", "1 while the gate keeps the engine from stepping.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(client, r);
        if (l != NULL) {
            put_sample(w, gate, "engine", r, "gate", "session", (l->gates & GATE_SESSION) != 0);
            put_sample(w, gate, "engine", r, "gate", "dirty", (l->gates & GATE_DIRTY) != 0);
            put_sample(w, gate, "engine", r, "gate", "asleep", (l->gates & GATE_ASLEEP) != 0);
        }
    }
    put_head(w, swap, "gauge", "Where new weights are received: inplace or shadow.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(client, r);
        if (l != NULL) {
            put_sample(w, swap, "engine", r, "mode", l->shadow ? "shadow" : "inplace", 1);
        }
    }
    put_head(w, version, "gauge", "Label of the weights in force.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(client, r);
        if (l != NULL) {
            put_sample(w, version, "engine", r, "version", msg_cstr(l->weight_version), 1);
        }
    }
    put_head(w, up, "gauge", "0 when the engine is dead, or was removed.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        bool removed = engine_client_removed_reason(client, r) != NULL;
        bool lives = engine_client_dead_reason(client, r) == NULL && !removed;
        put_sample(w, up, "engine", r, NULL, NULL, lives);
    }
    put_head(w, gone, "gauge", "1 when the engine was removed and does not come back.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const char *why = engine_client_removed_reason(client, r);
        put_sample(w, gone, "engine", r, why != NULL ? "why" : NULL, why, why != NULL);
    }
}

static void put_cache_config(writer_t *w, const metrics_source_t *source, uint32_t n_ranks)
{
    static const char name[] = "vllm:cache_config_info";
    put_head(w, name, "gauge", "How the KV cache is laid out.");
    for (uint32_t r = 0; r < n_ranks; r++) {
        const msg_load_t *l = engine_client_load(source->client, r);
        if (l != NULL) {
            lk_buf_printf(w->out, "%s{model_name=\"", name);
            put_escaped(w, w->model);
            lk_buf_printf(w->out,
                          "\",engine=\"%" PRIu32 "\",block_size=\"%" PRIu64
                          "\",num_gpu_blocks=\"%" PRIu64 "\",enable_prefix_caching=\"%s\"} 1\n",
                          r, l->block_size, l->kv_blocks,
                          source->prefix_caching ? "True" : "False");
        }
    }
}

/* ---- what this front end counts ---- */

static void put_frontend(writer_t *w, const metrics_t *self, const metrics_source_t *source)
{
    static const char *const reasons[] = {
#define X(name, value, text) [value] = text,
        FINISH_REASON_TABLE(X)
#undef X
    };
    static const char success[] = "vllm:request_success_total";
    static const char refused[] = "lockstep:refused_requests_total";
    static const char open[] = "lockstep:open_requests", calls[] = "lockstep:open_completions";
    uint32_t f = source->frontend;
    put_head(w, success, "counter", "Requests that ended, by finish_reason (error included).");
    for (size_t i = FINISH_STOP; i < LK_ARRAY_LEN(reasons); i++) {
        put_sample(w, success, "frontend", f, "finished_reason", reasons[i],
                   (double)self->finished[i]);
    }
    put_head(w, refused, "counter", "Completion calls answered with an error before they ran.");
    put_sample(w, refused, "frontend", f, NULL, NULL, (double)self->refused);
    put_head(w, open, "gauge", "Requests that engines work on for this front end.");
    put_sample(w, open, "frontend", f, NULL, NULL,
               (double)engine_client_num_requests(source->client));
    put_head(w, calls, "gauge", "Completion calls that are not answered yet.");
    put_sample(w, calls, "frontend", f, NULL, NULL, (double)source->open_completions);
    for (size_t i = 0; i < METRICS_N_HISTOGRAMS; i++) {
        put_histogram(w, f, i, &self->histograms[i]);
    }
}

void metrics_write(const metrics_t *self, const metrics_source_t *source, lk_buf_t *out)
{
    writer_t w = {out, source->model};
    engine_client_info_t info;
    engine_client_info(source->client, &info);
    put_engines(&w, source->client, info.n_ranks);
    put_states(&w, source->client, info.n_ranks);
    put_cache_config(&w, source, info.n_ranks);
    put_frontend(&w, self, source);
}
