/*
 * wte_module.h: transfer engines from shared objects: Lockstep's own that not every machine can use
 * (transfer_nccl.so, transfer_ipc.so), and users'. A module exports one function,
 *
 *     const wte_ops_t *lockstep_weight_transfer_engine(uint32_t abi_version);
 *
 * which gives its ops table if it was built for that version (WTE_ABI_VERSION) of
 * weight_transfer_engine.h and NULL otherwise; WTE_MODULE(ops) defines it. The table and what it
 * points to live as long as the process. A module of one's own needs this header and those it
 * includes, and nothing to link to: an error is a status and a text in an lk_error_t, a device is
 * its ops table.
 *
 * {"backend": "NAME"} in --weight-transfer-config means transfer_NAME.so, unless an engine of that
 * name is built in. Where it is looked for comes from the command line and from where the program
 * is, never from a request: in --transfer-module-dir if given, else beside the program, in
 * ../lib/lockstep and in ../transfer (the build tree).
 */
#ifndef LK_TRANSFER_WTE_MODULE_H
#define LK_TRANSFER_WTE_MODULE_H

#include "transfer/weight_transfer_engine.h"

#define WTE_MODULE_ENTRY "lockstep_weight_transfer_engine"

typedef const wte_ops_t *(*wte_module_entry_t)(uint32_t abi_version);

#define WTE_MODULE(ops)                                                                            \
    __attribute__((visibility("default"))) const wte_ops_t *lockstep_weight_transfer_engine(       \
        uint32_t abi_version);                                                                     \
    const wte_ops_t *lockstep_weight_transfer_engine(uint32_t abi_version)                         \
    {                                                                                              \
        return abi_version == WTE_ABI_VERSION ? &(ops) : (const wte_ops_t *)0;                     \
    }

/* The engine of that name, built in or from a module. directory: see above; NULL or "": not given.
 * LK_ERR_INVALID when there is none, LK_ERR_UNSUPPORTED when it can't be used: the text says what
 * was tried, and why it failed. */
LK_MUST_USE lk_status_t wte_open(const char *name, const char *directory, const wte_ops_t **out,
                                 lk_error_t *err);

#endif
