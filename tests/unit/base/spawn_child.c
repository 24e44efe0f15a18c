/* What test_spawn.c starts. Its first argument says how it behaves. */
#include "base/loop.h"
#include "base/spawn.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* "0,1,2": every descriptor that is open, but the one that lists them. */
static void open_descriptors(char *out, size_t room)
{
    DIR *dir = opendir("/proc/self/fd");
    bool open[64] = {false};
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        int fd = atoi(entry->d_name);
        if (entry->d_name[0] != '.' && fd != dirfd(dir)) {
            open[fd < 63 ? fd : 63] = true;
        }
    }
    closedir(dir);
    size_t n = 0;
    out[0] = '\0';
    for (int fd = 0; fd < 64; fd++) {
        if (open[fd]) {
            n += (size_t)snprintf(out + n, room - n, "%s%d", n > 0 ? "," : "", fd);
        }
    }
}

int main(int argc, char **argv)
{
    int parent_fd, status_fd;
    lk_error_t err = LK_ERROR_INIT;
    const char *how = argc > 1 ? argv[1] : "";
    char text[SPAWN_LINE_MAX];
    open_descriptors(text, sizeof text);
    if (spawn_child_fds(&parent_fd, &status_fd, &err) != LK_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 4;
    }
    if (strcmp(how, "silent") == 0) {
        return 3;
    }
    if (strcmp(how, "error") == 0) {
        spawn_child_report(&status_fd, false, "no model\nhere");
        return 1;
    }
    if (strcmp(how, "descriptors") != 0) {
        snprintf(text, sizeof text, "pid=%d %s", (int)getpid(), argc > 2 ? argv[2] : "");
    }
    if (strcmp(how, "launcher") == 0) { /* starts one itself, tells its pid, and waits */
        char *child_argv[] = {argv[0], (char *)(uintptr_t) "stubborn", NULL};
        spawn_spec_t spec = {"grandchild", argv[0], child_argv, NULL, -1, -1, false};
        spawn_t child = SPAWN_INIT;
        const char *line;
        lk_status_t status = spawn_start(&spec, &child, &err);
        while (status == LK_OK || status == LK_INPROGRESS) {
            struct pollfd pfd = {child.status_fd, POLLIN, 0};
            status = spawn_ready(&child, &line, &err);
            if (status == LK_OK) {
                break;
            }
            poll(&pfd, 1, -1);
        }
        snprintf(text, sizeof text, "%s", status == LK_OK ? line : err.text);
    }
    if (strcmp(how, "beats") == 0) {
        spawn_child_report(&status_fd, true, text);
        spawn_child_beat(status_fd, false);
        spawn_child_beat(status_fd, true);
        spawn_child_report(&status_fd, false, "out of luck. twice");
        return 5;
    }
    if (strcmp(how, "echo") == 0) { /* says what it is told, as its last word */
        spawn_child_report(&status_fd, true, text);
        ssize_t n = read(parent_fd, text, sizeof text - 1);
        text[n > 0 ? n - 1 : 0] = '\0';
        spawn_child_report(&status_fd, false, text);
        return 5;
    }
    if (strcmp(how, "stubborn") == 0) { /* does not look at its launcher's pipe */
        spawn_child_report(&status_fd, true, text);
        for (;;) {
            pause();
        }
    }
    /* whoever says it is ready may get a signal at once */
    lk_loop_t *loop = loop_new(lk_env_real());
    loop_catch_signals(loop);
    spawn_child_report(&status_fd, true, text);
    loop_watch_parent(loop, parent_fd);
    while (loop_stop_reason(loop) == NULL) {
        loop_wait(loop, NULL, 0, UINT64_MAX);
    }
    int code = strcmp(loop_stop_reason(loop), "SIGTERM") == 0 ? 15 : 7;
    loop_destroy(&loop);
    return code;
}
