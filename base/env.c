#include "base/env.h"
#include "base/check.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>

static uint64_t real_now_ns(void *ctx)
{
    struct timespec ts;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &ts) == 0);
    return (uint64_t)ts.tv_sec * LK_SECOND_NS + (uint64_t)ts.tv_nsec;
}

static void real_random(void *ctx, void *buf, size_t len)
{
    uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        CHECK(n > 0);
        p += n;
        len -= (size_t)n;
    }
}

static const lk_env_t real_env = {.now_ns = real_now_ns, .random = real_random};

const lk_env_t *lk_env_real(void)
{
    return &real_env;
}
