/*
 * memory.h: how much memory this process may still take (the machine's, and the limits of the
 * control groups, version 1 and 2, it is in), and how much it keeps.
 */
#ifndef LK_BASE_MEMORY_H
#define LK_BASE_MEMORY_H

#include "base/status.h"

/* Bytes; the least of what /proc/meminfo calls available and of what each control group from this
 * process's up leaves. Files that can't be read or say nothing bound nothing: UINT64_MAX if none
 * does. */
uint64_t memory_available(void);

/* Once, at the start of a program whose messages may be large: what was freed is kept for the next
 * one, up to MEMORY_KEPT bytes. Else the C library gives each large block back to the system, which
 * hands it out again page by page, cleared: half of the time that a message of 300 KB took. */
#define MEMORY_KEPT (32u << 20)
void memory_keep(void);

/* The pieces, for tests: NUL-terminated texts of those files. UINT64_MAX: no bound. */
uint64_t memory_of_meminfo(const char *meminfo);
/* limit: memory.max or memory.limit_in_bytes; usage: memory.current or usage_in_bytes; stat:
 * memory.stat, whose inactive file pages are given up before anything fails. */
uint64_t memory_of_group(const char *limit, const char *usage, const char *stat);

#endif
