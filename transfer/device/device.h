/* device.h: opens devices by name. */
#ifndef LK_TRANSFER_DEVICE_DEVICE_H
#define LK_TRANSFER_DEVICE_DEVICE_H

#include "transfer/device_ops.h"

/* name: "cuda" or "host"; index: the CUDA ordinal in this process. LK_ERR_UNSUPPORTED when this
 * build, this machine or this number has no such device: the text says which. */
LK_MUST_USE lk_status_t device_open(const char *name, int index, device_t **out, lk_error_t *err);
/* Accepts NULL and a pointer to NULL. */
void device_close(device_t **self_p);
/* CUDA devices that this process sees; 0 without a driver. */
unsigned device_count(const char *name);

/* Waits until the stream has run: for set-up and tests, not for a loop that serves. */
LK_MUST_USE lk_status_t device_wait(device_t *self, device_stream_t *stream, lk_error_t *err);

#endif
