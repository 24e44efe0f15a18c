#include "tests/lib/transfer/wte_rig.h"
#include "base/check.h"
#include "base/hash.h"
#include "transfer/backends/shm/shm_stream.h"
#include "transfer/backends/tcp/tcp_stream.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t fake_now(void *ctx)
{
    return ((wte_rig_t *)ctx)->now_ns;
}

static void fake_random(void *ctx, void *buf, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)lk_prng_u64(&((wte_rig_t *)ctx)->prng);
    }
}

void rig_tensors_add(rig_tensors_t *self, lk_dtype_t dtype, uint64_t n, lk_prng_t *prng)
{
    CHECK(self->n < MEM_SINK_MAX);
    size_t i = self->n++;
    snprintf(self->names[i], sizeof self->names[i], "tensor.%zu", i);
    self->descs[i] =
        (tensor_desc_t){.name = self->names[i], .dtype = dtype, .ndim = 1, .shape = {n}};
    size_t bytes = n * dtype_bytes(dtype);
    self->data[i] = malloc(bytes > 0 ? bytes : 1);
    CHECK(self->data[i] != NULL);
    for (size_t k = 0; k < bytes; k++) {
        ((uint8_t *)self->data[i])[k] = (uint8_t)lk_prng_u64(prng);
    }
}

void rig_tensors_fini(rig_tensors_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        free(self->data[i]);
    }
    self->n = 0;
}

void rig_trainer_starts(wte_rig_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    if (self->shm) {
        snprintf(self->segment, sizeof self->segment, "rig-%ld", (long)getpid());
        ck_ok_text(shm_ring_create(&self->ring, RIG_SLOTS, &err), err);
        ck_ok_text(shm_listen(self->segment, 16, &self->listener, &err), err);
    } else if (self->tcp) {
        lk_status_t st =
            tcp_listen("127.0.0.1", self->port, 16, &self->listener, &self->port, &err);
        ck_assert_msg(st == LK_OK, "%s", err.text);
    } else {
        self->mem = mem_listener_new("rig", 1 << 16);
        ck_assert_ptr_nonnull(self->mem);
    }
    self->sender = sender_new(&self->env, RIG_LIMIT_NS, RIG_TOKEN, self->n_ranks, self->lanes);
    ck_assert_ptr_nonnull(self->sender);
    if (self->shm) {
        sender_set_window(self->sender, self->ring.map, RIG_SLOTS);
    }
}

void rig_trainer_dies(wte_rig_t *self)
{
    sender_destroy(&self->sender);
    if (self->listener >= 0) {
        close(self->listener);
        self->listener = -1;
    }
    mem_listener_destroy(&self->mem);
    shm_ring_fini(&self->ring);
}

void rig_init(wte_rig_t *self, const char *backend, uint32_t n_ranks, uint32_t lanes,
              size_t capacity, const rig_tensors_t *model)
{
    *self = (wte_rig_t){.n_ranks = n_ranks, .lanes = lanes, .listener = -1};
    self->ops = wte_find(backend);
    ck_assert_ptr_nonnull(self->ops);
    self->tcp = strcmp(backend, "tcp") == 0;
    self->shm = strcmp(backend, "shm") == 0;
    self->lanes = self->shm ? 1 : lanes;
    self->now_ns = 1000 * LK_SECOND_NS;
    lk_prng_seed(&self->prng, 42);
    self->env = (lk_env_t){.ctx = self, .now_ns = fake_now, .random = fake_random};
    for (uint32_t r = 0; r < n_ranks; r++) {
        self->ctx[r] = (wte_context_t){.dp_rank = r,
                                       .dp_size = n_ranks,
                                       .ranks_per_replica = 1,
                                       .env = &self->env,
                                       .no_progress_ns = RIG_LIMIT_NS};
        self->state[r] = calloc(1, self->ops->state_size);
        ck_assert_ptr_nonnull(self->state[r]);
        self->sink[r] = mem_sink_new(model->descs, model->n);
    }
    rig_trainer_starts(self);
    if (self->mem != NULL && capacity != 1 << 16) {
        mem_listener_destroy(&self->mem);
        self->mem = mem_listener_new("rig", capacity);
    }
}

void rig_fini(wte_rig_t *self)
{
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        self->ops->fini(self->state[r]);
        self->ops->fini(self->state[r]);
        free(self->state[r]);
        mem_sink_destroy(&self->sink[r]);
    }
    rig_trainer_dies(self);
}

json_t *rig_init_info(const wte_rig_t *self, const char *token)
{
    json_t *info = self->shm   ? json_pack("{s:s, s:I}", "segment", self->segment, "bytes",
                                           (json_int_t)RIG_SLOTS * TRANSFER_CHUNK_BYTES)
                   : self->tcp ? json_pack("{s:s, s:i}", "master_address", "127.0.0.1",
                                           "master_port", (int)self->port)
                               : json_pack("{s:s}", "trainer", "rig");
    json_object_set_new(info, "session_token", json_string(token));
    if (!self->shm) {
        json_object_set_new(info, "connections", json_integer(self->lanes));
    }
    return info;
}

void rig_post_init(wte_rig_t *self, uint32_t rank)
{
    lk_error_t err = LK_ERROR_INIT;
    json_t *info = rig_init_info(self, RIG_TOKEN);
    ck_ok_text(self->ops->init_check(info, &self->ctx[rank], &err), err);
    ck_ok_text(self->ops->init_post(self->state[rank], info, &self->ctx[rank], &err), err);
    json_decref(info);
}

byte_stream_t *rig_dial(const wte_rig_t *self)
{
    byte_stream_t *stream = self->shm   ? shm_stream_dial(self->segment, &self->env)
                            : self->tcp ? tcp_stream_dial("127.0.0.1", self->port, &self->env)
                                        : mem_stream_dial("rig");
    ck_assert_ptr_nonnull(stream);
    return stream;
}

byte_stream_t *rig_accept(wte_rig_t *self)
{
    return self->shm   ? shm_accept(self->listener, self->ring.fd)
           : self->tcp ? tcp_accept(self->listener)
                       : mem_accept(self->mem);
}

byte_stream_t *rig_accept_from(wte_rig_t *self, uint32_t rank)
{
    byte_stream_t *stream = NULL;
    while (stream == NULL) {
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t st = self->ops->init_test(self->state[rank], &err);
        ck_assert_msg(st == LK_INPROGRESS, "%s", err.text);
        stream = rig_accept(self);
    }
    return stream;
}

void rig_connect(wte_rig_t *self)
{
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        rig_post_init(self, r);
    }
    lk_status_t greeted = LK_INPROGRESS;
    bool done[RIG_RANKS] = {false};
    for (uint32_t left = self->n_ranks; left > 0 || greeted != LK_OK;) {
        byte_stream_t *stream;
        while ((stream = rig_accept(self)) != NULL) {
            sender_add(self->sender, stream);
        }
        greeted = sender_greet(self->sender);
        for (uint32_t r = 0; r < self->n_ranks; r++) {
            lk_error_t err = LK_ERROR_INIT;
            if (!done[r]) {
                lk_status_t st = self->ops->init_test(self->state[r], &err);
                ck_assert_msg(st >= 0, "%s", err.text);
                done[r] = st == LK_OK;
                left -= done[r];
            }
        }
    }
}

wte_update_t rig_update(const rig_tensors_t *tensors, bool packed, uint64_t buffer)
{
    return (wte_update_t){.tensors = tensors->descs,
                          .n_tensors = tensors->n,
                          .packed = packed,
                          .packed_buffer_size_bytes = buffer,
                          .packed_num_buffers = 2};
}

static void post_update(wte_rig_t *self, uint32_t rank, const wte_update_t *update)
{
    lk_error_t err = LK_ERROR_INIT;
    wte_update_t copy = *update;
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    copy.update_info = info;
    weight_sink_t sink = mem_sink(self->sink[rank]);
    ck_ok_text(sink.ops->plan(sink.ctx, update->tensors, update->n_tensors, &err), err);
    ck_ok_text(self->ops->update_check(self->state[rank], &copy, &err), err);
    ck_ok_text(self->ops->update_post(self->state[rank], &copy, &sink, &err), err);
    json_decref(info);
}

void rig_begin(wte_rig_t *self, const rig_tensors_t *tensors, const wte_update_t *update)
{
    lk_error_t err = LK_ERROR_INIT;
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        post_update(self, r, update);
    }
    if (self->sender != NULL && tensors != NULL) {
        ck_ok_text(sender_begin(self->sender, tensors->descs, (const void *const *)tensors->data,
                                tensors->n, update->packed, update->packed_buffer_size_bytes, &err),
                   err);
    }
}

void rig_run(wte_rig_t *self)
{
    bool done[RIG_RANKS + 1] = {false};
    for (uint32_t left = self->n_ranks + 1; left > 0;) {
        for (uint32_t r = 0; r <= self->n_ranks; r++) {
            if (done[r]) {
                continue;
            }
            lk_error_t err = LK_ERROR_INIT;
            lk_status_t st = r < self->n_ranks ? self->ops->update_test(self->state[r], &err)
                                               : sender_step(self->sender, &err);
            ck_assert_msg(st >= 0, "%u: %s", r, err.text);
            done[r] = st == LK_OK;
            left -= done[r];
        }
    }
}

lk_status_t rig_finish_rank(wte_rig_t *self, uint32_t rank, lk_error_t *err)
{
    lk_status_t st;
    while ((st = self->ops->update_test(self->state[rank], err)) == LK_INPROGRESS) {
        continue;
    }
    return st;
}

void rig_expect_equal(const wte_rig_t *self, uint32_t rank, const rig_tensors_t *tensors)
{
    const mem_sink_t *sink = self->sink[rank];
    for (size_t i = 0; i < tensors->n; i++) {
        ck_assert(sink->arrived[i]);
        ck_assert_msg(memcmp(sink->data[i], tensors->data[i], sink->bytes[i]) == 0, "%s differs",
                      tensors->names[i]);
    }
}

static void step_rank(wte_rig_t *self)
{
    /* whichever call rank 0 is in; what it returns is the caller's to look at later */
    lk_error_t err = LK_ERROR_INIT;
    if (self->ops->update_test(self->state[0], &err) == LK_ERR_STATE) {
        (void)self->ops->init_test(self->state[0], &err);
    }
}

bool rig_write(wte_rig_t *self, byte_stream_t *stream, const void *bytes, size_t len)
{
    for (size_t done = 0; done < len;) {
        struct iovec iov = {(uint8_t *)bytes + done, len - done};
        size_t moved = 0;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t st = stream->ops->writev(stream, &iov, 1, &moved, &err);
        if (st < 0) {
            return false;
        }
        if (st == LK_INPROGRESS) {
            step_rank(self);
        } else {
            done += moved;
        }
    }
    return true;
}

void rig_read(wte_rig_t *self, byte_stream_t *stream, void *out, size_t len)
{
    for (size_t done = 0; done < len;) {
        struct iovec iov = {(uint8_t *)out + done, len - done};
        size_t moved = 0;
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t st = stream->ops->readv(stream, &iov, 1, &moved, &err);
        ck_assert_msg(st >= 0, "%s", err.text);
        if (st == LK_INPROGRESS) {
            step_rank(self);
        } else {
            done += moved;
        }
    }
}

void rig_welcome(wte_rig_t *self, byte_stream_t *stream, uint64_t session)
{
    uint8_t hello[TRANSFER_HELLO_SIZE + sizeof RIG_TOKEN - 1];
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t st = LK_INPROGRESS;
    for (size_t done = 0; done < sizeof hello;) {
        struct iovec iov = {hello + done, sizeof hello - done};
        size_t moved = 0;
        ck_assert_int_eq(self->ops->init_test(self->state[0], &err), LK_INPROGRESS);
        st = stream->ops->readv(stream, &iov, 1, &moved, &err);
        ck_assert_msg(st >= 0, "%s", err.text);
        done += st == LK_OK ? moved : 0;
    }
    ck_assert_int_eq(memcmp(hello + TRANSFER_HELLO_SIZE, RIG_TOKEN, sizeof RIG_TOKEN - 1), 0);
    lk_buf_t out;
    lk_buf_init(&out, 0);
    rig_frame(&out, (transfer_frame_t){TRANSFER_WELCOME, session, 0, 0, 0, 0});
    if (stream->ops->admit != NULL) {
        stream->ops->admit(stream);
    }
    ck_assert(rig_write(self, stream, out.data, out.len));
    lk_buf_fini(&out);
    while ((st = self->ops->init_test(self->state[0], &err)) == LK_INPROGRESS) {
        continue;
    }
    ck_ok_text(st, err);
}

void rig_frame(lk_buf_t *out, transfer_frame_t frame)
{
    uint8_t bytes[TRANSFER_FRAME_SIZE];
    transfer_frame_encode(&frame, bytes);
    lk_buf_append(out, bytes, sizeof bytes);
}

void rig_script(wte_rig_t *self, lk_buf_t *out, uint64_t session, uint64_t update,
                const rig_tensors_t *tensors, const wte_update_t *spec)
{
    packed_bucket_t *buckets = NULL;
    size_t n = 0, slot = 0;
    lk_error_t err = LK_ERROR_INIT;
    ck_ok_text(packed_layout(tensors->descs, tensors->n, spec->packed,
                             spec->packed_buffer_size_bytes, &buckets, &n, &err),
               err);
    for (size_t b = 0; b < n; b++) {
        lk_buf_t bytes;
        lk_buf_init(&bytes, 0);
        for (size_t i = buckets[b].first; i < buckets[b].first + buckets[b].count; i++) {
            lk_buf_append(&bytes, tensors->data[i],
                          tensors->descs[i].shape[0] * dtype_bytes(tensors->descs[i].dtype));
        }
        for (size_t at = 0; at < bytes.len;) {
            size_t run = LK_MIN(bytes.len - at, (size_t)37);
            rig_frame(out, (transfer_frame_t){TRANSFER_DATA, session, update, b, at, run});
            if (self->shm) {
                CHECK(slot < RIG_SLOTS);
                memcpy(self->ring.map + slot++ * TRANSFER_CHUNK_BYTES, bytes.data + at, run);
            } else {
                lk_buf_append(out, bytes.data + at, run);
            }
            at += run;
        }
        rig_frame(out, (transfer_frame_t){TRANSFER_DIGEST, session, update, b,
                                          lk_hash64(bytes.data, bytes.len, 0), 0});
        lk_buf_fini(&bytes);
    }
    free(buckets);
}
