/*
 * outbox.h: what the scheduler and the engine say to front ends about requests, collected until the
 * end of a step and sent as one OUTPUTS message per front end (more only when one would be too
 * large). Copies everything but labels; the scheduler's outputs are borrowed for its callback only.
 */
#ifndef LK_ENGINE_CORE_OUTBOX_H
#define LK_ENGINE_CORE_OUTBOX_H

#include "engine_core/sched/scheduler.h"
#include "engine_core/version_labels.h"
#include "proto/messages.h"

typedef struct outbox outbox_t;

/* NULL when out of memory. */
outbox_t *outbox_new(uint32_t n_frontends);
void outbox_destroy(outbox_t **self_p);

/* labels: for the epochs in the output; flush before one of them changes, as what is kept here
 * points to them. error_status: with FINISH_ERROR. now_ns: when it was made. */
void outbox_add(outbox_t *self, const sched_output_t *output, const version_labels_t *labels,
                lk_status_t error_status, uint64_t now_ns);
/* The end of a request that the scheduler does not have. */
void outbox_refuse(outbox_t *self, uint32_t frontend, uint64_t handle, lk_status_t status,
                   const char *text);
/* Forgets what is there for one front end. */
void outbox_drop(outbox_t *self, uint32_t frontend);
bool outbox_is_empty(const outbox_t *self);
/* Holds a message's worth of bytes: flush before there is more (logprobs of all tokens are large).
 */
bool outbox_is_full(const outbox_t *self);
/* Sends all; msg is borrowed for the call of send. */
void outbox_flush(outbox_t *self, uint32_t rank, uint64_t step,
                  void (*send)(void *ctx, uint32_t frontend, const msg_t *msg), void *ctx);

#endif
