/*
 * cpu_watch.h: does a silent process of this host compute, or does it stand still? One that is
 * stopped, or waits for ever, uses no processor; one that is in a long piece of work does. Reads
 * /proc; a process that is not there stands still.
 */
#ifndef LK_BASE_CPU_WATCH_H
#define LK_BASE_CPU_WATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CPU_WATCH_NS 400000000ull /* least time between two looks that are compared */

/* How many times as long as one that stands still a process that computes may be silent. */
#define CPU_WATCH_PATIENCE 12

/* Zeroed: nothing seen yet. */
typedef struct {
    uint64_t ticks, at_ns;
    bool busy;
} cpu_watch_t;

/* Whether it computed between the last two looks. Look at least twice, CPU_WATCH_NS apart, before
 * the answer matters. */
bool cpu_watch_look(cpu_watch_t *self, pid_t pid, uint64_t now_ns);

#endif
