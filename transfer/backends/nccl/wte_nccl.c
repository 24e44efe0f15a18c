#include "transfer/backends/nccl/wte_nccl.h"
#include "base/base64.h"
#include "base/check.h"
#include "transfer/backends/nccl/nccl_receiver.h"
#include "transfer/wte_fields.h"

#include <string.h>

static const nccl_comm_ops_t *comm_ops = &nccl_lib_ops;

void wte_nccl_use(const nccl_comm_ops_t *ops)
{
    comm_ops = ops != NULL ? ops : &nccl_lib_ops;
}

static const wte_field_t init_fields[] = {
    {"master_address", WTE_FIELD_STRING, false, 1, 255},
    {"master_port", WTE_FIELD_INT, false, 1, 65535},
    {"nccl_unique_id_b64", WTE_FIELD_STRING, false, 0, 4096},
    {"rank_offset", WTE_FIELD_INT, true, 1, 1 << 20},
    {"world_size", WTE_FIELD_INT, true, 2, 1 << 20},
    WTE_PACKED_FIELDS,
};

static const json_t *given(const json_t *init_info, const char *name)
{
    const json_t *value = json_object_get(init_info, name);
    return json_is_null(value) ? NULL : value;
}

static lk_status_t read_id(const char *text, uint8_t id[NCCL_ID_BYTES], lk_error_t *err)
{
    size_t len = strlen(text), n = 0;
    uint8_t bytes[4096];
    if (!base64_decode(text, len, bytes, sizeof bytes, &n)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info for nccl: nccl_unique_id_b64 is not valid standard "
                            "base64 (URL-safe base64 is not accepted)");
    }
    if (n != NCCL_ID_BYTES) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info for nccl: nccl_unique_id_b64 must decode to %d "
                            "bytes, got %zu",
                            NCCL_ID_BYTES, n);
    }
    memcpy(id, bytes, NCCL_ID_BYTES);
    return LK_OK;
}

/* Of an init_info whose fields are checked. */
static lk_status_t read_meeting(const json_t *init_info, const wte_context_t *ctx,
                                nccl_meeting_t *out, lk_error_t *err)
{
    nccl_meeting_t m = {0};
    const json_t *id = given(init_info, "nccl_unique_id_b64");
    const json_t *host = given(init_info, "master_address");
    const json_t *port = given(init_info, "master_port");
    if (id != NULL && (host != NULL || port != NULL)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info for nccl: pass nccl_unique_id_b64 OR "
                            "master_address/master_port, not both");
    }
    if (id == NULL && (host == NULL || port == NULL)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid init_info for nccl: need nccl_unique_id_b64, or both "
                            "master_address and master_port (got %s)",
                            host != NULL   ? "only master_address"
                            : port != NULL ? "only master_port"
                                           : "neither");
    }
    if (id != NULL) {
        m.has_id = true;
        LK_RETURN_IF_ERROR(read_id(json_string_value(id), m.id, err));
    } else {
        m.host = json_string_value(host);
        m.port = (uint16_t)json_integer_value(port);
    }
    m.world_size = (uint32_t)wte_fields_int(init_info, "world_size", 0);
    m.rank = (uint32_t)wte_fields_int(init_info, "rank_offset", 1) +
             ctx->dp_rank * ctx->ranks_per_replica;
    if (wte_fields_bool(init_info, "packed", false) && ctx->largest_tensor_bytes > 0) {
        m.slots = (uint32_t)wte_fields_int(init_info, "packed_num_buffers", 2);
        m.slot_bytes = (uint64_t)wte_fields_int(init_info, "packed_buffer_size_bytes",
                                                PACKED_BUFFER_SIZE_DEFAULT) +
                       ctx->largest_tensor_bytes;
    }
    *out = m;
    return LK_OK;
}

static lk_status_t check(const json_t *init_info, const wte_context_t *ctx, nccl_meeting_t *out,
                         lk_error_t *err)
{
    LK_RETURN_IF_ERROR(wte_fields_check("init_info", wte_nccl.name, init_info, init_fields,
                                        LK_ARRAY_LEN(init_fields), err));
    LK_RETURN_IF_ERROR(wte_fields_world(wte_nccl.name, init_info,
                                        (int64_t)ctx->dp_size * ctx->ranks_per_replica, err));
    LK_RETURN_IF_ERROR(read_meeting(init_info, ctx, out, err));
    if (ctx->device == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "nccl moves weights between GPUs, but this engine holds them in host "
                            "memory (see --device)");
    }
    return LK_OK;
}

static lk_status_t nccl_init_check(const json_t *init_info, const wte_context_t *ctx,
                                   lk_error_t *err)
{
    nccl_meeting_t meeting;
    return check(init_info, ctx, &meeting, err);
}

static lk_status_t nccl_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    nccl_meeting_t meeting;
    LK_RETURN_IF_ERROR(check(init_info, ctx, &meeting, err));
    return nccl_receiver_open(state, comm_ops, ctx, &meeting, err);
}

static lk_status_t nccl_init_test(void *state, lk_error_t *err)
{
    return nccl_receiver_open_step(state, err);
}

static lk_status_t nccl_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    static const wte_field_t fields[] = {WTE_UPDATE_FIELDS};
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_nccl.name, update->update_info, fields,
                                        LK_ARRAY_LEN(fields), err));
    return nccl_receiver_check(state, err);
}

static lk_status_t nccl_update_post(void *state, const wte_update_t *update,
                                    const weight_sink_t *sink, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(nccl_update_check(state, update, err));
    return nccl_receiver_begin(state, update, sink, err);
}

static lk_status_t nccl_update_test(void *state, lk_error_t *err)
{
    return nccl_receiver_step(state, err);
}

static void nccl_abort(void *state)
{
    nccl_receiver_abort(state);
}

static void nccl_progress(const void *state, wte_progress_t *out)
{
    nccl_receiver_progress(state, out);
}

static void nccl_describe(const void *state, json_t *object)
{
    const nccl_receiver_t *self = state;
    const nccl_link_t *link = &self->link;
    if (link->library == NULL) {
        return;
    }
    /* a field that there is no memory for is one that isn't said */
    (void)json_object_set_new(object, "nccl_version", json_string(link->library->version));
    (void)json_object_set_new(object, "nccl_library", json_string(link->library->path));
    (void)json_object_set_new(object, "nccl_rank", json_integer(self->rank));
    (void)json_object_set_new(object, "nccl_world_size", json_integer(self->world_size));
    const nccl_times_t *t = &self->times;
    const struct {
        const char *key;
        uint64_t ns;
    } times[] = {{"nccl_enqueued_us", t->called_ns},
                 {"nccl_first_us", t->first_ns},
                 {"nccl_wire_us", t->wire_ns},
                 {"nccl_done_us", t->done_ns}};
    for (size_t i = 0; i < LK_ARRAY_LEN(times) && t->done_ns > 0; i++) {
        uint64_t ns = times[i].ns > t->begun_ns ? times[i].ns - t->begun_ns : 0;
        (void)json_object_set_new(object, times[i].key, json_integer((json_int_t)(ns / 1000)));
    }
    (void)json_object_set_new(object, "staging_bytes",
                              json_integer((json_int_t)(link->n_slots * link->slot_bytes)));
}

static size_t nccl_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return nccl_receiver_pollfds(state, fds, room);
}

static void nccl_fini(void *state)
{
    nccl_receiver_fini(state);
}

const wte_ops_t wte_nccl = {
    .abi_version = WTE_ABI_VERSION,
    .name = "nccl",
    .state_size = sizeof(nccl_receiver_t),
    .init_check = nccl_init_check,
    .init_post = nccl_init_post,
    .init_test = nccl_init_test,
    .update_check = nccl_update_check,
    .update_post = nccl_update_post,
    .update_test = nccl_update_test,
    .abort = nccl_abort,
    .progress = nccl_progress,
    .describe = nccl_describe,
    .pollfds = nccl_pollfds,
    .fini = nccl_fini,
};
