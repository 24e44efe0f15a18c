/* Updates through shared memory and from a directory, with real processes: a DP=2 expert-parallel
 * cluster and a trainer that can die. */
#include "base/check.h"
#include "tests/cluster/rl_kit.h"
#include "tests/lib/test_main.h"
#include "transfer/safetensors.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_RANKS 2

static const char *const swaps[] = {"inplace", "shadow"};

static cluster_t cluster;
static lst_t *lst;

#define lst_good(expr) ck_assert_msg((expr) == LST_OK, "%s: %s", #expr, lst_last_error(lst))

static const char *start(const char *backend, const char *swap)
{
    static char config[64];
    snprintf(config, sizeof config, "{\"backend\": \"%s\"}", backend);
    const char *model = rl_make_model(ARCH_QWEN3_MOE, 1, 0);
    cluster_start(&cluster, model,
                  (const char *const[]){"--data-parallel-size", "2", "--enable-expert-parallel",
                                        "--weight-transfer-config", config, "--weight-swap", swap,
                                        NULL});
    lst = rl_open(&cluster);
    return model;
}

static void stop(void)
{
    lst_close(&lst);
    ck_assert_int_eq(cluster_stop(&cluster), 0);
}

static void expect_ranks(const char *digest, const char *version, uint64_t epoch, bool dirty)
{
    lst_rank_info_t ranks[N_RANKS];
    size_t n = 0;
    lst_good(lst_weight_info(lst, ranks, N_RANKS, &n));
    ck_assert_uint_eq(n, N_RANKS);
    for (size_t r = 0; r < n; r++) {
        ck_assert_int_eq(ranks[r].dirty, dirty);
        ck_assert_uint_eq(ranks[r].epoch, epoch);
        ck_assert_str_eq(ranks[r].version, version);
        if (!dirty) {
            ck_assert_str_eq(ranks[r].digest, digest);
        }
    }
}

/* The digest that ranks must have with these weights. */
static const char *digest_of(const char *model)
{
    static char digest[33];
    char err[512];
    lst_checkpoint_t *checkpoint = NULL;
    size_t n = 0;
    ck_assert_msg(lst_checkpoint_open(model, &checkpoint, err, sizeof err) == LST_OK, "%s", err);
    const lst_tensor_t *tensors = lst_checkpoint_tensors(checkpoint, &n);
    lst_good(lst_digest(lst, tensors, n, digest));
    lst_checkpoint_close(&checkpoint);
    return digest;
}

static void push(const char *model, const char *version, const lst_update_options_t *options)
{
    char err[512];
    lst_checkpoint_t *checkpoint = NULL;
    size_t n = 0;
    ck_assert_msg(lst_checkpoint_open(model, &checkpoint, err, sizeof err) == LST_OK, "%s", err);
    const lst_tensor_t *tensors = lst_checkpoint_tensors(checkpoint, &n);
    lst_good(lst_start(lst));
    lst_good(lst_update(lst, tensors, n, options));
    lst_good(lst_finish(lst, version));
    lst_checkpoint_close(&checkpoint);
}

/* Memory files of a transfer that processes of the cluster still map. */
static size_t mapped_rings(void)
{
    pid_t pids[16];
    size_t n = cluster_pids(&cluster, "lockstep-engine", pids, 16), found = 0;
    for (size_t i = 0; i < n && i < 16; i++) {
        char path[64], line[512];
        snprintf(path, sizeof path, "/proc/%ld/maps", (long)pids[i]);
        FILE *f = fopen(path, "r");
        while (f != NULL && fgets(line, sizeof line, f) != NULL) {
            found += strstr(line, "memfd:lockstep-weights") != NULL;
        }
        if (f != NULL) {
            fclose(f);
        }
    }
    return found;
}

static void expect_no_segment(void)
{
    DIR *dir = opendir("/dev/shm");
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        ck_assert_msg(strncmp(e->d_name, "lockstep", 8) != 0, "/dev/shm/%s is left", e->d_name);
    }
    if (dir != NULL) {
        closedir(dir);
    }
}

START_TEST(shm_update)
{
    start("shm", swaps[_i]);
    const char *second = rl_make_model(ARCH_QWEN3_MOE, 2, 0);
    const char *third = rl_make_model(ARCH_QWEN3_MOE, 3, 0);
    lst_good(lst_init_shm(lst, NULL));
    ck_assert_uint_eq(mapped_rings(), N_RANKS);
    push(second, "two", NULL);
    expect_ranks(digest_of(second), "two", 1, false);
    push(third, "three", &(lst_update_options_t){true, 100000});
    expect_ranks(digest_of(third), "three", 2, false);
    lst_good(lst_init_shm(lst, &(lst_shm_options_t){.ring_bytes = 2 << 20, .unchecked = true}));
    push(second, NULL, &(lst_update_options_t){true, 0});
    expect_ranks(digest_of(second), "three", 3, false);
    expect_no_segment();
    stop();
}
END_TEST

static void die_for_good(int signal)
{
    kill(getpid(), SIGKILL);
}

/* A trainer that sends half of a model, and is killed while it sends the rest: the last tensor's
 * memory can't be read. */
static void doomed_trainer(const char *model)
{
    char err[512];
    lst_checkpoint_t *checkpoint = NULL;
    size_t n = 0;
    signal(SIGSEGV, die_for_good);
    lst_t *own = NULL;
    if (lst_open(&(lst_options_t){.endpoint = cluster.trainer}, &own, err, sizeof err) != LST_OK ||
        lst_checkpoint_open(model, &checkpoint, err, sizeof err) != LST_OK) {
        _exit(1);
    }
    const lst_tensor_t *tensors = lst_checkpoint_tensors(checkpoint, &n);
    lst_tensor_t *rest = calloc(n, sizeof *rest);
    if (rest == NULL) {
        _exit(1);
    }
    memcpy(rest, tensors, n * sizeof *rest);
    rest[n - 1].data = mmap(NULL, 64 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (lst_init_shm(own, NULL) != LST_OK || lst_start(own) != LST_OK ||
        lst_update(own, tensors, n / 2, NULL) != LST_OK) {
        _exit(2);
    }
    lst_status_t st = lst_update(own, rest + n / 2, n - n / 2, NULL);
    _exit(st == LST_OK ? 3 : 4);
}

static bool is_dirty(void *ctx)
{
    lst_rank_info_t ranks[N_RANKS];
    size_t n = 0;
    lst_good(lst_weight_info(lst, ranks, N_RANKS, &n));
    return ranks[0].dirty && ranks[1].dirty;
}

static bool nothing_mapped(void *ctx)
{
    return mapped_rings() == 0;
}

START_TEST(shm_trainer_killed_in_the_middle)
{
    start("shm", "inplace");
    const char *second = rl_make_model(ARCH_QWEN3_MOE, 2, 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        doomed_trainer(second);
    }
    int status = 0;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %x", status);
    wait_for(is_dirty, NULL, 30, "every rank knows that its weights are half new");
    wait_for(nothing_mapped, NULL, 30, "no rank maps the dead trainer's memory");
    expect_no_segment();
    int http = 0;
    json_decref(cluster_call(&cluster, "POST", "/v1/completions", rl_body(1, 4, 4), 503, &http));
    lst_good(lst_init_shm(lst, NULL)); /* and a new trainer repairs it */
    push(second, "two", NULL);
    expect_ranks(digest_of(second), "two", 1, false);
    json_decref(cluster_call(&cluster, "POST", "/v1/completions", rl_body(1, 4, 4), 200, &http));
    stop();
}
END_TEST

static void refuse_dir(const char *dir, int want, const char *text)
{
    char body[1024];
    snprintf(body, sizeof body, "{\"weight_dir\": \"%s\"}", dir);
    json_t *reply = cluster_call(&cluster, "POST", "/update_weights", body, want, NULL);
    const char *message = json_text_at(reply, "error.message");
    ck_assert_msg(strstr(message, text) != NULL, "'%s' is not in '%s'", text, message);
    json_decref(reply);
}

/* All of a checkpoint but its last tensor. */
static const char *maimed(const char *model)
{
    static char dir[600];
    char path[700];
    safetensors_t *file = NULL;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(safetensors_open(model, &file, &err) == LK_OK, "%s", err.text);
    size_t n = safetensors_count(file);
    tensor_desc_t *descs = calloc(n, sizeof *descs);
    const void **data = calloc(n, sizeof *data);
    ck_assert(descs != NULL && data != NULL);
    for (size_t i = 0; i < n; i++) {
        descs[i] = safetensors_at(file, i)->desc;
        data[i] = safetensors_at(file, i)->data;
    }
    const char *made = rl_make_model(ARCH_QWEN3_MOE, 4, 0);
    snprintf(dir, sizeof dir, "%s", made);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    ck_assert_msg(safetensors_write(path, descs, data, n - 1, &err) == LK_OK, "%s", err.text);
    free(descs);
    free(data);
    safetensors_close(&file);
    return dir;
}

/* prime-rl's calls, on a cluster whose own engine is tcp and goes on afterwards. */
START_TEST(weight_dir_is_a_whole_session)
{
    const char *first = start("tcp", swaps[_i]);
    const char *second = rl_make_model(ARCH_QWEN3_MOE, 2, 0);
    const char *broken = maimed(second);
    lst_good(lst_init_tcp(lst, NULL));
    char body[1024], before[33];
    snprintf(before, sizeof before, "%s", digest_of(first));
    expect_ranks(before, "default", 0, false);

    refuse_dir("/etc", 400, "not below a directory of --allowed-weight-dirs");
    refuse_dir("model", 400, "must be absolute");
    refuse_dir(broken, 400, "missing");
    snprintf(body, sizeof body, "%s/../../../../../../etc", second);
    refuse_dir(body, 400, "not below a directory of --allowed-weight-dirs");
    snprintf(body, sizeof body, "%s/none", second);
    refuse_dir(body, 400, "No such file");
    refuse_dir(test_tmpdir(), 400, "neither model.safetensors nor");
    expect_ranks(before, "default", 0, false);

    json_decref(
        cluster_call(&cluster, "POST", "/pause?mode=keep&clear_cache=false", NULL, 200, NULL));
    snprintf(body, sizeof body, "{\"weight_dir\": \"%s\"}", second);
    json_decref(cluster_call(&cluster, "POST", "/update_weights", body, 200, NULL));
    json_decref(cluster_call(&cluster, "POST", "/resume", NULL, 200, NULL));
    expect_ranks(digest_of(second), strrchr(second, '/') + 1, 1, false);

    lst_good(lst_start(lst)); /* the connection from before is still there */
    refuse_dir(second, 409, "already active");
    lst_good(lst_abort(lst));
    push(first, "tcp again", NULL);
    expect_ranks(before, "tcp again", 2, false);

    lst_good(lst_update_disk(lst, second, "by the library", 0));
    expect_ranks(digest_of(second), "by the library", 3, false);
    stop();
}
END_TEST

/* The four calls, with disk configured. */
START_TEST(disk_engine_by_steps)
{
    start("disk", swaps[_i]);
    const char *second = rl_make_model(ARCH_QWEN3_MOE, 2, 0);
    char body[1024];
    snprintf(body, sizeof body, "{\"update_info\": {\"path\": \"%s\"}}", second);
    json_decref(cluster_call(&cluster, "POST", "/start_weight_update", "{}", 409, NULL));
    json_decref(cluster_call(&cluster, "POST", "/init_weight_transfer_engine",
                             "{\"init_info\": {}}", 200, NULL));
    json_decref(cluster_call(&cluster, "POST", "/start_weight_update", "{}", 200, NULL));
    json_decref(
        cluster_call(&cluster, "POST", "/update_weights", "{\"update_info\": {}}", 400, NULL));
    json_decref(cluster_call(&cluster, "POST", "/update_weights", body, 200, NULL));
    json_decref(cluster_call(&cluster, "POST", "/finish_weight_update",
                             "{\"weight_version\": \"disk\"}", 200, NULL));
    json_t *info = cluster_call(&cluster, "GET", "/weight_info", NULL, 200, NULL);
    ck_assert(json_is_true(json_object_get(info, "consistent")));
    ck_assert_str_eq(json_text_at(info, "weight_version"), "disk");
    json_decref(info);
    stop();
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("transfer_engines");
    TCase *tc = tcase_create("transfer_engines");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, shm_update, 0, LK_ARRAY_LEN(swaps));
    tcase_add_test(tc, shm_trainer_killed_in_the_middle);
    tcase_add_loop_test(tc, weight_dir_is_a_whole_session, 0, LK_ARRAY_LEN(swaps));
    tcase_add_loop_test(tc, disk_engine_by_steps, 0, LK_ARRAY_LEN(swaps));
    suite_add_tcase(s, tc);
    return s;
}
