/* tool.h: the sub-commands of lockstep-tool. argv[0] is the sub-command's name. */
#ifndef LK_DEPLOY_TOOL_TOOL_H
#define LK_DEPLOY_TOOL_TOOL_H

int tool_serve(int argc, char **argv);
int tool_make_model(int argc, char **argv);
int tool_status(int argc, char **argv);
int tool_tcpstore(int argc, char **argv);

/* Directory of the running executable. False if it can't be found. */
#include <stdbool.h>
#include <stddef.h>
bool tool_directory(char *out, size_t room);

#endif
