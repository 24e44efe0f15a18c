#include "transfer/backends/transfer_sender.h"
#include "base/buf.h"
#include "base/check.h"
#include "base/hash.h"
#include "transfer/backends/transfer_frame.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define SEND_BYTES    (1u << 20)   /* of one write */
#define SEND_BUDGET   (8u << 20)   /* per connection and step */
#define TURN_BYTES    (256u << 10) /* to each of several, in turns: all work on it at once */
#define PACK_BYTES    (128u << 10) /* copied, and hashed while they are in the cache */
#define STRANGERS_MAX 64

/* Where a lane stands: `head` bytes of the next header are out, then payload from `pos`. */
typedef struct {
    size_t bucket;
    uint64_t pos; /* in the bucket */
    uint32_t head;
    size_t tensor;       /* holds pos */
    uint64_t tensor_pos; /* its first byte in the bucket */
    uint64_t slot;       /* slots before pos, over all buckets; only with a window */
} cursor_t;

typedef struct {
    byte_stream_t *stream; /* NULL: not there */
    uint8_t in[TRANSFER_FRAME_SIZE];
    size_t in_len;
    char text[TRANSFER_TEXT_MAX]; /* of a FAIL */
    uint64_t text_len, text_done;
    bool failing, go;
    size_t acked;    /* next bucket to be acknowledged */
    uint64_t update; /* the rank's count, echoed */
    uint64_t progress_ns;
    cursor_t cursor;
    uint64_t slots_acked; /* of acknowledged buckets */
    uint64_t taken;       /* bytes that the rank has taken of bucket `acked` */
} link_t;

typedef struct {
    byte_stream_t *stream;
    uint8_t in[TRANSFER_HELLO_SIZE + TRANSFER_TOKEN_MAX];
    size_t in_len;
} stranger_t;

/* Hash of the bucket that the furthest rank of this lane is sending. */
typedef struct {
    XXH3_state_t *state;
    size_t bucket;
    uint64_t pos;
} lane_hash_t;

struct transfer_sender {
    const lk_env_t *env;
    uint64_t no_progress_ns;
    char token[TRANSFER_TOKEN_MAX + 1];
    uint32_t n_ranks, lanes;
    uint64_t session;
    link_t *links; /* [n_ranks][lanes] */
    lane_hash_t *hashes;
    stranger_t strangers[STRANGERS_MAX];
    size_t n_strangers;
    char refused[256]; /* the last stranger and why */
    bool dead;
    bool unchecked;

    uint8_t *window; /* NULL: payloads go with the frames */
    uint64_t window_slots;
    cursor_t packed; /* everything before it is in the window */

    bool active;
    const tensor_desc_t *descs;
    const void *const *data;
    size_t n_tensors;
    packed_bucket_t *buckets;
    size_t n_buckets;
    uint64_t *digests; /* per bucket, once hashed */
    uint64_t total, bytes;
};

transfer_sender_t *sender_new(const lk_env_t *env, uint64_t no_progress_ns, const char *token,
                              uint32_t n_ranks, uint32_t lanes)
{
    CHECK(n_ranks >= 1 && lanes >= 1 && lanes <= TRANSFER_LANES_MAX);
    transfer_sender_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->env = env;
    self->no_progress_ns = no_progress_ns;
    self->n_ranks = n_ranks;
    self->lanes = lanes;
    self->links = calloc((size_t)n_ranks * lanes, sizeof *self->links);
    self->hashes = calloc(lanes, sizeof *self->hashes);
    bool whole = self->links != NULL && self->hashes != NULL;
    for (uint32_t i = 0; whole && i < lanes; i++) {
        self->hashes[i].state = XXH3_createState();
        whole = self->hashes[i].state != NULL;
    }
    if (!whole) {
        sender_destroy(&self);
        return NULL;
    }
    snprintf(self->token, sizeof self->token, "%s", token);
    self->session = lk_env_random_u64(env) | 1; /* 0 is none */
    return self;
}

static void end_update(transfer_sender_t *self)
{
    free(self->buckets);
    free(self->digests);
    self->buckets = NULL;
    self->digests = NULL;
    self->n_buckets = 0;
    self->active = false;
    self->descs = NULL;
    self->data = NULL;
}

static void close_all(transfer_sender_t *self)
{
    for (size_t i = 0; self->links != NULL && i < (size_t)self->n_ranks * self->lanes; i++) {
        byte_stream_destroy(&self->links[i].stream);
    }
    while (self->n_strangers > 0) {
        byte_stream_destroy(&self->strangers[--self->n_strangers].stream);
    }
    self->dead = true;
    end_update(self);
}

void sender_destroy(transfer_sender_t **self_p)
{
    transfer_sender_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    close_all(self);
    for (uint32_t i = 0; self->hashes != NULL && i < self->lanes; i++) {
        XXH3_freeState(self->hashes[i].state);
    }
    free(self->hashes);
    free(self->links);
    explicit_bzero(self->token, sizeof self->token);
    free(self);
}

void sender_set_window(transfer_sender_t *self, uint8_t *window, uint64_t slots)
{
    CHECK(self->lanes == 1 && !self->active && slots > 0);
    self->window = window;
    self->window_slots = slots;
}

void sender_set_checked(transfer_sender_t *self, bool checked)
{
    self->unchecked = !checked;
}

void sender_add(transfer_sender_t *self, byte_stream_t *stream)
{
    if (self->dead) {
        byte_stream_destroy(&stream);
        return;
    }
    if (self->n_strangers ==
        STRANGERS_MAX) { /* whoever is silent longest must not keep ranks out */
        byte_stream_destroy(&self->strangers[0].stream);
        self->n_strangers--;
        memmove(&self->strangers[0], &self->strangers[1],
                self->n_strangers * sizeof self->strangers[0]);
    }
    self->strangers[self->n_strangers++] = (stranger_t){.stream = stream};
}

/* A short frame to a peer whose socket is empty: it fits, or the peer is not worth waiting for. */
static bool send_short(byte_stream_t *stream, const transfer_frame_t *frame, const char *text)
{
    uint8_t head[TRANSFER_FRAME_SIZE];
    transfer_frame_encode(frame, head);
    struct iovec iov[2] = {{head, sizeof head}, {(void *)text, frame->length}};
    size_t moved = 0;
    lk_error_t ignored;
    return stream->ops->writev(stream, iov, frame->length > 0 ? 2 : 1, &moved, &ignored) == LK_OK &&
           moved == sizeof head + frame->length;
}

static void send_fail(const transfer_sender_t *self, byte_stream_t *stream, const char *why)
{
    transfer_frame_t frame = {
        TRANSFER_FAIL, self->session, 0, 0, 0, strnlen(why, TRANSFER_TEXT_MAX)};
    (void)send_short(stream, &frame, why); /* best effort: closing says the rest */
}

/* Reads a hello. OK: complete; INPROGRESS; or why this is no rank of ours. */
static lk_status_t read_hello(transfer_sender_t *self, stranger_t *s, transfer_hello_t *hello,
                              lk_error_t *err)
{
    for (;;) {
        size_t want = TRANSFER_HELLO_SIZE;
        if (s->in_len >= TRANSFER_HELLO_SIZE) {
            LK_RETURN_IF_ERROR(transfer_hello_decode(s->in, hello, err));
            want += hello->token_len;
        }
        if (s->in_len >= TRANSFER_HELLO_SIZE && s->in_len == want) {
            break;
        }
        struct iovec iov = {s->in + s->in_len, want - s->in_len};
        size_t moved = 0;
        lk_status_t st = s->stream->ops->readv(s->stream, &iov, 1, &moved, err);
        if (st != LK_OK) {
            return st;
        }
        s->in_len += moved;
    }
    char token[TRANSFER_TOKEN_MAX + 1];
    memcpy(token, s->in + TRANSFER_HELLO_SIZE, hello->token_len);
    token[hello->token_len] = '\0';
    bool same = strlen(token) == hello->token_len && lk_secret_equal(token, self->token);
    explicit_bzero(token, sizeof token);
    if (!same) {
        return lk_error_set(err, LK_ERR_UNAUTHORIZED, "wrong session token");
    }
    if (hello->dp_size != self->n_ranks || hello->dp_rank >= self->n_ranks) {
        return lk_error_set(err, LK_ERR_PEER, "rank %u of %u, expected a rank of %u",
                            hello->dp_rank, hello->dp_size, self->n_ranks);
    }
    if (hello->lanes != self->lanes || hello->lane >= self->lanes) {
        return lk_error_set(err, LK_ERR_PEER, "connection %u of %u, expected %u", hello->lane,
                            hello->lanes, self->lanes);
    }
    return LK_OK;
}

lk_status_t sender_greet(transfer_sender_t *self)
{
    for (size_t i = 0; i < self->n_strangers;) {
        stranger_t *s = &self->strangers[i];
        transfer_hello_t hello = {0};
        lk_error_t err = LK_ERROR_INIT;
        lk_status_t st = read_hello(self, s, &hello, &err);
        if (st == LK_INPROGRESS) {
            i++;
            continue;
        }
        transfer_frame_t welcome = {TRANSFER_WELCOME, self->session, 0, 0, 0, 0};
        welcome.offset = self->unchecked ? TRANSFER_WELCOME_NO_DIGESTS : 0;
        if (st == LK_OK && s->stream->ops->admit != NULL) {
            s->stream->ops->admit(s->stream);
        }
        if (st == LK_OK && send_short(s->stream, &welcome, "")) {
            link_t *link = &self->links[(size_t)hello.dp_rank * self->lanes + hello.lane];
            byte_stream_destroy(&link->stream);
            *link = (link_t){.stream = s->stream};
        } else {
            snprintf(self->refused, sizeof self->refused, "%.150s from %.80s",
                     st == LK_OK ? "no answer possible" : err.text, s->stream->peer);
            send_fail(self, s->stream, err.text);
            byte_stream_destroy(&s->stream);
        }
        explicit_bzero(s->in, sizeof s->in);
        self->n_strangers--;
        memmove(s, s + 1, (self->n_strangers - i) * sizeof *s);
    }
    for (size_t i = 0; i < (size_t)self->n_ranks * self->lanes; i++) {
        if (self->links[i].stream == NULL) {
            return LK_INPROGRESS;
        }
    }
    return self->dead ? LK_INPROGRESS : LK_OK;
}

void sender_missing(const transfer_sender_t *self, char *out, size_t room)
{
    lk_buf_t text;
    lk_buf_init(&text, 0);
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        uint32_t there = 0;
        for (uint32_t l = 0; l < self->lanes; l++) {
            there += self->links[(size_t)r * self->lanes + l].stream != NULL;
        }
        if (there < self->lanes) {
            lk_buf_printf(&text, "%srank %u", text.len > 0 ? ", " : "", r);
            if (self->lanes > 1) {
                lk_buf_printf(&text, " (%u of %u connections)", there, self->lanes);
            }
        }
    }
    if (self->refused[0] != '\0') {
        lk_buf_printf(&text, "; refused: %s", self->refused);
    }
    snprintf(out, room, "%s", lk_buf_cstr(&text));
    lk_buf_fini(&text);
}

static uint64_t tensor_bytes(const transfer_sender_t *self, size_t i)
{
    uint64_t bytes = 0;
    bool fits = tensor_desc_bytes(&self->descs[i], &bytes);
    CHECK(fits); /* packed_layout has added them up */
    return bytes;
}

static void cursor_start(const transfer_sender_t *self, cursor_t *c, size_t bucket)
{
    *c = (cursor_t){.bucket = bucket, .slot = c->slot};
    c->tensor = bucket < self->n_buckets ? self->buckets[bucket].first : 0;
}

lk_status_t sender_begin(transfer_sender_t *self, const tensor_desc_t *descs,
                         const void *const *data, size_t n, bool packed, uint64_t buffer_size,
                         lk_error_t *err)
{
    if (self->dead || self->active || sender_greet(self) != LK_OK) {
        return lk_error_set(err, LK_ERR_STATE, "%s",
                            self->active ? "an update is under way already"
                                         : "not connected to all ranks: initialise first");
    }
    packed_bucket_t *buckets = NULL;
    size_t n_buckets = 0;
    LK_RETURN_IF_ERROR(packed_layout(descs, n, packed, buffer_size, &buckets, &n_buckets, err));
    uint64_t *digests = calloc(n_buckets + 1, sizeof *digests);
    if (digests == NULL) {
        free(buckets);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for %zu buckets", n_buckets);
    }
    self->descs = descs;
    self->data = data;
    self->n_tensors = n;
    self->buckets = buckets;
    self->n_buckets = n_buckets;
    self->digests = digests;
    self->bytes = self->total = 0;
    for (size_t i = 0; i < n_buckets; i++) {
        self->total += buckets[i].bytes;
    }
    uint64_t now = lk_env_now_ns(self->env);
    for (size_t i = 0; i < (size_t)self->n_ranks * self->lanes; i++) {
        link_t *link = &self->links[i];
        link->go = false;
        link->acked = i % self->lanes;
        link->slots_acked = link->taken = 0;
        link->progress_ns = now;
        link->cursor.slot = 0;
        cursor_start(self, &link->cursor, i % self->lanes);
    }
    for (uint32_t l = 0; l < self->lanes; l++) {
        self->hashes[l].bucket = l;
        self->hashes[l].pos = 0;
        XXH3_64bits_reset(self->hashes[l].state);
    }
    self->packed.slot = 0;
    cursor_start(self, &self->packed, 0);
    self->active = true;
    return LK_OK;
}

/* Finds the tensor that holds c->pos, which is before the bucket's end. */
static uint64_t cursor_tensor(const transfer_sender_t *self, cursor_t *c)
{
    uint64_t size = tensor_bytes(self, c->tensor);
    while (c->pos >= c->tensor_pos + size) {
        c->tensor_pos += size;
        size = tensor_bytes(self, ++c->tensor);
    }
    return size;
}

/* ---- the window ---- */

/* Packing may go on: something is left, and every rank is done with the slot's older bytes. */
static bool can_pack(const transfer_sender_t *self)
{
    if (self->window == NULL || self->packed.bucket >= self->n_buckets) {
        return false;
    }
    bool entered = false;
    for (uint32_t r = 0; r < self->n_ranks; r++) {
        const link_t *link = &self->links[r];
        bool done = link->go && link->acked >= self->n_buckets;
        uint64_t free_slots = link->slots_acked + link->taken / TRANSFER_CHUNK_BYTES;
        if (!done && self->packed.slot - free_slots >= self->window_slots) {
            return false;
        }
        entered = entered || link->go;
    }
    return entered;
}

/* One slot, or the end of a bucket. */
static uint64_t pack_slot(transfer_sender_t *self)
{
    cursor_t *c = &self->packed;
    lane_hash_t *h = &self->hashes[0];
    const packed_bucket_t *bucket = &self->buckets[c->bucket];
    uint8_t *slot = self->window + c->slot % self->window_slots * TRANSFER_CHUNK_BYTES;
    uint64_t bytes = LK_MIN(bucket->bytes - c->pos, (uint64_t)TRANSFER_CHUNK_BYTES);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t size = cursor_tensor(self, c), at = c->pos - c->tensor_pos;
        size_t run = LK_MIN(LK_MIN(bytes - done, size - at), (uint64_t)PACK_BYTES);
        memcpy(slot + done, (const uint8_t *)self->data[c->tensor] + at, run);
        if (!self->unchecked) {
            XXH3_64bits_update(h->state, slot + done, run);
        }
        done += run;
        c->pos += run;
    }
    c->slot += bytes > 0;
    if (c->pos == bucket->bytes) {
        self->digests[c->bucket] = self->unchecked ? 0 : XXH3_64bits_digest(h->state);
        XXH3_64bits_reset(h->state);
        cursor_start(self, c, c->bucket + 1);
    }
    return bytes;
}

static void pack_some(transfer_sender_t *self)
{
    for (uint64_t bytes = 0; bytes < SEND_BUDGET && can_pack(self);) {
        bytes += pack_slot(self) + TRANSFER_FRAME_SIZE;
    }
}

/* May the frame at c leave? Without a window, always. */
static bool frame_ready(const transfer_sender_t *self, const cursor_t *c)
{
    if (self->window == NULL || self->packed.bucket > c->bucket) {
        return true;
    }
    return self->packed.bucket == c->bucket && self->packed.slot > c->slot &&
           c->pos < self->buckets[c->bucket].bytes;
}

/* The next run of bytes at c: a header (into head[]) or a piece of one tensor. */
static struct iovec cursor_piece(const transfer_sender_t *self, const link_t *link, cursor_t *c,
                                 uint8_t head[TRANSFER_FRAME_SIZE])
{
    const packed_bucket_t *bucket = &self->buckets[c->bucket];
    if (c->head < TRANSFER_FRAME_SIZE) {
        bool digest = c->pos == bucket->bytes;
        uint64_t left = bucket->bytes - c->pos;
        transfer_frame_t frame = {digest ? TRANSFER_DIGEST : TRANSFER_DATA,
                                  self->session,
                                  link->update,
                                  c->bucket,
                                  digest ? self->digests[c->bucket] : c->pos,
                                  LK_MIN(left, TRANSFER_CHUNK_BYTES)};
        transfer_frame_encode(&frame, head);
        return (struct iovec){head + c->head, TRANSFER_FRAME_SIZE - c->head};
    }
    uint64_t size = cursor_tensor(self, c);
    uint64_t chunk_end = (c->pos / TRANSFER_CHUNK_BYTES + 1) * TRANSFER_CHUNK_BYTES;
    uint64_t end = LK_MIN(LK_MIN(chunk_end, bucket->bytes), c->tensor_pos + size);
    return (struct iovec){(uint8_t *)self->data[c->tensor] + (c->pos - c->tensor_pos),
                          end - c->pos};
}

/* Moves c over n bytes, at most what cursor_piece returned. */
static void cursor_skip(const transfer_sender_t *self, cursor_t *c, size_t n)
{
    uint64_t bytes = self->buckets[c->bucket].bytes;
    if (c->head < TRANSFER_FRAME_SIZE) {
        c->head += (uint32_t)n;
        if (c->head == TRANSFER_FRAME_SIZE && c->pos == bytes) {
            cursor_start(self, c, c->bucket + self->lanes);
        } else if (c->head == TRANSFER_FRAME_SIZE && self->window != NULL) {
            c->pos += LK_MIN(bytes - c->pos, (uint64_t)TRANSFER_CHUNK_BYTES);
            c->slot++;
            c->head = 0;
        }
        return;
    }
    c->pos += n;
    if (c->pos == bytes || c->pos % TRANSFER_CHUNK_BYTES == 0) {
        c->head = 0;
    }
}

/* The furthest rank's bytes are hashed as they are sent, while they are in the cache. */
static void hash_piece(transfer_sender_t *self, size_t lane, const cursor_t *c, struct iovec piece)
{
    lane_hash_t *h = &self->hashes[lane];
    uint64_t end = c->pos + piece.iov_len;
    if (c->bucket != h->bucket || end <= h->pos) {
        return;
    }
    uint64_t skip = h->pos - c->pos;
    XXH3_64bits_update(h->state, (uint8_t *)piece.iov_base + skip, piece.iov_len - skip);
    h->pos = end;
}

static void hash_finish(transfer_sender_t *self, size_t lane, const cursor_t *c)
{
    lane_hash_t *h = &self->hashes[lane];
    if (c->bucket == h->bucket && c->pos == self->buckets[c->bucket].bytes &&
        h->pos == self->buckets[c->bucket].bytes) {
        self->digests[h->bucket] = XXH3_64bits_digest(h->state);
        h->bucket += self->lanes;
        h->pos = 0;
        XXH3_64bits_reset(h->state);
    }
}

static lk_status_t link_write(transfer_sender_t *self, link_t *link, size_t lane, int64_t budget,
                              bool *did, lk_error_t *err)
{
    uint8_t heads[BYTE_STREAM_IOV_MAX][TRANSFER_FRAME_SIZE];
    struct iovec iov[BYTE_STREAM_IOV_MAX];
    size_t most = LK_MIN((size_t)budget, (size_t)SEND_BYTES);
    bool hashing = self->window == NULL && !self->unchecked;
    while (link->go && budget > 0 && link->cursor.bucket < self->n_buckets) {
        cursor_t c = link->cursor;
        int n = 0;
        size_t size = 0;
        while (n < BYTE_STREAM_IOV_MAX && size < most && c.bucket < self->n_buckets &&
               frame_ready(self, &c)) {
            if (hashing) {
                hash_finish(self, lane, &c);
            }
            iov[n] = cursor_piece(self, link, &c, heads[n]);
            iov[n].iov_len = LK_MIN(iov[n].iov_len, most - size);
            if (hashing && c.head == TRANSFER_FRAME_SIZE) {
                hash_piece(self, lane, &c, iov[n]);
            }
            cursor_skip(self, &c, iov[n].iov_len);
            size += iov[n++].iov_len;
        }
        if (n == 0) {
            break; /* the window is still to be filled */
        }
        size_t moved = 0;
        lk_status_t st = link->stream->ops->writev(link->stream, iov, n, &moved, err);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        *did = true;
        budget -= (int64_t)moved;
        for (int i = 0; moved > 0; i++) {
            size_t part = LK_MIN(moved, iov[i].iov_len);
            uint64_t pos = link->cursor.pos;
            size_t bucket = link->cursor.bucket;
            /* finds the tensor again; the piece itself is the same */
            (void)cursor_piece(self, link, &link->cursor, heads[0]);
            cursor_skip(self, &link->cursor, part);
            self->bytes += link->cursor.bucket == bucket ? link->cursor.pos - pos : 0;
            moved -= part;
        }
    }
    return LK_OK;
}

static uint64_t slots_of(uint64_t bytes)
{
    return (bytes + TRANSFER_CHUNK_BYTES - 1) / TRANSFER_CHUNK_BYTES;
}

/* Nobody frees slots whose frames it has not seen. */
static bool taken_was_sent(const link_t *link, const transfer_frame_t *taken)
{
    return link->slots_acked + taken->offset / TRANSFER_CHUNK_BYTES <= link->cursor.slot;
}

static lk_status_t take_frame(transfer_sender_t *self, link_t *link, lk_error_t *err)
{
    transfer_frame_t f;
    LK_RETURN_IF_ERROR(transfer_frame_decode(link->in, &f, err));
    if (f.session != self->session) {
        return lk_error_set(err, LK_ERR_PEER, "%s frame of another session",
                            transfer_kind_name(f.kind));
    }
    if (f.kind == TRANSFER_FAIL && f.length <= TRANSFER_TEXT_MAX) {
        link->failing = true;
        link->text_len = f.length;
        link->text_done = 0;
        return LK_OK;
    }
    if (f.kind == TRANSFER_GO && !link->go && self->active) {
        if (f.bucket != self->n_buckets || f.length != self->total) {
            return lk_error_set(err, LK_ERR_PEER,
                                "it expects %" PRIu64 " buckets of %" PRIu64
                                " bytes together, here are %zu of %" PRIu64,
                                f.bucket, f.length, self->n_buckets, self->total);
        }
        link->go = true;
        link->update = f.update;
        return LK_OK;
    }
    if (f.kind == TRANSFER_ACK && link->go && f.update == link->update && f.bucket == link->acked &&
        link->acked < link->cursor.bucket) {
        link->slots_acked += slots_of(self->buckets[link->acked].bytes);
        link->taken = 0;
        link->acked += self->lanes;
        return LK_OK;
    }
    if (f.kind == TRANSFER_TAKEN && self->window != NULL && link->go && f.update == link->update &&
        f.bucket == link->acked && f.offset > link->taken && f.offset % TRANSFER_CHUNK_BYTES == 0 &&
        taken_was_sent(link, &f)) {
        link->taken = f.offset;
        return LK_OK;
    }
    return lk_error_set(err, LK_ERR_PEER,
                        "unexpected %s frame (update %" PRIu64 ", bucket %" PRIu64 ")",
                        transfer_kind_name(f.kind), f.update, f.bucket);
}

static bool link_done(const transfer_sender_t *self, const link_t *link)
{
    return link->go && link->acked >= self->n_buckets;
}

static lk_status_t link_read(transfer_sender_t *self, link_t *link, bool *did, lk_error_t *err)
{
    while (!link_done(self, link)) {
        if (link->failing && link->text_done == link->text_len) {
            char text[TRANSFER_TEXT_MAX + 1];
            transfer_text_clean(link->text, link->text_len, text, sizeof text);
            return lk_error_set(err, LK_ERR_PEER, "it gave up: %s", text);
        }
        struct iovec iov = {link->in + link->in_len, sizeof link->in - link->in_len};
        if (link->failing) {
            iov = (struct iovec){link->text + link->text_done, link->text_len - link->text_done};
        }
        size_t moved = 0;
        lk_status_t st = link->stream->ops->readv(link->stream, &iov, 1, &moved, err);
        if (st != LK_OK) {
            return st < 0 ? st : LK_OK;
        }
        *did = true;
        if (link->failing) {
            link->text_done += moved;
            continue;
        }
        link->in_len += moved;
        if (link->in_len == sizeof link->in) {
            link->in_len = 0;
            LK_RETURN_IF_ERROR(take_frame(self, link, err));
        }
    }
    return LK_OK;
}

static lk_status_t link_error(transfer_sender_t *self, size_t i, const lk_error_t *inner,
                              lk_error_t *err)
{
    const link_t *link = &self->links[i];
    size_t bucket = link->acked;
    lk_error_t text = LK_ERROR_INIT;
    if (bucket < self->n_buckets) {
        bool current = link->cursor.bucket == bucket;
        lk_error_set(&text, inner->status, "rank %zu (%s), bucket %zu of %zu, tensor '%s': %s",
                     i / self->lanes, link->stream->peer, bucket + 1, self->n_buckets,
                     self->descs[current ? link->cursor.tensor : self->buckets[bucket].first].name,
                     inner->text);
    } else {
        lk_error_set(&text, inner->status, "rank %zu (%s): %s", i / self->lanes, link->stream->peer,
                     inner->text);
    }
    if (err != NULL) {
        *err = text;
    }
    sender_cancel(self, text.text);
    close_all(self);
    return text.status;
}

/* Some bytes to the link, as far as its budget and its socket go. *did: it took, or said, any. */
static lk_status_t serve(transfer_sender_t *self, size_t i, int64_t budget, bool reading, bool *did,
                         lk_error_t *err)
{
    link_t *link = &self->links[i];
    /* read first and last: a rank that gave up says why before its socket breaks */
    lk_status_t st = reading ? link_read(self, link, did, err) : LK_OK;
    if (st >= 0) {
        st = link_write(self, link, i % self->lanes, budget, did, err);
        lk_error_t last = LK_ERROR_INIT;
        lk_status_t st2 = st < 0 ? link_read(self, link, did, &last) : LK_OK;
        *err = st2 < 0 && link->failing ? last : *err;
    }
    return st;
}

/* One turn of all links. *moved: some link took, or said, something. */
static lk_status_t serve_all(transfer_sender_t *self, int64_t budget, bool reading, uint64_t now,
                             bool *moved, lk_error_t *err)
{
    *moved = false;
    for (size_t i = 0; i < (size_t)self->n_ranks * self->lanes; i++) {
        bool did = false;
        lk_error_t inner = LK_ERROR_INIT;
        if (link_done(self, &self->links[i])) {
            continue; /* what becomes of it now is for the group, or the next update, to find out */
        }
        if (serve(self, i, budget, reading, &did, &inner) < 0) {
            return link_error(self, i, &inner, err);
        }
        if (did) {
            self->links[i].progress_ns = now;
        }
        *moved = *moved || did;
    }
    return LK_OK;
}

lk_status_t sender_step(transfer_sender_t *self, lk_error_t *err)
{
    if (!self->active) {
        return lk_error_set(err, LK_ERR_STATE, "no update is under way");
    }
    bool finished = true, moved = true;
    uint64_t now = lk_env_now_ns(self->env);
    size_t n_links = (size_t)self->n_ranks * self->lanes;
    int64_t turn = n_links > 1 && self->window == NULL ? TURN_BYTES : SEND_BUDGET;
    pack_some(self);
    for (int64_t sent = 0; sent < SEND_BUDGET && moved; sent += turn) {
        LK_RETURN_IF_ERROR(serve_all(self, turn, sent == 0, now, &moved, err));
    }
    for (size_t i = 0; i < n_links; i++) {
        const link_t *link = &self->links[i];
        bool done = link_done(self, link);
        finished = finished && done;
        if (!done && now - link->progress_ns >= self->no_progress_ns) {
            lk_error_t inner;
            lk_error_set(&inner, LK_ERR_TIMEOUT, "no progress for %.1f s%s",
                         (double)(now - link->progress_ns) / 1e9,
                         link->go ? "" : " (it has not entered the update)");
            return link_error(self, i, &inner, err);
        }
    }
    if (!finished) {
        return LK_INPROGRESS;
    }
    end_update(self);
    return LK_OK;
}

void sender_cancel(transfer_sender_t *self, const char *why)
{
    if (!self->active) {
        return;
    }
    bool entered = false;
    for (size_t i = 0; i < (size_t)self->n_ranks * self->lanes; i++) {
        const link_t *link = &self->links[i];
        entered = entered || link->go;
        /* between frames a text fits; inside one the end of the stream must do */
        bool between = link->cursor.head == 0;
        if (link->go && between) {
            send_fail(self, link->stream, why);
        }
    }
    if (entered) {
        close_all(self);
    } else {
        end_update(self);
    }
}

bool sender_usable(const transfer_sender_t *self)
{
    return !self->dead;
}

uint64_t sender_bytes(const transfer_sender_t *self)
{
    return self->bytes;
}

size_t sender_pollfds(const transfer_sender_t *self, struct pollfd *fds, size_t room)
{
    size_t n = 0;
    bool packing = can_pack(self); /* work at hand: a socket with room wakes the caller at once */
    for (size_t i = 0; i < self->n_strangers && n < room; i++) {
        int fd = self->strangers[i].stream->ops->fd(self->strangers[i].stream);
        fds[n++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    for (size_t i = 0; i < (size_t)self->n_ranks * self->lanes && n < room && self->active; i++) {
        const link_t *link = &self->links[i];
        if (link_done(self, link)) {
            continue;
        }
        bool write = link->go && link->cursor.bucket < self->n_buckets &&
                     (packing || frame_ready(self, &link->cursor));
        fds[n++] = (struct pollfd){.fd = link->stream->ops->fd(link->stream),
                                   .events = (short)(POLLIN | (write ? POLLOUT : 0))};
    }
    return n;
}
