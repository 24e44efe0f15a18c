/*
 * completion.h: one POST /v1/completions or /inference/v1/generate from its first check to its last
 * byte: several choices, whole or as a stream. A call that is gone, aborted or failed aborts what
 * its engines still do.
 */
#ifndef LK_API_FRONTEND_COMPLETION_H
#define LK_API_FRONTEND_COMPLETION_H

#include "api_frontend/api.h"

typedef struct completion completion_t;

/* Ends everything without an answer (the process is going, or the client has). */
void completion_discard(completion_t *self);
/* Pings the streams that were silent for API_PING_NS. */
void completion_tick_all(api_t *api);

#endif
