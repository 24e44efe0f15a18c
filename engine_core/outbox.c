#include "engine_core/outbox.h"
#include "base/buf.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

#define MAX_OUTPUTS 4096u      /* of one message */
#define MAX_BYTES   (8u << 20) /* about; of one message */

/* An output whose bytes and spans are still offsets (into bytes, spans): both move as they grow. */
typedef struct {
    msg_output_t output;
    size_t tokens, logprobs, ranks, top_ids, top_logprobs, error;
    size_t prompt_logprobs, prompt_ranks, prompt_top_ids, prompt_top_logprobs;
    size_t kv_spans, weight_spans;
} entry_t;

typedef struct {
    entry_t *entries;
    size_t n, cap;
    msg_span_t *spans; /* version points into the labels */
    size_t n_spans, cap_spans;
    lk_buf_t bytes;
} box_t;

struct outbox {
    uint32_t n_frontends;
    msg_output_t *list; /* scratch of flush, [cap_list] */
    size_t cap_list;
    box_t boxes[];
};

outbox_t *outbox_new(uint32_t n_frontends)
{
    outbox_t *self = calloc(1, sizeof *self + n_frontends * sizeof self->boxes[0]);
    if (self != NULL) {
        self->n_frontends = n_frontends;
        for (uint32_t f = 0; f < n_frontends; f++) {
            lk_buf_init(&self->boxes[f].bytes, 0);
        }
    }
    return self;
}

void outbox_destroy(outbox_t **self_p)
{
    if (*self_p == NULL) {
        return;
    }
    for (uint32_t f = 0; f < (*self_p)->n_frontends; f++) {
        box_t *box = &(*self_p)->boxes[f];
        free(box->entries);
        free(box->spans);
        lk_buf_fini(&box->bytes);
    }
    free((*self_p)->list);
    free(*self_p);
    *self_p = NULL;
}

/* Room for `more` elements in a growing array. A token that can't be sent must not be lost. */
static void *grown(void *items, size_t *cap, size_t n, size_t more, size_t size)
{
    if (n + more <= *cap) {
        return items;
    }
    size_t wanted = LK_MAX(LK_MAX(n + more, 2 * *cap), 32);
    void *out = realloc(items, wanted * size);
    CHECKF(out != NULL, "out of memory for %zu outputs", wanted);
    *cap = wanted;
    return out;
}

static entry_t *push_entry(box_t *box)
{
    box->entries = grown(box->entries, &box->cap, box->n, 1, sizeof *box->entries);
    entry_t *e = &box->entries[box->n++];
    memset(e, 0, sizeof *e);
    return e;
}

/* Returns the offset. Elements are 4 bytes; so is the alignment. */
static size_t push_bytes(box_t *box, const void *data, size_t len)
{
    size_t at = box->bytes.len;
    if (len > 0) {
        lk_buf_append(&box->bytes, data, len);
    }
    CHECKF(!box->bytes.failed, "out of memory for outputs");
    return at;
}

static size_t push_text(box_t *box, const char *text)
{
    size_t at = push_bytes(box, text, strlen(text) + 1);
    push_bytes(box, "\0\0\0", (4 - box->bytes.len % 4) % 4);
    return at;
}

static size_t push_spans(box_t *box, const epoch_span_t *spans, size_t n,
                         const version_labels_t *labels)
{
    box->spans = grown(box->spans, &box->cap_spans, box->n_spans, n, sizeof *box->spans);
    size_t at = box->n_spans;
    for (size_t i = 0; i < n; i++) {
        box->spans[box->n_spans++] =
            (msg_span_t){.version = msg_str(version_labels_get(labels, spans[i].epoch)),
                         .epoch = spans[i].epoch,
                         .start = spans[i].start,
                         .end = spans[i].end};
    }
    return at;
}

static void add_prompt_logprobs(box_t *box, entry_t *e, const sched_output_t *o)
{
    msg_output_t *out = &e->output;
    size_t top = (size_t)o->n_prompt * o->n_prompt_top;
    out->prompt_first = o->prompt_first;
    out->n_prompt_top = o->n_prompt_top;
    out->prompt_logprobs.len = o->n_prompt * sizeof(float);
    out->prompt_ranks.len = o->n_prompt * sizeof(uint32_t);
    out->prompt_top_ids.len = top * sizeof(uint32_t);
    out->prompt_top_logprobs.len = top * sizeof(float);
    e->prompt_logprobs = push_bytes(box, o->prompt_logprobs, out->prompt_logprobs.len);
    e->prompt_ranks = push_bytes(box, o->prompt_ranks, out->prompt_ranks.len);
    e->prompt_top_ids = push_bytes(box, o->prompt_top_ids, out->prompt_top_ids.len);
    e->prompt_top_logprobs = push_bytes(box, o->prompt_top_logprobs, out->prompt_top_logprobs.len);
}

void outbox_add(outbox_t *self, const sched_output_t *o, const version_labels_t *labels,
                lk_status_t error_status, uint64_t now_ns)
{
    const request_t *r = o->request;
    CHECK(r->client < self->n_frontends);
    box_t *box = &self->boxes[r->client];
    entry_t *e = push_entry(box);
    msg_output_t *out = &e->output;
    bool ends = o->finish != FINISH_NONE;
    out->handle = r->handle;
    out->token_ids.len = o->n * sizeof(uint32_t);
    e->tokens = push_bytes(box, r->tokens + r->n_prompt + o->first, out->token_ids.len);
    if (o->logprobs != NULL && r->sampling.logprobs >= 0) {
        size_t top = (size_t)o->n * o->n_top;
        out->n_top = o->n_top;
        out->logprobs.len = o->n * sizeof(float);
        out->ranks.len = o->n * sizeof(uint32_t);
        out->top_ids.len = top * sizeof(uint32_t);
        out->top_logprobs.len = top * sizeof(float);
        e->logprobs = push_bytes(box, o->logprobs, out->logprobs.len);
        e->ranks = push_bytes(box, o->ranks, out->ranks.len);
        e->top_ids = push_bytes(box, o->top_ids, out->top_ids.len);
        e->top_logprobs = push_bytes(box, o->top_logprobs, out->top_logprobs.len);
    }
    if (o->n_prompt > 0) {
        add_prompt_logprobs(box, e, o);
    }
    if (o->first == 0 && o->n > 0) {
        out->queue_ns = r->scheduled_ns - r->arrival_ns;
        out->prefill_ns = now_ns - r->scheduled_ns;
    }
    out->epoch = o->epoch;
    if (o->n > 0) {
        out->version = msg_str(version_labels_get(labels, o->epoch));
    }
    out->finish_reason = o->finish;
    out->stop_token = ends ? r->stop_token : -1;
    out->cached_tokens = o->first == 0 ? r->n_cached : 0;
    out->kv_snapshot = o->kv_snapshot;
    if (o->kv_snapshot) {
        out->kv_spans.count = r->n_kv_spans;
        e->kv_spans = push_spans(box, r->kv_spans, r->n_kv_spans, labels);
    }
    if (ends) {
        out->weight_spans.count = r->n_weight_spans;
        e->weight_spans = push_spans(box, r->weight_spans, r->n_weight_spans, labels);
    }
    if (o->finish == FINISH_ERROR) {
        const char *text = o->error != NULL ? o->error : "";
        out->error_status = error_status;
        out->error.len = strlen(text);
        e->error = push_text(box, text);
    }
}

void outbox_refuse(outbox_t *self, uint32_t frontend, uint64_t handle, lk_status_t status,
                   const char *text)
{
    CHECK(frontend < self->n_frontends);
    box_t *box = &self->boxes[frontend];
    entry_t *e = push_entry(box);
    e->output.handle = handle;
    e->output.finish_reason = FINISH_ERROR;
    e->output.stop_token = -1;
    e->output.error_status = status;
    e->output.error.len = strlen(text);
    e->error = push_text(box, text);
}

static void clear(box_t *box)
{
    box->n = box->n_spans = 0;
    lk_buf_clear(&box->bytes);
}

void outbox_drop(outbox_t *self, uint32_t frontend)
{
    CHECK(frontend < self->n_frontends);
    clear(&self->boxes[frontend]);
}

bool outbox_is_full(const outbox_t *self)
{
    size_t bytes = 0;
    for (uint32_t f = 0; f < self->n_frontends; f++) {
        bytes += self->boxes[f].bytes.len;
    }
    return bytes >= MAX_BYTES;
}

bool outbox_is_empty(const outbox_t *self)
{
    for (uint32_t f = 0; f < self->n_frontends; f++) {
        if (self->boxes[f].n > 0) {
            return false;
        }
    }
    return true;
}

/* Offsets become pointers. */
static msg_output_t resolved(const box_t *box, const entry_t *e)
{
    msg_output_t out = e->output;
    const uint8_t *bytes = box->bytes.data;
    if (bytes != NULL) {
        out.token_ids.data = bytes + e->tokens;
        out.logprobs.data = bytes + e->logprobs;
        out.ranks.data = bytes + e->ranks;
        out.top_ids.data = bytes + e->top_ids;
        out.top_logprobs.data = bytes + e->top_logprobs;
        out.prompt_logprobs.data = bytes + e->prompt_logprobs;
        out.prompt_ranks.data = bytes + e->prompt_ranks;
        out.prompt_top_ids.data = bytes + e->prompt_top_ids;
        out.prompt_top_logprobs.data = bytes + e->prompt_top_logprobs;
        out.error.ptr = out.error.len > 0 ? (const char *)bytes + e->error : NULL;
    }
    if (box->spans != NULL) {
        out.kv_spans.items = box->spans + e->kv_spans;
        out.weight_spans.items = box->spans + e->weight_spans;
    }
    return out;
}

static size_t output_bytes(const msg_output_t *out)
{
    return 128 + out->token_ids.len + 2 * out->logprobs.len + 2 * out->top_ids.len +
           2 * (out->prompt_logprobs.len + out->prompt_top_ids.len) +
           64 * (out->kv_spans.count + out->weight_spans.count);
}

void outbox_flush(outbox_t *self, uint32_t rank, uint64_t step,
                  void (*send)(void *ctx, uint32_t frontend, const msg_t *msg), void *ctx)
{
    for (uint32_t f = 0; f < self->n_frontends; f++) {
        box_t *box = &self->boxes[f];
        self->list =
            grown(self->list, &self->cap_list, 0, LK_MIN(box->n, MAX_OUTPUTS), sizeof *self->list);
        for (size_t i = 0; i < box->n;) {
            size_t n = 0, bytes = 0;
            while (i < box->n && n < MAX_OUTPUTS && bytes < MAX_BYTES) {
                self->list[n] = resolved(box, &box->entries[i++]);
                bytes += output_bytes(&self->list[n++]);
            }
            msg_t msg = {.type = MSG_OUTPUTS};
            msg.outputs = (msg_outputs_t){.rank = rank, .step = step};
            msg.outputs.outputs.items = self->list;
            msg.outputs.outputs.count = n;
            send(ctx, f, &msg);
        }
        clear(box);
    }
}
