#include "base/check.h"
#include "base/log.h"
#include "transfer/backends/nccl/nccl_comm.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the part of NCCL's binary interface that is used; stable since 2.18 ---- */

typedef struct ncclComm *nccl_handle_t;
typedef struct {
    char bytes[NCCL_ID_BYTES];
} nccl_id_t;

enum {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7
};
enum { NCCL_FLOAT32 = 7, NCCL_SUM = 0 };

/* The configuration as 2.14 had it: newer libraries take their defaults for what came later. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size;
} nccl_config_t;

#define CONFIG_MAGIC   0xcafebeefu
#define CONFIG_VERSION 21400u
#define VERSION_MIN    21800

#define SYMBOL_TABLE(X)                                                                            \
    X(int, ncclGetVersion, (int *))                                                                \
    X(int, ncclGetUniqueId, (nccl_id_t *))                                                         \
    X(int, ncclCommInitRankConfig, (nccl_handle_t *, int, nccl_id_t, int, nccl_config_t *))        \
    X(int, ncclCommGetAsyncError, (nccl_handle_t, int *))                                          \
    X(int, ncclBroadcast,                                                                          \
      (const void *, void *, size_t, int, int, nccl_handle_t, device_stream_t *))                  \
    X(int, ncclAllReduce,                                                                          \
      (const void *, void *, size_t, int, int, nccl_handle_t, device_stream_t *))                  \
    X(int, ncclCommAbort, (nccl_handle_t))                                                         \
    X(const char *, ncclGetErrorString, (int))                                                     \
    X(const char *, ncclGetLastError, (nccl_handle_t))

typedef struct {
    nccl_library_t base;
    void *handle;
#define X(result, name, arguments) result(*name) arguments;
    SYMBOL_TABLE(X)
#undef X
} nccl_lib_t;

struct nccl_comm {
    const nccl_lib_t *lib;
    device_t *device;
    nccl_handle_t handle;
    bool forming; /* init is under way: what goes wrong is about forming the communicator */
};

/* ---- loading ---- */

#define LIBRARIES_MAX 4

static nccl_lib_t libraries[LIBRARIES_MAX];
static size_t n_libraries;

static nccl_lib_t *library_of(void *handle)
{
    for (size_t i = 0; i < n_libraries; i++) {
        if (libraries[i].handle == handle) {
            return &libraries[i];
        }
    }
    return NULL;
}

static lk_status_t find_symbols(nccl_lib_t *lib, lk_error_t *err)
{
#define X(result, name, arguments)                                                                 \
    lib->name = (result(*) arguments)dlsym(lib->handle, #name);                                    \
    if (lib->name == NULL) {                                                                       \
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "%s is no libnccl of 2.18 or newer: no %s",   \
                            lib->base.path, #name);                                                \
    }
    SYMBOL_TABLE(X)
#undef X
    return LK_OK;
}

static lk_status_t describe(nccl_lib_t *lib, lk_error_t *err)
{
    int version = 0;
    if (lib->ncclGetVersion(&version) != NCCL_SUCCESS || version < VERSION_MIN) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "%s is NCCL %d.%d.%d; it needs to be 2.18 or newer", lib->base.path,
                            version / 10000, version / 100 % 100, version % 100);
    }
    snprintf(lib->base.version, sizeof lib->base.version, "%d.%d.%d", version / 10000,
             version / 100 % 100, version % 100);
    return LK_OK;
}

static void *open_library(const char *name)
{
    if (name != NULL && name[0] != '\0') {
        return dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    /* in a PyTorch process, its own */
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    return handle != NULL ? handle : dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
}

static lk_status_t lib_load(const char *name, const nccl_library_t **out, lk_error_t *err)
{
    void *handle = open_library(name);
    if (handle == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "cannot load NCCL: %s; --nccl-library names it", dlerror());
    }
    nccl_lib_t *lib = library_of(handle);
    if (lib == NULL) {
        if (n_libraries == LIBRARIES_MAX) {
            return lk_error_set(err, LK_ERR_UNSUPPORTED, "this process has loaded %d libnccl",
                                LIBRARIES_MAX);
        }
        lib = &libraries[n_libraries];
        *lib = (nccl_lib_t){.handle = handle};
        const struct link_map *map = NULL;
        bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0';
        snprintf(lib->base.path, sizeof lib->base.path, "%s",
                 known          ? map->l_name
                 : name != NULL ? name
                                : "libnccl.so.2");
        LK_RETURN_IF_ERROR(find_symbols(lib, err));
        LK_RETURN_IF_ERROR(describe(lib, err));
        n_libraries++;
    }
    *out = &lib->base;
    return LK_OK;
}

/* ---- errors ---- */

static lk_status_t failed(const nccl_lib_t *lib, const nccl_comm_t *comm, int rc, const char *what,
                          lk_error_t *err)
{
    const char *more = lib->ncclGetLastError(comm != NULL ? comm->handle : NULL);
    more = more != NULL ? more : "";
    const char *name = lib->ncclGetErrorString(rc);
    if (strstr(more, "ismatched NCCL version") != NULL ||
        (rc == NCCL_INVALID_USAGE && strstr(more, "version") != NULL)) {
        return lk_error_set(err, LK_ERR_PEER,
                            "%s: the trainer uses another version of NCCL than this process, which "
                            "loaded %s (%s). Both need the same one; --nccl-library says which is "
                            "loaded here. NCCL says: %s",
                            what, lib->base.version, lib->base.path, more);
    }
    lk_status_t st = rc == NCCL_UNHANDLED_CUDA_ERROR                              ? LK_ERR_INTERNAL
                     : rc == NCCL_REMOTE_ERROR || (comm != NULL && comm->forming) ? LK_ERR_PEER
                                                                                  : LK_ERR_IO;
    return lk_error_set(err, st, "%s: NCCL %s: %s%s%s", what, lib->base.version, name,
                        more[0] != '\0' ? ": " : "", more);
}

static lk_status_t outcome(const nccl_comm_t *comm, int rc, const char *what, lk_error_t *err)
{
    return rc == NCCL_SUCCESS       ? LK_OK
           : rc == NCCL_IN_PROGRESS ? LK_INPROGRESS
                                    : failed(comm->lib, comm, rc, what, err);
}

/* ---- operations ---- */

static lk_status_t lib_unique_id(const nccl_library_t *library, uint8_t id[NCCL_ID_BYTES],
                                 lk_error_t *err)
{
    const nccl_lib_t *lib = (const nccl_lib_t *)library;
    nccl_id_t bytes;
    int rc = lib->ncclGetUniqueId(&bytes);
    if (rc != NCCL_SUCCESS) {
        return failed(lib, NULL, rc, "ncclGetUniqueId", err);
    }
    memcpy(id, bytes.bytes, NCCL_ID_BYTES);
    return LK_OK;
}

static lk_status_t lib_init(const nccl_library_t *library, device_t *device,
                            const uint8_t id[NCCL_ID_BYTES], uint32_t world_size, uint32_t rank,
                            nccl_comm_t **out, lk_error_t *err)
{
    const nccl_lib_t *lib = (const nccl_lib_t *)library;
    if (strcmp(device->ops->name, "cuda") != 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "NCCL moves memory of GPUs; this is %s",
                            device->text);
    }
    LK_RETURN_IF_ERROR(device->ops->make_current(device, err));
    nccl_comm_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->lib = lib;
    self->device = device;
    self->forming = true;
    nccl_config_t config = {.size = sizeof config,
                            .magic = CONFIG_MAGIC,
                            .version = CONFIG_VERSION,
                            .blocking = 0,
                            .cga_cluster_size = INT_MIN};
    nccl_id_t bytes;
    memcpy(bytes.bytes, id, NCCL_ID_BYTES);
    int rc = lib->ncclCommInitRankConfig(&self->handle, (int)world_size, bytes, (int)rank, &config);
    lk_status_t st = outcome(self, rc, "ncclCommInitRank", err);
    if (st < 0 || self->handle == NULL) {
        st = st < 0 ? st : lk_error_set(err, LK_ERR_INTERNAL, "ncclCommInitRank: no communicator");
        free(self);
        return st;
    }
    *out = self;
    return st;
}

static lk_status_t lib_poll(nccl_comm_t *self, lk_error_t *err)
{
    int state = NCCL_SUCCESS;
    int rc = self->lib->ncclCommGetAsyncError(self->handle, &state);
    lk_status_t st = outcome(self, rc != NCCL_SUCCESS ? rc : state,
                             self->forming ? "forming the communicator" : "the communicator", err);
    self->forming = self->forming && st != LK_OK;
    return st;
}

static int code_of(lk_dtype_t dtype)
{
    switch (dtype) {
    case LK_DTYPE_I8:
        return 0;
    case LK_DTYPE_U8:
        return 1;
    case LK_DTYPE_I32:
        return 2;
    case LK_DTYPE_I64:
        return 4;
    case LK_DTYPE_F16:
        return 6;
    case LK_DTYPE_F32:
        return NCCL_FLOAT32;
    case LK_DTYPE_F64:
        return 8;
    case LK_DTYPE_BF16:
        return 9;
    case LK_DTYPE_COUNT:
        break;
    }
    CHECKF(false, "dtype %d", (int)dtype);
}

static lk_status_t lib_broadcast(nccl_comm_t *self, void *buffer, uint64_t count, lk_dtype_t dtype,
                                 device_stream_t *stream, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(self->device->ops->make_current(self->device, err));
    int rc =
        self->lib->ncclBroadcast(buffer, buffer, count, code_of(dtype), 0, self->handle, stream);
    return outcome(self, rc, "ncclBroadcast", err);
}

static lk_status_t lib_all_reduce(nccl_comm_t *self, const float *from, float *to,
                                  device_stream_t *stream, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(self->device->ops->make_current(self->device, err));
    int rc = self->lib->ncclAllReduce(from, to, 1, NCCL_FLOAT32, NCCL_SUM, self->handle, stream);
    return outcome(self, rc, "ncclAllReduce", err);
}

/* ---- the end: ncclCommAbort may take a while, so a thread of its own does it ---- */

static atomic_size_t n_ending;

static void *end(void *arg)
{
    nccl_comm_t *self = arg;
    lk_error_t err = LK_ERROR_INIT;
    if (self->device->ops->make_current(self->device, &err) < 0) {
        LK_WARN("aborting a NCCL communicator: %s", err.text);
    }
    int rc = self->lib->ncclCommAbort(self->handle);
    if (rc != NCCL_SUCCESS) {
        LK_WARN("ncclCommAbort: %s", self->lib->ncclGetErrorString(rc));
    }
    free(self);
    atomic_fetch_sub(&n_ending, 1);
    return NULL;
}

static void lib_abort(nccl_comm_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    nccl_comm_t *self = *self_p;
    *self_p = NULL;
    pthread_t thread;
    atomic_fetch_add(&n_ending, 1);
    if (pthread_create(&thread, NULL, end, self) == 0) {
        pthread_detach(thread);
    } else {
        end(self);
    }
}

static size_t lib_ending(void)
{
    return atomic_load(&n_ending);
}

const nccl_comm_ops_t nccl_lib_ops = {
    .name = "nccl",
    .load = lib_load,
    .unique_id = lib_unique_id,
    .init = lib_init,
    .poll = lib_poll,
    .broadcast = lib_broadcast,
    .all_reduce = lib_all_reduce,
    .abort = lib_abort,
    .ending = lib_ending,
};
