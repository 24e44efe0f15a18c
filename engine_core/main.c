/* lockstep-engine: one DP rank. Start reading at engine_core.h. */
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/spawn.h"
#include "engine_core/engine_io.h"

#include <stdio.h>

int main(int argc, char **argv)
{
    lk_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    memory_keep();
    if (config_parse(argc, argv, &config, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        return 2;
    }
    char who[32];
    snprintf(who, sizeof who, "engine %llu", (unsigned long long)config.data_parallel_rank);
    config_init_log(&config, who);
    int parent_fd, status_fd;
    if (spawn_child_fds(&parent_fd, &status_fd, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        return 2;
    }
    lk_loop_t *loop = loop_new(lk_env_real());
    CHECKF(loop != NULL, "out of memory");
    loop_catch_signals(loop);
    if (parent_fd >= 0) {
        loop_watch_parent(loop, parent_fd);
    }
    int rc = engine_io_run(&config, loop, &status_fd);
    loop_destroy(&loop);
    return rc;
}
