#include "base/memory.h"
#include "base/check.h"

#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_ROOM 16384

/* The number behind `key` at the start of a line. */
static bool find_number(const char *text, const char *key, uint64_t *out)
{
    size_t len = strlen(key);
    for (const char *line = text; line != NULL && *line != '\0';) {
        if (strncmp(line, key, len) == 0 && (line[len] == ' ' || line[len] == ':')) {
            char *end;
            *out = strtoull(line + len + 1, &end, 10);
            return end != line + len + 1;
        }
        line = strchr(line, '\n');
        line = line != NULL ? line + 1 : NULL;
    }
    return false;
}

uint64_t memory_of_meminfo(const char *meminfo)
{
    uint64_t kib;
    return find_number(meminfo, "MemAvailable", &kib) && kib < UINT64_MAX / 1024 ? kib * 1024
                                                                                 : UINT64_MAX;
}

uint64_t memory_of_group(const char *limit, const char *usage, const char *stat)
{
    char *end_limit, *end_usage;
    uint64_t most = strtoull(limit, &end_limit, 10), used = strtoull(usage, &end_usage, 10);
    if (end_limit == limit || end_usage == usage) { /* "max", or no such file */
        return UINT64_MAX;
    }
    uint64_t cached = 0;
    if (!find_number(stat, "total_inactive_file", &cached)) { /* version 1: with its children */
        (void)find_number(stat, "inactive_file", &cached);
    }
    used -= LK_MIN(cached, used);
    return most - LK_MIN(used, most);
}

/* At most FILE_ROOM - 1 bytes; "" if it can't be read. */
static void read_text(char *out, const char *path)
{
    FILE *file = fopen(path, "r");
    size_t n = file != NULL ? fread(out, 1, FILE_ROOM - 1, file) : 0;
    out[n] = '\0';
    if (file != NULL) {
        fclose(file);
    }
}

static uint64_t of_directory(const char *dir, bool v2)
{
    static const char *const names[2][2] = {{"memory.limit_in_bytes", "memory.usage_in_bytes"},
                                            {"memory.max", "memory.current"}};
    char path[2 * PATH_MAX], limit[FILE_ROOM], usage[FILE_ROOM], stat[FILE_ROOM];
    snprintf(path, sizeof path, "%s/%s", dir, names[v2][0]);
    read_text(limit, path);
    snprintf(path, sizeof path, "%s/%s", dir, names[v2][1]);
    read_text(usage, path);
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    read_text(stat, path);
    return memory_of_group(limit, usage, stat);
}

/* The group at `path` below `mount`, and every one above it. */
static uint64_t of_groups(const char *mount, const char *path, bool v2)
{
    char dir[PATH_MAX];
    uint64_t least = UINT64_MAX;
    int len = snprintf(dir, sizeof dir, "%s%s", mount, path);
    if (len < 0 || (size_t)len >= sizeof dir) {
        return UINT64_MAX;
    }
    for (size_t root = strlen(mount);; *strrchr(dir, '/') = '\0') {
        least = LK_MIN(least, of_directory(dir, v2));
        if (strlen(dir) <= root) {
            return least;
        }
    }
}

uint64_t memory_available(void)
{
    char text[FILE_ROOM];
    read_text(text, "/proc/meminfo");
    uint64_t least = memory_of_meminfo(text);
    read_text(text, "/proc/self/cgroup"); /* lines "4:memory:/path" and "0::/path" */
    for (char *save, *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        const char *path = strchr(line, '/');
        if (path == NULL) {
            continue;
        }
        if (strstr(line, "::/") != NULL) {
            least = LK_MIN(least, of_groups("/sys/fs/cgroup", path, true));
        } else if (strstr(line, ":memory:") != NULL) {
            least = LK_MIN(least, of_groups("/sys/fs/cgroup/memory", path, false));
        }
    }
    return least;
}

void memory_keep(void)
{
#ifdef __GLIBC__
    /* larger blocks are the system's own business, as ever */
    (void)mallopt(M_MMAP_THRESHOLD, (int)MEMORY_KEPT);
    (void)mallopt(M_TRIM_THRESHOLD, (int)MEMORY_KEPT);
#endif
}
