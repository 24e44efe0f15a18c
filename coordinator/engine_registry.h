/*
 * engine_registry.h: which engines and front ends exist, how far their handshake is, and when each
 * was last heard. A pure table: time comes in with each call. membership.h decides.
 *
 * A removed engine keeps its place in the table and takes no part in anything.
 *
 *   NEW -> HELLO (said hello) -> INITED (was told the addresses) -> READY (can serve)
 *
 * An engine goes back to NEW when its group epoch breaks, and says HELLO for the next one.
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
    uint64_t pid;
    uint64_t expelled; /* lives up to this generation are over */
    char expelled_why[128];
    uint64_t member_of; /* HELLO: the group epoch that it says it is in; 0: none */
    uint64_t members;   /* HELLO: of how many ranks */
    uint64_t ready_for; /* group epoch of its READY; 0: none */
    uint64_t last_heard_ns, quiet_until_ns;
    bool dead;    /* silent for longer than the limit; an engine stays so until it comes anew */
    bool removed; /* it never comes back: none of the functions below counts it */
    char removed_why[160];
    char input[256], output[256], mesh[256]; /* addresses it serves */
    /* from READY */
    uint64_t num_blocks, max_model_len, vocab_size;
    bool lockstep;
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

/* Whether a HELLO may come from a member at all; *out is that member. LK_ERR_INVALID: unknown rank,
 * another configuration, an address too long; LK_ERR_STATE: a removed rank. Records nothing. */
LK_MUST_USE lk_status_t engine_registry_check_hello(engine_registry_t *self, const msg_t *msg,
                                                    member_t **out, lk_error_t *err);
/* This life of it is over, whatever it may still say. */
void member_expel(member_t *m, const char *why);
/* Anything was heard of a member's current life. False: of another one, or of none. A front end
 * that counted as dead does so no more (*back). */
bool engine_registry_heard(engine_registry_t *self, const msg_t *msg, uint64_t now_ns, bool *back);
/* Everybody counts as heard now. */
void engine_registry_forgive(engine_registry_t *self, uint64_t now_ns);

/* Engines that are not removed. */
uint32_t engine_registry_engines(const engine_registry_t *self);
/* All members of a role have reached `state`. */
bool engine_registry_all(const engine_registry_t *self, uint32_t role, member_state_t state);
/* Members below `state`, as "engine 1, front end 0". */
void engine_registry_missing(const engine_registry_t *self, member_state_t state, char *out,
                             size_t room);

const char *member_role_name(uint32_t role);

#endif
