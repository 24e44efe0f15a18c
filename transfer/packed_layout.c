#include "transfer/packed_layout.h"

#include <stdlib.h>

lk_status_t packed_layout(const tensor_desc_t *tensors, size_t n, bool packed, uint64_t buffer_size,
                          packed_bucket_t **buckets, size_t *n_buckets, lk_error_t *err)
{
    packed_bucket_t *list = n > 0 ? calloc(n, sizeof *list) : NULL;
    if (n > 0 && list == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu buckets", n);
    }
    size_t count = 0;
    uint64_t total = 0;
    bool open = false;
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes;
        if (!tensor_desc_bytes(&tensors[i], &bytes) || bytes > INT64_MAX - total) {
            free(list);
            return lk_error_set(err, LK_ERR_INVALID, "tensor '%s' is too large", tensors[i].name);
        }
        total += bytes;
        if (!open) {
            list[count++] = (packed_bucket_t){.first = i};
            open = true;
        }
        packed_bucket_t *bucket = &list[count - 1];
        bucket->count++;
        bucket->bytes += bytes;
        /* strictly greater: a total that just fills the buffer takes another tensor */
        if (!packed || bucket->bytes > buffer_size) {
            open = false;
        }
    }
    *buckets = list;
    *n_buckets = count;
    return LK_OK;
}
