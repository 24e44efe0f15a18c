/* Pickled IPC handles: byte 0 says packed or not, the rest is the pickle. */
#include "base/base64.h"
#include "base/check.h"
#include "transfer/backends/ipc/ipc_handles.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const tensor_desc_t tensors[] = {{"a", LK_DTYPE_F32, 2, {2, 3}},
                                            {"b", LK_DTYPE_BF16, 2, {4, 5}}};
    if (size == 0) {
        return 0;
    }
    size_t n = 1 + data[0] / 2 % 2;
    char *text = malloc(BASE64_SIZE(size - 1));
    CHECK(text != NULL);
    base64_encode(data + 1, size - 1, text);
    json_t *info =
        json_pack("{s:s, s:[i, i]}", "ipc_handles_pickled", text, "tensor_sizes", 24, 40);
    wte_update_t update = {.tensors = tensors,
                           .n_tensors = n,
                           .packed = n == 2 && data[0] % 2 == 1,
                           .update_info = info};
    lk_error_t err = LK_ERROR_INIT;
    ipc_handles_t handles = {0};
    lk_status_t status =
        ipc_handles_parse(&update, "84135ed2-9dce-b2e5-bcd1-eebe17e77a17", &handles, &err);
    CHECK((status == LK_OK) == (err.text[0] == '\0'));
    if (status == LK_OK) {
        CHECK(handles.n == (update.packed ? 1 : n));
        for (size_t i = 0; i < handles.n; i++) {
            const ipc_export_t *export = &handles.exports[i];
            CHECK(export->offset <= INT64_MAX - export->bytes && export->counter < IPC_COUNTERS);
            CHECK(strncmp(export->counter_name, "/torch_", 7) == 0);
            CHECK(strchr(export->counter_name + 1, '/') == NULL);
        }
    }
    ipc_handles_fini(&handles);
    json_decref(info);
    free(text);
    return 0;
}
