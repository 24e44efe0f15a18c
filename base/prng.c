#include "base/prng.h"
#include "base/check.h"

#include <math.h>

void lk_prng_seed(lk_prng_t *prng, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        prng->s[i] = lk_mix64(seed + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    }
}

static uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

/* xoshiro256** 1.0, Blackman and Vigna, "Scrambled linear pseudorandom number generators". */
uint64_t lk_prng_u64(lk_prng_t *prng)
{
    uint64_t *s = prng->s;
    uint64_t result = rotl(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

uint64_t lk_prng_below(lk_prng_t *prng, uint64_t bound)
{
    CHECK(bound > 0);
    uint64_t reject = -bound % bound; /* 2^64 mod bound */
    uint64_t x;
    do {
        x = lk_prng_u64(prng);
    } while (x < reject);
    return x % bound;
}

double lk_prng_unit(lk_prng_t *prng)
{
    return (double)(lk_prng_u64(prng) >> 11) * 0x1.0p-53;
}

double lk_prng_normal(lk_prng_t *prng)
{
    double u = 1.0 - lk_prng_unit(prng); /* in (0, 1]: log is finite */
    double v = lk_prng_unit(prng);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

void lk_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}
