#include "transfer/device/device_host.h"

#include "base/check.h"
#include "transfer/device/unpack_plan.h"
#include "transfer/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNWRITTEN 0xA5 /* memory that nobody has written */
#define ALIGNMENT 512u

typedef enum { WORK_COPY, WORK_ZERO, WORK_UNPACK, WORK_RECORD, WORK_WAIT, WORK_CALL } work_kind_t;

typedef struct {
    work_kind_t kind;
    void *dst;
    const void *src;
    uint64_t bytes;
    device_piece_t piece;
    device_event_t *event;
    uint64_t turn; /* of the event */
    bool (*call)(void *ctx);
    void *ctx;
} work_t;

struct device_event {
    uint64_t recorded, done;
    uint32_t users; /* owners, and work that names it; freed with the last */
};

struct device_stream {
    device_stream_t *next; /* of all the device has */
    work_t *work;
    size_t head, n, room; /* work[head .. n) is to be done */
};

typedef struct {
    device_t base;
    device_stream_t *streams;
    bool broken;
} device_host_t;

static device_host_t *of(device_t *base)
{
    return (device_host_t *)base;
}

/* ---- memory ---- */

/* The machine's; more is never there, whatever a kernel that overcommits says. */
static uint64_t physical_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : INT64_MAX / 2;
}

/* The size stands before the block. */
static lk_status_t host_alloc(device_t *base, uint64_t bytes, void **out, lk_error_t *err)
{
    uint64_t total = (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    char *block = bytes <= physical_memory() ? aligned_alloc(ALIGNMENT, total) : NULL;
    if (block == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for %llu bytes", base->text,
                            (unsigned long long)bytes);
    }
    memcpy(block, &bytes, sizeof bytes);
    memset(block + ALIGNMENT, UNWRITTEN, bytes); /* the same in every run that is replayed */
    base->allocations++;
    base->allocated += bytes;
    *out = block + ALIGNMENT;
    return LK_OK;
}

static void run_all(device_host_t *self);

static void host_free(device_t *base, void *ptr)
{
    if (ptr != NULL) {
        run_all(of(base));
        char *block = (char *)ptr - ALIGNMENT;
        uint64_t bytes;
        memcpy(&bytes, block, sizeof bytes);
        base->allocated -= bytes;
        free(block);
    }
}

static lk_status_t host_alloc_host(device_t *base, uint64_t bytes, void **out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(host_alloc(base, bytes, out, err));
    base->allocated -= bytes;
    return LK_OK;
}

static void host_free_host(device_t *base, void *ptr)
{
    if (ptr != NULL) {
        uint64_t bytes;
        memcpy(&bytes, (char *)ptr - ALIGNMENT, sizeof bytes);
        base->allocated += bytes;
        host_free(base, ptr);
    }
}

/* ---- work ---- */

static lk_status_t state_of(const device_host_t *self, lk_error_t *err)
{
    return self->broken
               ? lk_error_set(err, LK_ERR_INTERNAL, "%s: the device failed", self->base.text)
               : LK_OK;
}

static lk_status_t enqueue(device_t *base, device_stream_t *stream, const work_t *work,
                           lk_error_t *err)
{
    LK_RETURN_IF_ERROR(state_of(of(base), err));
    if (stream->head == stream->n) {
        stream->head = stream->n = 0;
    }
    if (stream->n == stream->room) {
        size_t room = LK_MAX(2 * stream->room, (size_t)64);
        work_t *grown = realloc(stream->work, room * sizeof *grown);
        if (grown == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for work", base->text);
        }
        stream->work = grown;
        stream->room = room;
    }
    if (work->event != NULL) {
        work->event->users++;
    }
    stream->work[stream->n++] = *work;
    return LK_OK;
}

static void drop_event(device_event_t *event)
{
    if (--event->users == 0) {
        free(event);
    }
}

static void unpack_rows(const device_piece_t *piece)
{
    size_t from_size = dtype_bytes(piece->src_dtype), to_size = dtype_bytes(piece->dst_dtype);
    digest_t digest = {{0}};
    for (uint64_t row = 0; row < piece->rows; row++) {
        const char *from = (const char *)piece->src + row * piece->cols * from_size;
        lk_status_t status = LK_OK;
        if (piece->lanes != NULL) {
            status = digest_add(&digest, from, piece->src_dtype, piece->dst_dtype, piece->cols,
                                piece->first + row * piece->cols);
        }
        CHECK(status == LK_OK); /* unpack_check */
        if (piece->dst != NULL) {
            char *to = (char *)piece->dst + row * piece->dst_pitch * to_size;
            status = dtype_convert(to, piece->dst_dtype, from, piece->src_dtype, piece->cols);
            CHECK(status == LK_OK);
        }
    }
    if (piece->lanes != NULL) {
        piece->lanes[0] += digest.lane[0];
        piece->lanes[1] += digest.lane[1];
    }
}

/* False if it has to wait. */
static bool run_one(const work_t *work)
{
    switch (work->kind) {
    case WORK_COPY:
        memmove(work->dst, work->src, work->bytes);
        break;
    case WORK_ZERO:
        memset(work->dst, 0, work->bytes);
        break;
    case WORK_UNPACK:
        unpack_rows(&work->piece);
        break;
    case WORK_RECORD:
        work->event->done = work->turn;
        drop_event(work->event);
        break;
    case WORK_WAIT:
        if (work->event->done < work->turn) {
            return false;
        }
        drop_event(work->event);
        break;
    case WORK_CALL:
        return work->call(work->ctx);
    }
    return true;
}

static void run_all(device_host_t *self)
{
    bool moved = !self->broken;
    while (moved) {
        moved = false;
        for (device_stream_t *s = self->streams; s != NULL; s = s->next) {
            while (s->head < s->n && run_one(&s->work[s->head])) {
                s->head++;
                moved = true;
            }
        }
    }
}

/* ---- streams and events ---- */

static lk_status_t host_stream_new(device_t *base, device_stream_t **out, lk_error_t *err)
{
    device_stream_t *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for a stream", base->text);
    }
    stream->next = of(base)->streams;
    of(base)->streams = stream;
    *out = stream;
    return LK_OK;
}

static void host_stream_destroy(device_t *base, device_stream_t *stream)
{
    if (stream == NULL) {
        return;
    }
    run_all(of(base));
    device_stream_t **at = &of(base)->streams;
    while (*at != stream) {
        at = &(*at)->next;
    }
    *at = stream->next;
    for (; stream->head < stream->n; stream->head++) { /* of a device that broke, or that waits */
        if (stream->work[stream->head].event != NULL) {
            drop_event(stream->work[stream->head].event);
        }
    }
    free(stream->work);
    free(stream);
}

static lk_status_t host_stream_test(device_t *base, device_stream_t *stream, lk_error_t *err)
{
    run_all(of(base));
    LK_RETURN_IF_ERROR(state_of(of(base), err));
    return stream->head == stream->n ? LK_OK : LK_INPROGRESS;
}

static lk_status_t host_event_new(device_t *base, device_event_t **out, lk_error_t *err)
{
    device_event_t *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for an event", base->text);
    }
    event->users = 1;
    *out = event;
    return LK_OK;
}

static void host_event_destroy(device_t *base, device_event_t *event)
{
    if (event != NULL) {
        drop_event(event);
    }
}

static lk_status_t host_event_record(device_t *base, device_event_t *event, device_stream_t *stream,
                                     lk_error_t *err)
{
    work_t work = {.kind = WORK_RECORD, .event = event, .turn = event->recorded + 1};
    LK_RETURN_IF_ERROR(enqueue(base, stream, &work, err));
    event->recorded++;
    return LK_OK;
}

static lk_status_t host_stream_wait(device_t *base, device_stream_t *stream, device_event_t *event,
                                    lk_error_t *err)
{
    work_t work = {.kind = WORK_WAIT, .event = event, .turn = event->recorded};
    return enqueue(base, stream, &work, err);
}

static lk_status_t host_event_test(device_t *base, device_event_t *event, lk_error_t *err)
{
    run_all(of(base));
    LK_RETURN_IF_ERROR(state_of(of(base), err));
    return event->done == event->recorded ? LK_OK : LK_INPROGRESS;
}

static lk_status_t host_copy(device_t *base, void *dst, const void *src, uint64_t bytes,
                             device_stream_t *stream, lk_error_t *err)
{
    work_t work = {.kind = WORK_COPY, .dst = dst, .src = src, .bytes = bytes};
    return bytes > 0 ? enqueue(base, stream, &work, err) : state_of(of(base), err);
}

static lk_status_t host_zero(device_t *base, void *dst, uint64_t bytes, device_stream_t *stream,
                             lk_error_t *err)
{
    work_t work = {.kind = WORK_ZERO, .dst = dst, .bytes = bytes};
    return bytes > 0 ? enqueue(base, stream, &work, err) : state_of(of(base), err);
}

static lk_status_t host_unpack(device_t *base, const device_piece_t *pieces, size_t n,
                               device_stream_t *stream, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(unpack_check(pieces, n, err));
    for (size_t i = 0; i < n; i++) {
        work_t work = {.kind = WORK_UNPACK, .piece = pieces[i]};
        LK_RETURN_IF_ERROR(enqueue(base, stream, &work, err));
    }
    return state_of(of(base), err);
}

lk_status_t device_host_call(device_t *base, device_stream_t *stream, bool (*call)(void *ctx),
                             void *ctx, lk_error_t *err)
{
    work_t work = {.kind = WORK_CALL, .call = call, .ctx = ctx};
    return enqueue(base, stream, &work, err);
}

static lk_status_t host_make_current(device_t *base, lk_error_t *err)
{
    return LK_OK;
}

/* ---- exports ---- */

/* Of all host devices of the process. */
static struct {
    void *memory; /* either this */
    uint64_t bytes;
    device_event_t *event; /* or that */
    bool open;
} exports[64];

static const uint64_t export_magic = 0x74726f70786e6b6cull;

static void make_handle(size_t slot, uint8_t handle[DEVICE_IPC_HANDLE_SIZE])
{
    uint64_t words[2] = {export_magic, slot};
    memset(handle, 0, DEVICE_IPC_HANDLE_SIZE);
    memcpy(handle, words, sizeof words);
}

static size_t free_export(void)
{
    size_t slot = 0;
    while (exports[slot].memory != NULL || exports[slot].event != NULL) {
        slot++;
        CHECK(slot < LK_ARRAY_LEN(exports));
    }
    return slot;
}

void device_host_export(void *memory, uint64_t bytes, uint8_t handle[DEVICE_IPC_HANDLE_SIZE])
{
    size_t slot = free_export();
    exports[slot].memory = memory;
    exports[slot].bytes = bytes;
    make_handle(slot, handle);
}

void device_host_export_event(device_event_t *event, uint8_t handle[DEVICE_IPC_HANDLE_SIZE])
{
    size_t slot = free_export();
    exports[slot].event = event;
    make_handle(slot, handle);
}

unsigned device_host_open_exports(void)
{
    unsigned n = 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(exports); i++) {
        n += exports[i].open;
    }
    return n;
}

unsigned device_host_unexport(void)
{
    unsigned n = device_host_open_exports();
    memset(exports, 0, sizeof exports);
    return n;
}

static bool find_export(const uint8_t handle[DEVICE_IPC_HANDLE_SIZE], size_t *slot)
{
    uint64_t words[2];
    memcpy(words, handle, sizeof words);
    *slot = (size_t)words[1];
    return words[0] == export_magic && words[1] < LK_ARRAY_LEN(exports);
}

static lk_status_t host_ipc_open(device_t *base, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                                 void **out, uint64_t *bytes, lk_error_t *err)
{
    size_t slot;
    if (!find_export(handle, &slot) || exports[slot].memory == NULL) {
        return lk_error_set(err, LK_ERR_IO, "%s: no memory is exported under this handle",
                            base->text);
    }
    CHECKF(!exports[slot].open, "a handle is opened once at a time");
    exports[slot].open = true;
    *bytes = exports[slot].bytes;
    *out = exports[slot].memory;
    return LK_OK;
}

static void host_ipc_close(device_t *base, void *ptr)
{
    run_all(of(base));
    for (size_t i = 0; i < LK_ARRAY_LEN(exports); i++) {
        if (ptr != NULL && exports[i].memory == ptr) {
            exports[i].open = false;
        }
    }
}

static lk_status_t host_ipc_event(device_t *base, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                                  device_event_t **out, lk_error_t *err)
{
    size_t slot;
    if (!find_export(handle, &slot) || exports[slot].event == NULL) {
        return lk_error_set(err, LK_ERR_IO, "%s: no event is exported under this handle",
                            base->text);
    }
    *out = exports[slot].event;
    (*out)->users++;
    return LK_OK;
}

static void host_close(device_t *base)
{
    CHECK(of(base)->streams == NULL);
    free(base);
}

static const device_ops_t host_ops = {
    .abi_version = DEVICE_OPS_ABI_VERSION,
    .name = "host",
    .alloc = host_alloc,
    .free = host_free,
    .alloc_host = host_alloc_host,
    .free_host = host_free_host,
    .stream_new = host_stream_new,
    .urgent_stream_new = host_stream_new,
    .stream_destroy = host_stream_destroy,
    .stream_test = host_stream_test,
    .event_new = host_event_new,
    .event_destroy = host_event_destroy,
    .event_record = host_event_record,
    .stream_wait = host_stream_wait,
    .event_test = host_event_test,
    .copy = host_copy,
    .zero = host_zero,
    .unpack = host_unpack,
    .make_current = host_make_current,
    .ipc_open = host_ipc_open,
    .ipc_close = host_ipc_close,
    .ipc_event = host_ipc_event,
    .close = host_close,
};

lk_status_t device_host_open(device_t **out, lk_error_t *err)
{
    device_host_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for a device");
    }
    self->base.ops = &host_ops;
    snprintf(self->base.text, sizeof self->base.text, "host memory");
    snprintf(self->base.uuid, sizeof self->base.uuid, "00000000-0000-0000-0000-000000000000");
    *out = &self->base;
    return LK_OK;
}

void device_host_break(device_t *device)
{
    of(device)->broken = true;
}
