/*
 * prng.h: two generators. `lk_prng_t` is a seeded stream (xoshiro256**) for tests and jitter.
 * `lk_philox4x32` is counter based: its output is a pure function of (key, counter), so that a
 * token's random number depends on its request and position and on nothing else.
 */
#ifndef LK_BASE_PRNG_H
#define LK_BASE_PRNG_H

#include <stdint.h>

typedef struct {
    uint64_t s[4];
} lk_prng_t;

void lk_prng_seed(lk_prng_t *prng, uint64_t seed);
uint64_t lk_prng_u64(lk_prng_t *prng);
/* Uniform in [0, bound); bound > 0. Unbiased. */
uint64_t lk_prng_below(lk_prng_t *prng, uint64_t bound);
/* Uniform in [0, 1), 53 bits. */
double lk_prng_unit(lk_prng_t *prng);
/* Standard normal (Box-Muller). */
double lk_prng_normal(lk_prng_t *prng);

/* Philox-4x32 with 10 rounds: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as
 * 1, 2, 3", SC 2011. */
void lk_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]);

/* splitmix64's finaliser: a fixed mix of 64 bits. */
static inline uint64_t lk_mix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

#endif
