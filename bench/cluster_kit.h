/*
 * cluster_kit.h: what benchmarks of a whole cluster share: a cluster of real processes over a small
 * model in a directory of its own, a connection to its trainer socket, bare echoes as floors, and
 * percentiles. One cluster at a time; a failure prints what failed, ends everything and exits.
 */
#ifndef LK_BENCH_CLUSTER_KIT_H
#define LK_BENCH_CLUSTER_KIT_H

#include "base/port.h"
#include "engine_core/exec/model_maker.h"
#include "transfer/trainer/lockstep_trainer.h"

#include <sys/types.h>

typedef struct {
    pid_t cluster, load; /* 0: none. load: a child of the benchmark that goes with it */
    char url[128], endpoint[256];
    lst_t *lst;
    uint32_t ranks;
} bench_t;

typedef struct {
    lst_tensor_t *list;
    size_t n;
    uint64_t bytes;
} tensors_t;

extern bench_t bench;

uint64_t kit_now(void);
/* Finds the tool, makes the directory. Call first. */
void kit_init(const char *name);
void kit_clean_up(void);
_Noreturn void kit_die(const char *what, const char *text);
void kit_must(lst_status_t status, const char *what);
/* pid 0: nothing to end. */
void kit_end_child(pid_t *pid, int sig);

/* Writes the model, and bfloat16 tensors of another seed for it. */
void kit_make_model(const model_maker_t *maker, tensors_t *tensors);
/* --weight-transfer-config tcp, float32; `more` (NULL: none) are further flags. Connected and
 * initialised for updates over tcp when it returns. */
void kit_start_cluster(const char *device, uint32_t ranks, char **more);
void kit_stop_cluster(void);
/* n (at most KIT_MAX_UPDATES) whole sessions, pause to resume, packed; printed. */
#define KIT_MAX_UPDATES 1000
void kit_measure_updates(const char *what, const tensors_t *t, size_t n);
/* Processor time of the child of the launcher whose command line holds both texts, all threads, in
 * ns; 0 if there is none. */
uint64_t kit_cpu_ns(const char *program, const char *argument);

/* Nearest-rank percentile; sorts. */
double kit_percentile(double *values, size_t n, double p);
void kit_print_times(const char *what, double *us, size_t n);

/* There and back between two processes; printed. */
void kit_floor_unix(void);
/* n bytes there, at most 64 back; p50 in us. */
double kit_floor_zmq(const char *what, const void *bytes, size_t n);

#endif
