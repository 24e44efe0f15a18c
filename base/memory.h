/*
 * memory.h: how much memory this process may still take: the machine's, and the limits of the
 * control groups (version 1 and 2) it is in.
 */
#ifndef LK_BASE_MEMORY_H
#define LK_BASE_MEMORY_H

#include "base/status.h"

/* Bytes; the least of what /proc/meminfo calls available and of what each control group from this
 * process's up leaves. Files that can't be read or say nothing bound nothing: UINT64_MAX if none
 * does. */
uint64_t memory_available(void);

/* The pieces, for tests: NUL-terminated texts of those files. UINT64_MAX: no bound. */
uint64_t memory_of_meminfo(const char *meminfo);
/* limit: memory.max or memory.limit_in_bytes; usage: memory.current or usage_in_bytes; stat:
 * memory.stat, whose inactive file pages are given up before anything fails. */
uint64_t memory_of_group(const char *limit, const char *usage, const char *stat);

#endif
