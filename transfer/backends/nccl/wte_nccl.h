/*
 * wte_nccl.h: the NCCL transfer engine.
 *
 * init_info {rank_offset, world_size, and either nccl_unique_id_b64 or master_address and
 * master_port} plus the packing fields, which update_info may override. This process is rank
 * rank_offset + dp_rank * ranks_per_replica; the trainer is rank 0.
 */
#ifndef LK_TRANSFER_WTE_NCCL_H
#define LK_TRANSFER_WTE_NCCL_H

#include "transfer/backends/nccl/nccl_comm.h"
#include "transfer/weight_transfer_engine.h"

extern const wte_ops_t wte_nccl;

/* The same engine over other communicators, for tests. NULL: libnccl again. */
void wte_nccl_use(const nccl_comm_ops_t *ops);

#endif
