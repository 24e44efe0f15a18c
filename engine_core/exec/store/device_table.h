/*
 * device_table.h: a model's weights in a device's memory: the storage, and the sink of updates. It
 * keeps the names, shapes, slices and layout of a weight table (weight_table.h) and its rules; only
 * where the bytes are differs, and that casting, placing and digesting are the device's work.
 *
 * Tensors that arrive in device memory are enqueued on the caller's stream and nothing is copied
 * through the host; those that arrive in host memory (the first load, the tcp, shm and disk
 * engines) go through two page-locked buffers of DEVICE_TABLE_STAGING bytes. Both are allocated
 * when the table is made, and nothing later: beside the weights there are two buffers on the device
 * and 16 bytes a tensor.
 *
 * A digest is known after device_settle, which update sessions call when an update has arrived.
 */
#ifndef LK_ENGINE_CORE_EXEC_STORE_DEVICE_TABLE_H
#define LK_ENGINE_CORE_EXEC_STORE_DEVICE_TABLE_H

#include "engine_core/exec/weight_table.h"
#include "transfer/device_ops.h"

#define DEVICE_TABLE_STAGING (16u << 20)

typedef struct device_table device_table_t;

/* The device is borrowed and outlives the table. NULL with the reason in err. */
device_table_t *device_table_new(device_t *device, const model_config_t *config, lk_dtype_t stored,
                                 uint32_t ep_rank, uint32_t ep_size, lk_error_t *err);
/* Without digests (the default is with): those of all tensors are zero from then on, and so is the
 * set's. What is compared, the spellings of a tied embedding, still is. Before the first load. */
void device_table_set_digests(device_table_t *self, bool digests);
/* Waits for the device. */
void device_table_destroy(device_table_t **self_p);

/* As weight_table_load and weight_table_fill; generates with so many threads. */
LK_MUST_USE lk_status_t device_table_load(device_table_t *self, const char *dir, lk_error_t *err);
LK_MUST_USE lk_status_t device_table_fill(device_table_t *self, uint64_t seed, uint32_t threads,
                                          lk_error_t *err);

/* Names, shapes, dtype; no data. */
weight_table_t *device_table_names(device_table_t *self);
/* The tensor in device memory; NULL if another rank owns it. */
void *device_table_data(const device_table_t *self, size_t slot);
/* Copies a tensor to host memory, for tests. LK_ERR_NOT_FOUND if another rank owns it. */
LK_MUST_USE lk_status_t device_table_read(device_table_t *self, size_t slot, void *out,
                                          lk_error_t *err);
weight_sink_t device_table_sink(device_table_t *self);

#endif
