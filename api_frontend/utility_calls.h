/*
 * utility_calls.h: calls that ask every rank and change nothing the group agrees on. Part of
 * engine_client; pure.
 */
#ifndef LK_API_FRONTEND_UTILITY_CALLS_H
#define LK_API_FRONTEND_UTILITY_CALLS_H

#include "api_frontend/engine_client.h"

typedef struct utility_calls utility_calls_t;

utility_calls_t *utility_calls_new(const engine_client_config_t *config,
                                   const engine_client_ops_t *ops);
void utility_calls_destroy(utility_calls_t **self_p);

/* dead_reasons: per rank, NULL for a living one. */
void utility_calls_call(utility_calls_t *self, const char *const *dead_reasons, const char *method,
                        const char *args, uint64_t timeout_ns, engine_result_fn fn, void *ctx);
/* False for a call that nobody waits for (late: not an error) */
bool utility_calls_on_reply(utility_calls_t *self, const msg_utility_reply_t *reply);
void utility_calls_on_dead(utility_calls_t *self, uint32_t rank, const char *reason);
/* The rank does not come back: it is asked no more, and has no place in answers. */
void utility_calls_remove(utility_calls_t *self, uint32_t rank, const char *reason);
void utility_calls_poll(utility_calls_t *self);
size_t utility_calls_num_open(const utility_calls_t *self);

#endif
