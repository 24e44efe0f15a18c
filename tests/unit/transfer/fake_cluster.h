/*
 * fake_cluster.h: a front end and its ranks in one thread, for tests of the trainer's library: it
 * answers the trainer socket's calls with real update sessions over real tcp (or nccl) engines and
 * memory sinks, and can be told to misbehave.
 */
#ifndef LK_TESTS_FAKE_CLUSTER_H
#define LK_TESTS_FAKE_CLUSTER_H

#include "tests/lib/transfer/mem_sink.h"
#include "transfer/update_session.h"

#include <stdatomic.h>

#define FAKE_RANKS 2

typedef struct fake_cluster fake_cluster_t;

typedef struct {
    const char *refuse; /* call that is answered with the two below */
    int code;
    const char *text;
    bool plain_error;          /* "error" is a string instead of an object */
    const char *sink_fails_at; /* on rank 1 */
    bool rank_1_stays_away;    /* from init */
    bool no_model;             /* in the answer to init */
    const char *lacks;         /* a field that answers leave out */
    bool nccl, ipc;            /* these engines on host devices; else tcp */
    double no_progress_s;      /* 0: 20 */
} fake_script_t;

fake_cluster_t *fake_cluster_new(const tensor_desc_t *model, size_t n, fake_script_t script);
void fake_cluster_destroy(fake_cluster_t **self_p);
const char *fake_cluster_endpoint(const fake_cluster_t *self);
/* Look at these only between calls. */
mem_sink_t *fake_cluster_sink(fake_cluster_t *self, unsigned rank);
/* The arguments of the last call, JSON text; until it is asked for again. */
const char *fake_cluster_last(fake_cluster_t *self);
/* Takes effect with the next call. */
void fake_cluster_script(fake_cluster_t *self, fake_script_t script);

#endif
