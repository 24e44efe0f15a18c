#include "transfer/backends/ipc/ipc_handles.h"

#include "base/base64.h"
#include "base/check.h"
#include "transfer/pickle.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* torch.multiprocessing.reductions.rebuild_cuda_tensor's arguments */
enum {
    ARG_CLASS,
    ARG_SIZE,
    ARG_STRIDE,
    ARG_OFFSET, /* elements */
    ARG_STORAGE_CLASS,
    ARG_DTYPE,
    ARG_DEVICE, /* the sender's number for the GPU */
    ARG_HANDLE,
    ARG_STORAGE_BYTES,
    ARG_STORAGE_OFFSET, /* bytes */
    ARG_REQUIRES_GRAD,
    ARG_COUNTER_NAME,
    ARG_COUNTER,
    ARG_EVENT,
    ARG_EVENT_WAIT,
    N_ARGS
};

/* A storage handle is a version, a type and what the type says; or, before there were types, only
 * the 64 bytes. */
#define HANDLE_HEADER 2u
#define TYPE_WHOLE    'c' /* a cudaMalloc: a cudaIpcMemHandle_t */
#define TYPE_SEGMENTS 'e' /* an expandable segment: a process id and file descriptors */

static lk_status_t bad(const char *what, const char *why, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_INVALID, "Invalid update_info for ipc: %s: %s", what, why);
}

/* ---- numbers and shapes ---- */

static bool argument(const pickle_value_t *args, size_t i, uint64_t *out)
{
    const pickle_value_t *value = pickle_item(args, i, PICKLE_INT);
    if (value == NULL || value->integer < 0) {
        return false;
    }
    *out = (uint64_t)value->integer;
    return true;
}

/* torch.Size((2, 3)), or the tuple alone. */
static const pickle_value_t *shape_of(const pickle_value_t *args, size_t i)
{
    const pickle_value_t *tuple = pickle_item(args, i, PICKLE_TUPLE);
    const pickle_value_t *call = pickle_item(args, i, PICKLE_CALL);
    const pickle_value_t *inner = pickle_call_args(call, "torch", "Size");
    return tuple != NULL ? tuple : pickle_item(inner, 0, PICKLE_TUPLE);
}

/* Into a description; false unless it is one of a contiguous tensor. */
static bool read_shape(const pickle_value_t *args, tensor_desc_t *out)
{
    const pickle_value_t *size = shape_of(args, ARG_SIZE), *stride = shape_of(args, ARG_STRIDE);
    if (size == NULL || stride == NULL || size->n != stride->n || size->n > TENSOR_MAX_DIMS) {
        return false;
    }
    out->ndim = size->n;
    for (uint32_t i = 0; i < size->n; i++) {
        if (!argument(size, i, &out->shape[i])) {
            return false;
        }
    }
    uint64_t want = 1, numel;
    if (!tensor_desc_numel(out, &numel)) {
        return false;
    }
    for (uint32_t i = size->n; i > 0 && numel > 0; i--) {
        uint64_t step;
        if (!argument(stride, i - 1, &step) || (out->shape[i - 1] != 1 && step != want)) {
            return false;
        }
        want *= out->shape[i - 1]; /* at most numel */
    }
    return true;
}

static bool read_dtype(const pickle_value_t *args, lk_dtype_t *out)
{
    const pickle_value_t *value = pickle_item(args, ARG_DTYPE, PICKLE_GLOBAL);
    return value != NULL && strcmp(value->global->module, "torch") == 0 &&
           dtype_parse(value->global->name, out);
}

/* ---- handles ---- */

static lk_status_t read_handle(const char *what, const pickle_value_t *args, ipc_export_t *out,
                               lk_error_t *err)
{
    const pickle_value_t *value = pickle_item(args, ARG_HANDLE, PICKLE_BYTES);
    if (value == NULL) {
        return bad(what, "argument 7 is no storage handle", err);
    }
    const uint8_t *bytes = value->bytes;
    if (value->len == DEVICE_IPC_HANDLE_SIZE) {
        memcpy(out->memory, bytes, DEVICE_IPC_HANDLE_SIZE);
        return LK_OK;
    }
    if (value->len > HANDLE_HEADER && bytes[1] == TYPE_SEGMENTS) {
        return lk_error_set(
            err, LK_ERR_UNSUPPORTED,
            "%s: the trainer's memory is an expandable segment, which has no handle "
            "to share; start the trainer without "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            what);
    }
    if (value->len != HANDLE_HEADER + DEVICE_IPC_HANDLE_SIZE || bytes[1] != TYPE_WHOLE) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "Invalid update_info for ipc: %s: a storage handle of %zu bytes, version "
            "%u and type %u; known are 66 bytes of type %u, and 64 bytes",
            what, value->len, value->len > 0 ? bytes[0] : 0u, value->len > 1 ? bytes[1] : 0u,
            TYPE_WHOLE);
    }
    memcpy(out->memory, bytes + HANDLE_HEADER, DEVICE_IPC_HANDLE_SIZE);
    return LK_OK;
}

/* torch's own names: no other shared memory is ever opened. */
static bool counter_name_ok(const pickle_value_t *value)
{
    static const char prefix[] = "/torch_";
    if (value == NULL || value->len >= IPC_COUNTER_NAME_MAX || value->len < sizeof prefix ||
        memcmp(value->bytes, prefix, sizeof prefix - 1) != 0) {
        return false;
    }
    for (size_t i = 1; i < value->len; i++) {
        if (!isalnum(value->bytes[i]) && value->bytes[i] != '_' && value->bytes[i] != '-') {
            return false;
        }
    }
    return true;
}

static lk_status_t read_counter(const char *what, const pickle_value_t *args, ipc_export_t *out,
                                lk_error_t *err)
{
    const pickle_value_t *name = pickle_item(args, ARG_COUNTER_NAME, PICKLE_BYTES);
    uint64_t counter;
    if (!counter_name_ok(name)) {
        return bad(what, "argument 11 is no name of torch's reference counts (/torch_...)", err);
    }
    if (!argument(args, ARG_COUNTER, &counter) || counter >= IPC_COUNTERS) {
        return bad(what, "argument 12 is no place in torch's reference counts", err);
    }
    memcpy(out->counter_name, name->bytes, name->len);
    out->counter_name[name->len] = '\0';
    out->counter = (uint32_t)counter;
    return LK_OK;
}

static lk_status_t read_event(const char *what, const pickle_value_t *args, ipc_export_t *out,
                              lk_error_t *err)
{
    const pickle_value_t *wait = pickle_item(args, ARG_EVENT_WAIT, PICKLE_BOOL);
    const pickle_value_t *event = pickle_item(args, ARG_EVENT, PICKLE_BYTES);
    if (wait == NULL) {
        return bad(what, "argument 14 is no truth value", err);
    }
    out->wait = wait->integer != 0;
    if (!out->wait) {
        return LK_OK;
    }
    if (event == NULL || event->len != DEVICE_IPC_HANDLE_SIZE) {
        return bad(what, "argument 13 is no event handle of 64 bytes", err);
    }
    memcpy(out->event, event->bytes, DEVICE_IPC_HANDLE_SIZE);
    return LK_OK;
}

/* Where the tensor lies in the memory, and that its storage holds it. */
static lk_status_t read_place(const char *what, const pickle_value_t *args,
                              const tensor_desc_t *desc, ipc_export_t *out, lk_error_t *err)
{
    uint64_t start, storage, at, bytes, end;
    if (!argument(args, ARG_OFFSET, &start) || !argument(args, ARG_STORAGE_BYTES, &storage) ||
        !argument(args, ARG_STORAGE_OFFSET, &at)) {
        return bad(what, "arguments 3, 8 and 9 are not all whole numbers", err);
    }
    if (!tensor_desc_bytes(desc, &bytes) ||
        __builtin_mul_overflow(start, (uint64_t)dtype_bytes(desc->dtype), &start) ||
        __builtin_add_overflow(start, bytes, &end) || end > storage ||
        __builtin_add_overflow(at, start, &out->offset) || out->offset > INT64_MAX - bytes) {
        return bad(what, "the tensor does not fit into its storage", err);
    }
    out->bytes = bytes;
    return LK_OK;
}

/* (function, args), or the arguments alone. */
static const pickle_value_t *arguments_of(const pickle_value_t *value)
{
    const pickle_value_t *function = pickle_item(value, 0, PICKLE_GLOBAL);
    bool pair = value->n == 2 && pickle_is_global(function, "torch.multiprocessing.reductions",
                                                  "rebuild_cuda_tensor");
    return pair ? pickle_item(value, 1, PICKLE_TUPLE) : value;
}

/* `want`: what the tensor has to be; NULL: any run of bytes. */
static lk_status_t read_export(const char *what, const pickle_value_t *value,
                               const tensor_desc_t *want, ipc_export_t *out, lk_error_t *err)
{
    const pickle_value_t *args =
        value != NULL && value->type == PICKLE_TUPLE ? arguments_of(value) : NULL;
    tensor_desc_t desc = {.name = what};
    if (args == NULL || args->n != N_ARGS) {
        return bad(what, "its handle is not the 15 arguments of a CUDA tensor", err);
    }
    if (!read_dtype(args, &desc.dtype)) {
        return bad(what, "argument 5 is no known dtype", err);
    }
    if (!read_shape(args, &desc)) {
        return bad(what, "it is not contiguous, or has no proper shape", err);
    }
    if (want != NULL && (want->dtype != desc.dtype || want->ndim != desc.ndim ||
                         memcmp(want->shape, desc.shape, desc.ndim * sizeof desc.shape[0]) != 0)) {
        char got[160], named[160];
        tensor_desc_shape_text(&desc, got, sizeof got);
        tensor_desc_shape_text(want, named, sizeof named);
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid update_info for ipc: %s: its handle is of %s %s, but it is "
                            "announced as %s %s",
                            what, dtype_torch_name(desc.dtype), got, dtype_torch_name(want->dtype),
                            named);
    }
    LK_RETURN_IF_ERROR(read_place(what, args, &desc, out, err));
    LK_RETURN_IF_ERROR(read_handle(what, args, out, err));
    LK_RETURN_IF_ERROR(read_counter(what, args, out, err));
    return read_event(what, args, out, err);
}

/* The entry of this GPU. */
static const pickle_value_t *pick_gpu(const char *what, const pickle_value_t *dict,
                                      const char *uuid, lk_error_t *err)
{
    if (dict == NULL || dict->type != PICKLE_DICT) {
        (void)bad(what, "its handles are no dict by GPU UUID", err);
        return NULL;
    }
    const pickle_value_t *value = pickle_get(dict, uuid);
    if (value == NULL) {
        char names[400] = "";
        size_t len = 0;
        for (uint32_t i = 0; i < dict->n && len < sizeof names - 50; i += 2) {
            const pickle_value_t *key = dict->items[i];
            bool printable = key->type == PICKLE_STR && key->len == DEVICE_UUID_SIZE - 1;
            len += (size_t)snprintf(names + len, sizeof names - len, "%s%.*s", i > 0 ? ", " : "",
                                    printable ? (int)key->len : 1,
                                    printable ? (const char *)key->bytes : "?");
        }
        lk_error_set(err, LK_ERR_INVALID,
                     "%s: IPC handle not found for GPU UUID %s. Available UUIDs: [%s]", what, uuid,
                     names);
    }
    return value;
}

/* ---- update_info ---- */

static lk_status_t check_sizes(const wte_update_t *update, uint64_t buffer, lk_error_t *err)
{
    const json_t *sizes = json_object_get(update->update_info, "tensor_sizes");
    if (!json_is_array(sizes)) {
        return bad("tensor_sizes", "`tensor_sizes` is required when packed=True", err);
    }
    if (json_array_size(sizes) != update->n_tensors) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "`tensor_sizes` should be of the same size as `names`: got %zu and %zu",
                            json_array_size(sizes), update->n_tensors);
    }
    uint64_t total = 0;
    for (size_t i = 0; i < update->n_tensors; i++) {
        const json_t *size = json_array_get(sizes, i);
        uint64_t bytes;
        bool fits = tensor_desc_bytes(&update->tensors[i], &bytes);
        CHECK(fits); /* update_spec.c */
        if (!json_is_integer(size) || json_integer_value(size) < 0 ||
            (uint64_t)json_integer_value(size) != bytes) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "Invalid update_info for ipc: tensor_sizes[%zu] is not the %llu "
                                "bytes of %s",
                                i, (unsigned long long)bytes, update->tensors[i].name);
        }
        total += bytes; /* update_spec.c bounds the sum */
    }
    return total <= buffer ? LK_OK
                           : lk_error_set(err, LK_ERR_INVALID,
                                          "Invalid update_info for ipc: the tensors have %llu "
                                          "bytes, the packed buffer %llu",
                                          (unsigned long long)total, (unsigned long long)buffer);
}

static lk_status_t read_exports(const wte_update_t *update, const pickle_value_t *root,
                                const char *uuid, ipc_export_t *out, size_t n, lk_error_t *err)
{
    if (!update->packed && (root->type != PICKLE_LIST || root->n != n)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "`ipc_handles` should be of the same size as `names`: got %u and %zu",
                            root->type == PICKLE_LIST ? root->n : 0u, n);
    }
    for (size_t i = 0; i < n; i++) {
        const char *what = update->packed ? "the packed buffer" : update->tensors[i].name;
        const pickle_value_t *value =
            pick_gpu(what, update->packed ? root : root->items[i], uuid, err);
        if (value == NULL) {
            return LK_ERR_INVALID;
        }
        LK_RETURN_IF_ERROR(
            read_export(what, value, update->packed ? NULL : &update->tensors[i], &out[i], err));
    }
    return update->packed ? check_sizes(update, out[0].bytes, err) : LK_OK;
}

static lk_status_t parse_pickle(const wte_update_t *update, const char *uuid, const uint8_t *bytes,
                                size_t len, ipc_handles_t *out, lk_error_t *err)
{
    pickle_t *pickle = NULL;
    size_t n = update->packed ? 1 : update->n_tensors;
    if (pickle_parse(bytes, len, pickle_globals_ipc, pickle_n_globals_ipc, &pickle, err) < 0) {
        return lk_error_prefix(err, "Invalid update_info for ipc: ipc_handles_pickled");
    }
    ipc_handles_t handles = {.exports = calloc(n + 1, sizeof *handles.exports), .n = n};
    lk_status_t status =
        handles.exports == NULL
            ? lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu handles", n)
            : read_exports(update, pickle_root(pickle), uuid, handles.exports, n, err);
    pickle_destroy(&pickle);
    if (status < 0) {
        ipc_handles_fini(&handles);
        return status;
    }
    *out = handles;
    return LK_OK;
}

lk_status_t ipc_handles_parse(const wte_update_t *update, const char *gpu_uuid, ipc_handles_t *out,
                              lk_error_t *err)
{
    const json_t *plain = json_object_get(update->update_info, "ipc_handles");
    const json_t *text = json_object_get(update->update_info, "ipc_handles_pickled");
    if (plain != NULL && !json_is_null(plain)) {
        return text != NULL && !json_is_null(text)
                   ? lk_error_set(err, LK_ERR_INVALID,
                                  "Cannot specify both `ipc_handles` and `ipc_handles_pickled`")
                   : lk_error_set(err, LK_ERR_UNSUPPORTED,
                                  "`ipc_handles` are Python objects, which JSON can't carry; send "
                                  "`ipc_handles_pickled`");
    }
    if (text == NULL || json_is_null(text)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Either `ipc_handles` or `ipc_handles_pickled` must be provided");
    }
    size_t len = json_string_length(text), n = 0;
    uint8_t *bytes = malloc(len + 1);
    lk_status_t status;
    if (bytes == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for handles");
    } else if (!json_is_string(text) ||
               !base64_decode(json_string_value(text), len, bytes, len, &n)) {
        status = bad("ipc_handles_pickled", "must be standard base64", err);
    } else {
        status = parse_pickle(update, gpu_uuid, bytes, n, out, err);
    }
    free(bytes);
    return status;
}

void ipc_handles_fini(ipc_handles_t *self)
{
    free(self->exports);
    *self = (ipc_handles_t){0};
}
