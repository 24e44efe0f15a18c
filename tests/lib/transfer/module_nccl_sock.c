/* module_nccl_sock.c: transfer_nccl.so for tests without GPUs: the product's engine over
 * communicators between processes (nccl_sock.h), for --device host-store. */
#include "tests/lib/transfer/nccl_sock.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/wte_module.h"

__attribute__((visibility("default"))) const wte_ops_t *
lockstep_weight_transfer_engine(uint32_t abi_version);
const wte_ops_t *lockstep_weight_transfer_engine(uint32_t abi_version)
{
    wte_nccl_use(&nccl_sock_ops);
    return abi_version == WTE_ABI_VERSION ? &wte_nccl : NULL;
}
