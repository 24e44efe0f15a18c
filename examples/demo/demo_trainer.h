/*
 * demo_trainer.h: the demo's trainer, in a process of its own. It speaks to the cluster through
 * liblockstep_trainer only, as any trainer would.
 */
#ifndef LK_EXAMPLES_DEMO_DEMO_TRAINER_H
#define LK_EXAMPLES_DEMO_DEMO_TRAINER_H

#include "examples/demo/demo_weights.h"

/* What the trainer tells of one update; written to the report pipe as it is (one process pair). */
typedef struct {
    uint64_t set;
    uint64_t bytes;
    bool clear_cache;
    bool digests_equal; /* every rank's digest is the trainer's own */
    uint32_t ranks;
    double transfer_s, pause_s; /* update_weights; pause to resume, 0: none */
    char digest[40];
    char error[400]; /* not empty: it failed, and why; the trainer has ended */
} update_report_t;

/* For sets 1..n_sets: waits for a byte on go_fd, pauses if asked to (`keep`; clear_cache for odd
 * sets), pushes the set as version "set-K", resumes, writes an update_report_t to report_fd.
 * Returns the exit status of the process. */
int demo_trainer_run(const char *endpoint, const demo_weights_t *weights, uint64_t n_sets,
                     bool pauses, int go_fd, int report_fd);

#endif
