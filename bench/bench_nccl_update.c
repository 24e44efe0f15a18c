/*
 * bench_nccl_update.c: whole weight updates over NCCL, from a trainer on one GPU to a cluster whose
 * ranks (one, or --ranks) have one each of the others: start to finish, the window from pause to
 * resume, and update_weights alone. In the same run, before and after: a warm raw ncclBroadcast of
 * as many bytes in pieces of 1 GiB, between as many processes on the same GPUs.
 *
 *   bench_nccl_update [qwen3-30b-a3b|qwen3-8b|qwen3-0.6b|tiny|tiny-moe] [--updates N]
 *       [--ranks N] [--kill] [--packed BYTES] [--unpacked] [--digests on|off] [--trainer-gpu N]
 *       [--rank-gpu N] [--nccl-library PATH] [--store] [--timings] [--count FILE]
 *       [-- flags for serve]
 *
 * --kill: after the updates one rank is killed in the middle of another one and does not come back;
 * then a session over those that are left. Every rank gets all tensors.
 *
 * Two tables, without and with digests of weights, each over a cluster of its own, or the one that
 * --digests names. The rank starts with generated weights; the trainer's tensors each have memory
 * of their own. --timings: also where both sides spent their time. --count: fails if FILE grows
 * from the second update on (tests/gpu/count_allocations.c writes it).
 */
#include "base/base64.h"
#include "base/check.h"
#include "base/env.h"
#include "base/log.h"
#include "deploy/client/http_client.h"
#include "engine_core/exec/model_tensors.h"
#include "transfer/backends/nccl/nccl_link.h"
#include "transfer/device/device.h"
#include "transfer/trainer/lockstep_trainer.h"

#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIECE       (1ull << 30)
#define RAW_ROUNDS  20
#define MAX_TENSORS 20000
#define MAX_RANKS   16
#define MAX_UPDATES 1000
#define MAX_ARGV    64
#define LIMIT_NS    (60 * LK_SECOND_NS)

static const struct {
    const char *name, *config;
} models[] = {
    {"qwen3-30b-a3b",
     "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"hidden_size\":"
     "2048,"
     "\"intermediate_size\":6144,\"num_hidden_layers\":48,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":4,\"head_dim\":128,\"vocab_size\":151936,\"num_experts\":128,"
     "\"num_experts_per_tok\":8,\"moe_intermediate_size\":768,\"norm_topk_prob\":true,"
     "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"max_position_embeddings\":40960,"
     "\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,\"tie_word_embeddings\":false,"
     "\"torch_dtype\":\"bfloat16\",\"hidden_act\":\"silu\"}"},
    {"qwen3-8b",
     "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"hidden_size\":4096,"
     "\"intermediate_size\":12288,\"num_hidden_layers\":36,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"head_dim\":128,\"vocab_size\":151936,"
     "\"max_position_embeddings\":40960,\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,"
     "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"hidden_act\":\"silu\"}"},
    {"qwen3-0.6b",
     "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"hidden_size\":1024,"
     "\"intermediate_size\":3072,\"num_hidden_layers\":28,\"num_attention_heads\":16,"
     "\"num_key_value_heads\":8,\"head_dim\":128,\"vocab_size\":151936,"
     "\"max_position_embeddings\":40960,\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,"
     "\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\",\"hidden_act\":\"silu\"}"},
    /* odd sizes, for a quick look whether everything works */
    {"tiny",
     "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"hidden_size\":37,"
     "\"intermediate_size\":101,\"num_hidden_layers\":3,\"num_attention_heads\":3,"
     "\"num_key_value_heads\":1,\"head_dim\":10,\"vocab_size\":1031,"
     "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,\"rope_theta\":10000,"
     "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"hidden_act\":\"silu\"}"},
    {"tiny-moe",
     "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"hidden_size\":37,"
     "\"intermediate_size\":101,\"num_hidden_layers\":3,\"num_attention_heads\":3,"
     "\"num_key_value_heads\":1,\"head_dim\":10,\"vocab_size\":1031,\"num_experts\":8,"
     "\"num_experts_per_tok\":2,\"moe_intermediate_size\":7,\"norm_topk_prob\":true,"
     "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"max_position_embeddings\":64,"
     "\"rms_norm_eps\":1e-6,\"rope_theta\":10000,\"tie_word_embeddings\":false,"
     "\"torch_dtype\":\"bfloat16\",\"hidden_act\":\"silu\"}"},
};

static struct {
    const char *model, *library, *count;
    size_t updates;
    uint64_t bucket; /* 0: the library's choice */
    unsigned ranks;
    bool unpacked, store, timings, kill;
    const char *digests; /* "on", "off"; NULL: both */
    int trainer_gpu, rank_gpu;
    char **serve; /* more flags; NULL: none */
} options = {.model = "qwen3-8b", .updates = 25, .ranks = 1, .trainer_gpu = 1};

static char dir[] = "/tmp/lockstep-bench-XXXXXX";
static char self_path[PATH_MAX], tool[PATH_MAX];
static pid_t cluster, peers[MAX_RANKS];
static lst_t *lst;
static device_t *gpu;
static lk_error_t err;

static lst_tensor_t tensors[MAX_TENSORS];
static char names[MAX_TENSORS][128];
static size_t n_tensors;
static uint64_t total_bytes;

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    return remove(path);
}

static void end_child(pid_t *pid, int sig)
{
    if (*pid > 0) {
        kill(*pid, sig);
        waitpid(*pid, NULL, 0);
        *pid = 0;
    }
}

static void print_log(void)
{
    char path[128], line[1024];
    snprintf(path, sizeof path, "%s/cluster.log", dir);
    FILE *f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        fprintf(stderr, "  | %s", line);
    }
    if (f != NULL) {
        fclose(f);
    }
}

static void clean_up(void)
{
    for (unsigned r = 0; r < MAX_RANKS; r++) {
        end_child(&peers[r], SIGKILL);
    }
    end_child(&cluster, SIGTERM);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void die(const char *what, const char *text)
{
    fprintf(stderr, "bench_nccl_update: %s: %s\n", what, text);
    print_log();
    clean_up();
    exit(1);
}

static void ok(lk_status_t status, const char *what)
{
    if (status < 0) {
        die(what, err.text);
    }
}

static void must(lst_status_t status, const char *what)
{
    if (status != LST_OK) {
        die(what, lst_last_error(lst));
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(double *values, size_t n, double p)
{
    qsort(values, n, sizeof *values, by_value);
    size_t k = (size_t)(p * (double)n);
    return values[LK_MIN(k, n - 1)];
}

static double report(const char *what, double *seconds, size_t n)
{
    double p50 = percentile(seconds, n, 0.5), p95 = percentile(seconds, n, 0.95);
    printf("  %-30s p50 %8.3f ms  p95 %8.3f ms  (%6.1f GB/s at p50)  %zu\n", what, p50 * 1e3,
           p95 * 1e3, (double)total_bytes / p50 / 1e9, n);
    fflush(stdout);
    return p50;
}

/* ---- the raw broadcast: this program again, as the other rank ---- */

/* Of rank r: the r-th from --rank-gpu on, the trainer's left out. */
static int gpu_of(unsigned r)
{
    int index = options.rank_gpu + (options.rank_gpu == options.trainer_gpu);
    for (; r > 0; r--) {
        index++;
        index += index == options.trainer_gpu;
    }
    return index;
}

/* Communicators are non-blocking: nothing is called before the last call has done its part. */
static void called(nccl_link_t *link, lk_status_t st, const char *what)
{
    while (st == LK_INPROGRESS) {
        st = link->ops->poll(link->comm, &err);
    }
    ok(st, what);
}

/* Everything in pieces, then a sum, without which rank 0 would not know that all has arrived. */
static double raw_round(nccl_link_t *link, uint8_t *buffer, uint64_t bytes)
{
    uint64_t start = now();
    lk_status_t st;
    for (uint64_t at = 0; at < bytes; at += PIECE) {
        st = link->ops->broadcast(link->comm, buffer + at, LK_MIN(PIECE, bytes - at), LK_DTYPE_U8,
                                  link->wire, &err);
        called(link, st, "ncclBroadcast");
    }
    st = link->ops->all_reduce(link->comm, link->warm, link->warm + 1, link->wire, &err);
    called(link, st, "ncclAllReduce");
    while ((st = gpu->ops->stream_test(gpu, link->wire, &err)) == LK_INPROGRESS) {
    }
    ok(st, "the raw broadcast");
    return (double)(now() - start) / 1e9;
}

static void raw_rounds(nccl_link_t *link, const uint8_t id[NCCL_ID_BYTES], uint32_t world,
                       uint32_t rank, uint64_t bytes, double *seconds)
{
    void *buffer = NULL;
    lk_status_t st;
    nccl_link_start(link, id, world, rank);
    while ((st = nccl_link_step(link, &err)) == LK_INPROGRESS) {
    }
    ok(st, "the raw communicator");
    ok(gpu->ops->alloc(gpu, bytes, &buffer, &err), "memory for the raw broadcast");
    (void)raw_round(link, buffer, bytes); /* the first one connects and warms up */
    for (size_t i = 0; i < RAW_ROUNDS; i++) {
        seconds[i] = raw_round(link, buffer, bytes);
    }
    gpu->ops->free(gpu, buffer);
}

static void open_link(nccl_link_t *link, int index)
{
    ok(device_open("cuda", index, &gpu, &err), "the GPU");
    ok(nccl_link_open(link, &nccl_lib_ops, options.library, gpu, lk_env_real(), LIMIT_NS, &err),
       "NCCL");
}

static int raw_peer(const char *id_text, const char *bytes_text, const char *world,
                    const char *rank)
{
    static nccl_link_t link;
    static double seconds[RAW_ROUNDS];
    uint8_t id[NCCL_ID_BYTES];
    size_t n = 0;
    CHECK(base64_decode(id_text, strlen(id_text), id, sizeof id, &n) && n == sizeof id);
    open_link(&link, options.rank_gpu);
    raw_rounds(&link, id, (uint32_t)atoi(world), (uint32_t)atoi(rank),
               strtoull(bytes_text, NULL, 10), seconds);
    nccl_link_fini(&link);
    device_close(&gpu);
    return 0;
}

static void start_raw_peer(unsigned r, const char *id, const char *bytes)
{
    char world[16], rank[16], index[16];
    snprintf(index, sizeof index, "%d", gpu_of(r));
    snprintf(world, sizeof world, "%u", options.ranks + 1);
    snprintf(rank, sizeof rank, "%u", r + 1);
    fflush(stdout);
    peers[r] = fork();
    CHECK(peers[r] >= 0);
    if (peers[r] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(self_path, self_path, "--rank-gpu", index, "--raw-peer", id, bytes, world, rank,
              options.library, NULL);
        _exit(127);
    }
}

static double measure_raw(void)
{
    static double seconds[RAW_ROUNDS];
    nccl_link_t link = {0};
    uint8_t id[NCCL_ID_BYTES];
    char text[BASE64_SIZE(NCCL_ID_BYTES)], bytes[32];
    ok(nccl_link_open(&link, &nccl_lib_ops, options.library, gpu, lk_env_real(), LIMIT_NS, &err),
       "NCCL");
    ok(nccl_lib_ops.unique_id(link.library, id, &err), "ncclGetUniqueId");
    base64_encode(id, sizeof id, text);
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)total_bytes);
    for (unsigned r = 0; r < options.ranks; r++) {
        start_raw_peer(r, text, bytes);
    }
    raw_rounds(&link, id, options.ranks + 1, 0, total_bytes, seconds);
    nccl_link_fini(&link);
    for (unsigned r = 0; r < options.ranks; r++) {
        waitpid(peers[r], NULL, 0);
        peers[r] = 0;
    }
    return report("raw ncclBroadcast, warm", seconds, RAW_ROUNDS);
}

/* ---- the trainer's tensors ---- */

static lk_status_t add_tensor(void *ctx, const model_tensor_t *t, lk_error_t *e)
{
    CHECK(n_tensors < MAX_TENSORS);
    lst_tensor_t *to = &tensors[n_tensors];
    snprintf(names[n_tensors], sizeof names[0], "%s", t->name);
    *to = (lst_tensor_t){.name = names[n_tensors], .dtype = "bfloat16", .ndim = t->ndim};
    memcpy(to->shape, t->shape, sizeof t->shape);
    void *data = NULL;
    LK_RETURN_IF_ERROR(gpu->ops->alloc(gpu, 2 * t->numel, &data, e));
    to->data = data;
    total_bytes += 2 * t->numel;
    n_tensors++;
    return LK_OK;
}

/* Every tensor gets a different stretch of one random block (finite bfloat16 values). */
static void fill_tensors(void)
{
    enum { BLOCK = 64 << 20, SHIFT = 4096 };
    uint16_t *block = NULL;
    device_stream_t *stream = NULL;
    ok(gpu->ops->alloc_host(gpu, 2 * BLOCK, (void **)&block, &err), "host memory");
    ok(gpu->ops->stream_new(gpu, &stream, &err), "a stream");
    uint64_t x = 88172645463325252ull;
    for (size_t i = 0; i < BLOCK; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        block[i] = (uint16_t)(x & 0xbfff);
    }
    for (size_t i = 0; i < n_tensors; i++) {
        uint64_t left = 1;
        for (unsigned d = 0; d < tensors[i].ndim; d++) {
            left *= tensors[i].shape[d];
        }
        uint16_t *to = (uint16_t *)(uintptr_t)tensors[i].data;
        for (uint64_t shift = i * 64 % SHIFT; left > 0;) {
            uint64_t n = LK_MIN(left, BLOCK - shift);
            ok(gpu->ops->copy(gpu, to, block + shift, 2 * n, stream, &err), "filling tensors");
            to += n;
            left -= n;
        }
    }
    ok(device_wait(gpu, stream, &err), "filling tensors");
    gpu->ops->stream_destroy(gpu, stream);
    gpu->ops->free_host(gpu, block);
}

static void make_tensors(void)
{
    const char *config = NULL;
    char path[128];
    for (size_t i = 0; i < LK_ARRAY_LEN(models); i++) {
        config = strcmp(models[i].name, options.model) == 0 ? models[i].config : config;
    }
    if (config == NULL) {
        die("no such model", options.model);
    }
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(config, f) >= 0 && fclose(f) == 0);
    model_config_t model;
    ok(model_config_load(dir, &model, &err), "config.json");
    ok(model_tensors_each(&model, add_tensor, NULL, &err), "the trainer's tensors");
    fill_tensors();
}

/* ---- the cluster ---- */

static void start_cluster(bool digests)
{
    int fds[2];
    char log[128], visible[8 * MAX_RANKS] = "", size[16], line[512] = "", url[200], text[512];
    const char *argv[MAX_ARGV] = {"lockstep-tool",
                                  "serve",
                                  dir,
                                  "--port",
                                  "0",
                                  "--device",
                                  "cuda-store",
                                  "--load-format",
                                  "dummy",
                                  "--dtype",
                                  "bfloat16",
                                  "--max-model-len",
                                  "64",
                                  "--handshake-timeout",
                                  "900",
                                  "--weight-transfer-config",
                                  "{\"backend\":\"nccl\"}"};
    size_t n = 17;
    snprintf(size, sizeof size, "%u", options.ranks);
    argv[n++] = "--data-parallel-size";
    argv[n++] = size;
    if (options.kill) {
        argv[n++] = "--engine-restarts";
        argv[n++] = "0";
        argv[n++] = "--data-parallel-min-size";
        argv[n++] = "1";
    }
    if (!digests) {
        argv[n++] = "--no-weight-digests";
    }
    if (options.timings) {
        argv[n++] = "--log-level";
        argv[n++] = "debug";
    }
    if (options.library != NULL) {
        argv[n++] = "--nccl-library";
        argv[n++] = options.library;
    }
    for (char **more = options.serve; more != NULL && *more != NULL; more++) {
        CHECK(n + 1 < MAX_ARGV);
        argv[n++] = *more;
    }
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    snprintf(log, sizeof log, "%s/cluster.log", dir);
    for (unsigned r = 0; r < options.ranks; r++) {
        size_t len = strlen(visible);
        snprintf(visible + len, sizeof visible - len, "%s%d", r > 0 ? "," : "", gpu_of(r));
    }
    fflush(stdout);
    cluster = fork();
    CHECK(cluster >= 0);
    if (cluster == 0) {
        dup2(fds[1], STDOUT_FILENO);
        FILE *e = freopen(log, "a", stderr);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        setpgid(0, 0);
        setenv("CUDA_VISIBLE_DEVICES", visible, 1);
        if (e != NULL) {
            execv(tool, (char *const *)argv);
        }
        _exit(127);
    }
    close(fds[1]);
    char base[128] = "";
    FILE *f = fdopen(fds[0], "r");
    if (fgets(line, sizeof line, f) == NULL ||
        sscanf(line, "lockstep: ready on %127s", base) != 1) {
        die("the cluster did not start", tool);
    }
    fclose(f);
    http_reply_t reply;
    snprintf(url, sizeof url, "%s/server_info", base);
    ok(http_call("GET", url, NULL, NULL, 10, &reply, &err), "server_info");
    json_t *info = json_loads(lk_buf_cstr(&reply.body), 0, NULL);
    const char *endpoint = json_string_value(json_object_get(info, "trainer_endpoint"));
    lst_options_t o = {.endpoint = endpoint != NULL ? endpoint : "", .no_progress_s = 60};
    if (lst_open(&o, &lst, text, sizeof text) != LST_OK) {
        die("connecting", text);
    }
    json_decref(info);
    http_reply_fini(&reply);
}

/* ---- updates ---- */

static double transfer_s[MAX_UPDATES], update_s[MAX_UPDATES], window_s[MAX_UPDATES];
static double total_s[MAX_UPDATES], start_s[MAX_UPDATES], finish_s[MAX_UPDATES];

/* Where the rank's time of an update went, in us from when it began to receive. */
static const char *const stages[] = {"enqueued", "first", "wire", "done"};
static double stage_us[LK_ARRAY_LEN(stages)][MAX_UPDATES];

static void note_stages(size_t i)
{
    json_t *reply = json_loads(lst_update_reply(lst), 0, NULL);
    const json_t *rank = json_array_get(json_object_get(reply, "ranks"), 0);
    for (size_t s = 0; s < LK_ARRAY_LEN(stages); s++) {
        char key[64];
        snprintf(key, sizeof key, "nccl_%s_us", stages[s]);
        stage_us[s][i] = (double)json_integer_value(json_object_get(rank, key));
    }
    json_decref(reply);
}

static void one_update(size_t i)
{
    char version[32];
    lst_stats_t stats;
    lst_update_options_t how = {.packed = !options.unpacked,
                                .packed_buffer_size_bytes = options.bucket};
    snprintf(version, sizeof version, "step-%zu", i);
    uint64_t begin = now();
    must(lst_pause(lst, "keep", true), "pause");
    uint64_t start = now();
    must(lst_start(lst), "start_weight_update");
    start_s[i] = (double)(now() - start) / 1e9;
    must(lst_update(lst, tensors, n_tensors, &how), "update_weights");
    uint64_t sent = now();
    must(lst_finish(lst, version), "finish_weight_update");
    uint64_t finished = now();
    must(lst_resume(lst), "resume");
    uint64_t end = now();
    note_stages(i);
    lst_stats(lst, &stats);
    transfer_s[i] = stats.last_transfer_s;
    window_s[i] = stats.last_pause_window_s;
    update_s[i] = (double)(finished - start) / 1e9;
    finish_s[i] = (double)(finished - sent) / 1e9;
    total_s[i] = (double)(end - begin) / 1e9;
}

static void verify(size_t ranks)
{
    char mine[33];
    lst_rank_info_t rank[MAX_RANKS];
    size_t n = 0;
    must(lst_digest(lst, tensors, n_tensors, mine), "the trainer's digest");
    must(lst_weight_info(lst, rank, MAX_RANKS, &n), "weight_info");
    if (n != ranks) {
        die("weight_info", "it does not list every rank");
    }
    for (size_t r = 0; r < n; r++) {
        if (strcmp(mine, rank[r].digest) != 0) {
            fprintf(stderr, "trainer %s, rank %u %s\n", mine, rank[r].rank, rank[r].digest);
            die("digests", "the rank does not have the trainer's weights");
        }
    }
    printf("  digest of all weights: %s on the trainer and %zu ranks\n", mine, n);
}

/* ---- one rank less ---- */

/* The engine of a rank, among the launcher's children. */
static pid_t engine_pid(unsigned rank)
{
    char path[64], children[4096] = "", line[4096], want[48];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)cluster, (int)cluster);
    FILE *f = fopen(path, "r");
    size_t len = f != NULL ? fread(children, 1, sizeof children - 1, f) : 0;
    children[len] = '\0';
    if (f != NULL) {
        fclose(f);
    }
    size_t want_len = (size_t)snprintf(want, sizeof want, "--data-parallel-rank%c%u", 0, rank) + 1;
    for (char *at = strtok(children, " "); at != NULL; at = strtok(NULL, " ")) {
        snprintf(path, sizeof path, "/proc/%d/cmdline", atoi(at));
        f = fopen(path, "r");
        len = f != NULL ? fread(line, 1, sizeof line, f) : 0;
        if (f != NULL) {
            fclose(f);
        }
        if (memmem(line, len, want, want_len) != NULL) {
            return atoi(at);
        }
    }
    die("kill", "there is no such engine");
    return 0;
}

typedef struct {
    pid_t pid;
    uint64_t at_ns, killed_ns;
} killer_t;

static void *kill_later(void *arg)
{
    killer_t *self = arg;
    uint64_t left = self->at_ns - now();
    struct timespec wait = {(time_t)(left / LK_SECOND_NS), (long)(left % LK_SECOND_NS)};
    nanosleep(&wait, NULL);
    kill(self->pid, SIGKILL);
    self->killed_ns = now();
    return NULL;
}

/* In the middle of an update of that many seconds. */
static void lose_a_rank(double transfer, const lst_nccl_options_t *o, bool digests)
{
    lst_update_options_t how = {.packed = !options.unpacked,
                                .packed_buffer_size_bytes = options.bucket};
    pthread_t thread;
    must(lst_start(lst), "start_weight_update");
    killer_t killer = {.pid = engine_pid(options.ranks - 1),
                       .at_ns = now() + (uint64_t)(transfer / 2 * LK_SECOND_NS)};
    CHECK(pthread_create(&thread, NULL, kill_later, &killer) == 0);
    lst_status_t st = lst_update(lst, tensors, n_tensors, &how);
    uint64_t failed = now();
    pthread_join(thread, NULL);
    if (st == LST_OK) {
        die("kill", "the update was over before; it needs a larger model");
    }
    printf("  rank %u killed in mid-transfer: the trainer knows after %.1f ms: %s\n",
           options.ranks - 1, (double)(failed - killer.killed_ns) / 1e6, lst_last_error(lst));
    uint64_t start = now();
    must(lst_init_nccl(lst, o), "init over the survivors");
    unsigned left = 0;
    uint64_t up = now();
    must(lst_world_size(lst, &left), "get_world_size");
    printf("  init_weight_transfer_engine    %.0f ms, %u ranks\n", (double)(up - start) / 1e6,
           left);
    if (left != options.ranks - 1) {
        die("kill", "the world size is another one");
    }
    one_update(0);
    printf("  an update over the survivors   %.3f ms\n", update_s[0] * 1e3);
    if (digests) {
        verify(left);
    }
}

static void print_stages(void)
{
    printf("  ms p50: start_weight_update %.3f, finish_weight_update %.3f\n",
           percentile(start_s, options.updates, 0.5) * 1e3,
           percentile(finish_s, options.updates, 0.5) * 1e3);
    printf(
        "  the rank, ms p50: first broadcast enqueued %.3f, run %.3f, last run %.3f, done %.3f\n",
        percentile(stage_us[0], options.updates, 0.5) / 1e3,
        percentile(stage_us[1], options.updates, 0.5) / 1e3,
        percentile(stage_us[2], options.updates, 0.5) / 1e3,
        percentile(stage_us[3], options.updates, 0.5) / 1e3);
}

/* Allocations so far, as the length of a file to which each adds a line. */
static long long counted(void)
{
    struct stat st;
    if (options.count == NULL) {
        return 0;
    }
    if (stat(options.count, &st) != 0 || st.st_size == 0) {
        die("no allocation was counted", options.count); /* not even those of the start */
    }
    return (long long)st.st_size;
}

static void check_counts(long long before)
{
    long long after = counted();
    if (after != before) {
        die("an update after the first allocated memory of a GPU, or page-locked memory",
            options.count);
    }
    if (options.count != NULL) {
        printf("  no allocation by the driver in %zu updates (%lld bytes of names before)\n",
               options.updates, before);
    }
}

static void measure_updates(double raw_s, bool digests)
{
    lst_nccl_options_t o = {.device = options.trainer_gpu,
                            .library = options.library,
                            .store = options.store,
                            .packed = !options.unpacked,
                            .packed_buffer_size_bytes = options.bucket};
    printf(" digests %s\n", digests ? "on" : "off");
    uint64_t start = now();
    start_cluster(digests);
    printf("  the cluster starts             %.1f s\n", (double)(now() - start) / 1e9);
    start = now();
    must(lst_init_nccl(lst, &o), "init_weight_transfer_engine");
    printf("  init_weight_transfer_engine    %.0f ms\n", (double)(now() - start) / 1e6);
    one_update(0);
    double first = update_s[0];
    if (digests) {
        verify(options.ranks);
    }
    long long before = counted();
    for (size_t i = 0; i < options.updates; i++) {
        one_update(i);
    }
    check_counts(before);
    double transfer = report("transfer (update_weights)", transfer_s, options.updates);
    double p50 = report("update (start to finish)", update_s, options.updates);
    (void)report("pause window", window_s, options.updates);
    (void)report("total (pause to resume)", total_s, options.updates);
    printf("  start to finish / raw broadcast: %.3f; the first update (%.3f ms): %.3f\n",
           p50 / raw_s, first * 1e3, first / raw_s);
    if (digests) {
        verify(options.ranks);
    }
    if (options.timings) {
        print_stages();
    }
    if (options.kill) {
        lose_a_rank(transfer, &o, digests);
    }
    lst_close(&lst);
    end_child(&cluster, SIGTERM);
}

/* ---- the command line ---- */

static const char *value_of(int argc, char **argv, int *i)
{
    if (*i + 1 >= argc) {
        fprintf(stderr, "bench_nccl_update: %s needs a value\n", argv[*i]);
        exit(2);
    }
    return argv[++*i];
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--updates") == 0) {
            options.updates = strtoul(value_of(argc, argv, &i), NULL, 10);
            options.updates = LK_MAX(LK_MIN(options.updates, (size_t)MAX_UPDATES), 1u);
        } else if (strcmp(argv[i], "--ranks") == 0) {
            options.ranks = (unsigned)strtoul(value_of(argc, argv, &i), NULL, 10);
            options.ranks = LK_MAX(LK_MIN(options.ranks, (unsigned)MAX_RANKS), 1u);
        } else if (strcmp(argv[i], "--kill") == 0) {
            options.kill = true;
        } else if (strcmp(argv[i], "--packed") == 0) {
            options.bucket = strtoull(value_of(argc, argv, &i), NULL, 10);
        } else if (strcmp(argv[i], "--unpacked") == 0) {
            options.unpacked = true;
        } else if (strcmp(argv[i], "--store") == 0) {
            options.store = true;
        } else if (strcmp(argv[i], "--timings") == 0) {
            options.timings = true;
        } else if (strcmp(argv[i], "--digests") == 0) {
            options.digests = value_of(argc, argv, &i);
            if (strcmp(options.digests, "on") != 0 && strcmp(options.digests, "off") != 0) {
                fprintf(stderr, "bench_nccl_update: --digests is on or off\n");
                exit(2);
            }
        } else if (strcmp(argv[i], "--trainer-gpu") == 0) {
            options.trainer_gpu = atoi(value_of(argc, argv, &i));
        } else if (strcmp(argv[i], "--rank-gpu") == 0) {
            options.rank_gpu = atoi(value_of(argc, argv, &i));
        } else if (strcmp(argv[i], "--count") == 0) {
            options.count = value_of(argc, argv, &i);
        } else if (strcmp(argv[i], "--nccl-library") == 0) {
            options.library = value_of(argc, argv, &i);
        } else if (strcmp(argv[i], "--") == 0) {
            options.serve = argv + i + 1;
            return;
        } else if (argv[i][0] != '-') {
            options.model = argv[i];
        } else {
            fprintf(stderr, "bench_nccl_update: unknown flag %s\n", argv[i]);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    ssize_t n = readlink("/proc/self/exe", self_path, sizeof self_path - 1);
    CHECK(n > 0);
    self_path[n] = '\0';
    if (argc >= 8 && strcmp(argv[3], "--raw-peer") == 0) {
        options.rank_gpu = atoi(argv[2]);
        options.library = argc >= 9 ? argv[8] : NULL;
        return raw_peer(argv[4], argv[5], argv[6], argv[7]);
    }
    parse(argc, argv);
    unsigned gpus = device_count("cuda");
    if (gpus < 1 + options.ranks || (options.kill && options.ranks < 2)) {
        printf("needs %u GPUs (and --kill two ranks); this machine has %u\n", 1 + options.ranks,
               gpus);
        return 77;
    }
    char here[PATH_MAX];
    snprintf(here, sizeof here, "%s", self_path);
    snprintf(tool, sizeof tool, "%.4000s/../deploy/tool/lockstep-tool", dirname(here));
    if (mkdtemp(dir) == NULL) {
        perror("bench_nccl_update");
        return 1;
    }
    if (options.timings) {
        lk_log_init("trainer", LK_LOG_DEBUG, LK_LOG_TEXT);
    }
    ok(device_open("cuda", options.trainer_gpu, &gpu, &err), "the trainer's GPU");
    make_tensors();
    printf("%s: %zu tensors, %.2f GB of bfloat16, %s; trainer on %s, %u ranks\n", options.model,
           n_tensors, (double)total_bytes / 1e9, options.unpacked ? "unpacked" : "packed",
           gpu->text, options.ranks);
    double raw_s = measure_raw();
    for (int digests = 0; digests < 2; digests++) {
        if (options.digests == NULL || (strcmp(options.digests, "on") == 0) == (digests == 1)) {
            measure_updates(raw_s, digests == 1);
        }
    }
    (void)measure_raw();
    clean_up();
    return 0;
}
