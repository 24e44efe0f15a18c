#include "tests/lib/transfer/nccl_fake.h"
#include "base/check.h"
#include "base/hash.h"
#include "transfer/device/device_host.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORLD_MAX 257u

typedef struct {
    bool is_sum;
    void *buffer;      /* broadcast: in place */
    const float *from; /* sum */
    float *to;
    uint64_t bytes;
} part_t;

typedef struct collective {
    struct collective *next;
    uint64_t number;
    part_t *parts; /* [world_size] */
    bool *came;
    bool done;
} collective_t;

typedef struct group {
    uint8_t id[NCCL_ID_BYTES];
    uint32_t world_size; /* 0: nobody has joined */
    bool joined[WORLD_MAX], odd, aborted;
    uint32_t n_joined;
    collective_t *collectives;
    struct group *next;
} group_t;

struct nccl_comm {
    group_t *group; /* NULL: aborted */
    device_t *device;
    uint32_t rank, refs;
    unsigned lag;
    uint64_t n_called;
};

typedef struct {
    nccl_comm_t *comm;
    uint64_t number;
    part_t part;
} call_t;

nccl_fake_knobs_t nccl_fake_knobs;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static group_t *groups;
static uint32_t n_groups; /* so far: ids differ */
static unsigned n_alive;

static void free_collective(collective_t *c)
{
    free(c->parts);
    free(c->came);
    free(c);
}

static group_t *add_group(const uint8_t id[NCCL_ID_BYTES])
{
    group_t *group = calloc(1, sizeof *group);
    CHECK(group != NULL);
    memcpy(group->id, id, NCCL_ID_BYTES);
    group->next = groups;
    groups = group;
    n_groups++;
    return group;
}

void nccl_fake_know(const uint8_t id[NCCL_ID_BYTES])
{
    pthread_mutex_lock(&lock);
    add_group(id);
    pthread_mutex_unlock(&lock);
}

unsigned nccl_fake_reset(void)
{
    for (group_t *group = groups, *other; group != NULL; group = other) {
        for (collective_t *c = group->collectives, *next; c != NULL; c = next) {
            next = c->next;
            free_collective(c);
        }
        other = group->next;
        free(group);
    }
    groups = NULL;
    n_groups = 0;
    memset(&nccl_fake_knobs, 0, sizeof nccl_fake_knobs);
    unsigned left = n_alive;
    n_alive = 0;
    return left;
}

static lk_status_t fake_load(const char *name, const nccl_library_t **out, lk_error_t *err)
{
    static const nccl_library_t library = {"/lib/fake/libnccl.so.2", "2.99.1"};
    if (atomic_load(&nccl_fake_knobs.no_library)) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "cannot load NCCL: no such file");
    }
    *out = &library;
    return LK_OK;
}

static lk_status_t fake_unique_id(const nccl_library_t *library, uint8_t id[NCCL_ID_BYTES],
                                  lk_error_t *err)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < NCCL_ID_BYTES; i++) {
        id[i] = (uint8_t)lk_hash64(&n_groups, sizeof n_groups, i);
    }
    add_group(id);
    pthread_mutex_unlock(&lock);
    return LK_OK;
}

static lk_status_t fake_init(const nccl_library_t *library, device_t *device,
                             const uint8_t id[NCCL_ID_BYTES], uint32_t world_size, uint32_t rank,
                             nccl_comm_t **out, lk_error_t *err)
{
    lk_status_t st = LK_INPROGRESS;
    pthread_mutex_lock(&lock);
    group_t *group = groups;
    while (group != NULL && memcmp(group->id, id, NCCL_ID_BYTES) != 0) {
        group = group->next;
    }
    if (rank >= world_size || world_size > WORLD_MAX || (group != NULL && group->joined[rank])) {
        st = lk_error_set(err, LK_ERR_IO, "ncclCommInitRank: NCCL 2.99.1: invalid argument");
    } else {
        *out = calloc(1, sizeof **out);
        CHECK(*out != NULL);
        (*out)->group = group; /* NULL: an id that nobody made; the rank waits for ever */
        (*out)->rank = rank;
        (*out)->device = device;
        (*out)->refs = 1;
        (*out)->lag = atomic_load(&nccl_fake_knobs.lag);
        n_alive++;
    }
    if (st >= 0 && group != NULL) {
        /* ranks that don't agree on the size never meet */
        group->odd = group->odd || (group->world_size != 0 && group->world_size != world_size);
        group->world_size = world_size;
        group->joined[rank] = true;
        group->n_joined++;
    }
    pthread_mutex_unlock(&lock);
    return st;
}

static lk_status_t poll_locked(nccl_comm_t *self, lk_error_t *err)
{
    unsigned old = atomic_load(&nccl_fake_knobs.old_version);
    if (self->group == NULL || self->group->odd) {
        return LK_INPROGRESS;
    }
    if (old != 0 && self->group->n_joined > 1 && self->group->joined[old - 1]) {
        return lk_error_set(err, LK_ERR_PEER,
                            "the trainer uses another version of NCCL than this process, which "
                            "loaded 2.99.1. NCCL says: Mismatched NCCL version detected");
    }
    if (self->group->aborted && atomic_load(&nccl_fake_knobs.lost) > 0) {
        return lk_error_set(err, LK_ERR_PEER,
                            "the communicator: NCCL 2.99.1: remote process exited");
    }
    if (self->group->n_joined < self->group->world_size) {
        return LK_INPROGRESS;
    }
    if (self->lag > 0) {
        self->lag--;
        return LK_INPROGRESS;
    }
    return LK_OK;
}

static lk_status_t fake_poll(nccl_comm_t *self, lk_error_t *err)
{
    pthread_mutex_lock(&lock);
    lk_status_t st = poll_locked(self, err);
    pthread_mutex_unlock(&lock);
    return st;
}

/* ---- collectives ---- */

static collective_t *collective_of(group_t *group, uint64_t number)
{
    for (collective_t *c = group->collectives; c != NULL; c = c->next) {
        if (c->number == number) {
            return c;
        }
    }
    collective_t *c = calloc(1, sizeof *c);
    CHECK(c != NULL);
    c->parts = calloc(group->world_size, sizeof *c->parts);
    c->came = calloc(group->world_size, sizeof *c->came);
    CHECK(c->parts != NULL && c->came != NULL);
    c->number = number;
    c->next = group->collectives;
    group->collectives = c;
    return c;
}

static void carry_out(const group_t *group, collective_t *c)
{
    float sum = 0;
    for (uint32_t r = 0; r < group->world_size; r++) {
        const part_t *p = &c->parts[r];
        if (!c->came[r] || p->is_sum != c->parts[0].is_sum || p->bytes != c->parts[0].bytes) {
            return;
        }
        sum += p->is_sum ? *p->from : 0;
    }
    bool torn = !c->parts[0].is_sum && atomic_exchange(&nccl_fake_knobs.torn, false);
    for (uint32_t r = 0; r < group->world_size; r++) {
        const part_t *p = &c->parts[r];
        if (p->is_sum) {
            *p->to = sum;
        } else if (r > 0) {
            memcpy(p->buffer, c->parts[0].buffer, torn ? p->bytes / 2 : p->bytes);
        }
    }
    c->done = true;
}

static void unref(nccl_comm_t *comm)
{
    if (--comm->refs == 0) {
        free(comm);
    }
}

static bool advance(void *ctx)
{
    call_t *call = ctx;
    bool over = true;
    pthread_mutex_lock(&lock);
    group_t *group = call->comm->group;
    if (group != NULL) {
        collective_t *c = collective_of(group, call->number);
        c->parts[call->comm->rank] = call->part;
        c->came[call->comm->rank] = true;
        if (!c->done) {
            carry_out(group, c);
        }
        over = c->done;
    }
    if (over) {
        unref(call->comm);
        free(call);
    }
    pthread_mutex_unlock(&lock);
    return over;
}

static lk_status_t enqueue(nccl_comm_t *self, const part_t *part, device_stream_t *stream,
                           lk_error_t *err)
{
    pthread_mutex_lock(&lock);
    lk_status_t ready = poll_locked(self, err);
    if (ready < 0) {
        pthread_mutex_unlock(&lock);
        return ready;
    }
    CHECKF(ready == LK_OK, "a collective is called before the communicator is ready");
    call_t *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    *call = (call_t){self, self->n_called++, *part};
    self->refs++;
    self->lag = atomic_load(&nccl_fake_knobs.lag);
    bool lagging = self->lag > 0;
    pthread_mutex_unlock(&lock);
    LK_RETURN_IF_ERROR(device_host_call(self->device, stream, advance, call, err));
    return lagging ? LK_INPROGRESS : LK_OK;
}

static lk_status_t fake_broadcast(nccl_comm_t *self, void *buffer, uint64_t count, lk_dtype_t dtype,
                                  device_stream_t *stream, lk_error_t *err)
{
    CHECK(count > 0);
    part_t part = {.buffer = buffer, .bytes = count * dtype_bytes(dtype)};
    return enqueue(self, &part, stream, err);
}

static lk_status_t fake_all_reduce(nccl_comm_t *self, const float *from, float *to,
                                   device_stream_t *stream, lk_error_t *err)
{
    part_t part = {.is_sum = true, .from = from, .to = to, .bytes = sizeof *to};
    return enqueue(self, &part, stream, err);
}

static void fake_abort(nccl_comm_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    pthread_mutex_lock(&lock);
    group_t *group = (*self_p)->group;
    if (group != NULL) {
        group->aborted = true;
        /* what it has not carried out is nobody's any more: its memory may go */
        for (collective_t *c = group->collectives; c != NULL; c = c->next) {
            c->came[(*self_p)->rank] = c->done && c->came[(*self_p)->rank];
        }
    }
    (*self_p)->group = NULL;
    unref(*self_p);
    n_alive--;
    pthread_mutex_unlock(&lock);
    *self_p = NULL;
}

static size_t fake_ending(void)
{
    return atomic_load(&nccl_fake_knobs.ending);
}

const nccl_comm_ops_t nccl_fake_ops = {
    .name = "fake",
    .load = fake_load,
    .unique_id = fake_unique_id,
    .init = fake_init,
    .poll = fake_poll,
    .broadcast = fake_broadcast,
    .all_reduce = fake_all_reduce,
    .abort = fake_abort,
    .ending = fake_ending,
};
