#include "api_frontend/tokenizer/bpe.h"
#include "api_frontend/tokenizer/byte_alphabet.h"
#include "base/check.h"
#include "base/prng.h"

#include <stdlib.h>
#include <string.h>

#define SHORT_WORD 48 /* symbols; above it the heap wins */
#define NO_PAIR    UINT64_MAX
#define NONE       UINT32_MAX

bool bpe_ids_push(bpe_ids_t *ids, uint32_t id)
{
    if (ids->len == ids->cap) {
        size_t cap = ids->cap == 0 ? 64 : ids->cap * 2;
        uint32_t *data = realloc(ids->data, cap * sizeof *data);
        if (data == NULL) {
            return false;
        }
        ids->data = data;
        ids->cap = cap;
    }
    ids->data[ids->len++] = id;
    return true;
}

static lk_status_t no_memory(lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for merging");
}

lk_status_t bpe_init(bpe_t *bpe, const vocab_t *vocab, size_t n_merges, lk_error_t *err)
{
    *bpe = (bpe_t){.vocab = vocab, .unk_id = VOCAB_NO_ID};
    uint32_t n = 16;
    while (n < n_merges * 2) {
        n *= 2;
    }
    bpe->merges = malloc(n * sizeof *bpe->merges);
    if (bpe->merges == NULL) {
        return no_memory(err);
    }
    bpe->n_slots = n;
    memset(bpe->merges, 0xFF, n * sizeof *bpe->merges);
    for (int b = 0; b < 256; b++) {
        char text[2];
        size_t len = byte_alphabet_encode((uint8_t)b, text);
        bpe->byte_ids[b] = vocab_find(vocab, text, len);
    }
    return LK_OK;
}

void bpe_fini(bpe_t *bpe)
{
    free(bpe->merges);
    bpe->merges = NULL;
}

static bpe_merge_t *find(const bpe_t *bpe, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t mask = bpe->n_slots - 1;
    uint32_t i = (uint32_t)lk_mix64(pair) & mask;
    while (bpe->merges[i].pair != pair && bpe->merges[i].pair != NO_PAIR) {
        i = (i + 1) & mask;
    }
    return &bpe->merges[i]; /* a free slot has rank NONE */
}

void bpe_add_merge(bpe_t *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t id)
{
    *find(bpe, left, right) =
        (bpe_merge_t){.pair = (uint64_t)left << 32 | right, .rank = rank, .id = id};
}

/* Writes the starting symbols of a word, one per byte (fused unknowns are one), into out[len]. */
static lk_status_t start_symbols(const bpe_t *bpe, const uint8_t *word, size_t len, uint32_t *out,
                                 size_t *n, lk_error_t *err)
{
    bool was_unknown = false;
    *n = 0;
    for (size_t i = 0; i < len; i++) {
        uint32_t id = bpe->byte_ids[word[i]];
        bool unknown = id == VOCAB_NO_ID;
        if (unknown && bpe->unk_id == VOCAB_NO_ID) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "the text has byte 0x%02X, for which the tokenizer has no token",
                                word[i]);
        }
        if (!unknown || !was_unknown || !bpe->fuse_unk) {
            out[(*n)++] = unknown ? bpe->unk_id : id;
        }
        was_unknown = unknown;
    }
    return LK_OK;
}

/* Quadratic, but on at most SHORT_WORD symbols; ranks[i] is the rank of (s[i], s[i + 1]). */
static size_t merge_short(const bpe_t *bpe, uint32_t *s, size_t n)
{
    uint32_t ranks[SHORT_WORD], merged[SHORT_WORD];
    for (size_t i = 0; i + 1 < n; i++) {
        const bpe_merge_t *m = find(bpe, s[i], s[i + 1]);
        ranks[i] = m->rank;
        merged[i] = m->id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            best = ranks[i] < ranks[best] ? i : best;
        }
        if (ranks[best] == NONE) {
            break;
        }
        s[best] = merged[best];
        n--;
        size_t tail = n - best - 1;
        memmove(s + best + 1, s + best + 2, tail * sizeof *s);
        memmove(ranks + best, ranks + best + 1, tail * sizeof *ranks);
        memmove(merged + best, merged + best + 1, tail * sizeof *merged);
        for (size_t i = best == 0 ? 0 : best - 1; i <= best && i + 1 < n; i++) {
            const bpe_merge_t *m = find(bpe, s[i], s[i + 1]);
            ranks[i] = m->rank;
            merged[i] = m->id;
        }
    }
    return n;
}

/* A symbol list and the heap of its possible merges. A merge is stale, and is skipped, when the
 * pair at `at` no longer has its rank. */
typedef struct {
    uint32_t id, prev, next;
} symbol_t;

/* rank << 32 | at, so that comparing two orders them */
typedef uint64_t candidate_t;

typedef struct {
    const bpe_t *bpe;
    symbol_t *s;
    candidate_t *heap; /* a four-way heap: half the levels, and a node's children share a line */
    size_t n_heap;
} long_word_t;

/* The pair at `at`, or false if it can't be merged. */
static bool candidate(const long_word_t *w, uint32_t at, candidate_t *c)
{
    if (at == NONE || w->s[at].next == NONE) {
        return false;
    }
    uint32_t rank = find(w->bpe, w->s[at].id, w->s[w->s[at].next].id)->rank;
    *c = (uint64_t)rank << 32 | at;
    return rank != NONE;
}

static void offer(long_word_t *w, uint32_t at)
{
    candidate_t c;
    if (!candidate(w, at, &c)) {
        return;
    }
    size_t i = w->n_heap++;
    for (; i > 0 && c < w->heap[(i - 1) / 4]; i = (i - 1) / 4) {
        w->heap[i] = w->heap[(i - 1) / 4];
    }
    w->heap[i] = c;
}

/* Puts c where the hole at i sinks to. */
static void sink(long_word_t *w, size_t i, candidate_t c)
{
    for (;;) {
        size_t first = 4 * i + 1, best = first;
        if (first >= w->n_heap) {
            break;
        }
        for (size_t k = first + 1; k < LK_MIN(first + 4, w->n_heap); k++) {
            best = w->heap[k] < w->heap[best] ? k : best;
        }
        if (c <= w->heap[best]) {
            break;
        }
        w->heap[i] = w->heap[best];
        i = best;
    }
    w->heap[i] = c;
}

static candidate_t take_first(long_word_t *w)
{
    candidate_t first = w->heap[0];
    w->n_heap--;
    if (w->n_heap > 0) {
        sink(w, 0, w->heap[w->n_heap]);
    }
    return first;
}

static void merge_at(long_word_t *w, candidate_t c)
{
    uint32_t at = (uint32_t)c;
    symbol_t *left = &w->s[at];
    if (left->id == NONE || left->next == NONE) {
        return;
    }
    symbol_t *right = &w->s[left->next];
    const bpe_merge_t *m = find(w->bpe, left->id, right->id);
    if (m->rank != c >> 32) {
        return;
    }
    left->id = m->id;
    left->next = right->next;
    right->id = NONE;
    if (left->next != NONE) {
        w->s[left->next].prev = at;
    }
    offer(w, left->prev);
    offer(w, at);
}

static lk_status_t encode_long(const bpe_t *bpe, const uint32_t *start, size_t n, bpe_ids_t *ids,
                               lk_error_t *err)
{
    /* n - 1 candidates at first, and each of at most n - 1 merges takes one and offers two */
    long_word_t w = {
        .bpe = bpe, .s = malloc(n * sizeof *w.s), .heap = malloc(2 * n * sizeof *w.heap)};
    lk_status_t status = LK_OK;
    if (w.s == NULL || w.heap == NULL) {
        status = no_memory(err);
        goto err_free;
    }
    for (size_t i = 0; i < n; i++) {
        w.s[i] = (symbol_t){.id = start[i],
                            .prev = i == 0 ? NONE : (uint32_t)i - 1,
                            .next = i + 1 == n ? NONE : (uint32_t)i + 1};
    }
    for (size_t i = 0; i < n; i++) {
        offer(&w, (uint32_t)i);
    }
    while (w.n_heap > 0) {
        merge_at(&w, take_first(&w));
    }
    for (uint32_t i = 0; i != NONE; i = w.s[i].next) {
        if (!bpe_ids_push(ids, w.s[i].id)) {
            status = no_memory(err);
            goto err_free;
        }
    }
err_free:
    free(w.s);
    free(w.heap);
    return status;
}

/* The whole word as a token of the model, or VOCAB_NO_ID. */
static uint32_t whole_word(const bpe_t *bpe, const uint8_t *word, size_t len)
{
    char text[VOCAB_MAX_TOKEN];
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (n + 2 > sizeof text) {
            return VOCAB_NO_ID;
        }
        n += byte_alphabet_encode(word[i], text + n);
    }
    uint32_t id = vocab_find(bpe->vocab, text, n);
    return id != VOCAB_NO_ID && bpe->vocab->entries[id].in_model ? id : VOCAB_NO_ID;
}

lk_status_t bpe_encode(const bpe_t *bpe, const uint8_t *word, size_t len, bpe_ids_t *ids,
                       lk_error_t *err)
{
    CHECK(len < 1u << 31);
    if (len == 0) {
        return LK_OK;
    }
    uint32_t small[SHORT_WORD];
    size_t n = 0;
    if (bpe->ignore_merges) {
        small[0] = whole_word(bpe, word, len);
        n = small[0] != VOCAB_NO_ID ? 1 : 0;
    }
    if (n == 0 && len > SHORT_WORD) {
        uint32_t *start = malloc(len * sizeof *start);
        if (start == NULL) {
            return no_memory(err);
        }
        lk_status_t status = start_symbols(bpe, word, len, start, &n, err);
        if (status == LK_OK) {
            status = encode_long(bpe, start, n, ids, err);
        }
        free(start);
        return status;
    }
    if (n == 0) {
        LK_RETURN_IF_ERROR(start_symbols(bpe, word, len, small, &n, err));
        n = merge_short(bpe, small, n);
    }
    for (size_t i = 0; i < n; i++) {
        if (!bpe_ids_push(ids, small[i])) {
            return no_memory(err);
        }
    }
    return LK_OK;
}
