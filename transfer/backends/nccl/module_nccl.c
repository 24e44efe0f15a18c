/* module_nccl.c: transfer_nccl.so. */
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/wte_module.h"

WTE_MODULE(wte_nccl)
