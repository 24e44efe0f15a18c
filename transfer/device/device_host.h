/*
 * device_host.h: a device whose memory is the process's own, for tests and for --device host-store.
 * It is as asynchronous as a device may be: what is enqueued on a stream runs when a stream or an
 * event is tested, never before, so that whoever forgets to wait reads what was there before.
 */
#ifndef LK_TRANSFER_DEVICE_DEVICE_HOST_H
#define LK_TRANSFER_DEVICE_DEVICE_HOST_H

#include "transfer/device_ops.h"

/* The caller ends it with device_close. */
LK_MUST_USE lk_status_t device_host_open(device_t **out, lk_error_t *err);
/* Work of somebody else's: called when the stream comes to it, and again until it returns true. It
 * may not call the device. A stream that is destroyed before forgets it. */
LK_MUST_USE lk_status_t device_host_call(device_t *device, device_stream_t *stream,
                                         bool (*call)(void *ctx), void *ctx, lk_error_t *err);
/* From now on it fails as a broken device does. */
void device_host_break(device_t *device);

/* Makes handles for ipc_open and ipc_event of any host device of this process. */
void device_host_export(void *memory, uint64_t bytes, uint8_t handle[DEVICE_IPC_HANDLE_SIZE]);
void device_host_export_event(device_event_t *event, uint8_t handle[DEVICE_IPC_HANDLE_SIZE]);
/* How many exports of memory are open. */
unsigned device_host_open_exports(void);
/* Ends all exports; returns how many were open. */
unsigned device_host_unexport(void);

#endif
