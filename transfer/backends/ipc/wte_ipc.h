/*
 * wte_ipc.h: weights out of the memory of a trainer on the same GPU (vLLM's "ipc" backend). What it
 * needs of a device is in device_ops.h; it has copied when update_test says OK, and then has taken
 * its count off every export, each once, whatever the outcome.
 *
 * init_info {packed?, rank_offset?, world_size?}. update_info: see ipc_handles.h. Memory of the
 * trainer stays open between updates as long as each update uses it; trainers that allocate afresh
 * pay for opening it, and nobody's freed memory is held longer than one update.
 */
#ifndef LK_TRANSFER_BACKENDS_IPC_WTE_IPC_H
#define LK_TRANSFER_BACKENDS_IPC_WTE_IPC_H

#include "transfer/weight_transfer_engine.h"

extern const wte_ops_t wte_ipc;

#endif
