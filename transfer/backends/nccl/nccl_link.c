#include "transfer/backends/nccl/nccl_link.h"
#include "base/check.h"
#include "base/log.h"

#include <poll.h>
#include <string.h>

#define ABORT_WAIT_MS 5000

/* ---- streams, events, buffers ---- */

static void free_slots(nccl_link_t *self)
{
    for (uint32_t i = 0; i < self->n_slots; i++) {
        self->device->ops->free(self->device, self->slots[i]);
        self->slots[i] = NULL;
    }
    self->n_slots = 0;
    self->slot_bytes = 0;
}

static void free_parts(nccl_link_t *self)
{
    device_t *device = self->device;
    free_slots(self);
    for (size_t i = 0; i < NCCL_WINDOW; i++) {
        device->ops->event_destroy(device, self->wire_done[i]);
        device->ops->event_destroy(device, self->local_done[i]);
    }
    for (size_t i = 0; i < NCCL_SLOTS_MAX; i++) {
        device->ops->event_destroy(device, self->slot_free[i]);
    }
    device->ops->stream_destroy(device, self->wire);
    device->ops->stream_destroy(device, self->local);
    device->ops->free(device, self->warm);
}

static lk_status_t make_parts(nccl_link_t *self, lk_error_t *err)
{
    device_t *device = self->device;
    const device_ops_t *ops = device->ops;
    void *warm = NULL;
    LK_RETURN_IF_ERROR(ops->urgent_stream_new(device, &self->wire, err));
    LK_RETURN_IF_ERROR(ops->stream_new(device, &self->local, err));
    for (size_t i = 0; i < NCCL_WINDOW; i++) {
        LK_RETURN_IF_ERROR(ops->event_new(device, &self->wire_done[i], err));
        LK_RETURN_IF_ERROR(ops->event_new(device, &self->local_done[i], err));
    }
    for (size_t i = 0; i < NCCL_SLOTS_MAX; i++) {
        LK_RETURN_IF_ERROR(ops->event_new(device, &self->slot_free[i], err));
    }
    LK_RETURN_IF_ERROR(ops->alloc(device, 2 * sizeof *self->warm, &warm, err));
    self->warm = warm;
    return LK_OK;
}

lk_status_t nccl_link_open(nccl_link_t *self, const nccl_comm_ops_t *ops, const char *library,
                           device_t *device, const lk_env_t *env, uint64_t no_progress_ns,
                           lk_error_t *err)
{
    const nccl_library_t *loaded = NULL;
    LK_RETURN_IF_ERROR(ops->load(library, &loaded, err));
    if (self->device == NULL) {
        nccl_link_t fresh = {
            .ops = ops, .device = device, .env = env, .abort_wait_ms = ABORT_WAIT_MS};
        lk_status_t st = make_parts(&fresh, err);
        if (st < 0) {
            free_parts(&fresh);
            return st;
        }
        *self = fresh;
    }
    CHECK(self->device == device);
    self->library = loaded;
    self->no_progress_ns = no_progress_ns;
    nccl_link_touch(self);
    return LK_OK;
}

void nccl_link_fini(nccl_link_t *self)
{
    if (self->device != NULL) {
        nccl_link_abort(self);
        free_parts(self);
    }
    memset(self, 0, sizeof *self);
}

lk_status_t nccl_link_stage(nccl_link_t *self, uint32_t slots, uint64_t bytes, lk_error_t *err)
{
    slots = LK_MAX(LK_MIN(slots, NCCL_SLOTS_MAX), 1u);
    if (bytes == 0 || (slots <= self->n_slots && bytes <= self->slot_bytes)) {
        return LK_OK;
    }
    bytes = LK_MAX(bytes, self->slot_bytes);
    free_slots(self);
    lk_status_t st = LK_OK;
    while (self->n_slots < slots && st == LK_OK) {
        st = self->device->ops->alloc(self->device, bytes, &self->slots[self->n_slots], err);
        self->n_slots += st == LK_OK;
    }
    if (self->n_slots == 0) {
        return lk_error_prefix(err, "staging buffers for received tensors");
    }
    self->slot_bytes = bytes; /* fewer than asked for: less overlap, same result */
    return LK_OK;
}

/* ---- progress ---- */

lk_status_t nccl_link_clock(nccl_link_t *self, nccl_times_t *times, size_t done, size_t next,
                            lk_error_t *err)
{
    lk_status_t st = LK_OK;
    size_t before = times->n_wire;
    times->n_wire = LK_MAX(times->n_wire, done); /* their events may serve later buckets by now */
    while (times->n_wire < next && st == LK_OK) {
        device_event_t *event = self->wire_done[times->n_wire % NCCL_WINDOW];
        st = self->device->ops->event_test(self->device, event, err);
        times->n_wire += st == LK_OK;
    }
    uint64_t now = lk_env_now_ns(self->env);
    times->called_ns = times->called_ns == 0 && next > 0 ? now : times->called_ns;
    times->first_ns = times->first_ns == 0 && times->n_wire > 0 ? now : times->first_ns;
    times->wire_ns = times->n_wire > before ? now : times->wire_ns;
    return st < 0 ? st : LK_OK;
}

static double ms_since(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (double)(to_ns - from_ns) / 1e6 : 0;
}

void nccl_link_log_times(const nccl_link_t *self, nccl_times_t *times, const char *what,
                         uint64_t bytes)
{
    times->done_ns = lk_env_now_ns(self->env);
    LK_DEBUG("NCCL: %s: %.6f GB in %zu buckets; ms from the beginning: first broadcast enqueued "
             "%.3f, run %.3f, last broadcast run %.3f, all done %.3f",
             what, (double)bytes / 1e9, times->n_wire, ms_since(times->begun_ns, times->called_ns),
             ms_since(times->begun_ns, times->first_ns), ms_since(times->begun_ns, times->wire_ns),
             ms_since(times->begun_ns, times->done_ns));
}

void nccl_link_touch(nccl_link_t *self)
{
    self->progress_ns = lk_env_now_ns(self->env);
}

bool nccl_link_silent(const nccl_link_t *self, double *silent_s)
{
    uint64_t silent = lk_env_now_ns(self->env) - self->progress_ns;
    *silent_s = (double)silent / 1e9;
    return silent >= self->no_progress_ns;
}

/* ---- up ---- */

void nccl_link_start(nccl_link_t *self, const uint8_t id[NCCL_ID_BYTES], uint32_t world_size,
                     uint32_t rank)
{
    CHECK(self->device != NULL && self->comm == NULL);
    memcpy(self->id, id, NCCL_ID_BYTES);
    self->world_size = world_size;
    self->rank = rank;
    self->called = false;
    self->phase = NCCL_LINK_OLD_ENDS;
    nccl_link_touch(self);
}

static lk_status_t form(nccl_link_t *self, lk_error_t *err)
{
    self->phase = NCCL_LINK_FORMS;
    if (self->comm == NULL) {
        return self->ops->init(self->library, self->device, self->id, self->world_size, self->rank,
                               &self->comm, err);
    }
    return self->ops->poll(self->comm, err);
}

static lk_status_t warm_up(nccl_link_t *self, lk_error_t *err)
{
    device_t *device = self->device;
    if (self->phase != NCCL_LINK_WARMS_UP) {
        self->phase = NCCL_LINK_WARMS_UP;
        LK_RETURN_IF_ERROR(
            device->ops->zero(device, self->warm, 2 * sizeof *self->warm, self->wire, err));
        lk_status_t st =
            self->ops->all_reduce(self->comm, self->warm, self->warm + 1, self->wire, err);
        if (st != LK_OK) {
            return st;
        }
    }
    lk_status_t st = self->ops->poll(self->comm, err);
    if (st == LK_OK && !self->called) {
        st = device->ops->event_record(device, self->wire_done[0], self->wire, err);
        self->called = st == LK_OK;
    }
    return st == LK_OK ? device->ops->event_test(device, self->wire_done[0], err) : st;
}

static lk_status_t advance(nccl_link_t *self, lk_error_t *err)
{
    lk_status_t st = LK_OK;
    if (self->phase == NCCL_LINK_OLD_ENDS) {
        st = self->ops->ending() > 0 ? LK_INPROGRESS : form(self, err);
    } else if (self->phase == NCCL_LINK_FORMS) {
        st = form(self, err);
    } else {
        return warm_up(self, err);
    }
    if (st == LK_OK) {
        nccl_link_touch(self);
        st = warm_up(self, err);
    }
    return st;
}

lk_status_t nccl_link_step(nccl_link_t *self, lk_error_t *err)
{
    CHECK(self->phase != NCCL_LINK_DOWN);
    if (self->phase == NCCL_LINK_UP) {
        return LK_OK;
    }
    lk_status_t st = advance(self, err);
    double silent_s;
    if (st == LK_OK) {
        self->phase = NCCL_LINK_UP;
        return LK_OK;
    }
    if (st == LK_INPROGRESS && nccl_link_silent(self, &silent_s)) {
        static const char *const waits[] = {
            [NCCL_LINK_OLD_ENDS] = "an older, aborted communicator did not end",
            [NCCL_LINK_FORMS] = "not all ranks of the communicator came",
            [NCCL_LINK_WARMS_UP] = "not all ranks made the warm-up all-reduce",
        };
        st = lk_error_set(err, LK_ERR_TIMEOUT,
                          "rank %u of %u (NCCL %s, %s): %s within %.1f s; is world_size right, and "
                          "does the trainer (rank 0) still live?",
                          self->rank, self->world_size, self->library->version, self->library->path,
                          waits[self->phase], silent_s);
    }
    if (st < 0) {
        nccl_link_abort(self);
    }
    return st;
}

/* ---- down ---- */

static bool quiet(nccl_link_t *self)
{
    lk_error_t ignored = LK_ERROR_INIT; /* a device that has failed writes nothing more, either */
    const device_ops_t *ops = self->device->ops;
    return self->ops->ending() == 0 &&
           ops->stream_test(self->device, self->wire, &ignored) != LK_INPROGRESS &&
           ops->stream_test(self->device, self->local, &ignored) != LK_INPROGRESS;
}

void nccl_link_abort(nccl_link_t *self)
{
    if (self->device == NULL || (self->comm == NULL && self->phase == NCCL_LINK_DOWN)) {
        return;
    }
    self->ops->abort(&self->comm);
    self->phase = NCCL_LINK_DOWN;
    int left_ms = self->abort_wait_ms;
    while (!quiet(self) && left_ms-- > 0) {
        (void)poll(NULL, 0, 1); /* a device has nothing to wait on */
    }
    if (left_ms < 0) {
        LK_ERROR("NCCL: an aborted communicator (rank %u of %u) still runs after %d ms", self->rank,
                 self->world_size, self->abort_wait_ms);
    }
}
