#include "base/check.h"
#include "transfer/backends/backends.h"

#include <string.h>

/* name is the "backend" of --weight-transfer-config */
#define BACKEND_TABLE(X)                                                                           \
    X(disk)                                                                                        \
    X(mem)                                                                                         \
    X(shm)                                                                                         \
    X(tcp)

static const wte_ops_t *const engines[] = {
#define X(name) &wte_##name,
    BACKEND_TABLE(X)
#undef X
};

static const char *const names = ""
#define X(name) ", " #name
    BACKEND_TABLE(X)
#undef X
    ;

bool wte_ops_whole(const wte_ops_t *ops)
{
    return ops->state_size > 0 && ops->init_check != NULL && ops->init_post != NULL &&
           ops->init_test != NULL && ops->update_check != NULL && ops->update_post != NULL &&
           ops->update_test != NULL && ops->abort != NULL && ops->progress != NULL &&
           ops->pollfds != NULL && ops->fini != NULL &&
           (ops->update_open == NULL) == (ops->update_close == NULL);
}

static void check_whole(const wte_ops_t *ops)
{
    CHECKF(ops->abi_version == WTE_ABI_VERSION, "weight transfer engine %s has ABI version %u",
           ops->name, ops->abi_version);
    CHECKF(wte_ops_whole(ops), "weight transfer engine %s lacks a mandatory operation", ops->name);
}

const wte_ops_t *wte_find(const char *name)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(engines); i++) {
        check_whole(engines[i]);
        if (strcmp(engines[i]->name, name) == 0) {
            return engines[i];
        }
    }
    return NULL;
}

const char *wte_names(void)
{
    return names + 2; /* after the first ", " */
}
