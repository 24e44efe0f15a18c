#include "base/check.h"
#include "transfer/device/device.h"
#include "transfer/trainer/lst.h"

/* Tensors over CUDA IPC: exporting them is the tensors' owner's business (torch), and the handles
 * go with lst_call. What is here is the connection, and the GPU for digests. */

void lst_ipc_use(lst_t *self, device_t *device)
{
    self->ipc_device = device;
    self->ipc_borrowed = true;
}

void lst_ipc_drop(lst_t *self)
{
    self->ipc_up = false;
}

void lst_ipc_fini(lst_t *self)
{
    lst_ipc_drop(self);
    if (!self->ipc_borrowed) {
        device_close(&self->ipc_device);
    }
    self->ipc_device = NULL;
}

static lk_status_t open_device(lst_t *self, int index)
{
    if (self->ipc_borrowed) {
        return LK_OK;
    }
    if (self->ipc_device != NULL && self->ipc_device->index != index) {
        device_close(&self->ipc_device);
    }
    return self->ipc_device != NULL ? LK_OK
                                    : device_open("cuda", index, &self->ipc_device, &self->err);
}

lst_status_t lst_init_ipc(lst_t *self, const lst_ipc_options_t *options)
{
    static const lst_ipc_options_t defaults = {0};
    const lst_ipc_options_t *o = options != NULL ? options : &defaults;
    json_t *reply = NULL;
    lst_drop_ranks(self);
    lk_status_t st = open_device(self, o->device);
    if (st < 0) {
        return (lst_status_t)st;
    }
    json_t *args = json_pack("{s:{s:b}}", "init_info", "packed", (int)o->packed);
    st = args != NULL ? lst_ask(self, "init_weight_transfer_engine", args, &reply)
                      : lk_error_set(&self->err, LK_ERR_NO_MEMORY, "out of memory");
    if (st == LK_OK) {
        lst_learn_model(self, reply);
        self->ipc_up = true;
        json_decref(reply);
    }
    return (lst_status_t)st;
}
