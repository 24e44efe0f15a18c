#include "base/cpu_watch.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Clock ticks of processor time of all its threads; 0 if it can't be read. */
static uint64_t ticks_of(pid_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) {
        close(fd);
    }
    if (n <= 0) {
        return 0;
    }
    text[n] = '\0';
    /* "pid (name) state ppid ...": the name may hold anything, so fields count from its end; utime
     * and stime are the 14th and 15th */
    const char *at = strrchr(text, ')');
    unsigned long long user = 0, system = 0;
    if (at == NULL || sscanf(at, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
                             &system) != 2) {
        return 0;
    }
    return user + system;
}

bool cpu_watch_look(cpu_watch_t *self, pid_t pid, uint64_t now_ns)
{
    if (self->at_ns == 0 || now_ns - self->at_ns >= CPU_WATCH_NS) {
        uint64_t ticks = ticks_of(pid);
        self->busy = self->at_ns != 0 && ticks > self->ticks;
        self->ticks = ticks;
        self->at_ns = now_ns;
    }
    return self->busy;
}
