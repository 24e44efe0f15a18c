/*
 * frontend.h: the front end as a whole: its sockets, the handshake with the coordinator, the engine
 * client, the API, HTTP and the trainer's socket, in one event loop. One thread.
 */
#ifndef LK_API_FRONTEND_FRONTEND_H
#define LK_API_FRONTEND_FRONTEND_H

#include "api_frontend/http_server.h"
#include "base/port.h"

typedef struct frontend frontend_t;

typedef struct {
    struct event_base *base;
    const lk_env_t *env;
    const tokenizer_t *tokenizer; /* NULL: ids only */
    http_limits_t http_limits;
    void *ctx;
    /* port_zmq_open, or port_mem_open of a hub. address NULL: a fresh one to bind. */
    lk_status_t (*open_port)(void *ctx, port_kind_t kind, bool bind, const char *address,
                             const char *what, lk_port_t **out, lk_error_t *err);
    /* Once: HTTP is open; text is "http://HOST:PORT trainer ADDRESS". */
    void (*on_ready)(void *ctx, const char *text);
    /* (optional) With every heartbeat, once it is ready: the loop turns. patience: something long
     * begins, so that it may not turn for a while. */
    void (*on_beat)(void *ctx, bool patience);
    /* Once, when there is nothing more to do: err->status is LK_OK after a stop that was asked for.
     * The owner ends the loop and destroys the front end. */
    void (*on_end)(void *ctx, const lk_error_t *err);
} frontend_deps_t;

/* Opens the sockets and says HELLO. config and deps are borrowed. */
LK_MUST_USE lk_status_t frontend_new(const lk_config_t *config, const frontend_deps_t *deps,
                                     frontend_t **out, lk_error_t *err);
void frontend_destroy(frontend_t **self_p);
/* Decision 18: no new work; running requests get --shutdown-timeout seconds, then end with what
 * they have. on_end follows. Again: no effect. */
void frontend_stop(frontend_t *self, const char *why);

/* Looks at every socket soon; for ports without a descriptor (port_mem). */
void frontend_wake(frontend_t *self);

/* Refuses what must not be started: another host than loopback without keys, or a trainer's socket
 * that other machines reach without the admin key (decision 19). */
LK_MUST_USE lk_status_t frontend_check_config(const lk_config_t *config, lk_error_t *err);

#endif
