/*
 * checkers.h: what the checkers are told, and the list of them. A checker sees what crosses a
 * boundary (a step's batch, a vote, a message, a call's answer) and read-only views of the
 * product's state; it shares no code with what it checks. The first one that objects ends the run
 * (sim_fail).
 */
#ifndef LK_TESTS_SIM_CHECKERS_H
#define LK_TESTS_SIM_CHECKERS_H

#include "tests/sim/sim.h"

/* name, fields used */
#define SIM_SAW_TABLE(X)                                                                           \
    X(STEP_POST)  /* rank, batch */                                                                \
    X(STEP_DONE)  /* rank, batch */                                                                \
    X(STEP_ABORT) /* rank */                                                                       \
    X(VOTE)       /* rank, epoch, round, vec, n */                                                 \
    X(DECIDED)    /* rank, epoch, round, vec, n: the result that this rank got */                  \
    X(TRANSFER)   /* rank, n: number of the update that it enters; with the collective backend */  \
    X(RANK_UP)    /* rank: a new process */                                                        \
    X(RANK_DOWN)  /* rank: it dies now */                                                          \
    X(FORMED)     /* rank, epoch: it is in this group epoch */                                     \
    X(LEFT)       /* rank: it is in none any more */                                               \
    X(SENT)       /* from, to (nodes), msg: somebody sends it */                                   \
    X(ADDED)      /* request */                                                                    \
    X(OUTPUT)     /* request, output */                                                            \
    X(ABORTED)    /* request: by its client */                                                     \
    X(ASKED)      /* call */                                                                       \
    X(ANSWERED)   /* call, engine_result */                                                        \
    X(PHASE)      /* a phase begins */                                                             \
    X(END)        /* the world is about to be taken down */

typedef enum {
#define X(name) SIM_SAW_##name,
    SIM_SAW_TABLE(X)
#undef X
} sim_saw_kind_t;

/* Borrowed for the call. */
typedef struct {
    sim_saw_kind_t kind;
    uint32_t rank, from, to;
    uint64_t epoch, round;
    const exec_batch_t *batch;
    const uint64_t *vec;
    size_t n;
    const msg_t *msg;
    sim_request_t *request;
    const msg_output_t *output;
    sim_call_t *call;
    const engine_result_t *engine_result;
} sim_saw_t;

typedef struct {
    const char *name;
    /* of the old design, too, whose other promises nobody made */
    bool any_design;
    size_t state_size; /* zeroed */
    void (*saw)(sim_t *sim, void *state, const sim_saw_t *saw);
    void (*after)(sim_t *sim, void *state); /* each event; may be NULL */
    void (*fini)(sim_t *sim, void *state);  /* may be NULL */
} sim_checker_t;

extern const sim_checker_t check_requests, check_kv, check_blocks, check_weights, check_failures,
    check_pause, check_modes, check_rounds, check_state, check_liveness, check_resources,
    check_scenario;

/* Nothing moves any more: fails as "liveness", with what every rank, call and request waits for. */
void sim_fail_stuck(sim_t *sim, const char *what);

/* Of the rank's weights in force, by check_weights.c's own formula from the numbers in its memory
 * (of tensors that are not here: what the rank was told). */
digest_t sim_memory_digest(const sim_t *sim, uint32_t rank);

sim_checks_t *sim_checks_new(const sim_t *sim);
void sim_checks_destroy(sim_t *sim, sim_checks_t **self_p);
void sim_saw(sim_t *sim, const sim_saw_t *saw);
void sim_checks_after(sim_t *sim);

#endif
