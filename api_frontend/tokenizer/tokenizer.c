#include "api_frontend/tokenizer/tokenizer_parts.h"
#include "api_frontend/tokenizer/utf8.h"

#include <stdlib.h>
#include <string.h>

void tokenizer_destroy(tokenizer_t **tokenizer)
{
    tokenizer_t *t = *tokenizer;
    if (t == NULL) {
        return;
    }
    added_trie_destroy(&t->raw_tokens);
    added_trie_destroy(&t->normalized_tokens);
    pretokenizer_fini(&t->pretokenizer);
    bpe_fini(&t->bpe);
    vocab_fini(&t->vocab);
    free(t->prefix.data);
    free(t->suffix.data);
    free(t);
    *tokenizer = NULL;
}

uint32_t tokenizer_vocab_size(const tokenizer_t *t)
{
    return t->vocab.n_ids;
}

uint32_t tokenizer_token_id(const tokenizer_t *t, const char *text)
{
    return vocab_find(&t->vocab, text, strlen(text));
}

uint32_t tokenizer_bos_id(const tokenizer_t *t)
{
    return t->bos_id;
}

uint32_t tokenizer_eos_id(const tokenizer_t *t)
{
    return t->eos_id;
}

bool tokenizer_is_special(const tokenizer_t *t, uint32_t id)
{
    const vocab_entry_t *e = vocab_get(&t->vocab, id);
    return e != NULL && e->special;
}

const uint8_t *tokenizer_token_bytes(const tokenizer_t *t, uint32_t id, size_t *len)
{
    return vocab_bytes(&t->vocab, id, len);
}

void tokenizer_token_text(const tokenizer_t *t, uint32_t id, lk_buf_t *out)
{
    size_t len;
    const uint8_t *bytes = vocab_bytes(&t->vocab, id, &len);
    utf8_append_lossy(out, bytes, len);
}

void tokenizer_decode(const tokenizer_t *t, const uint32_t *ids, size_t n_ids, bool skip_special,
                      lk_buf_t *out)
{
    lk_buf_t bytes;
    lk_buf_init(&bytes, 0);
    for (size_t i = 0; i < n_ids; i++) {
        size_t len;
        const uint8_t *p = vocab_bytes(&t->vocab, ids[i], &len);
        if (p != NULL && !(skip_special && tokenizer_is_special(t, ids[i]))) {
            lk_buf_append(&bytes, p, len);
        }
    }
    utf8_append_lossy(out, bytes.data, bytes.len);
    out->failed = out->failed || bytes.failed;
    lk_buf_fini(&bytes);
}

const char *tokenizer_normalize(const tokenizer_t *t, const char *text, size_t len, lk_buf_t *out,
                                size_t *out_len)
{
    lk_buf_clear(out);
    *out_len = len;
    if (t->n_normalizers == 0) {
        return text;
    }
    normalizer_apply(t->normalizers[0], text, len, out);
    for (uint32_t i = 1; i < t->n_normalizers && !out->failed; i++) {
        lk_buf_t next;
        lk_buf_init(&next, 0);
        normalizer_apply(t->normalizers[i], lk_buf_cstr(out), out->len, &next);
        lk_buf_fini(out);
        *out = next;
    }
    *out_len = out->len;
    return out->failed ? NULL : lk_buf_cstr(out);
}

/* One call of tokenizer_encode. */
typedef struct {
    const tokenizer_t *t;
    bool with_special;
    split_search_t *search;
    lk_buf_t normalized;
    bpe_ids_t ids;
} encoder_t;

static lk_status_t no_memory(lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for encoding a text");
}

static lk_status_t encode_word(void *ctx, const char *word, size_t len, lk_error_t *err)
{
    encoder_t *e = ctx;
    return bpe_encode(&e->t->bpe, (const uint8_t *)word, len, &e->ids, err);
}

/* Walks over the pieces of text: tokens of the trie become ids, the rest goes to plain(). */
static lk_status_t
encode_pieces(encoder_t *e, const added_trie_t *trie, const char *text, size_t len,
              lk_status_t (*plain)(encoder_t *, const char *, size_t, lk_error_t *),
              lk_error_t *err)
{
    added_scan_t scan;
    added_piece_t piece;
    added_scan_init(&scan, trie, text, len, e->with_special);
    while (added_scan_next(&scan, &piece)) {
        if (piece.token == NULL) {
            LK_RETURN_IF_ERROR(plain(e, text + piece.start, piece.end - piece.start, err));
        } else if (!bpe_ids_push(&e->ids, piece.token->id)) {
            return no_memory(err);
        }
    }
    return LK_OK;
}

static lk_status_t encode_plain(encoder_t *e, const char *text, size_t len, lk_error_t *err)
{
    return pretokenizer_run(&e->t->pretokenizer, e->search, text, len, encode_word, e, err);
}

static lk_status_t encode_raw(encoder_t *e, const char *text, size_t len, lk_error_t *err)
{
    size_t n;
    text = tokenizer_normalize(e->t, text, len, &e->normalized, &n);
    if (text == NULL) {
        return no_memory(err);
    }
    return encode_pieces(e, e->t->normalized_tokens, text, n, encode_plain, err);
}

static lk_status_t push_all(encoder_t *e, const bpe_ids_t *ids, lk_error_t *err)
{
    for (size_t i = 0; i < ids->len; i++) {
        if (!bpe_ids_push(&e->ids, ids->data[i])) {
            return no_memory(err);
        }
    }
    return LK_OK;
}

lk_status_t tokenizer_encode(const tokenizer_t *t, const char *text, size_t len, unsigned flags,
                             uint32_t **ids, size_t *n_ids, lk_error_t *err)
{
    size_t bad;
    if (len > TOKENIZER_MAX_TEXT) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "the text has %zu bytes, allowed are %u", len,
                            TOKENIZER_MAX_TEXT);
    }
    if (!utf8_check(text, len, &bad)) {
        return lk_error_set(err, LK_ERR_INVALID, "the text is not UTF-8 at byte %zu", bad);
    }
    encoder_t e = {.t = t, .with_special = (flags & TOKENIZER_PARSE_SPECIAL) != 0};
    lk_buf_init(&e.normalized, 0);
    e.search = split_search_new();
    e.ids.cap = len / 4 + 16;
    e.ids.data = malloc(e.ids.cap * sizeof *e.ids.data);
    lk_status_t status = e.search == NULL || e.ids.data == NULL ? no_memory(err) : LK_OK;
    bool around = (flags & TOKENIZER_ADD_SPECIAL) != 0;
    if (status == LK_OK && around) {
        status = push_all(&e, &t->prefix, err);
    }
    if (status == LK_OK) {
        status = encode_pieces(&e, t->raw_tokens, text, len, encode_raw, err);
    }
    if (status == LK_OK && around) {
        status = push_all(&e, &t->suffix, err);
    }
    split_search_destroy(&e.search);
    lk_buf_fini(&e.normalized);
    if (status != LK_OK) {
        free(e.ids.data);
        return status;
    }
    *ids = e.ids.data;
    *n_ids = e.ids.len;
    return LK_OK;
}
