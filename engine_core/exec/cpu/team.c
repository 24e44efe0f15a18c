#include "engine_core/exec/cpu/team.h"

#include "base/check.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 /* some 20 us: a few phases of a small model */

/* Each word that is waited on has its own cache line. */
struct team {
    uint32_t threads, started;
    pthread_t *ids;
    void (*fn)(worker_t *, void *);
    void *arg;
    bool stop;
    _Alignas(64) _Atomic uint32_t run;   /* number of runs begun; workers wait for it to change */
    _Alignas(64) _Atomic uint32_t phase; /* number of barriers passed */
    _Alignas(64) _Atomic uint32_t arrived;
    _Alignas(64) _Atomic uint32_t taken;
    _Alignas(64) _Atomic uint32_t sleepers;
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Returns when *word is no longer `old`. */
static void wait_change(team_t *self, _Atomic uint32_t *word, uint32_t old)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) {
            return;
        }
        relax();
    }
    atomic_fetch_add(&self->sleepers, 1);
    while (atomic_load(word) == old) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    }
    atomic_fetch_sub(&self->sleepers, 1);
}

/* Sequentially consistent with wait_change: either the change is seen before sleeping, or the
 * sleeper is seen here. */
static void change(team_t *self, _Atomic uint32_t *word)
{
    atomic_fetch_add(word, 1);
    if (atomic_load(&self->sleepers) > 0) {
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
}

void team_barrier(worker_t *w)
{
    team_t *self = w->team;
    if (w->n == 1) {
        atomic_store_explicit(&self->taken, 0, memory_order_relaxed);
        return;
    }
    uint32_t phase = atomic_load(&self->phase);
    if (atomic_fetch_add(&self->arrived, 1) + 1 < w->n) {
        wait_change(self, &self->phase, phase);
        return;
    }
    atomic_store(&self->arrived, 0);
    atomic_store(&self->taken, 0);
    change(self, &self->phase);
}

uint32_t team_take(worker_t *w)
{
    return atomic_fetch_add_explicit(&w->team->taken, 1, memory_order_relaxed);
}

typedef struct {
    team_t *team;
    uint32_t id;
} start_t;

static void *worker_main(void *arg)
{
    start_t start = *(start_t *)arg;
    free(arg);
    team_t *self = start.team;
    worker_t w = {.team = self, .id = start.id, .n = self->threads};
    for (uint32_t seen = 0;; seen++) {
        wait_change(self, &self->run, seen);
        if (self->stop) {
            return NULL;
        }
        self->fn(&w, self->arg);
        team_barrier(&w);
    }
}

lk_status_t team_new(uint32_t threads, team_t **out, lk_error_t *err)
{
    if (threads < 1 || threads > TEAM_MAX_THREADS) {
        return lk_error_set(err, LK_ERR_INVALID, "threads: %u is not in 1..%d", threads,
                            TEAM_MAX_THREADS);
    }
    team_t *self = aligned_alloc(64, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the thread team");
    }
    memset(self, 0, sizeof *self);
    self->threads = threads;
    self->ids = calloc(threads, sizeof *self->ids);
    if (self->ids == NULL) {
        lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %u threads", threads);
        goto err_destroy;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 1; i < threads; i++) {
        start_t *start = malloc(sizeof *start);
        int rc = ENOMEM;
        if (start != NULL) {
            *start = (start_t){.team = self, .id = i};
            rc = pthread_create(&self->ids[i], NULL, worker_main, start);
        }
        if (rc != 0) {
            free(start);
            lk_error_set(err, LK_ERR_IO, "threads: can't start number %u of %u: %s", i, threads,
                         strerror(rc));
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            goto err_destroy;
        }
        self->started = i;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    *out = self;
    return LK_OK;

err_destroy:
    team_destroy(&self);
    return err != NULL ? err->status : LK_ERR_NO_MEMORY;
}

void team_destroy(team_t **self_p)
{
    team_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    self->stop = true;
    change(self, &self->run);
    for (uint32_t i = 1; i <= self->started; i++) {
        pthread_join(self->ids[i], NULL);
    }
    free(self->ids);
    free(self);
}

void team_run(team_t *self, void (*fn)(worker_t *, void *), void *arg)
{
    worker_t w = {.team = self, .id = 0, .n = self->threads};
    atomic_store_explicit(&self->taken, 0, memory_order_relaxed);
    if (self->threads == 1) {
        fn(&w, arg);
        return;
    }
    self->fn = fn;
    self->arg = arg;
    change(self, &self->run);
    fn(&w, arg);
    team_barrier(&w);
}
