/*
 * rpc.h: one call at a time over the cluster's trainer socket: two frames each way, a call id (u64,
 * little-endian) and a msgpack map. A call without an answer is sent again, under the same id and
 * idempotency key. Nothing blocks.
 */
#ifndef LK_TRANSFER_TRAINER_RPC_H
#define LK_TRANSFER_TRAINER_RPC_H

#include "base/env.h"
#include "base/port.h"

#include <jansson.h>

typedef struct rpc rpc_t;

/* Takes over the port (a DEALER). admin_key may be NULL. */
rpc_t *rpc_new(lk_port_t *port, const lk_env_t *env, const char *admin_key, const char *endpoint);
void rpc_destroy(rpc_t **self_p);

/* Sends {"call": call, ...args}. args (may be NULL) is borrowed. Drops an older call's answer. */
LK_MUST_USE lk_status_t rpc_post(rpc_t *self, const char *call, const json_t *args,
                                 uint64_t timeout_ns, lk_error_t *err);
/* The same with the arguments as a JSON object's text, which the cluster passes on as it is: what
 * suits large ones. */
LK_MUST_USE lk_status_t rpc_post_text(rpc_t *self, const char *call, const char *args, size_t len,
                                      uint64_t timeout_ns, lk_error_t *err);
/* INPROGRESS; OK with the answer's map (caller owns *reply); or an error: the cluster's own text
 * with the status that its code stands for, or LK_ERR_TIMEOUT. */
LK_MUST_USE lk_status_t rpc_test(rpc_t *self, json_t **reply, lk_error_t *err);
bool rpc_busy(const rpc_t *self);
/* Forgets the call; its answer will be ignored. */
void rpc_drop(rpc_t *self);
/* To poll for input (edge-triggered, see port.h), or -1. */
int rpc_fd(const rpc_t *self);
/* When rpc_test has something to do without input. */
uint64_t rpc_wake_ns(const rpc_t *self);

#endif
