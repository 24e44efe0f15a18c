#include "tests/lib/allreduce_mem.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t next; /* rounds posted so far; the one that is out is next - 1 */
    bool out;
    uint64_t slots[2][ALLREDUCE_MAX_LEN];
    size_t len[2];
    uint64_t *arrived; /* [size]: rounds of each peer that have arrived here */
} member_t;

typedef struct {
    allreduce_mem_t *hub;
    uint32_t rank;
} view_t;

struct allreduce_mem {
    uint32_t size;
    bool auto_deliver, doorbell;
    int64_t dead; /* rank, or -1 */
    member_t *members;
    view_t *views;
};

static lk_status_t mem_post(void *ctx, uint64_t round, const uint64_t *vec, size_t n,
                            lk_error_t *err)
{
    view_t *view = ctx;
    allreduce_mem_t *hub = view->hub;
    member_t *me = &hub->members[view->rank];
    CHECKF(!me->out && round == me->next && n <= ALLREDUCE_MAX_LEN, "rank %u posts round %llu",
           view->rank, (unsigned long long)round);
    memcpy(me->slots[round % 2], vec, n * sizeof *vec);
    me->len[round % 2] = n;
    me->next = round + 1;
    me->out = true;
    me->arrived[view->rank] = me->next;
    for (uint32_t to = 0; hub->auto_deliver && to < hub->size; to++) {
        hub->members[to].arrived[view->rank] = me->next;
    }
    return LK_OK;
}

static lk_status_t mem_test(void *ctx, uint64_t *out, lk_error_t *err)
{
    view_t *view = ctx;
    allreduce_mem_t *hub = view->hub;
    member_t *me = &hub->members[view->rank];
    CHECK(me->out);
    uint64_t round = me->next - 1;
    if (hub->dead >= 0) {
        return lk_error_set(err, LK_ERR_PEER, "rank %d is gone", (int)hub->dead);
    }
    for (uint32_t p = 0; p < hub->size; p++) {
        if (me->arrived[p] <= round) {
            return LK_INPROGRESS;
        }
    }
    size_t n = me->len[round % 2];
    memcpy(out, me->slots[round % 2], n * sizeof *out);
    for (uint32_t p = 0; p < hub->size; p++) {
        const member_t *peer = &hub->members[p];
        if (peer->len[round % 2] != n) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u votes with another length", p);
        }
        for (size_t i = 0; i < n; i++) {
            out[i] = LK_MIN(out[i], peer->slots[round % 2][i]);
        }
    }
    me->out = false;
    return LK_OK;
}

static bool mem_peer_waiting(void *ctx, uint64_t round)
{
    view_t *view = ctx;
    const member_t *me = &view->hub->members[view->rank];
    for (uint32_t p = 0; p < view->hub->size; p++) {
        if (p != view->rank && me->arrived[p] > round) {
            return true;
        }
    }
    return false;
}

static void mem_missing(void *ctx, char *out, size_t room)
{
    view_t *view = ctx;
    const member_t *me = &view->hub->members[view->rank];
    size_t len = 0;
    out[0] = '\0';
    for (uint32_t p = 0; p < view->hub->size; p++) {
        if (me->arrived[p] < me->next && len < room) {
            len += (size_t)snprintf(out + len, room - len, "%s%u", len > 0 ? ", " : "", p);
        }
    }
}

static void mem_abort(void *ctx)
{
    view_t *view = ctx;
    view->hub->members[view->rank].out = false;
}

static const allreduce_ops_t ops = {mem_post, mem_test, mem_peer_waiting, mem_missing, mem_abort};
static const allreduce_ops_t ops_without_doorbell = {mem_post, mem_test, NULL, mem_missing,
                                                     mem_abort};

allreduce_mem_t *allreduce_mem_new(uint32_t size, bool auto_deliver, bool doorbell)
{
    allreduce_mem_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    *self = (allreduce_mem_t){.size = size,
                              .auto_deliver = auto_deliver,
                              .doorbell = doorbell,
                              .dead = -1,
                              .members = calloc(size, sizeof *self->members),
                              .views = calloc(size, sizeof *self->views)};
    CHECK(self->members != NULL && self->views != NULL);
    for (uint32_t r = 0; r < size; r++) {
        self->views[r] = (view_t){self, r};
        self->members[r].arrived = calloc(size, sizeof *self->members[r].arrived);
        CHECK(self->members[r].arrived != NULL);
    }
    return self;
}

void allreduce_mem_destroy(allreduce_mem_t **self_p)
{
    allreduce_mem_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    for (uint32_t r = 0; r < self->size; r++) {
        free(self->members[r].arrived);
    }
    free(self->members);
    free(self->views);
    free(self);
    *self_p = NULL;
}

allreduce_t allreduce_mem_rank(allreduce_mem_t *self, uint32_t rank)
{
    return (allreduce_t){self->doorbell ? &ops : &ops_without_doorbell, &self->views[rank], rank,
                         self->size};
}

bool allreduce_mem_in_flight(const allreduce_mem_t *self, uint32_t from, uint32_t to)
{
    return self->members[to].arrived[from] < self->members[from].next;
}

bool allreduce_mem_ready(const allreduce_mem_t *self, uint32_t rank)
{
    const member_t *me = &self->members[rank];
    bool ready = me->out;
    for (uint32_t p = 0; p < self->size; p++) {
        ready = ready && me->arrived[p] >= me->next;
    }
    return ready;
}

void allreduce_mem_deliver(allreduce_mem_t *self, uint32_t from, uint32_t to)
{
    CHECK(allreduce_mem_in_flight(self, from, to));
    self->members[to].arrived[from]++;
}

void allreduce_mem_reset(allreduce_mem_t *self)
{
    self->dead = -1;
    for (uint32_t r = 0; r < self->size; r++) {
        member_t *m = &self->members[r];
        memset(m->arrived, 0, self->size * sizeof *m->arrived);
        m->next = 0;
        m->out = false;
    }
}

void allreduce_mem_kill(allreduce_mem_t *self, uint32_t rank)
{
    self->dead = rank;
}
