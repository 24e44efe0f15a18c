#include "transfer/device/device_cuda.h"

#include "base/check.h"
#include "transfer/device/copies.h"
#include "transfer/device/unpack_fatbin.h"
#include "transfer/device/unpack_plan.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER_LIBRARY "libcuda.so.1"
#define DRIVER_MINIMUM 12010 /* kernel arguments of more than 4 KB */

/* The functions of the driver that are used. */
#define DRIVER_TABLE(X)                                                                            \
    X(cuInit)                                                                                      \
    X(cuDriverGetVersion)                                                                          \
    X(cuGetErrorString)                                                                            \
    X(cuDeviceGet)                                                                                 \
    X(cuDeviceGetAttribute)                                                                        \
    X(cuDeviceGetCount)                                                                            \
    X(cuDeviceGetName)                                                                             \
    X(cuDeviceGetUuid_v2)                                                                          \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease_v2)                                                                \
    X(cuCtxPushCurrent_v2)                                                                         \
    X(cuCtxPopCurrent_v2)                                                                          \
    X(cuCtxSetCurrent)                                                                             \
    X(cuCtxGetStreamPriorityRange)                                                                 \
    X(cuModuleLoadData)                                                                            \
    X(cuModuleUnload)                                                                              \
    X(cuModuleGetFunction)                                                                         \
    X(cuFuncSetAttribute)                                                                          \
    X(cuLaunchKernel)                                                                              \
    X(cuMemAlloc_v2)                                                                               \
    X(cuMemFree_v2)                                                                                \
    X(cuMemGetInfo_v2)                                                                             \
    X(cuMemGetAddressRange_v2)                                                                     \
    X(cuMemHostAlloc)                                                                              \
    X(cuMemFreeHost)                                                                               \
    X(cuMemcpyAsync)                                                                               \
    X(cuMemsetD8Async)                                                                             \
    X(cuStreamCreateWithPriority)                                                                  \
    X(cuStreamDestroy_v2)                                                                          \
    X(cuStreamQuery)                                                                               \
    X(cuStreamWaitEvent)                                                                           \
    X(cuEventCreate)                                                                               \
    X(cuEventDestroy_v2)                                                                           \
    X(cuEventRecord)                                                                               \
    X(cuEventQuery)                                                                                \
    X(cuIpcOpenMemHandle_v2)                                                                       \
    X(cuIpcCloseMemHandle)                                                                         \
    X(cuIpcOpenEventHandle)

static struct {
#define X(name) __typeof__(&name) name;
    DRIVER_TABLE(X)
#undef X
    lk_status_t status;
    char text[256];
} driver;

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

typedef struct {
    device_t base;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction unpack, unpack_beside, copies;
    int multiprocessors;
} device_cuda_t;

static device_cuda_t *of(device_t *base)
{
    return (device_cuda_t *)base;
}

/* ---- the driver ---- */

static void load_driver(void)
{
    driver.status = LK_ERR_UNSUPPORTED;
    void *library = dlopen(DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(driver.text, sizeof driver.text, "no NVIDIA driver: %s", dlerror());
        return;
    }
    static const struct {
        const char *name;
        void **place;
    } functions[] = {
#define X(name) {#name, (void **)&driver.name},
        DRIVER_TABLE(X)
#undef X
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(functions); i++) {
        *functions[i].place = dlsym(library, functions[i].name);
        if (*functions[i].place == NULL) {
            snprintf(driver.text, sizeof driver.text, "the NVIDIA driver has no %s: it is too old",
                     functions[i].name);
            return;
        }
    }
    CUresult rc = driver.cuInit(0);
    int version = 0;
    if (rc != CUDA_SUCCESS || driver.cuDriverGetVersion(&version) != CUDA_SUCCESS) {
        const char *why = NULL;
        driver.cuGetErrorString(rc, &why);
        snprintf(driver.text, sizeof driver.text, "the NVIDIA driver does not start: %s",
                 why != NULL ? why : "unknown error");
    } else if (version < DRIVER_MINIMUM) {
        snprintf(driver.text, sizeof driver.text,
                 "the NVIDIA driver is for CUDA %d.%d; 12.1 is the oldest that will do",
                 version / 1000, version % 1000 / 10);
    } else {
        driver.status = LK_OK;
    }
}

static lk_status_t need_driver(lk_error_t *err)
{
    int rc = pthread_once(&driver_once, load_driver);
    CHECK(rc == 0);
    return driver.status == LK_OK ? LK_OK : lk_error_set(err, driver.status, "%s", driver.text);
}

static lk_status_t cuda_error(const device_t *base, CUresult rc, const char *what, lk_error_t *err)
{
    const char *why = NULL;
    if (driver.cuGetErrorString(rc, &why) != CUDA_SUCCESS || why == NULL) {
        why = "unknown error";
    }
    lk_status_t status = rc == CUDA_ERROR_OUT_OF_MEMORY ? LK_ERR_NO_MEMORY : LK_ERR_IO;
    return lk_error_set(err, status, "%s: cannot %s: %s (%d)", base->text, what, why, (int)rc);
}

/* Runs one driver call with the device's context current and says what failed. */
#define IN_CONTEXT(base, call, what, err)                                                          \
    do {                                                                                           \
        CUcontext popped_;                                                                         \
        CUresult rc_ = driver.cuCtxPushCurrent_v2(of(base)->context);                              \
        if (rc_ == CUDA_SUCCESS) {                                                                 \
            rc_ = driver.call;                                                                     \
            (void)driver.cuCtxPopCurrent_v2(&popped_);                                             \
        }                                                                                          \
        if (rc_ != CUDA_SUCCESS) {                                                                 \
            return cuda_error(base, rc_, what, err);                                               \
        }                                                                                          \
    } while (0)

/* For calls whose failure leaves nothing to be done. */
#define IN_CONTEXT_QUIET(base, call)                                                               \
    do {                                                                                           \
        CUcontext popped_;                                                                         \
        if (driver.cuCtxPushCurrent_v2(of(base)->context) == CUDA_SUCCESS) {                       \
            (void)driver.call;                                                                     \
            (void)driver.cuCtxPopCurrent_v2(&popped_);                                             \
        }                                                                                          \
    } while (0)

static CUdeviceptr address(const void *ptr)
{
    return (CUdeviceptr)(uintptr_t)ptr;
}

/* ---- memory ---- */

static uint64_t size_of(device_t *base, CUdeviceptr ptr)
{
    CUdeviceptr start;
    size_t bytes = 0;
    IN_CONTEXT_QUIET(base, cuMemGetAddressRange_v2(&start, &bytes, ptr));
    return bytes;
}

static lk_status_t cuda_alloc(device_t *base, uint64_t bytes, void **out, lk_error_t *err)
{
    CUcontext popped;
    CUdeviceptr ptr = 0;
    size_t idle = 0, total = 0;
    CUresult rc = driver.cuCtxPushCurrent_v2(of(base)->context);
    if (rc == CUDA_SUCCESS) {
        rc = driver.cuMemAlloc_v2(&ptr, bytes > 0 ? bytes : 1);
        (void)driver.cuMemGetInfo_v2(&idle, &total);
        (void)driver.cuCtxPopCurrent_v2(&popped);
    }
    if (rc == CUDA_ERROR_OUT_OF_MEMORY) {
        return lk_error_set(err, LK_ERR_NO_MEMORY,
                            "%s: no memory for %llu bytes; %zu of %zu are free", base->text,
                            (unsigned long long)bytes, idle, total);
    }
    if (rc != CUDA_SUCCESS) {
        return cuda_error(base, rc, "allocate memory", err);
    }
    base->allocations++;
    base->allocated += size_of(base, ptr);
    *out = (void *)(uintptr_t)ptr;
    return LK_OK;
}

static void cuda_free(device_t *base, void *ptr)
{
    if (ptr != NULL) {
        base->allocated -= size_of(base, address(ptr));
        IN_CONTEXT_QUIET(base, cuMemFree_v2(address(ptr)));
    }
}

static lk_status_t cuda_alloc_host(device_t *base, uint64_t bytes, void **out, lk_error_t *err)
{
    void *ptr;
    IN_CONTEXT(base, cuMemHostAlloc(&ptr, bytes > 0 ? bytes : 1, CU_MEMHOSTALLOC_PORTABLE),
               "allocate page-locked memory", err);
    base->allocations++;
    *out = ptr;
    return LK_OK;
}

static void cuda_free_host(device_t *base, void *ptr)
{
    if (ptr != NULL) {
        IN_CONTEXT_QUIET(base, cuMemFreeHost(ptr));
    }
}

/* ---- streams and events ---- */

static lk_status_t make_stream(device_t *base, bool urgent, device_stream_t **out, lk_error_t *err)
{
    CUstream stream;
    int least = 0, greatest = 0;
    IN_CONTEXT(base, cuCtxGetStreamPriorityRange(&least, &greatest), "make a stream", err);
    IN_CONTEXT(
        base,
        cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, urgent ? greatest : least),
        "make a stream", err);
    *out = (device_stream_t *)stream;
    return LK_OK;
}

static lk_status_t cuda_stream_new(device_t *base, device_stream_t **out, lk_error_t *err)
{
    return make_stream(base, false, out, err);
}

static lk_status_t cuda_urgent_stream_new(device_t *base, device_stream_t **out, lk_error_t *err)
{
    return make_stream(base, true, out, err);
}

static void cuda_stream_destroy(device_t *base, device_stream_t *stream)
{
    if (stream != NULL) {
        IN_CONTEXT_QUIET(base, cuStreamDestroy_v2((CUstream)stream));
    }
}

static lk_status_t tested(const device_t *base, CUresult rc, lk_error_t *err)
{
    return rc == CUDA_SUCCESS           ? LK_OK
           : rc == CUDA_ERROR_NOT_READY ? LK_INPROGRESS
                                        : cuda_error(base, rc, "run the work on a stream", err);
}

static lk_status_t cuda_stream_test(device_t *base, device_stream_t *stream, lk_error_t *err)
{
    CUcontext popped;
    CUresult rc = driver.cuCtxPushCurrent_v2(of(base)->context);
    if (rc == CUDA_SUCCESS) {
        rc = driver.cuStreamQuery((CUstream)stream);
        (void)driver.cuCtxPopCurrent_v2(&popped);
    }
    return tested(base, rc, err);
}

static lk_status_t cuda_event_new(device_t *base, device_event_t **out, lk_error_t *err)
{
    CUevent event;
    IN_CONTEXT(base, cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "make an event", err);
    *out = (device_event_t *)event;
    return LK_OK;
}

static void cuda_event_destroy(device_t *base, device_event_t *event)
{
    if (event != NULL) {
        IN_CONTEXT_QUIET(base, cuEventDestroy_v2((CUevent)event));
    }
}

static lk_status_t cuda_event_record(device_t *base, device_event_t *event, device_stream_t *stream,
                                     lk_error_t *err)
{
    IN_CONTEXT(base, cuEventRecord((CUevent)event, (CUstream)stream), "record an event", err);
    return LK_OK;
}

static lk_status_t cuda_stream_wait(device_t *base, device_stream_t *stream, device_event_t *event,
                                    lk_error_t *err)
{
    IN_CONTEXT(base, cuStreamWaitEvent((CUstream)stream, (CUevent)event, 0), "wait for an event",
               err);
    return LK_OK;
}

static lk_status_t cuda_event_test(device_t *base, device_event_t *event, lk_error_t *err)
{
    CUcontext popped;
    CUresult rc = driver.cuCtxPushCurrent_v2(of(base)->context);
    if (rc == CUDA_SUCCESS) {
        rc = driver.cuEventQuery((CUevent)event);
        (void)driver.cuCtxPopCurrent_v2(&popped);
    }
    return tested(base, rc, err);
}

/* ---- work ---- */

static lk_status_t cuda_copy(device_t *base, void *dst, const void *src, uint64_t bytes,
                             device_stream_t *stream, lk_error_t *err)
{
    if (bytes > 0) {
        IN_CONTEXT(base, cuMemcpyAsync(address(dst), address(src), bytes, (CUstream)stream), "copy",
                   err);
    }
    return LK_OK;
}

static lk_status_t cuda_zero(device_t *base, void *dst, uint64_t bytes, device_stream_t *stream,
                             lk_error_t *err)
{
    if (bytes > 0) {
        IN_CONTEXT(base, cuMemsetD8Async(address(dst), 0, bytes, (CUstream)stream), "clear memory",
                   err);
    }
    return LK_OK;
}

/* Multiprocessors that are taken beside a collective. More copying slows it down more than it is
 * sooner done; digesting has to keep up with it, and leaves NCCL's blocks (at most 32, of one
 * multiprocessor each) what they need. */
static unsigned copying_beside(const device_t *base)
{
    return ((unsigned)((const device_cuda_t *)base)->multiprocessors + 1) / 2;
}

static unsigned digesting_beside(const device_t *base)
{
    enum { LEFT = 34 };
    unsigned all = (unsigned)((const device_cuda_t *)base)->multiprocessors;
    return all > 2 * LEFT ? all - LEFT : (all + 1) / 2;
}

static lk_status_t launch_copies(device_t *base, copies_launch_t *launch, device_stream_t *stream,
                                 lk_error_t *err)
{
    unsigned most = base->beside ? copying_beside(base) : 2 * (unsigned)of(base)->multiprocessors;
    void *arguments[] = {launch};
    if (launch->n_chunks > 0) {
        IN_CONTEXT(base,
                   cuLaunchKernel(of(base)->copies, LK_MIN(launch->n_chunks, most), 1, 1,
                                  COPIES_THREADS, 1, 1, 0, (CUstream)stream, arguments, NULL),
                   "start the copy kernel", err);
    }
    launch->n_items = launch->n_chunks = 0;
    return LK_OK;
}

static lk_status_t add_copy(device_t *base, copies_launch_t *launch, const device_piece_t *piece,
                            device_stream_t *stream, lk_error_t *err)
{
    uint64_t bytes = piece->rows * piece->cols * dtype_bytes(piece->src_dtype);
    CUdeviceptr src = address(piece->src), dst = address(piece->dst);
    if (bytes == 0) {
        return LK_OK;
    }
    if (((src | dst) & 15) != 0 && bytes > COPIES_CHUNK) {
        return cuda_copy(base, piece->dst, piece->src, bytes, stream, err);
    }
    if (!copies_add(launch, src, dst, bytes)) {
        LK_RETURN_IF_ERROR(launch_copies(base, launch, stream, err));
        CHECK(copies_add(launch, src, dst, bytes));
    }
    return LK_OK;
}

static lk_status_t launch_units(device_t *base, unpack_launch_t *launch, device_stream_t *stream,
                                lk_error_t *err)
{
    void *arguments[] = {launch}; /* the driver copies it */
    if (base->beside) {
        unsigned blocks = (launch->n_units + UNPACK_TEAMS - 1) / UNPACK_TEAMS;
        IN_CONTEXT(base,
                   cuLaunchKernel(of(base)->unpack_beside, LK_MIN(blocks, digesting_beside(base)),
                                  1, 1, UNPACK_TEAMS * UNPACK_THREADS, 1, 1,
                                  UNPACK_TEAMS * UNPACK_SHARED, (CUstream)stream, arguments, NULL),
                   "start the unpack kernel", err);
    } else {
        IN_CONTEXT(base,
                   cuLaunchKernel(of(base)->unpack, launch->n_units, 1, 1, UNPACK_THREADS, 1, 1, 0,
                                  (CUstream)stream, arguments, NULL),
                   "start the unpack kernel", err);
    }
    return LK_OK;
}

static lk_status_t launch_unpack(device_t *base, const device_piece_t *pieces, size_t n,
                                 device_stream_t *stream, lk_error_t *err)
{
    unpack_launch_t launch;
    for (size_t done = 0; done < n;) {
        done += unpack_plan(pieces + done, n - done, &launch);
        if (launch.n_units > 0) {
            LK_RETURN_IF_ERROR(launch_units(base, &launch, stream, err));
        }
    }
    return LK_OK;
}

static lk_status_t cuda_unpack(device_t *base, const device_piece_t *pieces, size_t n,
                               device_stream_t *stream, lk_error_t *err)
{
    device_piece_t rest[UNPACK_ITEMS];
    copies_launch_t copies;
    size_t n_rest = 0;
    copies.n_items = copies.n_chunks = 0;
    LK_RETURN_IF_ERROR(unpack_check(pieces, n, err));
    for (size_t i = 0; i < n; i++) {
        if (unpack_is_copy(&pieces[i])) {
            LK_RETURN_IF_ERROR(add_copy(base, &copies, &pieces[i], stream, err));
            continue;
        }
        rest[n_rest++] = pieces[i];
        if (n_rest == UNPACK_ITEMS) {
            LK_RETURN_IF_ERROR(launch_unpack(base, rest, n_rest, stream, err));
            n_rest = 0;
        }
    }
    LK_RETURN_IF_ERROR(launch_copies(base, &copies, stream, err));
    return launch_unpack(base, rest, n_rest, stream, err);
}

static lk_status_t cuda_make_current(device_t *base, lk_error_t *err)
{
    CUresult rc = driver.cuCtxSetCurrent(of(base)->context);
    return rc == CUDA_SUCCESS ? LK_OK : cuda_error(base, rc, "be made current", err);
}

/* ---- other processes' memory ---- */

STATIC_ASSERT(sizeof(CUipcMemHandle) == DEVICE_IPC_HANDLE_SIZE &&
                  sizeof(CUipcEventHandle) == DEVICE_IPC_HANDLE_SIZE,
              "handles have 64 bytes");

static lk_status_t cuda_ipc_open(device_t *base, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                                 void **out, uint64_t *bytes, lk_error_t *err)
{
    CUipcMemHandle h;
    CUdeviceptr ptr;
    memcpy(&h, handle, sizeof h);
    IN_CONTEXT(base, cuIpcOpenMemHandle_v2(&ptr, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
               "open the memory that another process exports", err);
    *bytes = size_of(base, ptr);
    *out = (void *)(uintptr_t)ptr;
    return LK_OK;
}

static void cuda_ipc_close(device_t *base, void *ptr)
{
    if (ptr != NULL) {
        IN_CONTEXT_QUIET(base, cuIpcCloseMemHandle(address(ptr)));
    }
}

static lk_status_t cuda_ipc_event(device_t *base, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                                  device_event_t **out, lk_error_t *err)
{
    CUipcEventHandle h;
    CUevent event;
    memcpy(&h, handle, sizeof h);
    IN_CONTEXT(base, cuIpcOpenEventHandle(&event, h), "open the event that another process exports",
               err);
    *out = (device_event_t *)event;
    return LK_OK;
}

/* ---- open, close ---- */

static void cuda_close(device_t *base)
{
    device_cuda_t *self = of(base);
    if (self->module != NULL) {
        IN_CONTEXT_QUIET(base, cuModuleUnload(self->module));
    }
    if (self->context != NULL) {
        (void)driver.cuDevicePrimaryCtxRelease_v2(self->device);
    }
    free(self);
}

static const device_ops_t cuda_ops = {
    .abi_version = DEVICE_OPS_ABI_VERSION,
    .name = "cuda",
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .stream_new = cuda_stream_new,
    .urgent_stream_new = cuda_urgent_stream_new,
    .stream_destroy = cuda_stream_destroy,
    .stream_test = cuda_stream_test,
    .event_new = cuda_event_new,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .stream_wait = cuda_stream_wait,
    .event_test = cuda_event_test,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .unpack = cuda_unpack,
    .make_current = cuda_make_current,
    .ipc_open = cuda_ipc_open,
    .ipc_close = cuda_ipc_close,
    .ipc_event = cuda_ipc_event,
    .close = cuda_close,
};

static void describe(device_cuda_t *self, int index)
{
    char name[48] = "NVIDIA GPU", *at = self->base.uuid;
    CUuuid uuid = {{0}};
    (void)driver.cuDeviceGetName(name, sizeof name, self->device);
    (void)driver.cuDeviceGetUuid_v2(&uuid, self->device);
    for (int i = 0; i < 16; i++) {
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                      (unsigned)(unsigned char)uuid.bytes[i]);
    }
    snprintf(self->base.text, sizeof self->base.text, "%.24s (GPU %d, UUID %.36s)", name, index,
             self->base.uuid);
}

static lk_status_t load_kernels(device_cuda_t *self, lk_error_t *err)
{
    IN_CONTEXT(&self->base, cuModuleLoadData(&self->module, lk_unpack_fatbin), "load the kernels",
               err);
    IN_CONTEXT(&self->base, cuModuleGetFunction(&self->unpack, self->module, "lk_unpack"),
               "find the unpack kernel", err);
    IN_CONTEXT(&self->base,
               cuModuleGetFunction(&self->unpack_beside, self->module, "lk_unpack_beside"),
               "find the second unpack kernel", err);
    IN_CONTEXT(&self->base,
               cuFuncSetAttribute(self->unpack_beside,
                                  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  UNPACK_TEAMS * UNPACK_SHARED),
               "have shared memory for the second unpack kernel", err);
    IN_CONTEXT(&self->base, cuModuleGetFunction(&self->copies, self->module, "lk_copies"),
               "find the copy kernel", err);
    IN_CONTEXT(&self->base,
               cuDeviceGetAttribute(&self->multiprocessors,
                                    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self->device),
               "count the multiprocessors", err);
    return LK_OK;
}

lk_status_t device_cuda_open(int index, device_t **out, lk_error_t *err)
{
    if (need_driver(err) < 0) {
        return lk_error_prefix(err, "GPU %d", index);
    }
    unsigned count = device_cuda_count();
    if (index < 0 || (unsigned)index >= count) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "GPU %d: this process sees %u GPUs", index,
                            count);
    }
    device_cuda_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "GPU %d: out of memory", index);
    }
    self->base.ops = &cuda_ops;
    self->base.index = index;
    CUresult rc = driver.cuDeviceGet(&self->device, index);
    if (rc == CUDA_SUCCESS) {
        describe(self, index);
        rc = driver.cuDevicePrimaryCtxRetain(&self->context, self->device);
    }
    lk_status_t status = rc == CUDA_SUCCESS ? load_kernels(self, err)
                                            : cuda_error(&self->base, rc, "make a context", err);
    if (status < 0) {
        cuda_close(&self->base);
        return status;
    }
    *out = &self->base;
    return LK_OK;
}

unsigned device_cuda_count(void)
{
    lk_error_t ignored = LK_ERROR_INIT;
    int count = 0;
    if (need_driver(&ignored) < 0 || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS || count < 0) {
        return 0;
    }
    return (unsigned)count;
}
