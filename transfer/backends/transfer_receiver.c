#include "transfer/backends/transfer_receiver.h"
#include "base/buf.h"
#include "base/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* Small enough that a piece is still in the cache when it is hashed. */
#define READ_BYTES (512u << 10)
#define COPY_BYTES (128u << 10)

typedef enum { LANE_CONNECTING, LANE_GREETING, LANE_READY } lane_phase_t;

struct transfer_lane {
    byte_stream_t *stream;
    lane_phase_t phase;
    lk_buf_t out; /* hello, GO, ACKs on their way */
    size_t out_sent;

    uint8_t head[TRANSFER_FRAME_SIZE];
    size_t head_len;
    transfer_frame_t frame; /* valid while `in_payload` */
    bool in_payload;
    bool in_slot; /* the frame's payload waits in the window */
    uint64_t payload_done;
    uint64_t slots_used;          /* DATA frames of this update */
    char text[TRANSFER_TEXT_MAX]; /* payload of FAIL */

    size_t bucket; /* the one being received; lane + k * n_lanes */
    uint64_t bucket_done;
    bool placed;      /* the places below are chosen */
    uint8_t **places; /* per tensor of the bucket: where its bytes go; NULL: the staging buffer */
    size_t places_size;
    size_t tensor; /* of the bucket: holds byte bucket_done */
    uint64_t tensor_at;
    bool verified; /* the digest was right: its tensors go to the sink */
    size_t delivered;
    uint64_t deliver_at;
    XXH3_state_t *hash;
    uint8_t *staging;
    uint64_t staging_size;
};

static void lanes_free(transfer_receiver_t *self)
{
    for (size_t i = 0; i < self->n_lanes; i++) {
        transfer_lane_t *lane = &self->lanes[i];
        byte_stream_destroy(&lane->stream);
        lk_buf_fini(&lane->out);
        XXH3_freeState(lane->hash);
        free(lane->staging);
        free(lane->places);
    }
    free(self->lanes);
    self->lanes = NULL;
    self->n_lanes = 0;
    self->turn = 0;
    self->delivering = NULL;
}

static void receiver_close(transfer_receiver_t *self, receiver_phase_t phase)
{
    lanes_free(self);
    free(self->buckets);
    self->buckets = NULL;
    self->n_buckets = 0;
    self->load = (wte_update_t){0};
    self->window = NULL;
    self->progress.waiting_for[0] = '\0';
    explicit_bzero(self->token, sizeof self->token);
    self->phase = phase;
}

static void touch(transfer_receiver_t *self)
{
    self->progress_ns = lk_env_now_ns(self->ctx.env);
    self->progress.moves++;
}

static void queue_frame(transfer_lane_t *lane, const transfer_frame_t *frame)
{
    uint8_t bytes[TRANSFER_FRAME_SIZE];
    transfer_frame_encode(frame, bytes);
    lk_buf_append(&lane->out, bytes, sizeof bytes);
}

/* Adds *did when bytes left. OK also while some wait. */
static lk_status_t flush(transfer_lane_t *lane, bool *did, lk_error_t *err)
{
    if (lane->out.failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for replies to the trainer");
    }
    while (lane->out_sent < lane->out.len) {
        struct iovec iov = {lane->out.data + lane->out_sent, lane->out.len - lane->out_sent};
        size_t moved = 0;
        lk_status_t st = lane->stream->ops->writev(lane->stream, &iov, 1, &moved, err);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        lane->out_sent += moved;
        *did = true;
    }
    lk_buf_clear(&lane->out);
    lane->out_sent = 0;
    return LK_OK;
}

static bool flushed(const transfer_lane_t *lane)
{
    return lane->out.len == 0;
}

/* Tells the trainer why (if the socket takes it at once), and closes. Returns err->status. */
static lk_status_t fail(transfer_receiver_t *self, lk_error_t *err)
{
    uint64_t len = strnlen(err->text, TRANSFER_TEXT_MAX);
    transfer_frame_t frame = {TRANSFER_FAIL, self->session, self->update, 0, 0, len};
    for (size_t i = 0; i < self->n_lanes && err->status != LK_ERR_CANCELED; i++) {
        transfer_lane_t *lane = &self->lanes[i];
        bool did = false;
        lk_error_t ignored;
        if (lane->phase == LANE_READY) {
            queue_frame(lane, &frame);
            lk_buf_append(&lane->out, err->text, len);
            (void)flush(lane, &did, &ignored); /* best effort: the first error is the one to tell */
        }
    }
    receiver_close(self, RECEIVER_CLOSED);
    return err->status;
}

lk_status_t receiver_open(transfer_receiver_t *self, const wte_context_t *ctx, const char *token,
                          byte_stream_t *const *streams, size_t n, lk_error_t *err)
{
    CHECK(n >= 1 && n <= TRANSFER_LANES_MAX);
    receiver_fini(self);
    self->ctx = *ctx;
    self->lanes = calloc(n, sizeof *self->lanes);
    if (self->lanes == NULL) {
        for (size_t i = 0; i < n; i++) {
            byte_stream_t *stream = streams[i];
            byte_stream_destroy(&stream);
        }
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu connections", n);
    }
    self->n_lanes = n;
    bool whole = true;
    for (size_t i = 0; i < n; i++) {
        self->lanes[i].stream = streams[i];
        self->lanes[i].hash = XXH3_createState();
        whole = whole && streams[i] != NULL && self->lanes[i].hash != NULL;
    }
    if (!whole) {
        receiver_close(self, RECEIVER_CLOSED);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu connections", n);
    }
    snprintf(self->token, sizeof self->token, "%s", token);
    snprintf(self->peer, sizeof self->peer, "%s", streams[0]->peer);
    self->phase = RECEIVER_OPENING;
    touch(self);
    return LK_OK;
}

static void queue_hello(const transfer_receiver_t *self, transfer_lane_t *lane)
{
    size_t token_len = strlen(self->token);
    transfer_hello_t hello = {.pid = (uint64_t)getpid(),
                              .dp_rank = self->ctx.dp_rank,
                              .dp_size = self->ctx.dp_size,
                              .lane = (uint32_t)(lane - self->lanes),
                              .lanes = (uint32_t)self->n_lanes,
                              .token_len = (uint32_t)token_len};
    uint8_t bytes[TRANSFER_HELLO_SIZE];
    transfer_hello_encode(&hello, bytes);
    lk_buf_append(&lane->out, bytes, sizeof bytes);
    lk_buf_append(&lane->out, self->token, token_len);
}

/* Reads into the payload (while in one), whose next `want` bytes go to the n pieces of iov, and on
 * into the next header, with one call. iov has room for one piece more. */
static lk_status_t lane_read(transfer_lane_t *lane, struct iovec *iov, int n, size_t want,
                             size_t *got, lk_error_t *err)
{
    size_t moved = 0;
    if (!lane->in_payload) {
        n = 0;
        want = 0;
        iov[n++] = (struct iovec){lane->head + lane->head_len, sizeof lane->head - lane->head_len};
    } else if (want == lane->frame.length - lane->payload_done &&
               lane->frame.kind == TRANSFER_DATA) {
        /* a FAIL ends the stream, and a piece that isn't the last has no header behind it */
        iov[n++] = (struct iovec){lane->head, sizeof lane->head};
    }
    lk_status_t st = lane->stream->ops->readv(lane->stream, iov, n, &moved, err);
    if (st != LK_OK) {
        return st;
    }
    size_t into_payload = LK_MIN(moved, want);
    if (lane->in_payload) {
        lane->payload_done += into_payload;
        lane->in_payload = lane->payload_done < lane->frame.length;
        lane->head_len = moved - into_payload;
    } else {
        lane->head_len += moved;
    }
    *got = into_payload;
    return LK_OK;
}

/* Into a header, or a FAIL's text. */
static lk_status_t read_text(transfer_lane_t *lane, size_t *got, lk_error_t *err)
{
    size_t want = lane->in_payload ? lane->frame.length - lane->payload_done : 0;
    struct iovec iov[2] = {{lane->text + lane->payload_done, want}};
    return lane_read(lane, iov, 1, want, got, err);
}

static lk_status_t trainer_failed(const transfer_receiver_t *self, transfer_lane_t *lane,
                                  lk_error_t *err)
{
    char text[TRANSFER_TEXT_MAX + 1];
    transfer_text_clean(lane->text, lane->frame.length, text, sizeof text);
    return lk_error_set(err, LK_ERR_PEER, "trainer %s gave up: %s", self->peer, text);
}

/* A complete header: checks what holds in every state. */
static lk_status_t take_header(transfer_lane_t *lane, lk_error_t *err)
{
    lane->head_len = 0;
    LK_RETURN_IF_ERROR(transfer_frame_decode(lane->head, &lane->frame, err));
    if (lane->frame.kind == TRANSFER_FAIL) {
        if (lane->frame.length > TRANSFER_TEXT_MAX) {
            return lk_error_set(err, LK_ERR_PEER, "FAIL frame with a text of %" PRIu64 " bytes",
                                lane->frame.length);
        }
        lane->in_payload = lane->frame.length > 0;
        lane->payload_done = 0;
    }
    return LK_OK;
}

static lk_status_t lane_greet(transfer_receiver_t *self, transfer_lane_t *lane, bool *did,
                              lk_error_t *err)
{
    if (lane->phase == LANE_CONNECTING) {
        lk_status_t st = lane->stream->ops->connect(lane->stream, err);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        queue_hello(self, lane);
        lane->phase = LANE_GREETING;
        *did = true;
    }
    LK_RETURN_IF_ERROR(flush(lane, did, err));
    while (lane->phase == LANE_GREETING) {
        size_t got = 0;
        lk_status_t st = read_text(lane, &got, err);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        *did = true;
        if (lane->head_len == sizeof lane->head) {
            LK_RETURN_IF_ERROR(take_header(lane, err));
        } else if (lane->head_len > 0 || lane->in_payload) {
            continue;
        }
        if (lane->frame.kind == TRANSFER_FAIL && !lane->in_payload) {
            return trainer_failed(self, lane, err);
        }
        if (lane->frame.kind == TRANSFER_WELCOME && lane->frame.length == 0 &&
            (self->session == 0 || self->session == lane->frame.session) &&
            lane->frame.session != 0) {
            self->session = lane->frame.session;
            self->unchecked = (lane->frame.offset & TRANSFER_WELCOME_NO_DIGESTS) != 0;
            lane->phase = LANE_READY;
        } else if (lane->frame.kind != TRANSFER_FAIL) {
            return lk_error_set(err, LK_ERR_PEER, "unexpected %s frame instead of a welcome",
                                transfer_kind_name(lane->frame.kind));
        }
    }
    return LK_OK;
}

lk_status_t receiver_open_step(transfer_receiver_t *self, lk_error_t *err)
{
    if (self->phase == RECEIVER_CANCELED) {
        self->phase = RECEIVER_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the initialisation was aborted");
    }
    if (self->phase != RECEIVER_OPENING) {
        return lk_error_set(err, LK_ERR_STATE, "no initialisation is under way");
    }
    bool did = false, ready = true;
    const transfer_lane_t *behind = NULL;
    for (size_t i = 0; i < self->n_lanes; i++) {
        transfer_lane_t *lane = &self->lanes[i];
        lk_error_t inner = LK_ERROR_INIT;
        if (lane_greet(self, lane, &did, &inner) < 0) {
            lk_error_set(err, inner.status, "initialisation with trainer %s failed: %s", self->peer,
                         inner.text);
            receiver_close(self, RECEIVER_CLOSED);
            return inner.status;
        }
        if (lane->phase != LANE_READY) {
            ready = false;
            behind = lane;
        }
    }
    if (did) {
        touch(self);
    }
    if (ready) {
        explicit_bzero(self->token, sizeof self->token);
        self->phase = RECEIVER_IDLE;
        return LK_OK;
    }
    uint64_t silent = lk_env_now_ns(self->ctx.env) - self->progress_ns;
    if (silent < self->ctx.no_progress_ns) {
        return LK_INPROGRESS;
    }
    bool connecting = behind->phase == LANE_CONNECTING;
    lk_error_set(err, LK_ERR_TIMEOUT, "trainer %s: %s for %.1f s%s%s", self->peer,
                 connecting ? "not reachable" : "no welcome after the hello", (double)silent / 1e9,
                 connecting && behind->stream->note[0] != '\0' ? ": " : "",
                 connecting ? behind->stream->note : "");
    receiver_close(self, RECEIVER_CLOSED);
    return LK_ERR_TIMEOUT;
}

byte_stream_t *receiver_stream(const transfer_receiver_t *self)
{
    CHECK(self->n_lanes > 0);
    return self->lanes[0].stream;
}

void receiver_set_window(transfer_receiver_t *self, const uint8_t *window, uint64_t slots)
{
    CHECK(self->phase == RECEIVER_IDLE && self->n_lanes == 1 && slots > 0);
    self->window = window;
    self->window_slots = slots;
}

lk_status_t receiver_check(const transfer_receiver_t *self, const char *backend, lk_error_t *err)
{
    if (self->phase != RECEIVER_IDLE) {
        return lk_error_set(err, LK_ERR_STATE,
                            "%s weight transfer not initialized. Call init_weight_transfer_engine "
                            "first.",
                            backend);
    }
    for (size_t i = 0; i < self->n_lanes; i++) {
        byte_stream_t *stream = self->lanes[i].stream;
        if (stream->ops->hung_up(stream)) {
            return lk_error_set(err, LK_ERR_STATE,
                                "trainer %s has closed its connection. Call "
                                "init_weight_transfer_engine again.",
                                self->peer);
        }
    }
    return LK_OK;
}

/* A lane's first bucket, or its next one. */
static void lane_start_bucket(transfer_lane_t *lane, size_t bucket)
{
    lane->bucket = bucket;
    lane->bucket_done = 0;
    lane->placed = false;
    lane->tensor = 0;
    lane->tensor_at = 0;
    lane->verified = false;
    lane->delivered = 0;
    lane->deliver_at = 0;
    XXH3_64bits_reset(lane->hash);
}

lk_status_t receiver_begin(transfer_receiver_t *self, const wte_update_t *update,
                           const weight_sink_t *sink, lk_error_t *err)
{
    packed_bucket_t *buckets = NULL;
    size_t n_buckets = 0;
    CHECK(self->phase == RECEIVER_IDLE);
    LK_RETURN_IF_ERROR(packed_layout(update->tensors, update->n_tensors, update->packed,
                                     update->packed_buffer_size_bytes, &buckets, &n_buckets, err));
    free(self->buckets);
    self->buckets = buckets;
    self->n_buckets = n_buckets;
    self->load = *update;
    self->sink = *sink;
    self->update++;
    self->progress = (wte_progress_t){.tensors_total = update->n_tensors};
    for (size_t i = 0; i < n_buckets; i++) {
        self->progress.bytes_total += buckets[i].bytes;
    }
    transfer_frame_t go = {
        TRANSFER_GO, self->session, self->update, n_buckets, 0, self->progress.bytes_total};
    for (size_t i = 0; i < self->n_lanes; i++) {
        lane_start_bucket(&self->lanes[i], i);
        self->lanes[i].slots_used = 0;
        queue_frame(&self->lanes[i], &go);
    }
    self->phase = RECEIVER_RECEIVING;
    touch(self);
    return LK_OK;
}

/* The tensor that byte `at` of a bucket belongs to, for texts. */
static const char *tensor_at(const transfer_receiver_t *self, size_t bucket, uint64_t at)
{
    const packed_bucket_t *b = &self->buckets[bucket];
    for (size_t i = 0; i < b->count; i++) {
        uint64_t bytes = 0;
        bool fits = tensor_desc_bytes(&self->load.tensors[b->first + i], &bytes);
        CHECK(fits); /* packed_layout has added them up */
        if (at < bytes || i + 1 == b->count) {
            return self->load.tensors[b->first + i].name;
        }
        at -= bytes;
    }
    return "?";
}

static void where(const transfer_receiver_t *self, const transfer_lane_t *lane, char *out,
                  size_t room)
{
    if (lane->bucket >= self->n_buckets) {
        snprintf(out, room, "after the last bucket");
        return;
    }
    snprintf(out, room, "bucket %zu of %zu, tensor '%s', %" PRIu64 " of %" PRIu64 " bytes received",
             lane->bucket + 1, self->n_buckets, tensor_at(self, lane->bucket, lane->bucket_done),
             lane->bucket_done, self->buckets[lane->bucket].bytes);
}

static uint64_t tensor_size(const transfer_receiver_t *self, size_t index)
{
    uint64_t bytes = 0;
    bool fits = tensor_desc_bytes(&self->load.tensors[index], &bytes);
    CHECK(fits); /* packed_layout has added them up */
    return bytes;
}

/* Tensors that can be received in place are; the others wait in the staging buffer, each at its
 * place in the bucket, until the digest was right. */
static lk_status_t choose_places(transfer_receiver_t *self, transfer_lane_t *lane, lk_error_t *err)
{
    const packed_bucket_t *bucket = &self->buckets[lane->bucket];
    if (lane->places_size < bucket->count) {
        uint8_t **places = realloc(lane->places, bucket->count * sizeof *places);
        if (places == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu tensors",
                                bucket->count);
        }
        lane->places = places;
        lane->places_size = bucket->count;
    }
    bool stage = false;
    for (size_t i = 0; i < bucket->count; i++) {
        size_t index = bucket->first + i;
        bool some = tensor_size(self, index) > 0;
        lane->places[i] = some && self->sink.ops->direct != NULL
                              ? self->sink.ops->direct(self->sink.ctx, index)
                              : NULL;
        stage = stage || (some && lane->places[i] == NULL);
    }
    if (stage && lane->staging_size < bucket->bytes) {
        free(lane->staging);
        lane->staging = malloc(bucket->bytes);
        lane->staging_size = lane->staging != NULL ? bucket->bytes : 0;
        if (lane->staging == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY,
                                "out of memory for a bucket of %" PRIu64 " bytes", bucket->bytes);
        }
    }
    lane->placed = true;
    return LK_OK;
}

/* The places of the bucket's next `want` bytes, at most n pieces. Returns how many; *covered: their
 * bytes together. Leaves the cursor at bucket_done. */
static int next_places(const transfer_receiver_t *self, transfer_lane_t *lane, size_t want,
                       struct iovec *iov, int n, size_t *covered)
{
    size_t first = self->buckets[lane->bucket].first, tensor = lane->tensor;
    uint64_t at = lane->tensor_at, size = tensor_size(self, first + tensor);
    int used = 0;
    for (*covered = 0; *covered < want && used < n;) {
        uint64_t pos = lane->bucket_done + *covered;
        while (pos >= at + size) {
            at += size;
            size = tensor_size(self, first + ++tensor);
        }
        if (used == 0) {
            lane->tensor = tensor;
            lane->tensor_at = at;
        }
        uint8_t *place = lane->places[tensor];
        place = place != NULL ? place : lane->staging + at;
        size_t run = LK_MIN(want - *covered, at + size - pos);
        iov[used++] = (struct iovec){place + (pos - at), run};
        *covered += run;
    }
    return used;
}

static lk_status_t bad_frame(const transfer_lane_t *lane, const char *why, lk_error_t *err)
{
    const transfer_frame_t *f = &lane->frame;
    return lk_error_set(err, LK_ERR_PEER,
                        "%s (%s frame: update %" PRIu64 ", bucket %" PRIu64 ", offset %" PRIu64
                        ", length %" PRIu64 ")",
                        why, transfer_kind_name(f->kind), f->update, f->bucket, f->offset,
                        f->length);
}

/* Checks a header against what must come next. */
static lk_status_t begin_frame(transfer_receiver_t *self, transfer_lane_t *lane, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(take_header(lane, err));
    const transfer_frame_t *f = &lane->frame;
    if (f->kind == TRANSFER_FAIL) {
        return lane->in_payload ? LK_OK : trainer_failed(self, lane, err);
    }
    uint64_t bytes = self->buckets[lane->bucket].bytes;
    if (f->kind != TRANSFER_DATA && f->kind != TRANSFER_DIGEST) {
        return bad_frame(lane, "unexpected frame", err);
    }
    if (f->session != self->session) {
        return bad_frame(lane, "frame of another session", err);
    }
    if (f->update != self->update) {
        return bad_frame(lane, "frame of another update", err);
    }
    if (f->bucket != lane->bucket) {
        return bad_frame(lane, "frame of a wrong bucket", err);
    }
    if (f->kind == TRANSFER_DATA) {
        if (f->offset != lane->bucket_done) {
            return bad_frame(lane, "frame at a wrong offset", err);
        }
        if (f->length == 0 || f->length > bytes - lane->bucket_done ||
            (self->window != NULL && f->length > TRANSFER_CHUNK_BYTES)) {
            return bad_frame(lane, "frame of a wrong length", err);
        }
        lane->in_payload = self->window == NULL;
        lane->in_slot = self->window != NULL;
        lane->payload_done = 0;
        return lane->placed ? LK_OK : choose_places(self, lane, err);
    }
    if (f->length != 0 || lane->bucket_done != bytes) {
        return bad_frame(lane, "digest before the bucket's end", err);
    }
    if (!self->unchecked && f->offset != XXH3_64bits_digest(lane->hash)) {
        return lk_error_set(err, LK_ERR_PEER, "digest of the received bytes is not the trainer's");
    }
    if (!lane->placed) {
        LK_RETURN_IF_ERROR(choose_places(self, lane, err));
    }
    lane->verified = true;
    return LK_OK;
}

/* Hands a slice of the verified bucket's next tensor to the sink; after the last one acknowledges.
 */
static lk_status_t deliver(transfer_receiver_t *self, transfer_lane_t *lane, uint64_t *cost,
                           lk_error_t *err)
{
    const packed_bucket_t *bucket = &self->buckets[lane->bucket];
    if (lane->delivered < bucket->count) {
        size_t index = bucket->first + lane->delivered;
        uint64_t bytes = tensor_size(self, index);
        static uint8_t nothing[8]; /* of an empty tensor */
        uint8_t *place = lane->places[lane->delivered];
        place = place != NULL ? place : bytes > 0 ? lane->staging + lane->deliver_at : nothing;
        lk_status_t st = self->sink.ops->tensor(self->sink.ctx, index, place, bytes, err);
        *cost = LK_MIN(bytes, (uint64_t)WEIGHT_SINK_SLICE_BYTES);
        self->delivering = st == LK_INPROGRESS ? lane : NULL;
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        lane->delivered++;
        lane->deliver_at += bytes;
        self->progress.tensors_done++;
    }
    if (lane->delivered == bucket->count) {
        queue_frame(lane, &(transfer_frame_t){TRANSFER_ACK, self->session, self->update,
                                              lane->bucket, 0, 0});
        lane_start_bucket(lane, lane->bucket + self->n_lanes);
    }
    return LK_OK;
}

/* `got` bytes of the bucket have come to `to`. */
static void take_bytes(transfer_receiver_t *self, transfer_lane_t *lane, const uint8_t *to,
                       size_t got)
{
    if (!self->unchecked) {
        XXH3_64bits_update(lane->hash, to, got);
    }
    lane->bucket_done += got;
    self->progress.bytes_done += got;
}

/* Copies a frame's payload out of its slot. What is hashed, and handed on, is the copy: the trainer
 * could still write to the slot. */
static void take_slot(transfer_receiver_t *self, transfer_lane_t *lane, uint64_t *cost)
{
    const uint8_t *slot =
        self->window + lane->slots_used % self->window_slots * TRANSFER_CHUNK_BYTES;
    for (uint64_t done = 0; done < lane->frame.length;) {
        struct iovec piece;
        size_t run;
        (void)next_places(self, lane, LK_MIN(lane->frame.length - done, (uint64_t)COPY_BYTES),
                          &piece, 1, &run);
        memcpy(piece.iov_base, slot + done, run);
        take_bytes(self, lane, piece.iov_base, run);
        done += run;
    }
    lane->in_slot = false;
    lane->slots_used++;
    *cost = lane->frame.length;
    if (lane->bucket_done < self->buckets[lane->bucket].bytes) {
        queue_frame(lane, &(transfer_frame_t){TRANSFER_TAKEN, self->session, self->update,
                                              lane->bucket, lane->bucket_done, 0});
    }
}

static lk_status_t receive_some(transfer_receiver_t *self, transfer_lane_t *lane, uint64_t *cost,
                                lk_error_t *err)
{
    if (lane->in_slot) {
        take_slot(self, lane, cost);
        return LK_OK;
    }
    bool data = lane->in_payload && lane->frame.kind == TRANSFER_DATA;
    struct iovec iov[BYTE_STREAM_IOV_MAX], pieces[BYTE_STREAM_IOV_MAX];
    size_t got = 0, want = 0;
    int n = 0;
    if (data) {
        uint64_t left = lane->frame.length - lane->payload_done;
        n = next_places(self, lane, LK_MIN(left, (uint64_t)READ_BYTES), iov,
                        BYTE_STREAM_IOV_MAX - 1, &want);
        memcpy(pieces, iov, (size_t)n * sizeof *iov);
    }
    lk_status_t st = data ? lane_read(lane, iov, n, want, &got, err) : read_text(lane, &got, err);
    if (st != LK_OK) {
        return st;
    }
    if (data) {
        *cost = got;
        for (int i = 0; got > 0; i++) {
            size_t part = LK_MIN(got, pieces[i].iov_len);
            take_bytes(self, lane, pieces[i].iov_base, part);
            got -= part;
        }
    } else if (lane->frame.kind == TRANSFER_FAIL && got > 0 && !lane->in_payload) {
        return trainer_failed(self, lane, err);
    }
    if (!lane->in_payload && lane->head_len == sizeof lane->head) {
        st = begin_frame(self, lane, err);
    }
    return st;
}

/* One lane until it would wait or the budget is used up. */
static lk_status_t lane_run(transfer_receiver_t *self, transfer_lane_t *lane, int64_t *budget,
                            bool *did, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(flush(lane, did, err));
    while (*budget > 0 && lane->bucket < self->n_buckets) {
        uint64_t cost = 0;
        if (lane->verified && self->delivering != NULL && self->delivering != lane) {
            break;
        }
        lk_status_t st =
            lane->verified ? deliver(self, lane, &cost, err) : receive_some(self, lane, &cost, err);
        if (st != LK_OK) {
            LK_RETURN_IF_ERROR(st);
            break;
        }
        *did = true;
        *budget -=
            (int64_t)cost + (int64_t)TRANSFER_FRAME_SIZE; /* tiny tensors cost something too */
    }
    return flush(lane, did, err);
}

lk_status_t receiver_step(transfer_receiver_t *self, lk_error_t *err)
{
    if (self->phase == RECEIVER_CANCELED) {
        self->phase = RECEIVER_CLOSED;
        return lk_error_set(err, LK_ERR_CANCELED, "the update was aborted");
    }
    if (self->phase != RECEIVER_RECEIVING) {
        return lk_error_set(err, LK_ERR_STATE, "no update is under way");
    }
    char at[512];
    bool did = false, finished = true;
    const transfer_lane_t *behind = NULL;
    int64_t budget = RECEIVER_STEP_BYTES;
    for (size_t i = 0; i < self->n_lanes; i++) {
        transfer_lane_t *lane = &self->lanes[(self->turn + i) % self->n_lanes];
        lk_error_t inner = LK_ERROR_INIT;
        if (lane_run(self, lane, &budget, &did, &inner) < 0) {
            where(self, lane, at, sizeof at);
            lk_error_t local = LK_ERROR_INIT;
            lk_error_set(&local, inner.status, "trainer %s, %s: %s", self->peer, at, inner.text);
            if (err != NULL) {
                *err = local;
            }
            return fail(self, &local);
        }
        if (lane->bucket < self->n_buckets || !flushed(lane)) {
            finished = false;
            behind = behind == NULL || lane->bucket < behind->bucket ? lane : behind;
        }
    }
    self->turn = (self->turn + 1) % self->n_lanes;
    if (did) {
        touch(self);
    }
    if (finished) {
        self->phase = RECEIVER_IDLE;
        self->load = (wte_update_t){0};
        self->progress.waiting_for[0] = '\0';
        return LK_OK;
    }
    uint64_t silent = lk_env_now_ns(self->ctx.env) - self->progress_ns;
    if (silent >= self->ctx.no_progress_ns) {
        where(self, behind, at, sizeof at);
        lk_error_t local = LK_ERROR_INIT;
        lk_error_set(&local, LK_ERR_TIMEOUT, "no progress for %.1f s from trainer %s: %s",
                     (double)silent / 1e9, self->peer, at);
        if (err != NULL) {
            *err = local;
        }
        return fail(self, &local);
    }
    snprintf(self->progress.waiting_for, sizeof self->progress.waiting_for,
             "trainer %.80s, bucket %zu of %zu", self->peer,
             LK_MIN(behind->bucket + 1, self->n_buckets), self->n_buckets);
    return LK_INPROGRESS;
}

void receiver_abort(transfer_receiver_t *self)
{
    if (self->phase == RECEIVER_OPENING || self->phase == RECEIVER_RECEIVING) {
        receiver_close(self, RECEIVER_CANCELED);
    }
}

void receiver_progress(const transfer_receiver_t *self, wte_progress_t *out)
{
    *out = self->progress;
    if (self->phase == RECEIVER_OPENING) {
        snprintf(out->waiting_for, sizeof out->waiting_for, "trainer %.100s", self->peer);
    }
}

size_t receiver_pollfds(const transfer_receiver_t *self, struct pollfd *fds, size_t room)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_lanes && n < room; i++) {
        const transfer_lane_t *lane = &self->lanes[i];
        int fd = lane->stream->ops->fd(lane->stream);
        if (fd < 0 || (self->phase != RECEIVER_OPENING && self->phase != RECEIVER_RECEIVING) ||
            lane->verified || lane->in_slot) {
            return 0; /* nothing to wait for, or work at hand */
        }
        if (self->phase == RECEIVER_RECEIVING && lane->bucket >= self->n_buckets && flushed(lane)) {
            continue;
        }
        bool write = lane->phase == LANE_CONNECTING || !flushed(lane);
        fds[n++] = (struct pollfd){.fd = fd, .events = (short)(POLLIN | (write ? POLLOUT : 0))};
    }
    return n;
}

void receiver_fini(transfer_receiver_t *self)
{
    receiver_close(self, RECEIVER_CLOSED);
    memset(self, 0, sizeof *self);
}
