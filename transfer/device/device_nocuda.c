/* device_nocuda.c: device_cuda.h in a build without CUDA. */
#include "transfer/device/device_cuda.h"

lk_status_t device_cuda_open(int index, device_t **out, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_UNSUPPORTED,
                        "GPU %d: this build has no CUDA; build with -Dcuda=enabled where nvcc is",
                        index);
}

unsigned device_cuda_count(void)
{
    return 0;
}
