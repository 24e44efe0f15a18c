/*
 * bpe.h: byte-pair merging of one pre-token. The next merge is always the one of lowest rank, the
 * leftmost among equals. Short words use a scan over a small array, long ones a heap over a linked
 * list, so n bytes cost O(n log n). Built once, then read-only and shared by threads.
 */
#ifndef LK_TOKENIZER_BPE_H
#define LK_TOKENIZER_BPE_H

#include "api_frontend/tokenizer/vocab.h"

typedef struct {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX is free */
    uint32_t rank, id;
} bpe_merge_t;

typedef struct {
    const vocab_t *vocab;
    bpe_merge_t *merges; /* open addressing, at most half full */
    uint32_t n_slots;
    uint32_t byte_ids[256]; /* VOCAB_NO_ID: the vocabulary lacks this byte */
    uint32_t unk_id;        /* for those; VOCAB_NO_ID: they are an error */
    bool fuse_unk;
    bool ignore_merges; /* a pre-token that is a token as a whole is not merged */
} bpe_t;

/* A growing list of token ids. */
typedef struct {
    uint32_t *data;
    size_t len, cap;
} bpe_ids_t;

/* False when out of memory. */
bool bpe_ids_push(bpe_ids_t *ids, uint32_t id);

/* Looks up the byte tokens and makes room for n_merges. vocab is borrowed. */
lk_status_t bpe_init(bpe_t *bpe, const vocab_t *vocab, size_t n_merges, lk_error_t *err);
void bpe_fini(bpe_t *bpe);

/* Adds the merge of two ids; a repeated pair takes the later rank, as the reference does. At most
 * the number of calls given to bpe_init. */
void bpe_add_merge(bpe_t *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);

/* Appends the ids of one pre-token of len bytes (below 2^31) to ids.
 * ERR_INVALID: a byte has no token. */
lk_status_t bpe_encode(const bpe_t *bpe, const uint8_t *word, size_t len, bpe_ids_t *ids,
                       lk_error_t *err);

#endif
