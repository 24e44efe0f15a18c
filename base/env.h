/*
 * env.h: the only door to the clock and to entropy. Objects take a `const lk_env_t *` when they
 * need either; the simulator passes its own.
 */
#ifndef LK_BASE_ENV_H
#define LK_BASE_ENV_H

#include <stddef.h>
#include <stdint.h>

typedef struct lk_env {
    void *ctx;
    /* Monotonic nanoseconds. Never goes back. */
    uint64_t (*now_ns)(void *ctx);
    /* Fills buf with unpredictable bytes (with seeded ones in the simulator). */
    void (*random)(void *ctx, void *buf, size_t len);
} lk_env_t;

/* The real one: CLOCK_MONOTONIC and getrandom(2). */
const lk_env_t *lk_env_real(void);

static inline uint64_t lk_env_now_ns(const lk_env_t *env)
{
    return env->now_ns(env->ctx);
}

static inline uint64_t lk_env_random_u64(const lk_env_t *env)
{
    uint64_t x;
    env->random(env->ctx, &x, sizeof x);
    return x;
}

#define LK_SECOND_NS 1000000000ull
#define LK_MS_NS 1000000ull

#endif
