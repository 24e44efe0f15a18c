/*
 * A long life: requests, clients that leave, pauses and weight updates by the hundred on one
 * cluster. Afterwards nothing is left of them: no KV block, no descriptor, no memory.
 */
#include "base/check.h"
#include "tests/cluster/rl_kit.h"
#include "tests/lib/test_main.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WARM_UP   240 /* rounds in which pools, caches and the kept answers grow to their size */
#define ROUNDS    240
#define N_CLIENTS 6
#define N_PROCS   16
#define MAX_GROWN 4096 /* KiB of one process over ROUNDS; a leak of a request's prompt is more */

typedef struct {
    const cluster_t *c;
    size_t n;
    pid_t pids[N_PROCS];
    long rss_kib[N_PROCS];
    size_t fds[N_PROCS];
} usage_t;

static long resident_kib(pid_t pid)
{
    char path[64], line[256];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    while (fgets(line, sizeof line, f) != NULL) {
        (void)(sscanf(line, "VmRSS: %ld", &kib) == 1);
    }
    fclose(f);
    ck_assert_int_gt(kib, 0);
    return kib;
}

static size_t open_fds(pid_t pid)
{
    char path[64];
    size_t n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    ck_assert_ptr_nonnull(dir);
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

static usage_t usage_of(const cluster_t *c)
{
    usage_t u = {.c = c};
    u.n = cluster_pids(c, "lockstep-", u.pids, N_PROCS);
    ck_assert_uint_ge(u.n, 4); /* coordinator, two engines, front end */
    for (size_t i = 0; i < u.n; i++) {
        u.rss_kib[i] = resident_kib(u.pids[i]);
        u.fds[i] = open_fds(u.pids[i]);
    }
    return u;
}

/* The last connections close a moment after their answers. */
static bool no_more_fds(void *ctx)
{
    const usage_t *before = ctx;
    for (size_t i = 0; i < before->n; i++) {
        if (open_fds(before->pids[i]) > before->fds[i]) {
            return false;
        }
    }
    return true;
}

static void push(lst_t *lst, const lst_checkpoint_t *checkpoint, int round)
{
    char version[32];
    size_t n;
    const lst_tensor_t *tensors = lst_checkpoint_tensors(checkpoint, &n);
    lst_update_options_t options = {.packed = round % 4 != 0};
    snprintf(version, sizeof version, "v%d", round);
    if (round % 8 == 0) {
        ck_assert_msg(lst_init_tcp(lst, NULL) == LST_OK, "%s", lst_last_error(lst));
    }
    ck_assert_msg(lst_start(lst) == LST_OK, "%s", lst_last_error(lst));
    if (round % 16 == 2) { /* a trainer that thinks better of it */
        ck_assert_msg(lst_abort(lst) == LST_OK, "%s", lst_last_error(lst));
        return;
    }
    ck_assert_msg(lst_update(lst, tensors, n, &options) == LST_OK, "%s", lst_last_error(lst));
    ck_assert_msg(lst_finish(lst, version) == LST_OK, "%s", lst_last_error(lst));
}

static void round_of_life(const cluster_t *c, lst_t *lst, const lst_checkpoint_t *checkpoint,
                          int round)
{
    static const char *const modes[] = {"keep", "abort", "wait"};
    cluster_async_t clients[N_CLIENTS];
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        clients[i] = rl_complete(c, i % 2, 1 + i, 8 + 7 * i, 40 * i + 10);
    }
    cluster_async_t gone = rl_complete(c, 0, 3, 20, 400);
    ck_assert_msg(lst_pause(lst, modes[round % 3], round % 2 == 0) == LST_OK, "%s",
                  lst_last_error(lst));
    if (round % 2 == 0) {
        push(lst, checkpoint, round);
    }
    kill(gone.pid, SIGKILL);
    waitpid(gone.pid, NULL, 0);
    close(gone.fd);
    ck_assert_msg(lst_resume(lst) == LST_OK, "%s", lst_last_error(lst));
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        int status;
        json_decref(cluster_join(&clients[i], 60, &status));
        ck_assert_int_eq(status, 200);
    }
}

START_TEST(nothing_is_left_behind)
{
    static const char *const args[] = {
        "--device", "null", "--data-parallel-size", "2", "--max-model-len", "512",
        "--enable-expert-parallel", "--weight-transfer-config", "{\"backend\": \"tcp\"}",
        /* few, so that every block has been used when the measuring begins */
        "--num-gpu-blocks-override", "512", NULL};
    cluster_t c;
    char err[512] = "", model[512];
    lst_checkpoint_t *checkpoint = NULL;
    snprintf(model, sizeof model, "%s", rl_fixture("qwen3_moe"));
    cluster_start(&c, model, args);
    lst_t *lst = rl_open(&c);
    ck_assert_msg(lst_checkpoint_open(model, &checkpoint, err, sizeof err) == LST_OK, "%s", err);
    for (int i = 0; i < WARM_UP; i++) {
        round_of_life(&c, lst, checkpoint, i);
    }
    rl_wait_idle(&c);
    usage_t before = usage_of(&c);
    for (int i = WARM_UP; i < WARM_UP + ROUNDS; i++) {
        round_of_life(&c, lst, checkpoint, i);
    }
    rl_wait_idle(&c);
    wait_for(no_more_fds, &before, 30, "no more descriptors than before");
    usage_t after = usage_of(&c);
    ck_assert_uint_eq(after.n, before.n);
    for (size_t i = 0; i < after.n; i++) {
        printf("# process %d: %ld KiB, then %ld; %zu descriptors, then %zu\n", (int)after.pids[i],
               before.rss_kib[i], after.rss_kib[i], before.fds[i], after.fds[i]);
        ck_assert_int_eq(after.pids[i], before.pids[i]);
        ck_assert_int_le(after.rss_kib[i], before.rss_kib[i] + MAX_GROWN);
    }
    json_t *info = cluster_call(&c, "GET", "/server_info", NULL, 200, NULL);
    ck_assert_int_eq(json_int_at(info, "engines.0.kv_blocks_used"), 0);
    ck_assert_int_eq(json_int_at(info, "engines.1.kv_blocks_used"), 0);
    ck_assert_int_eq(json_int_at(info, "open_completions"), 0);
    json_decref(info);
    lst_close(&lst);
    lst_checkpoint_close(&checkpoint);
    ck_assert_int_eq(cluster_stop(&c), 0);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("soak");
    TCase *tc = tcase_create("soak");
    tcase_set_timeout(tc, 280);
    tcase_add_test(tc, nothing_is_left_behind);
    suite_add_tcase(s, tc);
    return s;
}
