/* tcp_stream.h: byte streams over TCP sockets, and the listener a trainer accepts them from. */
#ifndef LK_TRANSFER_TCP_STREAM_H
#define LK_TRANSFER_TCP_STREAM_H

#include "base/env.h"
#include "transfer/backends/byte_stream.h"

/* Starts to connect to host (an address or a name; resolved without blocking). NULL: no memory. */
byte_stream_t *tcp_stream_dial(const char *host, uint16_t port, const lk_env_t *env);
/* Takes over a connected socket, also when it fails (NULL). */
byte_stream_t *tcp_stream_adopt(int fd);

/* Binds and listens. `host` is an address ("127.0.0.1", "::", "0.0.0.0"); port 0 lets the system
 * pick. Writes the descriptor (caller closes it) and the port. */
LK_MUST_USE lk_status_t tcp_listen(const char *host, uint16_t port, int backlog, int *fd_out,
                                   uint16_t *port_out, lk_error_t *err);
/* One waiting connection, or NULL. */
byte_stream_t *tcp_accept(int listener);

#endif
