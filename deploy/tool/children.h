/*
 * children.h: the processes of one node and their supervision (docs/MEMBERSHIP.md): a process that
 * ends, or is silent for --heartbeat-timeout (a stopped one, say: it is killed; one that computes
 * gets CPU_WATCH_PATIENCE times as long), is started again as a higher generation,
 * --engine-restarts times each. Then, or when one can not start, everything ends, by name; but an
 * engine is removed for good, and the others go on, if --data-parallel-min-size ranks are left. The
 * coordinator is told (spawn_tell), each later life of it by --removed-ranks. Before the cluster
 * was ready for the first time nothing is started again.
 */
#ifndef LK_DEPLOY_TOOL_CHILDREN_H
#define LK_DEPLOY_TOOL_CHILDREN_H

#include "base/config.h"
#include "base/cpu_watch.h"
#include "base/loop.h"
#include "base/spawn.h"

#define CHILDREN_MAX      320
#define CHILDREN_MAX_ARGV 512
#define CHILDREN_MAX_OWN  8 /* arguments that one child has for itself */
#define CHILDREN_OWN_LEN  (SPAWN_LINE_MAX + 4 * CHILDREN_MAX) /* address; --removed-ranks of all */

typedef enum { CHILD_COORDINATOR, CHILD_ENGINE, CHILD_FRONTEND } child_kind_t;

typedef struct {
    spawn_t spawn;
    child_kind_t kind;
    uint64_t index, generation, restarts;
    uint64_t started_ns, heard_ns, quiet_until_ns;
    cpu_watch_t cpu;
    bool killed;  /* by us: it was silent */
    bool removed; /* it has ended for good; the others go on */
    char removed_why[192];
    bool greeted;                                 /* its ready line was taken */
    char own[CHILDREN_MAX_OWN][CHILDREN_OWN_LEN]; /* flag, value, ...; "" ends them */
} child_t;

typedef struct {
    const lk_config_t *config;
    char *const *argv; /* the user's flags: argv[1..argc-1] */
    int argc;
    const char *bin; /* the tool's directory: top of the build tree or of the installation */
    lk_loop_t *loop;
    const lk_env_t *env;
    bool supervised; /* the cluster was ready: what ends is started again */
    child_t *items;  /* [CHILDREN_MAX] */
    size_t n;
} children_t;

/* Starts one more. own: flags and values that only it gets, NULL-terminated. */
LK_MUST_USE lk_status_t children_start(children_t *self, child_kind_t kind, uint64_t index,
                                       const char *const *own, child_t **out, lk_error_t *err);
/* What a later life of the child gets in addition to (or instead of the value of) its own flags. */
void child_pin(child_t *child, const char *flag, const char *value);
/* Looks at every child once. LK_ERR_PEER: everything has to end, as err says. */
LK_MUST_USE lk_status_t children_check(children_t *self, lk_error_t *err);
/* Sleeps until a child says or ends something, a signal comes, or somebody's time is up. */
void children_wait(children_t *self);
/* Waits for one child's first ready line; *text is valid while the child is kept. */
LK_MUST_USE lk_status_t children_wait_ready(children_t *self, child_t *child, const char **text,
                                            lk_error_t *err);
/* Front ends first: they let requests finish, and engines have to live for that. */
void children_stop(children_t *self);

#endif
