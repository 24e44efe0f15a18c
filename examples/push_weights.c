/*
 * push_weights: a complete trainer. Reads a checkpoint, optionally changes it a little (as training
 * would), sends it to every rank of a cluster, and compares the ranks' digests with its own.
 *
 *     push_weights --endpoint tcp://127.0.0.1:7100 --model DIR --version step-1 [--perturb SEED]
 *         [--packed BYTES] [--pause MODE] [--admin-key KEY] [--bind ADDRESS] [--backend tcp|shm]
 */
#include "transfer/trainer/lockstep_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANKS 1024

/* Scales each value by 1 +- 2^-7, chosen by a hash of seed and position: the same on every run. */
static void perturb(void *data, bool half, uint64_t n, uint64_t seed)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t x = (seed + i + 1) * 0x9e3779b97f4a7c15u;
        float f, scale = (x ^ (x >> 31)) & 1 ? 1.0078125f : 0.9921875f;
        uint32_t bits = half ? (uint32_t)((uint16_t *)data)[i] << 16 : ((uint32_t *)data)[i];
        memcpy(&f, &bits, sizeof f);
        f *= scale;
        memcpy(&bits, &f, sizeof bits);
        if (half) { /* bfloat16 is the upper half of a float */
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        } else {
            ((uint32_t *)data)[i] = bits;
        }
    }
}

/* The trainer's own weights, which training would change: the file's, or perturbed copies. */
static lst_tensor_t *own_weights(const lst_tensor_t *from, size_t n, const char *seed)
{
    lst_tensor_t *to = calloc(n + 1, sizeof *to);
    for (size_t i = 0; to != NULL && i < n; i++) {
        bool half = strcmp(from[i].dtype, "bfloat16") == 0;
        uint64_t count = 1;
        to[i] = from[i];
        for (unsigned d = 0; d < from[i].ndim; d++) {
            count *= from[i].shape[d];
        }
        if (seed != NULL && (half || strcmp(from[i].dtype, "float32") == 0)) {
            void *copy = malloc(count * 4 + 1);
            if (copy == NULL) {
                return NULL;
            }
            memcpy(copy, from[i].data, count * (half ? 2 : 4));
            perturb(copy, half, count, strtoull(seed, NULL, 0) + i);
            to[i].data = copy;
        }
    }
    return to;
}

static int compare_digests(lst_t *lst, const lst_tensor_t *tensors, size_t n)
{
    static lst_rank_info_t ranks[MAX_RANKS];
    char mine[33];
    size_t n_ranks = 0;
    int bad = 0;
    if (lst_digest(lst, tensors, n, mine) != LST_OK ||
        lst_weight_info(lst, ranks, MAX_RANKS, &n_ranks) != LST_OK) {
        return -1;
    }
    printf("trainer  %s\n", mine);
    for (size_t r = 0; r < n_ranks && r < MAX_RANKS; r++) {
        bool same = strcmp(mine, ranks[r].digest) == 0;
        printf("rank %-3u %s  version %s  epoch %llu  %s\n", ranks[r].rank, ranks[r].digest,
               ranks[r].version, (unsigned long long)ranks[r].epoch, same ? "equal" : "DIFFERENT");
        bad += !same;
    }
    return bad;
}

static lst_status_t push(lst_t *lst, const lst_tensor_t *tensors, size_t n, const char *version,
                         const char *pause, const lst_update_options_t *options)
{
    bool paused = strcmp(pause, "none") != 0;
    lst_status_t st = paused ? lst_pause(lst, pause, true) : LST_OK;
    st = st == LST_OK ? lst_start(lst) : st;
    st = st == LST_OK ? lst_update(lst, tensors, n, options) : st;
    st = st == LST_OK ? lst_finish(lst, version) : st;
    return st == LST_OK && paused ? lst_resume(lst) : st; /* half-updated weights stay paused */
}

static bool parse(int argc, char **argv, const char **values[], const char *const names[], size_t n)
{
    for (int i = 1; i < argc; i += 2) {
        size_t k = 0;
        while (k < n && strcmp(argv[i], names[k]) != 0) {
            k++;
        }
        if (k == n || i + 1 == argc) {
            return false;
        }
        *values[k] = argv[i + 1];
    }
    return true;
}

int main(int argc, char **argv)
{
    const char *endpoint = NULL, *key = NULL, *model = NULL, *version = NULL, *seed = NULL;
    const char *pause = "keep", *packed = NULL, *bind = NULL, *by = "tcp";
    static const char *const names[] = {"--endpoint", "--admin-key", "--model",
                                        "--version",  "--perturb",   "--pause",
                                        "--packed",   "--bind",      "--backend"};
    const char **values[] = {&endpoint, &key, &model, &version, &seed, &pause, &packed, &bind, &by};
    if (!parse(argc, argv, values, names, 9) || endpoint == NULL || model == NULL) {
        fprintf(stderr, "usage: %s --endpoint ADDRESS --model DIR [--version V] [...]\n", argv[0]);
        return 2;
    }
    lst_options_t options = {.endpoint = endpoint, .admin_key = key};
    lst_tcp_options_t tcp = {.bind_host = bind};
    lst_update_options_t update = {packed != NULL, packed != NULL ? strtoull(packed, NULL, 0) : 0};
    char err[1024];
    lst_checkpoint_t *checkpoint = NULL;
    size_t n = 0;
    lst_t *lst = NULL;
    if (lst_checkpoint_open(model, &checkpoint, err, sizeof err) != LST_OK ||
        lst_open(&options, &lst, err, sizeof err) != LST_OK) {
        fprintf(stderr, "push_weights: %s\n", err);
        return 1;
    }
    const lst_tensor_t *read = lst_checkpoint_tensors(checkpoint, &n);
    lst_tensor_t *tensors = own_weights(read, n, seed);
    lst_stats_t stats;
    int bad = -1, shm = strcmp(by, "shm") == 0;
    if (tensors != NULL && (shm ? lst_init_shm(lst, NULL) : lst_init_tcp(lst, &tcp)) == LST_OK &&
        push(lst, tensors, n, version, pause, &update) == LST_OK) {
        lst_stats(lst, &stats);
        printf("%zu tensors, %.1f MB to all ranks in %.3f s, paused for %.3f s\n", n,
               (double)stats.last_bytes / 1e6, stats.last_transfer_s, stats.last_pause_window_s);
        bad = compare_digests(lst, tensors, n);
    }
    if (bad != 0) {
        fprintf(stderr, "push_weights: %s\n", bad > 0 ? "digests differ" : lst_last_error(lst));
    }
    for (size_t i = 0; tensors != NULL && i < n; i++) {
        free(tensors[i].data != read[i].data ? (void *)tensors[i].data : NULL);
    }
    free(tensors);
    lst_close(&lst);
    lst_checkpoint_close(&checkpoint);
    return bad == 0 ? 0 : 1;
}
