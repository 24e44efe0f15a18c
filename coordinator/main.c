/* lockstep-coordinator */
#include "base/check.h"
#include "base/log.h"
#include "base/spawn.h"
#include "coordinator/coordinator_io.h"

int main(int argc, char **argv)
{
    lk_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    if (config_parse(argc, argv, &config, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        return 2;
    }
    config_init_log(&config, "coordinator");
    int parent_fd, status_fd;
    if (spawn_child_fds(&parent_fd, &status_fd, &err) != LK_OK) {
        LK_ERROR("%s", err.text);
        return 2;
    }
    lk_loop_t *loop = loop_new(lk_env_real());
    CHECK(loop != NULL);
    loop_catch_signals(loop);
    if (parent_fd >= 0) {
        loop_watch_parent(loop, parent_fd);
    }
    int rc = coordinator_io_run(&config, loop, &status_fd);
    loop_destroy(&loop);
    return rc;
}
