/* lockstep-tool: everything behind deploy/lockstep, one sub-command per file. */
#include "base/check.h"
#include "deploy/tool/tool.h"

#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"serve", tool_serve, "MODEL_DIR [flags]   start a node: coordinator, engines, front ends"},
    {"make-model", tool_make_model, "--arch A --out DIR [flags]   write a small random checkpoint"},
    {"status", tool_status, "[--url URL] [--admin-key K]   ranks, waves, pause and weight state"},
    {"tcpstore", tool_tcpstore, "HOST PORT   join a trainer's rendezvous, print the NCCL id"},
};

bool tool_directory(char *out, size_t room)
{
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0) {
        return false;
    }
    path[n] = '\0';
    return snprintf(out, room, "%s", dirname(path)) < (int)room;
}

static void usage(FILE *to)
{
    fprintf(to, "usage: lockstep COMMAND ...   (COMMAND --help for its flags)\n");
    for (size_t i = 0; i < LK_ARRAY_LEN(commands); i++) {
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].help);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        usage(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    for (size_t i = 0; i < LK_ARRAY_LEN(commands); i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    fprintf(stderr, "lockstep: no command '%s'\n", argv[1]);
    usage(stderr);
    return 2;
}
