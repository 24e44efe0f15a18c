/* hash.h: content hashes (XXH3-128) and key comparison. */
#ifndef LK_BASE_HASH_H
#define LK_BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t lo, hi;
} lk_hash128_t;

lk_hash128_t lk_hash128(const void *data, size_t len, uint64_t seed);
uint64_t lk_hash64(const void *data, size_t len, uint64_t seed);
static inline bool lk_hash128_equal(lk_hash128_t a, lk_hash128_t b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

/* SHA-256 into out[32]. */
void lk_sha256(const void *data, size_t len, uint8_t out[32]);

/* Compares secrets in a time that depends on their lengths only. */
bool lk_secret_equal(const char *a, const char *b);

#endif
