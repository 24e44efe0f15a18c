/*
 * vocab.h: the tokens of one tokenizer: text to id by hash, id to text and to bytes by table.
 * Ids may have holes (a model's matrix is often larger than its tokenizer). Built once, then
 * read-only.
 */
#ifndef LK_TOKENIZER_VOCAB_H
#define LK_TOKENIZER_VOCAB_H

#include "base/buf.h"

/* Largest known vocabularies have 262,144 entries. */
#define VOCAB_MAX_IDS   (1u << 20)
#define VOCAB_NO_ID     UINT32_MAX
#define VOCAB_MAX_TOKEN 8192u /* bytes of one token's text */
#define VOCAB_MAX_TEXT  (256u << 20)

typedef struct {
    uint32_t text_at, bytes_at; /* offsets into the arenas */
    uint32_t text_len, bytes_len;
    bool used;
    bool in_model; /* of model.vocab, not only an added token */
    bool special;  /* decoding can skip it */
} vocab_entry_t;

typedef struct {
    vocab_entry_t *entries; /* [n_ids] */
    uint32_t n_ids, cap_ids;
    uint32_t n_tokens, max_text_len;
    lk_buf_t texts, bytes; /* arenas */
    uint32_t *slots;       /* open addressing, id + 1; 0 is free */
    uint32_t n_slots;      /* power of two, at most half full */
} vocab_t;

void vocab_init(vocab_t *v);
void vocab_fini(vocab_t *v);

/* Adds a token (text: valid UTF-8 as written in the file; its bytes follow from the byte
 * alphabet). ERR_INVALID: the id is out of range or taken, or the text is known, empty or too
 * long. The text of an error names the token, not the field: callers prefix it. */
lk_status_t vocab_add(vocab_t *v, const char *text, size_t len, int64_t id, lk_error_t *err);

/* VOCAB_NO_ID if unknown. */
uint32_t vocab_find(const vocab_t *v, const char *text, size_t len);

/* NULL for an id that no token has. */
const vocab_entry_t *vocab_get(const vocab_t *v, uint32_t id);
const char *vocab_text(const vocab_t *v, uint32_t id, size_t *len);
const uint8_t *vocab_bytes(const vocab_t *v, uint32_t id, size_t *len);

/* A copy of text for error messages: cut to 40 bytes at a character's border. */
typedef struct {
    char s[48];
} vocab_quote_t;
vocab_quote_t vocab_quote(const char *text, size_t len);

#endif
