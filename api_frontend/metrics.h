/*
 * metrics.h: the figures of GET /metrics in Prometheus' text format 0.0.4. Names and labels are
 * vLLM's where the same thing exists ("vllm:"), else "lockstep:". A front end counts the requests
 * that came in by it (label frontend); what engines count comes with the newest STATS (label
 * engine) and is the same at every front end. Pure.
 */
#ifndef LK_API_FRONTEND_METRICS_H
#define LK_API_FRONTEND_METRICS_H

#include "api_frontend/engine_client.h"
#include "base/buf.h"

#define METRICS_MAX_BUCKETS 32

#define METRICS_REQUEST_SECONDS                                                                    \
    0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120,     \
        240, 480, 960, 1920, 7680
#define METRICS_TOKENS                                                                             \
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,     \
        500000, 1000000

/* name, help, upper bounds. Times are in seconds. */
#define METRICS_HISTOGRAM_TABLE(X)                                                                 \
    X(time_to_first_token_seconds, "From a request's arrival to its first token.", 0.001, 0.005,   \
      0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,     \
      640, 2560)                                                                                   \
    X(inter_token_latency_seconds, "Between a request's tokens.", 0.0005, 0.001, 0.0025, 0.005,    \
      0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,   \
      80)                                                                                          \
    X(e2e_request_latency_seconds, "From a request's arrival to its end.", 0.01, 0.05, 0.1, 0.3,   \
      0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)     \
    X(request_queue_time_seconds, "From a request's arrival at the engine to its first step.",     \
      METRICS_REQUEST_SECONDS)                                                                     \
    X(request_prefill_time_seconds, "From a request's first step to its first token.",             \
      METRICS_REQUEST_SECONDS)                                                                     \
    X(request_decode_time_seconds, "From a request's first token to its last.",                    \
      METRICS_REQUEST_SECONDS)                                                                     \
    X(request_inference_time_seconds, "From a request's first step to its last token.",            \
      METRICS_REQUEST_SECONDS)                                                                     \
    X(request_time_per_output_token_seconds, "A request's mean time between tokens.", 0.0005,      \
      0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, \
      5, 7.5, 10, 20, 40, 80)                                                                      \
    X(request_params_n, "n of a prompt's request.", 1, 2, 4, 8, 16, 32, 64, 128, 256)              \
    X(request_params_max_tokens, "max_tokens of a request; without one, the room left.",           \
      METRICS_TOKENS)                                                                              \
    X(request_max_num_generation_tokens, "Most tokens of a prompt's choices.", METRICS_TOKENS)     \
    X(request_prefill_kv_computed_tokens, "Prompt tokens that the prefix cache did not have.",     \
      METRICS_TOKENS)                                                                              \
    X(request_prompt_tokens, "Prompt tokens of a request.", 1, 2, 5, 10, 20, 50, 100, 200, 500,    \
      1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000)                      \
    X(request_generation_tokens, "Generated tokens of a request.", 1, 2, 5, 10, 20, 50, 100, 200,  \
      500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000)

typedef enum {
#define X(name, ...) METRICS_##name,
    METRICS_HISTOGRAM_TABLE(X)
#undef X
        METRICS_N_HISTOGRAMS
} metrics_histogram_t;

typedef struct {
    uint64_t counts[METRICS_MAX_BUCKETS + 1]; /* per bucket, not cumulative; the last: above all */
    uint64_t count;
    double sum;
} metrics_counts_t;

typedef struct {
    metrics_counts_t histograms[METRICS_N_HISTOGRAMS];
    uint64_t finished[FINISH_ERROR + 1]; /* requests, by finish_reason_t */
    uint64_t refused;                    /* calls answered before they reached an engine */
} metrics_t;                             /* {0} is empty */

/* `times` observations of the same value. */
void metrics_observe(metrics_t *self, metrics_histogram_t which, double value, uint64_t times);
static inline void metrics_observe_ns(metrics_t *self, metrics_histogram_t which, uint64_t ns,
                                      uint64_t times)
{
    metrics_observe(self, which, (double)ns * 1e-9, times);
}

typedef struct {
    const char *model; /* model_name of every sample */
    uint32_t frontend;
    size_t open_completions;
    const engine_client_t *client;
    bool prefix_caching;
} metrics_source_t;

/* Everything, as the body of a reply. */
void metrics_write(const metrics_t *self, const metrics_source_t *source, lk_buf_t *out);

#endif
