/* tokenizer_parts.h: what the loader fills and the codec reads. Private to this folder. */
#ifndef LK_TOKENIZER_PARTS_H
#define LK_TOKENIZER_PARTS_H

#include "api_frontend/tokenizer/added_tokens.h"
#include "api_frontend/tokenizer/bpe.h"
#include "api_frontend/tokenizer/normalizer.h"
#include "api_frontend/tokenizer/pretokenizer.h"
#include "api_frontend/tokenizer/tokenizer.h"
#include "api_frontend/tokenizer/vocab.h"

#define TOKENIZER_MAX_NORMALIZERS 8

struct tokenizer {
    vocab_t vocab;
    bpe_t bpe;
    normalizer_form_t normalizers[TOKENIZER_MAX_NORMALIZERS];
    uint32_t n_normalizers;
    pretokenizer_t pretokenizer;
    added_trie_t *raw_tokens;        /* looked for in the text as it comes */
    added_trie_t *normalized_tokens; /* looked for after normalisation */
    bpe_ids_t prefix, suffix;        /* added around a text with TOKENIZER_ADD_SPECIAL */
    bool has_template;
    uint32_t bos_id, eos_id;
};

/* Applies the normalizers in order. The result is *out or, if there are none, the text itself;
 * NULL when out of memory. */
const char *tokenizer_normalize(const tokenizer_t *t, const char *text, size_t len, lk_buf_t *out,
                                size_t *out_len);

#endif
