#include "base/hash.h"
#include "base/check.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <string.h>
#include <xxhash.h>

lk_hash128_t lk_hash128(const void *data, size_t len, uint64_t seed)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(data, len, seed);
    return (lk_hash128_t){.lo = h.low64, .hi = h.high64};
}

uint64_t lk_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

void lk_sha256(const void *data, size_t len, uint8_t out[32])
{
    CHECK(SHA256(data, len, out) != NULL);
}

bool lk_secret_equal(const char *a, const char *b)
{
    /* Hash first: equal lengths for the comparison, whatever a caller sends. */
    uint8_t ha[32], hb[32];
    lk_sha256(a, strlen(a), ha);
    lk_sha256(b, strlen(b), hb);
    return CRYPTO_memcmp(ha, hb, sizeof ha) == 0;
}
