/*
 * summary.h: what one run of updates was like, and the table that shows two runs side by side.
 */
#ifndef LK_EXAMPLES_DEMO_SUMMARY_H
#define LK_EXAMPLES_DEMO_SUMMARY_H

#include "examples/demo/demo_trainer.h"
#include "examples/demo/streams.h"

#define SUMMARY_MAX_SETS 1000

/* All updates of one --weight-swap mode, on a cluster of their own. */
typedef struct {
    const char *swap;  /* "inplace" or "shadow" */
    const char *title; /* "in place" */
    update_report_t reports[SUMMARY_MAX_SETS + 1];
    double gaps[SUMMARY_MAX_SETS]; /* longest time between two tokens of a stream, from the update's
                                      start to the next one's, seconds */
    uint64_t n_reports;
    streams_t *streams; /* ended */
    double seconds;
} summary_run_t;

/* One column per run. */
void summary_print(const summary_run_t *runs, size_t n);

#endif
