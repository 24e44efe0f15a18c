/*
 * engine_io.h: an engine process: the handshake with the coordinator, the sockets to front ends and
 * peers, and the loop that drives engine_core.h. One thread.
 */
#ifndef LK_ENGINE_CORE_ENGINE_IO_H
#define LK_ENGINE_CORE_ENGINE_IO_H

#include "base/config.h"
#include "base/loop.h"

/* Starts, reports on *status_fd (base/spawn.h), serves until the loop is told to stop (and then
 * drains, decision 18) or a peer is lost. Returns the process's exit status. */
int engine_io_run(const lk_config_t *config, lk_loop_t *loop, int *status_fd);

#endif
