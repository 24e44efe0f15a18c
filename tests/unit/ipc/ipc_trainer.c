#include "tests/unit/ipc/ipc_trainer.h"

#include "base/base64.h"
#include "base/buf.h"
#include "base/check.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILE_BYTES (64 + IPC_COUNTERS * sizeof(int64_t))

/* ---- pickle, protocol 4 ---- */

static void op(lk_buf_t *out, char code)
{
    lk_buf_append(out, &code, 1);
}

static void raw(lk_buf_t *out, const void *bytes, size_t n)
{
    lk_buf_append(out, bytes, n);
}

static void text(lk_buf_t *out, const char *s)
{
    uint8_t n = (uint8_t)strlen(s);
    op(out, (char)0x8c);
    raw(out, &n, 1);
    raw(out, s, n);
}

static void bytes(lk_buf_t *out, const void *data, size_t len)
{
    uint8_t n = (uint8_t)len;
    op(out, 'C');
    raw(out, &n, 1);
    raw(out, data, len);
}

static void integer(lk_buf_t *out, int64_t x)
{
    uint8_t n = 8;
    op(out, (char)0x8a); /* LONG1 */
    raw(out, &n, 1);
    raw(out, &x, 8);
}

static void global(lk_buf_t *out, const char *module, const char *name)
{
    text(out, module);
    text(out, name);
    op(out, (char)0x93);
}

static void tuple(lk_buf_t *out, const int64_t *items, uint32_t n)
{
    op(out, '(');
    for (uint32_t i = 0; i < n; i++) {
        integer(out, items[i]);
    }
    op(out, 't');
}

static void shape(lk_buf_t *out, const ipc_args_t *a)
{
    if (a->plain_shape) {
        tuple(out, a->shape, a->ndim);
        return;
    }
    global(out, "torch", "Size");
    op(out, '(');
    tuple(out, a->shape, a->ndim);
    op(out, 't');
    op(out, 'R');
}

static void arguments(lk_buf_t *out, const ipc_args_t *a)
{
    if (a->with_function) {
        op(out, '(');
        global(out, "torch.multiprocessing.reductions", "rebuild_cuda_tensor");
    }
    op(out, '(');
    global(out, "torch", "Tensor");
    shape(out, a);
    tuple(out, a->stride, a->ndim);
    integer(out, a->offset);
    global(out, "torch.storage", "TypedStorage");
    global(out, "torch", a->dtype);
    integer(out, 3);
    bytes(out, a->handle, a->handle_len);
    integer(out, a->storage_bytes);
    integer(out, a->storage_offset);
    op(out, (char)0x89);
    bytes(out, a->counter_name, strlen(a->counter_name));
    integer(out, a->counter);
    bytes(out, a->event, a->event_len);
    op(out, (char)(a->wait ? 0x88 : 0x89));
    op(out, 't');
    if (a->with_function) {
        op(out, 't');
    }
}

static void dict(lk_buf_t *out, const ipc_args_t *a, const char *uuid)
{
    op(out, '}');
    text(out, uuid);
    arguments(out, a);
    op(out, 's');
}

static char *finish(lk_buf_t *out)
{
    op(out, '.');
    char *encoded = malloc(BASE64_SIZE(out->len));
    CHECK(encoded != NULL);
    base64_encode(out->data, out->len, encoded);
    lk_buf_fini(out);
    return encoded;
}

static void begin(lk_buf_t *out)
{
    lk_buf_init(out, 0); /* no limit */
    raw(out, "\x80\x04", 2);
}

char *ipc_pickle_list(const ipc_args_t *args, size_t n, const char *uuid)
{
    lk_buf_t out;
    begin(&out);
    raw(&out, "](", 2);
    for (size_t i = 0; i < n; i++) {
        dict(&out, &args[i], uuid);
    }
    op(&out, 'e');
    return finish(&out);
}

char *ipc_pickle_dict(const ipc_args_t *args, const char *uuid)
{
    lk_buf_t out;
    begin(&out);
    dict(&out, args, uuid);
    return finish(&out);
}

ipc_args_t ipc_args(const char *dtype, uint32_t ndim, const uint64_t *dims,
                    const uint8_t handle[DEVICE_IPC_HANDLE_SIZE], uint64_t offset,
                    const char *counter_name, uint32_t counter)
{
    ipc_args_t a = {.dtype = dtype, .ndim = ndim, .counter = counter, .event_len = 64};
    lk_dtype_t type = LK_DTYPE_U8;
    bool known = dtype_parse(dtype, &type);
    CHECK(known);
    int64_t step = 1;
    for (uint32_t i = ndim; i > 0; i--) {
        a.shape[i - 1] = (int64_t)dims[i - 1];
        a.stride[i - 1] = step;
        step *= (int64_t)dims[i - 1];
    }
    a.storage_bytes = step * (int64_t)dtype_bytes(type);
    a.storage_offset = (int64_t)offset;
    memcpy(a.handle,
           "\x02"
           "c",
           2);
    memcpy(a.handle + 2, handle, DEVICE_IPC_HANDLE_SIZE);
    a.handle_len = 2 + DEVICE_IPC_HANDLE_SIZE;
    strncpy(a.counter_name, counter_name, sizeof a.counter_name - 1);
    return a;
}

/* ---- counts ---- */

void ipc_counts_create(const char *name)
{
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0);
    int rc = ftruncate(fd, (off_t)FILE_BYTES);
    CHECK(rc == 0);
    close(fd);
}

void ipc_counts_unlink(const char *name)
{
    (void)shm_unlink(name);
}

int64_t *ipc_counts_map(const char *name)
{
    int fd = shm_open(name, O_RDWR, 0);
    CHECK(fd >= 0);
    char *map = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED);
    close(fd);
    return (int64_t *)(map + 64);
}

void ipc_counts_unmap(int64_t *counts)
{
    munmap((char *)counts - 64, FILE_BYTES);
}
