/*
 * tcpstore.h: the wire of PyTorch's TCPStore, as far as a rendezvous over it goes. Little-endian;
 * a text or value is a u64 length and its bytes; one connection, requests one after the other.
 *
 * request (u8), what follows, answer:
 * - 0 VALIDATE, u32 magic: none; comes first
 * - 1 SET, key, value: none
 * - 3 GET, key: value (answered once the key is there)
 * - 4 ADD, key, i64: i64, the new value (kept as decimal text)
 * - 5 CHECK, u64 n, n keys: u8, 0 if all are there, else 1
 * - 6 WAIT, u64 n, n keys: u8 0 once all are there
 * - 8 DELETE_KEY, key: i64, how many there were
 * - 12 CANCEL_WAIT: u8 1
 * - 13 PING, u32: the same u32
 *
 * A worker says VALIDATE, PING, ADD "init/" 1, WAIT and GET "/broadcast_from/0/0"; the value is the
 * pickled ncclUniqueId (transfer/pickle.h). The master sets it once "init/" has reached the world
 * size.
 */
#ifndef LK_TRANSFER_TCPSTORE_H
#define LK_TRANSFER_TCPSTORE_H

#include "base/env.h"
#include "transfer/backends/byte_stream.h"
#include "transfer/pickle.h"

#include <poll.h>

#define TCPSTORE_MAGIC       0x3c85f7ceu
#define TCPSTORE_WORKERS_KEY "init/"
#define TCPSTORE_ID_KEY      "/broadcast_from/0/0"
#define TCPSTORE_MAX_VALUE   (64u << 10)
#define TCPSTORE_MAX_KEY     512u
#define TCPSTORE_MAX_KEYS    64u

#define TCPSTORE_OP_TABLE(X)                                                                       \
    X(VALIDATE, 0)                                                                                 \
    X(SET, 1)                                                                                      \
    X(GET, 3)                                                                                      \
    X(ADD, 4)                                                                                      \
    X(CHECK, 5)                                                                                    \
    X(WAIT, 6)                                                                                     \
    X(DELETE_KEY, 8)                                                                               \
    X(CANCEL_WAIT, 12)                                                                             \
    X(PING, 13)

typedef enum {
#define X(name, value) TCPSTORE_##name = value,
    TCPSTORE_OP_TABLE(X)
#undef X
} tcpstore_op_t;

/* ---- a worker: gets the id ---- */

typedef struct tcpstore_client tcpstore_client_t;

/* Makes the streams that it talks over: another one when a connection fails before the store has
 * counted this worker. */
typedef struct {
    byte_stream_t *(*dial)(void *ctx); /* NULL: no memory */
    void *ctx;
} tcpstore_dialer_t;

/* nonce is any number. The whole sequence has to end within timeout_ns. NULL: no memory. */
tcpstore_client_t *tcpstore_client_new(tcpstore_dialer_t dialer, const lk_env_t *env,
                                       uint64_t timeout_ns, uint32_t nonce);
void tcpstore_client_destroy(tcpstore_client_t **self_p);
/* INPROGRESS; OK with the id; or an error, after which it stays failed. Never blocks. */
LK_MUST_USE lk_status_t tcpstore_client_step(tcpstore_client_t *self, uint8_t id[NCCL_ID_BYTES],
                                             lk_error_t *err);
/* "10.0.0.1:29500 to accept a connection (last: Connection refused)" */
void tcpstore_client_waits_for(const tcpstore_client_t *self, char *out, size_t room);
/* Workers that the store has counted, this one included; 0: not counted yet. */
int64_t tcpstore_client_workers(const tcpstore_client_t *self);
/* At most one; 0: call step again soon. */
size_t tcpstore_client_pollfds(const tcpstore_client_t *self, struct pollfd *fds, size_t room);

/* ---- the master: hands the id out ---- */

typedef struct tcpstore_server tcpstore_server_t;

/* Takes over the listening socket. NULL: no memory (the socket is closed then, too). */
tcpstore_server_t *tcpstore_server_new(int listener);
void tcpstore_server_destroy(tcpstore_server_t **self_p);
/* Serves what has come. A peer that breaks the protocol loses its connection. */
void tcpstore_server_step(tcpstore_server_t *self);
/* False over the limits. */
bool tcpstore_server_set(tcpstore_server_t *self, const char *key, const void *value, size_t len);
/* The counter that workers add themselves to. */
int64_t tcpstore_server_workers(const tcpstore_server_t *self);
/* Fills at most room; returns how many there are. */
size_t tcpstore_server_pollfds(const tcpstore_server_t *self, struct pollfd *fds, size_t room);

#endif
