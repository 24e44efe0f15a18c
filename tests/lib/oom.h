/*
 * oom.h: makes one allocation of the code under test fail. A program that uses it is linked with
 * oom_dep (tests/lib/meson.build), whose link arguments redirect the allocations of everything
 * linked statically. Those of shared libraries go on as they are: jansson, for one, asserts.
 */
#ifndef LK_TESTS_OOM_H
#define LK_TESTS_OOM_H

#include <stdbool.h>
#include <stdint.h>

/* Allocation number `n` from now on (0 is the next) fails, once. */
void oom_arm(uint64_t n);
/* Ends that. True if the allocation was reached, and so failed. */
bool oom_disarm(void);

#endif
