/*
 * cluster.h: starts a real cluster through deploy/lockstep and talks to it. Every wait has a
 * deadline and fails the test with what it waited for.
 */
#ifndef LK_TESTS_CLUSTER_H
#define LK_TESTS_CLUSTER_H

#include "deploy/client/http_client.h"

#include <jansson.h>
#include <sys/types.h>

typedef struct {
    pid_t launcher;
    char url[128];
    char trainer[256]; /* trainer endpoint */
    char mark[40];     /* LK_TEST_CLUSTER=mark is in every process's environment */
    char log[300];     /* file with the cluster's standard error */
    int out_fd;        /* its standard output */
    char key[128];     /* what cluster_call sends: the --admin-key of args */
    char api_key[128]; /* what complete() sends: the --api-key of args */
} cluster_t;

/* Starts `deploy/lockstep serve MODEL --port 0 ARGS...` (args NULL-terminated) and waits for the
 * ready line. A failure prints the end of the log and fails the test. */
void cluster_start(cluster_t *c, const char *model, const char *const *args);
/* Bounds the address space of each process of the clusters started from now on (not where a
 * sanitizer needs it); 0: unbounded. */
void cluster_limit_memory(uint64_t bytes);
/* The same for open files. */
void cluster_limit_files(uint64_t n);
/* Same, but returns at once (to kill it in mid-start). */
void cluster_spawn(cluster_t *c, const char *model, const char *const *args);
/* Waits for the ready line; false if the launcher ended without one. */
bool cluster_wait_ready(cluster_t *c, double seconds);
/* SIGTERM, then waits for the exit; returns the exit status. Fails the test if it doesn't end or
 * leaves a process or a socket behind. */
int cluster_stop(cluster_t *c);
/* Waits until the launcher has ended (killed by the test) and nothing of the cluster is left. */
int cluster_wait_gone(cluster_t *c, double seconds);
/* pids of the cluster's processes whose command line contains `what` ("lockstep-engine"); how many.
 */
size_t cluster_pids(const cluster_t *c, const char *what, pid_t *pids, size_t room);
/* Prints the last lines of the log. */
void cluster_print_log(const cluster_t *c);

/* One call; the reply's JSON (caller decrefs). Fails the test when no reply comes or when its
 * status is not `want` (0: any; then *status is set). body may be NULL. */
json_t *cluster_call(const cluster_t *c, const char *method, const char *path, const char *body,
                     int want, int *status);
/* A TCP connection to the cluster's HTTP port. */
int cluster_connect(const cluster_t *c);
/* Sends bytes as they are on a connection of its own and collects what comes back: one whole reply
 * (by its Content-Length), or all until the server closes. shut: close the sending side behind the
 * bytes. Fails the test when there is neither within `seconds`. */
void cluster_raw(const cluster_t *c, const void *bytes, size_t len, bool shut, double seconds,
                 lk_buf_t *out);
/* One call with header lines of its own ("X-Name: value\r\n...", may be "") and a body of any
 * bytes; the HTTP status (0: no reply). *json (caller decrefs) is NULL when the reply is no JSON.
 */
int cluster_call_with(const cluster_t *c, const char *method, const char *path, const char *headers,
                      const void *body, size_t len, json_t **json);

/* Makes a random checkpoint with a byte-level tokenizer; its directory in `dir`, below
 * test_tmpdir(). */
void cluster_make_model(const char *arch, unsigned seed, char *dir, size_t room);

/* json path helper: integer at "a.b.0.c"; fails the test if it isn't there. */
json_int_t json_int_at(const json_t *root, const char *path);
const char *json_text_at(const json_t *root, const char *path);

/* A request in a process of its own, for calls that block; cluster_join gives its reply. */
typedef struct {
    pid_t pid;
    int fd;
} cluster_async_t;
cluster_async_t cluster_call_async(const cluster_t *c, const char *method, const char *path,
                                   const char *body);
/* headers: "Name: value"..., NULL-terminated; NULL: none. */
cluster_async_t cluster_call_async_with(const cluster_t *c, const char *method, const char *path,
                                        const char *body, const char *const *headers);
json_t *cluster_join(cluster_async_t *a, double seconds, int *status);
/* True while it has not been answered. */
bool cluster_async_pending(const cluster_async_t *a);

/* Polls `cond` every 10 ms until it is true; fails the test with `what` after `seconds`. */
void wait_for(bool (*cond)(void *ctx), void *ctx, double seconds, const char *what);

#endif
