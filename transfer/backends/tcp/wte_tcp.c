#include "base/check.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/tcp/tcp_stream.h"
#include "transfer/backends/transfer_receiver.h"
#include "transfer/wte_fields.h"

static const wte_field_t init_fields[] = {
    {"master_address", WTE_FIELD_STRING, true, 1, 255},
    {"master_port", WTE_FIELD_INT, true, 1, 65535},
    {"session_token", WTE_FIELD_STRING, true, 1, TRANSFER_TOKEN_MAX},
    {"connections", WTE_FIELD_INT, false, 1, TRANSFER_LANES_MAX},
    WTE_WORLD_FIELDS,
    WTE_PACKED_FIELDS,
};

static lk_status_t tcp_init_check(const json_t *init_info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    LK_RETURN_IF_ERROR(wte_fields_check("init_info", wte_tcp.name, init_info, init_fields,
                                        LK_ARRAY_LEN(init_fields), err));
    return wte_fields_world(wte_tcp.name, init_info, (int64_t)ctx->dp_size * ctx->ranks_per_replica,
                            err);
}

static lk_status_t tcp_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                                 lk_error_t *err)
{
    LK_RETURN_IF_ERROR(tcp_init_check(init_info, ctx, err));
    byte_stream_t *streams[TRANSFER_LANES_MAX] = {NULL};
    size_t n = (size_t)wte_fields_int(init_info, "connections", 1);
    for (size_t i = 0; i < n; i++) {
        streams[i] =
            tcp_stream_dial(json_string_value(json_object_get(init_info, "master_address")),
                            (uint16_t)wte_fields_int(init_info, "master_port", 0), ctx->env);
    }
    const char *token = json_string_value(json_object_get(init_info, "session_token"));
    return receiver_open(state, ctx, token, streams, n, err);
}

static lk_status_t tcp_init_test(void *state, lk_error_t *err)
{
    return receiver_open_step(state, err);
}

static lk_status_t tcp_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    static const wte_field_t fields[] = {WTE_UPDATE_FIELDS};
    LK_RETURN_IF_ERROR(wte_fields_check("update_info", wte_tcp.name, update->update_info, fields,
                                        LK_ARRAY_LEN(fields), err));
    return receiver_check(state, wte_tcp.name, err);
}

static lk_status_t tcp_update_post(void *state, const wte_update_t *update,
                                   const weight_sink_t *sink, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(tcp_update_check(state, update, err));
    return receiver_begin(state, update, sink, err);
}

static lk_status_t tcp_update_test(void *state, lk_error_t *err)
{
    return receiver_step(state, err);
}

static void tcp_abort(void *state)
{
    receiver_abort(state);
}

static void tcp_progress(const void *state, wte_progress_t *out)
{
    receiver_progress(state, out);
}

static size_t tcp_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return receiver_pollfds(state, fds, room);
}

static void tcp_fini(void *state)
{
    receiver_fini(state);
}

const wte_ops_t wte_tcp = {
    .abi_version = WTE_ABI_VERSION,
    .name = "tcp",
    .state_size = sizeof(transfer_receiver_t),
    .init_check = tcp_init_check,
    .init_post = tcp_init_post,
    .init_test = tcp_init_test,
    .update_check = tcp_update_check,
    .update_post = tcp_update_post,
    .update_test = tcp_update_test,
    .abort = tcp_abort,
    .progress = tcp_progress,
    .pollfds = tcp_pollfds,
    .fini = tcp_fini,
};
