/*
 * device_cuda.h: NVIDIA GPUs through the driver's library, which is loaded when the first device is
 * opened. Uses the primary context, so memory and streams are those of the CUDA runtime, of NCCL
 * and of PyTorch in the same process; leaves the thread's current context as it was.
 */
#ifndef LK_TRANSFER_DEVICE_DEVICE_CUDA_H
#define LK_TRANSFER_DEVICE_DEVICE_CUDA_H

#include "transfer/device_ops.h"

/* LK_ERR_UNSUPPORTED: built without CUDA, no driver, or no such device. Needs sm_80 or newer. */
LK_MUST_USE lk_status_t device_cuda_open(int index, device_t **out, lk_error_t *err);
unsigned device_cuda_count(void);

#endif
