#include "base/check.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/shm/shm_ring.h"
#include "transfer/backends/shm/shm_stream.h"
#include "transfer/backends/transfer_receiver.h"
#include "transfer/wte_fields.h"

typedef struct {
    transfer_receiver_t receiver;
    shm_ring_t ring;
    uint64_t bytes; /* that the ring has to have */
} shm_state_t;

static const wte_field_t init_fields[] = {
    {"segment", WTE_FIELD_STRING, true, 1, SHM_NAME_MAX},
    {"bytes", WTE_FIELD_INT, true, (int64_t)SHM_RING_SLOTS_MIN *TRANSFER_CHUNK_BYTES,
     (int64_t)SHM_RING_SLOTS_MAX *TRANSFER_CHUNK_BYTES},
    {"session_token", WTE_FIELD_STRING, true, 1, TRANSFER_TOKEN_MAX},
    WTE_WORLD_FIELDS,
    WTE_PACKED_FIELDS,
};

/* Maps nothing that the receiver no longer reads. */
static lk_status_t unmap_after(shm_state_t *self, lk_status_t st)
{
    if (st < 0 &&
        (self->receiver.phase == RECEIVER_CLOSED || self->receiver.phase == RECEIVER_CANCELED)) {
        shm_ring_fini(&self->ring);
    }
    return st;
}

static lk_status_t shm_init_check(const json_t *init_info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    LK_RETURN_IF_ERROR(wte_fields_check("init_info", wte_shm.name, init_info, init_fields,
                                        LK_ARRAY_LEN(init_fields), err));
    int64_t bytes = wte_fields_int(init_info, "bytes", 0);
    if (bytes % TRANSFER_CHUNK_BYTES != 0) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info for shm: 'bytes' must be a multiple of %u, not %lld",
                            TRANSFER_CHUNK_BYTES, (long long)bytes);
    }
    return wte_fields_world(wte_shm.name, init_info, (int64_t)ctx->dp_size * ctx->ranks_per_replica,
                            err);
}

static lk_status_t shm_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                                 lk_error_t *err)
{
    shm_state_t *self = state;
    LK_RETURN_IF_ERROR(shm_init_check(init_info, ctx, err));
    receiver_fini(&self->receiver);
    shm_ring_fini(&self->ring);
    self->bytes = (uint64_t)wte_fields_int(init_info, "bytes", 0);
    byte_stream_t *stream =
        shm_stream_dial(json_string_value(json_object_get(init_info, "segment")), ctx->env);
    const char *token = json_string_value(json_object_get(init_info, "session_token"));
    return receiver_open(&self->receiver, ctx, token, &stream, 1, err);
}

static lk_status_t shm_init_test(void *state, lk_error_t *err)
{
    shm_state_t *self = state;
    lk_status_t st = receiver_open_step(&self->receiver, err);
    if (st != LK_OK) {
        return unmap_after(self, st);
    }
    int fd = shm_stream_take_fd(receiver_stream(&self->receiver));
    st = fd >= 0 ? shm_ring_map(&self->ring, fd, self->bytes, err)
                 : lk_error_set(err, LK_ERR_PEER,
                                "trainer %s welcomed this rank, but passed no shared memory",
                                self->receiver.peer);
    if (st < 0) {
        receiver_fini(&self->receiver);
        return st;
    }
    receiver_set_window(&self->receiver, self->ring.map, self->ring.bytes / TRANSFER_CHUNK_BYTES);
    return LK_OK;
}

static lk_status_t shm_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    shm_state_t *self = state;
    static const wte_field_t fields[] = {WTE_UPDATE_FIELDS};
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_shm.name, update->update_info, fields,
                                        LK_ARRAY_LEN(fields), err));
    return receiver_check(&self->receiver, wte_shm.name, err);
}

static lk_status_t shm_update_post(void *state, const wte_update_t *update,
                                   const weight_sink_t *sink, lk_error_t *err)
{
    shm_state_t *self = state;
    LK_RETURN_IF_ERROR(shm_update_check(state, update, err));
    return receiver_begin(&self->receiver, update, sink, err);
}

static lk_status_t shm_update_test(void *state, lk_error_t *err)
{
    shm_state_t *self = state;
    return unmap_after(self, receiver_step(&self->receiver, err));
}

static void shm_abort(void *state)
{
    shm_state_t *self = state;
    receiver_abort(&self->receiver);
    if (self->receiver.phase != RECEIVER_IDLE) {
        shm_ring_fini(&self->ring);
    }
}

static void shm_progress(const void *state, wte_progress_t *out)
{
    receiver_progress(&((const shm_state_t *)state)->receiver, out);
}

static size_t shm_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return receiver_pollfds(&((const shm_state_t *)state)->receiver, fds, room);
}

static void shm_fini(void *state)
{
    shm_state_t *self = state;
    receiver_fini(&self->receiver);
    shm_ring_fini(&self->ring);
}

const wte_ops_t wte_shm = {
    .abi_version = WTE_ABI_VERSION,
    .name = "shm",
    .state_size = sizeof(shm_state_t),
    .init_check = shm_init_check,
    .init_post = shm_init_post,
    .init_test = shm_init_test,
    .update_check = shm_update_check,
    .update_post = shm_update_post,
    .update_test = shm_update_test,
    .abort = shm_abort,
    .progress = shm_progress,
    .pollfds = shm_pollfds,
    .fini = shm_fini,
};
