#include "api_frontend/tokenizer/vocab.h"
#include "api_frontend/tokenizer/byte_alphabet.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

void vocab_init(vocab_t *v)
{
    memset(v, 0, sizeof *v);
    lk_buf_init(&v->texts, VOCAB_MAX_TEXT);
    lk_buf_init(&v->bytes, VOCAB_MAX_TEXT);
}

void vocab_fini(vocab_t *v)
{
    free(v->entries);
    free(v->slots);
    lk_buf_fini(&v->texts);
    lk_buf_fini(&v->bytes);
    vocab_init(v);
}

vocab_quote_t vocab_quote(const char *text, size_t len)
{
    vocab_quote_t q;
    size_t n = LK_MIN(len, (size_t)40);
    while (n < len && n > 0 && ((uint8_t)text[n] & 0xC0) == 0x80) {
        n--;
    }
    memcpy(q.s, text, n);
    strcpy(q.s + n, n < len ? "..." : "");
    return q;
}

static uint32_t *find_slot(const vocab_t *v, const char *text, size_t len)
{
    uint32_t mask = v->n_slots - 1;
    uint32_t i = (uint32_t)lk_hash64(text, len, 0) & mask;
    for (;; i = (i + 1) & mask) {
        if (v->slots[i] == 0) {
            return &v->slots[i];
        }
        const vocab_entry_t *e = &v->entries[v->slots[i] - 1];
        if (e->text_len == len && memcmp(v->texts.data + e->text_at, text, len) == 0) {
            return &v->slots[i];
        }
    }
}

static bool grow_slots(vocab_t *v)
{
    if (v->n_slots != 0 && v->n_tokens < v->n_slots / 2) {
        return true;
    }
    uint32_t n = v->n_slots == 0 ? 1024 : v->n_slots * 2;
    uint32_t *slots = calloc(n, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    free(v->slots);
    v->slots = slots;
    v->n_slots = n;
    for (uint32_t id = 0; id < v->n_ids; id++) {
        const vocab_entry_t *e = &v->entries[id];
        if (e->used) {
            *find_slot(v, (char *)v->texts.data + e->text_at, e->text_len) = id + 1;
        }
    }
    return true;
}

static bool grow_ids(vocab_t *v, uint32_t id)
{
    if (id >= v->cap_ids) {
        uint32_t cap = LK_MAX(LK_MAX(id + 1, v->cap_ids * 2), 512u);
        vocab_entry_t *entries = realloc(v->entries, cap * sizeof *entries);
        if (entries == NULL) {
            return false;
        }
        memset(entries + v->cap_ids, 0, (cap - v->cap_ids) * sizeof *entries);
        v->entries = entries;
        v->cap_ids = cap;
    }
    v->n_ids = LK_MAX(v->n_ids, id + 1);
    return true;
}

lk_status_t vocab_add(vocab_t *v, const char *text, size_t len, int64_t id, lk_error_t *err)
{
    vocab_quote_t q = vocab_quote(text, len);
    if (id < 0 || id >= VOCAB_MAX_IDS) {
        return lk_error_set(err, LK_ERR_INVALID, "token \"%s\" has id %lld, outside 0 to %u", q.s,
                            (long long)id, VOCAB_MAX_IDS - 1);
    }
    if (len == 0 || len > VOCAB_MAX_TOKEN) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "token with id %lld has %zu bytes of text, allowed are 1 to %u",
                            (long long)id, len, VOCAB_MAX_TOKEN);
    }
    if (vocab_find(v, text, len) != VOCAB_NO_ID) {
        return lk_error_set(err, LK_ERR_INVALID, "token \"%s\" occurs twice", q.s);
    }
    size_t other_len;
    const char *other = vocab_text(v, (uint32_t)id, &other_len);
    if (other != NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "tokens \"%s\" and \"%s\" have the same id %lld",
                            vocab_quote(other, other_len).s, q.s, (long long)id);
    }
    size_t text_at = v->texts.len, bytes_at = v->bytes.len;
    lk_buf_append(&v->texts, text, len);
    byte_alphabet_decode(&v->bytes, text, len);
    if (v->texts.failed || v->bytes.failed || !grow_ids(v, (uint32_t)id) || !grow_slots(v)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the token texts");
    }
    v->entries[id] = (vocab_entry_t){.text_at = (uint32_t)text_at,
                                     .bytes_at = (uint32_t)bytes_at,
                                     .text_len = (uint32_t)len,
                                     .bytes_len = (uint32_t)(v->bytes.len - bytes_at),
                                     .used = true};
    *find_slot(v, text, len) = (uint32_t)id + 1;
    v->n_tokens++;
    v->max_text_len = LK_MAX(v->max_text_len, (uint32_t)len);
    return LK_OK;
}

uint32_t vocab_find(const vocab_t *v, const char *text, size_t len)
{
    if (v->n_slots == 0 || len > v->max_text_len) {
        return VOCAB_NO_ID;
    }
    uint32_t slot = *find_slot(v, text, len);
    return slot == 0 ? VOCAB_NO_ID : slot - 1;
}

const vocab_entry_t *vocab_get(const vocab_t *v, uint32_t id)
{
    return id < v->n_ids && v->entries[id].used ? &v->entries[id] : NULL;
}

const char *vocab_text(const vocab_t *v, uint32_t id, size_t *len)
{
    const vocab_entry_t *e = vocab_get(v, id);
    *len = e == NULL ? 0 : e->text_len;
    return e == NULL ? NULL : (const char *)v->texts.data + e->text_at;
}

const uint8_t *vocab_bytes(const vocab_t *v, uint32_t id, size_t *len)
{
    const vocab_entry_t *e = vocab_get(v, id);
    *len = e == NULL ? 0 : e->bytes_len;
    return e == NULL ? NULL : v->bytes.data + e->bytes_at;
}
