/*
 * fake_cluster.h: a coordinator and engines in memory around a real front end with real HTTP, all
 * in one thread: the test turns the event loop and the fakes with fcl_turn.
 */
#ifndef LK_TESTS_FAKE_CLUSTER_H
#define LK_TESTS_FAKE_CLUSTER_H

#include "api_frontend/frontend.h"

#define FCL_RANKS        2
#define FCL_MAX_REQUESTS 1024

typedef struct {
    bool used;
    uint32_t rank;
    uint64_t handle, made, max_tokens, stop_token;
    int64_t logprobs;
    uint32_t n_prompt;
} fcl_request_t;

typedef struct {
    struct event_base *base;
    port_mem_hub_t *hub; /* NULL: over ZeroMQ, as in production */
    lk_config_t config;
    frontend_t *frontend;
    lk_port_t *handshake, *events, *stats;           /* the coordinator's */
    lk_port_t *input[FCL_RANKS], *output[FCL_RANKS]; /* the engines' */
    bool connected, ready, ended;
    bool init_due; /* INIT comes a turn after the engines: the front end may be the last to hear */
    port_peer_t frontend_peer;
    lk_error_t end;
    char ready_text[512];
    unsigned patience_begins; /* beats that announced long work */
    bool patience;            /* the last beat did */
    uint16_t port;
    char trainer[256];

    fcl_request_t requests[FCL_MAX_REQUESTS];
    uint64_t n_added, n_aborted;
    uint32_t last_rank; /* where the newest request went */
    bool hold;          /* nobody makes tokens */
    bool silent;        /* commands get no DONE */
    bool paused;
    uint64_t tokens_per_turn;
    lk_status_t update_status; /* of UPDATE commands */
    const char *update_text;
    char last_spec[512];
    uint64_t last_verb;
    const char *dead; /* in STATS */
} fcl_t;

/* Starts everything; HTTP is open afterwards. flags: further ones, NULL at the end. */
void fcl_init(fcl_t *c, bool zmq, const http_limits_t *limits, const tokenizer_t *tokenizer,
              char *const *flags);
/* A port of the kind that the cluster uses. */
lk_port_t *fcl_open(fcl_t *c, port_kind_t kind, bool bind, const char *address);
void fcl_fini(fcl_t *c);
/* One turn of the loop and of the fakes. */
void fcl_turn(fcl_t *c);
/* An engine's answer to the front end. */
void fcl_output(fcl_t *c, uint32_t rank, const msg_t *msg);

#endif
