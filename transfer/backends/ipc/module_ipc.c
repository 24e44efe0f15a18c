/* module_ipc.c: transfer_ipc.so. */
#include "transfer/backends/ipc/wte_ipc.h"
#include "transfer/wte_module.h"

WTE_MODULE(wte_ipc)
