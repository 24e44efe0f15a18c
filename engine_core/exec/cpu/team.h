/*
 * team.h: a fixed set of threads that run one function together, with a barrier and a shared
 * counter of work units. Made for phases of microseconds: waiters spin briefly, then sleep in the
 * kernel, so that engines which share cores do not starve each other (which is why this is not
 * OpenMP: its waiting policy is one environment variable per process).
 *
 * The caller of team_run is worker 0. Workers hold no state between runs and block all signals.
 */
#ifndef LK_ENGINE_CORE_EXEC_CPU_TEAM_H
#define LK_ENGINE_CORE_EXEC_CPU_TEAM_H

#include "base/status.h"

typedef struct team team_t;

typedef struct {
    team_t *team;
    uint32_t id, n; /* this worker, number of workers */
} worker_t;

#define TEAM_MAX_THREADS 1024

/* threads >= 1; one thread starts no other and needs no synchronisation. */
LK_MUST_USE lk_status_t team_new(uint32_t threads, team_t **out, lk_error_t *err);
void team_destroy(team_t **self_p);

/* Runs fn on every worker and returns when all are done. One caller at a time. */
void team_run(team_t *self, void (*fn)(worker_t *w, void *arg), void *arg);

/* Within team_run: all workers wait for all; the counter of team_take starts again at 0. Every
 * worker must call it the same number of times. */
void team_barrier(worker_t *w);

/* Within team_run: the next unit of the current phase, n_units or more when none is left. */
uint32_t team_take(worker_t *w);

#endif
