/* backends.h: the engines that the registry (registry.c) lists, one line each. */
#ifndef LK_TRANSFER_BACKENDS_H
#define LK_TRANSFER_BACKENDS_H

#include "transfer/weight_transfer_engine.h"

/* init_info {master_address, master_port, session_token, connections?} plus the packing fields and
 * rank_offset, world_size of NCCL-shaped callers, which are checked and otherwise unused. */
extern const wte_ops_t wte_tcp;
/* init_info {}; update_info {path}: a directory of safetensors, a whole model. */
extern const wte_ops_t wte_disk;
/* init_info {segment, bytes, session_token} plus what tcp takes beside its address. `segment` is
 * the name of the trainer's abstract Unix socket, `bytes` the size of the shared ring that comes
 * through it (shm/shm_ring.h). */
extern const wte_ops_t wte_shm;
/* init_info {trainer, session_token, connections?} plus the packing fields. `trainer` names a
 * mem_listener (mem/mem_stream.h) of this process. */
extern const wte_ops_t wte_mem;

#endif
