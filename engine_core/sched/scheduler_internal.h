/* scheduler_internal.h: the inside of scheduler.h, for scheduler.c (requests come and go) and
 * scheduler_step.c (what runs, and what came of it). */
#ifndef LK_ENGINE_CORE_SCHED_SCHEDULER_INTERNAL_H
#define LK_ENGINE_CORE_SCHED_SCHEDULER_INTERNAL_H

#include "engine_core/exec/sampler.h"
#include "engine_core/sched/scheduler.h"

#define SCHED_STEP_ENTRIES   (1u << 21) /* top entries of prompts in one step; but one row's */
#define SCHED_PROMPT_ROWS    512        /* prompt tokens in one output, at most */
#define SCHED_PROMPT_ENTRIES (1u << 14) /* and their top entries; but one token's at least */

typedef struct {
    request_t *head, *tail;
    size_t n;
} request_list_t;

/* A row of the posted step. The request is kept until the step is over, also when it has ended. */
typedef struct {
    request_t *r;
    uint32_t start, n;
    bool ended; /* towards the client; only its memory is left */
} batch_entry_t;

struct scheduler {
    scheduler_config_t config;
    kv_cache_t *kv;
    sampler_t *sampler;
    sched_output_fn output;
    void *output_ctx;

    request_list_t waiting, running; /* both in order of (priority, arrival_seq) */
    size_t n_started;                /* in either list, with `started` */
    request_t **buckets;             /* by (client, handle) */
    uint32_t bucket_mask;
    uint64_t next_seq, n_preemptions;

    bool posted;
    uint64_t epoch, now_ns;    /* of the posted step */
    uint32_t prompt_rows_left; /* while it is put together */
    exec_batch_t batch;
    exec_seq_t *seqs;       /* [max_num_seqs] */
    batch_entry_t *entries; /* [max_num_seqs] */

    /* scratch for one output of prompt logprobs */
    float prompt_logprobs[SCHED_PROMPT_ROWS];
    uint32_t prompt_ranks[SCHED_PROMPT_ROWS];
    uint32_t *prompt_top_ids; /* [prompt_top_room], which is at least vocab_size */
    float *prompt_top_logprobs;
    uint32_t prompt_top_room;
};

/* In order; from the end: new arrivals and new admissions mostly belong there. */
void sched_list_insert(request_list_t *list, request_t *r);
/* The same from the front: preempted requests mostly belong there. */
void sched_list_insert_front(request_list_t *list, request_t *r);
void sched_list_remove(request_list_t *list, request_t *r);

/* Whether the whole pool could hold what r has now. */
bool sched_can_ever_fit(const scheduler_t *self, const request_t *r);
/* Takes r out of everything; its memory goes now, or with the step that still uses it. */
void sched_retire(scheduler_t *self, request_t *r, finish_reason_t reason);
/* Ends r with an output that carries no tokens. */
void sched_finish_now(scheduler_t *self, request_t *r, finish_reason_t reason, const char *error);
/* Frees a request that is in no list. */
void sched_destroy_request(scheduler_t *self, request_t *r);

#endif
