/*
 * added_tokens.h: finds added tokens (special ones and others) in a text before it is split and
 * merged: leftmost first, the longest at one place. Two of these exist per tokenizer: one for the
 * text as it comes, one for the text after normalisation.
 */
#ifndef LK_TOKENIZER_ADDED_TOKENS_H
#define LK_TOKENIZER_ADDED_TOKENS_H

#include "base/status.h"

typedef struct {
    uint32_t id;
    bool special;
    bool normalized;  /* matched after the normalizer */
    bool lstrip;      /* takes the white space before it */
    bool rstrip;      /* and after it */
    bool single_word; /* only where no word character touches it */
} added_token_t;

typedef struct added_trie added_trie_t;

added_trie_t *added_trie_new(void);
void added_trie_destroy(added_trie_t **trie);
bool added_trie_is_empty(const added_trie_t *trie);

/* content: valid UTF-8, len >= 1. A content already there is replaced. ERR_NO_MEMORY. */
lk_status_t added_trie_add(added_trie_t *trie, const char *content, size_t len,
                           const added_token_t *token, lk_error_t *err);

/* One piece of a text: a token (token != NULL) or plain text [start, end). */
typedef struct {
    const added_token_t *token;
    size_t start, end;
} added_piece_t;

/* Iteration over the pieces of a text, in order and without empty ones. */
typedef struct {
    const added_trie_t *trie;
    const char *text;
    size_t len;
    bool with_special; /* false: the text of special tokens is plain text */
    size_t done;       /* everything before it has been given out */
    size_t scan;       /* where the next match may begin */
    added_piece_t pending;
    bool has_pending;
} added_scan_t;

void added_scan_init(added_scan_t *scan, const added_trie_t *trie, const char *text, size_t len,
                     bool with_special);
/* False at the end. */
bool added_scan_next(added_scan_t *scan, added_piece_t *piece);

#endif
