/*
 * The digest of a tensor (transfer/digest.h) and what a sink does with one, per core, on blocks
 * that stay in the cache and on a tensor that does not; best of ROUNDS. The floor is a memcpy of
 * the same bytes, which reads and writes them once.
 */
#include "base/check.h"
#include "base/env.h"
#include "transfer/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS     60
#define BIG_BYTES  (32u << 20)
#define PASS_BYTES (1u << 20) /* a round goes over this many */

static uint64_t now(void)
{
    return lk_env_now_ns(lk_env_real());
}

static void digest_all(void *to, const void *from, lk_dtype_t dtype, lk_dtype_t stored, uint64_t n)
{
    digest_t acc = {{0}};
    CHECK(digest_add(&acc, from, dtype, stored, n, 0) == LK_OK);
    CHECK(acc.lane[0] != 0);
}

static void store_all(void *to, const void *from, lk_dtype_t dtype, lk_dtype_t stored, uint64_t n)
{
    digest_t acc = {{0}};
    CHECK(digest_store(&acc, to, from, dtype, stored, n, 0) == LK_OK);
    CHECK(acc.lane[0] != 0);
}

static void copy(void *to, const void *from, lk_dtype_t dtype, lk_dtype_t stored, uint64_t n)
{
    memcpy(to, from, n * dtype_bytes(dtype));
}

static const struct {
    const char *name;
    void (*run)(void *to, const void *from, lk_dtype_t dtype, lk_dtype_t stored, uint64_t n);
    lk_dtype_t dtype, stored;
} cases[] = {
    {"memcpy", copy, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"digest bfloat16", digest_all, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"digest float32", digest_all, LK_DTYPE_F32, LK_DTYPE_F32},
    {"copy + digest bfloat16", store_all, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"bfloat16 to float32 + digest", store_all, LK_DTYPE_BF16, LK_DTYPE_F32},
    {"float32 to bfloat16 + digest", store_all, LK_DTYPE_F32, LK_DTYPE_BF16},
    {"float16 to bfloat16 + digest", store_all, LK_DTYPE_F16, LK_DTYPE_BF16},
};

/* GB/s of bytes read. */
static double rate(size_t c, char *to, const char *from, uint64_t bytes)
{
    uint64_t n = bytes / dtype_bytes(cases[c].dtype), passes = LK_MAX(PASS_BYTES / bytes, 1u);
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = now();
        for (uint64_t i = 0; i < passes; i++) {
            cases[c].run(to, from, cases[c].dtype, cases[c].stored, n);
        }
        best = LK_MAX(best, (double)(passes * bytes) / (double)(now() - start));
    }
    return best;
}

int main(void)
{
    char *from = malloc(BIG_BYTES), *to = malloc(2 * (size_t)BIG_BYTES);
    CHECK(from != NULL && to != NULL);
    for (size_t i = 0; i < BIG_BYTES; i++) {
        from[i] = (char)(i * 31 % 113);
    }
    memset(to, 1, 2 * (size_t)BIG_BYTES);
    double floors[2] = {0};
    for (size_t c = 0; c < LK_ARRAY_LEN(cases); c++) {
        double small = rate(c, to, from, 256u << 10), big = rate(c, to, from, BIG_BYTES);
        floors[0] = c == 0 ? small : floors[0];
        floors[1] = c == 0 ? big : floors[1];
        printf("%-30s 256 KiB %6.2f GB/s (%.2f of memcpy)   32 MiB %6.2f GB/s (%.2f of memcpy)\n",
               cases[c].name, small, small / floors[0], big, big / floors[1]);
    }
    free(from);
    free(to);
    return 0;
}
