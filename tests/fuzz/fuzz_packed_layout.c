/*
 * Any list of sizes and any buffer size become buckets, or a refusal: the buckets cover the tensors
 * once and in order, and each ends with the tensor that takes it over the buffer's size. Input:
 * flags, buffer size (4 bytes), then dtype, dimensions and shape of one tensor after the other.
 */
#include "base/check.h"
#include "transfer/packed_layout.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_TENSORS 64

static size_t read_tensors(const uint8_t *data, size_t size, tensor_desc_t *tensors)
{
    static const lk_dtype_t dtypes[] = {LK_DTYPE_F32, LK_DTYPE_BF16, LK_DTYPE_F16};
    size_t n = 0;
    while (n < MAX_TENSORS && size >= 1) {
        uint32_t ndim = (data[0] >> 4) % (TENSOR_MAX_DIMS + 1);
        if (size < 1 + 2 * (size_t)ndim) {
            break;
        }
        tensors[n] = (tensor_desc_t){
            .name = "t", .dtype = dtypes[data[0] % LK_ARRAY_LEN(dtypes)], .ndim = ndim};
        for (uint32_t d = 0; d < ndim; d++) { /* up to 2^51 in a dimension */
            tensors[n].shape[d] = (uint64_t)data[1 + 2 * d] << data[2 + 2 * d] % 44;
        }
        data += 1 + 2 * ndim;
        size -= 1 + 2 * ndim;
        n++;
    }
    return n;
}

static uint64_t bytes_of(const tensor_desc_t *tensor)
{
    uint64_t bytes = 0;
    CHECK(tensor_desc_bytes(tensor, &bytes));
    return bytes;
}

static void check_buckets(const tensor_desc_t *tensors, size_t n, bool packed, uint64_t limit,
                          const packed_bucket_t *buckets, size_t n_buckets)
{
    size_t at = 0;
    for (size_t b = 0; b < n_buckets; b++) {
        CHECK(buckets[b].first == at && buckets[b].count > 0);
        CHECK(packed || buckets[b].count == 1);
        uint64_t bytes = 0;
        for (size_t i = 0; i < buckets[b].count; i++) {
            bytes += bytes_of(&tensors[at++]);
        }
        CHECK(bytes == buckets[b].bytes);
        CHECK(at <= n);
        /* the reference closes a bucket with the tensor that takes it over the buffer's size */
        uint64_t before_last = bytes - bytes_of(&tensors[at - 1]);
        CHECK(buckets[b].count == 1 || before_last <= limit);
        CHECK(!packed || b + 1 == n_buckets || bytes > limit);
    }
    CHECK(at == n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 5) {
        return 0;
    }
    tensor_desc_t tensors[MAX_TENSORS];
    bool packed = data[0] & 1;
    uint32_t limit;
    memcpy(&limit, data + 1, sizeof limit);
    size_t n = read_tensors(data + 5, size - 5, tensors), n_buckets = 0;
    packed_bucket_t *buckets = NULL;
    lk_error_t err = LK_ERROR_INIT;
    if (packed_layout(tensors, n, packed, limit, &buckets, &n_buckets, &err) != LK_OK) {
        CHECK(err.text[0] != '\0' && buckets == NULL);
        return 0;
    }
    check_buckets(tensors, n, packed, limit, buckets, n_buckets);
    free(buckets);
    return 0;
}
