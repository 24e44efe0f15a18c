/*
 * The front end's choice of a DP rank for one request, by number of engines: by load, by session,
 * and pinned; best of ROUNDS. The floor: the same number of scores read and compared, nothing else.
 */
#include "api_frontend/router.h"
#include "base/check.h"
#include "base/env.h"

#include <inttypes.h>
#include <stdio.h>

#define ROUNDS    20
#define DECISIONS 20000

typedef enum { BY_LOAD, BY_SESSION, PINNED, FLOOR } kind_t;

static uint32_t floor_pick(const router_t *router)
{
    uint32_t best = 0;
    for (uint32_t r = 1; r < router->n_ranks; r++) {
        if (router->ranks[r].running < router->ranks[best].running) {
            best = r;
        }
    }
    return best;
}

/* One decision, and the end of the request that it was for. */
static uint32_t decide(router_t *router, kind_t kind, uint64_t i)
{
    uint32_t rank = 0;
    lk_error_t err = LK_ERROR_INIT;
    if (kind == FLOOR) {
        rank = floor_pick(router);
        router->ranks[rank].running += 1;
        return rank;
    }
    int64_t pin = kind == PINNED ? (int64_t)(i % router->n_ranks) : -1;
    uint64_t session = kind == BY_SESSION ? 1 + i % 997 : 0;
    CHECKF(router_pick(router, pin, session, &rank, &err) == LK_OK, "%s", err.text);
    router_done(router, rank);
    return rank;
}

static double nanoseconds(uint32_t engines, kind_t kind)
{
    static router_t router;
    double best = 1e9;
    uint64_t sum = 0;
    for (int round = 0; round < ROUNDS; round++) {
        router_init(&router, engines, 0, 1);
        for (uint32_t r = 0; r < engines; r++) {
            router_report(&router, r, r * 7 % 5, 16 + r * 13 % 11, 0.4 + 0.01 * (r % 40));
        }
        uint64_t start = lk_env_now_ns(lk_env_real());
        for (uint64_t i = 0; i < DECISIONS; i++) {
            sum += decide(&router, kind, i);
        }
        double ns = (double)(lk_env_now_ns(lk_env_real()) - start) / DECISIONS;
        best = LK_MIN(best, ns);
    }
    CHECK(sum > 0 || engines == 1);
    return best;
}

int main(void)
{
    static const uint32_t sizes[] = {2, 8, 64, 256};
    for (size_t i = 0; i < LK_ARRAY_LEN(sizes); i++) {
        double base = nanoseconds(sizes[i], FLOOR), load = nanoseconds(sizes[i], BY_LOAD);
        printf("%3" PRIu32 " engines: by load %7.1f ns, by session %7.1f ns, pinned %5.1f ns; "
               "floor %6.1f ns, by load is %.1f of it\n",
               sizes[i], load, nanoseconds(sizes[i], BY_SESSION), nanoseconds(sizes[i], PINNED),
               base, load / base);
    }
    return 0;
}
