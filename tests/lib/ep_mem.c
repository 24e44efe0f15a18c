#include "tests/lib/ep_mem.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define DEPTH 2 /* a peer can be one exchange ahead */

typedef struct {
    uint64_t tag;
    void *data;
    size_t len;
} message_t;

/* Messages from one rank to another, oldest first. */
typedef struct {
    message_t items[DEPTH];
    uint32_t n;
} queue_t;

typedef struct {
    ep_mem_t *group;
    uint32_t rank;
    bool posted, dead;
    uint64_t tag, completed;
    message_t *taken; /* [ranks]: what the last test handed out */
} member_t;

struct ep_mem {
    uint32_t ranks;
    member_t *members;
    queue_t *queues; /* [from * ranks + to] */
};

static queue_t *queue(const ep_mem_t *self, uint32_t from, uint32_t to)
{
    return &self->queues[from * self->ranks + to];
}

static void release_taken(member_t *m)
{
    for (uint32_t r = 0; r < m->group->ranks; r++) {
        free(m->taken[r].data);
        m->taken[r] = (message_t){0};
    }
}

/* Drops the messages with this tag. */
static void drop(queue_t *q, uint64_t tag)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < q->n; i++) {
        if (q->items[i].tag == tag) {
            free(q->items[i].data);
        } else {
            q->items[kept++] = q->items[i];
        }
    }
    q->n = kept;
}

static lk_status_t mem_post(void *ctx, uint64_t tag, const ep_buf_t *send, lk_error_t *err)
{
    member_t *m = ctx;
    ep_mem_t *self = m->group;
    if (m->posted) {
        return lk_error_set(err, LK_ERR_STATE, "an exchange is out already");
    }
    release_taken(m);
    for (uint32_t r = 0; r < self->ranks; r++) {
        if (r == m->rank) {
            continue;
        }
        queue_t *q = queue(self, m->rank, r);
        CHECK(q->n < DEPTH);
        /* an exact-size copy, so that a sanitizer sees reads past the end */
        message_t msg = {.tag = tag, .data = malloc(send[r].len), .len = send[r].len};
        CHECK(msg.data != NULL || msg.len == 0);
        if (msg.len > 0) {
            memcpy(msg.data, send[r].data, msg.len);
        }
        q->items[q->n++] = msg;
    }
    m->posted = true;
    m->tag = tag;
    return LK_OK;
}

static lk_status_t mem_test(void *ctx, ep_buf_t *recv, lk_error_t *err)
{
    member_t *m = ctx;
    ep_mem_t *self = m->group;
    if (!m->posted) {
        return lk_error_set(err, LK_ERR_STATE, "no exchange was posted");
    }
    bool all = true;
    for (uint32_t r = 0; r < self->ranks; r++) {
        const queue_t *q = queue(self, r, m->rank);
        if (r == m->rank) {
            continue;
        }
        if (q->n > 0 && q->items[0].tag != m->tag) {
            return lk_error_set(err, LK_ERR_PEER,
                                "rank %u is out of step: exchange %llx, expected %llx", r,
                                (unsigned long long)q->items[0].tag, (unsigned long long)m->tag);
        }
        if (q->n == 0 && self->members[r].dead) {
            return lk_error_set(err, LK_ERR_PEER, "rank %u is gone", r);
        }
        all &= q->n > 0;
    }
    if (!all) {
        return LK_INPROGRESS;
    }
    for (uint32_t r = 0; r < self->ranks; r++) {
        recv[r] = (ep_buf_t){0};
        if (r != m->rank) {
            queue_t *q = queue(self, r, m->rank);
            m->taken[r] = q->items[0];
            memmove(q->items, q->items + 1, --q->n * sizeof *q->items);
            recv[r] = (ep_buf_t){.data = m->taken[r].data, .len = m->taken[r].len};
        }
    }
    m->posted = false;
    m->completed++;
    return LK_OK;
}

/* Takes back what peers have not taken and forgets what they sent to this exchange. */
static void mem_abort(void *ctx)
{
    member_t *m = ctx;
    ep_mem_t *self = m->group;
    if (!m->posted) {
        return;
    }
    m->posted = false;
    for (uint32_t r = 0; r < self->ranks; r++) {
        drop(queue(self, m->rank, r), m->tag);
        drop(queue(self, r, m->rank), m->tag);
    }
}

ep_mem_t *ep_mem_new(uint32_t ranks)
{
    ep_mem_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->ranks = ranks;
    self->members = calloc(ranks, sizeof *self->members);
    self->queues = calloc((size_t)ranks * ranks, sizeof *self->queues);
    CHECK(self->members != NULL && self->queues != NULL);
    for (uint32_t r = 0; r < ranks; r++) {
        self->members[r] = (member_t){.group = self, .rank = r};
        self->members[r].taken = calloc(ranks, sizeof(message_t));
        CHECK(self->members[r].taken != NULL);
    }
    return self;
}

void ep_mem_destroy(ep_mem_t **self_p)
{
    ep_mem_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    for (uint32_t r = 0; r < self->ranks; r++) {
        release_taken(&self->members[r]);
        free(self->members[r].taken);
    }
    for (uint32_t i = 0; i < self->ranks * self->ranks; i++) {
        for (uint32_t j = 0; j < self->queues[i].n; j++) {
            free(self->queues[i].items[j].data);
        }
    }
    free(self->members);
    free(self->queues);
    free(self);
}

ep_t ep_mem_rank(ep_mem_t *self, uint32_t rank)
{
    static const ep_ops_t ops = {.post = mem_post, .test = mem_test, .abort = mem_abort};
    CHECK(rank < self->ranks);
    return (ep_t){.ops = &ops, .ctx = &self->members[rank], .rank = rank, .size = self->ranks};
}

void ep_mem_kill(ep_mem_t *self, uint32_t rank)
{
    self->members[rank].dead = true;
}

void ep_mem_reset(ep_mem_t *self)
{
    for (uint32_t from = 0; from < self->ranks; from++) {
        self->members[from].posted = self->members[from].dead = false;
        for (uint32_t to = 0; to < self->ranks; to++) {
            queue_t *q = queue(self, from, to);
            while (q->n > 0) {
                free(q->items[--q->n].data);
            }
        }
    }
}

size_t ep_mem_in_flight(const ep_mem_t *self)
{
    size_t n = 0;
    for (uint32_t i = 0; i < self->ranks * self->ranks; i++) {
        n += self->queues[i].n;
    }
    return n;
}

uint64_t ep_mem_completed(const ep_mem_t *self, uint32_t rank)
{
    return self->members[rank].completed;
}
