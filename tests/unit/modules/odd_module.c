/* odd_module.c: transfer engines as nobody should build them; ODD says in which way. */
#include "transfer/wte_module.h"

static const wte_ops_t ops = {.abi_version = WTE_ABI_VERSION, .name = "odd"};

#if ODD == 1 /* no entry */
extern const wte_ops_t *odd_table;
__attribute__((visibility("default"))) const wte_ops_t *odd_table = &ops;
#elif ODD == 2 /* lacks operations */
WTE_MODULE(ops)
#else          /* of another version */
__attribute__((visibility("default"))) const wte_ops_t *
lockstep_weight_transfer_engine(uint32_t abi_version);
const wte_ops_t *lockstep_weight_transfer_engine(uint32_t abi_version)
{
    return abi_version == WTE_ABI_VERSION + 1 ? &ops : NULL;
}
#endif
