#include "examples/demo/summary.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef double (*value_fn)(const summary_run_t *run, uint64_t i);

static double transfer_of(const summary_run_t *run, uint64_t i)
{
    return run->reports[i].transfer_s;
}

static double pause_of(const summary_run_t *run, uint64_t i)
{
    return run->reports[i].pause_s;
}

static double gap_of(const summary_run_t *run, uint64_t i)
{
    return run->gaps[i];
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nearest-rank percentile over the updates; p 1: the largest. */
static double percentile(const summary_run_t *run, value_fn value, double p)
{
    double values[SUMMARY_MAX_SETS];
    for (uint64_t i = 0; i < run->n_reports; i++) {
        values[i] = value(run, i);
    }
    qsort(values, run->n_reports, sizeof values[0], by_value);
    size_t k = (size_t)(p * (double)run->n_reports);
    return values[LK_MIN(k, run->n_reports - 1)];
}

/* "p50 1.2 ms, max 3.4 ms" of each run. */
static void print_times(const summary_run_t *runs, size_t n, const char *title, value_fn value)
{
    printf("  %-20s", title);
    for (size_t i = 0; i < n; i++) {
        char text[64] = "none";
        double max = percentile(&runs[i], value, 1);
        if (max > 0) {
            snprintf(text, sizeof text, "p50 %.1f ms, max %.1f ms",
                     percentile(&runs[i], value, 0.5) * 1e3, max * 1e3);
        }
        printf("  %-32s", text);
    }
    printf("\n");
}

static void print_versions(const summary_run_t *run)
{
    printf("  tokens per version, %s:\n                       ", run->title);
    for (uint64_t k = 0; k <= run->n_reports; k++) {
        printf(" %s%llu:%llu%s", k == 0 ? "default/" : "set-", (unsigned long long)k,
               (unsigned long long)streams_tokens_of(run->streams, k),
               k % 6 == 5 && k < run->n_reports ? "\n                       " : "");
    }
    printf("\n");
}

void summary_print(const summary_run_t *runs, size_t n)
{
    printf("\n  %-20s", "--weight-swap");
    for (size_t i = 0; i < n; i++) {
        printf("  %-32s", runs[i].swap);
    }
    printf("\n  %-20s", "updates");
    for (size_t i = 0; i < n; i++) {
        char text[64];
        snprintf(text, sizeof text, "%llu, of %.2f MB to %u ranks",
                 (unsigned long long)runs[i].n_reports, (double)runs[i].reports[0].bytes / 1e6,
                 runs[i].reports[0].ranks);
        printf("  %-32s", text);
    }
    printf("\n");
    print_times(runs, n, "transfer", transfer_of);
    print_times(runs, n, "pause window", pause_of);
    print_times(runs, n, "longest token gap", gap_of);
    printf("  %-20s", "streams");
    for (size_t i = 0; i < n; i++) {
        char text[64];
        size_t streams;
        streams_records(runs[i].streams, &streams);
        snprintf(text, sizeof text, "%zu, %llu tokens in %.1f s", streams,
                 (unsigned long long)streams_tokens(runs[i].streams), runs[i].seconds);
        printf("  %-32s", text);
    }
    printf("\n");
    bool digests = true;
    for (size_t i = 0; i < n; i++) {
        for (uint64_t k = 0; k < runs[i].n_reports; k++) {
            digests &= runs[i].reports[k].digests_equal;
        }
    }
    printf("  %-20s  %s\n", "digests",
           digests ? "every rank's equal the trainer's after every update" : "DIFFER");
    for (size_t i = 0; i < n; i++) {
        print_versions(&runs[i]);
    }
    printf("\n");
}
