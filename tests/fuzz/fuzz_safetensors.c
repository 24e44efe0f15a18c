/*
 * Fuzz target: the first bytes of a safetensors file. The data section is taken to be as long as
 * the header says at most, so that offsets get past the size check. Whatever is accepted must be
 * consistent: sorted, covering, findable by name.
 */
#include "base/check.h"
#include "transfer/safetensors.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A plausible file size: the bytes that are there, plus what the last input byte picks. */
static uint64_t pick_file_size(const uint8_t *data, size_t size)
{
    static const uint64_t behind[] = {0, 8, 14, 16, 24, 64, 4096, 1ull << 40};
    return size + (size > 0 ? behind[data[size - 1] % LK_ARRAY_LEN(behind)] : 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t sizes[] = {size, pick_file_size(data, size)};
    for (size_t i = 0; i < LK_ARRAY_LEN(sizes); i++) {
        lk_error_t err = LK_ERROR_INIT;
        safetensors_t *file = NULL;
        lk_status_t status = safetensors_parse_header(data, size, sizes[i], &file, &err);
        if (status < 0) {
            CHECK(file == NULL && err.status == status && err.text[0] != '\0');
            continue;
        }
        uint64_t total = 0;
        for (size_t k = 0; k < safetensors_count(file); k++) {
            const safetensors_entry_t *entry = safetensors_at(file, k);
            uint64_t bytes;
            CHECK(tensor_desc_bytes(&entry->desc, &bytes) && bytes == entry->bytes);
            CHECK(safetensors_find(file, entry->desc.name) == entry);
            CHECK(entry->data == NULL);
            total += bytes;
        }
        CHECK(total < sizes[i]);
        safetensors_close(&file);
    }
    return 0;
}
