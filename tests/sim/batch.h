/* batch.h: many seeds, each in a process of its own, so that a crash is a failed seed. */
#ifndef LK_TESTS_SIM_BATCH_H
#define LK_TESTS_SIM_BATCH_H

#include "tests/sim/sim.h"

typedef struct {
    sim_config_t config; /* seed and options are filled for each */
    uint64_t *seeds;
    size_t n_seeds;
    unsigned jobs;           /* at once */
    bool twice;              /* each seed runs twice, and the traces have to be equal */
    const char *const *sets; /* option overrides, NULL at the end */
    const char *prefix;      /* of every line: "", or "# " in a test */
    const char *replay;      /* the command that replays a seed, without it */
} sim_batch_t;

/* Prints the failing seeds and, at the end, figures and "N passed, N failed". Returns the number
 * that failed. */
size_t sim_batch_run(const sim_batch_t *batch);

/* Options of a seed, with overrides. */
LK_MUST_USE lk_status_t sim_batch_options(uint64_t seed, const char *const *sets,
                                          sim_options_t *out, lk_error_t *err);

#endif
