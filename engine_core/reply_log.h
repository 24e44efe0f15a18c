/*
 * reply_log.h: the last answers (DONE) to each front end's commands, to be repeated word for word
 * when a command arrives again because its answer was lost.
 */
#ifndef LK_ENGINE_CORE_REPLY_LOG_H
#define LK_ENGINE_CORE_REPLY_LOG_H

#include "proto/messages.h"

/* Per front end. One that misses an answer asks for it with its next message; meanwhile it can have
 * had that many others answered: twice as many calls as it may have open at once. */
#define REPLY_LOG_DEPTH 2048

typedef struct reply_log reply_log_t;

reply_log_t *reply_log_new(uint32_t n_frontends);
void reply_log_destroy(reply_log_t **self_p);
/* Copies done; forgets the oldest. */
void reply_log_add(reply_log_t *self, uint32_t frontend, const msg_done_t *done);
/* NULL if there is none (not answered yet, or too long ago). Valid until the next add. */
const msg_done_t *reply_log_find(const reply_log_t *self, uint32_t frontend, uint64_t generation,
                                 uint64_t number);

#endif
