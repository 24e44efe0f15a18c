/*
 * device_ops.h: the memory, streams and kernels of an accelerator, as far as moving weights needs
 * them. transfer/device/ has two: CUDA, which loads the driver when a device is opened (so that one
 * build starts without one), and plain memory.
 *
 * Streams are FIFO queues of work; what is enqueued runs in order and nothing here waits for it,
 * except where said. Pointers marked "device" may be dereferenced by work on a stream only. One
 * thread uses a device_t at a time, any thread may be that one. Work that fails is reported by the
 * next *_test of a stream or event behind it; a device that has failed stays failed.
 */
#ifndef LK_TRANSFER_DEVICE_OPS_H
#define LK_TRANSFER_DEVICE_OPS_H

#include "transfer/tensor_desc.h"

#define DEVICE_OPS_ABI_VERSION 2u
#define DEVICE_IPC_HANDLE_SIZE 64u
#define DEVICE_UUID_SIZE       37 /* 8-4-4-4-12 lower-case hex digits and a NUL */

typedef struct device device_t;
typedef struct device_stream device_stream_t; /* CUDA: the cudaStream_t itself */
typedef struct device_event device_event_t;   /* CUDA: the cudaEvent_t itself */

/* A rectangle of elements on its way from a received tensor to its place: read contiguously from
 * src, cast (round to nearest even), written to rows of dst, and digested as stored (digest.h). */
typedef struct {
    const void *src; /* device; any alignment */
    lk_dtype_t src_dtype, dst_dtype;
    void *dst;           /* device, aligned to dst_dtype; NULL: only digest */
    uint64_t rows, cols; /* of src: rows * cols elements, back to back */
    uint64_t dst_pitch;  /* elements from one row of dst to the next; >= cols */
    uint64_t first;      /* index in its tensor of the first element, for the digest */
    uint64_t *lanes;     /* device: two u64 that the digest's lanes are added to; NULL: no digest */
} device_piece_t;

typedef struct device_ops {
    uint32_t abi_version; /* DEVICE_OPS_ABI_VERSION */
    const char *name;     /* "cuda", "host" */

    /* Device memory, aligned to 512 bytes at least. LK_ERR_NO_MEMORY says how much is free. */
    lk_status_t (*alloc)(device_t *self, uint64_t bytes, void **out, lk_error_t *err);
    /* Accepts NULL. Waits for work that uses it, where the driver does. */
    void (*free)(device_t *self, void *ptr);
    /* Page-locked host memory, which copy moves without blocking. */
    lk_status_t (*alloc_host)(device_t *self, uint64_t bytes, void **out, lk_error_t *err);
    void (*free_host)(device_t *self, void *ptr);

    lk_status_t (*stream_new)(device_t *self, device_stream_t **out, lk_error_t *err);
    /* One whose work goes before that of other streams, where both wait for the device. */
    lk_status_t (*urgent_stream_new)(device_t *self, device_stream_t **out, lk_error_t *err);
    /* Accepts NULL. */
    void (*stream_destroy)(device_t *self, device_stream_t *stream);
    /* OK: all that was enqueued has run. INPROGRESS: not yet. */
    lk_status_t (*stream_test)(device_t *self, device_stream_t *stream, lk_error_t *err);

    lk_status_t (*event_new)(device_t *self, device_event_t **out, lk_error_t *err);
    void (*event_destroy)(device_t *self, device_event_t *event);
    /* The event stands for what the stream holds now. */
    lk_status_t (*event_record)(device_t *self, device_event_t *event, device_stream_t *stream,
                                lk_error_t *err);
    /* What is enqueued on stream from now on runs after the event. Never recorded: at once. */
    lk_status_t (*stream_wait)(device_t *self, device_stream_t *stream, device_event_t *event,
                               lk_error_t *err);
    lk_status_t (*event_test)(device_t *self, device_event_t *event, lk_error_t *err);

    /* Between device memory, and to and from host memory (which must stay until it ran). */
    lk_status_t (*copy)(device_t *self, void *dst, const void *src, uint64_t bytes,
                        device_stream_t *stream, lk_error_t *err);
    lk_status_t (*zero)(device_t *self, void *dst, uint64_t bytes, device_stream_t *stream,
                        lk_error_t *err);
    /* Fused slice, cast, store and digest of n pieces; pieces is copied before it returns, without
     * allocating. Dtype pairs as dtype_convert's. */
    lk_status_t (*unpack)(device_t *self, const device_piece_t *pieces, size_t n,
                          device_stream_t *stream, lk_error_t *err);
    /* Makes the device current in the calling thread, for libraries that go by that (NCCL). */
    lk_status_t (*make_current)(device_t *self, lk_error_t *err);

    /* Memory that another process has exported, and an event of one, by the 64 bytes of their
     * handles (CUDA: cudaIpcMemHandle_t, cudaIpcEventHandle_t). *bytes is the size of the memory. A
     * handle is opened once at a time; ipc_close waits for work that uses the memory. The event is
     * ended with event_destroy. */
    lk_status_t (*ipc_open)(device_t *self, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                            void **out, uint64_t *bytes, lk_error_t *err);
    void (*ipc_close)(device_t *self, void *ptr);
    lk_status_t (*ipc_event)(device_t *self, const uint8_t handle[DEVICE_IPC_HANDLE_SIZE],
                             device_event_t **out, lk_error_t *err);
    /* Ends the device; everything of it has been ended before. */
    void (*close)(device_t *self);
} device_ops_t;

struct device {
    const device_ops_t *ops;
    int index;     /* CUDA: ordinal in this process */
    char text[96]; /* "NVIDIA H200 (GPU 0, UUID ...)" for messages */
    char uuid[DEVICE_UUID_SIZE];
    /* Set and cleared by the caller around calls of unpack: a collective runs beside it, which it
     * must not slow down. */
    bool beside;
    uint64_t allocations; /* calls of alloc and alloc_host so far: an update makes none */
    uint64_t allocated;   /* bytes of alloc that are not freed */
};

#endif
