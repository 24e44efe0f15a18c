/* coordinator_io.h: the sockets around coordinator.h. */
#ifndef LK_COORDINATOR_COORDINATOR_IO_H
#define LK_COORDINATOR_COORDINATOR_IO_H

#include "base/config.h"
#include "base/loop.h"

/* Binds, reports its handshake address on *status_fd (base/spawn.h), and serves until the loop is
 * told to stop or the cluster can not start. Returns the process's exit status. */
int coordinator_io_run(const lk_config_t *config, lk_loop_t *loop, int *status_fd);

#endif
