#include "engine_core/dp/roster.h"
#include "base/check.h"

#include <string.h>

roster_t roster_of_all(uint32_t size, uint32_t rank)
{
    CHECK(size >= 1 && size <= ROSTER_MAX && rank < size);
    roster_t all = {.n = size, .place = rank};
    for (uint32_t r = 0; r < size; r++) {
        all.ranks[r] = r;
    }
    return all;
}

lk_status_t roster_of_init(const msg_init_t *init, uint32_t dp_size, uint32_t rank, roster_t *out,
                           lk_error_t *err)
{
    CHECK(dp_size >= 1 && dp_size <= ROSTER_MAX && rank < dp_size);
    size_t n = init->members.count;
    if (init->dp_size != dp_size || n < 1 || n > dp_size || init->mesh.count != n) {
        return lk_error_set(err, LK_ERR_PEER,
                            "INIT of the coordinator: %zu members with %zu mesh addresses, of %llu "
                            "ranks, do not fit --data-parallel-size %u",
                            n, init->mesh.count, (unsigned long long)init->dp_size, dp_size);
    }
    roster_t roster = {.n = (uint32_t)n, .place = UINT32_MAX};
    for (size_t i = 0; i < n; i++) {
        uint64_t r = init->members.items[i].rank;
        if (r >= dp_size || (i > 0 && r <= roster.ranks[i - 1])) {
            return lk_error_set(err, LK_ERR_PEER,
                                "INIT of the coordinator: member %zu is rank %llu of %u, which is "
                                "not in ascending order",
                                i, (unsigned long long)r, dp_size);
        }
        roster.ranks[i] = (uint32_t)r;
        roster.place = r == rank ? (uint32_t)i : roster.place;
    }
    if (roster.place == UINT32_MAX) {
        return lk_error_set(err, LK_ERR_PEER,
                            "INIT of the coordinator: rank %u is not among its %zu members", rank,
                            n);
    }
    *out = roster;
    return LK_OK;
}

bool roster_equal(const roster_t *a, const roster_t *b)
{
    return a->n == b->n && a->place == b->place &&
           memcmp(a->ranks, b->ranks, a->n * sizeof a->ranks[0]) == 0;
}
