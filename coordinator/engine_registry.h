/*
 * engine_registry.h: which engines and front ends exist, how far their handshake is, and when each
 * was last heard. A pure table: time comes in with each call.
 *
 *   NEW -> HELLO (said hello) -> INITED (was told the addresses) -> READY (can serve)
 */
#ifndef LK_COORDINATOR_ENGINE_REGISTRY_H
#define LK_COORDINATOR_ENGINE_REGISTRY_H

#include "proto/messages.h"

typedef enum { MEMBER_NEW, MEMBER_HELLO, MEMBER_INITED, MEMBER_READY } member_state_t;

typedef struct {
    msg_role_t role;
    uint32_t rank;
    member_state_t state;
    uint64_t generation;
    uint64_t last_heard_ns;
    bool dead; /* silent for longer than the limit; lifted when it speaks again */
    char input[256], output[256], mesh[256]; /* addresses it serves */
    /* from READY */
    uint64_t num_blocks, max_model_len, vocab_size;
    char dtype[32], digest[64];
    /* newest report of an engine */
    msg_load_t load;
    char load_version[256]; /* owns load.weight_version */
} member_t;

typedef struct engine_registry engine_registry_t;

engine_registry_t *engine_registry_new(uint32_t dp_size, uint32_t n_frontends,
                                       const char *config_hash);
void engine_registry_destroy(engine_registry_t **self_p);

/* NULL when role or rank is none of this cluster's. */
member_t *engine_registry_find(engine_registry_t *self, uint32_t role, uint64_t rank);
size_t engine_registry_count(const engine_registry_t *self);
member_t *engine_registry_at(engine_registry_t *self, size_t i); /* engines first, by rank */

/* Checks and records a HELLO. LK_ERR_INVALID: unknown rank, another configuration, an address too
 * long; LK_ERR_STATE: an older life, or a rank that is taken by a living process. */
LK_MUST_USE lk_status_t engine_registry_hello(engine_registry_t *self, const msg_t *msg,
                                              uint64_t now_ns, lk_error_t *err);
/* LK_ERR_STATE before INIT was sent. */
LK_MUST_USE lk_status_t engine_registry_ready(engine_registry_t *self, const msg_t *msg,
                                              uint64_t now_ns, lk_error_t *err);
/* Anything was heard of a member. True if that lifts its death. */
bool engine_registry_heard(engine_registry_t *self, uint32_t role, uint64_t rank, uint64_t now_ns);
/* Declares members dead that were silent for longer than limit_ns; true if any changed. */
bool engine_registry_expire(engine_registry_t *self, uint64_t now_ns, uint64_t limit_ns);

/* All members of a role have reached `state`. */
bool engine_registry_all(const engine_registry_t *self, uint32_t role, member_state_t state);
/* Members below `state`, as "engine 1, front end 0". */
void engine_registry_missing(const engine_registry_t *self, member_state_t state, char *out,
                             size_t room);

const char *member_role_name(uint32_t role);

#endif
