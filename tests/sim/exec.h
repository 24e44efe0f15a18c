/*
 * exec.h: the null executor with time: a step is computed for a while before it can end, and the
 * checkers see each batch.
 */
#ifndef LK_TESTS_SIM_EXEC_H
#define LK_TESTS_SIM_EXEC_H

#include "tests/sim/sim.h"

LK_MUST_USE lk_status_t sim_exec_open(sim_rank_t *rank, const executor_config_t *config,
                                      executor_t **out, lk_error_t *err);

#endif
