#include "transfer/device/device.h"

#include "base/check.h"
#include "transfer/device/device_cuda.h"
#include "transfer/device/device_host.h"

#include <sched.h>
#include <string.h>

lk_status_t device_open(const char *name, int index, device_t **out, lk_error_t *err)
{
    if (strcmp(name, "host") == 0) {
        return device_host_open(out, err);
    }
    if (strcmp(name, "cuda") == 0) {
        return device_cuda_open(index, out, err);
    }
    return lk_error_set(err, LK_ERR_UNSUPPORTED, "there is no device '%.32s'", name);
}

void device_close(device_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        (*self_p)->ops->close(*self_p);
        *self_p = NULL;
    }
}

unsigned device_count(const char *name)
{
    return strcmp(name, "host") == 0 ? 1 : strcmp(name, "cuda") == 0 ? device_cuda_count() : 0;
}

lk_status_t device_wait(device_t *self, device_stream_t *stream, lk_error_t *err)
{
    lk_status_t status;
    while ((status = self->ops->stream_test(self, stream, err)) == LK_INPROGRESS) {
        sched_yield();
    }
    return status;
}
