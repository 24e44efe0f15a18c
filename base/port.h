/*
 * port.h: message sockets behind an ops table, so that the programs (port_zmq.c, the only user of
 * CZMQ) and the tests and the simulator (port_mem.c) drive the same objects.
 *
 * A port moves multipart messages of at most PORT_MAX_FRAMES frames. Nothing blocks: send queues
 * (LK_ERR_UNAVAILABLE when a peer's queue is full or a ROUTER doesn't know the peer), recv returns
 * LK_INPROGRESS when there is nothing. A pair's messages arrive in order, without gaps, while both
 * live; after a reconnect a suffix may be lost.
 */
#ifndef LK_BASE_PORT_H
#define LK_BASE_PORT_H

#include "base/status.h"

typedef enum { PORT_ROUTER, PORT_DEALER, PORT_PUSH, PORT_PULL, PORT_PUB, PORT_SUB } port_kind_t;

#define PORT_MAX_FRAMES  8
#define PORT_MAX_PEER    32
#define PORT_MAX_MESSAGE (1ull << 30) /* bytes of one frame; enforced by the socket too */

#define PORT_MAX_IPC 107 /* characters of an ipc address behind "ipc://" */

/* A peer of a ROUTER: its identity bytes. */
typedef struct {
    uint8_t id[PORT_MAX_PEER];
    size_t len;
} port_peer_t;

typedef struct {
    const void *data;
    size_t len;
} port_frame_t;

typedef struct lk_port lk_port_t;

/* A received message; frames are borrowed from it until port_msg_fini. */
typedef struct {
    port_peer_t peer; /* ROUTER only */
    size_t n_frames;
    port_frame_t frames[PORT_MAX_FRAMES];
    void *owned;
} port_msg_t;

typedef struct port_ops {
    lk_status_t (*send)(lk_port_t *self, const port_peer_t *peer, const port_frame_t *frames,
                        size_t n, lk_error_t *err);
    /* A message with too many frames or a frame over the limit is LK_ERR_INVALID and is consumed.
     */
    lk_status_t (*recv)(lk_port_t *self, port_msg_t *out, lk_error_t *err);
    void (*msg_fini)(port_msg_t *msg);
    /* A descriptor to poll for input, or -1. Readable until a recv returned INPROGRESS (and before
     * the first one), so no wake-up is lost; it may be readable for nothing. */
    int (*fd)(lk_port_t *self);
    /* The address that peers connect to (after a bind to a wildcard). */
    const char *(*address)(lk_port_t *self);
    void (*destroy)(lk_port_t *self);
    /* (optional) Connections that were lost since the first call of this, which begins to count. */
    uint64_t (*losses)(lk_port_t *self);
} port_ops_t;

struct lk_port {
    const port_ops_t *ops;
};

static inline lk_status_t port_send(lk_port_t *port, const port_peer_t *peer,
                                    const port_frame_t *frames, size_t n, lk_error_t *err)
{
    return port->ops->send(port, peer, frames, n, err);
}
static inline lk_status_t port_recv(lk_port_t *port, port_msg_t *out, lk_error_t *err)
{
    return port->ops->recv(port, out, err);
}
static inline void port_msg_fini(lk_port_t *port, port_msg_t *msg)
{
    port->ops->msg_fini(msg);
}
static inline int port_fd(lk_port_t *port)
{
    return port->ops->fd(port);
}
static inline const char *port_address(lk_port_t *port)
{
    return port->ops->address(port);
}
/* 0 where it is not known. What was sent on a connection that is lost may have arrived or not. */
static inline uint64_t port_losses(lk_port_t *port)
{
    return port->ops->losses != NULL ? port->ops->losses(port) : 0;
}
/* Accepts NULL and a pointer to NULL; nulls the caller's pointer. */
static inline void port_destroy(lk_port_t **port_p)
{
    if (port_p != NULL && *port_p != NULL) {
        (*port_p)->ops->destroy(*port_p);
        *port_p = NULL;
    }
}

/* What every implementation checks of its arguments: the address's form and length, an identity of
 * 1 to PORT_MAX_PEER bytes that does not start with a zero byte (ZeroMQ keeps those). */
LK_MUST_USE lk_status_t port_check_open(const char *address, const port_peer_t *identity,
                                        lk_error_t *err);

/* ZeroMQ. `address`: "ipc://@NAME" (abstract: leaves no file; only this user's processes are let
 * in), "ipc:///path", "tcp://host:port" or "tcp://host:*". bind false connects. identity (may be
 * NULL): of a DEALER. The loop that owns the port is the only thread that touches it. */
LK_MUST_USE lk_status_t port_zmq_open(port_kind_t kind, bool bind, const char *address,
                                      const port_peer_t *identity, lk_port_t **out,
                                      lk_error_t *err);
/* A fresh abstract ipc address that nobody can guess: "ipc://@lockstep-<32 hex>-<what>". */
void port_ipc_address(const char *what, char *out, size_t room);

/* In memory, for tests: a hub of named addresses, delivery in order, one thread. */
typedef struct port_mem_hub port_mem_hub_t;
port_mem_hub_t *port_mem_hub_new(void);
void port_mem_hub_destroy(port_mem_hub_t **self_p);
LK_MUST_USE lk_status_t port_mem_open(port_mem_hub_t *hub, port_kind_t kind, bool bind,
                                      const char *address, const port_peer_t *identity,
                                      lk_port_t **out, lk_error_t *err);

#endif
