/* What a hostile trainer sends to a rank, and a hostile rank to a trainer, through the in-memory
 * streams. Byte 0 picks the side and whether the update is packed; the rest are the bytes. */
#include "base/check.h"
#include "transfer/backends/mem/mem_stream.h"
#include "transfer/backends/transfer_receiver.h"
#include "transfer/backends/transfer_sender.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define N_TENSORS 4
static const tensor_desc_t tensors[N_TENSORS] = {
    {.name = "a", .dtype = LK_DTYPE_F32, .ndim = 1, .shape = {5}},
    {.name = "b", .dtype = LK_DTYPE_U8, .ndim = 1, .shape = {0}},
    {.name = "c", .dtype = LK_DTYPE_BF16, .ndim = 2, .shape = {3, 3}},
    {.name = "d", .dtype = LK_DTYPE_U8, .ndim = 1, .shape = {1}},
};

static uint64_t clock_ns;

static uint64_t fake_now(void *ctx)
{
    return clock_ns;
}

static void fake_random(void *ctx, void *buf, size_t len)
{
    memset(buf, 0, len); /* session 1: the corpus knows it */
}

static const lk_env_t env = {NULL, fake_now, fake_random};

static lk_status_t take_all(void *ctx, const tensor_desc_t *list, size_t n, lk_error_t *err)
{
    return LK_OK;
}

static lk_status_t take(void *ctx, size_t index, const void *bytes, size_t len, lk_error_t *err)
{
    uint64_t want = 0;
    bool fits = tensor_desc_bytes(&tensors[index], &want);
    CHECK(fits && index < N_TENSORS && len == want);
    uint8_t sum = 0;
    for (size_t i = 0; i < len; i++) {
        sum ^= ((const uint8_t *)bytes)[i];
    }
    *(uint8_t *)ctx ^= sum;
    return LK_OK;
}

static const weight_sink_ops_t sink_ops = {.check = take_all, .plan = take_all, .tensor = take};

/* Writes what fits; the ring is larger than any input that the fuzzer makes. */
static void write_all(byte_stream_t *stream, const uint8_t *data, size_t size)
{
    struct iovec iov = {(void *)data, size};
    size_t moved = 0;
    lk_error_t err;
    if (size > 0) {
        (void)stream->ops->writev(stream, &iov, 1, &moved, &err); /* refused once it has closed */
    }
}

static void hostile_trainer(mem_listener_t *listener, bool packed, const uint8_t *data, size_t size)
{
    transfer_receiver_t receiver = {0};
    wte_context_t ctx = {.dp_size = 1, .ranks_per_replica = 1, .env = &env, .no_progress_ns = 100};
    lk_error_t err = LK_ERROR_INIT;
    uint8_t seen = 0;
    weight_sink_t sink = {&sink_ops, &seen};
    wte_update_t update = {.tensors = tensors,
                           .n_tensors = N_TENSORS,
                           .packed = packed,
                           .packed_buffer_size_bytes = 20};
    byte_stream_t *mine = mem_stream_dial("fuzz");
    lk_status_t st = receiver_open(&receiver, &ctx, "token", &mine, 1, &err);
    CHECK(st == LK_OK);
    st = receiver_open_step(&receiver, &err);
    CHECK(st == LK_INPROGRESS);
    byte_stream_t *trainer = mem_accept(listener);
    CHECK(trainer != NULL);
    write_all(trainer, data, size);
    while ((st = receiver_open_step(&receiver, &err)) == LK_INPROGRESS) {
        clock_ns += 50;
    }
    if (st == LK_OK) {
        st = receiver_begin(&receiver, &update, &sink, &err);
        while (st == LK_OK && (st = receiver_step(&receiver, &err)) == LK_INPROGRESS) {
            clock_ns += 50;
            st = LK_OK;
        }
    }
    CHECK(st == LK_OK || err.text[0] != '\0');
    byte_stream_destroy(&trainer);
    receiver_fini(&receiver);
}

static void hostile_rank(mem_listener_t *listener, bool packed, const uint8_t *data, size_t size)
{
    static const uint8_t zeros[32];
    const void *const bytes[N_TENSORS] = {zeros, zeros, zeros, zeros};
    lk_error_t err = LK_ERROR_INIT;
    transfer_sender_t *sender = sender_new(&env, 100, "token", 1, 1);
    byte_stream_t *rank = mem_stream_dial("fuzz");
    CHECK(sender != NULL && rank != NULL);
    lk_status_t st = rank->ops->connect(rank, &err);
    CHECK(st == LK_OK);
    sender_add(sender, mem_accept(listener));
    write_all(rank, data, size);
    if (sender_greet(sender) == LK_OK) {
        st = sender_begin(sender, tensors, bytes, N_TENSORS, packed, 20, &err);
        CHECK(st == LK_OK);
        while ((st = sender_step(sender, &err)) == LK_INPROGRESS) {
            clock_ns += 50;
        }
        CHECK(st == LK_OK || err.text[0] != '\0');
    }
    byte_stream_destroy(&rank);
    sender_destroy(&sender);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0 || size > 1 << 16) {
        return 0;
    }
    mem_listener_t *listener = mem_listener_new("fuzz", 1 << 17);
    CHECK(listener != NULL);
    bool packed = data[0] & 1;
    if (data[0] & 2) {
        hostile_rank(listener, packed, data + 1, size - 1);
    } else {
        hostile_trainer(listener, packed, data + 1, size - 1);
    }
    mem_listener_destroy(&listener);
    return 0;
}
