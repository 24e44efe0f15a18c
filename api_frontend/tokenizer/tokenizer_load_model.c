/* "model" and "added_tokens". */
#include "api_frontend/tokenizer/tokenizer_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static lk_status_t load_vocab(tokenizer_t *t, json_t *model, lk_error_t *err)
{
    json_t *vocab, *id;
    const char *text;
    LK_RETURN_IF_ERROR(json_in_member(model, "model", "vocab", JSON_OBJECT, &vocab, err));
    if (vocab == NULL || json_object_size(vocab) == 0) {
        return lk_error_set(err, LK_ERR_INVALID, "model.vocab is missing or empty");
    }
    json_object_foreach(vocab, text, id)
    {
        if (!json_is_integer(id)) {
            return lk_error_set(err, LK_ERR_INVALID, "model.vocab: token \"%s\": id is no integer",
                                vocab_quote(text, strlen(text)).s);
        }
        if (vocab_add(&t->vocab, text, strlen(text), json_integer_value(id), err) != LK_OK) {
            return lk_error_prefix(err, "model.vocab");
        }
        t->vocab.entries[json_integer_value(id)].in_model = true;
    }
    return LK_OK;
}

/* The two halves of a merge: "a b" or ["a", "b"]. */
static bool merge_halves(json_t *merge, const char *half[2], size_t len[2])
{
    if (json_is_string(merge)) {
        half[0] = json_string_value(merge);
        const char *space = strchr(half[0], ' ');
        if (space == NULL || strchr(space + 1, ' ') != NULL) {
            return false;
        }
        half[1] = space + 1;
        len[0] = (size_t)(space - half[0]);
        len[1] = strlen(half[1]);
        return len[0] > 0 && len[1] > 0;
    }
    if (!json_is_array(merge) || json_array_size(merge) != 2) {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        json_t *s = json_array_get(merge, (size_t)i);
        if (!json_is_string(s) || json_string_length(s) == 0) {
            return false;
        }
        half[i] = json_string_value(s);
        len[i] = json_string_length(s);
    }
    return true;
}

static lk_status_t unknown_token(size_t i, const char *text, size_t len, lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_INVALID,
                        "model.merges[%zu]: token \"%s\" is not in model.vocab", i,
                        vocab_quote(text, len).s);
}

static lk_status_t load_merge(tokenizer_t *t, json_t *merge, size_t i, uint32_t rank,
                              lk_error_t *err)
{
    const char *half[2];
    size_t len[2];
    char joined[2 * VOCAB_MAX_TOKEN];
    uint32_t id[2];
    if (!merge_halves(merge, half, len)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "model.merges[%zu] is neither \"a b\" nor [\"a\", \"b\"]", i);
    }
    for (int k = 0; k < 2; k++) {
        id[k] = vocab_find(&t->vocab, half[k], len[k]);
        if (id[k] == VOCAB_NO_ID) {
            return unknown_token(i, half[k], len[k], err);
        }
    }
    memcpy(joined, half[0], len[0]);
    memcpy(joined + len[0], half[1], len[1]);
    uint32_t whole = vocab_find(&t->vocab, joined, len[0] + len[1]);
    if (whole == VOCAB_NO_ID) {
        return unknown_token(i, joined, len[0] + len[1], err);
    }
    bpe_add_merge(&t->bpe, id[0], id[1], rank, whole);
    return LK_OK;
}

static lk_status_t load_merges(tokenizer_t *t, json_t *model, lk_error_t *err)
{
    json_t *merges, *merge;
    size_t i;
    uint32_t rank = 0;
    LK_RETURN_IF_ERROR(json_in_member(model, "model", "merges", JSON_ARRAY, &merges, err));
    if (merges == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "model.merges is missing");
    }
    if (json_array_size(merges) > TOKENIZER_MAX_MERGES) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "model.merges has %zu entries, allowed are %u",
                            json_array_size(merges), TOKENIZER_MAX_MERGES);
    }
    LK_RETURN_IF_ERROR(bpe_init(&t->bpe, &t->vocab, json_array_size(merges), err));
    json_array_foreach(merges, i, merge)
    {
        const char *text = json_string_value(merge);
        if (text != NULL && strncmp(text, "#version", 8) == 0) {
            continue; /* the head line of a merges.txt */
        }
        LK_RETURN_IF_ERROR(load_merge(t, merge, i, rank++, err));
    }
    return LK_OK;
}

/* Settings of other kinds of BPE have to be off. */
static lk_status_t refuse_model_options(json_t *model, lk_error_t *err)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    json_t *dropout = json_object_get(model, "dropout");
    bool byte_fallback = false;
    if (dropout != NULL && !json_is_null(dropout) &&
        !(json_is_number(dropout) && json_number_value(dropout) == 0.0)) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "model.dropout is not supported");
    }
    for (int i = 0; i < 2; i++) {
        const char *text;
        LK_RETURN_IF_ERROR(json_in_string(model, "model", affixes[i], &text, err));
        if (text != NULL && *text != '\0') {
            return lk_error_set(err, LK_ERR_UNSUPPORTED, "model.%s is not supported", affixes[i]);
        }
    }
    LK_RETURN_IF_ERROR(json_in_bool(model, "model", "byte_fallback", &byte_fallback, err));
    return !byte_fallback
               ? LK_OK
               : lk_error_set(err, LK_ERR_UNSUPPORTED, "model.byte_fallback is not supported");
}

lk_status_t tokenizer_load_model(tokenizer_t *t, json_t *root, lk_error_t *err)
{
    json_t *model;
    const char *type, *unk;
    LK_RETURN_IF_ERROR(json_in_member(root, "", "model", JSON_OBJECT, &model, err));
    if (model == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "model is missing");
    }
    LK_RETURN_IF_ERROR(json_in_string(model, "model", "type", &type, err));
    if (type != NULL && strcmp(type, "BPE") != 0) { /* old files have none */
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "model.type \"%s\" is not supported, BPE is",
                            vocab_quote(type, strlen(type)).s);
    }
    LK_RETURN_IF_ERROR(refuse_model_options(model, err));
    LK_RETURN_IF_ERROR(load_vocab(t, model, err));
    LK_RETURN_IF_ERROR(load_merges(t, model, err));
    LK_RETURN_IF_ERROR(json_in_bool(model, "model", "ignore_merges", &t->bpe.ignore_merges, err));
    LK_RETURN_IF_ERROR(json_in_bool(model, "model", "fuse_unk", &t->bpe.fuse_unk, err));
    LK_RETURN_IF_ERROR(json_in_string(model, "model", "unk_token", &unk, err));
    if (unk != NULL && *unk != '\0') {
        t->bpe.unk_id = vocab_find(&t->vocab, unk, strlen(unk));
        if (t->bpe.unk_id == VOCAB_NO_ID) {
            return lk_error_set(err, LK_ERR_INVALID, "model.unk_token is not in model.vocab");
        }
    }
    return LK_OK;
}

static lk_status_t load_flags(json_t *object, const char *where, added_token_t *token,
                              lk_error_t *err)
{
    LK_RETURN_IF_ERROR(json_in_bool(object, where, "special", &token->special, err));
    token->normalized = !token->special;
    LK_RETURN_IF_ERROR(json_in_bool(object, where, "normalized", &token->normalized, err));
    LK_RETURN_IF_ERROR(json_in_bool(object, where, "lstrip", &token->lstrip, err));
    LK_RETURN_IF_ERROR(json_in_bool(object, where, "rstrip", &token->rstrip, err));
    return json_in_bool(object, where, "single_word", &token->single_word, err);
}

/* `id` is an added token with this content, with the flags of `object`. */
static lk_status_t add_one(tokenizer_t *t, json_t *object, const char *where, int64_t id,
                           lk_error_t *err)
{
    const char *content;
    LK_RETURN_IF_ERROR(json_in_string(object, where, "content", &content, err));
    if (content == NULL || *content == '\0') {
        return lk_error_set(err, LK_ERR_INVALID, "%s.content is missing or empty", where);
    }
    size_t len = strlen(content);
    uint32_t known = vocab_find(&t->vocab, content, len);
    if (known == VOCAB_NO_ID) {
        if (vocab_add(&t->vocab, content, len, id, err) != LK_OK) {
            return lk_error_prefix(err, "%s", where);
        }
    } else if (known != id) {
        return lk_error_set(err, LK_ERR_INVALID, "%s: token \"%s\" has id %lld here and %u before",
                            where, vocab_quote(content, len).s, (long long)id, known);
    }
    added_token_t token = {.id = (uint32_t)id};
    LK_RETURN_IF_ERROR(load_flags(object, where, &token, err));
    t->vocab.entries[id].special = token.special;
    if (!token.normalized) {
        return added_trie_add(t->raw_tokens, content, len, &token, err);
    }
    lk_buf_t buf;
    lk_buf_init(&buf, 0);
    const char *text = tokenizer_normalize(t, content, len, &buf, &len);
    lk_status_t status = LK_OK;
    if (text == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the added tokens");
    } else if (len > 0) {
        status = added_trie_add(t->normalized_tokens, text, len, &token, err);
    }
    lk_buf_fini(&buf);
    return status;
}

/* The entry of tokenizer_config.json for this id and content: its flags win. */
static json_t *config_entry(json_t *decoder, int64_t id, json_t *object)
{
    char key[24];
    snprintf(key, sizeof key, "%lld", (long long)id);
    json_t *entry = json_object_get(decoder, key);
    json_t *a = json_object_get(entry, "content"), *b = json_object_get(object, "content");
    return json_is_string(a) && json_equal(a, b) ? entry : object;
}

lk_status_t tokenizer_load_added(tokenizer_t *t, json_t *root, json_t *config, lk_error_t *err)
{
    json_t *added, *object, *decoder = json_object_get(config, "added_tokens_decoder");
    size_t i;
    t->raw_tokens = added_trie_new();
    t->normalized_tokens = added_trie_new();
    if (t->raw_tokens == NULL || t->normalized_tokens == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the added tokens");
    }
    LK_RETURN_IF_ERROR(json_in_member(root, "", "added_tokens", JSON_ARRAY, &added, err));
    json_array_foreach(added, i, object)
    {
        char where[40];
        snprintf(where, sizeof where, "added_tokens[%zu]", i);
        json_t *id = json_object_get(object, "id");
        if (!json_is_integer(id)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s.id is missing or not an integer", where);
        }
        int64_t value = json_integer_value(id);
        object = config_entry(decoder, value, object);
        LK_RETURN_IF_ERROR(add_one(t, object, where, value, err));
    }
    return LK_OK;
}

lk_status_t tokenizer_load_config_added(tokenizer_t *t, json_t *config, lk_error_t *err)
{
    const char *key;
    json_t *entry, *decoder;
    LK_RETURN_IF_ERROR(
        json_in_member(config, "", "added_tokens_decoder", JSON_OBJECT, &decoder, err));
    json_object_foreach(decoder, key, entry)
    {
        char where[80], *end;
        snprintf(where, sizeof where, "added_tokens_decoder.%s", vocab_quote(key, strlen(key)).s);
        long long id = strtoll(key, &end, 10);
        if (*key < '0' || *key > '9' || *end != '\0' || id >= VOCAB_MAX_IDS) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: the key is not an id", where);
        }
        if (!json_is_object(entry)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s is not an object", where);
        }
        const char *content = json_string_value(json_object_get(entry, "content"));
        if (content != NULL && vocab_find(&t->vocab, content, strlen(content)) == id &&
            !t->vocab.entries[id].in_model) {
            continue; /* tokenizer.json had it, and config_entry() took these flags */
        }
        LK_RETURN_IF_ERROR(add_one(t, entry, where, id, err));
    }
    return LK_OK;
}
