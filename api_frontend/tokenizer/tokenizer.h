/*
 * tokenizer.h: text to token ids and back, from a Hugging Face tokenizer.json with byte-level BPE
 * (the GPT-2, Llama-3, Qwen and SmolLM families). Ids are those of the reference library.
 *
 * A tokenizer_t is read-only after loading and may be used by several threads at once. What a file
 * asks for and this code can't do is refused at load, by the name of the field. Files are
 * untrusted: sizes, counts, nesting and ids are limited before memory is taken.
 */
#ifndef LK_TOKENIZER_TOKENIZER_H
#define LK_TOKENIZER_TOKENIZER_H

#include "base/buf.h"

#define TOKENIZER_MAX_FILE (64u << 20) /* bytes of tokenizer.json or tokenizer_config.json */
#define TOKENIZER_MAX_TEXT (16u << 20) /* bytes of one text to encode */
#define TOKENIZER_NO_ID    UINT32_MAX

typedef struct tokenizer tokenizer_t;

/*
 * Reads a checkpoint directory (tokenizer.json, and tokenizer_config.json if it is there) or one
 * tokenizer.json file. ERR_NOT_FOUND: there is no tokenizer.json. ERR_INVALID, ERR_UNSUPPORTED,
 * ERR_TOO_LARGE: the text names the file and the field. Destroy with tokenizer_destroy.
 */
LK_MUST_USE lk_status_t tokenizer_load(const char *path, tokenizer_t **out, lk_error_t *err);

/* The same from memory; config may be NULL. */
LK_MUST_USE lk_status_t tokenizer_parse(const char *json, size_t json_len, const char *config,
                                        size_t config_len, tokenizer_t **out, lk_error_t *err);

void tokenizer_destroy(tokenizer_t **tokenizer);

/* The highest id plus one. The model's matrix may be larger: such ids decode to nothing. */
uint32_t tokenizer_vocab_size(const tokenizer_t *t);

/* The id of a token by its text (for special and other added tokens: as one writes it; for tokens
 * of the model: in the byte alphabet). TOKENIZER_NO_ID if there is none. */
uint32_t tokenizer_token_id(const tokenizer_t *t, const char *text);

/* bos_token and eos_token of tokenizer_config.json; TOKENIZER_NO_ID without. */
uint32_t tokenizer_bos_id(const tokenizer_t *t);
uint32_t tokenizer_eos_id(const tokenizer_t *t);

bool tokenizer_is_special(const tokenizer_t *t, uint32_t id);

/* The bytes a token stands for, which may be part of a character. Owned by the tokenizer, not
 * terminated. NULL and *len = 0 for an id without a token. */
const uint8_t *tokenizer_token_bytes(const tokenizer_t *t, uint32_t id, size_t *len);

/* Appends the token alone as text, with U+FFFD for parts of characters; nothing for an id without
 * a token. Special tokens are not skipped. */
void tokenizer_token_text(const tokenizer_t *t, uint32_t id, lk_buf_t *out);

typedef enum {
    TOKENIZER_ADD_SPECIAL = 1,  /* what the post-processor adds, such as a first <|bos|> */
    TOKENIZER_PARSE_SPECIAL = 2 /* "<|eos|>" in the text is the token; else it is plain text */
} tokenizer_flags_t;

/* Encodes text; *ids is malloc'ed (the caller frees it; never NULL on success). ERR_INVALID: not
 * UTF-8, with the offset; ERR_TOO_LARGE: longer than TOKENIZER_MAX_TEXT. */
LK_MUST_USE lk_status_t tokenizer_encode(const tokenizer_t *t, const char *text, size_t len,
                                         unsigned flags, uint32_t **ids, size_t *n_ids,
                                         lk_error_t *err);

/* Appends the text of the ids, with U+FFFD for what is not UTF-8; ids without a token are nothing.
 * No clean-up of spaces is done. Sets out->failed when out of memory or over its limit. */
void tokenizer_decode(const tokenizer_t *t, const uint32_t *ids, size_t n_ids, bool skip_special,
                      lk_buf_t *out);

#define TOKENIZER_BYTES_BOS 256u /* "<|bos|>" */
#define TOKENIZER_BYTES_EOS 257u /* "<|eos|>" */
#define TOKENIZER_BYTES_MIN 258u

/*
 * Writes tokenizer.json and tokenizer_config.json of a tokenizer without merges into dir: ids 0 to
 * 255 are the bytes, then <|bos|> and <|eos|>; ids above stay unused. ERR_INVALID: vocab_size below
 * TOKENIZER_BYTES_MIN. ERR_IO: the files; what was there before is not replaced then.
 */
LK_MUST_USE lk_status_t tokenizer_write_bytes(const char *dir, uint32_t vocab_size,
                                              lk_error_t *err);

#endif
